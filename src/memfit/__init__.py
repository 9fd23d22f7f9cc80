"""Training that fits: plan, run, recover and explain the memory of PyTorch jobs.

The public names load their modules when they are first used, so ``import memfit`` is light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily

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

__getattr__, __dir__ = load_lazily(__name__)
