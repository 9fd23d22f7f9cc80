"""Batches of panel windows in a fixed order, made here or ahead by worker processes, with a position to resume at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from memfit.data._auto import WORKER_BYTES, Trial, enough_workers
from memfit.data._batches import DateBatch, DateBatches, WindowBatch, WindowBatches, check_seed
from memfit.data._build import fingerprint_of
from memfit.data._panel import Panel
from memfit.data._pool import Run, WorkerPool, pickled
from memfit.data._position import PositionedLoader
from memfit.data._slots import Slots, can_pin
from memfit.data._worker import Recipe, Transform
from memfit.errors import UsageError
from memfit.memory import Budget

Batch = DateBatch | WindowBatch


class Loader(PositionedLoader[Batch]):
    """Batches of panel windows, each copied once, straight into memory that is used again when the batch is gone.

    What batch k of an epoch holds depends on (panel, arguments, epoch, k) alone, whatever the number of workers. A
    batch that is kept never changes. An iteration is the rest of the present epoch; after its end the next one is the
    same epoch from its start, until ``set_epoch`` names another.

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
        num_workers: Processes that make batches ahead: see `WorkerPool`. 0 makes them here. ``"auto"`` makes the first
            16 here, times them against what is done with them, and then starts the fewest workers that keep it from
            waiting, within the CPUs and the memory budget of this process; none if it waits at most 2 % of its time.
        pin_memory: Page-lock the batches if there is a CUDA device; see `WorkerPool`.
        pool: Workers to share with other loaders, in place of ``num_workers``. Its owner closes it.
        transform: ``transform(windows, targets, generator)`` changes each batch in place, where it is made, and returns
            None. What it draws from the ``numpy.random.Generator`` given, or from the global generators of Python and
            NumPy, depends on (shuffle or 0, epoch, number). With workers it is a function that can be imported.

    Attributes:
        num_skipped: Dates left out: too little history before them, or too few eligible assets.
        largest_batch_bytes: Bytes of the windows of the largest batch.
        num_workers: Processes that make batches; 0 after a fallback, and until ``"auto"`` has found how many.

    Raises:
        DataError: If no date is left, or if an argument is out of range.
        UsageError: If the transform cannot be sent to workers, or if an argument is of another kind.

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

    def __init__(  # noqa: PLR0913 - what, in which batches, made by whom: a call reads as a sentence
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
        num_workers: int | Literal["auto"] = 0,
        pin_memory: bool = False,
        pool: WorkerPool | None = None,
        transform: Transform | None = None,
    ) -> None:
        self._arguments = {
            name: value for name, value in locals().items() if name not in ("self", "panel", "__class__")
        }
        self.panel = panel
        check_seed(shuffle, "shuffle")
        _check_workers(num_workers, pin_memory, pool)
        _check_transform(transform)
        _check_batch(batch, max_assets, drop_last)
        if min_assets is None:
            min_assets = 2 if batch == "date" else 1
        windows: dict[str, Any] = {"lookback": lookback, "target": target, "min_assets": min_assets}
        self._batches: DateBatches | WindowBatches
        if batch == "date":
            self._batches = DateBatches(panel, date_indices, shuffle_seed=shuffle, max_assets=max_assets, **windows)
        else:
            windows["drop_last"] = bool(drop_last)
            self._batches = WindowBatches(panel, date_indices, batch, shuffle_seed=shuffle, **windows)
        fingerprint = _fingerprint_of(panel, {**self._arguments, "min_assets": min_assets})
        super().__init__(fingerprint, owns_pool=pool is None)
        self._recipe = Recipe(panel, self._batches.layout, target, transform, shuffle or 0)
        self._is_pinned = pin_memory and can_pin()
        self._trial: Trial | None = None
        if num_workers == "auto":
            pickled(self._recipe)
            self._trial = Trial()
        elif pool is not None or num_workers:
            self._use(pool or self._new_pool(num_workers))
        self._here = self._new_slots()
        self._reader: Any = None

    def _new_pool(self, num_workers: int) -> WorkerPool:
        return WorkerPool(num_workers, pin_memory=self._is_pinned)

    def _new_slots(self) -> Slots:
        return Slots(self._batches.layout.nbytes, pinned=self._is_pinned, num_kept=2)

    def _use(self, pool: WorkerPool) -> None:
        self._pool, self._number = pool, pool.add(self._recipe)

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

    def _make_next(self) -> Batch:
        trial = self._trial
        if trial is None:
            return self._make(self._position)
        trial.asked()
        batch = self._make(self._position)
        trial.given()
        if trial.is_over:
            self._trial = None
            budget, ahead = Budget.read(), 2 * self._batches.layout.nbytes
            num_workers = enough_workers(
                *trial.seconds,
                num_cpus=budget.num_cpus,
                worker_bytes=WORKER_BYTES + ahead,
                budget_bytes=budget.lendable_bytes,
            )
            if num_workers:
                self._use(self._new_pool(num_workers))
                self._here = self._new_slots()
        return batch

    def _from_pool(self, pool: WorkerPool) -> Batch:
        if self._run is None:
            layout, cells_of = self._batches.layout, self._batches.cells
            self._run = Run(self._number, layout, self._epoch, cells_of, self._position, len(self))
        return self._batches.record(*pool.deliver(self._run, self._position))

    def _make(self, number: int) -> Batch:
        if self._reader is None:
            self._reader = self._recipe.reader()
        slot = self._here.take()
        assert slot is not None
        cells = self._batches.cells(number)
        windows, targets, _ = self._recipe.layout.parts(self._here.lend(slot), len(cells))
        self._recipe.make(self._reader, (windows, targets, cells), (self._epoch, number))
        return self._batches.record(cells, windows, targets)

    def longest(self) -> Batch:
        """A batch of the most windows: what takes most memory in a training. The position stays."""
        return self._make(self._batches.number_of_longest)

    def _stop(self) -> None:
        if self._trial is not None:
            self._trial.paused()
        super()._stop()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.panel, self._arguments, self.state_dict())


