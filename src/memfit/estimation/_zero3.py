"""What ZeRO-3 of DeepSpeed leaves on one rank: weights are gathered module by module.

Source: DeepSpeed 0.19 deepspeed/runtime/zero/partitioned_param_coordinator.py (``fetch_sub_module``,
``__params_to_release``), stage3.py (``__add_grad_to_ipg_bucket``, ``_create_fp32_partitions``, ``step``) and config.py
(defaults).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from memfit.estimation._data_parallel import (
    REDUCE_BUCKET_SIZE,
    chain,
    get_compute_dtype,
    is_in_backward,
    make_cast_hook,
    swap_optimized,
)
from memfit.estimation._fully_sharded import make_ghost
from memfit.estimation._program import Program
from memfit.estimation._setup import Setup
from memfit.estimation._trace import part


@dataclass(frozen=True)
class Zero3Settings:
    """DeepSpeed's settings of stage 3, in elements; the defaults are its own.

    Attributes:
        reduce_bucket_size: Of the bucket that gradients are copied into; it lives as long as the optimizer.
        prefetch_bucket_size: Weights gathered ahead when a module's are fetched.
        max_live_parameters: None are gathered ahead beyond so many elements.
        max_reuse_distance: Weights that are needed again within so many elements stay.
        persistence_threshold: Weights of fewer elements stay always.
    """

    reduce_bucket_size: int = REDUCE_BUCKET_SIZE
    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    persistence_threshold: int = 100_000


@dataclass(eq=False)
class _Weight:
    ghost: nn.Parameter
    partition: torch.Tensor
    world_size: int
    is_persistent: bool
    gathered: torch.Tensor | None = None

    def gather(self) -> None:
        if self.gathered is None:
            with part("communication"):
                self.gathered = torch.empty(self.partition.numel() * self.world_size, dtype=self.partition.dtype)


class _Coordinator:
    """Gathers and releases weights in the order in which modules ran in the first iteration."""

    def __init__(self, settings: Zero3Settings) -> None:
        self.settings = settings
        self.owned: dict[nn.Module, list[_Weight]] = {}
        self.order: list[nn.Module] = []
        self.position = 0
        self.is_order_known = False

    def watch(self, module: nn.Module, weights: list[_Weight]) -> None:
        self.owned[module] = weights
        module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        module.register_forward_hook(self._after_forward)

    def fetch(self, module: nn.Module) -> None:
        for weight in self.owned[module]:
            weight.gather()
        if not self.is_order_known:
            self.order.append(module)
            return
        self.position += 1
        live = sum(w.ghost.numel() for weights in self.owned.values() for w in weights if w.gathered is not None)
        budget = min(self.settings.max_live_parameters - live, self.settings.prefetch_bucket_size)
        for following in self.order[self.position :]:
            for weight in self.owned[following]:
                if budget > 0 and weight.gathered is None:
                    budget -= weight.ghost.numel()
                    weight.gather()
            if budget <= 0:
                break

    def release(self, module: nn.Module) -> None:
        kept: set[_Weight] = set()
        distance = 0
        for following in self.order[self.position :] if self.is_order_known else ():
            if distance >= self.settings.max_reuse_distance:
                break
            kept.update(self.owned[following])
            distance += sum(weight.ghost.numel() for weight in self.owned[following])
        for weight in self.owned[module]:
            if weight not in kept and not weight.is_persistent:
                weight.gathered = None

    def end_backward(self) -> None:
        for weights in self.owned.values():
            for weight in weights:
                if not weight.is_persistent:
                    weight.gathered = None

    def end_iteration(self) -> None:
        self.is_order_known = True
        self.position = 0

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.fetch(module)
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not places or not torch.is_grad_enabled():
            return args, kwargs
        marked = _Mark.apply(lambda: self.release(module), *(leaves[i] for i in places))  # type: ignore[no-untyped-call]
        for i, tensor in zip(places, marked, strict=True):
            leaves[i] = tensor
        new_args, new_kwargs = _pytree.tree_unflatten(leaves, spec)
        return new_args, new_kwargs

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.release(module)
        if not torch.is_grad_enabled():
            return output
        leaves = _pytree.tree_leaves(output)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not places:
            return output
        for i in places:
            leaves[i].register_hook(lambda _: self.fetch(module))
        return output


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.call()
        return (None, *grads)


class _Gradients:
    """The bucket of gradients, the rank's share of them, and the fp32 copy of its weights that is updated."""

    def __init__(self, weights: Sequence[_Weight], settings: Zero3Settings) -> None:
        trained = [weight for weight in weights if weight.ghost.requires_grad]
        sizes: dict[torch.dtype, int] = {}
        for weight in weights:
            sizes[weight.ghost.dtype] = sizes.get(weight.ghost.dtype, 0) + weight.ghost.numel()
        dtype = max((dtype for dtype in sizes if dtype.is_floating_point), key=sizes.__getitem__)
        numel = sum(weight.partition.numel() for weight in trained)
        self.bucket_size, self.filled = settings.reduce_bucket_size, 0
        with part("communication"):
            self.bucket = torch.empty(self.bucket_size, dtype=dtype)
        with part("gradients"):
            self.share = torch.empty(numel, dtype=dtype)
        with part("optimizer"):
            self.master = nn.Parameter(torch.empty(numel, dtype=torch.float32))
        for weight in trained:
            weight.ghost.register_post_accumulate_grad_hook(self.take)  # type: ignore[no-untyped-call]

    def take(self, ghost: torch.Tensor) -> None:
        if self.filled + ghost.numel() > self.bucket_size:
            self.reduce()
        self.filled += ghost.numel()
        if ghost.numel() > self.bucket_size:
            self.reduce()  # it is reduced from where it is
        ghost.grad = None

    def reduce(self) -> None:
        """Gradients are put together once more, rank by rank (runtime/comm/coalesced_collectives.py)."""
        if self.filled:
            with part("communication"):
                torch.empty(self.filled, dtype=self.share.dtype)
        self.filled = 0

    def before_step(self) -> None:
        with part("gradients"):
            self.master.grad = self.share.float()

    def after_step(self) -> None:
        self.master.grad = None


