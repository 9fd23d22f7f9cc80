"""What the ranker and the forecaster do alike: settings of a training, the dates of a fold, optimizer and trainer.

Importing this module loads no torch, for the processes that only prepare a run.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
from pydantic import Field, model_validator

from memfit import config
from memfit.data import Panel
from memfit.errors import MissingExtraError
from memfit.pipeline import Context
from memfit_workloads import finance, own
from memfit_workloads.finance.batches import scores_of
from memfit_workloads.finance.panels import (
    Count,
    DataParams,
    Splitter,
    check_cycles,
    check_data,
    check_folds,
    hold_out,
    num_features,
    scale_of,
)

if TYPE_CHECKING:
    import torch

    from memfit.training import FitResult


class TrainSettings(config.Settings):
    """The training of a fold."""

    num_epochs: int = Field(4, ge=1, description="epochs")
    optimizer: Literal["adamw", "adabelief"] = "adamw"
    schedule: Literal["constant", "cosine", "warm_restarts"] = Field("cosine", description="of the learning rate")
    learning_rate: float = Field(1e-3, gt=0, description="highest learning rate")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay")
    floor_share: float = Field(0.05, ge=0, lt=1, description="what a cosine ends at, of the learning rate")
    cycles: int = Field(2, ge=1, description="warm_restarts: cycles, each twice as long as the one before")
    warmup_share: float = Field(0.1, ge=0, lt=1, description="share of all steps in which the learning rate grows")
    max_grad_norm: float = Field(1.0, gt=0, description="longer gradients are cut to this norm")
    precision: Literal["auto", "float32", "bf16-mixed", "fp16-mixed"] = Field("auto", description="auto: by the device")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto: the granted GPU, else the CPU")
    microbatch_size: Count | Literal["auto"] | None = Field(
        None, description="days of a forward pass; null: all of a batch; auto: as many as fit"
    )
    num_workers: int = Field(0, ge=0, description="threads that read days ahead")
    valid_share: float = Field(0.15, ge=0, lt=1, description="the last of the training dates, kept for validation")

    @model_validator(mode="after")
    def _cycles_fit_the_schedule(self) -> TrainSettings:
        if self.cycles != TrainSettings.model_fields["cycles"].default and self.schedule != "warm_restarts":
            raise ValueError(f"cycles belongs to schedule: warm_restarts, and schedule is {self.schedule}")
        return self


class Fold:
    """The panel, and the dates of a fold that are fitted, that say when to stop, and that test it."""

    def __init__(self, context: Context, params: Any) -> None:
        self.panel, train_dates, self.test_dates = finance.fold_of(context)
        reach = max(params.data.labels)
        self.fit_dates, self.valid_dates = hold_out(train_dates, params.train.valid_share, reach)
        self.scale = scale_of(self.panel, self.fit_dates)


def check(params: Any, cut: Splitter, dates_at_once: Callable[[], int]) -> None:
    """Refuse data, folds, an optimizer or a schedule that cannot be trained with."""
    data, train = params.data, params.train
    check_data(data)
    num_days = check_folds(data, cut, train.valid_share)
    if train.schedule == "warm_restarts":
        more = "train for more steps: --set params.train.num_epochs=..., or smaller batches"
        num_steps = -(-num_days // dates_at_once()) * train.num_epochs
        check_cycles(train.cycles, num_steps, train.warmup_share, setting="--set params.train.cycles", more=more)
    if train.optimizer == "adabelief" and importlib.util.find_spec("pytorch_optimizer") is None:
        raise MissingExtraError.of("pytorch_optimizer", "forecaster", "the optimizer adabelief", "memfit-systems")


def sizes_of(data: DataParams) -> dict[str, Any]:
    """Return what a network's constructor may name."""
    return {"num_features": num_features(data), "lookback": data.lookback, "num_horizons": len(data.horizons)}


def make_optimizer(settings: TrainSettings, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer: ``adamw`` is torch's own, ``adabelief`` that of pytorch_optimizer.

    ``adabelief`` has eps 1e-16, decoupled weight decay and rectification.

    Source: J. Zhuang et al., AdaBelief Optimizer: Adapting Stepsizes by the Belief in Observed Gradients, NeurIPS 2020.
    """
    import torch

    given: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), **given, fused=True)
    from pytorch_optimizer import AdaBelief  # it takes seconds to import

    made: torch.optim.Optimizer = AdaBelief(
        model.parameters(), **given, betas=(0.9, 0.999), weight_decouple=True, rectify=True, eps=1e-16
    )
    return made


def fit(context: Context, params: Any, model: torch.nn.Module, loss: Any, data: Any, **more: Any) -> FitResult:
    """Train a fold's model on the first batches of ``data``, and validate it on the second.

    Checkpoints lie in the job's folder.

    ``more`` are arguments of a fit, and of its trainer ``split``, ``ema`` and ``milestones``; ``settings`` take the
    place of ``params.train``. ``judge`` gives the figures of an epoch from its scores; it validates by the loss alone
    without one.
    """
    from memfit.training import Trainer
    from memfit_workloads.finance.schedules import make_schedule

    settings: TrainSettings = more.pop("settings", params.train)
    of_trainer = {name: more.pop(name) for name in ("split", "ema", "milestones") if name in more}
    if judge := more.pop("judge", None):
        panel = data[0].panel
        more["evaluate"] = lambda model, batches: judge(score_table(model, panel, params, batches), params)
    optimizer = make_optimizer(settings, model)
    with contextlib.closing(data[0]):
        schedule = make_schedule(
            settings.schedule,
            optimizer,
            settings.num_epochs * len(data[0]),
            floor_share=settings.floor_share,
            cycles=settings.cycles,
            warmup_share=settings.warmup_share,
        )
        trainer = Trainer(
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
            **of_trainer,
        )
        return trainer.fit(*data, num_epochs=settings.num_epochs, **more)


def answer(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Return what a network says of a batch, (rows, horizons): it gets what it names of ``batch.INPUTS``."""
    import torch

    device = next(model.parameters()).device

    def find(name: str) -> Any:
        return batch if name == "batch" else torch.as_tensor(getattr(batch, name)).to(device)

    return own.call(model, batch.INPUTS, find)


def score_table(model: torch.nn.Module, panel: Panel, params: Any, batches: Iterable[Any]) -> pa.Table:
    """The scores of a model, as `scores_of` gives them."""

    def rows(batch: Any) -> tuple[Any, Any, torch.Tensor]:
        return batch.dates, batch.assets, answer(model, batch)

    return scores_of(model.eval(), panel, params.data, batches, rows=rows, precision=params.train.precision)


def step_of(params: Any, model: torch.nn.Module, loss: Any) -> Callable[[Any], None]:
    """Return one training step on a batch, without what a trainer does around it."""
    return own.step_of(model, make_optimizer(params.train, model), loss, params.train.max_grad_norm)
