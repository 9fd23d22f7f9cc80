"""Forecasts the footprint of a job from jobs that were measured."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import replace

from memfit.jobs._job import Job
from memfit.jobs.policy import Ended, Guess, Params, guess_for, number_of, usual_spread
from memfit.memory import Footprint, reservation_bytes

_MOST_ENDED = 256  # so many jobs that ended are compared with a job, the latest of its stage
#: The most that a job takes of which only running jobs are known, as a multiple of what they took so far.
_RUNNING_FACTOR = 2
_Key = tuple[str, ...]


class Forecast:
    """The measured footprints of a run's jobs, as a forecast for others of the same stage. The first that is known
    counts:

    1. what an earlier job with the same parameters took;
    2. the job's declared size, if it is not one for the whole stage;
    3. the most that a job took with the same names (parameters that are no numbers), else any job of its stage.

    Without walls jobs fail at their limits, so that they get the most that similar ones took.
    """

    def __init__(self, slack: float = 0.0) -> None:
        self.slack, self.has_walls = slack, True
        self._largest: dict[_Key, Footprint] = {}
        self._declared: defaultdict[str, set[int]] = defaultdict(set)
        self._ended: defaultdict[str, deque[tuple[Params, Ended]]] = defaultdict(lambda: deque(maxlen=_MOST_ENDED))
        self._guesses: dict[str, Guess | None] = {}
        self._found: dict[tuple[str, Params], Guess | None] = {}
        self._ended_pairs: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
        self._spreads: dict[str, float | None] = {}
        self._standing: dict[str, tuple[Job, int]] = {}

    def learn(
        self,
        job: Job,
        footprint: Footprint,
        *,
        is_final: bool = True,
        peaked: float = math.inf,
        seconds: float = math.inf,
        cores: float = 0.0,
    ) -> None:
        """Learn what a job took; if it has ended, also when it had reached its peak, its seconds and its cores."""
        self._forget()
        if is_final:
            self._ended_pairs[job.stage] |= _pairs(job)
            self._ended[job.stage].append((_pairs(job), Ended(footprint.private_bytes, peaked, seconds, cores)))
        for key in _keys(job):
            known = self._largest.get(key)
            self._largest[key] = footprint if known is None else known.merge(footprint)
        if job.footprint is not None:
            self._declared[job.stage].add(job.footprint.private_bytes)

    def predict(self, job: Job) -> Footprint | None:
        """Return what the job will take, measured on similar jobs or declared; None when nothing is known."""
        same, kind, stage = _keys(job)
        if same in self._largest:
            return self._largest[same]
        found = self._largest.get(kind) or self._largest.get(stage)
        return job.footprint if self._has_own_hint(job) else found or job.footprint

    def guess(self, job: Job) -> Guess | None:
        """Return what the policy is to think of a job, a slack on top of what was measured, if anything is known."""
        if job.id not in self._guesses:
            self._guesses[job.id] = self._guess(job)
        return self._guesses[job.id]

    def see(self, running: Mapping[str, tuple[Job, int]]) -> None:
        """Learn what the jobs use that run and stand still, by id."""
        if running != self._standing:
            self._standing = dict(running)
            self._forget()

    def _forget(self) -> None:
        self._guesses.clear()
        self._found.clear()
        self._spreads.clear()

    def _guess(self, job: Job) -> Guess | None:
        expected = self.predict(job)
        if expected is None:
            return None
        size = reservation_bytes(expected, self.slack)
        found = self._found_of(job)
        if expected.method == "declared":
            return Guess(size, size) if found is None else replace(found, size=size, most=size, spread=0)
        if found is None:  # measured on jobs that still run: a forecast once they passed each of their phases
            return Guess(size, _RUNNING_FACTOR * size) if job.phases else None
        if _keys(job)[0] in self._largest:
            return replace(found, size=size, most=size, spread=0)
        return found

    def _found_of(self, job: Job) -> Guess | None:
        pairs = _pairs(job) & self._ended_pairs[job.stage]  # the others, such as a seed of its own, decide nothing
        key = (job.stage, pairs)
        if key not in self._found:
            ended = self._ended[job.stage]
            if job.stage not in self._spreads:
                self._spreads[job.stage] = usual_spread(ended)
            standing = [(_pairs(one), used) for one, used in self._standing.values() if one.stage == job.stage]
            self._found[key] = guess_for(
                pairs, ended, standing, self.slack, self._spreads[job.stage], has_walls=self.has_walls
            )
        return self._found[key]

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


def _pairs(job: Job) -> Params:
    return frozenset(job.params.items())


def _keys(job: Job) -> tuple[_Key, _Key, _Key]:
    """Return a job's stage with all its parameters, with its names alone, and with none."""
    texts = {name: f"{name}={value}" for name, value in sorted(job.params.items())}
    names = [text for name, text in texts.items() if number_of(job.params[name]) is None]
    return (job.stage, "all", *texts.values()), (job.stage, "names", *names), (job.stage,)
