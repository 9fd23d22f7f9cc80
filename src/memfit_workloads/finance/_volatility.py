"""Warn of scores that rank assets by their volatility.

Shapes: D dates, A assets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.errors import DataError
from memfit.evaluation import rank_ic, summarize

#: Dates before a score whose returns make its asset's volatility; half of them must be known.
PAST_DATES = 60
#: A mean rank correlation of this size, of either sign, is a warning.
WARN_FROM = 0.5
#: On fewer dates it may be chance.
LEAST_DATES = 8

_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class VolatilityCorrelation:
    """How far scores rank assets by their volatility.

    Attributes:
        mean: Mean over dates of the rank correlation of scores with realised volatility; NaN where it is undefined.
        num_dates: Dates on which it is defined.
        past_dates: Dates before a score that the volatility is taken over.
        warns: The mean is 0.5 or more, of either sign.
    """

    mean: float
    num_dates: int
    past_dates: int
    warns: bool


def volatility_correlation(scores: _Floats, returns_1: _Floats) -> VolatilityCorrelation:
    """Correlate scores with the volatility that was known when they were made.

    Assets of equal expected return differ in how often they rise and in their median return: calm ones are above more
    often. So scores that follow volatility can have a rank IC or a precision at k without any skill.

    Args:
        scores: Shape (D, A); NaN where there is none.
        returns_1: Simple returns from each date to the next, shape (D, A); NaN where there is none.

    Raises:
        DataError: If the two are not of one 2-D shape.

    Example:
        >>> returns = np.random.default_rng(0).normal(size=(200, 4)) * [0.01, 0.02, 0.03, 0.04]
        >>> found = volatility_correlation(np.tile([4.0, 3.0, 2.0, 1.0], (200, 1)), returns)
        >>> round(found.mean, 2), found.num_dates, found.warns
        (-0.99, 170, True)
    """
    if scores.ndim != 2 or scores.shape != returns_1.shape:
        raise DataError(
            f"scores have the shape {scores.shape} and returns {returns_1.shape}.",
            rule="volatility_correlation takes two arrays of one shape (num_dates, num_assets).",
            remedy="fill absent assets with NaN",
        )
    correlation = summarize(rank_ic(scores, _realised(returns_1)))
    return VolatilityCorrelation(
        mean=correlation.mean,
        num_dates=correlation.num_dates,
        past_dates=PAST_DATES,
        warns=correlation.num_dates >= LEAST_DATES and abs(correlation.mean) >= WARN_FROM,
    )


def _realised(returns_1: _Floats) -> _Floats:
    """The standard deviation of the returns that are known on each date, of the last `PAST_DATES`."""
    known = np.isfinite(returns_1)
    filled = np.where(known, returns_1, 0.0)
    count, total, squares = (_past_sum(values) for values in (known.astype(np.float64), filled, filled**2))
    divisor = np.maximum(count, 1)
    variance = np.maximum(squares / divisor - (total / divisor) ** 2, 0.0)
    return np.where(count >= PAST_DATES // 2, np.sqrt(variance), np.nan)


def _past_sum(values: _Floats) -> _Floats:
    """The sum of each date's last `PAST_DATES` rows, without its own."""
    sums = np.vstack([np.zeros((1, values.shape[1])), np.cumsum(values, axis=0)])[:-1]
    past = sums.copy()
    past[PAST_DATES:] -= sums[:-PAST_DATES]
    return past
