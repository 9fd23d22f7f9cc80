"""Batches of panel windows in a fixed order, with a position to resume at."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from memfit.data._batches import DateBatch, DateBatches, WindowBatch, WindowBatches
from memfit.data._buffers import Buffers, can_pin
from memfit.data._build import fingerprint_of
from memfit.data._panel import Array, Panel
from memfit.data._position import PositionedLoader
from memfit.errors import DataError, UsageError, check_counts

Batch = DateBatch | WindowBatch
#: Changes windows (n, lookback, num_features) and targets (n,) in place, drawing from the generator that it is given.
Transform = Callable[[Any, Any, np.random.Generator], None]


class Loader(PositionedLoader[Batch]):
    """Batches of panel windows, each copied once, straight into memory that is used again when the batch is gone.

    Batch k of an epoch depends on (panel, arguments, epoch, k) alone, and never changes while it is kept. An iteration
    is the rest of the present epoch; the next one repeats that epoch until ``set_epoch`` names another.

    Args:
        panel: The panel.
        date_indices: The dates to take, indices into ``panel.dates``, each once.
        lookback: Dates per window, the window's own date included.
        target: The target's name, or None to score without one.
        batch: ``"date"`` for one date's eligible assets (`DateBatch`), or a number of windows drawn over all of them
            (`WindowBatch`; the last one holds what is left). Eligible are full finite windows with a finite target.
        shuffle: None keeps the dates' order; a seed, a whole number, draws one for each (seed, epoch).
        min_assets: A date with fewer eligible assets is left out; None for 2 by date, and 1 otherwise.
        max_assets: By date only: a date with more is cut into chunks of nearly equal size, none larger than this.
        drop_last: By number only: leave out the last batch if it has fewer windows. With ``shuffle`` each epoch leaves
            out others; without, the same ones always.
        num_workers: Threads that make batches ahead, each one batch. 0 makes a batch when it is asked for.
        pin_memory: Page-lock the batches if there is a CUDA device, for copies with ``non_blocking=True``. Queue them
            on the stream that is current when the next batch is asked for.
        transform: ``transform(windows, targets, generator)`` changes each batch in place and returns None. The
            ``numpy.random.Generator`` is that of (shuffle or 0, epoch, number). Several threads may call it at once.

    Attributes:
        num_skipped: Dates left out: too little history before them, or too few eligible assets.
        largest_batch_bytes: Bytes of the windows of the largest batch.
        num_workers: Threads that make batches ahead.

    Raises:
        DataError: If no date is left, or if an argument is out of range.
        UsageError: If an argument is of another kind.

    Example:
        >>> import tempfile, pyarrow as pa
        >>> rows = pa.table({
        ...     "date": ["2024-01-02", "2024-01-02", "2024-01-03", "2024-01-03"], "code": ["A", "B", "A", "B"],
        ...     "close": [1.0, 2.0, 3.0, 4.0], "ret": [0.1, 0.2, 0.3, 0.4],
        ... })
        >>> panel = Panel.build(rows, tempfile.mkdtemp(), features=["close"], targets=["ret"])
        >>> loader = Loader(panel, [0, 1], lookback=1, target="ret")
        >>> for batch in loader:
        ...     print(batch.date_index, batch.windows.ravel(), loader.state_dict()["position"])
        0 [1. 2.] 1
        1 [3. 4.] 2
        >>> [batch.windows.shape for batch in Loader(panel, [0, 1], lookback=1, target="ret", batch=3, shuffle=7)]
        [(3, 1, 1), (1, 1, 1)]
    """

    _order_of = "panel, dates, lookback, target, batch, shuffle, min_assets, max_assets and drop_last"

    def __init__(  # noqa: PLR0913 - what, in which batches, made how: a call reads as a sentence
        self,
        panel: Panel,
        date_indices: Sequence[int] | npt.NDArray[np.integer],
        *,
        lookback: int,
        target: str | None,
        batch: Literal["date"] | int = "date",
        shuffle: int | None = None,
        min_assets: int | None = None,
        max_assets: int | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = False,
        transform: Transform | None = None,
    ) -> None:
        self._arguments = {
            name: value for name, value in locals().items() if name not in ("self", "panel", "__class__")
        }
        check_counts(UsageError, 0, num_workers=num_workers)
        self.panel = panel
        check_counts(DataError, 0, shuffle=shuffle)
        _check_batch(batch, max_assets, drop_last)
        if min_assets is None:
            min_assets = 2 if batch == "date" else 1
        which = {"lookback": lookback, "target": target, "shuffle_seed": shuffle, "min_assets": min_assets}
        self._batches: DateBatches | WindowBatches
        if batch == "date":
            self._batches = DateBatches(panel, date_indices, **which, max_assets=max_assets)  # type: ignore[arg-type]
        else:
            self._batches = WindowBatches(panel, date_indices, *which.values(), size=batch, drop_last=bool(drop_last))
        super().__init__(_fingerprint_of(panel, {**self._arguments, "min_assets": min_assets}), num_workers)
        self._transform, self._seed, self._is_checked = transform, shuffle or 0, False
        is_pinned = pin_memory and can_pin()
        # The threads' batches, the one in use, and the one that takes its place; a device may still read some more.
        most = self.num_workers + 2 + 4 * is_pinned
        self._buffers = Buffers(self._batches.reader.nbytes(self._batches.max_size), most=most, pinned=is_pinned)

    @property
    def num_skipped(self) -> int:
        return self._batches.num_skipped

    @property
    def largest_batch_bytes(self) -> int:
        return self._batches.largest_batch_bytes

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._batches)

    def _draw(self, epoch: int) -> None:
        self._batches.set_epoch(epoch)

    def _task(self, number: int) -> Callable[[], Batch]:
        cells, memory = self._batches.cells(number), self._buffers.take()
        return functools.partial(self._make, cells, memory, (self._epoch, number))

    def _make(self, cells: npt.NDArray[np.int64], memory: Array, key: tuple[int, int]) -> Batch:
        windows, targets = self._batches.reader.read(cells, memory)
        if self._transform is not None:
            generator = np.random.default_rng((self._seed, *key))
            # The first batch is made in the calling thread, before there are others.
            before = None if self._is_checked else _global_states()
            self._is_checked = True
            result: object = self._transform(windows, targets, generator)
            if result is not None:
                raise UsageError(
                    f"transform returned {type(result).__name__} for batch {key[1]} of epoch {key[0]}.",
                    rule="a transform changes windows and targets in place and returns None; nothing else is taken.",
                    remedy="write into them, as in windows[:] = ..., and return nothing",
                )
            if before and before != _global_states():
                warnings.warn(
                    "transform draws from the random generators of Python or NumPy that all code shares, so a resume "
                    "gives other batches. Draw from the generator that it is given.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return self._batches.record(cells, windows, targets)

    def longest(self) -> Batch:
        """A batch of the most windows: what takes most memory in a training. The position stays."""
        return self._task(self._batches.number_of_longest)()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.panel, self._arguments, self.state_dict())


def _global_states() -> tuple[Any, ...]:
    kind, keys, *more = np.random.get_state()
    return random.getstate(), kind, np.asarray(keys).tobytes(), *more


def _rebuild(panel: Panel, arguments: dict[str, Any], state: dict[str, Any]) -> Loader:
    loader = Loader(panel, **arguments)
    loader.load_state_dict(state)
    return loader


def _check_batch(batch: Any, max_assets: int | None, drop_last: Any) -> None:
    by_date = isinstance(batch, str) and batch == "date"
    is_size = isinstance(batch, int | np.integer) and not isinstance(batch, bool)
    if not (by_date or is_size) or (by_date and drop_last) or (is_size and max_assets is not None):
        raise UsageError(
            f"a loader cannot have batch={batch!r}, max_assets={max_assets} and drop_last={bool(drop_last)}.",
            rule='batch is "date" or a number of windows; max_assets cuts dates, and drop_last is for a number.',
            remedy="correct one of them; by date, min_assets leaves out dates with few assets",
        )


def _fingerprint_of(panel: Panel, arguments: Mapping[str, Any]) -> str:
    """Return 16 hex digits that stand for all that the order of the batches depends on."""
    names = ("lookback", "target", "batch", "shuffle", "min_assets", "max_assets")
    values = {name: arguments[name] for name in names}
    values = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
    if arguments["drop_last"]:  # else as it was before there was a choice, so that states from then are taken
        values["drop_last"] = True
    dates = np.asarray(arguments["date_indices"], np.int64).tolist()
    return fingerprint_of({"panel": panel.fingerprint, "dates": dates, **values})[:16]
