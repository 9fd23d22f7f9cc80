"""Training that fits: plan, run, recover and explain the memory of PyTorch jobs.

The public names load their modules when they are first used, so ``import memfit`` is light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.data import Panel
    from memfit.diagnosis import diagnose
    from memfit.estimation import estimate
    from memfit.jobs import Job
    from memfit.memory import Budget, Footprint, measure
    from memfit.pipeline import run
    from memfit.planning import plan
    from memfit.rundir import phase
    from memfit.training import SafeStep, Trainer

_HOMES = {
    "Budget": "memory",
    "Footprint": "memory",
    "Job": "jobs",
    "Panel": "data",
    "SafeStep": "training",
    "Trainer": "training",
    "diagnose": "diagnosis",
    "estimate": "estimation",
    "measure": "memory",
    "phase": "rundir",
    "plan": "planning",
    "run": "pipeline",
}

__all__ = [
    "Budget",
    "Footprint",
    "Job",
    "Panel",
    "SafeStep",
    "Trainer",
    "diagnose",
    "estimate",
    "measure",
    "phase",
    "plan",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"memfit.{_HOMES[name]}"), name)
    from memfit.successors import missing_name

    raise missing_name(__name__, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
