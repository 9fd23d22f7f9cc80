"""Numbers of unknown meaning as text, for a metric may be a count, a share or a loss; and plain tables of figures."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.files import fits, open_own
from memfit.rundir import Event, JobState, RunDir
from memfit.units import format_bytes, format_duration

T = TypeVar("T")
_END_BYTES = 4096  # what is read of a log to find its last counter
_PEAKS = {"allocated_peak_bytes": int, "reserved_peak_bytes": int}
_MEMORY = {"metric": str, "phases": {str: {"host_bytes": int, "devices": {str: _PEAKS}}}}


def format_number(value: float) -> str:
    """A metric's value: a count without decimals, else four of them, or an exponent where those would tell nothing.

    >>> [format_number(value) for value in (545, 0.03712, -0.00002, 123456.7, 0.0)]
    ['545', '0.0371', '-2.000e-05', '1.235e+05', '0.0000']
    """
    if isinstance(value, int):
        return str(value)
    if value and math.isfinite(value) and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3e}"
    return f"{value:.4f}"


def format_column(values: Iterable[float | None], statistics: Iterable[float | None]) -> list[str]:
    """A metric's values over folds and then their statistics; of counts the statistics get one decimal."""
    values = list(values)
    if all(value is None or (math.isfinite(value) and value == int(value)) for value in values):
        cells = ["-" if value is None else str(int(value)) for value in values]
        return cells + ["-" if value is None else f"{value:.1f}" for value in statistics]
    return ["-" if value is None else format_number(float(value)) for value in (*values, *statistics)]


def or_dash(value: T | None, text: Callable[[T], str]) -> str:
    """Return a value as text, or ``-`` for None.

    >>> or_dash(2, str), or_dash(None, str)
    ('2', '-')
    """
    return "-" if value is None else text(value)


def short_path(path: Path) -> str:
    """Return a path relative to the current folder where it lies below it.

    >>> short_path(Path.cwd() / "runs"), short_path(Path("/elsewhere"))
    ('runs', '/elsewhere')
    """
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print text without markup and without folding long lines."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def print_facts(facts: Iterable[tuple[str, str]], console: Console, width: int = 10) -> None:
    """Print a line for each fact: its name in bold, and its text from a column on."""
    for name, text in facts:
        console.print(Text.assemble((f"{name:<{width}}", "bold"), text), soft_wrap=True)


def plain_table(
    *headings: str, rows: Iterable[Sequence[str | Text]] = (), left: Collection[str] = (), gap: int = 2
) -> Table:
    """Return a table without lines; the columns named in ``left`` hold words."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for name in headings:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def summarize_metrics(units: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float | None, int]]:
    """Per metric the mean over units, the standard deviation (n - 1; None for one) and n."""
    found: dict[str, tuple[float, float | None, int]] = {}
    for name in dict.fromkeys(name for unit in units for name in unit):
        values = [unit[name] for unit in units if name in unit]
        sd = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan
        found[name] = (statistics.fmean(values), sd if len(values) > 1 else None, len(values))
    return found


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def metrics_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among what a job returned."""
    return {name: value for name, value in result.items() if is_number(value)}


def explain_time(job: JobState) -> str:
    """Return how long a job ran, and how long its earlier attempts did, such as ``22.1s + 33.0s``."""
    text = or_dash(job.seconds, format_duration)
    return f"{text} + {format_duration(job.earlier_seconds)}" if job.earlier_seconds else text


def sizes_of(job: JobState) -> tuple[str, str, str]:
    """Return what a job uses, its peak and its reservation, as text."""
    used, peak, reserved = (
        format_bytes(size) if size else "-" for size in (job.used_bytes, job.peak_bytes, job.reserved_bytes)
    )
    return used, peak, reserved


def explain_rank(rank: Mapping[str, Any], job: JobState) -> list[str]:
    """Return what a rank does and where, what it holds, its peak, and which part of its job's reservation that is."""
    sizes = [format_bytes(rank[name]) if rank[name] else "-" for name in ("pss_bytes", "peak_bytes")]
    if rank["device_bytes"]:
        sizes[0] += f" + {format_bytes(rank['device_bytes'])}"
    step = rank.get("step")
    does = rank["place"] if step is None else f"{rank['place']} {step}"
    does += f" on {rank['node']}" if rank.get("node") else ""
    share = f"{100 * rank['peak_bytes'] / job.reserved_bytes:.0f} %" if job.reserved_bytes else "-"
    return [does, *sizes, share]


def what_it_does(job: JobState, run: RunDir) -> str:
    """Return the phase that a running job marked; else how far its log says it is, with ``~log``, or ``runs``."""
    if job.phase or job.pid is None:  # a watcher writes the number when the program has begun
        return job.phase or "starts"
    return f"{found} ~log" if (found := counter_of(job, run).text) else "runs"


class Counted(NamedTuple):
    """The last counter in a job's logs, such as ``epoch 3/10``; empty if they count nothing.

    ``share`` is how much of the job that is, None where the whole is not known; ``time`` when the log grew last.
    """

    text: str = ""
    share: float | None = None
    time: float = 0.0


def counter_of(job: JobState, run: RunDir) -> Counted:
    """Return the last counter in a job's logs."""
    found = Counted()
    for name in ("out.log", "err.log"):
        with suppress(OSError), open_own(run.job_dir(job.id) / name) as log:
            stat = os.fstat(log.fileno())
            if not found.text and stat.st_mtime > (job.started or 0.0):  # not an earlier attempt's
                from memfit.diagnosis import last_counter

                log.seek(max(0, stat.st_size - _END_BYTES))
                found = Counted(*last_counter(log.read(_END_BYTES)), stat.st_mtime)
    return found


def explain_memory(event: Event) -> str:
    """Return the memory that an epoch's event holds, by phase; empty where a script recorded none."""
    memory = event.get("memory")
    if memory is None or not fits(memory, _MEMORY):
        return ""
    said = []
    for phase, one in memory["phases"].items():
        text = f"{phase}: host {format_bytes(one['host_bytes'])} ({memory['metric'].replace('_', '-')})"
        for device, peaks in one["devices"].items():
            allocated, reserved = (format_bytes(peaks[name]) for name in _PEAKS)
            text += f", {device} peak {allocated} of {reserved} reserved"
        said.append(text)
    return "; ".join(said)
