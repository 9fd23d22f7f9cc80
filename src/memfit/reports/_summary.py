"""A run's closing summary, from its directory alone."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from memfit.errors import MemfitError
from memfit.files import fits, read_json
from memfit.memory import Footprint
from memfit.reports._columns import BAD, COLUMNS, columns_of, short_names, varied_params
from memfit.reports._curves import PLACES, read_reported
from memfit.reports._diagnosis import explain_in_a_line
from memfit.reports._numbers import (
    format_column,
    format_number,
    is_number,
    metrics_of,
    or_dash,
    short_path,
    summarize_metrics,
)
from memfit.reports._parts import Facts, Note, Part, Table
from memfit.rundir import JobState, RunDir, RunState, StageState, finite, show_state
from memfit.units import format_bytes, format_count, format_duration, list_some

_MOST_LINES, _MOST_RANKS = 60, 16  # so many commands, and ranks of one, have a row
_MOST_RUNS = 50  # the newest runs of an experiment, whose kills are counted
#: Causes in a log that say less than the exit code and the kernel's counters.
_TELLS_LESS = frozenset({"unknown", "killed", "terminated", "recovered"})
_REPEATED = frozenset({"fold", "seed"})  # parameters that repeat a training: a mean over them says something
_LEAST_WAIT = 0.02  # waits below this share of the time are left out
_WAITED_FOR = {
    "memory": "for memory",
    "device": "for a device",
    "cores": "for a core",
    "max_parallel": "because of max_parallel",
    "measuring": "while one was measured",
    "others": "for memory that others hold",
}


def summarize(state: RunState) -> dict[str, Any]:
    """Return the summary as JSON: sizes in bytes, durations in seconds, null for a number that is not finite."""
    jobs, reported = [*state.jobs.values()], read_reported(state)
    plain = "kind state most_at_once wall_seconds counts num_restarts outgrown num_gave_way"
    found = {
        "run": str(state.run.path),
        **{name: getattr(state, name) for name in plain.split()},
        "why": state.outcome.get("why") or "",
        "budget": dict(state.budget),
        "plan": state.run.plan,
        "planned": list(state.planned.values()),
        "stages": [_stage(state, name) for name in state.stage_names] if state.kind != "commands" else [],
        "cpu_seconds": sum(job.cpu_seconds for job in jobs),
        "waited_seconds": dict(state.waits),
        "host_cpu": dict(state.cpu),
        "jobs": [_job(state, job) | {"reported": reported.get(job.id, {})} for job in jobs],
        "kills": _count_kills(state.run),
        "forecast_error": _forecast_error(jobs),
    }
    return dict(finite(found))


def _stage(state: RunState, name: str) -> dict[str, Any]:
    stage, units = state.stages.get(name, StageState()), state.units[name]
    found = {"name": name, "counts": Counter(units.values()), "units": len(units), "why": stage.why}
    metrics = summarize_metrics([metrics_of(job.result) for job in state.jobs.values() if job.stage == name])
    means = {name: {"mean": mean, "sd": sd, "n": n} for name, (mean, sd, n) in metrics.items()}
    return found | {"saved_seconds": stage.saved_seconds, "metrics": means}


def _job(state: RunState, job: JobState) -> dict[str, Any]:
    more: dict[str, Any] = {"epoch": job.epoch.get("epoch"), "epoch_memory": job.epoch.get("memory")}
    more |= {"log": str(_logs(state, job)[0]), "diagnosis": _diagnosis(state, job) if job.shown in BAD else None}
    return job.to_row() | more


def _logs(state: RunState, row: JobState) -> list[Path]:
    """Return the job's logs that hold something, its standard error first; that alone where none does."""
    logs = [state.run.job_dir(row.id) / name for name in ("err.log", "out.log")]
    return [path for path in logs if path.exists() and path.stat().st_size > 0] or logs[:1]


def _diagnosis(state: RunState, row: JobState) -> str | None:
    """Return the diagnosis of the job's logs in a line; None where its cause says more."""
    from memfit.diagnosis import diagnose_logs

    logs = [path for path in _logs(state, row) if path.exists()]
    found = diagnose_logs(logs) if logs else None
    tells_less = _TELLS_LESS | ({"collective_timeout"} if "rank" in row.evidence else set())  # its agent knows the rank
    return None if found is None or found.cause in tells_less else explain_in_a_line(found)


