"""The local backend: each job in a new interpreter beside a shim that owns its outcome."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memfit.errors import UsageError
from memfit.jobs._job import Job, JobStatus
from memfit.jobs._shim import BUSY, JOB, LOCK, OUTCOME, SHIM, STATUS
from memfit.memory import Footprint
from memfit.rundir import JOB_ID_VARIABLE, RUN_DIR_VARIABLE, RunDir, read_json, write_json

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "POLARS_MAX_THREADS",
    "RAYON_NUM_THREADS",
)
#: glibc: freed memory goes back to the kernel at once, so that resident follows live memory.
_TIGHT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "2"}


def child_env(job: Job, run: RunDir) -> dict[str, str]:
    """The variables that a job's process gets on top of this one's, before it imports anything.

    >>> child_env(Job("fold_1", command=("true",), threads=2), RunDir(Path("/runs/r")))["OMP_NUM_THREADS"]
    '2'
    """
    env = dict.fromkeys(_THREAD_VARIABLES, str(job.threads))
    if job.tight_malloc:
        env |= _TIGHT_MALLOC
    return env | {RUN_DIR_VARIABLE: str(run.path), JOB_ID_VARIABLE: job.id} | dict(job.env)


@dataclass
class _Submitted:
    attempt: int
    shim: subprocess.Popen[bytes] | None
    to_send: signal.Signals | None = None


class LocalBackend:
    """Runs jobs as processes of this host.

    All state lies in the run directory: a new supervisor that submits the same job takes over the one that still runs,
    and reads the outcome of one that ended in between.

    Args:
        run: The run directory.
        grace_seconds: How long a job that was asked to stop may take to checkpoint.
    """

    def __init__(self, run: RunDir, *, grace_seconds: float = 60.0) -> None:
        self.run = run
        self.grace_seconds = grace_seconds
        self._submitted: dict[str, _Submitted] = {}
        self._found_running: set[str] = set()
        for status in (run.path / "jobs").glob(f"*/{STATUS}"):
            # What died with its watcher while nobody looked is told so, and not as running for ever. Its processes
            # ended with the watcher, and its process id may be another's by now.
            if not (status.parent / OUTCOME).exists() and not self.is_running(status.parent.name):
                self._settle(status.parent, f"its watcher died without a word (see {status.parent / 'shim.log'})")

    def is_running(self, job_id: str) -> bool:
        """Whether a job of this run's that anybody started runs now; ``submit`` then takes it over, ended or not."""
        held = is_held(self.run.job_dir(job_id))
        if held:
            self._found_running.add(job_id)
        return held

    def submit(self, job: Job) -> None:
        """Start a job's shim; a job of that id that still runs is taken over instead.

        Raises:
            UsageError: If this backend runs a job of that id already.
        """
        if job.id in self._submitted and self._status(job.id).state in ("pending", "running"):
            raise UsageError(
                f"job {job.id} is running already.",
                rule="a job never runs twice at once.",
                remedy="wait for its end, or give the other job another id",
            )
        folder = self.run.job_dir(job.id)
        folder.mkdir(parents=True, exist_ok=True)
        if job.id in self._found_running or is_held(folder):
            self._found_running.discard(job.id)
            self._submitted[job.id] = _Submitted(int((read_json(folder / SHIM) or {"attempt": 1})["attempt"]), None)
            return
        attempt = _next_attempt(folder)
        described = asdict(job) | {
            "attempt": attempt,
            "env": child_env(job, self.run),
            "grace_seconds": self.grace_seconds,
            "footprint": job.footprint.to_dict() if job.footprint else None,
        }
        write_json(folder / JOB, described)
        with open(folder / "shim.log", "ab") as log:
            shim = subprocess.Popen(
                [sys.executable, "-m", "memfit.jobs", "shim", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._submitted[job.id] = _Submitted(attempt, shim)

    def poll(self) -> dict[str, JobStatus]:
        """The status of every job submitted here, by id."""
        return {job_id: self._status(job_id) for job_id in self._submitted}

    def cancel(self, job_id: str, *, now: bool = False) -> None:
        """Ask a job to checkpoint and end; with ``now``, end it and all its processes at once."""
        submitted = self._submitted.get(job_id)
        if submitted is None:
            raise UsageError(
                f"there is no job {job_id} here.",
                rule="only a job that was submitted can be cancelled.",
                remedy=f"name one of: {', '.join(self._submitted) or 'none was submitted'}",
            )
        number = signal.SIGQUIT if now else signal.SIGTERM
        folder = self.run.job_dir(job_id)
        shim = read_json(folder / SHIM)
        # Its handlers stand once it has written its file; before that a signal would end it without an outcome.
        submitted.to_send = number if shim is None else None
        if shim is None:
            return
        if submitted.shim is not None:
            submitted.shim.send_signal(number)
        elif is_held(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(shim["pid"]), number)

    def _status(self, job_id: str) -> JobStatus:
        submitted, folder = self._submitted[job_id], self.run.job_dir(job_id)
        alive = submitted.shim.poll() is None if submitted.shim else is_held(folder)
        if alive:
            # Also for the moment between its outcome and its end: an ended job has no process left.
            if submitted.to_send is not None:
                self.cancel(job_id, now=submitted.to_send == signal.SIGQUIT)
            status = read_json(folder / STATUS)
            return to_status(job_id, status) if status else JobStatus(job_id, "pending", attempt=submitted.attempt)
        outcome = read_json(folder / OUTCOME)
        if outcome is not None:
            return to_status(job_id, outcome)
        if submitted.shim is not None and submitted.shim.returncode == BUSY:
            submitted.shim = None
            return JobStatus(job_id, "pending", attempt=submitted.attempt)
        return self._bury(job_id, folder)

    def _bury(self, job_id: str, folder: Path) -> JobStatus:
        """Settle a job whose shim died without an outcome: end what it left, and write that down."""
        last = read_json(folder / STATUS) or {}
        if "pid" in last:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(int(last["pid"]), signal.SIGKILL)
        cause = f"its watcher died without a word (see {folder / 'shim.log'}); its processes were ended"
        return to_status(job_id, self._settle(folder, cause))

    def _settle(self, folder: Path, cause: str) -> dict[str, Any]:
        last = read_json(folder / STATUS) or {}
        outcome = last | {"state": "node_fail", "cause": cause, "used_bytes": 0, "pss_bytes": 0, "ended": time.time()}
        write_json(folder / OUTCOME, outcome)
        return outcome


def is_held(folder: Path) -> bool:
    """Whether a shim holds this job's lock: the sure sign that it runs."""
    try:
        with open(folder / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _next_attempt(folder: Path) -> int:
    """The next attempt's number; the last attempt's outcome is kept under its number."""
    # What was ordered last counts: it stays whole when a supervisor is killed between the steps below.
    old, last = read_json(folder / OUTCOME), int((read_json(folder / JOB) or {"attempt": 0})["attempt"])
    if old is not None:
        os.replace(folder / OUTCOME, folder / f"outcome_{last}.json")
    (folder / STATUS).unlink(missing_ok=True)
    (folder / SHIM).unlink(missing_ok=True)
    return last + 1


def to_status(job_id: str, found: Mapping[str, Any]) -> JobStatus:
    """A ``status.json`` or ``outcome.json`` as a status."""
    footprint = found.get("footprint")
    return JobStatus(
        job_id=job_id,
        state=found["state"],
        phase=found.get("phase"),
        num_phases_passed=int(found.get("num_phases_passed", 0)),
        used_bytes=int(found.get("used_bytes", 0)),
        peak_bytes=int(found.get("peak_bytes", 0)),
        footprint=Footprint.from_dict(footprint) if footprint else None,
        started=found.get("started"),
        ended=found.get("ended"),
        exit_code=found.get("exit_code"),
        cause=str(found.get("cause", "")),
        attempt=int(found.get("attempt", 1)),
        pss_bytes=int(found.get("pss_bytes", 0)),
    )


def read_status(run: RunDir, job_id: str) -> JobStatus:
    """A job's status from its files alone, for readers that did not submit it."""
    folder = run.job_dir(job_id)
    found = read_json(folder / OUTCOME) or read_json(folder / STATUS)
    return to_status(job_id, found) if found else JobStatus(job_id, "pending")
