"""What a data set holds in memory, and how much of it each worker of a loader comes to hold for itself."""

from __future__ import annotations

import gc
import mmap
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

_PAGE = 4096
_HEADER = 16  # bytes that lie before an object that can hold others
_SMALL = 512  # bytes up to which Python packs objects of one size together
_NUM_SAMPLED, _NUM_SAMPLED_WITHIN = 1000, 32
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType)
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), range)


@dataclass(frozen=True)
class DataSize:
    """A data set's bytes by what becomes of them in worker processes.

    Attributes:
        object_bytes: Python objects: counts of references, and what lies beside them.
        touched_bytes: Those of their bytes that a forked worker copies when it reads all: reading an object writes its
            count of references.
        array_bytes: Numbers in arrays of this process: a forked worker shares them, another gets a copy.
        mapped_bytes: Numbers in maps of files: all processes share them.
        tensor_bytes: Numbers in torch tensors: every worker shares them.
        sent_bytes: What a worker that is not forked makes of what it is sent.
    """

    object_bytes: int
    touched_bytes: int
    array_bytes: int
    mapped_bytes: int
    tensor_bytes: int
    sent_bytes: int


def data_size(data: Any) -> DataSize:
    """The bytes of a data set; of large containers some elements are looked at, and stand for the others.

    Nothing is read or changed. What other libraries hold outside of arrays is not seen.

    Example:
        >>> rows = [{"id": number, "text": f"number {number}"} for number in range(10_000)]
        >>> size = data_size(rows)
        >>> size.object_bytes > size.touched_bytes > 1_000_000, size.array_bytes
        (True, 0)
        >>> data_size(np.zeros(1000)).array_bytes, data_size(np.zeros(1000)).touched_bytes < 500
        (8000, True)
    """
    parts = dict.fromkeys(("object", "array", "mapped", "tensor"), 0.0)
    pages = _Pages()
    for one, weight in _weighed(data, _held):
        kind, nbytes = _numbers(one)
        parts["object"] += weight * _size(one)
        pages.add(one, weight)
        if kind:
            parts[kind] += weight * nbytes
    sent = 0.0
    for one, weight in _weighed(data, _sent):
        kind, nbytes = _numbers(one)
        sent += weight * (_size(one) + (nbytes if kind in ("array", "mapped") else 0))
    sizes = {f"{name}_bytes": round(number) for name, number in parts.items()}
    return DataSize(**sizes, touched_bytes=round(pages.touched_bytes()), sent_bytes=round(sent))


class _Pages:
    """The pages that change when the count of references of each object does.

    Python lays small pieces of one size together, tables that nobody writes to among the objects: a page is copied if
    one object lies on it.
    """

    def __init__(self) -> None:
        self._objects: dict[int, float] = {}
        self._tables: dict[int, float] = {}
        self._large = 0.0

    def add(self, one: Any, weight: float) -> None:
        size = _size(one)
        own = _rounded(type(one).__basicsize__ + _HEADER) if isinstance(one, list | dict | set) else size
        for kind, part in ((self._objects, own), (self._tables, size - own)):
            if 0 < part <= _SMALL:
                kind[part] = kind.get(part, 0.0) + weight * part
            elif kind is self._objects:
                self._large += weight * min(part, _PAGE)

    def touched_bytes(self) -> float:
        total = self._large
        for size, objects in self._objects.items():
            whole = objects + self._tables.get(size, 0.0)
            total += whole * (1 - (1 - objects / whole) ** (_PAGE / size))
        return total


