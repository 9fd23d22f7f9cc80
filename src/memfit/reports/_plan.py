"""What may be used, what a run would do, and what a training would need, as people read it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from memfit.memory import Budget, Device
from memfit.reports._parts import Facts, Inset, Note, Part, Table
from memfit.units import format_bytes, format_duration

if TYPE_CHECKING:
    from memfit.memory import Footprint
    from memfit.pipeline import RunPlan, StagePlan
    from memfit.planning import Forecast

_METRICS = {
    "allocated_bytes": "live tensors",
    "active_bytes": "allocated, and freed blocks that a CUDA stream may still use",
    "reserved_bytes": "held by torch's allocator",
    "device_bytes": "all of the process, as nvidia-smi shows it",
}
_BOUNDS = ("value", "at most")
_STYLES = {
    "fits": "bold green",
    "tight": "bold yellow",
    "may fit": "bold yellow",
    "does not fit": "bold red",
}
_METHODS = {
    "traced": "traced with",
    "formula": "computed by the rules of",
}
_FITS = {True: "yes", False: "no", None: "not known"}


def view_run_plan(plan: RunPlan) -> Iterator[Part]:
    budget, run = plan.budget, f"{plan.run} continues" if plan.run else "a new run directory"
    limit = f"{format_bytes(budget.lendable_bytes)} of {format_bytes(budget.binding.limit_bytes)}"
    facts = [("run", run), ("budget", f"{limit} for jobs ({budget.binding.name})")]
    width = max([10, *(len(stage.name) + 1 for stage in plan.stages)])
    yield from map(shlex.join, plan.commands)
    yield from (Facts(facts, width), "")
    for stage in plan.stages:
        first, *lines = _lines(stage)
        yield Facts([(stage.name, first)], width)
        forecast = _forecast(stage.forecast) if stage.forecast is not None else ()
        yield Inset([*lines, *forecast, *_matrix(stage)], width)
    steps = any(re.search("first steps (as|of) ", stage.origin) for stage in plan.stages)
    yield "\nOnly first steps were run." if steps else "\nNothing was started."


def _forecast(forecast: Forecast) -> Iterator[Part]:
    ledger, peaks, rows = forecast.ledger, forecast.ledger.by_phase(), []
    for line in ledger.lines:
        each = f"{line.number} x {line.amount}" if line.number > 1 else str(line.amount)
        phases = ", ".join(line.phases) or "all"
        how = f"{line.how}, {line.metric}: {line.formula}"
        rows.append((line.name, each, format_bytes(ledger.on_node(line).bytes), phases, how))
    yield Table(("line", "each", "on a node", "phases", "how"), rows, ("line", "each", "phases", "how"), fold=("how",))
    sums = ", ".join(f"{phase} {format_bytes(size.bytes)}" for phase, size in peaks.items())
    yield Note(f"host memory on a node: {sums}; of {format_bytes(forecast.limit.bytes)}: {forecast.limit_from}")
    if forecast.batch:
        yield Note(forecast.batch)
    mem, counted = forecast.request["mem"], format_bytes(ledger.peak.bytes)
    yield Note(f"to request: {f'--mem={mem}' if mem else 'not known'}, /dev/shm {forecast.request['shm']}")
    if forecast.fits is None:
        yield Note(f"fits: not known; {counted} is counted, and not {', '.join(forecast.uncounted)}")
    yield from map(Note, forecast.notes)
    modes, found = [], forecast.list_modes()
    for mode in found:
        sizes = (format_bytes(size.bytes) for size in (mode.peak, found[0].peak - mode.peak))
        modes.append((mode.name, *sizes, _FITS[mode.fits], mode.cost))
    if len(modes) > 1:
        yield Table(("mode", "on a node", "less", "fits", "cost"), modes, ("mode", "fits", "cost"), fold=("cost",))
    if forecast.fits is False:
        change = "after which what is counted fits" if forecast.uncounted else "that fits"
        yield Note(f"does not fit: {forecast.why}", "bold")
        yield Note(f"smallest change {change}: {forecast.change}")


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
        how = "" if "first steps" in stage.origin else ": plan it without --no-steps, or run one"
        yield f"one job: {stage.origin}{how}"
    if stage.model is not None:
        yield from _model(stage.model)
    if stage.tight:
        yield f"tight: {stage.tight}; to accept that: --accept-tight"


def _model(answer: Mapping[str, Any]) -> Iterator[str]:
    """What a step of a stage's model takes of a GPU, its tensors by part, and what makes it fit."""
    how = "by the formula" if answer["method"] == "formula" else answer["method"]
    yield f"a step of its model ({how}) {_verdict(answer).text}"
    yield f"  tensors: {', '.join(f'{name} {value}' for name, value, _ in _parts(answer))}"
    if (change := answer["change"]) is not None:
        yield f"  {_fits_with(change)}"


