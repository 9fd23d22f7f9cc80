"""Decides over the host memory of one run's jobs: what each is to hold, which starts, which gives way.

All functions are pure: they see sizes and seconds, and return what follows. The scheduler calls them ten times a second
over real jobs, and ``benchmarks/policy.py`` over simulated ones. The rules:

- A job without similar ones that ended is taken to double while it grows. Once it stands still, its margin shrinks.
- A job with similar ones that ended is taken to need what most of them needed. When it stands still for longer than
  they took to reach their peaks, its margin shrinks too.
- What is granted and not used returns at once. While a job waits, one that stands still for now keeps what it uses.
- Of the jobs that wait at their limits, one grows at a time: the one that ends first.
- No more jobs start beside as many as there are cores once these keep the cores busy.
- A job starts if all that run could still end one after another, should each need the most that it may.
- A job that waits at its limit is helped by a restart of another one only when that costs less than the wait did.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from memfit.errors import ConfigError
from memfit.units import MIB, format_count, parse_bytes

#: How long a job that gets no more memory waits at its limit, at least, before another one gives way to it; and how
#: long if all wait.
STALL_SECONDS, DEADLOCK_SECONDS = 10.0, 0.5
STILL_SHARE = 0.02  # a job that grew by less than this share since stands still
STILL_SECONDS = 1.0  # how long a job stands still before its margin is a quarter, and before it is the least
#: What a job may grow by, as a share of what it uses: while it grows, after a second, once it has stopped.
_GROWING, _UNPROVEN, _STANDING, _SETTLED = 1.0, 0.5, 0.25, 0.05
_BEGUN = 1 / 16  # one that uses less than this share of what similar jobs took has only begun
#: What a job of unknown size holds at its start, as a multiple of what others of unknown size use.
_STANDING_FACTOR = 1.25
#: A job may reach its peak later than similar ones did, by this factor and these seconds.
_LATE_FACTOR, _LATE_SECONDS = 1.5, 1.0
_FIRST_SHARE = 1 / 16  # what a job holds at least while nothing at all is known of it, as a share of the capacity
#: Of such jobs at most so many run side by side that are not measured yet. One that holds no more than an interpreter
#: counts twice: it imports and reads, and its memory tells nothing yet.
_MOST_BLIND, _INTERPRETER = 4, 16 * MIB
_BARE_SECONDS = 5.0  # one that holds no more than that for so long is small
_MOST_ASIDES = 3  # a job that gave way so often runs alone the next time
_BUSY = 0.8  # all cores count as busy from this share on: another job would only take from the others
_OUTGROWN = 1.25  # a job that takes more than this multiple of the most of similar ones is not similar
_NO_WALLS = 3.0  # without walls, a job that needs more than was thought fails: all margins are wider
#: What a job gets beyond its use at least, if it grows: so much, or this share of the capacity if that is less.
_LEAST_STEP, _STEP_SHARE = 32 * MIB, 1 / 64
#: Similar jobs may differ by this share of their mean, until so many of them tell by how much.
_UNKNOWN_SPREAD, _LEAST_KNOWN = 1.0, 2
_EARLY = 0.35  # jobs that reach their peak before this share of their time stand still for good once they stand still
_LARGEST = 1e15  # the square of a larger number would overflow
_SURE = 0.1  # how many standard deviations of the sum of all bets are kept free
#: What a job holds above the mean of similar ones, in standard deviations of these and of that mean.
_ABOVE, _ERROR = 1.0, 0.3
_LEAST_SLACK = 0.1  # what is added to the most that similar jobs took, without walls


Params = frozenset[tuple[str, str]]  # the parameters of a job, as pairs of name and value


class Ended(NamedTuple):
    """A job that ended: its peak in bytes, seconds from its start to that and to its end, the cores it kept busy."""

    peak: int
    peaked: float
    seconds: float
    cores: float = 0.0


@dataclass(frozen=True)
class Guess:
    """What a job is thought to need, from jobs that ended."""

    size: int  # what it is to hold, in bytes
    most: int  # what it may need if it is an exception
    spread: int = 0  # by how much such jobs differ, as a standard deviation in bytes
    peaked: float = math.inf  # after how many seconds it has reached its peak; infinite if nobody knows
    seconds: float = math.inf  # how long it will run; infinite if nobody knows
    is_early: bool = False  # such jobs reach their peak early, so that one that stands still has reached it
    cores: float = 0.0  # how many cores it will keep busy


def number_of(text: str) -> float | None:
    """Return a parameter as a number or a size in bytes; None for a name."""
    try:
        value = float(text)
    except ValueError:
        try:
            value = float(parse_bytes(text))
        except ConfigError:
            return None
    return value if abs(value) <= _LARGEST else None  # not for a NaN either


def likeness(params: Params, others: Params) -> tuple[int, int]:
    """Return how many parameters two jobs share: names first, then all."""
    shared = params & others
    return sum(number_of(value) is None for _, value in shared), len(shared)


def usual_spread(ended: Collection[tuple[Params, Ended]]) -> float | None:
    """Return how much jobs with the same repeated parameters differ, as a share of their mean, if enough ended."""
    times = Counter(pair for params, _ in ended for pair in params)
    groups = defaultdict[Params, list[int]](list)
    for params, one in ended:
        groups[frozenset(pair for pair in params if times[pair] > 1)].append(one.peak)
    squares, num = 0.0, 0
    for peaks in groups.values():
        mean = statistics.fmean(peaks)
        squares += sum((peak / mean - 1) ** 2 for peak in peaks) if mean else 0.0
        num += len(peaks) - 1
    return math.sqrt(squares / num) if num >= _LEAST_KNOWN else None


def guess_for(
    params: Params,
    ended: Sequence[tuple[Params, Ended]],
    standing: Iterable[tuple[Params, int]] = (),
    slack: float = 0.0,
    usual: float | None = None,
    *,
    has_walls: bool = True,
) -> Guess | None:
    """Return what a job is thought to need, from the most similar ones that ended, and those ``standing`` still."""
    shared = [likeness(params, others) for others, _ in ended]
    most = max(shared, default=(0, 0))
    similar = [one for (_, one), like in zip(ended, shared, strict=True) if like == most]
    running = [used for others, used in standing if likeness(params, others) == most]
    return guess_from(similar, running, slack, usual, has_walls=has_walls)


def guess_from(
    similar: Sequence[Ended],
    running: Iterable[int] = (),
    slack: float = 0.0,
    usual: float | None = None,
    *,
    has_walls: bool = True,
) -> Guess | None:
    """Return what a job is thought to need, given similar ones that ended; None without any. ``running`` is what
    similar ones use that still run and stand still: small ones end first, and would speak for all. ``usual`` is by how
    much similar jobs differ as a share, None if nobody knows. Without walls a job fails where it needs more, so that it
    gets the most."""
    if not similar:
        return None
    mean = statistics.fmean(one.peak for one in similar)
    peaks = [*(one.peak for one in similar), *(max(size, mean) for size in running)]
    mean, num = statistics.fmean(peaks), len(peaks)
    spread = max(statistics.pstdev(peaks), (_UNKNOWN_SPREAD if usual is None else usual) * mean / num)
    seconds = statistics.median(one.seconds for one in similar)
    is_early = all(one.peaked < _EARLY * one.seconds for one in similar)
    size = round(mean + min(_ABOVE * spread, slack * mean) + _ERROR * spread / math.sqrt(num))
    if not has_walls:
        size = max(size, round(max(peaks) * (1 + max(slack, _LEAST_SLACK))) + round(_ABOVE * spread))
    peaked, cores = max(one.peaked for one in similar), statistics.median(one.cores for one in similar)
    return Guess(size, max(size, round(max(peaks))), round(spread), peaked, seconds, is_early, cores)


@dataclass(frozen=True)
class Held:
    """A running job, as the policy sees it. Sizes are bytes of host memory."""

    id: str
    used: int  # what it uses now
    reserved: int  # what it was granted
    guess: Guess | None = None  # what it is thought to need; None if nothing is known of similar jobs
    at_least: int = 0  # what it is to hold whatever it uses, because it ran out of memory before
    age: float = 0.0  # seconds since its start, without those in which it waited at its limit
    still: float = 0.0  # seconds since it grew last
    stalled: float | None = None  # for how many seconds it has waited at its limit; None if it does not
    at_risk: float = 0.0  # seconds of work that would be lost if it ended now
    asides: int = 0  # how often it gave way already
    is_leaving: bool = False  # it was asked to stop
    cores: float | None = None  # how many cores it keeps busy; None before that was measured
    threads: int = 1  # how many it may keep busy

    @property
    def left_seconds(self) -> float:
        return max(0.0, self.guess.seconds - self.age) if self.guess else math.inf


def likely(guess: Guess | None, used: int) -> Guess | None:
    """Return a job's guess; None once it uses much more than any similar job took, so that they tell nothing of it."""
    return None if guess is not None and used > _OUTGROWN * guess.most else guess


