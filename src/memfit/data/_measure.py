"""Measure a loader beside its trainer, and say how many workers are enough."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import mmap
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from memfit.data._packed import PackedDataset
from memfit.data._panel import Panel
from memfit.errors import DataError, DoesNotFitError, UsageError, check_counts
from memfit.memory import ProcReader
from memfit.units import format_bytes, format_count

#: The largest share of its time that a trainer may wait.
_MOST_WAIT = 0.02
#: Without a trainer: workers are enough with this share of the best rate.
_AS_GOOD = 0.95


@dataclass(frozen=True)
class Pace:
    """What a loader delivered in one measurement, after its first batch.

    Attributes:
        num_batches, num_samples, num_bytes: What it delivered; the first array of a batch gives its samples.
        wait_seconds: Time waited for batches; without a consumer, reading their bytes included.
        compute_seconds: Time in the consumer; 0 without one.
    """

    num_batches: int
    num_samples: int
    num_bytes: int
    wait_seconds: float
    compute_seconds: float = 0.0

    def per_second(self, count: float) -> float:
        seconds = self.wait_seconds + self.compute_seconds
        return count / seconds if seconds else 0.0

    @property
    def wait_share(self) -> float:
        """Of the time between the first and the last batch, the share that was waited, 0 to 1."""
        return self.per_second(self.wait_seconds)


@dataclass(frozen=True)
class LoaderReport:
    """One count of workers, measured.

    Attributes:
        num_workers: The workers asked for.
        start_seconds: To the first batch, the data in the page cache.
        warm: As fast as the loader goes, the data in the page cache.
        cold: One epoch at most, the data dropped from the page cache before; None without files or with one batch.
        trained: Beside the consumer, the data in the page cache; None without a consumer.
        worker_private_bytes: Non-reclaimable bytes of the processes that the loader started.
    """

    num_workers: int
    start_seconds: float
    warm: Pace
    cold: Pace | None = None
    trained: Pace | None = None
    worker_private_bytes: int = 0


@dataclass(frozen=True)
class MeasuredLoader:
    """A loader, measured with several counts of workers.

    Attributes:
        reports: One for each count, all beside the same trainer or all without one.
        budget_bytes: What the workers' private bytes may come to; None for no limit.

    Example:
        >>> warm = Pace(100, 3200, 0, 1.0)
        >>> reports = [LoaderReport(n, 0.1, warm, None, Pace(9, 9, 0, share, 1 - share), n << 28)
        ...            for n, share in {0: 0.3, 1: 0.1, 2: 0.01, 4: 0.0}.items()]
        >>> MeasuredLoader(reports).best.num_workers, MeasuredLoader(reports, budget_bytes=1 << 28).best.num_workers
        (2, 1)
        >>> print(MeasuredLoader(reports).text)
        2 workers are enough: a batch every 10.0 ms, a step takes 110.0 ms; the trainer waits 1.0 % of its time
    """

    reports: Sequence[LoaderReport]
    budget_bytes: int | None = None

    @property
    def best(self) -> LoaderReport:
        """The fewest workers that fit with which the trainer waits 2 % of its time at most, else the least.

        Without a trainer: the fewest that reach 95 % of the best rate.

        Raises:
            DoesNotFitError: If no count fits the budget.
        """
        limit = self.budget_bytes
        fitting = [one for one in self.reports if limit is None or one.worker_private_bytes <= limit]
        if not fitting:
            least = min(self.reports, key=lambda one: one.worker_private_bytes)
            workers, size = format_count(least.num_workers, "worker"), format_bytes(least.worker_private_bytes)
            raise DoesNotFitError(
                f"{workers} took {size}, the least measured.",
                rule=f"the workers may take {format_bytes(limit or 0)}.",
                remedy="measure 0 workers too, which take nothing beside the trainer",
            )
        rate = max(one.warm.per_second(one.warm.num_samples) for one in fitting)
        shares = {one.num_workers: one.trained.wait_share for one in fitting if one.trained is not None}
        most_wait = max(_MOST_WAIT, min(shares.values(), default=0.0))

        def is_enough(one: LoaderReport) -> bool:
            if shares:
                return shares[one.num_workers] <= most_wait
            return one.warm.per_second(one.warm.num_samples) >= _AS_GOOD * rate

        return min(filter(is_enough, fitting), key=lambda one: one.num_workers)

    @property
    def text(self) -> str:
        """Whether the trainer waits for its loader, in one sentence."""
        best = self.best
        every = f"a batch every {best.warm.wait_seconds / max(best.warm.num_batches, 1) * 1e3:.1f} ms"
        who, pace = format_count(best.num_workers, "worker"), best.trained
        if pace is None:
            rate = best.warm.per_second(best.warm.num_samples)
            return f"{who} are enough for the best rate: {every}, {rate:,.0f} samples/s; no trainer was measured"
        step = f"a step takes {pace.compute_seconds / max(pace.num_batches, 1) * 1e3:.1f} ms"
        waits = f"the trainer waits {pace.wait_share * 100:.1f} % of its time"
        if pace.wait_share <= _MOST_WAIT:
            return f"{who} are enough: {every}, {step}; {waits}"
        return f"the loader is the bottleneck: with {who} {every}, {step}; {waits} ({_MOST_WAIT * 100:g} % at most)"


def measure_loader(
    make_loader: Callable[[int], Iterable[Any]],
    *,
    num_workers: Sequence[int] = (0, 1, 2, 4),
    seconds: float = 3.0,
    consume: Callable[[Any], object] | float | None = None,
    files: Sequence[Path] | None = None,
    budget_bytes: int | None = None,
) -> MeasuredLoader:
    """Measure a loader with each count of workers: cold, warm and beside a trainer.

    Every byte of a batch is read once, so a loader that hands out a view of a map pays for its pages.

    Args:
        make_loader: Makes a new loader for a number of workers: any iterable of batches, such as a PyTorch
            ``DataLoader``. A batch is an array or tensor, or a dict, sequence or dataclass of them.
        num_workers: The counts to measure.
        seconds: The length of each of up to three measurements per count.
        consume: A function that trains on a batch, or the seconds of a step: the batch is read and the rest slept.
        files: The data's files, which are dropped from the page cache for the cold measurement; None for those of the
            loader's panel or packed objects.
        budget_bytes: See `MeasuredLoader`.

    Raises:
        DataError: If the loader gives no batch.
        UsageError: If a count or a time is out of range.

    Example:
        >>> batches = [{"x": np.ones((8, 100), np.float32)}] * 50
        >>> found = measure_loader(lambda num_workers: batches, num_workers=[0], seconds=0.01, consume=0.001)
        >>> report, = found.reports
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
    step = consume if callable(consume) or consume is None else _step_of(float(consume))
    others = _descendants()
    reports = [_measure_one(make_loader, count, seconds, step, files, others) for count in sorted(set(num_workers))]
    return MeasuredLoader(reports, budget_bytes)


