"""A loader's position in its epoch: how it moves, how it is saved, and that one iteration at a time has it."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from memfit.data._pool import Run, WorkerPool
from memfit.errors import SilentWorkersError, UsageError

BatchT = TypeVar("BatchT")


class PositionedLoader(ABC, Generic[BatchT]):
    """What all loaders share: an epoch, a position in it, and batches that are made here or by a pool's workers.

    Args:
        fingerprint: 16 hex digits that stand for all that the order of the batches depends on.
        owns_pool: Whether ``close`` ends the workers.
    """

    #: What a fingerprint stands for, in words.
    _order_of: ClassVar[str]

    def __init__(self, fingerprint: str, *, owns_pool: bool) -> None:
        self._fingerprint = fingerprint
        self._owns_pool = owns_pool
        self._pool: WorkerPool | None = None
        self._epoch = self._position = 0
        self._is_exhausted = False
        self._run: Run | None = None
        self._turn: object = None

    @abstractmethod
    def __len__(self) -> int:
        """Batches in an epoch."""

    @abstractmethod
    def _draw(self, epoch: int) -> None:
        """Draw the order of an epoch."""

    @abstractmethod
    def _make_next(self) -> BatchT:
        """Make the batch at the position in this process."""

    @abstractmethod
    def _from_pool(self, pool: WorkerPool) -> BatchT:
        """Take the batch at the position from the workers."""

    @property
    def num_workers(self) -> int:
        return 0 if self._pool is None else self._pool.num_workers

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, the present one or another; an iteration that is under way ends."""
        self._stop()
        if epoch != self._epoch:
            self._draw(epoch)
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
                rule=f"a loader resumes with the {self._order_of} that it was saved with.",
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

    def __iter__(self) -> Iterator[BatchT]:
        self._stop()
        if self._is_exhausted:
            self._position, self._is_exhausted = 0, False
        self._turn = turn = object()
        return self._iterate(turn)

    def _iterate(self, turn: object) -> Iterator[BatchT]:
        try:
            while self._position < len(self):
                self._check_turn(turn)
                yield self._deliver()  # nothing here holds the batch, so its memory is free when the user drops it
            self._check_turn(turn)
            self._is_exhausted = True
        finally:
            if turn is self._turn:
                self._stop()

    def _check_turn(self, turn: object) -> None:
        if turn is not self._turn:
            raise UsageError(
                "an iteration goes on that was ended.",
                rule="a loader has one position: a new iteration, set_epoch, load_state_dict and close end the others.",
                remedy="make one loader for each of several iterations at a time; they can share a pool",
            )

    def _deliver(self) -> BatchT:
        if self._pool is None:
            batch = self._make_next()
        else:
            try:
                batch = self._from_pool(self._pool)
            except SilentWorkersError as error:
                if not self._pool.fallback:
                    raise
                self._pool = self._run = None
                warnings.warn(f"{error}\n  the loader goes on without workers", RuntimeWarning, stacklevel=4)
                batch = self._make_next()
        self._position += 1
        return batch

    def worker_pids(self) -> list[int]:
        """The processes that make batches now."""
        return [] if self._pool is None else self._pool.worker_pids()

    def _stop(self) -> None:
        self._turn = None
        if self._run is not None and self._pool is not None:
            self._pool.cancel(self._run)
        self._run = None

    def close(self) -> None:
        """End the iteration, and the workers unless the pool is shared. Iterating again starts new ones."""
        self._stop()
        if self._owns_pool and self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
