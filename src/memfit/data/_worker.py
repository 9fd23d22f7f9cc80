"""What a loader's processes do: the fork server forks workers, a worker fills slots with batches.

Neither has a thread of its own, so forking is safe. Everything ends with the process that started it: a closed
connection is the sign. A worker never answers Ctrl-C or what asks a job to stop; those are blocked before it starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import pickle
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import numpy as np

from memfit.data._gather import WindowReader
from memfit.data._panel import Panel
from memfit.data._slots import Layout
from memfit.errors import JobFailedError, MemfitError, UsageError
from memfit.watchdog import register_stack_dump

#: Changes windows (n, lookback, num_features) and targets (n,) in place, drawing from the generator that it is given.
Transform = Callable[[Any, Any, np.random.Generator], None]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_REAP_SECONDS = 2.0


@dataclass(frozen=True)
class Recipe:
    """How batches are made from cells, in whatever process.

    Attributes:
        panel: Pickled as its path.
        layout: Where the parts of a batch lie in a slot.
        target: The target's name, or None.
        transform: What is done to each batch, or None.
        seed: Of what the transform draws.
    """

    panel: Panel
    layout: Layout
    target: str | None
    transform: Transform | None
    seed: int

    def reader(self) -> WindowReader:
        return WindowReader(self.panel, self.layout.lookback, self.target)

    def make(self, reader: WindowReader, parts: tuple[Any, Any, Any], key: tuple[int, int]) -> None:
        """Fill the windows and targets of the cells in ``parts``; ``key`` is (epoch, number)."""
        windows, targets, cells = parts
        reader.read(cells, windows, targets)
        if self.transform is not None:
            with _seeded(self.seed, *key) as generator:
                result: object = self.transform(windows, targets, generator)
            if result is not None:
                raise UsageError(
                    f"transform returned {type(result).__name__} for batch {key[1]} of epoch {key[0]}.",
                    rule="a transform changes windows and targets in place and returns None; nothing else is taken.",
                    remedy="write into them, as in windows[:] = ..., and return nothing",
                )


@contextmanager
def _seeded(*key: int) -> Iterator[np.random.Generator]:
    """A generator of this key; inside, Python's and NumPy's own draw from streams of it too and go on afterwards."""
    generator = np.random.default_rng(key)
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(int(generator.integers(1 << 62)))
    np.random.seed(int(generator.integers(1 << 32)))
    try:
        yield generator
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def serve(descriptor: int, folder: str) -> None:
    """Fork a worker for each connection that comes, and tell how it ended, until the other side is gone."""
    control = Connection(descriptor)
    workers: set[int] = set()
    own_pid = os.getpid()
    gc.collect()
    gc.freeze()  # what was imported is not written to by the workers' collectors, so it stays shared
    with contextlib.suppress(EOFError, OSError):
        while True:
            request, pid = control.recv()
            if request == "end":
                control.send(_status_of(pid))
                workers.discard(pid)
                continue
            connection = recv_handle(control)
            pid = os.fork()
            if pid == 0:
                control.close()
                _run_forked(connection, folder, own_pid)
            os.close(connection)
            workers.add(pid)
            control.send(pid)
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    shutil.rmtree(folder, ignore_errors=True)


def _status_of(pid: int) -> int:
    """A worker's exit code, or minus the signal; one that has closed its connection and lives on is killed."""
    deadline = time.monotonic() + _REAP_SECONDS
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _run_forked(connection: int, folder: str, server: int) -> None:
    status = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:  # it may have ended before it was asked to be followed
            work(connection, folder)
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def work(descriptor: int, folder: str) -> None:
    """Fill slots until the other side is gone. Messages come in order: what a batch needs comes before it."""
    with contextlib.suppress(OSError):
        register_stack_dump(folder)
    connection = Connection(descriptor)
    recipes: dict[int, bytes | tuple[Recipe, WindowReader]] = {}
    slots: dict[int, mmap.mmap] = {}
    while True:
        try:
            kind, number, *rest = connection.recv()
            if kind == "slot":
                file = recv_handle(connection)
                slots[number] = mmap.mmap(file, rest[0])
                os.close(file)
            elif kind == "drop":
                del slots[number]
            elif kind == "recipe":
                recipes[number] = rest[0]
            else:
                recipe, slot, size, key = rest
                connection.send((number, _try_to_make(recipes, recipe, slots[slot], size, key)))
        except (EOFError, ConnectionError):
            return


def _try_to_make(recipes: dict[int, Any], number: int, slot: mmap.mmap, size: int, key: tuple[int, int]) -> Any:
    """None, or what went wrong, as an error that can be pickled."""
    try:
        if isinstance(recipes[number], bytes):
            recipe = pickle.loads(recipes[number])
            recipes[number] = recipe, recipe.reader()
        recipe, reader = recipes[number]
        recipe.make(reader, recipe.layout.parts(np.frombuffer(slot, np.uint8), size), key)
    except MemfitError as error:
        return error
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: no signal comes here, so code raised them
        text = f"exit code {error.code!r}" if isinstance(error, SystemExit) else f"{error}"
        return JobFailedError(
            f"a loader's worker failed: {type(error).__name__}: {text}\n{traceback.format_exc()[-4000:]}".rstrip(),
            rule="an error in a worker ends the iteration at the batch that it happened in.",
            remedy="see the traceback above; num_workers=0 raises it here, where a debugger can see it",
        )
    return None
