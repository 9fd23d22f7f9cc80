"""The data of the ranker: where the rows come from, how dates are split, and the market to check.

This loads no torch, for the processes that only prepare a run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memfit import config
from memfit.data import Panel
from memfit.errors import DataError, SplitError
from memfit.pipeline import Context
from memfit.rundir import phase
from memfit.splits import CombinatorialPurged, PurgedKFold, WalkForward
from memfit_workloads import finance
from memfit_workloads.ranker import market as markets
from memfit_workloads.ranker import prices
from memfit_workloads.ranker.params import DataParams, RankerParams

Dates = npt.NDArray[np.int64]


class Splitter(Protocol):
    """What the three splitters have in common."""

    def split(self, X: Any, y: Any = None, groups: Any = None) -> Iterator[tuple[Dates, Dates]]: ...


def fingerprint(params: RankerParams) -> str:
    """A digest of the data that the parameters name: of their content where they are files."""
    data = params.data
    if data.source == "prices":
        return prices.prices_fingerprint()
    if data.source == "generated":
        return config.fingerprint(asdict(_market(data)))
    assert data.path is not None  # checked by DataParams
    files = sorted(path for path in data.path.iterdir() if path.is_file()) if data.path.is_dir() else [data.path]
    if not files or not files[0].exists():
        raise DataError(
            f"{data.path} is not there, or an empty folder.",
            rule="params.data.path names a Parquet file or a folder of them.",
            remedy="--set params.data.path=<a file>",
        )
    digest = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def prepare(context: Context, params: RankerParams) -> dict[str, Any]:
    """Save the panel and its folds, purged by the longest horizon."""
    phase("load")
    data = params.data
    source, features, checked = _source(context.panels_dir, data)
    phase("build")
    targets = list(dict.fromkeys([*(data.target(horizon) for horizon in data.labels), *checked]))
    panel = Panel.build(source, context.panels_dir, features=features, targets=targets)
    usable = usable_dates(panel, params)
    folds = splitter(params).split(panel.dates[usable])
    return finance.save_folds(
        context,
        panel,
        [(usable[train], usable[test]) for train, test in folds],
        label_dates=max(data.labels),
        embargo_size=params.splits.embargo_size,
        forward_only=params.splits.kind == "walk_forward",
    )


def usable_dates(panel: Panel, params: RankerParams) -> Dates:
    """The dates that are split: for each horizon, two assets or more have a whole window and a known target."""
    whole = panel.history >= params.data.lookback
    counts = [
        (whole & np.isfinite(panel.target(params.data.target(horizon)))).sum(axis=1) for horizon in params.data.horizons
    ]
    return np.flatnonzero(np.min(counts, axis=0) >= 2)


def splitter(params: RankerParams) -> Splitter:
    """What cuts the usable dates into folds."""
    settings, reach = params.splits, max(params.data.labels)
    shared: dict[str, Any] = {"purged_size": reach, "embargo_size": settings.embargo_size}
    if settings.kind == "walk_forward":
        return WalkForward(settings.n_splits, train_size=settings.train_size, **shared)
    if settings.kind == "combinatorial":
        return CombinatorialPurged(settings.n_splits, settings.n_test_splits, **shared)
    return PurgedKFold(settings.n_splits, lookback_size=settings.lookback_size, **shared)


def path_of_dates(panel: Panel, params: RankerParams, fold: int) -> npt.NDArray[np.int64] | None:
    """(num_dates,): to which path of combinatorial folds a fold's test of a date belongs, -1 where it tests none.

    The tests of one path, over all folds, hold each date once. None for folds that test a date once anyway.
    """
    cut = splitter(params)
    if not isinstance(cut, CombinatorialPurged):
        return None
    usable = usable_dates(panel, params)
    paths = np.full(len(panel.dates), -1, np.int64)
    paths[usable] = cut.test_paths(panel.dates[usable])[fold - 1]
    return paths


def hold_out(dates: Dates, share: float, reach: int) -> tuple[Dates, Dates]:
    """The training dates to fit on, and the last of them, to validate on.

    What is fitted ends before validation begins: a label that looks ``reach`` dates ahead does not reach into it.

    Args:
        dates: Training dates, ascending positions.
        share: The share to validate on; 0 keeps none.
        reach: Dates that the longest label looks ahead.

    Raises:
        SplitError: If nothing is left to fit on.

    Example:
        >>> fit, valid = hold_out(np.arange(10), share=0.2, reach=3)
        >>> fit.tolist(), valid.tolist()
        ([0, 1, 2, 3, 4], [8, 9])
    """
    if share == 0:
        return dates, dates[:0]
    valid = dates[-max(1, round(share * len(dates))) :]
    fit = dates[dates + reach < valid[0]]
    if len(fit) == 0:
        raise SplitError(
            f"of {len(dates)} training dates {len(valid)} are kept for validation, and none is left to fit on.",
            rule=f"dates are fitted whose labels of {reach} dates end before validation begins.",
            remedy="give more dates, fewer folds, shorter horizons, or --set params.train.valid_share=0",
        )
    return fit, valid


def market(panel: Panel, params: RankerParams) -> pa.Table:
    """The closing prices that the returns are made of: ``date``, ``code``, ``close``, where there is one.

    A Parquet file whose column of volumes was named adds ``volume``.

    Raises:
        DataError: If the source is a Parquet file whose column of closing prices was not named.
    """
    name = params.data.close if params.data.source == "parquet" else "close"
    if name is None:
        raise DataError(
            "the config names no closing prices.",
            rule="a profit counts only on prices that were checked; source: parquet names their column.",
            remedy="--set params.data.close=<a column>",
        )
    closes = panel.target(name)
    date, asset = np.nonzero(np.isfinite(closes))
    columns = {"close": closes}
    if params.data.volume is not None:
        columns["volume"] = panel.target(params.data.volume)
    return pa.table(
        {
            "date": pa.array(panel.dates[date], pa.date32()),
            "code": pa.array(panel.assets).take(pa.array(asset)),
            **{column: pa.array(values[date, asset].astype(np.float64)) for column, values in columns.items()},
        }
    )


def _source(panels_dir: Path, data: DataParams) -> tuple[pa.Table | Path, list[str], list[str]]:
    """The rows to build the panel from, the columns of features, and those that only the market's checks look at."""
    if data.source == "parquet":
        assert data.path is not None  # checked by DataParams
        return data.path, list(data.features), [name for name in (data.close, data.volume) if name is not None]
    if data.source == "prices":
        return prices.daily_features(data.start, data.end, data.labels), list(prices.FEATURES), ["close"]
    settings = _market(data)
    path = panels_dir / "markets" / f"{config.fingerprint(asdict(settings))[:16]}.parquet"
    if not path.exists() or markets.read_market(path) != settings:
        path.parent.mkdir(parents=True, exist_ok=True)
        markets.write_market(path, settings)
    return path, list(settings.feature_names), ["close"]


def _market(data: DataParams) -> markets.Market:
    return markets.Market(
        num_dates=data.num_dates,
        num_assets=data.num_assets,
        num_features=data.num_features,
        information_coefficient=data.information_coefficient,
        horizon=data.main_horizon,
        horizons=data.labels,
        turnover=data.turnover,
        seed=data.market_seed,
    )
