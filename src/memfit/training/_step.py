"""Make an optimizer step that survives running out of memory: it is split smaller and repeated from its first state.

A repeated step ends with the same bytes as one that had its final split from the start. Against the unsplit step it is
**gradient-exact**; dropout draws other values after a split: **equal in distribution**.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field

from memfit.errors import DoesNotFitError, JobFailedError, MemfitError, SampleTooLargeError, UsageError
from memfit.rundir import record
from memfit.training._checks import Checked, check_parts, checked_arguments
from memfit.training._exactness import Exactness, Loss, place
from memfit.training._flight import record_oom
from memfit.training._guard import OptimizerGuard
from memfit.training._oom import Failed, OomKind, attempt, memory_now
from memfit.training._process import say
from memfit.training._records import SkipPolicy, StepOutcome
from memfit.training._sizes import MicrobatchSizes
from memfit.training._snapshot import Snapshot
from memfit.training._split import BySample, Split, held_bytes, is_opaque, leaves, rebuild

E = TypeVar("E", bound=MemfitError)

_MOST_UPDATES = 3
_LEAST_SCALE = 1e-4


@dataclass
class _Batch:
    """A loader batch on its way through a step."""

    content: Any
    count: int
    versions: list[tuple[str, torch.Tensor, int]]
    cost: Callable[[int, int], int]
    parts: list[tuple[int, int]] = field(default_factory=list)
    tried: set[tuple[int, int]] = field(default_factory=set)

    @property
    def size(self) -> int:
        """Units of the largest microbatch."""
        return max(stop - start for start, stop in self.parts)

    @property
    def largest_cost(self) -> int:
        return max(self.cost(*part) for part in self.parts)


@dataclass
class _Gradients:
    loss_sum: float
    weight: float
    norm: float
    skipped_by_scaler: bool = False


class SafeStep:
    """Makes optimizer steps that survive running out of memory, in any training loop.

    Args:
        model: The model, of this process alone: DDP and FSDP are refused. Buffers are put back before a step is
            repeated, plain attributes that the forward pass changes are not.
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
    ) -> None:
        check_parts(model, optimizer, loss, split)
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.split = BySample() if split is None else split
        self.cost = held_bytes if cost is None else cost
        self.max_grad_norm, self.backward = max_grad_norm, backward
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.skip = skip
        self.sizes = MicrobatchSizes(None if isinstance(microbatch_size, str) else microbatch_size)
        self.where: dict[str, Any] = {}
        self.num_ooms = self.num_skipped = self._num_batches = 0
        self._never_splits = microbatch_size is None
        self._guard = OptimizerGuard(optimizer)
        self._before = Snapshot(model, optimizer, self.scaler)
        self.exactness = Exactness(model, loss, self.split, allow_inexact)
        self._at: tuple[_Batch | None, tuple[int, int], str] = (None, (0, 0), "")

    def __call__(self, *batches: Any) -> StepOutcome:
        """Make one optimizer step over the batches; several are accumulated. After an error the weights are as before.

        Raises:
            SampleTooLargeError: If a single unit does not fit.
            DoesNotFitError: If the optimizer's own memory has no room.
            HalfUpdatedError: If memory ran out inside the update and it could not be undone.
            JobFailedError: If a loss or gradient is not finite.
            UsageError: If a split would not be exact, or the loss edited the batch.
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
        self._take_snapshot()
        self._guard.prepare()

    @property
    def pending_bytes(self) -> int:
        """Bytes of the state that the optimizer's first step will make; known once ``prepare`` was called."""
        return self._guard.pending_bytes

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs beside model, optimizer and random state."""
        return {
            "sizes": self.sizes.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "num_ooms": self.num_ooms,
            "num_skipped": self.num_skipped,
            "num_batches": self._num_batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self.sizes.load_state_dict(state["sizes"])
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.num_ooms, self.num_skipped = state["num_ooms"], state["num_skipped"]
        self._num_batches = state["num_batches"]

    def _run(self, batches: Sequence[Any], *, update: bool) -> StepOutcome:
        if not batches:
            raise UsageError("A step was given no batch.", rule="a step is over one or more.", remedy="pass a batch")
        self.exactness.allow_step()
        todo = [self._batch(content) for content in batches]
        self._num_batches += len(todo) if update else 0
        ooms_before, updates_left = self.num_ooms, _MOST_UPDATES
        self._take_snapshot()
        while todo:
            self._plan(todo)
            retries = _num_alloc_retries(self._guard.parameters())
            done = attempt(functools.partial(self._try, todo, update=update), self._note_failure)
            if isinstance(done, Failed):
                updates_left -= self._at[2] == "update"
                self._recover(done, todo, updates_left)
                continue
            outcome = StepOutcome(
                done.loss_sum,
                done.weight,
                done.norm,
                sum(len(batch.parts) for batch in todo),
                max(batch.size for batch in todo),
                self.num_ooms - ooms_before,
                done.skipped_by_scaler,
            )
            self._remember(todo, _num_alloc_retries(self._guard.parameters()) - retries)
            if not update:
                self._before.reset_scaler()
            return outcome
        self.optimizer.zero_grad()
        return StepOutcome(0.0, 0.0, None, 0, 0, self.num_ooms - ooms_before, skipped=True)

    def _batch(self, content: Any) -> _Batch:
        found = list(leaves(content))
        versions = [(place, leaf, _version(leaf)) for place, leaf in found if isinstance(leaf, torch.Tensor)]
        # looked through once: in a step of 20 ms each look takes as long as a small layer
        count = self.split.count_of(found) if type(self.split) is BySample else self.split.count(content)

        @functools.cache
        def cost(start: int, stop: int) -> int:
            return max(1, int(self.cost(self.split.take(content, start, stop) if stop - start < count else content)))

        return _Batch(content, max(1, count), versions, cost)

    def _take_snapshot(self) -> None:
        """Note how things are; when the copies have no room, once more with empty caches."""
        where = {**self.where, "phase": "snapshot"}
        note = functools.partial(record_oom, model=self.model, optimizer=self.optimizer, where=where)
        for _ in range(2):
            failed = attempt(self._before.take, note)
            if not isinstance(failed, Failed):
                return
            self.num_ooms += 1
        assert isinstance(failed, Failed)
        raise DoesNotFitError(
            f"In {place(self.where)} the copies of the model's buffers have no room: {failed.first_line}",
            rule=memory_now(failed.kind),
            remedy="give more memory, or make buffers that never change plain attributes",
        )

    def _plan(self, todo: list[_Batch]) -> None:
        for batch in todo:
            batch.parts = [(0, batch.count)] if self._never_splits else self.sizes.cut(batch.count, batch.cost)
            if len(batch.parts) > 1:
                self.exactness.allow_split(batch.content, batch.count, self._before, self.where)

    def _try(self, todo: list[_Batch], *, update: bool) -> _Gradients:
        done = self._backward(todo)
        if update:
            self._update(done)
        return done

    def _backward(self, todo: list[_Batch]) -> _Gradients:
        """Make the gradients of the mean loss over all batches, cut to the longest allowed."""
        self._at = (todo[0], todo[0].parts[0], "forward")
        self.optimizer.zero_grad()
        is_one = sum(len(batch.parts) for batch in todo) == 1
        divisor: Any = None
        sums: list[tuple[torch.Tensor, Any]] = []
        for batch in todo:
            for start, stop in batch.parts:
                self._at = (batch, (start, stop), "forward")
                part = batch.content if len(batch.parts) == 1 else self.split.take(batch.content, start, stop)
                loss_sum, weight = self._loss_of(rebuild(part, lambda leaf: leaf))  # the loss may take fields out of it
                del part
                if len(batch.parts) > 1:
                    self.exactness.allow_buffers(self._before, self.where)
                if divisor is None:
                    divisor = _provisional(weight, stop - start, sum(one.count for one in todo))
                loss = loss_sum / (weight if is_one else divisor)
                sums.append((loss_sum.detach(), weight))
                del loss_sum
                self._at = (batch, (start, stop), "backward")
                self.backward(loss if self.scaler is None else self.scaler.scale(loss))
                del loss
        divisor, *values = _read([divisor, *(loss_sum for loss_sum, _ in sums), *(weight for _, weight in sums)])
        done = _Gradients(sum(values[: len(sums)]), sum(values[len(sums) :]), 0.0)
        is_finite = math.isfinite(done.weight) and (math.isfinite(done.loss_sum) or self.scaler is not None)
        if done.weight <= 0 or not is_finite:
            raise self._not_finite(f"the loss is {done.loss_sum} over a weight of {done.weight}.")
        self._at = (None, (0, 0), "update")
        self._finish_gradients(done, 1.0 if is_one else divisor / done.weight)
        if not math.isfinite(done.norm) and self.scaler is None:
            raise self._not_finite(f"the gradient's norm is {done.norm}; the loss is {done.loss_sum / done.weight}.")
        return done

    def _loss_of(self, part: Any) -> tuple[torch.Tensor, Any]:
        """Return the summed loss of a microbatch and its weight, which carries no graph."""
        found: Any = self.loss(self.model, part)
        loss_sum, weight = found if isinstance(found, tuple | list) and len(found) == 2 else (found, None)
        if not (_is_number(loss_sum) and isinstance(loss_sum, torch.Tensor) and _is_number(weight)):
            raise UsageError(
                f"loss(model, batch) returned {_describe(found)}.",
                rule="it returns the summed loss as a tensor of one number, and the weight that it is the sum of.",
                remedy="return loss.sum(), len(x)",
            )
        return loss_sum, weight.detach() if isinstance(weight, torch.Tensor) else weight

    def _finish_gradients(self, done: _Gradients, factor: float) -> None:
        """Bring the gradients to the true divisor, out of the scaler's scale and under the norm."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        parameters = self._guard.parameters()
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
        done.norm = float(norm)
        if self.max_grad_norm is not None and math.isfinite(done.norm):
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, norm)

    def _update(self, done: _Gradients) -> None:
        scaler = self.scaler
        if scaler is None:
            self._guard.step()
            return
        found_inf = scaler._found_inf_per_device(self.optimizer).values()
        done.skipped_by_scaler = any(found.item() for found in found_inf)
        if done.skipped_by_scaler:  # the optimizer stays as it is, with the room kept for its state
            scale = scaler.get_scale()
            scaler.update()
            next_scale = scaler.get_scale()
            record("scaler_skip", scale=scale, next_scale=next_scale, **self.where)
            if next_scale < _LEAST_SCALE:  # no scale helps, as with a loss that is not finite itself
                raise self._not_finite(f"the gradient is not finite, however small its scale: {scale:.2g} now.")
            return

        def step_and_adapt() -> None:
            scaler.step(self.optimizer)
            scaler.update()

        self._guard.step(step_and_adapt)  # last: what failed after it would be done twice

    def _remember(self, todo: list[_Batch], num_retries: int) -> None:
        if self._never_splits or (self.sizes.limit is None and num_retries == 0):
            self.sizes.succeeded(1)
            return
        largest = max(todo, key=lambda batch: batch.largest_cost)
        if self.sizes.succeeded(largest.largest_cost, num_retries if largest.size > 1 else 0):
            self._cut_anew(largest)

    def _cut_anew(self, batch: _Batch) -> int:
        """Cut a batch again after what fits has changed; return the units of its largest microbatch."""
        before = batch.size
        batch.parts = self.sizes.cut(batch.count, batch.cost)
        fields = {"size": batch.size, "previous_size": before, "count": batch.count, "cost": self.sizes.limit}
        told = f"changes its microbatch size: {before} -> {batch.size} (batch of {batch.count})"
        record("microbatch", **fields, **self.where, text=told)
        return batch.size

    def _note_failure(self, text: str, kind: OomKind) -> None:
        """Record the out-of-memory, then drop all gradients, so that emptying the caches frees their memory."""
        _, part, phase = self._at
        where = {**self.where, "phase": phase, "microbatch_size": part[1] - part[0] or None}
        record_oom(text, kind, model=self.model, optimizer=self.optimizer, where=where)
        self.model.zero_grad()
        self.optimizer.zero_grad()

    def _recover(self, failed: Failed, todo: list[_Batch], updates_left: int) -> None:
        """Put everything back, and choose what is tried next."""
        batch, part, phase = self._at
        self._at = (None, (0, 0), "")
        self.num_ooms += 1
        self._before.restore()
        self._check_unedited(todo)
        if batch is None and updates_left <= 0:
            raise self._given_up(
                DoesNotFitError(
                    f"In {place(self.where)} the update went out of memory {_MOST_UPDATES} times: {failed.first_line}",
                    rule="it was undone each time; it does not depend on the batch, so splitting gives it no room.",
                    remedy="take an optimizer with a smaller state or fused=True, or give more memory",
                )
            )
        next_size = None if batch is None else self._next_size(batch, part, todo, failed)
        if batch is None or next_size is not None:
            record("retry", phase=phase, size=next_size, **self.where)
        how = f" with {part[1] - part[0]} at once; goes on with {next_size}" if next_size else ""
        say(f"out of {failed.kind} memory in {phase}{how}: {failed.first_line}")

    def _next_size(self, batch: _Batch, part: tuple[int, int], todo: list[_Batch], failed: Failed) -> int | None:
        if part[1] - part[0] > 1 and not self._never_splits:
            self.sizes.shrink(batch.cost(*part), batch.cost(part[0], sum(part) + 1 >> 1))
            return self._cut_anew(batch)
        if part not in batch.tried:
            batch.tried.add(part)
            return part[1] - part[0]  # once more, now that garbage and caches are gone
        error = self._too_large(batch, failed)
        if self.skip is None:
            raise self._given_up(error)
        self._skip(batch, todo, error)
        return None

    def _given_up(self, error: E) -> E:
        record("give_up", error=error.what, **self.where)
        return error

    def _too_large(self, batch: _Batch, failed: Failed) -> SampleTooLargeError:
        shapes = [f"{name or 'batch'}: {tuple(one.shape)} {str(one.dtype)[6:]}" for name, one, _ in batch.versions]
        is_cut = batch.count > 1 and not self._never_splits
        opaque = next((type(leaf).__name__ for _, leaf in leaves(batch.content) if is_opaque(leaf)), "")
        is_whole = not is_cut and (opaque != "" or any(one.ndim and len(one) > 1 for _, one, _ in batch.versions))
        remedy = (
            "activation checkpointing (torch.utils.checkpoint, or gradient_checkpointing_enable() of Transformers), "
            "shorter samples, bfloat16 autocast, or more memory"
        )
        if is_whole and self._never_splits:
            remedy = f"pass microbatch_size='auto' to split it, or: {remedy}"
        elif is_whole:
            unit = f"memfit cannot cut a {opaque}" if opaque else "it is one unit now"
            remedy = f"pass split= an object with count(batch) and take(batch, start, stop) ({unit}), or: {remedy}"
        return SampleTooLargeError(
            f"{'The batch, which is not split,' if is_whole else 'A single unit of the batch'} does not fit, in "
            f"{place(self.where)}, tried twice ({'; '.join(shapes[:6]) or type(batch.content).__name__}): "
            f"{failed.first_line}",
            rule=memory_now(failed.kind),
            remedy=remedy,
        )

    def _skip(self, batch: _Batch, todo: list[_Batch], error: MemfitError) -> None:
        assert self.skip is not None
        self.num_skipped += 1
        counts = {"num_skipped": self.num_skipped, "num_batches": self._num_batches}
        told = f"skips a batch, number {self.num_skipped} of {self._num_batches}: {error.what}"
        record("skip", reason=error.what, **counts, **self.where, text=told)
        if not self.skip.allows(self.num_skipped, self._num_batches):
            number = f"number {self.num_skipped} of {self._num_batches} batches"
            raise type(error)(
                f"{error.what.rstrip('.')}; it would be skipped as {number}.",
                rule=f"{self.skip} allows no more. {error.rule}",
                remedy=error.remedy,
            )
        todo[:] = [one for one in todo if one is not batch]

    def _not_finite(self, what: str) -> JobFailedError:
        return JobFailedError(
            f"In {place(self.where)} {what}",
            rule="a step is taken only on a finite loss over a weight above 0, with a finite gradient; the weights are "
            "as they were before it.",
            remedy="look for missing values in this batch, lower the learning rate, or set max_grad_norm",
        )

    def _check_unedited(self, todo: list[_Batch]) -> None:
        for batch in todo:
            for name, tensor, version in batch.versions:
                if _version(tensor) != version:
                    raise UsageError(
                        f"The loss edited batch{name} in place, and the step went out of memory after that.",
                        rule="a step is replayed from its first state, and the batch is no longer what it was.",
                        remedy="clone the tensor in the loss before editing it",
                    )


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was edited; one made in inference mode does not count that."""
    return 0 if tensor.is_inference() else tensor._version


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, numbers.Real)


def _describe(value: Any) -> str:
    """Return the kinds of what a loss returned, in few words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(map(_describe, value[:3]))}"
    return f"{'an' if type(value).__name__[0] in 'aeiou' else 'a'} {type(value).__name__}"


def _provisional(weight: Any, num_units: int, num_all: int) -> Any:
    """Return a divisor near the weight of a split step: one far from it could overflow float16."""
    if isinstance(weight, torch.Tensor):  # not read: that would wait for the device
        guess = weight.float() * (num_all / num_units)
        return torch.where(guess > 0, guess, float(num_all))
    number = float(weight) * (num_all / num_units)
    return number if number > 0 else float(num_all)


def _read(values: Sequence[Any]) -> list[float]:
    """Return the numbers in tensors and out of them, with one wait for each device and dtype."""
    found: dict[int, float] = {}
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            alike.setdefault((value.device, value.dtype), []).append(index)
        else:
            found[index] = float(value)
    for indices in alike.values():
        found.update(zip(indices, torch.stack([values[index].reshape(()) for index in indices]).tolist(), strict=True))
    return [float(found[index]) for index in range(len(values))]


def _num_alloc_retries(parameters: list[torch.Tensor]) -> int:
    """Return how often the devices' allocators have emptied their caches and tried again."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    devices = {parameter.device for parameter in parameters if parameter.is_cuda}
    return sum(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0) for device in devices)
