"""A run at one moment: its stages, its jobs, its trials, and what is left."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from memfit.rundir._events import Event
from memfit.rundir._folder import RunDir, scope_of
from memfit.rundir._status import ENDED, JobStatus, name_jobs, show_state

#: States of a unit that will not run any more, and those in which its result is there.
_OVER = frozenset({"kept", "reused", "completed", "passed", "skipped", "stopped", "failed", "cancelled"})
THERE = frozenset({"kept", "reused", "completed", "stopped"})


@dataclass(frozen=True)
class StageState:
    """One stage, as the last command left it."""

    units: Mapping[str, str] = field(default_factory=dict)  # states by job id, as the event ``stage`` told them
    reasons: Mapping[str, Sequence[str]] = field(default_factory=dict)  # why jobs run or not: each with its jobs
    saved_seconds: float = 0.0  # how long it took to make the results that were kept or reused

    def after(self, event: Event) -> StageState:
        """Return the stage after an event of the kind ``stage``."""
        state, why = event["state"], event["why"]
        saved, reasons = self.saved_seconds, dict(self.reasons)
        if state in ("kept", "reused"):
            saved += event["seconds"]
        elif why not in ("", "it was not made yet") and state not in ("failed", "cancelled"):  # a job's cause says more
            reasons[why] = [*dict.fromkeys([*reasons.get(why, ()), *event["jobs"]])]
        return StageState({**self.units, **{job: str(state) for job in event["jobs"]}}, reasons, saved)

    @property
    def why(self) -> str:
        """All reasons in one line; a reason that holds for some units names them."""
        return "; ".join(
            why if len(jobs) == len(self.units) else f"{name_jobs(jobs)}: {why}" for why, jobs in self.reasons.items()
        )


@dataclass(frozen=True)
class JobState(JobStatus):
    """One job: its status (``pending`` also for one that ended and is queued again), and what events say beside."""

    stage: str = ""
    told: str = ""  # what the supervisor said of it last, as in ``StageState.units``; empty where it said nothing
    seconds: float | None = None  # how long it has run, or ran, in this attempt; None before its start
    earlier_seconds: float = 0.0  # how long its earlier attempts ran
    reserved_bytes: int | None = None  # now or last; None when it ran alone, before its size was known
    forecast_bytes: int | None = None  # what it had reserved when it started
    epochs_done: float = 0.0  # how many epochs it has done, the part of the present one included
    num_epochs: int = 0  # of how many; 0 while that is not known
    eta_seconds: float | None = None  # until its training ends, at its mean rate in this attempt, if known
    epoch: Event = field(default_factory=dict)  # its last event of the kind ``epoch``
    result: Mapping[str, Any] = field(default_factory=dict)  # what it returned
    params: Mapping[str, str] = field(default_factory=dict)  # the parameters that the command line gave it
    lost: Sequence[Event] = ()  # the events of the kind ``rank_lost``, of all attempts

    @property
    def id(self) -> str:
        return self.job_id

    @property
    def name(self) -> str:
        """Its id and its parameters, such as ``cmd_0002 fold=2``."""
        return _name(self.job_id, self.params)

    @property
    def shown(self) -> str:
        """The state to show: ``kept``, ``reused`` and ``stopped`` (by itself: a gate) are the supervisor's word."""
        is_told = self.told in THERE or (self.told == "failed" and self.state == "completed")
        return self.told if is_told else self.state

    @property
    def growth_told(self) -> str:
        """What is told of memory that grows; in the past once it has ended, and of a completed job what was sure."""
        told = self.growth.get("past" if self.state in ENDED else "text")
        is_moot = self.state == "completed" and not self.growth.get("is_sure")
        return f"{self.name}: {told}" if isinstance(told, str) and not is_moot else ""

    def explain_lost(self, event: Event) -> str:
        """Return how a rank was lost, in words."""
        return f"{str(event['text']).removeprefix(f'{self.job_id} ')} (generation {event['generation']})"

    def to_row(self) -> dict[str, Any]:
        """Return a JSON-ready form; sizes in bytes, times in seconds, null for a result that is not finite."""
        plain = "seconds earlier_seconds pid phase stalled used_bytes peak_bytes exit_code cause attempt growth"
        found: dict[str, Any] = {"job": self.job_id, "stage": self.stage, "params": self.params, "state": self.shown}
        found |= {name: getattr(self, name) for name in plain.split()}
        if self.ranks:
            found["ranks"] = [dict(one) for one in self.ranks]
            found["ranks_lost"] = [self.explain_lost(one) for one in self.lost]
        return found | {"reserved_bytes": self.reserved_bytes, "result": finite(self.result)}


