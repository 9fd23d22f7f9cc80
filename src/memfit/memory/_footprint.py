"""What a job takes: by part, by phase and by place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from memfit.errors import DamagedError, UsageError
from memfit.units import parse_memory

Method = Literal["declared", "computed", "measured"]
#: The place that every job takes memory of; the other places are devices, by their UUID.
HOST = "host"
#: Bytes by place. Those of two places are never added together.
Sizes = Counter[str]


@dataclass(frozen=True)
class PhasePeak:
    """The peaks of one phase, in bytes. ``private_bytes`` is the non-reclaimable memory of the process tree, high-water
    marks between two samples included. ``pss_bytes`` is 0 when no sweep fell into the phase."""

    private_bytes: int
    shared_bytes: int = 0
    pss_bytes: int = 0
    device_bytes: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def merge(self, other: PhasePeak) -> PhasePeak:
        return PhasePeak(
            private_bytes=max(self.private_bytes, other.private_bytes),
            shared_bytes=max(self.shared_bytes, other.shared_bytes),
            pss_bytes=max(self.pss_bytes, other.pss_bytes),
            device_bytes=_larger(self.device_bytes, other.device_bytes),
            seconds=max(self.seconds, other.seconds),
        )


@dataclass(frozen=True)
class Footprint:
    """A job's memory: private and shared host bytes apart, device bytes by device, peaks by phase.

    Attributes:
        private_bytes: The peak of *non-reclaimable* memory (anonymous + shared memory + kernel) of the process tree.
        shared_bytes: The peak of mapped file pages, each once.
        device_bytes: Peaks of device memory by device UUID; never added to host memory.
        parts: The private peak by name: ``anonymous`` (swapped and high-water marks included), ``shared_memory``,
            ``page_tables``, ``other``; beside them ``file``, the shared bytes then.
        phases: The peaks by phase, in order of appearance.
        method: Where the figures come from.

    Example:
        >>> Footprint.declared("2GiB").private_bytes
        2147483648
    """

    private_bytes: int
    shared_bytes: int = 0
    device_bytes: Mapping[str, int] = field(default_factory=dict)
    parts: Mapping[str, int] = field(default_factory=dict)
    phases: Mapping[str, PhasePeak] = field(default_factory=dict)
    method: Method = "measured"

    def __post_init__(self) -> None:
        if self.private_bytes < 0 or self.shared_bytes < 0:
            raise UsageError(
                f"a footprint of {self.private_bytes} private and {self.shared_bytes} shared bytes is not possible.",
                rule="bytes are counted from 0.",
                remedy="declare a size such as 8GiB",
            )

    @classmethod
    def declared(cls, host: str | int) -> Footprint:
        """Return a footprint as a user declares it: a hint until the job has been measured."""
        return cls(private_bytes=parse_memory(host) if isinstance(host, str) else host, method="declared")

    @property
    def sizes(self) -> Sizes:
        """What admission counts of it, by place."""
        return Counter({HOST: self.private_bytes, **self.device_bytes})

    @property
    def bytes_per_device(self) -> int:
        """The largest peak on one device; 0 when it uses none."""
        return max(self.device_bytes.values(), default=0)

    def exceeds(self, other: Footprint, factor: float = 1.0) -> bool:
        """Return True if it takes more than ``factor`` times another one, on the host or on a device.

        >>> Footprint(100, device_bytes={"a": 9}).exceeds(Footprint(100, device_bytes={"b": 8}))
        True
        """
        on_device = 0 < factor * other.bytes_per_device < self.bytes_per_device
        return on_device or self.private_bytes > factor * other.private_bytes

    @property
    def peak_phase(self) -> str | None:
        """The phase with the highest private peak, or None when no phase was marked."""
        return max(self.phases, key=lambda name: self.phases[name].private_bytes) if self.phases else None

    def merge(self, other: Footprint) -> Footprint:
        """Return the larger of two footprints, part by part and phase by phase; a measured one replaces a declared one.

        >>> Footprint(100, shared_bytes=7).merge(Footprint(90, shared_bytes=8)).shared_bytes
        8
        >>> Footprint.declared("1GiB").merge(Footprint(100)).private_bytes
        100
        """
        if self.method != other.method:
            return self if self.method == "measured" else other
        names = [*self.phases, *(name for name in other.phases if name not in self.phases)]
        zero = PhasePeak(0)
        return Footprint(
            private_bytes=max(self.private_bytes, other.private_bytes),
            shared_bytes=max(self.shared_bytes, other.shared_bytes),
            device_bytes=_larger(self.device_bytes, other.device_bytes),
            parts=_larger(self.parts, other.parts),
            phases={n: self.phases.get(n, zero).merge(other.phases.get(n, zero)) for n in names},
            method=self.method,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form; ``from_dict`` reads it back."""
        # Not asdict, which copies all that lies deeper one by one.
        phases = {name: {**vars(peak), "device_bytes": dict(peak.device_bytes)} for name, peak in self.phases.items()}
        return {
            **vars(self),
            "device_bytes": dict(self.device_bytes),
            "parts": dict(self.parts),
            "phases": phases,
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Footprint:
        """Return the footprint that ``to_dict`` gave.

        Raises:
            DamagedError: If it is another version's, or damaged.

        >>> Footprint.from_dict(Footprint(100, phases={"train": PhasePeak(100)}).to_dict()).peak_phase
        'train'
        """
        try:
            phases = {name: PhasePeak(**peak) for name, peak in value.get("phases", {}).items()}
            return cls(**{**value, "phases": phases})
        except (TypeError, AttributeError) as error:
            raise DamagedError(
                f"{str(dict(value))[:80]} is no footprint: {error}.",
                rule="a footprint is read with the fields that this version of memfit writes.",
                remedy="start over with --new, or read it with the version that wrote it",
            ) from error


def _larger(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {name: max(a.get(name, 0), b.get(name, 0)) for name in [*a, *(key for key in b if key not in a)]}
