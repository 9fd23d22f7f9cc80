"""The forecaster as stages: prepare, pre-train and train each fold, and evaluate them all.

Importing this module loads no torch, for the processes that only prepare a run. ``FORECASTER`` is what a config names
as ``target: memfit_workloads.forecaster.stages:FORECASTER``.

The figures of a fold are those of the epoch that was best on dates kept apart from its training dates, taken on dates
that the fold neither trained on nor overlapped.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memfit.pipeline import Context, Probe, Stage, Workload
from memfit.rundir import phase
from memfit_workloads import finance, own
from memfit_workloads.finance.batches import scores_of
from memfit_workloads.finance.panels import fingerprint, hold_out, num_features, scale_of
from memfit_workloads.forecaster.batches import DayBatch, DayBatches
from memfit_workloads.forecaster.data import check, largest_day, prepare
from memfit_workloads.forecaster.params import ForecasterParams
from memfit_workloads.forecaster.scoring import evaluate, fold_figures, validation_figures

if TYPE_CHECKING:
    import torch

    from memfit.training import Trainer
    from memfit_workloads.forecaster.loss import ForecastLoss

#: What a process with torch takes before it has a model.
_BASE_BYTES = 200 << 20


class Fold:
    """The batches of a fold, which share one scale of the features: that of the dates that are fitted."""

    def __init__(self, context: Context, params: ForecasterParams) -> None:
        panel, train_dates, self.test_dates = finance.fold_of(context)
        reach = max(params.data.labels)
        self.fit_dates, self.valid_dates = hold_out(train_dates, params.train.valid_share, reach)
        self.panel, self._seed = panel, context.seed
        scale = scale_of(panel, self.fit_dates)
        self._batches = functools.partial(DayBatches, context["prepare"], params=params, scale=scale)

    def fitted(self, num_workers: int) -> DayBatches:
        """Return the training batches."""
        return self._batches(self.fit_dates, seed=self._seed, num_workers=num_workers)

    def in_order(self, dates: npt.NDArray[np.int64]) -> DayBatches:
        """Return the days of some dates as they follow each other."""
        return self._batches(dates, seed=None)


def pretrain(context: Context, params: ForecasterParams) -> dict[str, float]:
    """Train the encoder of a fold to reconstruct hidden features on the fold's training dates.

    Returns:
        ``train_loss`` and ``valid_loss`` of the last epoch: mean squared errors of standardised features.
    """
    from memfit.training import checkpoint_path, seed_everything
    from memfit_workloads.forecaster.model import Masked, pretraining_loss

    phase("load")
    fold, settings = Fold(context, params), params.pretrain
    seed_everything(context.seed)
    model = Masked(_new_model(params, num_features(params.data))).to(_device(params))
    loss = functools.partial(pretraining_loss, seed=context.seed, share=settings.hidden_share)
    with contextlib.closing(fold.fitted(params.train.num_workers)) as batches:
        num_steps = settings.num_epochs * len(batches)
        trainer = _trainer(context, params, model, loss, settings.learning_rate, num_steps)
        result = trainer.fit(batches, fold.in_order(fold.valid_dates), num_epochs=settings.num_epochs)
    last = result.history[-1]
    context.save("latest", checkpoint_path(context.dir / "latest"))
    return {"train_loss": last.train_loss, "valid_loss": (last.metrics or {})["valid_loss"]}


def train_fold(context: Context, params: ForecasterParams) -> dict[str, float]:
    """Train one fold, score its test dates with the best epoch's weights, and save the scores as a table.

    Returns:
        ``rank_ic`` (of the main horizon, mean over the test dates), ``rank_ic_sd``, ``icir``, ``num_dates``, ``ic``,
        ``sharpe``; ``h5_rank_ic`` and ``h5_ic`` of each horizon; ``train_loss`` of the last epoch; ``num_epochs`` that
        were trained, ``best_epoch``, and its ``valid_rank_ic`` and ``valid_ic``.
    """
    from memfit.training import checkpoint_path, load_checkpoint

    phase("load")
    fold = Fold(context, params)
    model = _started_model(context, params, fold)
    with contextlib.closing(fold.fitted(params.train.num_workers)) as batches:
        num_steps = params.train.num_epochs * len(batches)
        trainer = _trainer(context, params, model, _loss(params), params.train.learning_rate, num_steps)
        result = trainer.fit(
            batches,
            fold.in_order(fold.valid_dates),
            num_epochs=params.train.num_epochs,
            evaluate=lambda model, days: validation_figures(_scores(model, days, fold, params), params.data),
            best_metric="valid_rank_ic",
            direction="maximize",
        )
    phase("validate")
    epoch = result.best_epoch or len(result.history)  # without a figure in any epoch, the last
    best = checkpoint_path(context.dir / ("best" if result.best_epoch else "latest"))
    model.load_state_dict(load_checkpoint(best)["model"])
    scores = _scores(model, fold.in_order(fold.test_dates), fold, params)
    context.save("scores", scores)
    context.save("model", best)
    found: dict[str, Any] = fold_figures(scores, params.data)
    found |= {"train_loss": result.history[-1].train_loss, "num_epochs": len(result.history), "best_epoch": epoch}
    return found | (result.history[epoch - 1].metrics or {})


def loader(context: Context, params: ForecasterParams, num_workers: int) -> DayBatches:
    """The batches that a fold trains on, made ahead by so many threads."""
    return Fold(context, params).fitted(num_workers)


def training_step(context: Context, params: ForecasterParams) -> Callable[[DayBatch], None]:
    """One step of a fold's training on a batch, without what a trainer does around it."""
    from memfit_workloads.forecaster.optim import make_optimizer

    settings, model = params.train, _started_model(context, params, Fold(context, params))
    optimizer = make_optimizer(settings.optimizer, model.parameters(), settings.learning_rate, settings.weight_decay)
    return own.step_of(model, optimizer, _loss(params), settings.max_grad_norm)


