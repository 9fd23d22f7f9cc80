"""Read a run directory: `read` makes a record of it, a `Reader` makes it again while the run goes on.

What has ended is read once, so that a run of thousands of jobs stays cheap to follow.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from memfit.files import fits, outlast, read_json
from memfit.rundir._events import Event, FolderTail, event_time
from memfit.rundir._folder import RunDir
from memfit.rundir._state import THERE, JobState, RunState, StageState, seconds_left, stage_of
from memfit.rundir._status import ENDED, read_status
from memfit.units import natural_order

_LIMIT = {"name": str, "source": str, "limit_bytes": int}
_BUDGET = {"binding": _LIMIT, "limits": [_LIMIT], "headroom_bytes": int, "reserve_bytes": int, "promise": str}
_OUTCOME = {"state": str, "why": (str, type(None))}
_NONE = type(None)
#: What an event must hold for a run to be followed, by kind. A job may record what it likes under any name, so one of
#: these kinds that lacks a field is passed over: no job can make the readers of its run fail.
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "run": {"state": str, "job": _NONE},
    "budget": _BUDGET | {"job": _NONE},
    "admit": {"job": str, "num_running": int, "why": str, "reservation_bytes": (int, _NONE)},
    "grow": {"job": str, "from_bytes": int, "to_bytes": int, "why": str},
    "short": {"outgrew": str},
    "retry": {"job": str, "reservation_bytes": (int, _NONE)},
    "end": {"job": str, "state": str, "cause": str},
    "epoch": {"job": str, "epoch": int, "num_epochs": (int, _NONE)},
    "step": {"job": str, "epoch": int, "step": int, "num_steps": int, "num_epochs": (int, _NONE)},
    "stop": {"num_running": int},
    "stage": {"stage": str, "state": str, "why": str, "jobs": [str], "seconds": (int, float)},
    "rank_lost": {"job": str, "rank": int, "generation": int, "text": str},
    "planned": {"job": str, "text": str},
}
_GRAPH = {"stages": [{"name": str, "each": (str, _NONE)}]}
_CPU = {"busy": float, "disk": float}
_OPEN_TRIALS = frozenset({"asking", "running"})


@dataclass
class _Attempt:
    """What events told of a job since it was admitted: its memory, and the epochs done at two times, of how many."""

    admitted: float | None = None  # until it ends
    reserved_bytes: int | None = None
    forecast_bytes: int | None = None
    first: tuple[float, float] | None = None
    last: tuple[float, float] = (0.0, 0.0)
    num_epochs: int = 0
    ran_seconds: float = 0.0
    earlier_seconds: float = 0.0

    def take(self, event: Event) -> None:
        now, done = float(event["time"]), float(event["epoch"])
        if event["kind"] == "step":
            done += event["step"] / max(1, event["num_steps"]) - 1
        self.num_epochs = int(event.get("num_epochs") or self.num_epochs)
        if self.first is None or done <= self.last[1]:  # what is behind the last is done again after a resume
            self.first = (now, done)
        self.last = (now, done)


class Reader:
    """Follows a run directory, from the ``offsets`` of an earlier reader; ``state`` is the run as read so far."""

    def __init__(
        self, run: RunDir, *, now: Callable[[], float] = time.time, offsets: Mapping[str, int] | None = None
    ) -> None:
        self.run, self._now = run, now
        self._events = FolderTail(run.events_dir, offsets)
        self._started: float | None = None
        self._ended: float | None = None
        self._last_time: float | None = None
        self._waiting: tuple[str, float] | None = None
        self._admitted_by = 0
        self._attempts: defaultdict[str, _Attempt] = defaultdict(_Attempt)
        self._epochs: dict[str, Event] = {}  # the last of each job
        self._lost: defaultdict[str, list[Event]] = defaultdict(list)
        self._queued: set[str] = set()
        self._settled: dict[str, JobState] = {}
        self._stages: dict[str, StageState] = {}
        self._graph: Mapping[str, Mapping[str, Any]] = {}
        self._params: Mapping[str, Mapping[str, str]] = {}
        self._records: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {}
        self._outgrown = Counter[str]()
        #: The fields of the state that events alone make.
        self._known: dict[str, Any] = {
            "budget": {}, "num_commands": 0, "most_at_once": 0, "num_restarts": 0, "num_gave_way": 0, "waits": {},
            "cpu": {}, "told_bytes": None, "planned": {},
        }  # fmt: skip

    def read(self, *, anew: bool = False) -> list[Event]:
        """Take in the events that came since the last call; return those that are whole, in order of time."""
        new: list[Event] = [event for event in self._events.read(anew=anew) if _is_understood(event)]
        for event in new:
            self._take(event)
        return new

    def state(self) -> RunState:
        now, told = self._now(), {one: state for stage in self._stages.values() for one, state in stage.units.items()}
        outcome = read_json(self.run.path / "outcome.json", _OUTCOME) or {}
        ended = self._ended
        if ended is None:  # a command that ended by an error said so in outcome.json, not in an event
            ended = (self._last_time or 0.0) if outcome else now
        jobs = outlast(lambda: {job: self._job(job, told.get(job, ""), now) for job in self._ids(told)})
        return RunState(
            run=self.run,
            header=self.header,
            outcome=outcome,
            now=now,
            graph=self.graph,
            stages=dict(self._stages),
            jobs=jobs,
            params=self.params,
            trials=self._trials() if self.header.get("kind") == "tune" else {},
            wall_seconds=0.0 if self._started is None else max(0.0, ended - self._started),
            outgrown=dict(self._outgrown),
            **self._known,
        )

    @property
    def offsets(self) -> dict[str, int]:
        return self._events.offsets

    @cached_property
    def header(self) -> Mapping[str, Any]:
        return self.run.header

    @property
    def graph(self) -> Mapping[str, Mapping[str, Any]]:
        """The stages of the run by name; a run that has only begun has not written them yet."""
        if not self._graph:
            found = (read_json(self.run.path / "graph.json", _GRAPH) or {}).get("stages", ())
            self._graph = {stage["name"]: stage for stage in found}
        return self._graph

    @property
    def params(self) -> Mapping[str, Mapping[str, str]]:
        """The parameters that the command line gave, by job id."""
        is_commands = self.header.get("kind") == "commands"
        if not self._params and (stage := "cmd" if is_commands else next(iter(self.graph), "")):
            found = self.header.get("combinations" if is_commands else "units") or ()
            self._params = {f"{stage}_{number:04d}": params for number, params in enumerate(found, start=1)}
        return self._params

    def _take(self, event: Event) -> None:
        """Keep what later questions need; steps come twice a second, so they are not all kept."""
        kind, now, known = event["kind"], float(event["time"]), self._known
        self._count_wait(event, kind, now)
        self._last_time = now
        if kind == "run":
            self._take_run(event, now)
        elif kind == "budget":
            known["budget"] = event
        elif kind == "planned":
            known["planned"] = known["planned"] | {event["job"]: event}
        elif kind == "stop":
            self._queued.clear()
        elif kind == "short":
            self._outgrown[event["outgrew"]] += 1
        elif kind == "aside" and event.get("to") is not None:
            known["num_gave_way"] += 1
        elif kind == "stage":
            name = event["stage"]
            self._stages[name] = self._stages.get(name, StageState()).after(event)
            for unit in event["jobs"]:
                self._settled.pop(unit, None)
        elif event.get("job") is not None:
            self._take_of_job(event, kind, event["job"], now)

    def _take_of_job(self, event: Event, kind: str, job: str, now: float) -> None:
        known = self._known
        if kind == "epoch":
            self._epochs[job] = event
        elif kind == "rank_lost":
            self._lost[job].append(event)
        if kind in ("admit", "end", "retry"):
            self._settled.pop(job, None)
            before = self._attempts[job]
            if before.admitted is not None:
                before.ran_seconds, before.admitted = max(0.0, now - before.admitted), None
            self._queued.discard(job)  # a job may also end while it is queued
        if kind in ("admit", "end") and fits(event.get("used_bytes"), int):
            known["told_bytes"] = event["used_bytes"]
        if kind == "retry":
            self._queued.add(job)
            known["num_restarts"] += 1
        elif kind == "admit":
            self._attempts[job] = _Attempt(now, event.get("reservation_bytes"), event.get("reservation_bytes"))
            self._attempts[job].earlier_seconds = before.earlier_seconds + before.ran_seconds
            most = known["most_at_once"] if self._admitted_by == known["num_commands"] else 0
            known["most_at_once"], self._admitted_by = max(most, event["num_running"]), known["num_commands"]
        elif kind == "grow":
            self._attempts[job].reserved_bytes = event["to_bytes"]
        elif kind in ("epoch", "step"):
            self._attempts[job].take(event)

    def _take_run(self, event: Event, now: float) -> None:
        """Take in the start or the end of a command: what still runs is admitted anew, and nothing is queued."""
        self._queued.clear()
        for attempt in self._attempts.values():
            attempt.admitted = None
        if event["state"] in ("started", "continued"):
            self._started, self._ended = now, None
            self._known |= {"num_commands": self._known["num_commands"] + 1, "waits": {}, "cpu": {}}
            self._settled.clear()
            self._stages.clear()
        else:
            told = event.get("cpu")
            self._ended, self._known["cpu"] = now, told if fits(told, _CPU) else {}

    def _count_wait(self, event: Event, kind: str, now: float) -> None:
        if kind not in ("wait", "admit", "run", "stop"):
            return
        if self._waiting is not None:
            on, since = self._waiting
            waits = self._known["waits"]
            self._known["waits"] = waits | {on: waits.get(on, 0.0) + max(0.0, now - since)}
        self._waiting = (str(event.get("on", "other")), now) if kind == "wait" else None

    def _ids(self, told: Mapping[str, str]) -> list[str]:
        folder = self.run.path / "jobs"
        names = [entry.name for entry in os.scandir(folder)] if folder.is_dir() else []
        found = {name for name in names if not name.startswith(".")}
        if self._stages:
            found = {job for job, state in told.items() if job in found or state in THERE}
        places = {name: place for place, name in enumerate(self.graph)}
        stages = {job: name for name, stage in self._stages.items() for job in stage.units}
        of = {job: stages.get(job) or stage_of(job, {}) for job in found}
        return sorted(found, key=lambda name: (places.get(of[name], len(places)), natural_order(name)))

    def _job(self, job_id: str, told: str, now: float) -> JobState:
        if (known := self._settled.get(job_id)) is not None:
            return known
        status, attempt = read_status(self.run, job_id), self._attempts.get(job_id) or _Attempt()
        if status.state == "pending" and attempt.admitted is not None:
            # A watcher writes its job's first status when that has lived half a second.
            status = replace(status, state="running", started=attempt.admitted)
        is_over, stage, began = status.state in ENDED, stage_of(job_id, self._stages), status.started
        left = seconds_left(attempt.first or attempt.last, attempt.last, attempt.num_epochs, now)
        job = JobState(
            **vars(status),
            stage=stage,
            told=told,
            seconds=None if began is None else max(0.0, (status.ended or now) - began),
            earlier_seconds=attempt.earlier_seconds,
            reserved_bytes=attempt.reserved_bytes,
            forecast_bytes=attempt.forecast_bytes,
            epochs_done=attempt.last[1],
            num_epochs=attempt.num_epochs,
            eta_seconds=None if is_over or began is None else left,
            epoch=self._epochs.get(job_id, {}),
            result=self._result(stage, job_id) if told in THERE or status.state == "completed" else {},
            params=self.params.get(job_id, {}),
            lost=tuple(self._lost[job_id]),
        )
        if is_over and job_id in self._queued:
            return replace(job, state="pending", used_bytes=0, stalled=False)
        if is_over or told in THERE:
            self._settled[job_id] = job
        return job

    def _result(self, stage: str, job_id: str) -> Mapping[str, Any]:
        path = self.run.manifest_path(stage, job_id)
        result = (read_json(path) or {}).get("result") if self.header.get("kind") == "stages" else None
        return result if isinstance(result, dict) else {}

    def _trials(self) -> dict[str, Mapping[str, Any]]:
        """The records of trials: each is read again when its file changed, until its trial has ended."""
        for path in (self.run.path / "trials").glob("[ct]*_*.json"):
            stamp, known = self._records.get(path.stem, (None, None))
            is_open = known is None or known["state"] in _OPEN_TRIALS or known.get("number") is None
            stat = path.stat()  # a short trial before the study has no number, and may begin again
            now = stat.st_mtime_ns, stat.st_ino
            if is_open and stamp != now and (found := read_json(path, {"state": str})) is not None:
                self._records[path.stem] = now, found
        return {name: found for name, (_, found) in self._records.items()}


def read(run: RunDir, *, now: Callable[[], float] = time.time) -> RunState:
    """Return a run as its directory tells it now.

    Raises:
        DamagedError: If a file of it was changed from outside.
    """
    reader = Reader(run, now=now)
    reader.read()
    return reader.state()


def _is_understood(event: Event) -> bool:
    if not event_time(event) or not fits(event, {"kind": str, "job": (str, _NONE)}):
        return False
    return fits(event, _FIELDS.get(event["kind"], {}))
