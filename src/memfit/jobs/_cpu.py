"""Measures how many cores jobs want: those that they keep busy, and those that they wait for."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

#: What jobs want is averaged over so long, and is too much from so many times the cores on. An average speaks when it
#: covers this share of that time.
_AVERAGE_SECONDS, _TOO_MUCH, _LEAST_WEIGHT = 10.0, 1.5, 0.4


class CpuMeter:
    """Measures how many cores a process tree wants, by what each of its threads ran and waited since the last look."""

    def __init__(self) -> None:
        self.wanted = 0.0
        self._threads: dict[int, float] = {}
        self._read_at = 0.0

    def look(self, pids: Iterable[int]) -> None:
        """Measure anew, given the processes that live."""
        before, now = self._threads, time.monotonic()
        seconds, self._read_at, self._threads = now - self._read_at, now, _read_seconds(pids)
        if before and seconds > 0:
            spent = (total - before.get(thread, 0.0) for thread, total in self._threads.items())
            self.wanted = sum(min(max(0.0, one), seconds) for one in spent) / seconds


class CpuDemand:
    """Follows how many cores all running jobs want, on average over some seconds, to say once when it is too much.

    Example:
        >>> demand = CpuDemand()
        >>> [demand.take(8.0, 8, 2, now) for now in (0.0, 3.0, 6.0, 9.0)]
        [None, None, {'wanted_cpus': 8.0, 'num_cpus': 2, 'num_running': 8}, None]
    """

    def __init__(self) -> None:
        self._sum, self._weight, self._taken_at, self._is_told = 0.0, 0.0, math.inf, False

    def take(self, wanted: float, num_running: int, num_cpus: int, now: float) -> dict[str, Any] | None:
        """Take in what so many jobs want now; what to say of it, the first time that it passes the cores by half."""
        share = min(1.0, max(0.0, now - self._taken_at) / _AVERAGE_SECONDS)
        self._sum, self._taken_at = self._sum + share * (wanted - self._sum), now
        self._weight += share * (1 - self._weight)
        if self._is_told or num_running < 2 or self._weight < _LEAST_WEIGHT:
            return None
        mean = self._sum / self._weight
        self._is_told = mean > _TOO_MUCH * num_cpus
        if not self._is_told:
            return None
        return {"wanted_cpus": round(mean, 1), "num_cpus": num_cpus, "num_running": num_running}


def _read_seconds(pids: Iterable[int]) -> dict[int, float]:
    """Return by thread the seconds that it ran, or was ready to run and waited; nothing where the kernel tells none.

    Source: Linux Documentation/scheduler/sched-stats.rst, /proc/<pid>/schedstat.
    """
    found: dict[int, float] = {}
    for pid in pids:
        with suppress(OSError):
            for thread in os.scandir(f"/proc/{pid}/task"):
                with suppress(OSError), open(f"{thread.path}/schedstat") as file:
                    ran, waited, _ = file.read().split()
                    found[int(thread.name)] = (int(ran) + int(waited)) / 1e9
    return found
