"""Forecast the host memory of a training: worker processes, their copies of the data, batches ahead, imports."""

from __future__ import annotations

import functools
import gc
import math
import mmap
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from memfit.data._loader import Loader
from memfit.data._packed import PackedDataset
from memfit.data._panel import Panel
from memfit.data._sequences import SequenceLoader
from memfit.errors import JobFailedError, UsageError
from memfit.memory import Footprint, PhasePeak

Loop = Literal["plain", "huggingface", "lightning"]
_NAMES = ("workers", "dataset copies", "pickled", "batches", "pinned")
_PAGE = 4096
#: The batches of the small training have at most so many bytes and items.
_MOST_MADE, _MOST_ITEMS = 8 << 20, 1024
#: As the agent of a group of one process sets them; torch finds a free port itself.
_GROUP = {
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "memfit",
}  # fmt: skip
_NUM_SAMPLED, _NUM_SAMPLED_WITHIN = 1000, 32
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType)
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), range)


@dataclass(frozen=True)
class LoaderUse:
    """How a training uses its loaders on one machine.

    Attributes:
        num_ranks: Processes on this machine that have such loaders each, and share the items among them.
        num_validating: How many of them validate at a time; None for all of them.
        release: Whether the workers of the training end before validation, as `Trainer` has them do without room.
        num_epochs: The epochs of the training; None for many.
        loop: Who runs the training: ``plain``, ``huggingface`` (transformers' Trainer) or ``lightning``, whose
            validation begins before the training's iteration ended.

    Raises:
        UsageError: If a number is out of range, or for another loop.
    """

    num_ranks: int = 1
    num_validating: int | None = None
    release: bool = False
    num_epochs: int | None = None
    loop: Loop = "plain"

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or not 0 < self.validating <= self.num_ranks:
            raise UsageError(
                f"loaders cannot be counted for {self.num_ranks} ranks of which {self.validating} validate at a time.",
                rule="there is a rank at least, and one at least validates.",
                remedy="leave num_ranks and num_validating out for 1",
            )
        if self.loop not in get_args(Loop):
            raise UsageError(
                f"a loop named {self.loop} is not known.",
                rule=f"loop is one of {', '.join(get_args(Loop))}.",
                remedy="use plain for a loop of your own",
            )

    @property
    def validating(self) -> int:
        """How many ranks validate at a time."""
        return self.num_ranks if self.num_validating is None else self.num_validating


@dataclass
class _Loader:
    """One rank's loader: bytes by part, mapped files, and what becomes of its workers when an epoch ends."""

    parts: dict[str, int]
    mapped: dict[Any, int]
    stays: bool = False
    starts_slowly: bool = False

    def workers(self, is_there: bool) -> dict[str, int]:
        return {name: self.parts.get(name, 0) for name in ("workers", "dataset copies") if is_there}


