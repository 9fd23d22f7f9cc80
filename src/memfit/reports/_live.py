"""A run while it goes on: a live table on a terminal, with the budget below; timestamped lines elsewhere."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from memfit.files import fits, open_own
from memfit.memory import Budget
from memfit.reports._columns import (
    BAD,
    PHASE_COLUMNS,
    cells_of,
    columns_of,
    counter_of,
    epochs_done,
    short_names,
    size_text,
    what_it_does,
)
from memfit.reports._numbers import format_number, is_number, stamp
from memfit.reports._parts import plain_table, say
from memfit.reports._study import study_of
from memfit.rundir import LEVELS, Event, JobState, Reader, RunDir, RunState, left_something, level_of, seconds_left
from memfit.units import format_bytes, format_count, format_duration

_STYLE = {"running": "cyan", "completed": "green", "stalled": "yellow", "stopped": "yellow", "rank": "dim"}
_STYLE |= dict.fromkeys(BAD, "red")
_OPTIONAL = ("node", "epoch")  # columns that are left out if no job has them
_WIDE_ALONE = ("node", "memory", "peak", "reserved")  # columns that a narrow terminal does not show
#: All of so many jobs are shown; of more, at most so many that run, and the last that ended.
_WHOLE_ROWS, _RUNNING_ROWS, _ENDED_ROWS = 12, 40, 3
_BAR_COLUMNS = 40
_MOST_RANKS = 8  # more ranks of one job are counted
_REFRESH_SECONDS = 0.5
_MOST_NEW_BYTES = 1 << 16  # what is read of a log at one look
#: Where there is no table, a line says what goes on after so long a silence; the next after twice as long, up to this.
_SILENCE_SECONDS, _MOST_SILENCE_SECONDS = 10.0, 60.0
_MOST_TOLD = 3  # of more running jobs such a line names the first ones


class LiveRun:
    """Show a run until it is closed: call what ``show(run)`` returns at each tick.

    Each event is printed once as a line, down to a level: of a run of few jobs those that the table shows, too; of many
    jobs and of a study only those that are a line everywhere. A terminal also shows a table with the time that is left.
    Elsewhere a line says what goes on after each 10 s of silence; if it lasts, after twice as long, up to a minute. If
    it runs ``here``, this process's limits are its limits.
    """

    def __init__(self, console: Console, *, here: bool = True, quiet: bool = False, verbose: bool = False) -> None:
        self.console = console
        self.here = here
        self.quiet = quiet
        self.verbose = verbose
        #: What follows the run; None before ``show``.
        self.reader: Reader | None = None
        self._live: Live | None = None
        self._next = 0.0
        self._read: dict[Path, int] = {}
        self._said: set[tuple[str, str]] = set()
        self._waits_for = ""
        self._spoke, self._silence = time.monotonic(), _SILENCE_SECONDS

    def show(self, run: RunDir) -> Callable[[], None]:
        self.reader = Reader(run)
        self.reader.read()
        if not self.quiet:
            self._say(f"Run {run.path}")
            if (study := study_of(self.reader.state())) is not None:
                self._say(study.headline())
            if self.console.is_terminal:
                self._live = Live(console=self.console, auto_refresh=False, transient=True)
                self._live.start()
        return partial(self._tick, self.reader)

    def _tick(self, reader: Reader) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _REFRESH_SECONDS
        events, state = reader.read(), _with_forecasts(reader.state())
        study = study_of(state)
        self._print_lines(events, state)
        self._print_warnings(state)
        headline = study.headline() if study else ""
        if self._live is not None:
            room, width = read_room(state, here=self.here), self.console.width
            self._live.update(render(state, room, headline, width=width), refresh=True)
        elif not self.quiet and state.outcome == {}:
            self._print_sign_of_life(state, headline)

    def _say(self, text: str, style: str | None = None) -> None:
        """Print a line; a terminal, where a table stands below, breaks a long one between words."""
        if self._live is None:
            say(self.console, text, style)
        else:
            self.console.print(Text(text, style or ""))
        self._spoke, self._silence = time.monotonic(), _SILENCE_SECONDS

    def _print_sign_of_life(self, state: RunState, headline: str) -> None:
        """After a silence print how long the run has lasted, what runs, and what the others wait for."""
        if time.monotonic() - self._spoke < self._silence:
            return
        own = (state.run.job_dir(job.id) / name for job in state.running for name in ("out.log", "err.log"))
        if state.is_one and any(log.exists() and time.time() - log.stat().st_mtime < self._silence for log in own):
            return  # a command that prints is not talked over
        silence = min(2 * self._silence, _MOST_SILENCE_SECONDS)
        self._say(f"{stamp(state.now)}  {headline or explain_now(state, self._waits_for)}", "dim")
        self._silence = silence

    def _print_warnings(self, state: RunState) -> None:
        for job in state.running:
            if new := self._new_of(state.run.job_dir(job.id) / "err.log"):
                from memfit.diagnosis import find_shortage  # most jobs say nothing, and its table takes long to load

                line = find_shortage(new)
                if line and (job.id, line) not in self._said:
                    self._said.add((job.id, line))
                    self._say(f"{stamp(time.time())}  {job.name} says: {line}", "red")
            if job.growth_told and (job.id, "grows") not in self._said:
                self._said.add((job.id, "grows"))
                self._say(f"{stamp(time.time())}  {job.growth_told}", "yellow")

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
        if self.reader is not None and (events := self.reader.read()):
            self._print_lines(events, self.reader.state())
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print_lines(self, events: Sequence[Event], state: RunState) -> None:
        is_study = state.kind == "tune"
        is_many = len(state.params) > _WHOLE_ROWS or any(len(one.units) > _WHOLE_ROWS for one in state.stages.values())
        lowest = LEVELS.index("verbose" if self.verbose else "line" if is_many or is_study else "table")
        lines = []
        for event in events:
            if event["kind"] in ("wait", "admit"):
                self._waits_for = str(event.get("reason") or "") if event["kind"] == "wait" else ""
            is_failure = event["kind"] in ("end", "trial") and event.get("state") not in ("completed", "pruned")
            is_told = LEVELS.index(level_of(event)) <= lowest and (is_failure or not self.quiet)
            text = describe(event, state) if is_told else ""
            if text:
                lines.append(f"{stamp(float(event['time']))}  " + re.sub(r"\s*\n\s*", "; ", text))
        if lines:  # at once: on a terminal each printing draws the table anew
            self._say("\n".join(lines))


def _with_forecasts(state: RunState) -> RunState:
    """Return the state with an end for each running job whose log alone says how far it is."""
    jobs = dict(state.jobs)
    for job in state.running:
        if job.eta_seconds is None and job.pid and (found := counter_of(job, state.run)).share:
            earlier = job.earlier_seconds if job.checkpointed is not None else 0.0  # else it began anew
            began = (job.started or found.time) - earlier
            left = seconds_left((began, 0.0), (found.time, found.share), 1.0, state.now)
            jobs[job.id] = replace(job, eta_seconds=left)
    return replace(state, jobs=jobs)


def describe(event: Event, state: RunState) -> str:
    """Return an event as a line; empty for one that only the table shows."""
    kind, job, text = str(event["kind"]), event.get("job"), event.get("text")
    if state.is_one and left_something(event):
        return f"the command completed: {event['cause']}"
    if not isinstance(text, str) and kind == "epoch":  # recorded by a script
        known = ("time", "job", "kind", "level", "epoch", "num_epochs")
        numbers = [f"{name} {format_number(v)}" for name, v in event.items() if name not in known and is_number(v)]
        return f"{job} epoch {event['epoch']}/{event.get('num_epochs') or '?'}  {'  '.join(numbers)}".rstrip()
    if not isinstance(text, str) or kind == "growth":  # the warning tells that, also who looks on later
        return ""
    return text.replace(job, state.name(job), 1) if job and kind in ("admit", "end") else text


def explain_now(state: RunState, waits_for: str = "") -> str:
    parts = []
    for job in state.running[:_MOST_TOLD]:
        left = f", about {format_duration(job.eta_seconds, short=True)} left" if job.eta_seconds else ""
        does = "waits for memory" if job.stalled else what_it_does(job, state.run)
        parts.append(f"{job.name} {does}{epochs_done(job)}{left}")
    if (more := len(state.running) - _MOST_TOLD) > 0:
        parts.append(f"{more} more run")
    if waiting := state.counts.get("waiting"):
        why = f" ({waits_for})" if waits_for else ""
        parts.append(f"{waiting} wait{'s' if waiting == 1 else ''}{why}")
    return f"after {format_duration(state.wall_seconds, short=True)}: {'; '.join(parts) or 'no job runs yet'}"


# The table


@dataclass(frozen=True)
class Room:
    """The limit that binds a run now, and how much of it everyone uses."""

    limit_bytes: int
    used_bytes: int
    name: str


def read_room(state: RunState, *, here: bool = True) -> Room:
    """Return the limit that binds the run: measured ``here``, under the run's own limits, or as the run said last."""
    told, used = state.budget, sum(job.used_bytes for job in state.jobs.values())
    if told and (not here or told.get("backend")):
        binding = told["binding"]
        said = binding.get("used_bytes") if state.told_bytes is None else state.told_bytes
        return Room(binding["limit_bytes"], max(used, said if fits(said, int) else 0), binding["name"])
    cap = next((limit["limit_bytes"] for limit in told.get("limits", ()) if limit["name"] == "cap"), None)
    budget = Budget.read(cap_bytes=cap, cap_used_bytes=used)
    return Room(budget.limit_bytes, budget.limit_bytes - budget.headroom_bytes, budget.binding.name)


