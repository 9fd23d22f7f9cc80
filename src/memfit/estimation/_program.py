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

from memfit.estimation._interval import Interval

#: The second finds the gradients of the first; further ones find the same.
_MOST_MICROBATCHES = 2


@dataclass
class Program:
    """What one training step runs. It is made, and changed, inside of a fake tensor mode: no byte of it is real.

    Attributes:
        model: The model, in the dtype of its weights.
        batch: What ``loss`` takes beside the model: any tree of tensors.
        loss: Gives the scalar to differentiate from the model and the batch.
        optimizer: None for inference only.
        autocast_dtype: The dtype of ``torch.autocast("cuda")`` around forward and loss; None without.
        num_microbatches: Forward and backward passes before each update.
        clip_grad_norm: Whether gradients are clipped by their norm before each update.
        clips_at_once: Whether the norm is taken of all gradients at once, as on CUDA; set by the trace.
        notes: What was replaced or assumed, in words.
        load: What loading the weights takes; None where that is no more than what stays.
        cast_slack: What stays beyond the count if libraries widen weights after loading them.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: torch.optim.Optimizer | None = None
    autocast_dtype: torch.dtype | None = None
    num_microbatches: int = 1
    clip_grad_norm: bool = False
    clips_at_once: bool = False
    notes: tuple[str, ...] = ()
    load: Interval | None = None
    cast_slack: int = 0

    def step(self) -> None:
        """Run one update, as a plain training loop does it."""
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
            nn.utils.clip_grad_norm_(clipped, 1.0, foreach=self.clips_at_once or None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)

    def _forward(self) -> torch.Tensor:
        with torch.autocast("cpu", dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None):
            return self.loss(self.model, self.batch)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that a model repeats: what is checkpointed, sharded and compiled one by one.

    The items of every ``nn.ModuleList`` or ``nn.Sequential`` of at least two modules of one class that lies in no other
    block and holds at least a twentieth of the model's parameters.

    >>> len(find_blocks(nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})))
    3
    """
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
    """A tree with the tensors in it replaced: in lists, tuples, mappings of any kind and dataclasses.

    Dataclasses, and mappings that derive from ``dict`` or ``UserDict``, keep their class; others become a ``dict``.
    """

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
    """The tensors of a tree, in order.

    >>> len(find_tensors({"x": torch.zeros(2), "more": [UserDict(y=torch.zeros(3)), None]}))
    2
    """
    found: list[torch.Tensor] = []
    map_tensors(found.append, tree)
    return found
