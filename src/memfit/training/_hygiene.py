"""Memory hygiene: collections as switches that say what they cost, a detector that names what grows, a frozen heap.

Nothing here is on by default. Python frees what is no longer referred to at once, and torch reuses its cache; a full
collection walks every living container, and an emptied cache is asked of the driver again. ``benchmarks/folklore.py``
measures it, ``docs/decisions/0009-no-periodic-collection.md`` says what follows.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch

from memfit.errors import UsageError, nearest
from memfit.rundir import read_heap, record
from memfit.training._oom import clear_caches, device_bytes
from memfit.units import MIB, format_bytes

Moment = Literal["epoch", "step", "oom", "stage", "fold"]

_SWITCHES = {"epoch": "proactive", "oom": "reactive", "step": "periodic", "stage": "stage", "fold": "fold"}


@dataclass(frozen=True)
class Cleanup:
    """What one collection, or many together, freed and cost.

    Attributes:
        num_calls: How many collections these are.
        num_objects: Unreachable objects that were found.
        host_bytes: By how much the heap's live bytes fell (see ``read_heap``).
        allocated_bytes: By how much torch's allocated bytes fell, over all devices.
        reserved_bytes: How much of torch's cache went back to the driver, over all devices.
        seconds: What it took.
    """

    num_calls: int = 0
    num_objects: int = 0
    host_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    seconds: float = 0.0


class CleanupPolicy:
    """When to collect garbage and empty the devices' cache, beyond what Python and torch do by themselves: never.

    Args:
        proactive: At the end of each epoch's training, before the phases that come then.
        reactive: After each out-of-memory, beside the one clearing that belongs to the recovery.
        periodic: Every so many optimizer steps; 0 is never.
        stage: Where a fit goes from one stage to the next: training, checkpoint, validation.
        fold: At the end of a fit, which is one fold of a cross-validation.

    Example:
        >>> policy = CleanupPolicy(periodic=2)
        >>> policy.at("step"), policy.at("epoch")
        (None, None)
        >>> policy.at("step").num_calls
        1
    """

    def __init__(
        self,
        *,
        proactive: bool = False,
        reactive: bool = False,
        periodic: int = 0,
        stage: bool = False,
        fold: bool = False,
    ) -> None:
        if periodic < 0:
            raise UsageError(
                f"periodic is {periodic}.",
                rule="it is a number of optimizer steps, and 0 switches it off.",
                remedy="pass for example periodic=100",
            )
        self._every = {"epoch": proactive, "oom": reactive, "step": periodic, "stage": stage, "fold": fold}
        self._num_seen: Counter[str] = Counter()
        self._totals: dict[str, Cleanup] = {}

    def at(self, moment: Moment) -> Cleanup | None:
        """Clean up if this moment's switch is on; returns what that freed, or None."""
        if moment not in self._every:
            raise UsageError(
                f"'{moment}' is no moment to clean up at.",
                rule=f"the moments are {', '.join(self._every)}.",
                remedy=nearest(moment, self._every),
            )
        self._num_seen[moment] += 1
        every = self._every[moment]
        if not every or self._num_seen[moment] % every:
            return None
        begin, before = time.perf_counter(), _levels()
        num_objects = clear_caches()
        host, allocated, reserved = (max(0, old - new) for old, new in zip(before, _levels(), strict=True))
        done = Cleanup(1, num_objects, host, allocated, reserved, time.perf_counter() - begin)
        self._totals[moment] = _sum((self._totals.get(moment, Cleanup()), done))
        return done

    def finish(self) -> str:
        """Record the totals as the event ``cleanup`` and return them as one line; empty if nothing was cleaned up."""
        if not self._totals:
            return ""
        record("cleanup", by={_SWITCHES[moment]: asdict(total) for moment, total in self._totals.items()})
        total = _sum(self._totals.values())
        switches = ", ".join(f"{_SWITCHES[moment]} {one.num_calls}" for moment, one in self._totals.items())
        return (
            f"cleanup: {total.num_calls} collections ({switches}) took {total.seconds:.1f} s and freed "
            f"{total.num_objects} objects, {format_bytes(total.host_bytes)} of the host's heap, "
            f"{format_bytes(total.allocated_bytes)} allocated, {format_bytes(total.reserved_bytes)} cached on devices"
        )


def _levels() -> tuple[int, int, int]:
    """The heap's live bytes, and what torch has allocated and reserved on all devices."""
    devices = device_bytes().values()
    allocated = sum(device["allocated_bytes"] for device in devices)
    return read_heap().get("live_bytes", 0), allocated, sum(device["reserved_bytes"] for device in devices)


def _sum(parts: Iterable[Cleanup]) -> Cleanup:
    columns = zip(*(asdict(part).values() for part in parts), strict=True)
    return Cleanup(*(sum(column) for column in columns))


