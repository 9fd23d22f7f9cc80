"""Is a job that grows told before it dies, and nothing else?

    python benchmarks/growth.py [--seeds 1 2] [--each 16] [--verbose]

A course has 0.06 to 3 s a step, activations, jitter and drift of the allocator; memfit's rule sees a line of each half
second, and the step events. What grows does so by 0.1 to 20 MiB a step and meets its limit at 45 to 90 % of its
training; what does not grow fills 50 to 97 % of its room. Each is asked at every line up to the limit or its end. Then
each that does not grow gets a limit that it meets: was it a death of growth, or of size?

Exit status: 0 if all targets that it prints are met, 1 if not.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness import parser, told
from memfit.jobs import Growing
from memfit.memory import HOST, Sample
from memfit.units import MIB

LOOK, EACH = 0.1, 5  # seconds between two looks; looks of a line
DEVICE = "GPU-a"


@dataclass(frozen=True)
class Course:
    """The memory of a job over time, its step events, and the true slope in bytes a step, 0 of what does not grow."""

    kind: str
    lines: Sequence[Sample]
    events: Sequence[dict[str, Any]]
    slope: float
    limit: int
    place: str = ""

    def size(self, line: Sample) -> int:
        return line.device_bytes[DEVICE] if self.place else line.peak_bytes


@dataclass(frozen=True)
class Found:
    """What was said of a course: at which part of the steps to its limit, how sure, its slope, and of what it died."""

    course: Course
    at: float | None
    is_sure: bool
    slope: float
    death: str


def ask(course: Course, limit: int) -> Found:
    """Ask at every line up to the limit, as the watcher of a job does."""
    growing, events, at, sure, slope = Growing(), iter(course.events), None, False, 0.0
    event, last = next(events, None), 0.0
    limits = {HOST: 1 << 50, DEVICE: 1 << 50, course.place or HOST: limit}
    for line in course.lines:
        while event is not None and event["time"] <= line.time:
            growing.steps.take(event)
            event = next(events, None)
        last = growing.steps.at(line.time)
        growing.look(replace(line, step=last), lambda: limits)
        if (one := growing.told) is not None and one.kind == "growth":
            at, slope, sure = (last, one.slope, one.is_sure) if at is None else (at, slope, sure or one.is_sure)
        if course.size(line) >= limit:
            break
    part = None if at is None else at / max(last, 1.0)
    return Found(course, part, sure, slope, growing.explain(is_device=bool(course.place)))


# --- simulated courses


def _fill(at: np.ndarray, end: float) -> np.ndarray:
    return np.asarray(np.minimum(at, end) / end)


def _stairs(at: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    steps = ((at > start) * size for start, size in zip(rng.uniform(0, 0.9, 6), rng.exponential(1, 6), strict=True))
    return np.asarray(sum(steps))


#: What grows, in steps of its slope: by the steps made, and how many it makes to its limit.
GROWTHS: dict[str, Callable[[np.ndarray, float, np.random.Generator], np.ndarray]] = {
    "evenly": lambda made, span, rng: made,
    "in lumps": lambda made, span, rng: made // (lump := rng.uniform(1, 1 + span / 25)) * lump,
    "with a cache": lambda made, span, rng: made + 0.5 * span * (1 - np.exp(-made / (0.1 * span))),
    "unevenly": lambda made, span, rng: np.cumsum(rng.exponential(1, int(made[-1]) + 2))[made.astype(int)],
}
ENDS_IN_TIME, ON_HOST = "a growth that ends in time", ("copies of shared pages", "what was reserved")
IN_EPOCHS = ("a cache of the first epoch", "results of an epoch", "batches by length")
#: What does not grow: by the part of the training (0 to 1) and the part of the epoch, any size that it takes.
OTHERS: dict[str, Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]] = {
    "a cache that levels off": lambda at, epoch, rng: 1 - np.exp(-at / rng.uniform(0.03, 0.3)),
    "a buffer that fills": lambda at, epoch, rng: _fill(at, rng.uniform(0.02, 0.3)),
    "a cache of the first epoch": lambda at, epoch, rng: np.where(at < 1 / 3, _fill(at, 1 / 3), 1),
    "steps of the allocator": lambda at, epoch, rng: _stairs(at, rng),
    "a load": lambda at, epoch, rng: _fill(at, rng.uniform(0.01, 0.05)) + 0.02 * rng.random(len(at)),
    "a sawtooth": lambda at, epoch, rng: (at / rng.uniform(0.03, 0.2)) % 1,
    "results of an epoch": lambda at, epoch, rng: epoch,
    "batches by length": lambda at, epoch, rng: np.sin(np.pi * epoch) + 0.1 * rng.random(len(at)),
    "copies of shared pages": lambda at, epoch, rng: 1 - np.exp(-at / rng.uniform(0.1, 0.5)),
    "what was reserved": lambda at, epoch, rng: _fill(at, rng.uniform(0.3, 1.0)),
    ENDS_IN_TIME: lambda at, epoch, rng: at,
}


def simulate(kind: str, rng: np.random.Generator, *, grows: bool, is_device: bool) -> Course:
    """Return a course of a kind. Its figures are MiB and steps."""
    span = _between(rng, 30, 1300)  # the steps to its limit
    seconds = float(np.clip(_between(rng, 0.06, 3), 20 / span, 1500 / span))
    epochs = 3 if kind in IN_EPOCHS else int(rng.choice([1, 3, 5, 8]))
    length = max(2, int(span / rng.uniform(0.45, 0.9)) // epochs)
    num_steps, span = length * epochs, min(span, 0.95 * length * epochs)
    pause = rng.uniform(0.5, 4) if epochs > 1 else 0.0  # the validation after an epoch
    whole = length * seconds + pause
    times = np.arange(0, epochs * whole, LOOK)
    times = times[: len(times) // EACH * EACH]
    epoch = np.minimum(times // whole, epochs - 1)
    inside = np.minimum((times - epoch * whole) / seconds, length)
    made = epoch * length + inside
    room = max(20.0, _between(rng, 0.1, 20) * span if grows else _between(rng, 40, 8000))
    own = GROWTHS[kind](made, span, rng) / span if grows else OTHERS[kind](made / num_steps, inside / length, rng)
    own = room * own / (1 if grows else own.max())
    base, active = rng.uniform(100, 3000), room * _between(rng, 0.01, 0.5)
    low = base + own + 0.01 * room * np.log1p(made) + rng.normal(0, 0.002 * room + 0.3, len(times))
    works = ((made + rng.random()) % 1 > 0.25) * rng.lognormal(0, 0.1, len(times))
    size = low + active * np.where(inside >= length, 0.5, works)
    number = np.arange(num_steps)
    ends = number // length * whole + (number % length + 1) * seconds
    first = float(times[np.argmax(own >= 0.99 * room)]) if kind == "a load" else 0.0  # then its steps begin
    mark = str(rng.choice(["load", "train"]))  # a load is in a phase of its own, or in none
    lines = []
    for looks in range(0, len(times), EACH):
        part, at = slice(looks, looks + EACH), times[looks + EACH - 1]
        phase = mark if at < first else "validate" if inside[part].max() >= length else "train"
        kept = [base + 1.02 * room if kind == name else size[part].min() + 50 for name in ON_HOST]
        sizes = [int(one * MIB) for one in (size[part].min(), size[part].max(), *kept)]
        lines.append(_line(1e9 + at, phase, *sizes, is_device=is_device))
    events = [
        {"time": 1e9 + when, "epoch": one // length + 1, "step": one % length + 1, "num_steps": length}
        | {"num_epochs": epochs}
        for one, when in zip(number.tolist(), ends.tolist(), strict=True)
        if when > first and (one == 0 or when // 0.5 > (when - seconds) // 0.5)
    ]
    course = Course(kind, lines, events, room / span * MIB if grows else 0.0, 0, DEVICE if is_device else "")
    start = course.size(next(line for line in lines if line.phase == "train"))
    last = ends[min(int(span), num_steps - 1)] if grows else times[-1]
    most = max(course.size(line) for line in lines if line.time <= 1e9 + last)
    return replace(course, limit=most if grows else start + int((most - start) / rng.uniform(0.5, 0.97)))


def _between(rng: np.random.Generator, least: float, most: float) -> float:
    return float(np.exp(rng.uniform(np.log(least), np.log(most))))


def _line(at: float, phase: str, low: int, peak: int, resident: int, reserved: int, *, is_device: bool) -> Sample:
    host, most = (1000 * MIB, 1000 * MIB) if is_device else (low, peak)
    line = Sample(at, 1, host, 0, 0, 0, phase, peak_bytes=most, low_bytes=host)
    if is_device:
        return replace(line, device_bytes={DEVICE: peak}, allocated_bytes={DEVICE: low})
    return replace(line, resident_bytes=resident, reserved_bytes=reserved)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    options.add_argument("--each", type=int, default=16, help="courses of a kind and seed")
    options.add_argument("--verbose", action="store_true")
    chosen = options.parse_args()
    jobs = [
        (kind, seed, number, grows)
        for seed in chosen.seeds
        for grows, kinds in ((True, GROWTHS), (False, OTHERS))
        for kind in kinds
        for number in range(chosen.each * (2 if grows else 1))
    ]
    with multiprocessing.Pool(2) as pool:
        found = pool.map(try_one, jobs, chunksize=8)
    return report(found, verbose=chosen.verbose)


def try_one(job: tuple[str, int, int, bool]) -> tuple[Found, str]:
    kind, seed, number, grows = job
    rng = np.random.default_rng([seed, number, *kind.encode()])
    course = simulate(kind, rng, grows=grows, is_device=number % 4 == 0 and kind not in ON_HOST)
    return judge(course, random.Random(f"{seed} {number} {kind}"))


def judge(course: Course, rng: random.Random) -> tuple[Found, str]:
    """Return what is said of a course, and what it died of: what does not grow under a limit that it meets."""
    found = ask(course, course.limit)
    if not course.slope and course.kind != ENDS_IN_TIME:
        start, most = course.size(course.lines[0]), max(map(course.size, course.lines))
        return _light(found), ask(course, start + int((most - start) * rng.uniform(0.4, 0.9))).death
    return _light(found), found.death if course.slope else "size"


def _light(found: Found) -> Found:
    return replace(found, course=replace(found.course, lines=(), events=()))


def report(found: Sequence[tuple[Found, str]], *, verbose: bool) -> int:
    grown = [(one, death) for one, death in found if one.course.slope]
    others = [(one, death) for one, death in found if not one.course.slope]
    seen = [one for one, _ in grown if one.at is not None]
    at = sorted(one.at or 0.0 for one in seen)
    errors = sorted(abs(one.slope / one.course.slope - 1) for one in seen)
    false = [one for one, _ in others if one.at is not None]
    quarter = {part: at[int(len(at) * part)] for part in (0.25, 0.5, 0.75)} if at else {}
    died = Counter(death for _, death in grown)
    wrong = Counter(death for _, death in others)
    early = sum(part < 0.75 for part in at)
    print(f"grows: told {len(seen)} of {len(grown)}; as sure {sum(one.is_sure for one in seen)}; early {early}")
    print(f"steps to the limit gone when told (25, 50, 75 %): {[f'{part:.0%}' for part in quarter.values()]}")
    print(f"error of the slope (50, 75 %): {errors[len(errors) // 2]:.1%}, {errors[len(errors) * 3 // 4]:.1%}")
    print(f"does not grow: told {len(false)} of {len(others)}; as sure {sum(one.is_sure for one in false)}")
    print(f"deaths of what grows: {dict(died)}; of what is too small: {dict(wrong)}")
    kinds: defaultdict[str, list[tuple[Found, str]]] = defaultdict(list)
    for one, death in found:
        kinds[one.course.kind].append((one, death))
    for kind, some in kinds.items() if verbose else ():
        sure = [one.is_sure for one, _ in some if one.at is not None]
        deaths = dict(Counter(death for _, death in some))
        print(f"{kind}: told {len(sure)} of {len(some)}, as sure {sum(sure)}; {deaths}")
    num = len(others)
    rows = [
        told(early >= 0.88 * len(grown), "88 % of what grows are told before 75 % of the steps to the limit are gone"),
        told(bool(errors) and errors[len(errors) * 3 // 4] <= 0.15, "the slope is within 15 % for three of four"),
        told(sum(one.is_sure for one in false) <= 0.02 * num, "at most 2 % of the others are told as sure"),
        told(wrong["growth"] <= 0.03 * num, "at most 3 % of those too small are said to have grown"),
    ]
    return 0 if all(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
