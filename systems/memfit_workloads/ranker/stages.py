"""The ranker as stages: prepare a panel and its folds, train each fold, and judge them all.

Importing this module loads no torch, for the processes that only prepare a run. ``RANKER`` is what a config names as
``target: memfit_workloads.ranker.stages:RANKER``.

The figures of a fold are those of the last epoch's weights, on dates that the fold neither trained on nor overlapped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memfit.data import Panel
from memfit.pipeline import Context, Probe, Stage, Workload
from memfit.rundir import phase
from memfit.splits import PurgedKFold, WalkForward
from memfit_workloads import finance, folds, own
from memfit_workloads.finance import evaluate_days, read_scores, summarize
from memfit_workloads.finance.panels import Splitter, check_market, fingerprint, market, prepare_folds
from memfit_workloads.ranker.batches import ListBatch, ListBatches
from memfit_workloads.ranker.params import RankerParams

if TYPE_CHECKING:
    import torch

    from memfit_workloads.ranker.loss import RankerLoss


def splitter(params: RankerParams) -> Splitter:
    """What cuts the usable dates into folds."""
    settings, reach = params.splits, max(params.data.labels)
    shared: dict[str, Any] = {"purged_size": reach, "embargo_size": settings.embargo_size}
    if settings.kind == "walk_forward":
        return WalkForward(settings.n_splits, **shared)
    return PurgedKFold(settings.n_splits, **shared)


def prepare(context: Context, params: RankerParams) -> dict[str, Any]:
    """Save the panel and its folds, purged by the longest horizon."""
    is_forward, embargo = params.splits.kind == "walk_forward", params.splits.embargo_size
    return prepare_folds(context, params.data, splitter(params), embargo_size=embargo, forward_only=is_forward)[1]


def train_fold(context: Context, params: RankerParams) -> dict[str, float]:
    """Train one fold, score its test dates with the last epoch's weights, and save the scores as a table."""
    from memfit.training import ByGroup, Ema, checkpoint_path

    phase("load")
    fold, settings = folds.Fold(context, params), params.train
    model = _started_model(context, params, fold)
    has_validation = len(fold.valid_dates) > 0
    result = folds.fit(
        context,
        params,
        model,
        _loss(params),
        (
            ListBatches(fold.panel, fold.fit_dates, params, seed=context.seed, num_workers=settings.num_workers),
            ListBatches(fold.panel, fold.valid_dates, params, seed=None) if has_validation else None,
        ),
        split=ByGroup(lambda batch: batch.lists),
        ema=Ema(settings.ema_decay) if settings.ema_epochs else None,
        milestones=settings.ema_epochs,
        judge=validation_metrics if has_validation else None,
        best_metric="valid_lift",
        direction="maximize",
        patience=settings.patience,
    )
    phase("validate")
    scores = folds.score_table(model, fold.panel, params, ListBatches(fold.panel, fold.test_dates, params, seed=None))
    context.save("scores", scores)
    for path in sorted([*context.dir.glob("*.pt"), *context.dir.glob("best"), context.dir / "latest"]):
        context.save(path.stem, checkpoint_path(path))  # what is blended then counts as a result
    found = fold_metrics(scores, params)
    found |= {"train_loss": result.history[-1].train_loss, "num_epochs": len(result.history)}
    if settings.ema_epochs:
        found["num_snapshots"] = len(list(context.dir.glob("ema_epoch_*.pt")))
    return found | ({"warm_start": 1.0} if params.splits.warm_start else {})


def score(panel: Panel, dates: npt.NDArray[np.int64], checkpoint: Path, params: RankerParams) -> pa.Table:
    """A checkpoint's scores on given dates, for every asset with a whole window."""
    from memfit.training import find_device, load_checkpoint

    model = _new_model(params).to(find_device(params.train.device)).eval()
    model.load_state_dict(load_checkpoint(checkpoint)["model"])
    return folds.score_table(model, panel, params, ListBatches(panel, dates, params, seed=None))