def host_footprint(
    train: Any, valid: Any = None, use: LoaderUse | None = None, *, training_bytes: int | None = 0
) -> Footprint:
    """Forecast the host memory of a training on one machine, before it starts.

    Global random generators keep their state. For each rank, with ``w`` workers and ``ahead = w * prefetch_factor``:

    - ``workers``: ``w`` times a worker of a small training that is measured here, its items included, and once the
      helpers of its start method and the pages that the process wrote to while forked workers held them.
    - ``dataset copies``: ``w * share * objects`` where workers are forked: reading an object counts a reference and so
      copies its page. ``share`` is that of the pages that hold an item the worker reads. Other workers have
      ``w * (objects + arrays)``, np.memmap included. Packed files and panels are never copied.
    - ``pickled``: what the process holds while it starts such a worker, above the batches that are not there yet.
    - ``batches``: ``(ahead + 1) * batch`` in shared memory, and one in each worker if another function than torch's
      collates; without workers three (in use, next, and the items that the next is made of). One is made here.
    - ``pinned``: ``ahead + 1`` of them, in powers of two.
    - ``data``: the objects and arrays of the data sets.
    - ``interpreter``: the process itself with its imports: that small training, with batches of the same size (8 MiB at
      most). The libraries that it maps are in ``shared_bytes``, once for the machine.
    - ``training``: ``training_bytes``.

    Args:
        train: A PyTorch ``DataLoader`` over a map-style data set, a `Loader` or a `SequenceLoader`.
        valid: The one of the validation, or None.
        use: How the training uses them; None for one rank that does so for many epochs.
        training_bytes: Host memory of a rank for weights, gradients, optimizer, buckets of DistributedDataParallel and
            activations. On a CPU, AdamW and DDP take five times the weights, and the activations. It is not measured.
            None: the loaders alone, without the last two parts.

    Returns:
        ``private_bytes``, the peak; its ``parts`` by the names above; ``shared_bytes``, the mapped files; ``phases``:
        ``train`` and ``validate``. Its method is ``computed``: measuring the run replaces it.

    Raises:
        UsageError: If a loader is of another kind.
        JobFailedError: If the small training failed, such as with a loop that is not installed.

    Example:
        >>> from memfit.data import LoaderUse, Padding, SequenceLoader
        >>> rows = [{"input_ids": [number, 1, 2]} for number in range(100)]
        >>> loader = SequenceLoader(rows, Padding(0), batch=10)
        >>> found = host_footprint(loader, use=LoaderUse(num_ranks=2), training_bytes=None)
        >>> found.parts["workers"], found.parts["batches"], found.parts["data"] > 20_000
        (0, 1920, True)
    """
    use, given = use or LoaderUse(), [one for one in (train, valid) if one is not None]
    modules = _imports(given)
    loaders = [_look_at(one, use, modules) for one in given]
    data = {id(_data_of(one)): found.parts.pop("data", 0) for one, found in zip(given, loaders, strict=True)}
    shared = sum({key: size for found in loaders for key, size in found.mapped.items()}.values())
    own = {"data": use.num_ranks * sum(data.values())}
    if training_bytes is not None:
        loader = next((one for one in given if getattr(one, "num_workers", 0)), train)
        made = _batch_of(loader)[0] if hasattr(loader, "prefetch_factor") else 0
        empty = _measure_empty_training(loader, use, modules, made)
        own = {"interpreter": use.num_ranks * empty.process, "training": use.num_ranks * training_bytes} | own
        shared += empty.files
    phases = {
        phase: own | {name: sum(number * parts.get(name, 0) for number, parts in terms) for name in _NAMES}
        for phase, terms in _by_phase(loaders, use).items()
    }
    largest = max(phases.values(), key=lambda parts: sum(parts.values()))
    return Footprint(
        private_bytes=sum(largest.values()),
        shared_bytes=shared,
        parts=largest,
        phases={name: PhasePeak(sum(parts.values()), shared) for name, parts in phases.items()},
        method="computed",
    )


def _by_phase(loaders: Sequence[_Loader], use: LoaderUse) -> dict[str, list[tuple[int, dict[str, int]]]]:
    """Return the parts that are there in each phase, each with the ranks that have them."""
    train, ranks, is_lightning = loaders[0], use.num_ranks, use.loop == "lightning"
    # CombinedLoader of Lightning 2.6 ends an iteration by its count of batches and keeps it until the next is made. The
    # workers of both are there then, if new ones start slowly.
    old = [is_lightning and found.starts_slowly for found in loaders]
    phases = {"train": [(ranks, train.parts), (ranks, train.workers(old[0] and use.num_epochs != 1))]}
    if len(loaders) > 1:
        valid = loaders[1]
        phases["train"].append((ranks, valid.workers(valid.stays or old[1])))
        phases["validate"] = [
            (ranks, train.workers((train.stays or is_lightning) and not use.release)),
            (ranks, {"batches": train.parts.get("batches", 0) if is_lightning else 0}),
            (use.validating, valid.parts),
            (use.validating, valid.workers(old[1])),
        ]
    return phases


def _data_of(loader: Any) -> Any:
    return next(
        found for name in ("dataset", "examples", "panel") if (found := getattr(loader, name, None)) is not None
    )


def _look_at(loader: Any, use: LoaderUse, modules: Sequence[str]) -> _Loader:
    if isinstance(loader, Loader):
        kind = "pinned" if loader._buffers.pinned else "batches"
        return _Loader({kind: loader._buffers.most * loader._buffers.nbytes}, look_through(loader.panel)[1])
    if isinstance(loader, SequenceLoader):
        # The threads' batches, the one in use, and the one that takes its place.
        batches = (loader.num_workers + 2) * _bytes_of(loader.longest())
        size, mapped = look_through(loader.examples)
        return _Loader({"batches": batches, "data": _held(size)}, mapped)
    torch, data = sys.modules.get("torch"), getattr(loader, "dataset", None)
    is_known = torch is not None and isinstance(loader, torch.utils.data.DataLoader) and hasattr(data, "__getitem__")
    if torch is None or not is_known or isinstance(data, torch.utils.data.IterableDataset):
        raise UsageError(
            f"what a {type(loader).__name__} over a {type(data).__name__} takes cannot be told before it runs.",
            rule="counted are memfit's Loader and SequenceLoader, and a DataLoader whose data set has items by number.",
            remedy="run a short training with it: memfit run measures the job",
        )
    return _look_at_torch(loader, use, modules)


