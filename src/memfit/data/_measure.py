"""Measure a loader beside its trainer, and choose the simplest of three ways to run it that is good enough."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from memfit.data._packed import PackedDataset
from memfit.data._pages import cached_share, drop_pages, warm_pages
from memfit.data._panel import Panel
from memfit.data._verdict import Choice, LoaderReport, ModeReport, Pace, choose_num_workers, simplest, too_large
from memfit.errors import DataError, DoesNotFitError, UsageError, check_counts
from memfit.memory import ProcReader


def measure_loader(
    make_loader: Callable[[int], Iterable[Any]],
    *,
    num_workers: Sequence[int] = (0, 1, 2, 4),
    seconds: float = 3.0,
    consume: Callable[[Any], object] | float | None = None,
    files: Sequence[Path] | None = None,
) -> list[LoaderReport]:
    """Measure a loader with each count of workers: cold, warm and beside a trainer.

    Every byte of a batch is read once, so a loader that hands out a view of a map pays for its pages.

    Args:
        make_loader: Makes a new loader for a number of workers: any iterable of batches, such as a PyTorch
            ``DataLoader``. A batch is an array or tensor, or a dict, sequence or dataclass of them.
        num_workers: The counts to measure.
        seconds: The length of each of up to three measurements per count.
        consume: A function that trains on a batch, or the seconds of a step: the batch is read and the rest slept.
        files: The data's files, dropped from and read into the page cache; None for those of the loader's panel or
            packed objects.

    Raises:
        DataError: If the loader gives no batch.
        UsageError: If a count or a time is out of range.

    Example:
        >>> batches = [{"x": np.ones((8, 100), np.float32)}] * 50
        >>> report, = measure_loader(lambda num_workers: batches, num_workers=[0], seconds=0.01, consume=0.001)
        >>> report.warm.num_samples == 8 * report.warm.num_batches, report.worker_private_bytes
        (True, 0)
    """
    for count in num_workers:
        check_counts(UsageError, 0, num_workers=count)
    if not num_workers or seconds <= 0 or (isinstance(consume, float | int) and consume < 0):
        raise UsageError(
            f"a loader cannot be measured with workers {list(num_workers)}, {seconds} seconds and step {consume}.",
            rule="there is one count of workers at least, and times are above 0.",
            remedy="leave num_workers and seconds out for (0, 1, 2, 4) and 3.0",
        )
    others = _descendants()
    return [_measure_one(make_loader, count, seconds, consume, files, others) for count in sorted(set(num_workers))]


@dataclass(frozen=True)
class _Training:
    """How long a training goes on, and what its data are."""

    num_batches: int
    num_epochs: int
    data_bytes: int
    read_seconds: float
    budget_bytes: float


def choose_mode(
    make_loader: Callable[[int], Iterable[Any]],
    *,
    num_workers: Sequence[int] = (1, 2, 4),
    seconds: float = 3.0,
    consume: Callable[[Any], object] | float | None = None,
    num_epochs: int = 10,
    files: Sequence[Path] | None = None,
    budget_bytes: int | None = None,
) -> Choice:
    """Measure a loader in each mode beside its trainer, and choose the simplest one that keeps it from waiting.

    A training is its start, a first epoch without the page cache, and later ones from the cache if the data fit, else
    from the disk. The choice is the first of ``safe``, ``preload`` and ``workers`` with which the trainer waits at most
    2 % of its time, else the one with which it waits least; without a trainer, the first with 95 % of the best rate.

    Args:
        make_loader, seconds, consume, files: See `measure_loader`. Without files, ``preload`` is refused.
        num_workers: The counts to try for ``workers``.
        num_epochs: Epochs of the training.
        budget_bytes: What workers and data may take; None for no limit.

    Raises:
        DataError: If the loader gives no batch.
        UsageError: If an argument is out of range.

    Example:
        >>> batches = [np.ones((8, 100), np.float32)] * 50
        >>> found = choose_mode(lambda num_workers: batches, num_workers=[], seconds=0.05, consume=0.01)
        >>> found.name, found.num_workers, [mode.name for mode in found.modes]
        ('safe', 0, ['safe', 'preload'])
        >>> found.modes[1].refused
        'no files are known to read in'
    """
    check_counts(UsageError, 1, num_epochs=num_epochs)
    for count in num_workers:
        check_counts(UsageError, 1, num_workers=count)
    loader: Any = make_loader(0)
    data = files_of(loader) if files is None else list(files)
    number = len(loader) if hasattr(loader, "__len__") else 1
    close_loader(loader)
    del loader  # what is mapped cannot be dropped from the page cache
    limit = math.inf if budget_bytes is None else budget_bytes
    nbytes = sum(file.stat().st_size for file in data)
    reading = _read_seconds(data, seconds) if 0 < nbytes <= limit else 0.0
    training = _Training(number, num_epochs, nbytes, reading, limit)
    reports = measure_loader(make_loader, num_workers=(0, *num_workers), seconds=seconds, consume=consume, files=data)
    modes = [_judged("safe", reports[0], training), _judged("preload", reports[0], training)]
    if len(reports) > 1:
        try:
            fewest = choose_num_workers(reports[1:], budget_bytes=budget_bytes).num_workers
        except DoesNotFitError:
            fewest = reports[1].num_workers
        modes.append(_judged("workers", next(one for one in reports if one.num_workers == fewest), training))
    labels = [f"workers ({mode.num_workers})" if mode.name == "workers" else mode.name for mode in modes]
    chosen, text = simplest(modes, labels)
    return Choice(chosen.num_workers, text, chosen.name, tuple(modes))


def _read_seconds(files: Sequence[Path], most_seconds: float) -> float:
    """Return the seconds that reading files into the page cache takes, extrapolated."""
    drop_pages(files)
    before = cached_share(files) or 0.0
    began = time.perf_counter()
    warm_pages(files, most_seconds=most_seconds)
    took, gained = time.perf_counter() - began, (cached_share(files) or 1.0) - before
    return took / gained * (1 - before) if gained > 0 else took


def _judged(name: Literal["safe", "preload", "workers"], report: LoaderReport, training: _Training) -> ModeReport:
    """Return a mode over a whole training, from its measured paces."""
    pace = report.trained or report.warm
    warm, computed = pace.wait_seconds / pace.num_batches, pace.compute_seconds / pace.num_batches
    cold = warm
    if report.cold is not None:
        every = report.cold.wait_seconds / report.cold.num_batches  # workers make it while the trainer computes
        cold = max(warm, every - computed if report.num_workers else every)
    is_read, limit = name == "preload", training.budget_bytes
    fits = report.worker_private_bytes + training.data_bytes <= limit
    first, later = warm if is_read else cold, warm if is_read or fits else cold
    start = report.start_seconds + (training.read_seconds if is_read else 0.0)
    waited = start + training.num_batches * (first + (training.num_epochs - 1) * later)
    all_batches = training.num_batches * training.num_epochs
    total = waited + all_batches * computed
    refused = too_large(report.worker_private_bytes, "workers", limit)
    if is_read:
        is_known = training.data_bytes > 0
        refused = too_large(training.data_bytes, "data", limit) if is_known else "no files are known to read in"
    return ModeReport(
        name=name,
        num_workers=report.num_workers,
        start_seconds=start,
        samples_per_second=all_batches * pace.num_samples / pace.num_batches / total,
        wait_share=None if report.trained is None else waited / total,
        private_bytes=report.worker_private_bytes,
        data_bytes=training.data_bytes if is_read else 0,
        refused=refused,
    )


def _measure_one(
    make_loader: Callable[[int], Iterable[Any]],
    num_workers: int,
    seconds: float,
    consume: Callable[[Any], object] | float | None,
    files: Sequence[Path] | None,
    others: set[int],
) -> LoaderReport:
    loader = make_loader(num_workers)
    data = files_of(loader) if files is None else list(files)
    cold = None
    if data and drop_pages(data):
        share = cached_share(data)
        cold, _ = _pace(loader, None, seconds, num_epochs=1)
        cold = dataclasses.replace(cold, cached_share=share) if cold.num_batches else None
    close_loader(loader)
    del loader
    gc.collect()
    warm_pages(data, most_seconds=seconds)
    share = cached_share(data)
    began = time.perf_counter()
    loader = make_loader(num_workers)
    made_seconds = time.perf_counter() - began
    sizes: list[tuple[int, int]] = []
    warm, first_seconds = _pace(loader, None, seconds, at_end=lambda: sizes.append(_memory_of_new(others)))
    trained = None
    if consume is not None:
        step = consume if callable(consume) else _step_of(float(consume))
        trained = dataclasses.replace(_pace(loader, step, seconds)[0], cached_share=share)
    close_loader(loader)
    private, pss = sizes[-1]
    warm = dataclasses.replace(warm, cached_share=share)
    return LoaderReport(num_workers, made_seconds + first_seconds, warm, cold, trained, private, pss)


def _pace(
    loader: Iterable[Any],
    consume: Callable[[Any], object] | None,
    seconds: float,
    *,
    num_epochs: int | None = None,
    at_end: Callable[[], object] | None = None,
) -> tuple[Pace, float]:
    """Return a measurement and the seconds to its first batch; call ``at_end`` while the workers live."""
    clock = time.perf_counter
    waited = computed = first = 0.0
    num_batches = num_samples = num_bytes = 0
    began = asked = clock()
    batches = _endless(loader, num_epochs)
    for number, batch in enumerate(batches):
        if consume is None:
            _read(batch)
        arrived = clock()
        if number == 0:
            first = arrived - began
        else:
            waited += arrived - asked
            size = size_of(batch)
            num_batches, num_samples, num_bytes = num_batches + 1, num_samples + size[0], num_bytes + size[1]
        begun = clock()
        if consume is not None:
            consume(batch)
        asked = clock()
        if number:
            computed += asked - begun
        if number and asked - began - first >= seconds:
            break
    if at_end is not None:
        at_end()
    batches.close()
    return Pace(num_batches, num_samples, num_bytes, waited, computed if consume else 0.0), first


def _endless(loader: Iterable[Any], num_epochs: int | None) -> Generator[Any, None, None]:
    """Yield the batches of epoch after epoch."""
    for epoch in itertools.count(1) if num_epochs is None else range(1, num_epochs + 1):
        if (set_epoch := getattr(loader, "set_epoch", None)) is not None:
            set_epoch(epoch)
        num_batches = 0
        for batch in loader:
            yield batch
            num_batches += 1
        if not num_batches:
            raise DataError(
                f"epoch {epoch} of the loader has no batch.",
                rule="a loader is measured by the batches that it gives, epoch after epoch.",
                remedy="have make_loader return a loader with batches, not an iterator that is used up",
            )


def _step_of(seconds: float) -> Callable[[Any], object]:
    """Return a step that reads the batch and takes so many seconds."""

    def step(batch: Any) -> None:
        end = time.perf_counter() + seconds
        _read(batch)
        time.sleep(max(0.0, end - time.perf_counter()))

    return step


def leaves(batch: Any) -> Iterator[Any]:
    """Yield the arrays, tensors, texts and numbers of a batch."""
    if isinstance(batch, Mapping):
        parts: Iterable[Any] = batch.values()
    elif isinstance(batch, list | tuple | set):
        parts = batch
    elif dataclasses.is_dataclass(batch):
        parts = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    else:
        yield batch
        return
    for part in parts:
        yield from leaves(part)


def size_of(batch: Any) -> tuple[int, int]:
    """Return the samples and bytes of a batch."""
    num_samples, num_bytes = 0, 0
    for leaf in leaves(batch):
        shape: Sequence[int] = getattr(leaf, "shape", ())
        num_samples = num_samples or (int(shape[0]) if len(shape) else 0)
        num_bytes += len(leaf) if isinstance(leaf, str | bytes) else int(getattr(leaf, "nbytes", 0))
    return num_samples or (len(batch) if hasattr(batch, "__len__") else 1), num_bytes


def _read(batch: Any) -> None:
    """Read every byte of a batch that lies in host memory."""
    for leaf in leaves(batch):
        array = _as_array(leaf)
        if array is not None and array.size:
            np.maximum.reduce(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _as_array(leaf: Any) -> np.ndarray[Any, Any] | None:
    """Return an array, or the bytes of a tensor on the CPU; None for all else."""
    if isinstance(leaf, np.ndarray):
        return None if leaf.dtype.hasobject else leaf
    if (torch := sys.modules.get("torch")) is None or not isinstance(leaf, torch.Tensor):
        return None
    if leaf.device.type != "cpu" or leaf.layout != torch.strided:
        return None
    found: np.ndarray[Any, Any] = leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def files_of(loader: Any) -> list[Path]:
    """Return the files of the panels and packed objects that a loader reads."""
    folders = [path for path in mapped_in(loader) if isinstance(path, Path)]
    return sorted(file for folder in folders for kind in ("*.npy", "*.bin") for file in folder.glob(kind))


def mapped_in(data: Any) -> dict[Any, int]:
    """Return folder and bytes of each panel and packed data set that a loader holds, a few attributes deep."""
    found: dict[Any, int] = {}
    todo = [(data, 0)]
    for one, depth in todo:
        if isinstance(one, Panel | PackedDataset):
            found[one.path] = int(one.nbytes)
        elif depth < 4:
            todo += [(value, depth + 1) for value in getattr(one, "__dict__", {}).values()]
    return found


def close_loader(loader: Any) -> None:
    """End a loader's workers; a PyTorch loader's end with its iterator."""
    if (close := getattr(loader, "close", None)) is not None:
        close()
    elif getattr(loader, "persistent_workers", False):
        loader._iterator = None


def _descendants() -> set[int]:
    import psutil

    return {child.pid for child in psutil.Process().children(recursive=True)}


def _memory_of_new(others: set[int]) -> tuple[int, int]:
    """Return the non-reclaimable bytes and PSS of this process's descendants without the others."""
    import psutil

    reader = ProcReader()
    private = pss = 0
    for pid in _descendants() - others:
        if (rollup := reader.rollup(pid)) is not None:
            private, pss = private + rollup.held + rollup.shared_memory, pss + rollup.pss
        elif not sys.platform.startswith("linux"):
            with suppress(psutil.Error):  # ended since it was listed
                unshared = int(psutil.Process(pid).memory_full_info().uss)
                private, pss = private + unshared, pss + unshared
    return private, pss
