"""How well jobs are admitted and grown: memfit's own scheduler over simulated jobs, beside an oracle.

    python benchmarks/policy.py [--mix NAME] [--seeds 100-119] [--no-walls] [--json FILE]

Jobs are simulated: how much memory each takes over its time, and how long it lasts. Everything that decides is the
library's: scheduler, admission, policy. A job stands still at its wall, as in the kernel; without walls it fails there,
as under RLIMIT_DATA. The oracle starts jobs in the order of the queue, as soon as they fit under the limit minus the
reserve; it knows all sizes and times, and needs as long as memfit to start a process.

In two mixes others stand under the same limit: a second run that shares the list of claims, and an outsider that takes
most of the memory, stays and goes, again and again. Of these jobs every second answers SIGTERM with exit code 1. The
kernel kills the largest job when all together pass the limit. The oracle knows nothing of it, so that one thing is
required: every job fits alone, so every job completes, and none is tried again without end.

For each mix a line says, over the seeds: the median and the 90th percentile of memfit's time as a multiple of the
oracle's, restarts per 100 jobs, and the share of the work that was done twice. No job writes checkpoints, so that each
restart loses all that its job had done. Then how many were thrown out in their first 30 s, and how often the most
unlucky one started.

Exit status: 0 all targets met, 1 one was missed. Rules are tuned on seeds 0 to 4; figures are of other seeds.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import repeat
from operator import itemgetter
from pathlib import Path
from typing import Any

from memfit.jobs import (
    ENDED,
    Enforcer,
    Job,
    JobStatus,
    LocalAdmission,
    Policy,
    Scheduler,
    State,
    Submission,
    Traits,
    Verdict,
)
from memfit.memory import HOST, Budget, Footprint, Others, Sizes
from memfit.units import MIB

LIMIT_MIB, RESERVE_MIB, NUM_CORES = 2048, 256, 4
#: What jobs that share cores lose, each time that as many more of them as there are cores want one. Measured on two
#: cores: eight processes that stream 64 MiB each took 1.1 to 1.7 times as long together as two at a time.
CROWDED = 0.12
TICK_SECONDS = 0.1
#: How long a process takes to start, what it holds before it begins, and how long it takes to end when it is asked to.
START_SECONDS, OWN_MIB, LEAVE_SECONDS = 0.4, 10, 0.3
#: As a backend on this host says.
LEAST_MIB = 16
#: As a job's shim tells its memory, and judges whether it has stopped growing.
STATUS_SECONDS, SETTLED_SECONDS, GROWN = 0.5, 3.0, 1.02
#: After so many simulated seconds, and so many times the oracle's, a mix is at a standstill.
LONGEST_SECONDS, LONGEST_RATIO = 600.0, 20.0
MOST_MEDIAN, MOST_P90, MOST_RESTARTS, MOST_LOST = 1.25, 1.5, 0.02, 0.01


@dataclass(frozen=True)
class SimJob:
    """A job: its memory over its time.

    Attributes:
        mib: Its peak, without what every process holds.
        seconds: How long it works.
        ramp: By which share of its time it has reached its peak; it grows evenly from 15 % of it.
        step: From which share of its time on it takes its peak, and 40 % before; 0 for a job that ramps up.
        params: What memfit knows of it.
        cores: How many cores it keeps busy.
        loads: For how many seconds it holds no more than every process does: it imports and reads.
        is_rude: It answers SIGTERM with exit code 1.
    """

    mib: float
    seconds: float
    ramp: float = 0.1
    step: float = 0.0
    params: Mapping[str, str] = field(default_factory=dict)
    cores: float = 0.0
    loads: float = 0.0
    is_rude: bool = False

    @property
    def peak_bytes(self) -> int:
        return round((self.mib + OWN_MIB) * MIB)

    def bytes_at(self, done: float) -> int:
        """Return what it needs to have worked for so many seconds."""
        share = (done - self.loads) / (self.seconds - self.loads)
        if share <= 0 < self.loads:
            return OWN_MIB * MIB
        before_step = 0.4 if share < self.step else 1.0
        part = before_step if self.step else min(1.0, 0.15 + 0.85 * share / self.ramp)
        return round((self.mib * part + OWN_MIB) * MIB)


def around(drawn: random.Random, value: float, share: float) -> float:
    return value * drawn.uniform(1 - share, 1 + share)


def draw_kind(
    drawn: random.Random, kinds: Sequence[tuple[str, int, float, float]], share: float, **options: Any
) -> SimJob:
    """Draw a job of one of these kinds, each with its weight, its MiB and its seconds; its name is a parameter."""
    kind, _, mib, seconds = drawn.choices(kinds, [one[1] for one in kinds])[0]
    params = {"kind": kind}
    return SimJob(around(drawn, mib, share), around(drawn, seconds, 0.2), params=params, **options)


FOUR_KINDS = (("tiny", 5, 60, 3.0), ("small", 3, 120, 5.0), ("medium", 2, 400, 6.0), ("large", 1, 700, 8.0))
THREE_KINDS = (("small", 4, 100, 4.0), ("medium", 2, 300, 8.0), ("large", 1, 800, 12.0))
TWO_KINDS = (("short", 1, 150, 10.0), ("long", 1, 500, 10.0))
#: The real processes of benchmarks/makespan.py: from 50 to 850 MiB, from 2 to 10 s.
REAL_KINDS = (("a", 6, 75, 3.0), ("b", 4, 150, 4.5), ("c", 2, 400, 6.5), ("d", 1, 750, 8.2))


def draw_unnamed(drawn: random.Random) -> SimJob:
    mib = min(1500.0, 60 * 2.2 ** drawn.gauss(0.8, 1.2))
    return SimJob(mib, 3 + mib / 120 * drawn.uniform(0.5, 1.5))


def draw_computing(drawn: random.Random) -> SimJob:
    """Draw a job that computes all the time, or waits for data half of it; each fits beside many others."""
    kind, cores = drawn.choice([("computes", 1.0), ("waits", 0.5)])
    return SimJob(around(drawn, 100, 0.2), around(drawn, 6, 0.3), params={"kind": kind}, cores=cores)


def draw_few_large(drawn: random.Random) -> SimJob:
    if drawn.random() < 0.1:
        return SimJob(drawn.uniform(500, 900), around(drawn, 8, 0.3))
    return SimJob(drawn.uniform(40, 80), around(drawn, 3, 0.3))


def draw_sized(drawn: random.Random) -> SimJob:
    batch = drawn.choice([8, 16, 32, 64])
    return SimJob(around(drawn, 40 + 8 * batch, 0.03), around(drawn, 5, 0.3), params={"batch": str(batch)})


def draw_loading(drawn: random.Random) -> SimJob:
    """Draw a fold of which nothing is known: it imports, loads its data, and trains for a minute."""
    return SimJob(around(drawn, 600, 0.1), around(drawn, 60, 0.2), ramp=0.15, loads=drawn.uniform(0.5, 6.0))


def draw_rude(drawn: random.Random) -> SimJob:
    return replace(draw_kind(drawn, FOUR_KINDS, 0.2), is_rude=drawn.random() < 0.5)


#: Each mix: how many jobs, and how one is drawn. A parameter is a size in "a parameter is the size" alone.
MIXES: dict[str, tuple[int, Callable[[random.Random], SimJob]]] = {
    "four kinds": (60, lambda drawn: draw_kind(drawn, FOUR_KINDS, 0.2)),
    "log-normal, nothing known": (60, draw_unnamed),
    "slow growth": (60, lambda drawn: draw_kind(drawn, THREE_KINDS, 0.1, ramp=0.8)),
    "step at validation": (60, lambda drawn: draw_kind(drawn, TWO_KINDS, 0.1, step=0.6)),
    "all alike": (60, lambda drawn: SimJob(around(drawn, 180, 0.05), around(drawn, 8, 0.1), ramp=0.3)),
    "few large among small": (200, draw_few_large),
    "ten jobs": (10, lambda drawn: replace(draw_kind(drawn, FOUR_KINDS, 0.2), params={})),
    "a thousand jobs": (1000, lambda drawn: draw_kind(drawn, FOUR_KINDS, 0.2)),
    "as in makespan.py": (60, lambda drawn: draw_kind(drawn, REAL_KINDS, 0.13, ramp=0.02)),
    "cores are the bound": (60, draw_computing),
    "a parameter is the size": (60, draw_sized),
    "folds load their data": (8, draw_loading),
    "two runs, one limit": (60, draw_rude),
    "an outsider": (60, draw_rude),
    "an outsider, ten jobs": (10, lambda drawn: replace(draw_rude(drawn), params={})),
}
#: Who else stands under the limit: how many runs share the jobs of a mix, and whether there is an outsider.
BESIDE = {"two runs, one limit": (2, False), "an outsider": (1, True), "an outsider, ten jobs": (1, True)}
#: What an outsider takes of the limit, at how many bytes a second, how long it stays, and when it comes back.
OUTSIDER_SHARE, OUTSIDER_PACE, OUTSIDER_STAYS, OUTSIDER_AWAY = (0.6, 0.98), 1024 * MIB, 12.0, (10.0, 25.0)
#: Below such a limit a program cannot start. No job is thrown out before it is so old.
EXEC_BYTES, EARLY_SECONDS = 2 * MIB, 30.0
#: So often a job starts at most.
MOST_STARTS = 12


def make_jobs(mix: str, seed: int) -> list[SimJob]:
    """Return the jobs of a mix, the same for the same seed."""
    number, draw = MIXES[mix]
    drawn = random.Random(seed)
    jobs = [draw(drawn) for _ in range(number)]
    return [replace(job, params={**job.params, "seed": str(n)}) for n, job in enumerate(jobs)]


def oracle_seconds(jobs: Iterable[SimJob], limit_bytes: int) -> float:
    """Return how long list scheduling takes that knows all sizes and times, and the cores that jobs keep busy."""
    queue, now, free, running = list(jobs), 0.0, limit_bytes, list[tuple[float, int, float]]()
    idle = float(NUM_CORES)
    while queue or running:
        for job in list(queue):
            if job.peak_bytes <= free and job.cores <= idle:
                queue.remove(job)
                free, idle = free - job.peak_bytes, idle - job.cores
                heapq.heappush(running, (now + job.seconds + START_SECONDS, job.peak_bytes, job.cores))
        now, given_back, cores = heapq.heappop(running)
        free, idle = free + given_back, idle + cores
    return now


@dataclass
class _Attempt:
    """A running attempt: how far it is, and what is known of it outside."""

    job: SimJob
    began: float
    number: int
    done: float = 0.0
    cpu: float = 0.0
    used: int = 0
    limit: int | None = None
    stalled: bool = False
    wants_more: bool = False
    leaves_at: float | None = None
    verdict: Verdict | None = None
    told: tuple[int, int, float, bool] = (0, 0, 0.0, False)
    told_at: float = 0.0
    settled_bytes: int = 0
    grown_at: float = 0.0


class Ground:
    """One limit with all who stand under it: the jobs of one or more runs, and an outsider that comes and goes."""

    def __init__(self, limit_bytes: int, drawn: random.Random | None) -> None:
        self.limit_bytes, self._drawn = limit_bytes, drawn
        self.backends, self.claims, self.kills = list[SimBackend](), list[SimClaims](), 0
        self.outside, self._wanted, self._until = 0, 0, drawn.uniform(0.5, 10.0) if drawn else math.inf

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.outside - sum(one.used_bytes for one in self.backends)

    def move(self, now: float) -> None:
        """Let the outsider take what it wants and jobs do not have; or go, and come back later."""
        if self._drawn and now >= self._until:
            is_here = self._wanted > 0
            self._wanted = 0 if is_here else round(self._drawn.uniform(*OUTSIDER_SHARE) * self.limit_bytes)
            self._until = now + (self._drawn.uniform(*OUTSIDER_AWAY) if is_here else OUTSIDER_STAYS)
        most = min(self.outside + round(OUTSIDER_PACE * TICK_SECONDS), self.outside + max(0, self.free_bytes))
        self.outside = min(self._wanted, most)

    def kill(self) -> None:
        """Kill the largest job, as the kernel does among those with the same score."""
        self.kills += 1
        live = [(attempt.used, name, one) for one in self.backends for name, attempt in one.live.items()]
        _, job_id, backend = max(live, key=itemgetter(0, 1))
        backend.end(job_id, Verdict("out_of_memory", "killed by the kernel"), asked=False)


class SimClaims:
    """The list of claims, in memory."""

    def __init__(self, ground: Ground) -> None:
        self.ground, self.own = ground, (Counter[str](), Counter[str]())
        ground.claims.append(self)

    def others(self) -> Others:
        them = [one.own for one in self.ground.claims if one is not self]
        used, unused = (sum((own[at] for own in them), Counter[str]()) for at in (0, 1))
        return Others(Counter({HOST: len(them)}), used, unused)

    @contextmanager
    def deciding(self) -> Iterator[Others]:
        yield self.others()

    def write(self, *, used: Sizes, unused: Sizes) -> None:
        self.own = used, unused


class SimBackend:
    """A backend of simulated jobs: ``wait`` moves its clock and all jobs on by a tick."""

    def __init__(self, jobs: Mapping[str, SimJob], ground: Ground, *, has_walls: bool = True) -> None:
        self.jobs, self.now, self.has_walls, self.ground = jobs, 0.0, has_walls, ground
        ground.backends.append(self)
        self.enforcer: Enforcer | None = self if has_walls else None
        self.traits = Traits(enforces_memory=not has_walls, least_bytes=LEAST_MIB * MIB)
        self.peak_bytes = self.num_early = self.num_restarts = 0
        self.lost_seconds = 0.0
        self._cap: int | None = None
        self._walls: dict[str, int] = {}
        self.live: dict[str, _Attempt] = {}
        self._status: dict[str, JobStatus] = {}

    def clock(self) -> float:
        return self.now

    def submit(self, batch: Sequence[Submission]) -> None:
        for job, limit in batch:
            known = self._status.get(job.id)
            number = known.attempt + 1 if known else 1
            attempt = _Attempt(self.jobs[job.id], self.now, number, grown_at=self.now)
            attempt.limit = None if self.has_walls else limit
            self.live[job.id] = attempt
            walls = sum(self._walls[name] for name in self.live) if self.has_walls else 0
            if walls > (self._cap or walls):  # then a process that starts may fail to fork
                raise RuntimeError(f"{job.id} starts under limits of {walls} bytes in all, above {self._cap}")
            self._tell(job.id, attempt)

    def adopt(self, job_ids: Iterable[str]) -> set[str]:
        return set()

    def make_room(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def grant(self, job_id: str, wall_bytes: int) -> None:
        self._walls[job_id] = wall_bytes

    def cap(self, total_bytes: int) -> None:
        self._cap = total_bytes

    def left_bytes(self) -> int:
        return 0

    def poll(self) -> Mapping[str, JobStatus]:
        return self._status

    def cancel(self, job_id: str, *, now: bool = False, verdict: Verdict | None = None) -> None:
        attempt = self.live.get(job_id)
        if attempt is not None:
            attempt.verdict = verdict or attempt.verdict
            attempt.leaves_at = self.now + (TICK_SECONDS if now else LEAVE_SECONDS)
        elif verdict is not None:
            known = self._status.get(job_id) or JobStatus(job_id, "pending", attempt=0)
            self._status[job_id] = replace(known, state=verdict.state, cause=verdict.cause)

    @property
    def used_bytes(self) -> int:
        return sum(attempt.used for attempt in self.live.values())

    @property
    def wanted_cores(self) -> float:
        begun = (one for one in self.live.values() if self.now - one.began > START_SECONDS and not one.stalled)
        return max(sum(one.job.cores for one in begun), 1e-9)

    @property
    def speed(self) -> float:
        """How fast a job that computes goes, as a share of its speed with cores to itself."""
        crowd = max(1.0, self.wanted_cores / NUM_CORES)
        return 1 / crowd / (1 + CROWDED * (crowd - 1))

    def wait(self, seconds: float) -> None:
        self.now += TICK_SECONDS
        speed = self.speed
        for job_id, attempt in list(self.live.items()):
            if job_id in self.live:  # the kernel may have killed it meanwhile
                self._move(job_id, attempt, self.used_bytes - attempt.used, speed)
            if job_id in self.live:
                self._tell(job_id, attempt)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _move(self, job_id: str, attempt: _Attempt, others: int, speed: float) -> None:
        job = attempt.job
        if attempt.leaves_at is not None and self.now >= attempt.leaves_at:
            answer = Verdict("failed", "exit code 1") if job.is_rude else Verdict("preempted", "as asked")
            verdict = attempt.verdict or answer
            self.end(job_id, verdict, asked=True)
            return
        if self.now - attempt.began <= START_SECONDS or attempt.leaves_at is not None:
            return
        done = TICK_SECONDS * (speed if job.cores else 1.0)
        need = job.bytes_at(min(job.seconds, attempt.done + done))
        wall = attempt.limit if not self.has_walls else self._walls[job_id]
        room = sys.maxsize if wall is None else wall
        if self.has_walls and self._cap is not None:
            room = min(room, self._cap - others)
        if self.has_walls and room < EXEC_BYTES and not attempt.used:  # as memfit reads it: at whose limit exec failed
            state: State = "failed" if self._walls[job_id] < EXEC_BYTES else "out_of_memory"
            self.end(job_id, Verdict(state, "exec failed"), asked=False)
            return
        if need > room and not self.has_walls:
            attempt.wants_more = True
            self.end(job_id, Verdict("out_of_memory", "MemoryError"), asked=False)
        elif self.has_walls and min(need, room) - attempt.used > max(0, self.ground.free_bytes):
            self.ground.kill()
        elif need > room:
            attempt.used, attempt.stalled, attempt.wants_more = max(attempt.used, room), True, True
        else:
            attempt.used, attempt.stalled, attempt.done = need, False, attempt.done + done
            attempt.cpu += TICK_SECONDS * job.cores * min(1.0, NUM_CORES / self.wanted_cores)
            if attempt.done >= job.seconds - 1e-9:
                self.end(job_id, Verdict("completed", ""), asked=False)

    def _tell(self, job_id: str, attempt: _Attempt) -> None:
        """Write what is known of a running job: what it uses at once, what its shim measures twice a second."""
        if not attempt.told_at or self.now - attempt.told_at >= STATUS_SECONDS:
            attempt.told_at = self.now
            if attempt.used > GROWN * attempt.settled_bytes:
                attempt.settled_bytes, attempt.grown_at = attempt.used, self.now
            still = self.now - attempt.grown_at
            is_settled = still >= max(SETTLED_SECONDS, (self.now - attempt.began) / 2)
            attempt.told = attempt.used, max(attempt.told[1], attempt.used), attempt.cpu, is_settled
        used, peak, cpu, is_settled = attempt.told
        if self.has_walls:
            used = attempt.used
        self._status[job_id] = JobStatus(
            job_id,
            "running",
            settled=is_settled,
            used_bytes=used,
            peak_bytes=max(peak, used),
            footprint=Footprint(peak) if peak else None,
            started=time.time() - (self.now - attempt.began),
            attempt=attempt.number,
            stalled=attempt.stalled,
            wants_more=attempt.wants_more,
            cpu_seconds=cpu,
        )

    def end(self, job_id: str, verdict: Verdict, *, asked: bool) -> None:
        attempt = self.live.pop(job_id)
        self.num_early += asked and self.now - attempt.began < EARLY_SECONDS
        peak = max(attempt.told[1], attempt.used)
        if verdict.state != "completed":
            self.num_restarts, self.lost_seconds = self.num_restarts + 1, self.lost_seconds + attempt.done
        self._status[job_id] = replace(
            self._status[job_id],
            state=verdict.state,
            cause=verdict.cause,
            used_bytes=0,
            peak_bytes=peak,
            footprint=Footprint(peak),
            ended=time.time(),
            ended_by="user" if asked else "job",
            asked=asked,
            exit_code=0 if verdict.state == "completed" else 1,
            stalled=False,
            wants_more=attempt.wants_more,
            cpu_seconds=attempt.cpu,
        )


class _Source:
    """Hands over all jobs at once."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._left = tuple(jobs)

    def next(self, num_free: int) -> Sequence[Job]:
        jobs, self._left = self._left, ()
        return jobs

    def ended(self, status: JobStatus) -> None:
        pass

    @property
    def is_done(self) -> bool:
        return not self._left


