"""Forecasts the footprint of a job from jobs that were measured."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import replace
from statistics import StatisticsError, linear_regression
from typing import NamedTuple

from memfit.errors import ConfigError
from memfit.jobs._job import Job
from memfit.memory import Footprint
from memfit.units import parse_bytes

#: A line needs this number of jobs, and uses at most the last 64.
_LEAST_POINTS, _MOST_POINTS = 4, 64
#: A line counts if its largest error is within this share of the largest peak.
_GOOD = 0.25
#: The square of a larger number would overflow.
_LARGEST = 1e15
#: Names a job's declared size among its numbers.
_DECLARED = "(declared)"

_Key = tuple[str, ...]
#: A straight line: its largest error, its slope and its offset.
_Fit = tuple[float, float, float]
_NO_LINE: _Fit = (math.inf, 0.0, 0.0)


class Line(NamedTuple):
    """A peak on a straight line through so many jobs, and the line's largest error, in bytes."""

    peak_bytes: float
    error_bytes: float
    num_jobs: int


class Forecast:
    """The measured footprints of a run's jobs, as a forecast for other jobs of the same stage.

    The first of these that is known counts:

    1. what an earlier job with the same parameters took;
    2. the straight line that peaks follow over one number: a parameter, or the declared size;
    3. the job's declared size, if it is not one for the whole stage;
    4. the most that a job took with the same names (parameters that are no numbers), else any job of its stage.
    """

    def __init__(self) -> None:
        self._largest: dict[_Key, Footprint] = {}
        self._points: defaultdict[_Key, deque[tuple[float, int]]] = defaultdict(lambda: deque(maxlen=_MOST_POINTS))
        self._lines: dict[_Key, _Fit] = {}
        self._declared: defaultdict[str, set[int]] = defaultdict(set)

    def learn(self, job: Job, footprint: Footprint, *, is_final: bool = True) -> None:
        """Learn what a job took; one that still runs adds no point to a line."""
        for key in _keys(job):
            known = self._largest.get(key)
            self._largest[key] = footprint if known is None else known.merge(footprint)
        if job.footprint is not None:
            self._declared[job.stage].add(job.footprint.private_bytes)
        for name, number in _numbers(job).items() if is_final else ():
            key = (*_keys(job)[1], name)
            self._points[key].append((number, footprint.private_bytes))
            self._lines[key] = _fit(self._points[key])

    def predict(self, job: Job) -> Footprint | None:
        """Return what the job will take, measured on similar jobs or declared; None when nothing is known."""
        same, kind, stage = _keys(job)
        if same in self._largest:
            return self._largest[same]
        found = self._largest.get(kind) or self._largest.get(stage)
        line = self.extrapolate(job)
        if found is not None and line is not None:
            return replace(found, private_bytes=max(0, math.ceil(line.peak_bytes + line.error_bytes)))
        return job.footprint if self._has_own_hint(job) else found or job.footprint

    def extrapolate(self, job: Job) -> Line | None:
        """Return what the best straight line through similar jobs says of a job; None without a good line."""
        kind = _keys(job)[1]
        lines = [(*self._lines.get((*kind, name), _NO_LINE), number, name) for name, number in _numbers(job).items()]
        error, slope, offset, number, name = min(lines, default=(*_NO_LINE, 0.0, ""))
        if error == math.inf:
            return None
        return Line(slope * number + offset, error, len(self._points[(*kind, name)]))

    def _has_own_hint(self, job: Job) -> bool:
        """True if its declared size is its own, not one for the whole stage."""
        if not job.params or job.footprint is None:
            return False
        declared = self._declared[job.stage]
        return len(declared | {job.footprint.private_bytes}) > 1 or not declared

    def is_inferred(self, job: Job) -> bool:
        """True if the forecast comes from similar jobs, not from one with its parameters or a declared size."""
        expected = self.predict(job)
        is_measured = expected is not None and expected.method == "measured"
        return is_measured and bool(job.params) and _keys(job)[0] not in self._largest


def _fit(points: Collection[tuple[float, int]]) -> _Fit:
    """Return the straight line through the peaks of jobs over one of their numbers, if there is a good one."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if len(xs) < _LEAST_POINTS:
        return _NO_LINE
    try:
        slope, offset = linear_regression(xs, ys)
    except StatisticsError:  # all have the same number
        return _NO_LINE
    error = max(abs(y - slope * x - offset) for x, y in points)
    return (error, slope, offset) if error <= _GOOD * max(ys) else _NO_LINE


def _keys(job: Job) -> tuple[_Key, _Key, _Key]:
    """Return a job's stage with all its parameters, with its names alone, and with none."""
    numbers = _numbers(job)
    texts = {name: f"{name}={value}" for name, value in sorted(job.params.items())}
    names = [text for name, text in texts.items() if name not in numbers]
    return (job.stage, "all", *texts.values()), (job.stage, "names", *names), (job.stage,)


def _numbers(job: Job) -> dict[str, float]:
    """Return a job's parameters that are numbers or sizes, and its declared size."""
    numbers = {name: number for name, value in job.params.items() if (number := _number(value)) is not None}
    return numbers | ({_DECLARED: float(job.footprint.private_bytes)} if job.footprint is not None else {})


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        try:
            value = float(parse_bytes(text))
        except ConfigError:
            return None
    return value if abs(value) <= _LARGEST else None  # not for a NaN either
