"""The arithmetic of admission: what a job reserves, what may still be lent, how many fit. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from memfit.memory._footprint import HOST, Footprint, Sizes
from memfit.units import format_bytes

#: What a job reserves on top of its like's measured peak, as a share of it.
DEFAULT_SLACK = 0.10


def reservation_bytes(footprint: Footprint, slack: float = DEFAULT_SLACK) -> int:
    """Return what a job of this footprint reserves on the host: its private peak, and a slack if that was measured.

    >>> reservation_bytes(Footprint(1000), slack=0.1), reservation_bytes(Footprint.declared(1000))
    (1100, 1000)
    """
    factor = 1.0 if footprint.method == "declared" else 1.0 + slack
    return round(footprint.private_bytes * factor)


@dataclass(frozen=True)
class Claim:
    """A running job's part of the budget, in bytes by place: what it reserved and what it uses now.

    >>> Claim(Counter({HOST: 100, "GPU-1": 50}), Counter({HOST: 30, "GPU-1": 60})).unused
    Counter({'host': 70})
    """

    reserved: Sizes
    used: Sizes

    @property
    def unused(self) -> Sizes:
        """What it may still take; nothing at a place where it has taken more than it reserved."""
        return Counter(self.reserved) - self.used


@dataclass(frozen=True)
class Lendable:
    """What may be lent at one place to one more job now, as a sum that can be shown.

    Attributes:
        headroom_bytes: What is free there, as measured now.
        reserve_bytes: What is never lent.
        unused_bytes: What running jobs reserved and do not use yet.
        where: The place in words, such as ``on GPU 0``; empty for the host.
    """

    headroom_bytes: int
    reserve_bytes: int
    unused_bytes: int
    where: str = ""

    @classmethod
    def now(cls, headroom_bytes: int, reserve_bytes: int, claims: Iterable[Claim]) -> Lendable:
        """Return the sum for the host, given its headroom and reserve in bytes and the claims of the running jobs."""
        return cls(headroom_bytes, reserve_bytes, sum(claim.unused[HOST] for claim in claims))

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
            f"{format_bytes(self.bytes)} may be lent{self.where and ' '}{self.where} = "
            f"{format_bytes(self.headroom_bytes)} free - {format_bytes(self.reserve_bytes)} reserve - "
            f"{format_bytes(self.unused_bytes)} reserved and not yet used"
        )
