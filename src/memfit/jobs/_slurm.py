"""The Slurm backend: runs each job as an element of a job array, beside the same shim as on this host.

A shim's files say how its job runs and how it ended. Slurm is asked about jobs in its queue, and about those that ended
without an outcome.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from memfit import slurm
from memfit.amounts import Amount
from memfit.config import ByteSize, Settings
from memfit.errors import UsageError
from memfit.files import read_json, refresh, write_atomic, write_json
from memfit.jobs._folder import STOP_REQUESTED, read_order, write_order
from memfit.jobs._follow import CACHED_SECONDS, Followed, FollowingBackend, runs_already
from memfit.jobs._job import Job, Submission, Traits, Verdict
from memfit.rundir import ENDED, OUTCOME, EndedBy, JobStatus, RunDir, State, read_record
from memfit.units import MIB, format_count

SHIM: Amount = Amount(16 * MIB, "node")  # what the shim takes beside its job
#: The same on the first of several nodes, with srun and the shim that follows the others.
_NODES = Amount(64 * MIB, "node")
_START = ("-P", "-m", "memfit.jobs", "shim")
_MOST_ELEMENTS = 1000  # the largest index of an array is 1000 on a cluster with Slurm's defaults
#: How often the queue is asked at first, and at most how seldom while nothing changes.
_FIRST_SECONDS, _LAST_SECONDS = 2.0, 60.0
#: How long a folder is read after it changed: what changes it twice in a few milliseconds shows once.
_NEWS_SECONDS = 2.0
_HELD = "launch failed requeued held"  # why Slurm holds an element that it could not start, in the words of squeue
#: How long an outcome may come after Slurm knows the end: at once for a job that never began, else an NFS cache's time.
_LATE_SECONDS, _LATEST_SECONDS = 2.0, CACHED_SECONDS
#: How long a job may run by Slurm and leave no file before it is taken for lost, as after a controller's crash.
_SILENT_SECONDS = 180.0
#: The state of an element that neither the queue nor the accounting knows: Slurm keeps no record of one that was
#: cancelled while it waited and others of its array go on.
_GONE = "nothing of it any more"
#: How an end without an outcome is recorded.
_ENDS: dict[str, tuple[State, EndedBy]] = {
    "OUT_OF_MEMORY": ("out_of_memory", "job"),
    "TIMEOUT": ("timeout", "platform"),
    "DEADLINE": ("timeout", "platform"),
    "PREEMPTED": ("preempted", "platform"),
    "REVOKED": ("preempted", "platform"),
    "NODE_FAIL": ("node_fail", "platform"),
    "BOOT_FAIL": ("node_fail", "platform"),
    "CANCELLED": ("cancelled", "user"),
    _GONE: ("cancelled", "user"),
    "FAILED": ("failed", "job"),
    "COMPLETED": ("node_fail", "platform"),
}


class SlurmOptions(Settings):
    """What each job asks of Slurm, with ``backend: slurm``. Memory comes from its forecast."""

    partition: str = ""  # empty: the cluster's default
    account: str = ""  # empty: your default
    qos: str = ""
    extra: tuple[str, ...] = ()  # further options of sbatch, such as ``--constraint=a100``
    time: str = ""  # of one job, as ``sbatch --time`` takes it: ``08:00:00``; empty: the partition's
    memory: ByteSize = ByteSize(4 << 30)  # what a job asks for on each node while its size is unknown
    nodes: Annotated[int, Field(ge=1)] = 1  # of one job, whose GPUs are spread over them; each runs its command once

    @property
    def options(self) -> dict[str, str]:
        return {"partition": self.partition, "account": self.account, "qos": self.qos}


class _Request(NamedTuple):
    """What a job asks of Slurm: memory of each node, ranks and GPUs on each, and the CPUs of each rank."""

    memory: Amount
    num_ranks: int
    num_cpus: int
    num_gpus: int
    options: SlurmOptions

    @classmethod
    def of(cls, job: Job, limit_bytes: int | None, options: SlurmOptions) -> _Request:
        if job.target and job.ranks == 1:  # a function of one process has one node, whatever the others have
            options = options.model_copy(update={"nodes": 1})
        ranks, cpus = max(1, job.ranks // options.nodes), math.ceil(job.threads / job.ranks)
        memory = Amount(limit_bytes or options.memory, "node") + (SHIM if options.nodes == 1 else _NODES)
        memory += SHIM if ranks > 1 else Amount(0, "node")
        return cls(memory, ranks, cpus, job.num_devices // options.nodes, options)

    def to_options(self) -> dict[str, str]:
        return {
            **self.options.options,
            "time": self.options.time,
            "nodes": str(self.options.nodes),
            "ntasks-per-node": str(self.num_ranks),
            "cpus-per-task": str(self.num_cpus),
            "gres": f"gpu:{self.num_gpus}" if self.num_gpus else "",
            "mem": f"{math.ceil(self.memory.bytes / MIB)}M",
        }

    def to_step(self) -> list[str]:
        """Return the options of ``srun`` that start one task on each node, which has all that the job has there."""
        nodes, gpus = self.options.nodes, [f"--gres=gpu:{self.num_gpus}"] * bool(self.num_gpus)
        cpus = f"--cpus-per-task={self.num_ranks * self.num_cpus}"
        return [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", cpus, *gpus, "--mem=0"]


@dataclass
class _Array:
    """An array: its name, the number that Slurm gave it (empty until then), and its jobs with their attempts."""

    path: Path
    name: str
    jobs: list[tuple[str, int]]
    number: str = ""
    was_tried: bool = False

    def save(self) -> None:
        write_json(self.path, {"name": self.name, "number": self.number, "jobs": self.jobs})


@dataclass(kw_only=True)
class _Followed(Followed):
    array: _Array
    index: int
    silent_since: float | None = None
    is_stopping: bool = False
    folder_changed: int = 0
    news_until: float = 0.0

    @property
    def element(self) -> str:
        return f"{self.array.number}_{self.index}" if self.array.number else ""


class SlurmBackend(FollowingBackend[_Followed]):
    """Runs jobs as elements of Slurm arrays. All state lies in the run directory, which nodes share, and in Slurm."""

    enforcer = None
    traits = Traits(enforces_memory=True, is_cluster=True)
    look_seconds = 0.2

    def __init__(
        self,
        run: RunDir,
        options: SlurmOptions | None = None,
        *,
        grace_seconds: float = 60.0,
        max_parallel: int | None = None,
        by_stage: Mapping[str, SlurmOptions] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(run, grace_seconds)
        self.options, self.by_stage = options or SlurmOptions(), by_stage or {}
        self.max_parallel, self.now = max_parallel, now
        for one in (self.options, *self.by_stage.values()):  # refused here, before any job
            self._script(_Array(run.path / "slurm/0.json", "mf", []), _Request(SHIM, 1, 1, 0, one))
        self._arrays: list[_Array] = []
        self._names: set[str] = set()
        self._queue: dict[str, slurm.Element] | None = None
        self._ends: dict[str, str] = {}
        self._absent: set[str] = set()
        self._ask_at, self._pause = 0.0, _FIRST_SECONDS
        for path in sorted((run.path / "slurm").glob("*.json")):
            self._recall(path)

    def _recall(self, path: Path) -> None:
        """Follow the jobs of an array of an earlier supervisor that have not ended."""
        found = read_json(path, {"name": str, "number": str, "jobs": [[(str, int)]]})
        if found is None:
            return
        array = _Array(path, found["name"], [tuple(one) for one in found["jobs"]], found["number"], was_tried=True)
        for index, (job_id, attempt) in enumerate(array.jobs):
            refresh(folder := self.run.job_dir(job_id))
            if read_order(folder).get("attempt") == attempt and read_record(folder / OUTCOME) is None:
                status = JobStatus(job_id, "pending", attempt=attempt)
                self._live[job_id] = _Followed(folder, status, array=array, index=index)
                self._adopted.add(job_id)
        if any(followed.array is array for followed in self._live.values()):
            self._arrays.append(array)
            self._names |= {array.name} if array.number else set()

    def submit(self, batch: Sequence[Submission]) -> None:
        """Submit jobs as arrays, one for each size. A controller that does not answer is asked again later."""
        groups: defaultdict[_Request, list[Job]] = defaultdict(list)
        for job, limit_bytes in batch:
            if job.id in self._live:
                self._look(job.id, self._live[job.id])
            if job.id in self._live:
                raise runs_already(job.id)
            groups[_Request.of(job, limit_bytes, self.by_stage.get(job.stage, self.options))].append(job)
        for request, jobs in groups.items():
            for first in range(0, len(jobs), _MOST_ELEMENTS):
                self._send(self._make_array(jobs[first : first + _MOST_ELEMENTS], request))

    def _make_array(self, jobs: Sequence[Job], request: _Request) -> _Array:
        token = secrets.token_hex(4)
        path = self.run.path / "slurm" / f"{token}.json"
        path.parent.mkdir(exist_ok=True)
        array = _Array(path, f"mf-{self.run.path.name[-8:]}.{token}", [])
        for job in jobs:
            folder = self.run.job_dir(job.id)
            folder.mkdir(parents=True, exist_ok=True)
            own = {"grace_seconds": self.grace_seconds, "step": request.to_step(), "num_nodes": request.options.nodes}
            attempt, index = write_order(self.run, job, **own), len(array.jobs)
            array.jobs.append((job.id, attempt))
            status = JobStatus(job.id, "pending", attempt=attempt)
            self._begin(job.id, _Followed(folder, status, array=array, index=index))
        write_atomic(path.with_suffix(".sh"), self._script(array, request), durable=False)
        array.save()
        self._arrays.append(array)
        return array

    def _script(self, array: _Array, request: _Request) -> str:
        most = f"%{self.max_parallel}" if self.max_parallel else ""
        return render_script(
            {
                "job-name": array.name,
                "array": f"0-{len(array.jobs) - 1}{most}",
                **request.to_options(),
                # Slurm sends it up to a minute early. The job needs the grace to save.
                "signal": f"B:TERM@{math.ceil(self.grace_seconds) + 60}",
                "no-requeue": None,
                "open-mode": "append",
                "output": str(array.path.parent).replace("%", "%%") + "/%A_%a.log",
            },
            request.options.extra,
            f"exec {shlex.join([sys.executable, *_START, str(self.run.path), '--array', str(array.path)])}",
        )

    def _send(self, array: _Array) -> None:
        """Hand an array to Slurm; one that it may have got already is looked for by its name first."""
        try:
            if array.was_tried:
                array.number = slurm.find_job(array.name)
            array.was_tried = True
            array.number = array.number or slurm.submit_script(array.path.with_suffix(".sh"))
        except slurm.NoAnswerError:
            return
        except UsageError as error:
            for job_id in [job_id for job_id, one in self._live.items() if one.array is array]:
                self._end(job_id, self._live[job_id].status.ended_as("failed", error.what, "platform"))
            return
        array.save()
        self._names.add(array.name)
        self._ask_at, self._pause = 0.0, _FIRST_SECONDS

    def poll(self) -> dict[str, JobStatus]:
        if self._live and self.now() >= self._ask_at:
            self._ask()
        return super().poll()

    def _ask(self) -> None:
        """Ask Slurm about all jobs at once, and more seldom while nothing changes."""
        self._arrays = [array for array in self._arrays if any(one.array is array for one in self._live.values())]
        for array in self._arrays:
            if not array.number:
                self._send(array)
        before = self._queue
        with suppress(slurm.NoAnswerError, UsageError):  # nothing is known then: jobs stay as they are
            self._queue = slurm.read_queue(self._names) if self._names else {}
            with suppress(UsageError):  # an element may end meanwhile
                self._tidy("PENDING")
            absent = {one.element for one in self._live.values() if one.element} - self._queue.keys()
            with suppress(UsageError):  # a cluster may have no accounting
                self._ends |= slurm.read_ends(absent) if absent else {}
            self._absent = absent
        is_quiet = self._queue == before and not any(one.is_stopping for one in self._live.values())
        self._pause = min(2 * self._pause, _LAST_SECONDS) if is_quiet else _FIRST_SECONDS
        self._ask_at = self.now() + self._pause

    def _tidy(self, *stale: str) -> None:
        """Remove elements in these states whose jobs have ended; release those that the controller's crash held."""
        live = {followed.element for followed in self._live.values()}
        for number, element in (self._queue or {}).items():
            if element.state in stale and "_" in number and number not in live:
                slurm.cancel_elements([number])
            elif element.state == "PENDING" and element.reason.startswith(_HELD):
                slurm.release_element(number)

    def _look(self, job_id: str, followed: _Followed) -> None:
        """Bring a job's status up to date: by its outcome, else its status file, else by Slurm."""
        element, state = self._find(followed)
        if self._has_news(followed) or (state in _ENDS and refresh(followed.folder)):
            if (outcome := read_record(followed.folder / OUTCOME)) is not None:
                self._end(job_id, outcome)
                return
            followed.read_status()
        if followed.status.state == "pending":
            reason = element.reason if element else "" if followed.element else "Slurm's controller does not answer"
            if followed.status.pending_reason != (reason or "submitted"):
                followed.status = replace(followed.status, pending_reason=reason or "submitted")
        if state not in _ENDS:
            followed.ended_since = None
            self._end_if_silent(job_id, followed, state)
            return
        has_begun = followed.changed or not (followed.is_stopping or state == "CANCELLED")
        if self._may_come(followed, _LATEST_SECONDS if has_begun else _LATE_SECONDS, "in Slurm"):
            self._ask_at = min(self._ask_at, self.now() + _FIRST_SECONDS)
            return
        recorded, ended_by = _ENDS[state]
        asked = (followed.folder / STOP_REQUESTED).exists()
        log = followed.array.path.parent / f"{followed.element}.log"
        cause = "stopped before it started" if asked and not followed.changed else f"Slurm says {state} (see {log})"
        status = replace(followed.status, asked=asked, pending_reason="", evidence={"witness": "slurm", "state": state})
        self._end(job_id, status.ended_as(recorded, cause, "user" if asked else ended_by), is_new=True)

    def _has_news(self, followed: _Followed) -> bool:
        """Return whether a job's folder changed a moment ago: of thousands of jobs most wait, and have no files yet."""
        with suppress(OSError):
            changed = followed.folder.stat().st_mtime_ns
            if changed != followed.folder_changed:
                followed.folder_changed, followed.news_until = changed, self.now() + _NEWS_SECONDS
                return True
        return self.now() < followed.news_until

    def _end_if_silent(self, job_id: str, followed: _Followed, state: str) -> None:
        """Give up a job that Slurm takes for running but whose shim never began; it is submitted again."""
        if state != "RUNNING" or followed.changed:
            followed.silent_since = None
            return
        followed.silent_since = followed.silent_since or self.now()
        if self.now() - followed.silent_since >= _SILENT_SECONDS:
            slurm.cancel_elements([followed.element])
            cause = f"Slurm says that it runs, but it left no file in {_SILENT_SECONDS:.0f} s"
            self._end(job_id, followed.status.ended_as("node_fail", cause, "platform"), is_new=True)

    def _find(self, followed: _Followed) -> tuple[slurm.Element | None, str]:
        """Return what Slurm knows of a job: its element, and its state; empty when it is not known."""
        queue, number = self._queue or {}, followed.array.number
        if (element := queue.get(followed.element)) is not None:
            return element, element.state
        # Elements that were cancelled before they began show as their array.
        whole = queue.get(number)
        if whole is not None and whole.state in _ENDS:
            return whole, whole.state
        known = self._ends.get(followed.element, self._ends.get(number, ""))
        return None, known or (_GONE if followed.element in self._absent else "")

    def cancel(self, job_id: str, *, now: bool = False, verdict: Verdict | None = None) -> None:
        super().cancel(job_id, now=now, verdict=verdict)
        if (followed := self._live.get(job_id)) is None:
            return
        followed.is_stopping = True
        self._look(job_id, followed)
        if job_id not in self._live or followed.changed:
            return  # its shim reads the file
        if not followed.element and not followed.array.was_tried:
            self._end(job_id, replace(followed.status, asked=True).ended_as("cancelled", "never submitted", "user"))
            return
        with suppress(slurm.NoAnswerError, UsageError):
            if followed.element:
                slurm.cancel_elements([followed.element])
        self._ask_at, self._pause = 0.0, _FIRST_SECONDS

    def close(self) -> None:
        # A crash of the controller leaves elements that it takes for running although their jobs have ended.
        with suppress(slurm.NoAnswerError, UsageError):
            self._queue = slurm.read_queue(self._names) if self._names else {}
            self._tidy("PENDING", "RUNNING")


