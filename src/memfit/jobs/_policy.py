"""What a run's owner decides about admission: the policy, the request to stop, and who is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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


def say_nothing(kind: str, **fields: object) -> None:
    """The listener of a scheduler that nobody listens to."""
