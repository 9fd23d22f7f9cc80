"""A job's files and its lock: who holds the lock is its watcher, and a job whose lock nobody holds does not run."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from memfit.memory import is_locked, lock_file
from memfit.rundir import fits

LOCK, JOB, STATUS, OUTCOME = "lock", "job.json", "status.json", "outcome.json"
#: Written by whoever wants the job to checkpoint and end, or to end now when the file says ``now``.
STOP_REQUESTED = "stop_requested"
#: Written by ``cancel``: whether the job is to end now, and the state and cause that its end is recorded with, if any.
CANCEL = "cancel.json"


@dataclass(frozen=True)
class Holder:
    """What the lock file says of the watcher that holds it.

    Attributes:
        pid: The watcher's process id.
        attempt: The job's attempt that it watches.
        job_pid: The process id of the job itself, or None before its start.
        started: When the job began, in Unix seconds.
    """

    pid: int
    attempt: int
    job_pid: int | None = None
    started: float | None = None


_HOLDER = {
    "pid": int,
    "attempt": int,
    "job_pid": (int, type(None)),
    "started": (int, float, type(None)),
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
        """Write what changed into the lock file, in place."""
        self.holder = Holder(**vars(self.holder) | changes)
        # Padded, so that a shorter text leaves no rest of a longer one.
        os.pwrite(self._descriptor, json.dumps(vars(self.holder)).ljust(255).encode() + b"\n", 0)
