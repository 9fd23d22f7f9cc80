"""The local backend: runs each job as a process of this host, beside a shim that owns its outcome."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memfit.errors import DamagedError
from memfit.files import refresh
from memfit.jobs._folder import LOCK, child_env, other_host, read_order, write_order, write_outcome
from memfit.jobs._follow import CACHED_SECONDS, Followed, FollowingBackend, runs_already
from memfit.jobs._fork import is_alive, start_interpreter
from memfit.jobs._job import Job, Submission, Traits
from memfit.jobs._processes import end_group
from memfit.jobs._warm import Parent
from memfit.memory import JobGroup, Walls, is_locked, lock_file
from memfit.rundir import OUTCOME, STATUS, JobStatus, RunDir, read_record
from memfit.units import MIB, format_bytes

_LEAST = 16 * MIB  # below it an exec or a fork fails


@dataclass
class _Followed(Followed):
    """``shim`` is its watcher, if that is known already; ``is_child`` if of this process; ``host`` if not here."""

    group: JobGroup | None = None
    shim: int | None = None
    is_child: bool = False
    host: str = ""


class LocalBackend(FollowingBackend[_Followed]):
    """Runs jobs as processes of this host. ``walls`` makes a control group for each job that has a grant; without it,
    RLIMIT_DATA limits the job's processes. Functions are forked from ``parent``; without it, each starts in a new
    interpreter."""

    def __init__(
        self,
        run: RunDir,
        *,
        grace_seconds: float = 60.0,
        walls: Walls | None = None,
        parent: Parent | None = None,
    ) -> None:
        super().__init__(run, grace_seconds)
        self.enforcer, self.parent = walls, parent
        self._plain: Parent | None = None  # from which the shims of commands are forked that start beside others
        self.traits = Traits(enforces_memory=walls is None, least_bytes=_LEAST)
        for folder in sorted((run.path / "jobs").glob("*")):
            # Look at the lock first: a job that is not held now has written its outcome, or never will.
            if is_locked(folder / LOCK) or (refresh(folder) and not (folder / OUTCOME).exists() and other_host(folder)):
                self._adopt(folder)
            elif (folder / STATUS).exists() and not (folder / OUTCOME).exists():
                _settle(folder)
                if walls is not None:
                    walls.forget(folder.name)

    def _adopt(self, folder: Path) -> None:
        job_id, order, host = folder.name, read_order(folder), other_host(folder)
        group = JobGroup.at(Path(order["group"])) if order.get("group") and not host else None
        status = JobStatus(job_id, "pending", attempt=order.get("attempt", 1))
        self._live[job_id] = _Followed(folder, status, group=group, host=host)
        self._adopted.add(job_id)

    def submit(self, batch: Sequence[Submission]) -> None:
        """Start the shims of jobs; an OSError comes for example from a full disk."""
        for job, limit_bytes in batch:
            self._submit(job, limit_bytes)

    def _submit(self, job: Job, limit_bytes: int | None) -> None:
        folder = self.run.job_dir(job.id)
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_file(folder / LOCK)  # held by the shim of a job that runs
        if lock is None:
            raise runs_already(job.id)
        try:
            if job.id in self._live:
                self._look(job.id, self._live[job.id])
            group = self.enforcer.find(job.id) if self.enforcer else None
            attempt = write_order(
                self.run,
                job,
                host=socket.gethostname(),
                grace_seconds=self.grace_seconds,
                group=str(group.path) if group else None,
                data_limit_bytes=limit_bytes if group is None and not job.num_devices else None,
            )
            status, forked = JobStatus(job.id, "pending", attempt=attempt), self._fork_shim(job, folder, lock)
            shim = forked or self._start_shim(job.id, folder, lock)
            followed = _Followed(folder, status, group=group, shim=shim, is_child=shim != forked)
        finally:
            os.close(lock)
        self._begin(job.id, followed)

    def _fork_shim(self, job: Job, folder: Path, lock: int) -> int | None:
        """Fork the shim of a job from a process that has imported what it needs; None where that cannot be."""
        if job.target is None:
            with contextlib.suppress(OSError):
                self._plain = self._plain or (Parent.start("", os.environ) if self._live else None)
            return self._plain.start_shim(folder, lock) if self._plain is not None else None
        parent = self.parent
        if parent is not None and parent.takes(child_env(job, self.run)):
            parent.load(uses=job.uses)
            if not parent.refused:
                if (shim := parent.start_shim(folder, lock)) is not None:
                    return shim
                parent.refused = "the process from which they are forked has ended"
            self._part_with(parent)
        return None

    def make_room(self) -> bool:
        """End the process from which functions are forked, whose memory a job may need to fit."""
        if (parent := self.parent) is None:
            return False
        parent.refused = f"a job needs the {format_bytes(parent.used_bytes)} of the process from which they are forked"
        self._part_with(parent)
        return True

    def _part_with(self, parent: Parent) -> None:
        self.say(f"jobs start in new interpreters: {parent.refused}")
        self.parent = None
        parent.close()

    def close(self) -> None:
        """End the process from which shims of commands are forked."""
        if self._plain is not None:
            self._plain.close()

    def _start_shim(self, job_id: str, folder: Path, lock: int) -> int | None:
        """Start the shim of a job in an interpreter of its own; None when no process can be had."""
        log = f"{folder}/shim.log"
        try:
            words = ["shim", str(self.run.path), "--job", job_id, "--lock", str(lock)]
            return start_interpreter(words, lock, env=os.environ, log=log)
        except OSError as error:  # the job ends as one whose watcher died
            Path(log).write_text(f"no watcher for {job_id}: {error}\n")
            return None

    def _watcher(self, followed: _Followed) -> int | None:
        return None if followed.host else followed.shim or followed.status.watcher_pid

    def _look(self, job_id: str, followed: _Followed) -> None:
        if _has_shim(followed):  # also between its outcome and its end: a job that has ended has no process left
            _read_running(followed)
            return
        refresh(followed.folder)
        status = read_record(followed.folder / OUTCOME)
        if status is None and followed.host:
            if self._may_come(followed, CACHED_SECONDS, f"on {followed.host}"):
                return
            cause = f"its watcher on {followed.host} died (see {followed.folder / 'shim.log'})"
            status = followed.status.ended_as("node_fail", cause, "platform")
        elif status is None:
            if followed.status.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(followed.status.pid, signal.SIGKILL)
            status = _settle(followed.folder)
        self._end(job_id, status)
        if self.enforcer is not None:
            self.enforcer.forget(job_id)


def _has_shim(followed: _Followed) -> bool:
    if followed.is_child:
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(followed.shim or 0, os.WNOHANG)[0] == 0
        return False
    if is_locked(followed.folder / LOCK):
        return True
    # Its folder may be out of reach for a while.
    return followed.shim is not None and not (followed.folder / LOCK).exists() and is_alive(followed.shim)


def _read_running(followed: _Followed) -> None:
    wanted_more = followed.status.wants_more  # its shim may not have seen that
    followed.read_status()
    known, state = followed.status, followed.group.state() if followed.group is not None else None
    if state is not None:
        peak_bytes = max(known.peak_bytes, state.used_bytes)
        known = replace(known, used_bytes=state.used_bytes, peak_bytes=peak_bytes, stalled=state.stalled)
    followed.status = replace(known, wants_more=wanted_more or known.wants_more or known.stalled)


def _settle(folder: Path) -> JobStatus:
    """End what is left of a job whose shim died without an outcome, and write one."""
    order = read_order(folder)
    if order.get("group") and not RunDir(folder.parents[1]).is_copy:
        end_group(JobGroup.at(Path(order["group"])), keep=bool(order.get("keeps_group")))
    last = JobStatus(folder.name, "pending", attempt=order.get("attempt", 1))
    with contextlib.suppress(DamagedError):
        last = read_record(folder / STATUS) or last
    cause = f"its watcher died (see {folder / 'shim.log'}); its processes were ended"
    status = last.ended_as("node_fail", cause, "platform")
    write_outcome(folder, status)
    return status
