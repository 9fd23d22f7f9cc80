"""End a trace that takes too long: every operation checks the time."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from contextvars import ContextVar

from memfit.errors import UntraceableError

#: Seconds that one answer may trace.
TIME_LIMIT = 300.0
_limit: ContextVar[tuple[float, float]] = ContextVar("limit", default=(math.inf, math.inf))


@contextlib.contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """End all tracing within the block after this time."""
    token = _limit.set((time.monotonic() + seconds, seconds))
    try:
        yield
    finally:
        _limit.reset(token)


def check_time() -> None:
    """Raise `UntraceableError` if the time is over."""
    end, seconds = _limit.get()
    if time.monotonic() >= end:
        raise UntraceableError(
            f"the trace was not done after {seconds:.0f} s",
            rule="a trace runs every operation of two training steps; a loop over time steps has many.",
            remedy="allow more: --time-limit 1800; or shorten the sequences",
        )
