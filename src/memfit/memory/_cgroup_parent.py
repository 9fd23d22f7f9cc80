"""Where memfit may make control groups of its own, and where it may not."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memfit.memory._cgroup import Group, Placement
from memfit.memory._host import REAL_ROOT, descends, parse_status, read_text

#: The name of the leaf that a supervisor is moved to, beside the group of its jobs, ends so (v2).
OUTSIDE = ".outside"

# What a job that is placed above a group would escape.
_FOREIGN_LIMITS = ("memory.max", "memory.high", "cpu.max", "cpuset.cpus")


@dataclass(frozen=True)
class Base:
    """The group that memfit's own can be made below.

    Attributes:
        version: 1 or 2.
        group: That group.
        enables: Its children have no memory controller yet (v2): it must be enabled for them.
        moves: What must leave it before that: the process and its descendants, if they are in it.
    """

    version: int
    group: Group
    enables: bool = False
    moves: tuple[int, ...] = ()


def find_base(
    root: Path, placement: Placement | None, *, may_write: Callable[[Path], bool] | None = None
) -> Base | str:
    """Where memfit's groups can be made for the process that was located, or why they cannot; nothing is made.

    v1: below its own group. v2: below the nearest group, from its own upward, that has the memory controller and may be
    written, and in which either no process is (the root excepted) or only this one and its descendants. A group with a
    limit of its own is never left, since its jobs would escape that limit.

    Args:
        root: The folder above proc and sys.
        placement: What ``locate`` found.
        may_write: Whether this user may write a directory or file. By default the kernel is asked or, in a recorded
            tree, the mount's options and the recorded user, since its folders are the reader's own.

    Source: Linux Documentation/admin-guide/cgroup-v2.rst, "No Internal Process Constraint", "Delegation Containment".
    """
    if placement is None:
        return "no control group with a memory controller is visible"
    if placement.read_only:
        return f"cgroup v{placement.version} is mounted read-only"
    may_write = may_write or _may_write(root)
    own = placement.groups[0]
    if placement.version == 1:
        # Kernels may be built without; a group whose killer stays on cannot hold a job without ending it.
        if root == REAL_ROOT and not (own.directory / "memory.oom_control").exists():
            return f"cgroup v1 {own.path} has no memory.oom_control: a job at its wall would be killed"
        return Base(1, own) if may_write(own.directory) else f"cgroup v1 {own.path} cannot be written by this user"
    reason = ""
    for number, group in enumerate(placement.groups):
        if group.path.endswith(OUTSIDE) and number == 0:
            continue  # An earlier start of memfit put this process there; its parent is ready for groups.
        found = _judge_v2(root, placement, group, may_write)
        if isinstance(found, Base):
            return found
        reason = reason or found
        if kept := [name for name in _FOREIGN_LIMITS if _is_set(read_text(group.directory / name))]:
            return reason + (f"; its {kept[0]} must not be left" if number else f", and its {kept[0]} must not be left")
    return reason


def _judge_v2(root: Path, placement: Placement, group: Group, may_write: Callable[[Path], bool]) -> Base | str:
    """The group as a base, or why it cannot be one."""
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


def pids_in(directory: Path | str) -> tuple[int, ...]:
    """The processes of one group, without the groups below it."""
    return tuple(int(pid) for pid in (read_text(f"{directory}/cgroup.procs") or "").split())


def _is_set(text: str | None) -> bool:
    """Whether a v2 knob limits anything: ``max``, ``max 100000`` and an empty list do not."""
    return bool((text or "").strip()) and not (text or "").startswith("max")


def _may_write(root: Path) -> Callable[[Path], bool]:
    if root == REAL_ROOT:
        return lambda path: os.access(path, os.W_OK | os.X_OK if path.is_dir() else os.W_OK)
    uids = parse_status(read_text(root / "proc/self/status")).get("Uid", "").split()
    return lambda path: uids[1:2] == ["0"]
