"""Iterate over an epoch from a position that can be saved, with batches that threads make ahead."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, Generic, Self, TypeVar

from memfit.errors import UsageError

BatchT = TypeVar("BatchT")

#: A batch is made ahead if none of the last few was made faster: to hand one from thread to thread takes 0.1 to 0.2 ms
#: of work on a busy machine, which must be little beside it. docs/loading.md says why no measurement takes its place.
_LEAST_SECONDS = 2e-3
_NUM_RECENT = 8


class PositionedLoader(ABC, Generic[BatchT]):
    """Batches by number, delivered in order from a position. ``fingerprint``: 16 hex digits that stand for all that the
    order depends on. ``num_workers`` threads make one batch ahead each."""

    #: What a fingerprint stands for, in words.
    _order_of: ClassVar[str]

    def __init__(self, fingerprint: str, num_workers: int) -> None:
        self.num_workers = int(num_workers)
        self._fingerprint = fingerprint
        self._epoch = self._position = 0
        self._is_exhausted = False
        self._turn: object = None
        self._made: Generator[BatchT, None, None] | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Batches in an epoch."""

    @abstractmethod
    def _draw(self, epoch: int) -> None:
        """Draw the order of an epoch."""

    @abstractmethod
    def _task(self, number: int) -> Callable[[], BatchT]:
        """Return what makes a batch of this epoch. Any thread may call it."""

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, the present one or another; an iteration that is under way ends."""
        self.close()
        if epoch != self._epoch:
            self._draw(epoch)
        self._epoch, self._position, self._is_exhausted = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return ``epoch``, ``position`` (how many of its batches were delivered) and ``fingerprint``."""
        return {"epoch": int(self._epoch), "position": self._position, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another loader with the same order stood; ``num_workers`` may differ."""
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
        self.close()
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
                self.close()

    def _check_turn(self, turn: object) -> None:
        if turn is not self._turn:
            raise UsageError(
                "an iteration goes on that was ended.",
                rule="a loader has one position: a new iteration, set_epoch, load_state_dict and close end the others.",
                remedy="make one loader for each of several iterations at a time",
            )

    def _deliver(self) -> BatchT:
        if self._made is None:
            self._made = made_ahead(self._task, self._position, len(self), self.num_workers)
        batch = next(self._made)
        self._position += 1
        return batch

    def close(self) -> None:
        """End the iteration and its threads. The next one goes on at the position."""
        self._turn = None
        made, self._made = self._made, None
        if made is not None:
            made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def made_ahead(
    task_of: Callable[[int], Callable[[], BatchT]], start: int, stop: int, num_threads: int
) -> Generator[BatchT, None, None]:
    """Yield the results of numbered tasks in order, or a task's error; each thread makes one ahead. The calling thread
    makes the first one, and all while one of the last few took less than `_LEAST_SECONDS`. When the generator is
    closed, each thread ends with the task that it has begun."""
    if num_threads == 0:
        yield from (task_of(number)() for number in range(start, stop))
        return
    recent = deque[float](maxlen=_NUM_RECENT)

    def timed(task: Callable[[], BatchT]) -> BatchT:
        began = time.perf_counter()
        result = task()
        recent.append(time.perf_counter() - began)
        return result

    pool, ahead, ready = ThreadPoolExecutor(num_threads, "memfit-loader"), deque[Future[BatchT]](), deque[BatchT]()
    try:
        while start < stop or ahead:
            if ahead:
                ready.append(ahead.popleft().result())
            else:
                ready.append(timed(task_of(start)))
                start += 1
            while start < stop and len(ahead) < num_threads and min(recent) >= _LEAST_SECONDS:
                ahead.append(pool.submit(timed, task_of(start)))
                start += 1
            yield ready.pop()  # nothing here holds it then
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