def _rebuild(panel: Panel, arguments: dict[str, Any], state: dict[str, Any]) -> Loader:
    loader = Loader(panel, **arguments)
    loader.load_state_dict(state)
    return loader


def _check_batch(batch: Any, max_assets: int | None, drop_last: Any) -> None:
    if not isinstance(drop_last, bool | np.bool_):
        raise UsageError(
            f"a loader cannot have drop_last={drop_last!r}.",
            rule="it is True or False: whether a last batch of fewer windows is left out.",
            remedy="pass drop_last=True or leave it out",
        )
    by_date = isinstance(batch, str) and batch == "date"
    is_size = isinstance(batch, int | np.integer) and not isinstance(batch, bool)
    if not (by_date or is_size) or (by_date and drop_last) or (is_size and max_assets is not None):
        raise UsageError(
            f"a loader cannot have batch={batch!r}, max_assets={max_assets} and drop_last={bool(drop_last)}.",
            rule='batch is "date" or a number of windows; max_assets cuts dates, and drop_last is for a number.',
            remedy="correct one of them; by date, min_assets leaves out dates with few assets",
        )


def _fingerprint_of(panel: Panel, arguments: Mapping[str, Any]) -> str:
    """16 hex digits that stand for all that the order of the batches depends on, which workers do not change."""
    names = ("lookback", "target", "batch", "shuffle", "min_assets", "max_assets")
    values = {name: _plain(arguments[name]) for name in names}
    if arguments["drop_last"]:  # else as it was before there was a choice, so that states from then are taken
        values["drop_last"] = True
    dates = np.asarray(arguments["date_indices"], np.int64).tolist()
    return fingerprint_of({"panel": panel.fingerprint, "dates": dates, **values})[:16]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _check_transform(transform: Any) -> None:
    if transform is not None and not callable(transform):
        raise UsageError(
            f"a loader cannot have transform={transform!r}.",
            rule="it is None or a function that is called as transform(windows, targets, generator).",
            remedy="pass the function itself",
        )


def _check_workers(num_workers: Any, pin_memory: bool, pool: Any) -> None:
    if num_workers == "auto" and pool is None:
        return
    is_count = isinstance(num_workers, int | np.integer) and not isinstance(num_workers, bool) and num_workers >= 0
    is_pool = pool is None or isinstance(pool, WorkerPool)
    if not is_count or not is_pool or (pool is not None and (num_workers or pin_memory)):
        raise UsageError(
            f"a loader cannot have num_workers={num_workers!r}, pin_memory={pin_memory} and pool={pool}.",
            rule="num_workers counts processes from 0; a pool is a WorkerPool, and says how many and whether to pin.",
            remedy="pass num_workers and pin_memory, or pool alone",
        )
