"""An interval for the mean of daily differences by resampling blocks of dates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memfit.errors import MissingExtraError, UsageError
from memfit.evaluation._forecasts import check_differences
from memfit.evaluation._variance import standard_error


@dataclass(frozen=True)
class Interval:
    """An interval for a mean.

    Attributes:
        lower: Lower end, in the unit of the differences; -inf where the blocks do not tell.
        upper: Upper end.
        level: The share of such intervals that hold the true mean, for example 0.95.
        block_length: Dates in a block.
        num_resamples: Number of resampled series.
    """

    lower: float
    upper: float
    level: float
    block_length: int
    num_resamples: int


def bootstrap_interval(
    differences: ArrayLike, horizon: int, level: float = 0.95, *, seed: int = 0, num_resamples: int = 1000
) -> Interval:
    """An interval for the mean of paired daily differences, by a studentised circular block bootstrap.

    Blocks are as long as the data ask for (Politis and White's rule), at least ``horizon`` and at most an eighth of
    the dates. In each resample the mean's deviation is divided by the standard error that its own blocks give; the
    interval is the mean plus and minus the quantile of the absolute ratios, times `standard_error`. The plain (basic
    or percentile) interval covers too little: 90 % in place of 95 at 240 dates and labels over 5, since resampled
    means vary less than means do. ``benchmarks/decision.py`` measures both.

    Dates of several folds are one series; a block over the border of two folds joins dates that are not neighbours,
    which concerns at most one block length of dates a border. Where all differences are equal the interval is that
    value.

    Args:
        differences: One per date in ascending order of dates, shape (D,); NaN are left out.
        horizon: Dates that a label spans.
        level: Above 0, below 1.
        seed: Of the resampling; the same seed gives the same interval.
        num_resamples: Number of resampled series.

    Raises:
        DataError: If fewer than `minimum_dates` are defined, or one is infinite.
        UsageError: If the level, the horizon or num_resamples is out of range.
        MissingExtraError: If arch or statsmodels is not installed.

    Source:
        F. Gotze, H. Kunsch, Second-order correctness of the blockwise bootstrap for stationary observations (1996);
        D. Politis, H. White, Automatic block-length selection for the dependent bootstrap (2004), corrected in 2009;
        P. Hall, On symmetric bootstrap confidence intervals (1988).

    Example:
        >>> rng = np.random.default_rng(0)
        >>> found = bootstrap_interval(np.convolve(rng.normal(size=244), np.ones(5), "valid"), 5, num_resamples=200)
        >>> found.lower < 0 < found.upper, found.block_length >= 5
        (True, True)
    """
    if not 0 < level < 1 or num_resamples < 100:
        raise UsageError(
            f"the level is {level} and num_resamples {num_resamples}.",
            rule="a level lies between 0 and 1, and its quantile needs 100 resamples at least.",
            remedy="level=0.95 with 1000 resamples is usual",
        )
    try:
        from arch.bootstrap import CircularBlockBootstrap, optimal_block_length
    except ImportError as error:
        raise MissingExtraError.of("arch", "evaluation", "a bootstrap interval") from error
    values = check_differences(differences, horizon)
    mean, (scale, _) = float(values.mean()), standard_error(values, horizon)
    if scale == 0:
        return Interval(mean, mean, level, horizon, num_resamples)
    found = float(optimal_block_length(values)["circular"].iloc[0])
    length = min(max(horizon, math.ceil(found)), len(values) // 8)
    num_blocks = len(values) // length

    def ratio(resample: NDArray[Any]) -> NDArray[np.float64]:
        blocks = resample[: num_blocks * length].reshape(num_blocks, length).sum(axis=1) / length
        deviations = blocks - blocks.sum() / num_blocks
        error_of_mean = math.sqrt(deviations @ deviations / (num_blocks - 1) / num_blocks)
        deviation = abs(resample.mean() - mean)
        return np.array([deviation / error_of_mean if error_of_mean > 0 else (math.inf if deviation else 0.0)])

    ratios = CircularBlockBootstrap(length, values, seed=seed).apply(ratio, num_resamples)
    reach = float(np.quantile(ratios, level, method="higher")) * scale
    return Interval(mean - reach, mean + reach, level, length, num_resamples)
