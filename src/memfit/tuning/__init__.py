"""Search a workload's settings: each trial is a graph of stages, and all trials run under one memory budget.

The names load their modules when they are first used.
"""

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily

if TYPE_CHECKING:
    from memfit.tuning._feasible import why_infeasible as why_infeasible
    from memfit.tuning._optuna import distributions as distributions
    from memfit.tuning._optuna import draw as draw
    from memfit.tuning._optuna import is_to_prune as is_to_prune
    from memfit.tuning._optuna import make_study as make_study
    from memfit.tuning._record import Trial as Trial
    from memfit.tuning._record import read_trial as read_trial
    from memfit.tuning._record import read_trials as read_trials
    from memfit.tuning._record import write_trial as write_trial
    from memfit.tuning._settings import Searched as Searched
    from memfit.tuning._settings import TuneSettings as TuneSettings
    from memfit.tuning._settings import of_command as of_command
    from memfit.tuning._settings import read_param as read_param
    from memfit.tuning._tune import Study as Study
    from memfit.tuning._tune import TuneResult as TuneResult
    from memfit.tuning._tune import resume_study as resume_study
    from memfit.tuning._tune import tune as tune

__all__ = ["Study", "Trial", "TuneResult", "TuneSettings", "draw", "tune"]

__getattr__, __dir__ = load_lazily(__name__)
