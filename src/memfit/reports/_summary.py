"""A run's closing summary, from its directory alone."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from memfit.memory import Footprint
from memfit.reports import _record
from memfit.reports._diagnosis import explain_in_a_line
from memfit.reports._numbers import format_column, format_number
from memfit.reports._run_view import JobRow, RunView, StageView, is_number, summarize_metrics
from memfit.rundir import RunDir, read_json
from memfit.units import format_bytes, format_duration

#: So many commands have a line each in the closing summary; of more, those that did not go smoothly.
_MOST_LINES = 60
_BAD = frozenset({"failed", "out_of_memory", "node_fail", "timeout"})
#: What a log says where memfit itself knows more: it has the exit and the kernel's counters.
_TELLS_LESS = frozenset({"unknown", "killed", "terminated", "recovered"})

#: A share of the time below which a wait is not told.
_LEAST_WAIT = 0.02
_WAITED_FOR = {
    "memory": "for memory",
    "device": "for a device",
    "max_parallel": "because of max_parallel",
    "measuring": "while one was measured",
    "starting": "while others started",
    "other_run": "for another run",
}


@dataclass(frozen=True)
class _Column:
    name: str
    cells: list[str]
    right: bool = True


def summarize(run: RunDir, view: RunView | None = None) -> dict[str, Any]:
    """The summary as JSON: budget, plan, stages, jobs, durations, where everything lies.

    Sizes are in bytes, durations in seconds; a number that is not finite is null, as JSON has no word for it.

    Args:
        run: The run directory.
        view: What has followed the run so far, so that not all is read a second time.

    Example:
        >>> import tempfile
        >>> found = summarize(RunDir.create(Path(tempfile.mkdtemp()), "demo", "0" * 64))
        >>> found["state"], found["jobs"], found["wall_seconds"]
        ('running', [], 0.0)
    """
    view = view or RunView(run)
    view.read()
    rows = view.rows()
    total, lost = view.work(rows)
    return {
        "run": str(run.path),
        "kind": view.kind,
        "state": run.state,
        "why": _outcome(run).get("why", ""),
        "budget": dict(view.last("budget") or {}),
        "plan": view.run.plan,
        "stages": [_stage(view, name, rows) for name in view.stage_names(rows)] if view.kind != "commands" else [],
        "most_at_once": view.most_at_once,
        "wall_seconds": view.wall_seconds,
        "counts": view.counts(rows),
        "num_restarts": sum(map(len, view.retries.values())),
        "job_seconds": total,
        "cpu_seconds": view.cpu_seconds(rows),
        "restarted_seconds": lost,
        "waited_seconds": dict(view.waits),
        "host_cpu": dict(view.cpu),
        "jobs": [_job(view, row) for row in rows],
        **_record.to_dict(run, rows),
    }


def _outcome(run: RunDir) -> Mapping[str, Any]:
    return read_json(run.path / "outcome.json") or {}


def _stage(view: RunView, name: str, rows: Sequence[JobRow]) -> dict[str, Any]:
    own = [row for row in rows if row.stage == name]
    stage = _told(view, name, own)
    metrics = summarize_metrics(own)
    return {
        "name": name,
        "counts": Counter(stage.units.values()),
        "units": len(stage.units),
        "why": stage.why,
        "saved_seconds": stage.saved_seconds,
        "metrics": _finite({name: {"mean": mean, "sd": sd, "n": n} for name, (mean, sd, n) in metrics.items()}),
    }


def _told(view: RunView, name: str, own: Sequence[JobRow]) -> StageView:
    """A stage with the states of its units as its jobs have them, which know more than the supervisor said."""
    told = view.stages.get(name, StageView(name))
    states = {row.status.job_id: "waiting" if row.state == "pending" else row.state for row in own}
    before = {job: "waiting" if state == "running" else state for job, state in told.units.items()}
    return replace(told, units=before | states)


def _job(view: RunView, row: JobRow) -> dict[str, Any]:
    status = row.status
    return {
        "job": status.job_id,
        "stage": row.stage,
        "params": dict(row.params),
        "state": row.state,
        "seconds": row.seconds,
        "peak_bytes": status.peak_bytes,
        "reservation_bytes": row.reserved_bytes,
        "exit_code": status.exit_code,
        "cause": status.cause,
        "attempt": status.attempt,
        "log": str(_log(view, row)),
        "diagnosis": _said(view, row) if row.state in _BAD else None,
        "heap": _heap(view, status.job_id),
        "result": _finite(row.result),
    }


def _heap(view: RunView, job_id: str) -> dict[str, int] | None:
    """What the job's C allocator had given out and held of the kernel at its last phase mark, in bytes."""
    mark = view.last("phase", job_id) or {}
    found = {name: mark.get(name) for name in ("live_bytes", "resident_bytes")}
    return {name: size for name, size in found.items() if isinstance(size, int)} if all(found.values()) else None


