"""Records of steps, epochs and fits, and the policy of which batches may be left out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["minimize", "maximize"]


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step.

    Attributes:
        loss_sum: The summed loss of all its batches, before the update.
        weight: The samples or tokens that it is the sum of.
        grad_norm: The gradient's 2-norm before it was cut; None if nothing was updated.
        num_microbatches: How many forward passes made the gradient.
        microbatch_size: The largest of them, in units of the split.
        num_ooms: How often it went out of memory before it went through.
        skipped: Whether the weights are as they were: skipped by the policy or by the gradient scaler.
    """

    loss_sum: float
    weight: float
    grad_norm: float | None
    num_microbatches: int
    microbatch_size: int
    num_ooms: int
    skipped: bool

    @property
    def loss(self) -> float:
        """The mean loss; NaN when nothing was counted."""
        return self.loss_sum / self.weight if self.weight else math.nan


@dataclass(frozen=True)
class SkipPolicy:
    """Allows batches to be left out, up to a limit. Without it, none is.

    Args:
        max_skipped: The most batches that may be skipped.
        max_share: The largest share of all batches so far; one is always within it.

    Example:
        >>> policy = SkipPolicy(max_skipped=10, max_share=0.01)
        >>> policy.allows(num_skipped=1, num_batches=5), policy.allows(num_skipped=2, num_batches=100)
        (True, False)
    """

    max_skipped: int
    max_share: float

    def allows(self, num_skipped: int, num_batches: int) -> bool:
        """Return whether ``num_skipped`` of ``num_batches`` may be skipped."""
        return num_skipped <= min(self.max_skipped, max(1.0, self.max_share * num_batches))


#: Figures of an epoch that are measured: two equal trainings differ in them.
MEASURED = ("seconds", "samples_per_second", "wait_share", "device_use")


@dataclass(frozen=True)
class EpochRecord:
    """The result of an epoch.

    Attributes:
        epoch: Counted from 1.
        train_loss: The sum of all losses divided by the sum of all weights, each taken before its step.
        num_steps: Optimizer steps.
        metrics: What validation gave; None without validation.
        num_skipped: Steps whose batch was skipped; they count in ``num_steps`` and not in ``train_loss``.
        samples_per_second: Over the steps and what they waited for; checkpoints and validation are left out. None if
            the samples of a batch cannot be counted. It is measured, so it is not compared, and no checkpoint has it:
            a resume knows it of the steps that it makes itself.
        seconds: This time. It and the two below are measured as well.
        wait_share: The share of this time in which a step waited for its batches, 0 to 1.
        device_use: The mean share of time in which the GPU ran a kernel, 0 to 1, by NVML twice a second; None on a CPU.
    """

    epoch: int
    train_loss: float
    num_steps: int
    metrics: dict[str, float] | None = None
    num_skipped: int = 0
    samples_per_second: float | None = field(default=None, compare=False, repr=False)
    seconds: float | None = field(default=None, compare=False, repr=False)
    wait_share: float | None = field(default=None, compare=False, repr=False)
    device_use: float | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class FitResult:
    """The result of a fit.

    Attributes:
        history: Every epoch from the first, those before a resume included.
        best_epoch: The epoch whose metric is best; None without validation, or if the metric was never a number.
        epochs_run: How many epochs this call trained to their end.
        resumed_from: Whole epochs of the checkpoint that this call went on from; None if it began anew.
        stopped_early: Whether ``patience`` ended it before the last epoch.
    """

    history: tuple[EpochRecord, ...]
    best_epoch: int | None
    epochs_run: int
    resumed_from: int | None
    stopped_early: bool = False
