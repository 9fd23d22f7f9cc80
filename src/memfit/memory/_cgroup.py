"""Memory limits of control groups, v1 and v2, up through every ancestor, visible or hidden.

/proc/self/cgroup names the group of this process, /proc/self/mountinfo says which part of the hierarchy is mounted
where. In a container the path is translated by the mount's root, else the group is found by its cgroup.procs.

Source: Linux Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst; cgroup_namespaces(7).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from memfit.memory._host import (
    HIDDEN,
    REAL_ROOT,
    Limit,
    Mount,
    limit,
    parse_mountinfo,
    parse_pairs,
    parse_status,
    read_text,
)

# The largest page counter, rounded down to a page of 4, 16 or 64 KiB, and the 2**64 - 1 of older kernels: all of them
# stand for "no limit". No machine has 2**62 bytes.
_UNLIMITED = 1 << 62
_MOST_GROUPS_SEARCHED = 4096

_V2_KERNEL = ("kernel_stack", "pagetables", "sec_pagetables", "percpu", "vmalloc", "slab_unreclaimable", "zswap")

_OWNERS = (
    (r"/memfit-[^/]+/job-([^/]+)$", "memfit job {}"),
    (r"job_(\d+)", "Slurm job {}"),
    (r"(?:docker-|docker/)([0-9a-f]{12})[0-9a-f]*(?:\.scope)?$", "Docker container {}"),
    (r"libpod-([0-9a-f]{12})[0-9a-f]*(?:\.scope)?(?:/container)?$", "Podman container {}"),
    (r"(?:cri-containerd|crio)-([0-9a-f]{12})[0-9a-f]*\.scope$", "Kubernetes container {}"),
    (r"kubepods.*pod([0-9a-f][0-9a-f_-]{35})/([0-9a-f]{12})[0-9a-f]*$", "Kubernetes container {1}"),
    (r"kubepods.*[-/]pod([0-9a-f][0-9a-f_-]{35})(?:\.slice)?$", "Kubernetes pod {}"),
    (r"/lxc(?:\.payload)?[./]([^/]+)$", "LXC container {}"),
    (r"([^/]+\.(?:service|scope|slice))$", "systemd unit {}"),
)


@dataclass(frozen=True)
class Group:
    path: str
    directory: Path


@dataclass(frozen=True)
class Placement:
    """Where this process (``pid`` in its own namespace, 0 if unknown) is in one hierarchy. ``groups`` has its own
    first, then each visible ancestor; ``hidden`` ones lie above the last."""

    version: int
    groups: tuple[Group, ...]
    hidden: bool
    read_only: bool
    pid: int = 0


def parse_cgroup(text: str | None) -> dict[str, str]:
    """Return the path by controller; the unified hierarchy is the controller ``""``.
    >>> parse_cgroup("4:memory:/slurm/uid_7/job_42\\n3:cpu,cpuacct:/\\n1:name=systemd:/\\n0::/init.scope\\n")
    {'memory': '/slurm/uid_7/job_42', 'cpu': '/', 'cpuacct': '/', 'name=systemd': '/', '': '/init.scope'}
    """
    paths = {}
    for line in (text or "").splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            paths.update(dict.fromkeys(fields[1].split(","), fields[2].removesuffix(" (deleted)")))
    return paths


def parse_limit(text: str | None) -> int | None:
    """Return the limit that a file holds, or None when it says unlimited or there is no file.
    >>> parse_limit("2147483648\\n"), parse_limit("max\\n"), parse_limit("9223372036854771712\\n")
    (2147483648, None, None)
    """
    value = (text or "").strip()
    return int(value) if value.isdigit() and int(value) < _UNLIMITED else None


def owner_of(path: str) -> str:
    """Return who made a group, by the names that schedulers and container engines give; empty if unknown.
    >>> owner_of("/slurm/uid_1000/job_42/step_0"), owner_of("/user.slice"), owner_of("/x")
    ('Slurm job 42', 'systemd unit user.slice', '')
    >>> owner_of("/memfit-run_1/job-job_7")
    'memfit job job_7'
    """
    for pattern, text in _OWNERS:
        if match := re.search(pattern, path):
            return text.format(*match.groups())
    return ""


def non_reclaimable_v2(stat: Mapping[str, int]) -> int:
    """Return anonymous, shared and kernel bytes of a v2 memory.stat: what reclaim cannot free without swap. ``kernel``
    (Linux 5.18) covers the single kernel figures; its reclaimable slab is taken out.
    >>> non_reclaimable_v2({"anon": 100, "file": 70, "shmem": 20, "kernel": 9, "slab_reclaimable": 4, "sock": 1})
    126
    >>> non_reclaimable_v2({"anon": 100, "kernel_stack": 2, "slab_unreclaimable": 3, "slab": 9})
    105
    """
    kernel = sum(stat.get(name, 0) for name in _V2_KERNEL)
    if "kernel" in stat:
        kernel = stat["kernel"] - stat.get("slab_reclaimable", 0)
    return sum(stat.get(name, 0) for name in ("anon", "shmem", "sock", "hugetlb")) + kernel


def non_reclaimable_v1(stat: Mapping[str, int], kernel_bytes: int) -> int:
    """Return anonymous, shared and kernel bytes of a v1 memory.stat, of the group and all below it. Before ``shmem``
    was shown, shared memory is what the anonymous LRU lists hold above ``rss``.
    >>> non_reclaimable_v1({"total_rss": 100, "total_cache": 70, "total_shmem": 20}, kernel_bytes=9)
    129
    >>> non_reclaimable_v1({"total_rss": 100, "total_active_anon": 80, "total_inactive_anon": 50}, kernel_bytes=0)
    130
    """
    rss = stat.get("total_rss", 0)
    lists = stat.get("total_active_anon", 0) + stat.get("total_inactive_anon", 0)
    return rss + stat.get("total_shmem", max(0, lists - rss)) + kernel_bytes


def locate(root: Path, controller: str, pid: int | None = None) -> Placement | None:
    """Return where this process (or ``pid``) is in the hierarchy with ``controller``; v1 wins in a hybrid layout."""
    who = root / "proc" / str(pid or "self")
    paths = parse_cgroup(read_text(who / "cgroup"))
    mounts = parse_mountinfo(read_text(root / "proc/self/mountinfo"))
    first = [mount for mount in mounts if mount.kind == "cgroup" and controller in mount.options]
    second = [mount for mount in mounts if mount.kind == "cgroup2"]
    if controller in paths and first:
        return _place(who, 1, paths[controller], first)
    return _place(who, 2, paths[""], second) if "" in paths and second else None


def _place(who: Path, version: int, path: str, mounts: list[Mount]) -> Placement:
    # A later mount hides an earlier one at its point; of several points the one with the higher root shows more.
    on_top = {mount.point: mount for mount in mounts}
    ordered = sorted(on_top.values(), key=lambda mount: len(_parts(mount.root)))
    root, pid = who.parents[1], parse_status(read_text(who / "status")).get("Pid", "")
    found = ((mount, _find(_top(root, mount), mount, path, pid)) for mount in ordered)
    mount, inner = next(((mount, inner) for mount, inner in found if inner is not None), (ordered[0], ()))
    top = _top(root, mount)
    # Only the root group has no cgroup.type in v2, and only it has a release_agent in v1.
    hidden = (top / "cgroup.type").exists() if version == 2 else not (top / "release_agent").exists()
    base = _parts(mount.root) if hidden else ()  # Seen from a namespace the root group is called "/../..".
    groups = tuple(
        Group("/" + "/".join((*base, *inner[:depth])), top.joinpath(*inner[:depth]))
        for depth in range(len(inner), -1, -1)
    )
    return Placement(version, groups, hidden, "ro" in mount.options, int(pid or 0))


def _top(root: Path, mount: Mount) -> Path:
    return root / mount.point.lstrip("/")


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split("/") if part)


def _find(top: Path, mount: Mount, path: str, pid: str) -> tuple[str, ...] | None:
    """The names that lead from the mount's top to the group of this process, or None when it is not below."""
    wanted, base = _parts(path), _parts(mount.root)
    inner = wanted[len(base) :]
    if wanted[: len(base)] == base and ".." not in inner and top.joinpath(*inner).is_dir():
        return inner
    # "/" below a mount whose root is "/../..", or a path of another namespace: only the list of members tells.
    for number, (folder, _, files) in enumerate(os.walk(top)):
        if number >= _MOST_GROUPS_SEARCHED:
            break
        if "cgroup.procs" in files and pid in (read_text(Path(folder, "cgroup.procs")) or "").split():
            return Path(folder).relative_to(top).parts
    return None


