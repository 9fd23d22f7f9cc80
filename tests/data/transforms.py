"""What the tests have workers do to batches. A worker imports these by name."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np


def add_noise(windows: Any, targets: Any, generator: np.random.Generator) -> None:
    """From all three sources of randomness."""
    windows += generator.random(windows.shape, np.float32) + np.float32(np.random.random())
    targets += np.float32(random.random())


def _is_first(name: str) -> bool:
    """Whether the file that arms something was still there; exactly one process is told so."""
    try:
        Path(os.environ["LOADER_TEST_FOLDER"], name).unlink()
    except FileNotFoundError:
        return False
    return True


def kill(windows: Any, targets: Any, generator: np.random.Generator) -> None:
    if _is_first("armed"):
        os.kill(os.getpid(), signal.SIGKILL)


def leave(windows: Any, targets: Any, generator: np.random.Generator) -> None:
    if _is_first("armed"):
        os._exit(3)


def sleep(windows: Any, targets: Any, generator: np.random.Generator) -> None:
    if _is_first("armed"):
        time.sleep(10)


def lock(windows: Any, targets: Any, generator: np.random.Generator) -> None:
    if _is_first("armed"):
        taken = threading.Lock()
        taken.acquire()
        taken.acquire()


def fail(windows: Any, targets: Any, generator: np.random.Generator) -> None:
    raise ValueError("no such thing")


def exit(windows: Any, targets: Any, generator: np.random.Generator) -> None:
    sys.exit(3)


def interrupt(windows: Any, targets: Any, generator: np.random.Generator) -> None:
    raise KeyboardInterrupt


def give_back(windows: Any, targets: Any, generator: np.random.Generator) -> Any:
    return windows + 1, targets


def count(windows: Any, targets: Any, generator: np.random.Generator) -> None:
    """One line for each batch that is made."""
    with open(Path(os.environ["LOADER_TEST_FOLDER"], "made"), "a") as file:
        file.write("made\n")


def check_environment(windows: Any, targets: Any, generator: np.random.Generator) -> None:
    """One thread here (and in the server that forked this), thread limits, and Ctrl-C blocked."""
    pids = [os.getpid()] + [os.getppid()] * (b"memfit.data.workers" in Path("/proc/self/cmdline").read_bytes())
    deadline = time.monotonic() + 2  # opening a panel checks its labels in threads, which end at once
    while sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in pids) > len(pids):
        assert time.monotonic() < deadline
    for name in (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "POLARS_MAX_THREADS",
        "RAYON_NUM_THREADS",
    ):
        assert os.environ[name] == "1"
    assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
