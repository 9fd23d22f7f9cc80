"""Decides whether a job that ended is restarted, and with what: one function; the first rule that holds decides."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from memfit.jobs._budget_watch import DEVICE, HeldByOthers
from memfit.jobs._job import Traits
from memfit.memory import HOST
from memfit.rundir import JobStatus
from memfit.units import format_bytes, format_count

#: What a restart counts as: a retry (at most ``retries``), an end from outside memfit, or a job that gave way.
Restart = Literal["retry", "outside", "aside"]
#: A job had all that there is from this share of it on; others hold a part of it below that share.
#: Shares that count as all of a limit: what is free changes by some bytes all the time.
_ALL, WHOLE = 0.99, 0.97
_MORE = 1.5  # what a job that ran out of memory gets next, as a multiple of what it had or took
#: Ends that are no fault of a job, and how many in a row another start follows. On a cluster a checkpoint begins
#: a new row.
_OUTSIDE, _MOST_OUTSIDE = frozenset({"preempted"}), 1
_OUTSIDE_OF_CLUSTER, _MOST_OF_CLUSTER = _OUTSIDE | {"timeout", "node_fail"}, 3
_CLIMB = 1.25  # a job that gave way at its limit needs this multiple of its peak at its next start
_RETRIED = "it was restarted {} already (retries)"
_NO_DEVICE = (
    "it ran out of device memory, and memfit has no more to give: --num-gpus 1 gives it a GPU here, and "
    "slurm.extra=[--constraint=...] larger ones in Slurm"
)


@dataclass(frozen=True)
class Retry:
    """A job is to be restarted, why, and what it must get: on the host (``HOST``), on each device (``DEVICE``).

    Where ``needed`` has no entry, nothing is known: the forecast decides. One that ``gets_all`` starts alone, with all
    that is free then; what others hold is waited for only as far as ``needed`` reaches.
    """

    reason: str
    needed: Mapping[str, int] = field(default_factory=dict)
    counts_as: Restart = "retry"
    gets_all: bool = False


@dataclass(frozen=True)
class End:
    """How an attempt ended, and all that decides what follows. Sizes are bytes on the host and on each device."""

    status: JobStatus
    traits: Traits
    # the limit that it met; no entry where it met none, since a grant is no proof that the memory was there
    had: Mapping[str, int] = field(default_factory=dict)
    # what one job gets once others have given back what they may: this alone ends a job for good
    alone: Mapping[str, int] = field(default_factory=dict)
    now: Mapping[str, int] = field(default_factory=dict)  # what one job gets now
    held: HeldByOthers = field(default_factory=HeldByOthers)  # what others hold there
    expected: int | None = None  # its forecast on the host; None if there is none
    retries: int = 2
    restarts: Counter[Restart] = field(default_factory=Counter)
    gave_way: bool = False  # it was asked to give way to others
    was_given_up: bool = False  # memfit ended it because it wanted more than the whole budget
    is_stopping: bool = False  # the run was asked to stop

    @property
    def is_forgiven(self) -> bool:
        """It wrote a checkpoint in this attempt, so that ends from outside before it count no more."""
        return self.traits.is_cluster and _has_saved(self.status)

    @property
    def is_short(self) -> bool:
        """It ran out of memory."""
        return self.status.state == "out_of_memory" or (self.status.state == "failed" and self.status.wants_more)

    @property
    def has_grown(self) -> bool:
        """It ran out of memory as one that grows with its steps, and not as one that is too large. The first time, one
        without a checkpoint gets more memory as any other: were the verdict false, that would save it."""
        is_told = self.is_short and self.status.evidence.get("ran_out_by") == "growth"
        return is_told and (_has_saved(self.status) or self.restarts["retry"] > 0)


_KILLED = (-9, 137)  # how a process that was killed by SIGKILL has ended, by itself and below a shell


def what_follows(end: End) -> Retry | str:
    """Return the next start of a job that ended, or why there is none. The first rule that holds decides.

    No rule that ends a job for good reads a size that nobody knows, or what others hold.
    """
    status, traits, state, num_retries = end.status, end.traits, end.status.state, end.restarts["retry"]
    outside, most = (_OUTSIDE_OF_CLUSTER, _MOST_OF_CLUSTER) if traits.is_cluster else (_OUTSIDE, _MOST_OUTSIDE)
    is_outside, outside_left = state in outside, most - (0 if end.is_forgiven else end.restarts["outside"])
    if state == "completed":
        return "it completed"
    if end.was_given_up and not end.has_grown:
        return "it had the whole budget to itself"
    if end.is_stopping:
        return "the run was asked to stop"
    if end.gave_way and not end.was_given_up:  # whatever it answered: memfit asked
        return Retry("it gave way to other jobs", _needed_beside(end), "aside")
    if status.asked and not end.was_given_up:
        return "its end was asked for"
    if is_outside and outside_left <= 0:
        return "it was ended from outside memfit again, without a checkpoint in between"
    if (
        state == "cancelled"
        or (state == "failed" and not end.is_short)
        or (state == "timeout" and not _has_saved(status))
    ):
        return "its own fault is not tried again"
    if end.has_grown:
        return _with_same(end)
    if end.is_short:
        return _with_more(end)
    if end.retries <= (0 if is_outside else num_retries):
        return _RETRIED.format(format_count(num_retries, "time"))
    how = f"{status.cause or 'its watcher died'}; the job did not fail"
    if state != "node_fail":
        how = "it was ended from outside memfit" if state == "preempted" else "it met its time limit"
        how += "; it goes on from its checkpoint"
    return Retry(how, counts_as="outside" if is_outside else "retry")


def _with_same(end: End) -> Retry | str:
    """Return how a job that grew until it ran out of memory goes on: more memory would only put its end off."""
    kind, peak, took = _taken(end)
    if not _has_saved(end.status):
        return f"it grew to {format_bytes(peak)}, and more memory would not mend that: it saved nothing to go on from"
    if end.retries <= (num_retries := end.restarts["retry"]):
        return _RETRIED.format(format_count(num_retries, "time"))
    how = f"it grew to {format_bytes(peak)}; it goes on from its checkpoint with the same memory"
    return Retry(how, {kind: min(took, end.alone.get(kind, took))} if took else {})


def _taken(end: End) -> tuple[str, int, int]:
    """Return where memory ran out, the peak there, and what it had of it."""
    status, kind, peak = end.status, HOST, end.status.peak_bytes
    if status.state == "out_of_memory" and status.evidence.get("place") == "device":
        kind, peak = DEVICE, status.footprint.bytes_per_device if status.footprint else 0
    return kind, peak, max(peak, min(end.had.get(kind, 0), end.alone.get(kind, 0)))


def _with_more(end: End) -> Retry | str:
    """Return how a job that ran out of memory is tried again with more of it, or why it is not."""
    status, num_retries = end.status, end.restarts["retry"]
    kind, peak, took = _taken(end)
    most, now, met = end.alone.get(kind, 0), end.now.get(kind, 0), end.had.get(kind)
    more = min(round(max(took, end.traits.least_bytes) * _MORE), most)
    if kind == DEVICE and not most:
        return _NO_DEVICE
    if took >= _ALL * most:
        whole = "a GPU here gives one job" if kind == DEVICE else "the whole budget is"
        return f"it had {format_bytes(took)}, and {whole} {format_bytes(most)}"
    needed = {kind: more} if took else {}  # nothing was measured, so nothing is known
    out_of = "device memory" if kind == DEVICE else f"memory at {format_bytes(peak)}"
    # One that was refused a request while there was room, such as a size that no machine has, is not others' doing.
    is_own = status.exit_code not in (None, *_KILLED) and took < WHOLE * now
    if not is_own and now < WHOLE * most and (met is None or met >= WHOLE * now):  # no retry is used up
        return Retry(f"it ran out of {out_of}: {end.held.words or 'others held a part'}", needed, "aside")
    if end.retries <= num_retries:
        return _RETRIED.format(format_count(num_retries, "time"))
    gets_all = not end.traits.is_cluster and num_retries + 1 >= end.retries
    if gets_all:
        needed = {kind: more}
    what = f"{'all that is free' if gets_all else format_bytes(more)}{' on each GPU' * (kind == DEVICE)}"
    gets = f"it gets {what}" if needed else "its size is not known"
    return Retry(f"it ran out of {out_of}; {gets}", needed, gets_all=gets_all)


def _needed_beside(end: End) -> dict[str, int]:
    """Return what a job that gave way needs at its next start: its peak or its forecast, if either is known."""
    peak = round(_CLIMB * end.status.peak_bytes) if end.status.wants_more else end.status.peak_bytes
    needed = min(max(peak, end.expected or 0), end.alone.get(HOST, 0))
    return {HOST: needed} if needed >= end.traits.least_bytes else {}


def _has_saved(status: JobStatus) -> bool:
    return (status.checkpointed or 0.0) > (status.started or math.inf)
