"""Run an order: find its run directory, hand its jobs to the scheduler, and write down how they ended."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit import config
from memfit.errors import DamagedError, UsageError
from memfit.files import read_json, write_atomic, write_json
from memfit.jobs import Job, JobStatus, Parent, call_in_child, raise_error_of, read_status, thread_env
from memfit.masking import mask
from memfit.memory import Footprint, lock_file
from memfit.pipeline._command import ALL, Choice, expand, fill, own_stdin
from memfit.pipeline._graph import Graph
from memfit.pipeline._manifest import mapped_bytes, open_folder
from memfit.pipeline._order import Order, Source, Warm, newest_run, order_of_config, order_of_run, with_threads
from memfit.pipeline._results import Index, Unit
from memfit.pipeline._source import UnitSource
from memfit.pipeline._supervise import Known, RunResult, Supervisor, View, Watcher, supervised
from memfit.pipeline._watchers import Canary, Planned, as_canary, read_planned
from memfit.rundir import CANARY_VARIABLE, RunDir

_TAKE_UP_SECONDS = 60.0
_OVER = ("completed", "stopped")


def run(
    source: Source,
    *,
    overrides: Sequence[config.Override] = (),
    env: Mapping[str, str] | None = None,
    choice: Choice = ALL,
    new: bool = False,
    force: bool = False,
    view: View | None = None,
) -> RunResult:
    """Run a config's stages, a plain function or a command under one memory budget, or continue the unfinished run.

    Valid results are kept. What changed runs again, and so does what builds on it. Running jobs of a dead memfit are
    taken over, and interrupted jobs continue from their checkpoints. SIGINT and SIGTERM ask the jobs to stop at a
    checkpoint; a second one ends them at once.

    Args:
        source: The config, a YAML file or its content as a mapping; a function as ``module:name``; or the words of a
            command, for which `run_commands` reads parameters.
        overrides: Settings such as ``"params.train.num_epochs=3"``; they count more than environment and file.
        env: Where ``MEMFIT_…`` variables are read; ``os.environ`` when None.
        choice: Which stages and units; all by default.
        new: Start over in a new run directory, and reuse nothing.
        force: Run also what does not fit the budget.
        view: Takes the run directory and returns a function that is called ten times a second while jobs run.

    Returns:
        The result. It holds failed jobs; they raise nothing.

    Raises:
        UsageError: If the config, the code or the data is bad, or another process runs this run.
        DoesNotFitError: If a job does not fit the budget even alone.

    Example:
        A config names its workload; ``docs/workload.md`` writes one::

            result = memfit.run("examples/linear/config.yaml", overrides=["units=1-2"])
            result.metrics["fold_1"]

        An unknown key is refused before anything is made:

        >>> from memfit.errors import ConfigError
        >>> try:
        ...     run({"experiment": "demo", "target": "workload:LINEAR", "unit": "1-2"})
        ... except ConfigError as error:
        ...     print(error.remedy)
        did you mean 'units'?
    """
    if callable(source):
        raise UsageError(
            f"memfit.run was given {source!r:.80}.",
            rule="it takes a config (a YAML file or its content), a function as 'module:name', or a command's words.",
            remedy="name the function by its module: memfit.run('train:train')",
        )
    with Warm() as warm:
        order = order_of_config(source, overrides=overrides, env=env, choice=choice, warm=warm)
        order = with_threads(order, env, new=new)
        if order.settings.canary:
            order, new = as_canary(order), True
        graph = Graph(order)  # refuses bad names before anything is made
        run_dir, state = take_up(order, find=lambda order: None if new else find_run(order, graph))
        if state == "started":  # else it has looked at the run that goes on
            graph.look(run_dir, None if new else earlier_runs(order, run_dir))
        return go_on(order, graph, state, force=force, view=view, parent=warm.parent)


def run_commands(command: Sequence[str], *, params: Sequence[str] = (), **given: Any) -> RunResult:
    """Run a command for every combination of parameters under one memory budget, or continue the unfinished run.

    ``params`` are texts such as ``fold=1..5``, whose values stand for ``{fold}`` in the command; ``given`` is as for
    `run`, and so are what is returned and raised. The newest run of the same command, parameters and folder continues.
    """
    return run(list(command), choice=Choice(combinations=tuple(expand(None, params))), **given)


def resume(run: Path, *, view: View | None = None) -> RunResult:
    """Continue a run in the folder and with the settings of its start.

    Raises:
        UsageError: If there is no such run, its folder is gone, it is finished and its code or data have changed
            since, or another process runs it.
    """
    run_dir = RunDir.open(run)
    with start_folder(run_dir), Warm() as warm:
        order = order_of_run(run_dir, warm)
        if order.kind == "commands" and run_dir.is_copy:
            raise UsageError(
                f"{run_dir.path} is a copy of {run_dir.header['path']}, which is there still.",
                rule="commands run in the folder of their start, where the files of that run are.",
                remedy="resume that run; or give its command again in the copied folder: it begins anew",
            )
        if order.settings.canary:
            raise UsageError(
                f"{run_dir.path} is a canary.",
                rule="a canary begins anew each time: it says whether a long run would hold.",
                remedy="give its command again, or start the long run without --canary",
            )
        graph = Graph(order).look(run_dir)
        if order.kind != "commands" and not _goes_on(order, graph):
            raise UsageError(
                f"the code or the data of {run_dir.path} changed since it was finished, or a result in it is gone.",
                rule="a finished result is never overwritten.",
                remedy="start it by its config: a new run takes over what is still valid",
            )
        return go_on(order, graph, "continued", force=False, view=view, parent=warm.parent)


def start_folder(run: RunDir) -> contextlib.chdir[Path]:
    cwd = Path(run.header.get("cwd") or ".")
    if not cwd.is_dir():
        raise UsageError(
            f"{cwd} is not there, where {run.path} was started.",
            rule="a run continues in the folder of its start: its paths begin there.",
            remedy=f"make that folder again: mkdir -p {shlex.quote(str(cwd))}; or give its command where it is now",
        )
    return contextlib.chdir(cwd)


def _goes_on(order: Order, graph: Graph) -> bool:
    """Return whether to continue a run: it is not finished, or nothing in it would be overwritten."""
    with contextlib.suppress(DamagedError):  # each job's own files say what is done
        if graph.run.state in _OVER:
            return order.kind != "commands" and not graph.overwrites()
    return True


def find_run(order: Order, graph: Graph) -> RunDir | None:
    """Return the newest run of an order if it is to continue; its graph has then looked at it."""
    found = newest_run(order)
    if found is None:
        return None
    graph.look(found, earlier_runs(order, found))  # refuses an unknown unit before the run is touched
    return found if _goes_on(order, graph) else None


def earlier_runs(order: Order, run: RunDir) -> Index:
    """Return the other runs of an order's experiment, from which results may be linked; none for commands."""
    runs = RunDir.all(order.settings.runs_dir, order.settings.experiment) if order.kind != "commands" else []
    return Index([other for other in runs if other != run])


