"""The trainer: epochs of steps, a checkpoint after each, then validation.

The order of an epoch is train, checkpoint, validate: what was trained is on disk before validation, often the hungrier
phase, begins. A resume restores weights, optimizer and random state as they stood at the end of the last saved epoch,
repeats that epoch's validation if there is one, and goes on. Validation leaves the random state untouched, so it does
not matter how often it ran: **bit-exact** on the same hardware with the same number of threads, wherever torch's own
operations are deterministic.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from memfit.errors import DataError, JobFailedError, StoppedError, UsageError
from memfit.rundir import mark_phase, record
from memfit.training._checkpoint import CheckpointFolder, CheckpointWarning
from memfit.training._process import StopSignals, preserved_rng, rng_state, seed_everything, set_rng_state
from memfit.training._result import Direction, EpochRecord, FitResult, best_epoch

Loss = Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor | float]]
Evaluate = Callable[[Any, Any], Mapping[str, float]]

_STEP_EVENT_SECONDS = 0.5
_RESERVED_NAMES = frozenset({"epoch", "num_epochs", "train_loss", "time", "job", "kind"})


class Batches(Protocol):
    """What can be trained on: sized, iterable once per epoch; its ``set_epoch(epoch)``, if any, is called first."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True)
class _Plan:
    train: Batches
    valid: Batches | None
    num_epochs: int
    evaluate: Evaluate
    best_metric: str
    direction: Direction

    def best_epoch(self, history: list[EpochRecord]) -> int | None:
        return best_epoch(history, self.best_metric, self.direction) if self.valid is not None else None


