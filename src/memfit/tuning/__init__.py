"""Search a workload's settings: each trial is a graph of stages, and all trials run under one memory budget.

The names load their modules when they are first used.
"""

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily

if TYPE_CHECKING:
    from memfit.tuning._record import ENDED_TRIALS, Trial, TrialState, read_trial, read_trials
    from memfit.tuning._settings import Searched, TuneSettings, of_command, read_param
    from memfit.tuning._tune import Study, TuneResult, resume_study, tune

__all__ = [
    "ENDED_TRIALS",
    "Searched",
    "Study",
    "Trial",
    "TrialState",
    "TuneResult",
    "TuneSettings",
    "of_command",
    "read_param",
    "read_trial",
    "read_trials",
    "resume_study",
    "tune",
]

__getattr__, __dir__ = load_lazily(__name__)
