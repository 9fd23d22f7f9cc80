"""Windows and batches over a panel: one date is one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memfit.data._panel import Array, Panel
from memfit.errors import DataError


def windows(panel: Panel, date_index: int, lookback: int) -> Array:
    """The last ``lookback`` dates of every asset up to a date: a read-only view into the panel, no copy.

    Args:
        panel: The panel.
        date_index: The last date of each window, an index into ``panel.dates``.
        lookback: Dates per window.

    Returns:
        (num_assets, lookback, num_features) in the panel's dtype, dates ascending; NaN where a value is missing.

    Raises:
        DataError: If so many dates do not lie before that date.

    Example:
        >>> import tempfile, pyarrow as pa
        >>> rows = pa.table({"date": ["2024-01-02", "2024-01-03"], "code": ["A", "A"], "close": [1.0, 2.0]})
        >>> panel = Panel.build(rows, tempfile.mkdtemp(), features=["close"])
        >>> windows(panel, 1, 2).tolist()
        [[[1.0], [2.0]]]
    """
    start = date_index + 1 - lookback
    if lookback < 1 or start < 0 or date_index >= panel.shape[0]:
        raise DataError(
            f"a window of {lookback} dates cannot end at date {date_index}.",
            rule=f"the panel has dates 0 to {panel.shape[0] - 1}, and a window lies within them.",
            remedy=f"ask for dates from {max(lookback - 1, 0)} on, or for a shorter look-back",
        )
    view: Array = panel.values[start : date_index + 1].transpose(1, 0, 2)
    return view


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


class DateBatches:
    """Batches of whole dates: every asset with a full finite window, and with a finite target if one is asked for.

    Iterable, and addressable by number, so that it also serves as a map-style data set. What a batch holds depends on
    (panel, arguments, epoch, number) alone, never on who asks or in which order. Pickles as the panel's path and the
    list of dates.

    Args:
        panel: The panel.
        date_indices: The dates to take, indices into ``panel.dates``, each once.
        lookback: Dates per window, the batch's own date included.
        target: The target's name, or None to score without one.
        shuffle_seed: None keeps the dates' order. With a seed, the order, and which assets of a large date go into
            which chunk, are drawn anew for every (seed, epoch).
        min_assets: A date with fewer eligible assets is dropped and counted in ``num_skipped``.
        max_assets: A date with more eligible assets is cut into chunks of nearly equal size, none larger than this.

    Attributes:
        num_skipped: Dates dropped: too little history before them, or too few eligible assets.
        largest_batch_bytes: Bytes of the windows of the largest batch.

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
        self.panel = panel
        self.lookback = lookback
        self.target = target
        self._seed = shuffle_seed
        self._check(date_indices, min_assets, max_assets)
        dates = np.asarray(date_indices, np.int64)
        counts = np.array([np.count_nonzero(self._eligible(date)) for date in dates], np.int64)
        kept = counts >= min_assets
        self.num_skipped = int(np.count_nonzero(~kept))
        if not kept.any():
            raise DataError(
                f"none of {len(dates)} dates has {min_assets} eligible assets; the most is {counts.max(initial=0)}.",
                rule=f"an asset needs {lookback} dates in a row with all features finite"
                + (f", and a finite '{target}'." if target else "."),
                remedy="give more dates, a shorter lookback, or a smaller min_assets",
            )
        num_chunks = np.ones_like(counts[kept]) if max_assets is None else -(-counts[kept] // max_assets)
        self._dates = np.repeat(dates[kept], num_chunks)
        self._num_chunks = np.repeat(num_chunks, num_chunks)
        self._chunks = np.concatenate([np.arange(count) for count in num_chunks])
        self._largest = int(np.argmax(np.repeat(-(-counts[kept] // num_chunks), num_chunks)))
        largest = int(np.max(-(-counts[kept] // num_chunks)))
        self.largest_batch_bytes = largest * lookback * panel.shape[2] * 4
        self.set_epoch(0)

    def _check(self, date_indices: Sequence[int] | Array, min_assets: int, max_assets: int | None) -> None:
        _require(self.lookback >= 1, f"lookback is {self.lookback}", "it is at least 1.")
        _require(min_assets >= 1, f"min_assets is {min_assets}", "it is at least 1.")
        least = 2 * min_assets - 1
        rule = f"it is at least 2 * min_assets - 1 = {least}, so that every chunk has min_assets."
        _require(max_assets is None or max_assets >= least, f"max_assets is {max_assets}", rule)
        _require(self._seed is None or self._seed >= 0, f"shuffle_seed is {self._seed}", "it is None or at least 0.")
        given = np.asarray(date_indices)
        is_list = given.ndim == 1 and (given.size == 0 or np.issubdtype(given.dtype, np.integer))
        _require(is_list, "date_indices are no list of whole numbers", "each is an index into panel.dates.")
        if given.size:
            last = self.panel.shape[0] - 1
            what = f"date_indices go from {given.min()} to {given.max()}"
            _require(given.min() >= 0 and given.max() <= last, what, f"the panel has dates 0 to {last}.")
            _require(len(np.unique(given)) == len(given), "date_indices hold a date twice", "each comes once.")

    def _eligible(self, date: int) -> npt.NDArray[np.bool_]:
        """(num_assets,): a full finite window and, if asked for, a finite target."""
        whole: npt.NDArray[np.bool_] = self.panel.history[date] >= self.lookback
        return whole if self.target is None else whole & np.isfinite(self.panel.target(self.target)[date])

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

    def longest(self) -> DateBatch:
        """A batch of the most assets: what takes most memory in a training."""
        return self[int(np.flatnonzero(self._order == self._largest)[0])]

    def __getitem__(self, number: int) -> DateBatch:
        """The batch with this number in the order of the epoch."""
        place = self._order[range(len(self))[number]]
        date = int(self._dates[place])
        assets = np.flatnonzero(self._eligible(date))
        if self._num_chunks[place] > 1:
            if self._seed is not None:
                assets = self._generator(date).permutation(assets)
            assets = np.sort(np.array_split(assets, self._num_chunks[place])[self._chunks[place]])
        if self.target is None:
            targets = np.full(len(assets), np.nan, np.float32)
        else:
            targets = _to_float32(self.panel.target(self.target)[date][assets], date)
        return DateBatch(date, assets, _gather(self.panel, date, self.lookback, assets), targets)


def _require(holds: bool, what: str, rule: str) -> None:
    if not holds:
        raise DataError(f"{what}.", rule=rule, remedy="correct that argument of DateBatches")


def _gather(panel: Panel, date: int, lookback: int, assets: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """(n, lookback, num_features), copied row by row out of the map in one pass."""
    num_assets, num_features = panel.shape[1:]
    rows = panel.values.reshape(-1, num_features)
    first = (date + 1 - lookback) * num_assets
    places = (first + np.arange(lookback) * num_assets + assets[:, None]).ravel()
    shape = (len(assets), lookback, num_features)
    if rows.dtype != np.float32:
        return _to_float32(rows[places].reshape(shape), date)
    buffer = np.empty(shape, np.float32)
    # mode="clip" lets numpy write into the buffer directly; the places are in range by construction.
    np.take(rows, places, axis=0, out=buffer.reshape(-1, num_features), mode="clip")
    return buffer


def _to_float32(values: Array, date: int) -> npt.NDArray[np.float32]:
    with np.errstate(over="raise"):
        try:
            return values.astype(np.float32)
        except FloatingPointError:
            raise DataError(
                f"date {date} holds a value beyond float32 ({np.abs(values).max():g}).",
                rule=f"batches are float32, up to {np.finfo(np.float32).max:g}.",
                remedy="scale the column before the panel is built",
            ) from None
