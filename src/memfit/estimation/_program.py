"""A training step that can be traced: a model, a batch, a loss and an optimizer, all on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.estimation._interval import Interval


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
        before_step: Called between the last backward pass and the update: collectives, unscaling.
        after_step: Called after the update, before gradients are dropped.
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
    before_step: Callable[[], None] | None = None
    after_step: Callable[[], None] | None = None
    notes: tuple[str, ...] = ()
    load: Interval | None = None
    cast_slack: int = 0


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
