"""A run as its directory tells it: read anew at each look, from files alone."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from memfit.files import fits, read_json
from memfit.jobs import ENDED, JobStatus, name_jobs, read_status, show_state
from memfit.rundir import FolderTail, RunDir, event_time
from memfit.units import format_bytes, natural_order

Event = Mapping[str, Any]
_LIMIT = {"name": str, "limit_bytes": int}

#: What an event must hold for a run to be followed, by kind. A job may record what it likes under any name, so one of
#: these kinds that lacks a field is passed over: no job can make the readers of its run fail.
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "run": {"state": str, "job": type(None)},
    "budget": {"binding": _LIMIT, "limits": [_LIMIT], "reserve_bytes": int, "job": type(None)},
    "admit": {"job": str, "num_running": int, "why": str, "reservation_bytes": (int, type(None))},
    "grow": {"job": str, "from_bytes": int, "to_bytes": int, "why": str},
    "grow_device": {"job": str, "from_bytes": int, "to_bytes": int, "why": str},
    "short": {"outgrew": str},
    "retry": {"job": str, "reservation_bytes": (int, type(None))},
    "end": {"job": str, "state": str, "cause": str},
    "epoch": {"job": str, "epoch": int, "num_epochs": int},
    "step": {"job": str, "epoch": int, "step": int, "num_steps": int, "num_epochs": (int, type(None))},
    "stop": {"num_running": int, "level": int},
    "stage": {"stage": str, "state": str, "why": str, "jobs": [str], "seconds": (int, float)},
    "warm": {"bytes": int, "job": type(None)},
    "progress": {"job": str, "phase": str, "done": int, "total": int},
}
#: States of a unit that will not run any more, and those in which its result is there.
_OVER = frozenset({"kept", "reused", "completed", "passed", "skipped", "stopped", "failed", "cancelled"})
_THERE = frozenset({"kept", "reused", "completed", "stopped"})
_NO_NEWS = ("", "it was not made yet")
_GRAPH = {"stages": [{"name": str, "each": (str, type(None))}]}


@dataclass
class StageView:
    """One stage, as the last command left it.

    Attributes:
        units: The state of each of its jobs by job id, as the event ``stage`` told it.
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
        elif event["why"] not in _NO_NEWS and event["state"] not in ("failed", "cancelled"):  # a job's cause says more
            known = self.reasons.setdefault(event["why"], [])
            known += [job for job in event["jobs"] if job not in known]

    @property
    def why(self) -> str:
        """All reasons in one line; a reason that holds for some units names them."""
        return "; ".join(
            why if len(jobs) == len(self.units) else f"{name_jobs(jobs)}: {why}" for why, jobs in self.reasons.items()
        )


@dataclass(frozen=True)
class JobRow:
    """What a report says of one job.

    Attributes:
        told: What the supervisor said of it last, as in ``StageView.units``; empty where it said nothing.
        status: Its state, phase and memory; ``pending`` also for one that ended and is queued again.
        seconds: How long it has run, or ran, in this attempt; None before its start.
        reserved_bytes: What it has reserved, or had last; None when it ran alone, before its size was known.
        forecast_bytes: What it had reserved when it started.
        epochs_done: How many epochs it has done, the part of the present one included.
        num_epochs: Of how many; 0 while that is not known.
        eta_seconds: How long it will still train, at its mean rate in this attempt; None while that is not known.
    """

    stage: str
    told: str
    status: JobStatus
    seconds: float | None = None
    reserved_bytes: int | None = None
    forecast_bytes: int | None = None
    epochs_done: float = 0.0
    num_epochs: int = 0
    eta_seconds: float | None = None
    result: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The job's id and its parameters, such as ``cmd_0002 fold=2``."""
        return job_name(self.status.job_id, self.params)

    @property
    def state(self) -> str:
        """The state to show: ``kept``, ``reused`` and ``stopped`` (by itself: a gate) are the supervisor's word."""
        if self.told in _THERE or (self.told == "failed" and self.status.state == "completed"):
            return self.told
        return str(self.status.state)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The numbers among what it returned."""
        return {name: value for name, value in self.result.items() if is_number(value)}

    @property
    def sizes(self) -> tuple[str, str, str]:
        """What it uses, its peak and its reservation, as text."""
        used, peak = self.status.used_bytes, self.status.peak_bytes
        return tuple(format_bytes(size) if size else "-" for size in (used, peak, self.reserved_bytes))  # type: ignore[return-value]

    @property
    def guess(self) -> str:
        """``log`` if its phases are guessed from that; empty if the job marked them."""
        return "" if self.status.phase_source == "marks" else self.status.phase_source or ""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form; sizes in bytes, times in seconds."""
        plain = ("pid", "phase", "phase_source", "stalled", "used_bytes", "peak_bytes")
        return {
            "job": self.status.job_id,
            "stage": self.stage,
            "params": dict(self.params),
            "state": self.state,
            "seconds": self.seconds,
            **{name: getattr(self.status, name) for name in (*plain, "exit_code", "cause", "attempt")},
            "reserved_bytes": self.reserved_bytes,
            "result": finite(self.result),
        }


