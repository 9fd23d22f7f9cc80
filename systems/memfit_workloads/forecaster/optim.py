"""Optimizers by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from memfit.errors import UsageError, nearest

#: What each of these takes beside its learning rate and weight decay.
_CONSTANTS: dict[str, dict[str, Any]] = {
    "adamw": {"fused": True},
    "adabelief": {"eps": 1e-16, "betas": (0.9, 0.999), "weight_decouple": True, "rectify": True},
}


def make_optimizer(
    name: str, parameters: Iterable[torch.nn.Parameter], learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Return an optimizer by name: ``adamw`` is torch's own, the others are those of pytorch_optimizer.

    ``adabelief`` has eps 1e-16, decoupled weight decay and rectification. The others have the library's constants, with
    decoupled weight decay where they know it.

    Raises:
        UsageError: If there is no such optimizer, it needs other settings, or a number is out of its range.

    Source: J. Zhuang et al., AdaBelief Optimizer: Adapting Stepsizes by the Belief in Observed Gradients, NeurIPS 2020.
    """
    kind: Any = torch.optim.AdamW if name == "adamw" else _load(name)
    takes = inspect.signature(kind).parameters
    constants = _CONSTANTS.get(name, {"weight_decouple": True} if "weight_decouple" in takes else {})
    try:
        if not {"lr", "weight_decay"} <= takes.keys():  # many take any other setting too, and ignore it
            raise TypeError(f"it has no lr or no weight_decay, but {', '.join(takes)}")
        made: torch.optim.Optimizer = kind(parameters, lr=learning_rate, weight_decay=weight_decay, **constants)
    except Exception as error:  # each optimizer has errors of its own
        raise UsageError(
            f"{name} with learning rate {learning_rate} and weight decay {weight_decay} cannot be made: {error}",
            rule="an optimizer takes parameters, a learning rate and a weight decay, and needs nothing else.",
            remedy="pass 'adamw' or 'adabelief', with a learning rate above 0 and a weight decay of 0 or more",
        ) from error
    return made


def _load(name: str) -> Any:
    """Return an optimizer class of pytorch_optimizer. It takes seconds to import."""
    import pytorch_optimizer

    known = pytorch_optimizer.get_supported_optimizers()
    if name not in known:
        raise UsageError(
            f"optimizer is {name!r}.",
            rule="it is 'adamw' or an optimizer of pytorch_optimizer.",
            remedy=nearest(name, known),
        )
    return pytorch_optimizer.load_optimizer(name)
