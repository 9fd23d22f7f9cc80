"""A study of trials as its records tell it: followed while it runs, as JSON, and as text."""

from __future__ import annotations

import math
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.reports._columns import size_text
from memfit.reports._numbers import format_number, or_dash, short_path
from memfit.reports._parts import Facts, Note, Part, Table
from memfit.rundir import RunDir, RunState, finite, liveness
from memfit.units import format_duration, list_some

if TYPE_CHECKING:
    from memfit.tuning import Trial

_MOST_ROWS = 10  # of more trials, the best so many are printed; so many failures, too
#: Trials that say more than the number that they reached.
_FAILED_TRIALS = frozenset({"failed", "out_of_memory", "timeout", "infeasible"})
_ORDER = ("completed", "pruned", "failed", "out_of_memory", "timeout", "infeasible", "running", "stopped")


class StudyView:
    """A study of trials at one moment; ``canaries`` are the short trials before the others."""

    def __init__(self, state: RunState) -> None:
        from memfit.tuning import Study, Trial  # not by those that look at no study

        self.run, self.study = state.run, Study.open(state.run)
        settings = self.study.settings
        found = [Trial.from_dict(one, self.run.path / "trials" / f"{name}.json") for name, one in state.trials.items()]
        self.trials = sorted((one for one in found if one.number is not None), key=lambda one: one.number or 0)
        self.canaries = sorted((one for one in found if one.number is None), key=lambda one: one.epochs or 0)
        self.ended = [one for one in self.trials if one.is_over]
        #: The completed trials, the best first; of equal ones the earlier one is better.
        self.ranked = [one for one in self.ended if one.state == "completed" and one.value is not None]
        self.ranked.sort(key=lambda one: one.value or 0.0, reverse=settings.direction == "maximize")
        #: How long a trial took on average, of those that ran and ended, and how long the rest takes, if known.
        self.seconds_per_trial: float | None = None
        self.seconds_left: float | None = None
        num_left = max(0, settings.n_trials - len(self.ended))
        if ran := [took for one in self.ended if (took := float(one.measured.get("seconds") or 0.0)) > 0]:
            self.seconds_per_trial = statistics.fmean(ran)
            self.seconds_left = self.seconds_per_trial * max(1.0, num_left / settings.num_slots)
        if not num_left:
            self.seconds_left = 0.0

    def counts(self, *, is_live: bool = True) -> dict[str, int]:
        """Return how many trials are in which state; one that has not ended is ``stopped`` if no supervisor runs."""
        open_state = "running" if is_live else "stopped"
        found = Counter(str(one.state) if one.is_over else open_state for one in self.trials)
        return {state: found[state] for state in _ORDER if found[state]}

    def headline(self) -> str:
        settings = self.study.settings
        parts = [f"trials {_explain_counts(self.counts(), len(self.ended), settings.n_trials)}"]
        if self.ranked:
            best = self.ranked[0]
            parts.append(f"best {settings.number} {format_number(best.value or 0.0)} ({best.name})")
        if self.seconds_left:
            parts.append(f"about {format_duration(self.seconds_left, short=True)} left")
        return "; ".join(parts)

    def summarize(self) -> dict[str, Any]:
        settings = self.study.settings
        found = {
            "name": self.study.name,
            "objective": settings.objective,
            "number": settings.number,
            "report": settings.report or settings.number,
            "direction": settings.direction,
            "n_trials": settings.n_trials,
            "num_ended": len(self.ended),
            "counts": self.counts(is_live=liveness(self.run).is_supervised),
            "best": _best(self) if self.ranked else None,
            "seconds_per_trial": self.seconds_per_trial,
            "seconds_left": self.seconds_left,
            "canaries": [_row(one) for one in self.canaries],
            "trials": [_row(one) for one in self.trials],
            "failures": [
                {"trial": one.name, "state": one.state, "kind": one.kind, "cause": one.cause, "job": one.job or None}
                | {"command": f"memfit diagnose {_quoted(self.run.job_dir(one.job))}" if one.job else None}
                for one in self.trials
                if one.state in _FAILED_TRIALS
            ],
            "refused": _refused(self.trials),
            "differs": [{"trial": one.name, "why": why} for one in self.trials if (why := _why_differs(one))],
        }
        return dict(finite(found))