@dataclass(frozen=True)
class Leak:
    """Something that grows from epoch to epoch.

    Attributes:
        series: What grows: ``host heap``, ``Python objects`` or a device such as ``cuda:0``.
        slope: Its growth per epoch (Theil-Sen): bytes, or the number of Python's small objects.
        num_epochs: Over how many epochs.
        holders: What grew meanwhile, the largest first.
    """

    series: str
    slope: float
    num_epochs: int
    holders: tuple[str, ...]

    def __str__(self) -> str:
        amount = f"{self.slope:,.0f} objects" if self.series == _OBJECTS else format_bytes(int(self.slope))
        grew = "; ".join(self.holders) or "nothing that Python knows: look at extensions and at autograd graphs kept"
        return f"{self.series}: {amount} more per epoch, over {self.num_epochs} epochs. What grew meanwhile: {grew}"


_OBJECTS = "Python objects"
_MIN_POINTS = 4
_WINDOW = 20
_RISING_SHARE = 0.8
_MAX_HOLDERS = 5
_CONTAINERS = frozenset({list, dict, set, deque})
_LONG = 16
_UNTRACKED = frozenset({np.ndarray, bytes, bytearray, str})
_LARGE_BYTES = 512
_BATCH = 10_000


class LeakDetector:
    """Watches what lives at the end of each epoch, and names what grows.

    Each epoch costs three readings of counters. Only where one rises twice in a row is garbage collected, so that what
    a collection would free is no leak, and are objects counted, to say two epochs later which there are more of. The
    first epoch is left out: optimizer state and caches come with it.

    Args:
        floor_bytes: A smaller growth per epoch is none.
        floor_objects: The same for Python's small objects, whose bytes no counter tells.

    Example:
        >>> detector, kept = LeakDetector(), []
        >>> for epoch in range(1, 7):
        ...     kept.extend(bytearray(1 << 16) for _ in range(64))
        ...     leak = detector.end_epoch()
        ...     if leak:
        ...         print(epoch, leak.series, leak.holders[0])
        5 host heap bytearray: 128 more, 8.0 MiB
    """

    def __init__(self, *, floor_bytes: int = MIB, floor_objects: int = 10_000) -> None:
        self._floor_bytes, self._floor_objects = floor_bytes, floor_objects
        self._series: dict[str, deque[int]] = {}
        self._earlier: _Census | None = None
        self._num_epochs = self._silent_until = 0

    def end_epoch(self) -> Leak | None:
        """Take this epoch's readings; returns what grows, when that has become sure and was not just said."""
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
        sure = [name for name in rising if len(self._series[name]) >= _MIN_POINTS]
        with _thawed():
            self._earlier = self._earlier or _Census()
            return self._report(sure[0], self._earlier) if sure else None

    def _rising(self) -> list[str]:
        """The series that rise, consistently and by more than the floor: devices and bytes before objects."""
        return [name for name, values in self._series.items() if self._rises(name, values)]

    def _rises(self, name: str, values: Sequence[int]) -> bool:
        if len(values) < 2:
            return False
        steps = [after > before for before, after in pairwise(values)]
        floor = self._floor_objects if name == _OBJECTS else self._floor_bytes
        return sum(steps) >= _RISING_SHARE * len(steps) and theil_sen_slope(values) > floor

    def _report(self, name: str, earlier: _Census) -> Leak:
        values = self._series[name]
        leak = Leak(name, theil_sen_slope(values), len(values), tuple(_Census().growth_since(earlier)))
        self._silent_until = 2 * self._num_epochs
        self._series.clear()
        self._earlier = None
        record("leak", **asdict(leak))
        return leak


def theil_sen_slope(values: Sequence[float]) -> float:
    """The median of the slopes between all pairs of equally spaced values: a few outliers do not move it.

    Source: Sen, Estimates of the regression coefficient based on Kendall's tau, JASA 63 (1968).

    >>> theil_sen_slope([1, 3, 5, 700, 9])
    2.0
    """
    pairs = combinations(enumerate(values), 2)
    return float(statistics.median((late - early) / (j - i) for (i, early), (j, late) in pairs))


def _living() -> dict[str, int]:
    """What lives now: allocated bytes by device, the C heap's live bytes, the number of Python's small objects.

    Python takes the memory of its small objects from the kernel itself, so that the heap's counters miss them.
    """
    devices = {name: sizes["allocated_bytes"] for name, sizes in device_bytes().items()}
    heap = read_heap()  # empty where the C library does not tell
    return devices | ({"host heap": heap["live_bytes"]} if heap else {}) | {_OBJECTS: sys.getallocatedblocks()}


