"""Compare three ways to run a loader over a whole training, and choose the simplest one that is good enough."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memfit.data._measure import close_loader, files_of, measure_loader
from memfit.data._pages import cached_share, drop_pages, warm_pages
from memfit.data._verdict import Choice, LoaderReport, ModeReport, choose_num_workers, simplest, too_large
from memfit.errors import DoesNotFitError, UsageError, check_counts


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

    Each is judged over a whole training: its start, a first epoch with the data out of the page cache, later ones from
    the cache if there is room for the data, and from the disk if there is none. Chosen is the first of ``safe``,
    ``preload`` and ``workers`` with which the trainer waits at most 2 % of its time, or else the one with which it
    waits least; without a trainer, the first that reaches 95 % of the best rate.

    Args:
        make_loader: Makes, for a number of workers, a new loader; see `measure_loader`.
        num_workers: The counts to try for ``workers``.
        seconds: How long each measurement goes on.
        consume: What the trainer does with a batch, or the seconds of one of its steps; see `measure_loader`.
        num_epochs: Epochs of the training.
        files: The data's files; None for those of the panel or the packed objects that the loader holds. Without any,
            nothing can be read in before, and the first epoch counts as the later ones.
        budget_bytes: What workers and data may take; None for no limit.

    Raises:
        DataError: If the loader gives no batch.
        UsageError: If an argument is out of range.

    Example:
        >>> import numpy as np
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
    """What reading files into the page cache takes, from as much as is read in some seconds."""
    drop_pages(files)
    before = cached_share(files) or 0.0
    began = time.perf_counter()
    warm_pages(files, most_seconds=most_seconds)
    took, gained = time.perf_counter() - began, (cached_share(files) or 1.0) - before
    return took / gained * (1 - before) if gained > 0 else took


def _judged(name: Literal["safe", "preload", "workers"], report: LoaderReport, training: _Training) -> ModeReport:
    """A mode over a whole training, from its measured paces."""
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
