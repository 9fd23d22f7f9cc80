"""Cut a batch into microbatches: by sample, by group, or not at all."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Protocol

import numpy as np
import torch

from memfit.errors import UsageError

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_SAME_IN_EVERY_PART = (*_PLAIN, tuple, np.generic, torch.dtype, torch.device)
_FEW = 16


class Split(Protocol):
    """What can cut a batch. Its units are what must stay whole: samples, or groups of them."""

    def count(self, batch: Any) -> int:
        """How many units the batch has; 1 is never split."""
        ...

    def take(self, batch: Any, start: int, stop: int) -> Any:
        """The units from ``start`` up to ``stop``, as a batch; views where possible."""
        ...


class BySample:
    """Cuts dimension 0 of every tensor and array, every list of plain values and every tuple of texts in the batch.

    It looks into mappings, tuples, named tuples, dataclasses, and lists with a tensor or array among their first items.
    A list of anything else has one item per sample. Numbers, texts, None and tensors without a dimension go into every
    part. A batch with an object of another kind is one unit.

    Example:
        >>> batch = {"x": torch.arange(6).view(3, 2), "name": ["a", "b", "c"], "scale": 0.5}
        >>> BySample().count(batch)
        3
        >>> BySample().take(batch, 1, 3)
        {'x': tensor([[2, 3],
                [4, 5]]), 'name': ['b', 'c'], 'scale': 0.5}
    """

    def count(self, batch: Any) -> int:
        """Return the common length; 1 if there is nothing to cut, or something that cannot be.

        Raises:
            UsageError: If two lengths differ; it names both places.
        """
        return self.count_of(leaves(batch))

    def count_of(self, content: Iterable[tuple[str, Any]]) -> int:
        """Return ``count`` of what ``leaves`` gave of a batch."""
        content = list(content)
        lengths = [(place, length) for place, leaf in content if (length := _length(leaf)) is not None]
        for place, length in lengths:
            if length != lengths[0][1]:
                raise UsageError(
                    f"The batch has {lengths[0][1]} samples at batch{lengths[0][0]} and {length} at batch{place}.",
                    rule="BySample cuts the first dimension of all tensors, arrays and lists, so all are equally long.",
                    remedy="put the samples first in each, or pass split= an object with count(batch) and "
                    "take(batch, start, stop), or split=WHOLE",
                )
        return lengths[0][1] if lengths and not any(is_opaque(leaf) for _, leaf in content) else 1

    def take(self, batch: Any, start: int, stop: int) -> Any:
        """Samples ``start`` up to ``stop``, in the batch's own structure."""
        return rebuild(batch, lambda leaf: leaf if _length(leaf) is None else leaf[start:stop])


class ByGroup:
    """Cuts between groups only, for a loss that couples the samples of one group, such as a ranking within a date.

    Args:
        groups: Gives the group of each sample of a batch: a 1-D array, tensor or list; equal ids stand together.

    Example:
        >>> split = ByGroup(lambda batch: batch["date"])
        >>> batch = {"x": torch.arange(5.0), "date": torch.tensor([7, 7, 7, 8, 8])}
        >>> split.count(batch), split.take(batch, 1, 2)["x"]
        (2, tensor([3., 4.]))
    """

    def __init__(self, groups: Callable[[Any], Any]) -> None:
        self.groups = groups

    def count(self, batch: Any) -> int:
        """The number of groups.

        Raises:
            UsageError: If a group is not in one piece, or there is not one id for each sample.
        """
        return len(self._borders(batch)) - 1

    def take(self, batch: Any, start: int, stop: int) -> Any:
        """Groups ``start`` up to ``stop``."""
        borders = self._borders(batch)
        return BySample().take(batch, int(borders[start]), int(borders[min(stop, len(borders) - 1)]))

    def _borders(self, batch: Any) -> np.ndarray[Any, Any]:
        ids = self.groups(batch)
        ids = np.asarray(ids.detach().cpu() if isinstance(ids, torch.Tensor) else ids)
        count = BySample().count(batch)
        if ids.ndim != 1 or len(ids) != count or count == 0:
            raise UsageError(
                f"groups(batch) has the shape {ids.shape}, and the batch has {count} samples.",
                rule="there is one group id for each sample.",
                remedy="return a 1-D array as long as the batch",
            )
        borders = np.flatnonzero(ids[1:] != ids[:-1]) + 1
        names, times = np.unique(ids[np.append(0, borders)], return_counts=True)
        if times.max() > 1:
            raise UsageError(
                f"Group {names[times.argmax()]} stands in {times.max()} places of the batch.",
                rule="a batch is cut between groups, so the samples of one group stand together.",
                remedy="sort each batch by group",
            )
        return np.concatenate([[0], borders, [len(ids)]])


