"""End a trace that takes too long: every operation checks the time."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from contextvars import ContextVar

from memfit.errors import OutOfTimeError

#: Seconds of CPU that all traces of one answer may take; torch, the model and the formula need some more.
TIME_LIMIT = 50.0
_limit: ContextVar[tuple[float, float]] = ContextVar("limit", default=(math.inf, math.inf))


@contextlib.contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """End all tracing within the block after this many seconds of this process's CPU time."""
    token = _limit.set((time.process_time() + seconds, seconds))
    try:
        yield
    finally:
        _limit.reset(token)


def time_left() -> float:
    """Return the seconds of CPU time that traces may still take: not above 0 if the time is over."""
    return _limit.get()[0] - time.process_time()


def check_time() -> None:
    """Raise `OutOfTimeError` if the time is over."""
    end, seconds = _limit.get()
    if time.process_time() >= end:
        raise OutOfTimeError(
            f"the trace was not done after {seconds:.0f} s of CPU",
            rule="a trace runs every operation of two training steps; a loop over time steps has many.",
            remedy="allow more: --time-limit 1800; shorten the sequences; or measure it: memfit run --plan",
        )
