"""A job in the scheduler's hands: what it holds, how often it was started, and the grants that follow from that."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from memfit.jobs._job import Grant, Job, JobStatus, Verdict
from memfit.memory import HOST, Claim, Footprint, Sizes, reservation_bytes
from memfit.units import MIB

#: By how much a reservation grows at least when the job passes it, and at most because of that minimum.
_GROWTH, _STEP_BYTES = 1.15, 32 * MIB


class Wait(NamedTuple):
    """What the next job waits for.

    Attributes:
        on: ``memory``, ``device``, ``max_parallel``, ``measuring`` (of a job that speaks for others), ``other_run``
            (on this host) or ``other``.
        reason: The same in words.
        detail: The arithmetic behind it.
        lacks: The bytes that it needs there and does not get; 0 when it waits for something else.
    """

    on: str
    reason: str
    detail: str = ""
    lacks: int = 0


@dataclass
class Reservation:
    """One job from its first admission to its last end.

    Attributes:
        job: The job.
        status: Its last status.
        reserved: What it holds of the budget, in bytes by place; nothing on the host while its size is unknown and it
            runs alone. The places other than the host are the devices that it was given.
        expected: What its like take; it will want that much sooner or later.
        by_hint: The places where its reservation rests on no measurement, and a measured one may lower it.
        needed_bytes: What it must get at its next start, whatever its like take; None when they decide.
        needed_device_bytes: The same on each device.
        grant: What the backend was told last.
        stalled_since: Since when it waits at its wall; None when it does not.
        grew: When its reservation at each place was raised last, by the monotonic clock.
        set_aside: It was asked to end so that others can go on; since then, by the monotonic clock.
        verdict: What its end is to be called, once it was given up for good.
        was_preempted: The platform ended it once, and it was started again.
        num_retries, num_asides: How often it was started again for its own sake, and for others'.
    """

    job: Job
    status: JobStatus
    reserved: Sizes = field(default_factory=Counter)
    expected: Sizes = field(default_factory=Counter)
    by_hint: frozenset[str] = frozenset()
    needed_bytes: int | None = None
    needed_device_bytes: int | None = None
    grant: Grant | None = None
    stalled_since: float | None = None
    grew: dict[str, float] = field(default_factory=dict)
    set_aside: float | None = None
    verdict: Verdict | None = None
    was_preempted: bool = False
    num_retries: int = 0
    num_asides: int = 0
    learned: Sizes = field(default_factory=Counter)

    @property
    def used(self) -> Sizes:
        """What it uses now, by place."""
        return Counter({HOST: self.status.used_bytes, **self.status.device_used_bytes})

    @property
    def devices(self) -> list[str]:
        """The devices that it was given, by UUID."""
        return [place for place in self.reserved if place != HOST]

    def claim(self) -> Claim:
        """Its part of the budget."""
        return Claim(self.reserved, self.used)

    def expectation(self) -> Claim:
        """What it will want of the budget, as far as its like tell."""
        return Claim(self.reserved | self.expected, self.used)

    def wants_more(self, place: str = HOST) -> bool:
        """Whether it has passed its reservation there, or waits at its wall."""
        over = self.used[place] > self.reserved[place]
        return bool(self.reserved[place]) and (over or (place == HOST and self.status.stalled))

    @property
    def is_queued(self) -> bool:
        """True while the backend has the job in a queue: it was submitted, and has not started."""
        return self.status.state == "pending" and bool(self.status.pending_reason)

    @property
    def is_measured(self) -> bool:
        """Whether its size is known or reserved, so that others need not wait for it."""
        return bool(self.reserved[HOST]) or self.status.settled

    def reserve(self, sizes: Sizes, expected: Footprint | None) -> None:
        """Hold so many bytes at each place from its start on, given its forecast."""
        self.reserved, self.expected = sizes, sizes.copy()
        is_hint = expected is not None and expected.method == "declared" and self.needed_bytes is None
        devices = () if self.needed_device_bytes else self.devices
        self.by_hint = frozenset([*([HOST] if is_hint else []), *devices])

    def hold_devices(self, measured: Footprint | None, slack: float) -> None:
        """Reserve its part of its devices if an earlier supervisor chose them, given what was measured."""
        if self.job.num_devices and not self.devices:
            need = self.device_need(measured, slack) or 1
            self.reserved |= Counter({place: max(need, used) for place, used in self.status.device_used_bytes.items()})

    def device_need(self, expected: Footprint | None, slack: float) -> int | None:
        """What it reserves on each of its devices, given what was measured; None when that is not known."""
        measured = expected.bytes_per_device if expected else 0
        return self.needed_device_bytes or round(measured * (1 + slack)) or self.job.device_bytes

    def revise(self, expected: Footprint, slack: float) -> None:
        """Have its reservations follow what was measured on its like; a hint may turn out too large."""
        sizes = Counter({HOST: reservation_bytes(expected, slack)} if self.needed_bytes is None else {})
        if expected.bytes_per_device and self.needed_device_bytes is None:
            sizes |= Counter(dict.fromkeys(self.devices, self.device_need(expected, slack)))
        self.expected = Counter({**self.expected, **sizes})
        for place in self.by_hint.intersection(sizes):
            self.reserved[place] = min(self.reserved[place], sizes[place])
        self.by_hint = self.by_hint.difference(sizes)

    def seconds_since_checkpoint(self) -> float:
        """The work that would be lost if it ended now: since its last checkpoint, or since its start."""
        since = self.status.checkpointed or self.status.started
        return max(0.0, time.time() - since) if since else 0.0

    def had_bytes(self) -> int:
        """Return what it could take before it ended: all there was when its size was unknown."""
        wall = self.grant.wall_bytes if self.grant else 0
        met_wall = self.status.wants_more and self.status.peak_bytes >= 0.8 * wall
        had = wall if met_wall or not self.reserved[HOST] else self.reserved[HOST]
        return max(had, self.status.evidence.get("data_limit_bytes") or 0)

    def take_back(self, needed_bytes: int | None, device_bytes: int | None) -> None:
        """Make it one that waits again; from now on it needs so much, or what it needed before."""
        self.needed_bytes = needed_bytes or self.needed_bytes
        self.needed_device_bytes = device_bytes or self.needed_device_bytes
        self.set_aside, self.stalled_since, self.grant = None, None, None
        self.reserved, self.grew = Counter(), {}

    def wanted_bytes(self, free_bytes: int, place: str = HOST) -> int:
        """What its reservation should grow to, of what is free there; its present one when there is no need."""
        used, held = self.used[place], max(self.reserved[place], self.expected[place])
        if not self.wants_more(place):
            return held
        # One that waits at its wall gets half of what is free, so that it meets few more on its way.
        is_stalled = place == HOST and self.status.stalled
        step = free_bytes // 2 if is_stalled else min(_STEP_BYTES, free_bytes // 8)
        return max(held, round(used * _GROWTH), used + step)

    def spare_bytes(self, place: str = HOST) -> int:
        """What a reservation that grew has come to hold for nothing: it rests on no forecast, only on its use then."""
        least, held = max(self.expected[place], round(self.used[place] * _GROWTH), 1), self.reserved[place]
        return held - least if place in self.grew and least < 0.9 * held else 0

    def grant_of(self, free_bytes: int, capacity_bytes: int) -> Grant:
        """What it may take: its reservation, and up to its wall its part of what is free; all there is when alone."""
        reserved = self.reserved[HOST]
        if not reserved:
            whole = max(1, capacity_bytes)
            return Grant(whole, whole)
        held = max(reserved, self.status.used_bytes)
        return Grant(reserved, max(held, min(held + free_bytes, capacity_bytes)))


def cheapest(entries: Iterable[Reservation]) -> Reservation:
    """The job whose end loses the least work; the one that was set aside least often among equals."""
    return min(entries, key=lambda entry: (entry.num_asides, entry.seconds_since_checkpoint(), entry.job.id))
