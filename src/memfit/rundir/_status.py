"""The words and the files that say how a job stands."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from memfit.errors import DamagedError
from memfit.files import read_json
from memfit.memory import Footprint
from memfit.rundir._folder import FOOTPRINT, RunDir
from memfit.units import format_bytes, format_duration

STATUS, OUTCOME = "status.json", "outcome.json"
#: Slurm's states in lower case.
State = Literal[
    "pending", "running", "completed", "failed", "out_of_memory", "timeout", "preempted", "cancelled", "node_fail"
]
STATES: tuple[State, ...] = get_args(State)
ENDED: frozenset[State] = frozenset(STATES) - {"pending", "running"}
EndedBy = Literal["", "job", "user", "platform"]

#: What a status says of each rank of a job of several.
RANK = {"rank": int, "place": str, "pss_bytes": int, "device_bytes": int, "peak_bytes": int}
_NUMBER, _NONE = (int, float), type(None)
_SHAPE: Mapping[str, Any] = {
    "state": frozenset(STATES),
    "phase": (str, _NONE),
    "cause": (str, _NONE),
    "node": (str, _NONE),
    "footprint": (FOOTPRINT, _NONE),
    "device_used_bytes": ({str: int}, _NONE),
    "evidence": (dict, _NONE),
    "growth": (dict, _NONE),
    "furthest": ({str: [_NUMBER]}, _NONE),
    "ranks": ([RANK], _NONE),
    "ended_by": (frozenset(get_args(EndedBy)), _NONE),
    **dict.fromkeys(("started", "ended", "checkpointed", "cpu_seconds"), (*_NUMBER, _NONE)),
    **dict.fromkeys(("used_bytes", "peak_bytes", "pss_bytes", "checkpoint_bytes"), (int, _NONE)),
    **dict.fromkeys(("exit_code", "attempt", "pid", "watcher_pid"), (int, _NONE)),
    **dict.fromkeys(("settled", "stalled", "wants_more", "asked"), (bool, _NONE)),
}


@dataclass(frozen=True)
class JobStatus:
    """The state of a job."""

    job_id: str
    state: State  # one of Slurm's states in lower case
    phase: str | None = None  # the phase that it marked last; None without marks
    settled: bool = False  # it has passed its ``phases``, or else stopped growing: a forecast for similar jobs
    used_bytes: int = 0  # its non-reclaimable memory now, of its whole control group where it has one
    peak_bytes: int = 0  # the peak of that
    footprint: Footprint | None = None  # the measured footprint so far, or None before the first sample
    started: float | None = None  # Unix seconds
    ended: float | None = None
    exit_code: int | None = None  # negative for a signal, as in ``subprocess``
    cause: str = ""  # why it ended as it did, in words
    attempt: int = 1  # how many times it was started
    pss_bytes: int = 0  # the proportional sizes of its processes at the last sweep; 0 before and after
    device_used_bytes: Mapping[str, int] = field(default_factory=dict)  # now, by the UUID of each device that it has
    pid: int | None = None  # of the job itself; None before its start
    watcher_pid: int | None = None  # of its shim
    stalled: bool = False  # it waits at its limit: the kernel lets it allocate no more until the limit is raised
    wants_more: bool = False  # an allocation of it was refused or delayed at its limit in this attempt
    cpu_seconds: float = 0.0  # the CPU time of all its processes so far
    # when it last reported a checkpoint further than those of earlier attempts, in Unix seconds; its start if it
    # reported others alone, None if none
    checkpointed: float | None = None
    furthest: Mapping[str, Sequence[float]] = field(default_factory=dict)  # checkpoint of each training: epoch and step
    checkpoint_bytes: int = 0  # the largest checkpoint that it reported
    asked: bool = False  # its end was asked for by ``cancel`` or ``memfit stop``
    ended_by: EndedBy = ""  # ``job``, ``user`` (through memfit) or ``platform`` (others); empty while it runs
    pending_reason: str = ""  # why the backend's queue holds a submitted job that has not started; empty when none does
    evidence: Mapping[str, Any] = field(default_factory=dict)  # limits, peaks and counters of its group at the end
    node: str = ""  # the node of a cluster that it runs on; empty on this host
    # what each rank of a job of several does and holds: ``rank``, ``pid``, its last ``place`` and ``step``,
    # ``pss_bytes`` and ``device_bytes`` now, ``peak_bytes`` so far by high-water marks, without file pages
    ranks: Sequence[Mapping[str, Any]] = ()
    growth: Mapping[str, Any] = field(default_factory=dict)  # `memfit.memory.Growth` as told; empty while it is not

    def ended_as(self, state: State, cause: str, ended_by: EndedBy) -> Self:
        """Return the status of a job that ended just now: it uses and wants nothing any more."""
        return replace(
            self,
            state=state,
            cause=cause,
            ended=time.time(),
            ended_by=ended_by,
            used_bytes=0,
            pss_bytes=0,
            stalled=False,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form, as in ``status.json`` and ``outcome.json``; the id is the folder's name."""
        found = {name: value for name, value in vars(self).items() if name != "job_id"}
        return found | {"footprint": self.footprint.to_dict() if self.footprint else None}

    def describe_end(self, reserved_bytes: int | None) -> str:
        """Return the state, the time it took and the peak: ``completed (5.2s), peak 228 MiB of 251 MiB reserved``."""
        took = "" if self.started is None or self.ended is None else f" ({format_duration(self.ended - self.started)})"
        reserved = f" of {format_bytes(reserved_bytes)} reserved" if reserved_bytes else ""
        return f"{show_state(self.state)}{took}, peak " + (
            f"{format_bytes(self.peak_bytes)}{reserved}" if self.peak_bytes else "not measured"
        )


def read_status_file(path: Path) -> dict[str, Any] | None:
    """Return what a job's file says; None without one, or for an empty file, which a power cut leaves."""
    try:
        return read_json(path, _SHAPE)
    except DamagedError:
        with suppress(OSError):  # moved away meanwhile
            if path.stat().st_size:
                raise
    return None


def read_record(path: Path) -> JobStatus | None:
    """Return the status in a file of a job's folder, without what is unknown; None as `read_status_file`."""
    if (found := read_status_file(path)) is None:
        return None
    known = {name: one for name, one in found.items() if name in JobStatus.__dataclass_fields__ and one is not None}
    if "footprint" in known:
        known["footprint"] = Footprint.from_dict(known["footprint"])
    return JobStatus(**known | {"job_id": path.parent.name})


def read_status(run: RunDir, job_id: str) -> JobStatus:
    """Return how a job stands or ended, by the files in its folder; ``pending`` before it has any."""
    folder = run.job_dir(job_id)
    return read_record(folder / OUTCOME) or read_record(folder / STATUS) or JobStatus(job_id, "pending")


def show_state(state: str) -> str:
    """Return the word that people read: a stop is one word, whoever asked for it and whether the job had saved."""
    return "stopped" if state in ("cancelled", "preempted") else state


def name_jobs(jobs: Sequence[str]) -> str:
    """Return the names of jobs in words.

    >>> name_jobs(["prepare"]), name_jobs(["fold_1", "fold_2"]), name_jobs([f"fold_{n}" for n in range(1, 6)])
    ('prepare', 'fold_1 and fold_2', 'fold_1 to fold_5 (5 jobs)')
    """
    return " and ".join(jobs) if len(jobs) < 3 else f"{jobs[0]} to {jobs[-1]} ({len(jobs)} jobs)"
