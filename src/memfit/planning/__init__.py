"""Decisions from budgets, footprints and estimates, before anything runs."""

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily
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


# A run plans without these, and they take a while to load.
__getattr__, __dir__ = load_lazily(__name__)
