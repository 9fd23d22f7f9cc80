"""Rank IC: Spearman's rank correlation between scores and targets across the assets of one date.

Shapes: D dates, A assets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memfit.errors import DataError

# Dates are ranked in blocks of about this many cells, so that memory stays at some tens of MiB for a panel of any size.
_BLOCK_CELLS = 1 << 18


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
    score_da, target_da = np.asarray(scores), np.asarray(targets)
    if score_da.ndim != 2 or score_da.shape != target_da.shape:
        raise DataError(
            f"scores have the shape {score_da.shape} and targets {target_da.shape}.",
            rule="rank_ic takes two arrays of one shape (num_dates, num_assets).",
            remedy="fill absent assets with NaN, or use rank_ic_by_date for a long table",
        )
    num_dates, num_assets = score_da.shape
    step = max(1, _BLOCK_CELLS // max(num_assets, 1))
    blocks = [
        _rank_ic_block(score_da[first : first + step], target_da[first : first + step])
        for first in range(0, num_dates, step)
    ]
    return np.concatenate(blocks) if blocks else np.empty(0)


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
        standard_error: ``sd / sqrt(num_dates)``, given only for labels that span one date. It takes the dates as
            independent, and with overlapping labels it would be too small.
        num_undefined: Number of dates that were left out because their rank IC is undefined.
    """

    mean: float
    sd: float
    num_dates: int
    icir: float
    standard_error: float
    num_undefined: int


def summarize_ic(ic: ArrayLike, *, horizon: int | None = None) -> ICSummary:
    """Mean, spread and ICIR of a series of rank ICs.

    Args:
        ic: The rank IC of each date, shape (D,); NaN where it is undefined.
        horizon: Number of dates that a label spans, where known. Only with 1 is a standard error given.

    Example:
        >>> summarize_ic([0.25, 0.75, float("nan"), 0.5])
        ICSummary(mean=0.5, sd=0.25, num_dates=3, icir=2.0, standard_error=nan, num_undefined=1)
    """
    series = np.asarray(ic, np.float64).ravel()
    defined = series[~np.isnan(series)]
    num = len(defined)
    mean = float(defined.mean()) if num else float("nan")
    sd = float(defined.std(ddof=1)) if num > 1 else float("nan")
    if num > 1 and defined.min() == defined.max():
        sd = 0.0  # rounding of the mean would leave 1e-17, and an ICIR of 1e16
    return ICSummary(
        mean=mean,
        sd=sd,
        num_dates=num,
        icir=mean / sd if sd > 0 else float("nan"),
        standard_error=sd / float(np.sqrt(num)) if horizon == 1 and num > 1 else float("nan"),
        num_undefined=len(series) - num,
    )


def _rank_ic_block(scores: NDArray[Any], targets: NDArray[Any]) -> NDArray[np.float64]:
    """Rank IC of a block of dates: Pearson's correlation of average ranks; both of shape (D, A)."""
    common = ~(np.isnan(scores) | np.isnan(targets))
    # Average ranks of n values have the mean (n + 1) / 2 whatever the ties.
    middle = (common.sum(axis=1, keepdims=True) + 1) / 2
    score = np.where(common, _average_ranks(np.where(common, scores, np.nan)) - middle, 0.0)
    target = np.where(common, _average_ranks(np.where(common, targets, np.nan)) - middle, 0.0)
    scale = np.sqrt((score**2).sum(axis=1) * (target**2).sum(axis=1))
    product = (score * target).sum(axis=1)
    # A constant row has deviations of exactly 0, since ranks are multiples of a half.
    ic = np.full(len(scores), np.nan)
    np.divide(product, scale, out=ic, where=scale > 0)
    return np.clip(ic, -1.0, 1.0, out=ic)


def _average_ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    """Ranks from 1 within each row; equal values share their average rank, NaN come last; shape (D, A) in and out."""
    order = np.argsort(values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)
    starts_run = np.ones(values.shape, bool)
    starts_run[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    starts = np.flatnonzero(starts_run)
    lengths = np.diff(starts, append=values.size)
    average = starts % max(values.shape[1], 1) + (lengths + 1) / 2
    ranks = np.empty(values.shape)
    np.put_along_axis(ranks, order, np.repeat(average, lengths).reshape(values.shape), axis=1)
    return ranks
