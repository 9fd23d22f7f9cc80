"""Tell a job that grows, which no request cures, from one that levels off, loads data or is too large.

The lowest levels of memory are looked at, since peaks follow the data. Source: docs/project/decisions/0031.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from memfit.units import MIB, format_bytes

if TYPE_CHECKING:
    from memfit.memory._meter import Sample

#: What rises: memory without an end; pages that were shared and are copied; what had been reserved and is now filled.
Kind = Literal["growth", "copies", "reserved"]
#: What a death of memory came from; ``open`` where too little was seen.
Cause = Literal["growth", "copies", "reserved", "size", "open"]
_PIECES, _LEAST_LEVELS, _FIRST_STEPS, _SETTLED = 5, 12, 3, 1 / 3
#: By how much each span may rise less than the one before, so that it is told early; so that it is told as sure.
_EARLY, _SURE = 0.08, 0.25
_ADVICE = "More memory puts that off, it does not mend it."
_SAID = {
    "growth": "grew by",
    "copies": "has copied pages that its processes share,",
    "reserved": "has filled what it had reserved,",
}


class Level(NamedTuple):
    """The lowest that a process, or all of a job, held in half a second or more of its training. Sizes in bytes."""

    time: float  # Unix seconds
    step: float  # optimizer steps so far, at the lowest point; seconds since the start where nobody counts steps
    low: int  # private bytes
    peak: int  # the highest of that time
    resident: int = 0  # RssAnon + RssShmem: with pages that others map too
    reserved: int = 0  # VmData + RssShmem

    def joined(self, later: Level) -> Level:
        """Return both as one: the lowest point with its step, and the highest peak."""
        return min(self, later, key=lambda one: one.low)._replace(peak=max(self.peak, later.peak))


class Levels:
    """A series of levels of bounded length: when it is full, each two become one, and later ones are as long."""

    def __init__(self, most: int = 128) -> None:
        self._most, self._each, self._num, self.lines = most, 1, 0, list[Level]()

    def add(self, level: Level) -> None:
        if self._num % self._each:
            self.lines[-1] = self.lines[-1].joined(level)
        else:
            if len(self.lines) == self._most:
                self._each *= 2
                self.lines = [one.joined(two) for one, two in zip(self.lines[::2], self.lines[1::2], strict=True)]
            self.lines.append(level)
        self._num += 1


class Course:
    """The levels of a job's training: of all of it, of each rank (``rank 1``) and of each device, 128 of each at most.

    Where it marks its phases, those of ``train`` count alone, or else of the newest phase."""

    def __init__(self) -> None:
        self.phase, self.counts_steps, self._since = "", False, 0.0
        self._phases: dict[str, dict[tuple[str, str], Levels]] = {}

    def add(self, line: Sample) -> None:
        """Take in a line of the job's memory."""
        self._since = self._since or line.time
        self.phase = line.phase if self.phase != "train" else self.phase
        if line.step and not self.counts_steps:
            self.counts_steps = True
            self._phases.clear()
        step = line.step if self.counts_steps else line.time - self._since
        parts = self._phases.setdefault(line.phase, defaultdict(Levels))
        shared, unused = line.resident_bytes - line.low_bytes, line.reserved_bytes - line.low_bytes
        for rank, low in {"": line.low_bytes, **line.ranks}.items():  # all ranks share one limit
            level = Level(line.time, step, low, line.peak_bytes, low + shared, low + unused)
            parts[rank and f"rank {rank}", ""].add(level)
        for place, low in line.allocated_bytes.items():
            parts["", place].add(Level(line.time, step, low, max(low, line.device_bytes.get(place, 0))))

    @property
    def parts(self) -> Mapping[tuple[str, str], Sequence[Level]]:
        """The levels by who and place, each empty for the whole job and for host memory."""
        return {part: levels.lines for part, levels in self._phases.get(self.phase, {}).items()}