@dataclass
class _Attempt:
    """What events told of a job since it was admitted: its memory, and the epochs done at two times, of how many."""

    admitted: float | None = None  # until it ends
    reserved_bytes: int | None = None
    forecast_bytes: int | None = None
    first: tuple[float, float] | None = None
    last: tuple[float, float] = (0.0, 0.0)
    num_epochs: int = 0
    epoch_ends: list[float] = field(default_factory=list)

    def take(self, event: Event) -> None:
        now, done = float(event["time"]), float(event["epoch"])
        if event["kind"] == "epoch":
            self.epoch_ends.append(now)
        else:
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

    Attributes:
        started: When the command that runs now, or ran last, began: Unix seconds; None before it said so.
        num_commands: How many commands have begun this run or gone on with it.
        most_at_once: The most jobs that ran at the same time, by the last command that admitted any.
        num_restarts: How often memfit itself started a job again.
        outgrown: How often jobs had to wait for a job that needed more than was thought, by its id.
        num_gave_way: How often a job was restarted because of that.
        stages: The stages of the last command by name; empty for commands.
        waits: Seconds of the last command in which jobs waited and none could start, by what they waited for.
        cpu: What the host's cores did in the last command, as shares of their time; empty until it ends.
    """

    def __init__(self, run: RunDir, *, now: Callable[[], float] = time.time) -> None:
        self.run = run
        self.now = now
        self.started: float | None = None
        self.num_commands = 0
        self.most_at_once = 0
        self.num_restarts = self.num_gave_way = 0
        self.outgrown = Counter[str]()
        self.stages: dict[str, StageView] = {}
        self.waits: dict[str, float] = {}
        self.cpu: Mapping[str, float] = {}
        self._ended: float | None = None
        self._last_time: float | None = None
        self._waiting: tuple[str, float] | None = None
        self._admitted_by = 0
        self._events = FolderTail(run.events_dir)
        self._last: dict[tuple[str, str | None], Event] = {}
        self._attempts: defaultdict[str, _Attempt] = defaultdict(_Attempt)
        self._queued: set[str] = set()
        self._settled: dict[str, JobRow] = {}

    def read(self) -> list[Event]:
        """Read on; the events that came since the last look, in order of time."""
        new: list[Event] = [event for event in self._events.read() if is_understood(event)]
        for event in new:
            self._take(event)
        return new

    def _take(self, event: Event) -> None:
        """Keep what later questions need; steps come twice a second, so they are not all kept."""
        kind, job, now = event["kind"], str(event.get("job")), float(event["time"])
        self._count_wait(event, kind, now)
        self._last[kind, event.get("job")] = event
        self._last_time = now
        if kind in ("admit", "end", "retry"):
            self._settled.pop(job, None)
            self._attempts[job].admitted = None
            self._queued.discard(job)  # a job may also end while it is queued
        if kind == "run":
            self._take_run(event, now)
        elif kind == "stop":
            self._queued.clear()
        elif kind == "retry":
            self._queued.add(job)
            self.num_restarts += 1
        elif kind == "short":
            self.outgrown[event["outgrew"]] += 1
        elif kind == "aside" and event.get("to") is not None:
            self.num_gave_way += 1
        elif kind == "admit":
            self._attempts[job] = _Attempt(now, event["reservation_bytes"], event["reservation_bytes"])
            before = self.most_at_once if self._admitted_by == self.num_commands else 0
            self.most_at_once, self._admitted_by = max(before, event["num_running"]), self.num_commands
        elif kind == "grow":
            self._attempts[job].reserved_bytes = event["to_bytes"]
        elif kind in ("epoch", "step"):
            self._attempts[job].take(event)
        elif kind == "stage" and self.kind != "commands":
            self.stages.setdefault(event["stage"], StageView(event["stage"])).take(event)
            for unit in event["jobs"]:
                self._settled.pop(unit, None)

    def _take_run(self, event: Event, now: float) -> None:
        """Take in the start or the end of a command: what still runs is admitted anew, and nothing is queued."""
        self._queued.clear()
        for attempt in self._attempts.values():
            attempt.admitted = None
        if event["state"] in ("started", "continued"):
            self.started, self._ended, self.num_commands = now, None, self.num_commands + 1
            self.waits, self.cpu = {}, {}
            self._settled.clear()
            self.stages.clear()
        else:
            told: Any = event.get("cpu")
            self._ended, self.cpu = now, told if fits(told, {"busy": float, "disk": float}) else {}

    def _count_wait(self, event: Event, kind: str, now: float) -> None:
        """Add up for how long jobs could not start, by what they waited for."""
        if kind not in ("wait", "admit", "run", "stop"):
            return
        if self._waiting is not None:
            on, since = self._waiting
            self.waits[on] = self.waits.get(on, 0.0) + max(0.0, now - since)
        self._waiting = (str(event.get("on", "other")), now) if kind == "wait" else None

    def last(self, kind: str, job_id: str | None = None) -> Event | None:
        """The last event of a kind, of one job or of the supervisor's."""
        return self._last.get((kind, job_id))

    @cached_property
    def kind(self) -> str:
        """What runs: ``stages`` of a workload, ``commands``, or ``tune``."""
        return str(self.run.header.get("kind"))

    @cached_property
    def graph(self) -> Mapping[str, Mapping[str, Any]]:
        """The workload's stages by name, in order: ``graph.json``."""
        found = (read_json(self.run.path / "graph.json", _GRAPH) or {}).get("stages", ())
        return {stage["name"]: stage for stage in found}

    @cached_property
    def params(self) -> Mapping[str, Mapping[str, str]]:
        """The parameters of every job whose values the command line gave, by job id, whether it has started or not."""
        header = self.run.header
        stage = "cmd" if self.kind == "commands" else next(iter(self.graph), "")
        found = header.get("combinations" if self.kind == "commands" else "units") or ()
        return {f"{stage}_{number:04d}": params for number, params in enumerate(found, start=1)}

    def epoch_ends(self, job_id: str) -> Sequence[float]:
        """When the epochs of a job's present attempt ended, in Unix seconds."""
        return self._attempts[job_id].epoch_ends

    def stage_of(self, job_id: str) -> str:
        """The stage of a job: ``fold`` of ``fold_3``."""
        told = next((stage.name for stage in self.stages.values() if job_id in stage.units), "")
        head, _, number = job_id.rpartition("_")
        return told or (head if number.isdigit() else job_id)

    def name(self, job_id: str) -> str:
        """The job's id and its parameters, such as ``cmd_0002 fold=2``."""
        return job_name(job_id, self.params.get(job_id, {}))

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
        folder = self.run.path / "jobs"
        names = [entry.name for entry in os.scandir(folder)] if folder.is_dir() else []
        found = {name for name in names if not name.startswith(".")}
        if self.stages:
            told = {job: state for stage in self.stages.values() for job, state in stage.units.items()}
            found = {job for job, state in told.items() if job in found or state in _THERE}
        places = {name: place for place, name in enumerate(self.graph)}
        return sorted(found, key=lambda name: (places.get(self.stage_of(name), len(places)), natural_order(name)))

    def rows(self) -> list[JobRow]:
        """One row for each job that was admitted, or whose result is kept."""
        return [self.row(job_id) for job_id in self.ids]

    def row(self, job_id: str) -> JobRow:
        """One job's row."""
        if (known := self._settled.get(job_id)) is not None:
            return known
        status, now = read_status(self.run, job_id), self.now()
        attempt = self._attempts.get(job_id) or _Attempt()
        if status.state == "pending" and attempt.admitted is not None:
            # A watcher writes its job's first status when that has lived half a second.
            status = replace(status, state="running", started=attempt.admitted)
        began, is_over, stage = status.started, status.state in ENDED, self.stage_of(job_id)
        told = self.stages[stage].units.get(job_id, "") if stage in self.stages else ""
        row = JobRow(
            stage=stage,
            told=told,
            status=status,
            seconds=None if began is None else max(0.0, (status.ended or now) - began),
            reserved_bytes=attempt.reserved_bytes,
            forecast_bytes=attempt.forecast_bytes,
            epochs_done=attempt.last[1],
            num_epochs=attempt.num_epochs,
            eta_seconds=None if is_over or began is None else attempt.eta_seconds(now),
            result=self._result(stage, job_id) if told in _THERE or status.state == "completed" else {},
            params=self.params.get(job_id, {}),
        )
        if is_over and job_id in self._queued:
            return replace(row, status=replace(status, state="pending", used_bytes=0, stalled=False))
        if is_over or told in _THERE:
            self._settled[job_id] = row
        return row

    def _result(self, stage: str, job_id: str) -> Mapping[str, Any]:
        """What a job returned, from its manifest."""
        path = self.run.manifest_path(stage, job_id)
        result = (read_json(path) or {}).get("result") if self.kind == "stages" else None
        return result if isinstance(result, dict) else {}

    def stage_names(self, rows: Sequence[JobRow]) -> list[str]:
        """The stages of the last command, or those of the jobs where it told none, in order."""
        told = sorted(self.stages, key=[*self.graph, *self.stages].index)
        return told or list(dict.fromkeys([*(row.stage for row in rows), *(map(self.stage_of, [*self.params][:1]))]))

    def states(self, stage: str, rows: Sequence[JobRow]) -> dict[str, str]:
        """The state to show of each known unit of a stage, by job id: a job's own is newer than the stage's events."""
        if stage in self.stages:
            told = {job: state if state in _OVER else "waiting" for job, state in self.stages[stage].units.items()}
        else:
            told = dict.fromkeys(self.params, "waiting")
        own = {row.status.job_id: row.state for row in rows if row.stage == stage}
        own = {job: state for job, state in own.items() if state != "pending" or told.get(job) != "cancelled"}
        return {job: "waiting" if state == "pending" else show_state(state) for job, state in (told | own).items()}

    def counts(self, rows: Sequence[JobRow]) -> dict[str, int]:
        """How many jobs are in which state, the most telling first; kept and reused results count as completed."""
        found = [state for name in self.stage_names(rows) for state in self.states(name, rows).values()]
        states = Counter("completed" if state in ("kept", "reused") else state for state in found)
        order = ["completed", "running", "waiting", *sorted(states)]
        return {name: states[name] for name in dict.fromkeys(order) if states[name]}

    def left(self, stage: str, rows: Sequence[JobRow]) -> tuple[int, float | None]:
        """How many units of a stage are not done yet, and how long they take, as units took so far.

        The seconds are None while no unit is done, or when nothing is left.
        """
        own = [row for row in rows if row.stage == stage]
        running = [row for row in own if row.state == "running"]
        waiting = sum(state == "waiting" for state in self.states(stage, rows).values())
        took = [row.seconds for row in own if row.status.state == "completed" and row.seconds is not None]
        if not took or not (running or waiting):
            return waiting + len(running), None
        mean = statistics.fmean(took)
        left = [row.eta_seconds or max(0.0, mean - (row.seconds or 0.0)) for row in running]
        at_once = len(running) or max(1, self.most_at_once)
        return waiting + len(running), max([(waiting * mean + sum(left)) / at_once, *left])