def validation_metrics(scores: pa.Table, params: RankerParams) -> dict[str, float]:
    """What an epoch is judged by: ``valid_lift`` decides, ``valid_rank_ic`` is that of the main horizon.

    The lift is the share of the best-scored assets that rose, less that of all assets: a mean over dates and horizons.
    """
    found = fold_metrics(scores, params)
    lifts = np.array([found[f"h{horizon}_delta_p_at_k_pos"] for horizon in params.data.horizons])
    known = lifts[~np.isnan(lifts)]
    return {"valid_lift": float(known.mean()) if len(known) else float("nan"), "valid_rank_ic": found["rank_ic"]}


def fold_metrics(scores: pa.Table, params: RankerParams) -> dict[str, float]:
    """The figures of a fold: the rank IC of the main horizon, then rank IC and lift by horizon."""
    data = params.data
    days = evaluate_days(read_scores(scores), horizons=data.horizons, k_ratio=params.train.k_ratio)
    main = summarize(days.column(f"h{data.main_horizon}_rank_ic").to_numpy())
    found = {"rank_ic": main.mean, "rank_ic_sd": main.sd, "icir": main.icir, "num_dates": main.num_dates}
    for name in (f"h{horizon}_{what}" for horizon in data.horizons for what in ("rank_ic", "delta_p_at_k_pos")):
        found[name] = summarize(days.column(name).to_numpy()).mean
    return found


def loader(context: Context, params: RankerParams, num_workers: int) -> ListBatches:
    """The batches that a fold trains on, made ahead by so many threads."""
    fold = folds.Fold(context, params)
    return ListBatches(fold.panel, fold.fit_dates, params, seed=context.seed, num_workers=num_workers)


def training_step(context: Context, params: RankerParams) -> Callable[[ListBatch], None]:
    """One step of a fold's training on a batch, without what a trainer does around it."""
    model = _started_model(context, params, folds.Fold(context, params))
    return folds.step_of(params, model, _loss(params))


def _loss(params: RankerParams) -> RankerLoss:
    from memfit_workloads.ranker.loss import RankerLoss

    return RankerLoss(**params.train.loss.model_dump())


def _new_model(params: RankerParams, scale: tuple[Any, Any] | None = None) -> torch.nn.Module:
    import torch

    from memfit_workloads.ranker.model import scaled

    sizes = folds.sizes_of(params.data)
    plain = np.zeros(sizes["num_features"], np.float32), np.ones(sizes["num_features"], np.float32)
    return scaled(own.build(params.model, **sizes), *map(torch.from_numpy, scale or plain))


def _started_model(context: Context, params: RankerParams, fold: folds.Fold) -> torch.nn.Module:
    """A new model, or one with the weights of the fold before where that was asked for."""
    from memfit.training import find_device, load_checkpoint, seed_everything

    seed_everything(context.seed)
    model = _new_model(params, fold.scale).to(find_device(params.train.device))
    if context.previous is not None:
        model.load_state_dict(load_checkpoint(context.previous.path("latest"))["model"])
    return model


def _check(params: RankerParams) -> None:
    """Refuse data, folds and a network that cannot be trained."""
    folds.check(params, splitter(params), lambda: params.train.dates_per_batch)
    rows, sizes = own.ROWS, folds.sizes_of(params.data)
    inputs: dict[str, Any] = dict.fromkeys(ListBatch.INPUTS, ("int64", (rows,)))
    inputs["windows"] = "float32", (rows, sizes["lookback"], sizes["num_features"])
    own.try_out(params.model, lambda: _new_model(params), inputs, (rows, sizes["num_horizons"]))


RANKER = Workload(
    params=RankerParams,
    check=_check,
    fingerprint=lambda params: {
        "prepare": fingerprint(params.data),
        "fold": params.model.fingerprint(),
        "decision": finance.fingerprint(params),
    },
    stages=(
        Stage("prepare", prepare, reads=("data", "splits"), phases=("load", "build")),
        Stage(
            "fold",
            train_fold,
            needs=("prepare",),
            each="fold in prepare.folds",
            reads=("data", "splits", "model", "train", "@seed"),
            in_order="params.splits.warm_start",
            phases=("load", "train", "checkpoint", "validate"),
            probe=Probe(loader, training_step),
        ),
        *finance.stages(
            score, market, reads=("data", "model", "train"), check=lambda params: check_market(params.data)
        ),
    ),
)