class Trainer:
    """Trains a model, and resumes bit-exact after a kill at any moment.

    Args:
        model: The model, on the device where it shall train. It is changed in place.
        loss: ``loss(model, batch) -> (sum, weight)``: the summed loss of a batch, and the weight (number of samples,
            tokens, lists) that it is the sum of. A step descends ``sum / weight``. It moves the batch to the device.
        optimizer: Made over the model's parameters; by default ``torch.optim.AdamW(model.parameters())``.
        checkpoint_dir: Where checkpoints are written and looked for; None saves nothing.
        seed: Seeds the global generators when a fit begins anew (dropout); a resume restores them instead. The model's
            first weights are drawn before: call ``seed_everything`` ahead of building it.
        max_grad_norm: Longer gradients are cut to this 2-norm; None leaves them.
        keep_epochs: How many of the newest epochs' checkpoints stay, beside the best.

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

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        loss: Loss,
        optimizer: torch.optim.Optimizer | None = None,
        checkpoint_dir: Path | None = None,
        seed: int = 0,
        max_grad_norm: float | None = None,
        keep_epochs: int = 2,
    ) -> None:
        if keep_epochs < 1 or (max_grad_norm is not None and not max_grad_norm > 0):
            raise UsageError(
                f"keep_epochs is {keep_epochs} and max_grad_norm is {max_grad_norm}.",
                rule="keep_epochs is at least 1, so that a resume has a checkpoint; max_grad_norm is above 0 or None.",
                remedy="pass for example keep_epochs=2, max_grad_norm=1.0",
            )
        self.model = model
        self.loss = loss
        self.optimizer = torch.optim.AdamW(model.parameters()) if optimizer is None else optimizer
        self.seed = seed
        self.max_grad_norm = max_grad_norm
        self._folder = None if checkpoint_dir is None else CheckpointFolder(Path(checkpoint_dir), keep_epochs)
        self._next_step_event = 0.0

    def fit(
        self,
        train: Batches,
        valid: Batches | None = None,
        *,
        num_epochs: int,
        evaluate: Evaluate | None = None,
        best_metric: str = "valid_loss",
        direction: Direction = "minimize",
    ) -> FitResult:
        """Train up to ``num_epochs`` epochs in all, going on from the newest whole checkpoint if there is one.

        On SIGTERM or SIGUSR1 the step under way is finished and the fit stops; the previous handlers are put back at
        the end. The model is left in evaluation mode with the weights of the *last* epoch. Those of the best one lie in
        ``best_model.pt``; chosen on the validation set, they look better there than they are.

        Args:
            train: The training batches.
            valid: The validation batches; None validates nothing.
            num_epochs: The epochs to reach, those before a resume included.
            evaluate: ``evaluate(model, valid) -> {name: value}``, called in evaluation mode without gradients; by
                default the mean loss as ``valid_loss``.
            best_metric: Which of these names decides what is best.
            direction: Whether less or more of it is better.

        Raises:
            StoppedError: After a signal; the same call goes on from the last whole epoch.
            JobFailedError: If a loss or gradient is not finite; the last checkpoint is from before it.
            DamagedError: If there are checkpoints and none is whole.
            UsageError: If the checkpoint was made with another model, optimizer, seed or amount of data.
        """
        plan = _Plan(train, valid, num_epochs, evaluate or self._mean_loss, best_metric, direction)
        _check(plan, evaluate)
        with StopSignals() as stop:
            identity = self._identity(plan)
            history = self._resume(identity, num_epochs)
            resumed_from = len(history) or None
            if not history:
                seed_everything(self.seed)
            while True:
                if history:
                    self._finish_epoch(plan, history)
                    if stop.noted:
                        raise self._stopped(stop.noted, epoch=len(history), step=0)
                if len(history) >= num_epochs:
                    break
                history.append(self._train_epoch(plan, len(history) + 1, stop))
                self._save(history, identity)
        self.model.eval()
        return FitResult(tuple(history), plan.best_epoch(history), num_epochs - (resumed_from or 0), resumed_from)

    def _train_epoch(self, plan: _Plan, epoch: int, stop: StopSignals) -> EpochRecord:
        mark_phase("train")
        self.model.train()
        set_epoch = getattr(plan.train, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        num_steps = len(plan.train)
        total = weight_total = 0.0
        step = 0
        for step, batch in enumerate(plan.train, start=1):
            loss_sum, weight = self._step(batch, f"epoch {epoch}, step {step} of {num_steps}")
            total += loss_sum
            weight_total += weight
            self._record_step(
                step=step, num_steps=num_steps, epoch=epoch, num_epochs=plan.num_epochs, loss=loss_sum / weight
            )
            if stop.noted and step < num_steps:
                raise self._stopped(stop.noted, epoch=epoch - 1, step=step)
        if step == 0:
            raise DataError(
                f"Epoch {epoch} gave no batch, and {num_steps} were announced.",
                rule="training data must be iterable once per epoch; a bare generator is used up after one.",
                remedy="pass a list, a DataLoader or another object whose iteration starts anew each time",
            )
        return EpochRecord(epoch, total / weight_total, step)

    def _step(self, batch: Any, where: str) -> tuple[float, float]:
        """One optimizer step; returns the batch's summed loss and weight as numbers."""
        loss_sum, weight = self.loss(self.model, batch)
        sum_value, weight_value = float(loss_sum.detach()), float(weight)
        if not (math.isfinite(sum_value) and math.isfinite(weight_value) and weight_value > 0):
            raise _not_finite(f"In {where} the loss is {sum_value} over a weight of {weight_value}.")
        self.optimizer.zero_grad(set_to_none=True)
        (loss_sum / weight).backward()  # type: ignore[no-untyped-call]
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not math.isfinite(norm):
            raise _not_finite(
                f"In {where} the gradient's norm is {float(norm)}; the loss is {sum_value / weight_value}."
            )
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
        self.optimizer.step()
        return sum_value, weight_value

    def _record_step(self, **fields: Any) -> None:
        now = time.monotonic()
        if now >= self._next_step_event:
            self._next_step_event = now + _STEP_EVENT_SECONDS
            record("step", **fields)

    def _save(self, history: list[EpochRecord], identity: dict[str, Any]) -> None:
        if self._folder is None:
            return
        mark_phase("checkpoint")
        state = {
            "memfit_checkpoint": 1,
            "epoch": len(history),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": rng_state(),
            "history": [asdict(entry) for entry in history],
            "identity": identity,
            "environment": _environment(),
        }
        path = self._folder.save(len(history), state)
        record("checkpoint", path=str(path), epoch=len(history), bytes=path.stat().st_size)

    def _finish_epoch(self, plan: _Plan, history: list[EpochRecord]) -> None:
        """Validate the newest epoch if that is still to be done, and mark and keep the best."""
        newest = history[-1]
        if plan.valid is not None and newest.metrics is None:
            newest = history[-1] = replace(newest, metrics=self._validate(plan))
        best_epoch = plan.best_epoch(history)
        if self._folder is not None:
            if best_epoch == newest.epoch:
                self._folder.mark_best()
            self._folder.prune(best_epoch)
        fields = {"epoch": newest.epoch, "num_epochs": plan.num_epochs, "train_loss": newest.train_loss}
        record("epoch", **fields, **(newest.metrics or {}))

    def _validate(self, plan: _Plan) -> dict[str, float]:
        mark_phase("validate")
        self.model.eval()
        with preserved_rng(), torch.no_grad():
            metrics = {name: float(value) for name, value in plan.evaluate(self.model, plan.valid).items()}
        if plan.best_metric not in metrics or _RESERVED_NAMES & metrics.keys():
            raise UsageError(
                f"Validation gave {sorted(metrics)}, and the best epoch is chosen by '{plan.best_metric}'.",
                rule=f"the chosen name is among the metrics; none is named {sorted(_RESERVED_NAMES)}.",
                remedy="pass best_metric=... with one of the names, or return it from evaluate",
            )
        return metrics

    def _mean_loss(self, model: torch.nn.Module, valid: Batches) -> dict[str, float]:
        total = weight_total = 0.0
        for batch in valid:
            loss_sum, weight = self.loss(model, batch)
            total += float(loss_sum)
            weight_total += float(weight)
        return {"valid_loss": total / weight_total if weight_total else math.nan}

    def _identity(self, plan: _Plan) -> dict[str, Any]:
        """What must not change between a checkpoint and its resume, read before anything is loaded."""
        identity: dict[str, Any] = {
            "seed": self.seed,
            "max_grad_norm": self.max_grad_norm,
            "steps per epoch": len(plan.train),
            "best": f"{plan.direction} {plan.best_metric}" if plan.valid is not None else "no validation",
            "optimizer": type(self.optimizer).__name__,
        }
        for index, group in enumerate(self.optimizer.state_dict()["param_groups"]):
            for name, value in group.items():
                value = len(value) if name == "params" else value
                if isinstance(value, int | float | str | bool | tuple | None):
                    identity[f"optimizer group {index}, {name}"] = value
        return identity

    def _resume(self, identity: dict[str, Any], num_epochs: int) -> list[EpochRecord]:
        """The history of the newest whole checkpoint, after its state was restored; empty when there is none."""
        taken = self._folder.newest() if self._folder is not None else None
        if taken is None:
            return []
        path, state = taken
        if state["epoch"] > num_epochs:
            raise UsageError(
                f"{path} has {state['epoch']} epochs behind it, and num_epochs is {num_epochs}.",
                rule="a fit goes on from its newest checkpoint; it cannot go back.",
                remedy=f"pass num_epochs={state['epoch']} or more, or another checkpoint_dir",
            )
        _check_identity(path, state["identity"], identity)
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise UsageError(
                f"{path} holds another model: {error}",
                rule="the names and shapes of all weights must be the checkpoint's.",
                remedy="build the model as it was, or pass another checkpoint_dir",
            ) from error
        self.optimizer.load_state_dict(state["optimizer"])
        set_rng_state(state["rng"])
        if state["environment"] != _environment():
            text = (
                f"{path} was made with {state['environment']}, this is {_environment()}: the resume is not bit-exact."
            )
            warnings.warn(text, CheckpointWarning, stacklevel=3)
        record("resume", path=str(path), epoch=state["epoch"])
        return [EpochRecord(**entry) for entry in state["history"]]

    def _stopped(self, signal_name: str, *, epoch: int, step: int) -> StoppedError:
        """The error for a stop ``step`` steps after the end of ``epoch`` (0: before the first epoch's end)."""
        record("stop", signal=signal_name, epoch=epoch, steps_to_repeat=step)
        where = f"after epoch {epoch}" if step == 0 else f"in epoch {epoch + 1}, after its step {step}"
        repeated = f"the {step} steps since will be repeated" if step else "nothing will be repeated"
        if self._folder is None:
            rule = "without checkpoint_dir nothing is saved: it will start over."
        elif epoch == 0:
            rule = f"a checkpoint is saved at the end of each epoch, and none has ended: {repeated}."
        else:
            rule = f"{self._folder.path} holds the end of epoch {epoch}: {repeated}."
        return StoppedError(f"Stopped by {signal_name} {where}.", rule=rule, remedy="run the same command again")


