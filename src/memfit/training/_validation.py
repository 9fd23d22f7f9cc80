"""Validate an epoch; run validation and saving again after an out-of-memory, from the same random state."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

import psutil
import torch
from torch.utils.data import DataLoader

from memfit.errors import JobFailedError, MemfitError, UsageError
from memfit.memory import Budget
from memfit.rundir import CANARY_BATCHES, is_canary, record
from memfit.training._beat import beat, leave
from memfit.training._compute import autocast
from memfit.training._feed import Feed
from memfit.training._flight import record_oom
from memfit.training._loaders import preserved_generators
from memfit.training._oom import Failed, attempt, classify_oom
from memfit.training._process import preserved_rng, read_rng, write_rng
from memfit.training._records import MEASURED
from memfit.training._setup import Evaluate, Plan, Setup
from memfit.training._snapshot import Snapshot
from memfit.training._step import SafeStep
from memfit.training._workers import Workers

T = TypeVar("T")

_RESERVED_NAMES = frozenset(
    {"epoch", "num_epochs", "train_loss", "time", "job", "kind", "text", "memory", *MEASURED, "num_threads"}
)


def _mean_of(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total, weight = sum(one["loss_sum"] for one in sums), sum(one["weight"] for one in sums)
    return {"valid_loss": total / weight if weight else math.nan}


def attempt_phase(step: SafeStep, phase: str, where: Mapping[str, Any], action: Callable[[], T]) -> T | Failed:
    """Return the result of a phase; or ``Failed``, with the random state as it was."""

    note = partial(record_oom, model=step.model, optimizer=step.optimizer, where={**where, "phase": phase})
    before = read_rng()
    result = attempt(action, note)
    if isinstance(result, Failed):
        if step.team is not None and not step.team.repeats:
            leave(f"out of memory in the phase {phase!r}, in which all ranks work together: {result.first_line}")
        write_rng(before)
    return result


def attempt_twice(step: SafeStep, phase: str, where: Mapping[str, Any], action: Callable[[], T], remedy: str) -> T:
    for _ in range(2):
        result = attempt_phase(step, phase, where, action)
        if not isinstance(result, Failed):
            return result
    assert isinstance(result, Failed)
    raise JobFailedError(
        f"The phase '{phase}' ran out of memory twice: {result.first_line}",
        rule="it is run once more after caches were cleared, from the same random state; then it has failed.",
        remedy=remedy,
    )


class Validation:
    """Validates the epochs of a fit by the user's ``evaluate``, or the mean loss as ``valid_loss``. A batch of the mean
    loss that does not fit is tried again, then in halves; the size that fitted holds from then on. ``check_stop`` is
    called between batches; it raises if the fit should stop."""

    def __init__(
        self, setup: Setup, plan: Plan, where: Callable[[], Mapping[str, Any]], check_stop: Callable[[], object]
    ) -> None:
        self._setup, self._plan, self._step, self._where, self._check_stop = setup, plan, setup.step, where, check_stop
        self._size: int | None = None

    def run(self, training: Feed) -> dict[str, float]:
        """Return the metrics; end the workers of the training data first where there is no room for both."""
        if not self._has_room_beside(training):
            training.close(persistent_too=True)
        remedy = "make the validation batches smaller, or keep less of each in evaluate"
        ranks, evaluate = self._step.ranks, self._plan.evaluate
        self._step.settle()
        metrics: dict[str, float] = {}
        try:
            if ranks is None or ranks.rank == 0 or evaluate is None or self._step.is_sharded:
                metrics = attempt_twice(self._step, "validate", self._where(), self._run_once, remedy)
        except RuntimeError:
            self._check_stop()  # a signal that stops the fit went to the workers of validation too, and they have gone
            raise
        found = [metrics] if ranks is None else ranks.gather(metrics)
        metrics = found[0] if evaluate is not None else _mean_of(found[:1] if self._step.is_sharded else found)
        if self._plan.best_metric not in metrics or _RESERVED_NAMES & metrics.keys():
            raise UsageError(
                f"Validation gave {sorted(metrics)}, and the best epoch is chosen by '{self._plan.best_metric}'.",
                rule=f"the chosen name is among the metrics; none is named {sorted(_RESERVED_NAMES)}.",
                remedy="pass best_metric=... with one of the names, or return it from evaluate",
            )
        return metrics

    def try_one(self, batch: Any) -> None:
        """Compute the loss of one batch; the user's ``evaluate`` sees whole validations only."""
        try:
            self._evaluated(partial(self._sums, is_one=True), [batch])
        except Exception as error:  # batches that only evaluate understands
            if self._plan.evaluate is None or isinstance(error, MemfitError) or classify_oom(error) is not None:
                raise
            record("preflight_validation", reason=f"{type(error).__name__}: {error}".partition("\n")[0])

    def state_dict(self) -> dict[str, Any]:
        return {"size": self._size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._size = state["size"]

    def _has_room_beside(self, training: Feed) -> bool:
        """Return whether validation's worker processes fit beside persistent ones of training."""
        workers, valid = training.worker_pids(), self._plan.valid
        if not workers or not isinstance(valid, DataLoader):
            return True
        largest = max(psutil.Process(pid).memory_full_info().uss for pid in workers)
        return valid.num_workers * largest <= Budget.read().headroom_bytes

    def _run_once(self) -> dict[str, float]:
        """Validate from the first batch, wherever the loader was left: by a stop, an out-of-memory or ``evaluate``."""
        plan = self._plan
        if (set_epoch := getattr(plan.valid, "set_epoch", None)) is not None:
            set_epoch(0)
        precision = None if plan.evaluate is None else self._setup.precision  # the mean loss has its own
        with preserved_generators(plan.valid), autocast(self._step.model, precision):
            return self._evaluated(plan.evaluate or self._sums, plan.valid)

    def _evaluated(self, evaluate: Evaluate, batches: Any) -> dict[str, float]:
        """Return the metrics in evaluation mode without gradients; the random state is afterwards as it was."""
        model = self._step.model.eval()
        with preserved_rng(), torch.no_grad():
            metrics = evaluate(model, batches)
            if not isinstance(metrics, Mapping):
                raise UsageError(
                    f"evaluate gave {type(metrics).__name__}.",
                    rule="evaluate(model, valid) returns its metrics by name.",
                    remedy="end it with for example return {'valid_loss': mean}",
                )
            return {name: float(value) for name, value in metrics.items()}

    def _sums(self, model: torch.nn.Module, batches: Iterable[Any], *, is_one: bool = False) -> dict[str, float]:
        """Return the sums of losses and weights over the batches. Of several ranks, each takes its own of them."""
        ranks = None if is_one or self._step.is_sharded else self._step.ranks
        rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        total = weight_total = 0.0
        last = CANARY_BATCHES * size if is_canary() else None
        with closing(Workers(batches, self._setup.first_batch_seconds)) as workers:
            for batch in itertools.islice(workers.open("validation"), rank, last, size):
                self._check_stop()
                if size > 1 or self._step.is_sharded:
                    beat("validate")
                loss_sum, weight = self._sum(model, batch)
                total += loss_sum
                weight_total += weight
        return {"loss_sum": total, "weight": weight_total}

    def _sum(self, model: torch.nn.Module, batch: Any) -> tuple[float, float]:
        step, failures = self._step, 0
        while True:
            count = step.split.count(batch) if self._size is not None or failures else 1
            size = min(count, self._size or count)
            result = attempt_phase(step, "validate", self._where(), partial(self._parts, model, batch, size, count))
            if not isinstance(result, Failed):
                return result
            failures += 1
            if failures == 1:
                continue
            if size == 1:
                raise JobFailedError(
                    f"One sample of a validation batch of {count} does not fit: {result.first_line}",
                    rule="a batch of validation is tried again after caches were cleared, then in halves down to one.",
                    remedy="make its samples shorter or smaller, evaluate in a smaller dtype, or give more memory",
                )
            before = Snapshot(model, step.optimizer, None)
            before.take()
            step.exactness.allow_split(batch, count, before, self._where())
            self._size = (size + 1) // 2
            record("microbatch", phase="validate", size=self._size, text=f"validates in microbatches of {self._size}")

    def _parts(self, model: torch.nn.Module, batch: Any, size: int, count: int) -> tuple[float, float]:
        total = weight_total = 0.0
        for start in range(0, count, size):
            part = batch if size == count else self._step.split.take(batch, start, min(start + size, count))
            loss_sum, weight = self._step.loss(model, part)
            total += float(loss_sum)
            weight_total += float(weight)
        return total, weight_total
