"""The local backend: each job in a process of its own beside a shim that owns its outcome."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from memfit.errors import DamagedError, UsageError
from memfit.jobs._job import STATES, EndedBy, Grant, Job, JobStatus, Request, Submission, Traits, Verdict
from memfit.jobs._lock import (
    CANCEL,
    JOB,
    LOCK,
    OUTCOME,
    STATUS,
    STOP_REQUESTED,
    is_held,
    read_holder,
)
from memfit.jobs._threads import thread_env
from memfit.memory import Footprint, JobGroup, Walls
from memfit.rundir import (
    FOOTPRINT,
    JOB_ID_VARIABLE,
    RUN_DIR_VARIABLE,
    RunDir,
    read_json,
    write_atomic,
    write_masked,
)

#: glibc: freed memory goes back to the kernel at once, so that resident follows live memory.
_TIGHT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "2"}
#: torch reads them once, when it is imported, 2.13 the first that is set, later versions perhaps the second alone.
_CUDA_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
#: A status read so recently is still good.
_FRESH_SECONDS = 0.1
#: Without a descriptor that tells of its end, a job's lock is looked at so often.
_LOOK_SECONDS = 0.2

_NUMBER, _NONE = (int, float), type(None)
_JOB_SHAPE = {"attempt": int, "group": (str, _NONE)}
#: What ``status.json`` and ``outcome.json`` must hold.
_STATUS_SHAPE: Mapping[str, Any] = {
    "state": frozenset(STATES),
    "phase": (str, _NONE),
    "cause": (str, _NONE),
    "footprint": (FOOTPRINT, _NONE),
    "device_used_bytes": ({str: int}, _NONE),
    "evidence": (dict, _NONE),
    "ended_by": (frozenset(get_args(EndedBy)), _NONE),
    **dict.fromkeys(("started", "ended", "checkpointed", "cpu_seconds"), (*_NUMBER, _NONE)),
    **dict.fromkeys(("used_bytes", "peak_bytes", "pss_bytes", "checkpoint_bytes"), (int, _NONE)),
    **dict.fromkeys(("exit_code", "attempt", "pid", "stopped_pid"), (int, _NONE)),
    **dict.fromkeys(("settled", "stalled", "wants_more", "asked"), (bool, _NONE)),
}


def child_env(job: Job, run: RunDir) -> dict[str, str]:
    """The variables that a job's process gets on top of this one's, before it imports anything.

    >>> child_env(Job("fold_1", command=("true",), threads=2), RunDir(Path("/runs/r")))["OMP_NUM_THREADS"]
    '2'
    """
    env = thread_env(job.threads)
    if job.tight_malloc:
        env |= _TIGHT_MALLOC
    if job.cuda_allocator is not None:
        env |= dict.fromkeys(_CUDA_ALLOCATOR, job.cuda_allocator)
    if job.command:
        env["PYTHONUNBUFFERED"] = "1"  # its log is read while it runs
    return env | {RUN_DIR_VARIABLE: str(run.path), JOB_ID_VARIABLE: job.id} | dict(job.env)


@dataclass
class _Submitted:
    """A job that this backend follows.

    Attributes:
        folder: Its folder.
        attempt: The attempt that is followed; 0 for one taken over before its watcher had told.
        group: Its control group, or None.
        child: The process id of its shim while that is a child of this process; else the job is followed by its lock.
        pidfd: Can be read when the shim has ended.
        to_send: The signal that waits until the shim listens.
        status, read_at, changed: The last status, when it was read by the monotonic clock, and the file's time then.
    """

    folder: Path
    attempt: int
    group: JobGroup | None = None
    child: int | None = None
    pidfd: int | None = None
    to_send: signal.Signals | None = None
    status: JobStatus | None = None
    read_at: float = 0.0
    changed: int = 0


class LocalBackend:
    """Runs jobs as processes of this host.

    All state lies in the run directory: a new supervisor adopts the jobs that still run.

    Args:
        run: The run directory.
        grace_seconds: How long a job that was asked to stop may take to checkpoint.
        walls: Makes a control group for each job that has a grant; without it such a job's data segment is limited.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        grace_seconds: float = 60.0,
        walls: Walls | None = None,
    ) -> None:
        self.run = run
        self.grace_seconds = grace_seconds
        self.walls = walls
        self.traits = Traits(queues_jobs=False, enforces_memory=walls is None, patience_seconds=1.0)
        self._live: dict[str, _Submitted] = {}
        self._ended: dict[str, JobStatus] = {}
        self._adopted: set[str] = set()
        self._granted: dict[str, JobGroup] = {}
        for lock in (run.path / "jobs").glob(f"*/{LOCK}"):
            # What died with its watcher while nobody looked is told so, and not as running for ever. Its first process
            # ended with the watcher, and its number may be another's by now.
            folder = lock.parent
            if _has_no_end(folder) and not is_held(folder):
                _settle(folder)

    @property
    def enforcer(self) -> LocalBackend | None:
        """This object, where there are walls."""
        return self if self.walls is not None else None

    def adopt(self, job_ids: Iterable[str]) -> set[str]:
        """Follow those of these jobs that an earlier supervisor started and that still run; their ids."""
        wanted = set(job_ids)
        for job_id in wanted.difference(self._adopted, self._live):
            if is_held(self.run.job_dir(job_id)):
                self._adopted.add(job_id)
                self._follow(job_id, self._taken_over(self.run.job_dir(job_id)))
        return wanted & self._adopted

    def running(self) -> list[str]:
        """The jobs submitted here that have not ended."""
        self.poll()
        return list(self._live)

    def submit(self, batch: Sequence[Submission]) -> None:
        """Start the shims of jobs.

        Raises:
            UsageError: If a job of one of these ids runs already.
            OSError: For example on a full disk.
        """
        for job, request in batch:
            self._submit(job, request)

    def _submit(self, job: Job, request: Request) -> None:
        folder = self.run.job_dir(job.id)
        if is_new := not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
        if (job.id in self._live and job.id in self.running()) or (not is_new and is_held(folder)):
            raise UsageError(
                f"job {job.id} is running already.",
                rule="a job never runs twice at once.",
                remedy="wait for its end, or give the other job another id",
            )
        attempt, group = 1 if is_new else _next_attempt(folder), self._granted.pop(job.id, None)
        has_limit = group is None and not job.num_devices
        described = {
            **vars(job),  # not asdict, which copies all that lies deeper
            "params": dict(job.params),
            "arguments": dict(job.arguments),
            "attempt": attempt,
            "env": child_env(job, self.run),
            "grace_seconds": self.grace_seconds,
            "footprint": job.footprint.to_dict() if job.footprint else None,
            "cwd": job.cwd or os.getcwd(),
            "group": str(group.path) if group else None,
            "data_limit_bytes": request.limit_bytes if has_limit else None,
        }
        # Not forced to disk: what a power cut takes is run again.
        write_masked(folder / JOB, described, durable=False)
        child = self._start_shim(job.id, folder)
        pidfd = _open_pidfd(child) if child is not None else None
        self._follow(job.id, _Submitted(folder, attempt, group, child, pidfd, read_at=time.monotonic()))

    def grant(self, job_id: str, grant: Grant) -> None:
        """Make the group of a job that is to start, or move the wall of one that runs."""
        submitted = self._live.get(job_id)
        if self.walls is None or (submitted is not None and submitted.group is None):
            return
        with contextlib.suppress(OSError):  # gone with its job, or refused: then its data segment is limited instead
            if submitted is None:
                self._granted[job_id] = self.walls.make(job_id, grant.soft_bytes, grant.wall_bytes)
            else:
                self.walls.resize(job_id, grant.soft_bytes, grant.wall_bytes)
                submitted.read_at = 0.0

    def cap(self, total_bytes: int) -> None:
        """Move the wall of all jobs together."""
        if self.walls is not None:
            with contextlib.suppress(OSError):  # as little to be had as in ``grant``
                self.walls.set_capacity(total_bytes)

    def left_bytes(self) -> int:
        """What jobs that ended left charged to the run."""
        return self.walls.left_bytes() if self.walls is not None else 0

    def poll(self) -> dict[str, JobStatus]:
        """The status of every job submitted here, by id."""
        for job_id, submitted in list(self._live.items()):
            self._read(job_id, submitted)
        self._adopted.difference_update(self._ended)
        return self._ended | {job_id: self._status(job_id) for job_id in self._live}

    def wait(self, seconds: float) -> None:
        """Wait until a job ended, passed its soft bytes or met its wall, or so long."""
        deadline = time.monotonic() + seconds
        handles = [submitted.pidfd for submitted in self._live.values() if submitted.pidfd is not None]
        if len(handles) < len(self._live):
            seconds = min(seconds, _LOOK_SECONDS)
        if self.walls is None:
            poll = select.poll()
            for handle in handles:
                poll.register(handle, select.POLLIN)
            poll.poll(max(0.0, seconds) * 1000)
        elif not self.walls.wait(seconds, *handles) and time.monotonic() < deadline:
            for submitted in self._live.values():
                submitted.read_at = 0.0  # there is news of one of them

    def cancel(self, job_id: str, *, now: bool = False, verdict: Verdict | None = None) -> None:
        """Ask a job to checkpoint and end; with ``now``, end it and all its processes at once.

        With a verdict, one that does not run is recorded with it.
        """
        if verdict is not None and job_id not in self._live:
            self._record(job_id, verdict)
            return
        if job_id not in self._live and job_id not in self._ended:
            raise UsageError(
                f"there is no job {job_id} here.",
                rule="only a job that was submitted can be cancelled.",
                remedy=f"name one of: {', '.join([*self._live, *self._ended]) or 'none was submitted'}",
            )
        submitted = self._live.get(job_id)
        if submitted is None:
            return
        order = {"now": now} | (asdict(verdict) if verdict is not None else {})
        write_atomic(submitted.folder / CANCEL, json.dumps(order) + "\n", durable=False)
        submitted.to_send = signal.SIGQUIT if now else signal.SIGTERM
        _send(submitted)

    def _record(self, job_id: str, verdict: Verdict) -> None:
        """Write a verdict over the outcome of a job that does not run; one that never started has none yet."""
        folder = self.run.job_dir(job_id)
        with contextlib.suppress(OSError):  # on a full disk its last attempt's outcome stays
            folder.mkdir(parents=True, exist_ok=True)
            outcome = (_read_outcome(folder) or {"attempt": 0, "ended": time.time()}) | asdict(verdict)
            write_atomic(folder / OUTCOME, json.dumps(outcome) + "\n")
            self._ended[job_id] = _to_status(job_id, outcome)

    def close(self) -> None:
        """Follow no job any more; those that run go on."""
        for submitted in self._live.values():
            _forget(submitted)

    def _start_shim(self, job_id: str, folder: Path) -> int | None:
        """Start the shim of a job in a session of its own; None when no process can be had."""
        # Without -P a file in this folder named like one of Python's modules would be imported in its place.
        command = [sys.executable, "-P", "-m", "memfit.jobs", "shim", str(self.run.path), "--job", job_id]
        log = f"{folder}/shim.log"
        streams = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        try:
            # Not subprocess, which complains of a child that outlives its parent.
            return os.posix_spawn(sys.executable, command, os.environ, file_actions=streams, setsid=True)
        except OSError as error:  # the job ends as one whose watcher died
            Path(log).write_text(f"no watcher for {job_id}: {error}\n")
            return None

    # Following jobs

    def _follow(self, job_id: str, submitted: _Submitted) -> None:
        self._ended.pop(job_id, None)
        self._live[job_id] = submitted

    def _taken_over(self, folder: Path) -> _Submitted:
        holder, described = read_holder(folder), read_json(folder / JOB, _JOB_SHAPE) or {}
        group = JobGroup.at(Path(described["group"])) if described.get("group") else None
        submitted = _Submitted(folder, holder.attempt if holder else 0, group)
        _watch_holder(submitted)
        return submitted

    def _status(self, job_id: str) -> JobStatus:
        submitted = self._live[job_id]
        return submitted.status or JobStatus(job_id, "pending", attempt=submitted.attempt)

    def _read(self, job_id: str, submitted: _Submitted) -> JobStatus | None:
        """Bring a job's status up to date; None when it has ended."""
        if _has_shim(submitted):
            # Also for the moment between its outcome and its end: an ended job has no process left.
            if submitted.to_send is not None:
                _send(submitted)
            if time.monotonic() - submitted.read_at >= _FRESH_SECONDS:
                submitted.read_at = time.monotonic()
                submitted.status = _read_running(job_id, submitted)
            return self._status(job_id)
        outcome = _read_outcome(submitted.folder) or _bury(submitted)
        self._ended[job_id] = _to_status(job_id, outcome)
        del self._live[job_id]
        _forget(submitted)
        if self.walls is not None:
            self.walls.forget(job_id)
        return None


