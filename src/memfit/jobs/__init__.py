"""Jobs, the backends that run them, and the scheduler that admits them under a budget."""

from memfit.jobs._child import call_in_child, load_target, raise_error_of
from memfit.jobs._job import ENDED, STATES, Backend, Job, JobStatus, State
from memfit.jobs._local import LocalBackend, read_status
from memfit.jobs._scheduler import OnFailure, Policy, ReadBudget, Scheduler, StopRequest

__all__ = [
    "ENDED",
    "STATES",
    "Backend",
    "Job",
    "JobStatus",
    "LocalBackend",
    "OnFailure",
    "Policy",
    "ReadBudget",
    "Scheduler",
    "State",
    "StopRequest",
    "call_in_child",
    "load_target",
    "raise_error_of",
    "read_status",
]