@dataclass(frozen=True)
class Outcome:
    """What came of one mix with one seed.

    Attributes:
        seconds: The simulated time.
        oracle: What the oracle needs.
        restarts: Attempts that came to nothing, per job.
        lost: The work done in them, as a share of all work.
        peak: The most that all jobs used at once, as a share of the limit.
        num_ended: How many jobs ended for good and did not complete.
        num_early: How many attempts were thrown out in their first 30 s.
        most_starts: How often the job started that started most often.
        kills: How often the kernel killed a job because all together passed the limit.
    """

    mix: str
    seed: int
    seconds: float
    oracle: float
    restarts: float
    lost: float
    peak: float
    num_ended: int = 0
    num_early: int = 0
    most_starts: int = 1
    kills: int = 0

    @property
    def is_complete(self) -> bool:
        return not self.num_ended

    @property
    def ratio(self) -> float:
        return self.seconds / self.oracle


class Standstill(RuntimeError):
    """A simulated run went on for many times the oracle's time."""


def simulate(
    jobs: Sequence[SimJob],
    *,
    mix: str = "",
    seed: int = 0,
    limit_bytes: int = LIMIT_MIB * MIB,
    has_walls: bool = True,
    say: Callable[..., None] = lambda kind, **fields: None,
    on_tick: Callable[[SimBackend, Scheduler], None] = lambda backend, scheduler: None,
) -> Outcome:
    """Run jobs through the scheduler in simulated time; ``say`` hears its events.

    Raises:
        Standstill: If it takes many times as long as the oracle.
    """
    named = {f"job_{number:04}": job for number, job in enumerate(jobs)}
    num_runs, has_outsider = BESIDE.get(mix, (1, False))
    ground = Ground(limit_bytes, random.Random(f"outsider {seed}") if has_outsider else None)
    parts = [dict(list(named.items())[at::num_runs]) for at in range(num_runs)]
    schedulers = [_make_run(part, ground, has_walls, say) for part in parts]
    oracle = oracle_seconds(jobs, limit_bytes - RESERVE_MIB * MIB)

    def tick(scheduler: Scheduler, backend: SimBackend) -> None:
        on_tick(backend, scheduler)
        if backend.now > max(LONGEST_SECONDS, LONGEST_RATIO * oracle):
            running = [job_id for job_id, status in backend.poll().items() if status.state not in ENDED]
            raise Standstill(f"{mix}, seed {seed}: still {running} after {backend.now:.0f} s, {oracle:.0f} expected")

    open_runs = [
        (one.steps(on_tick=partial(tick, one, backend)), backend)
        for one, backend in zip(schedulers, ground.backends, strict=True)
    ]
    seconds = 0.0
    while open_runs := [(steps, backend) for steps, backend in open_runs if next(steps, True) is None]:
        for _, backend in open_runs:
            backend.wait(TICK_SECONDS)
            seconds = max(seconds, backend.now)
        ground.move(seconds)
    statuses = [status for one in schedulers for status in one.statuses.values()]
    work, lost = sum(job.seconds for job in jobs), sum(one.lost_seconds for one in ground.backends)
    return Outcome(
        mix,
        seed,
        seconds,
        oracle,
        sum(one.num_restarts for one in ground.backends) / len(jobs),
        lost / work,
        max(one.peak_bytes for one in ground.backends) / limit_bytes,
        len(jobs) - sum(one.state == "completed" for one in statuses),
        sum(one.num_early for one in ground.backends),
        max(one.attempt for one in statuses),
        ground.kills,
    )


