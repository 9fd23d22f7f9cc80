"""What a step tells: what it did, what it survived, and which batches may be left out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from memfit.training._oom import OomKind


@dataclass(frozen=True)
class StepOutcome:
    """What a step did.

    Attributes:
        loss_sum: The summed loss of all its batches, before the update.
        weight: What it is the sum of: samples, tokens.
        grad_norm: The gradient's 2-norm before it was cut; None if nothing was updated.
        num_microbatches: How many forward passes made the gradient.
        microbatch_size: The largest of them, in units of the split.
        num_ooms: How often it went out of memory before it went through.
        skipped: Whether the weights are as they were: skipped by the policy or by the gradient scaler.

    Example:
        >>> StepOutcome(6.0, 4.0, 1.5, num_microbatches=2, microbatch_size=2, num_ooms=1, skipped=False).loss
        1.5
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
        """The mean loss; not a number when nothing was counted."""
        return self.loss_sum / self.weight if self.weight else math.nan


@dataclass(frozen=True)
class OomEvent:
    """An out-of-memory that was survived; handed to ``on_oom`` before the step is replayed.

    Attributes:
        kind: Which memory it was.
        error: The message of the failed allocation.
        phase: ``forward``, ``backward`` or ``update``.
        microbatch_size: What did not fit; None in the update.
        next_size: What is tried next; None in the update.
        flight_record: What was alive at that moment; None outside a run.
    """

    kind: OomKind
    error: str
    phase: str
    microbatch_size: int | None
    next_size: int | None
    flight_record: Path | None


@dataclass(frozen=True)
class SkipPolicy:
    """Permission to leave batches out, counted and capped. Without one, none is ever skipped.

    Args:
        max_skipped: The most batches that may be skipped.
        max_share: The largest share of all batches so far; one is always within it.
        on_nonfinite: Also skip a batch whose loss is not finite, and a step whose gradient is not.

    Example:
        >>> policy = SkipPolicy(max_skipped=10, max_share=0.01)
        >>> policy.allows(num_skipped=1, num_batches=5), policy.allows(num_skipped=2, num_batches=100)
        (True, False)
    """

    max_skipped: int
    max_share: float
    on_nonfinite: bool = False

    def allows(self, num_skipped: int, num_batches: int) -> bool:
        """Whether that many of that many may be skipped."""
        return num_skipped <= min(self.max_skipped, max(1.0, self.max_share * num_batches))