def has_peaked(held: Held) -> bool:
    """Return True if a job stands still, and similar ones had peaked by now: one without a core stands still as
    well."""
    if held.guess is None or held.still < STILL_SECONDS or held.used < _BEGUN * held.guess.size:
        return False
    return held.guess.is_early or held.age >= _LATE_FACTOR * held.guess.peaked + _LATE_SECONDS


def wanted(held: Held, capacity: int, *, is_tight: bool = False, has_walls: bool = True) -> int:
    """Return what a job is to hold. If it ``is_tight``, another one waits for memory, so that one that stands still for
    now keeps no more than it uses."""
    wider = 1.0 if has_walls else _NO_WALLS
    guess, step = held.guess, min(_LEAST_STEP, int(capacity * _STEP_SHARE))
    known = 0
    if guess is not None and not has_peaked(held) and held.used <= guess.size:
        known = guess.size
    if known and held.stalled is None:
        return max(known, held.at_least)
    if held.stalled is not None:
        margin = max(step, _STANDING * held.used)
    elif has_peaked(held):
        margin = wider * _SETTLED * held.used
    elif guess is not None:
        margin = wider * _STANDING * held.used
    elif held.still >= STILL_SECONDS:
        margin = wider * (_SETTLED if is_tight else _UNPROVEN) * held.used
    else:
        margin = max(step, wider * _GROWING * held.used)
        if held.age < STILL_SECONDS:
            known = int(_FIRST_SHARE * wider * capacity)
    return max(known, held.at_least, min(capacity, held.used + math.ceil(margin)))


