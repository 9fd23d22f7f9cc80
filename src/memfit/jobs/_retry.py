"""Decides whether a job that ended is restarted, by the cause of its end; bounded, and each time with a reason."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from memfit.jobs._budget_watch import DEVICE
from memfit.jobs._job import JobStatus
from memfit.memory import HOST, Sizes
from memfit.units import format_bytes

#: What a job reserves after it ran out of memory, as a multiple of what it had or took.
MORE = 1.5


@dataclass(frozen=True)
class Retry:
    """A job is to be restarted, why, and what it must get then: on the host (``HOST``), on each device (``DEVICE``)."""

    reason: str
    needed: Sizes = field(default_factory=Counter)


def decide(
    status: JobStatus, *, had: Sizes, capacity: Sizes, is_last: bool = False, was_preempted: bool = False
) -> Retry | str:
    """Return what follows from a job's end: a retry, or the reason why there is none.

    Out of memory: again from its checkpoint with more, and the last time with the whole budget. Its watcher's death:
    again as it was. An end from outside memfit: again once. A time limit: again if it wrote a checkpoint. Its own
    fault, an end that was asked for: never.

    Args:
        status: How it ended.
        had: What it could take when it ended, in bytes on the host and on each device.
        capacity: What the budget can give one job there.
        is_last: No further retry follows this one.
        was_preempted: It was ended from outside memfit too often already.
    """
    if status.asked:
        return "its end was asked for"
    if was_preempted:
        return "it was ended from outside memfit again, without a checkpoint in between"
    if status.state == "node_fail":
        return Retry("its watcher died, the job did not fail")
    if status.state == "preempted":
        return Retry("it was ended from outside memfit; it goes on from its checkpoint")
    if status.state == "timeout" and (status.checkpointed or 0.0) > (status.started or math.inf):
        return Retry("it met its time limit; it goes on from its checkpoint")
    if status.state != "out_of_memory" and not (status.state == "failed" and status.wants_more):
        return "its own fault is not tried again"
    on_device = status.state == "out_of_memory" and status.evidence.get("place") == "device"
    kind, peak, place = HOST, status.peak_bytes, "the whole budget is"
    if on_device:
        peak = status.footprint.bytes_per_device if status.footprint else 0
        kind, place = DEVICE, "a GPU here gives one job"
    most = capacity[kind]
    if on_device and not most:
        return "it ran out of device memory and was given no GPU: --num-gpus 1 gives it one"
    needed = max(peak, min(had[kind], most))
    if needed >= 0.99 * most:
        return f"it had {format_bytes(needed)}, and {place} {format_bytes(most)}"
    more = most if is_last else min(round(needed * MORE), most)
    out_of = "device memory" if on_device else f"memory at {format_bytes(peak)}"
    on_each = " on each GPU" if on_device else ""
    return Retry(f"it ran out of {out_of}; it gets {format_bytes(more)}{on_each}", Counter({kind: more}))
