"""Check the figures of a message about memory against each other, before anything is claimed of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from memfit.diagnosis._find import to_bytes
from memfit.units import format_bytes

#: The share of a device from which a size counts, and below which two sizes are equal but for rounding.
NOTICEABLE, _ROUNDING = 0.05, 0.01
#: No machine addresses more than 56 bits.
_IMPOSSIBLE = 1 << 56
_PROCESS = re.compile(r"Process(\d+)has([\d.]+)([KMGT]iB|bytes)memoryinuse")


@dataclass(frozen=True)
class Figures:
    """The figures of a message in bytes; None for those that it does not have."""

    total: int | None = None
    free: int | None = None
    allowed: int | None = None  # what this process may use
    allocated: int | None = None  # in tensors of this process
    reserved: int | None = None  # by its allocator
    own: int | None = None  # all that this process holds, as the driver counts
    tried: int | None = None
    processes: Mapping[int, int] = field(default_factory=dict)  # what each named process holds, as the driver counts

    @classmethod
    def read(cls, sizes: Mapping[str, int], text: str) -> Figures:
        named = {int(pid): to_bytes(size, unit) for pid, size, unit in _PROCESS.findall("".join(text.split()))}
        known = {name: sizes.get(name) for name in ("free", "allowed", "allocated", "reserved", "own")}
        return cls(sizes.get("device_total"), **known, tried=sizes.get("tried", sizes.get("over")), processes=named)

    @property
    def used(self) -> int | None:
        used = None if self.total is None or self.free is None else self.total - self.free
        return used if used is None or used >= 0 else None

    @property
    def slack(self) -> int | None:
        """What the allocator holds and no tensor uses."""
        return None if self.reserved is None or self.allocated is None else max(self.reserved - self.allocated, 0)

    @property
    def room(self) -> int | None:
        """What there was for the request."""
        allowed = None if self.allowed is None else max(self.allowed - (self.reserved or 0), 0)
        rooms = (None if self.used is None else self.free, allowed)
        return min((room for room in rooms if room is not None), default=None)

    @property
    def contradictions(self) -> dict[str, str]:
        """What in the figures speaks against a shortage, or against another figure: a name, and a sentence."""
        found, tried, total, room = {}, self.tried or 0, self.total or 0, self.room or 0
        if tried >= _IMPOSSIBLE:
            found["size"] = f"No machine has {tried >> 50} PiB: the size of the request is wrong."
        elif tried and room - tried >= NOTICEABLE * (self.allowed or total):
            sizes = f"{format_bytes(room)} of {format_bytes(total)} were free for {format_bytes(tried)}"
            found["room"] = f"{sizes}: these figures show no shortage."
        for name, size in (("free", self.free), ("held by this process", self.reserved)):
            if total and size is not None and size > total * (1 + _ROUNDING):
                sizes = f"{format_bytes(size)} {name}, but the device has {format_bytes(total)}"
                found[name] = f"{sizes}: host memory stands in (Windows), or a figure is wrong."
        return found

    @property
    def own_pids(self) -> tuple[int, ...]:
        """The named processes of which one is this process, as in a container, where it does not know its number."""
        rest = (self.used or 0) + _ROUNDING * (self.total or 0) - sum(self.processes.values())
        if self.own is not None or self.used is None or self.reserved is None or self.reserved <= rest:
            return ()  # the driver lists this process apart, or the figures leave room for it beside those named
        return tuple(pid for pid, size in self.processes.items() if size * (1 + _ROUNDING) >= self.reserved)

    @property
    def held(self) -> int | None:
        """What this process holds, by the widest of its figures."""
        return self.own or max((self.processes[pid] for pid in self.own_pids), default=self.reserved)

    @property
    def foreign(self) -> int | None:
        """What neither this process holds nor is free: other processes and the driver; None if unknown."""
        return None if self.used is None or self.held is None else max(self.used - self.held, 0)
