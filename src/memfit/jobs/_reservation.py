"""A job under admission: what it has reserved, how often it was started, and what it may take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from memfit.jobs._budget_watch import DEVICE
from memfit.jobs._job import Job, JobStatus, Verdict
from memfit.memory import HOST, Footprint, Sizes, reservation_bytes
from memfit.units import MIB

#: A reservation that its job has passed grows by this factor, or by this step if that is more.
_GROWTH, _STEP_BYTES = 1.15, 32 * MIB


class Wait(NamedTuple):
    """Why a job is not started now.

    Attributes:
        on: ``memory``, ``device``, ``tight``, ``max_parallel``, ``measuring`` (of another job) or ``other_run`` (here).
        reason: The same in words.
        detail: The arithmetic behind it.
        lacks: The bytes that it needs; 0 when it waits for something else.
        available: The bytes that are there instead.
    """

    on: str
    reason: str
    detail: str = ""
    lacks: int = 0
    available: int = 0


@dataclass
class Reservation:
    """One job from its first admission to its last end.

    Attributes:
        reserved: Bytes by place. Nothing on the host while its size is unknown and it runs alone. The places other than
            the host are its devices.
        expected: What its forecast says that it will take, by place.
        by_hint: The places where its reservation rests on no measurement; a measured one may lower it.
        needed: What it must get at its next start (``HOST``; ``DEVICE``: on each); nothing where the forecast decides.
        wall_bytes: The limit that the backend was given last.
        stalled_since: Since when it waits at its limit, by the monotonic clock.
        grew: When its reservation at each place grew last, by the same clock.
        set_aside: When it was asked to stop so that others can go on, by the same clock.
        verdict: What its end is recorded as, once memfit has given it up.
        num_preempted: How often the platform ended it in a row without a checkpoint in between.
        num_retries, num_asides: How often it was restarted for its own sake, and for others'.
        learned: The peaks that the forecast knows already.
    """

    job: Job
    status: JobStatus
    reserved: Sizes = field(default_factory=Counter)
    expected: Sizes = field(default_factory=Counter)
    by_hint: frozenset[str] = frozenset()
    needed: Sizes = field(default_factory=Counter)
    wall_bytes: int | None = None
    stalled_since: float | None = None
    grew: dict[str, float] = field(default_factory=dict)
    set_aside: float | None = None
    verdict: Verdict | None = None
    num_preempted: int = 0
    num_retries: int = 0
    num_asides: int = 0
    learned: Sizes = field(default_factory=Counter)

    @property
    def used(self) -> Sizes:
        """What it uses now, by place."""
        return Counter({HOST: self.status.used_bytes, **self.status.device_used_bytes})

    @property
    def devices(self) -> list[str]:
        """Its devices, by UUID."""
        return [place for place in self.reserved if place != HOST]

    def unused(self, *, expected: bool = True) -> Sizes:
        """Return what it has reserved, or is also expected to take, and does not use yet."""
        return Counter(self.reserved | self.expected if expected else self.reserved) - self.used

    def wants_more(self, place: str = HOST) -> bool:
        """Return True if it has passed its reservation there, or waits at its limit."""
        over = self.used[place] > self.reserved[place]
        return bool(self.reserved[place]) and (over or (place == HOST and self.status.stalled))

    @property
    def is_queued(self) -> bool:
        """True while the backend has the job in a queue."""
        return self.status.state == "pending" and bool(self.status.pending_reason)

    @property
    def is_measured(self) -> bool:
        """True if its size is known or reserved, so that others need not wait for it."""
        return bool(self.reserved[HOST]) or self.status.settled

    def reserve(self, sizes: Sizes, forecast: Footprint | None) -> None:
        """Hold these bytes at each place from its start on."""
        self.reserved, self.expected = sizes, sizes.copy()
        is_declared = forecast is not None and forecast.method == "declared"
        self.by_hint = frozenset(
            place
            for place in (HOST, *self.devices)
            if not self.needed[kind_of(place)] and (place != HOST or is_declared)
        )

    def hold_devices(self, forecast: Footprint | None, slack: float) -> None:
        """Reserve its devices if an earlier supervisor chose them."""
        if self.job.num_devices and not self.devices:
            need = self.needed[DEVICE] or self.forecast_bytes(DEVICE, forecast, slack) or 1
            self.reserved |= Counter({place: max(need, used) for place, used in self.status.device_used_bytes.items()})

    def forecast_bytes(self, kind: str, forecast: Footprint | None, slack: float = 0.0) -> int | None:
        """Return what it reserves on the host or on each device by its forecast; None if that is unknown."""
        if kind == HOST:
            return None if forecast is None else reservation_bytes(forecast, slack)
        measured = forecast.bytes_per_device if forecast is not None and forecast.method == "measured" else 0
        return round(measured * (1 + slack)) or self.job.device_bytes

    def revise(self, measured: Footprint, slack: float) -> None:
        """Take over what was measured on similar jobs; a reservation by a hint may turn out too large."""
        sizes = Counter[str]()
        for place in (HOST, *self.devices):
            kind = kind_of(place)
            if not self.needed[kind] and (kind == HOST or measured.bytes_per_device):
                sizes[place] = self.forecast_bytes(kind, measured, slack) or 0
        self.expected = Counter({**self.expected, **sizes})
        for place in self.by_hint.intersection(sizes):
            self.reserved[place] = min(self.reserved[place], sizes[place])
        self.by_hint = self.by_hint.difference(sizes)

    def seconds_since_checkpoint(self) -> float:
        """Return how much work would be lost if it ended now."""
        since = self.status.checkpointed or self.status.started
        return max(0.0, time.time() - since) if since else 0.0

    def had(self) -> Sizes:
        """Return what it could take before it ended, on the host and on each device."""
        wall = self.wall_bytes or 0
        met_wall = self.status.wants_more and self.status.peak_bytes >= 0.8 * wall
        host = wall if met_wall or not self.reserved[HOST] else self.reserved[HOST]
        host = max(host, self.status.evidence.get("data_limit_bytes") or 0)
        return Counter({HOST: host, DEVICE: max((self.reserved[place] for place in self.devices), default=0)})

    def take_back(self, needed: Sizes) -> None:
        """Queue it again; from now on it needs so much, or what it needed before."""
        self.needed = Counter({**self.needed, **needed})
        self.set_aside, self.stalled_since, self.wall_bytes = None, None, None
        self.reserved, self.grew = Counter(), {}

    def wanted_bytes(self, free_bytes: int, place: str = HOST) -> int:
        """Return what its reservation should grow to, of what is free there; the present one if it need not."""
        used, held = self.used[place], max(self.reserved[place], self.expected[place])
        if not self.wants_more(place):
            return held
        # One that waits at its limit gets half of what is free, so that it meets few more limits.
        is_stalled = place == HOST and self.status.stalled
        step = free_bytes // 2 if is_stalled else min(_STEP_BYTES, free_bytes // 8)
        return max(held, round(used * _GROWTH), used + step)

    def spare_bytes(self, place: str = HOST) -> int:
        """Return what a reservation that grew holds for nothing: it rests on no forecast, only on its use then."""
        least, held = max(self.expected[place], round(self.used[place] * _GROWTH), 1), self.reserved[place]
        return held - least if place in self.grew and least < 0.9 * held else 0

    def wall_of(self, free_bytes: int, capacity_bytes: int) -> int:
        """Return its limit: its reservation and its part of what is free; all there is if it runs alone."""
        if not self.reserved[HOST]:
            return max(1, capacity_bytes)
        held = max(self.reserved[HOST], self.status.used_bytes)
        return max(held, min(held + free_bytes, capacity_bytes))


def kind_of(place: str) -> str:
    """Return ``HOST`` for the host and ``DEVICE`` for any device."""
    return HOST if place == HOST else DEVICE


def cheapest(entries: Iterable[Reservation]) -> Reservation:
    """Return the job whose end loses the least work, and among equals the one that gave way least often."""
    return min(entries, key=lambda entry: (entry.num_asides, entry.seconds_since_checkpoint(), entry.job.id))
