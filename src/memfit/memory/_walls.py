"""Control groups for jobs: at its limit the kernel makes a job wait instead of killing it.

All jobs of a run live below one parent group, the supervisor outside of it. Clean page cache is reclaimed at the limit.

- v1: ``memory.limit_in_bytes``, killer off (``memory.oom_control``): page faults sleep, fork and tmpfs get ENOMEM.
- v2: ``memory.high`` slows allocations down to a crawl, and ``memory.max``, where it kills, lies well above.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from memfit.memory._cgroup import Group, Placement, locate
from memfit.memory._host import REAL_ROOT, descends, parse_status, read_text
from memfit.memory._jobgroup import OUTSIDE, JobGroup, pids_in, put

#: Before a job's id in the name of its group, so that no id collides with a file of the kernel's there.
_PREFIX = "job-"
# What a job that is placed above a group would escape.
_FOREIGN_LIMITS = ("memory.max", "memory.high", "cpu.max", "cpuset.cpus")
#: Less may be the lag of the kernel's counters.
_LEAST_LEFT = 1 << 20


@dataclass(frozen=True)
class Base:
    """The group below which memfit's own can be made. On v2 it ``enables`` the memory controller for its children,
    after the processes in ``moves`` have left it."""

    version: int
    group: Group
    enables: bool = False
    moves: tuple[int, ...] = ()


def find_base(
    root: Path, placement: Placement | None, *, may_write: Callable[[Path], bool] | None = None
) -> Base | str:
    """Return where memfit's groups can be made, or why they cannot; make nothing.

    v1: below its own group. v2: below the nearest group, from its own upward, that has the memory controller, may be
    written, and holds no process but this one and its descendants (the root may). A group with a limit is never left:
    its jobs would escape that limit. Source: Linux Documentation/admin-guide/cgroup-v2.rst, "No Internal Process
    Constraint", "Delegation Containment"."""
    if placement is None:
        return "no control group with a memory controller is visible"
    if placement.read_only:
        return f"cgroup v{placement.version} is mounted read-only"
    may_write = may_write or _may_write(root)
    own = placement.groups[0]
    if placement.version == 1:
        # Kernels may be built without; a group whose killer stays on cannot hold a job without ending it.
        if root == REAL_ROOT and not (own.directory / "memory.oom_control").exists():
            return f"cgroup v1 {own.path} has no memory.oom_control: a job at its limit would be killed"
        return Base(1, own) if may_write(own.directory) else f"cgroup v1 {own.path} cannot be written by this user"
    reason = ""
    for number, group in enumerate(placement.groups):
        if group.path.endswith(OUTSIDE) and number == 0:
            continue  # An earlier start of memfit put this process there; its parent is ready for groups.
        found = _judge_v2(root, placement, group, may_write)
        if isinstance(found, Base):
            return found
        reason = reason or found
        texts = {name: (read_text(group.directory / name) or "").strip() for name in _FOREIGN_LIMITS}
        if kept := [name for name, text in texts.items() if text and not text.startswith("max")]:
            return reason + (f"; its {kept[0]} must not be left" if number else f", and its {kept[0]} must not be left")
    return reason


def _judge_v2(root: Path, placement: Placement, group: Group, may_write: Callable[[Path], bool]) -> Base | str:
    name, directory = f"cgroup v2 {group.path}", group.directory
    if "memory" not in (read_text(directory / "cgroup.controllers") or "").split():
        return f"{name} has no memory controller"
    if not all(may_write(directory / file) for file in ("", "cgroup.procs", "cgroup.subtree_control")):
        return f"{name} cannot be written by this user"
    if "memory" in (read_text(directory / "cgroup.subtree_control") or "").split():
        return Base(2, group)
    if group == placement.groups[-1] and not placement.hidden:
        return Base(2, group, enables=True)  # The root may hold processes beside groups.
    members = pids_in(directory)
    if strangers := [pid for pid in members if not descends(root, pid, placement.pid)]:
        return f"{name} holds processes of others ({len(strangers)}), so it can have no groups with memory below it"
    return Base(2, group, enables=True, moves=members)


def _may_write(root: Path) -> Callable[[Path], bool]:
    if root == REAL_ROOT:
        return lambda path: os.access(path, os.W_OK | os.X_OK if path.is_dir() else os.W_OK)
    uids = parse_status(read_text(root / "proc/self/status")).get("Uid", "").split()
    return lambda path: uids[1:2] == ["0"]


def why_no_walls(*, root: Path = REAL_ROOT) -> str:
    """Return why ``Walls.build`` can make no groups here; empty when nothing is known against it."""
    base = find_base(root, locate(root, "memory"))
    return base if isinstance(base, str) else ""


def systemd_scope_command(*, env: Mapping[str, str] | None = None, root: Path = REAL_ROOT) -> list[str] | None:
    """Return the words that start a command in a delegated group of its own; None without a user manager. Only root may
    change the group of an ordinary user's session. Source: systemd-run(1); systemd.resource-control(5), Delegate=."""
    env = os.environ if env is None else env
    folders = [str(root / folder.lstrip("/")) for folder in env.get("PATH", "").split(os.pathsep) if folder]
    runtime = env.get("XDG_RUNTIME_DIR", "")
    if not runtime or not (root / runtime.lstrip("/") / "systemd/private").exists():
        return None
    if shutil.which("systemd-run", path=os.pathsep.join(folders)) is None:
        return None
    return ["systemd-run", "--user", "--scope", "--quiet", "--property=Delegate=yes", "--"]