class _Whole:
    def count(self, batch: Any) -> int:
        return 1

    def take(self, batch: Any, start: int, stop: int) -> Any:
        return batch

    def __repr__(self) -> str:
        return "WHOLE"


#: A batch is one unit and never split.
WHOLE = _Whole()


def leaves(batch: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what the structure of a batch holds, each with its place, such as ``['x'][0]``."""
    parts = _parts(batch)
    if parts is None:
        yield place, batch
        return
    for name, part in parts:
        yield from leaves(part, place + name)


def is_opaque(leaf: Any) -> bool:
    """Return whether it is an object that only its author can cut, such as a batch of graphs."""
    is_number = isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim == 0
    return _length(leaf) is None and not is_number and not isinstance(leaf, _SAME_IN_EVERY_PART)


def samples_in(batch: Any) -> int:
    """Return the samples of a batch; 0 if only its author can count them, as in a batch of graphs."""
    content = list(leaves(batch))
    if any(is_opaque(leaf) for _, leaf in content):
        return 0
    try:
        return BySample().count_of(content)
    except UsageError:  # its tensors are not equally long: a split of the user's own cuts it
        return 0


def held_bytes(batch: Any) -> int:
    """Return the bytes of the tensors and arrays in a batch; other lists and texts count by their length."""
    total = 0
    for _, leaf in leaves(batch):
        if (size := _nbytes(leaf)) is not None:
            total += size
        elif isinstance(leaf, list) and leaf and is_opaque(leaf[0]):
            total += sum(map(held_bytes, leaf))
        elif is_opaque(leaf) and hasattr(leaf, "__dict__"):
            total += sum(_nbytes(one) or 0 for _, one in leaves(vars(leaf)))
        else:
            total += len(leaf) if isinstance(leaf, Sized) else 0
    return total


def _nbytes(value: Any) -> int | None:
    """Return the bytes of a tensor or array, 0 if it cannot say (a sparse one); None for anything else."""
    try:
        size = getattr(value, "nbytes", None)
    except Exception:
        return 0
    return size if isinstance(size, int) else None


def rebuild(batch: Any, change: Callable[[Any], Any], is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return the same structure in new containers with every leaf changed; ``is_leaf`` names containers as leaves."""
    parts = None if is_leaf is not None and is_leaf(batch) else _parts(batch)
    if parts is None:
        return change(batch)
    changed = [rebuild(part, change, is_leaf) for _, part in parts]
    if isinstance(batch, list):
        return changed
    if type(batch) is dict:
        return dict(zip(batch, changed, strict=True))
    if isinstance(batch, tuple):
        return type(batch)(*changed) if hasattr(batch, "_fields") else type(batch)(changed)
    other: Any = copy.copy(batch)  # keeps what a subclass of dict holds beside its items
    if isinstance(batch, Mapping):
        for name, part in zip(batch, changed, strict=True):
            other[name] = part
        return other
    for field, part in zip(dataclasses.fields(batch), changed, strict=True):
        object.__setattr__(other, field.name, part)
    return other


def _parts(batch: Any) -> list[tuple[str, Any]] | None:
    if isinstance(batch, torch.Tensor):
        return None
    if isinstance(batch, Mapping):
        return [(f"[{name!r}]", part) for name, part in batch.items()]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return [(f".{name}", part) for name, part in zip(batch._fields, batch, strict=True)]
    if _is_texts(batch):
        return None
    is_plain = len(batch) > _FEW and set(map(type, batch)).issubset(_PLAIN) if isinstance(batch, tuple) else True
    if not is_plain or (isinstance(batch, list) and _holds_arrays(batch)):
        return [(f"[{index}]", part) for index, part in enumerate(batch)]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [(f".{field.name}", getattr(batch, field.name)) for field in dataclasses.fields(batch)]
    return None


def _holds_arrays(value: Any) -> bool:
    """Return whether a tensor or array is among the first items, at any depth."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return True
    if isinstance(value, list | tuple):
        if len(value) > _FEW and isinstance(value[0], _PLAIN):
            return False
        return any(map(_holds_arrays, value[:_FEW]))
    if isinstance(value, _PLAIN):
        return False
    return any(_holds_arrays(part) for _, part in _parts(value) or ())


def _is_texts(value: Any) -> bool:
    """Return whether it is a tuple of texts, as a loader makes of the samples' names."""
    is_tuple = isinstance(value, tuple) and not hasattr(value, "_fields") and len(value) > 0
    return is_tuple and set(map(type, value)) <= {str, bytes}


def _length(leaf: Any) -> int | None:
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return len(leaf) if leaf.ndim else None
    return len(leaf) if isinstance(leaf, list) or _is_texts(leaf) else None
