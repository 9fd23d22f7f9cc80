"""A study of trials as text: facts, tables, and what to do next."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from memfit.reports._columns import size_text
from memfit.reports._numbers import format_number, or_dash, short_path
from memfit.reports._parts import Cell, Facts, Note, Part, Table, to_text
from memfit.reports._runs import has_supervisor
from memfit.reports._study import explain_counts, summarize_study
from memfit.rundir import RunDir, RunState
from memfit.units import format_duration, list_some

_MOST_ROWS = 10  # of more trials, the best so many are printed; so many failures, too


def explain_rate(rate: Mapping[str, Any]) -> str:
    """Return a rate with its count and its interval.

    >>> explain_rate({"num": 1, "n": 1, "lower": 0.2065, "upper": 1.0})
    '1 of 1 (95 %: 0.21 to 1.00)'
    """
    return f"{rate['num']} of {rate['n']} (95 %: {rate['lower']:.2f} to {rate['upper']:.2f})"


def explain_params(params: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return searched settings and their values as text.

    >>> explain_params({"params.model.layers": 2, "params.lr": 0.00019275993})
    [('model.layers', '2'), ('lr', '0.000192760')]
    """
    texts = (f"{value:#.6g}" if isinstance(value, float) else str(value) for value in params.values())
    return list(zip((name.removeprefix("params.") for name in params), texts, strict=True))


def explain_region(region: Mapping[str, Any] | None) -> str:
    """Return the values of a setting as text.

    >>> explain_region({"low": 2, "high": 6}), explain_region({"values": [32, 64]}), explain_region(None)
    ('2 to 6', '32, 64', '-')
    """
    if region is None:
        return "-"
    if "values" in region:
        return ", ".join(map(str, region["values"]))
    return " to ".join(dict.fromkeys(f"{region[end]:.4g}" for end in ("low", "high")))


