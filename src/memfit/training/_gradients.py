"""Make the gradients of a step in this process: what does not fit is split smaller and repeated from the same state.

This half of a step tells nobody else anything. An error in it becomes a value; ``SafeStep`` decides what follows.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.errors import SampleTooLargeError, UsageError
from memfit.rundir import record
from memfit.training._exactness import Exactness, Loss, place
from memfit.training._flight import record_oom
from memfit.training._oom import Failed, OomKind, attempt, memory_now
from memfit.training._process import say
from memfit.training._records import SkipPolicy
from memfit.training._sizes import MicrobatchSizes
from memfit.training._snapshot import Snapshot
from memfit.training._split import BySample, Split, is_opaque, leaves, rebuild


@dataclass
class Batch:
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
class _Place:
    batch: Batch
    part: tuple[int, int]
    phase: str = "forward"

    @property
    def size(self) -> int:
        return self.part[1] - self.part[0]


@dataclass(frozen=True)
class Local:
    """Sums over this process's batches; the gradients of the summed loss, divided by ``divisor``, lie in the weights.
    ``is_skipped``: no batch is left, on any rank. ``used`` has a bit for each parameter with a gradient, for the
    ranks."""

    loss_sum: float = 0.0
    weight: float = 0.0
    divisor: float = 1.0
    batches: Sequence[Batch] = ()
    alloc_retries: int = 0
    is_skipped: bool = True
    used: bytes = b""


@dataclass(frozen=True)
class Failure:
    """Why this process has no gradients; after an out-of-memory also where it was, and the cost that was allowed."""

    error: Exception
    kind: OomKind | None = None
    phase: str = ""
    limit: int | None = None


@dataclass(frozen=True)
class StepSetup:
    """The parts and settings of a ``SafeStep`` that its passes need; it explains each."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss
    microbatch_size: int | str | None
    split: Split
    cost: Callable[[Any], int]
    scaler: torch.amp.GradScaler | None
    backward: Callable[[torch.Tensor], object]
    allow_inexact: bool
    skip: SkipPolicy | None


