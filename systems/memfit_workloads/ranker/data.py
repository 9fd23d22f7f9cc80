"""The folds of the ranker: how dates are split, and what of its config cannot run. `finance.panels` makes the panel."""

from __future__ import annotations

import fnmatch
from typing import Any

import numpy as np

from memfit.errors import ConfigError
from memfit.pipeline import Context
from memfit.splits import PurgedKFold, WalkForward
from memfit_workloads.finance.panels import (
    Splitter,
    check_data,
    check_folds,
    check_market,
    possible_dates,
    prepare_folds,
)
from memfit_workloads.ranker.params import RankerParams


def check(params: RankerParams) -> None:
    """Refuse data and folds that cannot be trained on."""
    check_data(params.data)
    check_folds(params.data, splitter(params), params.train.valid_share)


def check_judging(params: RankerParams) -> None:
    """Refuse folds that cannot be judged: without prices, dates in the period, or checkpoints to blend."""
    check_market(params.data)
    dates, _ = possible_dates(params.data)
    begin, end = (None if day is None else np.datetime64(day) for day in (params.start_date, params.end_date))
    if len(dates) and ((begin is not None and begin > dates[-1]) or (end is not None and end < dates[0])):
        raise ConfigError(
            f"no fold tests a date from {begin or 'the first'} to {end or 'the last'}.",
            rule=f"the folds test dates from {dates[0]} to {dates[-1]}, and what is judged are their test dates.",
            remedy="choose another period: --set params.start_date=... --set params.end_date=...",
        )
    epochs, pattern = range(1, params.train.num_epochs + 1), params.blend
    saved = ["latest", *(["best"] if params.train.valid_share else [])]
    saved += [f"ema_epoch_{epoch}.pt" for epoch in params.train.ema_epochs if epoch in epochs]
    if pattern and not fnmatch.filter(saved, pattern):
        raise ConfigError(
            f"no fold saves a checkpoint that matches '{pattern}'.",
            rule=f"blend names the checkpoints of a fold that are averaged: {', '.join(saved)}.",
            remedy="--set params.blend=latest, or --set params.train.ema_epochs=[...]",
        )


def prepare(context: Context, params: RankerParams) -> dict[str, Any]:
    """Save the panel and its folds, purged by the longest horizon."""
    is_forward, embargo = params.splits.kind == "walk_forward", params.splits.embargo_size
    return prepare_folds(context, params.data, splitter(params), embargo_size=embargo, forward_only=is_forward)[1]


def splitter(params: RankerParams) -> Splitter:
    """What cuts the usable dates into folds."""
    settings, reach = params.splits, max(params.data.labels)
    shared: dict[str, Any] = {"purged_size": reach, "embargo_size": settings.embargo_size}
    if settings.kind == "walk_forward":
        return WalkForward(settings.n_splits, train_size=settings.train_size, **shared)
    return PurgedKFold(settings.n_splits, **shared)