def view_summary(state: RunState, width: int, *, verbose: bool = False) -> Iterator[Part]:
    """Yield how a run ended; a study has `view_study`."""
    if not state.is_one:
        yield from (Note(""), Facts([*decisions(state, verbose)]))
    yield from view_results(state, width)
    yield from view_failures(state)
    yield Note("")
    places = [("run", f"{short_path(state.run.path)} ({show_state(state.state)})")]
    if not state.is_one:
        names = [path.name for path in sorted(state.run.path.glob("*_results.feather"))]
        names += ["checkpoints"] if state.kind != "commands" else []
        places += (("", f"  {name}") for name in [*names, "jobs (the logs and the memory of each)"])
    yield Facts([*totals(state, verbose), *places])


def view_failures(state: RunState, *, here: bool = True) -> Iterator[Part]:
    """Yield the failed jobs by state and cause, for one fault of a command fails all its jobs alike.

    What is not read ``here`` names whole paths, and what tells more.
    """
    path_text = short_path if here else str
    found: dict[tuple[str, str], list[JobState]] = {}
    for row in (one for one in state.jobs.values() if one.shown in BAD):
        found.setdefault((row.shown, row.cause or "it left no result"), []).append(row)
    for (ended_as, cause), (row, *others) in found.items():
        text = f"\n{row.name} {ended_as}: {cause}\n  log: {path_text(_logs(state, row)[0])}"
        text += f"\n  diagnosis: {said}" if (said := _diagnosis(state, row)) else ""
        text += f"\n  the same: {list_some([other.name for other in others])}" if others else ""
        text += "" if here else f"\n  more: memfit diagnose {state.run.job_dir(row.id)}"
        yield Note(text, "red")


def view_results(state: RunState, width: int | None) -> Iterator[Part]:
    """Yield how units ended and what they returned or reported last; a page, without a width, the results alone."""
    if state.kind != "commands":
        yield from _stages(state, width)
        return
    told, names = read_reported(state), short_names(state)
    rows = [row for row in state.jobs.values() if (row.id in told if width is None else row.ended)]
    if len(rows) > _MOST_LINES:  # what failed or began again first
        rows.sort(key=lambda row: row.state == "completed" and row.attempt == 1)
    shown = rows[:_MOST_LINES]
    numbers = [dict(told.get(row.id, {})) for row in shown]
    places = [name for name in PLACES if any(name in own for own in numbers)]
    columns = [(name, [or_dash(own.pop(name, None), "{:g}".format) for own in numbers]) for name in places]
    columns, has_mean = [*_columns(shown, width), *columns], set() < varied_params(state) <= _REPEATED
    if rows:
        yield from view_table("job", [names[row.name] for row in shown], columns, numbers, width, has_mean=has_mean)
    if len(shown) < len(rows):
        yield Note(f"and {len(rows) - len(shown)} more; --json lists all")


def _columns(rows: Sequence[JobState], width: int | None) -> list[tuple[str, list[str]]]:
    """Return how units ended, column by column; a page has a table of jobs beside."""
    order = [] if width is None else sorted(columns_of("summary"), key=lambda name: name not in ("state", "time"))
    return [(name, [COLUMNS[name].text(row) for row in rows]) for name in order]


def _stages(state: RunState, width: int | None) -> Iterator[Part]:
    names = state.stage_names
    indent, gap = max([10, *(len(name) + 1 for name in names)]), True
    for name in names:
        own = [row for row in state.jobs.values() if row.stage == name]
        yield from [Note("")] * gap
        yield Facts([(name, _fate(state, name))], indent)
        told = (row.result.get("report") for row in own)
        lines = [line for report in told if report and fits(report, [str]) for line in report]
        gap = any(row.id != name for row in own)
        if gap:
            each = str(state.graph.get(name, {}).get("each") or "unit").partition(" ")[0]
            units = [row.name.removeprefix(f"{name}_") for row in own]
            yield from view_table(each, units, _columns(own, width), [metrics_of(row.result) for row in own], width)
        elif own and (not lines or width is None):
            words = {one: format_number(value) if is_number(value) else value for one, value in own[0].result.items()}
            lines.append("  ".join(f"{one}: {value}" for one, value in words.items() if isinstance(value, str | bool)))
        yield from (Note(f"{'':<{indent}}{line}") for line in filter(None, lines))


