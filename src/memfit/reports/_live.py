"""A run while it goes on: a live table on a terminal, timestamped lines elsewhere."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from memfit.files import fits, open_own
from memfit.jobs import show_state
from memfit.memory import Budget
from memfit.reports._epoch_memory import explain_memory, memory_of
from memfit.reports._numbers import format_number, or_dash, plain_table, say
from memfit.reports._run_view import Event, JobRow, RunView, is_number
from memfit.reports._study import FAILED_TRIALS, StudyView
from memfit.rundir import RunDir
from memfit.units import format_bytes, format_duration

_STYLE = {
    "running": "cyan",
    "completed": "green",
    "failed": "red",
    "out_of_memory": "red",
    "node_fail": "red",
    "timeout": "red",
    "stalled": "yellow",
    "stopped": "yellow",
}
_REFRESH_SECONDS = 0.5
_HEADINGS = ("job", "node", "phase", "epoch", "memory", "peak", "reserved", "time", "ETA")
#: Columns that are left out if no job has them.
_OPTIONAL = ("node", "epoch")
#: The table's width, and that of its longest state: out_of_memory.
_COLUMNS, _PHASE_COLUMNS = 80, 13
#: All of so many jobs are shown; of more, at most so many that run, and the last that ended.
_WHOLE_ROWS, _RUNNING_ROWS, _ENDED_ROWS = 12, 40, 3
_BAR_COLUMNS = 40
#: Waits that are normal in a run of many jobs.
_ROUTINE = ("memory", "device", "max_parallel")
#: Events that are not shown for a single command: the summary says the same.
_OF_MANY = frozenset({"admit", "plan", "end", "grow", "grow_device"})
#: Events that have no line in a study: the ends of its trials have one.
_OF_TRIALS = frozenset({"admit", "end", "epoch", "stage"})
#: What is read of a log at one look.
_MOST_NEW_BYTES = 1 << 16
#: The least share of the limit by which a reservation grows for a line on the terminal.
_WORTH_A_LINE = 0.02


@dataclass(frozen=True)
class Room:
    """The limit that binds a run now, and how much of it everyone uses."""

    limit_bytes: int
    used_bytes: int
    name: str


class LiveRun:
    """Show a run until it is closed: call what ``show(run)`` returns at each tick.

    Each event is printed once as a line. A terminal also shows a table of the jobs with the time that is left. A run of
    many jobs prints their ends only, and on a terminal only failures. A study prints the ends of its trials.

    Args:
        console: Where to show it.
        here: True if this process runs the jobs; a watcher may have other limits.
        quiet: Print failures only.
        verbose: Also print the memory of each epoch, by phase.

    Example:
        >>> import tempfile; from pathlib import Path
        >>> run = RunDir.create(Path(tempfile.mkdtemp()), "demo", "0" * 64)
        >>> live = LiveRun(Console(soft_wrap=True))
        >>> tick = live.show(run)  # doctest: +ELLIPSIS
        Run ...run_..._00000000
        >>> tick(); live.close()
    """

    def __init__(self, console: Console, *, here: bool = True, quiet: bool = False, verbose: bool = False) -> None:
        self.console = console
        self.here = here
        self.quiet = quiet
        self.verbose = verbose
        #: The run as it was read so far; None before ``show``.
        self.view: RunView | None = None
        self._study: StudyView | None = None
        self._live: Live | None = None
        self._next = 0.0
        self._read: dict[Path, int] = {}
        self._said: set[tuple[str, str]] = set()
        self._epochs_seen: dict[str, int] = {}

    def show(self, run: RunDir) -> Callable[[], None]:
        """Begin to show what happens in a run from now on."""
        self.view = RunView(run)
        self.view.read()
        self._study = StudyView(run) if self.view.kind == "tune" else None
        if not self.quiet:
            say(self.console, f"Run {run.path}")
            if self._study is not None and (headline := self._study.headline()):
                say(self.console, headline)
            if self.console.is_terminal:
                self._live = Live(console=self.console, auto_refresh=False, transient=True)
                self._live.start()
        return partial(self._tick, self.view)

    def _tick(self, view: RunView) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _REFRESH_SECONDS
        self._print_new_lines(view)
        self._print_shortages(view)
        self._print_growth(view)
        if self._live is not None:
            headline = self._study.headline() if self._study else ""
            table = render(view, read_room(view, here=self.here), self.console.width, read_pressure(), headline)
            self._live.update(table, refresh=True)

    def _print_shortages(self, view: RunView) -> None:
        """Print what a running job's error log says about a shortage of memory, as soon as it says so."""
        from memfit.diagnosis import find_shortage  # not by those that only print a table

        for row in view.rows():
            if row.state == "running":
                line = find_shortage(self._new_of(view.run.job_dir(row.status.job_id) / "err.log"))
                if line and (row.name, line) not in self._said:
                    self._said.add((row.name, line))
                    say(self.console, f"{_stamp(time.time())}  {row.name} says: {line}", "red")

    def _print_growth(self, view: RunView) -> None:
        """Print once which running job's memory grows from epoch to epoch (at least five)."""
        from memfit.diagnosis import explain_growth

        limit = (view.last("budget") or {}).get("binding", {}).get("limit_bytes")
        for row in view.rows():
            ends, seen = view.epoch_ends(row.status.job_id), self._epochs_seen.get(row.name, 0)
            if row.state == "running" and len(ends) > max(5, 1.1 * seen) and (row.name, "grows") not in self._said:
                self._epochs_seen[row.name] = len(ends)
                folder = view.run.job_dir(row.status.job_id)
                if grown := explain_growth(folder, ends, limit if isinstance(limit, int) else 0):
                    self._said.add((row.name, "grows"))
                    say(self.console, f"{_stamp(time.time())}  {row.name}: {grown}", "yellow")

    def _new_of(self, log: Path) -> bytes:
        """Return what a log gained since the last call, at most its last 64 KiB; a watcher begins with what comes."""
        try:
            size = log.stat().st_size
            seen = self._read.setdefault(log, 0 if self.here else size)
            self._read[log] = size
            if size <= seen:
                return b""
            with open_own(log) as file:
                file.seek(max(seen, size - _MOST_NEW_BYTES))
                return file.read(_MOST_NEW_BYTES)
        except OSError:
            return b""

    def close(self) -> None:
        """Print what happened since the last tick, and clear the table."""
        if self.view is not None:
            self._print_new_lines(self.view)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print_new_lines(self, view: RunView) -> None:
        events = view.read()
        # Once a look for each stage: counting what is left reads all rows.
        ends = {view.stage_of(event["job"]): event for event in events if event["kind"] == "end"}
        lines = [
            f"{_stamp(float(event['time']))}  "
            + re.sub(r"\s*\n\s*", "; ", text)
            + (describe_left(event, view) if event in ends.values() and not self._study else "")
            + (f"; {explain_memory(memory)}" if self.verbose and (memory := _memory(event)) else "")
            for event in events
            if self._is_told(event, view) and (text := self._describe(event, view))
        ]
        if lines:  # at once: on a terminal each printing draws the table anew
            say(self.console, "\n".join(lines))

    def _describe(self, event: Event, view: RunView) -> str:
        if self._study is None or event["kind"] != "trial":
            return describe(event, view)
        return self._study.describe(str(event.get("name")))

    def _is_told(self, event: Event, view: RunView) -> bool:
        kind, is_success = event["kind"], event.get("state") == "completed"
        if self._study is not None:
            if self.quiet:
                return kind == "trial" and event.get("state") in FAILED_TRIALS
            if kind in _OF_TRIALS and not self.verbose:
                return _left_something(event)
        if self.quiet:
            return kind == "end" and not is_success
        is_many = (
            self._study is not None
            or max([len(view.params), *(len(stage.units) for stage in view.stages.values())]) > _WHOLE_ROWS
        )
        if kind == "wait":
            return not is_many or event.get("on") not in _ROUTINE
        is_routine = kind == "admit" or (kind == "end" and is_success and self._live is not None)
        return not (is_many and is_routine) or _left_something(event)