def _size(footprint: Footprint, stage: StagePlan) -> Iterator[str]:
    """What one job takes, each sum with its terms: host and GPUs apart."""
    whole, names = format_bytes(footprint.private_bytes), [name for name in footprint.parts if name != "file"]
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


def _matrix(stage: StagePlan) -> Iterator[Table]:
    unfit, rows = stage.forecast is not None and stage.forecast.fits is False, []
    for row in stage.rows:
        left = format_bytes(abs(row.margin_bytes))
        rows.append((
            f"all {row.num_jobs}" if row.num_jobs == stage.num_runs and row.num_jobs > 1 else str(row.num_jobs),
            format_bytes(row.needed_bytes),
            left if row.margin_bytes >= 0 else f"-{left}",
            "yes" if row.fits else "no" if row.margin_bytes < 0 or unfit else "no (GPU)",
            "not measured yet" if row.seconds is None else f"about {format_duration(row.seconds, short=True)}",
        ))  # fmt: skip
    if rows:
        yield Table(("at once", "memory", "left of the budget", "fits", "time"), rows, ("at once", "fits"))


# An estimate


def view_estimate(answer: Mapping[str, Any]) -> Iterator[Part]:
    yield _verdict(answer)
    if answer["data"]:
        yield Note(answer["data"]["text"])
    if answer["setup"] is not None:  # a workload's step has none
        yield from _equation(answer)
    versions = " and ".join(f"{name} {version}" for name, version in answer["versions"].items())
    yield Note(f"{_METHODS[answer['method']]} {versions}")
    figures = [(name.removesuffix("_bytes"), *_bounds(answer["device"][name]), text) for name, text in _METRICS.items()]
    phases = [(name, *_bounds(size)) for name, size in answer["by_phase"].items()]
    peak = f"at the peak ({answer['peak_phase']})"
    yield from ("", Table(("device", *_BOUNDS, ""), figures, ("device", "")))
    yield from ("", Table((peak, *_BOUNDS), [*_parts(answer)], (peak,)))
    yield from ("", Table(("peak by phase", *_BOUNDS), phases, ("peak by phase",)))
    if answer["setup"] is not None and answer["gpu"] is not None and (answer["change"] or answer["verdict"] != "fits"):
        yield from _explain_change(answer)
    if answer["verdict"] == "tight":
        yield Note("to accept that little: --accept-tight")
    if answer["notes"]:
        yield from ["", *(f"note: {note}" for note in answer["notes"])]


def _verdict(answer: Mapping[str, Any]) -> Note:
    need, gpu = answer["device"]["device_bytes"], answer["gpu"]
    text = f"needs {format_bytes(need['value'])}, at most {format_bytes(need['upper'])}"
    if gpu is None:
        return Note(f"{text} of device memory", "bold")
    size = format_bytes(gpu["total_bytes"])
    name = "" if gpu["name"] == size else f" ({gpu['name']})"
    left, verdict = gpu["total_bytes"] - need["upper"], answer["verdict"]
    rest = f"at least {format_bytes(left)} free" if left >= 0 else f"up to {format_bytes(-left)} too much"
    if verdict == "tight":
        rest = "torch's allocator empties its cache" if left < 0 else f"{rest}, under 5 %"
    return Note(f"{verdict}: {text} of {size}{name}; {rest}", _STYLES[verdict])


def _equation(answer: Mapping[str, Any]) -> Iterator[Note]:
    from memfit.estimation import equation_of_batch

    setup, chosen = answer["setup"], answer["largest_batch"]
    if chosen is not None:
        text = f"the largest batch that fits is {setup['batch']}" if chosen["fits"] else "not even a batch of 1 fits"
        yield Note(text, "bold")
    if setup["optimizer"] != "none":
        yield Note(equation_of_batch(setup["batch"], setup["num_microbatches"], setup["world_size"]))