def _measure_one(
    make_loader: Callable[[int], Iterable[Any]],
    num_workers: int,
    seconds: float,
    step: Callable[[Any], object] | None,
    files: Sequence[Path] | None,
    others: set[psutil.Process],
) -> LoaderReport:
    loader, cold = make_loader(num_workers), None
    data = files_of(loader) if files is None else list(files)
    if data and hasattr(os, "posix_fadvise"):
        _drop_pages(loader, data)
        pace, _, _ = _pace(loader, None, seconds, others, num_epochs=1)
        cold = pace if pace.num_batches else None
    _close(loader)
    del loader
    gc.collect()
    _read_files(data, seconds)
    began = time.perf_counter()
    loader = make_loader(num_workers)
    made_seconds = time.perf_counter() - began
    warm, first_seconds, private_bytes = _pace(loader, None, seconds, others)
    trained = None if step is None else _pace(loader, step, seconds, others)[0]
    _close(loader)
    return LoaderReport(num_workers, made_seconds + first_seconds, warm, cold, trained, private_bytes)


def _drop_pages(loader: Any, files: Sequence[Path]) -> None:
    """Have the kernel drop files from its page cache; pages that other processes map stay."""
    for data in _mapped(loader):
        for held in (*vars(data).values(), *vars(getattr(data, "_files", None) or object).values()):
            while held is not None and not isinstance(held, mmap.mmap):
                held = held.obj if isinstance(held, memoryview) else getattr(held, "base", None)
            if held is not None:
                held.madvise(mmap.MADV_DONTNEED)
    for path in files:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_files(files: Sequence[Path], most_seconds: float) -> None:
    deadline = time.perf_counter() + most_seconds
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while time.perf_counter() < deadline and file.read(8 << 20):
                pass