def _make_run(named: Mapping[str, SimJob], ground: Ground, has_walls: bool, say: Callable[..., None]) -> Scheduler:
    """Return the scheduler of a run of these jobs, under a limit that it shares with all others on that ground."""
    backend = SimBackend(named, ground, has_walls=has_walls)
    first = Budget.read(cap_bytes=ground.limit_bytes, reserve_bytes=RESERVE_MIB * MIB)
    limit = replace(next(one for one in first.limits if one.name == "cap"), scope="group", id=HOST)

    def read_budget(in_use_bytes: int) -> Budget:
        now = replace(limit, headroom_bytes=ground.free_bytes)
        return replace(first, limits=(now,), num_cpus=NUM_CORES, devices=())

    claims: Any = SimClaims(ground)
    admission = LocalAdmission(read_budget, policy=Policy(), claims=claims, now=backend.clock)
    source = _Source([Job(name, command=("true",), params=job.params) for name, job in named.items()])
    return Scheduler(source, backend, admission, say=say)


def run_one(mix: str, seed: int, has_walls: bool) -> Outcome:
    jobs = make_jobs(mix, seed)
    try:
        return simulate(jobs, mix=mix, seed=seed, has_walls=has_walls)
    except Standstill as error:
        print(error, file=sys.stderr)
        return Outcome(mix, seed, math.inf, 1.0, 0.0, 0.0, 0.0, len(jobs))


