"""A run's closing summary, from its directory alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
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
                "metrics": dict(row.metrics),
            }
            for row in rows
        ],
        "metrics": {n: {"mean": m, "sd": sd, "n": k} for n, (m, sd, k) in summarize_metrics(rows).items()},
    }


def render_summary(run: RunDir) -> RenderableType:
    """The summary as people read it."""
    view = RunView(run)
    view.read()
    rows = view.rows()
    parts: list[RenderableType] = [Text(""), _facts(view, rows), Text(""), _folds(rows)]
    failed = [row for row in rows if row.status.state in _BAD]
    for row in failed:
        log = run.job_dir(row.status.job_id) / "err.log"
        parts.append(Text(f"\n{row.status.job_id} {row.status.state}: {row.status.cause}\n  log: {log}", style="red"))
    return Group(*parts)


def print_summary(run: RunDir, console: Console) -> None:
    """Print the summary."""
    console.print(render_summary(run), soft_wrap=True, highlight=False)


def _facts(view: RunView, rows: Sequence[JobRow]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    budget, plan, stage = view.last("budget"), view.plan, view.stage
    if budget is not None:
        limit = budget["binding"]
        grid.add_row(
            "budget",
            f"{format_bytes(budget['headroom_bytes'])} free of {format_bytes(budget['limit_bytes'])}, set by "
            f"{limit['name']} ({limit['source']}); {format_bytes(budget['reserve_bytes'])} never lent",
        )
        grid.add_row("promise", budget["promise"])
    if stage is not None:
        reused = "reused" if stage["panel_reused"] else "built"
        grid.add_row(
            "panel",
            f"{reused}: {stage['num_dates']} dates x {stage['num_assets']} assets x {stage['num_features']} features, "
            f"{stage['first_date']} to {stage['last_date']}, {format_bytes(stage['panel_bytes'])}, mapped once by all",
        )
    if plan is not None:
        phases = plan["footprint"]["phases"]
        top = max(phases, key=lambda name: phases[name]["private_bytes"]) if phases else "?"
        grid.add_row(
            "one fold",
            f"{format_bytes(plan['footprint']['private_bytes'])} private at its peak, in phase {top} "
            f"(measured on {plan['measured_on']}), and {format_bytes(plan['footprint']['shared_bytes'])} mapped files",
        )
        grid.add_row("at once", f"{plan['why']}; {view.most_at_once()} ran at once")
    for name, (mean, sd, n) in summarize_metrics(rows).items():
        spread = f", sd {sd:.4f}" if sd is not None else ""
        grid.add_row(name, f"mean {mean:.4f}{spread}, n = {n} folds")
    seconds = [row.seconds for row in rows if row.seconds is not None and row.status.ended]
    grid.add_row(
        "time", f"{format_duration(_wall_seconds(view))} wall clock; the folds' own sum {format_duration(sum(seconds))}"
    )
    grid.add_row("run", f"{view.run.path}  ({view.run.state})")
    for name, note in (("kfold_results.feather", "results"), ("checkpoints", "checkpoints"), ("jobs", "logs, memory")):
        if (view.run.path / name).exists():
            grid.add_row("", f"{view.run.path / name}  ({note})")
    return grid


def _folds(rows: Sequence[JobRow]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("fold")
    table.add_column("state")
    for name in ("time", "peak", "reserved"):
        table.add_column(name, justify="right")
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        cells = [
            row.status.job_id.removeprefix("fold_"),
            row.status.state,
            format_duration(row.seconds) if row.seconds is not None else "-",
            format_bytes(row.status.peak_bytes) if row.status.peak_bytes else "-",
            format_bytes(row.reserved_bytes) if row.reserved_bytes else "-",
        ]
        table.add_row(*cells, *(_number(row.metrics.get(name)) for name in names))
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
