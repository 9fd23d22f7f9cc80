"""The memory budget: every limit that holds here with its source, the smallest first."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from memfit.errors import UsageError
from memfit.memory import _cgroup
from memfit.memory._devices import Device, read_devices, real_nvml
from memfit.memory._host import (
    REAL_ROOT,
    Host,
    Limit,
    SharedMemory,
    Swap,
    limit,
    parse_cpu_list,
    parse_pairs,
    parse_status,
    read_host,
    read_rlimits,
    read_text,
)
from memfit.memory._slurm import cpus_on_node, read_slurm
from memfit.memory._walls import find_base
from memfit.units import GIB, MIB, format_bytes

Permission = Literal["cgroup v1", "cgroup v2", "none"]


@dataclass(frozen=True)
class Budget:
    """The memory that may be used here. Device memory stands apart and is never added to it.

    Attributes:
        limits: Every limit on host memory, the binding one first, then by headroom; those that never bind last.
        reserve_bytes: What is kept free.
        reserve_note: How the reserve was worked out.
        swap: Swap space; shown and never used for jobs.
        shm: /dev/shm, or None where there is none.
        devices: The GPUs that this process may use, with the processes of others on them.
        num_cpus: CPUs, by affinity, by the groups' CPU quota and by Slurm.
        cpus_source: Which of these is the smallest.
        permission: Which control groups can be made here.
        promise: What holds under that permission, in words.
        cgroup: The group of this process, as ``cgroup v2 /path``; empty where there is none.
        notes: What else a reader must know.

    Example:
        >>> budget = Budget.read(cap_bytes=8 << 20)
        >>> budget.binding.name, budget.limit_bytes
        ('cap', 8388608)
    """

    limits: tuple[Limit, ...]
    reserve_bytes: int
    reserve_note: str
    swap: Swap
    shm: SharedMemory | None
    devices: tuple[Device, ...]
    num_cpus: int
    cpus_source: str
    permission: Permission
    promise: str
    cgroup: str
    notes: tuple[str, ...] = ()

    @classmethod
    def read(
        cls,
        *,
        root: Path = REAL_ROOT,
        env: Mapping[str, str] | None = None,
        cap_bytes: int | None = None,
        cap_used_bytes: int = 0,
        reserve_bytes: int | None = None,
        nvml: Any = None,
        last: Budget | None = None,
    ) -> Budget:
        """Read every limit that holds for this process now.

        Args:
            root: The folder above proc and sys; another one than ``/`` is a recorded tree.
            env: The environment; this process's own when None.
            cap_bytes: The user's own limit on what memfit starts from here on.
            cap_used_bytes: What that takes already.
            reserve_bytes: What to keep free; worked out when None.
            nvml: A module with nvidia-ml-py's names; that package when None, and for a recorded tree none.
            last: An earlier reading, from which the CPUs and the permission are taken: they stay as long as a process
                lives.

        Raises:
            UsageError: If a size is not possible, or the recorded tree holds no proc/meminfo.
        """
        _check_sizes(cap_bytes, reserve_bytes)
        env = os.environ if env is None else env
        host, placement = read_host(root), _cgroup.locate(root, "memory")
        found = _collect(root, env, host, placement)
        if cap_bytes is not None:
            note = "counts what memfit starts from here on"
            found.append(limit("cap", "the user", cap_bytes, cap_used_bytes, "job", note=note))
        limits = tuple(
            sorted((_judge(one, host) for one in found), key=lambda one: (not one.binds, one.headroom_bytes))
        )
        rooms = [(host.swap.free_bytes, host.swap.source), *(_cgroup.swap_rooms(placement) if placement else ())]
        usable, swap_source = min(rooms, key=lambda room: room[0])
        swap = replace(host.swap, usable_bytes=usable, source=swap_source)
        default_reserve, reserve_note = default_reserve_of(limits[0], swap)
        nvml = real_nvml() if nvml is None and root == REAL_ROOT else nvml
        devices, device_note = read_devices(nvml, root=root, env=env) if nvml is not None else ((), "")
        num_cpus, cpus_source = (last.num_cpus, last.cpus_source) if last else _cpus(root, env)
        permission, promise = (last.permission, last.promise) if last else _permission(root, placement)
        return cls(
            limits=limits,
            reserve_bytes=default_reserve if reserve_bytes is None else reserve_bytes,
            reserve_note=reserve_note if reserve_bytes is None else "set by the user",
            swap=swap,
            shm=host.shm,
            devices=devices,
            num_cpus=num_cpus,
            cpus_source=cpus_source,
            permission=permission,
            promise=promise,
            cgroup=f"cgroup v{placement.version} {placement.groups[0].path}" if placement else "",
            notes=tuple(note for note in (_hidden_note(placement), device_note) if note),
        )

    @property
    def binding(self) -> Limit:
        """The limit with the smallest headroom."""
        return self.limits[0]

    @property
    def limit_bytes(self) -> int:
        """The binding limit."""
        return self.binding.limit_bytes

    @property
    def headroom_bytes(self) -> int:
        """What is left of the binding limit, the reserve still in it."""
        return self.binding.headroom_bytes

    @property
    def lendable_bytes(self) -> int:
        """What jobs may get: the headroom without the reserve, and never below 0."""
        return max(0, self.headroom_bytes - self.reserve_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form; every size is in bytes."""
        figures = {name: getattr(self, name) for name in ("limit_bytes", "headroom_bytes", "lendable_bytes")}
        return {"binding": asdict(self.binding), **figures, **asdict(self)}