def _has_shim(submitted: _Submitted) -> bool:
    """Whether a shim watches the job: the one that was started here or, when that found it taken, another one."""
    if submitted.child is not None:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(submitted.child, os.WNOHANG)[0] == 0:
                return True
        submitted.child = None
        _forget(submitted)
        _watch_holder(submitted)
    return is_held(submitted.folder)


def _watch_holder(submitted: _Submitted) -> None:
    """Have the end of the shim that holds the job's lock wake ``wait``."""
    holder = read_holder(submitted.folder)
    if holder is not None:
        submitted.pidfd = _open_pidfd(holder.pid)
        if not is_held(submitted.folder):  # the number may be another's by now
            _forget(submitted)


def _open_pidfd(pid: int) -> int | None:
    """A descriptor that can be read when a process has ended; None when it has, or where there are none such."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _send(submitted: _Submitted) -> None:
    """Send the signal that waits, as soon as the shim listens: before that it would end it without an outcome."""
    holder = read_holder(submitted.folder)
    if holder is None or holder.attempt != (submitted.attempt or holder.attempt) or submitted.to_send is None:
        return
    if is_held(submitted.folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(holder.pid, submitted.to_send)
        submitted.to_send = None


def _forget(submitted: _Submitted) -> None:
    if submitted.pidfd is not None:
        os.close(submitted.pidfd)
        submitted.pidfd = None


def _read_running(job_id: str, submitted: _Submitted) -> JobStatus:
    """A running job's status: from its file, its lock while it is young, and its group."""
    folder, known = submitted.folder, submitted.status
    try:
        changed = (folder / STATUS).stat().st_mtime_ns
    except OSError:
        changed = 0
    if known is None or changed != submitted.changed or time.time_ns() - changed > 2_000_000_000:
        found = _read_record(folder / STATUS) if changed else None
        holder = read_holder(folder)
        if holder is not None and submitted.attempt not in (0, holder.attempt):
            holder = None
        if found is not None:
            known = _to_status(job_id, found)
        elif holder is not None and holder.started is not None:
            about = {"attempt": holder.attempt, "pid": holder.job_pid, "started": holder.started}
            known = JobStatus(job_id, "running", **about)  # type: ignore[arg-type]
        else:
            known = JobStatus(job_id, "pending", attempt=submitted.attempt or 1)
        submitted.changed = changed if found is not None else 0
    state = submitted.group.state() if submitted.group is not None else None
    if state is None:
        return known
    return replace(
        known,
        used_bytes=state.used_bytes,
        peak_bytes=max(known.peak_bytes, state.used_bytes),
        stalled=state.stalled,
        wants_more=known.wants_more or state.stalled,
    )


