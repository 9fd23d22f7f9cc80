"""The ranker as stages: prepare a panel and its folds, train each fold, and judge them all.

Importing this module loads no torch, for the processes that only prepare a run. ``RANKER`` is what a config names as
``target: memfit_workloads.ranker.stages:RANKER``.

The figures of a fold are those of one model, chosen before the test dates are looked at (``train.scored``), on dates
that the fold neither trained on nor overlapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memfit.data import Panel
from memfit.pipeline import Context, Probe, Stage, Workload
from memfit.rundir import phase
from memfit_workloads import finance, own
from memfit_workloads.finance.panels import fingerprint, hold_out, market, num_features, scale_of
from memfit_workloads.ranker.batches import INPUTS, ListBatch, ListBatches
from memfit_workloads.ranker.data import check, check_judging, prepare
from memfit_workloads.ranker.params import RankerParams
from memfit_workloads.ranker.scoring import fold_metrics, lists_to_score, score_table, validation_metrics

if TYPE_CHECKING:
    import torch

    from memfit.training import Ema, FitResult
    from memfit_workloads.ranker.loss import RankerLoss


def train_fold(context: Context, params: RankerParams) -> dict[str, float]:
    """Train one fold, score its test dates, and save the scores as a table."""
    from memfit.training import checkpoint_path, load_checkpoint

    phase("load")
    panel, train_dates, test_dates = finance.fold_of(context)
    fit_dates, valid_dates = hold_out(train_dates, params.train.valid_share, max(params.data.labels))
    model, average, result = _fit(context, params, fit_dates, valid_dates)
    phase("validate")
    if params.train.scored == "best":
        model.load_state_dict(load_checkpoint(context.dir / "best")["model"])
    with _averaged(model, average):
        scores = score_table(model, panel, lists_to_score(panel, test_dates, params), params)
    context.save("scores", scores)
    for path in sorted([*context.dir.glob("*.pt"), *context.dir.glob("best"), context.dir / "latest"]):
        context.save(path.stem, checkpoint_path(path))  # what is blended then counts as a result
    found = fold_metrics(scores, params.data, params.train.k_ratio)
    found |= {"train_loss": result.history[-1].train_loss, "num_epochs": len(result.history)}
    if params.train.ema_epochs:
        found["num_snapshots"] = len(list(context.dir.glob("ema_epoch_*.pt")))
    return found | ({"warm_start": 1.0} if params.splits.warm_start else {})


def _fit(
    context: Context, params: RankerParams, fit_dates: npt.NDArray[np.int64], valid_dates: npt.NDArray[np.int64]
) -> tuple[torch.nn.Module, Ema | None, FitResult]:
    """The model with the weights of its last epoch, and their average if that is scored."""
    from memfit.training import ByGroup, Ema, Trainer
    from memfit_workloads.finance.schedules import make_schedule

    settings, (panel, *_) = params.train, finance.fold_of(context)
    model, optimizer = _model(context, panel, params, fit_dates)
    batches = ListBatches(panel, fit_dates, params, seed=context.seed, num_workers=settings.num_workers)
    averaged = settings.ema_decay is not None and (settings.ema_epochs or settings.scored == "ema")
    ema = Ema(settings.ema_decay or 0.0) if averaged else None
    scored = ema if settings.scored == "ema" else None

    def evaluate(model: torch.nn.Module, lists: Any) -> dict[str, float]:
        with _averaged(model, scored):
            return validation_metrics(score_table(model, panel, lists, params), params)

    num_steps, shares = settings.num_epochs * len(batches), (settings.final_share, settings.warmup_share)
    schedule = make_schedule("cosine", optimizer, num_steps, floor_share=shares[0], warmup_share=shares[1])
    trainer = Trainer(
        model,
        loss=_loss(params),
        optimizer=optimizer,
        precision=settings.precision,
        schedule=schedule,
        ema=ema,
        checkpoint_dir=context.dir,
        milestones=settings.ema_epochs,
        seed=context.seed,
        max_grad_norm=settings.max_grad_norm,
        provenance=finance.provenance(context, params),
        split=ByGroup(lambda batch: batch.lists),
    )
    has_validation = len(valid_dates) > 0
    with contextlib.closing(batches):
        result = trainer.fit(
            batches,
            lists_to_score(panel, valid_dates, params) if has_validation else None,
            num_epochs=settings.num_epochs,
            evaluate=evaluate if has_validation else None,
            best_metric="valid_lift",
            direction="maximize",
            patience=settings.patience,
        )
    return model, scored, result


def _averaged(model: torch.nn.Module, average: Ema | None) -> contextlib.AbstractContextManager[Any]:
    """Inside, the model has the averaged weights, if there are any."""
    return contextlib.nullcontext() if average is None else average.applied(model)


def score(panel: Panel, dates: npt.NDArray[np.int64], checkpoint: Path, params: RankerParams) -> pa.Table:
    """A checkpoint's scores on given dates: the columns of `score_table`, for every asset with a whole window."""
    from memfit.training import find_device, load_checkpoint

    model = _new_model(params, len(panel.feature_names))
    model.load_state_dict(load_checkpoint(checkpoint)["model"])
    return score_table(
        model.to(find_device(params.train.device)).eval(), panel, lists_to_score(panel, dates, params), params
    )


