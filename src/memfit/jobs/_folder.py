"""A job's folder: its files, the lock that its shim holds for as long as it lives, and the variables it starts with."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from memfit.errors import DamagedError
from memfit.files import read_masked, write_atomic, write_masked
from memfit.jobs._fork import thread_env
from memfit.jobs._job import Job
from memfit.memory import Device, Sizes
from memfit.rundir import JOB_ID_VARIABLE, OUTCOME, RUN_DIR_VARIABLE, STATUS, JobStatus, RunDir, read_record

LOCK, JOB = "lock", "job.json"
#: Asks the shim to have its job checkpoint and end, or to end it at once when the file says ``now``.
STOP_REQUESTED = "stop_requested"

#: Has glibc give freed memory back to the kernel at once.
_TIGHT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "2"}
_PROCESSES = "LOKY_MAX_CPU_COUNT"  # how many processes joblib takes for n_jobs=-1; the user's own number counts
#: torch 2.13 reads the first that is set; later versions perhaps the second alone.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_FRACTION = "per_process_memory_fraction"
_FIRST_TORCH = (2, 10)  # the first torch that knows this setting; an earlier one refuses to start with it
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
    return env | (dict.fromkeys(ALLOCATOR_VARIABLES, cuda_allocator) if cuda_allocator is not None else {})


def child_env(job: Job, run: RunDir) -> dict[str, str]:
    """Return the variables that a job's process gets on top of this one's."""
    env = thread_env(job.threads) | start_env(tight_malloc=job.tight_malloc, cuda_allocator=job.cuda_allocator)
    env[_PROCESSES] = os.environ.get(_PROCESSES) or str(max(1, job.threads // max(1, job.ranks)))
    if job.command:
        env["PYTHONUNBUFFERED"] = "1"  # its log is read while it runs
    return env | {RUN_DIR_VARIABLE: str(run.path), JOB_ID_VARIABLE: job.id} | dict(job.env)


def device_env(
    job: Job, given: Sequence[str], most: Sizes, devices: Sequence[Device], *, env: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables that show a job its devices alone, and have its torch refuse to take more of them than
    ``most``. torch takes one fraction for all devices of a process; what other processes and the driver take of a
    device does not count against it. Nothing ``given`` stands for all. Source: torch 2.13,
    c10/cuda/CUDAAllocatorConfig.h."""
    found = {"CUDA_VISIBLE_DEVICES": ",".join(given)}
    fraction = min([1.0, *(most[one.uuid] / one.total_bytes for one in devices if one.uuid in most)])
    own = job.cuda_allocator or next(filter(None, map(env.get, ALLOCATOR_VARIABLES)), "")
    if fraction >= 1 or _FRACTION in own or not _knows_fraction(job):
        return found
    return found | dict.fromkeys(ALLOCATOR_VARIABLES, f"{own}{own and ','}{_FRACTION}:{fraction:.4f}")


def device_share(env: Mapping[str, Any]) -> float:
    """Return which share of each device `device_env` lets the torch of a process take."""
    found = re.search(rf"{_FRACTION}:([0-9.]+)", str([env.get(name) for name in ALLOCATOR_VARIABLES]))
    return float(found[1]) if found else 1.0


def _knows_fraction(job: Job) -> bool:
    """Return True if the job will load the torch beside this interpreter, and that knows the fraction."""
    if job.command:
        program = shutil.which(job.command[0])
        if program is None or Path(program).parent != Path(sys.executable).parent:
            return False
    from importlib import metadata  # slow to load, and without a device of no use

    try:
        found = re.match(r"(\d+)\.(\d+)", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return False
    return found is not None and (int(found[1]), int(found[2])) >= _FIRST_TORCH


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