class Gradients:
    """The half of a step that is this process's own."""

    #: What the summed loss is divided by, if that is known before the passes.
    divisor: float | None = None

    def __init__(self, setup: StepSetup) -> None:
        self.model, self.optimizer, self.loss = setup.model, setup.optimizer, setup.loss
        self.split, self.cost, self.backward, self.skip = setup.split, setup.cost, setup.backward, setup.skip
        self.scaler = setup.scaler if setup.scaler is not None and setup.scaler.is_enabled() else None
        self.sizes = MicrobatchSizes(None if isinstance(setup.microbatch_size, str) else setup.microbatch_size)
        self.where: dict[str, Any] = {}
        self.num_ooms = self.num_skipped = self.num_batches = 0
        self.never_splits = setup.microbatch_size is None
        self.called: Any = self.model
        self.team: Any = None  # of the ranks that make the step together, see Team
        self.before = Snapshot(self.model, self.optimizer, self.scaler)
        self.exactness = Exactness(self.model, self.loss, self.split, setup.allow_inexact)

    def batch(self, content: Any) -> Batch:
        found = list(leaves(content))
        versions = [(name, leaf, _version(leaf)) for name, leaf in found if isinstance(leaf, torch.Tensor)]
        # looked through once: in a step of 20 ms each look takes as long as a small layer
        count = self.split.count_of(found) if type(self.split) is BySample else self.split.count(content)

        @functools.cache
        def cost(start: int, stop: int) -> int:
            return max(1, int(self.cost(self.split.take(content, start, stop) if stop - start < count else content)))

        return Batch(content, max(1, count), versions, cost)

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def num_alloc_retries(self) -> int:
        """Return how often the allocators of the parameters' devices have emptied their caches and tried again."""
        devices = {parameter.device for parameter in self.parameters() if parameter.is_cuda}
        return sum(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0) for device in devices)

    def local(self, batches: Sequence[Batch]) -> Local | Failure:
        """Return the sums over the batches, zero over none; microbatches shrink until they fit."""
        try:
            return self._repeat(list(batches))
        except Exception as error:
            return Failure(error)

    def _repeat(self, todo: list[Batch]) -> Local | Failure:
        while todo:
            for batch in todo:
                batch.parts = [(0, batch.count)] if self.never_splits else self.sizes.cut(batch.count, batch.cost)
            if self.team is not None:
                self.team.cut(todo)
            for batch in todo:
                if len(batch.parts) > 1:
                    self.exactness.allow_split(batch.content, batch.count, self.before, self.where)
            at, retries = _Place(todo[0], todo[0].parts[0]), self.num_alloc_retries()
            done = attempt(functools.partial(self._sum, todo, at), functools.partial(self._note, at))
            if not isinstance(done, Failed):
                return Local(*done, todo, retries, is_skipped=False)
            limit, how = self.sizes.limit, ""
            self.undo(todo)
            size = self._next_size(at)
            if self.team is not None:
                size = self.team.go_on_with(size, at.size)
            if size is not None:
                record("retry", phase=at.phase, size=size, **self.where)
                how = f" with {at.size} at once; goes on with {size}"
            elif self.skip is None:
                return Failure(self._too_large(at.batch, done), done.kind, at.phase, limit)
            else:
                self._skip(self.skip, self._too_large(at.batch, done))
                todo = [one for one in todo if one is not at.batch]
            say(f"out of {done.kind} memory in {at.phase}{how}: {done.first_line}")
        self.optimizer.zero_grad()
        return Local()

    def _sum(self, todo: list[Batch], at: _Place) -> tuple[float, float, float]:
        """Run all microbatches forward and backward; return the sum of losses, that of weights, and the divisor."""
        self.optimizer.zero_grad()
        is_one = sum(len(batch.parts) for batch in todo) == 1
        divisor: Any = self.divisor
        sums: list[tuple[torch.Tensor, Any]] = []
        for batch in todo:
            for start, stop in batch.parts:
                at.batch, at.part, at.phase = batch, (start, stop), "forward"
                if self.team is not None:
                    self.team.begin_part(is_last=batch is todo[-1] and stop == batch.count)
                part = batch.content if len(batch.parts) == 1 else self.split.take(batch.content, start, stop)
                loss_sum, weight = self._loss_of(rebuild(part, lambda leaf: leaf))  # the loss may take fields out of it
                del part
                if len(batch.parts) > 1:
                    self.exactness.allow_buffers(self.before, self.where)
                if divisor is None:
                    num_all = sum(one.count for one in todo)
                    divisor = weight if is_one else _provisional(weight, stop - start, num_all)
                    if self.team is not None:
                        divisor = self.team.divisor_of(divisor)
                loss = loss_sum / divisor
                sums.append((loss_sum.detach(), weight))
                del loss_sum
                at.phase = "backward"
                self.backward(loss if self.scaler is None else self.scaler.scale(loss))
                del loss
        divisor, *values = _read([divisor, *(loss_sum for loss_sum, _ in sums), *(weight for _, weight in sums)])
        return sum(values[: len(sums)]), sum(values[len(sums) :]), divisor

    def _loss_of(self, part: Any) -> tuple[torch.Tensor, Any]:
        """Return the summed loss of a microbatch and its weight, which carries no graph."""
        found: Any = self.loss(self.called, part)
        loss_sum, weight = found if isinstance(found, tuple | list) and len(found) == 2 else (found, None)
        if not (_is_number(loss_sum) and isinstance(loss_sum, torch.Tensor) and _is_number(weight)):
            raise UsageError(
                f"loss(model, batch) returned {_describe(found)}.",
                rule="it returns the summed loss as a tensor of one number, and the weight that it is the sum of.",
                remedy="return loss.sum(), len(x)",
            )
        return loss_sum, weight.detach() if isinstance(weight, torch.Tensor) else weight

    def _note(self, at: _Place, text: str, kind: OomKind) -> None:
        self.note_failure(text, kind, {"phase": at.phase, "microbatch_size": at.size or None})

    def note_failure(self, text: str, kind: OomKind, at: dict[str, Any]) -> None:
        """Record the out-of-memory, then drop all gradients, so that emptying the caches frees their memory."""
        record_oom(text, kind, model=self.model, optimizer=self.optimizer, where={**self.where, **at})
        self.model.zero_grad()
        self.optimizer.zero_grad()

    def undo(self, batches: Sequence[Batch]) -> None:
        """Put everything back after an out-of-memory; refuse to go on with a batch that the loss edited."""
        self.num_ooms += 1
        self.before.restore()
        for batch in batches:
            for name, tensor, version in batch.versions:
                if _version(tensor) != version:
                    raise UsageError(
                        f"The loss edited batch{name} in place, and the step went out of memory after that.",
                        rule="a step is replayed from its first state, and the batch is no longer what it was.",
                        remedy="clone the tensor in the loss before editing it",
                    )

    def _next_size(self, at: _Place) -> int | None:
        """Choose the units that are tried at once next; None after a single one was tried twice."""
        batch, part = at.batch, at.part
        if at.size > 1 and not self.never_splits:
            self.sizes.shrink(batch.cost(*part), batch.cost(part[0], sum(part) + 1 >> 1))
            return self.cut_anew(batch)
        if part in batch.tried:
            return None
        batch.tried.add(part)
        return at.size  # once more, now that garbage and caches are gone

    def cut_anew(self, batch: Batch) -> int:
        """Cut a batch again after what fits has changed; return the units of its largest microbatch."""
        before = batch.size
        batch.parts = self.sizes.cut(batch.count, batch.cost)
        fields = {"size": batch.size, "previous_size": before, "count": batch.count, "cost": self.sizes.limit}
        told = f"changes its microbatch size: {before} -> {batch.size} (batch of {batch.count})"
        record("microbatch", **fields, **self.where, text=told)
        return batch.size

    def _too_large(self, batch: Batch, failed: Failed) -> SampleTooLargeError:
        shapes = [f"{name or 'batch'}: {tuple(one.shape)} {str(one.dtype)[6:]}" for name, one, _ in batch.versions]
        is_cut = batch.count > 1 and not self.never_splits
        opaque = next((type(leaf).__name__ for _, leaf in leaves(batch.content) if is_opaque(leaf)), "")
        is_whole = not is_cut and (opaque != "" or any(one.ndim and len(one) > 1 for _, one, _ in batch.versions))
        remedy = (
            "activation checkpointing (torch.utils.checkpoint, or gradient_checkpointing_enable() of Transformers), "
            "shorter samples, bfloat16 autocast, or more memory"
        )
        if is_whole and self.never_splits:
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

    def _skip(self, policy: SkipPolicy, error: SampleTooLargeError) -> None:
        """Count a batch as skipped; refuse that where the policy allows no more."""
        self.num_skipped += 1
        counts = {"num_skipped": self.num_skipped, "num_batches": self.num_batches}
        number = f"number {self.num_skipped} of {self.num_batches}"
        record("skip", reason=error.what, **counts, **self.where, text=f"skips a batch, {number}: {error.what}")
        if self.team is None and not policy.allows(self.num_skipped, self.num_batches):  # else all are counted together
            raise SampleTooLargeError(
                f"{error.what.rstrip('.')}; it would be skipped as {number} batches.",
                rule=f"{policy} allows no more. {error.rule}",
                remedy=error.remedy,
            )


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was edited; one made in inference mode does not count that."""
    return 0 if tensor.is_inference() else tensor._version


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, numbers.Real)


def _describe(value: Any) -> str:
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