@dataclass(frozen=True)
class RunState:
    """A run at one moment."""

    run: RunDir
    header: Mapping[str, Any]  # ``run.json``
    outcome: Mapping[str, Any]  # ``outcome.json``; empty before the run has ended
    now: float  # when it was read, in Unix seconds
    budget: Event  # the last event ``budget``; empty before the first
    graph: Mapping[str, Mapping[str, Any]]  # the stages by name, in order: ``graph.json``
    stages: Mapping[str, StageState]  # the stages of the last command by name; empty for commands
    jobs: Mapping[str, JobState]  # admitted, or with kept results, by id: in the order of stages, names, numbers
    params: Mapping[str, Mapping[str, str]]  # from the command line, by job id, whether it has started or not
    trials: Mapping[str, Mapping[str, Any]]  # the records of a study's trials by name: ``trials/*.json``
    wall_seconds: float  # the last command's wall clock: from its start to its end, or to now while it runs
    num_commands: int  # how many commands have begun this run or gone on with it
    most_at_once: int  # the most jobs that ran at the same time, by the last command that admitted any
    num_restarts: int  # how often memfit itself started a job again
    outgrown: Mapping[str, int]  # how often jobs had to wait for a job that needed more than was thought, by its id
    num_gave_way: int  # how often a job was restarted because of that
    waits: Mapping[str, float]  # seconds of the last command in which none could start, by what jobs waited for
    cpu: Mapping[str, float]  # what the host's cores did in the last command, as shares; empty until it ends
    told_bytes: int | None  # what all used of the limit when a job last started or ended; None before
    planned: Mapping[str, Event]  # whether each stage's first job is as planned, by its id; empty without a plan

    @property
    def kind(self) -> str:
        """What runs: ``stages`` of a workload, ``commands``, or ``tune``."""
        return str(self.header.get("kind"))

    @property
    def is_one(self) -> bool:
        """True for a single command."""
        return scope_of(self.header) == "command"

    @property
    def state(self) -> str:
        """The state in ``outcome.json``, or ``running`` when there is none yet."""
        return str(self.outcome.get("state", "running"))

    @property
    def running(self) -> list[JobState]:
        """The jobs that run."""
        return [job for job in self.jobs.values() if job.shown == "running"]

    def name(self, job_id: str) -> str:
        """A job's id and its parameters, such as ``cmd_0002 fold=2``."""
        return _name(job_id, self.params.get(job_id, {}))

    @cached_property
    def stage_names(self) -> list[str]:
        """The stages of the last command, or those of the jobs where it told none, in order."""
        told = sorted(self.stages, key=[*self.graph, *self.stages].index)
        rest = [*(job.stage for job in self.jobs.values()), *(stage_of(job, self.stages) for job in [*self.params][:1])]
        return told or list(dict.fromkeys(rest))

    @cached_property
    def units(self) -> dict[str, dict[str, str]]:
        """The state to show of each known unit by stage and job id: a job's own is newer than the stage's events."""
        found = {}
        for stage in self.stage_names:
            if stage in self.stages:
                told = {job: one if one in _OVER else "waiting" for job, one in self.stages[stage].units.items()}
            else:
                told = dict.fromkeys(self.params, "waiting")
            own = {job.id: job.shown for job in self.jobs.values() if job.stage == stage}
            own = {job: one for job, one in own.items() if one != "pending" or told.get(job) != "cancelled"}
            found[stage] = {
                job: "waiting" if one == "pending" else show_state(one) for job, one in (told | own).items()
            }
        return found

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many jobs are in which state, the most telling first; kept and reused results count as completed."""
        found = [state for units in self.units.values() for state in units.values()]
        states = Counter("completed" if state in ("kept", "reused") else state for state in found)
        order = ["completed", "running", "waiting", *sorted(states)]
        return {name: states[name] for name in dict.fromkeys(order) if states[name]}

    def left(self, stage: str) -> float | None:
        """How long the units of a stage that are not done take, as others took so far; None if that is not known."""
        own = [job for job in self.jobs.values() if job.stage == stage]
        running = [job for job in own if job.shown == "running"]
        waiting = sum(state == "waiting" for state in self.units.get(stage, {}).values())
        took = [job.seconds for job in own if job.state == "completed" and job.seconds is not None]
        if not took or not (running or waiting):
            ends = [job.eta_seconds for job in running if job.eta_seconds is not None]
            return max(ends) if ends and len(ends) == len(running) and not waiting else None
        mean = statistics.fmean(took)
        left = [job.eta_seconds or max(0.0, mean - (job.seconds or 0.0)) for job in running]
        at_once = len(running) or max(1, self.most_at_once)
        return max([(waiting * mean + sum(left)) / at_once, *left])


def seconds_left(first: tuple[float, float], last: tuple[float, float], whole: float, now: float) -> float | None:
    """Return how long the rest takes at the rate between two times, each with what was done; None without a rate."""
    (began, done_first), (looked, done) = first, last
    if not whole or done <= done_first or looked <= began:
        return None
    return max(0.0, (whole - done) * (looked - began) / (done - done_first) - max(0.0, now - looked))


def finite(value: Any) -> Any:
    """Return a JSON value with null for each number in it that is not finite."""
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _name(job_id: str, params: Mapping[str, str]) -> str:
    return " ".join([job_id, *(f"{name}={value}" for name, value in params.items())])


def stage_of(job_id: str, stages: Mapping[str, StageState]) -> str:
    """Return the stage of a job: ``fold`` of ``fold_3``."""
    told = next((name for name, stage in stages.items() if job_id in stage.units), "")
    head, _, number = job_id.rpartition("_")
    return told or (head if number.isdigit() else job_id)