def _log(view: RunView, row: JobRow) -> Path:
    """Where the job's last words are: its standard error or, when that is empty, its standard output."""
    folder = view.run.job_dir(row.status.job_id)
    out, err = folder / "out.log", folder / "err.log"
    return out if _size(err) == 0 and _size(out) else err


def _said(view: RunView, row: JobRow) -> str | None:
    """What the job's logs say of its end, in a line; None where they tell less than its cause does."""
    from memfit.diagnosis import diagnose_logs

    folder = view.run.job_dir(row.status.job_id)
    logs = [path for path in (folder / "err.log", folder / "out.log") if _size(path)]
    found = diagnose_logs(logs) if logs else None
    return None if found is None or found.cause in _TELLS_LESS else explain_in_a_line(found)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _finite(value: Any) -> Any:
    """A JSON value with null for each number in it that is not finite."""
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_summary(run: RunDir, console: Console, view: RunView | None = None) -> None:
    """Print the summary as people read it: what was decided and why, the jobs, then where everything lies.

    Args:
        run: The run directory.
        console: Where to print it.
        view: What has followed the run so far, so that not all is read a second time.
    """
    view = view or RunView(run)
    view.read()
    rows = view.rows()
    is_one = view.kind == "commands" and len(view.params) == 1
    console.print()
    for name, text in [] if is_one else _facts(view):
        console.print(Text.assemble((f"{name:<10}", "bold"), text), soft_wrap=True)
    if view.kind == "commands":
        _print_jobs(view, rows, console)
    else:
        _print_stages(view, rows, console)
    for row in rows:
        if row.state in _BAD:
            text = (
                f"{row.name} {row.state}: {row.status.cause or 'it left no result'}\n  log: {_short(_log(view, row))}"
            )
            if said := _said(view, row):
                text += f"\n  diagnosis: {said}"
            console.print(Text(f"\n{text}", style="red"), soft_wrap=True)
    console.print()
    for name, text in _of_one(view, rows) if is_one else _places(view, rows):
        console.print(Text.assemble((f"{name:<10}", "bold"), text), soft_wrap=True)


def _print_stages(view: RunView, rows: Sequence[JobRow], console: Console) -> None:
    """For each stage what became of it and why, and what it returned: by unit in a table, or name by name."""
    names = view.stage_names(rows)
    width, gap = max([10, *(len(name) + 1 for name in names)]), True
    for name in names:
        own = [row for row in rows if row.stage == name]
        fate = _fate(view, _told(view, name, own))
        console.print(Text.assemble("\n" if gap else "", (f"{name:<{width}}", "bold"), fate), soft_wrap=True)
        lines = [line for row in own for line in row.result.get("report", ()) if isinstance(line, str)]
        gap = any(row.has_unit for row in own)
        if gap:
            for table in _tables(own, view, console):
                console.print()
                console.print(table)
        elif own and not lines:
            lines = [_values(own[0].result)]
        for line in filter(None, lines):
            console.print(f"{'':<{width}}{line}", soft_wrap=True, markup=False)


def _fate(view: RunView, stage: StageView) -> str:
    """What became of a stage's units, and why."""
    counts = Counter(stage.units.values())
    text = ", ".join(f"{state} {number}" if len(stage.units) > 1 else state for state, number in counts.items())
    if stage.saved_seconds:
        text += f", which saved {format_duration(stage.saved_seconds)}"
    if "stopped" in counts:
        text += f" the run (exit code {_outcome(view.run).get('exit_code')})"
    return text + (f": {stage.why}" if stage.why else "")


def _values(result: Mapping[str, Any]) -> str:
    """The numbers and words of a result, without its lists."""
    told = {name: format_number(value) if is_number(value) else value for name, value in result.items()}
    return "  ".join(f"{name}: {value}" for name, value in told.items() if isinstance(value, str | bool))