def cancel_queued(run: RunDir) -> list[str]:
    """Cancel the jobs of a run that wait in Slurm's queue, and wait until they are gone; return their ids."""
    backend = SlurmBackend(run)
    queued = [job_id for job_id, status in backend.poll().items() if status.state == "pending"]
    for job_id in queued:
        backend.cancel(job_id)
    end = backend.now() + 2 * _LATEST_SECONDS
    while any(backend.poll()[job_id].state not in ENDED for job_id in queued):
        if backend.now() > end:
            raise UsageError(
                f"Slurm does not answer, and its queue still has {format_count(len(queued), 'job')} of {run.path}.",
                rule="Slurm's controller takes jobs out of its queue.",
                remedy="give the same command again when squeue works",
            )
        backend.wait(_FIRST_SECONDS)
    return queued


def render_script(options: Mapping[str, str | None], extra: Sequence[str], body: str) -> str:
    """Return a batch script: options of ``sbatch``, those with an empty text left out, and what it does."""
    # A backslash in the name of a log turns %A_%a off.
    given = [text for text in (*options.values(), *extra) if text]
    if bad := [text for text in given if re.search(r"[\x00-\x1f\x7f\\\ud800-\udfff]", text)]:
        raise UsageError(
            f"{bad[0]!r} cannot be an option of sbatch.",
            rule="an option is UTF-8 text without line breaks, other control characters and backslashes.",
            remedy="correct the settings below slurm:, or name another folder for the runs: --runs-dir FOLDER",
        )
    lines = ["#!/bin/sh"]
    for name, value in options.items():
        if value is None:
            lines.append(f"#SBATCH --{name}")
        elif value:
            quoted = value if re.fullmatch(r"[\w%+=:,./@-]*", value) else json.dumps(value, ensure_ascii=False)
            lines.append(f"#SBATCH --{name}={quoted}")
    return "\n".join([*lines, *(f"#SBATCH {option}" for option in extra), body, ""])
