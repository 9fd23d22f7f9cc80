"""Decide how many jobs run at once, and explain the sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from memfit.errors import DoesNotFitError, UsageError
from memfit.memory import DEFAULT_SLACK, HOST, Budget, Footprint, count_fitting, reservation_bytes, rooms_of
from memfit.units import format_bytes

LimitedBy = Literal["memory", "jobs", "max_parallel"]


@dataclass(frozen=True)
class Plan:
    """How many jobs of one kind run at once, and why.

    Attributes:
        num_jobs: Jobs to run.
        num_parallel: Jobs at once.
        limited_by: ``jobs`` if all fit, ``max_parallel`` if the user's number is smaller, else ``memory``.
        num_fitting: How many fit by the memory of the host and of the GPUs.
        num_devices: How many GPUs each job needs.
        reservation_bytes: The host memory that each job reserves: its private peak and the slack.
        device_reservation_bytes: The same on each of its GPUs; 0 if it needs none.
        capacity_bytes: The host memory for jobs when none of them runs.
        device_capacity_bytes: The same on each GPU, by its UUID.
        footprint: The footprint of one job.
    """

    num_jobs: int
    num_parallel: int
    limited_by: LimitedBy
    num_fitting: int
    num_devices: int
    reservation_bytes: int
    device_reservation_bytes: int
    capacity_bytes: int
    device_capacity_bytes: Mapping[str, int]
    footprint: Footprint

    def explain(self) -> str:
        """Return the decision and its sum in one sentence."""
        reason = {
            "jobs": "all fit",
            "max_parallel": f"max_parallel; {self.num_fitting} would fit",
            "memory": "no more fit",
        }[self.limited_by]
        on_devices = ""
        if self.num_devices:
            free = ", ".join(format_bytes(size) for size in self.device_capacity_bytes.values())
            on_devices = f"; {format_bytes(self.device_reservation_bytes)} on {_gpus(self.num_devices)}, of {free}"
        return (
            f"{self.num_parallel} of {self.num_jobs} at once ({reason}): each gets "
            f"{format_bytes(self.reservation_bytes)} of {format_bytes(self.capacity_bytes)}{on_devices}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form, as in ``plan.json``."""
        return asdict(self) | {"footprint": self.footprint.to_dict(), "why": self.explain()}


def plan(
    footprint: Footprint | str | int,
    num_jobs: int,
    *,
    budget: Budget | None = None,
    max_parallel: int | None = None,
    slack: float = DEFAULT_SLACK,
    in_use: Mapping[str, int] | None = None,
    num_devices: int | None = None,
) -> Plan:
    """Decide how many jobs of a footprint run at once within a budget, on the host and on its GPUs.

    Args:
        footprint: One job's footprint, or its size such as ``"8GiB"``. Only private bytes count: all jobs share a
            mapped panel, and the kernel can drop its pages.
        num_jobs: Jobs to run.
        budget: The memory that may be used; read from this machine when None.
        max_parallel: The most at once; None for as many as fit.
        slack: The share that is reserved on top of a measured footprint.
        in_use: Bytes by place that jobs of this plan use already and that the budget counts as taken.
        num_devices: GPUs that each job needs; as many as its footprint names when None.

    Raises:
        DoesNotFitError: If not even one job fits; with the sum.
        UsageError: If there is no job, or ``max_parallel`` is below 1.

    Example:
        >>> decision = plan("1MiB", num_jobs=5, max_parallel=2)
        >>> decision.num_parallel, decision.limited_by
        (2, 'max_parallel')
    """
    found = footprint if isinstance(footprint, Footprint) else Footprint.declared(footprint)
    budget = budget or Budget.read()
    decided = decide(found, num_jobs, budget, max_parallel, slack, in_use, num_devices)
    if decided.num_fitting:
        return decided
    if max(1, found.private_bytes) > decided.capacity_bytes:
        binding = budget.binding
        raise DoesNotFitError(
            f"one job needs {format_bytes(found.private_bytes)} of host memory ({found.method}); "
            f"{format_bytes(decided.capacity_bytes)} available.",
            rule=f"{binding.name} of {format_bytes(binding.limit_bytes)} ({binding.source}), less "
            f"{format_bytes(budget.reserve_bytes)} reserve.",
            remedy="raise that limit, free memory, or make the job smaller",
        )
    rooms = rooms_of(budget, in_use or {})
    free = "; ".join(room.explain() for place, room in rooms.items() if place != HOST) or "no GPU is here"
    raise DoesNotFitError(
        f"one job needs {format_bytes(found.bytes_per_device)} on {_gpus(decided.num_devices)} ({found.method}); "
        f"{free}.",
        rule="each GPU of a job must have room for what the job takes there.",
        remedy="free a GPU, or make the job smaller",
    )


def decide(
    footprint: Footprint,
    num_jobs: int,
    budget: Budget,
    max_parallel: int | None = None,
    slack: float = DEFAULT_SLACK,
    in_use: Mapping[str, int] | None = None,
    num_devices: int | None = None,
) -> Plan:
    """Return the plan as `plan` does; ``num_fitting`` is 0 if not even one job fits."""
    if num_jobs < 1 or (max_parallel is not None and max_parallel < 1):
        raise UsageError(
            f"a plan for {num_jobs} jobs, at most {max_parallel} at once, is empty.",
            rule="num_jobs and max_parallel are counted from 1.",
            remedy="plan for at least one job",
        )
    rooms = rooms_of(budget, in_use or {})
    num_devices = len(footprint.device_bytes) if num_devices is None else num_devices
    reserved = max(1, reservation_bytes(footprint, slack))
    on_device = round(footprint.bytes_per_device * (1 + slack)) if num_devices else 0
    num_fitting = count_fitting(rooms, reserved, num_devices, max(1, on_device))
    if not num_fitting:  # a job alone needs no slack
        private, device = max(1, footprint.private_bytes), max(1, footprint.bytes_per_device)
        num_fitting = min(1, count_fitting(rooms, private, num_devices, device))
    most = min(num_jobs, max_parallel or num_jobs)
    return Plan(
        num_jobs=num_jobs,
        num_parallel=min(num_fitting, most),
        limited_by="memory" if num_fitting < most else "jobs" if most == num_jobs else "max_parallel",
        num_fitting=num_fitting,
        num_devices=num_devices,
        reservation_bytes=reserved,
        device_reservation_bytes=on_device,
        capacity_bytes=rooms[HOST].bytes,
        device_capacity_bytes={place: room.bytes for place, room in rooms.items() if place != HOST},
        footprint=footprint,
    )


def _gpus(num: int) -> str:
    return "1 GPU" if num == 1 else f"each of {num} GPUs"
