"""How many workers a loader needs: the first batches are made without any, and timed against their consumer."""

from __future__ import annotations

import math
import time
from statistics import median

from memfit.data._verdict import MOST_WAIT_SHARE

#: What an idle worker takes for itself, beside the batches that it makes ahead.
WORKER_BYTES = 48 << 20
_NUM_FIRST = 4  # these also read cold pages, compile and allocate
_NUM_TIMED = 12


def enough_workers(
    load_seconds: float, consume_seconds: float, *, num_cpus: int, worker_bytes: int = 0, budget_bytes: int = 0
) -> int:
    """The fewest workers with which a consumer need not wait, of those that CPUs and budget allow.

    None are needed if making a batch takes at most 2 % of the time; else as many as make a batch, all together, in the
    time that one is consumed. One CPU is left to the consumer.

    Args:
        load_seconds: To make a batch.
        consume_seconds: To consume one.
        num_cpus: CPUs of this process.
        worker_bytes: Private memory of a worker, its batches ahead included.
        budget_bytes: What all workers may take.

    Example:
        >>> enough_workers(0.001, 0.1, num_cpus=8), enough_workers(0.05, 0.1, num_cpus=8)
        (0, 1)
        >>> enough_workers(0.25, 0.1, num_cpus=8), enough_workers(0.25, 0.1, num_cpus=3)
        (3, 2)
        >>> enough_workers(0.25, 0.1, num_cpus=8, worker_bytes=1 << 30, budget_bytes=(2 << 30) + 1)
        2
    """
    if load_seconds <= MOST_WAIT_SHARE * (load_seconds + consume_seconds):
        return 0
    wanted = math.ceil(load_seconds / consume_seconds) if consume_seconds > 0 else num_cpus
    affordable = budget_bytes // worker_bytes if worker_bytes else wanted
    return int(min(wanted, max(num_cpus - 1, 1), affordable))


class Trial:
    """Times batches: how long one takes to make, and how long its consumer keeps it."""

    def __init__(self) -> None:
        self._loads: list[float] = []
        self._consumptions: list[float] = []
        self._asked = self._given = 0.0

    def asked(self) -> None:
        """A batch is asked for."""
        self._asked = time.perf_counter()
        if self._given:
            self._consumptions.append(self._asked - self._given)

    def given(self) -> None:
        """It is handed over."""
        self._given = time.perf_counter()
        self._loads.append(self._given - self._asked)

    def paused(self) -> None:
        """An iteration ended: the time until the next one is nobody's."""
        self._given = 0.0

    @property
    def is_over(self) -> bool:
        return len(self._consumptions) >= _NUM_FIRST + _NUM_TIMED

    @property
    def seconds(self) -> tuple[float, float]:
        """To make a batch and to consume it: the medians, the first few left out."""
        return median(self._loads[_NUM_FIRST:]), median(self._consumptions[_NUM_FIRST:])
