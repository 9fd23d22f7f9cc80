"""Chooses the devices of a job, and shows it those alone."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from memfit.jobs._job import Job
from memfit.jobs._reservation import Wait
from memfit.memory import HOST, Device, Lendable, Sizes
from memfit.units import format_count

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch reads the first that is set
_FRACTION = "per_process_memory_fraction"
_FIRST_TORCH = (2, 10)  # the first torch that knows this setting; an earlier one refuses to start with it


def choose(
    rooms: Mapping[str, Lendable], num_devices: int, held: Container[str], *, is_unknown: bool = False
) -> list[str] | Wait:
    """Return the devices of a job, those with the most room; or why it gets none. CUDA gives a process one MIG instance
    at most, so a job that needs several devices gets whole GPUs. One of unknown size gets devices that are not ``held``
    by other jobs. Source: NVIDIA MIG User Guide, CUDA_VISIBLE_DEVICES."""
    devices, here, why = [place for place in rooms if place != HOST], "are here", ""
    if num_devices > 1 and any(place.startswith("MIG-") for place in devices):
        devices = [place for place in devices if not place.startswith("MIG-")]
        here = "whole ones are here, beside MIG instances: a process can use only one MIG instance"
    if len(devices) >= num_devices and is_unknown:
        devices = [place for place in devices if place not in held]
        here, why = "have no other job", " for itself, for its size there is unknown,"
    if len(devices) < num_devices:
        return Wait("device", f"it needs {format_count(num_devices, 'GPU')}{why} and {len(devices)} {here}")
    return sorted(devices, key=lambda place: -rooms[place].bytes)[:num_devices]


def device_env(
    job: Job, given: Sequence[str], most: Sizes, devices: Sequence[Device], *, env: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables that show a job its devices alone, and have its torch refuse to take more of them than
    ``most``. torch takes one fraction for all devices of a process; what other processes and the driver take of a
    device does not count against it. Nothing ``given`` stands for all. Source: torch 2.13,
    c10/cuda/CUDAAllocatorConfig.h."""
    found = {"CUDA_VISIBLE_DEVICES": ",".join(given)}
    fraction = min([1.0, *(most[one.uuid] / one.total_bytes for one in devices if one.uuid in most)])
    own = job.cuda_allocator or next(filter(None, map(env.get, _ALLOCATOR)), "")
    if fraction >= 1 or _FRACTION in own or not _knows_fraction(job):
        return found
    return found | dict.fromkeys(_ALLOCATOR, f"{own}{own and ','}{_FRACTION}:{fraction:.4f}")


def _knows_fraction(job: Job) -> bool:
    """Return True if the job will load the torch beside this interpreter, and that knows the fraction."""
    if job.command:
        program = shutil.which(job.command[0])
        if program is None or Path(program).parent != Path(sys.executable).parent:
            return False
    from importlib import metadata  # slow to load, and without a device of no use

    try:
        found = re.match(r"(\d+)\.(\d+)", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return False
    return found is not None and (int(found[1]), int(found[2])) >= _FIRST_TORCH