def take_up(order: Order, *, find: Callable[[Order], RunDir | None]) -> tuple[RunDir, str]:
    """Return the run that ``find`` returns, or a new one, and which of the two. Two starts at once find one run."""
    settings = order.settings
    # Other users' runs are theirs alone.
    path = RunDir.folder_of(settings.runs_dir, settings.experiment) / f".lock-{os.geteuid()}"
    lock = lock_file(path, _TAKE_UP_SECONDS)
    if lock is None:
        raise UsageError(
            f"another start of {settings.experiment} holds {path} for {_TAKE_UP_SECONDS:.0f} s.",
            rule="one start at a time looks for its run or makes it.",
            remedy=f"see which process it is: fuser {path}",
        )
    try:
        if (found := find(order)) is not None:
            return found, "continued"
        return RunDir.create(settings.runs_dir, settings.experiment, order.fingerprint, order.facts), "started"
    finally:
        path.unlink(missing_ok=True)  # the next start makes a new one
        os.close(lock)


def go_on(
    order: Order,
    graph: Graph,
    state: str,
    *,
    force: bool,
    view: View | None,
    parent: Parent | None,
    watch: Callable[[Supervisor], Watcher] = Canary,
) -> RunResult:
    """Run what a graph holds in its run; ``watch`` makes who follows a canary."""
    settings, run = order.settings, graph.run
    facts = {"state": state, "fingerprint": order.fingerprint}
    with supervised(run, settings, force=force, view=view, facts=facts, parent=parent) as supervisor:
        if settings.canary:
            supervisor.watchers.append(watch(supervisor))
        if settings.planned is not None:
            supervisor.watchers.append(Planned(order, graph, read_planned(settings.planned, run), supervisor.events))
        supervisor.adopt(graph.goes_on_with)
        write_order(order, run)
        if " over " in (origin := order.origins.get("memory.cuda_allocator", "")):
            supervisor.events.write("plan", text=f"torch's allocator: {settings.memory.cuda_allocator}, from {origin}")
        threads = settings.threads_per_rank
        if lost := [f"{one}={os.environ[one]}" for one, text in thread_env(threads).items()
                    if os.environ.get(one, text) != text]:  # fmt: skip
            text = f"{', '.join(lost)} becomes {threads}: threads_per_job, from {order.origins['threads_per_job']}"
            supervisor.events.write("plan", level="line", text=text)
        source = UnitSource(graph, functools.partial(make_job, order, run), say=supervisor.events.write)
        known = _known(order, graph)
        alike = [one for one in known if len(graph.units.get(one[0], ())) > 1]
        if alike and not source.is_done:
            stage, _, largest = max(alike, key=lambda one: one[2].private_bytes)
            supervisor.plan(largest, "an earlier job", len(graph.units[stage]))
        statuses = supervisor.schedule(source, known)
        source.close()
        return _settle(order, supervisor, graph, statuses)