def shard_zero3(program: Program, setup: Setup, settings: Zero3Settings | None = None) -> Program:
    """The program under ZeRO-3: weights in 16 bit with ``-amp``, an fp32 copy of the rank's share for the optimizer.

    Args:
        program: The program of one device; changed in place.
        setup: The number of ranks, and the dtype.
        settings: None for DeepSpeed's defaults.
    """
    settings = settings or Zero3Settings()
    dtype = get_compute_dtype(setup)
    coordinator = _Coordinator(settings)
    split: dict[nn.Parameter, _Weight] = {}
    for module in program.model.modules():
        owned = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        for name, parameter in owned.items():
            if parameter not in split:
                split[parameter] = _split(parameter, dtype, setup.world_size, settings)
            module._parameters[name] = split[parameter].ghost
        if owned:
            coordinator.watch(module, [split[parameter] for parameter in owned.values()])
    before_step, after_step = program.before_step, program.after_step
    if program.optimizer is not None:
        gradients = _Gradients(list(split.values()), settings)
        swap_optimized(program, {id(p): gradients.master for p in split if p.requires_grad}, setup)
        before_step = chain(gradients.before_step, before_step)
        after_step = chain(chain(after_step, gradients.after_step), coordinator.end_iteration)
        _call_after_backward(program.model, gradients.reduce)
        _call_after_backward(program.model, coordinator.end_backward)
    if dtype is not None:
        program.model.register_forward_pre_hook(make_cast_hook(dtype), with_kwargs=True)
    return dataclasses.replace(
        program,
        autocast_dtype=program.autocast_dtype if dtype is None else None,
        before_step=before_step,
        after_step=after_step,
        notes=(*program.notes, f"zero3: DeepSpeed over {setup.world_size} ranks, {settings}"),
    )


def _split(parameter: nn.Parameter, dtype: torch.dtype | None, world_size: int, settings: Zero3Settings) -> _Weight:
    new_dtype = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    with part("weights"):
        partition = torch.empty(-(-parameter.numel() // world_size), dtype=new_dtype)
    is_persistent = parameter.numel() < settings.persistence_threshold
    return _Weight(make_ghost(parameter, new_dtype), partition, world_size, is_persistent)


def _call_after_backward(model: nn.Module, call: Callable[[], Any]) -> None:
    """Calls when a backward pass through a model's outputs has ended."""

    def queue(_: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(call)

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if is_in_backward() or not torch.is_grad_enabled():
            return
        first = next((t for t in _pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad), None)
        if first is not None:
            first.register_hook(queue)  # type: ignore[no-untyped-call]

    model.register_forward_hook(hook)