def _explain_change(answer: Mapping[str, Any]) -> Iterator[Part]:
    yield ""
    change = answer["change"]
    if change is None:
        yield Note("no tested change of the setup makes it fit: use a larger GPU or a smaller model")
        return
    for one in (change, *answer["others"]):
        yield Note(_fits_with(one))


def _parts(answer: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the parts of a step's tensors, the largest first, with value and bound."""
    for name, size in sorted(answer["parts"].items(), key=lambda part: -part[1]["value"]):
        if size["upper"]:
            yield (name.replace("_", " "), *_bounds(size))


def _fits_with(change: Mapping[str, Any]) -> str:
    value, upper = _bounds(change["device"]["device_bytes"])
    same = "the same training" if change["same_training"] else "changes the training"
    options = " ".join(change["options"])
    return f"{change['verdict']} with {options}: {value}, at most {upper}\n  costs: {change['cost']}; {same}"


def _bounds(interval: Mapping[str, int]) -> tuple[str, str]:
    return format_bytes(interval["value"]), format_bytes(interval["upper"])


# A budget


def view_budget(budget: Budget) -> Iterator[Part]:
    binding, left = budget.binding, budget.headroom_bytes
    verdict = f"{format_bytes(left)} free" if left >= 0 else f"{format_bytes(-left)} too much is in use"
    whole, source = format_bytes(binding.limit_bytes), _short(binding.source)
    yield Note(f"{verdict} of {whole}. The smallest limit is {binding.name}, from {source}.", "bold")
    lendable, reserve = format_bytes(budget.lendable_bytes), format_bytes(budget.reserve_bytes)
    yield f"Jobs can have {lendable}. memfit keeps {reserve} free: {budget.reserve_note}.\n"
    words, rows = ("limit", "scope", "source"), []
    for one in budget.limits:
        says = _short(one.source) + (f": {one.note}" if one.note else "")
        sizes = map(format_bytes, (one.limit_bytes, one.used_bytes, one.headroom_bytes))
        rows.append((one.name, one.scope, *sizes, says))
    styles = ["bold", *("" if one.binds else "dim" for one in budget.limits[1:])]
    yield Table(("limit", "scope", "size", "used", "left", "source"), rows, words, fold=words, styles=styles)
    yield from ("", Facts([*_budget_facts(budget)]))


def _short(path: str) -> str:
    """Text with the long ids of containers cut to the twelve digits that people use."""
    return re.sub(r"([0-9a-f]{12})[0-9a-f]{20,}", r"\1…", path)


def _budget_facts(budget: Budget) -> Iterator[tuple[str, str]]:
    yield "counted", "; ".join(dict.fromkeys(f"{one.name}: {one.metric}" for one in budget.limits))
    swap = budget.swap
    usable = f"{format_bytes(swap.usable_bytes)} usable ({swap.source}), {format_bytes(swap.free_bytes)} free of "
    yield "swap", f"{usable}{format_bytes(swap.total_bytes)}; jobs never get it" if swap.total_bytes else "none"
    if budget.shm is None:
        yield "/dev/shm", "none"
    else:
        free = "" if budget.shm.free_bytes is None else f"{format_bytes(budget.shm.free_bytes)} free of "
        yield "/dev/shm", f"{free}{format_bytes(budget.shm.total_bytes)}; its files count as used memory"
    yield "cores", f"{budget.num_cpus} ({budget.cpus_source})"
    for device in budget.devices:
        yield f"GPU {device.index}", _device(device)
    if budget.cgroup:
        yield "group", _short(budget.cgroup)
    yield "jobs", _short(budget.promise)
    for note in budget.notes:
        yield "note", note


def _device(device: Device) -> str:
    text = (
        f"{device.name} {device.uuid}: {format_bytes(device.free_bytes)} free of {format_bytes(device.total_bytes)}, "
        f"{format_bytes(device.foreign_bytes)} taken by others and the driver"
    )
    names = []
    for process in device.processes:
        used = "unknown bytes" if process.used_bytes is None else format_bytes(process.used_bytes)
        user = f" of {process.user}" if process.user else ""
        names.append(f"{process.name} (pid {process.pid}{user}) {used}")
    return f"{text}: {', '.join(names)}" if names else text
