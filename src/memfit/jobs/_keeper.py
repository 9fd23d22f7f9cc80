"""The keeper: a small process that has imported what a shim needs, and forks one for each job.

It reads job ids from its standard input, a socket, and answers with the end of each: ``<job id> <exit code>``. It owns
nothing: each shim is in a session of its own and holds its job's lock, so they go on when the keeper is killed. When
the supervisor's end of the socket closes, the keeper leaves.

A shim whose job was brief takes the next one. To fork a shim, and to give it the pages that it writes to, takes several
milliseconds of CPU time, which is as much as a brief job itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from memfit.jobs import _shim
from memfit.jobs._lock import complain

HELLO = "keeper"
_PR_SET_NAME = 15
#: A shim whose job lived no longer takes another.
_BRIEF_SECONDS = 1.0
#: A shim that found no other job for so long leaves.
_IDLE_SECONDS = 5.0


def main(run_path: Path) -> int:
    """Fork shims until the supervisor leaves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _shim.prepare()
    keeper = _Keeper(run_path)
    gc.collect()
    gc.freeze()  # what the collector never looks at stays shared with the shims
    keeper.serve()
    return 0


@dataclass
class _Worker:
    """A shim as the keeper knows it; without a job it waits for one."""

    pid: int
    link: socket.socket
    job_id: str | None
    idle_since: float = 0.0


class _Keeper:
    def __init__(self, run_path: Path) -> None:
        self.jobs_path = run_path / "jobs"
        self.supervisor = socket.socket(fileno=0)
        self.supervisor.setblocking(False)
        self.woken, self.waker = os.pipe()
        os.set_blocking(self.woken, False)
        os.set_blocking(self.waker, False)
        signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.workers: dict[int, _Worker] = {}
        self.by_link: dict[int, _Worker] = {}
        self.idle: list[_Worker] = []
        self.incoming = b""
        self.outgoing = f"{HELLO} {os.getpid()}\n".encode()
        self.poll = select.poll()
        self.poll.register(self.woken, select.POLLIN)

    def serve(self) -> None:
        while True:
            self.poll.register(self.supervisor, select.POLLIN | (select.POLLOUT if self.outgoing else 0))
            ready = [handle for handle, _ in self.poll.poll(_IDLE_SECONDS * 1000 if self.idle else None)]
            for worker in [self.by_link[handle] for handle in ready if handle in self.by_link]:
                self._hear(worker)
            if self.woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.woken, 4096)
                self._reap()
            try:
                self._answer()
                if not self._take_orders():
                    return
            except ConnectionError:
                return
            self._dismiss()

    def _take_orders(self) -> bool:
        """See to what was ordered; False when the supervisor has left."""
        while True:
            try:
                chunk = self.supervisor.recv(65536)
            except BlockingIOError:
                return True
            *orders, self.incoming = (self.incoming + chunk).split(b"\n")
            for order in orders:
                self._begin(order.decode())
            if not chunk:
                return False

    def _begin(self, job_id: str) -> None:
        while self.idle:
            worker = self.idle.pop()
            with contextlib.suppress(OSError):
                worker.link.sendall(f"{job_id}\n".encode())
                worker.job_id = job_id
                return
            self._unlink(worker)  # it was killed while it waited
        try:
            worker = self._fork()
            worker.link.sendall(f"{job_id}\n".encode())
            worker.job_id = job_id
        except OSError as error:  # no memory or no process to be had: the job ends as one whose watcher died
            complain(f"no watcher for {job_id}: {error}")
            self.outgoing += f"{job_id} 1\n".encode()

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            self._become_shim(theirs, ours)
        theirs.close()
        worker = self.workers[pid] = self.by_link[ours.fileno()] = _Worker(pid, ours, None)
        self.poll.register(ours, select.POLLIN)
        return worker

    def _become_shim(self, link: socket.socket, other_end: socket.socket) -> NoReturn:
        code = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for handle in (self.woken, self.waker, other_end.fileno(), *self.by_link):
                os.close(handle)
            null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            os.dup2(null, 0)  # gives up the supervisor's socket
            os.close(null)
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_PR_SET_NAME, b"memfit-shim", 0, 0, 0)
            code = self._watch_jobs(link)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _watch_jobs(self, link: socket.socket) -> int:
        """A shim's life: one job, and further ones as long as they are brief; the last one's exit code."""
        while order := link.recv(4096):
            folder = self.jobs_path / order.decode().strip()
            sys.stdout = sys.stderr = _Log(folder / "shim.log")
            began = time.monotonic()
            code = _shim.main(folder)
            if code or time.monotonic() - began > _BRIEF_SECONDS or _has_child():
                return code
            try:
                link.sendall(b"%d\n" % code)
            except OSError:  # the keeper has died
                break
        return 0

    def _hear(self, worker: _Worker) -> None:
        """Take a shim's report; one that has died is reaped elsewhere."""
        try:
            report = worker.link.recv(4096)
        except OSError:
            report = b""
        if not report:
            self._unlink(worker)
            return
        self.outgoing += f"{worker.job_id} {report.decode()}".encode()
        worker.job_id, worker.idle_since = None, time.monotonic()
        self.idle.append(worker)

    def _unlink(self, worker: _Worker) -> None:
        if worker.link.fileno() >= 0:
            self.poll.unregister(worker.link)
            del self.by_link[worker.link.fileno()]
            worker.link.close()
        if worker in self.idle:
            self.idle.remove(worker)

    def _dismiss(self) -> None:
        """Let the shims go that have waited for another job in vain."""
        now = time.monotonic()
        for worker in [worker for worker in self.idle if now - worker.idle_since >= _IDLE_SECONDS]:
            self._unlink(worker)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while self.workers:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if (worker := self.workers.pop(pid, None)) is None:
                    continue
                if worker.link.fileno() in self.by_link:
                    self._hear_last(worker)
                if worker.job_id is not None:
                    self.outgoing += f"{worker.job_id} {os.waitstatus_to_exitcode(status)}\n".encode()

    def _hear_last(self, worker: _Worker) -> None:
        """What a dead shim reported before its death."""
        self._hear(worker)
        self._unlink(worker)

    def _answer(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.outgoing:
                self.outgoing = self.outgoing[self.supervisor.send(self.outgoing) :]


class _Log(io.TextIOBase):
    """A file that is made only when something is said."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, text: str) -> int:
        with open(self._path, "a", errors="backslashreplace") as file:
            return file.write(text)


def _has_child() -> bool:
    """Whether something of the last job could not be ended."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True