def write_order(order: Order, run: RunDir) -> None:
    write_config(order, run.path / "config.yaml")
    kept = ("name", "needs", "after", "each", "holds", "in_order")
    stages = [{name: getattr(stage, name) for name in kept} for stage in order.stages]
    write_json(run.path / "graph.json", {"schema_version": 1, "stages": stages})


def write_config(order: Order, path: Path, comment: str = "") -> None:
    """Write the resolved config of an order, if the file has another; one with secrets is for its owner alone."""
    if not path.exists() or path.read_text() != comment + order.yaml:
        values = order.settings.model_dump(mode="json") | {"params": order.params}
        write_atomic(path, comment + order.yaml, mode=0o600 if mask(values) != values else 0o666)


# Jobs


def make_job(order: Order, run: RunDir, unit: Unit) -> Job:
    """Return the job that makes a unit's result, and make its folder."""
    settings, stage = order.settings, unit.stage
    memory, ranks, (num_devices, device_bytes) = settings.memory, order.ranks_of(stage), order.gpus_of(stage)
    folder = open_folder(unit.manifest(run), unit.key, run.job_dir(unit.job_id) / "outcome.json")
    declared, _ = order.declared(stage)
    facts: dict[str, Any] = {
        "footprint": Footprint.declared(declared) if declared else None,
        "threads": max(settings.threads_per_job, ranks),
        "tight_malloc": memory.tight_malloc,
        "cuda_allocator": memory.cuda_allocator,
        "device_bytes": device_bytes,
        "num_devices": num_devices,
        "ranks": ranks,
        "stage": stage.name,
        "unit": unit.value,
    }
    env = {CANARY_VARIABLE: str(run.path / "canary")} if settings.canary else {}
    if stage.command is None:
        return Job(
            unit.job_id,
            target="memfit.pipeline._stage:run_stage",
            arguments={"order": stage_order(order, run, unit)},
            uses=tuple(one for one in stage.code if " " not in one),  # not the params without fields
            phases=tuple(stage.phases),
            mapped_bytes=sum(mapped_bytes(one.manifest(run)) for units in unit.inputs.values() for one in units),
            env={**order.env, **env},
            keeps_group=unit.label is None,  # the page cache that it filled stays charged to it
            **facts,
        )
    fields = unit.value if isinstance(unit.value, Mapping) else {stage.variable: unit.value}
    values = {str(name): str(value) for name, value in fields.items() if name}
    words: dict[str, str | list[str]] = dict(values)
    if order.kind == "commands":  # other braces are the command's own
        if memory.job_of:
            facts["footprint"] = Footprint.declared(fill([memory.job_of], words)[0])
        facts |= {"params": values, "stdin": own_stdin(stage.units or ())}
    else:
        words |= {f"params.{name}": str(value) for name, value in stage.settings.items()}
        label = unit.label if isinstance(unit.value, Mapping) else unit.value
        words |= {"unit": str(label), "dir": str(folder), "seed": str(order.common["seed"])}
        for name, units in unit.inputs.items():
            words[name] = [str(one.manifest(run).with_suffix("")) for one in units]
    return Job(
        unit.job_id, command=fill(stage.command, words, shell=stage.shell), cwd=str(Path.cwd()), env=env, **facts
    )


