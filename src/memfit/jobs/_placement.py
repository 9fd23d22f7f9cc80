"""Which GPU a job gets: the one with the most room that its device footprint fits into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memfit.memory import Claim, Device
from memfit.units import MIB, format_bytes

#: Never lent on a device: what the driver and a second context take on top of what was measured.
DEVICE_RESERVE_BYTES = 256 * MIB


def lendable_bytes(device: Device, claims: Sequence[Claim]) -> int:
    """What may be lent on a device: what is free now, whoever took the rest, less what running jobs may still take."""
    return device.free_bytes - DEVICE_RESERVE_BYTES - sum(claim.unused_bytes for claim in claims)


def place(
    devices: Sequence[Device], claims: Mapping[str, Sequence[Claim]], needed_bytes: int
) -> tuple[Device | None, str]:
    """The device for a job and why, or None and why not.

    Args:
        devices: The devices as they are now; what foreign processes use is not free on them.
        claims: The running jobs' reservations and use by device UUID.
        needed_bytes: What the job will take.
    """
    rooms = [(lendable_bytes(device, claims.get(device.uuid, ())), device) for device in devices]
    if not rooms:
        return None, f"it needs {format_bytes(needed_bytes)} on a GPU and there is none here"
    room, device = max(rooms, key=lambda found: found[0])
    text = f"{format_bytes(room)} may be lent on GPU {device.index} ({device.uuid})"
    return (device, text) if needed_bytes <= room else (None, f"it needs {format_bytes(needed_bytes)} on a GPU; {text}")
