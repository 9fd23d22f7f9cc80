"""The forecaster as stages: prepare, pre-train and train each fold, and evaluate them all.

Importing this module loads no torch, for the processes that only prepare a run. ``FORECASTER`` is what a config names
as ``target: memfit_workloads.forecaster.stages:FORECASTER``.

The figures of a fold are those of the epoch that was best on dates kept apart from its training dates, taken on dates
that the fold neither trained on nor overlapped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memfit.pipeline import Context, Probe, Stage, Workload
from memfit.rundir import phase
from memfit_workloads import finance, folds, own
from memfit_workloads.finance import quantile_spread, rank_ic, read_scores, summarize
from memfit_workloads.finance.panels import DataParams, fingerprint
from memfit_workloads.forecaster.batches import DayBatch, DayBatches
from memfit_workloads.forecaster.data import largest_day, prepare, splitter
from memfit_workloads.forecaster.params import ForecasterParams

if TYPE_CHECKING:
    from memfit.training import FitResult
    from memfit_workloads.forecaster.loss import ForecastLoss

#: What a process with torch takes before it has a model.
_BASE_BYTES = 200 << 20
_YEAR = 252
Floats = npt.NDArray[np.float64]


def pretrain(context: Context, params: ForecasterParams) -> dict[str, float]:
    """Train the encoder of a fold to reconstruct hidden features on the fold's training dates.

    Returns:
        ``train_loss`` and ``valid_loss`` of the last epoch: mean squared errors of standardised features.
    """
    from memfit.training import checkpoint_path, find_device, seed_everything
    from memfit_workloads.forecaster.model import Masked, pretraining_loss

    phase("load")
    settings = params.train.model_copy(update=params.pretrain.model_dump())
    seed_everything(context.seed)
    model = Masked(_new_model(params)).to(find_device(settings.device))
    result = _fit(context, params, folds.Fold(context, params), model, pretraining_loss, settings=settings)
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
    fold = folds.Fold(context, params)
    model = _started_model(context, params)
    how: dict[str, Any] = {"best_metric": "valid_rank_ic", "direction": "maximize"}
    result = _fit(context, params, fold, model, _loss(params), judge=validation_figures, **how)
    phase("validate")
    epoch = result.best_epoch or len(result.history)  # without a figure in any epoch, the last
    best = checkpoint_path(context.dir / ("best" if result.best_epoch else "latest"))
    model.load_state_dict(load_checkpoint(best)["model"])
    scores = folds.score_table(model, fold.panel, params, _days(context, params, fold, fold.test_dates))
    context.save("scores", scores)
    context.save("model", best)
    found: dict[str, Any] = fold_figures(scores, params.data)
    found |= {"train_loss": result.history[-1].train_loss, "num_epochs": len(result.history), "best_epoch": epoch}
    return found | (result.history[epoch - 1].metrics or {})


def evaluate(context: Context, params: ForecasterParams) -> dict[str, Any]:
    """Judge the scores of all folds, each date by the model that did not see it.

    Returns:
        For each horizon ``h5_rank_ic`` and ``h5_ic``, with ``_se``, the standard error for labels that overlap, and
        ``_num_dates``; those of the main horizon also without a prefix; ``sharpe`` and ``sharpe_se``.
    """
    scores, data = (
        finance.join_scores({one.unit["fold"]: one.table("scores") for one in context.units("fold")}),
        params.data,
    )
    days, found, lines = daily_figures(scores, data), dict[str, Any](), []
    for horizon in data.horizons:
        said = []
        for name, label in (("rank_ic", "rank IC"), ("ic", "IC")):
            one = summarize(days[f"h{horizon}_{name}"], horizon=horizon)
            figures = {name: one.mean, f"{name}_se": one.standard_error, f"{name}_num_dates": one.num_dates}
            found |= {f"h{horizon}_{key}": value for key, value in figures.items()}
            found |= figures if horizon == data.main_horizon else {}
            said.append(f"{label} {one.mean:+.4f} ± {one.standard_error:.4f}")
        lines.append(f"h{horizon}: {', '.join(said)}, n {found[f'h{horizon}_rank_ic_num_dates']}")
    found["sharpe"], found["sharpe_se"] = finance.sharpe(days["spread"], periods_per_year=_YEAR)
    lines.append(f"Sharpe of the daily spread {found['sharpe']:+.2f} ± {found['sharpe_se']:.2f} a year, before costs")
    plain = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in found.items()}
    return plain | {"report": lines}


def information_coefficient(scores: Floats, targets: Floats) -> Floats:
    """Return Pearson's correlation of scores and targets on each date, (D,), over the assets that have both.

    NaN where fewer than 2 assets have both, or either does not differ.
    """
    known = np.isfinite(scores) & np.isfinite(targets)
    count = np.maximum(known.sum(1, keepdims=True), 1)
    score, target = (
        np.where(known, values - np.where(known, values, 0.0).sum(1, keepdims=True) / count, 0.0)
        for values in (scores, targets)
    )
    scale = np.sqrt((score**2).sum(1) * (target**2).sum(1))
    found: Floats = np.divide((score * target).sum(1), scale, out=np.full(len(scores), np.nan), where=scale > 1e-30)
    return found


def daily_figures(scores: pa.Table, data: DataParams) -> dict[str, Floats]:
    """Return, by date in ascending order, ``h5_rank_ic`` and ``h5_ic`` of each horizon, and ``spread``.

    The spread is the return over the next date of the best fifth of the assets less that of the worst fifth, by the
    scores of the main horizon.
    """
    read, found = read_scores(scores), {}
    for horizon in data.horizons:
        score, target = read.of(f"score_h{horizon}"), read.of(f"target_h{horizon}")
        found[f"h{horizon}_rank_ic"] = rank_ic(score, target)
        found[f"h{horizon}_ic"] = information_coefficient(score, target)
    found["spread"] = quantile_spread(read.of(f"score_h{data.main_horizon}"), read.of("target_h1"))
    return found


def validation_figures(scores: pa.Table, params: ForecasterParams) -> dict[str, float]:
    """Return what an epoch is judged by: ``valid_rank_ic`` decides; ``valid_ic`` beside it."""
    found = fold_figures(scores, params.data)
    return {f"valid_{name}": found[name] for name in ("rank_ic", "ic")}


def fold_figures(scores: pa.Table, data: DataParams) -> dict[str, float]:
    """Return the figures of a fold: of the main horizon without a prefix, then of each horizon.

    ``sharpe`` is that of the daily spread, annual, before costs.
    """
    days = daily_figures(scores, data)
    main = summarize(days[f"h{data.main_horizon}_rank_ic"])
    found = {"rank_ic": main.mean, "rank_ic_sd": main.sd, "icir": main.icir, "num_dates": main.num_dates}
    found["ic"] = summarize(days[f"h{data.main_horizon}_ic"]).mean
    found["sharpe"] = summarize(days["spread"]).icir * math.sqrt(_YEAR)
    return found | {name: summarize(values).mean for name, values in days.items() if name != "spread"}


def loader(context: Context, params: ForecasterParams, num_workers: int) -> DayBatches:
    """The batches that a fold trains on, made ahead by so many threads."""
    fold = folds.Fold(context, params)
    return _days(context, params, fold, fold.fit_dates, seed=context.seed, num_workers=num_workers)


def training_step(context: Context, params: ForecasterParams) -> Callable[[DayBatch], None]:
    """One step of a fold's training on a batch, without what a trainer does around it."""
    return folds.step_of(params, _started_model(context, params), _loss(params))


