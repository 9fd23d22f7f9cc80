"""What a run would do, before anything starts: which jobs run and why, what one takes, and how many fit at once."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memfit import config
from memfit.errors import DamagedError
from memfit.jobs import JobStatus, read_status
from memfit.memory import Budget, Footprint, count_fitting, reservation_bytes, rooms_of
from memfit.pipeline._graph import ALL, PASSED, Choice, Graph, listed
from memfit.pipeline._grid import expand, fill
from memfit.pipeline._manifest import find_manifest
from memfit.pipeline._order import Order, order_of_command, order_of_config
from memfit.pipeline._results import Unit
from memfit.pipeline._run import find_run
from memfit.pipeline._supervise import read_budget
from memfit.rundir import RunDir, read_json
from memfit.units import format_duration

_MOST_RUNS = 20
#: So many jobs at once have a row each, beside as many as fit and all.
_FIRST_ROWS = 4


@dataclass(frozen=True)
class AtOnce:
    """What running some jobs of a stage side by side takes.

    Attributes:
        num_jobs: Jobs at once.
        needed_bytes: What they reserve together.
        margin_bytes: What is then left of the budget; below 0 when they do not fit.
        fits: Whether they fit the budget, that of the GPUs too.
        seconds: How long all jobs of the stage then take; None while no job was timed.
    """

    num_jobs: int
    needed_bytes: int
    margin_bytes: int
    fits: bool
    seconds: float | None


@dataclass(frozen=True)
class StagePlan:
    """What a run would do with one stage.

    Attributes:
        name: The stage.
        states: How many of its units are ``kept``, ``reused``, ``ready`` (would run), ``waiting`` and so on.
        num_runs: How many jobs would run; None while the list of its units is not known.
        why: Why they run, are skipped or stop the run.
        waits_for: The stages that decide whether, and for which units, it runs.
        saved_seconds: How long it took to make the results that are kept or reused.
        footprint: What one job takes; None while that is not known.
        origin: Where that figure comes from.
        measure: The command that measures one job, where nothing is known; and the one that estimates GPU memory.
        rows: How many at once take how much, and how long.
        advice: How many run at once, and what lets more of them fit.
    """

    name: str
    states: Mapping[str, int]
    num_runs: int | None
    why: str
    waits_for: Sequence[str]
    saved_seconds: float
    footprint: Footprint | None = None
    origin: str = ""
    measure: Sequence[str] = ()
    rows: Sequence[AtOnce] = ()
    advice: str = ""


@dataclass(frozen=True)
class RunPlan:
    """What a run would do.

    Attributes:
        run: The run that would go on; None for a new one.
        budget: What may be used now.
        stages: The stages that are asked for, in order.
        commands: The commands that would run; empty for a workload.
    """

    run: Path | None
    budget: Budget
    stages: Sequence[StagePlan]
    commands: Sequence[Sequence[str]] = ()

    @property
    def fits(self) -> bool:
        """False if a job of known size does not fit even alone."""
        return all(stage.rows[0].fits for stage in self.stages if stage.rows)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form; sizes in bytes, durations in seconds."""
        stages = []
        for stage in self.stages:
            footprint = stage.footprint.to_dict() if stage.footprint else None
            stages.append(vars(stage) | {"footprint": footprint, "rows": [asdict(row) for row in stage.rows]})
        run, commands = str(self.run) if self.run else None, [list(command) for command in self.commands]
        whole = {"run": run, "fits": self.fits, "budget": self.budget.to_dict()}
        return whole | {"stages": stages, "commands": commands}


def plan_run(
    source: Path | str | Mapping[str, Any],
    *,
    overrides: Sequence[config.Override] = (),
    env: Mapping[str, str] | None = None,
    choice: Choice = ALL,
    new: bool = False,
    start: str = "",
) -> RunPlan:
    """Say what ``run`` would do with the same arguments; nothing is started and nothing is written.

    Args:
        source: As in ``run``, and so are the others.
        overrides: As there.
        env: As there.
        choice: As there.
        new: As there.
        start: The command that starts this run whatever the choice: ``memfit run SOURCE`` and flags.

    Raises:
        UsageError: As ``run`` does.
    """
    order = order_of_config(source, overrides=overrides, env=env, choice=choice)
    name = "CONFIG" if isinstance(source, Mapping) else str(source)
    return _plan(order, start or f"memfit run {shlex.quote(name)}", new=new)


