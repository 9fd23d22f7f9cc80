"""Make batches of panel windows by number: the assets of one date, or windows of any dates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.data._buffers import aligned
from memfit.data._panel import Array, Panel
from memfit.errors import DataError, check_counts

#: Copied at a time, so that what a copy needs beside the batch stays small: 1 MiB of places. Long pieces, because each
#: one costs the time of some 100 KB copied.
_PIECE_ROWS = 1 << 17
#: Windows of neighbouring assets are copied date by date up to this size: it takes a sixth less time at 2 MiB. Larger
#: ones do not stay in the CPU's caches, and are faster window by window.
_CACHED_BYTES = 1 << 22


@dataclass(frozen=True, eq=False)
class DateBatch:
    """The eligible assets of one date, or a part of them.

    Attributes:
        date_index: The date, an index into ``panel.dates``: the last date of each window.
        asset_indices: (n,) int64, ascending indices into ``panel.assets``.
        windows: (n, lookback, num_features) float32, contiguous, finite, this batch's own memory.
        targets: (n,) float32; all NaN when the batches were asked for no target.
    """

    date_index: int
    asset_indices: npt.NDArray[np.int64]
    windows: npt.NDArray[np.float32]
    targets: npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class WindowBatch:
    """Windows that end at ``panel.dates[date_indices]`` of ``panel.assets[asset_indices]``, both (n,) int64."""

    date_indices: npt.NDArray[np.int64]
    asset_indices: npt.NDArray[np.int64]
    windows: npt.NDArray[np.float32]
    targets: npt.NDArray[np.float32]


class WindowReader:
    """Copies windows and targets of a panel once, from its map into the memory of a batch. A *cell* is a date and an
    asset in one number, ``date * num_assets + asset``: its window ends on this date."""

    def __init__(self, panel: Panel, lookback: int, target: str | None) -> None:
        self.panel = panel
        self.lookback = lookback
        self.num_dates, self.num_assets, self.num_features = panel.shape
        self._rows = panel.values.reshape(-1, self.num_features)
        self._piece = max(1, _PIECE_ROWS // lookback)
        self._steps = np.arange(1 - lookback, 1) * self.num_assets
        self._history = panel.history
        self._targets = None if target is None else panel.target(target)

    def eligible(self, date: int) -> npt.NDArray[np.int64]:
        """Return the assets with a full finite window that ends on a date and, if asked for, a finite target."""
        found = self._history[date] >= self.lookback
        if self._targets is not None:
            found &= np.isfinite(self._targets[date])
        return np.flatnonzero(found)

    def window_bytes(self, size: int) -> int:
        return size * self.lookback * self.num_features * 4

    def nbytes(self, size: int) -> int:
        """Return the bytes that hold so many windows and, behind them, their targets."""
        return aligned(self.window_bytes(size)) + size * 4

    def read(self, cells: npt.NDArray[np.int64], memory: Array) -> tuple[Array, Array]:
        """Fill memory (uint8, at least ``nbytes(n)``) with the windows and targets of n cells; return float32 views."""
        size = self.window_bytes(len(cells))
        rows = memory[:size].view(np.float32).reshape(-1, self.num_features)
        targets = memory[aligned(size) :][: len(cells) * 4].view(np.float32)
        is_run = len(cells) > 0 and bool((np.diff(cells) == 1).all())
        if size <= _CACHED_BYTES and is_run:
            by_step = rows.reshape(len(cells), self.lookback, self.num_features).swapaxes(0, 1)
            for step, first in zip(by_step, (cells[0] + self._steps).tolist(), strict=True):
                step[:] = self._rows[first : first + len(cells)]
        else:
            self._copy_rows(cells, rows)
        if self._targets is None:
            targets.fill(np.nan)
        else:
            targets[:] = self._targets[np.divmod(cells, self.num_assets)]
        return rows.reshape(-1, self.lookback, self.num_features), targets

    def _copy_rows(self, cells: npt.NDArray[np.int64], rows: npt.NDArray[np.float32]) -> None:
        for start in range(0, len(cells), self._piece):
            places = (cells[start : start + self._piece, None] + self._steps).ravel()
            # mode="clip" lets numpy write into the memory directly; the places are in range by construction.
            self._rows.take(places, 0, rows[start * self.lookback :][: len(places)], "clip")


class _Batches:
    """Batches over the dates with enough eligible assets, in an order drawn for each (seed, epoch)."""

    def __init__(
        self, panel: Panel, dates: Any, lookback: int, target: str | None, shuffle_seed: int | None, min_assets: int
    ) -> None:
        check_counts(DataError, 1, lookback=lookback, min_assets=min_assets)
        check_counts(DataError, 0, shuffle_seed=shuffle_seed)
        given = np.asarray(dates)
        is_list = given.ndim == 1 and (given.size == 0 or np.issubdtype(given.dtype, np.integer))
        _require(is_list, "date_indices are no list of whole numbers", "each is an index into panel.dates.")
        if given.size:
            last = panel.shape[0] - 1
            what = f"date_indices go from {given.min()} to {given.max()}"
            _require(given.min() >= 0 and given.max() <= last, what, f"the panel has dates 0 to {last}.")
            _require(len(np.unique(given)) == len(given), "date_indices hold a date twice", "each comes once.")
        self.panel, self.lookback, self.target, self._seed = panel, lookback, target, shuffle_seed
        counts = np.array([len(self.reader.eligible(date)) for date in given], np.int64)
        kept = counts >= min_assets
        if not kept.any():
            raise DataError(
                f"none of {len(counts)} dates has {min_assets} eligible assets; the most is {counts.max(initial=0)}.",
                rule=f"an asset needs {lookback} dates in a row with all features finite"
                + (f", and a finite '{self.target}'." if self.target else "."),
                remedy="give more dates, a shorter lookback, or a smaller min_assets",
            )
        self._kept, self._counts = given[kept].astype(np.int64), counts[kept]
        self.num_skipped = int(np.count_nonzero(~kept))

    @cached_property
    def reader(self) -> WindowReader:
        return WindowReader(self.panel, self.lookback, self.target)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "reader"}


class DateBatches(_Batches):
    """Batches of whole dates: every asset with a full finite window, and with a finite target if one is asked for.

    Iterable, and addressable by number as a map-style data set. A batch depends on (panel, arguments, epoch, number)
    alone. Pickles as the panel's path and the list of dates.

    Args:
        panel, date_indices, lookback, target, min_assets, max_assets: As for `Loader`.
        shuffle_seed: ``shuffle`` of `Loader`.

    Attributes:
        num_skipped, largest_batch_bytes: As for `Loader`.
        max_size: Windows in the largest batch.

    Raises:
        DataError: If no date is left, or if an argument is out of range.

    Example:
        >>> import tempfile, pyarrow as pa
        >>> rows = pa.table({
        ...     "date": ["2024-01-02", "2024-01-02", "2024-01-03", "2024-01-03"], "code": ["A", "B", "A", "B"],
        ...     "close": [1.0, 2.0, 3.0, 4.0], "ret": [0.1, 0.2, 0.3, 0.4],
        ... })
        >>> panel = Panel.build(rows, tempfile.mkdtemp(), features=["close"], targets=["ret"])
        >>> batches = DateBatches(panel, [0, 1], lookback=2, target="ret")
        >>> [(batch.date_index, batch.windows.shape) for batch in batches], batches.num_skipped
        ([(1, (2, 2, 1))], 1)
    """

    def __init__(
        self,
        panel: Panel,
        date_indices: Sequence[int] | npt.NDArray[np.integer],
        *,
        lookback: int,
        target: str | None,
        shuffle_seed: int | None = None,
        min_assets: int = 2,
        max_assets: int | None = None,
    ) -> None:
        super().__init__(panel, date_indices, lookback, target, shuffle_seed, min_assets)
        counts = self._counts
        least = 2 * min_assets - 1
        rule = f"it is at least 2 * min_assets - 1 = {least}, so that every chunk has min_assets."
        _require(max_assets is None or max_assets >= least, f"max_assets is {max_assets}", rule)
        num_chunks = np.ones_like(counts) if max_assets is None else -(-counts // max_assets)
        self._dates = np.repeat(self._kept, num_chunks)
        self._num_chunks = np.repeat(num_chunks, num_chunks)
        self._chunks = np.concatenate([np.arange(count) for count in num_chunks])
        sizes = np.repeat(-(-counts // num_chunks), num_chunks)
        self._largest = int(np.argmax(sizes))
        self.max_size = int(sizes.max())
        self.largest_batch_bytes = self.reader.window_bytes(self.max_size)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of an epoch; without a ``shuffle_seed`` the order stays."""
        self._epoch = epoch
        number = len(self._dates)
        self._order = np.arange(number) if self._seed is None else self._generator().permutation(number)

    def _generator(self, *more: int) -> np.random.Generator:
        assert self._seed is not None
        return np.random.default_rng([self._seed, self._epoch, *more])

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[DateBatch]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> DateBatch:
        """The batch with this number in the order of the epoch."""
        cells = self.cells(range(len(self))[number])
        return self.record(cells, *self.reader.read(cells, np.empty(self.reader.nbytes(len(cells)), np.uint8)))

    def longest(self) -> DateBatch:
        """A batch of the most assets: what takes most memory in a training."""
        return self[self.number_of_longest]

    @property
    def number_of_longest(self) -> int:
        return int(np.flatnonzero(self._order == self._largest)[0])

    def cells(self, number: int) -> npt.NDArray[np.int64]:
        """Return the (n,) cells of a batch."""
        place = self._order[number]
        date = int(self._dates[place])
        assets = self.reader.eligible(date)
        if self._num_chunks[place] > 1:
            if self._seed is not None:
                assets = self._generator(date).permutation(assets)
            assets = np.sort(np.array_split(assets, self._num_chunks[place])[self._chunks[place]])
        return date * self.panel.shape[1] + assets

    def record(self, cells: npt.NDArray[np.int64], windows: Array, targets: Array) -> DateBatch:
        """Return the batch of these cells, which are all of one date."""
        date = int(cells[0]) // self.panel.shape[1]
        return DateBatch(date, cells - date * self.panel.shape[1], windows, targets)


