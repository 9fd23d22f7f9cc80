"""Validation, and saving, that an out-of-memory does not end: cleared, put back and run again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch

from memfit.errors import JobFailedError, UsageError
from memfit.rundir import record
from memfit.training._exactness import Exactness, Loss
from memfit.training._flight import write_flight_record
from memfit.training._oom import classify_oom, clear_caches, release
from memfit.training._process import preserved_rng, rng_state, set_rng_state
from memfit.training._snapshot import Snapshot
from memfit.training._split import Split
from memfit.training._workers import FIRST_BATCH_SECONDS, watched

Evaluate = Callable[[Any, Any], Mapping[str, float]]

T = TypeVar("T")


class Recovery:
    """Runs what may go out of memory: a failed try leaves nothing behind, and another one begins where it began.

    Args:
        model: Named in the flight record.
        optimizer: Named in the flight record.
        where: Gives what else goes into it, for example epoch and step.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, where: Callable[[], Mapping[str, Any]]
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.where = where

    def attempt(self, action: Callable[[], T], phase: str) -> tuple[T | None, str]:
        """The result and an empty text; or None and the error's text, after everything that it held was let go."""
        before = rng_state()
        failed: Exception | None = None
        try:
            return action(), ""
        except Exception as error:
            kind = classify_oom(error)
            if kind is None:
                raise
            where = {**self.where(), "phase": phase}
            write_flight_record(str(error), kind, model=self.model, optimizer=self.optimizer, where=where)
            failed = error
        text = str(failed).partition("\n")[0] or type(failed).__name__
        record("oom", memory=str(kind), error=text, **where)
        release(failed)
        del failed
        clear_caches()
        set_rng_state(before)
        return None, text

    def snapshot(self) -> Snapshot:
        """How things are now."""
        snapshot = Snapshot(self.model, self.optimizer, None)
        snapshot.take()
        return snapshot

    def twice(self, action: Callable[[], T], phase: str, remedy: str) -> T:
        """The result of the first or second try.

        Raises:
            JobFailedError: If both ran out of memory.
        """
        text = ""
        for _ in range(2):
            result, text = self.attempt(action, phase)
            if not text:
                return result  # type: ignore[return-value]
        raise JobFailedError(
            f"The phase '{phase}' ran out of memory twice: {text}",
            rule="it is run once more after caches were cleared, from the same random state; then it has failed.",
            remedy=remedy,
        )


class MeanLoss:
    """The mean loss over the batches of validation, as ``valid_loss``.

    A batch that does not fit is tried again after caches were cleared, then in halves; the size that fitted holds from
    then on.

    Args:
        loss: As in training; in evaluation mode a part's sum adds up with the others'.
        split: How a batch is cut.
        exactness: Refuses a loss that cannot be cut.
        recovery: What makes a failed try leave nothing behind.
        stopped: Asked before each batch; a reason to leave at once is raised by it.
        first_batch_seconds: How long the workers of a ``DataLoader`` may do nothing before the first batch.
    """

    def __init__(
        self,
        loss: Loss,
        split: Split,
        exactness: Exactness,
        recovery: Recovery,
        stopped: Callable[[], None],
        first_batch_seconds: float = FIRST_BATCH_SECONDS,
    ) -> None:
        self.loss = loss
        self.split = split
        self.exactness = exactness
        self.recovery = recovery
        self.stopped = stopped
        self.first_batch_seconds = first_batch_seconds
        self.size: int | None = None

    def __call__(self, model: torch.nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        total = weight_total = 0.0
        with watched(batches, self.first_batch_seconds, "validation") as each:
            for batch in each:
                self.stopped()
                loss_sum, weight = self._sum(model, batch)
                total += loss_sum
                weight_total += weight
        return {"valid_loss": total / weight_total if weight_total else math.nan}

    def _sum(self, model: torch.nn.Module, batch: Any) -> tuple[float, float]:
        seen_whole = 0
        while True:
            count = self.split.count(batch) if self.size is not None or seen_whole else 1
            size = min(count, self.size or count)
            result, text = self.recovery.attempt(partial(self._parts, model, batch, size, count), "validate")
            if result is not None:
                return result
            seen_whole += 1
            if seen_whole == 1:
                continue
            if size == 1:
                raise JobFailedError(
                    f"One sample of a validation batch of {count} does not fit: {text}",
                    rule="a batch of validation is tried again after caches were cleared, then in halves down to one.",
                    remedy="make its samples shorter or smaller, evaluate in a smaller dtype, or give more memory",
                )
            self.exactness.allow_split(batch, count, self.recovery.snapshot(), self.recovery.where())
            self.size = (size + 1) // 2
            record("microbatch", phase="validate", size=self.size)

    def _parts(self, model: torch.nn.Module, batch: Any, size: int, count: int) -> tuple[float, float]:
        total = weight_total = 0.0
        for start in range(0, count, size):
            part = batch if size == count else self.split.take(batch, start, min(start + size, count))
            loss_sum, weight = self.loss(model, part)
            total += float(loss_sum)
            weight_total += float(weight)
        return total, weight_total

    def state_dict(self) -> dict[str, Any]:
        return {"size": self.size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.size = state["size"]


def evaluated(evaluate: Evaluate, model: torch.nn.Module, batches: Any) -> dict[str, float]:
    """The metrics in evaluation mode without gradients; the random state is afterwards as it was.

    Raises:
        UsageError: If it gives no metrics by name.
    """
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