def _has_no_end(folder: Path) -> bool:
    """Whether the attempt that was ordered last was begun and no outcome of it is there."""
    if _read_outcome(folder) is not None or (holder := read_holder(folder)) is None:
        return False
    described = _read_json_or_none(folder / JOB, _JOB_SHAPE) or {}
    return described.get("attempt") == holder.attempt and not (folder / f"outcome_{holder.attempt}.json").exists()


def _read_outcome(folder: Path) -> dict[str, Any] | None:
    return _read_record(folder / OUTCOME)


def _read_record(path: Path) -> dict[str, Any] | None:
    """Return a job's record; None also for an empty one, as a power cut leaves of one not forced to disk."""
    try:
        return read_json(path, _STATUS_SHAPE)
    except DamagedError:
        with contextlib.suppress(OSError):  # moved away meanwhile
            if path.stat().st_size:
                raise
        return None


def _bury(submitted: _Submitted) -> dict[str, Any]:
    """Settle a job whose shim died without an outcome: end what it left, and write that down."""
    folder, holder = submitted.folder, read_holder(submitted.folder)
    if holder is not None and holder.job_pid is not None and submitted.attempt in (0, holder.attempt):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(holder.job_pid, signal.SIGKILL)
    return _settle(folder, "; its processes were ended")