class WindowBatches(_Batches):
    """Batches of ``size`` windows, drawn over all eligible cells of some dates: see `Loader`."""

    number_of_longest = 0

    def __init__(self, *which: Any, size: int, drop_last: bool = False) -> None:
        check_counts(DataError, 1, batch=size)
        super().__init__(*which)
        self._size = size
        self._cells = np.concatenate([date * self.panel.shape[1] + self.reader.eligible(date) for date in self._kept])
        self._num_batches = len(self._cells) // size if drop_last else -(-len(self._cells) // size)
        few = f"batch is {size} with drop_last=True, and {len(self._cells)} windows are eligible"
        _require(self._num_batches > 0, few, "an epoch has at least one batch, and drop_last leaves out smaller ones.")
        self.max_size = min(size, len(self._cells))
        self.largest_batch_bytes = self.reader.window_bytes(self.max_size)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self._order = self._cells
        if self._seed is not None:
            self._order = self._cells.copy()
            np.random.default_rng([self._seed, epoch]).shuffle(self._order)

    def __len__(self) -> int:
        return self._num_batches

    def cells(self, number: int) -> npt.NDArray[np.int64]:
        return self._order[number * self._size : (number + 1) * self._size]

    def record(self, cells: npt.NDArray[np.int64], windows: Array, targets: Array) -> WindowBatch:
        dates, assets = np.divmod(cells, self.panel.shape[1])
        return WindowBatch(dates, assets, windows, targets)


def _require(holds: bool, what: str, rule: str) -> None:
    if not holds:
        raise DataError(f"{what}.", rule=rule, remedy="correct that argument")
