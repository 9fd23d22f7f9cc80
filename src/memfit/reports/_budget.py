"""Print a budget: the smallest limit, where it comes from, and what else was found."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from memfit.memory import Budget, Device
from memfit.reports._parts import Facts, Note, plain_table, say, to_text
from memfit.units import format_bytes


def print_budget(budget: Budget, console: Console) -> None:
    """Print the smallest limit and its source, all limits as a table, and what else may be used here."""
    binding, left = budget.binding, budget.headroom_bytes
    verdict = f"{format_bytes(left)} free" if left >= 0 else f"{format_bytes(-left)} too much is in use"
    whole, source = format_bytes(binding.limit_bytes), _short(binding.source)
    text = f" of {whole}. The smallest limit is {binding.name}, from {source}."
    console.print(Text.assemble((verdict, "bold"), text), soft_wrap=True)
    lendable, reserve = format_bytes(budget.lendable_bytes), format_bytes(budget.reserve_bytes)
    say(console, f"Jobs can have {lendable}. memfit keeps {reserve} free: {budget.reserve_note}.\n")
    words = ("limit", "scope", "source")
    table = plain_table("limit", "scope", "size", "used", "left", "source", left=words, fold=words)
    for number, one in enumerate(budget.limits):
        says = _short(one.source) + (f": {one.note}" if one.note else "")
        sizes = map(format_bytes, (one.limit_bytes, one.used_bytes, one.headroom_bytes))
        row = map(Text, (one.name, one.scope, *sizes, says))
        table.add_row(*row, style="bold" if number == 0 else "" if one.binds else "dim")
    console.print(table)
    to_text([Note(""), Facts([*_facts(budget)])], console)


def _short(path: str) -> str:
    """Text with the long ids of containers cut to the twelve digits that people use."""
    return re.sub(r"([0-9a-f]{12})[0-9a-f]{20,}", r"\1…", path)


def _facts(budget: Budget) -> Iterator[tuple[str, str]]:
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
