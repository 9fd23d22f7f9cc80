"""Intervals for a rate, from the standard library alone."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist

from memfit.errors import UsageError, check_counts


def check_level(level: float) -> None:
    """Refuse a confidence level that is not between 0 and 1."""
    if not 0 < level < 1:
        raise UsageError(
            f"the level is {level}.",
            rule="a level lies between 0 and 1.",
            remedy="level=0.95 is usual",
        )


def wilson_interval(successes: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Return the lower and upper end of an interval for a rate, by Wilson's score method.

    It stays within 0 and 1, and has a width also where all or none succeeded: one success of one proves little.

    Args:
        successes: How many of the n succeeded.
        n: How many were tried. With 0 nothing is known: the interval is 0 to 1.
        level: The share of such intervals that hold the true rate. Above 0, below 1.

    Raises:
        UsageError: If a count or the level is out of range.

    Source:
        E. Wilson, Probable inference, the law of succession, and statistical inference (1927).

    Example:
        >>> [round(end, 3) for end in wilson_interval(1, 1)], [round(end, 3) for end in wilson_interval(20, 20)]
        ([0.207, 1.0], [0.839, 1.0])
    """
    check_level(level)
    check_counts(UsageError, 0, successes=successes, n=n)
    if successes > n:
        raise UsageError(
            f"successes is {successes}, and n is {n}.",
            rule="no more can succeed than were tried.",
            remedy=f"pass n={successes} or more",
        )
    if n == 0:
        return 0.0, 1.0
    squared = NormalDist().inv_cdf((1 + level) / 2) ** 2
    middle = successes + squared / 2
    reach = sqrt(squared * (successes * (n - successes) / n + squared / 4))
    lower, upper = (middle - reach) / (n + squared), (middle + reach) / (n + squared)
    return (lower if successes else 0.0, upper if successes < n else 1.0)  # exact, where rounding leaves 1e-17
