"""Average the weights exponentially over the steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.training._checks import bad_setting

_LOW_PRECISION = (torch.float16, torch.bfloat16)


class Ema:
    """Averages a model's weights over the optimizer steps: ``average = decay * average + (1 - decay) * weights``.

    Averaged are the parameters that are trained, those of 16 bits in float32. Once ``prepare`` was called, an update
    allocates nothing.

    Args:
        decay: The share of the average that stays at each step, from 0 to below 1. It looks back over about
            ``1 / (1 - decay)`` steps.
        warmup: Begin with a smaller decay, ``min(decay, (1 + n) / (10 + n))`` at update ``n``.

    Source: ``get_ema_multi_avg_fn`` of ``torch.optim.swa_utils``; ``tf.train.ExponentialMovingAverage`` (warm-up).

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> ema = Ema(0.5)
        >>> for value in (0.0, 8.0, 0.0):
        ...     _ = torch.nn.init.constant_(model.weight, value)
        ...     ema.update(model)
        >>> with ema.applied(model):
        ...     averaged = model.weight.item()
        >>> averaged, model.weight.item()
        (2.0, 0.0)
    """

    def __init__(self, decay: float, *, warmup: bool = False) -> None:
        self.decay = decay
        self.warmup = warmup
        self.num_updates = 0
        self._average: dict[str, torch.Tensor] = {}
        if not 0 <= decay < 1:
            raise bad_setting("decay", decay, "it is at least 0 and below 1", "pass for example Ema(0.999)")

    def prepare(self, model: torch.nn.Module) -> None:
        """Allocate the average of every trained parameter that has none; refuse an average of another model."""
        parameters = dict(model.named_parameters())
        for name, average in self._average.items():
            if name not in parameters or parameters[name].shape != average.shape:
                raise UsageError(
                    f"The average holds '{name}' of shape {tuple(average.shape)}, and the model has "
                    f"{tuple(parameters[name].shape) if name in parameters else 'no such parameter'}.",
                    rule="an average goes on with the model that it was made of.",
                    remedy="build the model as it was, or begin with a new Ema",
                )
        for name, parameter in parameters.items():
            if parameter.requires_grad or name in self._average:
                dtype = torch.float32 if parameter.dtype in _LOW_PRECISION else parameter.dtype
                source = self._average.get(name, parameter.detach())
                moved = source.to(parameter.device, dtype)
                self._average[name] = moved.clone() if moved.data_ptr() == parameter.data_ptr() else moved

    @torch.no_grad()
    def update(self, model: torch.nn.Module) -> None:
        """Take in the weights as they are after an optimizer step."""
        tracked = {name: p for name, p in model.named_parameters() if p.requires_grad or name in self._average}
        if any(name not in self._average or self._average[name].device != p.device for name, p in tracked.items()):
            self.prepare(model)
        decay = self.decay if self.num_updates else 0.0
        if self.warmup:
            decay = min(decay, (1 + self.num_updates) / (10 + self.num_updates))
        averages, weights = [], []
        for name, parameter in tracked.items():
            if parameter.dtype in _LOW_PRECISION:  # lerp_ would need a copy of the weight in float32
                self._average[name].mul_(decay).add_(parameter, alpha=1.0 - decay)
            else:
                averages.append(self._average[name])
                weights.append(parameter.detach())
        if averages:
            torch._foreach_lerp_(averages, weights, 1.0 - decay)
        self.num_updates += 1

    @contextmanager
    def applied(self, model: torch.nn.Module) -> Iterator[None]:
        """Give the model the averaged weights inside the block, and its own again after it.

        Only 16-bit weights are copied for it. Only evaluate inside: an optimizer step would train the average.
        """
        own = {name: parameter.data for name, parameter in model.named_parameters() if name in self._average}
        try:
            for name, parameter in model.named_parameters():
                if name in own:
                    parameter.data = self._average[name].to(parameter.device, parameter.dtype)
            yield
        finally:
            for name, parameter in model.named_parameters():
                if name in own:
                    parameter.data = own[name]

    def state_dict(self) -> dict[str, Any]:
        """Return the average, the number of updates, and what it was made with."""
        settings = {"num_updates": self.num_updates, "decay": self.decay, "warmup": self.warmup}
        return {"average": dict(self._average), **settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave; another decay or warm-up is a ``UsageError``."""
        if (state["decay"], state["warmup"]) != (self.decay, self.warmup):
            raise UsageError(
                f"The average was made with decay={state['decay']}, warmup={state['warmup']}, and this Ema has "
                f"decay={self.decay}, warmup={self.warmup}.",
                rule="a resume goes on with what the checkpoint was made with; a change would mix two averages.",
                remedy="set these back, or begin with a new checkpoint_dir",
            )
        own = self._average
        self._average = {  # in place where it can be: an update after that allocates nothing
            name: own[name].copy_(one) if name in own and own[name].shape == one.shape else one.detach().clone()
            for name, one in state["average"].items()
        }
        self.num_updates = state["num_updates"]
