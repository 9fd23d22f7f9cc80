"""The budget as the scheduler follows it: read again and again, and what of it is available."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from memfit.memory import HOST, Budget, Lendable, Limit, Others, Sizes, bounds_of, rooms_of
from memfit.units import format_bytes

#: Reads the budget, given the private bytes that running jobs use now (the user's own limit counts those).
ReadBudget = Callable[[int], Budget]

DEVICE = "device"  # stands for each device of a job, in bytes by place
_FRESH_SECONDS = 0.25  # how old a reading may be; what jobs took since is subtracted from it
_NOTABLE = 0.05  # what other runs hold is worth a wait from this share of one's own capacity on
_NAMED = 1 / 64  # the holder of less than this share of a limit is not named
_FOR_OUTSIDERS = 0.75  # the share of the reserve that neighbours outside memfit may take before jobs must give way
#: What processes of no run held at each reading of a whole span of this length belongs to the machine.
_SPAN_SECONDS = 300.0


class HeldByOthers(NamedTuple):
    """What this run cannot have now and others may give back, so that no job's end rests on it; ``outside`` is of no
    run."""

    runs: int = 0
    num: int = 0
    outside: int = 0

    @property
    def words(self) -> str:
        who = "another run of memfit holds" if self.num == 1 else f"{self.num} other runs of memfit hold"
        found = {who: self.runs, "processes that are not memfit's hold": self.outside}
        return " and ".join(f"{who} {format_bytes(size)}" for who, size in found.items() if size)


class _Outside:
    """What processes of no run hold at one place: now, at the first reading, and all the time."""

    def __init__(self, first: int, now: float) -> None:
        self.bytes = self.first = first
        self._since, self._lowest = now, (0, first)  # of the time before nothing is known

    def note(self, size: int, now: float) -> None:
        if now - self._since >= _SPAN_SECONDS:
            self._since, self._lowest = now, (self._lowest[1], size)
        self.bytes, self._lowest = size, (self._lowest[0], min(self._lowest[1], size))

    def can_go(self, own: int) -> int:
        return max(0, self.bytes - max(own, min(self._lowest)))


class BudgetWatch:
    """The last reading of the budget, and what changed since."""

    def __init__(
        self,
        read_budget: ReadBudget,
        clock: Callable[[], float],
        in_use: Callable[[], Sizes],
        unused: Callable[[bool], Sizes],
        read_others: Callable[[], Others] = Others,
    ) -> None:
        self.read_budget, self.read_others, self.in_use, self.unused = read_budget, read_others, in_use, unused
        self.read_own: Callable[[], int] = int  # what memfit's own processes hold, without jobs
        self.others = self._others_then = Others()
        # The largest reported checkpoint is kept free for a stop; others have grown by so much at the least.
        self.checkpoint_bytes = self.outsiders_bytes = 0
        self._clock = clock
        self._budget: Budget | None = None
        self.read_at, self._in_use_then, self._reserve_left = 0.0, Counter[str](), 0
        self._outside: dict[str, _Outside] = {}

    def fresh(self) -> Budget:
        """Return the budget, read anew when the last reading is too old."""
        if self._budget is None or self._clock() - self.read_at >= _FRESH_SECONDS:
            self.read()
        return self.now

    @property
    def now(self) -> Budget:
        assert self._budget is not None, "the budget was never read"
        return self._budget

    def read(self) -> None:
        in_use = self.in_use()
        # The other runs first: what their jobs take between the two readings then counts twice, and not never.
        self.others = self._others_then = self.read_others()
        self._budget, self._own = self.read_budget(in_use[HOST]), self.read_own()
        self.read_at, self._in_use_then = self._clock(), in_use
        self.outsiders_bytes = self._measure_outsiders()
        # The reserve is there for others: what they took since the first reading comes out of it.
        reserve = self._budget.reserve_bytes
        self._reserve_left = reserve - min(self.outsiders_bytes, int(reserve * _FOR_OUTSIDERS))

    def rooms(self, *, expected: bool = True) -> dict[str, Lendable]:
        """Return what is available at each place, beside what the running jobs have reserved or will take."""
        return rooms_of(self.fresh(), **self._changed(expected))

    def parts(self) -> Sizes:
        """Return this run's part of what is available: other runs may take theirs of a shared limit meanwhile."""
        found = Counter[str]()
        for place, id, room in bounds_of(self.fresh(), **self._changed(expected=False)):
            size = max(0, room.bytes) // (1 + self.others.num[id if place == HOST else HOST])
            found[place] = min(found.get(place, size), size)
        return found

    def _changed(self, expected: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"in_use": self._freed(self.in_use()), "unused": self.unused(expected)}
        return found | {"others": self._new_of_others, "reserve_bytes": self._kept_bytes}

    @property
    def devices_of_others(self) -> set[str]:
        held = self.others.used + self.others.unused
        return {device.uuid for device in self.now.devices if held[device.uuid]}

    @property
    def capacity_bytes(self) -> int:
        return self._capacity(self._new_of_others, self._kept_bytes)[HOST]

    def here(self, num_devices: int) -> dict[str, int]:
        """Return what one job could take on the host and on each of its devices, if no other job of this run ran."""
        return _best(self._capacity(self._new_of_others, self._kept_bytes), num_devices)

    def most(self, num_devices: int) -> dict[str, int]:
        """Return the same once others have given back what they hold, where that is notably more."""
        here, gone = self.here(num_devices), Counter({key: -size for key, size in self._others_then.used.items()})
        for id in {one.id for one in (*self.now.limits, self.now.binding)} - {""}:
            gone[id] -= self._can_go(HOST)
        for device in self.now.devices:
            gone[device.uuid] -= self._can_go(device.uuid)
        alone = _best(self._capacity(gone, self.now.reserve_bytes + self.checkpoint_bytes), num_devices)
        return {kind: alone[kind] if alone[kind] > (1 + _NOTABLE) * size else size for kind, size in here.items()}

    def held(self, kind: str = HOST) -> HeldByOthers:
        is_host, id = kind == HOST, self.now.binding.id
        ids = [id] if is_host else [device.uuid for device in self.now.devices]
        runs = sum(self.others.used[one] + self.others.unused[one] for one in ids)
        least = _NAMED * self.now.limit_bytes * is_host
        outside = self._can_go(HOST) if is_host else sum(map(self._can_go, ids))
        found = [size if size > least else 0 for size in (runs, outside)]
        return HeldByOthers(found[0], self.others.num[id if is_host else HOST], found[1])

    @property
    def _kept_bytes(self) -> int:
        return self._reserve_left + self.checkpoint_bytes

    def _freed(self, in_use: Sizes) -> dict[str, int]:
        """Return what the reading counts as taken and is free; negative for what was taken since."""
        freed = {place: self._in_use_then[place] - in_use[place] for place in self._in_use_then | in_use}
        # A device's reading may be newer than the last report of its jobs, and have seen what they gave back.
        return {place: size if place == HOST else min(0, size) for place, size in freed.items()}

    def _capacity(self, others: Mapping[str, int], kept: int) -> dict[str, int]:
        rooms = rooms_of(self.now, self._in_use_then, others=others, reserve_bytes=kept)
        return {place: room.bytes for place, room in rooms.items()}

    def _can_go(self, place: str) -> int:
        """Return what processes of no run hold at a place and may give back."""
        if place != HOST:  # what was on a GPU when the run began is there to stay
            return self._outside[place].can_go(self._outside[place].first)
        binding = self.now.binding
        return self._outside[_name_of(binding)].can_go(self._own) if binding.id else 0

    @property
    def _new_of_others(self) -> Sizes:
        """What other runs have reserved, and took since the last reading."""
        return self.others.unused + (self.others.used - self._others_then.used)

    def _measure_outsiders(self) -> int:
        """Note what others than all runs hold at each place; return by how much it has grown on the host."""
        binding, in_use, others = self.now.binding, self._in_use_then, self._others_then
        found = {
            one.uuid: one.total_bytes - one.free_bytes - in_use[one.uuid] - others.used[one.uuid]
            for one in self.now.devices
        }
        # Other runs may use what they reserved already: the kernel shows that before they do.
        outside = binding.limit_bytes - binding.headroom_bytes - in_use[HOST] - others.used[binding.id]
        found[name := _name_of(binding)] = outside - others.unused[binding.id]
        for place, size in found.items():
            if place not in self._outside:
                self._outside[place] = _Outside(outside if place == name else size, self.read_at)
            self._outside[place].note(size, self.read_at)
        return max(0, found[name] - self._outside[name].first)


def _name_of(limit: Limit) -> str:
    return f"{limit.name} {limit.source}"


def _best(sizes: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Return what there is on the host, and on each of so many devices, those with the most."""
    devices = sorted((size for place, size in sizes.items() if place != HOST), reverse=True)
    on_device = devices[num_devices - 1] if 0 < num_devices <= len(devices) else 0
    return {HOST: max(0, sizes[HOST]), DEVICE: max(0, on_device)}
