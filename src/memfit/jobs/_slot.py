"""A job in the scheduler's hands: what it holds, how often it was started, and the grants that follow from that."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from memfit.jobs._job import Grant, Job, JobStatus, Verdict
from memfit.memory import Claim
from memfit.units import MIB

#: By how much a reservation grows at least when the job passes it, and at most because of that minimum.
_GROWTH, _STEP_BYTES = 1.15, 32 * MIB


class Wait(NamedTuple):
    """What the next job waits for.

    Attributes:
        on: ``memory``, ``device``, ``max_parallel``, ``measuring`` (of a job that speaks for others), ``starting`` (as
            many as cores can bear) or ``other``.
        reason: The same in words, with the arithmetic behind a semicolon.
    """

    on: str
    reason: str


@dataclass
class Slot:
    """One job from its first admission to its last end.

    Attributes:
        job: The job.
        status: Its last status.
        reserved_bytes: What it holds of the budget; 0 while its size is unknown and it runs alone.
        expected_bytes: What its like take; it will want that much sooner or later.
        by_hint: Its reservation rests on a declared size, which a measured one may lower.
        needed_bytes: What it must get at its next start, whatever its like take; None when they decide.
        device, device_bytes: The UUID of its GPU and what it holds there.
        grant: What the backend was told last.
        admitted: When it was started, by the monotonic clock.
        stalled_since: Since when it waits at its wall; None when it does not.
        grew: When its reservation was raised last, by the monotonic clock; 0 when it never was.
        set_aside: It was asked to end so that others can go on; since then, by the monotonic clock.
        verdict: What its end is to be called, once it was given up for good.
        num_retries, num_asides: How often it was started again for its own sake, and for others'.
    """

    job: Job
    status: JobStatus
    reserved_bytes: int = 0
    expected_bytes: int = 0
    by_hint: bool = False
    needed_bytes: int | None = None
    device: str | None = None
    device_bytes: int = 0
    needed_device_bytes: int | None = None
    grant: Grant | None = None
    admitted: float = 0.0
    stalled_since: float | None = None
    grew: float = 0.0
    set_aside: float | None = None
    verdict: Verdict | None = None
    num_retries: int = 0
    num_asides: int = 0
    learned_bytes: int = field(default=0)

    def claim(self) -> Claim:
        """Its part of the host's budget."""
        return Claim(self.reserved_bytes, self.status.used_bytes)

    def expectation(self) -> Claim:
        """What it will want of the host's budget, as far as its like tell."""
        return Claim(max(self.reserved_bytes, self.expected_bytes), self.status.used_bytes)

    def device_claim(self) -> Claim:
        """Its part of its device's memory."""
        footprint = self.status.footprint
        return Claim(self.device_bytes, max(footprint.device_bytes.values(), default=0) if footprint else 0)

    @property
    def wants_more(self) -> bool:
        """Whether it has passed its reservation, or waits at its wall."""
        over = self.status.used_bytes > self.reserved_bytes
        return bool(self.reserved_bytes) and (over or self.status.stalled)

    @property
    def is_measured(self) -> bool:
        """Whether its size is known or reserved, so that others need not wait for it."""
        return bool(self.reserved_bytes) or self.status.settled

    def lost_seconds(self) -> float:
        """The work that would be lost if it ended now: since its last checkpoint, or since its start."""
        since = self.status.checkpointed or self.status.started
        return max(0.0, time.time() - since) if since else 0.0

    def had_bytes(self) -> int:
        """Return what it could take before it ended: all there was when its size was unknown."""
        wall = self.grant.wall_bytes if self.grant else 0
        met_wall = self.status.wants_more and self.status.peak_bytes >= 0.8 * wall
        had = wall if met_wall or not self.reserved_bytes else self.reserved_bytes
        return max(had, self.status.evidence.get("data_limit_bytes") or 0)

    def take_back(self, needed_bytes: int | None, device_bytes: int | None) -> None:
        """Make it one that waits again; from now on it needs so much, or what it needed before."""
        self.needed_bytes = needed_bytes or self.needed_bytes
        self.needed_device_bytes = device_bytes or self.needed_device_bytes
        self.set_aside, self.stalled_since, self.grant, self.reserved_bytes, self.grew = None, None, None, 0, 0.0

    def wanted_bytes(self, free_bytes: int) -> int:
        """What its reservation should grow to, of what is free; its present one when there is no need."""
        used = self.status.used_bytes
        if not self.wants_more:
            return max(self.reserved_bytes, self.expected_bytes)
        # One that waits at its wall gets half of what is free, so that it meets few more on its way.
        step = free_bytes // 2 if self.status.stalled else min(_STEP_BYTES, free_bytes // 8)
        return max(self.reserved_bytes, self.expected_bytes, round(used * _GROWTH), used + step)

    def spare_bytes(self) -> int:
        """What a reservation that grew has come to hold for nothing: it rests on no forecast, only on its use then."""
        least = max(self.expected_bytes, round(self.status.used_bytes * _GROWTH), 1)
        return self.reserved_bytes - least if self.grew and least < 0.9 * self.reserved_bytes else 0

    def grant_of(self, free_bytes: int, capacity_bytes: int) -> Grant:
        """What it may take: its reservation, and up to its wall its part of what is free; all there is when alone."""
        if not self.reserved_bytes:
            whole = max(1, capacity_bytes)
            return Grant(whole, whole)
        held = max(self.reserved_bytes, self.status.used_bytes)
        return Grant(self.reserved_bytes, max(held, min(held + free_bytes, capacity_bytes)))


def device_claims(slots: Iterable[Slot]) -> dict[str, list[Claim]]:
    """Return the jobs' parts of each device's memory, by its UUID; of those that use none under an empty one."""
    claims: dict[str, list[Claim]] = {}
    for slot in slots:
        claims.setdefault(slot.device or "", []).append(slot.device_claim())
    return claims


def cheapest(slots: Iterable[Slot]) -> Slot:
    """The job whose end loses the least work; the one that was set aside least often among equals."""
    return min(slots, key=lambda slot: (slot.num_asides, slot.lost_seconds(), slot.job.id))
