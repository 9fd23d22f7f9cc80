"""Run one fit: epochs of steps, each saved, then validated.

Validation leaves the random state and the data's generators untouched, so a resume may repeat it and stay **bit-exact**
on the same hardware with the same number of threads.
"""

from __future__ import annotations

import math
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from memfit.errors import DataError, HalfUpdatedError, StoppedError, UsageError
from memfit.rundir import CANARY_STEPS, canary_over, is_canary, loader_settings, record
from memfit.training._beat import beat, keep_beats
from memfit.training._checkpoint import CheckpointWarning, save_checkpoint, tensor_bytes
from memfit.training._deal import own_part
from memfit.training._ema import Ema
from memfit.training._feed import feed_of
from memfit.training._fsdp import ShardedFolder
from memfit.training._journal import Journal, Unheard
from memfit.training._preflight import find_longest, preflight
from memfit.training._probes import refuse_own_generators
from memfit.training._process import Stopper, check_save_seconds, rng_state, seed_rank
from memfit.training._ranks import SAVE, Ranks
from memfit.training._records import MEASURED, FitResult
from memfit.training._resume import Progress, Resume
from memfit.training._setup import Plan, Setup
from memfit.training._split import samples_in
from memfit.training._validation import Validation, attempt_twice


class Fit:
    def __init__(self, setup: Setup, plan: Plan, stop: Stopper) -> None:
        self.setup, self.plan, self.stop = setup, plan, stop
        self.step, self.ema, self.folder = setup.step, setup.ema, setup.folder
        self.device = next(self.step.model.parameters()).device
        self.ranks = setup.step.ranks
        self.is_first = self.ranks is None or self.ranks.rank == 0  # it alone writes and tells
        self.data = feed_of(plan.train, setup.seed, setup.first_batch_seconds)
        if self.folder is not None and not self.step.exactness.allows_inexact:
            self.data.check()
            refuse_own_generators(plan.valid)
        self.batches_per_step = self.data.batches_per_step(setup.global_batch_size, self.step.split)
        self.num_steps = math.ceil(len(plan.train) / self.batches_per_step)
        self.progress, self.journal = Progress(), (Journal if self.is_first else Unheard)(plan.num_epochs)
        if self.ranks is not None:
            self._join(self.ranks)
        self.validation = Validation(setup, plan, self._where, self._stop_alone)
        self.resume = Resume(setup, plan, self.data, self.validation, self.journal, self.num_steps)
        self._is_open = self._has_room = False
        self._is_saved = True  # or nothing was done yet
        self._next_save = 0.0

    def run(self) -> FitResult:
        """Train from the newest whole checkpoint, or the start, to the last epoch's end."""
        try:
            with self.folder.held() if self.folder is not None and self.is_first else nullcontext():
                return self._run()
        except BaseException as error:
            if self.step.team is not None:
                self.step.team.fail(error)
            raise
        finally:
            beat("end")  # what follows is the script's own

    def _join(self, ranks: Ranks) -> None:
        """Take this rank's part of the data, and tell in each vote what it wants."""
        self.data.deal(self.batches_per_step, self.step.split, ranks)
        ranks.is_over, ranks.wants = False, self._wants
        if self.folder is not None:
            keep_beats(self.folder.path)
        if self.step.team is not None:
            self.step.team.parts += [self.ema] if self.ema is not None else []
            self.step.team.folder = self.step.team.folder or (self.folder.path if self.folder is not None else None)

    def _run(self) -> FitResult:
        try:
            resumed_from = self._begin()
            if is_canary():
                self._end_as_canary()
            while True:
                try:
                    self._advance()
                    break
                except HalfUpdatedError as error:
                    half = error
                self._is_open = False
                self._go_on_from(self.resume.go_back(half, self.progress.position))
        except RuntimeError as error:  # wherever it struck: torch raises a worker's death from a signal handler
            if (death := self.data.workers.explain(error)) is None:
                raise
            raise death from error
        finally:
            self.data.close(persistent_too=True)
        self._warn_of_missed_milestones()
        self.step.model.eval()
        history, num_epochs = tuple(self.progress.history), self.plan.num_epochs
        epochs_run, is_early = len(history) - (resumed_from or 0), len(history) < num_epochs
        return FitResult(history, self.plan.best_epoch(history), epochs_run, resumed_from, is_early)

    # --- the way to the first step

    def _begin(self) -> int | None:
        """Resume or start anew; return the number of whole epochs that a resume goes on from."""
        if self.ema is not None:
            self.ema.prepare(self.step.model)
        found = self.resume.newest()
        if found is None:
            seed_rank(self.setup.seed, 0 if self.ranks is None else self.ranks.rank)
        else:
            self._go_on_from(found)
        if self.step.team is not None:
            self.step.team.read_size()
        history = self.progress.history
        if len(history) < self.plan.num_epochs and not self.plan.is_early(history):
            self._prepare(save=self._save if found is None and self.folder is not None else None)
        return None if found is None else len(history)

    def _go_on_from(self, progress: Progress) -> None:
        self.progress, self._is_saved = progress, True
        self._next_save = time.monotonic() + self.setup.checkpoint_seconds

    def _prepare(self, save: Callable[[], Path | None] | None) -> None:
        """Allocate what the first step would, and try the largest batch of each phase."""
        plan, seconds = self.plan, self.setup.first_batch_seconds
        if not plan.preflight:
            self.step.prepare()
            if save is not None:
                save()
            return
        self.data.set_epoch(self.progress.epoch)
        longest, num_batches = find_longest(plan.train, seconds), self.batches_per_step
        if self.ranks is not None:
            parts = own_part([longest.batch] * num_batches, self.step.split, 0, self.ranks.size)
            longest, num_batches = replace(longest, batch=parts[0]), len(parts)
        validate = None
        if not (plan.valid is None or isinstance(plan.valid, Mapping) or hasattr(plan.valid, "__array__")):
            with suppress(TypeError, UsageError):  # only evaluate knows what it is
                validate = partial(self.validation.try_one, find_longest(plan.valid, seconds).batch)
        if self.progress.step or not self.progress.history:  # else a validation is still to be done before
            self._open_epoch()
            self._meet()
        preflight(self.step, longest=longest, validate=validate, save=save, num_batches=num_batches)

    def _end_as_canary(self) -> NoReturn:
        """Make a few steps, save, and validate a few batches, all ranks together; then end."""
        self.journal.phase("train")
        self.step.model.train()
        self._open_epoch()
        for _ in range(min(CANARY_STEPS, self.num_steps)):
            self._stop_or_save()
            self._step()
        self._save()
        self.data.close()
        if self.plan.valid is not None:
            self.journal.phase("validate")
            self.validation.run(self.data)
        if self.ranks is not None:
            self.ranks.is_over = True
        raise canary_over()

    # --- epochs and steps

    def _advance(self) -> None:
        history, num_epochs = self.progress.history, self.plan.num_epochs
        is_done = False
        if history and not self.progress.step:
            is_done = self._finish_epoch()  # of a resumed fit: its validation is still to be done
        while len(history) < num_epochs and not is_done:
            self._train_epoch()
            self._save()
            is_done = self._finish_epoch()
        if (done := len(history)) < num_epochs:
            best, metric = self.plan.best_epoch(history), self.plan.best_metric
            why = f"{metric} was best in epoch {best}" if self.plan.is_early(history) else "on_epoch said so"
            self.journal.early_stop(done, why, best_epoch=best, metric=metric)

    def _open_epoch(self) -> None:
        if self._is_open:
            return
        began = time.perf_counter()
        self.data.open(self.progress.epoch, self.progress.num_batches, self._stop_alone)
        waited = time.perf_counter() - began  # for workers to start, or for batches that are run forward
        self.journal.took(waited, waited)
        self._is_open = True

    def _say_loaders(self) -> None:
        plan, ranks = self.plan, 1 if self.ranks is None else self.ranks.size
        valid = {} if isinstance(plan.valid, Mapping) else loader_settings(plan.valid, "validation")
        accumulation = {"accumulation": max(1, self.batches_per_step // ranks)}
        own = {} if self.data.own_batch is None else {"batch": self.data.own_batch}
        self.journal.loaders(loader_settings(plan.train) | own | valid | accumulation)

    def _train_epoch(self) -> None:
        progress, num_batches = self.progress, len(self.plan.train)
        self._say_loaders()
        self.journal.begin_epoch()
        self.journal.phase("train")
        self.step.model.train()
        self._open_epoch()
        while True:
            if progress.num_batches < num_batches:  # else the epoch is saved as a whole
                self._stop_or_save()
            if not self._step():
                break
        self.data.close()
        self._is_open = False
        if progress.step == 0:
            raise DataError(
                f"Epoch {progress.epoch} gave no batch, and {num_batches} were announced.",
                rule="training data must be iterable once per epoch; a bare generator is used up after one.",
                remedy="pass a list, a DataLoader or another object whose iteration starts anew each time",
            )
        progress.end_epoch(self.journal.pace())

    def _step(self) -> bool:
        began = time.perf_counter()
        beat("data")
        batches, num_batches = self.data.take(self.batches_per_step)
        waited = time.perf_counter() - began
        if not num_batches:
            return False
        step, progress = self.step, self.progress
        step.where = {"epoch": progress.epoch, "step": progress.step + 1, "num_steps": self.num_steps}
        outcome = step(*batches)
        if not outcome.skipped:
            if self.setup.schedule is not None:
                self.setup.schedule.step()
            if self.ema is not None:
                self.ema.update(step.model)
        progress.add_step(outcome, num_batches)
        self._is_saved = self.folder is None  # nothing can be saved then
        self.journal.step(step.where, outcome.loss if outcome.weight else None, self.device)
        if self.setup.on_step is not None and self.is_first:
            self.setup.on_step(outcome)
        num_samples = sum(map(samples_in, batches)) * (1 if self.ranks is None else self.ranks.size)
        self.journal.took(time.perf_counter() - began, waited, num_samples)
        return True

    def _where(self) -> dict[str, Any]:
        return {"epoch": self.progress.epoch, "step": self.progress.step}

    def _finish_epoch(self) -> bool:
        """Validate the newest epoch if that is still to be done, keep the best; return whether the fit ends here."""
        history, folder, plan = self.progress.history, self.folder, self.plan
        newest = history[-1]
        if self.ema is not None and folder is not None and newest.epoch in folder.milestones and self.is_first:
            with folder.writing():
                self._save_average(self.ema, folder.path / f"ema_epoch_{newest.epoch}.pt")
        if plan.valid is not None and newest.metrics is None:
            self.journal.phase("validate")
            newest = history[-1] = replace(newest, metrics=self.validation.run(self.data))
        best = plan.best_epoch(history)
        if folder is not None and self.is_first:
            with folder.writing():
                if best == newest.epoch:
                    folder.mark_best()
                folder.prune(self.progress.position, best)
        numbers = {"train_loss": newest.train_loss, **(newest.metrics or {})}
        pace = {name: value for name in MEASURED if (value := getattr(newest, name)) is not None}
        self.journal.epoch(newest.epoch, numbers, pace)
        is_done = self.setup.on_epoch is not None and self.is_first and self.setup.on_epoch(newest) is True
        if self.ranks is not None:
            is_done = self.ranks.gather(is_done)[0]
        self._stop_or_save()
        return is_done or plan.is_early(history)

    # --- stops and checkpoints

    def _stop_or_save(self) -> None:
        """Stop here if a signal asked for it, with a checkpoint of this moment; or save if the last one is old."""
        request = self._wants()
        if self.ranks is not None:
            request, self.ranks.request = self.ranks.request, 0
        signal_name = signal.Signals(request).name if request > 0 else None
        is_due = request != 0
        if is_due and not self._is_saved:
            self._save()
            if signal_name is None:
                self.journal.phase("train")
        if signal_name is not None:
            if self.ranks is not None:
                self.ranks.is_over = True
            self.journal.stop(signal_name, self.progress.position)
            raise self._stopped(signal_name)

    def _wants(self) -> int:
        """Return the number of the signal that was noted, or ``SAVE`` if the last checkpoint is old; else 0."""
        if self.stop.noted is not None:
            return int(signal.Signals[self.stop.noted])
        return SAVE if self.is_first and time.monotonic() >= self._next_save else 0

    def _meet(self) -> None:
        """Stop or save, at a place where all ranks come to without a step before it."""
        self.step.settle()
        self._stop_or_save()

    def _stop_alone(self) -> None:
        """Stop or save, at a place that ranks come to alone: nothing is to be saved there, and the others are told."""
        if self.ranks is None:
            self._stop_or_save()
        elif self.stop.noted is not None and not self.step.is_sharded:  # its passes are those of all ranks
            raise self._stopped(self.stop.noted)

    def _stopped(self, signal_name: str) -> StoppedError:
        epoch, step = self.progress.position
        where = f"in epoch {epoch + 1}, after its step {step} of {self.num_steps}" if step else f"after epoch {epoch}"
        rule = "without checkpoint_dir nothing is saved: it will start over."
        if self.folder is not None:
            rule = f"{self.folder.path} holds all steps so far: nothing will be repeated."
        if (epoch, step) == (0, 0):
            where, rule = "before its first step", "nothing was trained yet: nothing will be repeated."
        return StoppedError(f"Stopped by {signal_name} {where}.", rule=rule, remedy="run the same command again")

    def _save(self) -> Path | None:
        folder, progress, self._is_saved = self.folder, self.progress, True
        if folder is None:
            return None
        self.journal.phase("checkpoint")
        began = time.monotonic()
        self.step.settle()
        rngs = [rng_state()] if self.ranks is None else self.ranks.gather(rng_state())
        beat("save")
        is_sharded = isinstance(folder, ShardedFolder)
        if isinstance(folder, ShardedFolder):
            with folder.writing():
                folder.save_shards(progress.position, self.num_steps)
        if not self.is_first:
            return None

        def save() -> Path:
            state = self.resume.capture(progress, rngs)
            if not self._has_room:
                folder.check_room(tensor_bytes(state) + self.step.pending_bytes, self.plan.num_epochs)
                self._has_room = True
            with folder.writing():
                return folder.save(progress.position, state)

        remedy = "give more host memory: a checkpoint passes through it on its way to the disk"
        path = attempt_twice(self.step, "checkpoint", self._where(), save, remedy)
        epoch, step = progress.position
        beat("sealed", epoch * self.num_steps + step, training=f"{folder.path} {progress.fit}")
        if self.step.team is not None:
            self.step.team.forget_size()
        if not is_sharded:  # its seal has told it
            self.journal.checkpoint(path, progress.position, time.monotonic() - began)
        check_save_seconds(time.monotonic() - began)
        self._next_save = time.monotonic() + self.setup.checkpoint_seconds
        if progress.step:
            with folder.writing():
                folder.prune(progress.position, self.plan.best_epoch(progress.history))
        return path

    def _save_average(self, ema: Ema, path: Path) -> None:
        """Write the model with its averaged weights, and what tells ``memfit average`` which training it is of."""
        epoch, facts = len(self.progress.history), {"fit": self.progress.fit, "identity": self.resume.identity}
        with ema.applied(self.step.model):
            state = {"epoch": epoch, "model": self.step.model.state_dict(), "provenance": self.setup.provenance}
            save_checkpoint(path, {**facts, **state})
        record("ema_snapshot", path=str(path), epoch=epoch, bytes=path.stat().st_size)

    def _warn_of_missed_milestones(self) -> None:
        """Warn of milestones after the last epoch: an average of these epochs will not be there to blend."""
        if self.ema is None or self.folder is None or not self.is_first:
            return
        done = len(self.progress.history)
        if missed := sorted(epoch for epoch in self.folder.milestones if epoch > done):
            record("ema_missing", epochs=missed, num_epochs=done)
            text = f"There is no average of the weights at epochs {missed}: the training ended after epoch {done}."
            warnings.warn(text, CheckpointWarning, stacklevel=4)
