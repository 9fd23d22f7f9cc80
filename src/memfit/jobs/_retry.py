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
    status: JobStatus,
    *,
    had_bytes: int,
    capacity_bytes: int,
    is_last: bool = False,
    had_device_bytes: int = 0,
    device_capacity_bytes: int = 0,
    was_preempted: bool = False,
) -> Retry | str:
    """What follows from a job's end: a retry, or the reason why there is none.

    Memory: again from its checkpoint with more, and the last time with the whole budget. Its watcher's death: again as
    it was. An end from outside memfit: again once. Its own fault, an end that was asked for, a timeout: never.

    Args:
        status: How it ended.
        had_bytes: What it could take when it ended: the larger of its reservation and its wall.
        capacity_bytes: What the budget can give one job.
        is_last: No further retry follows this one.
        had_device_bytes: What it had reserved on each of its devices.
        device_capacity_bytes: What one job can have on each of as many devices.
        was_preempted: It was ended from outside memfit before.
    """
    if status.asked:
        return "its end was asked for"
    if status.state == "node_fail":
        return Retry("its watcher died, the job did not fail")
    if status.state == "preempted":
        if was_preempted:
            return "it was ended from outside memfit for the second time"
        return Retry("it was ended from outside memfit; it goes on from its checkpoint")
    if status.state == "out_of_memory" and status.evidence.get("place") == "device":
        if not device_capacity_bytes:
            return "it ran out of device memory and was given no GPU: --num-gpus 1 gives it one"
        peak = status.footprint.bytes_per_device if status.footprint else 0
        most = _more_memory(peak, had_device_bytes, device_capacity_bytes, is_last)
        if most is None:
            return f"a GPU here gives one job {format_bytes(device_capacity_bytes)}, and it had that"
        return Retry(f"it ran out of device memory; it gets {format_bytes(most)} on each GPU", device_bytes=most)
    if status.state == "out_of_memory" or (status.state == "failed" and status.wants_more):
        peak = status.peak_bytes
        most = _more_memory(peak, had_bytes, capacity_bytes, is_last)
        if most is None:
            needed = max(peak, min(had_bytes, capacity_bytes))
            return f"it had {format_bytes(needed)}, and the whole budget is {format_bytes(capacity_bytes)}"
        return Retry(f"it ran out of memory at {format_bytes(peak)}; it gets {format_bytes(most)}", most)
    return "its own fault is not tried again"


def _more_memory(peak_bytes: int, had_bytes: int, capacity_bytes: int, is_last: bool) -> int | None:
    """What it gets at one place after it ran out of memory there; None when it had all that there is."""
    needed = max(peak_bytes, min(had_bytes, capacity_bytes))
    if needed >= 0.99 * capacity_bytes:
        return None
    return capacity_bytes if is_last else min(round(needed * MORE), capacity_bytes)
