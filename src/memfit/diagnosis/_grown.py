"""Tell whether memory grew until a job died of it, by the figures in the lines of a log."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from memfit.diagnosis._find import to_bytes
from memfit.diagnosis._progress import read_counters
from memfit.diagnosis._record import Diagnosis
from memfit.diagnosis._remedies import DEVICES
from memfit.diagnosis._text import Line, Stream
from memfit.memory import Level, explain_death
from memfit.units import format_bytes

#: How many figures a log must have where nothing died, and by which share of the last one they must rise.
_LEAST_FIGURES, _LEAST_SHARE = 30, 0.3
_GAP_LINES = 1000  # so many were left out: a long log is not read whole
_NOT_KNOWN = 1 << 40  # steps of an epoch, of which the first has not ended
#: ``memory 1.2 GiB``, ``mem=3.1G``, ``'gpu_mem': '900MB'``, ``RSS: 2.5 GB``, ``GPU 0 allocated 2.50GB``.
_SIZE = re.compile(
    r"(?P<name>(?:\b[a-z]+[ _/](?:\d[ _/])?)?(?<![a-z])(?:mem(?:ory)?|v?ram|rss|allocated)(?:[ _/]?[a-z]+)?)['\"]?"
    r"[ :=]{1,3}['\"]?(?P<size>\d+(?:\.\d+)?) ?(?P<unit>[KMGT])(?:i?B)?\b",
    re.IGNORECASE,
)
_OF_DEVICE = re.compile(r"gpu|cuda|vram|allocated|hip|npu|xpu|device", re.IGNORECASE)
_OF_HOST = re.compile(r"rss|cpu|host|\bram", re.IGNORECASE)
_NO_LEVEL = re.compile(r"max|peak|free|total|limit|avail|request|reserved", re.IGNORECASE)


def find_growth_in(found: Diagnosis, streams: Iterable[Stream]) -> Diagnosis:
    """Return the diagnosis of logs with what their lines say of memory that grows by the step."""
    is_host, figures = found.kind.startswith("host"), found.figures
    is_dead = found.oom and not found.recovered and (is_host or found.kind in DEVICES)
    size, tried = figures.get("limit") or figures.get("device_total") or 0, figures.get("tried", 0)
    for name, levels, first, epoch_steps in (one for stream in streams for one in _read_levels(stream.lines)):
        last, steps, is_near = levels[-1].low, levels[-1].step, tried <= size <= 2 * levels[-1].low
        known = {"epoch_steps": epoch_steps, "steps": 0 if epoch_steps else round(steps)}
        cause = explain_death(levels, size if size and is_near else last, **known)
        if cause != "growth" or last - first < _LEAST_SHARE * last:
            continue
        slope = format_bytes(round((last - levels[0].low) / (steps - levels[0].step)))
        text = f"the log's {name} grew by {slope} a step, up to {format_bytes(last)}"
        if is_dead and (is_near or not size) and not (_OF_DEVICE if is_host else _OF_HOST).search(name):
            return add_growth(found, text)
        if len(levels) >= _LEAST_FIGURES:
            return replace(found, notes=(*found.notes, f"{text} so far; it may level off."))
    return found


def add_growth(found: Diagnosis, text: str, who: str = "") -> Diagnosis:
    """Return the diagnosis of a job that grew until it met its limit; ``who`` may be ``rank 1``."""
    where = found.where | ({"rank": int(rank[1])} if (rank := re.fullmatch(r"rank (\d+)", who)) else {})
    text += ". More memory puts that off, it does not mend it."
    return replace(found, cause="growth", confidence="likely", where=where, notes=(text, *found.notes))


def _read_levels(lines: Sequence[Line]) -> Iterator[tuple[str, Sequence[Level], int, int]]:
    """Yield sizes of memory that lines show, by name, each at the newest step before it; the first; steps an epoch."""
    readings = [*read_counters(lines)] if any(_SIZE.search(line.text[:400]) for line in lines) else []
    last, before, places, begins, firsts = 0.0, 0.0, dict[int, float](), dict[str, int](), dict[str, int]()
    for one in [one for one in readings if one.counter == "step"] or [one for one in readings if one.is_training]:
        before, last = before + (one.total or last) * (one.value < last), one.value  # it begins again with each epoch
        if (named := one.epoch) and named["epochs"] != "1":
            begins.setdefault(named["epoch"], round(before + last))
        places[one.place] = before + last
    at, found = 0.0, defaultdict[str, list[Level]](list)
    for place, line in enumerate(lines if places else ()):
        if place and line.number > lines[place - 1].number + _GAP_LINES:
            found.clear()
        at = places.get(place, at)
        for size in _SIZE.finditer(line.text[:400]):
            held, name, levels = to_bytes(size["size"], size["unit"]), size["name"], found[size["name"]]
            if held and not _NO_LEVEL.search(name) and (levels[-1].step if levels else 0) < at:
                firsts.setdefault(name, held)
                levels.append(Level(0.0, at, held, held))
    epoch_steps = ([*begins.values(), _NOT_KNOWN] if begins else [0, 0])[1]
    yield from ((name, levels, firsts[name], epoch_steps) for name, levels in found.items() if levels)
