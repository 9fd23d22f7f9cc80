"""A job and its states, the source of jobs, and the backend that runs them."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol

from memfit.checks import check_one_given
from memfit.errors import UsageError
from memfit.memory import DEFAULT_SLACK, Footprint
from memfit.rundir import ENDED as ENDED
from memfit.rundir import EndedBy as EndedBy
from memfit.rundir import State as State
from memfit.rundir import name_jobs as name_jobs
from memfit.rundir import show_state
from memfit.units import format_bytes, format_count, format_duration

OnFailure = Literal["stop", "continue"]


@dataclass(frozen=True)
class Job:
    """A function or a command with a footprint.

    Attributes:
        id: Its name and its folder's: ``fold_3``, ``trial_0017``, ``cmd_0004``.
        target: The function, as ``module:name``; called in a process of its own with ``arguments`` as keywords.
        arguments: JSON values.
        command: The command, instead of a function.
        footprint: Its declared footprint; None to measure it.
        phases: The phases that it must pass once before its measured footprint is a forecast for similar jobs.
        threads: Threads for its numerical libraries; fixed, however many jobs run beside it.
        tight_malloc: Make glibc give freed memory back at once, so that resident memory follows live memory.
        cuda_allocator: Settings of torch's CUDA allocator, as in ``PYTORCH_CUDA_ALLOC_CONF``; the environment's if
            None.
        env: Further variables for the child.
        params: What differs between the jobs of its stage, as ``{"fold": "3", "lr": "1e-3"}``: the footprints of those
            that share the most of them are its forecast.
        cwd: The folder that its process starts in; the supervisor's when None.
        stdin: The file that it reads as its standard input, at its first attempt; nothing when None.
        num_devices: How many devices it needs; it sees no others.
        ranks: How many processes it is: a group whose first, rank 0, has the job's input and result. All of them share
            its memory, its devices and its threads.
        device_bytes: What it is declared to take on each of them; None to measure it.
        keeps_group: Keep its control group until the run ends, so that the page cache which it filled (a shared panel)
            is charged there and not to the jobs that read it.
        mapped_bytes: The size of the tables and arrays of earlier stages that it may map. Side by side, jobs leave room
            for them in the page cache.
        stage: The name of its stage. Jobs of one stage share forecasts.
        unit: Which part of its stage it is (a fold, a trial, a shard), as a JSON value.
        uses: The user's definitions that its function uses, as ``module:name``: the libraries that they import may be
            imported before it is forked.

    Example:
        >>> Job("hello", command=("echo", "hello")).command
        ('echo', 'hello')
        >>> Job("root", target="math:sqrt", arguments={"x": 9}).target
        'math:sqrt'
    """

    id: str
    target: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    footprint: Footprint | None = None
    phases: tuple[str, ...] = ()
    threads: int = 1
    tight_malloc: bool = True
    cuda_allocator: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    stdin: str | None = None
    num_devices: int = 0
    ranks: int = 1
    device_bytes: int | None = None
    keeps_group: bool = False
    mapped_bytes: int = 0
    stage: str = ""
    unit: Any = None
    uses: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.id):
            raise UsageError(
                f"'{self.id}' cannot name a job.",
                rule="the name becomes a folder: letters, digits, '.', '_' and '-', beginning with a letter or digit.",
                remedy="name it for example fold_3",
            )
        check_one_given(
            {f"the function of job {self.id}": self.target, "its command": self.command or None},
            none=f"job {self.id} has neither a function nor a command",
            rule="a job is either a function (target) or a command.",
            remedy="give one of them",
        )
        if self.num_devices < 0 or (self.device_bytes is not None and not self.num_devices):
            raise UsageError(
                f"job {self.id} declares device memory and asks for {self.num_devices} devices.",
                rule="what a job is declared to take on each device needs at least 1 device.",
                remedy="give num_devices too",
            )
        if self.num_devices % self.ranks:
            raise UsageError(
                f"job {self.id} has {self.ranks} ranks and asks for {format_count(self.num_devices, 'GPU')}.",
                rule="each rank has as many GPUs as every other: one, where there are any.",
                remedy=f"ask for one for each: --num-gpus {self.ranks}",
            )
        if self.threads < 1:
            raise UsageError(
                f"job {self.id} asks for {self.threads} threads.",
                rule="a job runs with at least 1 thread.",
                remedy="set threads_per_job to 1 or more",
            )


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
    # ``pss_bytes`` and ``device_bytes`` now, ``peak_bytes`` (of the former) so far
    ranks: Sequence[Mapping[str, Any]] = ()

    def ended_as(self, state: State, cause: str, ended_by: EndedBy) -> JobStatus:
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

    @classmethod
    def from_dict(cls, job_id: str, found: Mapping[str, Any]) -> JobStatus:
        """Return the status that ``to_dict`` gave; what is missing or unknown is left out."""
        names = {one.name for one in fields(cls)} - {"job_id", "footprint"}
        plain = {name: value for name, value in found.items() if name in names and value is not None}
        footprint = found.get("footprint")
        return cls(job_id, footprint=Footprint.from_dict(footprint) if footprint else None, **plain)

    def describe_end(self, reserved_bytes: int | None) -> str:
        """Return the state, the time it took and the peak: ``completed (5.2s), peak 228 MiB of 251 MiB reserved``."""
        took = "" if self.started is None or self.ended is None else f" ({format_duration(self.ended - self.started)})"
        reserved = f" of {format_bytes(reserved_bytes)} reserved" if reserved_bytes else ""
        return f"{show_state(self.state)}{took}, peak " + (
            f"{format_bytes(self.peak_bytes)}{reserved}" if self.peak_bytes else "not measured"
        )


@dataclass(frozen=True)
class Verdict:
    """The state and the cause that a job's end is recorded with, from whoever ends it and knows why."""

    state: State
    cause: str