def _fate(state: RunState, name: str) -> str:
    """Return the states of a stage's units, and why."""
    stage, states = state.stages.get(name, StageState()), state.units[name]
    counts = Counter(states.values())
    text = ", ".join(f"{state} {number}" if len(states) > 1 else state for state, number in counts.items())
    if stage.saved_seconds:
        text += f", which saved {format_duration(stage.saved_seconds)}"
    if "stopped" in stage.units.values():
        text += f" the run (exit code {state.outcome.get('exit_code')})"
    return text + (f": {stage.why}" if stage.why else "")


def decisions(state: RunState, verbose: bool) -> Iterator[tuple[str, str]]:
    """Yield the budget, the memory of one job, and how many ran at once."""
    budget, plan = state.budget, state.run.plan
    if budget:
        limit = budget["binding"]
        free = f"{format_bytes(budget['headroom_bytes'])} free of {format_bytes(limit['limit_bytes'])}"
        yield "budget", f"{free} ({limit['name']}); {format_bytes(budget['reserve_bytes'])} is kept free"
        if verbose:
            yield "limit", f"set by {limit['source']}; {budget['promise']}"
    if plan is not None:
        footprint = Footprint.from_dict(plan["footprint"])
        where = f" in phase {footprint.peak_phase}" if footprint.peak_phase else ""
        shared = f"; {format_bytes(footprint.shared_bytes)} shared by all jobs" if footprint.shared_bytes else ""
        peak = f"peak {format_bytes(footprint.private_bytes)}{where}"
        yield "one job", f"{peak} (measured on {plan['measured_on']}){shared}"
        yield "at once", f"{plan['why']}; at most {state.most_at_once} ran at the same time"


def _ranks(rows: Sequence[JobState]) -> Iterator[tuple[str, str]]:
    for row in rows[:_MOST_LINES]:
        of = "" if len(rows) == 1 else f"{row.id}: "
        for event in row.lost:
            yield "lost", f"{of}{row.explain_lost(event)}"
        if any(rank["peak_bytes"] for rank in row.ranks):
            peaks = [format_bytes(rank["peak_bytes"]) if rank["peak_bytes"] else "-" for rank in row.ranks]
            yield "ranks", f"{of}{len(peaks)}, with peaks of {list_some(peaks, _MOST_RANKS)} (without file pages)"


def totals(state: RunState, verbose: bool) -> Iterator[tuple[str, str]]:
    """Yield whether all went as planned, and the jobs by state, the restarts and the wall clock.

    If verbose, also why it was not shorter; of a single command its phases and its ranks.
    """
    yield from (("plan", event["text"]) for event in state.planned.values())
    rows, wall, is_whole = [*state.jobs.values()], state.wall_seconds, state.num_commands == 1
    for footprint in [row.footprint for row in rows] if state.is_one else ():
        if footprint is not None and footprint.phases:
            peaks = footprint.phases.items()
            text = ", ".join(f"{name} {format_bytes(peak.private_bytes)}" for name, peak in peaks)
            yield "phases", text
    if not state.is_one:
        yield "jobs", ", ".join(f"{name} {number}" for name, number in state.counts.items()) or "none has started"
        if state.num_restarts:
            took = sum(row.earlier_seconds for row in rows)
            took_text = f"; their earlier attempts took {format_duration(took)}" if took else ""
            yield "restarts", f"memfit restarted jobs {format_count(state.num_restarts, 'time')}{took_text}"
        if state.outgrown:
            num, jobs = sum(state.outgrown.values()), list_some(sorted(state.outgrown))
            cost = f"no job started meanwhile, {format_count(num, 'time')}"
            cost += f", and {format_count(state.num_gave_way, 'restart')}" if state.num_gave_way else ""
            yield "sizes", f"{jobs} needed more than was thought: {cost}. --memory SIZE tells memfit before"
        cores = sum(row.cpu_seconds for row in rows) / wall if wall else 0.0
        busy = f"; the jobs used {cores:.1f} cores on average" if cores and is_whole and not state.num_restarts else ""
        last = " of the last command" if state.num_commands > 1 else ""
        yield "Total:", f"{format_duration(wall)} wall clock{last}{busy}"
    yield from _ranks(rows)
    yield from (("growth", row.growth_told) for row in rows[:_MOST_LINES] if row.growth_told)
    if verbose and not state.is_one:
        if wall and is_whole and len(rows) > 1:
            yield from _bounds(state)
        yield from _record(state)


