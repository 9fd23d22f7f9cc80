"""Recover the steps of the Trainer of transformers from an out-of-memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device

from memfit.errors import SampleTooLargeError, UsageError
from memfit.training import StepRecovery, samples_in

_REMEDY = "set per_device_train_batch_size to what fits, and gradient_accumulation_steps to more"


class Recovery:
    """Makes the passes of a Trainer's steps, each by the Trainer's own ``training_step``."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.own = trainer, trainer.training_step
        trainer.training_step = self.training_step
        self.step: Any = None
        self.batches: Sequence[Any] = ()
        #: Whether a row of a batch is a sample: a pair of TRL is two rows, in two halves of the batch.
        self._is_by_sample: bool | None = None
        self._losses: Iterator[torch.Tensor] | None = None
        self._model: Any = None
        self._num_items: Any = None

    def open(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any] | None) -> None:
        args, backward = self.trainer.args, self.trainer.accelerator.backward
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        counts = (None, self._num_labels, samples_in)
        options: dict[str, Any] = {"counts": counts, "backward": backward, "dtype": dtype}
        self.step = StepRecovery(self.trainer.model, optimizer, self._loss, self._evaluated, **options)
        if saved is not None:
            self.step.load_state_dict(saved)

    def begin(self, batches: Sequence[Any]) -> None:
        self.batches, self._losses = batches, None
        for size in map(samples_in, batches):
            if size >= self.trainer.args.train_batch_size:  # a smaller one says nothing
                self._is_by_sample = size == self.trainer.args.train_batch_size and self._is_by_sample is not False

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Return the loss of the next batch; the first of a step makes the gradients of all."""
        if self._losses is None:
            self._model, self._num_items = model, num_items_in_batch
            try:
                self._losses = iter(self.step.losses(self.batches, may_split=self._is_by_sample is True))
            except (UsageError, SampleTooLargeError) as error:
                raise type(error)(error.what, rule=error.rule, remedy=_REMEDY) from error
        return next(self._losses)

    def _loss(self, batch: Any) -> torch.Tensor:
        accelerator, found = self.trainer.accelerator, []
        accelerator.backward = lambda loss, **options: found.append(loss)
        try:
            self.own(self._model, batch, self._num_items)
        finally:
            del accelerator.backward
        loss: torch.Tensor = found[0]
        return loss

    def _evaluated(self, batch: Any) -> torch.Tensor:
        trainer = self.trainer
        with trainer.compute_loss_context_manager():
            inputs = send_to_device(batch, trainer.args.device)
            found: torch.Tensor = trainer.compute_loss(self._model, inputs, num_items_in_batch=self._num_items)
        return found

    def _num_labels(self, batch: Any) -> float:
        """Count the labels as transformers does."""
        if "shift_labels" in batch:
            labels = batch["shift_labels"]
        else:
            labels = batch["labels"][..., 1:] if self.trainer._loss_shifts_labels else batch["labels"]
        return float(labels.ne(-100).sum())
