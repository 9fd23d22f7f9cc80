"""What data parallelism adds to the memory of one rank: DDP's buckets, and ZeRO-1 and 2 of DeepSpeed.

No process group is needed: a collective takes no memory of torch's beside its buffers, and those are made here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from memfit.estimation._optimizers import build_optimizer
from memfit.estimation._program import Program
from memfit.estimation._setup import Setup
from memfit.estimation._trace import part

#: Source: torch 2.13 torch/nn/parallel/distributed.py, ``bucket_cap_mb``; torch/csrc/distributed/c10d/reducer.hpp,
#: ``kDefaultFirstBucketBytes``; the coalesced broadcast of buffers: ``broadcast_bucket_size``.
BUCKET_BYTES, FIRST_BUCKET_BYTES, BROADCAST_BYTES = 25 << 20, 1 << 20, 250 << 20
#: Elements of DeepSpeed's buckets. Source: DeepSpeed 0.19 deepspeed/runtime/zero/config.py, ``reduce_bucket_size``.
REDUCE_BUCKET_SIZE = 500_000_000


def is_in_backward() -> bool:
    """Whether autograd is running: a forward pass seen then makes a checkpointed block again."""
    return bool(torch._C._current_graph_task_id() != -1)


def get_compute_dtype(setup: Setup) -> torch.dtype | None:
    """The dtype that mixed precision computes in; None without."""
    return {"bf16-amp": torch.bfloat16, "fp16-amp": torch.float16}.get(setup.dtype)


def make_cast_hook(dtype: torch.dtype) -> Callable[..., tuple[Any, Any]]:
    """A forward pre-hook that casts floating point inputs, as FSDP and DeepSpeed do."""

    def cast(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def one(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        cast_args, cast_kwargs = _pytree.tree_map_only(torch.Tensor, one, (args, kwargs))
        return cast_args, cast_kwargs

    return cast


def chain(first: Callable[[], None] | None, second: Callable[[], None] | None) -> Callable[[], None] | None:
    """One call for both, in order."""
    if first is None or second is None:
        return first or second

    def both() -> None:
        first()
        second()

    return both


def swap_optimized(program: Program, shards: Mapping[int, nn.Parameter], setup: Setup) -> None:
    """Makes a program's optimizer update shards in place of parameters.

    Args:
        program: Its optimizer's parameters, and states it has already, become the shards' and of their shapes. One
            that holds copies of weights, or updates within the backward pass, is made anew.
        shards: By the ``id`` of the parameter.
        setup: What the optimizer was made from.
    """
    if program.optimizer is None:
        return
    if setup.master_weights or setup.optimizer_in_backward:
        trained = dict.fromkeys(shard for shard in shards.values() if shard.requires_grad)
        program.optimizer, _ = build_optimizer(nn.ParameterList(trained), setup)
        return
    state = program.optimizer.state
    for group in program.optimizer.param_groups:
        old = group["params"]
        new = [shards.get(id(parameter), parameter) for parameter in old]
        group["params"] = list(dict.fromkeys(new))  # a flat shard stands for many parameters
        for before, after in zip(old, new, strict=True):
            if before is not after and before in state:
                fit = functools.partial(_fit, before=before, after=after)
                state[after] = _pytree.tree_map_only(torch.Tensor, fit, state.pop(before))


def _fit(state: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return torch.empty(after.shape, dtype=state.dtype) if state.shape == before.shape else state


def plan_buckets(sizes: Sequence[int], limits: Sequence[int]) -> list[int]:
    """The bytes of DDP's buckets: each is closed by the gradient that reaches its limit; the last limit repeats.

    Source: torch 2.13 torch/csrc/distributed/c10d/reducer.cpp, ``compute_bucket_assignment_by_size``.

    >>> plan_buckets([600, 600, 2000, 100], [1000, 2000])
    [1200, 2000, 100]
    """
    buckets: list[int] = []
    remaining = iter(limits)
    limit, filled = next(remaining), 0
    for size in sizes:
        filled += size
        if filled >= limit:
            buckets.append(filled)
            limit, filled = next(remaining, limit), 0
    return [*buckets, filled] if filled else buckets


def shard_ddp(program: Program, setup: Setup) -> Program:
    """The program as ``DistributedDataParallel`` runs it, with its defaults.

    The reducer holds a copy of all gradients (``gradient_as_bucket_view=False``): first in one bucket, then, when
    the order of gradients is known, in buckets of 1 and 25 MiB. Source: torch 2.13 torch/nn/parallel/distributed.py,
    ``_ddp_init_helper``; torch/csrc/distributed/c10d/reducer.cpp, ``initialize_buckets``, ``rebuild_buckets``.
    """
    trained = [parameter for parameter in program.model.parameters() if parameter.requires_grad]
    arrived: list[torch.Tensor] = []
    rebuilt: list[bool] = []
    with part("communication"):
        _broadcast([*program.model.parameters(), *program.model.buffers()])
        buckets = [_make_bytes(sum(_get_bytes(p) for p in same)) for same in _by_dtype(trained)]

    def before_forward(*_: Any) -> None:
        if is_in_backward():
            return
        if arrived and not rebuilt:
            buckets.clear()
            with part("communication"):
                for same in _by_dtype(arrived):
                    sizes = plan_buckets([_get_bytes(p) for p in same], [FIRST_BUCKET_BYTES, BUCKET_BYTES])
                    buckets.extend(_make_bytes(size) for size in sizes)
            rebuilt.append(True)
        with part("communication"):
            _broadcast(list(program.model.buffers()))

    def arrive(parameter: torch.Tensor) -> None:
        if not rebuilt:
            arrived.append(parameter)

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(arrive)  # type: ignore[no-untyped-call]
    program.model.register_forward_pre_hook(before_forward)
    return dataclasses.replace(
        program, notes=(*program.notes, "DDP: gradients are held twice, the second time in buckets")
    )


def _broadcast(tensors: Sequence[torch.Tensor]) -> None:
    """Flat copies of tensors, two alive at once. Source: reducer.cpp, ``broadcast_coalesced``."""
    flights: list[torch.Tensor] = []
    for same in _by_dtype(tensors):
        for size in plan_buckets([_get_bytes(tensor) for tensor in same], [BROADCAST_BYTES]):
            flights = [*flights[-1:], _make_bytes(size)]


def _by_dtype(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _get_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _make_bytes(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


class _Partition:
    """Rank 0's share of the trained parameters of one dtype, as ZeRO-1 and 2 flatten them."""

    def __init__(self, parameters: Sequence[nn.Parameter], world_size: int) -> None:
        self.parameters = parameters
        self.numel = -(-sum(parameter.numel() for parameter in parameters) // world_size)
        self.grad_dtype = parameters[0].dtype
        self.grad: torch.Tensor | None = None
        with part("optimizer"):
            self.shard = nn.Parameter(torch.empty(self.numel, dtype=torch.float32))


def shard_zero(program: Program, setup: Setup, *, bucket_size: int = REDUCE_BUCKET_SIZE) -> Program:
    """The program under ZeRO stage 1 (optimizer states shared out) or 2 (gradients too).

    With mixed precision the weights are in 16 bit, as DeepSpeed holds them. The optimizer always holds its share of
    them once more in fp32. Gradients are copied into a bucket that lives through each backward pass, and flattened
    once more to be reduced. Source: DeepSpeed 0.19 deepspeed/runtime/zero/stage_1_and_2.py, ``__init__``
    (``single_partition_of_fp32_groups``), ``backward``, ``average_tensor``, ``allreduce_bucket``, ``step``.

    Args:
        program: The program of one device; changed in place.
        setup: ``zero1`` or ``zero2``, and the number of ranks.
        bucket_size: Elements of the bucket (``reduce_bucket_size``).
    """
    compute_dtype = get_compute_dtype(setup)
    if compute_dtype is not None:
        cast_weights(program, compute_dtype, setup)
    trained = [parameter for parameter in program.model.parameters() if parameter.requires_grad]
    partitions = [_Partition(same, setup.world_size) for same in _by_dtype(trained)]  # type: ignore[arg-type]
    shards = {id(parameter): partition.shard for partition in partitions for parameter in partition.parameters}
    swap_optimized(program, shards, setup)
    emulator = _ZeroGradients(partitions, setup, bucket_size)
    if compute_dtype is not None:
        program.model.register_forward_pre_hook(make_cast_hook(compute_dtype), with_kwargs=True)
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(emulator.take)  # type: ignore[no-untyped-call]
    return dataclasses.replace(
        program,
        autocast_dtype=None if compute_dtype is not None else program.autocast_dtype,
        before_step=chain(emulator.partition, program.before_step),
        after_step=chain(program.after_step, emulator.clear),
        notes=(*program.notes, f"{setup.strategy}: DeepSpeed's defaults, a bucket of {bucket_size} elements"),
    )


class _ZeroGradients:
    """What becomes of gradients under ZeRO-1 and 2."""

    def __init__(self, partitions: Sequence[_Partition], setup: Setup, bucket_size: int) -> None:
        self.partitions = partitions
        self.is_stage_2 = setup.strategy == "zero2"
        self.bucket_size = bucket_size
        self.bucket: torch.Tensor | None = None
        self.filled = 0

    def take(self, parameter: torch.Tensor) -> None:
        """A gradient is ready: in stage 2 it moves into the bucket and is gone; in stage 1 it waits for the others."""
        if self.bucket is None:
            with part("communication"):
                self.bucket = torch.empty(self.bucket_size, dtype=parameter.dtype)
            if self.is_stage_2:
                torch.autograd.Variable._execution_engine.queue_callback(self._drop)
        if self.is_stage_2:
            self._move(parameter)

    def _move(self, parameter: torch.Tensor) -> None:
        if self.filled + parameter.numel() > self.bucket_size:
            self._reduce()
        self.filled += parameter.numel()
        parameter.grad = None

    def _reduce(self) -> None:
        """The bucket is full: it is flattened once more, reduced, and the rank's share is copied out."""
        with part("communication"):
            flat = torch.empty(self.filled, dtype=self.partitions[0].grad_dtype)
        self._make_partitions()
        del flat
        self.filled = 0

    def _drop(self) -> None:
        if self.filled:
            self._reduce()
        self.bucket = None

    def _make_partitions(self) -> None:
        for partition in self.partitions:
            if partition.grad is None:
                with part("gradients"):
                    partition.grad = torch.empty(partition.numel, dtype=partition.grad_dtype)

    def partition(self) -> None:
        """Before the update: the share's gradient in the optimizer's dtype."""
        if not self.is_stage_2:
            for parameter in itertools.chain.from_iterable(partition.parameters for partition in self.partitions):
                self._move(parameter)
            self._drop()
        for partition in self.partitions:
            if partition.grad is None:
                continue
            with part("gradients"):
                flat = torch.empty_like(partition.grad)
                partition.shard.grad = flat.to(partition.shard.dtype)
            del flat
            partition.grad = None

    def clear(self) -> None:
        for partition in self.partitions:
            partition.shard.grad = partition.grad = None


def cast_weights(program: Program, dtype: torch.dtype, setup: Setup) -> None:
    """Gives the floating point parameters of a model another dtype; the optimizer is told."""
    cast: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # the old ones are kept, so that no id is used twice
    for module in program.model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_floating_point() or parameter.dtype == dtype:
                continue
            if id(parameter) not in cast:
                with part("weights"):
                    new = nn.Parameter(torch.empty(parameter.shape, dtype=dtype), parameter.requires_grad)
                cast[id(parameter)] = parameter, new
            module._parameters[name] = cast[id(parameter)][1]
    swap_optimized(program, {key: new for key, (_, new) in cast.items()}, setup)
