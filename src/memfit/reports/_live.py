"""A run while it goes on: a live table on a terminal, timestamped lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from memfit.memory import Budget
from memfit.reports._numbers import format_number
from memfit.reports._run_view import Event, JobRow, RunView
from memfit.rundir import RunDir
from memfit.units import format_bytes, format_duration

_STYLE = {
    "running": "cyan",
    "completed": "green",
    "failed": "red",
    "out_of_memory": "red",
    "node_fail": "red",
    "timeout": "red",
}
_REFRESH_SECONDS = 0.5
_HEADINGS = ("fold", "phase", "epoch", "memory", "peak", "reserved", "time", "ETA")
#: The width that the table keeps within, and for that of its longest phase: out_of_memory is a state of that width.
_COLUMNS, _PHASE_COLUMNS = 80, 13


class LiveRun:
    """Shows a run until it is closed; ``show(run)`` gives the function that is to be called at each tick.

    Each event is printed once as a line. On a terminal a table of the folds stands below the lines and goes at the end.

    Example:
        >>> import tempfile; from pathlib import Path
        >>> run = RunDir.create(Path(tempfile.mkdtemp()), "demo", "0" * 64)
        >>> live = LiveRun(Console(soft_wrap=True))
        >>> tick = live.show(run)  # doctest: +ELLIPSIS
        Run ...run_..._00000000
        >>> tick(); live.close()
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._view: RunView | None = None
        self._live: Live | None = None
        self._next = 0.0

    def show(self, run: RunDir) -> Callable[[], None]:
        """Begin to show a run: what happens from now on, not what an earlier command did."""
        self._view = RunView(run)
        self._view.read()
        self.console.print(f"Run {run.path}", soft_wrap=True, highlight=False, markup=False)
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self._tick

    def _tick(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _REFRESH_SECONDS
        self._print_new_lines()
        if self._live is not None and self._view is not None:
            self._live.update(render(self._view, _read_budget(self._view)), refresh=True)

    def close(self) -> None:
        """Print what happened since the last tick, and give the terminal back."""
        self._print_new_lines()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print_new_lines(self) -> None:
        if self._view is None:
            return
        for event in self._view.read():
            text = describe(event, self._view)
            if text:
                stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(event["time"])))
                self.console.print(f"{stamp}  {text}", soft_wrap=True, highlight=False, markup=False)


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
        return f"{job} starts and {reserved} ({event['num_running']} running): {event['why']}{_memory(event)}"
    if kind == "wait":
        return f"{job} waits: {event['reason']}" + (f"; {event['arithmetic']}" if event["arithmetic"] else "")
    if kind == "plan":
        return str(event["why"])
    if kind == "stop":
        return _describe_stop(event)
    if kind == "done":
        return f"all {event['num_done']} folds were done already; --new starts over"
    if kind == "resume":
        return f"{job} goes on after epoch {event['epoch']}"
    if kind == "epoch":
        known = ("time", "job", "kind", "epoch", "num_epochs")
        numbers = [f"{name} {format_number(v)}" for name, v in event.items() if name not in known and _is_number(v)]
        return f"{job} epoch {event['epoch']}/{event['num_epochs']}  {'  '.join(numbers)}".rstrip()
    if kind == "end":
        row = view.row(str(job))
        took = f" ({format_duration(row.seconds)})" if row.seconds is not None else ""
        cause = f": {event['cause']}" if event["cause"] else ""
        return f"{job} {event['state']}{took}, peak {format_bytes(row.status.peak_bytes)}{_memory(event)}{cause}"
    return ""


def _describe_stop(event: Event) -> str:
    jobs = f"{event['num_running']} running job{'' if event['num_running'] == 1 else 's'}"
    if event["level"] > 1:
        return f"ending {jobs} now"
    return f"asking {jobs} to stop at a checkpoint; a second Ctrl-C ends them now"


def _memory(event: Event) -> str:
    """What was used at a job's start or end, under which limit, and what of it was the run's own."""
    sizes = [event.get(f"{name}_bytes") for name in ("used", "limit", "pss")]
    if not all(_is_number(size) for size in sizes):
        return ""
    used, limit, pss = (format_bytes(int(size or 0)) for size in sizes)
    return f"; {used} of {limit} used, jobs {pss} (PSS)"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_budget(view: RunView) -> Budget:
    """The budget now, under the cap of the run's own config."""
    limits = (view.last("budget") or {"limits": []})["limits"]
    cap = next((int(one["limit_bytes"]) for one in limits if one["name"] == "cap"), None)
    used = sum(row.status.used_bytes for row in view.rows())
    return Budget.read(cap_bytes=cap, cap_used_bytes=used)


def render(view: RunView, budget: Budget) -> RenderableType:
    """The table of folds, which needs 80 columns at most, and the budget's line."""
    rows = view.rows()
    preparing = not rows and view.last("admit", "prepare") is not None
    lines = [_cells(row) for row in ([view.row("prepare")] if preparing else rows)]
    if preparing and (share := _share_done(view, lines[0][1])):
        lines[0][1] = Text(share, style=_STYLE["running"])
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *lines, strict=True)]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= _COLUMNS else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for number, name in enumerate(_HEADINGS):
        table.add_column(name, no_wrap=True, justify="right" if number > 1 else "left")
    for cells in lines:
        table.add_row(*cells)
    used = sum(row.status.used_bytes for row in rows)
    line = Text(
        f"folds use {format_bytes(used)}; {format_bytes(budget.headroom_bytes)} free of "
        f"{format_bytes(budget.limit_bytes)} ({budget.binding.name})",
        style="dim",
    )
    return Group(table, line)


def _cells(row: JobRow) -> list[str | Text]:
    status = row.status
    text = (status.phase or "starts") if status.state == "running" else status.state
    return [
        status.job_id.removeprefix("fold_"),
        Text(text[:_PHASE_COLUMNS], style=_STYLE.get(status.state, "")),
        f"{_epochs(row)}/{row.num_epochs or '?'}" if row.epochs_done else "-",
        format_bytes(status.used_bytes) if status.used_bytes else "-",
        format_bytes(status.peak_bytes) if status.peak_bytes else "-",
        format_bytes(row.reserved_bytes) if row.reserved_bytes else "-",
        format_duration(row.seconds, short=True) if row.seconds is not None else "-",
        format_duration(row.eta_seconds, short=True) if row.eta_seconds is not None else "-",
    ]


def _share_done(view: RunView, phase: str | Text) -> str:
    """The phase that the prepare job is in with the share of it that is done, such as ``build 45 %``."""
    event = view.last("progress", "prepare")
    if event is None or event["phase"] != str(phase) or not event["total"]:
        return ""
    return f"{event['phase'][:7]} {100 * event['done'] // event['total']} %"


def _epochs(row: JobRow) -> str:
    """Epochs done, cut and not rounded: 2 are done when they are."""
    tenths = int(row.epochs_done * 10 + 1e-9)
    return f"{tenths // 10}" if row.epochs_done == int(row.epochs_done) else f"{tenths / 10:.1f}"
