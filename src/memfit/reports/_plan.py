"""What a run would do, as people read it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from memfit.reports._numbers import plain_table, print_facts, say
from memfit.units import format_bytes, format_duration

if TYPE_CHECKING:
    from memfit.memory import Footprint
    from memfit.pipeline import RunPlan, StagePlan

#: Entries of a footprint's parts that the private peak does not consist of.
_NO_PARTS = ("file", "charged_peak")
#: The parts of a training step that are always shown, in this order.
_OF_STEPS = ("weights", "gradients", "optimizer", "activations")


def print_run_plan(plan: RunPlan, console: Console) -> None:
    """Print the commands, then for each stage what would run, why, and how many of its jobs fit at once."""
    for command in plan.commands:
        say(console, shlex.join(command))
    budget, run = plan.budget, f"{plan.run} continues" if plan.run else "a new run directory"
    limit = f"{format_bytes(budget.lendable_bytes)} of {format_bytes(budget.binding.limit_bytes)}"
    facts = [("run", run), ("budget", f"{limit} for jobs ({budget.binding.name})")]
    width = max([10, *(len(stage.name) + 1 for stage in plan.stages)])
    print_facts(facts, console, width)
    console.print()
    for stage in plan.stages:
        first, *lines = _lines(stage)
        print_facts([(stage.name, first)], console, width)
        for line in lines:
            say(console, f"{'':<{width}}{line}")
        if stage.rows:
            console.print(Padding(_matrix(stage), (0, 0, 0, width), expand=False))
        if stage.advice:
            say(console, f"{'':<{width}}{stage.advice}")
    console.print("\nNothing was started.")


def _lines(stage: StagePlan) -> Iterator[str]:
    words = {"ready": "would run", "waiting": "would run later"}
    states = ", ".join(f"{words.get(state, state)} {number}" for state, number in stage.states.items())
    text = states or "its units are not known yet"
    if stage.saved_seconds:
        text += f", which saves {format_duration(stage.saved_seconds)}"
    yield text + (f": {stage.why}" if stage.why else "")
    if stage.waits_for:
        yield f"after {' and '.join(stage.waits_for)}, whose result decides whether it runs and for which units"
    if stage.footprint is not None:
        yield from _size(stage.footprint, stage)
    elif stage.origin:
        yield f"one job: {stage.origin}"
    if stage.model is not None:
        yield from _model(stage.model)
    if stage.tight:
        yield f"tight: {stage.tight}; to accept that: --accept-tight"
    for command in stage.measure:
        yield f"{'estimate its GPU memory' if command.startswith('memfit estimate') else 'measure one'}: {command}"


def _model(answer: Mapping[str, Any]) -> Iterator[str]:
    """What a step of a stage's model takes: its tensors by part, all of it on a GPU, and what makes it fit."""
    sizes, parts = answer["device"], answer["parts"]
    names = dict.fromkeys((*_OF_STEPS, *sorted(parts, key=lambda name: -int(parts[name]["value"]))))
    shown = {name: parts.get(name, {"value": 0})["value"] for name in names}
    terms = [
        f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in shown.items() if size or name in _OF_STEPS
    ]
    tensors, reserved, whole = (sizes[name] for name in ("allocated_bytes", "reserved_bytes", "device_bytes"))
    how = "by the formula" if answer["method"] == "formula" else answer["method"]
    yield f"a step of its model ({how}): {_bound(tensors)} in tensors = {' + '.join(terms)}"
    context = {name: whole[name] - reserved[name] for name in whole}
    yield f"  on a GPU: {_bound(whole)}, with torch's cache and a context of {_bound(context)}"
    gpu, change = answer["gpu"], answer["change"]
    if gpu is not None:
        yield f"  {answer['verdict']}: {format_bytes(gpu['total_bytes'])} ({gpu['name']})"
    if change is not None:
        yield f"  fits with {' '.join(change['options'])}: {_bound(change['device']['device_bytes'])}"


def _bound(size: Mapping[str, int]) -> str:
    return f"{format_bytes(size['value'])} (at most {format_bytes(size['upper'])})"


def _size(footprint: Footprint, stage: StagePlan) -> Iterator[str]:
    """What one job takes, each sum with its terms: host and GPUs apart."""
    whole, names = format_bytes(footprint.private_bytes), [name for name in footprint.parts if name not in _NO_PARTS]
    parts = [f"{name.replace('_', ' ')} {format_bytes(size)}" for name in names if (size := footprint.parts[name])]
    yield f"one job: {whole} of host memory ({stage.origin})" + (f" = {' + '.join(parts)}" if parts else "")
    if (reserved := stage.rows[0].needed_bytes if stage.rows else 0) > footprint.private_bytes:
        slack = round(100 * (reserved / footprint.private_bytes - 1))
        yield f"  reserved: {format_bytes(reserved)} = {whole} + {slack} % slack"
    if footprint.shared_bytes:
        yield f"  mapped files: {format_bytes(footprint.shared_bytes)}, shared by all jobs and not counted"
    for device, size in footprint.device_bytes.items():
        yield f"  GPU {device}: {format_bytes(size)}"
    if footprint.phases:
        peaks = [f"{name} {format_bytes(peak.private_bytes)}" for name, peak in footprint.phases.items()]
        yield f"  by phase: {', '.join(peaks)}"


def _matrix(stage: StagePlan) -> Table:
    table = plain_table("at once", "memory", "left of the budget", "fits", "time", left=("at once", "fits"))
    for row in stage.rows:
        left = format_bytes(abs(row.margin_bytes))
        table.add_row(
            f"all {row.num_jobs}" if row.num_jobs == stage.num_runs and row.num_jobs > 1 else str(row.num_jobs),
            format_bytes(row.needed_bytes),
            left if row.margin_bytes >= 0 else f"-{left}",
            "yes" if row.fits else "no" if row.margin_bytes < 0 else "no (GPU)",
            "not measured yet" if row.seconds is None else f"about {format_duration(row.seconds, short=True)}",
        )
    return table