def _print_jobs(view: RunView, rows: Sequence[JobRow], console: Console) -> None:
    """One line for each command that has ended, in the order of their ends; of very many only those of note."""
    ended = sorted((row for row in rows if row.status.ended), key=lambda row: row.status.ended or 0.0)
    of_note = [row for row in ended if row.status.state != "completed" or row.status.attempt > 1]
    shown = ended if len(ended) <= _MOST_LINES else of_note[:_MOST_LINES]
    if ended:
        console.print()
    for row in shown:
        console.print(_ended_line(row), soft_wrap=True, markup=False, highlight=False)
    if len(shown) < len(ended):
        console.print(f"and {len(ended) - len(shown)} more; --json lists all", soft_wrap=True)


def _ended_line(row: JobRow) -> str:
    status = row.status
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.ended or 0.0))
    took = f" ({format_duration(row.seconds)})" if row.seconds is not None else ""
    tries = f", attempt {status.attempt}" if status.attempt > 1 else ""
    return f"{stamp}  {row.name} {status.state}{took}{_peak(row)}{tries}"


def _peak(row: JobRow) -> str:
    peak = f", peak {format_bytes(row.status.peak_bytes)}" if row.status.peak_bytes else ""
    return f"{peak} of {format_bytes(row.reserved_bytes)} reserved" if peak and row.reserved_bytes else peak


def _of_one(view: RunView, rows: Sequence[JobRow]) -> list[tuple[str, str]]:
    """What there is to say of a run of one command that its line has not said."""
    facts, footprint = [], rows[0].status.footprint if rows else None
    if footprint is not None and footprint.phases:
        guessed = {"log": " (guessed from its log)", "shape": " (guessed from the shape of its memory)"}
        peaks = [f"{name} {format_bytes(peak.private_bytes)}" for name, peak in footprint.phases.items()]
        facts.append(("phases", ", ".join(peaks) + guessed.get(rows[0].phase_source, "")))
    facts += _restarts(view, rows)
    return [*facts, ("run", f"{_short(view.run.path)} ({view.run.state})")]


def _restarts(view: RunView, rows: Sequence[JobRow]) -> list[tuple[str, str]]:
    """How often memfit itself started jobs again, and the share of the work that was done for nothing or late."""
    num = sum(map(len, view.retries.values()))
    total, lost = view.work(rows)
    if not num:
        return []
    share = f"{100 * lost / total:.1f} %" if total else "0 %"
    times = "time" if num == 1 else "times"
    return [("restarts", f"memfit started jobs again {num} {times}; those attempts were {share} of all run time")]


def _facts(view: RunView) -> list[tuple[str, str]]:
    budget, plan = view.last("budget"), view.run.plan
    facts = []
    if budget is not None:
        limit = budget["binding"]
        facts.append((
            "budget",
            f"{format_bytes(budget['headroom_bytes'])} free of {format_bytes(limit['limit_bytes'])}, set by "
            f"{limit['name']} ({limit['source']}); {format_bytes(budget['reserve_bytes'])} of it is never lent",
        ))  # fmt: skip
        facts.append(("promise", str(budget["promise"])))
    if plan is not None:
        footprint = Footprint.from_dict(plan["footprint"])
        where = f", in phase {footprint.peak_phase}" if footprint.peak_phase else ""
        shared = f"; {format_bytes(footprint.shared_bytes)} of mapped files beside it" if footprint.shared_bytes else ""
        measured = f"{format_bytes(footprint.private_bytes)} private at its peak{where}"
        facts.append(("one job", f"{measured} (measured on {plan['measured_on']}){shared}"))
        facts.append(("at once", f"{plan['why']}. {view.most_at_once} ran at once"))
    return facts


def _places(view: RunView, rows: Sequence[JobRow]) -> list[tuple[str, str]]:
    seconds = [row.seconds for row in rows if row.seconds is not None and row.status.ended]
    last = " of the last command" if view.num_commands > 1 else ""
    wall = f"{format_duration(view.wall_seconds)} wall clock{last}"
    busy = ""
    if view.num_commands == 1 and view.wall_seconds and (cpu_seconds := view.cpu_seconds(rows)):
        busy = f"; the jobs kept {cpu_seconds / view.wall_seconds:.1f} cores busy"
    counts = ", ".join(f"{name} {number}" for name, number in view.counts(rows).items())
    places = [("jobs", counts or "none has started"), *_restarts(view, rows)]
    places.append(("Total:", f"{wall}, {view.most_at_once} at once{busy}"))
    places += _bounds(view, sum(seconds))
    error, kills = _record.forecast_error(rows), _record.count_kills(view.run)
    heaps = [(heap, row) for row in rows if (heap := _heap(view, row.status.job_id))]
    if heaps:
        heap, row = max(heaps, key=lambda found: found[0]["resident_bytes"] - found[0]["live_bytes"])
        held = f"{format_bytes(heap['live_bytes'])} live of {format_bytes(heap['resident_bytes'])} held"
        places.append(("heap", f"{held} by the C allocator of {row.name} at its last phase mark, the widest gap"))
    if error is not None:
        places.append(("forecast", error.explain()))
    if kills.num_jobs:
        places.append(("record", kills.explain()))
    places.append(("run", f"{_short(view.run.path)} ({view.run.state})"))
    tables = [path.name for path in sorted(view.run.path.glob("*_results.feather"))]
    for name in [*tables, *(["checkpoints"] if view.kind != "commands" else []), "jobs"]:
        places.append(("", f"  {name}" + (" (out.log and err.log of each, its memory)" if name == "jobs" else "")))
    return places


