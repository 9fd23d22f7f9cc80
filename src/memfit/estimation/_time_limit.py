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


def out_of_time(what: str) -> OutOfTimeError:
    return OutOfTimeError(
        what,
        rule="a trace runs every operation of two training steps; a loop over time steps has many. "
        "One that takes too long is made at smaller sizes of the batch or the length, and extrapolated.",
        remedy="allow more: --time-limit 1800; or shorten the sequences",
    )


@contextlib.contextmanager
def limit_time(seconds: float, allowed: float | None = None) -> Iterator[None]:
    """End all tracing within the block after this many seconds of this process's CPU time; ``allowed`` are those that
    an error names."""
    token = _limit.set((time.process_time() + seconds, seconds if allowed is None else allowed))
    try:
        yield
    finally:
        _limit.reset(token)


def share_time(share: float) -> contextlib.AbstractContextManager[None]:
    return limit_time(max(0.0, time_left()) * share, limit_seconds())


def time_left() -> float:
    """Return the seconds of CPU time that traces may still take: not above 0 if the time is over."""
    return _limit.get()[0] - time.process_time()


def limit_seconds() -> float:
    return _limit.get()[1]


def check_time(until: float = math.inf) -> None:
    """Raise `OutOfTimeError` if the time is over, or the process's CPU time is past ``until``."""
    end, seconds = _limit.get()
    if time.process_time() >= min(end, until):
        raise out_of_time(f"the trace was not done after {seconds:.0f} s of CPU")
