"""The settings of torch's caching allocator: what it refuses, what contradicts itself, with the source of each rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memfit.diagnosis._check import Verdict
from memfit.errors import nearest


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with the settings.

    Attributes:
        verdict: ``problem`` for what torch refuses or what breaks; ``warning`` for what has no effect or costs.
        finding: What is wrong.
        reason: Why.
        remedy: What to write instead.
        source: Who says so.
    """

    verdict: Verdict
    finding: str
    reason: str
    remedy: str
    source: str


_PARSER = "c10/core/AllocatorConfig.cpp (torch 2.13)"
_CUDA_PARSER = "c10/cuda/CUDAAllocatorConfig.h (torch 2.13)"
_BOOLEAN = "must be True or False"


def _at_least(least: int, *, above: bool = False) -> Callable[[str], str]:
    rule = f"must be a whole number {'above' if above else 'of at least'} {least}"
    return lambda value: "" if value.isdigit() and (int(value) > least or (int(value) == least and not above)) else rule


def _boolean(value: str) -> str:
    return "" if value in ("True", "False") else _BOOLEAN


def _between(value: str, *, to_one: bool) -> str:
    try:
        number = float(value)
    except ValueError:
        return "must be a number"
    good = 0.0 < number < 1.0 or (to_one and number in (0.0, 1.0))
    return "" if good else f"must lie {'from 0 to 1' if to_one else 'between 0 and 1, and be neither'}"


def _powers(value: str) -> str:
    """Divisions: one number, or a list such as ``[256:1,512:2,>:4]``.

    >>> _powers("4"), _powers("[256:1,512:2,>:4]"), _powers("3")
    ('', '', 'must be a power of 2, or a list such as [256:1,512:2,>:4]')
    """
    parts = value[1:-1].split(",") if value.startswith("[") and value.endswith("]") else [value]
    numbers = [part.rpartition(":")[2].strip() for part in parts]
    good = all(number.isdigit() and int(number) > 0 and int(number) & (int(number) - 1) == 0 for number in numbers)
    return "" if good else "must be a power of 2, or a list such as [256:1,512:2,>:4]"


def _backend(value: str) -> str:
    return "" if value in ("native", "cudaMallocAsync", "hipMallocAsync") else "must be native or cudaMallocAsync"


def _anything(value: str) -> str:
    return ""


#: Each key with what is wrong with a value of it, as torch judges it, and whether a build for the CPU judges it too.
KEYS: dict[str, Callable[[str], str]] = {
    "max_split_size_mb": _at_least(20),
    "max_non_split_rounding_mb": _at_least(20),
    "large_segment_size_mb": _at_least(10, above=True),
    "garbage_collection_threshold": lambda value: _between(value, to_one=False),
    "roundup_power2_divisions": _powers,
    "expandable_segments": _boolean,
    "pinned_use_background_threads": _boolean,
    "pinned_max_round_threshold_mb": _at_least(0),
    "pinned_max_cached_size_mb": _at_least(0),
    "backend": _backend,
    "release_lock_on_cudamalloc": _boolean,
    "release_lock_on_hipmalloc": _boolean,
    "pinned_use_cuda_host_register": _boolean,
    "pinned_use_hip_host_register": _boolean,
    "pinned_num_register_threads": _at_least(1),
    "pinned_reserve_segment_size_mb": _at_least(0),
    "graph_capture_record_stream_reuse": _boolean,
    "per_process_memory_fraction": lambda value: _between(value, to_one=True),
    "pinned_free_catch_all": _boolean,
    "throw_on_cudamalloc_oom": _boolean,
    "expandable_segments_reserve": _anything,
    "expandable_segments_reserve_by_class": _anything,
}


def parse_settings(text: str) -> list[tuple[str, str | None]]:
    """Keys and values, in order; None where there is no value. A list in brackets is one value.

    >>> parse_settings("max_split_size_mb:128, roundup_power2_divisions:[256:1,>:4],x")
    [('max_split_size_mb', '128'), ('roundup_power2_divisions', '[256:1,>:4]'), ('x', None)]
    """
    found = []
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", re.sub(r"\s", "", text)):
        key, colon, value = part.partition(":")
        found.append((key, value if colon else None))
    return found