def _look_at_torch(loader: Any, use: LoaderUse, modules: Sequence[str]) -> _Loader:
    (size, mapped), workers = look_through(loader.dataset), int(loader.num_workers)
    made, locked = _batch_of(loader)
    more = 1 if type(loader).__module__.startswith("accelerate.") else 0  # it looks one batch ahead
    if workers == 0:
        return _Loader({"batches": (3 + more) * made, "pinned": locked, "data": _held(size)}, mapped)
    empty = _measure_empty_training(loader, use, modules, made)
    ahead = workers * int(loader.prefetch_factor)
    method = _method_of(loader)
    # Of the batch that a worker makes, the items are in what was measured; other code than torch's does not collate
    # into shared memory, so that there are two.
    own = max(0, made - empty.batch) + (0 if (loader.collate_fn.__module__ or "").startswith("torch.") else made)
    batches = workers * own + (workers if locked else ahead + 1 + more) * made
    if method == "fork":
        copied = round(size["object"] * _share_read(loader, size["object"], use))
        pickled = 0
    else:
        sent, numbers = _pickled_bytes(loader.dataset)
        copied = size["object"] + numbers
        pickled = max(0, sent - batches)
    parts = {
        "workers": workers * empty.worker + empty.workers_once,
        "dataset copies": workers * copied,
        "pickled": pickled,
        "batches": batches,
        "pinned": (ahead + 1) * locked,
        "data": _held(size),
    }
    stays = bool(loader.persistent_workers)
    return _Loader(parts, mapped, stays, starts_slowly=method != "fork" and not stays)


def _method_of(loader: Any) -> str:
    """Return how workers of a loader start; for one without processes, how this process starts others."""
    return str((getattr(loader, "multiprocessing_context", None) or multiprocessing).get_start_method())


def _share_read(loader: Any, nbytes: int, use: LoaderUse) -> float:
    """Return which share of a data set's pages hold an item that one worker reads in its life. In order, a worker reads
    the same items in each epoch: 1 of ``w * num_ranks``. Shuffled, it reads after ``e`` epochs ``q = 1 - (1 - 1 / (w *
    num_ranks)) ** e`` of them, and a page lies in ``1 + page / item`` items."""
    part: float = 1 / (loader.num_workers * max(use.num_ranks, getattr(loader.sampler, "num_replicas", 1)))
    if type(loader.sampler).__name__ == "SequentialSampler" or getattr(loader.sampler, "shuffle", True) is False:
        return part
    epochs = (math.inf if use.num_epochs is None else use.num_epochs) if loader.persistent_workers else 1
    items_in_page = 1 + _PAGE * len(loader.dataset) / max(nbytes, 1)
    return float(1 - (1 - part) ** (epochs * items_in_page)) if part < 1 else 1.0


def _pickled_bytes(data: Any) -> tuple[int, int]:
    """Return the bytes of a data set as a process hands it to a worker that is not forked, and those of its arrays.
    Tensors go by themselves. Of arrays that a data set leaves out of its state, nothing is sent."""
    total = numbers = 0

    class Sink:
        def write(self, piece: Any) -> int:
            nonlocal total
            total += len(piece)
            return len(piece)

    class Counter(pickle.Pickler):
        def reducer_override(self, one: Any) -> Any:
            nonlocal numbers
            kind, nbytes = _numbers(one)
            numbers += nbytes if kind != "tensor" else 0
            return (int, ()) if kind else NotImplemented

    Counter(Sink(), 4).dump(data)
    return total + numbers, numbers


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
    # torch's allocator of pinned memory rounds up to powers of two
    pinned = (weight * (1 << max(size - 1, 1).bit_length()) for kind, size, weight in _sized(batch) if kind == "tensor")
    return _bytes_of(batch), round(sum(pinned)) if pins else 0


def _sized(batch: Any) -> Iterator[tuple[str, int, float]]:
    return ((*_numbers(one), weight) for one, weight in _weighed(batch))


def _bytes_of(batch: Any) -> int:
    return round(sum(weight * size for _, size, weight in _sized(batch)))


def _imports(loaders: Iterable[Any]) -> tuple[str, ...]:
    """Return the modules that a worker imports: those of the data sets, of collating, of the script."""
    names = set[str]()
    for loader in loaders:
        data = getattr(loader, "dataset", None)
        parts = (type(data), getattr(loader, "collate_fn", None), type(getattr(data, "dataset", None)))
        names |= {getattr(part, "__module__", "") for part in parts}
    if "__main__" in names:
        for value in vars(sys.modules["__main__"]).values():
            name = value.__name__ if isinstance(value, type(sys)) else getattr(value, "__module__", None)
            names |= {name} if isinstance(name, str) else set()
    return tuple(sorted(names - {"", "__main__", "builtins"}))


