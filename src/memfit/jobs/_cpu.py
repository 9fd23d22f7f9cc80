"""Measures how many cores jobs want: those that they keep busy, and those that they wait for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

#: What jobs want is too much from so many times the cores on, when it lasts so long.
_TOO_MUCH, _LASTING_SECONDS = 1.5, 5.0


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
    """Follows how many cores all running jobs want, to say once when that is too much for some seconds.

    Example:
        >>> demand = CpuDemand()
        >>> told = [demand.take(8.0, 8, 2, now) for now in (0.0, 3.0, 6.0, 9.0)]
        >>> [one and one["text"].partition(",")[0] for one in told]
        [None, None, 'the 8 running jobs want 8.0 cores and there are 2', None]
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._is_told = False

    def take(self, wanted: float, num_running: int, num_cpus: int, now: float) -> dict[str, Any] | None:
        """Take in what so many jobs want now; what to say of it, the first time that it lasts."""
        if self._is_told or num_running < 2 or wanted <= _TOO_MUCH * num_cpus:
            self._since = None
            return None
        self._since = now if self._since is None else self._since
        self._is_told = now - self._since >= _LASTING_SECONDS
        if not self._is_told:
            return None
        fewer = max(1, round(num_running * num_cpus / wanted))
        text = (
            f"the {num_running} running jobs want {wanted:.1f} cores and there are {num_cpus}, so each of them takes "
            f"longer; --max-parallel {fewer} runs fewer at once"
        )
        return {"wanted_cpus": round(wanted, 1), "num_cpus": num_cpus, "num_running": num_running, "text": text}


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
