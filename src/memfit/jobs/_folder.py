"""A job's folder: its files, and the lock that its shim holds for as long as it lives."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from memfit.errors import DamagedError
from memfit.files import read_masked, write_atomic, write_masked
from memfit.jobs._job import Job
from memfit.memory import lock_file
from memfit.rundir import OUTCOME, STATUS, JobStatus, read_record

LOCK, JOB = "lock", "job.json"
#: Asks the shim to have its job checkpoint and end, or to end it at once when the file says ``now``.
STOP_REQUESTED = "stop_requested"

_JOB_SHAPE = {"attempt": int, "group": (str, type(None)), "host": (str, type(None))}


def take_lock(folder: Path) -> int | None:
    """Take a job's lock; return the descriptor that holds it, or None when a shim has it."""
    return lock_file(folder / LOCK)


def write_outcome(folder: Path, status: JobStatus) -> None:
    """Write how a job ended, which replaces its status."""
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


def write_order(folder: Path, job: Job, more: Mapping[str, Any]) -> None:
    """Write ``job.json``, which a shim obeys: the job, and what this attempt of it gets."""
    order = {
        **vars(job),  # not asdict, which copies all that lies deeper
        "params": dict(job.params),
        "arguments": dict(job.arguments),
        "footprint": job.footprint.to_dict() if job.footprint else None,
        "cwd": job.cwd or os.getcwd(),
    }
    # Not forced to disk: what a power cut takes is run again.
    write_masked(folder / JOB, order | dict(more), durable=False)


def next_attempt(folder: Path) -> int:
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
