"""A training in the standard library alone that ends in the way named: ``training.py <how>``.

It counts steps as trainings do, and says nothing of how it will end.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
STEPS = 5


def train(seconds: float = 0.05) -> None:
    """A few steps."""
    for step in range(1, STEPS + 1):
        print(f"epoch 1 step {step}/100 loss {1 / step:.4f}", flush=True)
        time.sleep(seconds)


def hog(most: int = 600) -> None:
    """Touch more and more memory; pieces so small that the kernel's limit is met before an allocation fails."""
    held = []
    for _ in range(most // 4):
        held.append(bytearray(os.urandom(1) * (4 * MIB)))
        time.sleep(0.005)


def refused() -> None:
    """Ask for more address space than is allowed."""
    resource.setrlimit(resource.RLIMIT_AS, (600 * MIB, 600 * MIB))
    held = [bytearray(100 * MIB) for _ in range(20)]
    print(len(held))


def files() -> None:
    """Open more files than is allowed."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = [open("/dev/null") for _ in range(100)]  # noqa: SIM115 - they stay open, which is the fault
    print(len(held))


def disk() -> None:
    """Write a checkpoint to the folder that the environment names until nothing more fits."""
    print("saving checkpoint", flush=True)
    with open(Path(os.environ["CHECKPOINTS"], "checkpoint.bin"), "wb") as file:
        for _ in range(64):
            file.write(bytes(MIB))
            file.flush()


def segfault() -> None:
    """Read what is not there."""
    ctypes.string_at(0)


def deadlock() -> None:
    """Fork while another thread holds a lock that the child then waits for."""
    if sys.argv[2:] == ["watched"]:
        faulthandler.dump_traceback_later(1.5, exit=True)
    lock, is_held = threading.Lock(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            time.sleep(0.3)

    threading.Thread(target=hold).start()
    is_held.wait()
    child = os.fork()
    if child == 0:
        lock.acquire()
        os._exit(0)
    os.waitpid(child, 0)


def wait() -> None:
    """Train on, slowly."""
    for step in range(STEPS + 1, 1000):
        print(f"epoch 1 step {step}/1000 loss {1 / step:.4f}", flush=True)
        time.sleep(1)


def grow() -> None:
    """Take more with each step and come to a good end, if there is that much."""
    held = []
    for step in range(STEPS + 1, STEPS + 21):
        print(f"epoch 1 step {step}/25 loss {1 / step:.4f}", flush=True)
        held.append(bytearray(os.urandom(1) * (6 * MIB)))
        time.sleep(0.25)


WAYS: dict[str, Callable[[], None]] = {
    one.__name__: one for one in (hog, refused, files, disk, segfault, deadlock, wait, grow)
}

if __name__ == "__main__":
    train()
    WAYS[sys.argv[1]]()
    print("epoch 1 finished", flush=True)
