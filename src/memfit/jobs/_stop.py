"""Stops a run or one of its jobs from outside: from another terminal, with or without a supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence

from memfit.errors import UsageError
from memfit.files import check_owner
from memfit.jobs._folder import LOCK, STOP_REQUESTED, ask_to_stop
from memfit.memory import is_locked
from memfit.rundir import OUTCOME, SUPERVISOR, JobStatus, RunDir, liveness, read_status

_STEP_SECONDS = 0.1
#: Ask a supervisor to have its jobs checkpoint and end, and to end them now. Unlike Ctrl-C, twice means the same.
ASK_SIGNAL, NOW_SIGNAL = signal.SIGUSR1, signal.SIGUSR2
_NEVER_BEGAN = "stopped by memfit stop while it waited"


def stop(
    run: RunDir,
    job_id: str | None = None,
    *,
    now: bool = False,
    on_tick: Callable[[Sequence[str]], None] = lambda left: None,
) -> list[JobStatus]:
    """Ask a run, or one of its jobs, to checkpoint and end, and wait until it has; return the last statuses. The live
    supervisor is asked too, so that it starts no more jobs; a later one starts a queued job again. ``on_tick`` gets the
    ids of the jobs that still run."""
    check_owner(run.path)
    live = liveness(run)
    asked, supervisor = [one for one in live.jobs if job_id in (None, one)], None
    waits = job_id is not None and not asked and read_status(run, job_id).state == "pending"
    if live.is_hidden and (job_id is None or waits):
        where = f"{run.header.get('host', 'another host')}, or in another container or as another user"
        raise UsageError(
            f"the supervisor of {run.path} cannot be seen from here.",
            rule=f"it holds {run.path / SUPERVISOR} on {where}; this is {socket.gethostname()}.",
            remedy=f"there: memfit stop {run.path}",
        )
    if job_id is None and (supervisor := live.supervisor) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, NOW_SIGNAL if now else ASK_SIGNAL)
    if job_id is not None and waits and live.supervisor is not None:
        run.job_dir(job_id).mkdir(parents=True, exist_ok=True)
        asked = [job_id]
    for one in asked:
        ask_to_stop(run.job_dir(one), now=now)
    if job_id is None and supervisor is None and (run.path / "slurm").is_dir():
        from memfit.jobs._slurm import cancel_queued

        asked += [one for one in cancel_queued(run) if one not in asked]
    if job_id is not None and waits and asked and not is_locked(run.job_dir(job_id) / LOCK):
        return [JobStatus(job_id, "cancelled", cause=_NEVER_BEGAN, attempt=0)]
    left = asked
    while left or (supervisor is not None and live.supervisor == supervisor):
        on_tick(left)
        time.sleep(_STEP_SECONDS)
        live = liveness(run)
        left = [one for one in live.jobs if job_id in (None, one)]  # the supervisor may have been about to start one
        for one in left:
            folder = run.job_dir(one)
            if one in asked and not (folder / STOP_REQUESTED).exists() and not (folder / OUTCOME).exists():
                ask_to_stop(folder, now=now)  # it was asked while it began, which forgets earlier requests
        asked += [one for one in left if one not in asked]
    return [read_status(run, one) for one in asked]


def forget_stops(run: RunDir, job_ids: Iterable[str]) -> None:
    """Remove earlier requests to stop these jobs: they are to run."""
    for job_id in job_ids:
        (run.job_dir(job_id) / STOP_REQUESTED).unlink(missing_ok=True)


def take_stop(run: RunDir, job_id: str) -> str:
    """Remove the request to stop a queued job; return why it is not to start, empty if there was none."""
    if not os.access(f"{run.path}/jobs/{job_id}/{STOP_REQUESTED}", os.F_OK):
        return ""
    (run.job_dir(job_id) / STOP_REQUESTED).unlink(missing_ok=True)
    return _NEVER_BEGAN
