"""Forecast the memory of loaders: worker processes, their copies of the data, and the batches ahead."""

from __future__ import annotations

import functools
import gc
import mmap
import multiprocessing
import os
import random
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from memfit.data._loader import Loader
from memfit.data._measure import leaves, mapped_in, size_of
from memfit.data._packed import PackedDataset
from memfit.data._panel import Panel
from memfit.data._sequences import SequenceLoader
from memfit.errors import JobFailedError, UsageError
from memfit.memory import Footprint, PhasePeak

_NAMES = ("workers", "dataset copies", "batches", "pinned", "data")
_NUM_SAMPLED, _NUM_SAMPLED_WITHIN = 1000, 32
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType)
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), range)


@dataclass
class _Loader:
    """One rank's loader: bytes by part, mapped files, and whether its workers live on between epochs."""

    parts: dict[str, int]
    mapped: dict[Any, int]
    stays: bool = False


def loader_footprint(
    train: Any, valid: Any = None, *, num_ranks: int = 1, num_validating: int | None = None, release: bool = False
) -> Footprint:
    """Forecast the memory of loaders on one machine, before any of them runs.

    It counts the workers of a ``DataLoader`` (measured on an idle one), their copies of the data set (a list of dicts
    is copied by every worker that reads it, arrays by those that are not forked, mapped files by none), the batches
    ahead (from one that is made here), and the data set of each rank. Global random generators keep their state.

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
        (0, 1920, True)
    """
    validating = num_ranks if num_validating is None else num_validating
    if num_ranks < 1 or not 0 < validating <= num_ranks:
        raise UsageError(
            f"loaders cannot be counted for {num_ranks} ranks of which {validating} validate at a time.",
            rule="there is a rank at least, and one at least validates.",
            remedy="leave num_ranks and num_validating out for 1",
        )
    loaders = [_look_at(one) for one in (train, valid) if one is not None]
    by_data = {
        id(_data_of(one)): found.parts.pop("data", 0) for one, found in zip((train, valid), loaders, strict=False)
    }
    data = sum(by_data.values())
    phases = {"train": [(num_ranks, loaders[0].parts)]}
    if valid is not None:
        lives_on = loaders[0].stays and not release
        living = {name: loaders[0].parts[name] for name in ("workers", "dataset copies") if lives_on}
        phases["validate"] = [(num_ranks, living), (validating, loaders[1].parts)]
    added = {
        phase: {name: sum(number * parts.get(name, 0) for number, parts in terms) for name in _NAMES[:-1]}
        | {"data": num_ranks * data}
        for phase, terms in phases.items()
    }
    mapped = sum({key: size for found in loaders for key, size in found.mapped.items()}.values())
    largest = max(added.values(), key=lambda parts: sum(parts.values()))
    return Footprint(
        private_bytes=sum(largest.values()),
        shared_bytes=mapped,
        parts=largest,
        phases={name: PhasePeak(sum(parts.values()), mapped) for name, parts in added.items()},
        method="declared",
    )


def _data_of(loader: Any) -> Any:
    return next(
        found for name in ("dataset", "examples", "panel") if (found := getattr(loader, name, None)) is not None
    )


def _look_at(loader: Any) -> _Loader:
    if isinstance(loader, Loader):
        kind = "pinned" if loader._buffers.pinned else "batches"
        return _Loader({kind: loader._buffers.most * loader._buffers.nbytes}, mapped_in(loader.panel))
    if isinstance(loader, SequenceLoader):
        # The threads' batches, the one in use, and the one that takes its place.
        size = (loader.num_workers + 2) * size_of(loader.longest())[1]
        return _Loader({"batches": size, "data": _held(data_size(loader.examples))}, mapped_in(loader.examples))
    torch, data = sys.modules.get("torch"), getattr(loader, "dataset", None)
    is_known = torch is not None and isinstance(loader, torch.utils.data.DataLoader) and hasattr(data, "__getitem__")
    if torch is None or not is_known or isinstance(data, torch.utils.data.IterableDataset):
        raise UsageError(
            f"what a {type(loader).__name__} over a {type(data).__name__} takes cannot be told before it runs.",
            rule="counted are memfit's Loader and SequenceLoader, and a DataLoader whose data set has items by number.",
            remedy="measure it: memfit.data.measure_loader",
        )
    return _look_at_torch(loader)


