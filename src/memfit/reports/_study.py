"""A study of trials as its records tell it: followed while it runs, and summed up as JSON."""

from __future__ import annotations

import math
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memfit.reports._numbers import format_number, is_number, short_path
from memfit.reports._rates import wilson_interval
from memfit.reports._runs import has_supervisor
from memfit.rundir import RunDir, RunState, finite
from memfit.units import format_duration, parse_bytes

if TYPE_CHECKING:
    from memfit.tuning import Searched, Study, Trial

#: Trials that say more than the number that they reached.
_FAILED_TRIALS = frozenset({"failed", "out_of_memory", "timeout", "infeasible"})
_ORDER = ("completed", "pruned", "failed", "out_of_memory", "timeout", "infeasible", "running", "stopped")
_RATES = {"completed_or_pruned": ("completed", "pruned"), "failed": ("failed",), "out_of_memory": ("out_of_memory",)}
_SIZE = re.compile(r"\d+(?:\.\d+)? (?:[KMGT]i)?B\b")


class StudyView:
    """A study of trials at one moment; ``canaries`` are the short trials before the others."""

    def __init__(self, state: RunState, study: Study) -> None:
        from memfit.tuning import Trial  # not by those that look at no study

        self.run, self.study = state.run, study
        found = [Trial.from_dict(one, self.run.path / "trials" / f"{name}.json") for name, one in state.trials.items()]
        self.trials = sorted((one for one in found if one.number is not None), key=lambda one: one.number or 0)
        self.canaries = sorted((one for one in found if one.number is None), key=lambda one: one.epochs or 0)

    @property
    def ranked(self) -> list[Trial]:
        """The completed trials, the best first; of equal ones the earlier one is better."""
        sign = -1 if self.study.settings.direction == "maximize" else 1
        done = [one for one in self.trials if one.state == "completed" and one.value is not None]
        return sorted(done, key=lambda one: sign * (one.value or 0.0))

    @property
    def ended(self) -> list[Trial]:
        """The trials that will not run any more."""
        return [one for one in self.trials if one.is_over]

    @property
    def seconds_per_trial(self) -> float | None:
        """How long a trial took on average, of those that ran and ended; None before the first."""
        ran = [took for one in self.ended if (took := float(one.measured.get("seconds") or 0.0)) > 0]
        return statistics.fmean(ran) if ran else None

    @property
    def seconds_left(self) -> float | None:
        """How long the rest of the study takes, as trials took so far; None while that is not known."""
        settings, mean = self.study.settings, self.seconds_per_trial
        num_left = max(0, settings.n_trials - len(self.ended))
        if not num_left:
            return 0.0
        return None if mean is None else mean * max(1.0, num_left / settings.num_slots)

    def counts(self, *, is_live: bool = True) -> dict[str, int]:
        """Return how many trials are in which state; one that has not ended is ``stopped`` if no supervisor runs."""
        open_state = "running" if is_live else "stopped"
        found = Counter(str(one.state) if one.is_over else open_state for one in self.trials)
        return {state: found[state] for state in _ORDER if found[state]}

    def headline(self) -> str:
        """Return how far the study is, in a line."""
        settings = self.study.settings
        parts = [f"trials {explain_counts(self.counts(), len(self.ended), settings.n_trials)}"]
        if self.ranked:
            best = self.ranked[0]
            parts.append(f"best {settings.number} {format_number(best.value or 0.0)} ({best.name})")
        if self.seconds_left:
            parts.append(f"about {format_duration(self.seconds_left, short=True)} left")
        return "; ".join(parts)

    def describe(self, name: str) -> str:
        """Return how a trial ended, in a line; empty if it has not. A pruned one is compared as by the pruner."""
        trial = next((one for one in (*self.trials, *self.canaries) if one.name == name), None)
        if trial is None or not trial.is_over:
            return ""
        if trial.state == "pruned" and trial.intermediate:
            return f"{name} {self._explain_pruned(trial)}"
        if trial.state != "completed" or trial.value is None:
            return f"{name} {trial.state}: {trial.cause}"
        best = " (best)" if self.ranked and self.ranked[0] is trial else ""
        return f"{name} completed: {self.study.settings.number} {format_number(trial.value)}{best}"

    def _explain_pruned(self, trial: Trial) -> str:
        settings, at = self.study.settings, max(trial.intermediate)
        is_more_better = settings.direction == "maximize"
        own = (max if is_more_better else min)(trial.intermediate.values())
        seen = [one for one in self.trials[: trial.num_seen] if one.state == "completed" and at in one.intermediate]
        text = f"pruned at epoch {at}: {settings.report or settings.number} {format_number(own)}"
        if not seen:
            return text
        median = statistics.median(one.intermediate[at] for one in seen)
        return f"{text}, {'below' if is_more_better else 'above'} the median {format_number(median)}"

    def summarize(self) -> dict[str, Any]:
        """Return the study as JSON: sizes in bytes, durations in seconds."""
        study, ended = self.study, self.ended
        states = Counter(str(one.state) for one in ended)
        found = {
            "name": study.name,
            "objective": study.settings.objective,
            "number": study.settings.number,
            "report": study.settings.report or study.settings.number,
            "direction": study.settings.direction,
            "n_trials": study.settings.n_trials,
            "num_ended": len(ended),
            "counts": self.counts(is_live=has_supervisor(self.run)),
            "rates": {name: _rate(sum(states[one] for one in of), len(ended)) for name, of in _RATES.items()},
            "best": _best(self, states["completed"] + states["pruned"]) if self.ranked else None,
            "seconds_per_trial": self.seconds_per_trial,
            "seconds_left": self.seconds_left,
            "canaries": [_row(one) for one in self.canaries],
            "trials": [_row(one) for one in self.trials],
            "failures": [_failure(self.run, one) for one in self.trials if one.state in _FAILED_TRIALS],
            "refused": _refused(self.trials, study.settings.space),
            "differs": [{"trial": one.name, "why": why} for one in self.trials if (why := _why_differs(one))],
        }
        return dict(finite(found))


