"""Stands in for nvidia-ml-py: GPUs that are files, for a machine without any. Put its folder on PYTHONPATH.

``STAND_IN_GPUS`` names a folder: ``gpus.json`` holds the bytes of each GPU by UUID, ``<pid>.json`` what a process takes
of each; what process 0 takes is a stranger's. ``stand_in_cuda`` writes the latter.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace


class NVMLError(Exception):
    """Raised where the library would raise it."""


def _folder():
    return Path(os.environ["STAND_IN_GPUS"])


def _totals():
    return json.loads((_folder() / "gpus.json").read_text())


def used_by_pid(uuid):
    """Return the bytes that each living process takes of a GPU."""
    found = {}
    for path in _folder().glob("[0-9]*.json"):
        pid = int(path.stem)
        if pid == 0 or _is_alive(pid):
            found[pid] = json.loads(path.read_text()).get(uuid, 0)
    return {pid: size for pid, size in found.items() if size}


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def nvmlInit():
    """Does nothing."""


def nvmlDeviceGetCount():
    return len(_totals())


def nvmlDeviceGetHandleByIndex(index):
    return list(_totals())[index]


def nvmlDeviceGetUUID(uuid):
    return uuid


def nvmlDeviceGetName(uuid):
    return "stand-in"


def nvmlDeviceGetMemoryInfo(uuid):
    total, used = _totals()[uuid], sum(used_by_pid(uuid).values())
    return SimpleNamespace(total=total, free=total - used, used=used)


def nvmlDeviceGetMigMode(uuid):
    raise NVMLError("Not Supported")


def nvmlDeviceGetComputeRunningProcesses(uuid):
    return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in used_by_pid(uuid).items()]


def nvmlDeviceGetGraphicsRunningProcesses(uuid):
    raise NVMLError("Not Supported")
