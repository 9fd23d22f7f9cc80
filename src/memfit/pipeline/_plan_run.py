"""Say what a run would do before anything starts: which jobs run and why, their memory, and how many fit at once."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from memfit import config
from memfit.amounts import Amount, Layout
from memfit.errors import DamagedError
from memfit.files import read_json
from memfit.jobs import JobStatus, call_in_child, read_status
from memfit.masking import mask
from memfit.memory import Budget, Footprint, why_tight
from memfit.pipeline._command import ALL, Choice, fill
from memfit.pipeline._describe import StageSpec, list_units
from memfit.pipeline._first_steps import BOUND, FirstSteps, jobs_on_gpu, launch_of, make_first_steps
from memfit.pipeline._graph import PASSED, Graph
from memfit.pipeline._manifest import find_manifest
from memfit.pipeline._order import Order, Source, Warm, order_of_config, with_threads
from memfit.pipeline._places import read_budget
from memfit.pipeline._probe import ask_of_loaders, ask_of_model
from memfit.pipeline._results import MOST_RUNS, Unit, changed_settings, is_same_command, made_for
from memfit.pipeline._run import earlier_runs, find_run
from memfit.planning import (
    Forecast,
    Ledger,
    Line,
    Machine,
    decide,
    describe_batch,
    find_this_gpu,
    footprint_lines,
    step_line,
)
from memfit.rundir import RunDir
from memfit.units import format_count

WITH_OTHER = "with other settings: "  # begins what is said of a figure that was measured on a job of other settings
_TRACE_SECONDS = 30.0  # a model is traced so long at most; then the formula answers
_FIRST_ROWS = (1, 2, 3, 4)  # the numbers of jobs at once with a row each, beside as many as fit and all


class Taken(NamedTuple):
    """What one job takes, its origin, mean seconds, tasks on a node, peaks of ranks."""

    footprint: Footprint | None
    origin: str
    seconds: float | None = None
    num_tasks: int = 1
    ranks: tuple[int, ...] = ()

    def as_in(self, forecast: Forecast, on_gpu: int = 0) -> tuple[Footprint | None, str]:
        """Return the footprint that a forecast has on a node, None if not known, and its origin. ``on_gpu``: what first
        steps took of a GPU."""
        found, ledger, origin = self.footprint, forecast.ledger, self.origin
        if forecast.uncounted:
            return None, origin
        host, tasks = forecast.needs(ledger).bytes, ledger.layout.tasks_per_node or 1
        if found is None:
            gpus = dict.fromkeys(map(str, range(tasks if on_gpu else 0)), on_gpu)
            return Footprint(host, ledger.mapped.bytes, gpus, method="computed"), origin
        if abs(host - found.private_bytes) <= tasks:  # each rank's share is rounded up
            return replace(found, private_bytes=host), origin
        number = math.ceil(len(found.device_bytes) * tasks / max(1, len(self.ranks)))
        gpus = dict.fromkeys(map(str, range(number)), found.bytes_per_device)
        return Footprint(host, ledger.mapped.bytes, gpus, method=found.method), f"{origin}; its lines on a node"


@dataclass(frozen=True)
class AtOnce:
    """Jobs at once: the bytes they reserve, those left of the budget, the seconds for all jobs of the stage."""

    num_jobs: int
    needed_bytes: int
    margin_bytes: int
    fits: bool
    seconds: float | None


@dataclass(frozen=True)
class StagePlan:
    """What a run would do with one stage."""

    name: str
    states: Mapping[str, int]  # how many units are ``kept``, ``reused``, ``ready`` (would run), ``waiting``, ...
    num_runs: int | None  # how many jobs would run; None while the list of its units is not known
    why: str  # why they run, are skipped or stop the run
    waits_for: Sequence[str]  # the stages that decide whether, and for which units, it runs
    saved_seconds: float  # how long it took to make the results that are kept or reused
    footprint: Footprint | None = None  # the memory of one job; None while it is not known
    origin: str = ""  # where that figure comes from
    rows: Sequence[AtOnce] = ()  # memory and time by the number of jobs at once
    model: Mapping[str, Any] | None = None  # what ``memfit.planning.ask`` says of the model that it names
    forecast: Forecast | None = None  # on each process, rank, node and GPU; None if only one job's peak is known
    tight: str = ""  # why its declared or estimated peak is tight and not accepted: a run refuses it

    @property
    def fits(self) -> bool | None:
        """False if one of its jobs, or a step of its model, does not fit even alone, or is tight; None if not known."""
        unfit = (self.model or {}).get("verdict") in ("may fit", "does not fit")
        on_node = self.forecast.fits if self.forecast else True
        if unfit or self.tight or on_node is False or (self.rows and not self.rows[0].fits):
            return False
        return True if self.num_runs == 0 else on_node if self.rows else None


@dataclass(frozen=True)
class RunPlan:
    """What a run would do.

    Attributes:
        run: The run that would continue; None for a new one.
        budget: The memory that may be used now.
        stages: The stages that are asked for, in order.
        commands: The commands that would run; empty for a workload.
    """

    run: Path | None
    budget: Budget
    stages: Sequence[StagePlan]
    commands: Sequence[Sequence[str]] = ()

    @property
    def fits(self) -> bool | None:
        """False if a stage's job does not fit even alone, else None if that is not known of one."""
        found = {stage.fits for stage in self.stages}
        return False if False in found else None if None in found else True

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form; sizes in bytes, durations in seconds."""
        stages = []
        for stage in self.stages:
            footprint = stage.footprint.to_dict() if stage.footprint else None
            own = {"footprint": footprint, "rows": [asdict(row) for row in stage.rows], "fits": stage.fits}
            stages.append(vars(stage) | own | {"forecast": stage.forecast.to_dict() if stage.forecast else None})
        run, commands = str(self.run) if self.run else None, [list(command) for command in self.commands]
        whole = {"run": run, "fits": self.fits, "budget": self.budget.to_dict()}
        return whole | {"stages": stages, "commands": commands}


def plan_run(
    source: Source | Order,
    *,
    overrides: Sequence[config.Override] = (),
    env: Mapping[str, str] | None = None,
    choice: Choice = ALL,
    new: bool = False,
    on: Path | Machine | None = None,
    steps: Callable[[str], None] | None = None,
) -> RunPlan:
    """Return what `memfit.run` would do with the same arguments.

    It starts and writes nothing, unless ``steps`` is given: then stages of which nothing is measured or declared make
    their first steps, as one rank and as two, in a run that is removed. ``steps`` is told of them before. What earlier
    ones took is kept beside the runs, and counts in any case.

    ``source`` may be an order that was made before. ``on`` is a machine (`memfit.planning.Machine`) or the file that
    describes it; None for this one, or Slurm's largest node.
    """
    with Warm(can_fork=on is None and steps is not None) as warm:
        if isinstance(source, Order):
            order = source
        else:
            order = order_of_config(source, overrides=overrides, env=env, choice=choice, warm=warm)
            order = _with_ranks(with_threads(order, env, new=new))
        settings = order.settings
        runs = RunDir.all(settings.runs_dir, settings.experiment)[:MOST_RUNS]
        graph = Graph(order)
        found = None if new else find_run(order, graph)
        if found is None:
            planned = RunDir(settings.runs_dir / settings.experiment / "planned")
            graph.look(planned, None if new else earlier_runs(order, planned))
        lacking = [name for name in graph.stages if _lacks(order, graph, runs, name)]
        made = make_first_steps(order, lacking, warm.parent, steps, new=new)
    machine = Machine.read(on) if isinstance(on, Path) else on
    name = str(on) if isinstance(on, Path) else "the config"
    node = Node(read_budget(settings) if machine is None else machine.budget(name), machine)
    asked = [name for name in graph.stages if name in graph.asked]
    stages = [_stage(order, graph, runs, node, name, made.get(name)) for name in asked]
    ready = [unit for unit in graph.all_units if unit.state == "ready"]
    commands = [_command(unit) for unit in ready] if order.kind == "commands" else []
    return RunPlan(found.path if found else None, node.budget, stages, commands)


def _with_ranks(order: Order) -> Order:
    """Return an order in which a command of torchrun has the ranks that it starts, unless the settings say them."""
    ranks = launch_of(order.stages[0].command)[0] if order.kind == "commands" else 0
    if ranks < 2 or order.settings.resources.ranks > 1:
        return order
    each = order.settings.resources.model_copy(update={"ranks": ranks * order.nodes_of(order.stages[0])})
    return replace(order, settings=order.settings.model_copy(update={"resources": each}))


def _lacks(order: Order, graph: Graph, runs: Sequence[RunDir], name: str) -> bool:
    """Return whether a stage would run, and neither a job of these settings nor the settings say what it takes."""
    stage = graph.stages[name]
    units = graph.units.get(name) or _guessed(graph, runs, stage)
    if name not in graph.asked or (units and not any(unit.state in ("ready", "waiting") for unit in units)):
        return False
    taken = _taken(order, stage, runs, units)
    return taken.footprint is None or WITH_OTHER in taken.origin


def _command(unit: Unit) -> Sequence[str]:
    """Return the command of a unit without its secrets."""
    values = {str(name): str(value) for name, value in dict(unit.value or {}).items()}
    command = fill(unit.stage.command or (), values)
    shown: Sequence[str] = mask({"template": unit.stage.command, "command": command, "params": values})["command"]
    return shown


def _stage(
    order: Order,
    graph: Graph,
    runs: Sequence[RunDir],
    node: Node,
    name: str,
    steps: FirstSteps | None,
) -> StagePlan:
    budget = node.budget
    stage, is_known = graph.stages[name], name in graph.units
    units = graph.units[name] if is_known else _guessed(graph, runs, stage)
    states = Counter(unit.state for unit in units)
    left = [unit for unit in units if unit.state in ("ready", "waiting")]
    done = {other for other, units in graph.units.items() if all(unit.state in PASSED for unit in units)}
    reasons = dict.fromkeys(unit.why for unit in units if unit.why and unit.state not in ("kept", "reused"))
    waits_for = [other for other in dict.fromkeys(order.waits_for(name)) if other not in done]
    facts: dict[str, Any] = {
        "name": name,
        "states": dict(states),
        "num_runs": len(left) if is_known or left else None,
        "why": "; ".join(reasons),
        "waits_for": waits_for if not is_known or states["waiting"] else [],
        "saved_seconds": sum(unit.seconds for unit in units if unit.state in ("kept", "reused")),
    }
    if is_known and not left:
        return StagePlan(**facts)
    taken = _taken(order, stage, runs, left)
    if steps is not None and not steps.found:
        taken, steps = taken._replace(origin=f"{taken.origin}; first steps {steps.why}"), None
    if steps is not None:
        taken = Taken(None, steps.origin)
    footprint, origin = taken.footprint, taken.origin
    model = _model(order, stage, budget) if stage.has_model else None
    forecast = _forecast(order, stage, node, taken, model, steps, len(left))
    if forecast:
        footprint, origin = taken.as_in(forecast, steps.on_gpu if steps else 0)
    rows = _rows(order, budget, footprint, taken.seconds, len(left)) if footprint and left else ()
    if forecast and forecast.fits is False:  # also where /dev/shm alone is too small
        rows = [replace(row, fits=False) for row in rows]
    tight = "" if order.settings.accept_tight else _why_tight(footprint, rows, model)
    facts |= {"footprint": footprint, "origin": origin, "rows": rows}
    return StagePlan(**facts, model=model, forecast=forecast, tight=tight)


class Node(NamedTuple):
    budget: Budget
    machine: Machine | None

    def layout(self, order: Order, stage: StageSpec) -> Layout:
        ranks = order.ranks_of(stage)
        nodes = min(ranks, max(order.nodes_of(stage), order.settings.slurm_of(stage.name).nodes))
        if self.machine is not None:
            return self.machine.layout(ranks)
        tasks = math.ceil(ranks / nodes)
        return Layout(nodes, tasks, gpus_per_node=min(len(self.budget.devices), tasks))


def _forecast(
    order: Order,
    stage: StageSpec,
    node: Node,
    taken: Taken,
    model: Mapping[str, Any] | None,
    steps: FirstSteps | None,
    num_jobs: int,
) -> Forecast | None:
    """Return the ledger of one job of a stage; None where it has no line, or says no more than the footprint does."""
    loaders, ranks, settings = order.topology(stage.name).loaders, order.ranks_of(stage), order.settings
    if not (loaders or node.machine or max(ranks, taken.num_tasks) > 1 or steps):
        return None
    layout = node.layout(order, stage)
    accumulated, batch, notes = model["setup"]["num_microbatches"] if model else 1, "", list[str]()
    on_gpu = steps.on_gpu if steps else 0
    step = (step_line(model),) if model and layout.gpus_per_node and not on_gpu else ()
    settings_of = {"ranks": ranks} | ({"accumulation": accumulated} if model else {})
    workers, tasks, own, fewer = 0, layout.tasks_per_node or 1, tuple[Line, ...](), dict[int, tuple[Line, ...]]()
    lacking = ["processes, data, loaders, checkpoints"]
    lacking += [] if step else ["weights, gradients, optimizer, activations"]
    if loaders:
        facts = ask_of_loaders(order, loaders, ranks)
        settings_of |= facts["settings"]
        workers, samples, valid = facts["workers"], facts["samples"], facts["valid"]
        batch = describe_batch(samples, valid, facts["batch"], ranks, accumulated, drops=facts["drops"])
        notes += _note_workers(workers, ranks, layout.cpus_per_task or 0 if node.machine else None)
    if steps is not None:
        own, lacking = tuple(steps.lines(ranks, tasks)), []
        few = dict.fromkeys(number for number in (workers // 2, 1, 0) if number < workers)
        fewer = {number: tuple(steps.lines(ranks, tasks, number)) for number in few}
        notes += steps.notes(ranks, Ledger(layout, own).peak.bytes)
        notes += [f"the first of {num_jobs} jobs made them: another may take more"] if num_jobs > 1 else []
        if layout.gpus_per_node and not (on_gpu or step):
            notes.append("the first steps used no GPU here: what the job takes of one is not known")
    elif taken.footprint is None:
        notes += [f"not counted by part: {part}" for part in lacking]
        notes.append("first steps count it all; or declare a rank: --set resources.memory=8GiB")
    else:
        own, lacking = tuple(footprint_lines(taken.footprint, taken.num_tasks, taken.origin)), []
    ledger = Ledger(layout, (*own, *step))
    if not (ledger.lines or loaders):
        return None
    each = math.ceil(on_gpu * (1 + BOUND)) or (taken.footprint.bytes_per_device if taken.footprint else 0)
    each = each or (model["device"]["device_bytes"]["upper"] if model else 0)
    notes += [jobs_on_gpu(each, one.total_bytes) for one in node.budget.devices[:1] if each]
    limit, shm = node.budget.lendable_bytes, node.budget.shm
    return Forecast(
        ledger,
        Amount(limit, "node"),
        f"{node.budget.binding.name} ({node.budget.binding.source})",
        taken.ranks if len(taken.ranks) == ranks and all(taken.ranks) else (),
        Amount(shm.total_bytes, "node") if shm else None,
        num_ranks=ranks,
        num_nodes=node.machine.nodes if node.machine else layout.nodes or 1,
        slack=max(settings.memory.slack, BOUND) if steps else settings.memory.slack,
        slack_counts=steps is not None,
        fewer={workers: (*lines, *step) for workers, lines in fewer.items()},
        batch=batch,
        notes=tuple(notes),
        settings=settings_of,
        uncounted=tuple(lacking),
        made_for=made_for(stage),
    )


def _note_workers(workers: int, ranks: int, cpus: int | None) -> Iterator[str]:
    """Say how many loader workers a job has, and where a described machine gives a task too few CPUs for them."""
    own = format_count(workers, "loader worker")
    yield f"{own} x {format_count(ranks, 'rank')} = {workers * ranks} in the job"
    if cpus is not None and workers + 1 > cpus:
        share = f"{own} and the rank share {format_count(cpus, 'CPU of a task')}"
        yield f"{share}: cpus_per_task: {workers + 1}"


def _why_tight(footprint: Footprint | None, rows: Sequence[AtOnce], model: Mapping[str, Any] | None) -> str:
    """Return why one job is tight by what it was declared to take, or by the estimate of its model; empty if not."""
    if footprint is not None and footprint.method != "measured" and rows:
        return why_tight(footprint.private_bytes, rows[0].needed_bytes + rows[0].margin_bytes)
    if model is None or model["verdict"] != "tight":
        return ""
    why = why_tight(model["device"]["device_bytes"]["upper"], model["gpu"]["total_bytes"])
    return why or "torch's allocator empties its cache"


def _model(order: Order, stage: StageSpec, budget: Budget) -> Mapping[str, Any]:
    """Return the estimate of a stage's model on this machine's GPU, or on any where there is none."""
    own: dict[str, Any] = {"target": order.settings.target, "params": dict(order.params), "stage": stage.name}
    own["allocator"] = order.settings.memory.cuda_allocator
    asked = call_in_child("memfit.pipeline._probe:question_of", own, env=dict(os.environ) | dict(order.env))
    gpu, available, notes = find_this_gpu(budget)
    answer = ask_of_model(asked, gpu=gpu, available_bytes=available, time_limit=_TRACE_SECONDS)
    return answer | {"notes": [*answer["notes"], *notes]}


def _guessed(graph: Graph, runs: Sequence[RunDir], stage: StageSpec) -> list[Unit]:
    """Return a stage's units as an earlier run listed them."""
    for run in runs:
        made = find_manifest(run.manifest_path(stage.source or "", stage.source or ""))
        if made is not None and made["result"]:
            return graph.named(stage, list_units(stage, made["result"]))
    return []