def _stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def describe(event: Event, view: RunView) -> str:
    """Return an event as a line; empty for one that only the table shows."""
    kind, job, text = str(event["kind"]), event.get("job"), event.get("text")
    if view.kind == "commands" and len(view.params) == 1 and kind in _OF_MANY:
        return f"the command completed: {event['cause']}" if _left_something(event) else ""
    if kind in ("grow", "grow_device"):
        limit = ((view.last("budget") or {}).get("binding") or {}).get("limit_bytes", 0)
        if event["to_bytes"] - event["from_bytes"] < limit * _WORTH_A_LINE:
            return ""
    if not isinstance(text, str) and kind == "epoch":  # recorded by a script
        known = ("time", "job", "kind", "epoch", "num_epochs")
        numbers = [f"{name} {format_number(v)}" for name, v in event.items() if name not in known and is_number(v)]
        return f"{job} epoch {event['epoch']}/{event['num_epochs']}  {'  '.join(numbers)}".rstrip()
    if not isinstance(text, str):
        return ""
    return text.replace(job, view.name(job), 1) if job and kind in ("admit", "end") else text


def _memory(event: Event) -> Mapping[str, Any] | None:
    return memory_of(event) if event["kind"] == "epoch" else None


def describe_left(event: Event, view: RunView) -> str:
    """Return how many units of a stage are left after this end, and for how long; empty after the last one."""
    stage, rows = view.stage_of(event["job"]), view.rows()
    num_left, seconds = view.left(stage, rows)
    if not num_left:
        return ""
    left = f"; {num_left} of {len(view.states(stage, rows))} left"
    return left + (f", about {format_duration(seconds, short=True)}" if seconds else "")