def least_memory(params: ForecasterParams) -> int:
    """The bytes that the training of a fold takes at least: torch, the network, and one forward and backward pass.

    Of a network of the user's own these are its weights, their gradients and AdamW's state alone.
    """
    import torch

    with torch.device("meta"):
        model = _new_model(params)
    states: int = 4 * sum(one.nbytes for one in model.parameters())
    if params.model.is_own:
        return _BASE_BYTES + states
    day, asked, rows = largest_day(params.data), params.train.microbatch_size, params.train.batch_size
    if asked is not None:
        rows = min(rows, day * (1 if asked == "auto" else asked))
    return _BASE_BYTES + states + int(model.kept_bytes(max(rows, day), day))


def _check(params: ForecasterParams) -> None:
    """Refuse settings and a network that cannot be trained."""
    data, rows, sizes = params.data, own.ROWS, folds.sizes_of(params.data)
    folds.check(params, splitter(params), lambda: max(1, params.train.batch_size // largest_day(data)))
    row = ("int64", (rows,))
    inputs: dict[str, Any] = {"windows": ("float32", (rows, data.lookback, sizes["num_features"])), "days": row}
    inputs |= {"neighbours": ("int64", (rows, params.graph.neighbours)), "sectors": row}
    own.try_out(params.model, lambda: _new_model(params), inputs, (rows, len(data.horizons)))


def _new_model(params: ForecasterParams) -> Any:
    return own.build(params.model, **folds.sizes_of(params.data))


def _started_model(context: Context, params: ForecasterParams) -> Any:
    """A new forecaster, with the weights of the encoder where there was a pre-training."""
    from memfit.training import find_device, load_checkpoint, seed_everything
    from memfit_workloads.forecaster.model import Masked

    seed_everything(context.seed)
    model = _new_model(params)
    if "pretrain" in context.needs:
        trained = load_checkpoint(context["pretrain"].path("latest"))["model"]
        Masked(model).load_state_dict(trained)  # its heads are the first ones of this seed, untrained
    return model.to(find_device(params.train.device))


def _days(context: Context, params: ForecasterParams, fold: folds.Fold, dates: Any, **options: Any) -> DayBatches:
    """The batches of some dates of a fold; without a seed in their order."""
    return DayBatches(context["prepare"], dates, params, fold.scale, **{"seed": None, **options})


def _fit(
    context: Context, params: ForecasterParams, fold: folds.Fold, model: Any, loss: Any, **options: Any
) -> FitResult:
    from memfit.training import ByGroup

    data = loader(context, params, params.train.num_workers), _days(context, params, fold, fold.valid_dates)
    return folds.fit(context, params, model, loss, data, split=ByGroup(lambda batch: batch.days), **options)


def _loss(params: ForecasterParams) -> ForecastLoss:
    from memfit_workloads.forecaster.loss import ForecastLoss

    return ForecastLoss(params.horizon_weights, params.train.rank_weight)


_TRAINED = ("data", "graph", "model", "train", "@seed")
_UNIT: dict[str, Any] = {"each": "fold in prepare.folds", "phases": ("load", "train", "checkpoint", "validate")}
FORECASTER = Workload(
    params=ForecasterParams,
    fingerprint=lambda params: {"prepare": fingerprint(params.data), "fold": params.model.fingerprint()},
    choose=lambda params: ("prepare", *(("pretrain",) if params.pretrain.num_epochs else ()), "fold", "evaluate"),
    check=_check,
    stages=(
        Stage("prepare", prepare, reads=("data", "splits", "graph"), phases=("load", "build", "graph")),
        Stage("pretrain", pretrain, needs=("prepare",), reads=(*_TRAINED, "pretrain"), **_UNIT),
        Stage(
            "fold",
            train_fold,
            needs=("prepare", "pretrain"),
            reads=_TRAINED,
            probe=Probe(loader, training_step, memory=least_memory),
            **_UNIT,
        ),
        Stage("evaluate", evaluate, needs=("prepare", "fold"), reads=("data",)),
    ),
)
