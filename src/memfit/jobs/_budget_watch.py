"""The budget as the scheduler follows it: read again and again, and what of it may be lent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from memfit.memory import HOST, Budget, Claim, Lendable, Others, Sizes, lendable_on_devices, rooms_of

#: The budget as it is now, given the private bytes that running jobs use now (a cap of the user's counts those).
ReadBudget = Callable[[int], Budget]

#: How old a reading may be; what jobs took since is subtracted from it.
_FRESH_SECONDS = 0.25
#: What holds for all runs of this host together; the user's cap and a Slurm job bound this run alone.
_SHARED = frozenset({"group", "host"})
#: What other runs hold is worth a wait from this share of one's own capacity on.
_NOTABLE = 0.05
#: The share of the reserve up to which neighbours outside memfit may grow before jobs must give way.
_LENT_TO_OUTSIDERS = 0.75


class BudgetWatch:
    """Follows the budget.

    Args:
        read_budget: Reads it.
        clock: Monotonic seconds.
        read_others: Reads what other runs on this host took and lent.

    Attributes:
        others: What other runs took and lent, as last seen.
        checkpoint_bytes: The largest checkpoint that a job of this run reported: so much is never lent, so that a job
            that is asked to step aside has the room to write one.
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
        """Whether the last reading is too old."""
        return self._budget is None or self._clock() - self.read_at >= _FRESH_SECONDS

    @property
    def now(self) -> Budget:
        """The last reading."""
        if self._budget is None:
            raise RuntimeError("the budget was never read")
        return self._budget

    def read(self, in_use: Sizes) -> None:
        """Read the budget, while jobs use so many bytes at each place."""
        # First what others lent: what their jobs take between the two readings counts twice, and not never.
        self.others = self._others_then = self.read_others()
        self._budget = self.read_budget(in_use[HOST])
        self.read_at, self._in_use_then = self._clock(), in_use
        self.outsiders_bytes = self._measure_outsiders()
        # The reserve, less what others took since the first reading: it is there for them.
        reserve = self._budget.reserve_bytes
        self._reserve_left = reserve - min(self.outsiders_bytes, int(reserve * _LENT_TO_OUTSIDERS))

    def lendable(self, in_use: Sizes, claims: Collection[Claim]) -> dict[str, Lendable]:
        """What may be lent now at each place, beside the claims of the jobs that run."""
        headroom = min(self._headroom_bytes - (in_use[HOST] - self._in_use_then[HOST]), self.now.limit_bytes)
        host = Lendable.now(headroom, self._reserve_left + self.checkpoint_bytes, claims)
        unused = sum((claim.unused for claim in claims), self._lent_by_others)
        taken = in_use - self._in_use_then  # what was given back, the reading may have seen before the job told it
        return {HOST: host, **lendable_on_devices(self.now.devices, taken=taken, unused=unused)}

    def parts(self, in_use: Sizes, claims: Collection[Claim]) -> Sizes:
        """Return this run's part of what may be lent: other runs may take theirs of a shared limit at the same time."""
        rooms, num = self.lendable(in_use, claims), 1 + self.others.num
        whole = rooms.pop(HOST)
        kept = in_use[HOST] - self._in_use_then[HOST] + whole.reserve_bytes + whole.unused_bytes
        shared = [(free - kept) // num for is_shared, free in self._rooms() if is_shared]
        host = max(0, min([whole.bytes, *shared]))
        return Counter({HOST: host, **{place: max(0, room.bytes) // num for place, room in rooms.items()}})

    @property
    def devices_of_others(self) -> Sizes:
        """What other runs on this host hold of each device, in use or not."""
        held = self.others.used + self.others.unused
        return Counter({device.uuid: held[device.uuid] for device in self.now.devices if held[device.uuid]})

    def most_device_bytes(self, num_devices: int) -> int:
        """What one job could take on each of so many devices if no other ran, of this run or of another."""
        rooms = rooms_of(self.now, self._in_use_then + self._others_then.used)
        sizes = sorted((room.bytes for place, room in rooms.items() if place != HOST), reverse=True)
        return max(0, sizes[num_devices - 1]) if 0 < num_devices <= len(sizes) else 0

    @property
    def capacity_bytes(self) -> int:
        """What all jobs of this run may take together."""
        return self._headroom_bytes + self._in_use_then[HOST] - self._reserve_left - self.checkpoint_bytes

    @property
    def held_by_others_bytes(self) -> int:
        """How much more this run could take if all other runs on this host ended; 0 where its own limit binds."""
        theirs = self._lent_by_others[HOST] + self._others_then.used[HOST]
        return min(free + theirs * is_shared for is_shared, free in self._rooms()) - self._headroom_bytes

    @property
    def can_others_help(self) -> bool:
        """Return True if this run could take notably more when other runs on this host end."""
        return self.held_by_others_bytes > max(0.0, _NOTABLE * self.capacity_bytes)

    @property
    def most_bytes(self) -> int:
        """What one job could take if no other ran, of this run or of another."""
        return max(1, self.capacity_bytes + (self.held_by_others_bytes if self.can_others_help else 0))

    @property
    def _headroom_bytes(self) -> int:
        return min(free for _, free in self._rooms())

    @property
    def _lent_by_others(self) -> Sizes:
        """What other runs have lent, and took since the last reading."""
        return self.others.unused + (self.others.used - self._others_then.used)

    def _rooms(self) -> list[tuple[bool, int]]:
        """For each limit, whether other runs share it, and what is free under it beside them."""
        limits = [limit for limit in self.now.limits if limit.binds] or [self.now.binding]
        taken = self._lent_by_others[HOST]
        return [(is_shared := limit.scope in _SHARED, limit.headroom_bytes - taken * is_shared) for limit in limits]

    def _measure_outsiders(self) -> int:
        binding, others = self.now.binding, self._others_then
        if binding.scope not in _SHARED:
            others = Others()
        outside = binding.limit_bytes - binding.headroom_bytes - self._in_use_then[HOST] - others.used[HOST]
        first = self._outside_first.setdefault(f"{binding.name} {binding.source}", outside)
        # What other runs lent may be in use already: they tell of it later than the kernel does.
        return max(0, outside - others.unused[HOST] - first)
