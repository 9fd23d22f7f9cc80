"""A run as its directory tells it: read anew at each look, from files alone."""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from memfit.jobs import ENDED, JobStatus, read_status
from memfit.rundir import EventTail, RunDir, event_time, fits, read_json

Event = Mapping[str, Any]

#: What an event must hold to be understood, by kind. A job may record what it likes under any name, so one of these
#: kinds that lacks a field is passed over: no job can make the readers of its run fail.
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "run": {"state": str, "job": type(None)},
    "budget": {"binding": dict, "limits": list, "job": type(None)},
    "admit": {"job": str, "num_running": int, "why": str, "reservation_bytes": (int, type(None))},
    "wait": {"job": str, "reason": str, "arithmetic": str},
    "plan": {"why": str},
    "footprint": {"reservation_bytes": int},
    "grow": {"job": str, "from_bytes": int, "to_bytes": int, "why": str},
    "short": {"reason": str},
    "aside": {"job": str, "reason": str, "now": bool},
    "retry": {"job": str, "attempt": int, "reason": str, "reservation_bytes": (int, type(None))},
    "end": {"job": str, "state": str, "cause": str},
    "epoch": {"job": str, "epoch": int, "num_epochs": int},
    "step": {"job": str, "epoch": int, "step": int, "num_steps": int},
    "resume": {"job": str, "epoch": int},
    "oom": {"job": str, "memory": str, "error": str},
    "microbatch": {"job": str, "size": int, "previous_size": int, "count": int},
    "skip": {"job": str, "reason": str, "num_skipped": int, "num_batches": int},
    "inexact": {"job": str, "reason": str},
    "stop": {"num_running": int, "level": int},
    "cpu": {"wanted_cpus": (int, float), "num_cpus": int, "num_running": int},
    "stopped": {"job": str, "pid": (int, type(None))},
    "done": {"num_done": int},
    "progress": {"job": str, "phase": str, "done": int, "total": int},
}
#: The job that builds the panel: it comes before the run's own jobs and is none of them.
PREPARE = "prepare"
_TIMES = dict.fromkeys(("started", "ended", "cpu_seconds"), (int, float, type(None)))
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FOLD_ID = re.compile(r"fold_[0-9]+")


@dataclass(frozen=True)
class JobRow:
    """One job's line.

    Attributes:
        status: Its state, phase and memory; ``pending`` also for one that ended and is queued again.
        seconds: How long it has run, or ran, in this attempt; None before its start.
        reserved_bytes: What it has reserved, or had last; None when it ran alone, before its size was known.
        epochs_done: How many epochs it has done, the part of the present one included; 0 before the first step.
        num_epochs: Of how many; 0 while that is not known.
        eta_seconds: How long it will still train, at its mean rate in this attempt; None when not to be said.
        metrics: The numbers that it returned.
        params: What tells it from the other jobs.
        phase_source: How its phase is known: ``marks``, or guessed from its ``log`` or the ``shape`` of its memory;
            empty when nothing says so.
    """

    status: JobStatus
    seconds: float | None
    reserved_bytes: int | None
    epochs_done: float
    num_epochs: int
    eta_seconds: float | None
    metrics: Mapping[str, float]
    params: Mapping[str, str]
    phase_source: str

    @property
    def name(self) -> str:
        """The job's id and its parameters, such as ``cmd_0002 fold=2``."""
        return _name(self.status.job_id, self.params)


@dataclass
class _Progress:
    """How far a job has come since it was admitted: epochs done at two times (Unix seconds), of how many."""

    first: tuple[float, float] | None = None
    last: tuple[float, float] = (0.0, 0.0)
    num_epochs: int = 0

    def take(self, event: Event) -> None:
        now, done = float(event["time"]), float(event["epoch"])
        if event["kind"] == "step":
            done += event["step"] / max(1, event["num_steps"]) - 1
        self.num_epochs = int(event.get("num_epochs") or self.num_epochs)
        if self.first is None or done <= self.last[1]:  # what is behind the last is done again after a resume
            self.first = (now, done)
        self.last = (now, done)

    def eta_seconds(self, now: float) -> float | None:
        if self.first is None:
            return None
        (began, done_first), (looked, done) = self.first, self.last
        if not self.num_epochs or done <= done_first or looked <= began:
            return None
        left = (self.num_epochs - done) * (looked - began) / (done - done_first)
        return max(0.0, left - max(0.0, now - looked))