def study_of(state: RunState) -> StudyView | None:
    """Return the study that a run is; None if it is none, or has not begun."""
    return StudyView(state) if state.kind == "tune" and (state.run.path / "study.json").exists() else None


def summarize_study(state: RunState) -> dict[str, Any]:
    """Return a study as JSON: its trials by state, the best trial, and what failed."""
    return StudyView(state).summarize()


def _best(view: StudyView) -> dict[str, Any]:
    best, units = view.ranked[0], dict(view.ranked[0].by_unit)
    found = {"trial": best.name, "value": best.value, "params": dict(best.params), "by_unit": units}
    return found | {"n": len(units), "epochs": best.epochs}


def _row(trial: Trial) -> dict[str, Any]:
    most = {name: max(trial.measured.get(name, {}).values(), default=None) for name in ("peaks", "device_peaks")}
    return {
        "trial": trial.name, "state": trial.state, "is_over": trial.is_over, "epochs": trial.epochs,
        "value": trial.value, "params": dict(trial.params), "cause": trial.cause,
        "seconds": trial.measured.get("seconds"), "peak_bytes": most["peaks"],
        "device_peak_bytes": most["device_peaks"],
    }  # fmt: skip


def _refused(trials: Sequence[Trial]) -> dict[str, Any]:
    """Return how many draws cannot run, of how many, and the first of them."""
    refused = [{"trial": one.name, **draw} for one in trials for draw in one.refused]
    num_drawn = len(refused) + sum(bool(one.params) for one in trials)
    return {"num_refused": len(refused), "num_drawn": num_drawn, "first": refused[0] if refused else None}


def _why_differs(trial: Trial) -> str:
    """Return why a rerun may not repeat a trial exactly; empty if it repeats."""
    if "ran_out" in trial.measured:
        return f"memory ran out inside a step: {trial.measured['ran_out'] or 'the step was done again'}"
    return {
        "out_of_memory": "it ran out of memory; how much was free may differ",
        "timeout": "it met its time limit; a rerun may be faster",
    }.get(trial.state, "")


def _explain_counts(counts: Mapping[str, int], num_ended: int, n_trials: int) -> str:
    """Return how many trials have ended, and the states of all."""
    told = ", ".join(f"{number} {state}" for state, number in counts.items()) or "none has begun"
    return f"{num_ended} of {n_trials}: {told}"


def _explain_params(params: Mapping[str, Any]) -> dict[str, str]:
    """Return searched settings and their values as text.

    >>> _explain_params({"params.model.layers": 2, "params.lr": 0.00019275993})
    {'model.layers': '2', 'lr': '0.000192760'}
    """
    texts = {name: f"{value:#.6g}" if isinstance(value, float) else str(value) for name, value in params.items()}
    return {name.removeprefix("params."): text for name, text in texts.items()}


