"""The supervisor's end of a keeper."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

from memfit.errors import MemfitError
from memfit.jobs._keeper import HELLO

_PATIENCE_SECONDS = 60.0


class KeeperLink:
    """A keeper that runs, and the socket to it; the keeper leaves when this object goes.

    Args:
        run_path: The run directory whose jobs it starts.
        prefix: The words before its command, for example to start it in a scope of its own.
    """

    def __init__(self, run_path: Path, prefix: Sequence[str] = ()) -> None:
        self._socket, theirs = socket.socketpair()
        self._unread = b""
        self.pid: int | None = None
        self.log = run_path / "keeper.log"
        with theirs, open(self.log, "ab") as log:
            # Without -P a file in this folder named like one of Python's modules would be imported in its place.
            command = [*prefix, sys.executable, "-P", "-m", "memfit.jobs", "keeper", str(run_path)]
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=log, stderr=log, start_new_session=True
            )
        self.close = weakref.finalize(self, _close, self._socket, self._process)

    def fileno(self) -> int:
        return self._socket.fileno()

    def order(self, job_id: str) -> None:
        """Have the shim of a job forked.

        Raises:
            ConnectionError: If the keeper has died.
        """
        self._socket.sendall(f"{job_id}\n".encode())

    def ends(self) -> list[tuple[str, int]] | None:
        """The jobs whose shims ended since the last call, with the shims' exit codes; None when the keeper has died."""
        chunks, is_there = [self._unread], True
        while is_there:
            try:
                chunk = self._socket.recv(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:
                chunk = b""
            chunks.append(chunk)
            is_there = bool(chunk)
        *lines, self._unread = b"".join(chunks).split(b"\n")
        ends = []
        for line in lines:
            name, number = line.decode().rsplit(" ", 1)
            if self.pid is None and name == HELLO:
                self.pid = int(number)
            else:
                ends.append((name, int(number)))
        return ends if is_there or ends else None

    def wait_for_pid(self) -> int:
        """The keeper's process id, as soon as it runs.

        Raises:
            MemfitError: If it does not start.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if self.pid is None and poll.poll(_PATIENCE_SECONDS * 1000):
            self.ends()
        if self.pid is None:
            raise no_keeper(self.log)
        return self.pid


def no_keeper(log: Path) -> MemfitError:
    """The error of a keeper that does not start."""
    said = ""
    with contextlib.suppress(OSError):
        said = log.read_text(errors="replace")[-2000:].strip()
    return MemfitError(
        f"the process that starts the jobs did not start itself: {said or 'it said nothing'}",
        rule="jobs are started by a small process, python -m memfit.jobs keeper.",
        remedy=f"see {log}; try: {sys.executable} -P -c 'import memfit.jobs'",
    )


def _close(link: socket.socket, process: subprocess.Popen[bytes]) -> None:
    link.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)


def open_pidfd(pid: int) -> int | None:
    """A descriptor that can be read when a process has ended; None when it has, or where there are none such."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
