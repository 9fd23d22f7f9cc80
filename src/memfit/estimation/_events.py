"""What a traced training step did with device memory: births and deaths of blocks, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

Part = Literal[
    "weights",  # parameters
    "buffers",  # what a module holds beside its parameters
    "gradients",
    "optimizer",  # its states, and a master copy of the weights
    "activations",  # made in the forward pass and kept for the backward one
    "temporaries",  # everything that dies inside its phase
    "inputs",  # the batch
    "cast_weights",  # weights in the dtype of autocast, kept until its end
    "communication",  # gathered weights, buckets, buffers of collectives
    "workspaces",  # scratch memory of cuBLAS and cuDNN that torch's allocator holds
]
Phase = Literal["build", "forward", "backward", "step"]
PARTS: tuple[Part, ...] = get_args(Part)


class Event(NamedTuple):
    """The birth of a numbered block, with the bytes asked for, or its death, with 0 bytes."""

    block: int
    num_bytes: int
    phase: Phase


@dataclass(frozen=True)
class Trace:
    """The events of a program from its first byte on."""

    events: Sequence[Event]
    parts: Mapping[int, Part]  # by the number of a block
    notes: tuple[str, ...] = ()  # what was replaced or assumed
    streams: Mapping[int, int] = field(default_factory=dict)  # of blocks that were born on another CUDA stream than 0
    slack_bytes: int = 0  # that another implementation of the optimizer may take beyond the trace
    convolution_slack: Mapping[Phase, int] = field(default_factory=dict)  # of other algorithms of cuDNN, by phase


@dataclass(frozen=True)
class Peak:
    """The highest moment of a phase: bytes alive, not rounded, and what they are for."""

    num_bytes: int
    parts: Mapping[Part, int] = field(default_factory=dict)


def find_peaks(trace: Trace) -> dict[Phase, Peak]:
    sizes: dict[int, int] = {}
    alive: dict[Part, int] = {}
    peaks: dict[Phase, Peak] = {}
    total = 0
    for block, num_bytes, phase in trace.events:
        change = num_bytes or -sizes.pop(block)
        if num_bytes:
            sizes[block] = num_bytes
        total += change
        part = trace.parts[block]
        alive[part] = alive.get(part, 0) + change
        if phase not in peaks or total > peaks[phase].num_bytes:
            peaks[phase] = Peak(total, {name: count for name, count in alive.items() if count})
    return peaks
