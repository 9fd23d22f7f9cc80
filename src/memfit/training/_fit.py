"""Run one fit: epochs of steps, each saved, then validated.

Validation leaves the random state untouched, so a resume may repeat it.
"""

from __future__ import annotations

import math
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from memfit.errors import DataError, DoesNotFitError, HalfUpdatedError, StoppedError, UsageError
from memfit.rundir import CANARY_STEPS, canary_over, is_canary, loader_settings, record
from memfit.training._beat import beat
from memfit.training._checkpoint import CheckpointWarning, save_checkpoint, tensor_bytes
from memfit.training._ema import Ema
from memfit.training._feed import feed_of, own_part
from memfit.training._fit_parts import FitParts, Progress, tell_other_ranks
from memfit.training._fsdp import shard_bytes
from memfit.training._identity import check_environment, optimizer_identity
from memfit.training._journal import Journal
from memfit.training._oom import release
from memfit.training._preflight import find_longest, preflight
from memfit.training._process import seed_rank
from memfit.training._ranks import Ranks
from memfit.training._records import MEASURED, FitResult
from memfit.training._session import Due, Position, Session
from memfit.training._setup import Plan, Setup
from memfit.training._split import samples_in
from memfit.training._validation import Validation, attempt_twice
from memfit.units import format_bytes

#: The names of the checkpoints that a user may look for.
LATEST, BEST = "latest", "best"
_KEPT_STEPS, _MAX_ROLLBACKS = 2, 3
_PLAIN_VALUES_BYTES = 1 << 16  # of a checkpoint, beside its tensors


