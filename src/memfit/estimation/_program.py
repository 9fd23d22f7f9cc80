"""A training step that can be traced: a model, a batch, a loss and an optimizer, all on fake tensors."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from memfit.estimation._setup import Setup

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: The second finds the gradients of the first; further ones find the same.
_MOST_MICROBATCHES = 2


@dataclass
class Program:
    """One training step, made inside of a fake tensor mode: no byte of it is real."""

    model: nn.Module  # in the dtype of its weights
    batch: Any  # what ``loss`` takes beside the model: any tree of tensors
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: torch.optim.Optimizer | None = None  # None for inference
    autocast_dtype: torch.dtype | None = None  # of ``torch.autocast("cuda")`` around forward and loss
    num_microbatches: int = 1  # forward and backward passes before each update
    clip_grad_norm: bool = False
    notes: tuple[str, ...] = ()  # what was replaced or assumed

    def step(self) -> None:
        optimizer = self.optimizer
        if optimizer is None:
            with torch.no_grad():
                self._forward()
            return
        for _ in range(min(self.num_microbatches, _MOST_MICROBATCHES)):
            self._forward().backward()  # type: ignore[no-untyped-call]
        if self.clip_grad_norm:
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            clipped = list(dict.fromkeys([*self.model.parameters(), *held]))
            nn.utils.clip_grad_norm_(clipped, 1.0, foreach=True)  # as on CUDA
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)

    def _forward(self) -> torch.Tensor:
        with torch.autocast("cpu", dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None):
            return self.loss(self.model, self.batch)


def find_dtypes(setup: Setup) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the dtype of the weights, and that of autocast."""
    computes = DTYPES[setup.dtype.removesuffix("-amp")]
    if setup.autocasts and computes is not torch.float32:
        return torch.float32, computes
    return computes, None


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that a model repeats: what is checkpointed and sharded one by one. They are the items of each
    outermost list of two or more modules of one class, with a twentieth of all parameters."""
    total = sum(parameter.numel() for parameter in model.parameters())
    blocks: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            items = list(child.children()) if isinstance(child, nn.ModuleList | nn.Sequential) else []
            size = sum(parameter.numel() for item in items for parameter in item.parameters())
            if len(items) >= 2 and len({type(item) for item in items}) == 1 and size * 20 >= total:
                blocks.extend(items)
            else:
                visit(child)

    visit(model)
    return blocks


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return a tree with its tensors replaced; mappings other than ``dict`` and ``UserDict`` become a ``dict``."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if isinstance(leaf, Mapping):
            content = {key: map_tensors(function, one) for key, one in leaf.items()}
            if not isinstance(leaf, dict | UserDict):
                return content
            made: Any = copy.copy(leaf)
            made.update(content)
            return made
        if is_dataclass(leaf) and not isinstance(leaf, type):
            made = copy.copy(leaf)
            for field in fields(leaf):
                object.__setattr__(made, field.name, map_tensors(function, getattr(leaf, field.name)))
            return made
        return leaf

    return tree_map(visit, tree)


def find_tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(found.append, tree)
    return found