def job_name(job_id: str, params: Mapping[str, str]) -> str:
    """Return a job's id and its parameters, such as ``cmd_0002 fold=2``."""
    return " ".join([job_id, *(f"{name}={value}" for name, value in params.items())])


def is_understood(event: Event) -> bool:
    """Return whether an event has the fields of its kind."""
    if not event_time(event) or not fits(event, {"kind": str, "job": (str, type(None))}):
        return False
    return fits(event, _FIELDS.get(event["kind"], {}))


def summarize_metrics(units: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float | None, int]]:
    """Per metric the mean over units, the standard deviation (n - 1; None for one) and n.

    >>> summarize_metrics([{"rank_ic": 0.25}, {"rank_ic": 0.75, "num_dates": 9}])
    {'rank_ic': (0.5, 0.353..., 2), 'num_dates': (9.0, None, 1)}
    """
    found: dict[str, tuple[float, float | None, int]] = {}
    for name in dict.fromkeys(name for unit in units for name in unit):
        values = [unit[name] for unit in units if name in unit]
        sd = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan
        found[name] = (statistics.fmean(values), sd if len(values) > 1 else None, len(values))
    return found


def is_number(value: object) -> bool:
    """Whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite(value: Any) -> Any:
    """A JSON value with null for each number in it that is not finite."""
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
