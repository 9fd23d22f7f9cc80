"""Limits on memory, and what the kernel says of the host and of this process, by pure parsers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memfit.errors import UsageError
from memfit.memory._footprint import HOST

REAL_ROOT = Path("/")
#: The ``id`` of a limit above the visible groups.
HIDDEN = "hidden"

_SIZE_FACTOR = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


Scope = Literal["group", "host", "process", "job"]


@dataclass(frozen=True)
class Limit:
    """One limit on host memory: ``name`` is the file, variable or option that holds it (``memory.max``), ``source``
    where it is set (``Slurm job 42``), ``metric`` what ``used_bytes`` counts. By ``id`` other runs know that they stand
    under it too; empty for a limit of this run alone. ``binds`` is False for one that can never be the smallest."""

    name: str
    source: str
    limit_bytes: int
    used_bytes: int
    headroom_bytes: int
    scope: Scope
    note: str = ""
    metric: str = "non-reclaimable"
    id: str = ""
    binds: bool = True


def limit(name: str, source: str, limit_bytes: int, used_bytes: int, scope: Scope, **more: Any) -> Limit:
    more.setdefault("id", HOST if scope == "host" else "")
    return Limit(name, source, limit_bytes, used_bytes, limit_bytes - used_bytes, scope, **more)


@dataclass(frozen=True)
class Mount:
    root: str
    point: str
    kind: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Swap:
    """Swap space. It is shown and never used for jobs: a job that swaps hardly goes on. ``usable_bytes`` is what this
    process's groups may still use of it, and ``source`` is where that is set."""

    total_bytes: int
    free_bytes: int
    usable_bytes: int
    source: str


@dataclass(frozen=True)
class SharedMemory:
    """The file system at /dev/shm; what lies there is charged to the group that wrote it."""

    total_bytes: int
    free_bytes: int | None
    source: str


@dataclass(frozen=True)
class Host:
    limits: tuple[Limit, ...]
    total_bytes: int
    swap: Swap
    shm: SharedMemory | None


_PAIR = re.compile(r"^([^\s:]+):?[ \t]+(\d+)(?: (kB)$|$|(?=\s))", re.M | re.A)


def read_text(path: Path | str) -> str | None:
    """Return the text of a kernel file, or None where there is none or it may not be read."""
    # Bare system calls: a file object costs twice as much, ten times a second and for each process and group.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # gone, or not ours to see
        return None
    try:
        return b"".join(iter(lambda: os.read(descriptor, 1 << 16), b"")).decode(errors="replace")
    except OSError:  # gone since it was opened
        return None
    finally:
        os.close(descriptor)


def parse_pairs(text: str | None) -> dict[str, int]:
    """Return names and numbers, one pair a line, as in memory.stat and /proc/meminfo. Units ``kB`` become bytes.
    >>> parse_pairs("MemTotal:       24684092 kB\\nHugePages_Total:       0\\n")
    {'MemTotal': 25276510208, 'HugePages_Total': 0}
    >>> parse_pairs("anon 4096\\nfile 8192\\n")
    {'anon': 4096, 'file': 8192}
    """
    found = _PAIR.findall(text or "")
    return {name: int(number) * (1024 if unit else 1) for name, number, unit in found}


def parse_status(text: str | None) -> dict[str, str]:
    """Return the fields of /proc/<pid>/status as text.
    >>> parse_status("Name:\\tpython3\\nPPid:\\t17\\nVmSize:\\t   12052 kB\\n")
    {'Name': 'python3', 'PPid': '17', 'VmSize': '12052 kB'}
    """
    pairs = (line.partition(":") for line in (text or "").splitlines())
    return {name: value.strip() for name, colon, value in pairs if colon}


def descends(root: Path, pid: int, ancestor: int) -> bool:
    """Return True if a process is another one or below it, by the parents in /proc."""
    while pid > 1 and pid != ancestor:
        pid = int(parse_status(read_text(root / f"proc/{pid}/status")).get("PPid", "0"))
    return pid == ancestor


def parse_mountinfo(text: str | None) -> tuple[Mount, ...]:
    r"""Return the mounts of /proc/self/mountinfo, in its order; a later one hides an earlier one at the same point.
    >>> parse_mountinfo("30 25 0:27 / /mnt/a\\040b rw,relatime - tmpfs tmpfs rw,size=65536k\n")
    (Mount(root='/', point='/mnt/a b', kind='tmpfs', options=('rw', 'relatime', 'rw', 'size=65536k')),)
    """
    mounts = []
    for line in (text or "").splitlines():
        left, dash, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if dash and len(fields) >= 6 and len(tail) >= 3:
            options = (*fields[5].split(","), *tail[2].split(","))
            mounts.append(Mount(_unescape(fields[3]), _unescape(fields[4]), tail[0], options))
    return tuple(mounts)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text) if "\\" in text else text


