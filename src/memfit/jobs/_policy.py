"""What a run's owner decides: which jobs there are, how they are admitted, and when the run stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from memfit.jobs._job import Job, JobStatus
from memfit.memory import DEFAULT_SLACK

OnFailure = Literal["stop", "first", "continue"]


@dataclass(frozen=True)
class Policy:
    """How jobs are admitted.

    Attributes:
        max_parallel: The most jobs at once; None for as many as fit.
        on_failure: ``stop`` asks the running jobs to stop and starts no more when one fails; ``continue`` goes on.
            ``first`` starts no more of a stage when the first job of it that ends has failed by an error of its own.
        slack: The share that is reserved on top of a measured footprint.
        force: Admit without asking whether it fits, and without measuring one job first.
        retries: How often a job is started again when its memory was too small, its watcher died or it was preempted.
        proven_stages: Stages of which a job completed in an earlier run: ``first`` means ``continue`` for them.
    """

    max_parallel: int | None = None
    on_failure: OnFailure = "continue"
    slack: float = DEFAULT_SLACK
    force: bool = False
    retries: int = 2
    proven_stages: frozenset[str] = frozenset()


class StopRequest:
    """How a run is stopped from a signal handler: ``ask`` for a checkpoint and an end, or end it ``now``."""

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
        """Return the jobs that may start now and were not handed over before.

        Args:
            num_free: How many more jobs could start now. A source that makes up its jobs, such as a search, returns
                at most so many. A source that knows its jobs may return all of them: the scheduler keeps their order.
        """

    def ended(self, status: JobStatus) -> None:
        """Take note of a job's last end. Called once for each job that was handed over.

        A job that is tried again has not ended. A job that was given up before a start or between two attempts has
        the state ``pending``, and ``cause`` says why: the run stops, or a job of its stage failed first.
        """

    @property
    def is_done(self) -> bool:
        """True when no job will be handed over any more."""
