"""A job, its states and the one seam through which jobs are run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from memfit.errors import UsageError
from memfit.memory import Footprint

#: Slurm's states in lower case.
State = Literal[
    "pending", "running", "completed", "failed", "out_of_memory", "timeout", "preempted", "cancelled", "node_fail"
]
STATES: tuple[State, ...] = get_args(State)
ENDED: frozenset[State] = frozenset(STATES) - {"pending", "running"}


@dataclass(frozen=True)
class Job:
    """A function or a command with a footprint.

    Attributes:
        id: Its name and its folder's: ``fold_3``, ``trial_0017``, ``cmd_0004``.
        target: The function, as ``module:name``; called in a new interpreter with ``arguments`` as keywords.
        arguments: JSON values.
        command: The command, instead of a function.
        footprint: What it is declared or known to take; None when that is to be measured.
        phases: The phases that must each be passed once before the job's measured footprint speaks for its like.
        threads: Threads for its numerical libraries; fixed, however many jobs run beside it.
        tight_malloc: Make glibc give freed memory back at once, so that resident memory follows live memory.
        env: Further variables for the child.

    Example:
        >>> Job("hello", command=("echo", "hello")).command
        ('echo', 'hello')
        >>> import math
        >>> Job.of("root", math.sqrt).target
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
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.id):
            raise UsageError(
                f"'{self.id}' cannot name a job.",
                rule="the name becomes a folder: letters, digits, '.', '_' and '-', beginning with a letter or digit.",
                remedy="name it for example fold_3",
            )
        if (self.target is None) == (not self.command):
            raise UsageError(
                f"job {self.id} has {'neither a function nor' if self.target is None else 'both a function and'} a "
                "command.",
                rule="a job is either a function (target) or a command.",
                remedy="give one of them",
            )
        if self.threads < 1:
            raise UsageError(
                f"job {self.id} asks for {self.threads} threads.",
                rule="a job runs with at least 1 thread.",
                remedy="set threads_per_job to 1 or more",
            )

    @classmethod
    def of(cls, id: str, function: Callable[..., Any], **arguments: Any) -> Job:
        """A job that calls a function by its import path; the function must be importable in a new interpreter."""
        if "<" in function.__qualname__ or function.__module__ == "__main__":
            raise UsageError(
                f"job {id}: {function.__qualname__} cannot be imported by a new interpreter.",
                rule="a job's function lives at the top level of a module other than __main__.",
                remedy="move it into a module, and pass that",
            )
        return cls(id, target=f"{function.__module__}:{function.__qualname__}", arguments=arguments)


@dataclass(frozen=True)
class JobStatus:
    """What is known of a job now.

    Attributes:
        job_id: The job's id.
        state: One of Slurm's states in lower case.
        phase: The phase that it marked last, or None.
        num_phases_passed: How many of the job's ``phases`` it has entered and left.
        used_bytes: Its non-reclaimable memory now.
        peak_bytes: The peak of that.
        pss_bytes: The proportional sizes of its processes at the last sweep; 0 before the first and after its end.
        footprint: The measured footprint so far, or None before the first sample.
        started, ended: Unix seconds, or None.
        exit_code: The child's exit code; negative for a signal, as in ``subprocess``.
        cause: Why it ended as it did, in words.
        attempt: How many times it was started.
    """

    job_id: str
    state: State
    phase: str | None = None
    num_phases_passed: int = 0
    used_bytes: int = 0
    peak_bytes: int = 0
    footprint: Footprint | None = None
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    cause: str = ""
    attempt: int = 1
    pss_bytes: int = 0


class Backend(Protocol):
    """The seam: whatever runs jobs implements these three. ``memfit.testing.BackendContract`` is what it must pass."""

    def submit(self, job: Job) -> None:
        """Start a job, or take over the one of that id that still runs. Returns before the job ends."""

    def poll(self) -> dict[str, JobStatus]:
        """The status of every job submitted here, by id. Cheap and without side effects that a caller could see."""

    def cancel(self, job_id: str, *, now: bool = False) -> None:
        """Ask a job to checkpoint and end (SIGTERM); with ``now``, end it and all its processes at once."""
