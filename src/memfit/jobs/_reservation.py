"""A job under admission: what it has reserved, and how far it has come."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from memfit.jobs._budget_watch import DEVICE
from memfit.jobs._job import Job, JobStatus, Verdict
from memfit.jobs._retry import Restart, Retry
from memfit.jobs.policy import STILL_SHARE, Guess, Held, likely
from memfit.memory import HOST, Footprint, Sizes, reservation_bytes

#: The CPU use of a running job is measured over so long at least.
_CPU_SECONDS = 1.0


class Wait(NamedTuple):
    """Why a job is not started now.

    Attributes:
        on: ``memory``, ``device``, ``cores``, ``tight``, ``max_parallel``, ``measuring`` (of another job) or
            ``other_run`` (here).
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


@dataclass(frozen=True)
class Reservation:
    """What one attempt of a job holds, in bytes by place. The places other than the host are its devices.

    Attributes:
        reserved: What it was granted. Nothing on the host where a cluster's job of unknown size has a node to itself.
        expected: What it will take by all that is known of it now.
        by_hint: The places where its reservation rests on no measurement; a measured one may lower it.
        wall_bytes: The limit that the backend was given last.
    """

    reserved: Sizes = field(default_factory=Counter)
    expected: Sizes = field(default_factory=Counter)
    by_hint: frozenset[str] = frozenset()
    wall_bytes: int | None = None


@dataclass
class Progress:
    """How far a job has come, over all its attempts.

    Attributes:
        needed: What it must get at its next start (``HOST``; ``DEVICE``: on each); nothing where the forecast decides.
        noted: When it was looked at last, by the monotonic clock.
        age: For how long this attempt has run and did not wait at its limit, in seconds.
        grown_to, grown_at: The most that it was seen to use on the host, to 2 %, and since when.
        peaked: Its age then.
        cores: How many cores it kept busy when that was measured last; None before.
        cpu_seconds, cpu_at: The CPU time of this attempt then, and when that was, by the same clock.
        stalled_since: Since when it waits at its limit, by the same clock.
        told_bytes: The largest reservation that was told of this attempt.
        set_aside: When it was asked to stop so that others can go on, by the same clock.
        verdict: What its end is recorded as, once memfit has given it up.
        restarts: How often it was restarted, by what that counts as. ``outside`` counts from the last checkpoint on.
        learned: The peaks that the forecast knows already.
    """

    needed: Sizes = field(default_factory=Counter)
    noted: float = 0.0
    age: float = 0.0
    grown_to: int = 0
    grown_at: float = 0.0
    peaked: float = 0.0
    cores: float | None = None
    cpu_seconds: float = 0.0
    cpu_at: float = 0.0
    stalled_since: float | None = None
    told_bytes: int = 0
    set_aside: float | None = None
    verdict: Verdict | None = None
    restarts: Counter[Restart] = field(default_factory=Counter)
    learned: Sizes = field(default_factory=Counter)

    def begin(self, now: float) -> None:
        """Begin another attempt."""
        self.noted, self.grown_at, self.grown_to, self.age, self.peaked = now, now, 0, 0.0, 0.0
        self.cores, self.cpu_seconds, self.cpu_at = None, 0.0, now
        self.set_aside, self.stalled_since, self.told_bytes = None, None, 0

    def note(self, status: JobStatus, now: float) -> None:
        """Take in what a job uses now, and whether it waits at its limit."""
        if status.started is None or not status.used_bytes:  # its process has yet to begin
            self.grown_at, self.cpu_at = now, now
        else:
            self.age += 0.0 if status.stalled else now - self.noted
            if not self.grown_to:  # the first look: one that was taken over has run before
                self.cpu_seconds = status.cpu_seconds
            if status.used_bytes > (1 + STILL_SHARE) * self.grown_to:
                self.grown_to, self.grown_at, self.peaked = status.used_bytes, now, self.age
        self.noted = now
        if (passed := now - self.cpu_at) >= _CPU_SECONDS:
            cores = (status.cpu_seconds - self.cpu_seconds) / passed
            self.cores = cores if self.cores is None else (self.cores + cores) / 2
            self.cpu_seconds, self.cpu_at = status.cpu_seconds, now
        self.stalled_since = (self.stalled_since or now) if status.stalled else None


