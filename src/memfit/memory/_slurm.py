"""Reads what Slurm granted from the variables that it sets in a job."""

from __future__ import annotations

import re
from collections.abc import Mapping

from memfit.memory._host import Limit, limit
from memfit.units import MIB


def cpus_on_node(env: Mapping[str, str]) -> int | None:
    """Return the CPUs that the job has on this node, the fewest of all nodes in an ``salloc``; None outside of Slurm.
    >>> cpus_on_node({"SLURM_CPUS_ON_NODE": "4"}), cpus_on_node({"SLURM_JOB_CPUS_PER_NODE": "16(x2),8"})
    (4, 8)
    """
    counts = env.get("SLURM_CPUS_ON_NODE") or env.get("SLURM_JOB_CPUS_PER_NODE", "")
    return min((int(one) for one in re.findall(r"(?:^|,)(\d+)", counts)), default=None)


def gpus_on_node(env: Mapping[str, str]) -> int | None:
    """Return the GPUs that the job has on this node, or None where no variable says so.
    >>> gpus_on_node({"SLURM_GPUS_PER_NODE": "a100:4"}), gpus_on_node({"SLURM_STEP_GPUS": "0,2"})
    (4, 2)
    """
    if (text := env.get("SLURM_GPUS_ON_NODE", "")).isdigit():
        return int(text)
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if text := env.get(name, ""):
            return len(text.split(","))
    if text := env.get("SLURM_GPUS_PER_NODE", ""):
        tails = (part.rpartition(":")[2] for part in text.split(","))
        return sum(int(tail) if tail.isdigit() else 1 for tail in tails)
    return None


def visible_gpus(env: Mapping[str, str], num_gpus: int) -> str | None:
    """Return which of the host's GPUs a process may use, as CUDA_VISIBLE_DEVICES does; None for all ``num_gpus``.

    A cluster may grant GPUs without that variable. If it shows a job no others, Slurm's numbers are not those of here.

    Source: gres.conf(5), ``Flags=no_gpu_env``; cgroup.conf(5), ``ConstrainDevices``.

    >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "1", "SLURM_STEP_GPUS": "3"}, 4), visible_gpus({}, 4)
    ('1', None)
    >>> visible_gpus({"SLURM_JOB_GPUS": "2,3"}, 4), visible_gpus({"SLURM_JOB_GPUS": "2,3"}, 2)
    ('2,3', None)
    """
    if (visible := env.get("CUDA_VISIBLE_DEVICES")) is not None:
        return visible
    granted = env.get("SLURM_STEP_GPUS") or env.get("SLURM_JOB_GPUS")
    return granted if granted and granted.count(",") + 1 < num_gpus else None


def read_slurm(env: Mapping[str, str], used_bytes: int, used_note: str, id: str) -> tuple[Limit, ...]:
    """Return the memory limits that Slurm set on this node; its MB are MiB, and 0 stands for the whole node. Source:
    sbatch(1), OUTPUT ENVIRONMENT VARIABLES; ``--mem``, ``--mem-per-cpu``, ``--mem-per-gpu``.
    >>> [one] = read_slurm({"SLURM_JOB_ID": "7", "SLURM_MEM_PER_CPU": "2000", "SLURM_CPUS_ON_NODE": "4"}, 0, "", "")
    >>> one.limit_bytes == 8000 << 20, one.note
    (True, '2000 MiB x 4 CPUs on this node')
    """
    grants = (
        ("SLURM_MEM_PER_NODE", 1, ""),
        ("SLURM_MEM_PER_CPU", cpus_on_node(env), "CPUs"),
        ("SLURM_MEM_PER_GPU", gpus_on_node(env), "GPUs"),
    )
    source = f"Slurm job {env.get('SLURM_JOB_ID', '?')}"
    limits = []
    for name, count, unit in grants:
        mebibytes = int(env[name]) if env.get(name, "").isdigit() else 0
        if not mebibytes:
            continue
        notes = [used_note] if used_note else []
        if unit:
            shown = f"{count} {unit}" if count else f"1: no variable says how many {unit} are on this node"
            notes.insert(0, f"{mebibytes} MiB x {shown}" + (" on this node" if count else ""))
        if "SLURMD_NODENAME" not in env and "SLURM_PROCID" not in env and "SLURM_CPUS_ON_NODE" not in env:
            notes.append("the variables may come from salloc on another machine")
        size, note = mebibytes * (count or 1) * MIB, "; ".join(notes)
        limits.append(limit(name, source, size, used_bytes, "job", note=note, id=id))
    return tuple(limits)
