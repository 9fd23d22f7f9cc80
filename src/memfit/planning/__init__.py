"""Decisions from budgets, footprints and estimates, before anything runs."""

from typing import TYPE_CHECKING, Any

from memfit.planning._plan import Plan, decide, plan

if TYPE_CHECKING:
    from memfit.planning._estimate import Question, ask

__all__ = ["Plan", "Question", "ask", "decide", "plan"]


def __getattr__(name: str) -> Any:
    # A run plans without an estimate, and estimation takes a while to load.
    if name in ("Question", "ask"):
        from memfit.planning import _estimate

        return getattr(_estimate, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
