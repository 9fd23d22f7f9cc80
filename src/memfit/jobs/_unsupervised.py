"""What a shim does for a job that waits at its wall when no supervisor is there to raise the wall."""

from __future__ import annotations

import random
from pathlib import Path

from memfit.memory import GroupState, JobGroup, is_locked
from memfit.units import format_bytes

#: After so many seconds without a supervisor the job may take what the run has; later it is ended. The jobs of one run
#: end at different times, so that the others can have what the first gives back.
ALONE_SECONDS, STARVED_SECONDS = 5.0, 60.0
_LOOK_SECONDS = 1.0


class Unsupervised:
    """Follows one job that may stall while its run has no supervisor.

    Args:
        run_path: The run directory, whose ``supervisor.lock`` a supervisor holds.
        group: The job's group, below the group of all jobs of the run.
    """

    def __init__(self, run_path: Path, group: JobGroup) -> None:
        self._lock, self._group = run_path / "supervisor.lock", group
        self._ends_after = STARVED_SECONDS * random.uniform(1, 2)
        self._look_at = 0.0
        self._since: float | None = None

    def look(self, state: GroupState | None, now: float) -> str:
        """Raise a stalled job's wall to that of the whole run; the reason to end the job when that did not help."""
        if state is not None and state.stalled and now < self._look_at:
            return ""
        self._look_at = now + _LOOK_SECONDS
        if state is None or not state.stalled or is_locked(self._lock):
            self._since = None
            return ""
        self._since = self._since or now
        waited = now - self._since
        if waited >= self._ends_after:
            return (
                f"it waited {waited:.0f} s at its wall with {format_bytes(state.used_bytes)} in use, no supervisor was "
                "there, and none of its run's memory was free: ended by its watcher"
            )
        if waited >= ALONE_SECONDS and (run := JobGroup(self._group.path.parent, self._group.version).state()):
            self._group.set_wall(run.wall_bytes)
        return ""
