"""The memory of an epoch as its event tells it, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.files import fits
from memfit.units import format_bytes

_PEAKS = {"allocated_peak_bytes": int, "reserved_peak_bytes": int}
_SHAPE = {
    "metric": str,
    "phases": {str: {"host_bytes": int, "devices": {str: _PEAKS}}},
}


def memory_of(event: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the memory that an epoch's event holds; None where a script recorded none, or something else."""
    found = None if event is None else event.get("memory")
    return found if found is not None and fits(found, _SHAPE) else None


def explain_memory(memory: Mapping[str, Any]) -> str:
    """Return an epoch's memory in a line.

    >>> phases = {"train": {"host_bytes": 300 << 20, "devices": {}}}
    >>> explain_memory({"metric": "rss", "phases": phases})
    'host rss: train 300.0 MiB'
    """
    said = []
    phases = memory["phases"]
    if phases:
        sizes = ", ".join(f"{name} {format_bytes(one['host_bytes'])}" for name, one in phases.items())
        said.append(f"host {memory['metric'].replace('_', '-')}: {sizes}")
    for device in dict.fromkeys(device for one in phases.values() for device in one["devices"]):
        peaks = [f"{name} {_peak(one, device)}" for name, one in phases.items() if device in one["devices"]]
        said.append(f"{device} peak: {', '.join(peaks)}")
    return "; ".join(said)


def _peak(phase: Mapping[str, Any], device: str) -> str:
    sizes = phase["devices"][device]
    allocated, reserved = (format_bytes(sizes[name]) for name in _PEAKS)
    return f"{allocated} of {reserved} reserved"
