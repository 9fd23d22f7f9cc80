"""Optimizers on fake tensors: torch's own, or the states and temporaries of others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from memfit.errors import ConfigError
from memfit.estimation._setup import STATE_BLOCK, Setup

#: bitsandbytes 0.45, optim/optimizer.py: smaller tensors keep fp32 moments (torchao 0.7 draws the same line); smaller
#: moments are not paged.
_MIN_QUANTIZED_SIZE, _MIN_PAGED_SIZE = 4096, 100_000

_Factory = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def build_optimizer(model: nn.Module, setup: Setup) -> tuple[torch.optim.Optimizer | None, tuple[str, ...]]:
    """Return the optimizer of a model's trained weights, and notes on what was assumed."""
    if setup.optimizer == "none":
        return None, ()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError(
            f"No weight of {type(model).__name__} is trained, and the optimizer is {setup.optimizer}.",
            rule="An optimizer needs at least one weight.",
            remedy="use --optimizer none, or --lora with a rank above 0",
        )
    factory = _choose(setup)
    if setup.master_weights:
        factory = partial(_MasterWeights, factory=factory)
    made = InBackward(parameters, factory) if setup.optimizer_in_backward else factory(list(parameters))
    notes = []
    if setup.optimizer.endswith("adamw8bit"):
        notes.append("8-bit moments are those of bitsandbytes; transformers' trainer keeps fp32 ones of embeddings")
    if setup.master_weights:
        notes.append("the step makes fp32 gradients of all weights that have a master copy")
    return made, tuple(notes)


def _choose(setup: Setup) -> _Factory:
    name, foreach = setup.optimizer, setup.foreach
    if name.endswith("adamw8bit") or name == "paged_adamw":
        is_paged, bits = name.startswith("paged"), 8 if name.endswith("8bit") else 32
        make_state = partial(_state_of_bitsandbytes, maps={}, bits=bits, is_paged=is_paged)
        return partial(WeightByWeight, make_state=make_state)
    if name == "adafactor":  # transformers' trainer uses its own
        from transformers.optimization import Adafactor

        kind: Any = Adafactor
        return partial(kind, lr=1e-3, scale_parameter=False, relative_step=False)
    if name in ("sgd", "momentum"):
        momentum = 0.9 if name == "momentum" else 0.0
        # The fused kernel has no fake version; it takes as much as the loop over weights.
        return partial(torch.optim.SGD, lr=1e-3, momentum=momentum, foreach=foreach, fused=False)
    adam = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    fast: dict[str, Any] = {"foreach": True} if foreach else {"fused": True}
    return partial(adam, lr=1e-3, **fast)


def _state_of_bitsandbytes(
    weight: torch.Tensor, maps: dict[str, torch.Tensor], bits: int, is_paged: bool
) -> dict[str, torch.Tensor]:
    size, is_paged = weight.numel(), is_paged and weight.numel() >= _MIN_PAGED_SIZE
    if size < _MIN_QUANTIZED_SIZE or bits == 32:
        num = 0 if is_paged else size
        return {name: torch.zeros(num, dtype=torch.float32, device=weight.device) for name in ("state1", "state2")}
    state: dict[str, torch.Tensor] = {}
    for index in ("1", "2"):
        if f"qmap{index}" not in maps:
            maps[f"qmap{index}"] = torch.zeros(256)
        state[f"state{index}"] = torch.zeros(0 if is_paged else size, dtype=torch.uint8, device=weight.device)
        state[f"qmap{index}"] = maps[f"qmap{index}"]
        state[f"absmax{index}"] = torch.zeros(math.ceil(size / STATE_BLOCK), dtype=torch.float32)
    return state


class WeightByWeight(torch.optim.Optimizer):
    """An optimizer that updates one weight after another, by one kernel each."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        make_state: Callable[[torch.Tensor], dict[str, torch.Tensor]],
        make_temporaries: Callable[[torch.Tensor], list[torch.Tensor]] = lambda weight: [],
    ) -> None:
        super().__init__(parameters, {})
        self._make_state, self._make_temporaries = make_state, make_temporaries
        weights = [weight for group in self.param_groups for weight in group["params"]]
        #: bitsandbytes updates in place; torchao's compiled step may write both moments of a weight in fp32.
        self.slack_bytes = 2 * 4 * max((weight.numel() for weight in weights), default=0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make missing states, and temporaries, one weight at a time."""
        for weight in _weights_with_gradients(self):
            if not self.state[weight]:
                self.state[weight] = self._make_state(weight)
            self._make_temporaries(weight)


class _MasterWeights(torch.optim.Optimizer):
    """An optimizer of fp32 copies of 16-bit weights."""

    def __init__(self, parameters: Iterable[torch.Tensor], factory: _Factory) -> None:
        super().__init__(parameters, {})
        owned = [weight for group in self.param_groups for weight in group["params"]]
        self._pairs = []
        for weight in owned:
            master = weight
            if weight.dtype is not torch.float32:
                master = nn.Parameter(torch.empty_like(weight, dtype=torch.float32))
                self.state[weight]["master"] = master.detach()
            self._pairs.append((weight, master))
        self._inner = factory([master for _, master in self._pairs])
        self._inner.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pairs = [(weight, master) for weight, master in self._pairs if weight is not master]
        for weight, master in pairs:
            master.grad = None if weight.grad is None else weight.grad.float()
        self._inner.step()
        for weight, master in pairs:
            weight.copy_(master)
            master.grad = None


class InBackward(torch.optim.Optimizer):
    """An optimizer for each weight, run when its gradient is complete."""

    def __init__(self, parameters: Sequence[torch.Tensor], factory: _Factory) -> None:
        super().__init__(parameters, {})
        self.slack_bytes = 0
        for weight in parameters:
            inner = factory([weight])
            self.slack_bytes = max(self.slack_bytes, getattr(inner, "slack_bytes", 0))
            self.state.update(inner.state)
            inner.state = self.state
            if isinstance(inner, _MasterWeights):
                inner._inner.state = self.state
            weight.register_post_accumulate_grad_hook(_make_hook(inner))  # type: ignore[no-untyped-call]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: the backward pass made the updates."""


def _make_hook(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    def update(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def _weights_with_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