def study_facts(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what matters most of a study: names with a text each."""
    yield "study", f"{summary['name']}: {summary['direction']} {summary['objective']}"
    yield "trials", explain_counts(summary["counts"], summary["num_ended"], summary["n_trials"])
    for at, (name, rate) in enumerate(summary["rates"].items() if summary["num_ended"] else ()):
        yield "" if at else "rates", f"{name.replace('_', ' ')} {explain_rate(rate)}"
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
        yield from (("", f"{name} {value}") for name, value in explain_params(best["params"]))
        if best["n"] > 1:
            units = ", ".join(f"{unit} {format_number(value)}" for unit, value in best["by_unit"].items())
            error = statistics.stdev(best["by_unit"].values()) / math.sqrt(best["n"])
            yield "", f"mean of {best['n']}: {units}; standard error {format_number(error)}"
        if (luck := best["luck"]) is None:
            yield "luck", "not known: it takes two trials of several folds or seeds"
        else:
            expected, limit = (format_number(luck[name]) for name in ("expected", "limit"))
            yield "luck", f"by luck alone the best of {luck['num_trials']} would be {expected}; 1 time in 20 {limit}"
            text = "more than luck" if luck["is_beyond"] else "may be luck"
            if base := best["baseline"]:
                text += f"; {'beats' if base['is_beaten'] else 'not shown to beat'} {base['trial']} (own settings"
                text += ")" if base["epochs"] == best["epochs"] else f", {base['epochs']} of {best['epochs']} epochs)"
            yield "", text
    refused = summary["refused"]
    if refused["num_refused"]:
        smallest = refused["smallest"]
        yield "refused", f"{refused['num_refused']} of {refused['num_drawn']} draws cannot run; the smallest:"
        yield "", f"{smallest['why']} ({smallest['trial']})"


def print_study(state: RunState, console: Console) -> None:
    """Print a study: how far it is, its best trials, what failed, and what to do next."""
    summary = summarize_study(state)
    to_text([*view_trials(summary), Note(""), Facts([*next_steps(state.run, summary)])], console)


def view_trials(summary: Mapping[str, Any], *, told: Collection[str] = (), whole: bool = False) -> Iterator[Part]:
    """Yield the summary of a study; the failures of the jobs in ``told`` are left out.

    A page has the ``whole``: all trials with their settings and causes, in place of the best and of each cause once.
    """
    yield Facts([*study_facts(summary)])
    settings = {name.removeprefix("params."): one.values() for name, one in summary["refused"]["settings"].items()}
    if settings:
        rows = [(name, *map(explain_region, regions)) for name, regions in settings.items()]
        yield from (Note(""), Table(("setting", "refused", "accepted"), rows, ("setting",)))
    yield from _trials(summary, whole)
    yield from () if whole else _failures([one for one in summary["failures"] if one["job"] not in told])
    differs = summary["differs"] if whole else summary["differs"][:_MOST_ROWS]
    for at, one in enumerate(differs):
        yield Note(("" if at else "\nA rerun may end otherwise:\n") + f"  {one['trial']}: {one['why']}")
    yield from _more(0 if whole else len(summary["differs"]))


def _trials(summary: Mapping[str, Any], whole: bool) -> Iterator[Part]:
    """Yield all trials if they are few or the ``whole`` is wanted, or the best ones."""
    trials = [one for one in summary["trials"] if whole or one["is_over"]]
    done = [one for one in trials if one["state"] == "completed"]
    is_cut = not whole and len(trials) > _MOST_ROWS
    if is_cut:
        sign = -1 if summary["direction"] == "maximize" else 1
        trials = sorted(done, key=lambda one: sign * one["value"])[:_MOST_ROWS]
    if not trials:
        return
    sizes = {"peak": "peak_bytes", "device peak": "device_peak_bytes"}
    sizes = {name: key for name, key in sizes.items() if any(one[key] for one in trials)}
    names = dict.fromkeys(name for one in trials for name, _ in explain_params(one["params"])) if whole else {}
    best, values = summary["best"], [one["value"] for one in done if one["value"] is not None]
    reach = 2 * abs(best["value"] - statistics.median(values)) if best and values else 0.0
    rows = list[list[Cell]]()
    for one in trials:
        text, params = or_dash(one["value"], format_number), dict(explain_params(one["params"]))
        is_ranked = best is not None and one["value"] is not None  # its bar is whole for the best, half for the median
        value: Cell = (text, max(0.0, 1 - abs(best["value"] - one["value"]) / (reach or 1.0))) if is_ranked else text
        time, peaks = or_dash(one["seconds"] or None, format_duration), [size_text(one[key]) for key in sizes.values()]
        more = [*(params.get(name, "-") for name in names), *[one["cause"]] * whole]
        rows.append([one["trial"], one["state"], value, time, *peaks, *more])
    headings = ("trial", "state", summary["number"], "time", *sizes, *names, *["why"] * whole)
    yield from (Note(""), Table(headings, rows, ("trial", "state", "why"), "trials"))
    if is_cut:
        yield Note(f"the best {len(trials)} of {len(done)} that completed; memfit report shows all")


def _failures(failures: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    """Yield each cause of failure once, with the trials that failed alike."""
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in failures:
        alike.setdefault((one["state"], one["cause"]), []).append(one)
    for (state, cause), (first, *others) in list(alike.items())[:_MOST_ROWS]:
        kind = f" ({first['kind']})" if first["kind"] not in ("", state) else ""
        yield Note(f"\n{first['trial']} {state}{kind}: {cause}", "red")
        if others:
            yield Note(f"  the same: {list_some([one['trial'] for one in others], 4)}")
        if first["command"]:
            yield Note(f"  {first['command']}")
    yield from _more(len(alike))


def _more(num: int) -> Iterator[Part]:
    if num > _MOST_ROWS:
        yield Note(f"and {num - _MOST_ROWS} more; --json lists all")


def next_steps(run: RunDir, summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the commands that follow."""
    best = run.path / "best.yaml"
    if summary["num_ended"] < summary["n_trials"] and not has_supervisor(run):
        yield "go on", f"memfit resume {_quoted(run.path)}"
    if best.exists():
        yield "train", f"memfit run {_quoted(best)}"
    yield "see", f"memfit report {_quoted(run.path)}"


def _quoted(path: Path) -> str:
    return shlex.quote(short_path(path))