def parse_limits(text: str | None) -> dict[str, tuple[int | None, int | None]]:
    """Return the soft and hard limits of /proc/<pid>/limits; None for unlimited.
    >>> parse_limits("Max data size             4096                 unlimited            bytes     \\n")
    {'data size': (4096, None)}
    """
    rows = re.findall(r"^Max (.+?) {2,}(\d+|unlimited) +(\d+|unlimited)", text or "", re.M)
    return {name: tuple(int(one) if one.isdigit() else None for one in both) for name, *both in rows}  # type: ignore[misc]


def parse_cpu_list(text: str) -> int:
    """Return the number of CPUs in a list such as the status field Cpus_allowed_list.
    >>> parse_cpu_list("0-3,8"), parse_cpu_list("")
    (5, 0)
    """
    spans = (span.partition("-") for span in text.split(",") if span.strip())
    return sum(int(last or first) - int(first) + 1 for first, _, last in spans)


def parse_tmpfs_size(options: tuple[str, ...], total_bytes: int) -> int:
    """Return the size of a tmpfs by its mount options; without one, half of the memory, as in the kernel.
    >>> parse_tmpfs_size(("rw", "size=65536k"), 0), parse_tmpfs_size(("size=25%",), 4096), parse_tmpfs_size((), 4096)
    (67108864, 1024, 2048)
    """
    for option in options:
        if match := re.fullmatch(r"size=(\d+)([kmgtKMGT%]?)", option):
            count, unit = int(match.group(1)), match.group(2).lower()
            return total_bytes * count // 100 if unit == "%" else count * _SIZE_FACTOR[unit]
    return total_bytes // 2


def read_host(root: Path) -> Host:
    text = read_text(root / "proc/meminfo")
    if text is None:
        raise UsageError(
            f"{root} has no proc/meminfo.",
            rule="Linux has it, and so has a recorded tree.",
            remedy="mount /proc here, or pass the folder above proc and sys",
        )
    memory = parse_pairs(text)
    mounts = parse_mountinfo(read_text(root / "proc/self/mountinfo"))
    virtual = any(mount.point == "/proc/meminfo" and "lxcfs" in mount.kind for mount in mounts)
    source = "/proc/meminfo (lxcfs: the container's)" if virtual else "/proc/meminfo"
    total, available = memory["MemTotal"], memory["MemAvailable"]
    limits = [limit("MemAvailable", source, total, total - available, "host", metric="MemTotal - MemAvailable")]
    if (read_text(root / "proc/sys/vm/overcommit_memory") or "").strip() == "2":
        note = "the host allows no overcommit: address space counts, touched or not"
        commit = memory["CommitLimit"], memory["Committed_AS"]
        limits.append(limit("CommitLimit", source, *commit, "host", note=note, metric="Committed_AS"))
    free = memory.get("SwapFree", 0)
    swap = Swap(memory.get("SwapTotal", 0), free, free, source)
    return Host(tuple(limits), total, swap, _read_shm(root, mounts, total))


def _read_shm(root: Path, mounts: tuple[Mount, ...], total_bytes: int) -> SharedMemory | None:
    mount = next((mount for mount in reversed(mounts) if mount.point == "/dev/shm"), None)
    if mount is None:
        return None
    if root == REAL_ROOT:
        facts = os.statvfs(mount.point)
        return SharedMemory(facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize, "statvfs /dev/shm")
    return SharedMemory(parse_tmpfs_size(mount.options, total_bytes), None, "mountinfo /dev/shm")


def read_rlimits(root: Path, fields: Mapping[str, int]) -> tuple[Limit, ...]:
    """Return the limits on address space and data of this process. Source: getrlimit(2), RLIMIT_AS and RLIMIT_DATA."""
    limits = parse_limits(read_text(root / "proc/self/limits"))
    note = "bounds each process by itself and not their sum; counted because a job of one process cannot pass it"
    kinds = (("RLIMIT_AS", "address space", "VmSize"), ("RLIMIT_DATA", "data size", "VmData"))
    return tuple(
        limit(name, "/proc/self/limits (ulimit)", soft, fields.get(used, 0), "process", note=note, metric=used)
        for name, row, used in kinds
        if (soft := limits.get(row, (None, None))[0]) is not None
    )
