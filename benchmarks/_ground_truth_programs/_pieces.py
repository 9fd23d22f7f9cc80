"""The parts of the estimator that programs are put together with, and optimizers by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from memfit.estimation import (
    Dtype,
    InBackward,
    Program,
    Setup,
    WeightByWeight,
    build_optimizer,
    compile_blocks,
    shard,
    shard_fully,
)


def compile_modules(program: Program, modules: Sequence[nn.Module]) -> Program:
    """The program with modules run as ``torch.compile`` would run them."""
    return compile_blocks(program, modules)


def make_optimizer(name: str, model: nn.Module, *, in_backward: bool = False) -> torch.optim.Optimizer:
    """The optimizer of a model's trained parameters.

    Args:
        name: ``adamw_fused``, ``torchao_adamw8bit``, ``paged`` for one whose states torch's allocator never sees, or a
            name of ``Setup``'s with its ``foreach`` kernels.
        model: Whose.
        in_backward: Whether each parameter is updated as soon as its gradient is there.
    """
    if name == "torchao_adamw8bit":
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        make = partial(WeightByWeight, make_state=_make_8_bit_state, make_temporaries=_Autotuning())
        return InBackward(parameters, make) if in_backward else make(parameters)
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


def _make_8_bit_state(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """torchao 0.6.1, prototype/low_bit_optim/adam.py (``_new_buffer``) and subclass_8bit.py (``zeros``)."""
    size = weight.numel()
    if size < 4096 or size % 256:
        return {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
    state = {}
    for name in ("exp_avg", "exp_avg_sq"):
        state[f"{name}_codes"] = torch.zeros_like(weight, dtype=torch.uint8)
        state[f"{name}_scale"] = torch.zeros(size // 256)
        state[f"{name}_qmap"] = torch.zeros(256)
    return state


class _Autotuning:
    """What torchao's compiled update takes beside its states in torch 2.5.1, the stable one of torchtune's table.

    Its kernel, as inductor writes it for an A100, leaves the step of the weight in fp32. Before its first run several
    configurations of it are timed (``ReductionHint.DEFAULT``), on copies of what it writes, made for the argument that
    is read and for the one that is written (runtime/triton_heuristics.py, ``clone_args``, ``mutated_arg_names``), while
    256 MB empty the cache (triton/testing.py, ``do_bench``).
    """

    def __init__(self) -> None:
        self.timed: set[tuple[int, ...]] = set()

    def __call__(self, weight: torch.Tensor) -> list[torch.Tensor]:
        size = weight.numel()
        if size < 4096 or size % 256:
            return []
        made = [torch.empty_like(weight, dtype=torch.float32)]
        if tuple(weight.shape) not in self.timed:
            self.timed.add(tuple(weight.shape))
            made.append(torch.empty(256 * 10**6, dtype=torch.uint8))
            for _ in range(2):
                made.append(torch.empty_like(weight))
                made += [torch.empty_like(weight, dtype=torch.uint8) for _ in range(2)]
                made += [torch.empty(size // 256) for _ in range(2)]
        return made


def fully_shard(program: Program, world_size: int) -> Program:
    """The program of one rank of FSDP2: fp32 shards that are gathered in bf16 and reduced in fp32."""
    return shard(program, Setup(dtype="bf16-amp", strategy="fsdp", world_size=world_size))


def fully_shard_in_bf16(program: Program, world_size: int, units: Sequence[nn.Module] | None = None) -> Program:
    """The program of one rank of FSDP2 over bf16 weights, in place of the FSDP1 that was measured.

    Args:
        program: Of one device.
        world_size: Devices.
        units: What is wrapped, inner ones first; None for the blocks.
    """
    return shard_fully(program, Setup(dtype="bf16", strategy="fsdp", world_size=world_size), units)


def distribute(program: Program, world_size: int, *, dtype: Dtype = "bf16") -> Program:
    """The program of one rank of DistributedDataParallel, its weights in a dtype."""
    return shard(program, Setup(dtype=dtype, strategy="ddp", world_size=world_size))
