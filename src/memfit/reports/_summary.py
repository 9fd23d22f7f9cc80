"""A run's closing summary, from its directory alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.reports._run_view import JobRow, RunView, summarize_metrics
from memfit.rundir import RunDir
from memfit.units import format_bytes, format_duration

_BAD = frozenset({"failed", "out_of_memory", "node_fail", "timeout"})


def summarize(run: RunDir) -> dict[str, Any]:
    """The summary as JSON: budget, plan, panel, folds, metrics, durations, where everything lies."""
    view = RunView(run)
    view.read()
    rows = view.rows()
    return {
        "run": str(run.path),
        "state": run.state,
        "budget": dict(view.last("budget") or {}),
        "plan": view.plan,
        "panel": view.stage,
        "most_at_once": view.most_at_once(),
        "wall_seconds": _wall_seconds(view),
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
                "metrics": dict(row.metrics),
            }
            for row in rows
        ],
        "metrics": {n: {"mean": m, "sd": sd, "n": k} for n, (m, sd, k) in summarize_metrics(rows).items()},
    }


def print_summary(run: RunDir, console: Console) -> None:
    """Print the summary as people read it: what was decided and why, the folds, then where everything lies."""
    view = RunView(run)
    view.read()
    rows = view.rows()
    console.print()
    for name, text in _facts(view):
        console.print(Text.assemble((f"{name:<10}", "bold"), text), soft_wrap=True)
    console.print()
    console.print(_folds(rows))
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
        facts.append(("at once", f"{plan['why']}. {view.most_at_once()} ran at once"))
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
    took = f"{format_duration(_wall_seconds(view))} wall clock; the folds' own times add up to "
    places = [("time", took + format_duration(sum(seconds)))]
    if view.stage is not None:
        places.append(("panel", _short(Path(view.stage["panel"]))))
    places.append(("run", f"{_short(view.run.path)} ({view.run.state})"))
    for name, what in (("kfold_results.feather", "the table above"), ("checkpoints", ""), ("jobs", "logs, memory")):
        if (view.run.path / name).exists():
            places.append(("", f"  {name}" + (f" ({what})" if what else "")))
    return places


def _short(path: Path) -> str:
    """A path as it is written from the current folder, where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _folds(rows: Sequence[JobRow]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_footer=False)
    table.add_column("fold", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("time", "peak", "reserved"):
        table.add_column(name, justify="right", no_wrap=True)
    summary = summarize_metrics(rows)
    for name in summary:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [
            row.status.job_id.removeprefix("fold_"),
            row.status.state,
            format_duration(row.seconds) if row.seconds is not None else "-",
            format_bytes(row.status.peak_bytes) if row.status.peak_bytes else "-",
            format_bytes(row.reserved_bytes) if row.reserved_bytes else "-",
        ]
        table.add_row(*cells, *(_number(row.metrics.get(name)) for name in summary))
    num_done = max((n for _, _, n in summary.values()), default=0)
    if num_done > 1:
        table.add_row("mean", f"n = {num_done}", "", "", "", *(_number(mean) for mean, _, _ in summary.values()))
        table.add_row("sd", "over folds", "", "", "", *(_number(sd) for _, sd, _ in summary.values()))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if float(value).is_integer() and abs(value) >= 1 else f"{value:.4f}"


def _wall_seconds(view: RunView) -> float:
    """The last command's wall clock: from its start to the end that it wrote, or to now."""
    ends = [e for e in view.events if e["kind"] == "run" and e["state"] not in ("started", "continued")]
    end = float(ends[-1]["time"]) if ends and ends[-1]["time"] >= (view.started or 0) else time.time()
    return end - (view.started or end)
