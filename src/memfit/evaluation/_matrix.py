"""What the metrics of a date share: matrices of one shape, blocks of dates, and ties. D dates x A assets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memfit.errors import DataError

# Dates are ranked in blocks of about this many cells, so that memory stays at some tens of MiB for a panel of any size.
_BLOCK_CELLS = 1 << 18

Metric = Callable[[NDArray[Any], NDArray[Any], NDArray[np.bool_]], NDArray[np.float64]]


def by_date(name: str, scores: ArrayLike, targets: ArrayLike, metric: Metric) -> NDArray[np.float64]:
    """A metric of each date, shape (D,); it gets blocks of dates of scores, targets and of where both are there.

    Raises:
        DataError: If the two are not of one 2-D shape.
    """
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


def share_ties(values: NDArray[Any], weights: NDArray[Any]) -> NDArray[np.float64]:
    """What each cell gets when a row's weights are dealt out in ascending order of its values, shape (D, A).

    Equal values get the mean of their weights, which is what each would get on average if chance broke the tie. NaN
    come last.

    >>> share_ties(np.array([[0.5, 0.1, 0.5, np.nan]]), np.array([[1, 2, 3, 4]]))
    array([[2.5, 1. , 2.5, 4. ]])
    """
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


def average_ranks(values: NDArray[Any], common: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Ranks from 1 within each row among the cells that are common; equal values share their average rank."""
    return share_ties(np.where(common, values, np.nan), np.arange(1, values.shape[1] + 1))


def divide(numerator: NDArray[Any], denominator: NDArray[Any], defined: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The quotient where it is defined, NaN elsewhere; all of shape (D,)."""
    result = np.full(len(numerator), np.nan)
    np.divide(numerator, denominator, out=result, where=defined)
    return result
