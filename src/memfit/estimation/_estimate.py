"""The answer: four figures of device memory, each as a value and a bound, by part and by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from memfit.estimation._events import Part, Phase
from memfit.estimation._gpus import Gpu
from memfit.estimation._interval import Interval

#: What the device's peak is measured in. ``allocated``: in tensors; ``active``: with blocks that wait for another
#: stream; ``reserved``: held by torch's allocator; ``device``: all that the process takes, as nvidia-smi shows it.
Metric = Literal["allocated_bytes", "active_bytes", "reserved_bytes", "device_bytes"]
METRICS: tuple[Metric, ...] = ("allocated_bytes", "active_bytes", "reserved_bytes", "device_bytes")
Method = Literal["traced", "formula"]
Verdict = Literal["fits", "fits with a thin margin", "may fit", "does not fit"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
#: The share of a device's memory below which a margin is thin.
THIN = 0.03


def judge(need: Interval, total_bytes: int) -> Verdict:
    """Whether bytes fit a device.

    >>> [judge(Interval(50, upper), 100) for upper in (97, 98, 101)], judge(Interval(101), 100)
    (['fits', 'fits with a thin margin', 'may fit'], 'does not fit')
    """
    if need.upper <= total_bytes:
        return "fits" if total_bytes - need.upper >= THIN * total_bytes else "fits with a thin margin"
    return "may fit" if need.value <= total_bytes else "does not fit"


@dataclass(frozen=True)
class Estimate:
    """What a training step will take of one device.

    Attributes:
        device: The peak in each metric.
        parts: What the tensors are for at the moment of the allocated peak.
        by_phase: The allocated peak of each phase, in order.
        method: ``traced`` where the step was run on fake tensors, ``formula`` where it was computed from the config.
        gpu: The device that it is for; None for any.
        verdict: Whether it fits there: ``fits`` when the bound leaves `THIN` of the device free. The margin is thin too
            where the bound is above the device and torch's allocator can give back enough of what it has cached.
        versions: The libraries whose memory is modelled, with their versions.
        notes: What was replaced, assumed or left out, in words.
    """

    device: Mapping[Metric, Interval]
    parts: Mapping[Part, Interval]
    by_phase: Mapping[Phase, Interval]
    method: Method
    gpu: Gpu | None = None
    verdict: Verdict | None = None
    notes: tuple[str, ...] = field(default_factory=tuple)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def peak_phase(self) -> Phase:
        """The phase of the allocated peak."""
        return max(self.by_phase, key=lambda phase: self.by_phase[phase].value)

    @property
    def fits(self) -> bool:
        """Whether it fits its device, be it with a thin margin."""
        return self.verdict in ("fits", "fits with a thin margin")

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
            "versions": dict(self.versions),
            "notes": list(self.notes),
        }