def report(found: Sequence[Outcome]) -> bool:
    """Print a line for each mix; whether every target was met."""
    is_met = True
    titles = ("jobs", "median", "p90", "worst", "restarts", "lost", "early", "starts", "kills")
    print(f"{'mix':24}", *(f"{title:>8}" for title in titles))
    for mix in dict.fromkeys(one.mix for one in found):
        of = [one for one in found if one.mix == mix]
        ratios = sorted(one.ratio for one in of)
        median, p90 = statistics.median(ratios), ratios[max(0, -(-9 * len(ratios) // 10) - 1)]
        restarts = statistics.mean(one.restarts for one in of)
        lost = statistics.mean(one.lost for one in of)
        early, starts = sum(one.num_early for one in of), max(one.most_starts for one in of)
        kills = sum(one.kills for one in of)
        is_good = all(one.is_complete and one.peak <= 1.0 for one in of) and starts <= MOST_STARTS
        if mix not in BESIDE:  # the oracle knows nothing of others
            is_good &= median <= MOST_MEDIAN and p90 <= MOST_P90 and restarts <= MOST_RESTARTS and lost <= MOST_LOST
        is_met &= is_good
        texts = [f"{MIXES[mix][0]}", *(f"{ratio:.2f}" for ratio in (median, p90, ratios[-1]))]
        texts += [f"{restarts:.1%}", f"{lost:.1%}", f"{early}", f"{starts}", f"{kills}"]
        ended = sum(one.num_ended for one in of)
        notes = [f"{ended} ENDED FOR GOOD"] * bool(ended) + ["MISSED"] * (not is_good)
        print(f"{mix:24}", *(f"{text:>8}" for text in texts), *notes, flush=True)
    return is_met


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of a range.

    >>> parse_seeds("3-5"), parse_seeds("7")
    ([3, 4, 5], [7])
    """
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def outcomes(mixes: Sequence[str], seeds: Sequence[int], has_walls: bool, num: int) -> Iterator[Outcome]:
    pairs = [(mix, seed) for mix in mixes for seed in seeds]
    with ProcessPoolExecutor(num) as pool:
        yield from pool.map(run_one, *zip(*pairs, strict=True), repeat(has_walls))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", action="append", choices=list(MIXES), help="only this mix; may be given again")
    parser.add_argument("--seeds", type=parse_seeds, default=parse_seeds("100-119"), help="one, or FIRST-LAST")
    parser.add_argument("--no-walls", action="store_true", help="jobs fail at their limits, as without control groups")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many simulations run at once")
    parser.add_argument("--json", type=Path, help="where all figures are written")
    options = parser.parse_args()
    print(f"limit {LIMIT_MIB / 1024:.0f} GiB, reserve {RESERVE_MIB} MiB, {len(options.seeds)} seeds a mix")
    found = list(outcomes(options.mix or list(MIXES), options.seeds, not options.no_walls, options.jobs))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1))
    return 0 if report(found) else 1


if __name__ == "__main__":
    sys.exit(main())
