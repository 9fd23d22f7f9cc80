"""The result of an estimate: four figures of device memory, each with a value and a bound, by part and by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from memfit.estimation._events import Part, Phase
from memfit.estimation._gpus import Gpu
from memfit.estimation._interval import Interval
from memfit.memory import why_tight

#: A figure of device memory. ``allocated``: in tensors; ``active``: also freed blocks that a stream may still use;
#: ``reserved``: held by torch's allocator; ``device``: all that the process takes, as nvidia-smi shows it.
Metric = Literal["allocated_bytes", "active_bytes", "reserved_bytes", "device_bytes"]
METRICS: tuple[Metric, ...] = get_args(Metric)
Method = Literal["traced", "formula"]
Verdict = Literal["fits", "tight", "may fit", "does not fit"]


def judge(need: Interval, total_bytes: int) -> Verdict:
    if need.upper <= total_bytes:
        return "tight" if why_tight(need.upper, total_bytes) else "fits"
    return "may fit" if need.value <= total_bytes else "does not fit"


@dataclass(frozen=True)
class Estimate:
    """What a training step takes of one device, in bytes.

    Attributes:
        device: The peak in each metric.
        parts: What the tensors are for at the allocated peak.
        by_phase: The allocated peak of each phase, in order.
        method: ``traced`` where the step ran on fake tensors, ``formula`` where it was computed from the config.
        gpu: The device; None for any.
        verdict: Whether it fits there. ``fits`` leaves 5 % of the device free, ``tight`` less. It is also tight if the
            bound is above the device and torch's allocator can give back enough of its cache.
        notes: What was replaced, assumed or left out.
        versions: The libraries whose memory is modelled, with their versions.
    """

    device: Mapping[Metric, Interval]
    parts: Mapping[Part, Interval]
    by_phase: Mapping[Phase, Interval]
    method: Method
    gpu: Gpu | None = None
    verdict: Verdict | None = None
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def peak_phase(self) -> Phase:
        """Return the phase of the allocated peak."""
        return max(self.by_phase, key=lambda phase: self.by_phase[phase].value)

    @property
    def fits(self) -> bool:
        """Return True if it fits its device, and is not tight."""
        return self.verdict == "fits"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form; sizes in bytes."""
        return {
            "device": {name: vars(interval) for name, interval in self.device.items()},
            "parts": {name: vars(interval) for name, interval in self.parts.items()},
            "by_phase": {name: vars(interval) for name, interval in self.by_phase.items()},
            "peak_phase": self.peak_phase,
            "method": self.method,
            "gpu": None if self.gpu is None else {"name": self.gpu.name, "total_bytes": self.gpu.total_bytes},
            "verdict": self.verdict,
            "versions": dict(self.versions),
            "notes": list(self.notes),
        }