@dataclass(frozen=True)
class EmptyTraining:
    """Bytes of a training of one small layer: anonymous memory of its process, the ``files`` that it maps (libraries),
    and what each ``worker`` of its loader has for itself with the items of a batch. ``workers_once`` is what the
    workers add together: helpers of the start method, or pages that the process wrote to while forked workers held
    them."""

    process: int
    files: int
    worker: int
    workers_once: int
    batch: int


def _measure_empty_training(loader: Any, use: LoaderUse, modules: Sequence[str], made: int) -> EmptyTraining:
    """Measure a training of one small layer, with batches of ``made`` bytes, and workers that start like a loader's."""
    items = min(int(loader.batch_size or 1), _MOST_ITEMS) if hasattr(loader, "prefetch_factor") else 1
    numbers = max(1, min(made, _MOST_MADE) // (4 * items))
    return _measure(use.loop, use.num_ranks > 1, _method_of(loader), items, numbers, modules)


@functools.lru_cache
def _measure(
    loop: Loop, in_group: bool, method: str, items: int, numbers: int, modules: Sequence[str]
) -> EmptyTraining:
    folders = os.pathsep.join(folder for folder in sys.path if folder)
    variables = {**os.environ, "PYTHONPATH": folders, **(_GROUP if in_group else {})}
    program, where = Path(__file__).with_name("_empty_training.py"), "group" if in_group else "alone"
    command = [sys.executable, "-P", str(program), loop, where, method, str(items), str(numbers), *modules]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    if done.returncode != 0:
        raise JobFailedError(
            f"a small training could not be measured: {done.stderr.strip()[-600:]}",
            rule="what a process takes by itself is measured on one that trains one small layer.",
            remedy="see the error above; memfit run measures the job itself",
        )
    process, files, worker, once = map(int, done.stdout.split())
    return EmptyTraining(process, files, worker, once, 4 * items * numbers)


def look_through(data: Any) -> tuple[dict[str, int], dict[Any, int]]:
    """Return the bytes of a data set as ``object``, ``array``, ``mapped`` and ``tensor``, sampling large containers,
    and those of mapped arrays by file and place in it, of panels and packed objects by folder: what two data sets map
    is there once. What other libraries hold outside of arrays is not in it."""
    sizes, mapped = dict.fromkeys(("object", "array", "mapped", "tensor"), 0.0), dict[Any, int]()
    for one, weight in _weighed(data):
        kind, nbytes = _numbers(one)
        sizes["object"] += weight * (256 if kind else -(-sys.getsizeof(one, 64) // 16) * 16)
        if kind:
            sizes[kind] += weight * nbytes
        if isinstance(one, Panel | PackedDataset):
            mapped[one.path] = one.nbytes
        elif kind == "mapped":
            whole = one
            while isinstance(whole.base, np.ndarray):
                whole = whole.base
            start = one.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
            mapped[getattr(whole, "filename", None) or id(whole), start] = round(weight * nbytes)
    return {name: round(size) for name, size in sizes.items()}, mapped


def _weighed(data: Any) -> list[tuple[Any, float]]:
    """Return the objects of a data set, and how many like it each stands for."""
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
    return [(one, weight) for one, weight, _ in weights.values()]


def _held(size: Mapping[str, int]) -> int:
    """Return what the process of a data set itself holds."""
    return size["object"] + size["array"] + size["tensor"]


def _sampled(one: Any, most: int) -> tuple[list[Any], float]:
    """Return parts of an object, and how many each stands for."""
    is_objects = isinstance(one, np.ndarray) and one.dtype.hasobject and one.dtype.names is None
    if isinstance(one, (*_PLAIN, Panel, PackedDataset)) or (_numbers(one)[0] and not is_objects):
        return [], 1.0
    if isinstance(one, list | tuple) or is_objects:
        step = max(1, len(one) // most)
        found = list(one[::step])
        return found, len(one) / max(len(found), 1)
    if type(one) in (dict, set, frozenset):
        step = max(1, len(one) // most)
        pairs = islice(one.items() if isinstance(one, dict) else zip(one), 0, None, step)
        return [part for pair in pairs for part in pair], float(step)
    return [part for part in gc.get_referents(one) if not isinstance(part, _OPAQUE)], 1.0


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
