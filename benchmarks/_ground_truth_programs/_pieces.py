# mypy: disable-error-code="no-any-return, no-untyped-call"
"""What the programs share: what is known of a row, layers with the temporaries of those that ran, and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from memfit.estimation import Dtype, InBackward, Program, Setup, WeightByWeight, build_optimizer, shard, shard_fully


@dataclass(frozen=True)
class Spec:
    """One measured run.

    Attributes:
        make: Makes its program; called inside of a fake tensor mode.
        metric: Which of the four peaks was published.
        gpu: The device, by a name that ``find_gpu`` knows.
        world_size: Devices.
        assumed: What the source does not say; empty for an exact one.
        expandable_segments: Whether the run set this option of the allocator.
        minus_inputs: Whether the published figure leaves out what was there before the step, as operator tests do.
        memory_gib: The memory of a device that ``find_gpu`` knows with another size only.
        context_gib: What a process takes with next to no model, where the source measured it on the same machine.
        cudnn_gib: What cuDNN adds to it, in the same way.
        compiled: Whether ``torch.compile`` ran it: it is rebuilt without, so that only its bound is a target.
    """

    make: Callable[[], Program]
    metric: str
    gpu: str | None = None
    world_size: int = 1
    assumed: str = ""
    expandable_segments: bool = False
    minus_inputs: bool = False
    memory_gib: float | None = None
    context_gib: float | None = None
    cudnn_gib: float | None = None
    compiled: bool = False


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Modules made within have parameters of a dtype; ``module.to`` does not work on fake tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def freeze(module: nn.Module, *, except_for: str = "\0") -> None:
    """Takes the gradient from every parameter whose name does not hold ``except_for``."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(except_for in name)


class RMSNorm(nn.Module):
    """The norm in fp32, its result in the dtype of the input, then the weight; unfused, as all frameworks wrote it.

    ``squares_by_product`` is the way of LitGPT, which keeps two references to the fp32 input instead of ``pow``'s one.
    """

    def __init__(
        self, dim: int, *, eps: float = 1e-5, unit_offset: bool = False, squares_by_product: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps, self.unit_offset, self.squares_by_product = eps, unit_offset, squares_by_product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        squares = wide * wide if self.squares_by_product else wide.pow(2)
        normed = (wide * torch.rsqrt(squares.mean(-1, keepdim=True) + self.eps)).type_as(x)
        return normed * (1 + self.weight if self.unit_offset else self.weight)


class _FlexAttention(torch.autograd.Function):
    """The memory of the compiled ``flex_attention``: no scores, no fp32 accumulators; the sum over the head of
    ``out * grad`` is written before its backward kernel (torch/_inductor/kernel/flex_attention.py of 2.5)."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value, _out, logsumexp = ctx.saved_tensors
        delta = torch.empty_like(logsumexp)
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del delta
        return grads


def flex_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return _FlexAttention.apply(query, key, value)


class _NF4Linear(torch.autograd.Function):
    """A linear layer over 4-bit weights: they are made whole for each product and kept in no pass.

    bitsandbytes up to 0.43.0 kept its input, as an attribute of the node: until the graph dies, not until its pass;
    0.43.3 does not.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: NF4Linear) -> torch.Tensor:
        ctx.layer = layer
        if layer.keeps_input:
            ctx.x = x
        return functional.linear(x, layer.dequantized(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad @ ctx.layer.dequantized(grad.dtype), None


class NF4Linear(nn.Module):
    """A frozen linear layer in NF4: half a byte an element, and the double-quantised scales.

    Both torchao (nf4tensor.py: int8 scales of blocks of 64, a factor a block of 256 of them) and bitsandbytes (uint8
    absmax, an fp32 absmax of 256 of them, and an fp32 code book of 256 entries) hold these; ``dequantized`` has one
    result and no other temporary, as bitsandbytes' kernel and torchao's compiled one.
    """

    def __init__(self, in_features: int, out_features: int, *, double: bool = True, keeps_input: bool = False) -> None:
        super().__init__()
        self.keeps_input = keeps_input
        elements = in_features * out_features
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty((elements + 1) // 2, 1, dtype=torch.uint8), requires_grad=False)
        self.register_buffer(
            "absmax", torch.empty(-(-elements // 64), dtype=torch.uint8 if double else torch.float32), persistent=False
        )
        outer = torch.empty(-(-elements // 16384), dtype=torch.float32)
        self.register_buffer("absmax_of_absmax", outer, persistent=False)
        self.register_buffer("code", torch.empty(256, dtype=torch.float32), persistent=False)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self.out_features, self.in_features, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _NF4Linear.apply(x, self)


def make_linear(
    in_features: int, out_features: int, *, nf4: bool = False, bias: bool = False, **options: bool
) -> nn.Module:
    """A linear layer, 4-bit or not, with the options of ``NF4Linear``."""
    if nf4:
        return NF4Linear(in_features, out_features, **options)
    return nn.Linear(in_features, out_features, bias=bias)


class LoRALinear(nn.Module):
    def __init__(
        self, base: nn.Module, in_features: int, out_features: int, rank: int, *, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.base = base
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.lora_a = nn.Linear(in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        return result + 2.0 * self.lora_b(self.lora_a(self.dropout(x)))


def make_optimizer(name: str, model: nn.Module, *, in_backward: bool = False) -> torch.optim.Optimizer:
    """The optimizer of a model's trained parameters: ``adamw_fused``, ``torchao_adamw8bit``, ``paged`` for one whose
    states torch's allocator never sees, or a name of ``Setup``'s with its ``foreach`` kernels."""
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
    """The program of one rank of FSDP2 over bf16 weights, in place of the FSDP1 that was measured; ``units`` are what
    is wrapped, inner ones first, and the blocks without them."""
    return shard_fully(program, Setup(dtype="bf16", strategy="fsdp", world_size=world_size), units)


def distribute(program: Program, world_size: int, *, dtype: Dtype = "bf16") -> Program:
    """The program of one rank of DistributedDataParallel, its weights in a dtype."""
    return shard(program, Setup(dtype=dtype, strategy="ddp", world_size=world_size))
