"""How well jobs are admitted and grown: memfit's own scheduler over simulated jobs, beside an oracle.

    python benchmarks/policy.py [--mix NAME] [--seeds 100-119] [--no-walls] [--json FILE]

Jobs are simulated: how much memory each takes over its time, and how long it lasts. Everything that decides is the
library's: scheduler, admission, policy. A job stands still at its wall, as in the kernel; without walls it fails there,
as under RLIMIT_DATA. The oracle starts jobs in the order of the queue, as soon as they fit under the limit minus the
reserve; it knows all sizes and times, and needs as long as memfit to start a process.

For each mix a line says, over the seeds: the median and the 90th percentile of memfit's time as a multiple of the
oracle's, restarts per 100 jobs, and the share of the work that was done twice. No job writes checkpoints, so that each
restart loses all that its job had done.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import repeat
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
    Submission,
    Traits,
    Verdict,
)
from memfit.memory import Budget, Footprint
from memfit.units import MIB

LIMIT_MIB, RESERVE_MIB, NUM_CORES = 2048, 256, 4
#: What jobs that share cores lose, each time that as many more of them as there are cores want one. Measured on two
#: cores: eight processes that stream 64 MiB each took 1.1 to 1.7 times as long together as two at a time.
CROWDED = 0.12
TICK_SECONDS = 0.1
#: How long a process takes to start, what it holds before it begins, and how long it takes to end when it is asked to.
START_SECONDS, OWN_MIB, LEAVE_SECONDS = 0.4, 10, 0.3
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
    """

    mib: float
    seconds: float
    ramp: float = 0.1
    step: float = 0.0
    params: Mapping[str, str] = field(default_factory=dict)
    cores: float = 0.0

    @property
    def peak_bytes(self) -> int:
        return round((self.mib + OWN_MIB) * MIB)

    def bytes_at(self, done: float) -> int:
        """Return what it needs to have worked for so many seconds."""
        share = done / self.seconds
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


#: Each mix: how many jobs, and how one is drawn. A parameter is a size in the last of them alone.
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
}


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


