"""Three ways to run a loader, tried under a budget: here, here with the data read into memory before, with workers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memfit.data._loader_footprint import mapped_in
from memfit.data._measure import _close, _files_of, measure_loader
from memfit.data._pages import cached_share, drop_pages, warm_pages
from memfit.data._verdict import _AS_GOOD, MOST_WAIT_SHARE, LoaderReport, choose_num_workers
from memfit.errors import DoesNotFitError, UsageError
from memfit.units import format_bytes

Name = Literal["safe", "preload", "workers"]


@dataclass(frozen=True)
class ModeReport:
    """One way to run a loader, over a training of some epochs.

    Attributes:
        name: ``safe``: batches are made in the training's process. ``preload``: so too, and all data are read into the
            page cache before the first, once for all processes. ``workers``: by processes that live on.
        num_workers: How many; 0 for the others.
        start_seconds: To the first batch, the reading of the data included.
        samples_per_second: Over the whole training.
        wait_share: The share of it that the trainer waits for data, 0 to 1; 1 where no trainer was measured.
        private_bytes: What the workers hold for themselves.
        data_bytes: What has to stay in the page cache.
        refused: Why it cannot be chosen, with the arithmetic; empty if it can.
    """

    name: Name
    num_workers: int
    start_seconds: float
    samples_per_second: float
    wait_share: float
    private_bytes: int
    data_bytes: int
    refused: str = ""


@dataclass(frozen=True)
class ModeChoice:
    """The mode to take, what was measured of all, and the table with the reasons."""

    name: Name
    num_workers: int
    modes: tuple[ModeReport, ...]
    text: str


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
) -> ModeChoice:
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
    if num_epochs < 1 or any(count < 1 for count in num_workers):
        raise UsageError(
            f"modes cannot be compared over {num_epochs} epochs with workers {list(num_workers)}.",
            rule="a training has an epoch at least; the mode with workers has one at least.",
            remedy="leave num_epochs and num_workers out for 10 and (1, 2, 4)",
        )
    loader: Any = make_loader(0)
    data = files_of(loader) if files is None else list(files)
    number = len(loader) if hasattr(loader, "__len__") else 1
    _close(loader)
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
    return _choice(modes, has_trainer=consume is not None, limit=limit)


def files_of(loader: Any) -> list[Path]:
    """The files of the panel or packed objects that a loader reads."""
    folders = [path for path in mapped_in(loader) if isinstance(path, Path)]
    packed = [file for folder in folders for file in folder.glob("*.bin")]
    return sorted({*_files_of(loader), *packed, *(file for folder in folders for file in folder.glob("*.npy"))})


def _read_seconds(files: Sequence[Path], most_seconds: float) -> float:
    """What reading files into the page cache takes, from as much as is read in some seconds."""
    drop_pages(files)
    before = cached_share(files) or 0.0
    began = time.perf_counter()
    warm_pages(files, most_seconds=most_seconds)
    took, gained = time.perf_counter() - began, (cached_share(files) or 1.0) - before
    return took / gained * (1 - before) if gained > 0 else took


def _judged(name: Name, report: LoaderReport, training: _Training) -> ModeReport:
    """A mode over a whole training, from its measured paces."""
    pace = report.trained or report.warm
    warm, computed = pace.wait_seconds / pace.num_batches, pace.compute_seconds / pace.num_batches
    cold = warm
    if report.cold is not None:
        every = report.cold.wait_seconds / report.cold.num_batches  # workers make it while the trainer computes
        cold = max(warm, every - computed if report.num_workers else every)
    is_read = name == "preload"
    need = report.worker_private_bytes + training.data_bytes
    fits = need <= training.budget_bytes
    first, later = warm if is_read else cold, warm if is_read or fits else cold
    start = report.start_seconds + (training.read_seconds if is_read else 0.0)
    waited = start + training.num_batches * (first + (training.num_epochs - 1) * later)
    all_batches = training.num_batches * training.num_epochs
    total = waited + all_batches * computed
    refused = ""
    if is_read and not training.data_bytes:
        refused = "no files are known to read in"
    elif is_read and not fits:
        refused = f"{format_bytes(training.data_bytes)} of data, more than the {_size(training.budget_bytes)}"
    elif report.worker_private_bytes > training.budget_bytes:
        refused = (
            f"{format_bytes(report.worker_private_bytes)} of workers, more than the {_size(training.budget_bytes)}"
        )
    return ModeReport(
        name=name,
        num_workers=report.num_workers,
        start_seconds=start,
        samples_per_second=all_batches * pace.num_samples / pace.num_batches / total,
        wait_share=waited / total,
        private_bytes=report.worker_private_bytes,
        data_bytes=training.data_bytes if is_read else 0,
        refused=refused,
    )


def _size(nbytes: float) -> str:
    return f"{format_bytes(int(nbytes))} that are left"


def _choice(modes: Sequence[ModeReport], *, has_trainer: bool, limit: float) -> ModeChoice:
    fitting = [mode for mode in modes if not mode.refused]
    best = max(mode.samples_per_second for mode in fitting)
    if has_trainer:
        enough = [mode for mode in fitting if mode.wait_share <= MOST_WAIT_SHARE]
        most = f"{MOST_WAIT_SHARE * 100:g} %"
        why = f"the simplest with which the trainer waits at most {most}"
        if not enough:
            enough = [min(fitting, key=lambda mode: mode.wait_share)]
            why = f"with which it waits least; none that fits keeps it below {most}"
    else:
        enough = [mode for mode in fitting if mode.samples_per_second >= _AS_GOOD * best]
        why = f"the simplest that reaches {_AS_GOOD:.0%} of the best rate (no trainer was measured)"
    chosen = enough[0]
    lines = [f"{_label(chosen)}, {why}"]
    for mode in modes:
        told = f"{mode.samples_per_second:,.0f} samples/s"
        told += f", waits {mode.wait_share * 100:.1f} %" if has_trainer else ""
        told += f", starts in {mode.start_seconds:.2f} s, {format_bytes(mode.private_bytes)} private"
        told += f", {format_bytes(mode.data_bytes)} of data in memory" if mode.data_bytes else ""
        lines.append(f"  {_label(mode)}: {told}{f'; refused: {mode.refused}' if mode.refused else ''}")
    return ModeChoice(chosen.name, chosen.num_workers, tuple(modes), "\n".join(lines))


def _label(mode: ModeReport) -> str:
    return f"workers ({mode.num_workers})" if mode.name == "workers" else mode.name