def group_id(directory: Path) -> str:
    """Return the device and inode of a group's folder, which are the same in every name space."""
    try:
        found = directory.stat()
    except OSError:
        return HIDDEN
    return f"{found.st_dev}:{found.st_ino}"


@functools.cache
def is_below(directory: Path, group: str) -> bool:
    """Return whether a folder, or one below it, has this id; True where there are too many to look at."""
    found = enumerate(os.walk(directory))
    return any(number >= _MOST_GROUPS_SEARCHED or group_id(Path(one[0])) == group for number, one in found)


def group_used(directory: Path, version: int, stat: Mapping[str, int] | None = None) -> int:
    """Return the non-reclaimable bytes of a group, its whole usage where it has no memory.stat; 0 when it is gone."""
    stat = parse_pairs(read_text(f"{directory}/memory.stat")) if stat is None else stat
    if not stat:
        usage = read_text(directory / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        return int(usage) if usage else 0
    if version == 2:
        return non_reclaimable_v2(stat)
    kernel = read_text(f"{directory}/memory.kmem.usage_in_bytes")
    return non_reclaimable_v1(stat, int(kernel) if kernel else 0)


def _source(placement: Placement, group: Group) -> str:
    owner = owner_of(group.path)
    return f"cgroup v{placement.version} {group.path}" + (f" ({owner})" if owner else "")


def read_group_limits(placement: Placement) -> Iterator[Limit]:
    if placement.version == 1:
        yield from _limits_v1(placement)
        return
    throttle = "above it the kernel throttles and reclaims, it does not kill"
    for group in placement.groups:
        for name, note in (("memory.max", ""), ("memory.high", throttle)):
            value = parse_limit(read_text(group.directory / name))
            if value is not None:
                used, id = group_used(group.directory, 2), group_id(group.directory)
                yield limit(name, _source(placement, group), value, used, "group", note=note, id=id)


def _limits_v1(placement: Placement) -> Iterator[Limit]:
    groups = placement.groups
    stats = [parse_pairs(read_text(group.directory / "memory.stat")) for group in groups]
    kinds = (
        ("memory.limit_in_bytes", "hierarchical_memory_limit", ""),
        ("memory.memsw.limit_in_bytes", "hierarchical_memsw_limit", "memory and swap together"),
    )
    for name, hierarchical, note in kinds:
        swapped = [stat.get("total_swap", 0) if note else 0 for stat in stats]
        used = [group_used(group.directory, 1) + more for group, more in zip(groups, swapped, strict=True)]
        visible = _UNLIMITED
        for group, taken in zip(groups, used, strict=True):
            value = parse_limit(read_text(group.directory / name))
            if value is not None:
                visible = min(value, visible)
                id = group_id(group.directory)
                yield limit(name, _source(placement, group), value, taken, "group", note=note, id=id)
        # What the kernel enforces on this group from wherever in the tree: smaller than all that is seen means that a
        # namespace or a bind mount hides the group that says so.
        if (value := stats[0].get(hierarchical, _UNLIMITED)) < visible:
            hidden = "set above the groups that are visible here; what others below it use is not known"
            source = f"cgroup v1, a group hidden above {groups[-1].path}"
            seen = used[-1] - swapped[-1] + swapped[0]
            yield limit(hierarchical, source, value, seen, "group", note=hidden, id=HIDDEN)


def swap_rooms(placement: Placement) -> Iterator[tuple[int, str]]:
    for group in placement.groups:
        source = _source(placement, group)
        if placement.version == 2:
            allowed = parse_limit(read_text(group.directory / "memory.swap.max"))
            if allowed is not None:
                used = int(read_text(group.directory / "memory.swap.current") or 0)
                yield max(0, allowed - used), f"memory.swap.max of {source}"
            continue
        both = parse_limit(read_text(group.directory / "memory.memsw.limit_in_bytes"))
        if both is not None:
            memory = parse_limit(read_text(group.directory / "memory.limit_in_bytes"))
            used = parse_pairs(read_text(group.directory / "memory.stat")).get("total_swap", 0)
            yield max(0, both - (memory or both) - used), f"memory.memsw.limit_in_bytes of {source}"


def cpu_quota(root: Path) -> tuple[float, str] | None:
    """Return the smallest CPU quota of this process's groups, in CPUs, and its source; None without one."""
    placement = locate(root, "cpu")
    quotas = []
    for group in placement.groups if placement else ():
        if placement and placement.version == 2:
            words = (read_text(group.directory / "cpu.max") or "").split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [(read_text(group.directory / name) or "").strip() for name in names]
        if placement and len(words) == 2 and words[0].isdigit() and words[1].isdigit():
            quotas.append((int(words[0]) / int(words[1]), _source(placement, group)))
    return min(quotas, default=None)


def memory_group(*, root: Path = REAL_ROOT) -> Path | None:
    placement = locate(root, "memory")
    return placement.groups[0].directory if placement is not None else None


def oom_kills_above(directory: Path) -> dict[Path, int]:
    """Return the OOM kills of a group and of each visible group above it, by directory, its own first."""
    kills = {}
    for group in (directory, *directory.parents):
        files = (parse_pairs(read_text(group / name)) for name in ("memory.oom_control", "memory.events"))
        found = [counters["oom_kill"] for counters in files if "oom_kill" in counters]  # of v1 or of v2
        if found:
            kills[group] = found[0]
        elif kills:
            break  # The root of v2 counts nothing, and above the mount nothing is a group.
    return kills
