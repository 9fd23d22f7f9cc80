"""The arithmetic of admission: what a job reserves, what is available at each place, how many jobs fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from memfit.memory._footprint import HOST, Footprint
from memfit.units import MIB, format_bytes

if TYPE_CHECKING:
    from memfit.memory._budget import Budget

#: What a job reserves on top of the measured peak, as a share of it.
DEFAULT_SLACK = 0.10
#: Kept free on each device: what the driver and a second context take on top of what was measured.
DEVICE_RESERVE_BYTES = 256 * MIB
#: At most this share of a limit is kept for the page cache of mapped files: a larger panel is read in pieces anyway.
_CACHE_SHARE = 0.25
#: What a declared or estimated peak must leave of its limit, as a share; less is tight.
_TIGHT = 0.05
_NOTHING: Mapping[str, int] = MappingProxyType({})


def reservation_bytes(footprint: Footprint, slack: float = DEFAULT_SLACK) -> int:
    """Return what a job of this footprint reserves on the host: its private peak, and a slack if that was measured.
    >>> reservation_bytes(Footprint(1000), slack=0.1), reservation_bytes(Footprint.declared(1000))
    (1100, 1000)
    """
    factor = 1.0 + slack if footprint.method == "measured" else 1.0
    return round(footprint.private_bytes * factor)


def why_tight(upper_bytes: int, limit_bytes: int) -> str:
    """Say that a peak nobody has measured fits its limit and leaves less than 5 % of it; empty where that is not so.
    >>> why_tight(98 << 30, 100 << 30), why_tight(95, 100), why_tight(101, 100)
    ('98.00 GiB of 100.00 GiB leave 2.0%, under 5%', '', '')
    """
    left = (limit_bytes - upper_bytes) / max(limit_bytes, 1)
    if not 0 <= left < _TIGHT:
        return ""
    return f"{format_bytes(upper_bytes)} of {format_bytes(limit_bytes)} leave {left:.1%}, under {_TIGHT:.0%}"


@dataclass(frozen=True)
class Lendable:
    """What one more job may take at one place, on the host or on a GPU (``where``). ``unused_bytes`` is what running
    jobs have reserved and do not use yet."""

    headroom_bytes: int
    reserve_bytes: int
    unused_bytes: int
    where: str = ""

    @property
    def bytes(self) -> int:
        """What is available; below 0 when more is reserved than there is."""
        return self.headroom_bytes - self.reserve_bytes - self.unused_bytes

    def explain(self) -> str:
        """Return the sum in words.
        >>> Lendable(8 << 30, 1 << 30, 2 << 30).explain()
        '5.00 GiB available = 8.00 GiB free - 1.00 GiB reserve - 2.00 GiB reserved and not yet used'
        """
        return (
            f"{format_bytes(self.bytes)} available{self.where and ' '}{self.where} = "
            f"{format_bytes(self.headroom_bytes)} free - {format_bytes(self.reserve_bytes)} reserve - "
            f"{format_bytes(self.unused_bytes)} reserved and not yet used"
        )


def bounds_of(
    budget: Budget,
    in_use: Mapping[str, int] = _NOTHING,
    *,
    unused: Mapping[str, int] = _NOTHING,
    others: Mapping[str, int] = _NOTHING,
    reserve_bytes: int | None = None,
) -> list[tuple[str, str, Lendable]]:
    """Return for each limit its place, its id (a device's uuid), and what is available under it. ``in_use``: bytes, by
    place, that the reading counts as taken and that are free (negative: taken since). ``others``: by the limit's id."""
    kept = budget.reserve_bytes if reserve_bytes is None else reserve_bytes
    limits = [one for one in budget.limits if one.binds] or [budget.binding]
    found = [(HOST, one.id, one.headroom_bytes, one.limit_bytes, kept, "") for one in limits]
    found += [
        (one.uuid, one.uuid, one.free_bytes, one.total_bytes, DEVICE_RESERVE_BYTES, f"on GPU {one.index} ({one.uuid})")
        for one in budget.devices
    ]
    bounds = []
    for place, id, free_bytes, limit_bytes, reserve, where in found:
        free = min(free_bytes + in_use.get(place, 0), limit_bytes) - others.get(id, 0)
        bounds.append((place, id, Lendable(free, reserve, unused.get(place, 0), where)))
    return bounds


def rooms_of(budget: Budget, in_use: Mapping[str, int] = _NOTHING, **more: Any) -> dict[str, Lendable]:
    """Return what is available at each place, under the smallest limit there; arguments as in ``bounds_of``."""
    rooms: dict[str, Lendable] = {}
    for place, _, room in bounds_of(budget, in_use, **more):
        if place not in rooms or room.bytes < rooms[place].bytes:
            rooms[place] = room
    return rooms


def keep_cache(budget: Budget, room: Lendable, mapped_bytes: int) -> Lendable:
    """Return the room beside the page cache of the files that jobs map. Page cache is never the cause of a kill, but
    jobs that fill a limit without it read their panel from the disk again and again."""
    cache = min(mapped_bytes, int(_CACHE_SHARE * budget.binding.limit_bytes))
    return replace(room, reserve_bytes=max(room.reserve_bytes, cache))


def count_fitting(
    rooms: Mapping[str, Lendable], needed_bytes: int, num_devices: int = 0, needed_device_bytes: int = 1
) -> int:
    """Return how many jobs of one size fit side by side; each runs on as many different devices as it needs.
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
