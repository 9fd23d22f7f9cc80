"""The settings of torch's caching allocator: how their text is read, what a value may be, and what they decide."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from memfit.errors import ConfigError, nearest
from memfit.units import MIB

#: The variables that torch reads, the first that is set: c10/cuda/CUDAAllocatorConfig.h (torch 2.13).
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SOURCE = "c10/core/AllocatorConfig.cpp (torch 2.13)"
_NUM_INTERVALS = 16  # of sizes, from 1 MiB to 64 GiB: c10/core/AllocatorConfig.cpp (torch 2.13)


def _at_least(least: int) -> Callable[[str], str]:
    rule = f"must be a whole number of at least {least}"
    return lambda value: "" if value.isdigit() and int(value) >= least else rule


def _boolean(value: str) -> str:
    return "" if value in ("True", "False") else "must be True or False"


def _between(value: str, *, to_one: bool) -> str:
    try:
        number = float(value)
    except ValueError:
        return "must be a number"
    good = 0.0 < number < 1.0 or (to_one and number in (0.0, 1.0))
    return "" if good else f"must lie {'from 0 to 1' if to_one else 'between 0 and 1, and be neither'}"


def _is_power(text: str) -> bool:
    return text.isdigit() and int(text).bit_count() == 1


def _divisions(value: str) -> str:
    """What is wrong with divisions: one number, or a list of sizes in MiB, each with its own; 0 is none.

    >>> _divisions("4"), _divisions("[256:0,512:2,>:4]"), _divisions("3")
    ('', '', 'must be a power of 2, or a list such as [256:1,512:2,>:4]')
    """
    wrong = "must be a power of 2, or a list such as [256:1,512:2,>:4]"
    if not (value.startswith("[") and value.endswith("]")):
        return "" if _is_power(value) else wrong
    for part in value[1:-1].split(","):
        size, colon, number = part.partition(":")
        if not colon or not (size == ">" or _is_power(size)) or not (number == "0" or _is_power(number)):
            return wrong
    return ""


def _backend(value: str) -> str:
    return "" if value in ("native", "cudaMallocAsync", "hipMallocAsync") else "must be native or cudaMallocAsync"


def _anything(value: str) -> str:
    return ""


#: Each key of torch 2.6 to 2.13, with what is wrong with a value of it; empty when nothing is.
KEYS: Mapping[str, Callable[[str], str]] = {
    "max_split_size_mb": _at_least(20),  # where large_segment_size_mb is set, at least that
    "max_non_split_rounding_mb": _at_least(20),
    "large_segment_size_mb": _at_least(11),
    "garbage_collection_threshold": lambda value: _between(value, to_one=False),
    "roundup_power2_divisions": _divisions,
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


def split_settings(text: str) -> list[tuple[str, str | None]]:
    """Keys and values, in order; None where there is no value. A list in brackets is one value.

    >>> split_settings("max_split_size_mb:128, roundup_power2_divisions:[256:1,>:4],x")
    [('max_split_size_mb', '128'), ('roundup_power2_divisions', '[256:1,>:4]'), ('x', None)]
    """
    found = []
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", re.sub(r"\s", "", text)):
        key, colon, value = part.partition(":")
        found.append((key, value if colon else None))
    return found


def refused_settings(pairs: Sequence[tuple[str, str | None]]) -> Iterator[tuple[str, str | None, str]]:
    """What torch refuses: the key, its value, and what is wrong with it.

    >>> list(refused_settings([("max_split_size_mb", "19"), ("expandable_segments", "True")]))
    [('max_split_size_mb', '19', 'must be a whole number of at least 20')]
    """
    sizes = [value for key, value in pairs if key == "large_segment_size_mb" and value and value.isdigit()]
    large = max(int(sizes[-1]), 11) if sizes else 20
    for key, value in pairs:
        rule = KEYS.get(key)
        if key in ("max_split_size_mb", "max_non_split_rounding_mb"):
            rule = _at_least(large)
        if rule is None:
            yield key, value, "is no setting of torch 2.6 to 2.13"
        elif value is None:
            yield key, value, "has no value"
        elif wrong := rule(value):
            yield key, value, wrong


@dataclass(frozen=True)
class AllocatorSettings:
    """What torch's caching allocator for CUDA is told; the defaults are torch's.

    Attributes:
        expandable_segments: Whether segments grow page by page instead of being taken one by one.
        max_split_size: Blocks from this size on, in bytes, are never split; None for no limit.
        max_non_split_rounding: By how many bytes such a block may be larger than what it is given for.
        large_segment_size: Bytes of the segment that is taken for a request between 1 and 10 MiB.
        roundup_power2_divisions: Into how many steps the sizes between two powers of 2 are divided, for each of the
            sixteen intervals from 1 MiB to 64 GiB; 0 or 1 for none; empty for none at all.
        garbage_collection_threshold: From which share of what is allowed free blocks are given back; 0 for never. It
            does nothing unless ``per_process_memory_fraction`` is below 1.
        per_process_memory_fraction: The share of the device's memory that is allowed.

    >>> AllocatorSettings.parse("expandable_segments:True,max_split_size_mb:128").max_split_size
    134217728
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int = 20 * MIB
    large_segment_size: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """The settings that a value of ``PYTORCH_ALLOC_CONF`` or ``PYTORCH_CUDA_ALLOC_CONF`` stands for.

        Keys that concern other memory than the device's are read and change nothing.

        Raises:
            ConfigError: If torch would refuse the text, or another allocator than torch's own is asked for.

        Source: c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.h (torch 2.13).
        """
        pairs = split_settings(text)
        for key, value, wrong in refused_settings(pairs):
            what = f"the allocator setting {key}{'' if value is None else ':' + value} {wrong}."
            remedy = f"write {key}:VALUE, or leave it out" if key in KEYS else nearest(key, KEYS)
            raise ConfigError(what, rule=f"torch refuses it: {_SOURCE}", remedy=remedy)
        given = {key: value for key, value in pairs if value is not None}
        if given.get("backend", "native") != "native":
            what = f"the allocator '{given['backend']}' is the driver's, and how much it reserves is not known."
            raise ConfigError(what, rule="only torch's own allocator is modelled", remedy="leave the key backend out")
        split = given.get("max_split_size_mb")
        return cls(
            given.get("expandable_segments") == "True",
            int(split) * MIB if split else None,
            int(given.get("max_non_split_rounding_mb", 20)) * MIB,
            int(given.get("large_segment_size_mb", 20)) * MIB,
            _intervals(given.get("roundup_power2_divisions", "")),
            float(given.get("garbage_collection_threshold", 0.0)),
            float(given.get("per_process_memory_fraction", 1.0)),
        )


def _intervals(value: str) -> tuple[int, ...]:
    """The divisions of each interval of sizes: the first is up to 2 MiB, the last from 32 GiB on.

    Sizes before the first one named have its divisions, those that follow ``>`` the last; the rest have none.

    >>> _intervals("[4:8,8:2,>:1]")
    (8, 8, 8, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
    """
    if not value:
        return ()
    if not value.startswith("["):
        return (int(value),) * _NUM_INTERVALS
    found, last = [0] * _NUM_INTERVALS, -1
    for part in value[1:-1].split(","):
        size, _, number = part.partition(":")
        if size == ">":
            start = max(last, 0) + 1
            found[start:] = [int(number)] * (_NUM_INTERVALS - start)
            continue
        index = min(int(size).bit_length() - 1, _NUM_INTERVALS - 1)
        for before in range(index if last < 0 else 0):
            found[before] = int(number)
        found[index], last = int(number), index
    return tuple(found)
