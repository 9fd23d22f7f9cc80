"""Decides whether a job that ended is restarted, and with what: one table, read from above; each line has a reason."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from memfit.jobs._budget_watch import DEVICE
from memfit.jobs._job import ENDED, JobStatus, State, Traits
from memfit.memory import HOST, Sizes
from memfit.units import format_bytes, format_count

#: What a restart counts as: a retry (at most ``retries``), an end from outside memfit, or a job that gave way.
Restart = Literal["retry", "outside", "aside"]


@dataclass(frozen=True)
class Retry:
    """A job is to be restarted, why, and what it must get then: on the host (``HOST``), on each device (``DEVICE``)."""

    reason: str
    needed: Sizes = field(default_factory=Counter)
    counts_as: Restart = "retry"


@dataclass(frozen=True)
class End:
    """How an attempt ended, and all that decides what follows. The properties are what the table asks.

    Attributes:
        status: How it ended.
        traits: What its backend tries again.
        had: What it could take when it ended, in bytes on the host and on each device.
        capacity: What the budget can give one job there.
        retries: How often a job may be restarted for its own sake.
        restarts: How often it was restarted already, by what that counted as.
        aside: What it must get if it gave way to other jobs; None if it did not.
        was_given_up: memfit ended it because it wanted more than the whole budget.
        is_stopping: The run was asked to stop.
    """

    status: JobStatus
    traits: Traits
    had: Sizes = field(default_factory=Counter)
    capacity: Sizes = field(default_factory=Counter)
    retries: int = 2
    restarts: Counter[Restart] = field(default_factory=Counter)
    aside: Sizes | None = None
    was_given_up: bool = False
    is_stopping: bool = False

    @property
    def has_saved(self) -> bool:
        """It wrote a checkpoint in this attempt."""
        return (self.status.checkpointed or 0.0) > (self.status.started or math.inf)

    @property
    def is_from_outside(self) -> bool:
        """Such an end is no fault of the job, as its backend says."""
        return self.status.state in self.traits.outside

    @property
    def ended_outside_too_often(self) -> bool:
        return self.is_from_outside and not self.is_forgiven and self.restarts["outside"] >= self.traits.most_outside

    @property
    def is_forgiven(self) -> bool:
        """Ends from outside before this attempt count no more."""
        return self.traits.saving_forgives and self.has_saved

    @property
    def has_no_retries_left(self) -> bool:
        return self.retries <= (0 if self.is_from_outside else self.restarts["retry"])

    @property
    def kind(self) -> str:
        """Where it ran out of memory: on the host or on a device."""
        on_device = self.status.state == "out_of_memory" and self.status.evidence.get("place") == "device"
        return DEVICE if on_device else HOST

    @property
    def most(self) -> int:
        return self.capacity[self.kind]

    @property
    def peak(self) -> int:
        if self.kind == HOST:
            return self.status.peak_bytes
        return self.status.footprint.bytes_per_device if self.status.footprint else 0

    @property
    def took(self) -> int:
        """What it had or took, there."""
        return max(self.peak, min(self.had[self.kind], self.most))

    @property
    def had_all(self) -> bool:
        return self.took >= 0.99 * self.most

    @property
    def more(self) -> int:
        """What it gets there next."""
        is_last = self.traits.last_gets_all and self.restarts["retry"] + 1 >= self.retries
        return self.most if is_last else min(round(self.took * self.traits.more), self.most)


class Line(NamedTuple):
    """A line of the table: what follows from these ends if something is known, and why.

    ``then`` is ``end``, or what a restart gets: ``same`` as before, ``more``, or what it needs ``beside`` others.
    """

    states: tuple[State, ...] | frozenset[State]
    known: Callable[[End], bool]
    then: Literal["end", "same", "more", "beside"]
    why: str


def _always(end: End) -> bool:
    return True


_GAVE_WAY: tuple[State, ...] = ("preempted", "cancelled", "node_fail", "out_of_memory")
_FAULT = "its own fault is not tried again"
_AGAIN_OUTSIDE = "it was ended from outside memfit again, without a checkpoint in between"
_NO_DEVICE = (
    "it ran out of device memory, and memfit has no more to give: --num-gpus 1 gives it a GPU here, and "
    "slurm.extra=[--constraint=...] larger ones in Slurm"
)
_GOES_ON = "it goes on from its checkpoint"
#: How it ended, what is known, what follows, why. The first line that holds decides.
RESTARTS = (
    Line(("completed",), _always, "end", "it completed"),
    Line(ENDED, lambda end: end.was_given_up, "end", "it had the whole budget to itself"),
    Line(ENDED, lambda end: end.is_stopping, "end", "the run was asked to stop"),
    Line(_GAVE_WAY, lambda end: end.aside is not None, "beside", "it gave way to other jobs"),
    Line(ENDED, lambda end: end.status.asked, "end", "its end was asked for"),
    Line(ENDED, lambda end: end.ended_outside_too_often, "end", _AGAIN_OUTSIDE),
    Line(("cancelled",), _always, "end", _FAULT),
    Line(("failed",), lambda end: not end.status.wants_more, "end", _FAULT),
    Line(("timeout",), lambda end: not end.has_saved, "end", _FAULT),
    Line(("out_of_memory",), lambda end: end.kind == DEVICE and not end.most, "end", _NO_DEVICE),
    Line(("out_of_memory", "failed"), lambda end: end.had_all, "end", "it had {took}, and {whole} {most}"),
    Line(ENDED, lambda end: end.has_no_retries_left, "end", "it was restarted {retried} already (retries)"),
    Line(("node_fail",), _always, "same", "{cause}; the job did not fail"),
    Line(("preempted",), _always, "same", f"it was ended from outside memfit; {_GOES_ON}"),
    Line(("timeout",), _always, "same", f"it met its time limit; {_GOES_ON}"),
    Line(("out_of_memory", "failed"), _always, "more", "it ran out of {memory}; it gets {more}"),
)


def what_follows(end: End) -> Retry | str:
    """Return what follows from a job's end: a restart, or the reason why there is none."""
    line = next(line for line in RESTARTS if end.status.state in line.states and line.known(end))
    on_device = end.kind == DEVICE
    reason = line.why.format(
        took=format_bytes(end.took),
        most=format_bytes(end.most),
        whole="a GPU here gives one job" if on_device else "the whole budget is",
        memory="device memory" if on_device else f"memory at {format_bytes(end.peak)}",
        more=f"{format_bytes(end.more)}{' on each GPU' if on_device else ''}",
        retried=format_count(end.restarts["retry"], "time"),
        cause=end.status.cause or "its watcher died",
    )
    if line.then == "end":
        return reason
    if line.then == "beside":
        return Retry(reason, end.aside or Counter(), "aside")
    needed = Counter({end.kind: end.more}) if line.then == "more" else Counter[str]()
    return Retry(reason, needed, "outside" if end.is_from_outside else "retry")
