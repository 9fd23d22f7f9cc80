"""Whether a run lives: the process that starts its jobs, and the watchers that hold the locks of those that run."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from memfit.memory import is_locked, live_jobs
from memfit.rundir._folder import RunDir

SUPERVISOR = "supervisor.lock"


@dataclass(frozen=True)
class Liveness:
    run: RunDir
    supervisor: int | None  # the process that starts its jobs, where that can be seen from here
    is_hidden: bool  # it has one that cannot be seen: on another host, in another container or of another user

    @cached_property
    def jobs(self) -> list[str]:
        """The ids of the jobs that run now, with a supervisor or without: a watcher holds their locks."""
        return list(live_jobs(self.run.path))

    @property
    def is_supervised(self) -> bool:
        """Whether a process starts the run's jobs; on another host, also as long as the run says so."""
        if self.supervisor is not None or self.is_hidden:
            return True
        return self.run.state == "running" and self.run.header.get("host") not in (None, socket.gethostname())

    @property
    def is_live(self) -> bool:
        return self.is_supervised or bool(self.jobs)

    @property
    def state(self) -> str:
        """What the run says of itself; ``interrupted`` where that is ``running`` and nothing runs any more."""
        return "interrupted" if self.run.state == "running" and not self.is_live else self.run.state


def liveness(run: RunDir) -> Liveness:
    lock = run.path / SUPERVISOR
    supervisor = next((pid for pid in _lock_owners(lock) if _holds(pid, lock)), None)
    return Liveness(run, supervisor, supervisor is None and is_locked(lock))


def _holds(pid: int, lock: Path) -> bool:
    """Return True if a process of this user has the lock file open, so that a reused number is never taken."""
    with contextlib.suppress(OSError):
        wanted = lock.lstat()
        if not stat.S_ISREG(wanted.st_mode) or Path(f"/proc/{pid}").stat().st_uid != os.geteuid():
            return False
        for found in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.path.samestat(found.stat(), wanted):
                    return True
    return False


def _lock_owners(path: Path) -> list[int]:
    """Return who holds a ``flock`` on a file, as far as this process can see.

    Source: proc(5), ``/proc/locks``: ``1: FLOCK  ADVISORY  WRITE 4711 fe:01:1835033 0 EOF``.
    """
    try:
        inode = path.lstat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines]
    return [int(one[4]) for one in fields if one[1:2] == ["FLOCK"] and one[5].rpartition(":")[2] == str(inode)]