def study_of(state: RunState, known: Study | None = None) -> StudyView | None:
    """Return the study that a run is; None if it is none, or has not begun. ``known`` are its settings."""
    if state.kind != "tune" or (known is None and not (state.run.path / "study.json").exists()):
        return None
    from memfit.tuning import Study

    return StudyView(state, known or Study.open(state.run))


def summarize_study(state: RunState) -> dict[str, Any]:
    """Return a study as JSON: its trials by state, rates with their intervals, the best trial, and what failed."""
    from memfit.tuning import Study

    return StudyView(state, Study.open(state.run)).summarize()


def _rate(num: int, n: int) -> dict[str, float]:
    lower, upper = wilson_interval(num, n)
    return {"num": num, "n": n, "lower": lower, "upper": upper}


def _best(view: StudyView, num: int) -> dict[str, Any]:
    """Return the best trial, what the best of ``num`` equally good trials would reach, and whether it beats a canary.

    A trial's error is over its units, less what each unit adds to all trials. Medians, for some trials diverge.
    """
    best, units = view.ranked[0], dict(view.ranked[0].by_unit)
    found = {
        "trial": best.name, "value": best.value, "params": dict(best.params), "by_unit": units, "n": len(units),
        "epochs": best.epochs, "luck": None, "baseline": None,
    }  # fmt: skip
    alike = [one for one in view.ranked if one.by_unit.keys() == units.keys()]
    if len(units) < 2 or len(alike) < 2:
        return found
    middles = {name: statistics.median(one.by_unit[name] for one in alike) for name in units}
    spreads = [statistics.stdev(value - middles[name] for name, value in one.by_unit.items()) for one in alike]
    # A median of squares is below their mean: Wilson and Hilferty (1931). The expected maximum: Blom (1958).
    scale = len(units) * (1 - 2 / (9 * (len(units) - 1))) ** 3 * (1 - 1 / len(alike))
    sign, quantile = 1 if view.study.settings.direction == "maximize" else -1, statistics.NormalDist().inv_cdf
    error, value = sign * statistics.median(spreads) / math.sqrt(scale), best.value or 0.0
    middle = statistics.median(one.value or 0.0 for one in alike)
    shares = (num - 0.375) / (num + 0.25), 0.95 ** (1 / num)
    expected, limit = (middle + error * quantile(share) for share in shares)
    found["luck"] = {"num_trials": num, "expected": expected, "limit": limit, "is_beyond": sign * (value - limit) > 0}
    for one in [one for one in view.canaries if one.value is not None][-1:]:
        reach = abs(error) * math.sqrt(2) * quantile(1 - 0.05 / num)
        found["baseline"] = _row(one) | {"is_beaten": sign * (value - (one.value or 0.0)) > reach}
    return found


