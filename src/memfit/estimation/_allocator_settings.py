"""The settings of torch's caching allocator: read them, and find what torch refuses or ignores."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

from memfit.checks import Check, Verdict
from memfit.errors import ConfigError, nearest
from memfit.units import MIB

#: The variables that torch reads, the first that is set: c10/cuda/CUDAAllocatorConfig.h (torch 2.13).
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_PARSER = "c10/core/AllocatorConfig.cpp (torch 2.13)"
_CUDA_PARSER = "c10/cuda/CUDAAllocatorConfig.h (torch 2.13)"
#: What expandable segments do not go with, and why.
_BESIDE_EXPANDABLE = {
    **dict.fromkeys(
        ("max_split_size_mb", "garbage_collection_threshold"),
        "before torch 2.5 it ends with an assertion near an out-of-memory; since then the other option skips blocks of "
        "expandable segments (pytorch pull requests 120022 and 134338)",
    ),
    "roundup_power2_divisions": "rounding wastes memory to use blocks again; expandable segments do not need it",
}
_REFUSES = "torch refuses it when it is imported, also in a build for the CPU"
_ALONE = "expandable_segments:True alone: it is what prevents fragmentation; the others are for drivers without it"


class _Rule(NamedTuple):
    holds: Callable[[str], bool]
    words: str
    example: str


def _at_least(least: int, example: str = "128") -> _Rule:
    return _Rule(
        lambda value: value.isdigit() and int(value) >= least, f"be a whole number of at least {least}", example
    )


def _one_of(*known: str) -> _Rule:
    return _Rule(known.__contains__, f"be {' or '.join(known)}", known[0])


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan


def _are_divisions(value: str) -> bool:
    """Check divisions: one number, or a list of sizes in MiB, each with its own; 0 is none."""
    is_list = value.startswith("[") and value.endswith("]")
    parts = [part.partition(":") for part in value[1:-1].split(",")] if is_list else [(">", ":", value)]
    return all(
        colon and (size == ">" or _is_power(size)) and ((is_list and number == "0") or _is_power(number))
        for size, colon, number in parts
    )


def _is_power(text: str) -> bool:
    return text.isdigit() and int(text).bit_count() == 1


_BOOLEANS = """
expandable_segments pinned_use_background_threads release_lock_on_cudamalloc release_lock_on_hipmalloc
pinned_use_cuda_host_register pinned_use_hip_host_register graph_capture_record_stream_reuse pinned_free_catch_all
throw_on_cudamalloc_oom
"""
_COUNTS = "pinned_max_round_threshold_mb pinned_max_cached_size_mb pinned_reserve_segment_size_mb"
_ANY = _Rule(lambda _: True, "", "128")
#: What each key of torch 2.6 to 2.13 takes.
KEYS: Mapping[str, _Rule] = {
    "max_split_size_mb": _at_least(20),  # where large_segment_size_mb is set, at least that
    "max_non_split_rounding_mb": _at_least(20),
    "large_segment_size_mb": _at_least(11),
    "garbage_collection_threshold": _Rule(
        lambda value: 0 < _number(value) < 1, "lie between 0 and 1, and be neither", "0.8"
    ),
    "roundup_power2_divisions": _Rule(_are_divisions, "be a power of 2, or a list such as [256:1,512:2,>:4]", "4"),
    "backend": _one_of("native", "cudaMallocAsync", "hipMallocAsync"),
    "pinned_num_register_threads": _at_least(1, "8"),
    "per_process_memory_fraction": _Rule(lambda value: 0 <= _number(value) <= 1, "lie from 0 to 1", "0.9"),
    **dict.fromkeys(_BOOLEANS.split(), _one_of("True", "False")),
    **dict.fromkeys(_COUNTS.split(), _at_least(0)),
    **dict.fromkeys(("expandable_segments_reserve", "expandable_segments_reserve_by_class"), _ANY),
}


_fault = partial(Check, "torch allocator")


def allocator_faults(text: str) -> list[Check]:
    pairs = _split(text)
    return [*_refused(pairs), *_contradictions(pairs)]


def check_allocator(text: str, *, name: str = "the allocator's settings") -> list[str]:
    """Refuse settings that break; return the faults that only cost or have no effect, each as a sentence."""
    faults = allocator_faults(text)
    _refuse([fault for fault in faults if fault.verdict == "problem"], name)
    return [f"{fault.finding}: {fault.reason} ({fault.source}); {fault.remedy}" for fault in faults]


def _refuse(problems: Iterable[Check], name: str) -> None:
    for one in problems:
        raise ConfigError(f"{name}: {one.finding}.", rule=f"{one.reason} ({one.source}).", remedy=one.remedy)


def _split(text: str) -> list[tuple[str, str | None]]:
    """Return keys and values, in order; None if there is no value. A list in brackets is one value."""
    found = []
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", re.sub(r"\s", "", text)):
        key, colon, value = part.partition(":")
        found.append((key, value if colon else None))
    return found


def _refused(pairs: Sequence[tuple[str, str | None]]) -> Iterator[Check]:
    """Find keys and values that torch refuses."""
    sizes = [value for key, value in pairs if key == "large_segment_size_mb" and value and value.isdigit()]
    large = _at_least(max(int(sizes[-1]), 11) if sizes else 20)
    for key, value in pairs:
        name, _, given = key.partition("=")
        rule = KEYS.get(name)
        write = f"write {name}:{given or (rule or _ANY).example}"
        if key in ("max_split_size_mb", "max_non_split_rounding_mb"):
            rule = large
        if value is None:
            reason = f"a setting is written key:value, with a colon; {_REFUSES}"
            yield _fault("problem", f"'{key}' has no value", reason, write, _PARSER)
        elif rule is None:
            near = nearest(key, KEYS)
            remedy = near if near.startswith("did") else "leave it out, or see the docs of your torch"
            reason = "a build for a GPU ends with 'Unrecognized key'; one for the CPU says nothing"
            finding = f"'{key}' is no setting of torch 2.6 to 2.13"
            yield _fault("problem", finding, reason, remedy, _CUDA_PARSER)
        elif not rule.holds(value):
            yield _fault("problem", f"{key}:{value} must {rule.words}", _REFUSES, write, _PARSER)


def _contradictions(pairs: Sequence[tuple[str, str | None]]) -> Iterator[Check]:
    """Find settings that torch takes, and that do not go with expandable segments."""
    given = dict(pairs)
    for key, reason in _BESIDE_EXPANDABLE.items() if given.get("expandable_segments") == "True" else ():
        if key in given:
            verdict: Verdict = "warning" if key == "roundup_power2_divisions" else "problem"
            finding = f"expandable_segments:True together with {key}:{given[key]}"
            yield _fault(verdict, finding, reason, _ALONE, "pytorch issue 119452")


@dataclass(frozen=True)
class AllocatorSettings:
    """The settings of torch's caching allocator for CUDA, in bytes; the defaults are torch's. Blocks of
    ``max_split_size`` and more are never split. Such a block may be larger than the request by
    ``max_non_split_rounding``. ``large_segment_size`` is the segment for a request between 1 and 10 MiB."""

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int = 20 * MIB
    large_segment_size: int = 20 * MIB
    per_process_memory_fraction: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a value of ``PYTORCH_ALLOC_CONF`` or ``PYTORCH_CUDA_ALLOC_CONF``; refuse what torch refuses or memfit
        does not model: another allocator, rounding to parts of powers of 2.

        Keys of other memory than the device's change nothing, nor does ``garbage_collection_threshold``, which only
        makes torch reserve less. Source: c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.h (torch
        2.13)."""
        pairs = _split(text)
        _refuse(_refused(pairs), "the allocator's settings")
        given = {key: value for key, value in pairs if value is not None}
        if given.get("backend", "native") != "native":
            what = f"the allocator '{given['backend']}' is the driver's: memfit does not know what it reserves."
            raise ConfigError(what, rule="only torch's own allocator is modelled", remedy="leave the key backend out")
        if "roundup_power2_divisions" in given:
            raise ConfigError(
                "memfit does not model roundup_power2_divisions.",
                rule="it rounds sizes up, by a share that depends on each size.",
                remedy="leave it out: its memory comes on top of the estimate",
            )
        split = given.get("max_split_size_mb")
        return cls(
            given.get("expandable_segments") == "True",
            int(split) * MIB if split else None,
            int(given.get("max_non_split_rounding_mb", 20)) * MIB,
            int(given.get("large_segment_size_mb", 20)) * MIB,
            float(given.get("per_process_memory_fraction", 1.0)),
        )