def _look_at_torch(loader: Any) -> _Loader:
    size, workers = data_size(loader.dataset), int(loader.num_workers)
    made, locked = _batch_of(loader)
    mapped = {**mapped_in(loader.dataset), id(loader.dataset): size["mapped"]}
    if workers == 0:
        return _Loader({"batches": made, "pinned": locked, "data": _held(size)}, mapped)
    ahead = workers * int(loader.prefetch_factor)
    method = str((loader.multiprocessing_context or multiprocessing).get_start_method())
    own = 1 if (loader.collate_fn.__module__ or "").startswith("torch.") else 2  # torch's collates into shared memory
    in_order = method == "fork" and type(loader.sampler).__name__ == "SequentialSampler"
    # A forked worker copies the objects that it reads, since reading counts a reference; another gets arrays too.
    copied = size["object"] + (size["array"] + size["mapped"] if method != "fork" else 0)
    parts = {
        "workers": workers * idle_torch_worker(method, _imports_of(loader)),
        "dataset copies": copied if in_order else workers * copied,  # in order, each reads its own part
        "batches": (workers * own + (workers if locked else ahead + 1)) * made,
        "pinned": (ahead + 1) * locked,
        "data": _held(size),
    }
    return _Loader(parts, mapped, stays=bool(loader.persistent_workers))


def _batch_of(loader: Any) -> tuple[int, int]:
    """Return the bytes of a batch, and of its pinned memory."""
    import torch

    number = loader.batch_size
    if number is None and loader.batch_sampler is not None:
        number = getattr(loader.batch_sampler, "batch_size", 1)
    places = np.linspace(0, len(loader.dataset) - 1, number or 1).astype(np.int64).tolist()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        items = [loader.dataset[place] for place in places]
        batch = loader.collate_fn(items if number is not None else items[0])
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
    pins = loader.pin_memory and torch.cuda.is_available()
    sizes = [int(leaf.nbytes) for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
    # torch's allocator of pinned memory rounds up to powers of two
    return size_of(batch)[1], sum(1 << max(size - 1, 1).bit_length() for size in sizes) if pins else 0


def _imports_of(loader: Any) -> tuple[str, ...]:
    """Return the modules that a worker imports: of the data set, of collating, and of the script."""
    parts = (type(loader.dataset), loader.collate_fn, type(getattr(loader.dataset, "dataset", None)))
    names = {getattr(part, "__module__", "") for part in parts}
    if "__main__" in names:
        for value in vars(sys.modules["__main__"]).values():
            name = value.__name__ if isinstance(value, type(sys)) else getattr(value, "__module__", None)
            names |= {name} if isinstance(name, str) else set()
    return tuple(sorted(name for name in names if name and name not in ("__main__", "builtins")))


@functools.lru_cache
def idle_torch_worker(method: str, modules: Sequence[str]) -> int:
    """Measure the private bytes of a ``DataLoader`` worker that does nothing."""
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


def data_size(data: Any) -> dict[str, int]:
    """Return the bytes of a data set as ``object``, ``array``, ``mapped`` and ``tensor``, sampling large containers.

    Panels and packed objects are left out, and so is what other libraries hold outside of arrays.
    """
    sizes = dict.fromkeys(("object", "array", "mapped", "tensor"), 0.0)
    weights: dict[int, tuple[Any, float, int]] = {}
    todo: list[tuple[Any, float, int]] = [(data, 1.0, 0)]
    while todo:
        one, weight, owner = todo.pop()
        _, known, first = weights.get(id(one), (None, 0.0, owner))
        if known and (known <= 1.0 or first == owner):
            continue
        if known:  # several sampled elements hold it, so it stands for itself
            weight, owner = 1.0, 0
        weights[id(one)] = one, weight, owner
        parts, scale = _sampled(one, _NUM_SAMPLED if weight == 1.0 else _NUM_SAMPLED_WITHIN)
        todo += [(part, weight * scale, id(part) if scale > 1 else owner) for part in parts]
    for one, weight, _ in weights.values():
        kind, nbytes = _numbers(one)
        sizes["object"] += weight * (256 if kind else -(-sys.getsizeof(one, 64) // 16) * 16)
        if kind:
            sizes[kind] += weight * nbytes
    return {name: round(size) for name, size in sizes.items()}


def _held(size: Mapping[str, int]) -> int:
    """Return what the process of a data set itself holds."""
    return size["object"] + size["array"] + size["tensor"]


def _sampled(one: Any, most: int) -> tuple[list[Any], float]:
    """Return parts of an object, and how many each stands for."""
    is_objects = isinstance(one, np.ndarray) and one.dtype.hasobject and one.dtype.names is None
    if isinstance(one, _PLAIN) or (_numbers(one)[0] and not is_objects):
        return [], 1.0
    if isinstance(one, list | tuple) or is_objects:
        step = max(1, len(one) // most)
        found = list(one[::step])
        return found, len(one) / max(len(found), 1)
    if type(one) in (dict, set, frozenset):
        step = max(1, len(one) // most)
        pairs = islice(one.items() if isinstance(one, dict) else zip(one), 0, None, step)
        return [part for pair in pairs for part in pair], float(step)
    return [part for part in gc.get_referents(one) if not isinstance(part, (*_OPAQUE, Panel, PackedDataset))], 1.0


def _numbers(one: Any) -> tuple[str, int]:
    """Return where the numbers of an array lie, and their bytes; an empty name for all else."""
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
