"""Whether a job that ended is started again, by the cause of its end; bounded, and each time with a reason."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.jobs._job import JobStatus
from memfit.units import format_bytes

#: What a job reserves after it ran out of memory, as a multiple of what it had or took.
MORE = 1.5


@dataclass(frozen=True)
class Retry:
    """A job is to be started again.

    Attributes:
        reason: Why, in words.
        needed_bytes: What it reserves then; None for what its like reserve.
        device_bytes: What it reserves on its device then; None for as before.
    """

    reason: str
    needed_bytes: int | None = None
    device_bytes: int | None = None


def decide(
    status: JobStatus, *, had_bytes: int, capacity_bytes: int, is_last: bool = False, had_device_bytes: int = 0
) -> Retry | str:
    """What follows from a job's end: a retry, or the reason why there is none.

    Memory: again from its checkpoint with more, and the last time with the whole budget. Its watcher's death or a
    preemption: again as it was. Its own fault, an end that was asked for, a timeout: never.

    Args:
        status: How it ended.
        had_bytes: What it could take when it ended: the larger of its reservation and its wall.
        capacity_bytes: What the budget can give one job.
        is_last: No further retry follows this one.
        had_device_bytes: What it had reserved on its device.

    >>> decide(JobStatus("a", "out_of_memory", peak_bytes=100), had_bytes=90, capacity_bytes=1000).needed_bytes
    150
    >>> decide(JobStatus("a", "failed"), had_bytes=90, capacity_bytes=1000)
    'its own fault is not tried again'
    """
    if status.asked:
        return "its end was asked for"
    if status.state == "node_fail":
        return Retry("its watcher died, the job did not fail")
    if status.state == "preempted":
        return Retry("it was preempted from outside and goes on from its checkpoint")
    if status.state == "out_of_memory" and status.evidence.get("place") == "device":
        more = round(max(1, had_device_bytes) * MORE)
        return Retry(f"it ran out of device memory; it gets {format_bytes(more)} of it", None, more)
    if status.state == "out_of_memory" or (status.state == "failed" and status.wants_more):
        return _more_memory(status, had_bytes, capacity_bytes, is_last)
    return "its own fault is not tried again"


def _more_memory(status: JobStatus, had_bytes: int, capacity_bytes: int, is_last: bool) -> Retry | str:
    needed = max(status.peak_bytes, min(had_bytes, capacity_bytes))
    if needed >= 0.99 * capacity_bytes:
        return f"it had {format_bytes(needed)}, and the whole budget is {format_bytes(capacity_bytes)}"
    needed = capacity_bytes if is_last else min(round(needed * MORE), capacity_bytes)
    return Retry(f"it ran out of memory at {format_bytes(status.peak_bytes)}; it gets {format_bytes(needed)}", needed)
