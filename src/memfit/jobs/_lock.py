"""A job's files and its lock: who holds the lock is its watcher, and a job whose lock nobody holds does not run."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from memfit.memory import is_locked, lock_file
from memfit.rundir import fits

T = TypeVar("T")

LOCK, JOB, STATUS, OUTCOME = "lock", "job.json", "status.json", "outcome.json"
#: Written by whoever wants the job to checkpoint and end, or to end now when the file says ``now``.
STOP_REQUESTED = "stop_requested"
#: The state and cause that the job's end by ``LocalBackend.cancel`` is recorded with.
VERDICT = "verdict.json"

FULL = "the disk is full; memfit tries again every second"
_AGAIN_SECONDS = 1.0


@dataclass(frozen=True)
class Holder:
    """What the lock file says of the watcher that holds it.

    Attributes:
        pid: The watcher's process id.
        attempt: The job's attempt that it watches.
        job_pid: The process id of the job itself, or None before its start.
        started: When the job began, in Unix seconds.
        note: What it cannot say elsewhere: that the disk is full.
    """

    pid: int
    attempt: int
    job_pid: int | None = None
    started: float | None = None
    note: str = ""


_HOLDER = {
    "pid": int,
    "attempt": int,
    "job_pid": (int, type(None)),
    "started": (int, float, type(None)),
    "note": (str, type(None)),
}


def read_holder(folder: Path) -> Holder | None:
    """What the lock file says, or None when it is not there or just being written; the lock itself is not looked at."""
    try:
        with open(f"{folder}/{LOCK}", "rb") as file:
            found = json.loads(file.read())
        return Holder(**found) if fits(found, _HOLDER) else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def is_held(folder: Path) -> bool:
    """Whether a shim holds this job's lock: the sure sign that it runs."""
    return is_locked(f"{folder}/{LOCK}")


def complain(text: str) -> None:
    """Say something in the watcher's log, if it can be written: a full disk must not end a watcher, and so its job."""
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")


class JobLock:
    """A job's lock, held until it is released or this process ends."""

    def __init__(self, descriptor: int, holder: Holder) -> None:
        self._descriptor = descriptor
        self.holder = holder

    @classmethod
    def take(cls, folder: Path) -> JobLock | None:
        """The lock, or None when another process holds it."""
        descriptor = lock_file(Path(f"{folder}/{LOCK}"))
        return None if descriptor is None else cls(descriptor, Holder(os.getpid(), 0))

    def release(self) -> None:
        """Let the lock go; what the file says stays."""
        os.close(self._descriptor)

    def tell(self, **changes: int | float | str | None) -> None:
        """Write what changed into the lock file, in place: once it has its block that works on a full disk too."""
        self.holder = Holder(**vars(self.holder) | changes)
        # Padded, so that a shorter text leaves no rest of a longer one and the file never needs to grow.
        os.pwrite(self._descriptor, json.dumps(vars(self.holder)).ljust(255).encode() + b"\n", 0)

    def patiently(self, write: Callable[[], T], *, gives_up: Callable[[], bool] = lambda: False) -> T:
        """Do something that must not be lost: while the disk is full, again every second, until the caller gives up."""
        while True:
            try:
                done = write()
                break
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or gives_up():
                    raise
            with suppress(OSError):
                self.tell(note=FULL)
            time.sleep(_AGAIN_SECONDS)
        if self.holder.note:
            with suppress(OSError):
                self.tell(note="")
        return done