def _left_something(event: Event) -> bool:
    """True if a job completed and left processes or shared memory behind."""
    return event["kind"] == "end" and event["state"] == "completed" and bool(event["cause"])


def read_room(view: RunView, *, here: bool = True) -> Room:
    """Return the limit that binds the run: measured ``here``, under the run's own limits, or as the run said last."""
    told = view.last("budget") or {"limits": [], "binding": {}}
    used = sum(row.status.used_bytes for row in view.rows())
    binding = told["binding"]
    if (not here or told.get("backend") == "slurm") and binding:
        events = [event for kind in ("admit", "end") for job in view.ids if (event := view.last(kind, job))]
        last = max(events, key=lambda event: float(event["time"]), default=binding)
        told_used: Any = last.get("used_bytes")
        return Room(binding["limit_bytes"], max(used, told_used if fits(told_used, int) else 0), binding["name"])
    cap = next((limit["limit_bytes"] for limit in told["limits"] if limit["name"] == "cap"), None)
    budget = Budget.read(cap_bytes=cap, cap_used_bytes=used)
    return Room(budget.limit_bytes, budget.limit_bytes - budget.headroom_bytes, budget.binding.name)


def read_pressure(root: Path = Path("/")) -> float | None:
    """Return the percentage of the last ten seconds in which some task waited for memory; None where it is not known.

    Source: Documentation/accounting/psi.rst. The first line of ``/proc/pressure/memory`` is
    ``some avg10=1.53 avg60=0.87 avg300=0.29 total=18209``.
    """
    try:
        found = re.match(r"some avg10=([0-9.]+)", (root / "proc/pressure/memory").read_text())
    except OSError:
        return None
    return float(found.group(1)) if found else None


def render(
    view: RunView, room: Room, width: int = _COLUMNS, pressure: float | None = None, headline: str = ""
) -> RenderableType:
    """Return the table of jobs, their counts and the budget, in at most 80 columns, with a headline above."""
    rows = view.rows()
    lines = [_cells(row, view) for row in _shown(rows)]
    columns = [(name, [cells[place] for cells in lines]) for place, name in enumerate(_HEADINGS)]
    columns = [(name, cells) for name, cells in columns if name not in _OPTIONAL or any(cell != "-" for cell in cells)]
    widths = [max(map(len, (name, *cells))) for name, cells in columns]
    gap = 2 if sum(widths[1:]) + _least(rows) + 2 * len(widths) <= _COLUMNS else 1
    left = max(width - sum(widths[1:]) - gap * len(widths), _least(rows))
    table = plain_table(*(name for name, _ in columns), left=("job", "node", "phase"), gap=gap)
    for name, *cells in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(name if len(name) <= left else f"{name[: left - 1]}…", *cells)
    return Group(*([Text(headline)] if headline else ()), table, *_footer(view, rows, room, pressure))


def _least(rows: Sequence[JobRow]) -> int:
    """Return the width of the longest job name without parameters."""
    return max((len(row.status.job_id) for row in rows), default=0)


