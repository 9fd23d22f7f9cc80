"""Frozen linear layers: their weights in 4 bits, and LoRA adapters beside them, with the memory of PEFT's."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from memfit.errors import ConfigError, nearest
from memfit.estimation._setup import NF4_BLOCK

#: Layers that classify: PEFT trains them in full (tuners/lora, task type SEQ_CLS), and they are not quantised.
CLASSIFIERS = ("classifier", "score")


class QuantizedLinear(nn.Module):
    """A linear layer whose frozen weight is held in 4 bits, with the memory of bitsandbytes' layer: it makes its weight
    again in the backward pass."""

    def __init__(
        self, in_features: int, out_features: int, bias: torch.Tensor | None, *, compute_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.compute_dtype = in_features, out_features, compute_dtype
        size = in_features * out_features
        self.weight = _freeze(torch.empty(math.ceil(size / 2), 1, dtype=torch.uint8))
        self.code = _freeze(torch.empty(16, dtype=torch.float32))
        self.maxima = _freeze(torch.empty(math.ceil(size / NF4_BLOCK), dtype=torch.float32))
        self.bias = None if bias is None else _freeze(torch.empty(bias.shape, dtype=bias.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        result: torch.Tensor = _Product.apply(x.to(self.compute_dtype), bias, self)  # type: ignore[no-untyped-call]
        return result.to(x.dtype)

    def make_weight(self) -> torch.Tensor:
        return torch.empty(self.out_features, self.in_features, dtype=self.compute_dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, layer: QuantizedLinear) -> torch.Tensor:
        ctx.layer = layer
        return functional.linear(x, layer.make_weight(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        (gradient,) = gradients
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return gradient @ ctx.layer.make_weight().to(gradient.dtype), None, None


def _freeze(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def quantize_linears(model: nn.Module, *, compute_dtype: torch.dtype, skip: Collection[nn.Module] = ()) -> int:
    """Freeze a model, quantise its linear layers (GPT-2's transposed ones too) but ``skip``, and return how many."""
    model.requires_grad_(False)
    kept = {id(module) for module in skip}
    num_replaced = 0
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if id(child) not in kept and _is_linear(child):
                bias: torch.Tensor | None = child.bias  # type: ignore[assignment]
                setattr(parent, name, QuantizedLinear(*_find_features(child), bias, compute_dtype=compute_dtype))
                num_replaced += 1
    return num_replaced


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D" or isinstance(module, QuantizedLinear)


def _find_features(module: nn.Module) -> tuple[int, int]:
    layer: Any = module
    if type(module).__name__ == "Conv1D":
        features_in, features_out = layer.weight.shape
        return int(features_in), int(features_out)
    return int(layer.in_features), int(layer.out_features)


class LoraLinear(nn.Module):
    """A frozen linear layer and two narrow fp32 ones beside it, as PEFT's ``tuners/lora/layer.py`` runs them."""

    def __init__(self, base: nn.Module, rank: int, dropout: float = 0.0) -> None:
        super().__init__()
        features_in, features_out = _find_features(base)
        self.base_layer, self.dropout = base, nn.Dropout(dropout)
        self.lora_A = nn.Linear(features_in, rank, bias=False, dtype=torch.float32)
        self.lora_B = nn.Linear(rank, features_out, bias=False, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(x)
        update: torch.Tensor = self.lora_B(self.lora_A(self.dropout(x.to(self.lora_A.weight.dtype)))) * 2.0
        if isinstance(self.base_layer, QuantizedLinear):  # PEFT's tuners/lora/bnb.py casts before it adds
            return result + (update if torch.is_autocast_enabled("cpu") else update.to(result.dtype))
        return (result + update).to(result.dtype)


def add_lora(
    model: nn.Module, rank: int, targets: Sequence[str], *, head: nn.Module | None = None, dropout: float = 0.0
) -> int:
    """Freeze a model but its classifier, put adapters beside linear layers (by last names), and return how many."""
    model.requires_grad_(False)
    linears = {name: module for name, module in model.named_modules() if name and _is_linear(module)}
    if "all-linear" in targets:
        chosen = [name for name, module in linears.items() if module is not head]
    else:
        chosen = [name for name in linears if any(f".{name}".endswith(f".{target}") for target in targets)]
    if not chosen:
        known = {name.rsplit(".", 1)[-1] for name in linears}
        raise ConfigError(
            f"No linear layer of {type(model).__name__} is named {' or '.join(targets)}.",
            rule=f"Adapters go beside linear layers; {nearest(targets[0], known)}.",
            remedy=f"use --train lora_targets=[{','.join(sorted(known)[:4])}], or --train lora_targets=[all-linear]",
        )
    for name in chosen:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, LoraLinear(linears[name], rank, dropout))
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in CLASSIFIERS and not isinstance(module, LoraLinear):
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    parameter.requires_grad_(True)
    return len(chosen)
