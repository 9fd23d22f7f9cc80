"""Worker processes that are started without forking this one, in an environment of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from multiprocessing.spawn import get_executable
from typing import Any, Literal

#: How many threads the libraries in a worker may start: the workers themselves are what runs side by side.
THREAD_LIMITS = dict.fromkeys(
    [
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
        "POLARS_MAX_THREADS",
        "RAYON_NUM_THREADS",
    ],
    "1",
)
# The allocator that Arrow brings would start a thread in the fork server, which must have none.
_NO_THREADS = {"ARROW_DEFAULT_MEMORY_POOL": "system", "JE_ARROW_MALLOC_CONF": "background_thread:false"}

_END_SECONDS = 1.0  # for a server to end its workers; one that is not up yet does not hear

StartMethod = Literal["forkserver", "spawn"]

_PROGRAM = {
    "forkserver": "from memfit.data import _worker; _worker.serve(descriptor, folder)  # memfit.data.workers",
    "spawn": "follow_parent(); from memfit.data import _worker; _worker.work(descriptor, folder)",
}
_HEAD = """
import json, sys
descriptor, folder, sys.path[:] = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
from memfit.watchdog import register_stack_dump
register_stack_dump(folder)
def follow_parent():
    import ctypes, os, signal
    if sys.platform == "linux" and int(sys.argv[4]):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != int(sys.argv[4]):
            os._exit(1)
"""


class Launcher:
    """Starts workers: forks of one server that has imported what they need, or fresh interpreters.

    Neither imports the main module, so a script needs no ``if __name__ == "__main__"``.

    Args:
        method: ``forkserver`` or ``spawn``.
    """

    def __init__(self, method: StartMethod) -> None:
        self.method = method
        self.folder = tempfile.mkdtemp(prefix="memfit-workers-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._control: Connection | None = None
        self._pids: list[int] = []
        self._num_asked = 0
        if method == "forkserver":
            self._control, process = self._start("forkserver")
            self._processes.append(process)

    def _start(self, method: StartMethod) -> tuple[Connection, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair()
        # Only the main thread lives as long as the process: PDEATHSIG follows the thread.
        follow = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        arguments = [str(theirs.fileno()), self.folder, json.dumps(sys.path), str(follow)]
        with theirs, _stop_signals_blocked():
            process = subprocess.Popen(
                [os.fsdecode(get_executable()), "-c", _HEAD + _PROGRAM[method], *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_NO_THREADS, **THREAD_LIMITS},
            )
        return Connection(ours.detach()), process

    def start_worker(self) -> Connection:
        """A connection to a new worker; nothing is waited for."""
        if self._control is None:
            connection, process = self._start("spawn")
            self._processes.append(process)
            self._pids.append(process.pid)
            return connection
        ours, theirs = socket.socketpair()
        # That the server has ended already is told when the worker's answer is read.
        with theirs, contextlib.suppress(OSError):
            self._control.send(("start", 0))
            send_handle(self._control, theirs.fileno(), 0)
        self._num_asked += 1
        return Connection(ours.detach())

    def pids(self, timeout: float) -> list[int]:
        """The workers' pids in order of their start, as far as the server has told them in so many seconds."""
        with contextlib.suppress(EOFError, OSError):
            while self._control is not None and len(self._pids) < self._num_asked and self._control.poll(timeout):
                self._pids.append(self._control.recv())
        return list(self._pids)

    @property
    def server_pid(self) -> int | None:
        return self._processes[0].pid if self.method == "forkserver" else None

    def status_of(self, place: int) -> tuple[int | None, int | None]:
        """Pid and exit code (or minus the signal) of a worker that has closed its connection; None where unknown."""
        pids = self.pids(timeout=5.0)
        pid = pids[place] if place < len(pids) else None
        if self._control is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[place].wait(timeout=5.0)
            return pid, self._processes[place].returncode
        with contextlib.suppress(EOFError, OSError):
            if pid is not None:
                self._control.send(("end", pid))
                if self._control.poll(5.0):
                    return pid, self._control.recv()
        return pid, None

    def server_status(self) -> int | None:
        """The exit code of the fork server if it has ended, or does within a second."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._processes[0].wait(timeout=1.0) if self.method == "forkserver" else None
        return None

    def end(self) -> None:
        """End all of them now; what they write to is memory that nobody reads any more."""
        if self._control is not None:
            self._control.close()  # the server ends its workers, then itself
        for process in self._processes:
            if self.method == "spawn":
                process.kill()
            try:
                process.wait(timeout=_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """What is started inside never receives Ctrl-C, or what asks a whole job to stop: it serves until the end."""
    signals: list[Any] = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
