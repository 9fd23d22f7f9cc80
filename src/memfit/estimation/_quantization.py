"""Frozen weights in 4 or 8 bits: their bytes, and the weights that are made of them for each product and dropped."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

#: bitsandbytes 0.45, functional.py, quantize_4bit: one fp32 maximum for 64 weights; double quantisation takes less.
_BLOCK_SIZE = 64


class QuantizedLinear(nn.Module):
    """A linear layer whose frozen weight is held in 4 or 8 bits, with the memory of bitsandbytes' layers.

    Nothing of the 4-bit layer's input is kept for the backward pass: the weight is made again there. The 8-bit layer
    keeps its input (bitsandbytes 0.45, autograd/_functions.py, MatMul8bitLt).

    Args:
        in_features: Of the weight.
        out_features: Of the weight.
        bias: Whose shape and dtype the layer's frozen bias has; it may be on the meta device. Or None.
        kind: ``nf4`` or ``int8``.
        compute_dtype: Of the product and of the weight that is made for it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: torch.Tensor | None,
        kind: Literal["nf4", "int8"],
        *,
        compute_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.kind = kind
        self.compute_dtype = compute_dtype
        size = in_features * out_features
        if kind == "int8":
            self.weight = _freeze(torch.empty(out_features, in_features, dtype=torch.int8))
            self.scales = _freeze(torch.empty(out_features, dtype=torch.float32))
        else:
            self.weight = _freeze(torch.empty(math.ceil(size / 2), 1, dtype=torch.uint8))
            self.code = _freeze(torch.empty(16, dtype=torch.float32))
            self.maxima = _freeze(torch.empty(math.ceil(size / _BLOCK_SIZE), dtype=torch.float32))
        self.bias = None if bias is None else _freeze(torch.empty(bias.shape, dtype=bias.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product in ``compute_dtype``, in the dtype of ``x``."""
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        result: torch.Tensor = _Product.apply(x.to(self.compute_dtype), bias, self)  # type: ignore[no-untyped-call]
        return result.to(x.dtype)

    def make_weight(self) -> torch.Tensor:
        """New bytes for the weight in ``compute_dtype``."""
        return torch.empty(self.out_features, self.in_features, dtype=self.compute_dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, layer: QuantizedLinear) -> torch.Tensor:
        ctx.layer = layer
        if layer.kind == "nf4":
            return functional.linear(x, layer.make_weight(), bias)
        ctx.save_for_backward(x)
        rows = x.numel() // layer.in_features
        quantized = torch.empty_like(x, dtype=torch.int8)
        scales = torch.empty(rows, dtype=torch.float32)
        sums = torch.empty(rows, layer.out_features, dtype=torch.int32)
        result = torch.empty(*x.shape[:-1], layer.out_features, dtype=x.dtype)
        del quantized, scales, sums
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        (gradient,) = gradients
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return gradient @ ctx.layer.make_weight().to(gradient.dtype), None, None


def quantize_linears(
    model: nn.Module,
    kind: Literal["nf4", "int8"],
    *,
    compute_dtype: torch.dtype,
    skip: Collection[nn.Module] = (),
) -> int:
    """Replaces the linear layers of a model, and GPT-2's transposed ones, by quantised ones and freezes the model.

    Args:
        model: Changed in place.
        kind: How weights are held.
        compute_dtype: Of products.
        skip: Layers that stay: the output layer above all.

    Returns:
        How many were replaced.
    """
    model.requires_grad_(False)
    kept = {id(module) for module in skip}
    num_replaced = 0
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if id(child) in kept or not is_linear(child):
                continue
            features_in, features_out = find_features(child)
            bias: torch.Tensor | None = child.bias  # type: ignore[assignment]
            layer = QuantizedLinear(features_in, features_out, bias, kind, compute_dtype=compute_dtype)
            setattr(parent, name, layer)
            num_replaced += 1
    return num_replaced


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer with a weight of its own: torch's, GPT-2's transposed one, or quantised."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D" or isinstance(module, QuantizedLinear)


def find_features(module: nn.Module) -> tuple[int, int]:
    """How many features a linear layer takes and gives."""
    if type(module).__name__ == "Conv1D":
        features_in, features_out = module.get_parameter("weight").shape
        return int(features_in), int(features_out)
    layer: Any = module
    return int(layer.in_features), int(layer.out_features)


def _freeze(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