class Grown(NamedTuple):
    """What each job is to hold from now on, what is free then, and which job gets less than it wants."""

    reserved: dict[str, int]
    free: int
    short: str


def grow(
    jobs: Collection[Held], free: int, capacity: int, first: str = "", *, has_walls: bool = True, least: int = 1
) -> Grown:
    """Return what each job is to hold, given what is free beside; ``first``, to which others gave way, comes first."""
    is_tight = any(job.stalled is not None for job in jobs)
    wants = {job.id: wanted(job, capacity, is_tight=is_tight, has_walls=has_walls) for job in jobs}
    reserved = {job.id: job.reserved for job in jobs}
    for job in jobs:
        size = max(job.used, wants[job.id], least)
        if size < job.reserved and not job.is_leaving:
            reserved[job.id] = size
            free += job.reserved - size
    short = ""
    waiting = _in_order((job for job in jobs if job.stalled is not None), first)
    growing = sorted((job for job in jobs if job.stalled is None), key=lambda job: wants[job.id] - job.used)
    for job in (*waiting, *growing):
        if job.is_leaving or wants[job.id] <= reserved[job.id]:
            continue
        held = max(reserved[job.id], job.used)  # what it has taken already is not free any more
        more = max(0, min(wants[job.id] - held, free))  # nothing is left once one is short
        reserved[job.id], free = held + more, free - more
        if held + more < wants[job.id] and (job.stalled is not None or job.used > job.reserved):
            short = short or job.id
    return Grown(reserved, max(0, free), short)


def _in_order(jobs: Iterable[Held], first: str | None) -> list[Held]:
    """Return jobs that wait at their limits in the order in which they grow: those that end first, else the oldest."""
    return sorted(jobs, key=lambda job: (job.id != first, job.left_seconds, -job.age))


def walls(jobs: Collection[Held], free: int, capacity: int, first: str = "", *, least: int = 1) -> dict[str, int]:
    """Return each job's limit: what it holds and a part of what is free, for a burst. Together they stay within both.
    While some wait at their limits, one of them alone gets a part."""
    if len(jobs) == 1:
        return {job.id: max(least, job.used, job.reserved, capacity) for job in jobs}
    waiting = _in_order((job for job in jobs if job.stalled is not None and not job.is_leaving), first)
    chosen = waiting[0].id if waiting else first
    part = free // max(8, len(jobs))
    found = {}
    for job in jobs:
        burst = part if not chosen else free if job.id == chosen else 0
        found[job.id] = max(least, job.used, job.reserved) + burst
    return found


def is_safe(jobs: Iterable[tuple[int, int]], capacity: int) -> bool:
    """Return True if all jobs could end one after another; each is what it uses, and the most that it may need."""
    jobs = sorted(jobs, key=lambda job: job[1] - job[0])
    free = capacity - sum(used for used, _ in jobs)
    for used, most in jobs:
        if most - used > free:
            return False
        free += used
    return True


def most_of(held: Held, capacity: int, *, has_walls: bool = True) -> int:
    now = wanted(held, capacity, has_walls=has_walls)
    if has_peaked(held):
        return now
    return min(capacity, max(now, held.guess.most if held.guess else 2 * held.used))


class Need(NamedTuple):
    """What a waiting job needs: the least that it can start with, and what it is to hold, in bytes."""

    least: int
    wanted: int


