"""A run as its directory tells it: read anew at each look, from files alone."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.jobs import ENDED, JobStatus, read_status
from memfit.rundir import EventTail, RunDir, read_json

Event = Mapping[str, Any]

#: What an event must hold to be understood, by kind. A job may record what it likes under any name, so one of these
#: kinds that lacks a field is passed over: no job can make the readers of its run fail.
_FIELDS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "run": {"state": str, "job": type(None)},
    "budget": {"binding": dict, "limits": list, "job": type(None)},
    "admit": {"job": str, "num_running": int, "why": str, "reservation_bytes": (int, type(None))},
    "wait": {"job": str, "reason": str, "arithmetic": str},
    "plan": {"why": str},
    "footprint": {"reservation_bytes": int},
    "end": {"job": str, "state": str, "cause": str},
    "epoch": {"job": str, "epoch": int, "num_epochs": int},
    "step": {"job": str, "epoch": int, "step": int, "num_steps": int},
    "resume": {"job": str, "epoch": int},
    "stop": {"num_running": int, "level": int},
    "done": {"num_done": int},
    "progress": {"job": str, "phase": str, "done": int, "total": int},
}


@dataclass(frozen=True)
class JobRow:
    """One job's line.

    Attributes:
        status: Its state, phase and memory.
        seconds: How long it has run, or ran; None before its start.
        reserved_bytes: The most that it had reserved; None when it ran alone, before its size was known.
        epochs_done: How many epochs it has done, the part of the present one included; 0 before the first step.
        num_epochs: Of how many; 0 while that is not known.
        eta_seconds: How long it will still train, at its mean rate in this attempt; None when not to be said.
        metrics: The numbers that it returned.
    """

    status: JobStatus
    seconds: float | None
    reserved_bytes: int | None
    epochs_done: float
    num_epochs: int
    eta_seconds: float | None
    metrics: Mapping[str, float]


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
    """Follows a run directory.

    Args:
        run: The run directory.
        now: The clock, in Unix seconds.

    Attributes:
        started: When the command that runs now, or ran last, began: Unix seconds; None before it said so.
        num_commands: How many commands have begun this run or gone on with it.
        most_at_once: The most folds that ran at the same time, by the last command that admitted any.
    """

    def __init__(self, run: RunDir, *, now: Callable[[], float] = time.time) -> None:
        self.run = run
        self.now = now
        self.started: float | None = None
        self.num_commands = 0
        self.most_at_once = 0
        self._ended: float | None = None
        self._last_time: float | None = None
        self._admitted_by = 0
        self._tails: dict[Path, EventTail] = {}
        self._of_kind: dict[tuple[str, str | None], Event] = {}
        self._progress: dict[str, _Progress] = {}
        self._reservations: list[tuple[float, int]] = []

    def read(self) -> list[Event]:
        """Read on; the events that came since the last look, in order of time."""
        for path in self.run.events_dir.glob("*.jsonl"):
            self._tails.setdefault(path, EventTail(path))
        new: list[Event] = [event for tail in self._tails.values() for event in tail.read() if _is_understood(event)]
        new.sort(key=lambda event: float(event["time"]))
        for event in new:
            self._take(event)
        return new

    def _take(self, event: Event) -> None:
        """Keep what later questions need; steps come twice a second, so they are not all kept."""
        kind, job, now = event["kind"], event.get("job"), float(event["time"])
        self._of_kind[kind, job] = event
        self._last_time = now
        if kind == "run" and event["state"] in ("started", "continued"):
            self.started, self._ended, self.num_commands = now, None, self.num_commands + 1
        elif kind == "run":
            self._ended = now
        elif kind == "footprint":
            self._reservations.append((now, event["reservation_bytes"]))
        elif kind == "admit":
            self._progress[str(job)] = _Progress()
            if job != "prepare":
                before = self.most_at_once if self._admitted_by == self.num_commands else 0
                self.most_at_once, self._admitted_by = max(before, event["num_running"]), self.num_commands
        elif kind in ("epoch", "step"):
            self._progress.setdefault(str(job), _Progress()).take(event)

    def last(self, kind: str, job_id: str | None = None) -> Event | None:
        """The last event of a kind, of one job or of the supervisor's."""
        return self._of_kind.get((kind, job_id))

    @property
    def stage(self) -> dict[str, Any] | None:
        """What the prepare stage left: the panel and the folds."""
        return read_json(self.run.path / "checkpoints" / "stage_prepare.json")

    @property
    def plan(self) -> dict[str, Any] | None:
        """``plan.json``: how many at once and why; written when a fold's footprint is known or grew."""
        return read_json(self.run.path / "plan.json")

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

    def rows(self) -> list[JobRow]:
        """One row for each fold that was admitted, in order of its number."""
        names = (path.name for path in (self.run.path / "jobs").glob("fold_*"))
        numbers = sorted(int(name.removeprefix("fold_")) for name in names if re.fullmatch(r"fold_[0-9]+", name))
        return [self.row(f"fold_{number}") for number in numbers]

    def row(self, job_id: str) -> JobRow:
        """One job's row."""
        status, now = read_status(self.run, job_id), self.now()
        result = read_json(self.run.job_dir(job_id) / "result.json") if status.state == "completed" else None
        progress = self._progress.get(job_id) or _Progress()
        running = status.started is not None and status.state not in ENDED
        return JobRow(
            status=status,
            seconds=None if status.started is None else max(0.0, (status.ended or now) - status.started),
            reserved_bytes=self._reserved_bytes(job_id, status),
            epochs_done=progress.last[1],
            num_epochs=progress.num_epochs,
            eta_seconds=progress.eta_seconds(now) if running else None,
            metrics=(result or {}).get("result") or {},
        )

    def _reserved_bytes(self, job_id: str, status: JobStatus) -> int | None:
        """What it was admitted with, or what it counted for after one of its kind had taken more."""
        admitted = self.last("admit", job_id)
        if admitted is None:
            return None
        ended = status.ended if status.state in ENDED else None
        raised = [size for at, size in self._reservations if at >= admitted["time"] and (ended is None or at <= ended)]
        return max([admitted["reservation_bytes"] or 0, *raised]) or None


def _is_understood(event: Event) -> bool:
    if isinstance(event.get("time"), bool) or not isinstance(event.get("time"), int | float):
        return False
    if not isinstance(event.get("kind"), str) or not isinstance(event.get("job"), str | None):
        return False
    needed = _FIELDS.get(event["kind"], {})
    return all(isinstance(event.get(name), kind) for name, kind in needed.items())


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
