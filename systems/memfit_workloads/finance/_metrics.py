"""How good a ranking of assets was on each date: functions of two arrays of D dates x A assets, and what they share.

An asset is *eligible* on a date when it has both a score and a target there; NaN means that it is absent. Where scores
are equal, each figure is the mean over all orders in which chance could break the tie: a model that scores all assets
alike gets what random scores get, whatever the order of the assets in the table.

Each metric gives one figure for each date, NaN where it is undefined, and raises DataError if the two arrays are not of
one 2-D shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memfit.errors import DataError, UsageError

# Dates are ranked in blocks of about this many cells, so that memory stays at some tens of MiB for a panel of any size.
_BLOCK_CELLS = 1 << 18

_Block = Callable[[NDArray[Any], NDArray[Any], NDArray[np.bool_]], NDArray[np.float64]]


def rank_ic(scores: ArrayLike, targets: ArrayLike) -> NDArray[np.float64]:
    """Return the rank IC of each date: Spearman's correlation over the assets that have both a score and a target.

    Equal values share the average of their ranks; infinities rank as the largest and smallest values. A date is NaN
    with fewer than 2 assets in common, or if all their scores or all their targets are equal. It equals
    ``scipy.stats.spearmanr`` date by date.
    """

    def block(score: NDArray[Any], target: NDArray[Any], common: NDArray[np.bool_]) -> NDArray[np.float64]:
        # Pearson's correlation of ranks. Average ranks of n values have the mean (n + 1) / 2 whatever the ties.
        middle = (common.sum(axis=1, keepdims=True) + 1) / 2
        score = np.where(common, _average_ranks(score, common) - middle, 0.0)
        target = np.where(common, _average_ranks(target, common) - middle, 0.0)
        scale = np.sqrt((score**2).sum(axis=1) * (target**2).sum(axis=1))
        # A constant row has deviations of exactly 0, since ranks are multiples of a half.
        ic = divide((score * target).sum(axis=1), scale, scale > 0)
        return np.clip(ic, -1.0, 1.0, out=ic)

    return _by_date("rank_ic", scores, targets, block)


def precision_at_k(scores: ArrayLike, targets: ArrayLike, *, k_ratio: float) -> NDArray[np.float64]:
    """Return the share of each date's best-scored assets whose target is above 0, and not exactly 0.

    Of n eligible assets, ``floor(k_ratio * n + 0.5)`` are selected, at least 1. NaN where none is eligible.

    Raises:
        UsageError: If k_ratio is not above 0 and at most 1.
    """
    if not 0 < k_ratio <= 1:
        raise UsageError(
            f"k_ratio is {k_ratio}.",
            rule="the share of the assets that are selected is above 0 and at most 1.",
            remedy="give k_ratio=0.1 for a tenth of those that are eligible",
        )

    def block(score: NDArray[Any], target: NDArray[Any], common: NDArray[np.bool_]) -> NDArray[np.float64]:
        num = common.sum(axis=1)
        sizes = np.maximum(1, np.floor(k_ratio * num + 0.5)).astype(int)
        selected = _by_rank(score, common, np.arange(score.shape[1]) < sizes[:, None])
        hits = (selected * (common & (target > 0))).sum(axis=1)
        return divide(hits, sizes, num >= sizes)

    return _by_date("precision_at_k", scores, targets, block)


def positive_rate(scores: ArrayLike, targets: ArrayLike) -> NDArray[np.float64]:
    """Return the share of each date's eligible assets whose target is above 0: `precision_at_k` of random scores."""

    def block(_: NDArray[Any], target: NDArray[Any], common: NDArray[np.bool_]) -> NDArray[np.float64]:
        num = common.sum(axis=1)
        return divide((common & (target > 0)).sum(axis=1), num, num > 0)

    return _by_date("positive_rate", scores, targets, block)


def quantile_spread(scores: ArrayLike, targets: ArrayLike) -> NDArray[np.float64]:
    """Return the mean target of each date's best fifth by score, less that of its worst fifth, in their unit.

    Both groups hold ``floor(n / 5)`` of the n eligible assets; NaN where that is 0. Equal scores at a group's border
    share it. It is the whole difference: a portfolio half long and half short returns half of it.

    Raises:
        DataError: If a target is infinite.
    """

    def block(score: NDArray[Any], target: NDArray[Any], common: NDArray[np.bool_]) -> NDArray[np.float64]:
        if np.isinf(target[common]).any():
            raise DataError(
                f"{np.isinf(target[common]).sum()} targets are infinite.",
                rule="a mean return is taken over finite returns.",
                remedy="check the prices behind them (a price of 0 gives an infinite return), and set them to NaN",
            )
        num = common.sum(axis=1)[:, None]
        size = num // 5
        place = np.arange(score.shape[1])
        sides = (place < size).astype(np.float64) - ((place >= num - size) & (place < num))
        total = (_by_rank(score, common, sides) * np.where(common, target, 0.0)).sum(axis=1)
        return divide(total, size[:, 0], size[:, 0] > 0)

    return _by_date("quantile_spread", scores, targets, block)


def _by_rank(scores: NDArray[Any], common: NDArray[np.bool_], weights: NDArray[Any]) -> NDArray[np.float64]:
    """Return the weight of each cell's place from the best score down; 0 where it is not common; all (D, A)."""
    return np.where(common, _share_ties(np.where(common, -scores, np.nan), weights), 0.0)


def _by_date(name: str, scores: ArrayLike, targets: ArrayLike, metric: _Block) -> NDArray[np.float64]:
    """Return a metric of each date, shape (D,); it gets blocks of dates: scores, targets, and where both are there."""
    score_da, target_da = np.asarray(scores), np.asarray(targets)
    if score_da.ndim != 2 or score_da.shape != target_da.shape:
        raise DataError(
            f"scores have the shape {score_da.shape} and targets {target_da.shape}.",
            rule=f"{name} takes two arrays of one shape (num_dates, num_assets).",
            remedy="fill absent assets with NaN; read_scores makes such arrays of a long table",
        )
    num_dates, num_assets = score_da.shape
    step = max(1, _BLOCK_CELLS // max(num_assets, 1))
    result = np.empty(num_dates)
    for first in range(0, num_dates, step):
        score, target = score_da[first : first + step], target_da[first : first + step]
        result[first : first + step] = metric(score, target, ~(np.isnan(score) | np.isnan(target)))
    return result


def _share_ties(values: NDArray[Any], weights: NDArray[Any]) -> NDArray[np.float64]:
    """Deal each row's weights to its cells in ascending order; equal values get their mean weight, NaN come last."""
    if not values.size:
        return np.empty(values.shape)
    order = np.argsort(values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)
    starts_run = np.ones(values.shape, bool)
    starts_run[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    starts = np.flatnonzero(starts_run)
    lengths = np.diff(starts, append=values.size)
    means = np.add.reduceat(np.broadcast_to(weights, values.shape).ravel(), starts) / lengths
    shared = np.empty(values.shape)
    np.put_along_axis(shared, order, np.repeat(means, lengths).reshape(values.shape), axis=1)
    return shared


def _average_ranks(values: NDArray[Any], common: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return ranks from 1 within each row among the cells that are common; equal values share their average rank."""
    return _share_ties(np.where(common, values, np.nan), np.arange(1, values.shape[1] + 1))


def divide(numerator: NDArray[Any], denominator: NDArray[Any], defined: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the quotient where it is defined, NaN elsewhere; all of shape (D,)."""
    result = np.full(len(numerator), np.nan)
    np.divide(numerator, denominator, out=result, where=defined)
    return result