class SimBackend:
    """A backend of simulated jobs: ``wait`` moves its clock and all jobs on by a tick."""

    def __init__(self, jobs: Mapping[str, SimJob], capacity_bytes: int, *, has_walls: bool = True) -> None:
        self.jobs, self.now, self.has_walls = jobs, 0.0, has_walls
        self.enforcer: Enforcer | None = self if has_walls else None
        self.traits = Traits(queues_jobs=False, enforces_memory=not has_walls, patience_seconds=1.0)
        self.capacity_bytes, self.peak_bytes = capacity_bytes, 0
        self.num_restarts, self.lost_seconds = 0, 0.0
        self._cap: int | None = None
        self._walls: dict[str, int] = {}
        self._live: dict[str, _Attempt] = {}
        self._status: dict[str, JobStatus] = {}

    def clock(self) -> float:
        return self.now

    def submit(self, batch: Sequence[Submission]) -> None:
        for job, limit in batch:
            known = self._status.get(job.id)
            number = known.attempt + 1 if known else 1
            attempt = _Attempt(self.jobs[job.id], self.now, number, grown_at=self.now)
            attempt.limit = None if self.has_walls else limit
            self._live[job.id] = attempt
            walls = sum(self._walls[name] for name in self._live) if self.has_walls else 0
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
        attempt = self._live.get(job_id)
        if attempt is not None:
            attempt.verdict = verdict or attempt.verdict
            attempt.leaves_at = self.now + (TICK_SECONDS if now else LEAVE_SECONDS)
        elif verdict is not None:
            known = self._status.get(job_id) or JobStatus(job_id, "pending", attempt=0)
            self._status[job_id] = replace(known, state=verdict.state, cause=verdict.cause)

    @property
    def used_bytes(self) -> int:
        return sum(attempt.used for attempt in self._live.values())

    @property
    def wanted_cores(self) -> float:
        begun = (one for one in self._live.values() if self.now - one.began > START_SECONDS and not one.stalled)
        return max(sum(one.job.cores for one in begun), 1e-9)

    @property
    def speed(self) -> float:
        """How fast a job that computes goes, as a share of its speed with cores to itself."""
        crowd = max(1.0, self.wanted_cores / NUM_CORES)
        return 1 / crowd / (1 + CROWDED * (crowd - 1))

    def wait(self, seconds: float) -> None:
        self.now += TICK_SECONDS
        used, speed = self.used_bytes, self.speed
        for job_id, attempt in list(self._live.items()):
            used -= attempt.used
            self._move(job_id, attempt, used, speed)
            used += attempt.used
            if job_id in self._live:
                self._tell(job_id, attempt)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _move(self, job_id: str, attempt: _Attempt, others: int, speed: float) -> None:
        job = attempt.job
        if attempt.leaves_at is not None and self.now >= attempt.leaves_at:
            verdict = attempt.verdict or Verdict("preempted", "as asked")
            self._end(job_id, attempt, verdict, asked=True)
            return
        if self.now - attempt.began <= START_SECONDS or attempt.leaves_at is not None:
            return
        done = TICK_SECONDS * (speed if job.cores else 1.0)
        need = job.bytes_at(min(job.seconds, attempt.done + done))
        wall = attempt.limit if not self.has_walls else self._walls[job_id]
        room = sys.maxsize if wall is None else wall
        if self.has_walls and self._cap is not None:
            room = min(room, self._cap - others)
        if need > room and not self.has_walls:
            attempt.wants_more = True
            self._end(job_id, attempt, Verdict("out_of_memory", "MemoryError"), asked=False)
        elif need > room:
            attempt.used, attempt.stalled, attempt.wants_more = max(attempt.used, room), True, True
        else:
            attempt.used, attempt.stalled, attempt.done = need, False, attempt.done + done
            attempt.cpu += TICK_SECONDS * job.cores * min(1.0, NUM_CORES / self.wanted_cores)
            if attempt.done >= job.seconds - 1e-9:
                self._end(job_id, attempt, Verdict("completed", ""), asked=False)

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

    def _end(self, job_id: str, attempt: _Attempt, verdict: Verdict, *, asked: bool) -> None:
        del self._live[job_id]
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
        is_complete: Each job completed.
    """

    mix: str
    seed: int
    seconds: float
    oracle: float
    restarts: float
    lost: float
    peak: float
    is_complete: bool

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
    reserve_bytes = RESERVE_MIB * MIB
    named = {f"job_{number:04}": job for number, job in enumerate(jobs)}
    backend = SimBackend(named, limit_bytes - reserve_bytes, has_walls=has_walls)
    first = Budget.read(cap_bytes=limit_bytes, reserve_bytes=reserve_bytes)
    cap = next(one for one in first.limits if one.name == "cap")

    def read_budget(in_use_bytes: int) -> Budget:
        headroom = limit_bytes - in_use_bytes
        return replace(first, limits=(replace(cap, headroom_bytes=headroom),), num_cpus=NUM_CORES, devices=())

    admission = LocalAdmission(read_budget, policy=Policy(), now=backend.clock)
    source = _Source([Job(name, command=("true",), params=job.params) for name, job in named.items()])
    scheduler = Scheduler(source, backend, admission, say=say)
    oracle = oracle_seconds(jobs, limit_bytes - reserve_bytes)

    def tick() -> None:
        on_tick(backend, scheduler)
        if backend.now > max(LONGEST_SECONDS, LONGEST_RATIO * oracle):
            running = [job_id for job_id, status in backend.poll().items() if status.state not in ENDED]
            raise Standstill(f"{mix}, seed {seed}: still {running} after {backend.now:.0f} s, {oracle:.0f} expected")

    statuses = scheduler.run(on_tick=tick)
    work = sum(job.seconds for job in jobs)
    return Outcome(
        mix,
        seed,
        backend.now,
        oracle,
        backend.num_restarts / len(jobs),
        backend.lost_seconds / work,
        backend.peak_bytes / limit_bytes,
        len(statuses) == len(jobs) and {one.state for one in statuses.values()} == {"completed"},
    )


def run_one(mix: str, seed: int, has_walls: bool) -> Outcome:
    jobs = make_jobs(mix, seed)
    try:
        return simulate(jobs, mix=mix, seed=seed, has_walls=has_walls)
    except Standstill as error:
        print(error, file=sys.stderr)
        return Outcome(mix, seed, math.inf, 1.0, 0.0, 0.0, 0.0, is_complete=False)


def report(found: Sequence[Outcome]) -> bool:
    """Print a line for each mix; whether every target was met."""
    is_met = True
    print(f"{'mix':27} {'jobs':>5} {'median':>7} {'p90':>6} {'worst':>6} {'restarts':>9} {'lost':>6}")
    for mix in dict.fromkeys(one.mix for one in found):
        of = [one for one in found if one.mix == mix]
        ratios = sorted(one.ratio for one in of)
        median, p90 = statistics.median(ratios), ratios[max(0, -(-9 * len(ratios) // 10) - 1)]
        restarts = statistics.mean(one.restarts for one in of)
        lost = statistics.mean(one.lost for one in of)
        is_good = median <= MOST_MEDIAN and p90 <= MOST_P90 and restarts <= MOST_RESTARTS and lost <= MOST_LOST
        is_good &= all(one.is_complete and one.peak <= 1.0 for one in of)
        is_met &= is_good
        line = f"{mix:27} {MIXES[mix][0]:5} {median:7.2f} {p90:6.2f} {ratios[-1]:6.2f} {restarts:9.1%} {lost:6.1%}"
        print(f"{line}{'' if is_good else '  MISSED'}", flush=True)
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
