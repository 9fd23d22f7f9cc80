"""What fully sharded data parallelism leaves on one rank: FSDP2, FSDP1 and ZeRO-3 of DeepSpeed.

The modules keep parameters of full shape that have no bytes (ghosts); what is gathered, reduced and kept is made
beside them at the moments at which the real thing makes it. No process group is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from memfit.estimation._data_parallel import get_compute_dtype, is_in_backward, make_cast_hook, swap_optimized
from memfit.estimation._program import Program, find_blocks
from memfit.estimation._setup import Setup
from memfit.estimation._trace import part

#: The streams that gather weights and reduce gradients; each has segments of its own.
_GATHERING, _REDUCING = 1, 2


@dataclass(frozen=True)
class ShardingPolicy:
    """How weights are shared out.

    Attributes:
        world_size: Ranks.
        compute_dtype: What weights are gathered, and gradients made, in; None for the weights' own.
        reduce_dtype: What gradients are reduced in; None for that of the gradients.
        is_flat: FSDP1: one flat parameter a unit, gathered in place; else FSDP2's copy out of a buffer.
    """

    world_size: int
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    is_flat: bool = False


def make_ghost(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """A parameter of the same shape that takes one byte, and none when it is used.

    The recorder of a trace meets the storage at one byte and does not see it grow.
    """
    with part("weights"):
        tensor = torch.empty(1, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    with _disable_current_modes():
        storage.resize_(parameter.numel() * dtype.itemsize)
        empty = FakeTensor(tensor.fake_mode, torch.empty(0, dtype=dtype, device="meta"), torch.device("cpu"))  # type: ignore[attr-defined]
        full = empty.set_(storage, 0, parameter.shape, _get_strides(parameter.shape))
        return nn.Parameter(full, requires_grad=parameter.requires_grad)


def _get_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides[: len(shape)])


@dataclass(eq=False)
class _Weight:
    """A parameter: its ghost in the modules, and rank 0's share, which is padded on the first dimension.

    Source: torch 2.13 torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``_init_sharded_param``.
    """

    ghost: nn.Parameter
    shard: nn.Parameter
    padded_numel: int
    is_cast: bool


def _split(parameter: nn.Parameter, policy: ShardingPolicy) -> _Weight:
    dtype = policy.compute_dtype
    is_cast = dtype is not None and parameter.is_floating_point() and parameter.dtype != dtype
    rows = parameter.shape[0] if parameter.ndim else 1
    rest = tuple(parameter.shape[1:])
    with part("weights"):
        local = torch.empty((-(-rows // policy.world_size), *rest), dtype=parameter.dtype)
        shard = nn.Parameter(local, requires_grad=parameter.requires_grad)
    ghost = make_ghost(parameter, dtype if is_cast and dtype is not None else parameter.dtype)
    return _Weight(ghost, shard, shard.numel(), is_cast)


@dataclass(eq=False)
class _Communication:
    """What all groups share. Source: torch 2.13 _fsdp_param_group.py, ``FSDPCommContext``."""

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
    """Parameters that are gathered and reduced at once: a block's, or what is left to the root.

    Source: torch 2.13 torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py.
    """

    def __init__(
        self, weights: Sequence[_Weight], policy: ShardingPolicy, shared: _Communication, is_root: bool
    ) -> None:
        self.weights = weights
        self.policy = policy
        self.shared = shared
        self.is_root = is_root
        self.state = "idle"
        self.pending: torch.Tensor | None = None  # gathered, not yet copied out
        self.unsharded: list[torch.Tensor] | None = None
        self.positions: list[int] = []

    # The forward and backward passes call these.
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if is_in_backward():  # a checkpointed block is made again
            self.start_gathering()
            self.finish_gathering()
            return args, kwargs
        self.state = "forward"
        self.start_gathering()
        self.finish_gathering()
        return self._mark_inputs(args, kwargs) if torch.is_grad_enabled() else (args, kwargs)

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_in_backward():
            return
        self.state = "idle"
        if not self.is_root:
            self.unsharded = None
        if torch.is_grad_enabled():
            self.positions.append(len(self.shared.order))
            self.shared.order.append(self)
            for tensor in _pytree.tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self.before_backward)  # type: ignore[no-untyped-call]
        if self.is_root:
            self.shared.last_gathered = None

    def before_backward(self, grad: torch.Tensor) -> None:
        self.shared.queue_callback()
        if self.state == "pre-backward":
            return
        self.state = "pre-backward"
        self.start_gathering()
        self.finish_gathering()
        if self.positions and (position := self.positions.pop()) > 0:
            self.shared.order[position - 1].start_gathering()  # the implicit prefetch of the next one

    def after_backward(self) -> None:
        self.state = "post-backward"
        trained = [weight for weight in self.weights if weight.ghost.grad is not None]
        grads = [weight.ghost.grad for weight in trained]
        for weight in trained:
            weight.ghost.grad = None
        if self.policy.is_flat and trained:
            self._flatten(grads)  # type: ignore[arg-type]
        self.unsharded = None
        self.shared.reduce_input = None  # the one of the group before
        if trained:
            self._reduce(trained, grads)  # type: ignore[arg-type]
        if self.policy.is_flat:
            self.shared.reduce_input = None

    # Collectives.
    def start_gathering(self) -> None:
        """Source: ``foreach_all_gather``: weights are cast into a flat copy, then gathered into a buffer."""
        if self.unsharded is not None or self.pending is not None or not self.weights:
            return
        cast = [weight for weight in self.weights if weight.is_cast]
        dtypes = {weight.ghost.dtype for weight in self.weights}
        num_bytes = sum(weight.padded_numel * weight.ghost.element_size() for weight in self.weights)
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        with part("communication", stream=_GATHERING):
            flat = torch.empty(sum(weight.padded_numel for weight in cast), dtype=self.policy.compute_dtype)
            self.pending = torch.empty(num_bytes // dtype.itemsize * self.policy.world_size, dtype=dtype)
        del flat

    def finish_gathering(self) -> None:
        """Source: ``wait_for_unshard``, ``foreach_all_gather_copy_out``: in the forward pass the buffer lives on until
        the next group has gathered."""
        if self.pending is None:
            return
        if self.state == "forward":
            self.shared.last_gathered = None
        with part("communication"):
            if self.policy.is_flat:
                self.unsharded = [self.pending]
            else:
                self.unsharded = [
                    torch.empty(weight.padded_numel * self.policy.world_size, dtype=weight.ghost.dtype)
                    for weight in self.weights
                ]
        if self.state == "forward" and not self.policy.is_flat:
            self.shared.last_gathered = self.pending
        self.pending = None

    def _reduce(self, trained: Sequence[_Weight], grads: list[torch.Tensor]) -> None:
        """Source: ``foreach_reduce``; FSDP1 reduces the flat gradient, or a cast of it, where it is."""
        numel = sum(weight.padded_numel for weight in trained)
        dtype = self.policy.reduce_dtype or grads[0].dtype
        if self.policy.is_flat and dtype == grads[0].dtype:
            self.shared.reduce_input = grads[0]
        else:
            with part("communication"):
                self.shared.reduce_input = torch.empty(numel * self.policy.world_size, dtype=dtype)
        if not self.policy.is_flat:
            grads.clear()
        with part("gradients", stream=0 if self.policy.is_flat else _REDUCING):
            output = torch.empty(numel, dtype=dtype).to(trained[0].shard.dtype)
        offset = 0
        for weight in trained:
            shard = weight.shard
            grad = output[offset : offset + weight.padded_numel].view(shard.shape)
            offset += weight.padded_numel
            if shard.grad is None:
                shard.grad = grad
            else:
                shard.grad += grad
            for hook in (shard._post_accumulate_grad_hooks or {}).values():
                hook(shard)

    def _flatten(self, grads: list[torch.Tensor]) -> None:
        """The gradient of a flat parameter is put together from those of its views when the last of them is there.

        Source: torch 2.13 torch/distributed/fsdp/_flat_param.py, ``_get_unflat_views_unaligned``: a split, whose
        backward pass is a concatenation.
        """
        with part("communication", stream=_GATHERING):
            flat = torch.empty(sum(grad.numel() for grad in grads), dtype=grads[0].dtype)
        grads[:] = [flat]

    def _mark_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Inputs through a function whose backward pass runs when their gradients are ready."""
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not places or not self.weights:
            return args, kwargs
        marked = _AfterBackward.apply(self, *(leaves[i] for i in places))  # type: ignore[no-untyped-call]
        for i, tensor in zip(places, marked, strict=True):
            leaves[i] = tensor
        new_args, new_kwargs = _pytree.tree_unflatten(leaves, spec)
        return new_args, new_kwargs