def loader(context: Context, params: RankerParams, num_workers: int) -> ListBatches:
    """The batches that a fold trains on, made ahead by so many threads."""
    panel, train_dates, _ = finance.fold_of(context)
    fit_dates, _ = hold_out(train_dates, params.train.valid_share, max(params.data.labels))
    return ListBatches(panel, fit_dates, params, seed=context.seed, num_workers=num_workers)


def training_step(context: Context, params: RankerParams) -> Callable[[ListBatch], None]:
    """One step of a fold's training on a batch, without what a trainer does around it."""
    panel, train_dates, _ = finance.fold_of(context)
    model, optimizer = _model(context, panel, params, train_dates)
    return own.step_of(model, optimizer, _loss(params), params.train.max_grad_norm)


def _loss(params: RankerParams) -> RankerLoss:
    from memfit_workloads.ranker.loss import RankerLoss

    return RankerLoss(**params.train.loss.model_dump(), horizon_weights=params.horizon_weights)


def _new_model(params: RankerParams, num_features: int) -> torch.nn.Module:
    from memfit_workloads.ranker.model import scaled

    sizes = {"num_features": num_features, "lookback": params.data.lookback, "num_horizons": len(params.data.horizons)}
    return scaled(own.build(params.model, **sizes), num_features)


def _check(params: RankerParams) -> None:
    """Refuse data, folds and a network that cannot be trained."""
    check(params)
    data, rows, features = params.data, own.ROWS, num_features(params.data)
    inputs: dict[str, Any] = dict.fromkeys(INPUTS, ("int64", (rows,)))
    inputs["windows"] = "float32", (rows, data.lookback, features)
    own.try_out(params.model, lambda: _new_model(params, features), inputs, (rows, len(data.horizons)))


def _model(
    context: Context, panel: Panel, params: RankerParams, dates: npt.NDArray[np.int64]
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A new model, or one with the weights of the fold before where that was asked for, and its optimizer."""
    import torch

    from memfit.training import find_device, load_checkpoint, seed_everything

    seed_everything(context.seed)
    model: Any = _new_model(params, len(panel.feature_names)).to(find_device(params.train.device))
    model.scale.set(*map(torch.from_numpy, scale_of(panel, dates)))
    if context.previous is not None:
        model.load_state_dict(load_checkpoint(context.previous.path("latest"))["model"])
    settings = params.train
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
    )
    return model, optimizer


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
        *finance.stages(score, market, reads=("data", "model", "train"), check=check_judging),
    ),
)
