"""Warn of scores that rank assets by their volatility.

Shapes: D dates, A assets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from memfit_workloads.finance._inference import summarize
from memfit_workloads.finance._matrices import Floats
from memfit_workloads.finance._metrics import rank_ic

#: Dates before a score whose returns make its asset's volatility; half of them must be known.
PAST_DATES = 60
#: A mean rank correlation of this size, of either sign, is a warning.
WARN_FROM = 0.5
#: On fewer dates it may be chance.
LEAST_DATES = 8


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


def volatility_correlation(scores: Floats, returns_1: Floats) -> VolatilityCorrelation:
    """Correlate scores with the volatility that was known when they were made.

    Assets of equal expected return differ in how often they rise and in their median return: calm ones are above more
    often. So scores that follow volatility can have a rank IC or a precision at k without any skill.

    Args:
        scores: Shape (D, A); NaN where there is none.
        returns_1: Simple returns from each date to the next, shape (D, A); NaN where there is none.

    Example:
        >>> returns = np.random.default_rng(0).normal(size=(200, 4)) * [0.01, 0.02, 0.03, 0.04]
        >>> found = volatility_correlation(np.tile([4.0, 3.0, 2.0, 1.0], (200, 1)), returns)
        >>> round(found.mean, 2), found.num_dates, found.warns
        (-0.99, 170, True)
    """
    correlation = summarize(rank_ic(scores, _realised(returns_1)))
    return VolatilityCorrelation(
        mean=correlation.mean,
        num_dates=correlation.num_dates,
        past_dates=PAST_DATES,
        warns=correlation.num_dates >= LEAST_DATES and abs(correlation.mean) >= WARN_FROM,
    )


def _realised(returns_1: Floats) -> Floats:
    """Return the standard deviation of the returns that are known on each date, of the last `PAST_DATES`."""
    unknown = np.full((PAST_DATES, returns_1.shape[1]), np.nan)
    past = sliding_window_view(np.vstack([unknown, returns_1])[:-1], PAST_DATES, axis=0)
    known = np.isfinite(past).sum(axis=-1)
    mean = np.nansum(past, axis=-1) / np.maximum(known, 1)
    variance = np.nansum((past - mean[..., None]) ** 2, axis=-1) / np.maximum(known, 1)
    return np.where(known >= PAST_DATES // 2, np.sqrt(variance), np.nan)