class _AfterBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: _Group, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.group.after_backward()
        return (None, *grads)


def shard_fully(program: Program, setup: Setup) -> Program:
    """The program as ``fully_shard`` of each block and of the whole model runs it (FSDP2).

    With ``-amp`` the mixed precision policy computes in 16 bit and reduces in fp32; the shards are in fp32.
    """
    dtype = get_compute_dtype(setup)
    policy = ShardingPolicy(setup.world_size, dtype, torch.float32 if dtype is not None else None)
    return shard_units(program, setup, find_blocks(program.model), policy)


def shard_flat(program: Program, setup: Setup, units: Sequence[nn.Module] | None = None) -> Program:
    """The program under FSDP1, full shard, ``use_orig_params=False``: one flat parameter a unit.

    Args:
        program: The program of one device; changed in place.
        setup: With ``-amp`` parameters and reductions are in 16 bit (Lightning's and Hugging Face's mixed precision).
        units: What is wrapped; None for the blocks. The root takes the rest.
    """
    dtype = get_compute_dtype(setup)
    policy = ShardingPolicy(setup.world_size, dtype, dtype, is_flat=True)
    return shard_units(program, setup, find_blocks(program.model) if units is None else units, policy)


def shard_units(program: Program, setup: Setup, units: Sequence[nn.Module], policy: ShardingPolicy) -> Program:
    """The program with each unit's parameters, and the rest of the model's, shared out as a group.

    Args:
        program: The program of one device; changed in place.
        setup: What the optimizer was made from.
        units: Modules that are gathered one by one; those within another come before it.
        policy: Ranks and dtypes.
    """
    shared = _Communication()
    split: dict[nn.Parameter, _Weight] = {}
    groups: list[_Group] = []
    for module in (*units, program.model):
        is_root = module is program.model
        weights = _replace_parameters(module, split, policy)
        group = _Group(weights, policy, shared, is_root)
        groups.append(group)
        if policy.compute_dtype is not None:
            module.register_forward_pre_hook(make_cast_hook(policy.compute_dtype), with_kwargs=True)
        module.register_forward_pre_hook(group.before_forward, with_kwargs=True)
        module.register_forward_hook(group.after_forward)
    shared.groups = [groups[-1], *groups[:-1]]  # the root is first, as in named_modules()
    swap_optimized(program, {id(key): weight.shard for key, weight in split.items()}, setup)
    name = "FSDP1" if policy.is_flat else "FSDP2"
    note = f"{name}: {len(units)} units and the root over {policy.world_size} ranks; rank 0 is shown"
    autocast = None if policy.compute_dtype is not None else program.autocast_dtype
    return dataclasses.replace(program, autocast_dtype=autocast, notes=(*program.notes, note))


def _replace_parameters(module: nn.Module, split: dict[nn.Parameter, _Weight], policy: ShardingPolicy) -> list[_Weight]:
    """Puts ghosts in the place of a module's parameters that belong to no group yet; tied ones share a ghost."""
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
                weight = split[parameter] = _split(parameter, policy)
                found.append(weight)
                ghosts.add(id(weight.ghost))
            owner._parameters[name] = weight.ghost
    return found