def _check(plan: _Plan, evaluate: Evaluate | None) -> None:
    if evaluate is not None and plan.valid is None:
        raise UsageError(
            "evaluate was given without validation batches.",
            rule="evaluate(model, valid) is called with them after each epoch.",
            remedy="pass valid=...",
        )
    if plan.num_epochs < 1 or len(plan.train) == 0 or plan.direction not in ("minimize", "maximize"):
        raise UsageError(
            f"num_epochs is {plan.num_epochs}, an epoch has {len(plan.train)} batches, direction is {plan.direction}.",
            rule="there is at least one epoch of at least one batch; direction is 'minimize' or 'maximize'.",
            remedy="check num_epochs, direction, and how the training data were filtered",
        )


def _check_identity(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = [
        f"{name}: {saved.get(name)} then, {now.get(name)} now"
        for name in sorted({*saved, *now})
        if saved.get(name) != now.get(name)
    ]
    if changed:
        raise UsageError(
            f"{path} was made otherwise. {'; '.join(changed)}.",
            rule="a resume goes on with what the checkpoint was made with; a change would mix two trainings.",
            remedy="set these back, or pass another checkpoint_dir to start over",
        )


def _environment() -> dict[str, Any]:
    return {"torch": str(torch.__version__), "num_threads": torch.get_num_threads()}


def _not_finite(what: str) -> JobFailedError:
    return JobFailedError(
        what,
        rule="a step is taken only on a finite loss over a weight above 0, with a finite gradient; the weights are as "
        "they were before it.",
        remedy="look for missing values in this batch, lower the learning rate, or set max_grad_norm",
    )
