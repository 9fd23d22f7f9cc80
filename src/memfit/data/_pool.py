"""Worker processes that make batches ahead, in order and never more than asked for; what happens when one fails."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from types import TracebackType
from typing import Any

import numpy.typing as npt

from memfit.data._deaths import cause_of_death, oom_kills
from memfit.data._launch import Launcher, StartMethod
from memfit.data._slots import Layout, Slot, Slots, can_pin
from memfit.data._worker import Recipe
from memfit.errors import JobFailedError, SilentWorkersError, UsageError
from memfit.watchdog import likely_cause, stacks_of

Array = npt.NDArray[Any]

#: Slots beyond those that are filled ahead: for the batch that is handed over, and for some that the user still holds.
_SPARE = 4
_SLICE_SECONDS = 1.0


@dataclass(eq=False)
class Run:
    """One iteration.

    Attributes:
        recipe: How its batches are made: what `WorkerPool.add` gave.
        layout: Where their parts lie in a slot.
        epoch: The epoch.
        cells_of: What the batch of a number is made of.
        next: The number of the next batch to hand out to a worker.
        stop: The first number that is none of its batches.
        num_ahead: Batches handed out to workers and not yet delivered.
        done: Those of them that are ready, by number.
    """

    recipe: int
    layout: Layout
    epoch: int
    cells_of: Callable[[int], Array]
    next: int
    stop: int
    num_ahead: int = 0
    done: dict[int, tuple[Slot, Array, Exception | None]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Task:
    run: Run
    number: int
    slot: Slot
    cells: Array
    worker: _Worker


@dataclass(eq=False)
class _Worker:
    place: int
    connection: Connection
    recipes: set[int] = field(default_factory=set)
    slots: set[int] = field(default_factory=set)
    num_tasks: int = 0


class WorkerPool:
    """Processes that make batches for one `Loader` or for several, in one thread of the program.

    They start with the first batch that is asked for, without forking this process and without importing its main
    module: forked by a server that has imported numpy and memfit.data and has no threads, or as fresh interpreters.
    What they start with in their environment limits OpenMP, MKL, OpenBLAS, NumExpr, Polars and Rayon to one thread.
    Batches lie in anonymous shared memory, of which nothing is left behind even if everything is killed.

    Args:
        num_workers: Processes, at least 1.
        prefetch: Batches that may be made ahead per worker; never more than ``num_workers * prefetch`` in all.
        start_method: ``forkserver``, or ``spawn``, which takes longer and shares no memory of the interpreter.
        start_timeout: Seconds to wait for a batch before the workers are asked what they are doing, and ended.
        fallback: Then warn and go on in this process instead of raising.
        pin_memory: Page-lock the batches if there is a CUDA device: a copy with ``non_blocking=True`` then does not
            wait. Queue it on the stream that is current when the batch is dropped, as a training does.

    Raises:
        UsageError: If an argument is out of range.
        MissingExtraError: If memory is to be pinned and torch is not installed.

    Example:
        >>> with WorkerPool(2) as pool:  # doctest: +SKIP
        ...     train = Loader(panel, train_dates, lookback=20, target="ret", shuffle=0, pool=pool)
        ...     valid = Loader(panel, valid_dates, lookback=20, target="ret", pool=pool)
    """

    def __init__(
        self,
        num_workers: int,
        *,
        prefetch: int = 2,
        start_method: StartMethod = "forkserver",
        start_timeout: float = 60.0,
        fallback: bool = False,
        pin_memory: bool = False,
    ) -> None:
        if min(num_workers, prefetch) < 1 or start_timeout <= 0 or start_method not in ("forkserver", "spawn"):
            raise UsageError(
                f"a pool cannot have num_workers={num_workers}, prefetch={prefetch}, start_timeout={start_timeout} "
                f"and start_method={start_method!r}.",
                rule="there is at least one worker and one batch ahead, some time to start, and forkserver or spawn.",
                remedy="correct that argument; a Loader without workers has num_workers=0 and no pool",
            )
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        self.num_workers = num_workers
        self.num_ahead = num_workers * prefetch
        self.start_method: StartMethod = start_method
        self.start_timeout = start_timeout
        self.fallback = fallback
        self.pin_memory = pin_memory and can_pin()
        self._recipes: dict[int, bytes] = {}
        self._numbers = itertools.count()
        self._owner = os.getpid()
        self._slots = self._new_slots(0)
        self._reset()

    def _new_slots(self, nbytes: int) -> Slots:
        return Slots(nbytes, shared=True, pinned=self.pin_memory)

    def _reset(self) -> None:
        self._launcher: Launcher | None = None
        self._workers: list[_Worker] = []
        self._tasks: dict[int, _Task] = {}
        self._runs: set[Run] = set()
        self._finalizer: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._arguments,)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; batches that were handed over stay. The next batch that is asked for starts new ones."""
        if self._finalizer is not None and os.getpid() == self._owner:
            self._finalizer()
        self._slots = self._new_slots(self._slots.nbytes)
        self._reset()

    def worker_pids(self) -> list[int]:
        """The processes that make batches now."""
        return [] if self._launcher is None else self._launcher.pids(timeout=self.start_timeout)

    def add(self, recipe: Recipe) -> int:
        """Register how batches are made; the number to ask for them by.

        Raises:
            UsageError: If its transform cannot be sent to workers.
        """
        content = pickled(recipe)
        for number, known in self._recipes.items():
            if known == content:
                return number
        number = next(self._numbers)
        self._recipes[number] = content
        if recipe.layout.nbytes > self._slots.nbytes:  # the slots that are there are too small
            self._slots = self._new_slots(recipe.layout.nbytes)
            for worker in self._workers:
                for slot in worker.slots:
                    self._tell(worker, "drop", slot)
                worker.slots.clear()
        return number

    def open(self, run: Run) -> None:
        """Begin an iteration, or go on with one whose workers were ended; nothing is waited for."""
        self._start()
        run.done.clear()
        run.num_ahead = 0
        self._runs.add(run)
        self._fill(run)

    def cancel(self, run: Run) -> None:
        """End an iteration: what is ahead is dropped as it comes."""
        self._runs.discard(run)
        for slot, _, _ in run.done.values():
            self._slots.put(slot)
        run.done.clear()

    def deliver(self, run: Run, number: int) -> tuple[Array, Array, Array]:
        """Cells, windows and targets of the next batch, in memory that stays as it is while somebody holds them.

        Raises:
            JobFailedError: If a worker ended.
            SilentWorkersError: If no batch came in time.
        """
        if run not in self._runs:
            run.next = number
            self.open(run)
        self._fill(run)
        while number not in run.done:
            self._wait()
        slot, cells, error = run.done.pop(number)
        run.num_ahead -= 1
        if error is not None:
            self._slots.put(slot)
            raise error
        memory = self._hand_over(slot)
        self._fill(run)
        windows, targets, _ = run.layout.parts(memory, len(cells))
        return cells, windows, targets

    def _start(self) -> None:
        if self._launcher is None:
            self._launcher = launcher = Launcher(self.start_method)
            self._workers = [_Worker(place, launcher.start_worker()) for place in range(self.num_workers)]
            connections = [worker.connection for worker in self._workers]
            self._finalizer = weakref.finalize(self, _end, launcher, connections, self._owner)
            self._oom_kills = oom_kills()

    def _most_slots(self) -> int:
        return len(self._runs) * self.num_ahead + _SPARE

    def _fill(self, run: Run) -> None:
        """Hand out tasks until enough are ahead; at least one is, whoever holds the slots."""
        while run.num_ahead < self.num_ahead and run.next < run.stop:
            worker = min(self._workers, key=lambda worker: worker.num_tasks)
            may_make = self._slots.num_made < self._most_slots() or run.num_ahead == 0
            slot = self._slots.take(worker.slots, make=may_make)
            if slot is None:
                return
            try:
                self._send(worker, run, run.next, slot)
            except BaseException:
                self.close()  # half a message may have been sent
                raise
            run.next += 1

    def _send(self, worker: _Worker, run: Run, number: int, slot: Slot) -> None:
        cells = run.cells_of(number)
        run.layout.parts(slot.memory, len(cells))[2][:] = cells
        task = next(self._numbers)
        self._tasks[task] = _Task(run, number, slot, cells, worker)
        run.num_ahead += 1
        worker.num_tasks += 1
        if run.recipe not in worker.recipes:
            self._tell(worker, "recipe", run.recipe, self._recipes[run.recipe])
            worker.recipes.add(run.recipe)
        if slot.number not in worker.slots:
            self._tell(worker, "slot", slot.number, slot.nbytes, descriptor=slot.descriptor)
            worker.slots.add(slot.number)
        self._tell(worker, "batch", task, run.recipe, slot.number, len(cells), (run.epoch, number))

    def _tell(self, worker: _Worker, *message: Any, descriptor: int | None = None) -> None:
        # That a worker has ended is told when its answer is read.
        with contextlib.suppress(ConnectionError):
            worker.connection.send(message)
            if descriptor is not None:
                send_handle(worker.connection, descriptor, 0)

    def _hand_over(self, slot: Slot) -> Array:
        """The slot's memory until the user drops it, or a copy if the user holds so many that work would stop."""
        if self._slots.num_free == 0 and self._slots.num_made >= self._most_slots():
            copy = slot.memory.copy()
            self._slots.put(slot)
            return copy
        return self._slots.lend(slot)

    def _wait(self) -> None:
        """Take in what has come; raise if nothing comes in time, or if a worker has ended."""
        waited = 0.0
        while True:
            began = time.monotonic()
            limit = min(_SLICE_SECONDS, self.start_timeout)
            ready = wait([worker.connection for worker in self._workers], timeout=limit)
            if ready:
                break
            # No more than about a slice is counted, so that time in which everything was stopped is not.
            waited += min(time.monotonic() - began, 2 * limit)
            if waited >= self.start_timeout:
                raise self._explain_silence()
        for worker in self._workers:
            if worker.connection in ready:
                try:
                    number, error = worker.connection.recv()
                except (EOFError, ConnectionError):
                    raise self._explain_death(worker) from None
                except BaseException:
                    self.close()  # half a message may have been read
                    raise
                self._take(self._tasks.pop(number), error)

    def _take(self, task: _Task, error: Exception | None) -> None:
        task.worker.num_tasks -= 1
        if task.run in self._runs:
            task.run.done[task.number] = task.slot, task.cells, error
        else:
            self._slots.put(task.slot)

    def _explain_silence(self) -> SilentWorkersError:
        """Why no batch came, from what the workers are doing; they are ended."""
        assert self._launcher is not None
        pids = self._launcher.pids(timeout=0.0) or [self._launcher.server_pid or 0]
        stacks = stacks_of(pids, self._launcher.folder)
        texts = [f"process {pid}:\n{stack.text.strip()}" for pid, stack in stacks.items() if stack.text]
        workers = f"{self.num_workers} worker{'s' * (self.num_workers > 1)}"
        self.close()
        return SilentWorkersError(
            f"{workers} gave no batch within {self.start_timeout:g} s; {likely_cause(stacks)}"
            + "".join(f"\n{text}" for text in texts[:4]),
            rule=f"start_timeout={self.start_timeout:g}; the workers were ended.",
            remedy="see where they are above; on a slow disk raise start_timeout; num_workers=0 needs no workers, "
            "and WorkerPool(fallback=True) goes on without them",
        )

    def _explain_death(self, worker: _Worker) -> JobFailedError:
        """How a worker ended and over which batch; the others are ended too."""
        assert self._launcher is not None
        pid, status = self._launcher.status_of(worker.place)
        server = self._launcher.server_status() if status is None else None
        tasks = [task for task in self._tasks.values() if task.worker is worker]
        batch = f" while it made batch {tasks[0].number} of epoch {tasks[0].run.epoch}" if tasks else ""
        num_kills = sum(oom_kills().values()) - sum(self._oom_kills.values())
        self.close()
        if server is not None:
            who, status = "the workers' fork server", server
        else:
            who = f"worker {worker.place} of {self.num_workers} (pid {pid if pid is not None else 'unknown'})"
        how, rule, remedy = cause_of_death(status, num_kills)
        return JobFailedError(f"{who} {how}{batch}.", rule=rule, remedy=remedy)


def pickled(recipe: Recipe) -> bytes:
    """A recipe as it is sent to workers.

    Raises:
        UsageError: If the transform cannot be pickled, or lies in a main module, which workers do not import.
    """
    module = getattr(recipe.transform, "__module__", None)
    try:
        content = pickle.dumps(recipe)
    except Exception as error:
        module, reason = "__main__", f"{error}"
    else:
        reason = "it is defined in __main__"
    if module == "__main__":
        raise UsageError(
            f"transform cannot be sent to a worker: {reason}.",
            rule="workers import a transform by its name, and not the script that was started.",
            remedy="define it at the top of a module that can be imported, or use num_workers=0",
        )
    return content


def _rebuild(arguments: dict[str, Any]) -> WorkerPool:
    return WorkerPool(**arguments)


def _end(launcher: Launcher, connections: list[Connection], owner: int) -> None:
    """End the workers, but not from a process that was forked off their owner."""
    if os.getpid() == owner:
        for connection in connections:
            connection.close()
        launcher.end()
