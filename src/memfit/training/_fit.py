"""Run one fit: epochs of steps, checkpoints, validation, and the way back to a checkpoint.

An epoch is trained, saved, then validated. Validation leaves the random state and the data's generators untouched, so a
resume may repeat it and stay **bit-exact** on the same hardware with the same number of threads.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from torch.utils.data import DataLoader

from memfit.errors import DataError, HalfUpdatedError, MemfitError, StoppedError, UsageError
from memfit.memory import Budget
from memfit.rundir import record
from memfit.training._checkpoint import CheckpointWarning, position_of, save_checkpoint, tensor_bytes
from memfit.training._compute import autocast
from memfit.training._ema import Ema
from memfit.training._journal import Journal
from memfit.training._keyed import TrainingData, preserved_generators, refuse_own_generators
from memfit.training._oom import classify_oom, release
from memfit.training._preflight import find_longest, preflight
from memfit.training._process import StopSignals, preserved_rng, seed_everything
from memfit.training._records import MEASURED, FitResult
from memfit.training._setup import Plan, Setup
from memfit.training._split import samples_in
from memfit.training._state import Progress, capture, optimizer_identity, restore
from memfit.training._validation import MeanLoss, attempt_twice, evaluated

_MAX_ROLLBACKS = 3
_RESERVED_NAMES = frozenset(
    {"epoch", "num_epochs", "train_loss", "time", "job", "kind", "text", "memory", *MEASURED, "num_threads"}
)


class Fit:
    """One call of ``Trainer.fit``."""

    def __init__(self, setup: Setup, plan: Plan, stop: StopSignals) -> None:
        self.setup, self.plan, self.stop = setup, plan, stop
        self.step, self.ema, self.folder = setup.step, setup.ema, setup.folder
        self.data = TrainingData(plan.train, setup.seed, setup.first_batch_seconds)
        if self.folder is not None and not self.step.exactness.allows_inexact:
            self.data.check_replayable()
            refuse_own_generators(plan.valid)
        self.batches_per_step = self._count_batches_per_step()
        self.num_steps = math.ceil(len(plan.train) / self.batches_per_step)
        self.progress, self.journal = Progress(), Journal(plan.num_epochs)
        self.mean_loss = MeanLoss(self.step, self._where, self._leave_if_stopped, setup.first_batch_seconds)
        self.identity = {  # what must not change between a checkpoint and its resume, read before anything is loaded
            "steps per epoch": self.num_steps,
            "best": f"{plan.direction} {plan.best_metric}" if plan.valid is not None else "no validation",
            **setup.identity,
            **self.data.identity(),
            **optimizer_identity(self.step.optimizer, scheduled=setup.schedule is not None),
        }
        self._rollbacks: Counter[tuple[int, int]] = Counter()
        self._data_state: Mapping[str, Any] | None = None
        self._is_open = self._has_room = False
        self._next_save = 0.0

    def run(self) -> FitResult:
        """Train from the newest whole checkpoint, or the start, to the last epoch's end."""
        with nullcontext() if self.folder is None else self.folder.held():
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
        self._warn_of_missed_milestones()
        self.step.model.eval()
        history = tuple(self.progress.history)
        epochs_run = len(history) - (resumed_from or 0)
        return FitResult(
            history,
            self.plan.best_epoch(self.progress.history),
            epochs_run,
            resumed_from,
            len(history) < self.plan.num_epochs,
        )

    # --- the way to the first step, and back to a checkpoint

    def _begin(self) -> int | None:
        """Resume or start anew; return the number of whole epochs that a resume goes on from."""
        if self.ema is not None:
            self.ema.prepare(self.step.model)
        taken = self.folder.newest() if self.folder is not None else None
        if taken is None:
            seed_everything(self.setup.seed)
        else:
            self._restore(*taken)
        done = len(self.progress.history)
        if done < self.plan.num_epochs and not self.plan.is_early(self.progress.history):
            self._prepare(save=self._save if taken is None and self.folder is not None else None)
        return None if taken is None else done

    def _restore(self, path: Path, state: dict[str, Any]) -> None:
        if position_of(state) > (self.plan.num_epochs, 0):
            raise UsageError(
                f"{path} has {state['epoch']} whole epochs, and num_epochs is {self.plan.num_epochs}.",
                rule="a fit goes on from its newest checkpoint; it cannot go back.",
                remedy=f"pass num_epochs={state['epoch'] + bool(state['step'])} or more, or another checkpoint_dir",
            )
        self.progress = restore(path, state, self._parts(), self.identity)
        self._data_state = state["data"]
        self._next_save = time.monotonic() + self.setup.checkpoint_seconds
        self.journal.resume(path, self.progress.position)

    def _prepare(self, save: Callable[[], Path] | None) -> None:
        """Allocate what the first step would, and try the largest batch of each phase."""
        plan, seconds = self.plan, self.setup.first_batch_seconds
        if not plan.preflight:
            self.step.prepare()
            if save is not None:
                save()
            return
        self.data.set_epoch(self.progress.epoch)
        longest = find_longest(plan.train, seconds)
        validate = None
        if not (plan.valid is None or isinstance(plan.valid, Mapping) or hasattr(plan.valid, "__array__")):
            with suppress(TypeError, UsageError):  # only evaluate knows what it is
                validate = partial(self._try_validation, find_longest(plan.valid, seconds).batch)
        if self.progress.position[1] or not self.progress.history:  # else a validation is still to be done before
            self._open_epoch()
        preflight(self.step, longest=longest, validate=validate, save=save, num_batches=self.batches_per_step)

    def _try_validation(self, batch: Any) -> None:
        """Compute the loss of the largest validation batch; the user's ``evaluate`` sees whole validations only."""
        try:
            evaluated(self.mean_loss, self.step.model, [batch])
        except Exception as error:  # batches that only evaluate understands
            if self.plan.evaluate is None or isinstance(error, MemfitError) or classify_oom(error) is not None:
                raise
            record("preflight_validation", reason=f"{type(error).__name__}: {error}".partition("\n")[0])

    def _go_back(self, error: HalfUpdatedError) -> None:
        """Go back to the newest checkpoint after an optimizer step that an out-of-memory left half-way."""
        folder, position = self.folder, self.progress.position
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
        parts = {
            "model": self.step.model,
            "optimizer": self.step.optimizer,
            "schedule": self.setup.schedule,
            "ema": self.ema,
            "sizes": self.step,
            "validation": self.mean_loss,
        }
        return {name: part for name, part in parts.items() if part is not None}

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
        began = time.perf_counter()
        reached = self.data.open(progress.epoch, progress.num_batches, self._data_state, lambda: self.stop.noted)
        waited = time.perf_counter() - began  # for workers to start, or for batches that are run forward
        self.journal.took(waited, waited)
        self._data_state, self._is_open = None, True
        if not reached or self.stop.noted:
            raise self._stopped()

    def _train_epoch(self) -> None:
        progress = self.progress
        self.journal.begin_epoch()
        self.journal.phase("train")
        self.step.model.train()
        self._open_epoch()
        while self._step():
            if progress.num_batches >= len(self.plan.train):
                continue
            if self.stop.noted:
                self._save()
                raise self._stopped()
            if time.monotonic() >= self._next_save and self.folder is not None:
                self._save()
                self.journal.phase("train")
        self.data.close()
        self._is_open = False
        if progress.step == 0:
            raise DataError(
                f"Epoch {progress.epoch} gave no batch, and {len(self.plan.train)} were announced.",
                rule="training data must be iterable once per epoch; a bare generator is used up after one.",
                remedy="pass a list, a DataLoader or another object whose iteration starts anew each time",
            )
        progress.end_epoch(self.journal.pace())

    def _step(self) -> bool:
        """Make the next optimizer step; return False at the epoch's end."""
        began = time.perf_counter()
        batches = list(itertools.islice(self.data, self.batches_per_step))
        waited = time.perf_counter() - began
        if not batches:
            return False
        step, progress = self.step, self.progress
        step.where = {"epoch": progress.epoch, "step": progress.step + 1, "num_steps": self.num_steps}
        outcome = step(*batches)
        if not outcome.skipped:
            if self.setup.schedule is not None:
                self.setup.schedule.step()
            if self.ema is not None:
                self.ema.update(self.step.model)
        progress.add_step(outcome, len(batches))
        device = next(self.step.model.parameters()).device
        self.journal.step(step.where, outcome.loss if outcome.weight else None, device)
        if self.setup.on_step is not None:
            self.setup.on_step(outcome)
        self.journal.took(time.perf_counter() - began, waited, sum(map(samples_in, batches)))
        return True

    def _where(self) -> dict[str, Any]:
        return {"epoch": self.progress.epoch, "step": self.progress.step}

    # --- checkpoints and validation

    def _save(self) -> Path:
        folder, progress = self.folder, self.progress
        if folder is None:
            return Path()
        self.journal.phase("checkpoint")

        def save() -> Path:
            state = capture(self._parts(), progress, self.identity)
            state["data"] = self.data.state_dict()
            state["provenance"] = dict(self.setup.provenance)
            if not self._has_room:
                folder.check_room(tensor_bytes(state) + self.step.pending_bytes, self.plan.num_epochs)
                self._has_room = True
            with folder.writing():
                return folder.save(progress.position, state)

        remedy = "give more host memory: a checkpoint passes through it on its way to the disk"
        path = attempt_twice(self.step, "checkpoint", self._where(), save, remedy)
        self.journal.checkpoint(path, progress.position)
        self._next_save = time.monotonic() + self.setup.checkpoint_seconds
        if progress.step:
            with folder.writing():
                folder.prune(progress.position, self.plan.best_epoch(self.progress.history))
        return path

    def _finish_epoch(self) -> bool:
        """Validate the newest epoch if that is still to be done, keep the best; return whether the fit ends here."""
        history, folder = self.progress.history, self.folder
        newest = history[-1]
        if self.ema is not None and folder is not None and newest.epoch in folder.milestones:
            with folder.writing():
                self._save_average(self.ema, folder.path / f"ema_epoch_{newest.epoch}.pt")
        if self.plan.valid is not None and newest.metrics is None:
            newest = history[-1] = replace(newest, metrics=self._validate())
        best = self.plan.best_epoch(self.progress.history)
        if folder is not None:
            with folder.writing():
                if best == newest.epoch:
                    folder.mark_best()
                folder.prune(self.progress.position, best)
        numbers = {"train_loss": newest.train_loss, **(newest.metrics or {})}
        pace = {name: value for name in MEASURED if (value := getattr(newest, name)) is not None}
        self.journal.epoch(newest.epoch, numbers, pace)
        is_done = self.setup.on_epoch is not None and self.setup.on_epoch(newest) is True
        if self.stop.noted:
            raise self._stopped()
        return is_done or self.plan.is_early(self.progress.history)

    def _save_average(self, ema: Ema, path: Path) -> None:
        """Write the model with its averaged weights, and what tells ``memfit average`` which training it is of."""
        epoch, facts = len(self.progress.history), {"fit": self.progress.fit, "identity": self.identity}
        with ema.applied(self.step.model):
            state = {"epoch": epoch, "model": self.step.model.state_dict(), "provenance": self.setup.provenance}
            save_checkpoint(path, {**facts, **state})
        record("ema_snapshot", path=str(path), epoch=epoch, bytes=path.stat().st_size)

    def _warn_of_missed_milestones(self) -> None:
        """Warn of milestones after the last epoch: an average of these epochs will not be there to blend."""
        if self.ema is None or self.folder is None:
            return
        done = len(self.progress.history)
        if missed := sorted(epoch for epoch in self.folder.milestones if epoch > done):
            record("ema_missing", epochs=missed, num_epochs=done)
            text = f"There is no average of the weights at epochs {missed}: the training ended after epoch {done}."
            warnings.warn(text, CheckpointWarning, stacklevel=4)

    def _validate(self) -> dict[str, float]:
        self.journal.phase("validate")
        if not self._has_room_for_both():
            self.data.close(persistent_too=True)
        remedy = "make the validation batches smaller, or keep less of each in evaluate"
        try:
            return attempt_twice(self.step, "validate", self._where(), self._validate_once, remedy)
        except RuntimeError:
            self._leave_if_stopped()  # the signal went to the workers of validation too, and they have gone
            raise

    def _validate_once(self) -> dict[str, float]:
        """Validate from the first batch, wherever the loader was left: by a stop, an out-of-memory or ``evaluate``."""
        plan, model = self.plan, self.step.model
        if (set_epoch := getattr(plan.valid, "set_epoch", None)) is not None:
            set_epoch(0)
        precision = None if plan.evaluate is None else self.setup.precision  # the mean loss has its own
        with preserved_generators(plan.valid), autocast(model, precision):
            metrics = evaluated(plan.evaluate or self.mean_loss, model, plan.valid)
        if plan.best_metric not in metrics or _RESERVED_NAMES & metrics.keys():
            raise UsageError(
                f"Validation gave {sorted(metrics)}, and the best epoch is chosen by '{plan.best_metric}'.",
                rule=f"the chosen name is among the metrics; none is named {sorted(_RESERVED_NAMES)}.",
                remedy="pass best_metric=... with one of the names, or return it from evaluate",
            )
        return metrics

    def _has_room_for_both(self) -> bool:
        """Return whether validation's worker processes fit beside persistent ones of training."""
        workers = self.data.worker_pids()
        if not workers or not isinstance(self.plan.valid, DataLoader):
            return True
        largest = max(psutil.Process(pid).memory_full_info().uss for pid in workers)
        return self.plan.valid.num_workers * largest <= Budget.read().headroom_bytes

    # --- stops

    def _tell_early(self) -> None:
        history, metric = self.progress.history, self.plan.best_metric
        best = self.plan.best_epoch(history)
        why = f"{metric} was best in epoch {best}" if self.plan.is_early(history) else "on_epoch said so"
        self.journal.early_stop(len(history), why, best_epoch=best, metric=metric)

    def _leave_if_stopped(self) -> None:
        if self.stop.noted and self.folder is not None:
            raise self._stopped()

    def _stopped(self) -> StoppedError:
        (epoch, step), signal_name = self.progress.position, str(self.stop.noted)
        self.journal.stop(signal_name, (epoch, step))
        where = f"in epoch {epoch + 1}, after its step {step} of {self.num_steps}" if step else f"after epoch {epoch}"
        rule = "without checkpoint_dir nothing is saved: it will start over."
        if self.folder is not None:
            rule = f"{self.folder.path} holds this very moment: nothing will be repeated."
        if (epoch, step) == (0, 0):
            where, rule = "before its first step", "nothing was trained yet: nothing will be repeated."
        return StoppedError(f"Stopped by {signal_name} {where}.", rule=rule, remedy="run the same command again")

    def _count_batches_per_step(self) -> int:
        wanted = self.setup.global_batch_size
        if wanted is None:
            return 1
        size = getattr(self.data.batches, "batch_size", None)
        if size is None and self.data.kind == "indexed":
            self.data.set_epoch(1)
            with preserved_rng(), preserved_generators(self.data.batches):
                size = self.step.split.count(self.plan.train[0])
        if size is None or wanted < size or wanted % size:
            raise UsageError(
                f"global_batch_size is {wanted}, and a batch of the training data has "
                f"{'a size that is not known' if size is None else size}.",
                rule="an optimizer step takes a whole number of the loader's batches.",
                remedy="pass a DataLoader with batch_size, and a global_batch_size that is a multiple of it",
            )
        return wanted // int(size)
