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
    """The state of a job.

    Attributes:
        job_id: The job's id.
        state: One of Slurm's states in lower case.
        phase: The phase that it marked last; None without marks.
        settled: Its measured footprint is a forecast for similar jobs: it has passed each of its ``phases`` or, if it
            names none, has stopped growing.
        used_bytes: Its non-reclaimable memory now, of its whole control group where it has one.
        peak_bytes: The peak of that.
        pss_bytes: The proportional sizes of its processes at the last sweep; 0 before the first and after its end.
        device_used_bytes: Its device memory now, by the UUID of each device that it was given.
        footprint: The measured footprint so far, or None before the first sample.
        started, ended: Unix seconds, or None.
        exit_code: The child's exit code; negative for a signal, as in ``subprocess``.
        cause: Why it ended as it did, in words.
        attempt: How many times it was started.
        pid: The process id of the job itself, or None before its start.
        watcher_pid: The process id of its shim; None before the start of that.
        stalled: It waits at its limit: the kernel lets it allocate no more until the limit is raised.
        wants_more: An allocation of it was refused or delayed at its limit in this attempt.
        cpu_seconds: The CPU time of all its processes so far.
        checkpointed: When it last reported a checkpoint, in Unix seconds; None when it never did.
        checkpoint_bytes: The largest checkpoint that it reported.
        asked: Its end was asked for by ``cancel`` or ``memfit stop``.
        ended_by: Who ended it: the ``job`` itself, the ``user`` (through memfit) or the ``platform`` (a signal from
            elsewhere, or the death of its watcher); empty while it runs.
        pending_reason: Why the backend's queue holds a submitted job that has not started; empty when none does.
        evidence: What proves the cause: limits, peaks and counters of its group at the end.
        node: The node of a cluster that it runs on; empty on this host.
        ranks: What each rank of a job of several does and holds: ``rank``, ``pid``, its last ``place`` and ``step``,
            ``pss_bytes`` and ``device_bytes`` now, ``peak_bytes`` (of the former) so far.
    """

    job_id: str
    state: State
    phase: str | None = None
    settled: bool = False
    used_bytes: int = 0
    peak_bytes: int = 0
    footprint: Footprint | None = None
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    cause: str = ""
    attempt: int = 1
    pss_bytes: int = 0
    device_used_bytes: Mapping[str, int] = field(default_factory=dict)
    pid: int | None = None
    watcher_pid: int | None = None
    stalled: bool = False
    wants_more: bool = False
    cpu_seconds: float = 0.0
    checkpointed: float | None = None
    checkpoint_bytes: int = 0
    asked: bool = False
    ended_by: EndedBy = ""
    pending_reason: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    node: str = ""
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
    """What a backend can do.

    Attributes:
        queues_jobs: True if a submitted job may wait in a queue before it starts.
        enforces_memory: True if a job that takes more than its request ends as ``out_of_memory``.
        patience_seconds: How long a status may lag behind the truth.
        outside: Ends that are no fault of a job here: another start after one is no retry.
        most_outside: How many of them in a row are followed by another start.
        saving_forgives: A checkpoint between two of them begins a new row.
        more: What a job that ran out of memory gets next, as a multiple of what it had or took.
        last_gets_all: Its last retry gets the whole budget.
    """

    queues_jobs: bool
    enforces_memory: bool
    patience_seconds: float
    outside: Collection[State] = frozenset[State]({"preempted"})
    most_outside: int = 1
    saving_forgives: bool = False
    more: float = 1.5
    last_gets_all: bool = True


class Enforcer(Protocol):
    """Makes running jobs wait at their limits. Only a backend on this host can offer one."""

    def grant(self, job_id: str, wall_bytes: int) -> None:
        """Set a job's limit in non-reclaimable bytes: before its start, and again while it runs.

        Does nothing for one that has ended.
        """

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
        """Start jobs. Returns before they end.

        Raises:
            UsageError: If a job of one of these ids runs already.
        """

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

        Raises:
            UsageError: If there is no job of this id and no verdict.
        """

    def make_room(self) -> bool:
        """Give back memory that it holds itself, for a job that does not fit; False if it holds none."""

    def close(self) -> None:
        """Follow no job any more; those that run go on."""


@dataclass(frozen=True)
class Policy:
    """How jobs are admitted.

    Attributes:
        max_parallel: The most jobs at once; None for as many as fit, while they leave cores idle.
        on_failure: When a job fails, ``stop`` stops the run and ``continue`` goes on.
        slack: The share that is reserved on top of a measured footprint.
        force: Admit without asking whether it fits, and without measuring one job first.
        retries: How often a job is restarted when it ran out of memory, its watcher died or it was preempted.
        largest_first: Start the largest of the waiting jobs that fit, unless two have passed the oldest. If false,
            start the oldest that fits.
        refuse_tight: Refuse a job whose declared peak leaves less than 5 % of what it gets alone (`why_tight`).
    """

    max_parallel: int | None = None
    on_failure: OnFailure = "continue"
    slack: float = DEFAULT_SLACK
    force: bool = False
    retries: int = 2
    largest_first: bool = False
    refuse_tight: bool = False


class StopRequest:
    """Stops a run from a signal handler: ``ask`` its jobs to checkpoint and end, or end them ``now``."""

    level = 0

    def ask(self) -> None:
        self.level = max(self.level, 1)

    def now(self) -> None:
        self.level = 2


class JobSource(Protocol):
    """Hands over jobs and hears how they ended.

    The scheduler calls both methods from one thread. It asks for jobs ten times a second, so ``next`` must be cheap.
    """

    def next(self, num_free: int) -> Sequence[Job]:
        """Return the jobs that may start now and were not handed over before; the scheduler keeps their order.

        A source that makes up its jobs, such as a search, returns at most ``num_free``.
        """

    def ended(self, status: JobStatus) -> None:
        """Take note of a job's last end. Called once for each job that was handed over.

        A job that was given up before a start or a restart has the state ``pending``; ``cause`` says why.
        """

    @property
    def is_done(self) -> bool:
        """True when no job will be handed over any more."""
