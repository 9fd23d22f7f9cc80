"""The table of a run's jobs on a terminal: as wide as that is, with the budget below."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.files import fits
from memfit.memory import Budget
from memfit.reports._columns import PHASE_COLUMNS, cells_of, explain_rank
from memfit.reports._parts import plain_table
from memfit.rundir import JobState, RunState
from memfit.units import format_bytes, format_count, format_duration

_STYLE = {
    "running": "cyan",
    "completed": "green",
    "failed": "red",
    "out_of_memory": "red",
    "node_fail": "red",
    "timeout": "red",
    "stalled": "yellow",
    "stopped": "yellow",
    "rank": "dim",
}
_HEADINGS = ("job", "node", "phase", "epoch", "memory", "peak", "reserved", "time", "ETA")
_REPEATED = frozenset({"fold", "seed"})  # parameters that repeat a training: a mean over them says something
_OPTIONAL = ("node", "epoch")  # columns that are left out if no job has them
#: Columns that give way where the terminal is narrow, one after the other.
_GIVING_WAY = ("peak", "reserved", "node", "memory")
#: All of so many jobs are shown; of more, at most so many that run, and the last that ended.
WHOLE_ROWS, _RUNNING_ROWS, _ENDED_ROWS = 12, 40, 3
_BAR_COLUMNS = 40
_MOST_RANKS = 8  # more ranks of one job are counted


@dataclass(frozen=True)
class Room:
    """The limit that binds a run now, and how much of it everyone uses."""

    limit_bytes: int
    used_bytes: int
    name: str


def read_room(state: RunState, *, here: bool = True) -> Room:
    """Return the limit that binds the run: measured ``here``, under the run's own limits, or as the run said last."""
    told, used = state.budget, sum(job.used_bytes for job in state.jobs.values())
    if told and (not here or told.get("backend") == "slurm"):
        binding = told["binding"]
        said = binding.get("used_bytes") if state.told_bytes is None else state.told_bytes
        return Room(binding["limit_bytes"], max(used, said if fits(said, int) else 0), binding["name"])
    cap = next((limit["limit_bytes"] for limit in told.get("limits", ()) if limit["name"] == "cap"), None)
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
    state: RunState, room: Room, pressure: float | None = None, headline: str = "", *, width: int = 80
) -> RenderableType:
    """Return the table of jobs, their counts and the budget, with a headline above.

    Where a terminal is narrow, a job goes by the parameters in which the jobs differ, and sizes give way.
    """
    rows, names = [*state.jobs.values()], short_names(state)
    lines = [line for row in _shown(rows) for line in (cells_of(row, state.run), *_rank_lines(row))]
    shown = [one for one in _HEADINGS if one not in _OPTIONAL or any(line.get(one, "-") != "-" for line in lines)]
    for dropped in range(-1, len(_GIVING_WAY) + 1):
        if dropped == 0:
            lines = [line | {"job": names.get(line["job"], line["job"])} for line in lines]
        columns = [name for name in shown if name not in _GIVING_WAY[: max(0, dropped)]]
        widths = [max(map(len, (name, *(line.get(name, "") for line in lines)))) for name in columns]
        if sum(widths) + len(widths) <= width:
            break
    cells = [[Text(line.get(name, ""), _style(name, line)) for name in columns] for line in lines]
    table = plain_table(*columns, rows=cells, left=("job", "node", "phase"), gap=1)
    table.columns[0].overflow = "ellipsis"
    for column, least in zip(table.columns[1:], widths[1:], strict=True):
        column.min_width = least
    return Group(*([Text(headline)] if headline else ()), table, *_footer(state, rows, room, pressure, width))


def _style(name: str, line: Mapping[str, str]) -> str:
    return _STYLE.get(line["state"], "") if name == "phase" else ""


def short_names(state: RunState) -> dict[str, str]:
    """Return for each job's name the parameters in which the jobs differ; its name where it has none."""
    values = [*state.params.values()]
    found = {}
    for job in state.jobs.values():
        own = [f"{name}={value}" for name, value in job.params.items() if any(one.get(name) != value for one in values)]
        found[job.name] = " ".join(own) or job.id
    return found