def allocator_faults(text: str) -> list[Fault]:
    """What is wrong with a value of PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF; empty when nothing is.

    Args:
        text: The variable's value.

    >>> [fault.finding for fault in allocator_faults("expandable_segments:True,max_split_size_mb:128")]
    ['expandable_segments:True together with max_split_size_mb:128']
    >>> allocator_faults("expandable_segments:True")
    []
    """
    pairs = parse_settings(text)
    return [*_refused(pairs), *_contradictions(pairs)]


def _refused(pairs: list[tuple[str, str | None]]) -> Iterator[Fault]:
    """Keys and values that torch does not take."""
    refuses = "torch refuses it when it is imported, also in a build for the CPU"
    seen: dict[str, str | None] = {}
    for key, value in pairs:
        if value is None:
            what = "a setting is written key:value, with a colon"
            yield Fault("problem", f"'{key}' has no value", f"{what}; {refuses}", _write(key), _PARSER)
            continue
        rule = KEYS.get(key)
        if rule is None:
            near = nearest(key, KEYS)
            hint = near if near.startswith("did") else "leave it out, or see the docs of your torch"
            reason = "a build for a GPU ends with 'Unrecognized key'; one for the CPU says nothing"
            yield Fault("problem", f"'{key}' is no setting of torch 2.6 to 2.13", reason, hint, _CUDA_PARSER)
        elif wrong := rule(value):
            yield Fault("problem", f"{key}:{value} {wrong}", refuses, _write(key), _PARSER)
        if key in seen and seen[key] != value:
            yield Fault("warning", f"{key} is given twice: {seen[key]} and {value}", "the last one counts",
                        "leave one out", _PARSER)  # fmt: skip
        seen[key] = value


def _write(key: str) -> str:
    """An example of a good value.

    >>> _write("max_split_size_mb=128")
    'write max_split_size_mb:128'
    """
    name, _, value = key.partition("=")
    examples = {"garbage_collection_threshold": "0.8", "roundup_power2_divisions": "4", "backend": "native"}
    boolean = KEYS.get(name) is _boolean
    return f"write {name}:{value or examples.get(name) or ('True' if boolean else '128')}"


def _contradictions(pairs: list[tuple[str, str | None]]) -> Iterator[Fault]:
    """Settings that torch takes and that do not go together."""
    given = {key: value for key, value in pairs if value is not None}
    alone = "expandable_segments:True alone: it is what prevents fragmentation; the others are for drivers without it"
    if given.get("expandable_segments") == "True":
        for key in ("max_split_size_mb", "garbage_collection_threshold"):
            if key in given:
                yield Fault(
                    "problem",
                    f"expandable_segments:True together with {key}:{given[key]}",
                    "before torch 2.5 it hits an assertion near an out-of-memory; since then blocks of expandable "
                    "segments are skipped, so that the other option frees nothing of them",
                    alone,
                    "pytorch pull requests 120022 and 134338, issue 119452",
                )
        if "roundup_power2_divisions" in given:
            reason = "rounding wastes memory so that blocks can be used again, which expandable segments need not"
            finding = (
                f"expandable_segments:True together with roundup_power2_divisions:{given['roundup_power2_divisions']}"
            )
            yield Fault("warning", finding, reason, alone, "pytorch issue 119452")
    native = [key for key in given if key not in ("backend", "expandable_segments") and not key.startswith("pinned_")]
    if given.get("backend") == "cudaMallocAsync" and (native or given.get("expandable_segments") == "True"):
        others = ", ".join([*native, *(["expandable_segments"] if "expandable_segments" in given else [])])
        reason = "the driver's allocator is used, and these are settings of torch's own: they have no effect"
        yield Fault("warning", f"backend:cudaMallocAsync together with {others}", reason, "leave one of them out",
                    "torch notes, CUDA semantics, memory management")  # fmt: skip
    if "throw_on_cudamalloc_oom" in given and "per_process_memory_fraction" not in given:
        reason = "it refuses what would pass the process's fraction, and without one there is nothing to pass"
        yield Fault("warning", "throw_on_cudamalloc_oom without per_process_memory_fraction", reason,
                    "add per_process_memory_fraction:0.9", _CUDA_PARSER)  # fmt: skip