def render(state: RunState, room: Room, headline: str = "", *, width: int = 80) -> RenderableType:
    """Return the table of jobs, their counts and the budget, with a headline above.

    A narrow terminal shows of a job the parameters in which the jobs differ, and neither node nor sizes.
    """
    rows = [*state.jobs.values()]
    lines = [line for row in _shown(rows) for line in (cells_of(row, state.run), *_rank_lines(row))]
    shown = columns_of("live")
    shown = [one for one in shown if one not in _OPTIONAL or any(line.get(one, "-") != "-" for line in lines)]
    narrow = [one for one in shown if one not in _WIDE_ALONE]
    for columns, names in ((shown, {}), (narrow, short_names(state))):
        lines = [line | {"job": names.get(line["job"], line["job"])} for line in lines]
        widths = [max(map(len, (name, *(line.get(name, "") for line in lines)))) for name in columns]
        if sum(widths) + len(widths) <= width:
            break
    styles = [_STYLE.get(line["state"], "") for line in lines]
    cells = [
        [Text(line.get(name, ""), style if name == "phase" else "") for name in columns]
        for line, style in zip(lines, styles, strict=True)
    ]
    table = plain_table(*columns, rows=cells, left=("job", "node", "phase"), gap=1)
    for column, least in zip(table.columns[1:], widths[1:], strict=True):
        column.min_width = least
    return Group(*([Text(headline)] if headline else ()), table, *_footer(state, rows, room, width))