def _pace(
    loader: Iterable[Any],
    step: Callable[[Any], object] | None,
    seconds: float,
    others: set[psutil.Process],
    num_epochs: int | None = None,
) -> tuple[Pace, float, int]:
    """Return a measurement, the seconds to its first batch, and the private bytes of the loader's processes."""
    clock, batches = time.perf_counter, _endless(loader, num_epochs)
    waits: list[float] = []
    steps: list[float] = []
    sizes: list[tuple[int, int]] = []
    began = asked = clock()
    for batch in batches:
        if step is None:
            _read(batch)
        waits.append(clock() - asked)
        sizes.append(size_of(batch))
        begun = clock()
        if step is not None:
            step(batch)
        asked = clock()
        steps.append(0.0 if step is None else asked - begun)
        if len(waits) > 1 and asked - began - waits[0] >= seconds:
            break
    private_bytes = _private_bytes_of_new(others)
    batches.close()
    samples, num_bytes = (sum(one[place] for one in sizes[1:]) for place in (0, 1))
    return Pace(len(sizes) - 1, samples, num_bytes, sum(waits[1:]), sum(steps[1:])), waits[0], private_bytes


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
        if isinstance(leaf, np.ndarray):
            if leaf.size and not leaf.dtype.hasobject:
                np.maximum.reduce(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))
        elif getattr(getattr(leaf, "device", None), "type", "") == "cpu":  # a tensor
            leaf.sum()


def files_of(loader: Any) -> list[Path]:
    """Return the files of the panels and packed objects that a loader reads."""
    folders = [path for path in mapped_in(loader) if isinstance(path, Path)]
    return sorted(file for folder in folders for kind in ("*.npy", "*.bin") for file in folder.glob(kind))


def mapped_in(data: Any) -> dict[Any, int]:
    """Return folder and bytes of each panel and packed data set that a loader holds, a few attributes deep."""
    return {one.path: int(one.nbytes) for one in _mapped(data)}


def _mapped(data: Any) -> list[Panel | PackedDataset]:
    found: list[Panel | PackedDataset] = []
    todo = [(data, 0)]
    for one, depth in todo:
        if isinstance(one, Panel | PackedDataset):
            found.append(one)
        elif depth < 4:
            todo += [(value, depth + 1) for value in getattr(one, "__dict__", {}).values()]
    return found


def _close(loader: Any) -> None:
    """End a loader's workers; a PyTorch loader's end with its iterator."""
    if (close := getattr(loader, "close", None)) is not None:
        close()
    elif getattr(loader, "persistent_workers", False):
        loader._iterator = None


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _private_bytes_of_new(others: set[psutil.Process]) -> int:
    """Return the non-reclaimable bytes of this process's descendants without the others."""
    reader, private = ProcReader(), 0
    for process in _descendants() - others:
        if (rollup := reader.rollup(process.pid)) is not None:
            private += rollup.held + rollup.shared_memory
        elif not sys.platform.startswith("linux"):
            with suppress(psutil.Error):  # ended since it was listed
                private += int(process.memory_full_info().uss)
    return private
