"""Low-rank adapters beside frozen layers, with the memory of PEFT's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from memfit.errors import ConfigError, nearest
from memfit.estimation._quantization import QuantizedLinear, find_features, is_linear

#: Layers that classify: PEFT trains them in full (tuners/lora, task type SEQ_CLS).
_TRAINED_HEADS = ("classifier", "score")


class LoraLinear(nn.Module):
    """A frozen linear layer and two narrow trained ones beside it, as PEFT's ``tuners/lora/layer.py`` runs them.

    The adapters are in fp32, to which PEFT casts them on 16-bit models (``autocast_adapter_dtype``). So is the copy of
    the input that is kept for the backward pass. Without dropout; scaled by a number.

    Args:
        base: Frozen.
        rank: Of the product of both narrow layers.
    """

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        features_in, features_out = find_features(base)
        self.base_layer = base
        self.lora_A = nn.Linear(features_in, rank, bias=False, dtype=torch.float32)
        self.lora_B = nn.Linear(rank, features_out, bias=False, dtype=torch.float32)
        self.scaling = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the frozen layer gives plus the scaled product of both adapters, in the frozen layer's dtype."""
        result: torch.Tensor = self.base_layer(x)
        dtype = result.dtype
        update: torch.Tensor = self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))) * self.scaling
        if isinstance(self.base_layer, QuantizedLinear):  # PEFT's tuners/lora/bnb.py casts before it adds
            return result + (update if torch.is_autocast_enabled("cpu") else update.to(dtype))
        total: torch.Tensor = result + update
        return total.to(dtype)


def add_lora(model: nn.Module, rank: int, targets: Sequence[str], *, head: nn.Module | None = None) -> int:
    """Freezes a model and puts adapters beside some of its linear layers.

    Args:
        model: Changed in place. Layers named ``classifier`` or ``score`` stay trained.
        rank: Of the adapters.
        targets: Last parts of the layers' names; ``all-linear`` for all but the head.
        head: The output layer, which ``all-linear`` leaves out.

    Returns:
        How many layers were adapted.

    Raises:
        ConfigError: No layer has such a name.
    """
    model.requires_grad_(False)
    linears = [(name, module) for name, module in model.named_modules() if is_linear(module)]
    chosen = [(name, module) for name, module in linears if _matches(name, targets, is_head=module is head)]
    if not chosen:
        known = {name.rsplit(".", 1)[-1] for name, _ in linears}
        raise ConfigError(
            f"No linear layer of {type(model).__name__} is named {' or '.join(targets)}.",
            rule=f"Adapters go beside linear layers; {nearest(targets[0], known)}.",
            remedy=f"use --lora {rank}:{','.join(sorted(known)[:4])}, or --lora {rank}:all-linear",
        )
    for name, module in chosen:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, LoraLinear(module, rank))
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in _TRAINED_HEADS and not isinstance(module, LoraLinear):
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    parameter.requires_grad_(True)
    return len(chosen)


def _matches(name: str, targets: Sequence[str], *, is_head: bool) -> bool:
    if "all-linear" in targets:
        return not is_head
    return any(name == target or name.endswith(f".{target}") for target in targets)
