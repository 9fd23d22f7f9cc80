"""Keep the ranks of one training together: a vote before each update, then a sum that nobody enters alone.

A rank that fails says so in the next vote, and all raise together. Between a vote and the end of its update no rank can
fail alone any more: it leaves with exit code 79, and the group begins again from its last checkpoint.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memfit.errors import MemfitError, PeerFailedError, StoppedError, UsageError
from memfit.training._beat import beat, leave, lost_peers, peers_lost, place_now

OK, FATAL, STOPPED = range(3)
#: What a rank may ask for in a vote, beside a stop by the number of a signal.
SAVE = -1

_TEXT_BYTES = 256
_LARGE_BYTES, _BUCKET_BYTES = 1 << 20, 4 << 20
_IN_FLIGHT = 2


@dataclass(frozen=True)
class Vote:
    """What one rank says of a step before its update. ``sizes`` are its microbatch sizes with -1 for None, ``cost``
    that of its largest microbatch. ``used`` has a bit for each parameter with a gradient. ``request`` is ``SAVE``, or
    the number of a signal to stop. ``is_half``: it ran out of memory inside its last update."""

    rank: int = 0
    step: int = 0
    status: int = OK
    is_half: bool = False
    request: int = 0
    num_batches: int = 0
    num_skipped: int = 0
    num_left: int = 0
    sizes: tuple[int, ...] = (-1, -1, 0, 0, 0)
    cost: int = 1
    num_retries: int = 0
    has_new_buffers: bool = False
    loss_sum: float = 0.0
    weight: float = 0.0
    text: str = ""
    used: bytes = b""

    def pack(self, num_bytes: int) -> bytes:
        values = vars(self) | {"text": self.text.encode()[:_TEXT_BYTES]}
        packed = np.array(tuple(values[name] for name in _PACKED.names or ()), _PACKED)
        return packed.tobytes() + self.used.ljust(num_bytes, b"\0")

    @classmethod
    def unpack(cls, rank: int, data: bytes) -> Vote:
        values = dict(zip(_PACKED.names or (), np.frombuffer(data, _PACKED, 1).item(), strict=True))
        sizes, text = tuple(values.pop("sizes").tolist()), values.pop("text").decode(errors="ignore")
        return cls(rank, sizes=sizes, text=text, used=data[_PACKED.itemsize :], **values)


_KINDS = {"int": "i8", "bool": "?", "float": "f8", "str": f"S{_TEXT_BYTES}", "tuple[int, ...]": "5i8"}
#: A vote as bytes, as long on each rank; behind it are the bits of ``used``.
_PACKED = np.dtype([(one.name, _KINDS[str(one.type)]) for one in fields(Vote) if one.name not in ("rank", "used")])


class Ranks:
    """The group of ranks that train one model; every rank calls each of its methods at the same place.

    Gradients are summed in ``group``; votes and plain values go by ``side``. ``num_parameters``: how many a vote tells
    of. ``request`` is what the last vote asked for, ``SAVE`` or the number of a signal; 0 for nothing. ``wants``
    returns what this rank asks for. ``is_over``: all ranks raise what this one raises."""

    def __init__(self, group: Any, num_parameters: int = 0) -> None:
        self.group, self.side = group, _side_group(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._num_bytes = (num_parameters + 7) // 8
        self.step = self.request = 0
        self.wants: Callable[[], int] = int
        self.is_over = False
        self._came_from = "end"

    @classmethod
    def current(cls, group: Any = None, num_parameters: int = 0) -> Ranks | None:
        """Return the ranks of a group, by default of the main one; None in a process that trains alone."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD if group is None else group
        return cls(group, num_parameters) if dist.get_world_size(group) > 1 else None

    def vote(self, mine: Vote) -> list[Vote]:
        """Return the votes of all ranks in order; leave if one is lost or at another step."""
        self._came_from = place_now()
        beat("vote", self.step)
        with or_leave("the vote failed"):
            votes = self._exchange(mine)
        self.request = max((vote.request for vote in votes), key=lambda value: (value > 0, abs(value)))
        steps = [vote.step for vote in votes]
        if len(set(steps)) > 1 and not any(vote.status for vote in votes):
            leave(f"the ranks are at steps {steps}")
        return votes

    def raise_failed(self, votes: Sequence[Vote], own: Exception | None = None) -> None:
        """Raise the own error, or one that names the rank which failed or stops."""
        failed = next((vote for vote in votes if vote.status), None)
        if failed is None:
            return
        self.is_over = True
        try:
            if own is not None:
                beat(self._came_from, self.step)  # where it failed, not in the vote that told of it
                raise own
        finally:
            del own  # the error's frames hold it
        if failed.status == STOPPED:
            remedy = "run the same command again"
            raise StoppedError(f"Stopped with rank {failed.rank}.", rule=failed.text, remedy=remedy)
        raise PeerFailedError(
            f"Rank {failed.rank} failed: {failed.text}",
            rule="all ranks of a group end together; the weights here are as they were before the step.",
            remedy=f"see the error of rank {failed.rank}",
        )

    def settle(self) -> None:
        """Meet all ranks between two steps, and raise if one has failed or stops."""
        self.raise_failed(self.vote(self.ballot()))
        beat("end")  # until what comes next says so

    def ballot(self, error: BaseException | None = None, **fields: Any) -> Vote:
        """Return this rank's vote; with an error it says that this rank ends."""
        if error is not None:
            fields |= {"status": STOPPED if isinstance(error, StoppedError) else FATAL, "text": first_line(error)}
        return Vote(self.rank, self.step, request=self.wants(), **fields)

    def gather(self, value: Any) -> list[Any]:
        self.settle()
        beat("vote", self.step)
        found: list[Any] = [None] * self.size
        with or_leave("gathering failed"):
            dist.all_gather_object(found, value, group=self.side)
        beat("end")
        return found

    def lead(self, function: Callable[[], Any]) -> Any:
        """Call a function on rank 0 alone; return on all ranks what it returned. PeerFailedError if it failed."""
        box, own = [None], None
        if self.rank == 0:
            try:
                box = [function()]
            except Exception as error:
                own = error
        self.raise_failed(self.vote(self.ballot(own)), own)
        with or_leave("the word of rank 0 failed"):
            dist.broadcast_object_list(box, src=dist.get_global_rank(self.group, 0), group=self.side)
        return box[0]

    def fail(self, error: BaseException) -> None:
        """Tell the peers in their next vote that this rank ends, unless they end as well."""
        if not self.is_over:
            with suppress(Exception):
                self._exchange(replace(self.ballot(error), request=0))

    def sequence(self) -> int:
        """Return how many collectives the group began."""
        return int(self.group._get_sequence_number_for_group())

    def share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give all ranks the values of rank 0, as DistributedDataParallel does."""
        dist._broadcast_coalesced(self.group, list(tensors), _BUCKET_BYTES, 0)  # type: ignore[attr-defined]

    def _exchange(self, mine: Vote) -> list[Vote]:
        data = torch.frombuffer(bytearray(mine.pack(self._num_bytes)), dtype=torch.uint8)
        found = [torch.empty_like(data) for _ in range(self.size)]
        dist.all_gather(found, data, group=self.side)
        return [Vote.unpack(rank, one.numpy().tobytes()) for rank, one in enumerate(found)]


class GradientSum:
    """Sums the gradients of all ranks in place: large ones as they are, small ones in buckets, two at a time."""

    def __init__(self, ranks: Ranks, parameters: Sequence[torch.Tensor]) -> None:
        self._ranks, self.parameters = ranks, parameters
        self._pieces = _pieces(parameters)
        self._expected = [parameter.requires_grad for parameter in parameters]
        self._buffers: list[dict[tuple[torch.device, torch.dtype], torch.Tensor]] = []

    def used(self) -> bytes:
        return np.packbits([parameter.grad is not None for parameter in self.parameters]).tobytes()

    def reserve(self) -> None:
        """Allocate all that ``sum`` needs, zeros in place of missing gradients too."""
        while len(self._buffers) < _IN_FLIGHT:
            sizes: dict[tuple[torch.device, torch.dtype], int] = {}
            for piece in self._pieces:
                if self._goes_alone(piece):
                    continue
                key = (self.parameters[piece[0]].device, self.parameters[piece[0]].dtype)
                sizes[key] = max(sizes.get(key, 0), sum(self.parameters[index].numel() for index in piece))
            self._buffers.append(
                {key: torch.empty(size, device=key[0], dtype=key[1]) for key, size in sizes.items()},
            )
        for parameter, is_expected in zip(self.parameters, self._expected, strict=True):
            if parameter.grad is None and is_expected:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad is not None and not parameter.grad.is_contiguous() and parameter.is_contiguous():
                parameter.grad = parameter.grad.contiguous()

    def fit(self, votes: Sequence[Vote]) -> None:
        """Give a gradient to the parameters that some rank has one of, and to no other: an optimizer leaves these."""
        used = np.bitwise_or.reduce([np.frombuffer(vote.used, np.uint8) for vote in votes])
        self._expected = np.unpackbits(used, count=len(self.parameters)).astype(bool).tolist()
        for parameter, is_used in zip(self.parameters, self._expected, strict=True):
            if not is_used:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def sum(self, factor: float) -> None:
        """Replace each gradient by the sum over all ranks of gradient x ``factor``; each rank has its own factor."""
        in_flight: deque[Any] = deque()
        for number, piece in enumerate(self._pieces):
            grads = [grad for index in piece if (grad := self.parameters[index].grad) is not None]
            if not grads:
                continue
            if factor != 1.0:
                torch._foreach_mul_(grads, factor)
            flat, views = grads[0], []
            if not self._goes_alone(piece):
                flat = self._buffers[number % _IN_FLIGHT][flat.device, flat.dtype]
                flat = flat[: sum(grad.numel() for grad in grads)]
                parts = torch.split(flat, [grad.numel() for grad in grads])
                views = [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)]
                torch._foreach_copy_(views, grads)
            work = dist.all_reduce(flat, group=self._ranks.group, async_op=True)
            in_flight.append((work, grads, views))
            if len(in_flight) == _IN_FLIGHT:
                _land(*in_flight.popleft())
        while in_flight:
            _land(*in_flight.popleft())

    def _goes_alone(self, piece: Sequence[int]) -> bool:
        first = self.parameters[piece[0]]
        return len(piece) == 1 and first.nbytes >= _LARGE_BYTES and first.is_contiguous()


@contextmanager
def or_leave(what: str) -> Iterator[None]:
    """Leave with exit code 79 after any error inside: the peers wait for this rank in a collective."""
    try:
        yield
    except Exception as error:
        leave(lost_peers(error) if peers_lost(error) else f"{what}: {first_line(error)}")


def order_sums(model: Any) -> None:
    """Let a ``DistributedDataParallel`` add gradients in the same order from the first step on; all ranks call it. It
    puts them into other buckets after its first backward pass, and the sum over more than two ranks depends on that:
    the first step after a resume would differ. So this makes a pass without a model, as if the gradients came from the
    last weight to the first. ``static_graph=True`` is refused."""
    if getattr(model, "static_graph", False):
        raise UsageError(
            "DistributedDataParallel has static_graph=True.",
            rule="exact: all steps add gradients in the same order, also the first one after a resume.",
            remedy="leave it off",
        )
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters:  # then it keeps its first ones
        return
    weights = [one for one in model.module.parameters() if one.requires_grad]
    model.reducer.prepare_for_backward([])
    torch.autograd.backward([one.sum() * 0 for one in weights])
    for one in weights:
        one.grad = None


def leave_uncaught() -> None:
    """Leave with exit code 79 after an error that nobody caught if it says that another rank is lost."""
    before = sys.excepthook

    def leaves(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if peers_lost(error):
            leave(lost_peers(error))

    sys.excepthook = leaves


def first_line(error: BaseException) -> str:
    text = error.what if isinstance(error, MemfitError) else str(error).partition("\n")[0]
    return text if isinstance(error, MemfitError) else f"{type(error).__name__}: {text}"


@functools.cache
def _side_group(group: Any) -> Any:
    """Return a group for votes and plain values: itself if it takes tensors on the CPU, else one of gloo."""
    if "cpu:gloo" in dist.get_backend_config(group):
        return group
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo")


def _pieces(parameters: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the indices of the parameters whose gradients travel together; a large one travels alone."""
    pieces: list[list[int]] = []
    open_ones: dict[Any, tuple[list[int], int]] = {}
    for index, one in enumerate(parameters):
        bucket, size = open_ones.get((one.device, one.dtype), ([], 0))
        if one.nbytes >= _LARGE_BYTES:
            pieces.append([index])
            continue
        if not bucket or size + one.nbytes > _BUCKET_BYTES:
            bucket, size = [], 0
            pieces.append(bucket)
        bucket.append(index)
        open_ones[one.device, one.dtype] = (bucket, size + one.nbytes)
    return pieces


def _land(work: Any, grads: list[torch.Tensor], views: list[torch.Tensor]) -> None:
    work.wait()
    if views:
        torch._foreach_copy_(grads, views)
