"""The folds of the ranker: how dates are split. The panel is made by `memfit_workloads.finance.panels`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.data import Panel
from memfit.pipeline import Context
from memfit.splits import CombinatorialPurged, PurgedKFold, WalkForward
from memfit_workloads.finance.panels import Splitter, prepare_folds, usable_dates
from memfit_workloads.ranker.params import RankerParams


def prepare(context: Context, params: RankerParams) -> dict[str, Any]:
    """Save the panel and its folds, purged by the longest horizon."""
    is_forward, embargo = params.splits.kind == "walk_forward", params.splits.embargo_size
    return prepare_folds(context, params, splitter(params), embargo_size=embargo, forward_only=is_forward)[1]


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
