"""The small process beside each local job: it watches the job and writes its outcome; standard library only.

It holds ``lock`` in the job's folder while it lives. The file ``stop_requested`` there asks the job to checkpoint and
end within a grace; with the word ``now``, it ends the job at once. A SIGTERM to the shim does the same as the file, but
then the platform asked. A job on several nodes of Slurm has a shim on each, and one that follows those.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from memfit.errors import UsageError
from memfit.files import read_json, read_whole, refresh
from memfit.jobs._folder import JOB, LOCK, write_outcome
from memfit.jobs._nodes import NodesShim
from memfit.jobs._processes import become_subreaper
from memfit.jobs._watch import Shim, Stop
from memfit.memory import lock_file
from memfit.rundir import OUTCOME, JobStatus, read_record


def main(job_dir: Path, lock: int | None = None, *, forks: bool = False) -> int:
    """Run the job whose folder this is, as its ``job.json`` says; return its exit code, or 128 + n for signal n.
    Starting it again is harmless: an attempt that has ended is not run twice, and one that runs is left alone (0)."""
    if lock is None and (lock := lock_file(job_dir / LOCK)) is None:
        return 0
    os.set_inheritable(lock, False)  # or the lock would live as long as any process of the job
    status = read_record(job_dir / OUTCOME) or _run(job_dir, forks)
    with contextlib.suppress(OSError):
        if not (log := job_dir / "shim.log").stat().st_size:
            log.unlink()
    if status.exit_code is None:
        return 1
    return status.exit_code if status.exit_code >= 0 else 128 - status.exit_code


def run_element(run_dir: Path, array: Path) -> int:
    """Run the job of an element of a Slurm array, unless it has a later attempt; return its exit code."""
    found = read_json(array, {"jobs": [[(str, int)]]}) or {"jobs": []}
    job_id, attempt = found["jobs"][int(os.environ["SLURM_ARRAY_TASK_ID"])]
    order = read_whole(job_dir / JOB) if refresh(job_dir := run_dir / "jobs" / job_id) else None
    return main(job_dir) if order is not None and order["attempt"] == attempt else 0


def _run(job_dir: Path, forks: bool) -> JobStatus:
    job = read_whole(job_dir / JOB)
    if job is None:
        raise UsageError(
            f"{job_dir / JOB} is missing.",
            rule="a shim runs the job that this file describes.",
            remedy="have the supervisor start the job: memfit resume RUN",
        )
    stop, kind = Stop(job_dir), NodesShim if job.get("num_nodes", 1) > 1 else Shim
    become_subreaper()
    status = kind(job, job_dir, stop, forks=forks).run()
    write_outcome(job_dir, status)
    return status


def run_node(folder: Path) -> int:
    return main(folder / "jobs" / f"node_{os.environ['SLURM_NODEID']}")
