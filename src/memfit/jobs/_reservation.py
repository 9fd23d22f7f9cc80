"""A job under admission: what it has reserved, and how far it has come."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from memfit.jobs._budget_watch import DEVICE
from memfit.jobs._job import Job, Verdict
from memfit.jobs._retry import Restart, Retry
from memfit.jobs.policy import STILL_SHARE, Guess, Held, likely
from memfit.memory import HOST, Footprint, Sizes, reservation_bytes
from memfit.rundir import JobStatus

_CPU_SECONDS = 1.0  # the CPU use of a running job is measured over so long at least


class Wait(NamedTuple):
    on: str  # ``memory``, ``device``, ``cores``, ``tight``, ``max_parallel``, ``measuring`` or ``others``
    reason: str  # the same in words
    detail: str = ""  # the arithmetic behind it
    lacks: int = 0  # the bytes that it needs; 0 when it waits for something else
    available: int = 0  # the bytes that are there instead


@dataclass
class Progress:
    # what it must get at its next start, on the host and on each device; no entry where nothing is known
    needed: dict[str, int] = field(default_factory=dict)
    gets_all: bool = False  # its next start gets all that is free
    noted: float = 0.0  # when it was looked at last, by the monotonic clock
    age: float = 0.0  # for how long this attempt has run and did not wait at its limit, in seconds
    grown_to: int = 0  # the most that it was seen to use on the host, to 2 %
    grown_at: float = 0.0  # since when
    peaked: float = 0.0  # its age then
    cores: float | None = None  # how many cores it kept busy when that was measured last; None before
    cpu_seconds: float = 0.0  # the CPU time of this attempt then
    cpu_at: float = 0.0  # when that was, by the same clock
    stalled_since: float | None = None  # since when it waits at its limit, by the same clock
    told_bytes: int = 0  # the largest reservation that was told of this attempt
    set_aside: float | None = None  # when it was asked to stop so that others can go on, by the same clock
    verdict: Verdict | None = None  # what its end is recorded as, once memfit has given it up
    # how often it was restarted, by what that counts as. ``outside`` counts from the last checkpoint on
    restarts: Counter[Restart] = field(default_factory=Counter)
    learned: Sizes = field(default_factory=Counter)  # the peaks that the forecast knows already

    def begin(self, now: float) -> None:
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
    """One job from its first admission to its last end: what it holds in bytes by place, and how far it has come."""

    job: Job
    status: JobStatus
    progress: Progress = field(default_factory=Progress)
    # what this attempt was granted; the places other than the host are its devices. Nothing on the host where a
    # cluster's job of unknown size has a node to itself
    reserved: Sizes = field(default_factory=Counter)
    expected: Sizes = field(default_factory=Counter)  # what it will take by all that is known of it now
    by_hint: bool = False  # what it has of its devices rests on no measurement; a measured one may lower it
    wall_bytes: int | None = None  # the limit that the backend was given last

    @property
    def used(self) -> Sizes:
        return Counter({HOST: self.status.used_bytes, **self.status.device_used_bytes})

    @property
    def devices(self) -> list[str]:
        return [place for place in self.reserved if place != HOST]

    def unused(self, *, expected: bool = True) -> Sizes:
        return Counter(self.reserved | self.expected if expected else self.reserved) - self.used

    def held(self, guess: Guess | None, now: float) -> Held:
        stalled, saved = self.progress.stalled_since, self.status.checkpointed or self.status.started
        return Held(
            self.job.id,
            self.status.used_bytes,
            self.reserved[HOST],
            likely(guess, self.status.used_bytes),
            at_least=self.progress.needed.get(HOST, 0),
            age=self.progress.age,
            still=now - self.progress.grown_at,
            stalled=None if stalled is None else now - stalled,
            at_risk=max(0.0, time.time() - saved) if saved else 0.0,
            asides=self.progress.restarts["aside"],
            is_leaving=self.progress.set_aside is not None,
            cores=self.progress.cores,
            threads=self.job.threads,
        )

    @property
    def is_queued(self) -> bool:
        """True while the backend has the job in a queue."""
        return self.status.state == "pending" and bool(self.status.pending_reason)

    def reserve(self, sizes: Sizes) -> None:
        self.reserved, self.expected = sizes, sizes.copy()
        self.by_hint = bool(self.devices) and DEVICE not in self.progress.needed

    def hold_devices(self, forecast: Footprint | None, slack: float) -> None:
        """Reserve its devices if an earlier supervisor chose them."""
        if self.job.num_devices and not self.devices:
            need = self.progress.needed.get(DEVICE) or self.forecast_bytes(DEVICE, forecast, slack) or 1
            for place, used in self.status.device_used_bytes.items():
                self.reserved[place] = max(need, used)

    def forecast_bytes(self, kind: str, forecast: Footprint | None, slack: float = 0.0) -> int | None:
        """Return what it reserves on the host or on each device by its forecast; None if that is unknown."""
        if kind == HOST:
            return None if forecast is None else reservation_bytes(forecast, slack)
        measured = forecast.bytes_per_device if forecast is not None and forecast.method == "measured" else 0
        return round(measured * (1 + slack)) or self.job.device_bytes

    def revise(self, measured: Footprint, slack: float) -> None:
        """Take over what was measured of devices on similar jobs; a reservation by a hint may turn out too large."""
        if DEVICE in self.progress.needed or not measured.bytes_per_device:
            return
        for place in self.devices:
            size = self.forecast_bytes(DEVICE, measured, slack) or 0
            if self.by_hint:
                self.reserved[place] = min(self.reserved[place], size)
            self.expected[place] = size
        self.by_hint = False

    def had(self, *, is_enforced: bool) -> dict[str, int]:
        """Return the limit of its start that it met, by place; none where a grant is not enforced."""
        status, wall = self.status, self.wall_bytes or 0
        met_wall = status.wants_more and status.peak_bytes >= 0.8 * wall
        at_start = status.evidence.get("data_limit_bytes")
        host = at_start or (wall if met_wall else self.reserved[HOST] * is_enforced)
        found = {HOST: host, DEVICE: max((self.reserved[place] for place in self.devices), default=0)}
        return {kind: size for kind, size in found.items() if size}

    def take_back(self, again: Retry, *, is_forgiven: bool) -> None:
        """Queue it again; from now on it needs what the retry says, or what it needed before."""
        if is_forgiven:
            self.progress.restarts["outside"] = 0
        self.progress.restarts[again.counts_as] += 1
        self.progress.needed, self.progress.gets_all = {**self.progress.needed, **again.needed}, again.gets_all
        self.reserved, self.expected, self.by_hint, self.wall_bytes = Counter(), Counter(), False, None
        self.progress.set_aside, self.progress.stalled_since, self.progress.verdict = None, None, None
