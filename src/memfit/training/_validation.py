"""Run validation and saving again after an out-of-memory, from the same random state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch

from memfit.errors import JobFailedError, UsageError
from memfit.rundir import record
from memfit.training._flight import record_oom
from memfit.training._oom import Failed, attempt
from memfit.training._process import preserved_rng, rng_state, set_rng_state
from memfit.training._setup import Evaluate
from memfit.training._snapshot import Snapshot
from memfit.training._step import SafeStep
from memfit.training._workers import watched

T = TypeVar("T")


def attempt_phase(step: SafeStep, phase: str, where: Mapping[str, Any], action: Callable[[], T]) -> T | Failed:
    """Return the result of a phase; or ``Failed``, with the random state as it was."""

    note = partial(record_oom, model=step.model, optimizer=step.optimizer, where={**where, "phase": phase})
    before = rng_state()
    result = attempt(action, note)
    if isinstance(result, Failed):
        set_rng_state(before)
    return result


def attempt_twice(step: SafeStep, phase: str, where: Mapping[str, Any], action: Callable[[], T], remedy: str) -> T:
    """Return the result of a phase's first or second try, or raise a ``JobFailedError``."""
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


class MeanLoss:
    """Computes the mean loss over the batches of validation, as ``valid_loss``.

    A batch that does not fit is tried again, then in halves; the size that fitted holds from then on.
    """

    def __init__(
        self,
        step: SafeStep,
        where: Callable[[], Mapping[str, Any]],
        leave_if_stopped: Callable[[], None],
        first_batch_seconds: float,
    ) -> None:
        self.step, self.where = step, where
        self.leave_if_stopped, self.first_batch_seconds = leave_if_stopped, first_batch_seconds
        self.size: int | None = None

    def __call__(self, model: torch.nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        total = weight_total = 0.0
        with watched(batches, self.first_batch_seconds, "validation") as each:
            for batch in each:
                self.leave_if_stopped()
                loss_sum, weight = self._sum(model, batch)
                total += loss_sum
                weight_total += weight
        return {"valid_loss": total / weight_total if weight_total else math.nan}

    def _sum(self, model: torch.nn.Module, batch: Any) -> tuple[float, float]:
        split, failures = self.step.split, 0
        while True:
            count = split.count(batch) if self.size is not None or failures else 1
            size = min(count, self.size or count)
            result = attempt_phase(self.step, "validate", self.where(), partial(self._parts, model, batch, size, count))
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
            before = Snapshot(model, self.step.optimizer, None)
            before.take()
            self.step.exactness.allow_split(batch, count, before, self.where())
            self.size = (size + 1) // 2
            record("microbatch", phase="validate", size=self.size, text=f"validates in microbatches of {self.size}")

    def _parts(self, model: torch.nn.Module, batch: Any, size: int, count: int) -> tuple[float, float]:
        total = weight_total = 0.0
        for start in range(0, count, size):
            part = batch if size == count else self.step.split.take(batch, start, min(start + size, count))
            loss_sum, weight = self.step.loss(model, part)
            total += float(loss_sum)
            weight_total += float(weight)
        return total, weight_total

    def state_dict(self) -> dict[str, Any]:
        return {"size": self.size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.size = state["size"]


def evaluated(evaluate: Evaluate, model: torch.nn.Module, batches: Any) -> dict[str, float]:
    """Return the metrics in evaluation mode without gradients; the random state is afterwards as it was."""
    model.eval()
    with preserved_rng(), torch.no_grad():
        metrics = evaluate(model, batches)
        if not isinstance(metrics, Mapping):
            raise UsageError(
                f"evaluate gave {type(metrics).__name__}.",
                rule="evaluate(model, valid) returns its metrics by name.",
                remedy="end it with for example return {'valid_loss': mean}",
            )
        return {name: float(value) for name, value in metrics.items()}
