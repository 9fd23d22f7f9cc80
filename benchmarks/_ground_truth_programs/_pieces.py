"""The parts of the estimator that programs are put together with, and optimizers by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from memfit.estimation._compile import compile_blocks
from memfit.estimation._fully_sharded import shard_flat
from memfit.estimation._optimizers import build_optimizer
from memfit.estimation._parallel import shard
from memfit.estimation._program import Program
from memfit.estimation._setup import Dtype, Setup


def compile_modules(program: Program, modules: Sequence[nn.Module]) -> Program:
    """The program with modules run as ``torch.compile`` would run them."""
    return compile_blocks(program, modules)


def make_optimizer(name: str, model: nn.Module, *, in_backward: bool = False) -> torch.optim.Optimizer:
    """The optimizer of a model's trained parameters.

    Args:
        name: ``adamw_fused``, ``paged`` for one whose states torch's allocator never sees, or a name of ``Setup``'s
            with its ``foreach`` kernels.
        model: Whose.
        in_backward: Whether each parameter is updated as soon as its gradient is there.
    """
    if name == "paged":
        name = "sgd"
    fused = name == "adamw_fused"
    setup = Setup(
        optimizer="adamw" if fused else name,  # type: ignore[arg-type]
        foreach=not fused,
        optimizer_in_backward=in_backward,
    )
    optimizer, _ = build_optimizer(model, setup)
    assert optimizer is not None
    return optimizer


def fully_shard(program: Program, world_size: int) -> Program:
    """The program of one rank of FSDP2: fp32 shards that are gathered in bf16 and reduced in fp32."""
    return shard(program, Setup(dtype="bf16-amp", strategy="fsdp", world_size=world_size))


def fully_shard_flat(program: Program, world_size: int, units: Sequence[nn.Module] | None = None) -> Program:
    """The program of one rank of FSDP1 over bf16 weights.

    Args:
        program: Of one device.
        world_size: Devices.
        units: What is wrapped, inner ones first; None for the blocks.
    """
    return shard_flat(program, Setup(dtype="bf16", strategy="fsdp", world_size=world_size), units)


def distribute(program: Program, world_size: int, *, dtype: Dtype = "bf16") -> Program:
    """The program of one rank of DistributedDataParallel, its weights in a dtype."""
    return shard(program, Setup(dtype=dtype, strategy="ddp", world_size=world_size))