def _shown(rows: Sequence[JobState]) -> Sequence[JobState]:
    if len(rows) <= _WHOLE_ROWS:
        return rows
    running = [row for row in rows if row.shown == "running"][:_RUNNING_ROWS]
    ended = sorted((row for row in rows if row.ended), key=lambda row: row.ended or 0.0)
    return [*ended[-_ENDED_ROWS:], *running]


def _footer(state: RunState, rows: Sequence[JobState], room: Room, width: int) -> Iterator[Text]:
    if len(state.stages) > 1 and state.kind != "tune":
        names = state.stage_names
        yield Text("stages: " + ", ".join(_progress(name, [*state.units[name].values()]) for name in names))
    if counts := ", ".join(f"{name} {number}" for name, number in state.counts.items()):
        num_stalled = sum(row.stalled for row in rows)
        counts += f"; {num_stalled} waiting for memory" if num_stalled else ""
        for stage in state.stage_names if state.kind != "tune" else ():
            eta = state.left(stage)
            of = f" of {stage}" if len(state.stages) > 1 else ""
            counts += f"; about {format_duration(eta, short=True)}{of} left" if eta else ""
        yield Text(counts)
    used = sum(row.used_bytes for row in rows)
    reserved = sum(max(row.reserved_bytes or 0, row.used_bytes) for row in rows if row.state == "running")
    free = max(0, room.limit_bytes - room.used_bytes)
    others = max(0, room.used_bytes - used)
    held = f"jobs use {format_bytes(used)} of {format_bytes(reserved)}"
    if queue := state.budget.get("backend"):
        nodes = format_count(len({row.node for row in rows if row.state == "running"}), "node")
        yield Text(f"{held} that {queue.capitalize()} gave them on {nodes}", style="dim")
        return
    sizes = [min(size, room.limit_bytes) for size in (others, used, min(reserved - used, free))]
    length = max(10, min(_BAR_COLUMNS, width - _BAR_COLUMNS))
    columns = [length * size // max(1, room.limit_bytes) for size in sizes]
    bar = "".join(sign * number for sign, number in zip("o#=", columns, strict=True))[:length]
    yield Text(f"[{bar:.<{length}}] # jobs = reserved o others . free", style="dim")
    left = f"{format_bytes(free)} free of {format_bytes(room.limit_bytes)} ({room.name})"
    yield Text(f"{held}; {left}", style="dim")


def _progress(name: str, states: Sequence[str]) -> str:
    """Return a stage's progress, such as ``prepare kept`` or ``fold 2 of 5``."""
    if len(set(states)) == 1 and (len(states) == 1 or states[0] != "running"):
        return f"{name} {states[0]}"
    return f"{name} {sum(state in ('kept', 'reused', 'completed') for state in states)} of {len(states)}"


def _rank_lines(job: JobState) -> Iterator[dict[str, str]]:
    ranks, none = job.ranks if job.shown == "running" else (), {"state": "", "node": "-", "epoch": "-"}
    for rank in ranks[:_MOST_RANKS]:
        step = "" if rank.get("step") is None else f" {rank['step']}"
        node = f" on {rank['node']}" if rank.get("node") else ""
        sizes = {"memory": size_text(rank["pss_bytes"]), "peak": size_text(rank["peak_bytes"]), "reserved": "-"}
        if rank["device_bytes"]:
            sizes["memory"] += f" + {format_bytes(rank['device_bytes'])}"
        if job.reserved_bytes:
            sizes["reserved"] = f"{100 * rank['peak_bytes'] / job.reserved_bytes:.0f} %"
        phase = f"{rank['place']}{step}{node}"[:PHASE_COLUMNS]
        yield none | {"job": f"  rank {rank['rank']}", "phase": phase, "state": "rank"} | sizes
    if len(ranks) > _MOST_RANKS:
        yield none | {"job": f"  and {len(ranks) - _MOST_RANKS} more"}
