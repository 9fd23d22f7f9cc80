"""The local backend: each job in a process of its own beside a shim that owns its outcome."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from memfit.errors import DamagedError, UsageError
from memfit.jobs._job import STATES, Grant, Job, JobStatus, Verdict
from memfit.jobs._link import KeeperLink, no_keeper, open_pidfd
from memfit.jobs._lock import (
    JOB,
    LOCK,
    OUTCOME,
    STATUS,
    STOP_REQUESTED,
    VERDICT,
    is_held,
    read_holder,
)
from memfit.jobs._shim import BUSY
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
_MOST_KEEPERS = 3

_NUMBER, _NONE = (int, float), type(None)
_JOB_SHAPE = {"attempt": int, "group": (str, _NONE)}
#: What ``status.json`` and ``outcome.json`` must hold.
_STATUS_SHAPE: Mapping[str, Any] = {
    "state": frozenset(STATES),
    "phase": (str, _NONE),
    "cause": (str, _NONE),
    "footprint": (FOOTPRINT, _NONE),
    "evidence": (dict, _NONE),
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
        by_lock: It is followed by its lock: another keeper forked its shim.
        has_ended: Its keeper said that its shim has ended.
        pidfd: Can be read when the shim of a job followed by its lock has ended.
        to_send: The signal that waits until the shim listens.
        status, read_at, changed: The last status, when it was read by the monotonic clock, and the file's time then.
    """

    folder: Path
    attempt: int
    group: JobGroup | None = None
    by_lock: bool = False
    has_ended: bool = False
    pidfd: int | None = None
    to_send: signal.Signals | None = None
    status: JobStatus | None = None
    read_at: float = 0.0
    changed: int = 0