class Walls:
    """The control groups of one run's jobs, an ``Enforcer`` of theirs; ``parent`` is above all of them, with the run's
    capacity as its limit."""

    parent: JobGroup
    permission: Literal["cgroup v1", "cgroup v2"]

    def __init__(self, parent: JobGroup, base: Base) -> None:
        self.parent = parent
        self.permission = "cgroup v1" if parent.version == 1 else "cgroup v2"
        self._base = base
        self._live: dict[str, JobGroup] = {}

    @classmethod
    def build(cls, name: str, capacity_bytes: int, *, root: Path = REAL_ROOT, pid: int | None = None) -> Walls | None:
        """Make the parent group ``memfit-<name>``, or take over the one that a dead supervisor left; None where no
        groups can be made. On v2, this process and its descendants move to a leaf beside it until ``close`` if they are
        in the way. The name differs from that of all other runs on the host."""
        base = find_base(root, locate(root, "memory", pid))
        if isinstance(base, str):
            return None
        path = base.group.directory / f"memfit-{re.sub(r'[^A-Za-z0-9._-]', '-', name)}"
        parent = JobGroup(path, base.version)
        try:
            if base.enables:
                _enable(base, _leaf(parent))
            path.mkdir(exist_ok=True)
            _prepare(parent)
            parent.set_wall(capacity_bytes + parent.used_bytes())  # jobs of a dead supervisor's may run in it
        except OSError:
            if parent.remove():
                _restore(base, _leaf(parent))
            return None
        return cls(parent, base)

    def grant(self, job_id: str, wall_bytes: int) -> None:
        """Make the group of a job that is to start, or move the limit of one that runs."""
        with contextlib.suppress(OSError):  # gone with its job, or refused: then RLIMIT_DATA holds instead
            group = self._live.get(job_id) or self._make(job_id)
            group.set_wall(wall_bytes)
            self._live[job_id] = group

    def find(self, job_id: str) -> JobGroup | None:
        return self._live.get(job_id)

    def _make(self, job_id: str) -> JobGroup:
        group = JobGroup(self.parent.path / f"{_PREFIX}{job_id}", self.parent.version)
        try:
            group.path.mkdir()
        except FileExistsError:
            if group.version == 1 and not group.pids():
                put(group.path / "memory.max_usage_in_bytes", "0")
        if group.version == 2:
            with contextlib.suppress(FileNotFoundError):  # Linux 4.19
                put(group.path / "memory.oom.group", "1")
        return group

    def cap(self, total_bytes: int) -> None:
        """Set the limit of all jobs together. What ended jobs left behind (files in /dev/shm) stays charged to the
        parent group and counts in the budget as in use: the limit is higher by that, or it would count twice."""
        with contextlib.suppress(OSError):
            self.parent.set_wall(total_bytes + self.left_bytes())

    def left_bytes(self) -> int:
        """Return what ended jobs left charged to the run, such as files in /dev/shm; a few pages are lag."""
        left = self.parent.used_bytes() - sum(group.used_bytes() for group in self._live.values())
        return left if left >= _LEAST_LEFT else 0

    def forget(self, job_id: str) -> None:
        self._live.pop(job_id, None)

    def close(self) -> None:
        """Remove all groups that hold no process; on v2, go back to the group that this process came from."""
        if self.parent.remove():
            _restore(self._base, _leaf(self.parent))


def _leaf(parent: JobGroup) -> Path:
    return parent.path.with_name(parent.path.name + OUTSIDE)


def _prepare(parent: JobGroup) -> None:
    """Set what all groups of jobs inherit from their parent."""
    if parent.version == 2:
        put(parent.path / "cgroup.subtree_control", "+memory")
        with contextlib.suppress(FileNotFoundError):  # No swap in this kernel
            put(parent.path / "memory.swap.max", "0")
        return
    if (read_text(parent.path / "memory.use_hierarchy") or "1").strip() == "0":
        put(parent.path / "memory.use_hierarchy", "1")  # Before Linux 5.11
    put(parent.path / "memory.oom_control", "1")
    with contextlib.suppress(OSError):
        put(parent.path / "memory.swappiness", "0")


def _enable(base: Base, leaf: Path) -> None:
    """Give the children of the base a memory controller, after its own processes have moved to the leaf."""
    directory = base.group.directory
    if base.moves:
        leaf.mkdir(exist_ok=True)
        _move_all(directory, leaf)
    put(directory / "cgroup.subtree_control", "+memory")


def _restore(base: Base, leaf: Path) -> None:
    """Undo ``_enable`` where processes were moved, unless another group needs the controller."""
    if base.moves and leaf.is_dir():
        with contextlib.suppress(OSError):
            put(base.group.directory / "cgroup.subtree_control", "-memory")
            _move_all(leaf, base.group.directory)
            leaf.rmdir()


def _move_all(source: Path, target: Path) -> None:
    for _ in range(100):  # A process that forks while it is moved leaves a child behind.
        pids = pids_in(source)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                put(target / "cgroup.procs", str(pid))
        if not pids:
            return
