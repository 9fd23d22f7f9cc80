"""Make an optimizer step that survives running out of memory: it is split smaller and repeated from its first state.

A repeated step ends with the same bytes as one that had its final split from the start. Against the unsplit step it is
**gradient-exact**; dropout draws other values after a split: **equal in distribution**.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from memfit.errors import DoesNotFitError, JobFailedError, MemfitError, UsageError
from memfit.rundir import record
from memfit.training._beat import beat
from memfit.training._checks import (
    Checked,
    Given,
    Recovery,
    bad_setting,
    check_parts,
    checked_arguments,
    take_off_wrapper,
)
from memfit.training._exactness import Loss, place
from memfit.training._flight import record_oom
from memfit.training._gradients import Batch, Failure, Gradients, Local, StepSetup
from memfit.training._guard import OptimizerGuard
from memfit.training._oom import Failed, attempt, memory_now
from memfit.training._process import say
from memfit.training._ranks import Ranks
from memfit.training._records import SkipPolicy, StepOutcome
from memfit.training._split import BySample, Split, held_bytes
from memfit.training._team import Team, Together

_MOST_UPDATES = 3
_LEAST_SCALE = 1e-4


class SafeStep(Gradients):
    """Makes optimizer steps that survive running out of memory, in any training loop.

    Args:
        model: The model. One in ``DistributedDataParallel`` is trained by all ranks of its group: memfit takes the
            wrapper's work over. Buffers are put back before a step is repeated, plain attributes that the forward pass
            changes are not.
        optimizer: The optimizer over its parameters.
        loss: ``loss(model, batch) -> (sum, weight)``: the summed loss and the weight (number of samples, tokens) that
            it is the sum of. A step descends ``sum / weight``. It must not edit the batch's tensors.
        microbatch_size: The most units at once; ``"auto"`` finds what fits; None never splits.
        split: How a batch is cut.
        cost: ``cost(batch) -> int``: what memory grows with, such as tokens, nodes or frames; by default the bytes of
            the batch's tensors. More units must not cost less.
        max_grad_norm: Longer gradients are cut to this 2-norm; None leaves them.
        scaler: The gradient scaler of mixed precision with float16.
        backward: ``backward(loss)`` in place of ``loss.backward()``, for example ``accelerator.backward``.
        allow_inexact: Split also where the result differs from the unsplit batch's (batch statistics, losses over the
            whole batch); recorded as an ``inexact`` event.
        skip: Which batches may be left out; None: none.
        group: None trains a plain model in this process alone although a group of ranks is there.
        recovery: What follows when memory runs out on a rank of ``DistributedDataParallel``: it repeats its passes, and
            memfit sums the gradients after them; or with ``"restart"`` DDP sums them in the backward pass, and the
            group begins again with a smaller size. A ``fully_shard`` model always restarts.

    Attributes:
        where: Plain values such as epoch and step, for errors, events and records.
        sizes: The largest cost of a microbatch that fits.
        num_ooms: How often memory ran out so far.
        num_skipped: How many batches the policy skipped so far.

    Example:
        >>> import torch
        >>> from memfit.training import SafeStep
        >>> def squared_error(model, batch):
        ...     x, y = batch
        ...     return ((model(x) - y) ** 2).sum(), len(x)
        >>> model = torch.nn.Linear(1, 1)
        >>> step = SafeStep(model, torch.optim.SGD(model.parameters(), lr=0.3), squared_error, microbatch_size=8)
        >>> x = torch.linspace(-1, 1, 32)[:, None]
        >>> for _ in range(40):
        ...     outcome = step((x, 2 * x))
        >>> outcome.num_microbatches, round(model.weight.item(), 2)
        (4, 2.0)
    """

    @checked_arguments
    def __init__(  # noqa: PLR0913
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        *,
        microbatch_size: Checked[Annotated[int, Field(ge=1)] | Literal["auto"] | None] = "auto",
        split: Split | None = None,
        cost: Callable[[Any], int] | None = None,
        max_grad_norm: Checked[Annotated[float, Field(gt=0)] | None] = None,
        scaler: torch.amp.GradScaler | None = None,
        backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
        allow_inexact: bool = False,
        skip: SkipPolicy | None = None,
        group: Literal["auto"] | None = "auto",
        recovery: Checked[Recovery] = "repeat",
    ) -> None:
        given = take_off_wrapper(model, group, recovery)
        model, self.is_sharded = given.model, given.is_sharded
        check_parts(model, optimizer, loss, split, is_sharded=given.is_sharded)
        split, cost = BySample() if split is None else split, held_bytes if cost is None else cost
        setup = StepSetup(model, optimizer, loss, microbatch_size, split, cost, scaler, backward, allow_inexact, skip)
        super().__init__(setup)
        self.max_grad_norm = max_grad_norm
        self.guard = OptimizerGuard(optimizer)
        self.ranks = self._ranks_of(given)
        self.team: Team | None = None
        if self.ranks is not None:
            self.team = Team(self, self.ranks, given.check) if given.check else Together(self, self.ranks, given.called)

    def _ranks_of(self, given: Given) -> Ranks | None:
        if given.group is None:
            return None
        if given.is_sharded:
            if self.scaler is not None:
                raise bad_setting("scaler", self.scaler, "it is None for a sharded model", "train it in bfloat16")
            self.guard.tries = False
            self.exactness.trust()
            return Ranks(given.group)  # a group of one rank, too: its weights are shards
        return Ranks.current(given.group, len(self.parameters()))

    def __call__(self, *batches: Any) -> StepOutcome:
        """Make one optimizer step over the batches; several are accumulated. After an error the weights are as before.

        Raises:
            SampleTooLargeError: If a single unit does not fit.
            DoesNotFitError: If the optimizer's own memory has no room.
            HalfUpdatedError: If memory ran out inside the update and it could not be undone.
            JobFailedError: If a loss or gradient is not finite.
            UsageError: If a split would not be exact, or the loss edited the batch.
            PeerFailedError: If another rank has failed.
        """
        return self._run(batches, update=True)

    def gradients(self, *batches: Any) -> StepOutcome:
        """Make the gradients of a step and leave the weights as they are."""
        return self._run(batches, update=False)

    def prepare(self) -> None:
        """Take the memory of the optimizer's state now, and try that of a step's temporaries.

        Raises:
            DoesNotFitError: If there is no room; nothing was changed.
        """
        self.take_snapshot()
        self.guard.prepare()

    @property
    def pending_bytes(self) -> int:
        """Bytes of the state that the optimizer's first step will make; known once ``prepare`` was called."""
        return self.guard.pending_bytes

    def settle(self) -> None:
        """Meet all ranks before a checkpoint or a validation.

        Every rank calls it at the same place; it does nothing in a process that trains alone.

        Raises:
            HalfUpdatedError: If memory ran out inside the last update of some rank.
            PeerFailedError: If another rank has failed.
        """
        if self.team is not None:
            self.team.settle()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs beside model, optimizer and random state."""
        return {
            "sizes": self.sizes.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "num_ooms": self.num_ooms,
            "num_skipped": self.num_skipped,
            "num_batches": self.num_batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self.sizes.load_state_dict(state["sizes"])
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.num_ooms, self.num_skipped = state["num_ooms"], state["num_skipped"]
        self.num_batches = state["num_batches"]
        if self.team is not None:
            self.team.counts = self.num_skipped, self.num_batches

    def _run(self, contents: Sequence[Any], *, update: bool) -> StepOutcome:
        if not contents and self.ranks is None:  # of several ranks some may have none
            raise UsageError("A step was given no batch.", rule="a step is over one or more.", remedy="pass a batch")
        ooms_before, is_done = self.num_ooms, False
        try:
            batches = self._begin(contents)
        except Exception as error:
            if self.team is None:
                raise
            self.team.refuse(error)
        self.num_batches += len(batches) if update else 0
        try:
            outcome = self._commit(batches, ooms_before, update=update)
            is_done = update
            return outcome
        finally:
            if not is_done:
                self.before.reset_scaler()
            if self.ranks is not None:
                beat("end")  # what follows is the loop's own

    def _begin(self, contents: Sequence[Any]) -> list[Batch]:
        if self.ranks is not None:
            self.ranks.step, self.ranks.is_over = self.ranks.step + 1, False
        self.exactness.allow_step()
        batches = [self.batch(content) for content in contents]
        self.take_snapshot()
        return batches

    def _commit(self, batches: Sequence[Batch], ooms_before: int, *, update: bool) -> StepOutcome:
        """Make the gradients and step, again from the first state while the update finds no memory."""
        tries_left = _MOST_UPDATES
        note = functools.partial(self.note_failure, at={"phase": "update", "microbatch_size": None})
        while True:
            local = self._agree(batches)
            if local.is_skipped:
                return StepOutcome(0.0, 0.0, None, 0, 0, self.num_ooms - ooms_before, skipped=True)
            finish = functools.partial(self._finish, local, update=update)
            done = attempt(finish, note) if self.team is None else self.team.finish(finish, note, update)
            if not isinstance(done, Failed):
                break
            batches, tries_left = local.batches, tries_left - 1
            self.undo(batches)
            if not tries_left:
                raise self._given_up(self._no_update(done))
            record("retry", phase="update", size=None, **self.where)
            say(f"out of {done.kind} memory in update: {done.first_line}")
        norm, skipped = done
        num = sum(len(batch.parts) for batch in local.batches)
        size = max((batch.size for batch in local.batches), default=0)
        self._remember(local)
        return StepOutcome(local.loss_sum, local.weight, norm, num, size, self.num_ooms - ooms_before, skipped)

    def _agree(self, batches: Sequence[Batch]) -> Local:
        """Return what the step goes on with, or raise. One process asks only itself; ranks vote."""
        if self.team is not None:
            return self.team.agree(self.team.local(batches))
        local = self.local(batches)
        try:
            if isinstance(local, Failure):
                raise self.error_of(local)
            return local
        finally:
            del local  # the error's frames hold it, and it the error

    def error_of(self, failure: Failure) -> Exception:
        """Return the error of a failed step; one after an out-of-memory is recorded."""
        return failure.error if failure.kind is None else self._given_up(failure)

    def _given_up(self, failure: Failure) -> Exception:
        told = failure.error.what if isinstance(failure.error, MemfitError) else str(failure.error)
        record("give_up", error=told, phase=failure.phase, limit=failure.limit, **self.where)
        return failure.error

    def _finish(self, local: Local, *, update: bool) -> tuple[float, bool]:
        """Bring the gradients to the mean loss and under the norm, and update; return norm and whether skipped."""
        is_finite = math.isfinite(local.weight) and (math.isfinite(local.loss_sum) or self.scaler is not None)
        if local.weight <= 0 or not is_finite:
            raise self._not_finite(f"the loss is {local.loss_sum} over a weight of {local.weight}.")
        norm = self._scale(local.divisor / local.weight)
        if not math.isfinite(norm) and self.scaler is None:
            raise self._not_finite(f"the gradient's norm is {norm}; the loss is {local.loss_sum / local.weight}.")
        return norm, update and self._update()

    def take_snapshot(self) -> None:
        """Note how things are; when the copies have no room, once more with empty caches."""
        where = {**self.where, "phase": "snapshot"}
        note = functools.partial(record_oom, model=self.model, optimizer=self.optimizer, where=where)
        for _ in range(2):
            failed = attempt(self.before.take, note)
            if not isinstance(failed, Failed):
                return
            self.num_ooms += 1
        assert isinstance(failed, Failed)
        raise DoesNotFitError(
            f"In {place(self.where)} the copies of the model's buffers have no room: {failed.first_line}",
            rule=memory_now(failed.kind),
            remedy="give more memory, or make buffers that never change plain attributes",
        )

    def _scale(self, factor: float) -> float:
        """Bring the gradients to the true divisor, out of the scaler's scale and under the norm."""
        if self.team is not None:  # before the scale is taken out: what is not finite on one rank is so on all
            factor = self.team.reduce(factor)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        parameters = self.parameters()
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()  # each row once, or its norm is another one
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not grads:
            raise UsageError(
                f"In {place(self.where)} none of the optimizer's {len(parameters)} parameters has a gradient.",
                rule="the optimizer steps the parameters of the model that the loss is of.",
                remedy="make the optimizer over model.parameters(), after the model was moved or wrapped",
            )
        if factor != 1.0:
            torch._foreach_mul_(grads, factor)
        norm = torch.nn.utils.get_total_norm([grad._values() if grad.is_sparse else grad for grad in grads])
        if self.is_sharded:
            norm = norm.full_tensor()  # type: ignore[attr-defined]
        length = float(norm)
        if self.max_grad_norm is not None and math.isfinite(length):
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
        return length

    def _update(self) -> bool:
        scaler = self.scaler
        if scaler is None:
            self.guard.step()
            return False
        found_inf = scaler._found_inf_per_device(self.optimizer).values()
        if any(found.item() for found in found_inf):  # the optimizer stays as it is, with the room kept for its state
            scale = scaler.get_scale()
            scaler.update()
            next_scale = scaler.get_scale()
            record("scaler_skip", scale=scale, next_scale=next_scale, **self.where)
            if next_scale < _LEAST_SCALE:  # no scale helps, as with a loss that is not finite itself
                raise self._not_finite(f"the gradient is not finite, however small its scale: {scale:.2g} now.")
            return True

        def step_and_adapt() -> None:
            scaler.step(self.optimizer)
            scaler.update()

        self.guard.step(step_and_adapt)  # last: what failed after it would be done twice
        return False

    def _remember(self, local: Local) -> None:
        if self.team is not None:
            if self.team.remember() and local.batches:
                self.cut_anew(max(local.batches, key=lambda batch: batch.largest_cost))
            return
        num_retries = self.num_alloc_retries() - local.alloc_retries
        if self.never_splits or (self.sizes.limit is None and num_retries == 0):
            self.sizes.succeeded(1)
            return
        largest = max(local.batches, key=lambda batch: batch.largest_cost)
        if self.sizes.succeeded(largest.largest_cost, num_retries if largest.size > 1 else 0):
            self.cut_anew(largest)

    def _no_update(self, failed: Failed) -> Failure:
        error = DoesNotFitError(
            f"In {place(self.where)} the update went out of memory {_MOST_UPDATES} times: {failed.first_line}",
            rule="it was undone each time; it does not depend on the batch, so splitting gives it no room.",
            remedy="take an optimizer with a smaller state or fused=True, or give more memory",
        )
        return Failure(error, failed.kind, "update", self.sizes.limit)

    def _not_finite(self, what: str) -> JobFailedError:
        return JobFailedError(
            f"In {place(self.where)} {what}",
            rule="a step is taken only on a finite loss over a weight above 0, with a finite gradient; the weights are "
            "as they were before it.",
            remedy="look for missing values in this batch, lower the learning rate, or set max_grad_norm",
        )
