"""A run while it goes on: a live table on a terminal, timestamped lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from memfit.memory import Budget
from memfit.reports._run_view import Event, JobRow, RunView
from memfit.rundir import RunDir
from memfit.units import format_bytes, format_duration

_STYLE = {"running": "cyan", "completed": "green", "failed": "red", "out_of_memory": "red", "node_fail": "red"}
_REFRESH_SECONDS = 0.5


class LiveRun:
    """Shows a run until it is closed; ``show(run)`` gives the function that is to be called at each tick."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None

    def show(self, run: RunDir) -> Callable[[], None]:
        """Begin to show a run."""
        view = RunView(run)
        view.read()  # what an earlier command did is not shown again
        self.console.print(f"Run {run.path}", soft_wrap=True)
        if not self.console.is_terminal:
            return lambda: _print_new_lines(self.console, view)
        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._live.start()
        return self._ticker(view, self._live)

    def _ticker(self, view: RunView, live: Live) -> Callable[[], None]:
        last = 0.0

        def tick() -> None:
            nonlocal last
            if time.monotonic() - last >= _REFRESH_SECONDS:
                last = time.monotonic()
                _print_new_lines(self.console, view)
                live.update(render(view), refresh=True)

        return tick

    def close(self) -> None:
        """Give the terminal back."""
        if self._live is not None:
            self._live.stop()


def _print_new_lines(console: Console, view: RunView) -> None:
    for event in view.read():
        text = describe(event, view)
        if text:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(event["time"])))
            console.print(f"{stamp}  {text}", soft_wrap=True, highlight=False, markup=False)


def describe(event: Event, view: RunView) -> str:
    """One event as a line, or an empty text for one that only the table shows.

    >>> describe({"time": 0.0, "kind": "wait", "job": "fold_2", "reason": "fold_1 is being measured", "arithmetic": ""},
    ...     RunView(RunDir(__import__("pathlib").Path("."))))
    'fold_2 waits: fold_1 is being measured'
    """
    kind, job = event["kind"], event.get("job")
    if kind == "admit":
        size = event["reservation_bytes"]
        reserved = f"reserves {format_bytes(size)}" if size else "is of unknown size"
        return f"{job} starts and {reserved} ({event['num_running']} running): {event['why']}"
    if kind == "wait":
        return f"{job} waits: {event['reason']}" + (f"; {event['arithmetic']}" if event["arithmetic"] else "")
    if kind == "plan":
        return str(event["why"])
    if kind == "epoch":
        known = ("time", "job", "kind", "epoch", "num_epochs")
        numbers = [f"{name} {value:.4f}" for name, value in event.items() if name not in known and _is_number(value)]
        return f"{job} epoch {event['epoch']}/{event['num_epochs']}  {'  '.join(numbers)}"
    if kind == "end":
        row = view.row(str(job))
        took = f" ({format_duration(row.seconds)})" if row.seconds is not None else ""
        cause = f": {event['cause']}" if event["cause"] else ""
        return f"{job} {event['state']}{took}, peak {format_bytes(row.status.peak_bytes)}{cause}"
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def render(view: RunView) -> RenderableType:
    """The table of jobs and the budget's line."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("fold", "state", "phase", "epoch"):
        table.add_column(name)
    for name in ("memory", "peak", "reserved", "time", "ETA"):
        table.add_column(name, justify="right")
    rows = view.rows()
    for row in rows:
        table.add_row(*_cells(row))
    budget = Budget.read()
    used = sum(row.status.used_bytes for row in rows)
    line = Text(
        f"folds use {format_bytes(used)}; {format_bytes(budget.headroom_bytes)} free of "
        f"{format_bytes(budget.limit_bytes)} ({budget.binding.name})",
        style="dim",
    )
    return Group(table, line)


def _cells(row: JobRow) -> list[str | Text]:
    status = row.status
    return [
        status.job_id.removeprefix("fold_"),
        Text(status.state, style=_STYLE.get(status.state, "")),
        status.phase or "-",
        f"{row.epoch}/{row.num_epochs}" if row.num_epochs else "-",
        format_bytes(status.used_bytes) if status.used_bytes else "-",
        format_bytes(status.peak_bytes) if status.peak_bytes else "-",
        format_bytes(row.reserved_bytes) if row.reserved_bytes else "-",
        format_duration(row.seconds) if row.seconds is not None else "-",
        format_duration(row.eta_seconds) if row.eta_seconds is not None else "-",
    ]
