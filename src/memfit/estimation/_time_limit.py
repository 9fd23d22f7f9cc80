"""End a trace whose time is over: every operation checks it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from contextvars import ContextVar

from memfit.errors import UntraceableError

#: Seconds that the answer to a question may trace.
TIME_LIMIT = 300.0
_limit: ContextVar[tuple[float, float]] = ContextVar("limit", default=(math.inf, math.inf))


@contextlib.contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """End all tracing within once this time is over."""
    token = _limit.set((time.monotonic() + seconds, seconds))
    try:
        yield
    finally:
        _limit.reset(token)


def check_time() -> None:
    """Refuse to trace on when the time is over.

    Raises:
        UntraceableError: It is.
    """
    end, seconds = _limit.get()
    if time.monotonic() >= end:
        raise UntraceableError(
            f"the trace was not done after {seconds:.0f} s",
            rule="a trace runs every operation of two training steps, and a loop over time steps has many.",
            remedy="allow more: --time-limit 1800; or shorten the sequences",
        )