def _facts(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "study", f"{summary['name']}: {summary['direction']} {summary['objective']}"
    yield "trials", _explain_counts(summary["counts"], summary["num_ended"], summary["n_trials"])
    if summary["seconds_per_trial"] is not None:
        left = summary["seconds_left"]
        more = f"; about {format_duration(left, short=True)} left" if left else ""
        yield "time", f"{format_duration(summary['seconds_per_trial'])} a trial{more}"
    for at, one in enumerate(summary["canaries"]):
        reached = f": {summary['number']} {format_number(one['value'])}" if one["value"] is not None else ""
        text = f"{one['trial']} {one['state']}{reached or (': ' + one['cause'] if one['cause'] else '')}"
        yield "" if at else "before", text
    if (best := summary["best"]) is not None:
        yield "best", f"{summary['number']} {format_number(best['value'])} ({best['trial']})"
        yield from (("", f"{name} {value}") for name, value in _explain_params(best["params"]).items())
        if best["n"] > 1:
            units = ", ".join(f"{unit} {format_number(value)}" for unit, value in best["by_unit"].items())
            error = statistics.stdev(best["by_unit"].values()) / math.sqrt(best["n"])
            yield "", f"mean of {best['n']}: {units}; standard error {format_number(error)}"
    if (first := (refused := summary["refused"])["first"]) is not None:
        yield "refused", f"{refused['num_refused']} of {refused['num_drawn']} draws cannot run, such as:"
        yield "", f"{first['why']} ({first['trial']})"


def view_study(state: RunState) -> Iterator[Part]:
    """Yield a study: how far it is, its best trials, what failed, and what to do next."""
    study = summarize_study(state)
    yield from (*view_trials(study), Note(""), Facts([*_next_steps(state.run, study)]))


def view_trials(summary: Mapping[str, Any], *, whole: bool = False) -> Iterator[Part]:
    """Yield the summary of a study; a page has the ``whole``: all trials with their settings, in place of the best.

    Beside the best, each cause of failure is said once.
    """
    yield Facts([*_facts(summary)])
    yield from _trials(summary, whole)
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in () if whole else summary["failures"]:
        alike.setdefault((one["state"], one["cause"]), []).append(one)
    for (state, cause), (first, *others) in [*alike.items()][:_MOST_ROWS]:
        same = f"\n  the same: {list_some([one['trial'] for one in others], 4)}" if others else ""
        more = f"\n  {first['command']}" if first["command"] else ""
        yield Note(f"\n{first['trial']} {state}: {cause}{same}{more}", "red")
    differs = summary["differs"] if whole else summary["differs"][:_MOST_ROWS]
    for at, one in enumerate(differs):
        yield Note(("" if at else "\nA rerun may end otherwise:\n") + f"  {one['trial']}: {one['why']}")
    if left := len(summary["differs"]) - len(differs):
        yield f"and {left} more; --json lists all"


def _trials(summary: Mapping[str, Any], whole: bool) -> Iterator[Part]:
    trials = [one for one in summary["trials"] if whole or one["is_over"]]
    done = [one for one in trials if one["state"] == "completed" and one["value"] is not None]
    is_cut = not whole and len(trials) > _MOST_ROWS
    if is_cut:
        sign = -1 if summary["direction"] == "maximize" else 1
        trials = sorted(done, key=lambda one: sign * one["value"])[:_MOST_ROWS]
    if not trials:
        return
    has_why = any(one["cause"] for one in trials)
    sizes = {"peak": "peak_bytes", "device peak": "device_peak_bytes"}
    sizes = {name: key for name, key in sizes.items() if any(one[key] for one in trials)}
    names = dict.fromkeys(name for one in trials for name in _explain_params(one["params"])) if whole else {}
    rows = []
    for one in trials:
        value, params = or_dash(one["value"], format_number), _explain_params(one["params"])
        time, peaks = or_dash(one["seconds"] or None, format_duration), [size_text(one[key]) for key in sizes.values()]
        more = [*(params.get(name, "-") for name in names), *[one["cause"]] * has_why]
        rows.append([one["trial"], one["state"], value, time, *peaks, *more])
    headings = ("trial", "state", summary["number"], "time", *sizes, *names, *["why"] * has_why)
    yield from (Note(""), Table(headings, rows, ("trial", "state", "why"), "trials", fold=("why",)))
    if is_cut:
        yield Note(f"the best {len(trials)} of {len(done)} that completed; memfit report shows all")


def _next_steps(run: RunDir, summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    best = run.path / "best.yaml"
    if summary["num_ended"] < summary["n_trials"] and not liveness(run).is_supervised:
        yield "go on", f"memfit resume {_quoted(run.path)}"
    if best.exists():
        yield "train", f"memfit run {_quoted(best)}"
    yield "see", f"memfit report {_quoted(run.path)}"


def _quoted(path: Path) -> str:
    return shlex.quote(short_path(path))
