"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def make_optimizer(
    name: str, parameters: Iterable[torch.nn.Parameter], learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Return an optimizer by name: ``adamw`` is torch's own, ``adabelief`` that of pytorch_optimizer.

    ``adabelief`` has eps 1e-16, decoupled weight decay and rectification.

    Source: J. Zhuang et al., AdaBelief Optimizer: Adapting Stepsizes by the Belief in Observed Gradients, NeurIPS 2020.
    """
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay, fused=True)
    from pytorch_optimizer import AdaBelief  # it takes seconds to import

    made: torch.optim.Optimizer = AdaBelief(
        parameters, learning_rate, (0.9, 0.999), weight_decay, weight_decouple=True, rectify=True, eps=1e-16
    )
    return made