def _row(trial: Trial) -> dict[str, Any]:
    most = {name: max(trial.measured.get(name, {}).values(), default=None) for name in ("peaks", "device_peaks")}
    return {
        "trial": trial.name, "state": trial.state, "is_over": trial.is_over, "epochs": trial.epochs,
        "value": trial.value, "params": dict(trial.params), "cause": trial.cause,
        "seconds": trial.measured.get("seconds"), "peak_bytes": most["peaks"],
        "device_peak_bytes": most["device_peaks"],
    }  # fmt: skip


def _failure(run: RunDir, trial: Trial) -> dict[str, Any]:
    more = f"memfit diagnose {shlex.quote(short_path(run.job_dir(trial.job)))}" if trial.job else None
    told = {"state": trial.state, "kind": trial.kind, "cause": trial.cause, "job": trial.job or None}
    return {"trial": trial.name, **told, "command": more}


def _refused(trials: Sequence[Trial], space: Sequence[Searched]) -> dict[str, Any]:
    """Return the draws that cannot run beside the others, for each searched setting."""
    refused = [{"trial": one.name, **draw} for one in trials for draw in one.refused]
    accepted = [one.params for one in trials if one.params]
    drawn = {"refused": [draw["params"] for draw in refused], "accepted": accepted}
    settings = {one.name: {how: _region(one, draws) for how, draws in drawn.items()} for one in space}
    return {
        "num_refused": len(refused),
        "num_drawn": len(refused) + len(accepted),
        "settings": settings if refused else {},
        "smallest": min(refused, key=lambda draw: _size_of(draw["why"]), default=None),
    }


def _size_of(why: str) -> float:
    """Return the bytes that a refused draw needs: the first size of its arithmetic.

    >>> _size_of("train takes at least 1.50 GiB by its estimate; the host has 1.00 GiB")
    1610612736.0
    """
    found = _SIZE.search(why)
    return float(parse_bytes(found[0])) if found else math.inf


def _region(searched: Searched, draws: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    values = [draw[searched.name] for draw in draws if searched.name in draw]
    if not values:
        return None
    if searched.choices is not None:
        return {"values": [one for one in searched.choices if one in values]}
    numbers = [one for one in values if is_number(one) and math.isfinite(one)]
    return {"low": min(numbers), "high": max(numbers)} if numbers else None


def _why_differs(trial: Trial) -> str:
    """Return why a rerun may not repeat a trial exactly; empty if it repeats."""
    if "ran_out" in trial.measured:
        return f"memory ran out inside a step: {trial.measured['ran_out'] or 'the step was done again'}"
    return {
        "out_of_memory": "it ran out of memory; how much was free may differ",
        "timeout": "it met its time limit; a rerun may be faster",
    }.get(trial.state, "")


def explain_counts(counts: Mapping[str, int], num_ended: int, n_trials: int) -> str:
    """Return how many trials have ended, and the states of all.

    >>> explain_counts({"completed": 2, "running": 1}, 2, 40)
    '2 of 40: 2 completed, 1 running'
    """
    told = ", ".join(f"{number} {state}" for state, number in counts.items()) or "none has begun"
    return f"{num_ended} of {n_trials}: {told}"