def _weighed(data: Any, parts_of: Callable[[Any], Iterable[Any]]) -> Iterator[tuple[Any, float]]:
    """Every object once, and how many it stands for; one that several hold stands for itself."""
    alive: dict[int, Any] = {}
    parts: dict[int, tuple[list[Any], float]] = {}
    element: dict[int, int] = {}  # of which sampled element an object is a part
    shared: set[int] = set()
    todo = [(data, _NUM_SAMPLED, 0)]
    while todo:
        one, most, of = todo.pop()
        if id(one) in alive:
            shared |= {id(one)} if element[id(one)] != of else set()
        elif not isinstance(one, _OPAQUE) and not _is_static(one):
            alive[id(one)], element[id(one)] = one, of
            parts[id(one)] = found, scale = _sampled(one, parts_of, most)
            todo += [(part, _NUM_SAMPLED_WITHIN, id(part)) if scale > 1 else (part, most, of) for part in found]
    weights: dict[int, float] = {}
    order: list[tuple[Any, float]] = [(data, 1.0)]
    while order:
        one, weight = order.pop()
        if id(one) not in alive or id(one) in weights:
            continue
        weights[id(one)] = weight = 1.0 if id(one) in shared else weight
        found, scale = parts[id(one)]
        order += [(part, weight * scale) for part in found]
    for key, weight in weights.items():
        yield alive[key], weight


def _is_static(one: Any) -> bool:
    return one is None or isinstance(one, bool) or (isinstance(one, int) and -5 <= one <= 256)


def _sampled(one: Any, parts_of: Callable[[Any], Iterable[Any]], most: int) -> tuple[list[Any], float]:
    """Parts of an object, and how many each stands for."""
    if isinstance(one, _PLAIN):
        return [], 1.0
    if isinstance(one, np.ndarray):
        parts: Any = one.reshape(-1) if one.dtype.hasobject and one.dtype.names is None else []
    elif isinstance(one, list | tuple):
        parts = one
    elif type(one) in (dict, set, frozenset):
        number = len(one)
        pairs = one.items() if isinstance(one, dict) else ((part,) for part in one)
        if number <= 2 * most:
            return [part for pair in pairs for part in pair], 1.0
        step = number / most
        return [part for pair in islice(pairs, 0, None, int(step)) for part in pair], float(int(step))
    else:
        return ([] if _numbers(one)[0] else list(parts_of(one))), 1.0
    if len(parts) <= 2 * most:
        return list(parts), 1.0
    places = random.Random(0).sample(range(len(parts)), most)
    return [parts[place] for place in places], len(parts) / most


def _held(one: Any) -> Iterable[Any]:
    return [part for part in gc.get_referents(one) if not isinstance(part, _OPAQUE)]


def _sent(one: Any) -> Iterable[Any]:
    """What is pickled of an object in place of it."""
    try:
        reduced = one.__reduce_ex__(4)
    except Exception:  # it cannot be sent, as its loader will tell
        return _held(one)
    if isinstance(reduced, str):
        return []
    items = [list(islice(more, _NUM_SAMPLED)) for more in reduced[3:5] if more is not None]
    return [part for part in (*reduced[1:3], *items) if part is not None]


def _numbers(one: Any) -> tuple[str, int]:
    """Where the numbers of an array lie, and their bytes; an empty name for all else."""
    if isinstance(one, np.ndarray):
        return ("mapped" if _is_mapped(one) else "array"), 0 if one.dtype.hasobject else int(one.nbytes)
    if (torch := sys.modules.get("torch")) is not None and isinstance(one, torch.Tensor):
        return "tensor", int(one.nbytes)
    if type(one).__module__.partition(".")[0] == "pyarrow" and isinstance(getattr(one, "nbytes", None), int):
        return "array", int(one.nbytes)
    return "", 0


def _is_mapped(array: Any) -> bool:
    base = array
    while base is not None:
        if isinstance(base, np.memmap | mmap.mmap):
            return True
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return False


def _size(one: Any) -> int:
    """Bytes of an object alone, its header included, as the allocator gives them; without an array's numbers."""
    if isinstance(one, np.ndarray):
        return 112
    return 256 if _numbers(one)[0] else _rounded(sys.getsizeof(one, 64))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 16) * 16
