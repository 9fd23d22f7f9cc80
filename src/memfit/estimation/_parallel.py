"""A training step as rank 0 of several runs it, whose share is the largest: DDP and FSDP2.

Hooks on fake tensors emulate both without a process group: what is gathered, reduced and kept is made when torch makes
it. NCCL's own buffers are not here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from memfit.estimation._optimizers import build_optimizer
from memfit.estimation._program import Program, find_blocks, find_dtypes
from memfit.estimation._recorder import part
from memfit.estimation._setup import Setup
from memfit.units import format_count

#: The streams that gather weights and reduce gradients; each has segments of its own.
_GATHERING, _REDUCING = 1, 2


def shard(program: Program, setup: Setup) -> Program:
    """Return the program of one rank under ``ddp`` or ``fsdp``; model and optimizer are changed in place."""
    if setup.is_sharded:
        return shard_fully(program, setup)
    return _shard_ddp(program) if setup.strategy == "ddp" else program


def _shard_ddp(program: Program) -> Program:
    """Add DDP's copy of all gradients, in a bucket for each dtype (torch/csrc/distributed/c10d/reducer.cpp)."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in program.model.parameters():
        if parameter.requires_grad:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    with part("communication"):
        buckets = [torch.empty(size, dtype=dtype) for dtype, size in sizes.items()]
    program.model.__dict__["_buckets_of_ddp"] = buckets  # they live as long as the model
    return dataclasses.replace(program, notes=(*program.notes, "DDP holds gradients twice, the second time in buckets"))


