"""The control group of one job, by its path: its state, its limit, its end."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from memfit.memory._cgroup import group_used, non_reclaimable_v1, parse_limit
from memfit.memory._host import parse_pairs, read_text

MIB = 1 << 20
#: Stands for a limit that was never set.
NO_WALL_BYTES = 1 << 62
_PATIENCE_SECONDS = 2.0
#: The name of the leaf that a supervisor is moved to, beside the group of its jobs, ends so (v2).
OUTSIDE = ".outside"


@dataclass(frozen=True)
class GroupState:
    """``used_bytes`` is non-reclaimable, ``cache_bytes`` page cache. ``stalled``: a process waits for memory at its own
    limit or that of the group above. ``met_wall`` counts charges that met the limit, for page cache too.
    ``charged_peak`` is the most that was charged at once, page cache included; 0 where there is none (v2 < 5.19)."""

    used_bytes: int
    cache_bytes: int
    shared_memory_bytes: int
    wall_bytes: int
    stalled: bool
    met_wall: int
    charged_peak: int = 0


@dataclass(frozen=True)
class JobGroup:
    path: Path
    version: int

    @classmethod
    def at(cls, path: Path) -> JobGroup:
        """Return the group of a directory; its version by the files there or, when it is gone, above it."""
        if os.access(f"{path}/memory.limit_in_bytes", os.F_OK):
            return cls(path, 1)
        marks = (one for one in (path, *path.parents) if (one / "cgroup.procs").exists())
        return cls(path, 1 if (next(marks, path) / "memory.limit_in_bytes").exists() else 2)

    @property
    def name(self) -> str:
        """The group as messages name it, by its path below the mount."""
        above = takewhile(lambda one: (one / "cgroup.procs").exists(), self.path.parents)
        top = next(iter(reversed(list(above))), Path("/"))
        return f"cgroup v{self.version} /{self.path.relative_to(top)}"

    def enter(self) -> None:
        """Move the calling process into the group; for the child between fork and exec."""
        put(f"{self.path}/cgroup.procs", "0")

    def state(self) -> GroupState | None:
        charged_peak = self.charged_peak()  # before the page cache, which may grow meanwhile
        text = self._text("memory.stat")
        if text is None:
            return None
        stat, pids = parse_pairs(text), self.pids()
        used, charged, wall = group_used(self.path, self.version, stat), self.charged_bytes(), self.wall_bytes()
        if self.version == 1:
            events, met_wall = parse_pairs(self._text("memory.oom_control")), self._number("memory.failcnt")
            stalled = events.get("under_oom", 0) > 0
            if stalled and parse_pairs(read_text(self.path.parent / "memory.oom_control")).get("under_oom"):
                # The mark is set on all groups below the one whose limit was met: only some of them wait.
                stalled = _any_sleeps(pids)
        else:
            events = parse_pairs(self._text("memory.events"))
            met_wall = events.get("high", 0) + events.get("max", 0)
            # Near the limit and never held back there: on its way to it.
            stalled = met_wall > 0 and _is_throttled(charged, used, wall)
            if not stalled:
                above = JobGroup(self.path.parent, 2)
                is_full = _is_throttled(above.charged_bytes(), above.used_bytes(), above.wall_bytes())
                stalled = is_full and _any_sleeps(pids)
        shared_memory, cache = stat.get("shmem", 0), stat.get("file", 0) + stat.get("slab_reclaimable", 0)
        if self.version == 1:
            shared_memory, cache = non_reclaimable_v1(stat, 0) - stat.get("total_rss", 0), stat.get("total_cache", 0)
        return GroupState(
            used_bytes=used,
            cache_bytes=cache - shared_memory,
            shared_memory_bytes=shared_memory,
            wall_bytes=wall,
            stalled=stalled,
            met_wall=met_wall,
            charged_peak=charged_peak,
        )

    def used_bytes(self) -> int:
        return group_used(self.path, self.version)

    def _text(self, name: str) -> str | None:
        return read_text(f"{self.path}/{name}")

    def _number(self, name: str) -> int:
        text = (self._text(name) or "").strip()
        return int(text) if text.isdigit() else 0

    def wall_bytes(self) -> int:
        return parse_limit(self._text("memory.limit_in_bytes" if self.version == 1 else "memory.high")) or NO_WALL_BYTES

    def charged_bytes(self) -> int:
        return self._number("memory.usage_in_bytes" if self.version == 1 else "memory.current")

    def charged_peak(self) -> int:
        return self._number("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")

    def first_met(self) -> str:
        """Return the nearest of this group and those above it whose hard limit was ever met; empty if none was. The
        reclaim of page cache counts too, so that this is a hint and no proof."""
        for path in (self.path, *self.path.parents):
            if self.version == 1:
                met, wall = read_text(path / "memory.failcnt") or "0", read_text(path / "memory.limit_in_bytes")
            else:
                met = str(parse_pairs(read_text(path / "memory.events")).get("max", 0))
                wall = read_text(path / "memory.max")
            if met.strip() != "0" and parse_limit(wall):
                return path.name
        return ""

    def set_wall(self, wall_bytes: int) -> None:
        """Set the limit, or as near above it as what is used allows. Lowering it reclaims page cache first, in this
        call. On v2 nothing is killed by it: ``memory.max`` stays above what is charged."""
        with contextlib.suppress(FileNotFoundError):
            if self.version == 1:
                self._set_wall_v1(wall_bytes)
                return
            least = self.charged_bytes() + 256 * MIB
            backstop = wall_bytes + max(256 * MIB, wall_bytes // 2)  # room for a burst between two slowdowns
            knobs = [("memory.high", wall_bytes), ("memory.max", max(backstop, least))]
            for name, value in knobs if wall_bytes <= self.wall_bytes() else reversed(knobs):
                put(f"{self.path}/{name}", str(value))

    def _set_wall_v1(self, wall_bytes: int) -> None:
        present, wanted = self.wall_bytes(), wall_bytes
        for above in (0, MIB, 16 * MIB, 64 * MIB, 256 * MIB, 0):
            try:
                put(f"{self.path}/memory.limit_in_bytes", str(wanted))
                return
            except OSError as error:  # more is charged than that, and reclaim did not help
                if error.errno != errno.EBUSY:
                    raise
            if (wanted := max(wall_bytes, self.charged_bytes() + above)) >= present:
                return

    def pids(self) -> list[int]:
        try:
            has_children = self.path.stat().st_nlink != 2
        except OSError:
            return []
        folders = [folder for folder, _, _ in os.walk(self.path)] if has_children else [self.path]
        return [pid for folder in folders for pid in pids_in(folder) if pid > 0]

    def kill(self) -> int:
        """Kill all processes in it and wait until it is empty, at most 2 s; return how many there were."""
        seen: set[int] = set()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (pids := self.pids()) and time.monotonic() < deadline:
            seen.update(pids)
            try:
                put(self.path / "cgroup.kill", "1")
            except OSError:  # v1, and v2 before Linux 5.14: what forks away meanwhile is killed in the next round
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        return len(seen)

    def remove(self) -> bool:
        for _ in range(40):
            for folder, _, _ in os.walk(self.path, topdown=False):
                with contextlib.suppress(OSError):  # a process is in it, or has left it this moment
                    Path(folder).rmdir()
            if not self.path.exists() or self.pids():
                break
            time.sleep(0.005)
        return not self.path.exists()


def pids_in(directory: Path | str) -> tuple[int, ...]:
    """Return the processes of one group, without the groups below it."""
    return tuple(int(pid) for pid in (read_text(f"{directory}/cgroup.procs") or "").split())


def put(file: Path | str, text: str) -> None:
    """Write a kernel file in one write, so that its refusal is seen; never make a file."""
    handle = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(handle, text.encode())
    except OSError as error:
        error.filename = str(file)
        raise
    finally:
        os.close(handle)


def _is_throttled(charged_bytes: int, used_bytes: int, wall_bytes: int) -> bool:
    # The kernel charges in batches per CPU, so that a group at its limit may show a little less.
    return charged_bytes >= wall_bytes - MIB and used_bytes >= wall_bytes * 9 // 10


def _any_sleeps(pids: list[int]) -> bool:
    """Return True if a thread of these processes sleeps in the kernel, where only SIGKILL reaches it."""
    stats = (read_text(task / "stat") for pid in pids for task in Path(f"/proc/{pid}/task").glob("*"))
    return any((text or "").rpartition(")")[2].split()[:1] == ["D"] for text in stats)


def sweep_groups(parent: Path, *, uid: int | None = None) -> int:
    """Kill and remove what a dead run left below its parent group; return how many processes were killed. Another
    folder than a ``memfit-`` group, or one that is not of user ``uid``, is left alone."""
    try:
        owner = parent.stat().st_uid
    except OSError:
        return 0
    if not parent.name.startswith("memfit-") or uid not in (None, owner) or not (parent / "cgroup.procs").exists():
        return 0
    group = JobGroup.at(parent)
    ended = group.kill()
    group.remove()
    with contextlib.suppress(OSError):  # Where the supervisor was moved on v2; other processes may be in it still.
        Path(f"{parent}{OUTSIDE}").rmdir()
    return ended
