"""Which devices a job gets, and what it is told of them."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from memfit.jobs._job import Job
from memfit.jobs._reservation import Wait
from memfit.memory import HOST, Device, Lendable, Sizes

#: torch reads the first that is set.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_FRACTION = "per_process_memory_fraction"
#: The first torch that knows this setting; an earlier one refuses to start with it.
_FIRST_TORCH = (2, 10)


def choose(
    rooms: Mapping[str, Lendable], num_devices: int, needed_bytes: int | None, held: Container[str]
) -> Sizes | Wait:
    """Return what a job reserves on each of its devices, which are those with the most room; or why it gets none.

    One of unknown size gets all that may be lent of devices on which no other job is. CUDA gives a process one MIG
    instance at most, so a job that needs several devices gets whole GPUs.

    Args:
        rooms: What may be lent at each place.
        num_devices: How many devices the job needs.
        needed_bytes: What it needs of each; None when that is not known.
        held: The devices of which other jobs hold a part.

    Source: NVIDIA MIG User Guide, CUDA_VISIBLE_DEVICES: "CUDA can only enumerate a single compute instance".

    >>> rooms = {"GPU-a": Lendable(900, 100, 0), "GPU-b": Lendable(700, 100, 0), "GPU-c": Lendable(500, 100, 0)}
    >>> choose(rooms, 2, 300, held=()), choose(rooms, 2, None, held={"GPU-b"})
    (Counter({'GPU-a': 300, 'GPU-b': 300}), Counter({'GPU-a': 800, 'GPU-c': 400}))
    >>> choose(rooms, 4, 300, held=()).reason
    'it needs 4 GPUs and 3 are here'
    """
    devices = [place for place in rooms if place != HOST]
    if num_devices > 1 and any(place.startswith("MIG-") for place in devices):
        devices = [place for place in devices if not place.startswith("MIG-")]
        if len(devices) < num_devices:
            here = f"{len(devices)} whole ones are here, beside MIG instances"
            reason = f"it needs {count_gpus(num_devices)} and {here}: a process can use only one MIG instance"
            return Wait("device", reason)
    if len(devices) < num_devices:
        return Wait("device", f"it needs {count_gpus(num_devices)} and {len(devices)} are here")
    if needed_bytes is None:
        devices = [place for place in devices if place not in held]
    if len(devices) < num_devices:
        reason = f"it needs {count_gpus(num_devices)} for itself, for its size there is unknown"
        return Wait("device", reason, f"{len(devices)} have no other job")
    chosen = sorted(devices, key=lambda place: -rooms[place].bytes)[:num_devices]
    return Counter({place: max(1, rooms[place].bytes) if needed_bytes is None else needed_bytes for place in chosen})


def count_gpus(num: int) -> str:
    """Return a number of GPUs in words."""
    return "1 GPU" if num == 1 else f"{num} GPUs"


def device_env(
    job: Job, given: Sequence[str], most: Sizes, devices: Sequence[Device], *, env: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables that show a job its devices alone, and have its torch refuse to take more of them.

    torch takes one fraction for all devices of a process; what other processes and the driver take of a device does
    not count against it.

    Args:
        job: The job.
        given: Its devices, by UUID.
        most: What it may take of each; nothing stands for all.
        devices: All devices here.
        env: What the job's environment is made of.

    Source: torch 2.13, c10/cuda/CUDAAllocatorConfig.h.
    """
    told = {"CUDA_VISIBLE_DEVICES": ",".join(given)}
    fraction = min([1.0, *(most[one.uuid] / one.total_bytes for one in devices if one.uuid in most)])
    own = job.cuda_allocator or next(filter(None, map(env.get, _ALLOCATOR)), "")
    if fraction >= 1 or _FRACTION in own or not _knows_fraction(job):
        return told
    return told | dict.fromkeys(_ALLOCATOR, f"{own}{own and ','}{_FRACTION}:{fraction:.4f}")


def _knows_fraction(job: Job) -> bool:
    """Whether the torch that the job will load knows the fraction: it is the one beside this interpreter."""
    if job.command:
        program = shutil.which(job.command[0])
        if program is None or Path(program).parent != Path(sys.executable).parent:
            return False
    try:
        found = re.match(r"(\d+)\.(\d+)", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return False
    return found is not None and (int(found[1]), int(found[2])) >= _FIRST_TORCH
