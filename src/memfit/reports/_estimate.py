"""Print an estimate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from memfit.reports._parts import Note, Part, Table, to_text
from memfit.units import format_bytes

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
    "extrapolated": "extrapolated from traces with",
    "formula": "computed by the rules of",
}


def print_estimate(answer: Mapping[str, Any], log: Console) -> None:
    """Print an answer of ``memfit.planning.ask``."""
    to_text(_estimate(answer), log)


def _estimate(answer: Mapping[str, Any]) -> Iterator[Part]:
    yield _verdict(answer)
    if answer["data"]:
        yield Note(answer["data"]["text"])
    if answer["setup"] is not None:  # a workload's step has none
        yield from _equation(answer)
    versions = " and ".join(f"{name} {version}" for name, version in answer["versions"].items())
    yield Note(f"{_METHODS[answer['method']]} {versions}")
    figures = [(name.removesuffix("_bytes"), *_sizes(answer["device"][name]), text) for name, text in _METRICS.items()]
    parts = sorted(answer["parts"].items(), key=lambda part: -part[1]["value"])
    largest = [(name.replace("_", " "), *_sizes(size)) for name, size in parts if size["upper"]]
    phases = [(name, *_sizes(size)) for name, size in answer["by_phase"].items()]
    peak = f"at the peak ({answer['peak_phase']})"
    yield from (Note(""), Table(("device", *_BOUNDS, ""), figures, ("device", "")))
    yield from (Note(""), Table((peak, *_BOUNDS), largest, (peak,)))
    yield from (Note(""), Table(("peak by phase", *_BOUNDS), phases, ("peak by phase",)))
    if answer["setup"] is not None and answer["gpu"] is not None and answer["verdict"] != "fits":
        yield from _change(answer)
    if answer["verdict"] == "tight":
        yield Note("to accept that little: --accept-tight")
    if answer["notes"]:
        yield from (Note(""), *(Note(f"note: {note}") for note in answer["notes"]))


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


def _change(answer: Mapping[str, Any]) -> Iterator[Note]:
    yield Note("")
    change = answer["change"]
    if change is None:
        yield Note("no tested change of the setup makes it fit: use a larger GPU or a smaller model")
        if answer["smaller_model"]:
            yield Note(f"  {answer['smaller_model']['text']}")
        return
    value, upper = _sizes(change["device"]["device_bytes"])
    yield Note(f"fits with {' '.join(change['options'])}: {value}, at most {upper}", "bold")
    same = "the same training" if change["same_training"] else "changes the training"
    yield Note(f"  costs: {change['cost']}; {same}")


def _sizes(interval: Mapping[str, int]) -> tuple[str, str]:
    return format_bytes(interval["value"]), format_bytes(interval["upper"])
