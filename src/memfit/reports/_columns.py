"""What is told of a job, column by column, and of its logs."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from memfit.files import open_own
from memfit.reports._numbers import or_dash, stamp
from memfit.rundir import JobState, RunDir, RunState, show_state
from memfit.units import format_bytes, format_duration

BAD = frozenset({"failed", "out_of_memory", "node_fail", "timeout"})  # ends that are failures
PHASE_COLUMNS = 18  # the width of a counter such as ``12000/100000 ~log``
_END_BYTES = 4096  # what is read of a log to find its last counter


def size_text(size: int | None) -> str:
    return format_bytes(size) if size else "-"


def _time(job: JobState) -> str:
    """Return how long a job ran, and how long its earlier attempts did, such as ``22.1s + 33.0s``."""
    text = or_dash(job.seconds, format_duration)
    return f"{text} + {format_duration(job.earlier_seconds)}" if job.earlier_seconds else text


class Column(NamedTuple):
    """A column of a job: its text, and the reports that show it."""

    text: Callable[[JobState], str]
    shown_by: Collection[str]


_LIVE, _ALL = {"live", "ps"}, {"live", "ps", "summary", "page"}
#: The columns of a job by their headings: those of the live table, of ``memfit ps``, of the summary and of the page.
COLUMNS: Mapping[str, Column] = {
    "job": Column(lambda job: job.name, {"live", "ps", "page"}),
    "node": Column(lambda job: job.node or "-", {"live"}),
    "pid": Column(lambda job: f"{job.node}{job.node and ':'}{job.pid or '-'}", {"ps"}),
    "state": Column(lambda job: show_state(job.shown), {"summary", "page"}),
    "phase": Column(lambda job: job.phase or "-", _LIVE),
    "epoch": Column(lambda job: epochs_done(job).strip() or "-", {"live"}),
    "memory": Column(lambda job: size_text(job.used_bytes), _LIVE),
    "peak": Column(lambda job: size_text(job.peak_bytes), _ALL),
    "reserved": Column(lambda job: size_text(job.reserved_bytes), _ALL),
    "start": Column(lambda job: or_dash(job.started, stamp), {"page"}),
    "time": Column(_time, _ALL),
    "ETA": Column(lambda job: or_dash(job.eta_seconds, partial(format_duration, short=True)), {"live"}),
    "attempts": Column(lambda job: str(job.attempt) if job.attempt > 1 else "-", {"page"}),
}


def columns_of(report: str) -> list[str]:
    return [name for name, column in COLUMNS.items() if report in column.shown_by]


def cells_of(job: JobState, run: RunDir) -> dict[str, str]:
    """Return what is told of a job while it runs: all columns, its time in short, and below ``phase`` what it does."""
    state = "waiting" if job.shown == "pending" else "stalled" if job.shown == "running" and job.stalled else job.shown
    phase = what_it_does(job, run)[:PHASE_COLUMNS] if state == "running" else show_state(state)
    time = or_dash(job.seconds, partial(format_duration, short=True))
    return {name: column.text(job) for name, column in COLUMNS.items()} | {"phase": phase, "time": time, "state": state}


def epochs_done(job: JobState) -> str:
    """Return how many epochs a job has done, such as `` 2.5/8``; empty before the first step."""
    return f" {int(job.epochs_done * 10 + 1e-9) / 10:g}/{job.num_epochs or '?'}" if job.epochs_done else ""


def what_it_does(job: JobState, run: RunDir) -> str:
    """Return the phase that a running job marked; else how far its log says it is, with ``~log``, or ``runs``."""
    if job.phase or job.pid is None:  # a watcher writes the number when the program has begun
        return job.phase or "starts"
    return f"{found} ~log" if (found := counter_of(job, run).text) else "runs"


def varied_params(state: RunState) -> set[str]:
    every = [*state.params.values()]
    return {name for one in every for name in (*one, *every[0]) if one.get(name) != every[0].get(name)}


def short_names(state: RunState) -> dict[str, str]:
    """Return for each job's name the parameters in which the jobs differ; its id where it has none."""
    varied, found = varied_params(state), {}
    for job in state.jobs.values():
        own = [f"{name}={value}" for name, value in job.params.items() if name in varied]
        found[job.name] = " ".join(own) or job.id
    return found


class Counted(NamedTuple):
    """The last counter in a job's logs, such as ``epoch 3/10``; empty if they count nothing.

    ``share`` is how much of the job that is, None where the whole is not known; ``time`` when the log grew last.
    """

    text: str = ""
    share: float | None = None
    time: float = 0.0


def counter_of(job: JobState, run: RunDir) -> Counted:
    found = Counted()
    for name in ("out.log", "err.log"):
        with suppress(OSError), open_own(run.job_dir(job.id) / name) as log:
            stat = os.fstat(log.fileno())
            if not found.text and stat.st_mtime > (job.started or 0.0):  # not an earlier attempt's
                from memfit.diagnosis import last_counter

                log.seek(max(0, stat.st_size - _END_BYTES))
                found = Counted(*last_counter(log.read(_END_BYTES)), stat.st_mtime)
    return found