@dataclass
class Entry:
    """One job from its first admission to its last end: what it holds, and how far it has come."""

    job: Job
    status: JobStatus
    sizes: Reservation = field(default_factory=Reservation)
    progress: Progress = field(default_factory=Progress)

    @property
    def reserved(self) -> Sizes:
        """What it was granted, by place."""
        return self.sizes.reserved

    @property
    def expected(self) -> Sizes:
        """What it will take by all that is known of it now, by place."""
        return self.sizes.expected

    @property
    def wall_bytes(self) -> int | None:
        """The limit that the backend was given last."""
        return self.sizes.wall_bytes

    def hold(self, place: str, reserved: int) -> None:
        """Reserve so much at a place."""
        self.sizes = replace(self.sizes, reserved=Counter({**self.sizes.reserved, place: reserved}))

    def hold_expected(self, place: str, expected: int) -> None:
        """Expect so much of it at a place."""
        if expected != self.sizes.expected[place]:
            self.sizes = replace(self.sizes, expected=Counter({**self.sizes.expected, place: expected}))

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

    def held(self, guess: Guess | None, now: float) -> Held:
        """Return it as the policy sees it."""
        stalled = self.progress.stalled_since
        return Held(
            self.job.id,
            self.status.used_bytes,
            self.reserved[HOST],
            likely(guess, self.status.used_bytes),
            at_least=self.progress.needed[HOST],
            age=self.progress.age,
            still=now - self.progress.grown_at,
            stalled=None if stalled is None else now - stalled,
            at_risk=self.seconds_since_checkpoint(),
            asides=self.progress.restarts["aside"],
            is_leaving=self.progress.set_aside is not None,
            cores=self.progress.cores,
            threads=self.job.threads,
        )

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
        is_declared = forecast is not None and forecast.method == "declared"
        needed, places = self.progress.needed, (HOST, *(place for place in sizes if place != HOST))
        by_hint = (place for place in places if not needed[kind_of(place)] and (place != HOST or is_declared))
        self.sizes = Reservation(sizes, sizes.copy(), frozenset(by_hint))

    def hold_devices(self, forecast: Footprint | None, slack: float) -> None:
        """Reserve its devices if an earlier supervisor chose them."""
        if self.job.num_devices and not self.devices:
            need = self.progress.needed[DEVICE] or self.forecast_bytes(DEVICE, forecast, slack) or 1
            for place, used in self.status.device_used_bytes.items():
                self.hold(place, max(need, used))

    def forecast_bytes(self, kind: str, forecast: Footprint | None, slack: float = 0.0) -> int | None:
        """Return what it reserves on the host or on each device by its forecast; None if that is unknown."""
        if kind == HOST:
            return None if forecast is None else reservation_bytes(forecast, slack)
        measured = forecast.bytes_per_device if forecast is not None and forecast.method == "measured" else 0
        return round(measured * (1 + slack)) or self.job.device_bytes

    def revise(self, measured: Footprint, slack: float) -> None:
        """Take over what was measured of devices on similar jobs; a reservation by a hint may turn out too large."""
        if self.progress.needed[DEVICE] or not measured.bytes_per_device:
            return
        for place in self.devices:
            size = self.forecast_bytes(DEVICE, measured, slack) or 0
            reserved = self.reserved[place]
            self.hold(place, min(reserved, size) if place in self.sizes.by_hint else reserved)
            self.hold_expected(place, size)
        self.sizes = replace(self.sizes, by_hint=self.sizes.by_hint - {*self.devices})

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

    def take_back(self, again: Retry, *, is_forgiven: bool) -> None:
        """Queue it again; from now on it needs what the retry says, or what it needed before."""
        if is_forgiven:
            self.progress.restarts["outside"] = 0
        self.progress.restarts[again.counts_as] += 1
        self.progress.needed = Counter({**self.progress.needed, **again.needed})
        self.sizes = Reservation()
        self.progress.set_aside, self.progress.stalled_since = None, None


def kind_of(place: str) -> str:
    """Return ``HOST`` for the host and ``DEVICE`` for any device."""
    return HOST if place == HOST else DEVICE
