"""A run as its directory tells it: read anew at each look, from files alone."""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    "grow_device": {"job": str, "from_bytes": int, "to_bytes": int, "why": str},
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
    "stage": {"stage": str, "state": str, "why": str, "jobs": [str], "seconds": (int, float)},
    "progress": {"job": str, "phase": str, "done": int, "total": int},
}
#: States of a unit that will not run any more, and those in which its result is there.
_OVER = frozenset({"kept", "reused", "completed", "passed", "skipped", "stopped", "failed"})
NO_NEWS = ("", "it was not made yet")
_THERE = frozenset({"kept", "reused", "completed", "stopped"})
_GRAPH = {"stages": [{"name": str, "each": (str, type(None))}]}
#: The first job of a run of memfit 0.1, which has no graph.
_FIRST = "prepare"
_TIMES = dict.fromkeys(("started", "ended", "cpu_seconds"), (int, float, type(None)))
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass
class StageView:
    """One stage, as the last command left it.

    Attributes:
        name: The stage's name.
        units: The state of each of its jobs, by job id: ``waiting``, ``running`` (or queued), ``kept``, ``reused``,
            ``completed``, ``stopped``, ``passed``, ``skipped``, ``failed``, ``cancelled``.
        reasons: Why jobs run, were skipped or stopped the run: each reason with its jobs.
        saved_seconds: How long it took to make the results that were kept or reused.
    """

    name: str
    units: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, list[str]] = field(default_factory=dict)
    saved_seconds: float = 0.0

    def take(self, event: Event) -> None:
        """Take in an event of the kind ``stage``."""
        self.units |= dict.fromkeys(event["jobs"], event["state"])
        if event["state"] in ("kept", "reused"):
            self.saved_seconds += event["seconds"]
        elif event["why"] not in NO_NEWS and event["state"] not in ("failed", "cancelled"):  # a job's cause says more
            known = self.reasons.setdefault(event["why"], [])
            known += [job for job in event["jobs"] if job not in known]

    @property
    def why(self) -> str:
        """All reasons in one line; a reason that holds for some units names them."""
        return "; ".join(
            why if len(jobs) == len(self.units) else f"{name_jobs(jobs)}: {why}" for why, jobs in self.reasons.items()
        )


def name_jobs(jobs: Sequence[str]) -> str:
    """Some jobs in words.

    >>> name_jobs(["prepare"]), name_jobs(["fold_1", "fold_2"]), name_jobs([f"fold_{n}" for n in range(1, 6)])
    ('prepare', 'fold_1 and fold_2', 'fold_1 to fold_5 (5 jobs)')
    """
    return " and ".join(jobs) if len(jobs) < 3 else f"{jobs[0]} to {jobs[-1]} ({len(jobs)} jobs)"


