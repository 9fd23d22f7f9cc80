"""Jobs, the backends that run them, and the scheduler that admits them under a budget.

The names load their modules when they are first used: the processes beside each job need few of them.
"""

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily

if TYPE_CHECKING:
    from memfit.jobs._admission import LocalAdmission as LocalAdmission
    from memfit.jobs._budget_watch import HeldByOthers as HeldByOthers
    from memfit.jobs._child import call_in_child as call_in_child
    from memfit.jobs._child import load_target as load_target
    from memfit.jobs._child import raise_error_of as raise_error_of
    from memfit.jobs._death import Counters as Counters
    from memfit.jobs._death import Death as Death
    from memfit.jobs._death import explain_death as explain_death
    from memfit.jobs._death import memory_place as memory_place
    from memfit.jobs._folder import ALLOCATOR_VARIABLES as ALLOCATOR_VARIABLES
    from memfit.jobs._folder import child_env as child_env
    from memfit.jobs._folder import device_env as device_env
    from memfit.jobs._folder import start_env as start_env
    from memfit.jobs._forecast import Forecast as Forecast
    from memfit.jobs._fork import leave as leave
    from memfit.jobs._fork import own_threads as own_threads
    from memfit.jobs._fork import thread_env as thread_env
    from memfit.jobs._growing import Growing as Growing
    from memfit.jobs._job import Backend as Backend
    from memfit.jobs._job import Enforcer as Enforcer
    from memfit.jobs._job import Job as Job
    from memfit.jobs._job import JobSource as JobSource
    from memfit.jobs._job import OnFailure as OnFailure
    from memfit.jobs._job import Policy as Policy
    from memfit.jobs._job import StopRequest as StopRequest
    from memfit.jobs._job import Submission as Submission
    from memfit.jobs._job import Traits as Traits
    from memfit.jobs._job import Verdict as Verdict
    from memfit.jobs._local import LocalBackend as LocalBackend
    from memfit.jobs._monitor import Monitor as Monitor
    from memfit.jobs._monitor import Unsupervised as Unsupervised
    from memfit.jobs._processes import remove_segments as remove_segments
    from memfit.jobs._processes import spawn as spawn
    from memfit.jobs._ranks import Headway as Headway
    from memfit.jobs._retry import End as End
    from memfit.jobs._retry import Retry as Retry
    from memfit.jobs._retry import what_follows as what_follows
    from memfit.jobs._scheduler import Scheduler as Scheduler
    from memfit.jobs._shim import run_element as run_element
    from memfit.jobs._slurm import SHIM as SHIM
    from memfit.jobs._slurm import SlurmBackend as SlurmBackend
    from memfit.jobs._slurm import SlurmOptions as SlurmOptions
    from memfit.jobs._slurm import render_script as render_script
    from memfit.jobs._stop import ASK_SIGNAL as ASK_SIGNAL
    from memfit.jobs._stop import NOW_SIGNAL as NOW_SIGNAL
    from memfit.jobs._stop import forget_stops as forget_stops
    from memfit.jobs._stop import stop as stop
    from memfit.jobs._stop import take_stop as take_stop
    from memfit.jobs._warm import Parent as Parent
    from memfit.rundir import ENDED as ENDED
    from memfit.rundir import JobStatus as JobStatus
    from memfit.rundir import State as State
    from memfit.rundir import name_jobs as name_jobs
    from memfit.rundir import read_status as read_status

__all__ = ["Job", "JobStatus", "State", "Verdict"]

__getattr__, __dir__ = load_lazily(__name__)