@contextmanager
def _thawed() -> Iterator[None]:
    """A frozen heap is searched as well: what gathers may hang on something old. What lives then is frozen again."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        yield
    finally:
        if was_frozen:
            gc.freeze()


class _Census:
    """How many objects of which kind there are and how many bytes they hold, and how long the long containers are."""

    def __init__(self) -> None:
        self.kinds: dict[str, tuple[int, int]] = {}
        self.lengths: dict[int, int] = {}
        found: dict[Any, tuple[int, int]] = {}
        for one in _objects():
            kind, num_bytes = _describe(one)
            count, total = found.get(kind, (0, 0))
            found[kind] = (count + 1, total + num_bytes)
            if kind in _CONTAINERS and len(one) >= _LONG:
                self.lengths[id(one)] = len(one)
        for kind, figures in found.items():
            module = "" if isinstance(kind, str) or kind.__module__ == "builtins" else f"{kind.__module__}."
            self.kinds[kind if isinstance(kind, str) else module + kind.__qualname__] = figures

    def growth_since(self, earlier: _Census) -> list[str]:
        """What there is more of than in ``earlier``: kinds by bytes, then the containers that became longer."""
        more = {
            kind: (count - before[0], num_bytes - before[1])
            for kind, (count, num_bytes) in self.kinds.items()
            if num_bytes > (before := earlier.kinds.get(kind, (0, 0)))[1] and count > before[0]
        }
        least = max((num_bytes for _, num_bytes in more.values()), default=0) / 100
        kinds = [
            f"{kind}: {count} more, {format_bytes(num_bytes)}"
            for kind, (count, num_bytes) in sorted(more.items(), key=lambda item: -item[1][1])[:_MAX_HOLDERS]
            if num_bytes >= least
        ]
        own = {id(earlier.kinds), id(earlier.lengths)}
        longer = {
            address: length - earlier.lengths.get(address, length)
            for address, length in self.lengths.items()
            if address not in own and length > earlier.lengths.get(address, length)
        }
        longest = dict(sorted(longer.items(), key=lambda item: -item[1])[:_MAX_HOLDERS])
        return kinds + [
            f"{type(one).__name__} {_name_of(one)}: {longest[id(one)]} elements more"
            for one in gc.get_objects()
            if id(one) in longest and type(one) in _CONTAINERS
        ]


def _objects() -> Iterator[Any]:
    """What the collector knows, and the arrays, bytes and texts that it does not, where they are large."""
    objects = gc.get_objects()
    yield from objects
    large: dict[int, Any] = {}
    for start in range(0, len(objects), _BATCH):
        inner = gc.get_referents(*objects[start : start + _BATCH])
        large |= {id(one): one for one in inner if type(one) in _UNTRACKED and sys.getsizeof(one) >= _LARGE_BYTES}
    yield from large.values()


def _describe(one: Any) -> tuple[type | str, int]:
    """An object's kind, in words where its shape says more, and the bytes that are its own."""
    kind = type(one)  # isinstance() would ask foreign objects for their __class__
    try:
        if issubclass(kind, torch.Tensor):
            return f"Tensor {list(one.shape)} {one.dtype} on {one.device}", one.numel() * one.element_size()
        if kind is np.ndarray:
            return f"ndarray {list(one.shape)} {one.dtype}", one.nbytes if one.base is None else 0
        return kind, sys.getsizeof(one)
    except Exception:  # a tensor without one shape or storage, an object's own __sizeof__
        return kind, 0


def _name_of(one: Any) -> str:
    """Where an object hangs: ``module.name`` or ``Class.attribute`` where one refers to it, else in words."""
    loaded = reversed(list(sys.modules.items()))  # of two names of one module the first stays
    modules = {id(vars(module)): name for name, module in loaded if type(module) is ModuleType}
    for holder in gc.get_referrers(one):
        if id(holder) in modules:
            owner, space = modules[id(holder)], holder
        elif type(holder) is dict:
            owners = [other for other in gc.get_referrers(holder) if _attributes(other) is holder]
            owner, space = (type(owners[0]).__qualname__, holder) if owners else ("", {})
        else:
            owner, space = type(holder).__qualname__, _attributes(holder)
        names = [name for name, value in space.items() if value is one]
        if names:
            return f"{owner}.{names[0]}"
    return "of a local variable"


def _attributes(one: Any) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = object.__getattribute__(one, "__dict__")
        return found
    except AttributeError:
        return {}


@dataclass(frozen=True)
class FrozenHeap:
    """What freezing did.

    Attributes:
        num_objects: How many objects the collector no longer visits.
        seconds_before: What a full collection took before.
        seconds_after: What one takes now.
    """

    num_objects: int
    seconds_before: float
    seconds_after: float


def freeze_startup_heap() -> FrozenHeap:
    """Take all that lives now out of every later collection; call it once, when the data and the model are there.

    What was frozen is freed as ever when nothing refers to it; only cycles within it are not found any more, until
    ``gc.unfreeze()``. Workers that are forked later leave the frozen pages shared.

    Example:
        >>> freeze_startup_heap().num_objects > 1000
        True
        >>> gc.unfreeze()
    """
    gc.collect()
    before = gc.get_freeze_count()
    seconds_before = _collection_seconds()
    gc.freeze()
    return FrozenHeap(gc.get_freeze_count() - before, seconds_before, _collection_seconds())


def _collection_seconds() -> float:
    begin = time.perf_counter()
    gc.collect()
    return time.perf_counter() - begin
