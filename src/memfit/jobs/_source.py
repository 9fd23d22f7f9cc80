"""Where the scheduler gets its jobs from: a list, a graph of stages, a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from memfit.jobs._job import Job, JobStatus


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
