"""Decisions from budgets, footprints and estimates, before anything runs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memfit.planning._plan import Plan, decide, plan

if TYPE_CHECKING:
    from memfit.planning._estimate import Question, ask, find_this_gpu
    from memfit.planning._launch import Launch, LaunchConfig, LaunchFormat, Measured

__all__ = [
    "Launch",
    "LaunchConfig",
    "LaunchFormat",
    "Measured",
    "Plan",
    "Question",
    "ask",
    "decide",
    "find_this_gpu",
    "plan",
]

_LATER = {
    "Question": "_estimate",
    "ask": "_estimate",
    "find_this_gpu": "_estimate",
    "Launch": "_launch",
    "LaunchConfig": "_launch",
    "LaunchFormat": "_launch",
    "Measured": "_launch",
}


def __getattr__(name: str) -> Any:
    # A run plans without these, and they take a while to load.
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
