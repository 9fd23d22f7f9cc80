"""A job and its states, the source of jobs, and the backend that runs them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from memfit.checks import check_one_given
from memfit.errors import UsageError
from memfit.memory import DEFAULT_SLACK, Footprint
from memfit.rundir import JobStatus, State
from memfit.units import format_count

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
    enforces_memory: bool  # true if a job that takes more than its request ends as ``out_of_memory``
    #: True if jobs wait in a queue for a node whose budget each has alone, and may be preempted or lost there.
    is_cluster: bool = False
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
    """The seam: whatever runs jobs implements these. `tests/jobs/contract.py` has what it must pass. The run directory
    holds the state, so a new object can be made at any time."""

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
