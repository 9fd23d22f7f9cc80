"""Takes memory of the stand-in GPUs as torch would: of those that are visible, up to the fraction that is set."""

import fcntl
import json
import os
import re
from pathlib import Path

import pynvml

FOLDER = Path(os.environ["STAND_IN_GPUS"])


class OutOfMemoryError(RuntimeError):
    """Reads in a log as torch's does; to load torch takes longer than all else in a job here."""

    __module__ = "torch"


def visible():
    """Return the UUIDs of the GPUs that this process sees, in its order."""
    every = json.loads((FOLDER / "gpus.json").read_text())
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(every)).split(",")


def hold(num_bytes):
    """Hold so many bytes of each visible GPU from now on, in place of what was held before.

    Raises:
        OutOfMemoryError: If a GPU has not so many, or the process may not take so many.
    """
    with open(FOLDER / "gpus.json") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        totals = json.load(file)
        found = re.search(r"per_process_memory_fraction:([\d.]+)", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
        fraction = float(found[1]) if found else 1.0
        for uuid in visible():
            others = sum(size for pid, size in pynvml.used_by_pid(uuid).items() if pid != os.getpid())
            if num_bytes > fraction * totals[uuid] or others + num_bytes > totals[uuid]:
                raise OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes / 2**30:.2f} GiB.")
        aside = FOLDER / f".{os.getpid()}"
        aside.write_text(json.dumps(dict.fromkeys(visible(), num_bytes)))
        aside.rename(FOLDER / f"{os.getpid()}.json")