def default_reserve_of(binding: Limit, swap: Swap) -> tuple[int, str]:
    """Return the reserve, and its arithmetic in words. It covers the supervisor, what the kernel charges in batches per
    CPU, and what is measured late. An eighth of the limit is the most, so that a small container can be used."""
    percent, why = (2, "swap can be used") if swap.usable_bytes else (4, "no swap can be used")
    share, ceiling = binding.limit_bytes * percent // 100, binding.limit_bytes // 8
    wanted = min(max(share, 256 * MIB), 4 * GIB)
    text = f"{percent} % of {format_bytes(binding.limit_bytes)} ({why}) = {format_bytes(share)}"
    if wanted != share:
        text += f", kept between 256 MiB and 4 GiB = {format_bytes(wanted)}"
    if ceiling < wanted:
        text += f", at most an eighth of the limit = {format_bytes(ceiling)}"
    return min(wanted, ceiling), text


def _check_sizes(cap_bytes: int | None, reserve_bytes: int | None) -> None:
    if cap_bytes is not None and cap_bytes <= 0:
        raise UsageError(
            f"a limit of {cap_bytes} bytes leaves nothing to use.",
            rule="a limit on memory is larger than 0.",
            remedy="pass for example --limit 8GiB",
        )
    if reserve_bytes is not None and reserve_bytes < 0:
        raise UsageError(
            f"a reserve of {reserve_bytes} bytes is not possible.",
            rule="the reserve is 0 or larger.",
            remedy="pass for example --reserve 512MiB",
        )


def _collect(root: Path, env: Mapping[str, str], host: Host, placement: _cgroup.Placement | None) -> list[Limit]:
    fields = parse_pairs(read_text(root / "proc/self/status"))
    found = [*(_cgroup.read_group_limits(placement) if placement else ()), *host.limits]
    found += read_slurm(env, *_job_used(placement, env.get("SLURM_JOB_ID", ""), fields))
    return [*found, *read_rlimits(root, fields)]


def _judge(one: Limit, host: Host) -> Limit:
    """Mark a limit as never binding when it allows more than the machine has."""
    if one.scope not in ("group", "job") or one.limit_bytes <= host.total_bytes:
        return one
    note = f"larger than the host's memory ({format_bytes(host.total_bytes)}): never binds"
    return replace(one, binds=False, note="; ".join(filter(None, (note, one.note))))


def _job_used(placement: _cgroup.Placement | None, job: str, fields: Mapping[str, int]) -> tuple[int, str, str]:
    """Return what this Slurm job uses already: its group where there is one, with its id, else this process alone."""
    if placement and job:
        for group in placement.groups:
            if group.path.rpartition("/")[2] == f"job_{job}":
                return _cgroup.group_used(group.directory, placement.version), "", _cgroup.group_id(group.directory)
    return fields.get("RssAnon", 0) + fields.get("RssShmem", 0), "used counts this process only", ""


def _cpus(root: Path, env: Mapping[str, str]) -> tuple[int, str]:
    allowed = parse_status(read_text(root / "proc/self/status")).get("Cpus_allowed_list", "")
    counts = [(parse_cpu_list(allowed), "affinity") if allowed else (os.cpu_count() or 1, "the operating system")]
    if quota := _cgroup.cpu_quota(root):
        counts.append((max(1, int(quota[0])), f"CPU quota {quota[0]:g} of {quota[1]}"))
    if granted := cpus_on_node(env):
        counts.append((granted, "Slurm"))
    return min(counts, key=lambda count: count[0])


def _permission(root: Path, placement: _cgroup.Placement | None) -> tuple[Permission, str]:
    base = find_base(root, placement)
    if isinstance(base, str):
        return "none", (
            f"no job can have a cgroup limit here ({base}); memfit measures the jobs, limits their data segment and "
            "lets the kernel kill a job before other programs, but a fast burst can still be killed"
        )
    where = f"each job has a limit of its own in a cgroup v{base.version} group below {base.group.path}; "
    if base.version == 1:
        return "cgroup v1", where + (
            "at that limit the kernel makes the job wait and does not kill it, but a fork or a write to /dev/shm fails"
        )
    return "cgroup v2", where + (
        "at that limit the kernel slows the job down and does not kill it, unless a burst goes beyond it by half and "
        "by 256 MiB"
    )


def _hidden_note(placement: _cgroup.Placement | None) -> str:
    if placement is None or not placement.hidden or placement.version == 1:
        return ""  # v1 shows what hidden ancestors enforce, in hierarchical_memory_limit.
    return f"groups above cgroup v2 {placement.groups[-1].path} are hidden here; a smaller limit there cannot be read"