def are_repetitions(state: RunState) -> bool:
    """Return whether the jobs differ in fold or seed alone, so that a mean over them says something."""
    values = [*state.params.values()]
    names = {name for one in values for name in one if any(other.get(name) != one[name] for other in values)}
    return bool(names) and names <= _REPEATED


def _shown(rows: Sequence[JobState]) -> Sequence[JobState]:
    if len(rows) <= WHOLE_ROWS:
        return rows
    running = [row for row in rows if row.state == "running"][:_RUNNING_ROWS]
    ended = sorted((row for row in rows if row.ended), key=lambda row: row.ended or 0.0)
    return [*ended[-_ENDED_ROWS:], *running]


def _footer(
    state: RunState, rows: Sequence[JobState], room: Room, pressure: float | None, width: int
) -> Iterator[Text]:
    if len(state.stages) > 1 and state.kind != "tune":
        names = state.stage_names
        yield Text("stages: " + ", ".join(_progress(name, [*state.units[name].values()]) for name in names))
    if counts := ", ".join(f"{name} {number}" for name, number in state.counts.items()):
        num_stalled = sum(row.stalled for row in rows)
        counts += f"; {num_stalled} waiting for memory" if num_stalled else ""
        for stage in state.stage_names if state.kind != "tune" else ():
            eta = state.left(stage)[1]
            of = f" of {stage}" if len(state.stages) > 1 else ""
            counts += f"; about {format_duration(eta, short=True)}{of} left" if eta else ""
        yield Text(counts)
    used = sum(row.used_bytes for row in rows)
    reserved = sum(max(row.reserved_bytes or 0, row.used_bytes) for row in rows if row.own == "running")
    free = max(0, room.limit_bytes - room.used_bytes)
    others = max(0, room.used_bytes - used)
    if state.budget.get("backend") == "slurm":
        num_nodes = len({row.node for row in rows if row.own == "running"})
        nodes = format_count(num_nodes, "node")
        yield Text(
            f"jobs use {format_bytes(used)} of {format_bytes(reserved)} that Slurm gave them on {nodes}", style="dim"
        )
        return
    sizes = [min(size, room.limit_bytes) for size in (others, used, min(reserved - used, free))]
    length = max(10, min(_BAR_COLUMNS, width - _BAR_COLUMNS))
    columns = [length * size // max(1, room.limit_bytes) for size in sizes]
    bar = "".join(sign * number for sign, number in zip("o#=", columns, strict=True))[:length]
    yield Text(f"[{bar:.<{length}}] # jobs = reserved o others . free", style="dim")
    left = f"{format_bytes(free)} free of {format_bytes(room.limit_bytes)} ({room.name})"
    yield Text(f"jobs use {format_bytes(used)} of {format_bytes(reserved)}; {left}", style="dim")
    if pressure is not None:
        yield Text(f"memory pressure {pressure:.1f} % of the last ten seconds", style="dim")


def _progress(name: str, states: Sequence[str]) -> str:
    """Return a stage's progress, such as ``prepare kept`` or ``fold 2 of 5``."""
    if len(set(states)) == 1 and (len(states) == 1 or states[0] != "running"):
        return f"{name} {states[0]}"
    return f"{name} {sum(state in ('kept', 'reused', 'completed') for state in states)} of {len(states)}"


def _rank_lines(job: JobState) -> Iterator[dict[str, str]]:
    """Yield a line for each rank of a running job: what it does, its memory, its peak and its part of the limit."""
    ranks, none = job.ranks if job.state == "running" else (), {"state": "", "node": "-", "epoch": "-"}
    for rank in ranks[:_MOST_RANKS]:
        does, *sizes = explain_rank(rank, job)
        named = dict(zip(("memory", "peak", "reserved"), sizes, strict=True))
        yield none | {"job": f"  rank {rank['rank']}", "phase": does[:PHASE_COLUMNS], "state": "rank"} | named
    if len(ranks) > _MOST_RANKS:
        yield none | {"job": f"  and {len(ranks) - _MOST_RANKS} more"}
