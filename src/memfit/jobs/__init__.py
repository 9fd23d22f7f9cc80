"""Jobs, the backends that run them, and the scheduler that admits them under a budget.

The names load their modules when they are first used: the processes beside each job need few of them.
"""

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily

if TYPE_CHECKING:
    from memfit.jobs._admission import LocalAdmission
    from memfit.jobs._budget_watch import ReadBudget
    from memfit.jobs._child import call_in_child, load_target, raise_error_of
    from memfit.jobs._folder import read_status
    from memfit.jobs._forecast import Forecast
    from memfit.jobs._job import (
        ENDED,
        STATES,
        Backend,
        EndedBy,
        Enforcer,
        Job,
        JobSource,
        JobStatus,
        OnFailure,
        Policy,
        State,
        StopRequest,
        Submission,
        Traits,
        Verdict,
        name_jobs,
        show_state,
    )
    from memfit.jobs._local import LocalBackend, child_env
    from memfit.jobs._scheduler import Scheduler
    from memfit.jobs._slurm import SHIM_BYTES, SlurmBackend, SlurmOptions, SlurmPlace, render_script
    from memfit.jobs._stop import ASK_SIGNAL, NOW_SIGNAL, find_supervisor, forget_stops, running_jobs, stop, take_stop
    from memfit.jobs._threads import limit_threads

__all__ = [
    "ASK_SIGNAL",
    "ENDED",
    "SHIM_BYTES",
    "NOW_SIGNAL",
    "STATES",
    "Backend",
    "EndedBy",
    "Enforcer",
    "Forecast",
    "Job",
    "JobSource",
    "JobStatus",
    "LocalAdmission",
    "LocalBackend",
    "OnFailure",
    "Policy",
    "ReadBudget",
    "Scheduler",
    "SlurmBackend",
    "SlurmOptions",
    "SlurmPlace",
    "State",
    "StopRequest",
    "Submission",
    "Traits",
    "Verdict",
    "call_in_child",
    "child_env",
    "find_supervisor",
    "forget_stops",
    "limit_threads",
    "name_jobs",
    "load_target",
    "raise_error_of",
    "read_status",
    "render_script",
    "running_jobs",
    "show_state",
    "stop",
    "take_stop",
]

__getattr__, __dir__ = load_lazily(__name__)
