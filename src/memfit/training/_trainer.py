"""Train a model by epochs; out-of-memory and kills change no result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack

import torch
from pydantic import Field

from memfit.errors import UsageError
from memfit.rundir import record
from memfit.training._checks import (
    Checked,
    Recovery,
    bad_setting,
    check_parts,
    checked_arguments,
    take_off_wrapper,
)
from memfit.training._compute import PlacedLoss, Precision, place
from memfit.training._ema import Ema
from memfit.training._exactness import Loss
from memfit.training._feed import Batches
from memfit.training._fit import Fit
from memfit.training._records import Direction, EpochRecord, FitResult, SkipPolicy, StepOutcome
from memfit.training._sealed import SealedFolder
from memfit.training._setup import Evaluate, Plan, Setup
from memfit.training._split import Split
from memfit.training._step import SafeStep
from memfit.training._workers import FIRST_BATCH_SECONDS


class StepSettings(TypedDict, total=False):
    """The settings that a ``Trainer`` passes to its ``SafeStep``, which explains each."""

    microbatch_size: int | Literal["auto"] | None
    split: Split
    cost: Callable[[Any], int] | None
    max_grad_norm: float | None
    scaler: torch.amp.GradScaler | None
    backward: Callable[[torch.Tensor], object]
    allow_inexact: bool
    skip: SkipPolicy | None
    group: Literal["auto"] | None
    recovery: Recovery


class Trainer:
    """Trains a model, survives running out of memory, and resumes bit-exact after a kill at any moment.

    Args:
        model: The model. It is changed in place. One in ``DistributedDataParallel`` is trained by all ranks of its
            group: each is given the same data, whose batches are dealt out; rank 0 writes, prints and calls
            ``on_step`` and ``on_epoch``.
        loss: ``loss(model, batch) -> (sum, weight)``: the summed loss of a batch, and the weight (number of samples,
            tokens, lists) that it is the sum of. A step descends ``sum / weight``.
        optimizer: Made over the model's parameters; by default ``torch.optim.AdamW(model.parameters())``.
        device: ``"cuda"``, ``"cuda:1"``, ``"cpu"``, or ``"auto"``: the granted GPU, else the CPU. The model moves there
            now, each microbatch before the loss gets it. None leaves both where they are.
        precision: ``"bf16-mixed"`` and ``"fp16-mixed"`` run loss and evaluation under autocast; float16 also gets a
            ``GradScaler``. ``"auto"`` chooses by the device. None is ``"float32"``: no autocast.
        schedule: A schedule of the learning rate, stepped after each optimizer step that was not skipped.
        ema: An average of the weights, updated after each optimizer step.
        seed: Seeds the global generators when a fit begins anew, and the stream that data draw from. Call
            ``seed_everything`` before the model is built: its first weights are drawn there.
        global_batch_size: Samples of an optimizer step, a multiple of the loader's batch; None is one batch.
        checkpoint_dir: Where checkpoints are written and looked for; None saves nothing.
        checkpoint_seconds: Write a checkpoint within an epoch too when the last one is so old.
        keep_epochs: How many of the newest epochs' checkpoints stay, beside the best.
        milestones: Epochs whose checkpoints stay as well; with ``ema`` each also leaves ``ema_epoch_<n>.pt``, the model
            with the averaged weights.
        first_batch_seconds: Seconds that the workers of a ``DataLoader`` may do nothing before an epoch's first batch;
            then the fit fails with their stacks.
        on_step: ``on_step(outcome)``, called with the ``StepOutcome`` after each optimizer step.
        on_epoch: ``on_epoch(record)``, called with the ``EpochRecord`` after each epoch's checkpoint and validation;
            True ends the fit there. After a resume it is called again for the last whole epoch.
        provenance: Plain values that say where this training belongs, such as its run and fold; kept in every
            checkpoint and snapshot. A resume does not compare them.
        **step: Settings of the ``SafeStep``: ``microbatch_size``, ``split``, ``cost``, ``max_grad_norm``, ``scaler``,
            ``backward``, ``allow_inexact``, ``skip``, ``group``, ``recovery``.

    Example:
        >>> import torch
        >>> from memfit.training import Trainer, seed_everything
        >>> seed_everything(0)
        >>> def squared_error(model, batch):
        ...     x, y = batch
        ...     return ((model(x) - y) ** 2).sum(), len(x)
        >>> x = torch.linspace(-1, 1, 32)[:, None]
        >>> model = torch.nn.Linear(1, 1)
        >>> trainer = Trainer(model, loss=squared_error, optimizer=torch.optim.SGD(model.parameters(), lr=0.3))
        >>> result = trainer.fit([(x, 2 * x)], [(x, 2 * x)], num_epochs=40)
        >>> result.best_epoch, round(model.weight.item(), 2)
        (40, 2.0)
    """

    @checked_arguments
    def __init__(  # noqa: PLR0913 - one each for what is trained, in which steps, and what is kept
        self,
        model: torch.nn.Module,
        *,
        loss: Loss,
        optimizer: torch.optim.Optimizer | None = None,
        device: str | torch.device | None = None,
        precision: Precision | None = None,
        schedule: Checked[torch.optim.lr_scheduler.LRScheduler | None] = None,
        ema: Checked[Ema | None] = None,
        seed: Checked[Annotated[int, Field(ge=0, lt=1 << 32)]] = 0,
        global_batch_size: Checked[Annotated[int, Field(ge=1)] | None] = None,
        checkpoint_dir: Path | str | None = None,
        checkpoint_seconds: Checked[Annotated[float, Field(ge=0)]] = 600.0,
        keep_epochs: Checked[Annotated[int, Field(ge=1)]] = 2,
        milestones: Collection[int] = (),
        first_batch_seconds: Checked[Annotated[float, Field(gt=0)]] = FIRST_BATCH_SECONDS,
        on_step: Checked[Callable[[StepOutcome], object] | None] = None,
        on_epoch: Checked[Callable[[EpochRecord], bool | None] | None] = None,
        provenance: Mapping[str, Any] | None = None,
        **step: Unpack[StepSettings],
    ) -> None:
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise UsageError(
                "ReduceLROnPlateau cannot be the schedule.",
                rule="the schedule is stepped after each optimizer step, and this one wants a metric.",
                remedy="take one that depends on the number of steps alone, such as OneCycleLR or CosineAnnealingLR",
            )
        given: Any = model
        unwrapped = take_off_wrapper(model, step.get("group", "auto"), step.get("recovery", "repeat"))
        model, bare, is_sharded = unwrapped.model, unwrapped.model, unwrapped.is_sharded
        if optimizer is None and isinstance(bare, torch.nn.Module):
            optimizer = torch.optim.AdamW(model.parameters())
        check_parts(model, optimizer, loss, step.get("split"), is_sharded=is_sharded)
        if is_sharded and ema is not None:
            raise bad_setting("ema", ema, "it is None for a sharded model: its weights are on all ranks")
        assert optimizer is not None
        loss, chosen = place(model, optimizer, loss, device, precision)
        if chosen == "fp16-mixed" and step.get("scaler") is None:
            step["scaler"] = torch.amp.GradScaler(next(model.parameters()).device.type)
        scaler = step.get("scaler")
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.step = SafeStep(given, optimizer, loss, **step)
        self.identity = {  # read now: some schedules change what they are made of
            "seed": seed,
            "max_grad_norm": step.get("max_grad_norm"),
            "precision": None if chosen == "float32" else chosen,
            "global_batch_size": global_batch_size,
            "scaler": None if scaler is None else type(scaler).__name__,
            "schedule": None if schedule is None else _describe(schedule),
            "average": ema is not None,
            "in shards": is_sharded,
        }
        self._setup = Setup(
            step=self.step,
            schedule=schedule,
            ema=ema,
            keeper=None if checkpoint_dir is None else SealedFolder(checkpoint_dir),
            keep_epochs=keep_epochs,
            milestones=frozenset(milestones),
            precision=chosen,
            seed=seed,
            global_batch_size=global_batch_size,
            checkpoint_seconds=checkpoint_seconds,
            first_batch_seconds=first_batch_seconds,
            on_step=on_step,
            on_epoch=on_epoch,
            provenance=dict(provenance or {}),
            identity=self.identity,
        )

    @checked_arguments
    def fit(  # noqa: PLR0913 - one each for the data, how long, and what is best
        self,
        train: Batches,
        valid: Batches | None = None,
        *,
        num_epochs: Checked[Annotated[int, Field(ge=1)]],
        evaluate: Checked[Evaluate | None] = None,
        best_metric: Checked[str] = "valid_loss",
        direction: Checked[Direction] = "minimize",
        patience: Checked[Annotated[int, Field(ge=1)] | None] = None,
        preflight: Checked[bool] = True,
    ) -> FitResult:
        """Train up to ``num_epochs`` epochs in all, going on from the newest whole checkpoint if there is one.

        SIGTERM, SIGUSR1 and, with a ``checkpoint_dir``, a first Ctrl-C stop the fit after the step under way, with a
        checkpoint. The model is left in evaluation mode with the weights of the *last* epoch; those of the best one lie
        in the folder that ``best`` names.

        Args:
            train: The training batches.
            valid: The validation batches; None validates nothing.
            num_epochs: The epochs to reach, those before a resume included.
            evaluate: ``evaluate(model, valid) -> {name: value}``, called in evaluation mode without gradients; by
                default the mean loss as ``valid_loss``.
            best_metric: Which of these names decides what is best.
            direction: Whether less or more of it is better.
            patience: Stop after so many epochs in a row without a better ``best_metric``; None never does.
            preflight: Before the first step, try the largest batches, the optimizer's memory and a checkpoint.

        Raises:
            StoppedError: After a signal; the same call goes on where it was. Uncaught, the script's status is 75.
            SampleTooLargeError: If a single sample does not fit.
            DoesNotFitError: If the optimizer's memory, or the checkpoints on their disk, do not fit.
            JobFailedError: If a loss or gradient is not finite, validation or saving went out of memory twice, the
                disk refuses a checkpoint, or a worker of a ``DataLoader`` is stuck or has died.
            DamagedError: If there are checkpoints and none is whole.
            UsageError: If the checkpoint is of another training, or validation does not give ``best_metric``.
        """
        plan = Plan(train, valid, num_epochs, evaluate, best_metric, direction, patience, preflight)
        record(
            "trainer",
            optimizer=_describe(self.optimizer),
            schedule=self.identity["schedule"],
            precision=self._setup.precision,
            device=str(next(self.model.parameters()).device),
            num_parameters=sum(one.numel() for one in self.model.parameters() if one.requires_grad),
            loss=_describe_loss(self.step.loss),
            num_threads=torch.get_num_threads(),
            num_workers=getattr(plan.train, "num_workers", None),
        )
        return Fit(self._setup, plan).run()


#: What a schedule counts in, beside its constants.
_COUNTERS = frozenset({"last_epoch", "verbose"})


def _describe(part: torch.optim.lr_scheduler.LRScheduler | torch.optim.Optimizer) -> str:
    """Return a schedule or an optimizer with its constants, those of its first group of parameters."""
    if isinstance(part, torch.optim.Optimizer):
        settings = {name: value for name, value in part.param_groups[0].items() if value is not False}
    else:
        settings = {name: value for name, value in vars(part).items() if name[0] != "_" and name not in _COUNTERS}
    plain = {name: value for name, value in sorted(settings.items()) if _is_plain(value)}
    return f"{type(part).__name__}({', '.join(f'{name}={value}' for name, value in plain.items())})"


def _describe_loss(loss: Loss) -> str:
    """Return the user's loss: a dataclass with its constants, else the name of the function or class."""
    own = loss.loss if isinstance(loss, PlacedLoss) else loss
    if dataclasses.is_dataclass(own):
        return repr(own)
    return getattr(getattr(own, "func", own), "__qualname__", type(own).__name__)


def _is_plain(value: Any) -> bool:
    return all(isinstance(one, int | float | str) for one in (value if isinstance(value, list | tuple) else [value]))
