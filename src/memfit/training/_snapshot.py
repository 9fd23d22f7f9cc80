"""What a forward pass changes beside gradients, noted before a step and put back before it is done again."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class Snapshot:
    """What a forward pass changes beside gradients: random state and buffers; and the gradient scaler."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
    ) -> None:
        self._model, self._optimizer, self._scaler = model, optimizer, scaler
        self.modules: list[torch.nn.Module] = []
        self._children: list[torch.nn.Module | None] = []
        self._buffers: list[tuple[torch.nn.Module, dict[str, Any]]] = []
        self._copies: dict[torch.Tensor, torch.Tensor] = {}
        self._rng: tuple[Any, ...] = ()
        self._scaler_state: dict[str, Any] = {}

    def take(self) -> None:
        """Note how things are. Copies are written over those of the last time, so this allocates once."""
        self._rng = _read_rng()
        children = [child for module in self.modules for child in module._modules.values()]
        if children != self._children or not self.modules:  # walking the tree anew costs ten times as much
            self.modules = list(self._model.modules())
            self._children = [child for module in self.modules for child in module._modules.values()]
        self._buffers = [(module, dict(module._buffers)) for module in self.modules if module._buffers]
        buffers = {buffer for _, held in self._buffers for buffer in held.values() if buffer is not None}
        if buffers != self._copies.keys():
            self._copies = {}
            self._copies = {buffer: buffer.detach().clone() for buffer in buffers}
        elif buffers:
            with torch.no_grad():
                torch._foreach_copy_(list(self._copies.values()), list(self._copies))
        if self._scaler is not None:
            self._scaler_state = self._scaler.state_dict()

    def restore(self) -> None:
        """Put everything back; allocates nothing."""
        _write_rng(self._rng)
        for module, before in self._buffers:
            if isinstance(module, torch.jit.ScriptModule):  # what it shows are not its own dicts
                for name, buffer in before.items():
                    setattr(module, name, buffer)
                continue
            module._buffers.clear()
            module._buffers.update(before)
        with torch.no_grad():
            for buffer, copy in self._copies.items():
                if not _is_expanded(buffer):
                    buffer.copy_(copy)
        self.reset_scaler()

    def changed(self) -> tuple[list[str], bool]:
        """The names of the buffers whose values are not what they were, and whether all of them could be compared.

        One that has appeared or has another shape since, as a cached table of positions, cannot.
        """
        before = {id(module): held for module, held in self._buffers}
        found, compared_all = [], True
        for place, module in self._model.named_modules():
            held = before.get(id(module), {})
            for name, buffer in module._buffers.items():
                was = held.get(name)
                if buffer is None or was is None or buffer.shape != was.shape or buffer.layout != torch.strided:
                    compared_all &= buffer is None or buffer is was
                elif not _equal(buffer, self._copies[was]):
                    found.append(f"{place}.{name}".lstrip("."))
        return found, compared_all

    def reset_scaler(self) -> None:
        if self._scaler is not None and self._scaler_state:
            self._scaler.load_state_dict(self._scaler_state)
            self._scaler._per_optimizer_states.pop(id(self._optimizer), None)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all values are the same; what is not a number is the same as itself."""
    return torch.equal(one, other) or bool(((one == other) | (one != one) & (other != other)).all())


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements share one place in memory: nothing can have been written there, and nothing can be."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _read_rng() -> tuple[Any, ...]:
    """The state of the global generators, in the generators' own form: quicker than one that a file can hold."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def _write_rng(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3]:
        torch.cuda.set_rng_state_all(state[3])
