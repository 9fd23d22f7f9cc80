"""This user's runs on this host: which live, what they take, and which one a word of the user's means."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from memfit.errors import MemfitError, UsageError, nearest
from memfit.files import check_owner
from memfit.memory import list_entries
from memfit.reports._columns import cells_of, columns_of
from memfit.reports._parts import Inset, Note, Part, Table
from memfit.rundir import JobState, Reader, RunDir, liveness, read, show_state
from memfit.units import format_bytes

_ROOT = Path("runs")


@dataclass(frozen=True)
class Overview:
    """A run at a glance: its supervisor's process id, its jobs, or why it cannot be read."""

    run: RunDir
    supervisor: int | None
    state: str
    counts: Mapping[str, int]
    running: Sequence[JobState]
    problem: str = ""

    @property
    def is_live(self) -> bool:
        """Whether it has a supervisor, or jobs that go on without one."""
        return self.supervisor is not None or bool(self.running)

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": str(self.run.path),
            "supervisor": self.supervisor,
            "state": self.state,
            "counts": dict(self.counts),
            "used_bytes": sum(row.used_bytes for row in self.running),
            # What one uses beyond its reservation counts too.
            "reserved_bytes": sum(max(row.reserved_bytes or 0, row.used_bytes) for row in self.running),
            "problem": self.problem,
            "jobs": [row.to_row() for row in self.running],
        }


class Target(NamedTuple):
    """What a word of the user's means: a run, or one of its jobs."""

    run: RunDir
    job_id: str | None = None


def look_at(run: RunDir, supervisor: int | None = None) -> Overview:
    """A run at a glance; the supervisor's process id is taken as given."""
    try:
        live = liveness(run)
        state, held = read(run), set(live.jobs)
        running = [job for job in state.jobs.values() if job.id in held]
        if supervisor is None:  # nobody settles yet what a dead watcher left: it is told as the next start records it
            lost = {job.id: replace(job, state="node_fail", used_bytes=0) for job in state.jobs.values()
                    if job.state == "running" and job.id not in held}  # fmt: skip
            state = replace(state, jobs={**state.jobs, **lost})
        return Overview(run, supervisor, live.state, state.counts, running)
    except (OSError, MemfitError) as error:
        return Overview(run, supervisor, "unknown", {}, [], str(error).splitlines()[0])


def list_runs(*, claims: Path | None = None, root: Path | None = None) -> list[Overview]:
    """Every live run of this user on this host, newest first, wherever it lies."""
    entries = [entry for entry in list_entries(claims) if entry.host == socket.gethostname()]
    entries.sort(key=lambda entry: entry.started, reverse=True)
    looks = [look_at(RunDir(entry.run), entry.pid if entry.alive else None) for entry in entries]
    found = {one.run.path: one for one in reversed(looks) if one.is_live}
    runs = list(reversed(found.values()))
    if root is not None:
        runs += [look_at(run) for run in _below(root) if run.path not in found]
    return runs


def find_run(
    name: str | None = None, *, claims: Path | None = None, root: Path = _ROOT, writes: bool = False
) -> RunDir:
    """The run that a word means; without one, the newest live run, below ``root`` first, or else the newest there.

    What ``writes`` into the run gets one below ``root`` alone, unless a word names another.
    """
    if name is not None:
        return find_target(name, claims=claims, root=root).run
    live = [] if writes else [one.run for one in list_runs(claims=claims)]
    live.sort(key=lambda run: not run.path.is_relative_to(root.absolute()))
    found = [*live, *_below(root)]
    if not found:
        raise UsageError(
            f"{'' if writes else 'no run of yours is alive on this host, and '}there is no run below {root}.",
            rule=f"without a name the newest run {f'below {root} ' if writes else ''}is meant.",
            remedy="start one: memfit run -- python train.py, or name a run directory",
        )
    return found[0]


def find_runs(name: str, root: Path = _ROOT) -> list[RunDir]:
    """Return the runs of an experiment, newest first; it is named by its folder, or by its name below ``root``."""
    path = Path(name)
    found = RunDir.all(path.parent, path.name) or RunDir.all(root, name)
    if not found:
        known = dict.fromkeys(run.path.parent.name for run in _below(root))
        raise UsageError(
            f"'{name}' names no experiment that has runs of yours.",
            rule=f"an experiment is named by its folder, or by its name below {root}.",
            remedy=nearest(name, known) if known else "give its folder: <runs_dir>/<experiment>",
        )
    return [RunDir.open(run.path) for run in found]


def find_target(name: str, *, claims: Path | None = None, root: Path = _ROOT) -> Target:
    """Return the run or job that a word means.

    A run is named by its folder, by its name, or by its experiment, which stands for the newest run that is alive, or
    else for the newest below ``root``; a job by ``RUN/JOB`` or by its folder.
    """
    name = name.rstrip("/") or name
    runs = [*(one.run for one in list_runs(claims=claims)), *_below(root)]
    if (run := _find(name, runs)) is not None:
        return Target(run)
    head, _, job_id = name.rpartition("/")
    named = _find(head.removesuffix("/jobs"), runs) if head else None
    is_name = job_id not in ("", ".", "..")  # those would be the folder of all jobs, or the run's own
    if named is not None and is_name and (named.job_dir(job_id).is_dir() or job_id in Reader(named).params):
        return Target(named, job_id)
    for path in root.glob("*/run_*"):
        if (head or name) in (path.name, path.parent.name):
            check_owner(path)
    known = [text for run in runs for text in (run.path.parent.name, run.path.name)]
    known += [f"{head}/{job.name}" for job in (named.path / "jobs").glob("*/")] if named else []
    raise UsageError(
        f"'{name}' names no run and no job.",
        rule="a run is named by its folder, its name or its experiment; a job by RUN/JOB.",
        remedy=f"{nearest(name, dict.fromkeys(known))}; memfit ps --all lists the runs" if known else "see memfit ps",
    )


def _find(name: str, runs: Sequence[RunDir]) -> RunDir | None:
    """Return the run of this folder, or the first one of this name or experiment."""
    path = Path(name)
    if (path / "run.json").exists():
        return RunDir.open(path)
    if path.name and (found := RunDir.all(path.parent, path.name)):
        return RunDir.open(found[0].path)
    return next((run for run in runs if name in (run.path.name, run.path.parent.name)), None)


def _below(root: Path) -> list[RunDir]:
    """The runs of this user below a folder of runs, newest first."""
    found = [run for folder in root.glob("*/") for run in RunDir.all(root, folder.name)]
    return sorted(found, key=lambda run: run.path.name, reverse=True)


def view_runs(found: Iterable[Overview]) -> Iterator[Part]:
    for one in found:
        counts = ", ".join(f"{name} {number}" for name, number in one.counts.items()) or "no jobs"
        if one.problem:
            text = one.problem
        elif one.is_live:
            who = "none (its jobs go on; memfit resume)" if one.supervisor is None else str(one.supervisor)
            used, reserved = (format_bytes(one.to_dict()[name]) for name in ("used_bytes", "reserved_bytes"))
            text = f"supervisor {who}; {counts}; {used} used of {reserved} reserved"
        else:
            text = f"{show_state(one.state)}; {counts}"
        headings, lines = columns_of("ps"), [cells_of(row, one.run) for row in one.running]
        table = Table(headings, [[line[name] for name in headings] for line in lines], ("job", "phase"))
        yield Note(str(one.run.path), "bold")
        yield Inset([text, *([table] if lines else ()), *filter(None, (job.growth_told for job in one.running))], 2)
