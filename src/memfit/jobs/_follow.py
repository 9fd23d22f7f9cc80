"""Follows jobs by their folders: what the backends of this host and of Slurm have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from memfit.errors import UsageError
from memfit.files import until_next_look
from memfit.jobs._folder import STOP_REQUESTED, ask_to_stop, write_outcome
from memfit.jobs._fork import wait_for_any
from memfit.jobs._job import Verdict
from memfit.rundir import OUTCOME, STATUS, JobStatus, RunDir, read_record


@dataclass
class Followed:
    """A job that a backend follows; ``changed`` is the time of the status file that was read last, in nanoseconds."""

    folder: Path
    status: JobStatus
    changed: int = 0
    verdict: Verdict | None = None
    ended_since: float | None = None

    def read_status(self) -> None:
        path = self.folder / STATUS
        with suppress(OSError):
            changed = path.stat().st_mtime_ns
            if changed != self.changed:
                self.status, self.changed = read_record(path) or self.status, changed


F = TypeVar("F", bound=Followed)
CACHED_SECONDS = 61.0  # how long an NFS client may take a file for absent: ``actimeo``, 60 s by default


class FollowingBackend(ABC, Generic[F]):
    """Follows the jobs that it submitted or adopted until each has an outcome. See ``Backend`` for the methods."""

    look_seconds = 0.05
    now: Callable[[], float] = staticmethod(time.monotonic)
    say: Callable[[str], None] = staticmethod(lambda text: None)

    def __init__(self, run: RunDir, grace_seconds: float) -> None:
        self.run, self.grace_seconds = run, grace_seconds
        self._live: dict[str, F] = {}
        self._ended: dict[str, JobStatus] = {}
        self._adopted: set[str] = set()

    @abstractmethod
    def _look(self, job_id: str, followed: F) -> None:
        """Bring a job's status up to date; end it here if it has ended."""

    def adopt(self, job_ids: Iterable[str]) -> set[str]:
        return self._adopted.intersection(job_ids)

    def poll(self) -> dict[str, JobStatus]:
        for job_id, followed in list(self._live.items()):
            with until_next_look():
                self._look(job_id, followed)
        return self._ended | {job_id: followed.status for job_id, followed in self._live.items()}

    def wait(self, seconds: float) -> None:
        wait_for_any(filter(None, map(self._watcher, self._live.values())), min(seconds, self.look_seconds))

    def _watcher(self, followed: F) -> int | None:
        """Return the process on this host whose end is that of a job."""

    def cancel(self, job_id: str, *, now: bool = False, verdict: Verdict | None = None) -> None:
        if (followed := self._live.get(job_id)) is not None:
            self._adopted.discard(job_id)
            followed.verdict = verdict or followed.verdict
            ask_to_stop(followed.folder, now=now)
        elif verdict is not None:
            folder = self.run.job_dir(job_id)
            folder.mkdir(parents=True, exist_ok=True)
            known = read_record(folder / OUTCOME) or JobStatus(job_id, "pending", attempt=0, ended=time.time())
            self._ended[job_id] = replace(known, state=verdict.state, cause=verdict.cause)
            write_outcome(folder, self._ended[job_id])
        elif job_id not in self._ended:
            raise UsageError(
                f"there is no job {job_id} here.",
                rule="only a job that was submitted can be cancelled.",
                remedy=f"name one of: {', '.join([*self._live, *self._ended]) or 'none was submitted'}",
            )

    def make_room(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: jobs that run go on, and nothing is held for them here."""

    def _may_come(self, followed: F, seconds: float, where: str) -> bool:
        """Return whether a job that seems to have ended may have an outcome that its folder does not show yet."""
        since, changed = followed.ended_since, followed.changed
        followed.read_status()
        if since is None or followed.changed != changed:  # it lives, where locks hold on one host only
            followed.ended_since = self.now()
        if since is None and seconds >= CACHED_SECONDS:
            self.say(f"{followed.status.job_id} has ended {where}: waiting up to {seconds:.0f} s for its outcome (NFS)")
        return self.now() - (followed.ended_since or 0.0) < seconds

    def _begin(self, job_id: str, followed: F) -> None:
        self._ended.pop(job_id, None)
        self._adopted.discard(job_id)
        self._live[job_id] = followed

    def _end(self, job_id: str, status: JobStatus, *, is_new: bool = False) -> None:
        """Record how a job ended; ``is_new`` if its folder does not say so yet."""
        followed = self._live.pop(job_id)
        verdict = followed.verdict if status.ended_by == "user" else None
        if verdict is not None:
            status = replace(status, state=verdict.state, cause=verdict.cause)
        if is_new or verdict is not None or not (followed.folder / OUTCOME).exists():
            write_outcome(followed.folder, status)
        (followed.folder / STOP_REQUESTED).unlink(missing_ok=True)  # obeyed
        self._ended[job_id] = status


def runs_already(job_id: str) -> UsageError:
    return UsageError(
        f"job {job_id} is running already.",
        rule="a job never runs twice at once.",
        remedy="wait for its end, or give the other job another id",
    )
