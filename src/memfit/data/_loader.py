"""Batches of panel windows in a fixed order, made here or ahead by worker processes, with a position to resume at."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from memfit.data._auto import WORKER_BYTES, Trial, enough_workers
from memfit.data._batches import DateBatch, DateBatches, WindowBatch, WindowBatches, check_seed
from memfit.data._build import fingerprint_of
from memfit.data._panel import Array, Panel
from memfit.data._pool import Run, WorkerPool, pickled
from memfit.data._slots import Slots, can_pin
from memfit.data._worker import Recipe, Transform
from memfit.errors import SilentWorkersError, UsageError
from memfit.memory import Budget

Batch = DateBatch | WindowBatch


class Loader:
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
        self._arguments = {name: value for name, value in locals().items() if name not in ("self", "panel")}
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
        self._fingerprint = _fingerprint_of(panel, {**self._arguments, "min_assets": min_assets})
        self._recipe = Recipe(panel, self._batches.layout, target, transform, shuffle or 0)
        self._is_pinned = pin_memory and can_pin()
        self._owns_pool = pool is None
        self._pool: WorkerPool | None = None
        self._trial: Trial | None = None
        if num_workers == "auto":
            pickled(self._recipe)
            self._trial = Trial()
        elif pool is not None or num_workers:
            self._use(pool or self._new_pool(num_workers))
        self._here = self._new_slots()
        self._reader: Any = None
        self._epoch = self._position = 0
        self._is_exhausted = False
        self._run: Run | None = None
        self._turn: object = None

    def _new_pool(self, num_workers: int) -> WorkerPool:
        return WorkerPool(num_workers, pin_memory=self._is_pinned)

    def _new_slots(self) -> Slots:
        return Slots(self._batches.layout.nbytes, pinned=self._is_pinned, num_kept=2)

    def _use(self, pool: WorkerPool) -> None:
        self._pool, self._number = pool, pool.add(self._recipe)

    @property
    def num_workers(self) -> int:
        return 0 if self._pool is None else self._pool.num_workers

    @property
    def num_skipped(self) -> int:
        return self._batches.num_skipped

    @property
    def largest_batch_bytes(self) -> int:
        return self._batches.largest_batch_bytes

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._batches)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; an iteration that is under way ends."""
        self._stop()
        if epoch != self._epoch:
            self._batches.set_epoch(epoch)
        self._epoch, self._position, self._is_exhausted = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as plain values.

        Returns:
            ``epoch``, ``position`` (how many of its batches were delivered) and ``fingerprint``: 16 hex digits that
            stand for all that the order of the batches depends on.
        """
        return {"epoch": int(self._epoch), "position": self._position, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another loader with the same arguments stood; the number of workers may differ.

        Raises:
            UsageError: If it is no state, or that of a loader with another order.
        """
        fingerprint = state.get("fingerprint") if isinstance(state, Mapping) else None
        if isinstance(fingerprint, str) and fingerprint != self._fingerprint:
            raise UsageError(
                f"the saved state is of another loader: its fingerprint is {fingerprint}, not {self._fingerprint}.",
                rule="a loader resumes with the panel, dates, lookback, target, batch, shuffle, min_assets, max_assets "
                "and drop_last that it was saved with.",
                remedy="build it with the arguments that it had, or start from the beginning without the state",
            )
        is_state = fingerprint == self._fingerprint and all(
            type(state.get(name)) is int and state[name] >= 0 for name in ("epoch", "position")
        )
        if not is_state or state["position"] > len(self):
            raise UsageError(
                f"{state!r:.200} is no state of this loader.",
                rule=f"a state is what state_dict() gave: epoch from 0, position from 0 to {len(self)}, fingerprint.",
                remedy="pass what state_dict() of a loader with the same arguments gave",
            )
        self.set_epoch(state["epoch"])
        self._position = state["position"]

    def __iter__(self) -> Iterator[Batch]:
        self._stop()
        if self._is_exhausted:
            self._position, self._is_exhausted = 0, False
        self._turn = turn = object()
        return self._iterate(turn)

    def _iterate(self, turn: object) -> Iterator[Batch]:
        try:
            while self._position < len(self):
                self._check(turn)
                # Nothing here holds the batch, so its memory is free when the user drops it.
                yield self._batches.record(*self._deliver())
            self._check(turn)
            self._is_exhausted = True
        finally:
            if turn is self._turn:
                self._stop()

    def _check(self, turn: object) -> None:
        if turn is not self._turn:
            raise UsageError(
                "an iteration goes on that was ended.",
                rule="a loader has one position: a new iteration, set_epoch, load_state_dict and close end the others.",
                remedy="make one loader for each of several iterations at a time; they can share a pool",
            )

    def _deliver(self) -> tuple[Array, Array, Array]:
        """Cells, windows and targets of the next batch."""
        if self._trial is not None:
            parts = self._try(self._trial)
        elif self._pool is not None:
            try:
                parts = self._from_pool(self._pool)
            except SilentWorkersError as error:
                if not self._pool.fallback:
                    raise
                self._pool = self._run = None
                warnings.warn(f"{error}\n  the loader goes on without workers", RuntimeWarning, stacklevel=4)
                parts = self._make(self._position)
        else:
            parts = self._make(self._position)
        self._position += 1
        return parts

    def _try(self, trial: Trial) -> tuple[Array, Array, Array]:
        trial.asked()
        parts = self._make(self._position)
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
        return parts

    def _from_pool(self, pool: WorkerPool) -> tuple[Array, Array, Array]:
        if self._run is None:
            layout, cells_of = self._batches.layout, self._batches.cells
            self._run = Run(self._number, layout, self._epoch, cells_of, self._position, len(self))
        return pool.deliver(self._run, self._position)

    def _make(self, number: int) -> tuple[Array, Array, Array]:
        if self._reader is None:
            self._reader = self._recipe.reader()
        slot = self._here.take()
        assert slot is not None
        cells = self._batches.cells(number)
        windows, targets, _ = self._recipe.layout.parts(self._here.lend(slot), len(cells))
        self._recipe.make(self._reader, (windows, targets, cells), (self._epoch, number))
        return cells, windows, targets

    def longest(self) -> Batch:
        """A batch of the most windows: what takes most memory in a training. The position stays."""
        return self._batches.record(*self._make(self._batches.number_of_longest))

    def worker_pids(self) -> list[int]:
        """The processes that make batches now."""
        return [] if self._pool is None else self._pool.worker_pids()

    def _stop(self) -> None:
        self._turn = None
        if self._trial is not None:
            self._trial.paused()
        if self._run is not None and self._pool is not None:
            self._pool.cancel(self._run)
        self._run = None

    def close(self) -> None:
        """End the iteration, and the workers unless the pool is shared. Iterating again starts new ones."""
        self._stop()
        if self._owns_pool and self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Loader:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.panel, self._arguments, self.state_dict())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
