"""Listening to a control group: how a supervisor hears at once that a job grows or waits."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from memfit.memory._jobgroup import NO_WALL_BYTES, JobGroup, put

#: How long a group that had news, or false news by page cache, is not listened to.
QUIET_SECONDS = 1.0
SAMPLE_SECONDS = 0.05
#: So many microseconds of waiting for memory within so many: the kernel takes windows from half a second on and,
#: without CAP_SYS_RESOURCE, only multiples of two seconds. Source: Linux Documentation/accounting/psi.rst.
_PRESSURES = ("some 50000 500000", "some 200000 2000000")


def pressure_trigger(group: JobGroup) -> int | None:
    """A descriptor with POLLPRI when processes of a group or below it wait for memory, at most twice a second.

    They wait while ``memory.high`` slows them down and while page cache is reclaimed for them. The kernel's watch ends
    when the descriptor is closed.

    Returns:
        None on v1, and where the kernel keeps no pressure (before Linux 5.2, ``psi=0``) or this user may not ask.
    """
    for pressure in _PRESSURES if group.version == 2 else ():
        handle = _open(group.path / "memory.pressure", os.O_RDWR | os.O_NONBLOCK)
        if handle is None:
            return None
        try:
            os.write(handle, f"{pressure}\0".encode())
            return handle
        except OSError:
            os.close(handle)
    return None


@dataclass
class Ear:
    """What is listened to of one group: that its usage passes ``soft_bytes``, and that it meets its wall.

    The kernel notifies of the first on v1 alone, and only by total usage, page cache included. To be registered there
    takes the caller some 15 ms (the kernel waits for an RCU grace period), so that a young group is sampled instead.
    """

    group: JobGroup
    soft_bytes: int
    born: float
    look_at: float = 0.0
    soft_from: float = 0.0
    wall_from: float = 0.0
    pause: float = SAMPLE_SECONDS
    soft_fd: int | None = None
    wall_fd: int | None = None
    usage_fd: int | None = None
    is_open: bool = False
    can_notify: bool = field(init=False)

    def __post_init__(self) -> None:
        self.can_notify = self.group.version == 1 and self.soft_bytes < NO_WALL_BYTES

    def open(self) -> None:
        """Listen from now on; what happened before shows in the next look."""
        path, self.is_open = self.group.path, True
        if self.group.version == 1:
            self.wall_fd = _eventfd(path, "memory.oom_control")
            self.usage_fd = _open(path / "memory.usage_in_bytes")
        else:
            local = path / "memory.events.local"  # Does not hear of the groups below.
            self.wall_fd = _open(local if local.exists() else path / "memory.events")
            self.usage_fd = _open(path / "memory.current")
        self._drain()

    def close(self) -> None:
        """Listen no more."""
        for handle in (self.soft_fd, self.wall_fd, self.usage_fd):
            if handle is not None:
                os.close(handle)
        self.soft_fd = self.wall_fd = self.usage_fd = None

    def change(self, soft_bytes: int, now: float) -> None:
        """Listen at once, and at another threshold."""
        if soft_bytes != self.soft_bytes and self.soft_fd is not None:
            os.close(self.soft_fd)
            self.soft_fd, self.born = None, now
        self.soft_bytes, self.look_at, self.soft_from, self.wall_from = soft_bytes, 0.0, 0.0, 0.0
        self.pause = SAMPLE_SECONDS

    def ask_to_be_notified(self) -> None:
        """Have the kernel tell when the threshold is crossed, instead of being sampled."""
        self.soft_fd = _eventfd(self.group.path, "memory.usage_in_bytes", str(self.soft_bytes))
        self.can_notify = self.soft_fd is not None
        self.look_at = 0.0  # What crossed it before this moment is not told.

    def look(self, now: float, met_wall: bool = False) -> bool | None:
        """Whether there is news, None when the group is gone; and when to look or listen next."""
        if self.is_open:
            self._drain()
        else:  # of a brief job that is never needed
            self.open()
        is_sampled = self.soft_fd is None and self.soft_bytes < NO_WALL_BYTES
        if is_sampled and not met_wall and self._charged_bytes() < self.soft_bytes:
            self.look_at = now + SAMPLE_SECONDS
            return False
        state = self.group.state()
        if state is None:
            return None
        # On v1 nothing but a process that waits sets the wall's event off; on v2 page cache does so as well.
        if state.stalled or state.used_bytes >= self.soft_bytes or (met_wall and self.group.version == 1):
            self.soft_from = self.wall_from = self.look_at = now + QUIET_SECONDS
            return True
        if not met_wall and state.charged_bytes < self.soft_bytes:
            self.pause, self.look_at = SAMPLE_SECONDS, now + SAMPLE_SECONDS if is_sampled else math.inf
            return False
        # Page cache: the event tells no more, so that it is looked at, ever more seldom.
        self.soft_from, self.look_at = now + QUIET_SECONDS, now + self.pause
        if met_wall:
            self.wall_from = now + QUIET_SECONDS
        self.pause = min(2 * self.pause, QUIET_SECONDS)
        return False

    def _charged_bytes(self) -> int:
        try:
            return int(os.pread(self.usage_fd, 32, 0)) if self.usage_fd is not None else NO_WALL_BYTES
        except OSError:  # The group is gone: let the look find that.
            return NO_WALL_BYTES

    def _drain(self) -> None:
        with contextlib.suppress(OSError):
            if self.soft_fd is not None:
                os.eventfd_read(self.soft_fd)
        with contextlib.suppress(OSError):
            if self.wall_fd is not None and self.group.version == 1:
                os.eventfd_read(self.wall_fd)
            elif self.wall_fd is not None:
                os.pread(self.wall_fd, 4096, 0)


def _open(file: Path, flags: int = os.O_RDONLY) -> int | None:
    try:
        return os.open(file, flags | os.O_CLOEXEC)
    except OSError:
        return None


def _eventfd(group: Path, file: str, argument: str = "") -> int | None:
    """An eventfd that the kernel writes to, or None where this kernel knows no such event."""
    watched = _open(group / file)
    if watched is None:
        return None
    handle = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        put(group / "cgroup.event_control", f"{handle} {watched} {argument}".strip())
    except OSError:
        os.close(handle)
        return None
    finally:
        os.close(watched)
    return handle
