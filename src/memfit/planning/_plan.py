"""The decision before jobs run side by side: how many at once, and the sum behind it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from memfit.errors import DoesNotFitError, UsageError
from memfit.memory import DEFAULT_SLACK, Budget, Footprint, reservation_bytes
from memfit.units import format_bytes

LimitedBy = Literal["memory", "jobs", "max_parallel"]


@dataclass(frozen=True)
class Plan:
    """How many jobs of one kind run at once, and why.

    Attributes:
        num_jobs: Jobs to run.
        num_parallel: Jobs at once.
        limited_by: ``jobs`` when all fit, ``max_parallel`` when the user's number is smaller, else ``memory``.
        num_fitting: How many fit by memory alone.
        num_cpus: Cores that may be used; they bound speed, not safety, so they do not bound the number.
        reservation_bytes: What each job reserves: its private peak and the slack.
        capacity_bytes: What may be lent when none of the jobs runs.
        footprint: The footprint that the plan rests on.
        limit: The binding limit in words.
    """

    num_jobs: int
    num_parallel: int
    limited_by: LimitedBy
    num_fitting: int
    num_cpus: float
    reservation_bytes: int
    capacity_bytes: int
    footprint: Footprint
    limit: str

    def explain(self) -> str:
        """The decision and its arithmetic, in one sentence."""
        reason = {
            "jobs": "all fit",
            "max_parallel": f"max_parallel; {self.num_fitting} would fit",
            "memory": "no more fit",
        }[self.limited_by]
        return (
            f"{self.num_parallel} of {self.num_jobs} at once ({reason}): each reserves "
            f"{format_bytes(self.reservation_bytes)}, {format_bytes(self.capacity_bytes)} may be lent under "
            f"{self.limit}; {self.num_cpus:g} cores"
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form, as in ``plan.json``."""
        return asdict(self) | {"footprint": self.footprint.to_dict(), "why": self.explain()}


def plan(
    footprint: Footprint | str | int,
    num_jobs: int,
    *,
    budget: Budget | None = None,
    max_parallel: int | None = None,
    slack: float = DEFAULT_SLACK,
    in_use_bytes: int = 0,
) -> Plan:
    """How many jobs of a footprint fit a budget at once.

    Args:
        footprint: One job's footprint, or its size such as ``"8GiB"``. Only private bytes count: a panel that all map
            is there once, and the kernel can drop its pages.
        num_jobs: Jobs to run.
        budget: What may be used; read from this machine when None.
        max_parallel: The most at once; None for as many as fit.
        slack: The share that is reserved on top of a measured footprint.
        in_use_bytes: Private bytes that jobs of this plan use already and that the budget counts as taken.

    Returns:
        The plan.

    Raises:
        DoesNotFitError: If not even one job fits; with the arithmetic.
        UsageError: If there is no job, or ``max_parallel`` is below 1.

    Example:
        >>> decision = plan("1MiB", num_jobs=5, max_parallel=2)
        >>> decision.num_parallel, decision.limited_by
        (2, 'max_parallel')
    """
    if num_jobs < 1 or (max_parallel is not None and max_parallel < 1):
        raise UsageError(
            f"a plan for {num_jobs} jobs, at most {max_parallel} at once, is empty.",
            rule="num_jobs and max_parallel are counted from 1.",
            remedy="plan for at least one job",
        )
    found = footprint if isinstance(footprint, Footprint) else Footprint.declared(footprint)
    budget = budget or Budget.read()
    capacity = budget.headroom_bytes + in_use_bytes - budget.reserve_bytes
    binding = budget.binding
    limit = f"{binding.name} of {format_bytes(binding.limit_bytes)}"
    if found.private_bytes > capacity:
        raise DoesNotFitError(
            f"one job needs {format_bytes(found.private_bytes)} of host memory ({found.method}); "
            f"{format_bytes(capacity)} may be lent.",
            rule=f"{limit} ({binding.source}), less {format_bytes(budget.reserve_bytes)} reserve.",
            remedy="raise that limit, free memory, or make the job smaller",
        )
    reserved = max(1, reservation_bytes(found, slack))
    num_fitting = max(1, capacity // reserved)
    most = min(num_jobs, max_parallel or num_jobs)
    limited_by: LimitedBy = "memory" if num_fitting < most else "jobs" if most == num_jobs else "max_parallel"
    return Plan(
        num_jobs=num_jobs,
        num_parallel=min(num_fitting, most),
        limited_by=limited_by,
        num_fitting=num_fitting,
        num_cpus=budget.num_cpus,
        reservation_bytes=reserved,
        capacity_bytes=capacity,
        footprint=found,
        limit=limit,
    )
