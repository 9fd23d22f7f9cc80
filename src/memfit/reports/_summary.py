"""A run's closing summary, from its directory alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from memfit.reports._numbers import format_column
from memfit.reports._run_view import JobRow, RunView, summarize_metrics
from memfit.rundir import RunDir
from memfit.units import format_bytes, format_duration

_BAD = frozenset({"failed", "out_of_memory", "node_fail", "timeout"})


@dataclass(frozen=True)
class _Column:
    name: str
    cells: list[str]
    right: bool = True


def summarize(run: RunDir) -> dict[str, Any]:
    """The summary as JSON: budget, plan, panel, folds, metrics, durations, where everything lies.

    Sizes are in bytes, durations in seconds; a metric that is not finite is null, as JSON has no word for it.

    Example:
        >>> import tempfile
        >>> found = summarize(RunDir.create(Path(tempfile.mkdtemp()), "demo", "0" * 64))
        >>> found["state"], found["folds"], found["wall_seconds"]
        ('running', [], 0.0)
    """
    view = RunView(run)
    view.read()
    rows = view.rows()
    return {
        "run": str(run.path),
        "state": run.state,
        "budget": dict(view.last("budget") or {}),
        "plan": view.plan,
        "panel": view.stage,
        "most_at_once": view.most_at_once,
        "wall_seconds": view.wall_seconds,
        "folds": [
            {
                "job": row.status.job_id,
                "state": row.status.state,
                "seconds": row.seconds,
                "peak_bytes": row.status.peak_bytes,
                "reservation_bytes": row.reserved_bytes,
                "exit_code": row.status.exit_code,
                "cause": row.status.cause,
                "attempt": row.status.attempt,
                "log": str(run.job_dir(row.status.job_id) / "err.log"),
                "metrics": {name: _finite(value) for name, value in row.metrics.items()},
            }
            for row in rows
        ],
        "metrics": {
            name: {"mean": _finite(mean), "sd": _finite(sd), "n": num}
            for name, (mean, sd, num) in summarize_metrics(rows).items()
        },
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def print_summary(run: RunDir, console: Console) -> None:
    """Print the summary as people read it: what was decided and why, the folds, then where everything lies."""
    view = RunView(run)
    view.read()
    rows = view.rows()
    console.print()
    for name, text in _facts(view):
        console.print(Text.assemble((f"{name:<10}", "bold"), text), soft_wrap=True)
    for table in _tables(rows, console):
        console.print()
        console.print(table)
    for row in rows:
        if row.status.state in _BAD:
            log = _short(run.job_dir(row.status.job_id) / "err.log")
            text = f"{row.status.job_id} {row.status.state}: {row.status.cause}\n  log: {log}"
            console.print(Text(f"\n{text}", style="red"), soft_wrap=True)
    console.print()
    for name, text in _places(view, rows):
        console.print(Text.assemble((f"{name:<10}", "bold"), text), soft_wrap=True)


def _facts(view: RunView) -> list[tuple[str, str]]:
    budget, plan, stage = view.last("budget"), view.plan, view.stage
    facts = []
    if budget is not None:
        limit = budget["binding"]
        facts.append((
            "budget",
            f"{format_bytes(budget['headroom_bytes'])} free of {format_bytes(limit['limit_bytes'])}, set by "
            f"{limit['name']} ({limit['source']}); {format_bytes(budget['reserve_bytes'])} of it is never lent",
        ))  # fmt: skip
        facts.append(("promise", str(budget["promise"])))
    if stage is not None:
        facts.append(("panel", _panel(stage)))
    if plan is not None:
        footprint = plan["footprint"]
        phases = footprint["phases"]
        top = max(phases, key=lambda name: phases[name]["private_bytes"]) if phases else "?"
        facts.append((
            "one fold",
            f"{format_bytes(footprint['private_bytes'])} private at its peak, in phase {top} (measured on "
            f"{plan['measured_on']}); {format_bytes(footprint['shared_bytes'])} of mapped files beside it",
        ))  # fmt: skip
        facts.append(("at once", f"{plan['why']}. {view.most_at_once} ran at once"))
    return facts


def _panel(stage: Mapping[str, Any]) -> str:
    how = "reused" if stage["panel_reused"] else "built"
    if stage["panel_changed"] and not stage["panel_reused"]:
        how += f" anew (changed: {', '.join(stage['panel_changed'])})"
    return (
        f"{how}: {stage['num_dates']} dates x {stage['num_assets']} assets x {stage['num_features']} features, "
        f"{stage['first_date']} to {stage['last_date']}, {format_bytes(stage['panel_bytes'])}, mapped by every fold"
    )


def _places(view: RunView, rows: Sequence[JobRow]) -> list[tuple[str, str]]:
    seconds = [row.seconds for row in rows if row.seconds is not None and row.status.ended]
    last = " of the last command" if view.num_commands > 1 else ""
    took = f"{format_duration(view.wall_seconds)} wall clock{last}; the folds' own times add up to "
    places = [("time", took + format_duration(sum(seconds)))]
    if view.stage is not None:
        places.append(("panel", _short(Path(view.stage["panel"]))))
    places.append(("run", f"{_short(view.run.path)} ({view.run.state})"))
    for name, what in (("kfold_results.feather", "the folds above"), ("checkpoints", ""), ("jobs", "logs, memory")):
        if (view.run.path / name).exists():
            places.append(("", f"  {name}" + (f" ({what})" if what else "")))
    return places


def _short(path: Path) -> str:
    """A path as it is written from the current folder, where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _tables(rows: Sequence[JobRow], console: Console) -> Iterator[Table]:
    """The folds' table; where the console is too narrow for all of it, the metrics follow in tables of their own."""
    folds = [row.status.job_id.removeprefix("fold_") for row in rows]
    facts, metrics = _fact_columns(rows), _metric_columns(rows)
    num = max((num for _, _, num in summarize_metrics(rows).values()), default=0)
    labels = [f"mean of {num}", f"sd of {num}"] if num > 1 else []
    names = _Column("fold", folds + labels, right=False)
    padded = [replace(column, cells=column.cells + [""] * len(labels)) for column in facts]
    if _fits([names, *padded, *metrics], console):
        yield _table([names, *padded, *metrics])
        return
    yield _table([_Column("fold", folds, right=False), *facts])
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
        _Column("state", [row.status.state for row in rows], right=False),
        _Column("time", ["-" if row.seconds is None else format_duration(row.seconds) for row in rows]),
        _Column("peak", [format_bytes(row.status.peak_bytes) if row.status.peak_bytes else "-" for row in rows]),
        _Column("reserved", [format_bytes(row.reserved_bytes) if row.reserved_bytes else "-" for row in rows]),
    ]


def _metric_columns(rows: Sequence[JobRow]) -> list[_Column]:
    """One column for each metric: the folds' values, then mean and standard deviation when there are several."""
    summary = summarize_metrics(rows)
    several = max((num for _, _, num in summary.values()), default=0) > 1
    return [
        _Column(name, format_column([row.metrics.get(name) for row in rows], [mean, sd] if several else []))
        for name, (mean, sd, _) in summary.items()
    ]