@dataclass(frozen=True)
class Growth:
    """What rises, by how many bytes a step (a second), and when it meets its limit."""

    kind: Kind
    slope: float  # bytes for each unit
    least: float  # the range of that slope
    most: float
    unit: Literal["step", "second"] = "step"
    who: str = ""  # such as "rank 1"; empty for the whole job
    phase: str = ""
    place: str = ""  # the device; empty for host memory
    limit_bytes: int = 0
    at: float = 0.0  # the unit in which it meets the limit, counted from the training's start
    at_time: float = 0.0  # the same in Unix seconds
    more_bytes: int = 0  # of copies and reserved memory: the most that can still come
    is_sure: bool = False  # it outlived an epoch and a third of the training; a buffer would be full by then

    @property
    def text(self) -> str:
        """Return it as a sentence for people, while the job runs."""
        when = time.strftime("%H:%M", time.localtime(self.at_time))
        when = f"step {self.at:,.0f}, about {when}" if self.unit == "step" else when
        meets = f"at this rate it meets its limit of {format_bytes(self.limit_bytes)} at {when}"
        said, to_come = f"grows{'' if self.is_sure else ' so far'} by", ""
        if self.kind == "growth":
            meets += f". {_ADVICE if self.is_sure else 'It may still level off.'}"
        else:
            said, meets, to_come = _SAID[self.kind], f"{meets}.", f", at most {format_bytes(self.more_bytes)} more"
        return f"{self._say(said)}{to_come}; {meets}"

    @property
    def past(self) -> str:
        """Return what was measured, once the job has ended."""
        return self._say(_SAID[self.kind])

    def _say(self, what: str) -> str:
        who = f"{self.who or 'it'}{' on ' + self.place if self.place else ''}"
        slope, least, most = (format_bytes(round(size)) for size in (self.slope, self.least, self.most))
        return f"{who} {what} {slope} a {self.unit}{' in ' + self.phase if self.phase else ''} ({least} to {most})"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return asdict(self) | {"text": self.text, "past": self.past}