def _record(state: RunState) -> Iterator[tuple[str, str]]:
    """Yield how exact the forecasts were, and how many jobs ran out of memory, if any did."""
    if error := _forecast_error([*state.jobs.values()]):
        share, side = abs(100 * error["median"]), "above" if error["median"] >= 0 else "below"
        of = f"(median of {format_count(error['num'], 'job')})"
        yield "forecast", f"{share:.0f} % {side} the peaks {of}; too small: {error['num_under']}"
    if (kills := _count_kills(state.run))["num_killed"]:
        runs = format_count(kills["num_runs"], "run of this experiment")
        of = f"of {format_count(kills['num_jobs'], 'job')} in {runs} ended out of memory"
        yield "OOM kills", f"{kills['num_killed']} {of}"


def _bounds(state: RunState) -> Iterator[tuple[str, str]]:
    """Yield how many jobs ran at once on average, what the others waited for, and how busy the cores were."""
    wall, ran = state.wall_seconds, sum(row.seconds or 0.0 for row in state.jobs.values() if row.ended)
    waits = sorted(((seconds, on) for on, seconds in state.waits.items() if on in _WAITED_FOR), reverse=True)
    words = [
        f"{100 * seconds / wall:.0f} % of the time others waited {_WAITED_FOR[on]}"
        for seconds, on in waits
        if seconds >= _LEAST_WAIT * wall
    ]
    if "busy" in state.cpu:
        words.append(f"the host's cores were {100 * state.cpu['busy']:.0f} % busy")
    if state.cpu.get("disk", 0.0) >= _LEAST_WAIT:
        words.append(f"{100 * state.cpu['disk']:.0f} % idle for a disk")
    if words:
        yield "waits", ", ".join([f"{ran / wall:.1f} at once on average", *words])


def _count_kills(run: RunDir) -> dict[str, Any]:
    """Count the jobs that ended out of memory, over the newest runs of this experiment that have ended."""
    ended: list[list[str]] = []
    for other in RunDir.all(run.path.parents[1], run.path.parent.name)[:_MOST_RUNS]:
        with suppress(MemfitError):
            jobs = (read_json(other.path / "outcome.json", {"jobs": {str: {"state": str}}}) or {}).get("jobs", {})
            ended.append([job["state"] for job in jobs.values() if job["state"] not in ("pending", "running")])
    states = [state for run_states in ended for state in run_states]
    return {"num_killed": states.count("out_of_memory"), "num_jobs": len(states), "num_runs": sum(map(bool, ended))}


def _forecast_error(rows: Sequence[JobState]) -> dict[str, Any] | None:
    """Return by which share of their peaks what jobs had at their start was too much (above 0) or too little."""
    errors = [
        row.forecast_bytes / row.peak_bytes - 1
        for row in rows
        if row.forecast_bytes and row.peak_bytes and row.state == "completed"
    ]
    if not errors:
        return None
    num_under = sum(error < 0 for error in errors)
    spread = {"low": min(errors), "median": statistics.median(errors), "high": max(errors)}
    return {"num": len(errors), "num_under": num_under, **spread}


def view_table(
    heading: str,
    names: Sequence[str],
    columns: Iterable[tuple[str, Sequence[str]]],
    numbers: Sequence[Mapping[str, float]],
    width: int | None,
    *,
    has_mean: bool = True,
) -> Iterator[Part]:
    """Yield a table of units, their numbers behind the columns, and how many columns do not fit the width."""
    metrics = summarize_metrics(numbers)
    num = max((num for _, _, num in metrics.values()), default=0)
    labels = [f"mean of {num}", f"sd of {num}"] if num > 1 and has_mean else []
    first = (heading, [*names, *labels])
    rest = [(name, [*cells, *[""] * len(labels)]) for name, cells in columns]
    for name, (mean, sd, _) in metrics.items():
        rest.append((name, format_column([own.get(name) for own in numbers], [mean, sd] if labels else [])))
    shown, left = [first], (width or math.inf) - max(map(len, (heading, *first[1])))
    while rest and ((left := left - 2 - max(map(len, (rest[0][0], *rest[0][1])))) >= 0 or len(shown) == 1):
        shown.append(rest.pop(0))
    if shown[1:]:
        headings, columns = zip(*shown, strict=True)
        yield from (Note(""), Table(headings, [*zip(*columns, strict=True)], (heading, "state")))
    if rest:
        yield f"and {format_count(len(rest), 'more column')}: memfit report shows all"
