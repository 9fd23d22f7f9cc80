"""What a run would do, as people read it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.reports._parts import plain_table, print_facts, say
from memfit.units import format_bytes, format_duration

if TYPE_CHECKING:
    from memfit.memory import Footprint
    from memfit.pipeline import RunPlan, StagePlan
    from memfit.planning import Forecast

_NO_PARTS = ("file", "charged_peak")  # entries of a footprint's parts that the private peak does not consist of
_FITS = {True: "yes", False: "no", None: "not known"}
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
        if stage.forecast is not None:
            _print_forecast(stage.forecast, console, width)
        if stage.rows:
            console.print(Padding(_matrix(stage), (0, 0, 0, width), expand=False))
        if stage.advice:
            say(console, f"{'':<{width}}{stage.advice}")
    console.print("\nNothing was started.")


def _print_forecast(forecast: Forecast, console: Console, width: int) -> None:
    """Print the ledger, its sums by phase, the global batch, what to request, the modes, and what would fit."""
    ledger, peaks = forecast.ledger, forecast.ledger.by_phase()
    lines = plain_table("line", "each", "on a node", "phases", "how", left=("line", "each", "phases", "how"))
    lines.columns[-1].no_wrap, lines.columns[-1].overflow = False, "fold"
    for line in ledger.lines:
        each = f"{line.number} x {line.amount}" if line.number > 1 else str(line.amount)
        what, size = f"{line.how}, {line.metric}: {line.formula}", format_bytes(ledger.on_node(line).bytes)
        phases = ", ".join(phase for phase in line.phases if phase in peaks) or "all"
        lines.add_row(line.name, each, size, phases, Text(what))
    console.print(Padding(lines, (0, 0, 0, width), expand=False))
    sums = ", ".join(f"{phase} {format_bytes(size.bytes)}" for phase, size in peaks.items())
    facts = [f"host memory on a node: {sums}; of {format_bytes(forecast.limit.bytes)}: {forecast.limit_from}"]
    facts += [forecast.batch] if forecast.batch else []
    mem, counted = forecast.request["mem"], format_bytes(ledger.peak.bytes)
    facts.append(f"to request: {f'--mem={mem}' if mem else 'not known'}, /dev/shm {forecast.request['shm']}")
    if forecast.fits is None:
        facts.append(f"fits: not known; {counted} is counted, and not {', '.join(forecast.uncounted)}")
    for text in (*facts, *forecast.notes):
        say(console, f"{'':<{width}}{text}")
    modes = plain_table("mode", "on a node", "less", "fits", "cost", left=("mode", "fits", "cost"))
    modes.columns[-1].no_wrap, modes.columns[-1].overflow = False, "fold"
    for mode in (found := forecast.list_modes()):
        saved = format_bytes((ledger.peak - mode.peak).bytes)
        modes.add_row(mode.name, format_bytes(mode.peak.bytes), saved, _FITS[mode.fits], mode.cost)
    if len(found) > 1:
        console.print(Padding(modes, (0, 0, 0, width), expand=False))
    if forecast.fits is False:
        change = "after which what is counted fits" if forecast.uncounted else "that fits"
        say(console, f"{'':<{width}}does not fit: {forecast.why}", "bold")
        say(console, f"{'':<{width}}smallest change {change}: {forecast.change}")


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
    what = {"memfit estimate": "estimate its GPU memory", "--set stages": "or count its loaders, if you name them"}
    for command in stage.measure:
        yield f"{next((text for words, text in what.items() if command.startswith(words)), 'measure one')}: {command}"


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
    unfit = stage.forecast is not None and stage.forecast.fits is False
    for row in stage.rows:
        left = format_bytes(abs(row.margin_bytes))
        table.add_row(
            f"all {row.num_jobs}" if row.num_jobs == stage.num_runs and row.num_jobs > 1 else str(row.num_jobs),
            format_bytes(row.needed_bytes),
            left if row.margin_bytes >= 0 else f"-{left}",
            "yes" if row.fits else "no" if row.margin_bytes < 0 or unfit else "no (GPU)",
            "not measured yet" if row.seconds is None else f"about {format_duration(row.seconds, short=True)}",
        )
    return table