def _shown(rows: Sequence[JobRow]) -> Sequence[JobRow]:
    if len(rows) <= _WHOLE_ROWS:
        return rows
    running = [row for row in rows if row.state == "running"][:_RUNNING_ROWS]
    ended = sorted((row for row in rows if row.status.ended), key=lambda row: row.status.ended or 0.0)
    return [*ended[-_ENDED_ROWS:], *running]


def _footer(view: RunView, rows: Sequence[JobRow], room: Room, pressure: float | None) -> Iterator[Text]:
    if len(view.stages) > 1 and view.kind != "tune":
        names = view.stage_names(rows)
        yield Text("stages: " + ", ".join(_progress(name, [*view.states(name, rows).values()]) for name in names))
    if counts := ", ".join(f"{name} {number}" for name, number in view.counts(rows).items()):
        num_stalled = sum(row.status.stalled for row in rows)
        counts += f"; {num_stalled} waiting for memory" if num_stalled else ""
        for stage in view.stage_names(rows) if view.kind != "tune" else ():
            eta = view.left(stage, rows)[1]
            of = f" of {stage}" if len(view.stages) > 1 else ""
            counts += f"; about {format_duration(eta, short=True)}{of} left" if eta else ""
        yield Text(counts)
    used = sum(row.status.used_bytes for row in rows)
    reserved = sum(max(row.reserved_bytes or 0, row.status.used_bytes) for row in rows if row.status.state == "running")
    free = max(0, room.limit_bytes - room.used_bytes)
    others = max(0, room.used_bytes - used)
    if (view.last("budget") or {}).get("backend") == "slurm":
        num_nodes = len({row.status.node for row in rows if row.status.state == "running"})
        nodes = f"{num_nodes} node{'' if num_nodes == 1 else 's'}"
        yield Text(
            f"jobs use {format_bytes(used)} of {format_bytes(reserved)} that Slurm gave them on {nodes}", style="dim"
        )
        return
    sizes = [min(size, room.limit_bytes) for size in (others, used, min(reserved - used, free))]
    columns = [_BAR_COLUMNS * size // max(1, room.limit_bytes) for size in sizes]
    bar = "".join(sign * number for sign, number in zip("o#=", columns, strict=True))[:_BAR_COLUMNS]
    yield Text(f"[{bar:.<{_BAR_COLUMNS}}] # jobs = reserved o others . free", style="dim")
    left = f"{format_bytes(free)} free of {format_bytes(room.limit_bytes)} ({room.name})"
    yield Text(f"jobs use {format_bytes(used)} of {format_bytes(reserved)}; {left}", style="dim")
    if pressure is not None:
        yield Text(f"memory pressure {pressure:.1f} % of the last ten seconds", style="dim")


def _progress(name: str, states: Sequence[str]) -> str:
    """Return a stage's progress, such as ``prepare kept`` or ``fold 2 of 5``."""
    if len(set(states)) == 1 and (len(states) == 1 or states[0] != "running"):
        return f"{name} {states[0]}"
    return f"{name} {sum(state in ('kept', 'reused', 'completed') for state in states)} of {len(states)}"


def _cells(row: JobRow, view: RunView) -> list[str | Text]:
    status = row.status
    state = "waiting" if row.state == "pending" else row.state
    if state == "running":
        state = "stalled" if status.stalled else state
    text = show_state(state)
    if state == "running":
        text = _share_done(view, row) or (status.phase or "starts")[:_PHASE_COLUMNS]
        text += f" ~{row.guess}" if row.guess else ""
    return [
        row.name,
        status.node or "-",
        Text(text, style=_STYLE.get(state, "")),
        f"{int(row.epochs_done * 10 + 1e-9) / 10:g}/{row.num_epochs or '?'}" if row.epochs_done else "-",
        *row.sizes,
        *(or_dash(seconds, partial(format_duration, short=True)) for seconds in (row.seconds, row.eta_seconds)),
    ]


def _share_done(view: RunView, row: JobRow) -> str:
    """Return a job's phase with the share that is done, such as ``build 45 %``."""
    event = view.last("progress", row.status.job_id)
    if event is None or event["phase"] != row.status.phase or not event["total"]:
        return ""
    return f"{event['phase'][:7]} {100 * event['done'] // event['total']} %"
