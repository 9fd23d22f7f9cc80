"""The arithmetic of admission: what a job reserves, what may still be lent, how many fit. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from memfit.memory._footprint import HOST, Footprint, Sizes
from memfit.units import MIB, format_bytes

if TYPE_CHECKING:
    from memfit.memory._budget import Budget
    from memfit.memory._devices import Device

#: What a job reserves on top of its like's measured peak, as a share of it.
DEFAULT_SLACK = 0.10
#: Never lent on a device: what the driver and a second context take on top of what was measured.
DEVICE_RESERVE_BYTES = 256 * MIB


def reservation_bytes(footprint: Footprint, slack: float = DEFAULT_SLACK) -> int:
    """Return what a job of this footprint reserves on the host: its private peak, and a slack if that was measured.

    >>> reservation_bytes(Footprint(1000), slack=0.1), reservation_bytes(Footprint.declared(1000))
    (1100, 1000)
    """
    factor = 1.0 if footprint.method == "declared" else 1.0 + slack
    return round(footprint.private_bytes * factor)


@dataclass(frozen=True)
class Claim:
    """A running job's part of the budget, in bytes by place: what it reserved and what it uses now.

    >>> Claim(Counter({HOST: 100, "GPU-1": 50}), Counter({HOST: 30, "GPU-1": 60})).unused
    Counter({'host': 70})
    """

    reserved: Sizes
    used: Sizes

    @property
    def unused(self) -> Sizes:
        """What it may still take; nothing at a place where it has taken more than it reserved."""
        return Counter(self.reserved) - self.used


@dataclass(frozen=True)
class Lendable:
    """What may be lent at one place to one more job now, as a sum that can be shown.

    Attributes:
        headroom_bytes: What is free there, as measured now.
        reserve_bytes: What is never lent.
        unused_bytes: What running jobs reserved and do not use yet.
        where: The place in words, such as ``on GPU 0``; empty for the host.
    """

    headroom_bytes: int
    reserve_bytes: int
    unused_bytes: int
    where: str = ""

    @classmethod
    def now(cls, headroom_bytes: int, reserve_bytes: int, claims: Iterable[Claim]) -> Lendable:
        """Return the sum for the host, given its headroom and reserve in bytes and the claims of the running jobs."""
        return cls(headroom_bytes, reserve_bytes, sum(claim.unused[HOST] for claim in claims))

    @property
    def bytes(self) -> int:
        """What may be lent; below 0 when more is promised than there is."""
        return self.headroom_bytes - self.reserve_bytes - self.unused_bytes

    def explain(self) -> str:
        """The sum in words.

        >>> Lendable(8 << 30, 1 << 30, 2 << 30).explain()
        '5.00 GiB may be lent = 8.00 GiB free - 1.00 GiB reserve - 2.00 GiB reserved and not yet used'
        """
        return (
            f"{format_bytes(self.bytes)} may be lent{self.where and ' '}{self.where} = "
            f"{format_bytes(self.headroom_bytes)} free - {format_bytes(self.reserve_bytes)} reserve - "
            f"{format_bytes(self.unused_bytes)} reserved and not yet used"
        )


def lendable_on_devices(devices: Iterable[Device], *, taken: Sizes, unused: Sizes) -> dict[str, Lendable]:
    """Return what may be lent on each device.

    Args:
        devices: As they were read.
        taken: What jobs took of each since then; below 0 what they gave back.
        unused: What running jobs reserved of each and do not use yet.
    """
    return {
        one.uuid: Lendable(
            one.free_bytes - taken[one.uuid],
            DEVICE_RESERVE_BYTES,
            unused[one.uuid],
            f"on GPU {one.index} ({one.uuid})",
        )
        for one in devices
    }


def rooms_of(budget: Budget, in_use: Mapping[str, int] = MappingProxyType({})) -> dict[str, Lendable]:
    """Return what may be lent at each place once the jobs have ended that use so much there."""
    used = Counter(in_use)
    host = Lendable(min(budget.headroom_bytes + used[HOST], budget.limit_bytes), budget.reserve_bytes, 0)
    # What a job told last may be free already.
    given_back = Counter({one.uuid: max(-used[one.uuid], one.free_bytes - one.total_bytes) for one in budget.devices})
    return {HOST: host, **lendable_on_devices(budget.devices, taken=given_back, unused=Counter())}


def count_fitting(
    rooms: Mapping[str, Lendable], needed_bytes: int, num_devices: int = 0, needed_device_bytes: int = 1
) -> int:
    """Return how many jobs of one size fit side by side; each runs on as many different devices as it needs.

    Args:
        rooms: What may be lent at each place.
        needed_bytes: What a job reserves on the host, at least 1.
        num_devices: How many devices it needs.
        needed_device_bytes: What it reserves on each of them, at least 1.

    >>> rooms = {HOST: Lendable(100, 0, 0), "GPU-a": Lendable(90, 0, 0), "GPU-b": Lendable(20, 0, 0)}
    >>> count_fitting(rooms, 30), count_fitting(rooms, 10, 1, 30), count_fitting(rooms, 10, 2, 10)
    (3, 3, 2)
    """
    most = max(0, rooms[HOST].bytes) // needed_bytes
    if not num_devices:
        return most
    parts = [max(0, room.bytes) // needed_device_bytes for place, room in rooms.items() if place != HOST]
    # No job has two parts of one device, so a device serves at most as many parts as there are jobs.
    while most and (fewer := sum(min(most, each) for each in parts) // num_devices) < most:
        most = fewer
    return most
