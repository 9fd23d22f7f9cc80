"""The data of the forecaster: folds, sectors, each day's graph and its volatility, all from what was known on the day.

This loads no torch, for the processes that only prepare a run.
"""

from __future__ import annotations

import bisect
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.pipeline import Context
from memfit.rundir import phase
from memfit.splits import PurgedKFold
from memfit_workloads.finance.panels import DataParams, possible_dates, prepare_folds, sectors_of
from memfit_workloads.forecaster.params import ForecasterParams

Array = npt.NDArray[Any]

_VOLATILITY_DATES = 20
_LEAST_PAST = 60  # volatilities before a day's is ranked among them
_CHUNK_ROWS = 1024


def prepare(context: Context, params: ForecasterParams) -> dict[str, Any]:
    """Save the panel, its purged folds, the sectors, and what each date's past says: neighbours and volatility."""
    data, embargo = params.data, params.splits.embargo_size
    panel, facts = prepare_folds(context, params.data, splitter(params), embargo_size=embargo)
    phase("graph")
    returns = panel.target(data.target(1))
    context.save("days", {"sectors": sectors_of(panel, data), "volatility": volatility_ranks(returns)})
    path = context.dir / "neighbours.npy"
    write_neighbours(path, returns, params.graph.neighbours, params.graph.window)
    context.save("neighbours", path)
    return facts


def splitter(params: ForecasterParams) -> PurgedKFold:
    """What cuts the usable dates into folds."""
    splits = params.splits
    return PurgedKFold(splits.n_splits, purged_size=max(params.data.labels), embargo_size=splits.embargo_size)


def write_neighbours(path: Path, returns: Array, number: int, window: int) -> None:
    """Write the neighbours of every date, one date at a time: (num_dates, num_assets, number), -1 for none.

    ``returns`` (num_dates, num_assets) are those over the date that follows each. A date's neighbours come from those
    of the ``window`` dates before it: the last of them is known at its close.
    """
    num_dates, num_assets = returns.shape
    kind = np.int16 if num_assets <= np.iinfo(np.int16).max else np.int32
    found = np.lib.format.open_memmap(path, "w+", kind, (num_dates, num_assets, number))
    for date in range(num_dates):
        found[date] = neighbours_of(returns[date - window : date], number) if date >= window else -1
    found.flush()


def neighbours_of(past: Array, number: int) -> npt.NDArray[np.int64]:
    """Return the assets of the highest correlation with each, highest first: (num_assets, number), -1 for none.

    ``past`` are returns (num_dates, num_assets). An asset takes part if half of its returns are known and they differ.
    A missing return (NaN) counts as its asset's mean.
    """
    known = np.isfinite(past)
    count = known.sum(0)
    plain = np.where(known, past, 0.0)
    centred = np.where(known, plain - plain.sum(0) / np.maximum(count, 1), 0.0)
    length = np.sqrt((centred**2).sum(0))
    counts = (2 * count >= len(past)) & (length > 0)
    unit = (centred / np.where(counts, length, 1.0)).astype(np.float32)
    num_assets = past.shape[1]
    taken = min(number, num_assets - 1)
    found = np.full((num_assets, number), -1, np.int64)
    for start in range(0, num_assets if taken else 0, _CHUNK_ROWS):
        rows = np.arange(start, min(start + _CHUNK_ROWS, num_assets))
        close = unit[:, rows].T @ unit
        close[:, ~counts] = -np.inf
        close[rows - start, rows] = -np.inf
        top = np.argpartition(-close, taken - 1, axis=1)[:, :taken]
        highest = np.take_along_axis(close, top, 1)
        order = np.argsort(-highest, axis=1, kind="stable")
        top, highest = np.take_along_axis(top, order, 1), np.take_along_axis(highest, order, 1)
        found[rows, :taken] = np.where(np.isfinite(highest) & counts[rows, None], top, -1)
    return found


def volatility_ranks(returns: Array) -> npt.NDArray[np.float32]:
    """Return where each date's volatility stands among those of the dates before it: (num_dates,), 0 to 1.

    The volatility is the standard deviation of the mean return of all assets over the last 20 dates, the last of them
    known at the date's close. ``returns`` (num_dates, num_assets) are those over the date that follows each. A date
    with too little past has 0.5.
    """
    known = [row[np.isfinite(row)] for row in returns[:-1]]
    known_on = np.array([np.nan, *(row.mean(dtype=np.float64) if len(row) else np.nan for row in known)])
    ranks, past = np.full(len(returns), 0.5, np.float32), list[float]()
    for date in range(_VOLATILITY_DATES, len(returns)):
        volatility = float(known_on[date - _VOLATILITY_DATES + 1 : date + 1].std())
        if np.isnan(volatility):
            continue
        if len(past) >= _LEAST_PAST:
            ranks[date] = (bisect.bisect_left(past, volatility) + bisect.bisect(past, volatility)) / (2 * len(past))
        bisect.insort(past, volatility)
    return ranks


def day_weights(ranks: npt.NDArray[np.float32], strength: float) -> npt.NDArray[np.float32]:
    """Return how much each date counts: ``exp(-strength * (2 * rank - 1))``, so a calm day counts more; 1 at 0."""
    weights: npt.NDArray[np.float32] = np.exp(-strength * (2 * ranks - 1)).astype(np.float32)
    return weights


def largest_day(data: DataParams) -> int:
    """Return how many assets the largest day has at most; of a file that is there, from its column of dates."""
    return 1 if data.path is not None and not data.path.exists() else possible_dates(data)[1]