class Submission(NamedTuple):
    """A job to start, and the most host memory that this attempt may take where there is no enforcer."""

    job: Job
    limit_bytes: int | None = None


@dataclass(frozen=True)
class Traits:
    """What a backend can do."""

    queues_jobs: bool  # true if a submitted job may wait in a queue before it starts
    enforces_memory: bool  # true if a job that takes more than its request ends as ``out_of_memory``
    patience_seconds: float  # how long a status may lag behind the truth
    outside: Collection[State] = frozenset[State]({"preempted"})  # ends that are no fault of a job: no retry counts
    most_outside: int = 1  # how many of them in a row are followed by another start
    saving_forgives: bool = False  # a checkpoint between two of them begins a new row
    more: float = 1.5  # what a job that ran out of memory gets next, as a multiple of what it had or took
    last_gets_all: bool = True  # its last retry gets what is free
    least_bytes: int = 1  # less is no room for a process here: no reservation and no limit is smaller


class Enforcer(Protocol):
    """Makes running jobs wait at their limits. Only a backend on this host can offer one."""

    def grant(self, job_id: str, wall_bytes: int) -> None:
        """Set a job's limit in non-reclaimable bytes, before its start or while it runs; nothing once it has ended."""

    def cap(self, total_bytes: int) -> None:
        """Set what all jobs together may take now."""

    def left_bytes(self) -> int:
        """Return the memory that jobs left behind when they ended, such as files in /dev/shm."""


class Backend(Protocol):
    """The seam: whatever runs jobs implements these. `tests/jobs/contract.py` has what it must pass.

    The run directory holds the state. A backend object only follows it, so a new one can be made at any time.
    """

    @property
    def traits(self) -> Traits:
        """What it can do."""

    @property
    def enforcer(self) -> Enforcer | None:
        """What makes running jobs wait at their limits; None where nothing can."""

    def submit(self, batch: Sequence[Submission]) -> None:
        """Start jobs. Returns before they end."""

    def adopt(self, job_ids: Iterable[str]) -> set[str]:
        """Follow those of these jobs that an earlier supervisor started and that still run; return their ids.

        A job that ran when this object was made counts even if it has ended since, so that it is not restarted. One
        that was cancelled or submitted here does not count.
        """

    def poll(self) -> Mapping[str, JobStatus]:
        """Return the status of every job submitted or adopted here, by id. Never raises because a queue is down."""

    def wait(self, seconds: float) -> None:
        """Wait until a job ended, passed its reservation or met its limit, and at most so long."""

    def cancel(self, job_id: str, *, now: bool = False, verdict: Verdict | None = None) -> None:
        """Ask a job to checkpoint and end (SIGTERM); with ``now``, end it and all its processes at once.

        A job that ends by this, and not by itself, is recorded with the verdict if there is one. A job that does not
        run is recorded with it at once.
        """

    def make_room(self) -> bool:
        """Give back memory that it holds itself, for a job that does not fit; False if it holds none."""

    def close(self) -> None:
        """Follow no job any more; those that run go on."""


@dataclass(frozen=True)
class Policy:
    """How jobs are admitted."""

    max_parallel: int | None = None  # the most jobs at once; None for as many as fit, while they leave cores idle
    on_failure: OnFailure = "continue"  # when a job fails, ``stop`` stops the run and ``continue`` goes on
    slack: float = DEFAULT_SLACK  # the share that is reserved on top of a measured footprint
    force: bool = False  # admit without asking whether it fits, and without measuring one job first
    retries: int = 2  # how often a job is restarted when it ran out of memory, its watcher died or it was preempted
    largest_first: bool = False  # of the waiting jobs that fit, unless two have passed the oldest; else the oldest
    refuse_tight: bool = False  # refuse a declared peak that leaves less than 5 % of what it gets alone (`why_tight`)


class StopRequest:
    """Stops a run from a signal handler: ``ask`` its jobs to checkpoint and end, or end them ``now``."""

    level = 0

    def ask(self) -> None:
        self.level = max(self.level, 1)

    def now(self) -> None:
        self.level = 2


class JobSource(Protocol):
    """Hands over jobs and hears how they ended, in one thread; ``next`` is called ten times a second."""

    def next(self, num_free: int) -> Sequence[Job]:
        """Return the jobs that may start now and are new, in order; a search makes up ``num_free`` at most."""

    def ended(self, status: JobStatus) -> None:
        """Take note of a job's last end. Called once for each job that was handed over.

        A job that was given up before a start or a restart has the state ``pending``; ``cause`` says why.
        """

    @property
    def is_done(self) -> bool:
        """True when no job will be handed over any more."""