def _make_ghost(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Make a parameter of the same shape that takes one byte: the recorder does not see its storage grow."""
    with part("weights"):
        tensor = torch.empty(1, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    with _disable_current_modes():
        storage.resize_(parameter.numel() * dtype.itemsize)
        empty = FakeTensor(tensor.fake_mode, torch.empty(0, dtype=dtype, device="meta"), torch.device("cpu"))  # type: ignore[attr-defined]
        strides = torch.empty(parameter.shape, device="meta").stride()
        full = empty.set_(storage, 0, parameter.shape, strides)
        return nn.Parameter(full, requires_grad=parameter.requires_grad)


@dataclass(eq=False)
class _Weight:
    """A parameter: its ghost in the modules, and rank 0's share, padded on the first dimension (_fsdp_param.py)."""

    ghost: nn.Parameter
    shard: nn.Parameter
    is_cast: bool

    @classmethod
    def split(cls, parameter: nn.Parameter, dtype: torch.dtype | None, world_size: int) -> _Weight:
        wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        rows = parameter.shape[0] if parameter.ndim else 1
        with part("weights"):
            local = torch.empty((-(-rows // world_size), *parameter.shape[1:]), dtype=parameter.dtype)
        made = nn.Parameter(local, requires_grad=parameter.requires_grad)
        return cls(_make_ghost(parameter, wanted), made, wanted != parameter.dtype)


@dataclass(eq=False)
class _Communication:
    """What all groups share. Source: torch 2.13 _fsdp_param_group.py, ``FSDPCommContext``."""

    world_size: int
    dtype: torch.dtype | None  # of gathered weights and of gradients, which are then reduced in fp32
    groups: list[_Group] = field(default_factory=list)
    order: list[_Group] = field(default_factory=list)
    last_gathered: torch.Tensor | None = None
    reduce_input: torch.Tensor | None = None
    is_callback_queued: bool = False

    def queue_callback(self) -> None:
        if not self.is_callback_queued:
            self.is_callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _finish_backward(self) -> None:
        """Source: torch 2.13 _fsdp_state.py, ``_root_post_backward_final_callback``."""
        for group in self.groups:
            if group.state != "post-backward":
                group.after_backward()
            group.state = "idle"
            group.pending = None
            group.positions.clear()
        self.order.clear()
        self.reduce_input = None
        self.is_callback_queued = False


class _Group:
    """Parameters that are gathered and reduced at once: a block's, or the rest (torch's _fsdp_param_group.py)."""

    def __init__(self, weights: Sequence[_Weight], shared: _Communication, *, is_root: bool) -> None:
        self.weights = weights
        self.shared = shared
        self.is_root = is_root
        self.state = "idle"
        self.pending: torch.Tensor | None = None  # gathered, not yet copied out
        self.unsharded: list[torch.Tensor] | None = None
        self.positions: list[int] = []

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.shared.dtype is not None:
            args, kwargs = _pytree.tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        is_again = _is_in_backward()
        if not is_again:
            self.state = "forward"
        self._start_gathering()
        self._finish_gathering()
        return (args, kwargs) if is_again or not torch.is_grad_enabled() else self._mark_inputs(args, kwargs)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.shared.dtype) if tensor.is_floating_point() else tensor

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if _is_in_backward():
            return
        self.state = "idle"
        if not self.is_root:
            self.unsharded = None
        if torch.is_grad_enabled():
            self.positions.append(len(self.shared.order))
            self.shared.order.append(self)
            for tensor in _pytree.tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._before_backward)  # type: ignore[no-untyped-call]
        if self.is_root:
            self.shared.last_gathered = None

    def _before_backward(self, grad: torch.Tensor) -> None:
        self.shared.queue_callback()
        if self.state == "pre-backward":
            return
        self.state = "pre-backward"
        self._start_gathering()
        self._finish_gathering()
        if self.positions and (position := self.positions.pop()) > 0:
            self.shared.order[position - 1]._start_gathering()  # the implicit prefetch of the next one

    def after_backward(self) -> None:
        self.state = "post-backward"
        trained = [weight for weight in self.weights if weight.ghost.grad is not None]
        grads = [weight.ghost.grad for weight in trained]
        for weight in trained:
            weight.ghost.grad = None
        self.unsharded = None
        self.shared.reduce_input = None  # the one of the group before
        if trained:
            self._reduce(trained, grads)  # type: ignore[arg-type]

    def _start_gathering(self) -> None:
        """Cast weights into a flat copy, then gather them into a buffer (``foreach_all_gather``)."""
        if self.unsharded is not None or self.pending is not None or not self.weights:
            return
        cast = sum(weight.shard.numel() for weight in self.weights if weight.is_cast)
        dtypes = {weight.ghost.dtype for weight in self.weights}
        num_bytes = sum(weight.shard.numel() * weight.ghost.element_size() for weight in self.weights)
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        with part("communication", stream=_GATHERING):
            flat = torch.empty(cast, dtype=self.shared.dtype)
            self.pending = torch.empty(num_bytes // dtype.itemsize * self.shared.world_size, dtype=dtype)
        del flat

    def _finish_gathering(self) -> None:
        """Copy weights out of the buffer, which the forward pass keeps until the next group has gathered."""
        if self.pending is None:
            return
        if self.state == "forward":
            self.shared.last_gathered = None
        with part("communication"):
            self.unsharded = [
                torch.empty(weight.shard.numel() * self.shared.world_size, dtype=weight.ghost.dtype)
                for weight in self.weights
            ]
        if self.state == "forward":
            self.shared.last_gathered = self.pending
        self.pending = None

    def _reduce(self, trained: Sequence[_Weight], grads: list[torch.Tensor]) -> None:
        """Source: ``foreach_reduce``."""
        numel = sum(weight.shard.numel() for weight in trained)
        dtype = grads[0].dtype if self.shared.dtype is None else torch.float32
        with part("communication"):
            self.shared.reduce_input = torch.empty(numel * self.shared.world_size, dtype=dtype)
        grads.clear()
        with part("gradients", stream=_REDUCING):
            output = torch.empty(numel, dtype=dtype).to(trained[0].shard.dtype)
        offset = 0
        for weight in trained:
            shard = weight.shard
            grad = output[offset : offset + shard.numel()].view(shard.shape)
            offset += shard.numel()
            if shard.grad is None:
                shard.grad = grad
            else:
                shard.grad += grad
            for hook in (shard._post_accumulate_grad_hooks or {}).values():
                hook(shard)

    def _mark_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Pass inputs through a function whose backward pass runs when their gradients are ready."""
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not places or not self.weights:
            return args, kwargs
        marked = _AfterBackward.apply(self, *(leaves[i] for i in places))  # type: ignore[no-untyped-call]
        for i, tensor in zip(places, marked, strict=True):
            leaves[i] = tensor
        new_args, new_kwargs = _pytree.tree_unflatten(leaves, spec)
        return new_args, new_kwargs


def _is_in_backward() -> bool:
    """Whether autograd is running: then a forward pass is that of a checkpointed block."""
    return bool(torch._C._current_graph_task_id() != -1)


class _AfterBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: _Group, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.group.after_backward()
        return (None, *grads)


def shard_fully(program: Program, setup: Setup, units: Sequence[nn.Module] | None = None) -> Program:
    """Return the program as FSDP2 runs it: ``fully_shard`` of each unit, inner ones first, and of the whole model. With
    ``-amp`` the mixed precision policy computes in 16 bit and reduces in fp32; the shards are in fp32."""
    units = find_blocks(program.model) if units is None else units
    dtype = find_dtypes(setup)[1]
    shared = _Communication(setup.world_size, dtype)
    split: dict[nn.Parameter, _Weight] = {}
    for module in (*units, program.model):
        weights = _replace_parameters(module, split, shared)
        group = _Group(weights, shared, is_root=module is program.model)
        shared.groups.append(group)
        module.register_forward_pre_hook(group.before_forward, with_kwargs=True)
        module.register_forward_hook(group.after_forward)
    shared.groups.insert(0, shared.groups.pop())  # the root is first, as in named_modules()
    _swap_optimized(program, {id(key): weight.shard for key, weight in split.items()}, setup)
    note = f"FSDP2: {format_count(len(units), 'unit')} and the root over {setup.world_size} ranks; rank 0 is shown"
    autocast = None if dtype is not None else program.autocast_dtype
    return dataclasses.replace(program, autocast_dtype=autocast, notes=(*program.notes, note))


def _replace_parameters(module: nn.Module, split: dict[nn.Parameter, _Weight], shared: _Communication) -> list[_Weight]:
    """Replace a module's parameters that belong to no group yet by ghosts; tied ones share a ghost."""
    ghosts = {id(weight.ghost) for weight in split.values()}
    found: list[_Weight] = []
    for owner in module.modules():
        owned = {name: parameter for name, parameter in owner._parameters.items() if parameter is not None}
        is_quantized = any(not parameter.is_floating_point() for parameter in owned.values())
        for name, parameter in owned.items():
            if id(parameter) in ghosts or (is_quantized and parameter.is_floating_point()):
                continue  # bitsandbytes holds the scales of a quantised weight whole on every rank
            weight = split.get(parameter)
            if weight is None:
                weight = split[parameter] = _Weight.split(parameter, shared.dtype, shared.world_size)
                found.append(weight)
                ghosts.add(id(weight.ghost))
            owner._parameters[name] = weight.ghost
    return found


def _swap_optimized(program: Program, shards: Mapping[int, nn.Parameter], setup: Setup) -> None:
    """Make the optimizer, which has not stepped yet, update shards (by ``id`` of the parameter)."""
    if program.optimizer is None:
        return
    if setup.master_weights or setup.optimizer_in_backward:  # it holds copies or hooks of the weights
        trained = dict.fromkeys(shard for shard in shards.values() if shard.requires_grad)
        program.optimizer, _ = build_optimizer(nn.ParameterList(trained), setup)
        return
    for group in program.optimizer.param_groups:
        group["params"] = [shards.get(id(parameter), parameter) for parameter in group["params"]]
