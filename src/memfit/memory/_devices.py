"""GPUs as NVML shows them: their memory, and who uses it."""

from __future__ import annotations

import importlib
import pwd
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from memfit.memory._host import descends, parse_status, read_text
from memfit.memory._slurm import visible_gpus

#: Device bytes by device UUID of the processes with these numbers.
DeviceReader = Callable[[set[int]], Mapping[str, int]]


@dataclass(frozen=True)
class DeviceProcess:
    """A process on a GPU outside of this process's tree; ``used_bytes`` is None where the driver does not say."""

    pid: int
    name: str
    used_bytes: int | None
    user: str


@dataclass(frozen=True)
class Device:
    """One GPU or MIG instance. ``index`` is the GPU's in NVML (PCI bus order), ``uuid`` what CUDA_VISIBLE_DEVICES
    takes. ``foreign_bytes`` is in use outside of this process's tree, the driver's own share included."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    foreign_bytes: int
    processes: tuple[DeviceProcess, ...]


class _Handle(NamedTuple):
    gpu: int
    uuid: str
    handle: Any


@cache
def _handles(nvml: Any) -> list[_Handle]:
    """Return the GPUs, and instead of one that is split its MIG instances; NVML stays open from here on."""
    nvml.nvmlInit()
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        found += [_Handle(index, _text(nvml.nvmlDeviceGetUUID(one)), one) for one in _instances(nvml, handle)]
    return found


def _instances(nvml: Any, handle: Any) -> list[Any]:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if current else 0
    except nvml.NVMLError:
        return [handle]
    found = []
    for number in range(count):
        with suppress(nvml.NVMLError):  # a slot without an instance
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
    return found or [handle]


def read_devices(nvml: Any, *, root: Path, env: Mapping[str, str]) -> tuple[tuple[Device, ...], str]:
    """Return the GPUs that this process may use by CUDA_VISIBLE_DEVICES or Slurm's grant, and what is missing."""
    visible = None
    try:
        handles = _handles(nvml)
        visible = visible_gpus(env, len({one.gpu for one in handles}))
        chosen = select_visible([(one.gpu, one.uuid) for one in handles], visible)
        names = {_text(nvml.nvmlDeviceGetName(one.handle)) for one in handles}
        devices = tuple(_device(nvml, handles[number], root) for number in chosen)
    except nvml.NVMLError as error:
        return (), f"no GPUs: {error}"
    by_number = any(part.strip().isdigit() for part in (visible or "").split(","))
    if len(names) > 1 and by_number and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return devices, (
            "GPUs of several kinds: CUDA numbers the fastest first; set CUDA_DEVICE_ORDER=PCI_BUS_ID to number as here"
        )
    return devices, ""


def device_reader(nvml: Any = None, *, has_devices: bool = False) -> DeviceReader | None:
    """Return a reader of device bytes by process, or None on a machine without GPUs. In a container with process
    numbers of its own, NVML gives the host's numbers and no process is found."""
    if nvml is None:
        if not has_devices and not Path("/dev/nvidiactl").exists():
            return None
        nvml = real_nvml()
    try:
        devices = _handles(nvml)
    except nvml.NVMLError:
        return None

    def read(pids: set[int]) -> dict[str, int]:
        held = {one.uuid: _processes(nvml, one.handle) for one in devices}
        return {
            uuid: sum(used[pid] or 0 for pid in used.keys() & pids) for uuid, used in held.items() if used.keys() & pids
        }

    return read


def visible_uuids(env: Mapping[str, str], nvml: Any = None) -> tuple[str, ...]:
    """Return the GPUs that a process with these variables sees, in its order: by UUID, or as they are without NVML."""
    nvml = real_nvml() if nvml is None else nvml
    try:
        handles = _handles(nvml)
    except nvml.NVMLError:
        return tuple(filter(None, (visible_gpus(env, sys.maxsize) or "").split(",")))
    visible = visible_gpus(env, len({one.gpu for one in handles}))
    return tuple(handles[number].uuid for number in select_visible([(one.gpu, one.uuid) for one in handles], visible))


def real_nvml() -> Any:
    """Return the module of nvidia-ml-py, which takes some milliseconds to import."""
    return importlib.import_module("pynvml")


def select_visible(devices: Sequence[tuple[int, str]], visible: str | None) -> list[int]:
    """Return the positions in ``devices`` (index, UUID) that CUDA_VISIBLE_DEVICES leaves visible, in its order.

    As CUDA reads it: the list ends at the first entry that names no device; a UUID may be shortened; naming a device
    twice hides all. The number of a GPU that is split into MIG instances stands for its first instance.

    Source: CUDA C++ Programming Guide, CUDA environment variables; NVIDIA MIG User Guide, CUDA_VISIBLE_DEVICES.

    >>> gpus = [(0, "GPU-8932f937-d72c"), (1, "MIG-41c8e4a7-0d6f"), (1, "MIG-9f1b")]
    >>> select_visible(gpus, None), select_visible(gpus, ""), select_visible(gpus, "1,0")
    ([0, 1, 2], [], [1, 0])
    >>> select_visible(gpus, "0,-1,1"), select_visible(gpus, "GPU-8932"), select_visible(gpus, "0,0")
    ([0], [0], [])
    """
    if visible is None:
        return list(range(len(devices)))
    chosen: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit():
            matches = [number for number, device in enumerate(devices) if device[0] == int(entry)][:1]
        else:
            named = entry.startswith(("GPU-", "MIG-"))
            matches = [number for number, device in enumerate(devices) if named and device[1].startswith(entry)]
        if len(matches) != 1:
            break
        if matches[0] in chosen:
            return []
        chosen += matches
    return chosen


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _device(nvml: Any, device: _Handle, root: Path) -> Device:
    memory = nvml.nvmlDeviceGetMemoryInfo(device.handle)
    own_pid = int(parse_status(read_text(root / "proc/self/status")).get("Pid", "0"))
    held = _processes(nvml, device.handle)
    own = {pid for pid in held if own_pid and descends(root, pid, own_pid)}
    own_bytes = sum(held[pid] or 0 for pid in own)
    foreign = (DeviceProcess(pid, *_name_and_user(root, pid, held[pid])) for pid in sorted(held.keys() - own))
    return Device(
        index=device.gpu,
        uuid=device.uuid,
        name=_text(nvml.nvmlDeviceGetName(device.handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        foreign_bytes=max(0, int(memory.total) - int(memory.free) - own_bytes),
        processes=tuple(foreign),
    )


def _processes(nvml: Any, handle: Any) -> dict[int, int | None]:
    """Return device memory by process; None where the driver does not say (WSL, some MIG setups)."""
    found: dict[int, int | None] = {}
    for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        with suppress(nvml.NVMLError):
            # A process of both kinds is listed twice with the same bytes.
            found.update({int(process.pid): process.usedGpuMemory for process in ask(handle)})
    return found


def _name_and_user(root: Path, pid: int, used: int | None) -> tuple[str, int | None, str]:
    status = parse_status(read_text(root / f"proc/{pid}/status"))
    if "Name" not in status:
        return "not visible from here (another container or user)", used, ""
    uid = status.get("Uid", "").split()[0]
    try:
        return status["Name"], used, pwd.getpwuid(int(uid)).pw_name
    except KeyError:
        return status["Name"], used, f"uid {uid}"
