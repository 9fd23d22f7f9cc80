"""How far the truth may lie above what was counted: from a trace's peaks to four figures with their bounds."""

from __future__ import annotations

from collections.abc import Mapping

from memfit.estimation._allocator import Replay
from memfit.estimation._estimate import Metric
from memfit.estimation._events import Part, Peak, Phase, Trace
from memfit.estimation._gpus import Gpu
from memfit.estimation._interval import Interval
from memfit.estimation._setup import Setup

#: How far each part may lie above its count. Weights, gradients and states are counted tensor by tensor, and torch's
#: allocator rounds each up. What is kept for the backward pass depends on the kernels that the library's version
#: chooses; what is temporary also on when Python lets go of it. Buffers of collectives wait for events of their stream,
#: so that as many may still be there again; workspaces of convolutions depend on the algorithm that cuDNN picks.
ABOVE: Mapping[Part, float] = {
    "weights": 0.005,
    "buffers": 0.005,
    "gradients": 0.01,
    "optimizer": 0.01,
    "activations": 0.08,
    "temporaries": 0.2,
    "inputs": 0.0,
    "cast_weights": 0.05,
    "communication": 1.0,
    "workspaces": 2.0,
}
#: Bytes that a step takes beside its tensors in any case: random states, flags, lazily made handles.
_AT_LEAST = 64 << 20
#: Of the bytes that come and go, the share that fragments may hold beside those of the replay: a real step meets its
#: batches in another order and at other sizes.
_FRAGMENTS = 0.06


def bound_parts(peak: Peak, workspaces: Interval) -> dict[Part, Interval]:
    """The parts of a peak, each with its bound.

    Args:
        peak: As it was traced.
        workspaces: What cuBLAS and cuDNN may take on this device beyond what was traced, as the bound's addition.
    """
    parts: dict[Part, Interval] = {}
    for part, count in peak.parts.items():
        extra = workspaces.upper if part == "workspaces" else 0
        parts[part] = Interval(count, int(count * (1 + ABOVE[part])) + extra)
    return parts


def bound_device(
    peaks: Mapping[Phase, Peak], replay: Replay, gpu: Gpu, trace: Trace, *, world_size: int = 1
) -> tuple[dict[Metric, Interval], dict[Phase, Interval], dict[Part, Interval]]:
    """The four figures, the allocated peak of each phase, and the parts of the highest one."""
    workspace = gpu.cublas_workspace_bytes
    room = Interval(0, 2 * (workspace.upper - workspace.value))
    parts = {phase: bound_parts(peak, room) for phase, peak in peaks.items()}
    by_phase = {}
    for phase, found in parts.items():
        total = Interval.total(found.values())
        value = max(total.value, replay.allocated_bytes[phase])
        slack = trace.slack_bytes if phase in ("backward", "step") else 0
        slack += trace.convolution_slack.get(phase, 0) + trace.cast_slack
        by_phase[phase] = Interval(value, max(total.upper, value) + slack + _AT_LEAST)
    top = max(by_phase, key=lambda phase: by_phase[phase].value)
    allocated = Interval.highest(by_phase.values())
    churn = sum(
        count for part, count in peaks[top].parts.items() if part not in ("weights", "buffers", "optimizer", "inputs")
    )
    above = allocated.upper - allocated.value
    counted = max(replay.allocated_bytes.values(), default=0)
    active = Interval(counted, max(counted + above, allocated.upper))
    reserved = Interval(
        replay.reserved_bytes, max(replay.reserved_bytes, allocated.value) + above + int(churn * _FRAGMENTS) + _AT_LEAST
    )
    beside = gpu.context_bytes + gpu.nccl_bytes(world_size)
    if trace.convolution_slack:
        beside = beside + gpu.cudnn_bytes
    device = {
        "allocated_bytes": allocated,
        "active_bytes": active,
        "reserved_bytes": reserved,
        "device_bytes": reserved + beside,
    }
    return device, by_phase, parts[top]  # type: ignore[return-value]


def bound_load(setup: Setup, whole: Interval, unit: int, largest: int) -> Interval | None:
    """Return what loading the weights takes of a device; None where it is no more than what stays of them.

    Args:
        setup: Its strategy, adapters and quantisation count.
        whole: All weights, as they are held on a device that shares none.
        unit: The largest block, or what lies beside the blocks.
        largest: The largest weight that is quantised, before it is; 0 for none.
    """
    if setup.is_sharded:
        share = whole.times(1 / setup.world_size, 1.02 / setup.world_size)
        shards = share + Interval(unit, 2 * unit + _AT_LEAST)
        every = Interval(whole.value, whole.upper + shards.upper)
        return {"shards": shards, "whole": every}.get(setup.load, Interval(shards.value, every.upper))
    if setup.lora_rank or setup.quantization != "none":
        return whole + Interval(largest, 2 * largest + _AT_LEAST)
    return None
