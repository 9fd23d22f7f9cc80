"""A small training in torch that ends in the way named: ``torch_training.py <how>``."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MIB = 1 << 20


class Batches:
    """An endless map-style dataset whose items are as large as asked for; it keeps what it made when it leaks."""

    def __init__(self, item_bytes: int, leaks: bool = False, lock: Any = None) -> None:
        self.item_bytes, self.leaks, self.lock = item_bytes, leaks, lock
        self.held: list[Any] = []

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        import torch

        if self.lock is not None:
            self.lock.acquire()
        if self.leaks:
            self.held.append(torch.ones(4 * MIB))
        return torch.ones(self.item_bytes // 4)


def batches(dataset: Batches, **options: Any) -> Iterator[Any]:
    """The batches of one worker."""
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(dataset, num_workers=1, multiprocessing_context="fork", **options)
    return iter(loader)


def train(found: Iterator[Any]) -> None:
    """Count the batches."""
    for step, batch in enumerate(found, 1):
        print(f"epoch 1 step {step}/1000 loss {float(batch.mean()) / step:.4f}", flush=True)


def shm() -> None:
    """Batches of 12 MiB by way of a small ``/dev/shm``."""
    train(batches(Batches(4 * MIB), batch_size=3))


def leak() -> None:
    """The loader's worker keeps 16 MiB of each item."""
    train(batches(Batches(1024, leaks=True)))


def refused() -> None:
    """A tensor for which there is no address space."""
    import torch

    print("epoch 1 step 1/1000 loss 0.5", flush=True)
    print("epoch 1 step 2/1000 loss 0.4", flush=True)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_DATA, (used + 100 * MIB, used + 100 * MIB))
    print(torch.ones(256 * MIB).sum())


def disk() -> None:
    """A checkpoint that is larger than what is free in the folder that the environment names."""
    import torch

    print("epoch 1 step 1/1000 loss 0.5", flush=True)
    print("epoch 1 step 2/1000 loss 0.4", flush=True)
    print("saving checkpoint", flush=True)
    torch.save({"model": torch.ones(16 * MIB)}, Path(os.environ["CHECKPOINTS"], "checkpoint.pt"))


def deadlock() -> None:
    """A loader's worker, forked while a thread holds a lock, waits for that lock."""
    lock, is_held = multiprocessing.Lock(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            time.sleep(1000)

    threading.Thread(target=hold, daemon=True).start()
    is_held.wait()
    train(batches(Batches(1024, lock=lock), timeout=2))


WAYS: dict[str, Callable[[], None]] = {one.__name__: one for one in (shm, leak, refused, disk, deadlock)}

if __name__ == "__main__":
    WAYS[sys.argv[1]]()
