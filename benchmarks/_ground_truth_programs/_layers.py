"""Layers that several of the frameworks share, with the temporaries and saved tensors of the ones they ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn


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
    """Attention under a block mask."""
    out: torch.Tensor = _FlexAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out


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
        """The weight, whole."""
        return torch.empty(self.out_features, self.in_features, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _NF4Linear.apply(x, self)  # type: ignore[no-untyped-call]
        return out


def make_linear(
    in_features: int, out_features: int, *, nf4: bool = False, bias: bool = False, **options: bool
) -> nn.Module:
    """A linear layer, 4-bit or not, with the options of ``NF4Linear``."""
    if nf4:
        return NF4Linear(in_features, out_features, **options)
    return nn.Linear(in_features, out_features, bias=bias)


class LoRALinear(nn.Module):
    """A linear layer with torchtune's adapter."""

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
        adapted: torch.Tensor = result + 2.0 * self.lora_b(self.lora_a(self.dropout(x)))
        return adapted


class UpcastCrossEntropy(nn.Module):
    """The cross entropy of logits made fp32 for it, summed."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.float(), labels, reduction="sum")
