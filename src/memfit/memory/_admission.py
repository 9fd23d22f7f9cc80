"""The arithmetic of admission: what a job reserves, what may still be lent, how many fit. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memfit.memory._footprint import Footprint
from memfit.units import format_bytes

#: What a job reserves on top of its like's measured peak, as a share of it.
DEFAULT_SLACK = 0.10


def reservation_bytes(footprint: Footprint, slack: float = DEFAULT_SLACK) -> int:
    """What a job of this footprint reserves: its private peak and, when that was measured on another job, a slack.

    >>> reservation_bytes(Footprint(1000), slack=0.1), reservation_bytes(Footprint.declared(1000))
    (1100, 1000)
    """
    factor = 1.0 if footprint.method == "declared" else 1.0 + slack
    return round(footprint.private_bytes * factor)


@dataclass(frozen=True)
class Claim:
    """A running job's part of the budget: what it reserved and what it uses now, both private bytes.

    >>> Claim(100, 30).unused_bytes, Claim(100, 130).unused_bytes
    (70, 0)
    """

    reserved_bytes: int
    used_bytes: int

    @property
    def unused_bytes(self) -> int:
        """What it may still take; 0 when it has taken more than it reserved."""
        return max(0, self.reserved_bytes - self.used_bytes)


@dataclass(frozen=True)
class Lendable:
    """What may be lent to one more job now, as a sum that can be shown.

    Attributes:
        headroom_bytes: What is free under the binding limit, as measured now.
        reserve_bytes: What is never lent.
        unused_bytes: What running jobs reserved and do not use yet.
    """

    headroom_bytes: int
    reserve_bytes: int
    unused_bytes: int

    @classmethod
    def now(cls, headroom_bytes: int, reserve_bytes: int, claims: Mapping[str, Claim]) -> Lendable:
        """The sum for a headroom and a reserve in bytes, and the claims of the jobs that run, by id."""
        return cls(headroom_bytes, reserve_bytes, sum(claim.unused_bytes for claim in claims.values()))

    @property
    def bytes(self) -> int:
        """What may be lent; below 0 when more is promised than there is."""
        return self.headroom_bytes - self.reserve_bytes - self.unused_bytes

    def explain(self) -> str:
        """The sum in words.

        >>> Lendable(8 << 30, 1 << 30, 2 << 30).explain()
        '5.00 GiB may be lent = 8.00 GiB free - 1.00 GiB reserve - 2.00 GiB reserved and not yet used'
        """
        return (
            f"{format_bytes(self.bytes)} may be lent = {format_bytes(self.headroom_bytes)} free - "
            f"{format_bytes(self.reserve_bytes)} reserve - {format_bytes(self.unused_bytes)} reserved and not yet used"
        )
