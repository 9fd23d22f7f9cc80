"""The answer: four figures of device memory, each as a value and a bound, by part and by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from memfit.estimation._events import Part, Phase
from memfit.estimation._gpus import Gpu
from memfit.estimation._interval import Interval

#: What the device's peak is measured in. ``allocated``: in tensors; ``active``: with blocks that wait for another
#: stream; ``reserved``: held by torch's allocator; ``device``: all that the process takes, as nvidia-smi shows it.
Metric = Literal["allocated_bytes", "active_bytes", "reserved_bytes", "device_bytes"]
METRICS: tuple[Metric, ...] = ("allocated_bytes", "active_bytes", "reserved_bytes", "device_bytes")
Method = Literal["traced", "formula"]
Verdict = Literal["fits", "may fit", "does not fit"]


@dataclass(frozen=True)
class Estimate:
    """What a training step will take of one device.

    Attributes:
        device: The peak in each metric.
        parts: What the tensors are for at the moment of the allocated peak.
        by_phase: The allocated peak of each phase, in order.
        method: ``traced`` where the step was run on fake tensors, ``formula`` where it was computed from the config.
        gpu: The device that it is for; None for any.
        verdict: Whether it fits there: ``fits`` when the bound does. What torch's allocator has cached it gives back
            before it runs out of memory, so reserved bytes beyond the device's do not speak against it.
        notes: What was replaced, assumed or left out, in words.
    """

    device: Mapping[Metric, Interval]
    parts: Mapping[Part, Interval]
    by_phase: Mapping[Phase, Interval]
    method: Method
    gpu: Gpu | None = None
    verdict: Verdict | None = None
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def peak_phase(self) -> Phase:
        """The phase of the allocated peak."""
        return max(self.by_phase, key=lambda phase: self.by_phase[phase].value)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form; sizes in bytes."""
        return {
            "device": {name: vars(interval) for name, interval in self.device.items()},
            "parts": {name: vars(interval) for name, interval in self.parts.items()},
            "by_phase": {name: vars(interval) for name, interval in self.by_phase.items()},
            "peak_phase": self.peak_phase,
            "method": self.method,
            "gpu": None if self.gpu is None else {"name": self.gpu.name, "total_bytes": self.gpu.total_bytes},
            "verdict": self.verdict,
            "notes": list(self.notes),
        }
