"""The run directory: everything before a run writes into it, everything after reads from it.

Event files are append-only. All other files are *written aside and renamed*, so that a reader sees the old content or
the new one and never a part. ARCHITECTURE.md lists the files. `read` makes a `RunState` of them, the one record that
tables, summaries, pages and messages are made of; a `Reader` makes it again while the run goes on.
"""

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily

if TYPE_CHECKING:
    from memfit.rundir._beats import LOST as LOST
    from memfit.rundir._beats import RANKS_VARIABLE as RANKS_VARIABLE
    from memfit.rundir._beats import START_PATIENCE as START_PATIENCE
    from memfit.rundir._beats import WAITING as WAITING
    from memfit.rundir._beats import Beat as Beat
    from memfit.rundir._beats import is_further as is_further
    from memfit.rundir._beats import launch_of as launch_of
    from memfit.rundir._beats import open_beats as open_beats
    from memfit.rundir._beats import read_beats as read_beats
    from memfit.rundir._canary import CANARY_BATCHES as CANARY_BATCHES
    from memfit.rundir._canary import CANARY_STEPS as CANARY_STEPS
    from memfit.rundir._canary import CANARY_VARIABLE as CANARY_VARIABLE
    from memfit.rundir._canary import PROVE_OUTPUTS as PROVE_OUTPUTS
    from memfit.rundir._canary import PROVE_PLACE as PROVE_PLACE
    from memfit.rundir._canary import PROVE_PLAN as PROVE_PLAN
    from memfit.rundir._canary import PROVE_SEALED as PROVE_SEALED
    from memfit.rundir._canary import PROVE_VARIABLE as PROVE_VARIABLE
    from memfit.rundir._canary import canary_folder as canary_folder
    from memfit.rundir._canary import canary_over as canary_over
    from memfit.rundir._canary import is_canary as is_canary
    from memfit.rundir._canary import scratch_folder as scratch_folder
    from memfit.rundir._events import LEVELS as LEVELS
    from memfit.rundir._events import Event as Event
    from memfit.rundir._events import EventTail as EventTail
    from memfit.rundir._events import EventWriter as EventWriter
    from memfit.rundir._events import FolderTail as FolderTail
    from memfit.rundir._events import event_time as event_time
    from memfit.rundir._events import left_something as left_something
    from memfit.rundir._events import level_of as level_of
    from memfit.rundir._events import read_events as read_events
    from memfit.rundir._folder import JOB_ID_VARIABLE as JOB_ID_VARIABLE
    from memfit.rundir._folder import RUN_DIR_VARIABLE as RUN_DIR_VARIABLE
    from memfit.rundir._folder import RunDir as RunDir
    from memfit.rundir._folder import scope_of as scope_of
    from memfit.rundir._liveness import SUPERVISOR as SUPERVISOR
    from memfit.rundir._liveness import liveness as liveness
    from memfit.rundir._loaders import batch_size_of as batch_size_of
    from memfit.rundir._loaders import loader_settings as loader_settings
    from memfit.rundir._reader import Reader as Reader
    from memfit.rundir._reader import read as read
    from memfit.rundir._record import current_run as current_run
    from memfit.rundir._record import phase as phase
    from memfit.rundir._record import read_devices as read_devices
    from memfit.rundir._record import record as record
    from memfit.rundir._state import JobState as JobState
    from memfit.rundir._state import RunState as RunState
    from memfit.rundir._state import StageState as StageState
    from memfit.rundir._state import finite as finite
    from memfit.rundir._state import seconds_left as seconds_left
    from memfit.rundir._status import ENDED as ENDED
    from memfit.rundir._status import OUTCOME as OUTCOME
    from memfit.rundir._status import STATUS as STATUS
    from memfit.rundir._status import EndedBy as EndedBy
    from memfit.rundir._status import JobStatus as JobStatus
    from memfit.rundir._status import State as State
    from memfit.rundir._status import name_jobs as name_jobs
    from memfit.rundir._status import read_record as read_record
    from memfit.rundir._status import read_status as read_status
    from memfit.rundir._status import read_status_file as read_status_file
    from memfit.rundir._status import show_state as show_state

__all__ = ["JobState", "RunDir", "RunState", "StageState", "finite", "phase", "read", "record"]

__getattr__, __dir__ = load_lazily(__name__)