def plan_commands(
    command: Sequence[str],
    *,
    params: Sequence[str] = (),
    param_file: Path | None = None,
    settings: config.Resolved[Any],
    new: bool = False,
    start: str = "memfit run",
) -> RunPlan:
    """Say what ``run_commands`` would do with the same arguments; nothing is started and nothing is written.

    Args:
        command: As in ``run_commands``, and so are the others.
        params: As there.
        param_file: As there.
        settings: As there.
        new: As there.
        start: The command that runs one command, up to its ``--``.

    Raises:
        UsageError: As ``run_commands`` does.
    """
    words = [*command, *filter(None, [settings.value.memory.job_of])]
    return _plan(order_of_command(command, expand(words, params, param_file), settings), start, new=new)


def _plan(order: Order, start: str, *, new: bool) -> RunPlan:
    settings = order.settings
    runs = RunDir.all(settings.runs_dir, settings.experiment)[:_MOST_RUNS]
    found = None if new else find_run(order)
    graph = Graph(
        order,
        found or RunDir(settings.runs_dir / settings.experiment / "planned"),
        earlier=[] if new else [run for run in runs if run != found],
    )
    graph.advance()
    budget = read_budget(settings)
    stages = [_stage(order, graph, runs, budget, start, name) for name in graph.stages if name in graph.asked]
    ready = [unit for units in graph.units.values() for unit in units if unit.state == "ready"]
    commands = [] if order.target else [_command(unit) for unit in ready if not unit.stage["keyed"]]
    return RunPlan(found.path if found else None, budget, stages, commands)


def _command(unit: Unit) -> Sequence[str]:
    return fill(unit.stage["command"], {str(name): str(value) for name, value in dict(unit.value or {}).items()})


def _stage(order: Order, graph: Graph, runs: Sequence[RunDir], budget: Budget, start: str, name: str) -> StagePlan:
    stage, units = graph.stages[name], graph.units.get(name)
    is_known = units is not None
    if units is None:
        units = _guessed(graph, runs, stage)
    states = Counter(unit.state for unit in units)
    left = [unit for unit in units if unit.state in ("ready", "waiting")]
    there = {other for other, units in graph.units.items() if all(unit.state in PASSED for unit in units)}
    before = [other for other in dict.fromkeys(graph.waits_for(name)) if other not in there]
    reasons = dict.fromkeys(unit.why for unit in units if unit.why and unit.state not in ("kept", "reused"))
    facts: dict[str, Any] = {
        "name": name,
        "states": dict(states),
        "num_runs": len(left) if is_known or left else None,
        "why": "; ".join(reasons),
        "waits_for": before if not is_known or states["waiting"] else [],
        "saved_seconds": sum(unit.seconds for unit in units if unit.state in ("kept", "reused")),
    }
    if is_known and not left:
        return StagePlan(**facts)
    own, measure = order.topology(name), []
    footprint, origin, seconds = _size(order, stage, runs, left)
    if footprint is None and stage["keyed"]:
        measure.append(f"{start} --until {name}" + (" --units 1" if stage["each"] or stage["units"] else ""))
    elif footprint is None:
        measure.append(f"{start} -- {shlex.join(_command(left[0]))}")
    if stage.get("has_probe") and (own.gpu_memory or order.settings.memory.gpu_job):
        measure.append(f"memfit estimate {shlex.quote(shlex.split(start)[2])}")
    rows = _rows(order, budget, footprint, seconds, len(left)) if footprint and left else ()
    advice = _advice(rows, len(left)) if len(left) > 1 else ""
    return StagePlan(**facts, footprint=footprint, origin=origin, measure=measure, rows=rows, advice=advice)


