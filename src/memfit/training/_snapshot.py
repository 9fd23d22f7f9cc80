"""Note before a step what a forward pass changes beside gradients, and put it back before the step is repeated."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.training._process import read_rng, write_rng


class Snapshot:
    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
    ) -> None:
        self._model, self._optimizer, self._scaler = model, optimizer, scaler
        self.modules: list[torch.nn.Module] = []
        self._children: list[torch.nn.Module | None] = []
        self._buffers: list[tuple[torch.nn.Module, dict[str, Any]]] = []
        #: Buffers and their copies, by the buffers' identity.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rng: tuple[Any, ...] = ()
        self._scaler_state: dict[str, Any] = {}

    def take(self) -> None:
        """Note how things are, over the copies of the last time: only the first call allocates."""
        self._rng = read_rng()
        children = [child for module in self.modules for child in module._modules.values()]
        if children != self._children or not self.modules:  # walking the tree anew costs ten times as much
            self.modules = list(self._model.modules())
            self._children = [child for module in self.modules for child in module._modules.values()]
        self._buffers = [(module, dict(module._buffers)) for module in self.modules if module._buffers]
        buffers = {id(one): one for _, held in self._buffers for one in held.values() if one is not None}
        if buffers.keys() != self._copies.keys():
            self._copies = {}
            self._copies = {key: (buffer, buffer.detach().clone()) for key, buffer in buffers.items()}
        elif buffers:
            with torch.no_grad():
                torch._foreach_copy_(
                    [copy for _, copy in self._copies.values()], [one for one, _ in self._copies.values()]
                )
        if self._scaler is not None:
            self._scaler_state = self._scaler.state_dict()

    def restore(self) -> None:
        """Put everything back; allocates nothing."""
        write_rng(self._rng)
        for module, before in self._buffers:
            if isinstance(module, torch.jit.ScriptModule):  # what it shows are not its own dicts
                for name, buffer in before.items():
                    setattr(module, name, buffer)
                continue
            module._buffers.clear()
            module._buffers.update(before)
        with torch.no_grad():
            for buffer, copy in self._copies.values():
                if not _is_expanded(buffer):
                    buffer.copy_(copy)
        self.reset_scaler()

    def changed(self) -> tuple[list[str], bool]:
        """Return the names of changed buffers, and whether all could be compared: a new shape cannot."""
        before = {id(module): held for module, held in self._buffers}
        found, compared_all = [], True
        for place, module in self._model.named_modules():
            held = before.get(id(module), {})
            for name, buffer in module._buffers.items():
                was = held.get(name)
                if buffer is None or was is None or buffer.shape != was.shape or buffer.layout != torch.strided:
                    compared_all &= buffer is None or buffer is was
                elif not _equal(buffer, self._copies[id(was)][1]):
                    found.append(f"{place}.{name}".lstrip("."))
        return found, compared_all

    def reset_scaler(self) -> None:
        if self._scaler is not None and self._scaler_state:
            self._scaler.load_state_dict(self._scaler_state)
            self._scaler._per_optimizer_states.pop(id(self._optimizer), None)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether all values are the same; NaN is the same as itself."""
    return torch.equal(one, other) or bool(((one == other) | (one != one) & (other != other)).all())


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether several elements share one place in memory, so that nothing can be written there."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


@contextmanager
def kept(model: torch.nn.Module) -> Iterator[None]:
    """Put back what the modules' attributes held: numbers, tensors, tuples, and what is in lists, dicts and sets."""
    held: list[tuple[dict[str, Any], str, Any, Any]] = []
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, list | dict | set) and (name == "_buffers" or not name.startswith("_")):
                held.append((vars(module), name, value, copy.copy(value)))
            elif isinstance(value, int | float | str | tuple | torch.Tensor | None) and name != "training":
                held.append((vars(module), name, value, value.clone() if isinstance(value, torch.Tensor) else value))
    try:
        yield
    finally:
        for attributes, name, value, before in held:
            if isinstance(value, list):
                value[:] = before
            elif isinstance(value, dict | set):
                value.clear()
                value.update(before)
            elif isinstance(value, torch.Tensor) and not _equal(value, before):
                value.data.copy_(before)
            attributes[name] = value
