"""The budget as the scheduler follows it: read again and again, and what of it is available."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from memfit.memory import HOST, Budget, Lendable, Others, Sizes, bounds_of, rooms_of

#: Reads the budget, given the private bytes that running jobs use now (the user's own limit counts those).
ReadBudget = Callable[[int], Budget]

#: Stands for each device of a job, in bytes by place.
DEVICE = "device"
#: How old a reading may be; what jobs took since is subtracted from it.
_FRESH_SECONDS = 0.25
#: What other runs hold is worth a wait from this share of one's own capacity on.
_NOTABLE = 0.05
#: The share of the reserve that neighbours outside memfit may take before jobs must give way.
_FOR_OUTSIDERS = 0.75


class BudgetWatch:
    """The last reading of the budget, and what changed since.

    Attributes:
        others: What other runs on this host use and have reserved, as last seen.
        checkpoint_bytes: The largest checkpoint that a job reported. So much is kept free, so that a job that is asked
            to stop can write one.
        read_at: When the budget was read last, by the clock.
        outsiders_bytes: By how much others than memfit's jobs have grown since the first reading, at the least.
    """

    def __init__(
        self, read_budget: ReadBudget, clock: Callable[[], float], read_others: Callable[[], Others] = Others
    ) -> None:
        self.read_budget, self.read_others = read_budget, read_others
        self.others = self._others_then = Others()
        self.checkpoint_bytes = self.outsiders_bytes = 0
        self._clock = clock
        self._budget: Budget | None = None
        self.read_at, self._in_use_then, self._reserve_left = 0.0, Counter[str](), 0
        self._outside_first: dict[str, int] = {}

    @property
    def is_due(self) -> bool:
        """True if the last reading is too old."""
        return self._budget is None or self._clock() - self.read_at >= _FRESH_SECONDS

    @property
    def now(self) -> Budget:
        """The last reading."""
        if self._budget is None:
            raise RuntimeError("the budget was never read")
        return self._budget

    def read(self, in_use: Sizes) -> None:
        """Read the budget, given what jobs use at each place."""
        # The other runs first: what their jobs take between the two readings then counts twice, and not never.
        self.others = self._others_then = self.read_others()
        self._budget = self.read_budget(in_use[HOST])
        self.read_at, self._in_use_then = self._clock(), in_use
        self.outsiders_bytes = self._measure_outsiders()
        # The reserve is there for others: what they took since the first reading comes out of it.
        reserve = self._budget.reserve_bytes
        self._reserve_left = reserve - min(self.outsiders_bytes, int(reserve * _FOR_OUTSIDERS))

    def rooms(self, in_use: Sizes, unused: Sizes) -> dict[str, Lendable]:
        """Return what is available at each place, given what jobs use now and have reserved beyond that."""
        freed = self._freed(in_use)
        return rooms_of(self.now, freed, unused=unused, others=self._new_of_others, reserve_bytes=self._kept_bytes)

    def parts(self, in_use: Sizes, unused: Sizes) -> Sizes:
        """Return this run's part of what is available: other runs may take theirs of a shared limit meanwhile."""
        found, kept = Counter[str](), self._kept_bytes
        bounds = bounds_of(self.now, self._freed(in_use), unused=unused, others=self._new_of_others, reserve_bytes=kept)
        for place, is_shared, room in bounds:
            size = max(0, room.bytes) // (1 + self.others.num * is_shared)
            found[place] = min(found.get(place, size), size)
        return found

    @property
    def devices_of_others(self) -> set[str]:
        """The devices that other runs on this host use."""
        held = self.others.used + self.others.unused
        return {device.uuid for device in self.now.devices if held[device.uuid]}

    @property
    def capacity_bytes(self) -> int:
        """What all jobs of this run may take together."""
        return self._capacity(self._new_of_others)[HOST]

    @property
    def can_others_help(self) -> bool:
        """True if this run could take notably more when other runs on this host end."""
        here = self.capacity_bytes
        return self._capacity_alone()[HOST] - here > max(0.0, _NOTABLE * here)

    def most(self, num_devices: int) -> Sizes:
        """Return what one job could take on the host and on each of its devices, if no job of any run ran."""
        whole = self._capacity_alone()
        devices = sorted((size for place, size in whole.items() if place != HOST), reverse=True)
        on_device = max(0, devices[num_devices - 1]) if 0 < num_devices <= len(devices) else 0
        return Counter({HOST: max(1, whole[HOST] if self.can_others_help else self.capacity_bytes), DEVICE: on_device})

    @property
    def _kept_bytes(self) -> int:
        return self._reserve_left + self.checkpoint_bytes

    def _freed(self, in_use: Sizes) -> dict[str, int]:
        """Return what the reading counts as taken and is free; negative for what was taken since."""
        freed = {place: self._in_use_then[place] - in_use[place] for place in self._in_use_then | in_use}
        # A device's reading may be newer than the last report of its jobs, and have seen what they gave back.
        return {place: size if place == HOST else min(0, size) for place, size in freed.items()}

    def _capacity(self, others: Sizes) -> dict[str, int]:
        rooms = rooms_of(self.now, self._in_use_then, others=others, reserve_bytes=self._kept_bytes)
        return {place: room.bytes for place, room in rooms.items()}

    def _capacity_alone(self) -> dict[str, int]:
        """Return what there is once all other runs have ended."""
        return self._capacity(Counter({place: -size for place, size in self._others_then.used.items()}))

    @property
    def _new_of_others(self) -> Sizes:
        """What other runs have reserved, and took since the last reading."""
        return self.others.unused + (self.others.used - self._others_then.used)

    def _measure_outsiders(self) -> int:
        binding, others = self.now.binding, self._others_then
        if binding.scope not in ("group", "host"):
            others = Others()
        outside = binding.limit_bytes - binding.headroom_bytes - self._in_use_then[HOST] - others.used[HOST]
        first = self._outside_first.setdefault(f"{binding.name} {binding.source}", outside)
        # Other runs may use what they reserved already: the kernel shows that before they do.
        return max(0, outside - others.unused[HOST] - first)
