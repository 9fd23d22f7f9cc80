"""What two DataLoader workers hold alone after each read all objects: ``packed_workers.py <folder> <start method>...``.

Prints for each method three sizes in bytes, of the larger worker: without objects, with packed ones, and with a list of
the same.
"""

import gc
import multiprocessing
import os
import re
import sys
from pathlib import Path

import torch

from memfit.data import pack

NUM_RECORDS = 80_000


class ReadsAll(torch.utils.data.Dataset):
    """One item for each worker, for which it reads all objects."""

    def __init__(self, objects):
        self.objects = objects

    def __len__(self):
        return 2

    def __getitem__(self, number):
        total = sum(one["id"] + len(one["text"]) + len(one["labels"]) for one in self.objects)
        rollup = Path("/proc/self/smaps_rollup").read_text()
        return os.getpid(), total, int(re.search(r"Private_Dirty:\s+(\d+) kB", rollup)[1]) << 10


def private_bytes(objects, method, total):
    gc.freeze()  # else a collection in a forked worker copies the parent's heap
    loader = torch.utils.data.DataLoader(ReadsAll(objects), None, num_workers=2, multiprocessing_context=method)
    pids, totals, sizes = zip(*loader, strict=True)
    assert len(set(pids)) == 2
    assert set(totals) == {total}
    return max(sizes)


def records():
    return ({"id": n, "text": f"record number {n}", "labels": [n, n + 1]} for n in range(NUM_RECORDS))


if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["torch", "memfit.data"])
    expected = sum(one["id"] + len(one["text"]) + 2 for one in records())
    packed = pack(records(), sys.argv[1])
    for method in sys.argv[2:]:
        empty = private_bytes([], method, 0)
        print(empty, private_bytes(packed, method, expected), private_bytes(list(records()), method, expected))
