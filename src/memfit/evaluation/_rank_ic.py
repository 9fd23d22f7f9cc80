"""Rank IC: Spearman's rank correlation between scores and targets across the assets of one date.

Shapes: D dates, A assets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memfit.errors import DataError
from memfit.evaluation._matrix import average_ranks, by_date, divide
from memfit.evaluation._variance import summarize


def rank_ic(scores: ArrayLike, targets: ArrayLike) -> NDArray[np.float64]:
    """The rank IC of each date: Spearman's correlation over the assets that have both a score and a target.

    Equal values share the average of their ranks. NaN means that the asset is absent on that date; infinities rank as
    the largest and smallest values. A date is NaN where it is undefined: fewer than 2 assets in common, or all their
    scores or all their targets equal. With 2 assets it can only be -1 or 1: ask for more where that matters.

    Args:
        scores: What the model ranks by, shape (D, A).
        targets: What was to be ranked, shape (D, A), for example forward returns. Only their order within a date
            counts: taking the date's mean off, or scaling by a positive factor, changes nothing.

    Returns:
        Shape (D,), float64, from -1 to 1.

    Raises:
        DataError: If the two are not of one 2-D shape.

    Source:
        C. Spearman, The proof and measurement of association between two things (1904); equal to
        ``scipy.stats.spearmanr`` date by date.

    Example:
        >>> rank_ic([[1, 2, 3, 4], [1, 1, 1, 1]], [[10, 20, 40, 30], [1, 2, 3, 4]])
        array([0.8, nan])
    """
    return by_date("rank_ic", scores, targets, _rank_ic_block)


def rank_ic_by_date(
    dates: ArrayLike, scores: ArrayLike, targets: ArrayLike
) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """The distinct dates in ascending order, and the rank IC of each, from a long table of one row per date and asset.

    Args:
        dates: The date of each row, in any order, shape (n,).
        scores: Shape (n,); NaN where there is none.
        targets: Shape (n,); NaN where there is none.

    Raises:
        DataError: If the three are not of one 1-D shape.

    Example:
        >>> rank_ic_by_date([7, 8, 7, 8, 7], [0.1, 0.5, 0.2, 0.4, 0.3], [1, 2, 2, 1, 0])
        (array([7, 8]), array([-0.5,  1. ]))
    """
    date, score, target = np.asarray(dates), np.asarray(scores), np.asarray(targets)
    if date.ndim != 1 or not date.shape == score.shape == target.shape:
        raise DataError(
            f"dates have the shape {date.shape}, scores {score.shape} and targets {target.shape}.",
            rule="rank_ic_by_date takes three columns of one length.",
            remedy="pass one value per row, or use rank_ic for arrays of shape (num_dates, num_assets)",
        )
    distinct, number, counts = np.unique(date, return_inverse=True, return_counts=True)
    order = np.argsort(number, kind="stable")
    position = np.empty(len(date), np.int64)
    position[order] = np.arange(len(date)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = (len(distinct), int(counts.max(initial=0)))
    score_da, target_da = np.full(shape, np.nan), np.full(shape, np.nan)
    score_da[number, position], target_da[number, position] = score, target
    return distinct, rank_ic(score_da, target_da)


@dataclass(frozen=True)
class ICSummary:
    """The rank IC over dates. A figure that is undefined is NaN.

    Attributes:
        mean: Mean over the dates on which the rank IC is defined.
        sd: Standard deviation over those dates, with divisor ``num_dates - 1``.
        num_dates: Number of dates on which the rank IC is defined.
        icir: ``mean / sd``: per date, not annualised. No factor of sqrt(252) makes it annual when labels overlap.
        standard_error: Standard error of the mean, right for labels that overlap; NaN where the horizon is not known.
        num_undefined: Number of dates that were left out because their rank IC is undefined.
    """

    mean: float
    sd: float
    num_dates: int
    icir: float
    standard_error: float
    num_undefined: int


def summarize_ic(ic: ArrayLike, *, horizon: int | None = None) -> ICSummary:
    """Mean, spread, ICIR and standard error of a series of rank ICs; `summarize` does it for any metric.

    Args:
        ic: The rank IC of each date in ascending order, shape (D,); NaN where it is undefined.
        horizon: Number of dates that a label spans. Without it no standard error is given.

    Raises:
        UsageError: If the horizon is less than 1.
        MissingExtraError: If the horizon is more than 1 and statsmodels is not installed.

    Example:
        >>> summarize_ic([0.25, 0.75, float("nan"), 0.5])
        ICSummary(mean=0.5, sd=0.25, num_dates=3, icir=2.0, standard_error=nan, num_undefined=1)
    """
    summary = summarize(ic, horizon)
    return ICSummary(
        mean=summary.mean,
        sd=summary.sd,
        num_dates=summary.num_dates,
        icir=summary.mean / summary.sd if summary.sd > 0 else float("nan"),
        standard_error=summary.standard_error,
        num_undefined=summary.num_undefined,
    )


def _rank_ic_block(scores: NDArray[Any], targets: NDArray[Any], common: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Rank IC of a block of dates: Pearson's correlation of average ranks; both of shape (D, A)."""
    # Average ranks of n values have the mean (n + 1) / 2 whatever the ties.
    middle = (common.sum(axis=1, keepdims=True) + 1) / 2
    score = np.where(common, average_ranks(scores, common) - middle, 0.0)
    target = np.where(common, average_ranks(targets, common) - middle, 0.0)
    scale = np.sqrt((score**2).sum(axis=1) * (target**2).sum(axis=1))
    # A constant row has deviations of exactly 0, since ranks are multiples of a half.
    ic = divide((score * target).sum(axis=1), scale, scale > 0)
    return np.clip(ic, -1.0, 1.0, out=ic)
