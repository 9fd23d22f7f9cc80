"""One fit under way: epochs of steps, checkpoints at their ends and in between, validation, and the way back.

The order of an epoch is train, checkpoint, validate: what was trained is on disk before validation, often the hungrier
phase, begins. A resume restores weights, optimizer, schedule, averages and random state as a checkpoint has them, takes
the epoch's data up at its next batch, and goes on. Validation begins at its first batch and leaves the random state and
the data's generators untouched, so it does not matter how often it ran: **bit-exact** on the same hardware with the
same number of threads, wherever torch's own operations are deterministic.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from memfit.errors import DataError, HalfUpdatedError, MemfitError, StoppedError, UsageError
from memfit.memory import Budget
from memfit.rundir import mark_phase, record
from memfit.training._checkpoint import CheckpointFolder, position_of, tensor_bytes
from memfit.training._checks import STRICT
from memfit.training._compute import Precision, autocast
from memfit.training._ema import Ema
from memfit.training._exactness import Exactness
from memfit.training._keyed import TrainingData, preserved_generators, refuse_own_generators
from memfit.training._leaks import LeakDetector
from memfit.training._oom import classify_oom, release
from memfit.training._preflight import find_longest, preflight
from memfit.training._process import StopSignals, preserved_rng, say, seed_everything
from memfit.training._records import Direction, EpochRecord, FitResult, StepOutcome, best_epoch
from memfit.training._state import Progress, capture, optimizer_identity, restore
from memfit.training._step import SafeStep
from memfit.training._validation import MeanLoss, Recovery, evaluated

_STEP_EVENT_SECONDS = 0.5
_MAX_ROLLBACKS = 3
_RESERVED_NAMES = frozenset({"epoch", "num_epochs", "train_loss", "time", "job", "kind"})


@dataclass(frozen=True, config=STRICT)
class Setup:
    """What a ``Trainer`` was made with."""

    model: torch.nn.Module
    loss: Callable[..., Any]
    precision: Precision
    optimizer: torch.optim.Optimizer
    step: SafeStep
    folder: CheckpointFolder | None
    seed: Annotated[int, Field(ge=0, lt=1 << 32)]
    global_batch_size: Annotated[int, Field(ge=1)] | None
    schedule: torch.optim.lr_scheduler.LRScheduler | None
    ema: Ema | None
    on_step: Callable[[StepOutcome], object] | None
    on_epoch: Callable[[EpochRecord], bool | None] | None
    checkpoint_seconds: Annotated[float, Field(ge=0)]
    first_batch_seconds: Annotated[float, Field(gt=0)]
    allow_inexact: bool
    provenance: Mapping[str, Any]
    identity: Mapping[str, Any]


@dataclass(frozen=True, config=STRICT)
class Plan:
    """What ``Trainer.fit`` was called with."""

    train: Any
    valid: Any
    num_epochs: Annotated[int, Field(ge=1)]
    evaluate: Callable[..., Any] | None
    best_metric: str
    direction: Direction
    patience: Annotated[int, Field(ge=1)] | None
    preflight: bool


class Fit:
    """One call of ``Trainer.fit``."""

    def __init__(self, setup: Setup, plan: Plan, stop: StopSignals) -> None:
        self.setup = setup
        self.plan = plan
        self.stop = stop
        self.data = TrainingData(plan.train, setup.seed, setup.first_batch_seconds)
        if setup.folder is not None and not setup.allow_inexact:
            self.data.check_replayable()
            refuse_own_generators(plan.valid)
        self.batches_per_step = _batches_per_step(self.data, setup)
        self.num_steps = math.ceil(len(plan.train) / self.batches_per_step)
        self.progress = Progress()
        self.recovery = Recovery(setup.model, setup.optimizer, self._where)
        exactness = Exactness(setup.model, setup.loss, setup.step.split, setup.allow_inexact)
        self.mean_loss = MeanLoss(
            setup.loss, setup.step.split, exactness, self.recovery, self._leave_validation, setup.first_batch_seconds
        )
        self.evaluate = plan.evaluate or self.mean_loss
        self.identity = self._identity()
        self._leaks = LeakDetector()
        self._rollbacks: Counter[tuple[int, int]] = Counter()
        self._data_state: Mapping[str, Any] | None = None
        self._is_open = self._has_room = False
        self._next_step_event = self._next_save = 0.0

    def run(self) -> FitResult:
        """From the newest whole checkpoint, or the start, to the last epoch's end."""
        folder = self.setup.folder
        with nullcontext() if folder is None else folder.held():
            return self._run()

    def _run(self) -> FitResult:
        try:
            resumed_from = self._begin()
            while True:
                try:
                    self._advance()
                    break
                except HalfUpdatedError as error:
                    half = error
                self._go_back(half)
        except RuntimeError as error:  # wherever it struck: torch raises a worker's death from a signal handler
            if (death := self.data.workers.explain(error)) is None:
                raise
            raise death from error
        finally:
            self.data.close(persistent_too=True)
        self.setup.model.eval()
        history = tuple(self.progress.history)
        epochs_run = len(history) - (resumed_from or 0)
        return FitResult(history, self._best_epoch(), epochs_run, resumed_from, len(history) < self.plan.num_epochs)

    # --- the way to the first step, and back to a checkpoint

    def _begin(self) -> int | None:
        """Resume or start anew; returns the whole epochs behind it after a resume."""
        setup, folder = self.setup, self.setup.folder
        if setup.ema is not None:
            setup.ema.prepare(setup.model)
        taken = folder.newest() if folder is not None else None
        if taken is None:
            seed_everything(setup.seed)
        else:
            self._restore(*taken)
        done = len(self.progress.history)
        if setup.ema is not None and folder is not None:
            setup.ema.report_missing(folder.path, done=done, num_epochs=self.plan.num_epochs)
        if done < self.plan.num_epochs and not self._is_early():
            self._prepare(save=self._save if taken is None and folder is not None else None)
        return None if taken is None else done

    def _restore(self, path: Path, state: dict[str, Any]) -> None:
        if position_of(state) > (self.plan.num_epochs, 0):
            raise UsageError(
                f"{path} has {state['epoch']} epochs behind it, and num_epochs is {self.plan.num_epochs}.",
                rule="a fit goes on from its newest checkpoint; it cannot go back.",
                remedy=f"pass num_epochs={state['epoch'] + bool(state['step'])} or more, or another checkpoint_dir",
            )
        self.progress = restore(path, state, self._parts(), self.identity)
        self._data_state = state["data"]
        epoch, step = self.progress.position
        self._next_save = time.monotonic() + self.setup.checkpoint_seconds
        record("resume", path=str(path), epoch=epoch, step=step)
        where = f"in epoch {epoch + 1} after its step {step}" if step else f"after epoch {epoch}"
        say(f"goes on {where}, of {self.plan.num_epochs} epochs ({path})")

    def _prepare(self, save: Callable[[], Path] | None) -> None:
        """Allocate what the first step would, and try the largest of each phase."""
        setup, plan, epoch = self.setup, self.plan, self.progress.epoch
        if not plan.preflight:
            setup.step.prepare()
            if save is not None:
                save()
            return
        self.data.set_epoch(epoch)
        longest = find_longest(plan.train, setup.first_batch_seconds)
        longest_valid = self._longest_validation()
        validate = None if longest_valid is None else lambda: self._try_validation(longest_valid)
        if self.progress.position[1] or not self.progress.history:  # else a validation is still to be done before
            self._open_epoch()
        preflight(setup.step, longest=longest, validate=validate, save=save, num_batches=self.batches_per_step)

    def _longest_validation(self) -> Any:
        """The largest batch of validation; None without one, or where validation takes something else than batches."""
        valid = self.plan.valid
        if valid is None or isinstance(valid, Mapping) or hasattr(valid, "__array__"):
            return None
        try:
            return find_longest(valid, self.setup.first_batch_seconds).batch
        except (TypeError, UsageError):
            return None

    def _try_validation(self, batch: Any) -> None:
        """The loss of the largest validation batch; an ``evaluate`` of the user's sees whole validations only."""
        try:
            evaluated(self.mean_loss, self.setup.model, [batch])
        except Exception as error:  # batches that only evaluate understands
            if self.plan.evaluate is None or isinstance(error, MemfitError) or classify_oom(error) is not None:
                raise
            record("preflight_validation", reason=f"{type(error).__name__}: {error}".partition("\n")[0])

    def _go_back(self, error: HalfUpdatedError) -> None:
        """To the newest checkpoint, after an optimizer step that an out-of-memory left half-way."""
        folder, position = self.setup.folder, self.progress.position
        self._rollbacks[position] += 1
        self.data.close()
        self._is_open = False
        taken = folder.newest() if folder is not None and self._rollbacks[position] <= _MAX_ROLLBACKS else None
        if taken is None:
            raise error
        release(error)
        self._restore(*taken)
        record("rollback", from_epoch=position[0], from_step=position[1], error=error.what)

    def _parts(self) -> dict[str, Any]:
        setup = self.setup
        parts = {
            "model": setup.model,
            "optimizer": setup.optimizer,
            "schedule": setup.schedule,
            "ema": setup.ema,
            "sizes": setup.step,
            "validation": self.mean_loss,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def _identity(self) -> dict[str, Any]:
        """What must not change between a checkpoint and its resume, read before anything is loaded."""
        setup, plan = self.setup, self.plan
        return {
            "steps per epoch": self.num_steps,
            "best": f"{plan.direction} {plan.best_metric}" if plan.valid is not None else "no validation",
            **setup.identity,
            **self.data.identity(),
            **optimizer_identity(setup.optimizer, scheduled=setup.schedule is not None),
        }

    # --- epochs and steps

    def _advance(self) -> None:
        progress = self.progress
        is_done = False
        if progress.history and not progress.step:
            is_done = self._finish_epoch()  # of a resumed fit: its validation is still to be done
        while len(progress.history) < self.plan.num_epochs and not is_done:
            self._train_epoch()
            self._save()
            is_done = self._finish_epoch()
        if len(progress.history) < self.plan.num_epochs:
            self._tell_early()

    def _open_epoch(self) -> None:
        if self._is_open:
            return
        progress = self.progress
        reached = self.data.open(progress.epoch, progress.num_batches, self._data_state, lambda: self.stop.noted)
        self._data_state, self._is_open = None, True
        if not reached or self.stop.noted:
            raise self._stopped()

    def _train_epoch(self) -> None:
        progress = self.progress
        mark_phase("train")
        self.setup.model.train()
        self._open_epoch()
        while self._step():
            if progress.num_batches >= len(self.plan.train):
                continue
            if self.stop.noted:
                self._save()
                raise self._stopped()
            if time.monotonic() >= self._next_save and self.setup.folder is not None:
                self._save()
                mark_phase("train")
        self.data.close()
        self._is_open = False
        if progress.step == 0:
            raise DataError(
                f"Epoch {progress.epoch} gave no batch, and {len(self.plan.train)} were announced.",
                rule="training data must be iterable once per epoch; a bare generator is used up after one.",
                remedy="pass a list, a DataLoader or another object whose iteration starts anew each time",
            )
        progress.end_epoch()

    def _step(self) -> bool:
        """The next optimizer step; False at the epoch's end."""
        batches = list(itertools.islice(self.data, self.batches_per_step))
        if not batches:
            return False
        setup, progress = self.setup, self.progress
        setup.step.where = {"epoch": progress.epoch, "step": progress.step + 1, "num_steps": self.num_steps}
        outcome = setup.step(*batches)
        if not outcome.skipped:
            if setup.schedule is not None:
                setup.schedule.step()
            if setup.ema is not None:
                setup.ema.update(setup.model)
        progress.step += 1
        progress.num_batches += len(batches)
        progress.num_skipped += outcome.skipped
        if not outcome.skipped:  # by the policy, or by the scaler, whose loss did not come to the weights
            progress.loss_sum += outcome.loss_sum
            progress.weight += outcome.weight
        now = time.monotonic()
        if now >= self._next_step_event:
            self._next_step_event = now + _STEP_EVENT_SECONDS
            fields = {**setup.step.where, "num_epochs": self.plan.num_epochs}
            record("step", **fields, loss=outcome.loss if outcome.weight else None)
        if setup.on_step is not None:
            setup.on_step(outcome)
        return True

    def _where(self) -> dict[str, Any]:
        return {"epoch": self.progress.epoch, "step": self.progress.step}

    # --- checkpoints and validation

    def _save(self) -> Path:
        folder, progress = self.setup.folder, self.progress
        if folder is None:
            return Path()
        mark_phase("checkpoint")

        def save() -> Path:
            state = capture(self._parts(), progress, self.identity)
            state["data"] = self.data.state_dict()
            state["provenance"] = dict(self.setup.provenance)
            if not self._has_room:
                folder.check_room(tensor_bytes(state) + self.setup.step.pending_bytes, self.plan.num_epochs)
                self._has_room = True
            with folder.writing():
                return folder.save(progress.position, state)

        remedy = "give more host memory: a checkpoint passes through it on its way to the disk"
        path = self.recovery.twice(save, "checkpoint", remedy)
        epoch, step = progress.position
        record("checkpoint", path=str(path), epoch=epoch, step=step, bytes=path.stat().st_size)
        self._next_save = time.monotonic() + self.setup.checkpoint_seconds
        if step:
            with folder.writing():
                folder.prune(progress.position, self._best_epoch())
        return path

    def _finish_epoch(self) -> bool:
        """Validate the newest epoch if that is still to be done, keep the best; returns whether the fit ends here."""
        setup, history = self.setup, self.progress.history
        newest, folder = history[-1], setup.folder
        if setup.ema is not None and folder is not None:
            facts = {"fit": self.progress.fit, "identity": self.identity, "provenance": dict(setup.provenance)}
            with folder.writing():
                setup.ema.snapshot(setup.model, newest.epoch, folder.path, facts)
        if self.plan.valid is not None and newest.metrics is None:
            newest = history[-1] = replace(newest, metrics=self._validate())
        best = self._best_epoch()
        if folder is not None:
            with folder.writing():
                if best == newest.epoch:
                    folder.mark_best()
                folder.prune(self.progress.position, best)
        fields = {"epoch": newest.epoch, "num_epochs": self.plan.num_epochs, "train_loss": newest.train_loss}
        record("epoch", **fields, **(newest.metrics or {}))
        numbers = {"train_loss": newest.train_loss, **(newest.metrics or {})}
        told = "  ".join(f"{name} {value:.6g}" for name, value in numbers.items())
        say(f"epoch {newest.epoch}/{self.plan.num_epochs}  {told}")
        if leak := self._leaks.end_epoch():
            print(f"memfit: {leak}", file=sys.stderr)
        is_done = setup.on_epoch is not None and setup.on_epoch(newest) is True
        if self.stop.noted:
            raise self._stopped()
        return is_done or self._is_early()

    def _validate(self) -> dict[str, float]:
        mark_phase("validate")
        if not self._has_room_for_both():
            self.data.close(persistent_too=True)
        remedy = "make the validation batches smaller, or keep less of each in evaluate"
        try:
            return self.recovery.twice(self._validate_once, "validate", remedy)
        except RuntimeError:
            self._leave_validation()  # the signal went to the workers of validation too, and they have gone
            raise

    def _validate_once(self) -> dict[str, float]:
        """Validate from the first batch, wherever the loader was left: by a stop, an out-of-memory or ``evaluate``."""
        if (set_epoch := getattr(self.plan.valid, "set_epoch", None)) is not None:
            set_epoch(0)
        return self._metrics(self.plan.valid)

    def _metrics(self, batches: Any) -> dict[str, float]:
        """What validation gives, with the name in it that the best epoch is chosen by."""
        setup = self.setup
        precision = None if self.plan.evaluate is None else setup.precision  # the mean loss has its own
        with preserved_generators(self.plan.valid), autocast(setup.model, precision):
            metrics = evaluated(self.evaluate, setup.model, batches)
        if self.plan.best_metric not in metrics or _RESERVED_NAMES & metrics.keys():
            raise UsageError(
                f"Validation gave {sorted(metrics)}, and the best epoch is chosen by '{self.plan.best_metric}'.",
                rule=f"the chosen name is among the metrics; none is named {sorted(_RESERVED_NAMES)}.",
                remedy="pass best_metric=... with one of the names, or return it from evaluate",
            )
        return metrics

    def _has_room_for_both(self) -> bool:
        """Whether validation's workers, each as large as one of training's, fit beside persistent ones of training."""
        workers = self.data.worker_pids()
        number = getattr(self.plan.valid, "num_workers", 0)
        if not workers or not number:
            return True
        largest = max(psutil.Process(pid).memory_full_info().uss for pid in workers)
        return bool(number * largest <= Budget.read().headroom_bytes)

    def _best_epoch(self) -> int | None:
        plan = self.plan
        return best_epoch(self.progress.history, plan.best_metric, plan.direction) if plan.valid is not None else None

    # --- stops

    def _is_early(self) -> bool:
        """Whether so many epochs in a row brought no better metric; a metric that was never a number counts as none."""
        history, patience = self.progress.history, self.plan.patience
        if patience is None or not history or history[-1].metrics is None:
            return False
        return len(history) < self.plan.num_epochs and len(history) - (self._best_epoch() or 0) >= patience

    def _tell_early(self) -> None:
        done, best, metric = len(self.progress.history), self._best_epoch(), self.plan.best_metric
        record("early_stop", epoch=done, num_epochs=self.plan.num_epochs, best_epoch=best, metric=metric)
        why = f"{metric} was best in epoch {best}" if self._is_early() else "on_epoch said so"
        say(f"stops early after epoch {done} of {self.plan.num_epochs}: {why}")
        setup = self.setup
        if setup.ema is not None and setup.folder is not None:
            setup.ema.report_missing(setup.folder.path, done=done, num_epochs=done)

    def _leave_validation(self) -> None:
        if self.stop.noted and self.setup.folder is not None:
            raise self._stopped()

    def _stopped(self) -> StoppedError:
        epoch, step = self.progress.position
        folder, signal_name = self.setup.folder, self.stop.noted
        record("stop", signal=signal_name, epoch=epoch, step=step)
        if (epoch, step) == (0, 0):
            where, rule = "before its first step", "nothing was trained yet: nothing will be repeated."
        else:
            where = (
                f"in epoch {epoch + 1}, after its step {step} of {self.num_steps}" if step else f"after epoch {epoch}"
            )
            rule = "without checkpoint_dir nothing is saved: it will start over."
            if folder is not None:
                rule = f"{folder.path} holds this very moment: nothing will be repeated."
        return StoppedError(f"Stopped by {signal_name} {where}.", rule=rule, remedy="run the same command again")


def _batches_per_step(data: TrainingData, setup: Setup) -> int:
    """How many batches of the loader make one optimizer step."""
    wanted = setup.global_batch_size
    if wanted is None:
        return 1
    size = getattr(data.batches, "batch_size", None)
    if size is None and data.kind == "indexed":
        data.set_epoch(1)
        with preserved_rng(), preserved_generators(data.batches):
            size = setup.step.split.count(data.batches[0])  # type: ignore[index]
    if size is None or wanted < size or wanted % size:
        raise UsageError(
            f"global_batch_size is {wanted}, and a batch of the training data has "
            f"{'a size that is not known' if size is None else size}.",
            rule="an optimizer step takes a whole number of the loader's batches.",
            remedy="pass a DataLoader with batch_size, and a global_batch_size that is a multiple of it",
        )
    return wanted // int(size)
