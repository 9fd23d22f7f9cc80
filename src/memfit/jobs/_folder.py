"""A job's folder: its files, and the lock that its shim holds for as long as it lives."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from memfit.errors import DamagedError
from memfit.files import read_masked, write_atomic, write_masked
from memfit.jobs._fork import thread_env
from memfit.jobs._job import Job
from memfit.rundir import JOB_ID_VARIABLE, OUTCOME, RUN_DIR_VARIABLE, STATUS, JobStatus, RunDir, read_record

LOCK, JOB = "lock", "job.json"
#: Asks the shim to have its job checkpoint and end, or to end it at once when the file says ``now``.
STOP_REQUESTED = "stop_requested"

#: Has glibc give freed memory back to the kernel at once.
_TIGHT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "2"}
_PROCESSES = "LOKY_MAX_CPU_COUNT"  # how many processes joblib takes for n_jobs=-1; the user's own number counts
#: torch 2.13 reads the first that is set; later versions perhaps the second alone.
_CUDA_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_JOB_SHAPE = {"attempt": int, "group": (str, type(None)), "host": (str, type(None))}


def write_outcome(folder: Path, status: JobStatus) -> None:
    write_atomic(folder / OUTCOME, json.dumps(status.to_dict()) + "\n")
    (folder / STATUS).unlink(missing_ok=True)


def ask_to_stop(folder: Path, *, now: bool) -> None:
    """Ask the shim of a job to have it checkpoint and end, or to end it ``now``."""
    write_atomic(folder / STOP_REQUESTED, "now\n" if now else "stop\n", durable=False)


def read_order(folder: Path) -> dict[str, Any]:
    """Return ``job.json``; nothing when it is not there or damaged."""
    with suppress(DamagedError):
        return read_masked(folder / JOB, _JOB_SHAPE) or {}
    return {}


def other_host(folder: Path) -> str:
    """Return where a job's shim was started; empty for this host, or without an order."""
    host = str(order.get("host") or "another host") if (order := read_order(folder)) else ""
    return "" if host == socket.gethostname() else host


def start_env(*, tight_malloc: bool, cuda_allocator: str | None) -> dict[str, str]:
    """Return the variables that a process must have from its start on."""
    env = dict(_TIGHT_MALLOC) if tight_malloc else {}
    return env | (dict.fromkeys(_CUDA_ALLOCATOR, cuda_allocator) if cuda_allocator is not None else {})


def child_env(job: Job, run: RunDir) -> dict[str, str]:
    """Return the variables that a job's process gets on top of this one's."""
    env = thread_env(job.threads) | start_env(tight_malloc=job.tight_malloc, cuda_allocator=job.cuda_allocator)
    env[_PROCESSES] = os.environ.get(_PROCESSES) or str(max(1, job.threads // max(1, job.ranks)))
    if job.command:
        env["PYTHONUNBUFFERED"] = "1"  # its log is read while it runs
    return env | {RUN_DIR_VARIABLE: str(run.path), JOB_ID_VARIABLE: job.id} | dict(job.env)


def write_order(run: RunDir, job: Job, **more: Any) -> int:
    """Write ``job.json``, which a shim obeys: the job, and what its next attempt gets; return that attempt's number."""
    folder = run.job_dir(job.id)
    attempt = _next_attempt(folder)
    order = {
        **vars(job),  # not asdict, which copies all that lies deeper
        "params": dict(job.params),
        "arguments": dict(job.arguments),
        "footprint": job.footprint.to_dict() if job.footprint else None,
        "cwd": job.cwd or os.getcwd(),
        "attempt": attempt,
        "env": child_env(job, run),
        "group": None,
        "data_limit_bytes": None,
    }
    # Not forced to disk: what a power cut takes is run again.
    write_masked(folder / JOB, order | more, durable=False)
    return attempt


def _next_attempt(folder: Path) -> int:
    """Return the next attempt's number; keep the last attempt's outcome under its number."""
    with suppress(DamagedError):
        known = read_record(folder / OUTCOME)
        if known is not None and known.attempt == 0:  # recorded without a start
            (folder / OUTCOME).unlink()
    # What was ordered last counts: it stays whole when a supervisor is killed between the steps below.
    num_kept = len([*folder.glob("outcome_*.json"), *folder.glob(OUTCOME)])
    last = int(read_order(folder).get("attempt", 0)) or num_kept
    if (folder / OUTCOME).exists():
        os.replace(folder / OUTCOME, folder / f"outcome_{last}.json")
    for name in (STATUS, STOP_REQUESTED):
        (folder / name).unlink(missing_ok=True)
    return last + 1
