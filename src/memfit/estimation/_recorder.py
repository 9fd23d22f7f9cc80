"""Record births and deaths of storages: a dispatch mode sees every operation on fake tensors."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfit.estimation._cuda_ops import CudaOps
from memfit.estimation._events import Event, Part, Phase
from memfit.estimation._recurrent import count_onednn
from memfit.estimation._time_limit import check_time

_forced_parts: list[tuple[Part, int]] = []

_aten = torch.ops.aten
#: The number of every block that is not on the device: a number made into a tensor, such as Adam's count of steps.
_ON_HOST = -1
_DEPENDS_ON_DATA = (_aten.index.Tensor, _aten.masked_select.default, _aten.nonzero.default)
#: An LSTM on the CPU; on CUDA cuDNN runs it.
_ON_CPU = (_aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default)


@contextlib.contextmanager
def part(name: Part, *, stream: int = 0) -> Iterator[None]:
    """Count every block born within as this part, on this CUDA stream; 0 is the one that computes."""
    _forced_parts.append((name, stream))
    try:
        yield
    finally:
        _forced_parts.pop()


@dataclass
class Block:
    phase: Phase  # of its birth
    num_bytes: int
    forced: Part | None = None  # named at its birth
    claimed: Part | None = None  # named afterwards by what holds it
    is_cast: bool = False  # a weight in a narrower dtype, such as autocast's
    outlived_birth_phase: bool = False
    stream: int = 0

    @property
    def part(self) -> Part:
        """What it is for: as named, or as its life shows."""
        named = self.forced or self.claimed
        if named:
            return named
        if self.is_cast:
            return "cast_weights"
        outliving: dict[Phase, Part] = {"build": "buffers", "forward": "activations", "step": "optimizer"}
        return outliving.get(self.phase, "temporaries") if self.outlived_birth_phase else "temporaries"


@dataclass
class Log:
    """Events so far, and the blocks; ``alive`` has the number and a reference to each living storage."""

    events: list[Event] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    alive: dict[int, tuple[int, weakref.ref[Any]]] = field(default_factory=dict)
    phase: Phase = "build"

    def bear(self, num_bytes: int) -> int:
        number = len(self.blocks)
        forced, stream = _forced_parts[-1] if _forced_parts else (None, 0)
        self.blocks.append(Block(self.phase, num_bytes, forced, stream=stream))
        self.events.append(Event(number, num_bytes, self.phase))
        return number

    def bury(self, number: int) -> None:
        self.events.append(Event(number, 0, self.phase))

    def watch(self, tensor: torch.Tensor, *, on_host: bool = False) -> int | None:
        """Return the number of the block under a tensor, new or known; None if it has no bytes on the device."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self.alive.get(key)
        if known is not None:
            return known[0] if known[0] != _ON_HOST else None
        num_bytes = storage.nbytes()
        if not num_bytes:
            return None
        number = _ON_HOST if on_host else self.bear(num_bytes)

        def die(_: object) -> None:
            if self.alive.pop(key, (None,))[0] == number and not on_host:
                self.bury(number)

        self.alive[key] = (number, weakref.ref(storage, die))
        return number

    def resize(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        known = self.alive.get(storage._cdata)
        if known is not None and known[0] == _ON_HOST:
            return
        if known is None or self.blocks[known[0]].num_bytes != storage.nbytes():
            if known is not None:
                del self.alive[storage._cdata]
                self.bury(known[0])
            self.watch(tensor)

    def find(self, tensor: torch.Tensor) -> int | None:
        known = self.alive.get(tensor.untyped_storage()._cdata)
        return known[0] if known and known[0] != _ON_HOST else None

    def claim(self, tensors: Iterable[Any], name: Part) -> None:
        """Name what the blocks under some tensors are for, unless they are named already."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                number = self.find(tensor)
                if number is not None and self.blocks[number].claimed is None:
                    self.blocks[number].claimed = name

    def enter(self, phase: Phase) -> None:
        for number, _ in self.alive.values():
            if number != _ON_HOST:
                self.blocks[number].outlived_birth_phase = True
        self.phase = phase


_Effect = Literal["births", "resizes", "none"]


def _effect_of(func: Any) -> _Effect:
    """What an operation can do to storages; views and most operations in place do nothing."""
    name = func._schema.name
    if name == "aten::lift_fresh" or any(one.alias_info is None for one in func._schema.returns):
        return "births"
    if name in ("aten::resize_", "aten::resize_as_", "aten::set_") or func._schema.overload_name.endswith("out"):
        return "resizes"
    return "none"


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below autograd, with fake results."""

    def __init__(self, log: Log, cuda: CudaOps | None, notes: dict[str, None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.longest = 1
        self.log = log
        self.cuda = cuda
        self.notes = notes
        self.plans: dict[Any, tuple[_Effect, bool]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:
            return self._guess_number(func, args[0])
        if func in _DEPENDS_ON_DATA:
            func, args, kwargs = self._pick_all(func, args)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs = {**kwargs, "device": torch.device("cpu")}  # autograd on a fake "cuda" tensor ends the process
        self._meet(func, args)
        result = func(*args, **kwargs)
        if func is _aten.mkldnn_rnn_layer.default and args[-1]:  # in training; fake tensors know no workspace
            result = (*result[:3], args[0].new_empty(count_onednn(args)[0], dtype=torch.uint8))
        plan = self.plans.get(func)
        if plan is None:
            plan = self.plans[func] = (_effect_of(func), self.cuda is not None and self.cuda.concerns(func))
        effect, is_concern = plan
        if effect != "none":
            for tensor in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    check_time()  # torch's C++ asks for sizes and devices where it cannot pass on errors
                    if effect == "births":
                        self._bear(func, args, tensor)
                    else:
                        self.log.resize(tensor)
        if is_concern:
            self._count_inside(func, args, result)
        elif func in _ON_CPU:
            self.log.bury(self.log.bear(count_onednn(args)[1]))
        return result

    def _meet(self, func: Any, args: tuple[Any, ...]) -> None:
        """Count a real tensor that the step uses, as if it were on the device from now on."""
        for arg in args:
            for one in arg if isinstance(arg, list | tuple) else (arg,):
                if not isinstance(one, torch.Tensor) or isinstance(one, FakeTensor):
                    continue
                if one.dim() and not one.is_meta and func is not _aten.lift_fresh.default:
                    self.log.watch(one)
                    self.log.claim([one], "weights" if isinstance(one, nn.Parameter) else "inputs")
                    self.notes["real tensors of the step are counted as if they were on the device"] = None

    def _bear(self, func: Any, args: tuple[Any, ...], tensor: torch.Tensor) -> None:
        log = self.log
        number = log.watch(tensor, on_host=func is _aten.lift_fresh.default and not tensor.dim())
        if number is not None and log.phase == "forward" and func is _aten._to_copy.default:
            source, is_narrower = log.find(args[0]), tensor.itemsize < args[0].itemsize
            log.blocks[number].is_cast = is_narrower and source is not None and log.blocks[source].claimed == "weights"

    def _count_inside(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Count what a CUDA kernel allocates beside its results."""
        log = self.log
        if self.cuda is not None:
            for number in [log.bear(num_bytes) for num_bytes in self.cuda.scratch(func, args, result, log.phase)]:
                log.bury(number)
            for num_bytes in self.cuda.workspaces(func, in_backward=log.phase == "backward"):
                with part("workspaces"):
                    log.bear(num_bytes)

    def _guess_number(self, func: Any, tensor: torch.Tensor) -> bool | int | float:
        with contextlib.suppress(DataDependentOutputException):
            known: bool | int | float = func(tensor)
            return known
        # A whole number may become a length: take the longest.
        guess: bool | int | float = self.longest
        if tensor.dtype is torch.bool or tensor.is_floating_point():
            guess = True if tensor.dtype is torch.bool else 1.0
        self.notes[f"a number that depends on the data is assumed to be {guess}"] = None
        return guess

    def _pick_all(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Replace an operation by one whose mask picks every element."""
        if func is _aten.masked_select.default:
            return _aten.new_empty.default, (args[0], (self._count_all(args[0] == args[1]),)), {}
        if func is _aten.nonzero.default and args[0].dim() == 1:
            return _aten.new_empty.default, (args[0], (self._count_all(args[0]), 1)), {"dtype": torch.int64}
        if func is _aten.index.Tensor:
            indices: list[torch.Tensor | None] = []
            for index in args[1]:
                if index is None or index.dtype is not torch.bool:
                    indices.append(index)
                else:
                    indices += [torch.empty(self._count_all(index), dtype=torch.int64)] * index.dim()
            args = (args[0], indices)
        return func, args, {}

    def _count_all(self, mask: torch.Tensor) -> int:
        self.notes["masks are assumed to pick all elements"] = None
        return mask.numel()
