"""Follows the steps and the memory of a job's training, and tells when it grows. Its times are those of events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from memfit.files import fits
from memfit.memory import HOST, Course, Growth, Sample, explain_death, find_growth
from memfit.rundir import Event, event_time

_STEP = {"epoch": int, "step": int, "num_steps": int, "num_epochs": (int, type(None))}
_FIRST_LOOK, _LATER_LOOKS = 12, 1.04  # it looks again once there are so many times as many lines
_MOVED, _LEVEL = 0.1, 0.25


@dataclass
class Steps:
    """How many optimizer steps a training has made, by the step events of its rank 0."""

    epoch_steps: int = 0  # 0 as long as nobody knows
    steps: int = 0  # of all epochs; 0 as epoch_steps
    _longest: int = 0
    _before: tuple[float, int] = (0.0, 0)
    _last: tuple[float, int] = (0.0, 0)  # the time and steps of the newest event

    def take(self, event: Event) -> None:
        if not fits(event, _STEP):
            return
        epoch, step, self._longest = event["epoch"], event["step"], max(self._longest, event["num_steps"])
        if step < self._longest:  # who does not know the length of an epoch says what it has made of it
            self.epoch_steps = self._longest
            self.steps = (event["num_epochs"] or 0) * self._longest
        self._before, self._last = self._last, (event_time(event), (epoch - 1) * self._longest + step)

    def at(self, time: float) -> float:
        """Return the steps by now: as many more as between the last two events, at most.

        >>> steps = Steps()
        >>> for at, step in ((10.0, 5), (12.0, 9)):
        ...     steps.take({"time": at, "epoch": 2, "step": step, "num_steps": 10, "num_epochs": 3})
        >>> steps.at(13.0), steps.at(20.0), (steps.epoch_steps, steps.steps)
        (21.0, 23.0, (10, 30))
        """
        (then, made), (last, now) = self._before, self._last
        pace = max(0.0, (now - made) / (last - then)) if 0 < then < last else 0.0
        return now + pace * min(max(0.0, time - last), last - then)


@dataclass
class Growing:
    """Looks for growth as the lines of a job's memory come: of the whole job, each rank, and each device."""

    steps: Steps = field(default_factory=Steps)
    told: Growth | None = None
    _course: Course = field(default_factory=Course)
    _num: int = 0
    _next: float = _FIRST_LOOK
    _limits: Mapping[str, int] = field(default_factory=dict)

    def look(self, line: Sample, read_limits: Callable[[], Mapping[str, int]]) -> bool:
        """Take in a line; return True if growth is told first, or meets its limit at another step than was told."""
        self._course.add(line)
        self._num += 1
        if self._num < self._next:
            return False
        self._next, self._limits = _LATER_LOOKS * self._num, read_limits()
        before, found = self.told, self._find()
        if found is None:
            self.told = None if before and self._is_over(before) else before
            return False
        if before is not None:
            is_same = (found.place, found.is_sure) == (before.place, before.is_sure)
            is_moved = found.unit == before.unit and abs(found.at - before.at) > _MOVED * before.at
            if before.is_sure > found.is_sure or (is_same and not is_moved):
                return False
        self.told = found
        return True

    def _find(self) -> Growth | None:
        """Return what grows, by the rank that does if there is one; the first to meet its limit."""
        ranks: list[Growth] = []
        found: list[Growth] = []
        for (who, place), levels in self._course.parts.items():
            limit, steps = self._limits.get(place or HOST, 0), self.steps
            if grown := find_growth(levels, limit, epoch_steps=steps.epoch_steps, steps=steps.steps):
                if not self._course.counts_steps:
                    grown = replace(grown, unit="second", is_sure=False)
                grown = replace(grown, who=who, place=place, phase=self._course.phase)
                (ranks if who else found).append(grown)
        whole = next((one for one in found if not one.place), None)
        steepest = max(ranks, key=lambda one: one.slope, default=None)
        if steepest and (whole is None or (whole.kind == "growth" and steepest.slope > whole.slope / 2)):
            found = [steepest, *(one for one in found if one is not whole)]
        return min(found, key=lambda one: (not one.is_sure, one.at_time), default=None)

    def _is_over(self, told: Growth) -> bool:
        """Return True if what was told has risen much less since, over as long as a quarter of its course."""
        levels = self._course.parts.get((told.who, told.place), [])
        if not levels:
            return False
        length = (levels[-1].step - levels[0].step) / 4
        last, before = (
            [one.low for one in levels if start * length <= levels[-1].step - one.step <= (start + 0.2) * length]
            for start in (0, 0.8)
        )
        return bool(before) and min(last) - min(before) < _LEVEL * told.slope * length

    def explain(self, is_device: bool) -> str:
        """Return what the death of this job came from if it was of memory, by the name of `explain_death`."""
        found, steps = set(), self.steps
        for (_, place), levels in self._course.parts.items():
            if bool(place) == is_device:
                limit = max(self._limits.get(place or HOST, 0), max(one.peak for one in levels))
                found.add(explain_death(levels, limit, epoch_steps=steps.epoch_steps, steps=steps.steps))
        return next((one for one in ("growth", "copies", "reserved", "size") if one in found), "open")