class RunView:
    """Follows a run directory. What has ended is read once, so that a run of thousands of jobs stays cheap to follow.

    Args:
        run: The run directory.
        now: The clock, in Unix seconds.

    Attributes:
        started: When the command that runs now, or ran last, began: Unix seconds; None before it said so.
        num_commands: How many commands have begun this run or gone on with it.
        most_at_once: The most jobs that ran at the same time, by the last command that admitted any.
        retries: When each job was queued again by memfit itself, in Unix seconds, by job id.
    """

    def __init__(self, run: RunDir, *, now: Callable[[], float] = time.time) -> None:
        self.run = run
        self.now = now
        self.started: float | None = None
        self.num_commands = 0
        self.most_at_once = 0
        self.retries: dict[str, list[float]] = {}
        self._ended: float | None = None
        self._last_time: float | None = None
        #: Seconds of the last command in which jobs waited and none could start, by what they waited for.
        self.waits: dict[str, float] = {}
        #: What the host's cores did in the last command, as shares of their time; empty until it ends.
        self.cpu: Mapping[str, float] = {}
        self._waiting: tuple[str, float] | None = None
        self._admitted_by = 0
        self._tails: dict[str, tuple[EventTail, int]] = {}
        self._of_kind: dict[tuple[str, str | None], Event] = {}
        self._progress: dict[str, _Progress] = {}
        self._admitted: dict[str, float] = {}
        self._queued: set[str] = set()
        self._ids: list[str] = []
        self._num_folders = -1
        self._settled: dict[str, JobRow] = {}

    def read(self) -> list[Event]:
        """Read on; the events that came since the last look, in order of time."""
        new: list[Event] = []
        try:
            found = list(os.scandir(self.run.events_dir))
        except FileNotFoundError:
            found = []
        for file in found:
            tail, size = self._tails.get(file.name) or (EventTail(Path(file.path)), 0)
            size_now = file.stat().st_size
            if size_now != size and file.name.endswith(".jsonl"):
                new += [event for event in tail.read() if _is_understood(event)]
                self._tails[file.name] = (tail, size_now)
        new.sort(key=lambda event: float(event["time"]))
        for event in new:
            self._take(event)
        return new

    def _take(self, event: Event) -> None:
        """Keep what later questions need; steps come twice a second, so they are not all kept."""
        kind, job, now = event["kind"], event.get("job"), float(event["time"])
        self._count_wait(event, kind, now)
        self._of_kind[kind, job] = event
        self._last_time = now
        if kind in ("run", "stop"):
            self._queued.clear()  # nothing is queued any more, and what ended has ended
        if kind == "run":
            self._admitted.clear()  # what still runs is admitted anew
        elif kind in ("end", "retry"):
            self._admitted.pop(str(job), None)
            self._queued.discard(str(job))  # it may end while it waits for another start
            self._settled.pop(str(job), None)
        if kind == "run" and event["state"] in ("started", "continued"):
            self.started, self._ended, self.num_commands = now, None, self.num_commands + 1
            self.waits, self.cpu = {}, {}
            self._settled.clear()
        elif kind == "run":
            self._ended, told = now, event.get("cpu")
            shares = told if isinstance(told, dict) else {}
            self.cpu = {name: float(share) for name, share in shares.items() if isinstance(share, int | float)}
        elif kind == "retry":
            self._queued.add(str(job))
            self.retries.setdefault(str(job), []).append(now)
        elif kind == "admit":
            self._take_admission(event, str(job))
        elif kind in ("epoch", "step"):
            self._progress.setdefault(str(job), _Progress()).take(event)

    def _count_wait(self, event: Event, kind: str, now: float) -> None:
        """Add up for how long jobs could not start, by what they waited for."""
        if kind not in ("wait", "admit", "run", "stop"):
            return
        if self._waiting is not None:
            on, since = self._waiting
            self.waits[on] = self.waits.get(on, 0.0) + max(0.0, now - since)
        self._waiting = (str(event.get("on", "other")), now) if kind == "wait" else None

    def _take_admission(self, event: Event, job: str) -> None:
        self._progress[job] = _Progress()
        self._admitted[job] = float(event["time"])
        self._queued.discard(job)
        self._settled.pop(job, None)
        self._of_kind.pop(("grow", job), None)
        if job != PREPARE:
            before = self.most_at_once if self._admitted_by == self.num_commands else 0
            self.most_at_once, self._admitted_by = max(before, event["num_running"]), self.num_commands

    def last(self, kind: str, job_id: str | None = None) -> Event | None:
        """The last event of a kind, of one job or of the supervisor's."""
        return self._of_kind.get((kind, job_id))

    @cached_property
    def kind(self) -> str:
        """What runs: ``folds`` of a workload, or ``commands``."""
        return str(self.run.header.get("kind") or "folds")

    @cached_property
    def params(self) -> Mapping[str, Mapping[str, str]]:
        """The parameters of every command of the run, by job id, whether it has started or not; empty for folds."""
        combinations = self.run.header.get("combinations") or () if self.kind == "commands" else ()
        return {f"cmd_{number:04d}": found for number, found in enumerate(combinations, start=1)}

    def name(self, job_id: str) -> str:
        """The job's id and its parameters, such as ``cmd_0002 fold=2``."""
        return _name(job_id, self.params.get(job_id, {}))

    @property
    def wall_seconds(self) -> float:
        """The last command's wall clock: from its start to its end, or to now while it runs."""
        if self.started is None:
            return 0.0
        ended = self._ended
        if ended is None:
            # A command that ended by an error said so in outcome.json, not in an event.
            ended = self.now() if self.run.state == "running" else self._last_time or self.started
        return max(0.0, ended - self.started)

    @property
    def ids(self) -> list[str]:
        """The jobs that were admitted, in the order of their names and numbers."""
        try:
            names = [folder.name for folder in os.scandir(self.run.path / "jobs")]
        except FileNotFoundError:
            names = []
        if len(names) != self._num_folders:  # folders come, and never go
            self._num_folders = len(names)
            pattern = _FOLD_ID if self.kind == "folds" else _JOB_ID
            self._ids = sorted((name for name in names if pattern.fullmatch(name) and name != PREPARE), key=_natural)
        return self._ids

    def rows(self) -> list[JobRow]:
        """One row for each job that was admitted, in the order of names and numbers."""
        return [self.row(job_id) for job_id in self.ids]

    def counts(self, rows: Sequence[JobRow]) -> dict[str, int]:
        """How many jobs are in which state, the most telling first; those that wait for their start are ``waiting``."""
        states = Counter(row.status.state for row in rows)
        num_jobs = len(self.params) or int((self.run.plan or {}).get("num_jobs", 0))
        waiting = states.pop("pending", 0) + max(0, num_jobs - len(rows))
        counts = {"completed": states.pop("completed", 0), "running": states.pop("running", 0), "waiting": waiting}
        return {name: number for name, number in [*counts.items(), *sorted(states.items())] if number}

    def eta_seconds(self, rows: Sequence[JobRow]) -> float | None:
        """How long the run will still take, as jobs took so far; None while none has completed, or all have."""
        took = [row.seconds for row in rows if row.status.state == "completed" and row.seconds is not None]
        running = [row for row in rows if row.status.state == "running"]
        if not took or not running:
            return None
        mean = statistics.fmean(took)
        left = [row.eta_seconds or max(0.0, mean - (row.seconds or 0.0)) for row in running]
        waiting = self.counts(rows).get("waiting", 0)
        return max(*left, (waiting * mean + sum(left)) / len(left))

    def row(self, job_id: str) -> JobRow:
        """One job's row."""
        if (known := self._settled.get(job_id)) is not None:
            return known
        status, now = read_status(self.run, job_id), self.now()
        if status.state == "pending" and job_id in self._admitted:
            # A watcher writes its job's first status when that has lived half a second.
            status = replace(status, state="running", started=self._admitted[job_id])
        progress = self._progress.get(job_id) or _Progress()
        is_running, seconds = status.state not in ENDED, None
        if status.started is not None:
            seconds = max(0.0, (status.ended or now) - status.started)
        row = JobRow(
            status=status,
            seconds=seconds,
            reserved_bytes=self._reserved_bytes(job_id),
            epochs_done=progress.last[1],
            num_epochs=progress.num_epochs,
            eta_seconds=progress.eta_seconds(now) if is_running and seconds is not None else None,
            metrics=self._metrics(job_id) if status.state == "completed" and self.kind != "commands" else {},
            params=self.params.get(job_id, {}),
            phase_source=self._phase_source(job_id, status),
        )
        if is_running:
            return row
        if job_id in self._queued:
            return replace(row, status=replace(status, state="pending", used_bytes=0, stalled=False, stopped_pid=None))
        self._settled[job_id] = row
        return row

    def _metrics(self, job_id: str) -> Mapping[str, float]:
        result = (read_json(self.run.job_dir(job_id) / "result.json") or {}).get("result")
        return dict(result) if isinstance(result, dict) and fits(result, {str: (int, float)}) else {}

    def _phase_source(self, job_id: str, status: JobStatus) -> str:
        if status.phase is None:
            return ""
        name = "outcome.json" if status.state in ENDED else "status.json"
        return str((read_json(self.run.job_dir(job_id) / name) or {}).get("phase_source", ""))

    def _reserved_bytes(self, job_id: str) -> int | None:
        """What it was admitted with, or what that grew to."""
        admitted, grown = self.last("admit", job_id), self.last("grow", job_id)
        size = grown["to_bytes"] if grown is not None else admitted["reservation_bytes"] if admitted is not None else 0
        return size or None

    def work(self, rows: Sequence[JobRow]) -> tuple[float, float]:
        """The run time of all attempts, and of those that memfit ended or started again itself, in seconds."""
        total, lost = sum(row.seconds or 0.0 for row in rows), 0.0
        for row in rows:
            folder, retries = self.run.job_dir(row.status.job_id), self.retries.get(row.status.job_id, [])
            for number in range(1, row.status.attempt):
                earlier = read_json(folder / f"outcome_{number}.json", _TIMES) or {}
                began, ended = earlier.get("started"), earlier.get("ended")
                if began is None or ended is None:
                    continue
                total += ended - began
                following = read_json(folder / f"outcome_{number + 1}.json", _TIMES) or {"started": row.status.started}
                until = following.get("started") or math.inf
                lost += ended - began if any(ended <= at <= until for at in retries) else 0.0
        return total, lost

    def cpu_seconds(self, rows: Sequence[JobRow]) -> float:
        """Return the CPU time that all attempts of the jobs used, as measured at their ends."""
        total = sum(row.status.cpu_seconds for row in rows)
        for row in rows:
            for number in range(1, row.status.attempt):
                earlier = read_json(self.run.job_dir(row.status.job_id) / f"outcome_{number}.json", _TIMES) or {}
                total += earlier.get("cpu_seconds") or 0.0
        return total


def _name(job_id: str, params: Mapping[str, str]) -> str:
    return " ".join([job_id, *(f"{name}={value}" for name, value in params.items())])


def _natural(name: str) -> list[tuple[str, int]]:
    """A sort key by which ``fold_10`` comes after ``fold_9``."""
    return [(text, int(number or 0)) for text, number in re.findall(r"([^0-9]*)([0-9]*)", name)]


def _is_understood(event: Event) -> bool:
    if not event_time(event) or not fits(event, {"kind": str, "job": (str, type(None))}):
        return False
    return fits(event, _FIELDS.get(event["kind"], {}))


def summarize_metrics(rows: Sequence[JobRow]) -> dict[str, tuple[float, float | None, int]]:
    """Per metric the mean over folds, the standard deviation (n - 1; None for one fold) and n."""
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    found: dict[str, tuple[float, float | None, int]] = {}
    for name in names:
        values = [row.metrics[name] for row in rows if name in row.metrics]
        found[name] = (statistics.fmean(values), _sd(values), len(values))
    return found


def _sd(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    # statistics.stdev fails on what is not finite.
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
