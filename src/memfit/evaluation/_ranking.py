"""How good a ranking of assets was on each date, apart from the rank IC. Shapes: D dates, A assets.

An asset is *eligible* on a date when it has both a score and a target there. Where scores are equal, each figure is
the mean over all orders in which chance could break the tie: a model that scores all assets alike gets what random
scores get, whatever the order of the assets in the table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memfit.errors import DataError, UsageError
from memfit.evaluation._matrix import average_ranks, by_date, divide, share_ties


def precision_at_k(
    scores: ArrayLike, targets: ArrayLike, *, k: int | None = None, k_ratio: float | None = None
) -> NDArray[np.float64]:
    """The share of each date's k best-scored assets whose target is above 0. A target of exactly 0 is not above it.

    Args:
        scores: Higher is better, shape (D, A); NaN where the asset is absent.
        targets: Forward returns, shape (D, A); NaN where they are not known.
        k: Number of assets to select.
        k_ratio: In place of k, the share of the eligible assets to select: ``floor(k_ratio * n + 0.5)``, at least 1.

    Returns:
        Shape (D,), from 0 to 1; NaN where fewer than k assets are eligible.

    Raises:
        DataError: If the two are not of one 2-D shape.
        UsageError: If not exactly one of k and k_ratio is given, or it is out of range.

    Example:
        >>> precision_at_k([[4, 3, 2, 1], [1, 1, 1, 1]], [[0.1, -0.1, 0.2, -0.2], [0.1, 0.1, 0.1, -0.1]], k=2)
        array([0.5 , 0.75])
    """
    _check_k(k, k_ratio)

    def block(score: NDArray[Any], target: NDArray[Any], common: NDArray[np.bool_]) -> NDArray[np.float64]:
        num = common.sum(axis=1)
        sizes = _sizes(num, k, k_ratio)
        selected = _by_rank(score, common, np.arange(score.shape[1]) < sizes[:, None])
        hits = (selected * (common & (target > 0))).sum(axis=1)
        return divide(hits, sizes, num >= sizes)

    return by_date("precision_at_k", scores, targets, block)


def positive_rate(scores: ArrayLike, targets: ArrayLike) -> NDArray[np.float64]:
    """The share of each date's eligible assets whose target is above 0: what `precision_at_k` is for random scores.

    Returns:
        Shape (D,), from 0 to 1; NaN where no asset is eligible.

    Raises:
        DataError: If the two are not of one 2-D shape.

    Example:
        >>> positive_rate([[4, 3, 2, float("nan")]], [[0.1, -0.1, 0.2, 0.3]])
        array([0.666...])
    """

    def block(score: NDArray[Any], target: NDArray[Any], common: NDArray[np.bool_]) -> NDArray[np.float64]:
        num = common.sum(axis=1)
        return divide((common & (target > 0)).sum(axis=1), num, num > 0)

    return by_date("positive_rate", scores, targets, block)


def lift_at_k(
    scores: ArrayLike, targets: ArrayLike, *, k: int | None = None, k_ratio: float | None = None
) -> NDArray[np.float64]:
    """`precision_at_k` less `positive_rate`: a difference of shares, whose expectation for random scores is 0.

    Args and Raises are those of `precision_at_k`.

    Returns:
        Shape (D,), from -1 to 1; NaN where fewer than k assets are eligible.

    Example:
        >>> lift_at_k([[4, 3, 2, 1]], [[0.1, 0.3, -0.2, -0.2]], k=1)
        array([0.5])
    """
    return precision_at_k(scores, targets, k=k, k_ratio=k_ratio) - positive_rate(scores, targets)


def ndcg_at_k(
    scores: ArrayLike, targets: ArrayLike, *, k: int | None = None, k_ratio: float | None = None
) -> NDArray[np.float64]:
    """The normalised discounted cumulative gain of each date's k best-scored assets.

    The gain of an asset is its target's average rank within the date, scaled from 0 (the lowest) to 1 (the highest):
    so one extreme return cannot carry a date, and losses have no negative gain. The discount of place i, from 1, is
    ``1 / log2(i + 1)``, and 0 beyond k. The sum is divided by that of the best order. It is not 0 for random scores:
    compare two models by it, or a model with its own shuffled scores.

    Args:
        scores: Higher is better, shape (D, A); NaN where the asset is absent.
        targets: Forward returns, shape (D, A); NaN where they are not known.
        k: Number of places that count.
        k_ratio: In place of k, as in `precision_at_k`.

    Returns:
        Shape (D,), from 0 to 1; NaN where fewer than max(k, 2) assets are eligible.

    Raises:
        DataError: If the two are not of one 2-D shape.
        UsageError: If not exactly one of k and k_ratio is given, or it is out of range.

    Source:
        K. Jarvelin, J. Kekalainen, Cumulated gain-based evaluation of IR techniques (2002); F. McSherry, M. Najork,
        Computing information retrieval performance measures efficiently in the presence of tied scores (2008). Equal
        to ``sklearn.metrics.ndcg_score`` of these gains.

    Example:
        >>> ndcg_at_k([[3, 2, 1], [1, 2, 3]], [[0.3, 0.2, 0.1], [0.3, 0.2, 0.1]], k=2).round(3)
        array([1.  , 0.24])
    """
    _check_k(k, k_ratio)

    def block(score: NDArray[Any], target: NDArray[Any], common: NDArray[np.bool_]) -> NDArray[np.float64]:
        num = common.sum(axis=1)
        sizes = _sizes(num, k, k_ratio)
        place = np.arange(score.shape[1])
        discount = np.where(place < sizes[:, None], 1 / np.log2(place + 2), 0.0)
        gain = (average_ranks(target, common) - 1) / np.maximum(num - 1, 1)[:, None]
        gain = np.where(common, gain, 0.0)
        found = (_by_rank(score, common, discount) * gain).sum(axis=1)
        best = (_by_rank(target, common, discount) * gain).sum(axis=1)
        return divide(found, best, num >= np.maximum(sizes, 2))

    return by_date("ndcg_at_k", scores, targets, block)


def quantile_spread(scores: ArrayLike, targets: ArrayLike, *, num_quantiles: int = 5) -> NDArray[np.float64]:
    """The mean target of each date's top quantile by score, less that of its bottom quantile.

    Both groups hold ``floor(n / num_quantiles)`` of the n eligible assets; what does not divide goes to the groups
    between them. Equal scores at a group's border belong to it in equal parts. It is the whole difference: libraries
    that give the return of a portfolio half long and half short give half of it.

    Args:
        scores: Higher is better, shape (D, A); NaN where the asset is absent.
        targets: Forward returns, finite, shape (D, A); NaN where they are not known.
        num_quantiles: Number of groups, at least 2.

    Returns:
        Shape (D,), in the unit of the targets; NaN where fewer than num_quantiles assets are eligible.

    Raises:
        DataError: If the two are not of one 2-D shape, or a target is infinite.
        UsageError: If num_quantiles is less than 2.

    Example:
        >>> quantile_spread([[5, 4, 3, 2, 1]], [[0.04, 0.02, 0.0, 0.01, -0.01]], num_quantiles=2).round(3)
        array([0.03])
    """
    if num_quantiles < 2:
        raise UsageError(
            f"num_quantiles is {num_quantiles}.",
            rule="a spread lies between two groups at least.",
            remedy="num_quantiles=5 compares the best fifth with the worst",
        )

    def block(score: NDArray[Any], target: NDArray[Any], common: NDArray[np.bool_]) -> NDArray[np.float64]:
        if np.isinf(target[common]).any():
            raise DataError(
                f"{np.isinf(target[common]).sum()} targets are infinite.",
                rule="a mean return is taken over finite returns.",
                remedy="check the prices behind them (a price of 0 gives an infinite return), and set them to NaN",
            )
        num = common.sum(axis=1)[:, None]
        size = num // num_quantiles
        place = np.arange(score.shape[1])
        sides = (place < size).astype(np.float64) - ((place >= num - size) & (place < num))
        total = (_by_rank(score, common, sides) * np.where(common, target, 0.0)).sum(axis=1)
        return divide(total, size[:, 0], size[:, 0] > 0)

    return by_date("quantile_spread", scores, targets, block)


def hit_rate(scores: ArrayLike, targets: ArrayLike) -> NDArray[np.float64]:
    """The share of each date's eligible assets on the right side: score and target both above, or both below, median.

    The medians are those of the date, so that neither the market's move nor an offset of the scores counts. An asset
    at either median counts one half. Random scores have the expectation 0.5.

    Returns:
        Shape (D,), from 0 to 1; NaN where fewer than 2 assets are eligible.

    Raises:
        DataError: If the two are not of one 2-D shape.

    Example:
        >>> hit_rate([[4, 3, 2, 1]], [[0.4, -0.1, 0.1, -0.3]])
        array([0.5])
    """

    def block(score: NDArray[Any], target: NDArray[Any], common: NDArray[np.bool_]) -> NDArray[np.float64]:
        num = common.sum(axis=1)
        agreement = (_side(score, common) * _side(target, common)).sum(axis=1)
        return divide(num + agreement, 2 * num, num >= 2)

    return by_date("hit_rate", scores, targets, block)


def _side(values: NDArray[Any], common: NDArray[np.bool_]) -> NDArray[np.int64]:
    """1 above the median of the row's common cells, -1 below it, 0 elsewhere; (D, A) in and out."""
    median = np.full(len(values), np.nan)
    rows = common.any(axis=1)
    with np.errstate(invalid="ignore"):  # between -inf and inf lies no median, and no cell is on a side of it
        median[rows] = np.nanmedian(np.where(common, values, np.nan)[rows], axis=1)
    side: NDArray[np.int64] = np.zeros(values.shape, np.int64)
    side[common & (values > median[:, None])] = 1
    side[common & (values < median[:, None])] = -1
    return side


