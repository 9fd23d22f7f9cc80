"""What a loader will take before it runs: its ranks, workers, their copies of the data, and the batches ahead."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from memfit.data._copies import DataSize, data_size
from memfit.data._launch import Launcher, StartMethod
from memfit.data._loader import Loader
from memfit.data._measure import _leaves, _size_of
from memfit.data._packed import PackedDataset
from memfit.data._panel import Panel
from memfit.data._pool import _SPARE
from memfit.data._sequences import SequenceLoader
from memfit.errors import JobFailedError, UsageError
from memfit.memory import Footprint, PhasePeak, ProcReader

_PAGE = 4096
_WAIT_SECONDS = 30.0
_NAMES = ("workers", "dataset copies", "batches", "pinned", "data")


@dataclass(frozen=True)
class _Parts:
    """Bytes of one rank's loader.

    Attributes:
        workers: The interpreters of its workers, with what they import.
        copies: What the workers copy of the data set.
        batches: Batches ahead, in the making, and the one in use.
        pinned: Those of them that are page-locked.
        data: The data set in the rank's own process, but for what is mapped.
        mapped: Files that are mapped, by what they belong to; once for all ranks.
        stay: Whether the workers live on between epochs.
        slots: Bytes of the batches' memory that stays with them.
        pool: What its workers belong to; None for its own.
    """

    workers: int = 0
    copies: int = 0
    batches: int = 0
    pinned: int = 0
    data: int = 0
    mapped: Mapping[Any, int] = field(default_factory=dict)
    stay: bool = False
    slots: int = 0
    pool: Any = None


def loader_footprint(
    train: Any, valid: Any = None, *, num_ranks: int = 1, num_validating: int | None = None, release: bool = False
) -> Footprint:
    """What loaders will take on one machine, before any of them runs.

    Counted are the workers' interpreters, measured on an idle one that is started for it; their copies of the data set,
    from its objects (a list of dicts is copied by every worker that reads it, arrays by those that are not forked,
    mapped files by none); the batches ahead, from one that is made here; and the data set in each rank itself. The
    random generators of Python, NumPy and torch are put back; one that the data set holds draws on.

    Args:
        train: A PyTorch ``DataLoader`` over a map-style data set, a `Loader` or a `SequenceLoader`.
        valid: The one of the validation, or None.
        num_ranks: Processes on this machine that have such loaders each.
        num_validating: How many of them validate at a time; None for all of them.
        release: Whether the workers of the training end before validation, as `Trainer` has them do without room.

    Returns:
        ``private_bytes``, the peak; ``parts``: ``workers``, ``dataset copies``, ``batches``, ``pinned`` and ``data``
        (the ranks' own); ``shared_bytes``, the mapped files; ``phases``: ``train`` and ``validate``. Its method is
        ``declared``: measuring the run replaces it.

    Raises:
        UsageError: If a loader is of another kind, or a number is out of range.
        JobFailedError: If no idle worker could be measured.

    Example:
        >>> from memfit.data import Padding, SequenceLoader
        >>> rows = [{"input_ids": [number, 1, 2]} for number in range(100)]
        >>> loader = SequenceLoader(rows, Padding(0), batch=10)
        >>> found = loader_footprint(loader, num_ranks=2)
        >>> found.parts["workers"], found.parts["batches"], found.parts["data"] > 20_000
        (0, 960, True)
    """
    validating = num_ranks if num_validating is None else num_validating
    if num_ranks < 1 or not 0 < validating <= num_ranks:
        raise UsageError(
            f"loaders cannot be counted for {num_ranks} ranks of which {validating} validate at a time.",
            rule="there is a rank at least, and one at least validates.",
            remedy="leave num_ranks and num_validating out for 1",
        )
    one = _parts_of(train)
    two = None if valid is None else _parts_of(valid)
    sets = {id(getattr(loader, name, None)): part for loader, part in ((train, one), (valid, two)) if part
            for name in ("dataset", "examples", "panel") if hasattr(loader, name)}  # fmt: skip
    data = num_ranks * sum(part.data for part in sets.values())
    phases = {"train": _added((num_ranks, one), data=data)}
    if two is not None:
        is_shared = two.pool is not None and two.pool is one.pool
        lives = _Parts(workers=one.workers, copies=one.copies, batches=one.slots) if one.stay and not release else None
        later = _Parts(copies=two.copies, batches=two.batches, pinned=two.pinned) if is_shared and lives else two
        phases["validate"] = _added(*([(num_ranks, lives)] if lives else []), (validating, later), data=data)
    mapped = {**one.mapped, **(two.mapped if two else {})}
    largest = max(phases.values(), key=lambda parts: sum(parts.values()))
    return Footprint(
        private_bytes=sum(largest.values()),
        shared_bytes=sum(mapped.values()),
        parts=largest,
        phases={name: PhasePeak(sum(parts.values()), sum(mapped.values())) for name, parts in phases.items()},
        method="declared",
    )


def _added(*terms: tuple[int, _Parts], data: int) -> dict[str, int]:
    found = dict.fromkeys(_NAMES, 0) | {"data": data}
    for number, part in terms:
        for name, size in zip(_NAMES, (part.workers, part.copies, part.batches, part.pinned), strict=False):
            found[name] += number * size
    return found


def _parts_of(loader: Any) -> _Parts:
    if isinstance(loader, Loader | SequenceLoader):
        return _parts_of_own(loader)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(loader, torch.utils.data.DataLoader):
        raise UsageError(
            f"what a {type(loader).__name__} takes cannot be told before it runs.",
            rule="loaders that are counted are a PyTorch DataLoader, and memfit's Loader and SequenceLoader.",
            remedy="measure it: memfit.data.measure_loader",
        )
    if not hasattr(loader.dataset, "__getitem__") or isinstance(loader.dataset, torch.utils.data.IterableDataset):
        raise UsageError(
            f"the data set {type(loader.dataset).__name__} has no items by number.",
            rule="a batch is made of some items to see its size, and an iterable data set would lose them.",
            remedy="measure it: memfit.data.measure_loader",
        )
    return _parts_of_torch(loader)


def _parts_of_own(loader: Loader | SequenceLoader) -> _Parts:
    """memfit's loaders: slots of one size, workers that map the panel or the packed objects."""
    data: Any = loader.panel if isinstance(loader, Loader) else loader.examples
    size, mapped = data_size(data), mapped_in(data)
    held = 0 if isinstance(data, Panel) else size.object_bytes + size.array_bytes + size.tensor_bytes
    pool = loader._pool
    if pool is None:
        batch = 2 * loader._batches.layout.nbytes if isinstance(loader, Loader) else _bytes_of(loader.longest())
        return _Parts(data=held, batches=batch, mapped=mapped)
    layout = loader._batches.layout if isinstance(loader, Loader) else loader._layout
    server, worker = idle_worker(pool.start_method)
    slots = (pool.num_ahead + _SPARE) * layout.nbytes
    copies = 0 if isinstance(data, Panel) else pool.num_workers * size.sent_bytes
    pinned = slots if pool.pin_memory else 0
    return _Parts(
        workers=server + pool.num_workers * worker,
        copies=copies,
        batches=slots - pinned,
        pinned=pinned,
        data=held,
        mapped=mapped,
        stay=True,
        slots=slots,
        pool=pool,
    )


def _parts_of_torch(loader: Any) -> _Parts:
    size, workers = data_size(loader.dataset), int(loader.num_workers)
    made, locked = _batch_of(loader)
    held = size.object_bytes + size.array_bytes + size.tensor_bytes
    mapped = {**mapped_in(loader.dataset), id(loader.dataset): size.mapped_bytes}
    if workers == 0:
        return _Parts(data=held, batches=made, pinned=locked, mapped=mapped)
    ahead = workers * int(loader.prefetch_factor)
    own = 1 if (loader.collate_fn.__module__ or "").startswith("torch.") else 2  # torch's collates into shared memory
    return _Parts(
        workers=workers * idle_torch_worker(start_method_of(loader), _imports_of(loader)),
        copies=_copies(loader, size, workers),
        batches=(workers * own + (workers if locked else ahead + 1)) * made,
        pinned=(ahead + 1) * locked,
        data=held,
        mapped=mapped,
        stay=bool(loader.persistent_workers),
    )


def _copies(loader: Any, size: DataSize, workers: int) -> int:
    """What all workers together copy of the data set.

    A forked one copies the pages on which it reads objects. In order it reads its own part of them; shuffled it reads a
    share of the items in each epoch, and with it nearly all pages if an item is smaller than a page.
    """
    if start_method_of(loader) != "fork":
        return workers * size.sent_bytes
    if type(loader.sampler).__name__ == "SequentialSampler":
        return size.touched_bytes
    touched_by_item = size.touched_bytes / max(len(loader.dataset), 1)
    share = 1.0 if loader.persistent_workers else 1 - (1 - 1 / workers) ** (1 + _PAGE / max(touched_by_item, 1.0))
    return round(workers * share * size.touched_bytes)


def _batch_of(loader: Any) -> tuple[int, int]:
    """Bytes of a batch of the loader, and of the pinned memory that it takes."""
    import torch

    number = loader.batch_size
    if number is None and loader.batch_sampler is not None:
        number = getattr(loader.batch_sampler, "batch_size", 1)
    places = np.linspace(0, len(loader.dataset) - 1, number or 1).astype(np.int64).tolist()
    with _generators_kept():
        items = [loader.dataset[place] for place in places]
        batch = loader.collate_fn(items if number is not None else items[0])
    pins = loader.pin_memory and torch.cuda.is_available()
    sizes = [int(leaf.nbytes) for leaf in _leaves(batch) if isinstance(leaf, torch.Tensor)]
    # torch's allocator of pinned memory rounds up to powers of two
    return _bytes_of(batch), sum(1 << max(size - 1, 1).bit_length() for size in sizes) if pins else 0


def _bytes_of(batch: Any) -> int:
    return _size_of(batch)[1]


@contextmanager
def _generators_kept() -> Iterator[None]:
    import random

    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def mapped_in(data: Any) -> dict[Any, int]:
    """Folder and bytes of each panel and packed objects that a loader holds, to a depth of a few attributes."""
    found: dict[Any, int] = {}
    todo = [(data, 0)]
    for one, depth in todo:
        if isinstance(one, Panel | PackedDataset):
            found[one.path] = int(one.nbytes)
        elif depth < 4:
            todo += [(value, depth + 1) for value in getattr(one, "__dict__", {}).values()]
    return found


def start_method_of(loader: Any) -> str:
    """How a ``DataLoader`` starts its workers."""
    import multiprocessing

    context = loader.multiprocessing_context or multiprocessing
    return str(context.get_start_method())


def _imports_of(loader: Any) -> tuple[str, ...]:
    """Modules that a worker imports: those of the data set and of collating, and what a script imported by name."""
    parts = (type(loader.dataset), loader.collate_fn, type(getattr(loader.dataset, "dataset", None)))
    names = {getattr(part, "__module__", "") for part in parts}
    if "__main__" in names:
        for value in vars(sys.modules["__main__"]).values():
            name = value.__name__ if isinstance(value, type(sys)) else getattr(value, "__module__", None)
            names |= {name} if isinstance(name, str) else set()
    return tuple(sorted(name for name in names if name and name not in ("__main__", "builtins")))


@functools.lru_cache
def idle_torch_worker(method: str, modules: Sequence[str]) -> int:
    """What a ``DataLoader`` worker that does nothing holds for itself, measured on one, in bytes.

    Raises:
        JobFailedError: If it could not be started.
    """
    folders = os.pathsep.join(folder for folder in sys.path if folder)
    command = [sys.executable, "-P", str(Path(__file__).with_name("_idle.py")), method, *modules]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": folders})
    if done.returncode != 0:
        raise JobFailedError(
            f"an idle worker could not be measured: {done.stderr.strip()[-600:]}",
            rule="what a worker takes by itself is measured on one that does nothing.",
            remedy="see the error above; memfit.data.measure_loader measures the whole loader",
        )
    return int(done.stdout.split()[-1])


@functools.lru_cache
def idle_worker(method: StartMethod) -> tuple[int, int]:
    """What the fork server and one idle worker of a `WorkerPool` hold for themselves, measured on two, in bytes."""
    launcher, reader = Launcher(method), ProcReader()
    try:
        connections = [launcher.start_worker() for _ in range(2)]
        pids = launcher.pids(timeout=_WAIT_SECONDS)
        sizes, deadline = [-1.0], time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < deadline:  # until they have imported what they need
            time.sleep(0.1)
            rollups = [reader.rollup(pid) for pid in pids]
            sizes.append(sum(found.held for found in rollups if found is not None) / 2)
            if len(sizes) > 5 and math.isclose(sizes[-1], sizes[-5], rel_tol=0.01) and sizes[-1] > 0:
                break
        server = reader.rollup(launcher.server_pid) if launcher.server_pid else None
        for connection in connections:
            connection.close()
    finally:
        launcher.end()
    return (0 if server is None else server.held), round(sizes[-1])
