"""What a forward pass changes beside gradients, noted before a step and put back before it is done again."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import torch

#: Numpy's ``mt19937_state``: 624 words and the position of the next.
_TWISTER_BYTES = 625 * 4


class Snapshot:
    """What a forward pass changes beside gradients: random state and buffers; and the gradient scaler."""

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
        self._numpy = _NumpyState()
        self._scaler_state: dict[str, Any] = {}

    def take(self) -> None:
        """Note how things are. Copies are written over those of the last time, so this allocates once."""
        self._rng = _read_rng(self._numpy)
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
        _write_rng(self._rng)
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
                elif not _equal(buffer, self._copies[id(was)][1]):
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


class _NumpyState:
    """Reads the state of numpy's global generator, which takes numpy 0.1 ms, only when it may have changed.

    Every draw changes the 2,500 bytes of the Mersenne twister, but for a normal number that was kept from the draw
    before; while none is kept, equal bytes are an equal state.
    """

    def __init__(self) -> None:
        self._seen: tuple[int, bytes] | None = None
        self._state: Any = None

    def read(self) -> Any:
        """What ``numpy.random.set_state`` takes."""
        generator = np.random.mtrand._rand._bit_generator
        seen = None
        if type(generator) is np.random.MT19937:
            address = generator.ctypes.state_address
            seen = address, ctypes.string_at(address, _TWISTER_BYTES)
        if seen is None or seen != self._seen or self._state["has_gauss"]:
            self._state, self._seen = np.random.get_state(legacy=False), seen
        return self._state


def _read_rng(numpy_state: _NumpyState) -> tuple[Any, ...]:
    """The state of the global generators, in the generators' own form: quicker than one that a file can hold."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return random.getstate(), numpy_state.read(), torch.get_rng_state(), cuda


def _write_rng(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3]:
        torch.cuda.set_rng_state_all(state[3])