def find_growth(levels: Sequence[Level], limit_bytes: int, *, epoch_steps: int = 0, steps: int = 0) -> Growth | None:
    """Return what rises evenly and meets the limit before the end of all ``steps``; None if nothing does. ``levels``
    are of one process or of all, none of a validation. Steps are 0 if not known."""
    if not levels or not limit_bytes:
        return None
    now, first = levels[-1].step, levels[0].step
    left = limit_bytes - max(one.peak for one in levels[-max(1, len(levels) // 10) :])
    epoch_steps = epoch_steps if not steps or epoch_steps < steps else 0  # 0 where there is but one
    to_come = (first + epoch_steps if now < first + epoch_steps else steps or math.inf) - now
    for rise, seen, low in _rises(levels, (0.75, 0.4), epoch_steps, left, to_come):
        kind, more = _kind_of(levels)
        if len(seen) < _LEAST_LEVELS or (kind != "growth" and more <= left):
            continue
        is_sure = kind == "growth" and _has_settled(levels, epoch_steps, steps) and not _fell(levels[: -len(seen)], low)
        is_sure = is_sure and _judge(low, left, to_come, _SURE) is not None
        to_limit = left / rise.slope
        at_time = levels[-1].time + to_limit * (levels[-1].time - levels[0].time) / ((now - first) or 1)
        found = Growth(kind, rise.slope, rise.least, rise.most, limit_bytes=limit_bytes, more_bytes=more)
        return replace(found, at=now + to_limit, at_time=at_time, is_sure=is_sure)
    return None


def explain_death(levels: Sequence[Level], limit_bytes: int, *, epoch_steps: int = 0, steps: int = 0) -> Cause:
    """Return whether a job that ran out of memory grew, or was too large; arguments as of `find_growth`."""
    if len(levels) < 16 or levels[-1].step - levels[0].step < 12:
        return "open"
    epoch_steps = epoch_steps if not steps or epoch_steps < steps else 0
    passed, first = levels[-1].step - levels[0].step, levels[0].step
    start = next(one.low for one in levels if one.step >= first + 0.15 * passed)
    room = limit_bytes - start - median(one.peak - one.low for one in levels)
    for rise, _, low in _rises(levels, (0.85, 0.45, 0.25), epoch_steps, 0, math.inf):
        if rise.late >= 0.7 and low[-1][1] - low[0][1] >= 0.5 * room:
            kind, _ = _kind_of(levels)
            return "open" if kind == "growth" and not _has_settled(levels, epoch_steps, steps, epochs=1) else kind
    return "open" if passed < epoch_steps else "size"


def _rises(
    levels: Sequence[Level], shares: Sequence[float], epoch_steps: int, left: float, to_come: float
) -> Iterator[tuple[_Rise, Sequence[Level], Sequence[tuple[float, int]]]]:
    """Yield the even rises in the last shares of a course that fill what is left, with their levels and floors. Past
    the first of several epochs, in which caches of the data fill, it must rise by itself, and from epoch to epoch."""
    now, first = levels[-1].step, levels[0].step
    later = [one for one in levels if one.step >= first + epoch_steps] if epoch_steps else []
    for share in shares:
        seen = [one for one in levels if one.step >= max(_FIRST_STEPS, now - share * (now - first))]
        low = _floors(seen, _PIECES)
        if not (rise := _judge(low, left, to_come)):
            continue
        own = _floors(later[-len(seen) :], 3) if len(later) >= 12 else []
        epochs = _floors([one for one in levels if one.step > now - 2 * epoch_steps], 2)
        pairs = [*pairwise(own), *pairwise(epochs)]
        if not later or (own and all(b[1] - a[1] > max(0, 0.4 * rise.slope * (b[0] - a[0])) for a, b in pairs)):
            yield rise, seen, low


def _has_settled(levels: Sequence[Level], epoch_steps: int, steps: int, epochs: int = 2) -> bool:
    """Return whether what a process fills at its start, such as a cache or a buffer, would be full by now."""
    first, passed = levels[0].step, levels[-1].step - levels[0].step
    part = _SETTLED * (steps - first) if steps else math.inf
    return passed >= max(epoch_steps, part) or passed >= epochs * epoch_steps > 0


def _fell(before: Sequence[Level], low: Sequence[tuple[float, int]]) -> bool:
    """Return whether it held more before than where its rise begins: what a collector or the end of an epoch frees."""
    most = max((size for _, size in _floors(before, max(1, min(8, len(before) // 4)))), default=0)
    return most > low[0][1] + 0.3 * (low[-1][1] - low[0][1])


class _Rise(NamedTuple):
    slope: float
    least: float
    most: float
    late: float  # the later half of the rise as a part of the earlier one, at most 1


def _floors(levels: Sequence[Level], pieces: int) -> list[tuple[float, int]]:
    """Return the lowest (step, size) of each of equally long pieces; empty if one has fewer than two levels."""
    made = sorted(one.step for one in levels) or [0.0]  # ranks begin again
    first, length = made[0], made[-1] - made[0] or 1
    found: list[list[Level]] = [[] for _ in range(pieces)]
    for one in levels:
        found[min(pieces - 1, int((one.step - first) / length * pieces))].append(one)
    if any(len(one) < 2 for one in found):
        return []
    return [(low.step, low.low) for low in (min(one, key=lambda level: level.low) for one in found)]


def _judge(low: Sequence[tuple[float, int]], left: float, to_come: float, decay: float = _EARLY) -> _Rise | None:
    """Return the rise of floors, if it is even and fills what is left also if it decays as it has so far."""
    gaps = [later[1] - one[1] for one, later in pairwise(low)]
    if not gaps:
        return None
    usual, half = median(gaps), len(gaps) // 2
    if min(gaps) <= 0.15 * usual or max(gaps) > 3 * usual or sum(gaps) < max(MIB, 0.002 * low[0][1]):
        return None
    slopes = sorted((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(low, 2) if b[0] > a[0])
    slope, late = median(slopes), min(1.0, sum(gaps[-half:]) / sum(gaps[:half]))
    span, q = half * (low[-1][0] - low[0][0]) / len(gaps), late - decay
    if left > 0:
        if q <= 0 or left > slope * to_come:
            return None
        if left > slope * late * span * q * (1 - q ** (to_come / span)) / (1 - q):
            return None
    return _Rise(slope, slopes[len(slopes) // 8], slopes[-1 - len(slopes) // 8], late)


def _kind_of(levels: Sequence[Level]) -> tuple[Kind, int]:
    """Return what rises, and of what must end the most that can still come."""
    number, now = max(2, len(levels) // 4), levels[-1]
    names = ("low", "resident", "reserved")
    old, new = levels[number : 2 * number] or levels, levels[-number:]
    rose = {one: min(getattr(x, one) for x in new) - min(getattr(x, one) for x in old) for one in names}
    if now.resident and rose["resident"] < 0.5 * rose["low"]:
        return "copies", now.resident - now.low
    if now.reserved and rose["reserved"] < 0.5 * rose["low"]:
        return "reserved", now.reserved - now.resident
    return "growth", 0