def _advice(rows: Sequence[AtOnce], num_jobs: int) -> str:
    """Say how many jobs memfit runs at once, how long that takes, and what lets more of them fit."""
    most = max((row for row in rows if row.fits), key=lambda row: row.num_jobs, default=None)
    if most is None:
        return ""
    text = f"memfit runs {'all ' if most.num_jobs == num_jobs else ''}{most.num_jobs} at once"
    if most.seconds and most.num_jobs > 1:
        times = [format_duration(row.seconds, short=True) for row in (most, rows[0]) if row.seconds]
        text += f": about {times[0]} with enough cores, against {times[1]} one at a time"
    if not all(row.fits for row in rows):
        text += "; data that all of them read needs no room in each if they map it (memfit.Panel, docs/data.md)"
    return text


def _guessed(graph: Graph, runs: Sequence[RunDir], stage: Mapping[str, Any]) -> list[Unit]:
    """A stage's units as an earlier run had them: the stage that lists them has yet to run."""
    source = stage["source"]["stage"]
    for run in runs:
        made = find_manifest(run.manifest_path(source, source))
        if made is not None and made["result"]:
            return graph.named(stage, listed(stage, made["result"]))
    return []


def _size(
    order: Order, stage: Mapping[str, Any], runs: Sequence[RunDir], units: Sequence[Unit]
) -> tuple[Footprint | None, str, float | None]:
    """What one job of a stage takes, where that figure comes from, and how long one takes on average."""
    own, memory = order.topology(stage["name"]), order.settings.memory
    for run in runs:
        sizes, seconds = {}, []
        for status in _done(run, own.like or stage["name"]):
            if status.footprint is not None:
                sizes[status.job_id] = status.footprint
            if status.started is not None and status.ended is not None:
                seconds.append(status.ended - status.started)
        if sizes:
            job_id = max(sizes, key=lambda one: sizes[one].private_bytes)
            took = sum(seconds) / len(seconds) if seconds else None
            return sizes[job_id], f"measured on {job_id} of {run.path.name}", took
    if own.memory:
        return Footprint.declared(own.memory), f"declared: stages.{stage['name']}.memory", None
    if memory.job and (stage["each"] or stage["units"]):
        return Footprint.declared(memory.job), "declared: memory.job", None
    if memory.job_of and not stage["keyed"]:
        declared = [Footprint.declared(fill([memory.job_of], dict(unit.value or {}))[0]) for unit in units]
        return max(declared, key=lambda one: one.private_bytes), f"declared: {memory.job_of}, the largest", None
    return None, "not measured yet", None


def _done(run: RunDir, stage: str) -> Iterator[JobStatus]:
    """The jobs of a stage that completed in a run."""
    for folder in sorted((run.path / "jobs").glob(f"{stage}*")):
        with suppress(DamagedError):
            status = read_status(run, folder.name)
            if status.state == "completed" and (read_json(folder / "job.json") or {}).get("stage") == stage:
                yield status


def _rows(order: Order, budget: Budget, footprint: Footprint, seconds: float | None, num_jobs: int) -> list[AtOnce]:
    """A row for one at a time, two, three, as many as fit, and all, under the user's own bound."""
    slack, most, lendable = order.settings.memory.slack, order.settings.max_parallel, budget.lendable_bytes
    reserved = max(1, reservation_bytes(footprint, slack))
    on_device = max(1, round(footprint.bytes_per_device * (1 + slack)))
    fitting = count_fitting(rooms_of(budget), reserved, len(footprint.device_bytes), on_device)
    most = num_jobs if most == "auto" else min(most, num_jobs)
    numbers = {*range(1, _FIRST_ROWS + 1), fitting, most}
    rows = []
    for number in sorted(number for number in numbers if 1 <= number <= most):
        whole = None if seconds is None else math.ceil(num_jobs / number) * seconds
        rows.append(AtOnce(number, number * reserved, lendable - number * reserved, number <= fitting, whole))
    return rows