def start(
    need: Need | None,
    guess: Guess | None,
    jobs: Sequence[Held],
    room: int,
    capacity: int,
    *,
    asides: int = 0,
    has_walls: bool = True,
) -> int | str:
    """Return what a waiting job holds from its start on, which may be more than the room; or why it must not start yet.
    ``need`` is None if nothing is known of it. ``room`` is free beside what the running ``jobs`` hold, ``capacity`` is
    for all together."""
    size = first_size(jobs, capacity, has_walls=has_walls) if need is None else need.wanted
    if not jobs:  # the slack is for jobs beside it
        return min(size, max(need.least if need else 0, room))
    if asides >= _MOST_ASIDES:
        return f"it gave way {asides} times, so it runs alone next"
    known = None if need is None else guess or Guess(size, size)
    why = may_start(known, size, jobs, room, capacity, has_walls=has_walls)
    return why or (size if need or has_walls else max(room, size))  # without walls it cannot be raised later


def may_start(
    guess: Guess | None, size: int, jobs: Sequence[Held], room: int, capacity: int, *, has_walls: bool = True
) -> str:
    """Return why a job of this size must not start beside others; empty if it may. Args as in `start`."""
    if waiting := _in_order((job for job in jobs if job.stalled is not None), None):
        return f"{waiting[0].id} waits for more memory"  # it may take all that is free at any moment
    if guess is None:
        blind = [job for job in jobs if not is_measured(job, has_walls=has_walls)]
        num_blind = sum(2 if job.used <= _INTERPRETER else 1 for job in blind)
        if num_blind >= (_MOST_BLIND if has_walls else 1):
            return f"{min(blind, key=lambda job: job.age).id} is being measured"
    bets = [job.guess.spread for job in jobs if job.guess is not None and not has_peaked(job)]
    if guess is not None and size + _SURE * math.hypot(guess.spread, *bets) > room:
        return "room is kept for running jobs that may need more than similar ones"
    pairs = [(job.used, most_of(job, capacity, has_walls=has_walls)) for job in jobs]
    if not is_safe([*pairs, (0, min(capacity, max(size, guess.most if guess else 0)))], capacity):
        return "the running jobs may need what is free"
    return ""


def is_measured(held: Held, *, has_walls: bool = True) -> bool:
    """Return True if what a running job uses tells what it needs: similar ones ended, or it stands still."""
    calm = STILL_SECONDS if held.used > _INTERPRETER else _BARE_SECONDS
    return held.guess is not None or held.still >= calm * (1.0 if has_walls else _NO_WALLS)


def why_no_core(jobs: Collection[Held], cores: int) -> str:
    """Return why no job more starts however much memory is free; empty if one may. Beyond one for each core, more jobs
    only share what is there once all cores are busy."""
    expected = [job.guess.cores if job.guess else 0.0 for job in jobs]
    busy = sum(guess if job.cores is None else job.cores for job, guess in zip(jobs, expected, strict=True))
    if sum(job.threads for job in jobs) < cores or busy < _BUSY * cores:
        return ""
    keep = "keeps" if len(jobs) == 1 else "keep"
    return f"{format_count(len(jobs), 'job')} {keep} {busy:.1f} of {format_count(cores, 'core')} busy"


def first_size(jobs: Iterable[Held], capacity: int, *, has_walls: bool = True) -> int:
    """Return what a job of unknown size holds at its start: as much as those of unknown size do on average."""
    wider = 1.0 if has_walls else _NO_WALLS
    used = [job.used for job in jobs if job.guess is None]
    return min(capacity, round(wider * max(_STANDING_FACTOR * statistics.fmean(used or [0]), _FIRST_SHARE * capacity)))


class Aside(NamedTuple):
    """A job that is to give way, and the one to which; both the same if it alone runs and needs more than there is."""

    id: str
    to: str


def relieve(jobs: Sequence[Held], first: str | None = None) -> Aside | None:
    """Return which job gives way to a waiting one: at once if all wait, else once the wait cost more than a restart."""
    waiting = _in_order((job for job in jobs if job.stalled is not None), first)
    if not waiting or any(job.is_leaving for job in jobs):
        return None
    chosen = waiting[0]
    if first not in (None, chosen.id) and any(job.id == first for job in jobs):
        return None  # the one that goes first does go on
    waited = max(job.stalled or 0.0 for job in ([chosen] if first else waiting))
    if len(jobs) == 1:
        return Aside(chosen.id, chosen.id) if waited >= DEADLOCK_SECONDS else None
    other = cheapest(job for job in jobs if job.id != chosen.id)
    is_deadlock = len(waiting) == len(jobs)
    patience = DEADLOCK_SECONDS if is_deadlock else max(STALL_SECONDS, other.at_risk)
    return Aside(other.id, chosen.id) if waited >= patience else None


def cheapest(jobs: Iterable[Held]) -> Held:
    """Return the job whose end loses the least work, and among equals the one that gave way least often."""
    return min(jobs, key=lambda job: (job.asides, job.at_risk, job.id))