class Fit:
    def __init__(self, setup: Setup, plan: Plan) -> None:
        self.setup, self.plan = setup, plan
        self.step, self.ema, self.keeper = setup.step, setup.ema, setup.keeper
        self.device = next(self.step.model.parameters()).device
        self.ranks = setup.step.ranks
        self.is_first = self.ranks is None or self.ranks.rank == 0  # it alone writes and tells
        self.data = feed_of(plan.train, setup.seed, setup.first_batch_seconds)
        self.batches_per_step = self.data.batches_per_step(setup.global_batch_size, self.step.split)
        self.num_steps = math.ceil(len(plan.train) / self.batches_per_step)
        self.progress = Progress()
        self.validation = Validation(setup, plan, self._where, self._stop_alone)
        self.parts = FitParts(setup, self.progress, validation=self.validation, data=self.data)
        self.session = Session(self.parts, self.keeper, allow=None)
        self.session.on_inexact = "warn" if self.step.exactness.allows_inexact else "stop"
        self.session.every_seconds = setup.checkpoint_seconds  # 0: after each step
        self._is_open = self._has_room = False
        self._rollbacks: Counter[int] = Counter()

    def run(self) -> FitResult:
        """Train from the newest whole checkpoint, or the start, to the last epoch's end."""
        with self.session:
            try:
                return self._run()
            except BaseException as error:
                if self.step.team is not None:
                    self.step.team.fail(error)
                raise
            finally:
                beat("end")

    @property
    def at(self) -> Position:
        return self.session.position

    @property
    def journal(self) -> Journal:
        return self.session.journal

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
                self._go_back(half)
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
        session, setup, plan = self.session, self.setup, self.plan
        if self.ranks is not None:
            self._join(self.ranks)
        self.journal.num_epochs = plan.num_epochs
        if self.ema is not None:
            self.ema.prepare(self.step.model)
        if self.keeper is None:
            session.listen(interrupt=False)
        path = session.open()
        if self.keeper is not None and not self.step.exactness.allows_inexact:
            self.data.check()
        best = f"{plan.direction} {plan.best_metric}" if plan.valid is not None else "no validation"
        if path is not None and (self.at.epoch, self.at.epoch_step) > (plan.num_epochs, 0):
            raise UsageError(
                f"{path} has {self.at.epoch} whole epochs, and num_epochs is {plan.num_epochs}.",
                rule="a fit goes on from its newest checkpoint; it cannot go back.",
                remedy=f"pass num_epochs={self.at.epoch + bool(self.at.epoch_step)} or more, or another checkpoint_dir",
            )
        is_judged = path is None or session.facts.get("is_judged", True)
        session.compare(
            **{"steps per epoch": self.num_steps, **setup.identity, **self.data.identity()},
            **optimizer_identity(self.step.optimizer, scheduled=setup.schedule is not None),
            best=best if is_judged else session.facts["identity"]["best"],  # a wrong best_metric can be put right
        )
        session.identity["best"] = best
        rank = 0 if self.ranks is None else self.ranks.rank
        if (found := session.resumed) is None or "now" not in found.drawn:
            seed_rank(setup.seed, rank)
        if found is not None and self.is_first:
            tell_other_ranks(found, session.facts["ranks"], self.ranks, setup.seed)
            check_environment(found.path, session.facts["environment"])
        session.begin()
        if found is not None and session.facts["ranks"] != (1 if self.ranks is None else self.ranks.size):
            session.waive()
        session.restore_draws()
        if self.keeper is not None and self.is_first and found is not None:
            self.keeper.mark(LATEST, self.at.step)
        if self.step.team is not None:
            self.step.team.read_size()
        history = self.progress.history
        if len(history) < plan.num_epochs and not plan.is_early(history):
            self._prepare(save=self._save if found is None and self.keeper is not None else None)
        return None if found is None else len(history)

    def _join(self, ranks: Ranks) -> None:
        """Take this rank's part of the data, and tell in each vote what it wants."""
        self.data.deal(self.batches_per_step, self.step.split, ranks)
        self.session.stopper.join(ranks)  # also where nothing is kept
        self.session.join(ranks)
        ranks.is_over = False
        if self.step.team is not None:
            self.step.team.folder = self.step.team.folder or (self.keeper.path if self.keeper is not None else None)

    def _go_back(self, error: HalfUpdatedError) -> None:
        """Go back to the newest checkpoint after an optimizer step that an out-of-memory left half-way."""
        at, self._is_open = self.at, False
        self._rollbacks[at.step] += 1
        self.data.close()
        if self._rollbacks[at.step] <= _MAX_ROLLBACKS:
            self.session.go_back()
        if self.session.resumed is None or self._rollbacks[at.step] > _MAX_ROLLBACKS:
            raise error
        release(error)
        record("rollback", from_epoch=at.epoch, from_step=at.epoch_step, error=error.what)

    def _prepare(self, save: Callable[[], Path | None] | None) -> None:
        """Allocate what the first step would, and try the largest batch of each phase."""
        plan, seconds = self.plan, self.setup.first_batch_seconds
        if not plan.preflight:
            self.step.prepare()
            if save is not None:
                save()
            return
        self.data.set_epoch(self.at.epoch + 1)
        longest, num_batches = find_longest(plan.train, seconds), self.batches_per_step
        if self.ranks is not None:
            parts = own_part([longest.batch] * num_batches, self.step.split, 0, self.ranks.size)
            longest, num_batches = replace(longest, batch=parts[0]), len(parts)
        validate = None
        if not (plan.valid is None or isinstance(plan.valid, Mapping) or hasattr(plan.valid, "__array__")):
            with suppress(TypeError, UsageError):  # only evaluate knows what it is
                validate = partial(self.validation.try_one, find_longest(plan.valid, seconds).batch)
        if self.at.epoch_step or not self.progress.history:  # else a validation is still to be done before
            self._open_epoch()
            self.step.settle()
            self._stop_or_save()
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
        if history and not self.at.epoch_step:
            is_done = self._finish_epoch()  # of a resumed fit: its validation is still to be done
        while len(history) < num_epochs and not is_done:
            self._train_epoch()
            if self.keeper is not None:
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
        self.data.open(self.at.epoch + 1, self.at.batch, self._stop_alone)
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
        num_batches = len(self.plan.train)
        self._say_loaders()
        self.journal.begin_epoch()
        self.journal.phase("train")
        self.step.model.train()
        self._open_epoch()
        while True:
            if self.at.batch < num_batches:  # else the epoch is saved as a whole
                self._stop_or_save()
            if not self._step():
                break
        self.data.close()
        self._is_open = False
        if self.session.is_leaving:
            self._stop()
        if self.at.epoch_step == 0:
            raise DataError(
                f"Epoch {self.at.epoch + 1} gave no batch, and {num_batches} were announced.",
                rule="training data must be iterable once per epoch; a bare generator is used up after one.",
                remedy="pass a list, a DataLoader or another object whose iteration starts anew each time",
            )
        self.progress.end_epoch(self.at.epoch_step, self.journal.pace())
        self.session.end_epoch()

    def _step(self) -> bool:
        began = time.perf_counter()
        beat("data")
        batches, num_batches = self.data.take(self.batches_per_step)
        waited = time.perf_counter() - began
        if not num_batches:
            return False
        self.session.took(batches)
        step, at = self.step, self.at
        step.where = {"epoch": at.epoch + 1, "step": at.epoch_step + 1, "num_steps": self.num_steps}
        outcome = step(*batches)
        if not outcome.skipped:
            if self.setup.schedule is not None:
                self.setup.schedule.step()
            if self.ema is not None:
                self.ema.update(step.model)
        self.progress.add_step(outcome)
        at.batch += num_batches
        loss, parts = outcome.loss if outcome.weight else None, outcome.num_microbatches
        self.session.stepped(loss, self.num_steps, self.device, parts=parts, has_voted=True)
        if self.setup.on_step is not None and self.is_first:
            self.setup.on_step(outcome)
        num_samples = sum(map(samples_in, batches)) * (1 if self.ranks is None else self.ranks.size)
        self.journal.took(time.perf_counter() - began, waited, num_samples)
        return True

    def _where(self) -> dict[str, Any]:
        return {"epoch": self.at.epoch + 1, "step": self.at.epoch_step}

    def _finish_epoch(self) -> bool:
        """Validate the newest epoch if that is still to be done, keep the best; return whether the fit ends here."""
        history, keeper, plan = self.progress.history, self.keeper, self.plan
        newest = history[-1]
        if self.ema is not None and keeper is not None and newest.epoch in self.setup.milestones and self.is_first:
            with keeper.writing():
                self._save_average(self.ema, keeper.path / f"ema_epoch_{newest.epoch}.pt")
        if plan.valid is not None and newest.metrics is None:
            self.journal.phase("validate")
            newest = history[-1] = replace(newest, metrics=self.validation.run(self.data))
        if keeper is not None and self.is_first and (best := plan.best_epoch(history)) is not None:
            keeper.mark(BEST, self.progress.ends[best])
        self._prune()
        numbers = {"train_loss": newest.train_loss, **(newest.metrics or {})}
        pace = {name: value for name in MEASURED if (value := getattr(newest, name)) is not None}
        self.journal.epoch(newest.epoch, numbers, pace)
        is_done = self.setup.on_epoch is not None and self.is_first and self.setup.on_epoch(newest) is True
        if self.ranks is not None:
            is_done = self.ranks.gather(is_done)[0]
        is_done = is_done or plan.is_early(history)
        self._stop_or_save(at_once=is_done or len(history) == plan.num_epochs)
        return is_done

    # --- stops and checkpoints

    def _stop_or_save(self, *, at_once: bool = False) -> None:
        """Stop or save here, as it is due."""
        due = self.session.due()
        if due and self.session.is_unsaved and not self.session.is_leaving:
            self._save()
            self.journal.phase("train")
        if due is Due.STOP:
            self._stop(at_once=at_once)

    def _stop(self, *, at_once: bool = False) -> None:
        try:
            self.session.stop(self._place(), at_once=at_once)
        except StoppedError:
            if self.ranks is not None:
                self.ranks.is_over = True
            raise

    def _stop_alone(self) -> None:
        """Stop or save, at a place that ranks come to alone: nothing is to be saved there, and the others are told."""
        if self.ranks is None:
            self._stop_or_save(at_once=True)
        elif self.session.stopper.own is not None and not self.step.is_sharded:  # its passes are those of all ranks
            self.session.stop(self._place(), at_once=True)

    def _place(self) -> str:
        epoch, step = self.at.epoch, self.at.epoch_step
        where = f"in epoch {epoch + 1}, after its step {step} of {self.num_steps}" if step else f"after epoch {epoch}"
        return where if self.at.step else "before its first step"

    def _save(self) -> Path:
        """Seal a checkpoint of here, all ranks together, and return its folder."""
        self.journal.phase("checkpoint")
        self.step.settle()
        facts = {"ranks": 1 if self.ranks is None else self.ranks.size}
        facts |= {"is_judged": any(entry.metrics for entry in self.progress.history)}
        remedy = "give more host memory: a checkpoint passes through it on its way to the disk"
        twice = partial(attempt_twice, self.step, "checkpoint", self._where(), remedy=remedy)
        path = self.session.save(self._write, twice, **facts)
        if self.step.team is not None:
            self.step.team.forget_size()
        if self.keeper is not None and self.is_first:
            self.keeper.mark(LATEST, self.at.step)
        if self.at.epoch_step:
            self._prune()
        return path

    def _write(self, path: Path) -> None:
        """Write this rank's shards, and on rank 0 all else."""
        self.parts.save_shards(path)
        if self.is_first:
            content = self.parts.content(self.at, self.session.identity)
            self._check_room(tensor_bytes(content) + self.step.pending_bytes)
            self.parts.write(path, content)

    def _prune(self) -> None:
        """Keep the last two within an epoch, the newest epochs, the best one and the milestones."""
        keeper, ends = self.keeper, self.progress.ends
        if keeper is None or not self.is_first:
            return
        kept = [*self.setup.milestones, self.plan.best_epoch(self.progress.history) or 0]
        steps = [*ends[-self.setup.keep_epochs :], *(ends[epoch] for epoch in kept if 0 < epoch < len(ends))]
        keeper.prune(_KEPT_STEPS if self.at.epoch_step else 1, [keeper.folder_of(step) for step in steps])

    def _check_room(self, num_bytes: int) -> None:
        """Refuse a fit whose checkpoints, of so many bytes each, the disk cannot hold; looked at once."""
        setup, path = self.setup, self.setup.keeper.path if self.setup.keeper is not None else None
        if path is None or self._has_room:
            return
        one = num_bytes + self.step.is_sharded * shard_bytes(self.step) + _PLAIN_VALUES_BYTES
        num_epochs, milestones = self.plan.num_epochs, sum(epoch <= self.plan.num_epochs for epoch in setup.milestones)
        number = min(setup.keep_epochs, num_epochs) + milestones + _KEPT_STEPS + 2
        own = sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
        free = shutil.disk_usage(path).free + own
        if number * one > free:
            raise DoesNotFitError(
                f"{number} checkpoints of {format_bytes(one)} need {format_bytes(number * one)} of disk, and "
                f"{format_bytes(free)} is free on that of {path} or taken by its checkpoints.",
                rule=f"keep_epochs={setup.keep_epochs} and {milestones} milestones, the best, {_KEPT_STEPS} within an "
                "epoch, and the one being written.",
                remedy="free some space, pass fewer milestones or keep_epochs=1, or another checkpoint_dir",
            )
        self._has_room = True

    def _save_average(self, ema: Ema, path: Path) -> None:
        """Write the model with its averaged weights, and what tells ``memfit average`` which training it is of."""
        with ema.applied(self.step.model):
            save_checkpoint(path, {**self.parts.told(self.session.identity), "model": self.step.model.state_dict()})
        record("ema_snapshot", path=str(path), epoch=self.at.epoch, bytes=path.stat().st_size)

    def _warn_of_missed_milestones(self) -> None:
        """Warn of milestones after the last epoch: an average of these epochs will not be there to blend."""
        if self.ema is None or self.keeper is None or not self.is_first:
            return
        done = len(self.progress.history)
        if missed := sorted(epoch for epoch in self.setup.milestones if epoch > done):
            record("ema_missing", epochs=missed, num_epochs=done)
            text = f"There is no average of the weights at epochs {missed}: the training ended after epoch {done}."
            warnings.warn(text, CheckpointWarning, stacklevel=4)
