"""What a trace makes torch's caching allocator take from the device, and where it runs out of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memfit.estimation._allocator_settings import AllocatorSettings
from memfit.estimation._caching import Allocator, Usage
from memfit.estimation._events import Phase, Trace


@dataclass(frozen=True)
class OutOfMemory:
    """Where the allocator gives up, with the figures of torch's message.

    Attributes:
        event: The index of the birth that fails.
        block: The number of the block that is born.
        phase: When.
        requested_bytes: What the program asked for.
        tried_bytes: What the allocator asked the device for: "Tried to allocate".
        free_bytes: What the device had left: "is free".
        allocated_bytes: "is allocated by PyTorch".
        unallocated_bytes: "is reserved by PyTorch but unallocated".
    """

    event: int
    block: int
    phase: Phase
    requested_bytes: int
    tried_bytes: int
    free_bytes: int
    allocated_bytes: int
    unallocated_bytes: int


@dataclass(frozen=True)
class Replay:
    """The peaks of a trace in the allocator.

    Attributes:
        allocated_bytes: As ``torch.cuda.max_memory_allocated`` says.
        active_bytes: The peak of ``active_bytes.all`` in ``torch.cuda.memory_stats``.
        reserved_bytes: As ``torch.cuda.max_memory_reserved`` says.
        phases: The same peaks for each phase, what was there at its start included.
        end: What is there at the end.
        num_retries: How often everything cached was given back to the device to find room: each costs time.
        out_of_memory_at: Where it ends, if it does not fit.
    """

    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    phases: Mapping[Phase, Usage] = field(default_factory=dict)
    end: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    num_retries: int = 0
    out_of_memory_at: OutOfMemory | None = None


def replay(
    trace: Trace,
    settings: AllocatorSettings | None = None,
    *,
    capacity_bytes: int | None = None,
    total_bytes: int | None = None,
) -> Replay:
    """What the events of a trace make torch's allocator take from the device.

    Args:
        trace: Births and deaths, in order.
        settings: The allocator's; torch's defaults if None.
        capacity_bytes: What the device can give the allocator: its memory less the context and other processes; None
            for no end. Where it is not enough, the replay stops.
        total_bytes: The device's memory, for ``per_process_memory_fraction``; the capacity if None.

    >>> from memfit.estimation._events import Event
    >>> trace = Trace([Event(1, 30 << 20, "forward"), Event(1, 0, "forward"), Event(2, 4, "step")], {})
    >>> peaks = replay(trace)
    >>> peaks.allocated_bytes >> 20, peaks.reserved_bytes >> 20
    (30, 32)
    """
    allocator = Allocator(settings or AllocatorSettings(), capacity_bytes, total_bytes)
    phases: dict[Phase, tuple[int, int]] = {}
    current: Phase | None = None
    allocated = reserved = 0
    failed = None
    for index, (block, num_bytes, phase) in enumerate(trace.events):
        if phase != current:
            if current is not None:
                phases[current] = (allocated, reserved)
            before, current = phases.get(phase, (0, 0)), phase
            allocated = max(before[0], allocator.allocated_bytes)
            reserved = max(before[1], allocator.reserved_bytes)
        if not num_bytes:
            allocator.free(block)
        elif allocator.allocate(block, num_bytes, trace.streams.get(block, 0)):
            if allocator.allocated_bytes > allocated:
                allocated = allocator.allocated_bytes
            if allocator.reserved_bytes > reserved:
                reserved = allocator.reserved_bytes
        else:
            failed = _describe(allocator, index, block, num_bytes, phase)
            break
    if current is not None:
        phases[current] = (allocated, reserved)
    peaks = {phase: Usage(one, one, other) for phase, (one, other) in phases.items()}
    peak = max((usage.allocated_bytes for usage in peaks.values()), default=0)
    most = max((usage.reserved_bytes for usage in peaks.values()), default=0)
    return Replay(peak, peak, most, peaks, allocator.usage, allocator.num_retries, failed)


def _describe(allocator: Allocator, index: int, block: int, num_bytes: int, phase: Phase) -> OutOfMemory:
    allocated, reserved = allocator.allocated_bytes, allocator.reserved_bytes
    tried = allocator.segment_size(allocator.round(num_bytes))
    total = allocator.capacity_bytes if allocator.capacity_bytes is not None else allocator.total_bytes
    free = (total or 0) - reserved
    return OutOfMemory(index, block, phase, num_bytes, tried, free, allocated, reserved - allocated)
