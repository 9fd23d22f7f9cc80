"""Training that fits: plan, run, recover and explain the memory of PyTorch jobs.

The public names load their modules when they are first used, so ``import memfit`` is light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily

if TYPE_CHECKING:
    from memfit.data import Panel as Panel
    from memfit.diagnosis import diagnose as diagnose
    from memfit.estimation import estimate as estimate
    from memfit.jobs import Job as Job
    from memfit.memory import Budget as Budget
    from memfit.memory import Footprint as Footprint
    from memfit.memory import measure as measure
    from memfit.pipeline import run as run
    from memfit.planning import plan as plan
    from memfit.rundir import phase as phase
    from memfit.training import SafeStep as SafeStep
    from memfit.training import Trainer as Trainer

__getattr__, __dir__ = load_lazily(__name__)
