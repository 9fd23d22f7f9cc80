"""What a job will take, told by those like it that were measured."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from operator import mul

from memfit.errors import ConfigError
from memfit.jobs._job import Job
from memfit.memory import Footprint
from memfit.units import parse_bytes

#: Up to so many parameters every subset of them is kept; above it only the large ones, single ones and none.
_MOST_FOR_ALL_SUBSETS = 5
#: A line through fewer jobs than this says nothing; its error is taken from so many of the last.
_LEAST_POINTS, _MOST_POINTS = 4, 64
#: A line is believed when its largest error is within this share of what the jobs took.
_GOOD = 0.25
#: A larger number is a name: its squares would overflow.
_LARGEST = 1e15
#: The feature that stands for a job's declared size, and the one that stands for its stage.
_DECLARED, _STAGE = "(declared)", "(stage)"

_Key = tuple[tuple[str, str], ...]


class Forecast:
    """The measured footprints of a run's jobs, and what they say about the others of the same stage.

    Where the peaks of jobs of one kind (those that share all parameters that are no numbers) follow one of their
    numbers, or their declared size, along a straight line, that line and its largest error speak. Otherwise jobs that
    share the most parameter values speak for each other, the largest of them for all. A declared size is a hint for a
    job with which no measured one shares a value; where each job was declared apart, until there is a line.

    Example:
        >>> forecast = Forecast()
        >>> for size in (10, 20, 30, 40):
        ...     job = Job("j", command=("true",), params={"model": "a", "size": str(size)})
        ...     forecast.learn(job, Footprint(100 + size))
        >>> forecast.predict(Job("k", command=("true",), params={"model": "a", "size": "100"})).private_bytes
        200
    """

    def __init__(self) -> None:
        self._largest: dict[_Key, Footprint] = {}
        self._lines: dict[_Key, dict[str, _Line]] = {}
        self._declared: dict[str, set[int]] = {}
        self._told: dict[int, tuple[Job, Footprint | None]] = {}

    def learn(self, job: Job, footprint: Footprint, *, is_final: bool = True) -> None:
        """Take in what a job took; of one that still runs, for those that share its parameters alone."""
        self._told.clear()
        for subset in _subsets(job):
            known = self._largest.get(subset)
            if known is None or footprint.private_bytes > known.private_bytes or footprint.device_bytes:
                self._largest[subset] = footprint if known is None else known.merge(footprint)
        if job.footprint is not None:
            self._declared.setdefault(job.stage, set()).add(job.footprint.private_bytes)
        if not is_final:
            return
        kind, numbers = _features(job)
        lines = self._lines.setdefault(kind, {})
        for name, value in numbers.items():
            lines.setdefault(name, _Line()).take(value, footprint.private_bytes)

    def predict(self, job: Job) -> Footprint | None:
        """What the job will take: measured on its like, else as declared; None when nothing is known."""
        job_told, told = self._told.get(id(job), (None, None))
        if job_told is not job:  # asked for several times between two ends
            told = self._predict(job)
            self._told[id(job)] = job, told
        return told

    def _predict(self, job: Job) -> Footprint | None:
        found: Footprint | None = None
        num_shared, num_all = 0, len(job.params) + 1
        for subset in _subsets(job):
            if found is not None and len(subset) < num_shared:
                break
            known = self._largest.get(subset)
            if known is not None:
                found, num_shared = known if found is None else found.merge(known), len(subset)
        if found is not None and num_shared < num_all:
            along = self._along_a_line(job)
            if along is not None:
                return replace(found, private_bytes=along)
        return job.footprint if self._has_own_hint(job, num_shared == num_all) else found or job.footprint

    def _has_own_hint(self, job: Job, has_twin: bool) -> bool:
        """True if its declared size is its own, not one for the whole stage, and no job with its parameters ran."""
        if not job.params or job.footprint is None or has_twin:
            return False
        declared = self._declared.get(job.stage, set())
        return len(declared | {job.footprint.private_bytes}) > 1 or not declared

    def is_inferred(self, job: Job) -> bool:
        """True if the forecast comes from similar jobs, not from one with its parameters or a declared size."""
        expected = self.predict(job)
        is_measured = expected is not None and expected.method == "measured"
        return is_measured and bool(job.params) and next(_subsets(job)) not in self._largest

    def _along_a_line(self, job: Job) -> int | None:
        """What the best line of its kind says; None when there is no good one."""
        kind, numbers = _features(job)
        lines = self._lines.get(kind, {})
        good = [(line.error, name) for name, line in lines.items() if name in numbers and line.is_good]
        if not good:
            return None
        error, name = min(good)
        return max(0, math.ceil(lines[name].at(numbers[name]) + error))


@dataclass
class _Line:
    """A least-squares line through the last peaks of one kind of job over one of its numbers."""

    points: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_MOST_POINTS))
    slope: float = 0.0
    offset: float = 0.0
    error: float = math.inf
    largest: int = 0

    def take(self, x: float, y: int) -> None:
        """Take in a point and fit anew."""
        self.points.append((x, y))
        xs, ys = zip(*self.points, strict=True)
        number, self.largest = len(xs), max(ys)
        mean_x, mean_y = sum(xs) / number, sum(ys) / number
        self.error = math.inf
        if number < _LEAST_POINTS:
            return
        far_x, far_y = [x - mean_x for x in xs], [y - mean_y for y in ys]
        spread = sum(map(mul, far_x, far_x))
        if spread > 0:
            slope = self.slope = sum(map(mul, far_x, far_y)) / spread
            self.offset = mean_y - slope * mean_x
            self.error = max([abs(y - slope * x) for x, y in zip(far_x, far_y, strict=True)])

    @property
    def is_good(self) -> bool:
        return self.error <= _GOOD * self.largest

    def at(self, x: float) -> float:
        return self.offset + self.slope * x


def _features(job: Job) -> tuple[_Key, dict[str, float]]:
    """Return a job's kind (its stage and the parameters that are no numbers), and its numbers and declared size."""
    numbers = {name: number for name, value in job.params.items() if (number := _number(value)) is not None}
    if job.footprint is not None:
        numbers[_DECLARED] = float(job.footprint.private_bytes)
    names = {name: value for name, value in job.params.items() if name not in numbers}
    return ((_STAGE, job.stage), *sorted(names.items())), numbers


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        try:
            value = float(parse_bytes(text))
        except ConfigError:
            return None
    return value if abs(value) <= _LARGEST else None  # not for a NaN either


def _subsets(job: Job) -> Iterator[_Key]:
    """A job's stage with each subset of its parameters, the largest first, the empty one last."""
    items = tuple(sorted(job.params.items()))
    sizes: Iterable[int] = range(len(items), -1, -1)
    if len(items) > _MOST_FOR_ALL_SUBSETS:
        sizes = dict.fromkeys((len(items), len(items) - 1, 1, 0))
    for size in sizes:
        for chosen in combinations(items, size):
            yield (_STAGE, job.stage), *chosen
