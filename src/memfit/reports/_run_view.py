"""A run as its directory tells it: read anew at each look, from files alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.jobs import ENDED, JobStatus, read_status
from memfit.rundir import EventTail, RunDir, read_json

Event = Mapping[str, Any]


@dataclass(frozen=True)
class JobRow:
    """One job's line.

    Attributes:
        status: Its state, phase and memory.
        reserved_bytes: What it reserved; None while its size was unknown.
        epoch, num_epochs: The epoch that it finished last, of how many; 0 and 0 before the first.
        eta_seconds: When it will have ended, at its present rate; None when not to be said.
        metrics: The numbers that it returned.
    """

    status: JobStatus
    reserved_bytes: int | None
    epoch: int
    num_epochs: int
    eta_seconds: float | None
    metrics: Mapping[str, float]

    @property
    def seconds(self) -> float | None:
        """How long it has run, or ran."""
        if self.status.started is None:
            return None
        return (self.status.ended or time.time()) - self.status.started


class RunView:
    """Follows a run directory.

    Args:
        run: The run directory.

    Attributes:
        events: All events read so far, in the order in which they were found.
        started: When the command that runs now, or ran last, began: Unix seconds.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.events: list[Event] = []
        self.started: float | None = None
        self._tails: dict[Path, EventTail] = {}
        self._of_kind: dict[tuple[str, str | None], Event] = {}

    def read(self) -> list[Event]:
        """Read on; the events that came since the last look, in order of time."""
        for path in self.run.events_dir.glob("*.jsonl"):
            self._tails.setdefault(path, EventTail(path))
        new: list[Event] = [event for tail in self._tails.values() for event in tail.read()]
        new.sort(key=lambda event: float(event["time"]))
        for event in new:
            self._of_kind[str(event["kind"]), event.get("job")] = event
            if event["kind"] == "run" and event["state"] in ("started", "continued"):
                self.started = float(event["time"])
        self.events += new
        return new

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

    def rows(self) -> list[JobRow]:
        """One row for each fold that was admitted, in order of its number."""
        ids = [path.name for path in (self.run.path / "jobs").glob("fold_*")]
        return [self.row(job_id) for job_id in sorted(ids, key=lambda id: int(id.removeprefix("fold_")))]

    def row(self, job_id: str) -> JobRow:
        """One job's row."""
        status = read_status(self.run, job_id)
        epoch = self.last("epoch", job_id) or {"epoch": 0, "num_epochs": 0}
        admitted = self.last("admit", job_id) or {}
        result = read_json(self.run.job_dir(job_id) / "result.json") if status.state == "completed" else None
        reserved = admitted.get("reservation_bytes")
        if admitted and self.plan is not None:
            # What it was admitted with, or what it counts for since one of its kind took more.
            reserved = max(reserved or 0, int(self.plan["reservation_bytes"]))
        return JobRow(
            status=status,
            reserved_bytes=reserved,
            epoch=int(epoch["epoch"]),
            num_epochs=int(epoch["num_epochs"]),
            eta_seconds=self._eta(job_id, status),
            metrics=result["result"] if result else {},
        )

    def _eta(self, job_id: str, status: JobStatus) -> float | None:
        """From the rate of training steps since this attempt's first one."""
        if status.started is None or status.state in ENDED:
            return None
        steps = [e for e in self.events if e["kind"] == "step" and e["job"] == job_id and e["time"] >= status.started]
        if len(steps) < 2:
            return None
        (first, done_first), (last, done) = ((step, _steps_done(step)) for step in (steps[0], steps[-1]))
        if done <= done_first:
            return None
        rate = float(last["time"] - first["time"]) / (done - done_first)
        left = int(last["num_steps"]) * int(last["num_epochs"]) - done
        return max(0.0, left * rate - (time.time() - float(last["time"])))

    def most_at_once(self) -> int:
        """The most folds that ran at the same time."""
        spans = [(row.status.started, row.status.ended or time.time()) for row in self.rows() if row.status.started]
        return max((sum(a <= start < b for a, b in spans) for start, _ in spans), default=0)


def _steps_done(step: Event) -> int:
    return int(step["num_steps"]) * (int(step["epoch"]) - 1) + int(step["step"])


def summarize_metrics(rows: Sequence[JobRow]) -> dict[str, tuple[float, float | None, int]]:
    """Per metric the mean over folds, the standard deviation (n - 1; None for one fold) and n."""
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    found: dict[str, tuple[float, float | None, int]] = {}
    for name in names:
        values = [row.metrics[name] for row in rows if name in row.metrics]
        found[name] = (statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))
    return found