class LocalBackend:
    """Runs jobs as processes of this host.

    All state lies in the run directory: a new supervisor that submits the same job takes over the one that still runs,
    and reads the outcome of one that ended in between.

    Args:
        run: The run directory.
        grace_seconds: How long a job that was asked to stop may take to checkpoint.
        walls: Makes a control group for each job that has a grant; without it such a job's data segment is limited.
        keeper_prefix: The words before the keeper's command, for example to start it in a scope of its own.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        grace_seconds: float = 60.0,
        walls: Walls | None = None,
        keeper_prefix: Sequence[str] = (),
    ) -> None:
        self.run = run
        self.grace_seconds = grace_seconds
        self.walls = walls
        self._prefix = tuple(keeper_prefix)
        self._keeper: KeeperLink | None = None
        self._num_lost = 0
        self._live: dict[str, _Submitted] = {}
        self._ended: dict[str, JobStatus] = {}
        self._found_running: set[str] = set()
        for lock in (run.path / "jobs").glob(f"*/{LOCK}"):
            # What died with its watcher while nobody looked is told so, and not as running for ever. Its first process
            # ended with the watcher, and its number may be another's by now.
            folder = lock.parent
            if _has_no_end(folder) and not self.is_running(folder.name):
                _settle(folder)

    def keeper_pid(self) -> int:
        """The process id of the keeper, which is started if there is none: walls can be built below its group."""
        return self._get_keeper().wait_for_pid()

    def is_running(self, job_id: str) -> bool:
        """Whether a job of this run's that anybody started runs now; ``submit`` then takes it over, ended or not."""
        held = is_held(self.run.job_dir(job_id))
        if held:
            self._found_running.add(job_id)
        return held

    def running(self) -> list[str]:
        """The jobs submitted here that have not ended."""
        self.poll()
        return list(self._live)

    def submit(self, job: Job, grant: Grant | None = None) -> None:
        """Start a job's shim; a job of that id that still runs is taken over instead.

        Raises:
            UsageError: If this backend runs a job of that id already.
            OSError: For example on a full disk.
        """
        if job.id in self._live and job.id in self.running():
            raise UsageError(
                f"job {job.id} is running already.",
                rule="a job never runs twice at once.",
                remedy="wait for its end, or give the other job another id",
            )
        folder = self.run.job_dir(job.id)
        if is_new := not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
        if job.id in self._found_running or (not is_new and is_held(folder)):
            self._found_running.discard(job.id)
            self._follow(job.id, self._taken_over(folder))
            if grant is not None:
                self.resize(job.id, grant)
            return
        attempt = 1 if is_new else _next_attempt(folder)
        group = self._make_group(job.id, grant)
        has_limit = grant is not None and group is None and job.device_bytes is None
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
            "data_limit_bytes": grant.wall_bytes if grant and has_limit else None,
        }
        # Not forced to disk: what a power cut takes is run again.
        write_masked(folder / JOB, described, durable=False)
        self._follow(job.id, _Submitted(folder, attempt, group, read_at=time.monotonic()))
        self._order_shim(job.id)

    def resize(self, job_id: str, grant: Grant) -> None:
        """Move a running job's wall; does nothing for one that has ended or has no group."""
        submitted = self._live.get(job_id)
        if self.walls is not None and submitted is not None and submitted.group is not None:
            with contextlib.suppress(OSError):  # gone with its job
                self.walls.resize(job_id, grant.soft_bytes, grant.wall_bytes)
            submitted.read_at = 0.0

    def cap(self, total_bytes: int) -> None:
        """Move the wall of all jobs together."""
        if self.walls is not None:
            with contextlib.suppress(OSError):  # as little to be had as in ``resize``
                self.walls.set_capacity(total_bytes)

    def poll(self) -> dict[str, JobStatus]:
        """The status of every job submitted here, by id."""
        self._hear()
        for job_id, submitted in list(self._live.items()):
            self._read(job_id, submitted)
        return self._ended | {job_id: self._status(job_id) for job_id in self._live}

    def wait(self, seconds: float) -> None:
        """Wait until a job ended, passed its soft bytes or met its wall, or so long."""
        deadline = time.monotonic() + seconds
        handles = [self._keeper.fileno()] if self._keeper is not None else []
        for submitted in self._live.values():
            if submitted.by_lock and submitted.pidfd is not None:
                handles.append(submitted.pidfd)
            elif submitted.by_lock:
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
        if verdict is not None:
            with contextlib.suppress(OSError):  # on a full disk it is told as cancelled
                write_atomic(submitted.folder / VERDICT, json.dumps(asdict(verdict)) + "\n", durable=False)
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
        """Have the keeper leave; jobs that run go on."""
        for submitted in self._live.values():
            _forget(submitted)
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
            for submitted in self._live.values():
                submitted.by_lock = True

    # The keeper

    def _get_keeper(self) -> KeeperLink:
        if self._keeper is None:
            self._keeper = KeeperLink(self.run.path, self._prefix)
        return self._keeper

    def _order_shim(self, job_id: str) -> None:
        while True:
            try:
                self._get_keeper().order(job_id)
                return
            except ConnectionError:
                self._lose_keeper(besides=job_id)

    def _hear(self) -> None:
        """Take note of the shims that ended, and of the keeper's own end."""
        while self._keeper is not None:
            ends = self._keeper.ends()
            if ends is None:
                self._lose_keeper()
                return
            if not ends:
                return
            for job_id, code in ends:
                submitted = self._live.get(job_id)
                if submitted is None or submitted.by_lock:
                    continue
                if code == BUSY or is_held(submitted.folder):  # another shim has it, whoever ordered that one
                    self._follow_by_lock(submitted)
                else:
                    submitted.has_ended = True

    def _lose_keeper(self, besides: str = "") -> None:
        """Follow the shims of a keeper that died by their locks; those that it had not forked are ordered again."""
        if self._keeper is None:
            return
        started, log = self._keeper.pid is not None, self._keeper.log
        self._keeper.close()
        self._keeper = None
        self._num_lost = 0 if started else self._num_lost + 1
        if self._num_lost >= _MOST_KEEPERS:
            raise no_keeper(log)
        for job_id, submitted in list(self._live.items()):
            if submitted.by_lock or submitted.has_ended or job_id == besides:
                continue
            holder = read_holder(submitted.folder)
            if holder is not None and holder.attempt == submitted.attempt:
                self._follow_by_lock(submitted)
            elif _read_outcome(submitted.folder) is not None:
                submitted.has_ended = True
            else:  # a shim that is just being forked finds the lock held or the outcome written, or the other one does
                self._order_shim(job_id)

    # Following jobs

    def _follow(self, job_id: str, submitted: _Submitted) -> None:
        self._ended.pop(job_id, None)
        self._live[job_id] = submitted

    def _taken_over(self, folder: Path) -> _Submitted:
        holder, described = read_holder(folder), read_json(folder / JOB, _JOB_SHAPE) or {}
        group = JobGroup.at(Path(described["group"])) if described.get("group") else None
        submitted = _Submitted(folder, holder.attempt if holder else 0, group)
        self._follow_by_lock(submitted)
        return submitted

    def _follow_by_lock(self, submitted: _Submitted) -> None:
        submitted.by_lock = True
        holder = read_holder(submitted.folder)
        if holder is not None:
            submitted.pidfd = open_pidfd(holder.pid)
            if submitted.pidfd is not None and not is_held(submitted.folder):  # the number may be another's by now
                _forget(submitted)

    def _make_group(self, job_id: str, grant: Grant | None) -> JobGroup | None:
        if self.walls is None or grant is None:
            return None
        try:
            return self.walls.make(job_id, grant.soft_bytes, grant.wall_bytes)
        except OSError:
            return None  # its data segment is limited instead

    def _status(self, job_id: str) -> JobStatus:
        submitted = self._live[job_id]
        return submitted.status or JobStatus(job_id, "pending", attempt=submitted.attempt)

    def _read(self, job_id: str, submitted: _Submitted) -> JobStatus | None:
        """Bring a job's status up to date; None when it has ended."""
        alive = is_held(submitted.folder) if submitted.by_lock else not submitted.has_ended
        if alive:
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
        if holder is not None and holder.note:
            known = replace(known, cause=holder.note)
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
    logs = (folder / "shim.log", folder.parent.parent / "keeper.log")
    cause = f"its watcher died without a word (see {next(filter(Path.exists, logs), logs[1])}){more}"
    described = _read_json_or_none(folder / JOB, _JOB_SHAPE) or {}
    if described.get("group"):
        group = JobGroup.at(Path(described["group"]))
        group.kill()
        if not described.get("keeps_group"):
            group.remove()
    holder, last = read_holder(folder), _read_json_or_none(folder / STATUS, _STATUS_SHAPE) or {}
    first = {"attempt": holder.attempt, "started": holder.started} if holder else {}
    ended = {"state": "node_fail", "cause": cause, "ended": time.time()}
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
        for name in (STATUS, VERDICT, STOP_REQUESTED):
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
