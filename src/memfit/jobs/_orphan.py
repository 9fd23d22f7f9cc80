"""What a shim does for a stalled job when no supervisor is there to raise its wall."""

from __future__ import annotations

import os
from pathlib import Path

from memfit.memory import GroupState, JobGroup, is_locked
from memfit.units import MIB, format_bytes

#: For how long nobody must be there before the shim decides itself, and how long a job may then still wait.
ALONE_SECONDS, STARVED_SECONDS = 5.0, 60.0
_LOOK_SECONDS = 1.0
_LEAST_BYTES = 16 * MIB
#: Orphans of one run give up one after another, so that the others can have what the first gives back.
_APART_SECONDS = 5.0


class OrphanWatch:
    """Grows a stalled job's wall from what is free in its run when no supervisor does, and ends what cannot grow.

    Args:
        run_path: The run directory, whose ``supervisor.lock`` a supervisor holds.
        group: The job's group.
        alone_seconds, starved_seconds: How long to wait for a supervisor, and for memory.
    """

    def __init__(
        self,
        run_path: Path,
        group: JobGroup,
        *,
        alone_seconds: float = ALONE_SECONDS,
        starved_seconds: float = STARVED_SECONDS,
    ) -> None:
        self._lock = run_path / "supervisor.lock"
        self._group = group
        self._alone_seconds, self._starved_seconds = alone_seconds, starved_seconds
        self._look_at = 0.0
        self._alone_since: float | None = None
        self._starved_since: float | None = None

    def look(self, state: GroupState | None, now: float) -> str:
        """See to the job; the reason why it must end, or nothing while it may go on."""
        if state is None or not state.stalled:
            self._alone_since = self._starved_since = None
            return ""
        if now < self._look_at:
            return ""
        self._look_at = now + _LOOK_SECONDS
        if is_locked(self._lock):
            self._alone_since = self._starved_since = None
            return ""
        self._alone_since = self._alone_since or now
        if now - self._alone_since < self._alone_seconds:
            return ""
        free = self._free_bytes()
        if free >= _LEAST_BYTES:
            self._group.set_wall(max(state.wall_bytes, state.used_bytes) + free)
            self._starved_since = None
            return ""
        self._starved_since = self._starved_since or now
        starved = now - self._starved_since
        if starved < self._starved_seconds + self._rank() * _APART_SECONDS:
            return ""
        return (
            f"it waited {starved:.0f} s at its wall of {format_bytes(state.wall_bytes)} with "
            f"{format_bytes(state.used_bytes)} in use, no supervisor was there to give it more, and "
            f"{format_bytes(max(0, free))} of its run's memory was free: ended by its watcher"
        )

    def _siblings(self) -> list[Path]:
        try:
            return sorted(Path(entry.path) for entry in os.scandir(self._group.path.parent) if entry.is_dir())
        except OSError:
            return []

    def _free_bytes(self) -> int:
        """What no job of the run uses, below the wall of all of them."""
        parent = JobGroup(self._group.path.parent, self._group.version).state()
        states = [JobGroup(path, self._group.version).state() for path in self._siblings()]
        return (parent.wall_bytes if parent else 0) - sum(state.used_bytes for state in states if state)

    def _rank(self) -> int:
        paths = self._siblings()
        return paths.index(self._group.path) if self._group.path in paths else 0
