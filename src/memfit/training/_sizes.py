"""Learn how much of a batch fits at once, as a cost: bytes, tokens, nodes, frames."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from memfit.errors import UsageError

_FIRST_WAIT_STEPS = 64
_MOST_WAIT_STEPS = 1 << 20
_RETRIES_IN_A_ROW = 2


@dataclass
class _Known:
    limit: int | None = None  # the largest cost in use; None is whatever the batch has
    failed: int | None = None  # the smallest cost above it that failed
    quiet: int = 0  # steps since the last change or trial
    wait: int = _FIRST_WAIT_STEPS  # quiet steps before a larger cost is tried
    retries: int = 0  # steps in a row in which the device's allocator emptied its cache and tried again


class MicrobatchSizes:
    """Finds the largest cost of a microbatch that fits, by halving on failure and by bounded trials upward. After
    ``wait`` quiet steps a larger cost is tried once: twice as much, or half way to the smallest that failed. A trial
    that fails doubles the wait. All is counted in steps, so that a resumed run decides as the uninterrupted one."""

    def __init__(self, largest: int | None = None) -> None:
        self.largest = largest
        self._known = _Known()

    @property
    def limit(self) -> int | None:
        """The largest cost in use; None as long as nothing failed."""
        return self._known.limit

    def cut(self, count: int, cost: Callable[[int, int], int]) -> list[tuple[int, int]]:
        """Return the microbatches of a batch of ``count`` units as ranges, each as long as its cost allows, one unit at
        least. ``cost(start, stop)`` is that of the units from ``start`` up to ``stop``; more units never cost less."""
        limit, most = self._limit_now(), self.largest or count
        ranges, start = [], 0
        while start < count:
            stop = min(start + most, count)
            if limit is not None and cost(start, stop) > limit:
                ends = range(start + 1, stop)
                stop = start + max(1, bisect_right(ends, limit, key=partial(cost, start)))
            ranges.append((start, stop))
            start = stop
        return ranges

    def _limit_now(self) -> int | None:
        known = self._known
        if known.limit is None or known.quiet < known.wait:
            return known.limit
        if known.failed is None or 2 * known.limit < known.failed:
            return max(1, 2 * known.limit)
        if known.quiet == known.wait:
            return (known.limit + known.failed) // 2
        return known.failed  # half way to it was no unit more

    def shrink(self, failed_cost: int, half_cost: int | None = None) -> None:
        """Take the cost of half as many units as did not fit, or the limit before it if that was a trial."""
        known = self._known
        if known.limit is None or failed_cost <= known.limit:
            known.limit = failed_cost // 2 if half_cost is None else min(half_cost, failed_cost - 1)
        if known.quiet:  # not on the way down to the first size that fits
            known.wait = min(2 * known.wait, _MOST_WAIT_STEPS)
        known.failed, known.quiet, known.retries = failed_cost, 0, 0

    def succeeded(self, cost: int, num_retries: int = 0) -> bool:
        """Note a step whose largest microbatch had this cost; return whether the limit changed. ``num_retries``: how
        often the device's allocator emptied its cache in it. Two such steps in a row count as a failure: the next
        allocation may find nothing to give back."""
        known = self._known
        known.retries = known.retries + 1 if num_retries else 0
        has_risen = known.limit is not None and cost > known.limit
        if known.limit is not None:
            known.quiet += 1
        if has_risen:
            known.limit, known.quiet = cost, 0
            if known.failed is not None and known.failed <= cost:
                known.failed = None
        if known.retries < _RETRIES_IN_A_ROW:
            return has_risen
        self.shrink(cost)
        return True

    def numbers(self) -> tuple[int, ...]:
        """Return what is known as whole numbers, -1 for None: what a rank tells the others."""
        return tuple(-1 if value is None else value for value in asdict(self._known).values())

    def agree(self, numbers: Sequence[Sequence[int]]) -> None:
        """Take over the smallest sizes of all ranks, from the ``numbers`` of each.
        >>> sizes, others = MicrobatchSizes(), MicrobatchSizes()
        >>> sizes.shrink(60)
        >>> others.agree([others.numbers(), sizes.numbers()])
        >>> others.limit
        30
        """
        limits, failed, quiet, wait, retries = zip(*numbers, strict=True)
        least, above = (min((one for one in values if one >= 0), default=None) for values in (limits, failed))
        self._known = _Known(least, above, min(quiet), max(wait), max(retries))

    def state_dict(self) -> dict[str, Any]:
        return asdict(self._known)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self._known = _Known(**state)
        except TypeError as error:
            raise UsageError(
                f"These are no microbatch sizes: {error!r}.",
                rule="the state is what MicrobatchSizes.state_dict() gave.",
                remedy="leave it out: sizes are found anew by a few failures",
            ) from error
