"""The parts and settings of a fit, and the refusal of those that do not fit together."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.training._compute import Precision
from memfit.training._ema import Ema
from memfit.training._records import Direction, EpochRecord, StepOutcome
from memfit.training._sealed import SealedFolder
from memfit.training._step import SafeStep

Evaluate = Callable[[Any, Any], Mapping[str, float]]


@dataclass(frozen=True)
class Setup:
    """The parts and settings of a ``Trainer``, which explains each."""

    step: SafeStep
    schedule: torch.optim.lr_scheduler.LRScheduler | None
    ema: Ema | None
    keeper: SealedFolder | None
    keep_epochs: int
    milestones: Collection[int]
    precision: Precision
    seed: int
    global_batch_size: int | None
    checkpoint_seconds: float
    first_batch_seconds: float
    on_step: Callable[[StepOutcome], object] | None
    on_epoch: Callable[[EpochRecord], bool | None] | None
    provenance: Mapping[str, Any]
    identity: Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """The arguments of ``Trainer.fit``, which explains each."""

    train: Any
    valid: Any
    num_epochs: int
    evaluate: Evaluate | None
    best_metric: str
    direction: Direction
    patience: int | None
    preflight: bool

    def __post_init__(self) -> None:
        needs_valid = {"evaluate": self.evaluate, "patience": self.patience}
        if without := [name for name, value in needs_valid.items() if value is not None and self.valid is None]:
            raise UsageError(
                f"{without[0]} was given without validation batches.",
                rule=f"{without[0]} is used in the validation after each epoch.",
                remedy=f"pass valid=..., or leave {without[0]} out",
            )
        if self.valid is not None and self.evaluate is None and self.best_metric != "valid_loss":
            raise UsageError(
                f"best_metric is {self.best_metric!r}, and there is no evaluate.",
                rule="without evaluate, validation gives 'valid_loss' alone.",
                remedy="pass evaluate=..., which returns it by name, or leave best_metric out",
            )
        try:
            len(self.train)
        except TypeError as error:
            raise UsageError(
                f"The training data have no length: {error}.",
                rule="the steps of an epoch are known before it begins.",
                remedy="give the data set a __len__: samples, or of an IterableDataset those of one epoch",
            ) from error
        for name, batches in (("training", self.train), ("validation", self.valid)):
            if isinstance(batches, Sized) and len(batches) == 0:
                raise UsageError(
                    f"There are no {name} batches: an epoch has 0.",
                    rule="there is at least one batch to an epoch.",
                    remedy=f"check how the {name} data were filtered",
                )

    def best_epoch(self, history: Sequence[EpochRecord]) -> int | None:
        """Return the epoch with the best metric, the first of equals; one without a number is never best."""
        sign = 1.0 if self.direction == "maximize" else -1.0
        values = [(sign * (entry.metrics or {}).get(self.best_metric, math.nan), -entry.epoch) for entry in history]
        found = [pair for pair in values if not math.isnan(pair[0])]
        return -max(found)[1] if found and self.valid is not None else None

    def is_early(self, history: Sequence[EpochRecord]) -> bool:
        """Return whether ``patience`` epochs in a row brought no better metric."""
        if self.patience is None or not history or history[-1].metrics is None:
            return False
        return len(history) < self.num_epochs and len(history) - (self.best_epoch(history) or 0) >= self.patience
