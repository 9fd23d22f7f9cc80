"""Try data and model before the first step: does one key give one batch, does anything move that no checkpoint holds?

What they cannot see: state in closures, global variables and C extensions, and a change that begins later.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from memfit.errors import UsageError
from memfit.training._process import preserved_rng
from memfit.training._stream import KeyedStream

#: So many samples are drawn of a batch, so many numbers are compared of an object's attributes, as deep as this.
_NUM_SAMPLES, _NUM_ATTRIBUTES, _DEPTH = 8, 2000, 3
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def check_loader(loader: DataLoader[Any], allow: Collection[str] = ()) -> None:
    """Draw a few samples of two batches, the first of them twice, under the keys of a ``KeyedStream``.

    Args:
        loader: As the user made it.
        allow: Parts by name, such as ``"collator.counter"``, that may move: they change no batch.

    Raises:
        UsageError: A batch differs when it is drawn again, or a part moves. Its message names the part.
    """
    keyed = KeyedStream(0).loader(loader)
    data, collate = keyed.dataset, keyed.collate_fn
    parts = {"dataset": loader.dataset, "collator": loader.collate_fn}
    before = {name: _Numbers(part, name) for name, part in parts.items()}
    with preserved_rng():
        order, again = list(itertools.islice(_keys(keyed), 2)), list(itertools.islice(_keys(keyed), 2))
        if order != again:
            raise _refused("The sampler gives another order under the same key.", "sampler", allow)
        batches = []
        for keys in [*order[:1], *order[1:], *order[:1]]:
            fetch: Any = data
            batches.append(collate(fetch.__getitems__(keys) if isinstance(keys, list) else data[keys]))
    moved = [name for one in before.values() for name in one.moved()]
    for name in moved:
        if name not in allow:
            raise _refused(f"{name} moves when a batch is made.", name, allow)
    if batches and not _same(batches[0], batches[-1]) and "data" not in allow:
        raise _refused("The first batch differs when it is made a second time.", "data", allow)


def _keys(loader: Any) -> Iterator[Any]:
    """Return the keys of its batches, a few of each."""
    for keys in loader.sampler if loader.batch_sampler is None else loader.batch_sampler:
        yield keys[:_NUM_SAMPLES] if isinstance(keys, list) else keys


def check_model(model: torch.nn.Module, forward: Callable[[], object], allow: Collection[str] = ()) -> None:
    """Call ``forward`` once, without gradients, and put back random state and buffers.

    Raises:
        UsageError: A buffer that no state dict holds, or a number in an attribute, moves in a forward pass.
    """
    modules = dict(model.named_modules())
    numbers = [_Numbers(one, f"model.{name}".rstrip("."), depth=0) for name, one in modules.items()]
    buffers = {name: (one, one.detach().clone()) for name, one in model.named_buffers()}
    saved = set(model.state_dict())
    with preserved_rng(), torch.no_grad():
        try:
            forward()
            now = dict(model.named_buffers())
            lost = [
                f"model.{name}"
                for name, (_, was) in buffers.items()
                if name not in saved and not (name in now and _same(now[name], was))
            ]
        finally:
            for held, was in buffers.values():
                held.copy_(was)
            moved = [name for one in numbers for name in one.moved()]
    for name in [*lost, *moved]:
        if name not in allow:
            raise _refused(f"{name} moves in a forward pass, and no checkpoint holds it.", name, allow)


def check_first_forward(
    model: torch.nn.Module, is_due: Callable[[], bool] = lambda: True, allow: Collection[str] = ()
) -> RemovableHandle:
    """Let ``check_model`` try the first forward pass in training mode for which ``is_due``, with what it is given.

    Returns:
        Its ``remove()`` takes the check back.
    """

    def rehearse(module: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and module.training and is_due():
            handle.remove()
            plain = getattr(module, "_orig_mod", module)
            check_model(plain, lambda: plain(*args, **kwargs), allow)
            torch.clear_autocast_cache()  # it holds weights that were cast without their gradients

    handle = model.register_forward_pre_hook(rehearse, with_kwargs=True)
    return handle


def _refused(what: str, name: str, allow: Collection[str]) -> UsageError:
    cure = {
        "sampler": "let it draw from the global generators of torch, NumPy or Python, or from its attribute generator",
        "data": "draw from the global generators, and read no clock and no counter",
    }.get(name, "make it a function of the sample, or a buffer that the state dict holds")
    allowed = repr((*sorted(allow), name)) if len(allow) else f'("{name}",)'
    return UsageError(
        what,
        rule="exact: a stopped training goes on to the same bytes, so nothing may move that is not saved or keyed.",
        remedy=f"{cure}; or, if no batch and no loss depends on it, pass allow={allowed}",
    )


class _Numbers:
    """The numbers in an object's attributes, and the states of its random generators."""

    def __init__(self, holder: object, name: str, depth: int = _DEPTH) -> None:
        self._found: list[tuple[Any, str, str, Any]] = []
        self._seen: set[int] = set()
        self._walk(holder, name, depth)

    def _walk(self, holder: object, name: str, depth: int) -> None:
        if id(holder) in self._seen:
            return
        self._seen.add(id(holder))
        for key, value in list(getattr(holder, "__dict__", {}).items()):
            if len(self._found) >= _NUM_ATTRIBUTES:
                return
            if isinstance(value, int | float | complex):
                self._found.append((holder, key, f"{name}.{key}", value))
            elif isinstance(value, _GENERATORS):
                self._found.append((value, "", f"{name}.{key}", _state_of(value)))
            elif depth and hasattr(value, "__dict__") and not isinstance(value, type | torch.Tensor):
                self._walk(value, f"{name}.{key}", depth - 1)

    def moved(self) -> list[str]:
        """Return the names of those that have moved. Generators are put back; of numbers only their owner knows what
        belongs to them.
        """
        found = []
        for holder, key, name, was in self._found:
            now = getattr(holder, "__dict__", {}).get(key) if key else _state_of(holder)
            if not _same(now, was):
                found.append(name)
                if not key:
                    _set_state(holder, was)
        return found


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _same(one: Any, other: Any) -> bool:
    """Return whether two batches hold the same bytes; NaN is the same as itself.

    >>> _same({"x": torch.ones(2), "n": [1, "a"]}, {"x": torch.ones(2), "n": [1, "a"]}), _same([1.0], [2.0])
    (True, False)
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (one.shape, one.dtype) == (other.shape, other.dtype) and bool(
            torch.equal(one, other) or torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
        )
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, Sequence) and not isinstance(one, str | bytes):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, str | bytes | int | float | complex | None):
        return one == other or (one != one and other != other)
    mine, theirs = getattr(one, "__dict__", None), getattr(other, "__dict__", None)  # a batch of a class of its own
    return _same(dict(mine), dict(theirs)) if mine and theirs else True