def least_memory(params: ForecasterParams) -> int:
    """The bytes that the training of a fold takes at least: torch, the network, and one forward and backward pass.

    Of a network of the user's own these are its weights, their gradients and AdamW's state.
    """
    import torch

    from memfit_workloads.forecaster.model import memory_bytes

    sizes = _sizes(params, num_features(params.data))
    if params.model.is_own:
        with torch.device("meta"):
            model = own.build(params.model, **sizes)
        return _BASE_BYTES + 4 * 4 * sum(one.numel() for one in model.parameters())
    day, asked, rows = largest_day(params.data), params.train.microbatch_size, params.train.batch_size
    if asked is not None:
        rows = min(rows, day * (1 if asked == "auto" else asked))
    return _BASE_BYTES + memory_bytes(max(rows, day), day, **sizes, **params.model.arguments)


def _sizes(params: ForecasterParams, features: int) -> dict[str, Any]:
    return {"num_features": features, "lookback": params.data.lookback, "num_horizons": len(params.data.horizons)}


def _new_model(params: ForecasterParams, features: int) -> Any:
    return own.build(params.model, **_sizes(params, features))


def _check(params: ForecasterParams) -> None:
    """Refuse settings and a network that cannot be trained."""
    check(params)
    data, rows, features = params.data, own.ROWS, num_features(params.data)
    windows, row = (rows, data.lookback, features), ("int64", (rows,))
    inputs: dict[str, Any] = {"windows": ("float32", windows), "known": ("bool", windows)}
    inputs |= {"days": row, "neighbours": ("int64", (rows, params.graph.neighbours)), "sectors": row}
    own.try_out(params.model, lambda: _new_model(params, features), inputs, (rows, len(data.horizons)))


def _started_model(context: Context, params: ForecasterParams, fold: Fold) -> Any:
    """A new forecaster, with the weights of the encoder where there was a pre-training."""
    from memfit.training import load_checkpoint, seed_everything
    from memfit_workloads.forecaster.model import Masked

    seed_everything(context.seed)
    model = _new_model(params, len(fold.panel.feature_names))
    if "pretrain" in context.needs:
        trained = load_checkpoint(context["pretrain"].path("latest"))["model"]
        Masked(model).load_state_dict(trained)  # its heads are the first ones of this seed, untrained
    return model.to(_device(params))


def _device(params: ForecasterParams) -> torch.device:
    from memfit.training import find_device

    return find_device(params.train.device)


def _loss(params: ForecasterParams) -> ForecastLoss:
    from memfit_workloads.forecaster.loss import ForecastLoss

    settings = params.train
    return ForecastLoss(params.horizon_weights, settings.rank_weight, settings.rank_temperature)


def _trainer(
    context: Context, params: ForecasterParams, model: torch.nn.Module, loss: Any, learning_rate: float, num_steps: int
) -> Trainer:
    from memfit.training import ByGroup, Trainer
    from memfit_workloads.finance.schedules import make_schedule
    from memfit_workloads.forecaster.optim import make_optimizer

    settings = params.train
    optimizer = make_optimizer(settings.optimizer, model.parameters(), learning_rate, settings.weight_decay)
    schedule = make_schedule(
        settings.schedule,
        optimizer,
        num_steps,
        floor_share=settings.floor_share,
        cycles=settings.cycles,
        warmup_share=settings.warmup_share,
    )
    return Trainer(
        model,
        loss=loss,
        optimizer=optimizer,
        precision=settings.precision,
        schedule=schedule,
        checkpoint_dir=context.dir,
        seed=context.seed,
        max_grad_norm=settings.max_grad_norm,
        microbatch_size=settings.microbatch_size,
        provenance=finance.provenance(context, params),
        split=ByGroup(lambda batch: batch.days),
    )


def _scores(model: torch.nn.Module, days: Iterable[DayBatch], fold: Fold, params: ForecasterParams) -> pa.Table:
    """The scores of some days, as `table_of` gives them."""

    from memfit_workloads.forecaster.model import answer

    def rows(batch: DayBatch) -> tuple[Any, Any, torch.Tensor]:
        return batch.dates, batch.assets, answer(model, batch)

    return scores_of(model.eval(), fold.panel, params.data, days, rows=rows, precision=params.train.precision)


def _chosen(params: ForecasterParams) -> tuple[str, ...]:
    return ("prepare", *(("pretrain",) if params.pretrain.num_epochs else ()), "fold", "evaluate")


_TRAINED = ("data", "graph", "model", "train", "@seed")
FORECASTER = Workload(
    params=ForecasterParams,
    fingerprint=lambda params: {"prepare": fingerprint(params.data), "fold": params.model.fingerprint()},
    choose=_chosen,
    check=_check,
    stages=(
        Stage("prepare", prepare, reads=("data", "splits", "graph"), phases=("load", "build", "graph")),
        Stage(
            "pretrain",
            pretrain,
            needs=("prepare",),
            each="fold in prepare.folds",
            reads=(*_TRAINED, "pretrain"),
            phases=("load", "train", "checkpoint", "validate"),
        ),
        Stage(
            "fold",
            train_fold,
            needs=("prepare", "pretrain"),
            each="fold in prepare.folds",
            reads=_TRAINED,
            phases=("load", "train", "checkpoint", "validate"),
            probe=Probe(loader, training_step, memory=least_memory),
        ),
        Stage("evaluate", evaluate, needs=("prepare", "fold"), reads=("data",)),
    ),
)