def _bounds(view: RunView, job_seconds: float) -> list[tuple[str, str]]:
    """How many ran at once on average, and what kept it from more: what jobs waited for, and what the cores did."""
    wall = view.wall_seconds
    if not wall or view.num_commands > 1 or len(view.ids) < 2:
        return []
    words = [f"{job_seconds / wall:.1f} at once on average"]
    named = {on: seconds for on, seconds in view.waits.items() if seconds >= _LEAST_WAIT * wall and on in _WAITED_FOR}
    for on, seconds in sorted(named.items(), key=lambda found: -found[1]):
        words.append(f"{100 * seconds / wall:.0f} % of the time others waited {_WAITED_FOR[on]}")
    if "busy" in view.cpu:
        words.append(f"the host's cores were {100 * view.cpu['busy']:.0f} % busy")
    if view.cpu.get("disk", 0.0) >= _LEAST_WAIT:
        words.append(f"{100 * view.cpu['disk']:.0f} % idle for a disk")
    return [("bound by", ", ".join(words))] if len(words) > 1 else []


def _short(path: Path) -> str:
    """A path as it is written from the current folder, where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _tables(rows: Sequence[JobRow], view: RunView, console: Console) -> Iterator[Table]:
    """A table of a stage's units; where the console is too narrow for all of it, the numbers follow in tables of
    their own."""
    stage = rows[0].stage
    each = str(view.graph.get(stage, {}).get("each") or "unit").partition(" ")[0]
    units = [row.name.removeprefix(f"{stage}_") for row in rows]
    facts, metrics = _fact_columns(rows), _metric_columns(rows)
    num = max((num for _, _, num in summarize_metrics(rows).values()), default=0)
    labels = [f"mean of {num}", f"sd of {num}"] if num > 1 else []
    names = _Column(each, units + labels, right=False)
    padded = [replace(column, cells=column.cells + [""] * len(labels)) for column in facts]
    if _fits([names, *padded, *metrics], console):
        yield _table([names, *padded, *metrics])
        return
    yield _table([_Column(each, units, right=False), *facts])
    while metrics:
        most = next((n for n in range(len(metrics), 1, -1) if _fits([names, *metrics[:n]], console)), 1)
        yield _table([names, *metrics[:most]])
        metrics = metrics[most:]


def _fits(columns: Sequence[_Column], console: Console) -> bool:
    options = console.options.update(max_width=10_000)
    return Measurement.get(console, options, _table(columns)).maximum <= console.width


def _table(columns: Sequence[_Column]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.name, justify="right" if column.right else "left", no_wrap=True)
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    return table


def _fact_columns(rows: Sequence[JobRow]) -> list[_Column]:
    return [
        _Column("state", [row.state for row in rows], right=False),
        _Column("time", ["-" if row.seconds is None else format_duration(row.seconds) for row in rows]),
        _Column("peak", [format_bytes(row.status.peak_bytes) if row.status.peak_bytes else "-" for row in rows]),
        _Column("reserved", [format_bytes(row.reserved_bytes) if row.reserved_bytes else "-" for row in rows]),
    ]


def _metric_columns(rows: Sequence[JobRow]) -> list[_Column]:
    """One column for each number: the units' values, then mean and standard deviation when there are several."""
    summary = summarize_metrics(rows)
    several = max((num for _, _, num in summary.values()), default=0) > 1
    return [
        _Column(name, format_column([row.metrics.get(name) for row in rows], [mean, sd] if several else []))
        for name, (mean, sd, _) in summary.items()
    ]
