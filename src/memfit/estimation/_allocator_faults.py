"""What is wrong with the settings of torch's caching allocator: what it refuses, what contradicts itself, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from memfit.errors import ConfigError, nearest
from memfit.estimation._allocator_settings import KEYS, refused_settings, split_settings

_PARSER = "c10/core/AllocatorConfig.cpp (torch 2.13)"
_CUDA_PARSER = "c10/cuda/CUDAAllocatorConfig.h (torch 2.13)"
_ALLOCATOR = "c10/cuda/CUDACachingAllocator.cpp (torch 2.13)"
_REFUSES = "torch refuses it when it is imported, also in a build for the CPU"
_EXAMPLES = {"garbage_collection_threshold": "0.8", "roundup_power2_divisions": "4", "backend": "native"}
_ALONE = "expandable_segments:True alone: it is what prevents fragmentation; the others are for drivers without it"


@dataclass(frozen=True)
class AllocatorFault:
    """One thing that is wrong with the settings.

    Attributes:
        verdict: ``problem`` for what torch refuses or what breaks; ``warning`` for what has no effect or costs.
        finding: What is wrong.
        reason: Why.
        remedy: What to write instead.
        source: Who says so.
    """

    verdict: Literal["problem", "warning"]
    finding: str
    reason: str
    remedy: str
    source: str


def allocator_faults(text: str) -> list[AllocatorFault]:
    """What is wrong with a value of PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF; empty when nothing is.

    Args:
        text: The variable's value.

    >>> [fault.finding for fault in allocator_faults("expandable_segments:True,max_split_size_mb:128")]
    ['expandable_segments:True together with max_split_size_mb:128']
    >>> allocator_faults("expandable_segments:True")
    []
    """
    pairs = split_settings(text)
    given = {key: value for key, value in pairs if value is not None}
    return [*_refused(pairs), *_repeated(pairs), *_contradictions(given), *_without_effect(given)]


def check_allocator(text: str, *, name: str = "the allocator's settings") -> list[str]:
    """What of the settings has no effect or costs, each in a sentence.

    Args:
        text: As in ``PYTORCH_CUDA_ALLOC_CONF``.
        name: Where the text was given, for the error.

    Raises:
        ConfigError: If torch refuses them, or they break one another.

    >>> check_allocator("garbage_collection_threshold:0.8")[0].partition(":")[0]
    'garbage_collection_threshold'
    """
    faults = allocator_faults(text)
    for fault in faults:
        if fault.verdict == "problem":
            raise ConfigError(
                f"{name}: {fault.finding}.", rule=f"{fault.reason} ({fault.source}).", remedy=fault.remedy
            )
    return [f"{fault.finding}: {fault.reason} ({fault.source}); {fault.remedy}" for fault in faults]


def _refused(pairs: Sequence[tuple[str, str | None]]) -> Iterator[AllocatorFault]:
    """Keys and values that torch does not take."""
    for key, value, wrong in refused_settings(pairs):
        if value is None:
            reason = f"a setting is written key:value, with a colon; {_REFUSES}"
            yield AllocatorFault("problem", f"'{key}' has no value", reason, _write(key), _PARSER)
        elif key not in KEYS:
            near = nearest(key, KEYS)
            remedy = near if near.startswith("did") else "leave it out, or see the docs of your torch"
            reason = "a build for a GPU ends with 'Unrecognized key'; one for the CPU says nothing"
            yield AllocatorFault("problem", f"'{key}' {wrong}", reason, remedy, _CUDA_PARSER)
        else:
            yield AllocatorFault("problem", f"{key}:{value} {wrong}", _REFUSES, _write(key), _PARSER)


def _repeated(pairs: Sequence[tuple[str, str | None]]) -> Iterator[AllocatorFault]:
    seen: dict[str, str | None] = {}
    for key, value in pairs:
        if key in seen and seen[key] != value:
            finding = f"{key} is given twice: {seen[key]} and {value}"
            yield AllocatorFault("warning", finding, "the last one counts", "leave one out", _PARSER)
        seen[key] = value


def _write(key: str) -> str:
    """An example of a good value.

    >>> _write("max_split_size_mb=128"), _write("expandable_segments")
    ('write max_split_size_mb:128', 'write expandable_segments:True')
    """
    name, _, value = key.partition("=")
    rule = KEYS.get(name)
    is_boolean = rule is not None and not rule("True") and bool(rule("128"))
    return f"write {name}:{value or _EXAMPLES.get(name) or ('True' if is_boolean else '128')}"


def _contradictions(given: dict[str, str]) -> Iterator[AllocatorFault]:
    """Settings that torch takes and that do not go together."""
    if given.get("expandable_segments") != "True":
        return
    for key in ("max_split_size_mb", "garbage_collection_threshold"):
        if key in given:
            yield AllocatorFault(
                "problem",
                f"expandable_segments:True together with {key}:{given[key]}",
                "before torch 2.5 it hits an assertion near an out-of-memory; since then blocks of expandable "
                "segments are skipped, so that the other option frees nothing of them",
                _ALONE,
                "pytorch pull requests 120022 and 134338, issue 119452",
            )
    if "roundup_power2_divisions" in given:
        reason = "rounding wastes memory so that blocks can be used again, which expandable segments need not"
        finding = f"expandable_segments:True together with roundup_power2_divisions:{given['roundup_power2_divisions']}"
        yield AllocatorFault("warning", finding, reason, _ALONE, "pytorch issue 119452")


def _without_effect(given: dict[str, str]) -> Iterator[AllocatorFault]:
    """Settings that nothing looks at without another one."""
    expandable = given.get("expandable_segments") == "True"
    native = [key for key in given if key not in ("backend", "expandable_segments") and not key.startswith("pinned_")]
    if given.get("backend") == "cudaMallocAsync" and (native or expandable):
        others = ", ".join([*native, *(["expandable_segments"] if "expandable_segments" in given else [])])
        finding = f"backend:cudaMallocAsync together with {others}"
        reason = "the driver's allocator is used, and these are settings of torch's own: they have no effect"
        source = "torch notes, CUDA semantics, memory management"
        yield AllocatorFault("warning", finding, reason, "leave one of them out", source)
        return
    fraction = given.get("per_process_memory_fraction")
    if "garbage_collection_threshold" in given and not expandable and not _is_below_one(fraction):
        told = "without per_process_memory_fraction" if fraction is None else f"with a whole device ({fraction})"
        reason = (
            "the share is taken of what the process is allowed, and torch looks at it only where that is less than the "
            "device: nothing is given back"
        )
        remedy = (
            "add per_process_memory_fraction:0.9, or call torch.cuda.set_per_process_memory_fraction(0.9) in the script"
        )
        finding = f"garbage_collection_threshold:{given['garbage_collection_threshold']} {told}"
        yield AllocatorFault("warning", finding, reason, remedy, _ALLOCATOR)
    if "throw_on_cudamalloc_oom" in given and fraction is None:
        reason = "it refuses what would pass the process's fraction, and without one there is nothing to pass"
        finding, remedy = (
            "throw_on_cudamalloc_oom without per_process_memory_fraction",
            "add per_process_memory_fraction:0.9",
        )
        yield AllocatorFault("warning", finding, reason, remedy, _CUDA_PARSER)


def _is_below_one(fraction: str | None) -> bool:
    try:
        return fraction is not None and float(fraction) < 1.0
    except ValueError:
        return False