def stage_order(order: Order, run: RunDir, unit: Unit) -> dict[str, Any]:
    """Return what `run_stage` takes."""
    stage, previous = unit.stage, unit.previous
    return {
        "target": order.settings.target,
        "params": order.params,
        "stage": {name: getattr(stage, name) for name in ("name", "settings", "code", "modules", "seed")},
        "facts": unit.facts,
        "variable": stage.variable,
        "seed": order.settings.seed,
        "manifest": str(unit.manifest(run)),
        "panels_dir": str(order.settings.panels_dir.absolute()),
        "needs": {name: [str(one.manifest(run)) for one in units] for name, units in unit.inputs.items()},
        "meets": [name for name, units in unit.inputs.items() if stage.each and units[0].stage.each == stage.each],
        "previous": str(previous.manifest(run)) if previous else None,
    }


def _known(order: Order, graph: Graph) -> Known:
    """Return the footprints of jobs of this run that an earlier command measured with the same allocator."""
    found = []
    for unit in graph.all_units:
        if unit.state not in ("kept", "completed"):
            continue
        footprint = read_status(graph.run, unit.job_id).footprint
        job = read_json(graph.run.job_dir(unit.job_id) / "job.json") or {}
        now = order.settings.memory.tight_malloc, order.ranks_of(unit.stage)
        if footprint is not None and (job.get("tight_malloc"), job.get("ranks")) == now:
            values = unit.value if isinstance(unit.value, Mapping) and order.kind == "commands" else {}
            found.append((unit.stage.name, values, footprint))
    return found


# The end


def _settle(order: Order, supervisor: Supervisor, graph: Graph, statuses: Mapping[str, JobStatus]) -> RunResult:
    run, units, found = supervisor.run, graph.all_units, {}
    for unit in [unit for unit in units if unit.state != "passed"]:
        status = statuses.get(unit.job_id)
        if status is None and unit.state in ("kept", "completed"):
            status = read_status(run, unit.job_id)
        if status is None or (unit.state in ("kept", "reused") and status.state != "completed"):
            status = JobStatus(unit.job_id, "completed" if unit.state in ("kept", "reused") else "pending")
        if unit.state == "failed" and status.state in ("completed", "pending"):  # refused, or it left no result
            status = dataclasses.replace(status, state="failed", cause=unit.why)
        found[unit.job_id] = status
    results = {unit.job_id: unit.result for unit in units if unit.result and unit.state != "stopped"}
    stopped = next((unit.made for unit in units if unit.state == "stopped"), None)
    result = supervisor.settle(found, results, stopped=stopped)
    if order.settings.canary:
        return result
    if tables := _tables(order, graph, found):  # not in this process, whose pyarrow may be in use
        parent = supervisor.parent
        call = parent.call if parent is not None and not parent.refused else call_in_child
        call("memfit.pipeline._stage:write_tables", {"tables": tables})
    if graph.error is not None:
        raise graph.error
    for unit in units:  # what a stage that runs once refused
        if unit.state == "failed" and unit.label is None:
            raise_error_of(run.job_dir(unit.job_id))
    return result


def _tables(order: Order, graph: Graph, statuses: Mapping[str, JobStatus]) -> list[dict[str, Any]]:
    others = graph
    if order.choice.units != "all":  # the table is the run's, not the command's
        everything = dataclasses.replace(order.choice, units="all", anew=None)
        whole = dataclasses.replace(order, choice=everything)
        others = Graph(whole).look(graph.run)
    found = []
    for name, asked in graph.units.items():
        own = {unit.job_id for unit in asked}
        more = [unit for unit in others.units.get(name, ()) if unit.job_id not in own and unit.state == "kept"]
        if asked[0].label is None or not any(unit.result for unit in [*asked, *more]):
            continue
        rows = []
        for unit in [*asked, *more]:
            status = statuses[unit.job_id] if unit.job_id in own else read_status(graph.run, unit.job_id)
            state = status.state if unit.job_id in own else "completed"
            measured = {"seconds": unit.seconds or None, "peak_private_bytes": status.peak_bytes or None}
            rows.append({"unit": unit.label, "state": state, **measured, "result": unit.result})
        file = "kfold_results.feather" if name == "fold" else f"{name}_results.feather"
        found.append(
            {"path": str(graph.run.path / file), "variable": graph.stages[name].variable or "unit", "rows": rows}
        )
    return found
