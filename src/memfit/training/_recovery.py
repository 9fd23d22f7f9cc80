"""Recover the steps of another loop from an out-of-memory: that loop's own code makes each loss and takes the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.training._compute import PlacedLoss
from memfit.training._exactness import Exactness
from memfit.training._gradients import Local
from memfit.training._snapshot import Snapshot
from memfit.training._split import BySample
from memfit.training._step import SafeStep

#: The number of labels or samples in a batch; None: the losses of its parts add up.
Count = Callable[[Any], float] | None


class StepRecovery(SafeStep):
    """Makes the gradients of a step that another loop takes; what does not fit is split smaller and repeated. As long
    as everything fits, they have the bytes that the loop would have made. ``loss(batch)`` is what the loop would go
    backward from; ``evaluated`` is the same in the model's present mode. ``counts`` are what the loss may be a mean
    over: the first is taken under which a batch's loss is that of its parts."""

    #: The loop has divided its losses already.
    divisor = 1.0

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any], torch.Tensor],
        evaluated: Callable[[Any], torch.Tensor],
        *,
        counts: Sequence[Count],
        backward: Callable[[torch.Tensor], object],
        dtype: torch.dtype | None = None,
    ) -> None:
        def training(_: Any, part: Any) -> tuple[torch.Tensor, float]:
            found = self._weigh(loss(part[0]), part, self._candidates.count)
            self._told.append(found[0].detach())
            return found

        def in_evaluation(count: Count) -> Callable[[Any, Any], Any]:
            return lambda _, part: self._weigh(evaluated(part[0]), part, count)

        self._samples = _Samples()
        super().__init__(model, optimizer, training, split=self._samples, backward=backward)
        device = next((one.device for one in model.parameters()), torch.device("cpu"))
        placed = [(count, PlacedLoss(in_evaluation(count), device, False, dtype)) for count in counts]
        self._candidates = _Candidates([(count, Exactness(model, one, self.split, False)) for count, one in placed])
        self.exactness: Any = self._candidates
        self._wholes: Sequence[Any] = ()
        self._told: list[torch.Tensor] = []
        self._losses: list[torch.Tensor] = []

    def losses(self, batches: Sequence[Any], *, may_split: bool = True) -> list[torch.Tensor]:
        """Add up the gradients of all batches of a step; return each loss. ``may_split``: rows are samples."""
        self._wholes, self._told, self._samples.may_split = batches, [], may_split
        self.gradients(*((batch, number) for number, batch in enumerate(batches)))
        self._wholes = ()
        return self._losses

    def _finish(self, local: Local, *, update: bool) -> tuple[float, bool]:
        """Leave the gradients to the loop, also those that are not finite."""
        told = iter(self._told[-sum(len(batch.parts) for batch in local.batches) :])
        each = [[next(told) for _ in batch.parts] for batch in local.batches]
        self._losses = [one[0] if len(one) == 1 else torch.stack(one).sum() for one in each]
        return math.nan, False

    def _weigh(self, loss: torch.Tensor, part: Any, count: Count) -> tuple[torch.Tensor, float]:
        """Return what a part brings to the loss of its batch, and its share of the samples."""
        batch, whole = part[0], self._wholes[part[1]]
        size, size_of_whole = self.split.count(batch), self.split.count(whole)
        if count is not None and size < size_of_whole:
            number = float(count(batch))
            if not number:
                raise UsageError(
                    "A part of the batch has no label, and the loss is a mean over labels.",
                    rule="a split batch gives the gradient of the whole one, or it is refused.",
                    remedy="take smaller batches from the loader, and accumulate more of them",
                )
            loss = loss * (number / float(count(whole)))
        return loss, size / size_of_whole


class _Candidates:
    """Ways in which a loss may weigh its samples, until a batch that is split shows which holds."""

    def __init__(self, left: list[tuple[Count, Exactness]]) -> None:
        self.left = left

    @property
    def count(self) -> Count:
        return self.left[0][0]

    def allow_step(self) -> None:
        self.left[0][1].allow_step()

    def allow_split(self, batch: Any, count: int, before: Snapshot, where: Mapping[str, Any]) -> None:
        while True:
            exactness = self.left[0][1]
            try:
                exactness.allow_split(batch, count, before, where)
            except UsageError:
                if len(self.left) == 1:
                    raise
                del self.left[0]
                continue
            if exactness.fault is None:
                raise UsageError(
                    "The batch must be split, and the losses of its parts are not finite.",
                    rule="they show how the loss weighs samples.",
                    remedy="look for missing values in this batch, or take smaller batches from the loader",
                )
            return

    def allow_buffers(self, before: Snapshot, where: Mapping[str, Any]) -> None:
        self.left[0][1].allow_buffers(before, where)


class _Samples(BySample):
    """Cuts by sample; a batch of tensors that are not equally long is one unit."""

    may_split = True

    def count(self, batch: Any) -> int:
        try:
            return super().count(batch) if self.may_split else 1
        except UsageError:
            return 1
