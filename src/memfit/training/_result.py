"""What a fit gives back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Direction = Literal["minimize", "maximize"]


@dataclass(frozen=True)
class EpochRecord:
    """One epoch, as it was.

    Attributes:
        epoch: Counted from 1.
        train_loss: The sum of all losses divided by the sum of all weights, each taken before its step.
        num_steps: Optimizer steps.
        metrics: What validation gave; None without validation.
        num_skipped: Steps whose batch was skipped; they count in ``num_steps`` and not in ``train_loss``.

    Example:
        >>> EpochRecord(epoch=1, train_loss=0.7, num_steps=242, metrics={"rank_ic": 0.03}).metrics["rank_ic"]
        0.03
    """

    epoch: int
    train_loss: float
    num_steps: int
    metrics: dict[str, float] | None = None
    num_skipped: int = 0


@dataclass(frozen=True)
class FitResult:
    """What a fit gave back.

    Attributes:
        history: Every epoch from the first, those before a resume included.
        best_epoch: The epoch whose metric is best; None without validation, or if the metric was never a number.
        epochs_run: How many epochs this call trained to their end.
        resumed_from: How many whole epochs the checkpoint had behind it that this call went on from; None if it began
            anew.
        stopped_early: Whether ``patience`` ended it before the last epoch.

    Example:
        >>> history = (EpochRecord(1, 0.9, 10), EpochRecord(2, 0.7, 10))
        >>> FitResult(history, best_epoch=None, epochs_run=1, resumed_from=1).history[-1].train_loss
        0.7
    """

    history: tuple[EpochRecord, ...]
    best_epoch: int | None
    epochs_run: int
    resumed_from: int | None
    stopped_early: bool = False


def best_epoch(history: Sequence[EpochRecord], metric: str, direction: Direction) -> int | None:
    """The epoch with the best metric, the first of equals; an epoch without a number is never best.

    >>> history = [EpochRecord(n, 1.0, 5, {"ic": ic}) for n, ic in [(1, math.nan), (2, 0.1), (3, 0.4), (4, 0.4)]]
    >>> best_epoch(history, "ic", "maximize"), best_epoch(history, "ic", "minimize")
    (3, 2)
    >>> best_epoch(history[:1], "ic", "maximize") is None
    True
    """
    sign = 1.0 if direction == "maximize" else -1.0
    values = [(sign * (entry.metrics or {}).get(metric, math.nan), -entry.epoch) for entry in history]
    found = [pair for pair in values if not math.isnan(pair[0])]
    return -max(found)[1] if found else None