@dataclass(frozen=True)
class JobRow:
    """One job's line.

    Attributes:
        stage: The stage that it is a unit of.
        told: What the supervisor said of it last, as in ``StageView.units``; empty where it said nothing.
        status: Its state, phase and memory; ``pending`` also for one that ended and is queued again.
        seconds: How long it has run, or ran, in this attempt; None before its start.
        reserved_bytes: What it has reserved, or had last; None when it ran alone, before its size was known.
        epochs_done: How many epochs it has done, the part of the present one included; 0 before the first step.
        num_epochs: Of how many; 0 while that is not known.
        eta_seconds: How long it will still train, at its mean rate in this attempt; None when not to be said.
        result: What it returned.
        params: What tells it from the other jobs.
        phase_source: How its phase is known: ``marks``, or guessed from its ``log`` or the ``shape`` of its memory;
            empty when nothing says so.
    """

    stage: str
    told: str
    status: JobStatus
    seconds: float | None
    reserved_bytes: int | None
    epochs_done: float
    num_epochs: int
    eta_seconds: float | None
    result: Mapping[str, Any]
    params: Mapping[str, str]
    phase_source: str

    @property
    def name(self) -> str:
        """The job's id and its parameters, such as ``cmd_0002 fold=2``."""
        return _name(self.status.job_id, self.params)

    @property
    def state(self) -> str:
        """The state to show: ``kept``, ``reused`` and ``stopped`` (by itself: a gate) are the supervisor's word."""
        if self.told in _THERE or (self.told == "failed" and self.status.state == "completed"):
            return self.told
        return str(self.status.state)

    @property
    def has_unit(self) -> bool:
        """Whether its stage runs once for each of several units."""
        return self.status.job_id != self.stage

    @property
    def metrics(self) -> Mapping[str, float]:
        """The numbers among what it returned."""
        return {name: value for name, value in self.result.items() if is_number(value)}


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
        stages: The stages of the last command, by name, in order; empty for commands and for runs of memfit 0.1.
    """

    def __init__(self, run: RunDir, *, now: Callable[[], float] = time.time) -> None:
        self.run = run
        self.now = now
        self.started: float | None = None
        self.num_commands = 0
        self.most_at_once = 0
        self.retries: dict[str, list[float]] = {}
        self.stages: dict[str, StageView] = {}
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
        self._known = (-1, -1)
        self._num_told = 0
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
            self.stages.clear()
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
        elif kind == "stage" and self.kind != "commands":
            self.stages.setdefault(event["stage"], StageView(event["stage"])).take(event)
            self._num_told += 1
            for one in event["jobs"]:
                self._settled.pop(one, None)

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
        before = self.most_at_once if self._admitted_by == self.num_commands else 0
        self.most_at_once, self._admitted_by = max(before, event["num_running"]), self.num_commands

    def last(self, kind: str, job_id: str | None = None) -> Event | None:
        """The last event of a kind, of one job or of the supervisor's."""
        return self._of_kind.get((kind, job_id))

    @cached_property
    def kind(self) -> str:
        """What runs: ``stages`` of a workload, ``commands``, or ``folds`` in a run of memfit 0.1."""
        return str(self.run.header.get("kind") or "folds")

    @cached_property
    def graph(self) -> Mapping[str, Mapping[str, Any]]:
        """The workload's stages by name, in order: ``graph.json``."""
        found = (read_json(self.run.path / "graph.json", _GRAPH) or {}).get("stages", ())
        return {stage["name"]: stage for stage in found}

    @cached_property
    def params(self) -> Mapping[str, Mapping[str, str]]:
        """The parameters of every job whose values the command line gave, by job id, whether it has started or not."""
        header = self.run.header
        if self.kind == "commands":
            return {f"cmd_{number:04d}": one for number, one in enumerate(header.get("combinations") or (), start=1)}
        stage = next(iter(self.graph), "")
        return {f"{stage}_{number:04d}": one for number, one in enumerate(header.get("units") or (), start=1)}

    def stage_of(self, job_id: str) -> str:
        """The stage of a job: ``fold`` of ``fold_3``."""
        told = next((stage.name for stage in self.stages.values() if job_id in stage.units), "")
        return told or re.sub(r"_[0-9]+$", "", job_id)

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
        """The jobs that were admitted, or whose results are kept: by stage, in the order of names and numbers."""
        try:
            names = [folder.name for folder in os.scandir(self.run.path / "jobs")]
        except FileNotFoundError:
            names = []
        if (len(names), self._num_told) != self._known:  # folders come, and never go
            self._known = (len(names), self._num_told)
            found = {name for name in names if _JOB_ID.fullmatch(name)}
            if self.stages:
                told = {job: state for stage in self.stages.values() for job, state in stage.units.items()}
                found = {job for job, state in told.items() if job in found or state in _THERE}
            order = list(self.graph) or [_FIRST]
            places = {name: place for place, name in enumerate(order)}
            self._ids = sorted(found, key=lambda name: (places.get(self.stage_of(name), len(order)), _natural(name)))
        return self._ids

    def rows(self) -> list[JobRow]:
        """One row for each job that was admitted, or whose result is kept."""
        return [self.row(job_id) for job_id in self.ids]

    def counts(self, rows: Sequence[JobRow]) -> dict[str, int]:
        """How many jobs are in which state, the most telling first; kept and reused results count as completed."""
        states = Counter("completed" if row.state in ("kept", "reused") else row.state for row in rows)
        states.pop("pending", 0)
        shown = {row.status.job_id for row in rows}
        for stage in self.stages.values():
            states.update(state for job, state in stage.units.items() if job not in shown and state in _OVER)
        waiting = sum(self._num_waiting(name, rows) for name in self.stage_names(rows))
        counts = {"completed": states.pop("completed", 0), "running": states.pop("running", 0), "waiting": waiting}
        return {name: number for name, number in [*counts.items(), *sorted(states.items())] if number}

    def stage_names(self, rows: Sequence[JobRow]) -> list[str]:
        """The stages of the last command, or those of the jobs where it told none, in order."""
        told = [name for name in self.graph if name in self.stages]
        return told or list(dict.fromkeys([*(row.stage for row in rows), *(map(self.stage_of, [*self.params][:1]))]))

    def _num_waiting(self, stage: str, rows: Sequence[JobRow]) -> int:
        """How many units of a stage are known and have not started."""
        states = {row.status.job_id: row.state for row in rows if row.stage == stage}
        if stage in self.stages:
            units = self.stages[stage].units
            return sum(state not in _OVER and states.get(job, "pending") == "pending" for job, state in units.items())
        plan = self.run.plan
        num_planned = plan.get("num_jobs") or 0 if plan and self.stage_of(plan["measured_on"]) == stage else 0
        pending = sum(state == "pending" for state in states.values())
        return pending + max(0, (len(self.params) or num_planned) - len(states))

    def left(self, stage: str, rows: Sequence[JobRow]) -> tuple[int, float | None]:
        """How many units of a stage are not done yet, and how long they take, as units took so far.

        The seconds are None while no unit is done, or when nothing is left.
        """
        own = [row for row in rows if row.stage == stage]
        running = [row for row in own if row.state == "running"]
        waiting = self._num_waiting(stage, rows)
        took = [row.seconds for row in own if row.status.state == "completed" and row.seconds is not None]
        if not took or not (running or waiting):
            return waiting + len(running), None
        mean = statistics.fmean(took)
        left = [row.eta_seconds or max(0.0, mean - (row.seconds or 0.0)) for row in running]
        at_once = len(running) or max(1, self.most_at_once)
        return waiting + len(running), max([(waiting * mean + sum(left)) / at_once, *left])

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
        stage = self.stage_of(job_id)
        told = self.stages[stage].units.get(job_id, "") if stage in self.stages else ""
        row = JobRow(
            stage=stage,
            told=told,
            status=status,
            seconds=seconds,
            reserved_bytes=self._reserved_bytes(job_id),
            epochs_done=progress.last[1],
            num_epochs=progress.num_epochs,
            eta_seconds=progress.eta_seconds(now) if is_running and seconds is not None else None,
            result=self._result(stage, job_id) if told in _THERE or status.state == "completed" else {},
            params=self.params.get(job_id, {}),
            phase_source=self._phase_source(job_id, status),
        )
        if is_running and told not in _THERE:
            return row
        if job_id in self._queued:
            return replace(row, status=replace(status, state="pending", used_bytes=0, stalled=False, stopped_pid=None))
        self._settled[job_id] = row
        return row

    def _result(self, stage: str, job_id: str) -> Mapping[str, Any]:
        """What a job returned, from its manifest; in a run of memfit 0.1 from its folder."""
        if self.kind == "commands":
            return {}
        path = (
            self.run.manifest_path(stage, job_id) if self.kind == "stages" else self.run.job_dir(job_id) / "result.json"
        )
        result = (read_json(path) or {}).get("result")
        return result if isinstance(result, dict) else {}

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
    """Per metric the mean over units, the standard deviation (n - 1; None for one) and n."""
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


def is_number(value: object) -> bool:
    """Whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)
