"""Print an estimate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from memfit.reports._parts import plain_table, say
from memfit.units import format_bytes

_METRICS = {
    "allocated_bytes": "live tensors",
    "active_bytes": "allocated, and freed blocks that a CUDA stream may still use",
    "reserved_bytes": "held by torch's allocator",
    "device_bytes": "all of the process, as nvidia-smi shows it",
}
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
    _verdict(answer, log)
    if answer["data"]:
        say(log, answer["data"]["text"])
    if answer["setup"] is not None:  # a workload's step has none
        _equation(answer, log)
    versions = " and ".join(f"{name} {version}" for name, version in answer["versions"].items())
    say(log, f"{_METHODS[answer['method']]} {versions}")
    figures = [(name.removesuffix("_bytes"), *_sizes(answer["device"][name]), text) for name, text in _METRICS.items()]
    parts = sorted(answer["parts"].items(), key=lambda part: -part[1]["value"])
    sizes = ("value", "at most")
    _print_table(log, ("device", *sizes, ""), figures)
    largest = [(name.replace("_", " "), *_sizes(size)) for name, size in parts if size["upper"]]
    _print_table(log, (f"at the peak ({answer['peak_phase']})", *sizes), largest)
    _print_table(log, ("peak by phase", *sizes), [(name, *_sizes(size)) for name, size in answer["by_phase"].items()])
    if answer["setup"] is not None:
        _change(answer, log)
    if answer["verdict"] == "tight":
        say(log, "to accept that little: --accept-tight")
    if answer["notes"]:
        log.print()
        for note in answer["notes"]:
            say(log, f"note: {note}")


def _verdict(answer: Mapping[str, Any], log: Console) -> None:
    need, gpu = answer["device"]["device_bytes"], answer["gpu"]
    text = f"needs {format_bytes(need['value'])}, at most {format_bytes(need['upper'])}"
    if gpu is None:
        say(log, f"{text} of device memory", "bold")
        return
    size = format_bytes(gpu["total_bytes"])
    name = "" if gpu["name"] == size else f" ({gpu['name']})"
    left, verdict = gpu["total_bytes"] - need["upper"], answer["verdict"]
    rest = f"at least {format_bytes(left)} free" if left >= 0 else f"up to {format_bytes(-left)} too much"
    if verdict == "tight":
        rest = "torch's allocator empties its cache" if left < 0 else f"{rest}, under 5 %"
    say(log, f"{verdict}: {text} of {size}{name}; {rest}", _STYLES[verdict])


def _equation(answer: Mapping[str, Any], log: Console) -> None:
    from memfit.estimation import equation_of_batch

    setup, chosen = answer["setup"], answer["largest_batch"]
    if chosen is not None:
        text = f"the largest batch that fits is {setup['batch']}" if chosen["fits"] else "not even a batch of 1 fits"
        say(log, text, "bold")
    if setup["optimizer"] != "none":
        say(log, equation_of_batch(setup["batch"], setup["num_microbatches"], setup["world_size"]))


def _change(answer: Mapping[str, Any], log: Console) -> None:
    if answer["gpu"] is None or answer["verdict"] == "fits":
        return
    log.print()
    change = answer["change"]
    if change is None:
        log.print("no tested change of the setup makes it fit: use a larger GPU or a smaller model")
        if answer["smaller_model"]:
            say(log, f"  {answer['smaller_model']['text']}")
        return
    value, upper = _sizes(change["device"]["device_bytes"])
    say(log, f"fits with {' '.join(change['options'])}: {value}, at most {upper}", "bold")
    same = "the same training" if change["same_training"] else "changes the training"
    say(log, f"  costs: {change['cost']}; {same}")


def _sizes(interval: Mapping[str, int]) -> tuple[str, str]:
    return format_bytes(interval["value"]), format_bytes(interval["upper"])


def _print_table(log: Console, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    log.print("", plain_table(*headings, rows=rows, left=(headings[0], "")), sep="\n")
