"""Add to a trace's peaks how far the truth may lie above them: four figures with their bounds."""

from __future__ import annotations

from collections.abc import Mapping

from memfit.estimation._allocator import Replay
from memfit.estimation._estimate import Metric
from memfit.estimation._events import Part, Peak, Phase, Trace
from memfit.estimation._gpus import Gpu
from memfit.estimation._interval import Interval

#: How far each part may lie above its count. Weights, gradients and states are counted tensor by tensor, and torch's
#: allocator rounds each up. Activations depend on the kernels of the library's version; temporaries also on when Python
#: drops them. Buffers of collectives wait for events of their stream, so that there may be twice as many; workspaces of
#: convolutions depend on the algorithm that cuDNN picks.
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
#: Bytes that any step takes beside its tensors: random states, flags, handles.
_AT_LEAST = 64 << 20
#: The share of short-lived bytes that fragments may hold beside those of the replay: a real step meets its batches in
#: another order and at other sizes.
_FRAGMENTS = 0.06


def bound_device(
    peaks: Mapping[Phase, Peak], replay: Replay, gpu: Gpu, trace: Trace, *, world_size: int = 1
) -> tuple[dict[Metric, Interval], dict[Phase, Interval], dict[Part, Interval]]:
    """Return the four figures, the allocated peak of each phase, and the parts of the highest one."""
    workspace = gpu.cublas_workspace_bytes
    room = 2 * (workspace.upper - workspace.value)  # both threads' workspaces on this device, beyond the trace's
    parts: dict[Phase, dict[Part, Interval]] = {}
    by_phase: dict[Phase, Interval] = {}
    for phase, peak in peaks.items():
        parts[phase] = {
            part: Interval(count, int(count * (1 + ABOVE[part])) + room * (part == "workspaces"))
            for part, count in peak.parts.items()
        }
        total = Interval.total(parts[phase].values())
        value = max(total.value, replay.allocated_bytes[phase])
        slack = trace.slack_bytes if phase in ("backward", "step") else 0
        slack += trace.convolution_slack.get(phase, 0)
        by_phase[phase] = Interval(value, max(total.upper, value) + slack + _AT_LEAST)
    top = max(by_phase, key=lambda phase: by_phase[phase].value)
    allocated = Interval.highest(by_phase.values())
    short_lived = sum(
        count for part, count in peaks[top].parts.items() if part not in ("weights", "buffers", "optimizer", "inputs")
    )
    above = allocated.upper - allocated.value
    counted = max(replay.allocated_bytes.values(), default=0)
    upper = max(replay.reserved_bytes, allocated.value) + above + int(short_lived * _FRAGMENTS) + _AT_LEAST
    reserved = Interval(replay.reserved_bytes, upper)
    beside = gpu.outside_bytes(world_size)
    if trace.convolution_slack:
        beside += gpu.cudnn_bytes
    device: dict[Metric, Interval] = {
        "allocated_bytes": allocated,
        "active_bytes": Interval(counted, max(counted + above, allocated.upper)),
        "reserved_bytes": reserved,
        "device_bytes": reserved + beside,
    }
    return device, by_phase, parts[top]