def _by_rank(scores: NDArray[Any], common: NDArray[np.bool_], weights: NDArray[Any]) -> NDArray[np.float64]:
    """The weight of each cell's place from the best score down; 0 where it is not common; all of shape (D, A)."""
    return np.where(common, share_ties(np.where(common, -scores, np.nan), weights), 0.0)


def _sizes(num: NDArray[np.int64], k: int | None, k_ratio: float | None) -> NDArray[np.int64]:
    """The number of assets to select on dates with so many eligible ones; shape (D,)."""
    if k is not None:
        return np.full(len(num), k, np.int64)
    assert k_ratio is not None  # checked by _check_k
    sizes: NDArray[np.int64] = np.maximum(1, np.floor(k_ratio * num + 0.5)).astype(np.int64)
    return sizes


def _check_k(k: int | None, k_ratio: float | None) -> None:
    if (k is None) == (k_ratio is None) or (k is not None and k < 1) or (k_ratio is not None and not 0 < k_ratio <= 1):
        raise UsageError(
            f"k is {k} and k_ratio {k_ratio}.",
            rule="exactly one of them says how many assets are selected: k from 1, or k_ratio above 0 and at most 1.",
            remedy="give k=50 for fifty assets, or k_ratio=0.1 for a tenth of those that are eligible",
        )
