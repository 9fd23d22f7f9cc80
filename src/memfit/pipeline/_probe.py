"""The first unit of a workload's training stage outside of a run, for what measures its loader or its step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memfit import config
from memfit.errors import UsageError
from memfit.jobs import JobStatus
from memfit.pipeline._config import RunConfig
from memfit.pipeline._contract import Context, Probe
from memfit.pipeline._describe import describe, load_workload
from memfit.pipeline._graph import Choice, Graph
from memfit.pipeline._order import Order
from memfit.pipeline._run import stage_order
from memfit.pipeline._stage import make_context, only, run_stage
from memfit.rundir import RunDir

HOW = (
    "write loader(context, params, num_workers), a unit's training batches, and step(context, params), which gives a "
    "function that takes one training step, and name both: Stage(..., probe=Probe(loader, step)); docs/commands.md "
    "shows them"
)


def find_probe(target: str) -> tuple[str, Probe]:
    """The stage of a workload that says how it is measured, and what it says.

    Raises:
        UsageError: If none does.
    """
    for stage in load_workload(target).stages:
        if stage.probe is not None:
            return stage.name, stage.probe
    raise UsageError(
        f"no stage of '{target}' says how it is measured.",
        rule="what is measured is the loader and the step that a stage names (probe).",
        remedy=HOW,
    )


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
