"""The first unit of a workload's training stage outside of a run, for what measures its loader or its step."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit import config
from memfit.errors import UsageError
from memfit.jobs import JobStatus, call_in_child, limit_threads
from memfit.pipeline._config import RunConfig
from memfit.pipeline._contract import Context, Probe
from memfit.pipeline._describe import describe, load_workload
from memfit.pipeline._graph import Choice, Graph
from memfit.pipeline._order import Order, python_path
from memfit.pipeline._run import stage_order
from memfit.pipeline._stage import make_context, only, run_stage
from memfit.rundir import RunDir

_HOW = (
    "write loader(context, params, num_workers), a unit's training batches, and step(context, params), which gives a "
    "function that takes one training step, and name both: Stage(..., probe=Probe(loader, step)); docs/commands.md "
    "shows them"
)


def call_alone(
    function: str,
    source: Path | str,
    arguments: Mapping[str, Any],
    *,
    overrides: Sequence[config.Override],
    env: Mapping[str, str] | None,
) -> dict[str, Any]:
    """What a function gives that takes ``target``, ``resolved`` (the config) and further arguments.

    It works in an interpreter of its own, with the threads of a job.

    Raises:
        UsageError: If the config is bad; and what the function raises.
    """
    env, file = os.environ if env is None else env, Path(source)
    resolved = config.resolve(RunConfig, file=file, env=env, overrides=overrides)
    child_env = dict(os.environ) | python_path([str(file.resolve().parent)], env)
    limit_threads(resolved.value.threads_per_job, env=child_env, modules=())
    order = {"target": resolved.value.target, "resolved": resolved.to_json(), **arguments}
    found: dict[str, Any] = call_in_child(function, order, env=child_env)
    return found


@contextlib.contextmanager
def probed(target: str, resolved: str, *needed: str) -> Iterator[tuple[Context, Any, Probe]]:
    """The first unit of the stage that says how it is measured: its context, its params, and what it says.

    Args:
        target: The workload.
        resolved: The config.
        needed: What the stage must name: ``loader``, ``step``.

    Raises:
        UsageError: If no stage names them.
    """
    stages = load_workload(target).stages
    stage, probe = next(((one.name, one.probe) for one in stages if one.probe is not None), ("", Probe()))
    missing = [name for name in needed if getattr(probe, name) is None]
    if missing:
        who = f"stage {stage} of '{target}' names no {' and no '.join(missing)}"
        raise UsageError(
            f"{who if stage else f'no stage of {target!r} says how it is measured'}.",
            rule="what is measured is the loader and the step that a stage names (probe).",
            remedy=_HOW,
        )
    whole = config.Resolved.from_json(RunConfig, resolved)
    with tempfile.TemporaryDirectory(prefix="memfit-probe-") as folder:
        yield *first_context(target, whole, stage, Path(folder)), probe


def first_context(target: str, whole: config.Resolved[RunConfig], stage: str, folder: Path) -> tuple[Context, Any]:
    """Run what a stage needs in this process, and return its first unit's context and params.

    Args:
        target: The workload.
        whole: The config; panels go to its ``panels_dir``, so those of earlier runs are found.
        stage: The stage.
        folder: Where all else goes.
    """
    described = describe(target, whole.to_json())
    order = Order(whole.value, described["stages"], "", {}, {}, Choice(until=stage, units="1"), described["params"])
    (folder / "checkpoints").mkdir()
    graph = Graph(order, RunDir(folder), make_job=lambda graph, unit: unit)
    while True:
        unit = next(iter(graph.next(1)))
        asked = stage_order(order, graph, unit)
        if unit.stage["name"] == stage:
            params = load_workload(target).params.model_validate(described["params"])
            return make_context(asked), only(params, unit.stage)
        run_stage(asked)
        graph.ended(JobStatus(unit.job_id, "completed"))


def mapped_bytes(context: Context) -> int:
    """The bytes of the panels that a context's stage needs: mapped once, however many jobs read them."""
    return sum(panel.nbytes for panel in _panels(context))


def data_text(context: Context) -> str:
    """What a context's stage reads, in words."""
    found = [repr(panel) for panel in _panels(context)] or [f"the output of {name}" for name in context.needs]
    return f"{', '.join(found) or 'no other stage'}, for {context.dir.name}"


def _panels(context: Context) -> list[Any]:
    outputs = [output for outputs in context.needs.values() for output in outputs]
    return [
        output.panel(one["name"]) for output in outputs for one in output.facts["outputs"] if one["kind"] == "panel"
    ]
