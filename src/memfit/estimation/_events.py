"""What a traced training step did with device memory: births and deaths of blocks, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from memfit.estimation._interval import Interval

#: What the bytes of a block are for.
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
Phase = Literal["load", "build", "forward", "backward", "step", "validate"]
PARTS: tuple[Part, ...] = Part.__args__  # type: ignore[attr-defined]
PHASES: tuple[Phase, ...] = Phase.__args__  # type: ignore[attr-defined]


class Event(NamedTuple):
    """The birth or death of a block.

    Attributes:
        block: The block's number; never used twice.
        num_bytes: The bytes asked for at birth, not rounded; 0 at death.
        phase: When.
    """

    block: int
    num_bytes: int
    phase: Phase


@dataclass(frozen=True)
class Trace:
    """The events of a program from its first byte on.

    Attributes:
        events: In order; a block that has no death lives on.
        parts: What each block is for, by its number.
        notes: What was replaced or assumed on the way, in words.
        streams: The stream that a block was born on, by its number; 0, which computes, is left out.
        slack_bytes: What an update may take beyond what was traced, as implementations of the same optimizer differ.
        convolution_slack: What another algorithm of cuDNN may take beyond what was counted, by phase; empty without
            convolutions.
        load: What loading the weights takes, and `cast_slack` what stays if libraries then widen some of them.
    """

    events: Sequence[Event]
    parts: Mapping[int, Part]
    notes: tuple[str, ...] = ()
    streams: Mapping[int, int] = field(default_factory=dict)
    slack_bytes: int = 0
    convolution_slack: Mapping[Phase, int] = field(default_factory=dict)
    load: Interval | None = None
    cast_slack: int = 0


@dataclass(frozen=True)
class Peak:
    """The highest moment of a trace, or of one of its phases.

    Attributes:
        num_bytes: Bytes alive, not rounded.
        parts: The same bytes by what they are for.
    """

    num_bytes: int
    parts: Mapping[Part, int] = field(default_factory=dict)


def find_peaks(trace: Trace) -> dict[Phase, Peak]:
    """The peak of each phase, in order of appearance.

    >>> events = [Event(1, 8, "build"), Event(2, 4, "forward"), Event(2, 0, "forward")]
    >>> find_peaks(Trace(events, {1: "weights", 2: "inputs"}))["forward"].parts
    {'weights': 8, 'inputs': 4}
    """
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