def _settle(folder: Path, more: str = "") -> dict[str, Any]:
    cause = f"its watcher died without a word (see {folder / 'shim.log'}){more}"
    described = _read_json_or_none(folder / JOB, _JOB_SHAPE) or {}
    if described.get("group"):
        group = JobGroup.at(Path(described["group"]))
        group.kill()
        if not described.get("keeps_group"):
            group.remove()
    holder, last = read_holder(folder), _read_json_or_none(folder / STATUS, _STATUS_SHAPE) or {}
    first = {"attempt": holder.attempt, "started": holder.started} if holder else {}
    ended = {"state": "node_fail", "cause": cause, "ended": time.time(), "ended_by": "platform"}
    outcome = first | last | ended | {"used_bytes": 0, "pss_bytes": 0, "stalled": False, "stopped_pid": None}
    with contextlib.suppress(OSError):  # on a full disk it is settled again by the next supervisor
        write_atomic(folder / OUTCOME, json.dumps(outcome) + "\n")
        (folder / STATUS).unlink(missing_ok=True)
    return outcome


def _read_json_or_none(path: Path, shape: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        return read_json(path, shape)
    except DamagedError:
        return None


def _next_attempt(folder: Path) -> int:
    """The next attempt's number; the last attempt's outcome is kept under its number."""
    if (_read_json_or_none(folder / OUTCOME, _STATUS_SHAPE) or {}).get("attempt") == 0:  # recorded without a start
        (folder / OUTCOME).unlink()
    # What was ordered last counts: it stays whole when a supervisor is killed between the steps below.
    described = _read_json_or_none(folder / JOB, _JOB_SHAPE)
    last = int(described["attempt"]) if described else _last_kept(folder)
    if (folder / OUTCOME).exists():
        os.replace(folder / OUTCOME, folder / f"outcome_{last}.json")
    if last:
        for name in (STATUS, CANCEL, STOP_REQUESTED):
            (folder / name).unlink(missing_ok=True)
    return last + 1


def _last_kept(folder: Path) -> int:
    numbers = [int(found[1]) for path in folder.iterdir() if (found := re.fullmatch(r"outcome_(\d+)\.json", path.name))]
    return max(numbers, default=0) + (folder / OUTCOME).exists()


_PLAIN = frozenset(field.name for field in fields(JobStatus)) - {"job_id", "footprint"}


def _to_status(job_id: str, found: Mapping[str, Any]) -> JobStatus:
    """A ``status.json`` or ``outcome.json`` as a status."""
    footprint = found.get("footprint")
    plain = {name: value for name, value in found.items() if name in _PLAIN and value is not None}
    return JobStatus(job_id, footprint=Footprint.from_dict(footprint) if footprint else None, **plain)


def read_status(run: RunDir, job_id: str) -> JobStatus:
    """A job's status from its files alone, for readers that did not submit it."""
    folder = run.job_dir(job_id)
    found = _read_outcome(folder) or _read_record(folder / STATUS)
    if found is not None:
        return _to_status(job_id, found)
    return JobStatus(job_id, "pending")
