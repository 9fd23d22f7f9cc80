"""Find what grows from epoch to epoch."""

from __future__ import annotations

import gc
import statistics
import sys
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from types import ModuleType
from typing import Any

import torch

from memfit.memory import read_heap
from memfit.rundir import record
from memfit.training._oom import device_bytes
from memfit.units import MIB, format_bytes

_OBJECTS = "Python objects"
_MIN_POINTS = 4
_WINDOW = 20
_RISING_SHARE = 0.8
_MAX_HOLDERS = 5
_CONTAINERS = (list, dict, set, deque)
_LONG = 16

#: Living tensors by kind and bytes, and the lengths of long containers by address.
_Census = tuple[Counter[tuple[str, int]], dict[int, int]]


@dataclass(frozen=True)
class Leak:
    """Something that grows from epoch to epoch. ``slope`` is its growth per epoch (Theil-Sen), in bytes or Python's
    small objects. ``holders``: tensors that became more, by shape, then containers that became longer, by name."""

    series: str
    slope: float
    num_epochs: int
    holders: tuple[str, ...]

    def __str__(self) -> str:
        amount = f"{self.slope:,.0f} objects" if self.series == _OBJECTS else format_bytes(int(self.slope))
        grew = "; ".join(self.holders) or "nothing that Python knows: look at extensions and at autograd graphs kept"
        return f"{self.series}: {amount} more per epoch, over {self.num_epochs} epochs. What grew meanwhile: {grew}"


class LeakDetector:
    """Watches what lives at the end of each epoch, and names what grows by ``floor_bytes`` or ``floor_objects`` an
    epoch. An epoch costs three readings of counters. Only where one rises twice in a row is garbage collected and are
    objects counted. The first epoch is left out: optimizer state and caches come with it."""

    def __init__(self, *, floor_bytes: int = MIB, floor_objects: int = 10_000) -> None:
        self._floor_bytes, self._floor_objects = floor_bytes, floor_objects
        self._series: dict[str, deque[int]] = {}
        self._earlier: _Census | None = None
        self._num_epochs = self._silent_until = 0

    def end_epoch(self) -> Leak | None:
        """Take this epoch's readings; return what grows, once that is sure."""
        self._num_epochs += 1
        if self._num_epochs == 1 or self._num_epochs < self._silent_until:
            return None
        for name, value in _living().items():
            self._series.setdefault(name, deque(maxlen=_WINDOW)).append(value)
        if self._rising():
            gc.collect()
            for name, value in _living().items():
                self._series[name][-1] = value
        rising = self._rising()
        if not rising:
            self._earlier = None
            return None
        self._earlier = self._earlier or _census()
        sure = next((name for name in rising if len(self._series[name]) >= _MIN_POINTS), None)
        if sure is None:
            return None
        values = self._series[sure]
        leak = Leak(sure, _theil_sen_slope(values), len(values), tuple(_growth_since(self._earlier)))
        self._silent_until = 2 * self._num_epochs  # else it would be said in every epoch
        self._series.clear()
        self._earlier = None
        record("leak", **asdict(leak))
        return leak

    def _rising(self) -> list[str]:
        """Return the series that rise in most epochs and by more than the floor: bytes before objects."""
        found = []
        for name, values in self._series.items():
            steps = [after > before for before, after in pairwise(values)]
            floor = self._floor_objects if name == _OBJECTS else self._floor_bytes
            if steps and sum(steps) >= _RISING_SHARE * len(steps) and _theil_sen_slope(values) > floor:
                found.append(name)
        return found


def _theil_sen_slope(values: Sequence[float]) -> float:
    """Return the median of the slopes between all pairs of values: a few outliers do not move it. Source: Sen,
    Estimates of the regression coefficient based on Kendall's tau, JASA 63 (1968)."""
    pairs = combinations(enumerate(values), 2)
    return float(statistics.median((late - early) / (j - i) for (i, early), (j, late) in pairs))


def _living() -> dict[str, int]:
    """Return allocated bytes by device, the C heap's live bytes, and the number of Python's small objects. Python takes
    the memory of its small objects from the kernel itself, so the heap's counters miss them."""
    devices = {name: sizes["allocated_bytes"] for name, sizes in device_bytes().items()}
    heap = read_heap()  # empty where the C library does not tell
    return devices | ({"host heap": heap["live_bytes"]} if heap else {}) | {_OBJECTS: sys.getallocatedblocks()}


def _census() -> _Census:
    objects = gc.get_objects()
    tensors: Counter[tuple[str, int]] = Counter()
    for one in objects:
        if issubclass(type(one), torch.Tensor):  # isinstance() would ask foreign objects for their __class__
            with suppress(RuntimeError, NotImplementedError, TypeError):  # without one shape, size or storage
                kind = f"Tensor {list(one.shape)} {one.dtype} on {one.device}"
                tensors[kind, one.numel() * one.element_size()] += 1
    return tensors, {id(one): len(one) for one in objects if type(one) in _CONTAINERS and len(one) >= _LONG}


def _growth_since(earlier: _Census) -> list[str]:
    """Return tensors by bytes, then containers, of which there is more than in ``earlier``."""
    tensors, lengths = _census()
    more = sorted(((num * size, num, kind) for (kind, size), num in (tensors - earlier[0]).items()), reverse=True)
    longer = Counter({address: length - earlier[1].get(address, length) for address, length in lengths.items()})
    longest = {address: num for address, num in longer.most_common(_MAX_HOLDERS) if num > 0}
    return [f"{kind}: {num} more, {format_bytes(num_bytes)}" for num_bytes, num, kind in more[:_MAX_HOLDERS]] + [
        f"{type(one).__name__} {_name_of(one)}: {longest[id(one)]} elements more"
        for one in gc.get_objects()
        if id(one) in longest and type(one) in _CONTAINERS
    ]


def _name_of(one: Any) -> str:
    """Return ``module.name`` or ``Class.attribute`` where one refers to an object, else ``of a local variable``."""
    holders = gc.get_referrers(one)
    holders += [owner for holder in holders if type(holder) is dict for owner in gc.get_referrers(holder)]
    for owner in holders:
        kind = owner if issubclass(type(owner), type | ModuleType) else type(owner)
        if name := next((name for name, value in _attributes(owner).items() if value is one), ""):
            return f"{kind.__name__}.{name}"
    return "of a local variable"


def _attributes(one: Any) -> Any:
    try:
        return object.__getattribute__(one, "__dict__")
    except AttributeError:
        return {}
