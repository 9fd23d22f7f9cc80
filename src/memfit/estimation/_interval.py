"""Bytes with an upper bound."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A number of bytes: ``value`` is the best guess, ``upper`` its bound, by default the same.
    >>> Interval(3) + Interval(1, 2)
    Interval(value=4, upper=5)
    >>> Interval.highest([Interval(3, 4), Interval(2, 9)])
    Interval(value=3, upper=9)
    """

    value: int = 0
    upper: int = -1

    def __post_init__(self) -> None:
        if self.upper == -1:
            object.__setattr__(self, "upper", self.value)
        if not 0 <= self.value <= self.upper:
            raise ValueError(f"{self.value} to {self.upper} is no interval of bytes")

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.value + other.value, self.upper + other.upper)

    def times(self, factor: float, upper_factor: float | None = None) -> Interval:
        """Multiply both ends, the upper one by ``upper_factor`` if it is given; rounded up.
        >>> Interval(10, 20).times(0.25, 0.5)
        Interval(value=3, upper=10)
        """
        upper = self.upper * (factor if upper_factor is None else upper_factor)
        return Interval(math.ceil(self.value * factor), math.ceil(upper))

    @classmethod
    def total(cls, intervals: Iterable[Interval]) -> Interval:
        return sum(intervals, cls())

    @classmethod
    def highest(cls, intervals: Iterable[Interval]) -> Interval:
        """Return the highest value and the highest bound, which may be of two intervals."""
        found = list(intervals)
        return cls(max((i.value for i in found), default=0), max((i.upper for i in found), default=0))