def _taken(order: Order, stage: StageSpec, runs: Sequence[RunDir], units: Sequence[Unit]) -> Taken:
    """Return what one job of a stage takes.

    What was measured with the settings of now counts, then what is declared, then what was measured with others.
    """
    memory, other = order.settings.memory, None
    for run in runs:
        done = list(_done(order, stage, run))
        largest = max(done, key=lambda one: one.footprint.private_bytes if one.footprint else -1, default=None)
        if largest is not None and largest.footprint is not None:
            seconds = [one.ended - one.started for one in done if one.started and one.ended]
            peaks = tuple(one["peak_bytes"] for one in largest.ranks)
            mean, ranks = sum(seconds) / len(seconds) if seconds else None, max(1, len(peaks))
            on_node = max(Counter(one.get("node") for one in largest.ranks).values(), default=1)
            changes = changes_since(order, stage, run, largest.job_id)
            origin = f"measured on {largest.job_id} of {run.path.name}"
            if ranks != order.ranks_of(stage):
                origin += f" with {format_count(ranks, 'rank')} in place of {order.ranks_of(stage)}"
            found = Taken(largest.footprint, origin + changes, mean, on_node, peaks)
            if not changes:
                return found
            other = other or found
    declared, origin = order.declared(stage)
    tasks = max(1, order.ranks_of(stage) // order.nodes_of(stage))
    if declared:
        return Taken(Footprint.declared(declared), origin, None, tasks)
    if memory.job_of and order.kind == "commands":
        sizes_of = [Footprint.declared(fill([memory.job_of], dict(unit.value or {}))[0]) for unit in units]
        most = max(sizes_of, key=lambda one: one.private_bytes)
        return Taken(most, f"declared: {memory.job_of}, the largest", None, tasks)
    return other or Taken(None, "not measured yet", None, tasks)


def changes_since(order: Order, stage: StageSpec, run: RunDir, job_id: str) -> str:
    """Return a remark on what of a stage's settings or command is not as it was for a job; empty if nothing."""
    if (before := find_manifest(run.manifest_path(stage.name, job_id))) is None:
        return ""
    is_same = stage.command is None or is_same_command(before, stage)
    changes = [*changed_settings(before, stage)[:4], *["the command changed"][is_same:]]
    text = " ".join("; ".join(changes).split())  # one line, whatever a setting is named
    return f", {WITH_OTHER}{text}" if text else ""


def _done(order: Order, stage: StageSpec, run: RunDir) -> Iterator[JobStatus]:
    """Yield the jobs of a stage that completed in a run of the same target."""
    for folder in sorted((run.path / "jobs").glob(f"{stage.name}*")):
        with suppress(DamagedError):
            status, job = read_status(run, folder.name), read_json(folder / "job.json") or {}
            target = (job.get("arguments") or {}).get("order", {}).get("target", "")
            is_own = (job.get("stage"), target) == (stage.name, order.settings.target)
            if status.state == "completed" and is_own:
                yield status


def _rows(order: Order, budget: Budget, footprint: Footprint, seconds: float | None, num_jobs: int) -> list[AtOnce]:
    settings = order.settings
    decided = decide(footprint, num_jobs, budget, settings.most_at_once, settings.memory.slack)
    most, rows = min(num_jobs, settings.most_at_once or num_jobs), []
    for number in sorted({*_FIRST_ROWS, decided.num_fitting, most}):
        if 1 <= number <= most:
            needed = number * decided.reservation_bytes
            whole = None if seconds is None else math.ceil(num_jobs / number) * seconds
            fits = number <= decided.num_fitting
            rows.append(AtOnce(number, needed, decided.capacity_bytes - needed, fits, whole))
    return rows
