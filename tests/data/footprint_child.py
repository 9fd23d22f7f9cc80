"""What DataLoaders with two workers were forecast to take and took: ``footprint_child.py <kind>:<start method>...``.

Prints a line of JSON for each: ``parts``, the forecast, and ``grown_bytes``, by how much all memory that cannot be
reclaimed grew, of this process and its workers, each page once, at the most.
"""

import json
import sys
from pathlib import Path

import numpy as np
import psutil
import torch

from memfit.data import host_footprint, pack
from memfit.memory import ProcReader

NUM_ROWS, WIDTH = 72_000, 256


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        row = self.rows[number]
        if isinstance(row, dict):
            return row["id"] + len(row["text"]) + sum(row["labels"])
        return row


def data_of(kind, folder):
    listed = ({"id": n, "text": f"record number {n}" * 4, "labels": [n, n + 1]} for n in range(NUM_ROWS))
    if kind == "list":
        return list(listed)
    if kind == "packed":
        return pack(listed, Path(folder) / f"packed{len(list(Path(folder).iterdir()))}")
    array = np.random.default_rng(0).random((NUM_ROWS // 4, WIDTH), np.float32)
    return torch.from_numpy(array) if kind == "tensor" else array


def held():
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    rollups = [ProcReader().rollup(process.pid) for process in processes]
    return sum(found.held + found.shared_memory for found in rollups if found is not None)


def measured(loader):
    before, most = held(), 0
    for number, _ in enumerate(loader):
        if number % 60 == 59 or number == len(loader) - 1:
            most = max(most, held())
    return most - before


if __name__ == "__main__":
    torch.set_num_threads(1)
    for word in sys.argv[2:]:
        kind, method = word.split(":")
        data = Rows(data_of(kind, sys.argv[1]))
        loader = torch.utils.data.DataLoader(
            data, 256, shuffle=True, num_workers=2, persistent_workers=True, multiprocessing_context=method
        )
        parts = dict(host_footprint(loader, training_bytes=None).parts)
        print(json.dumps({"parts": parts, "grown_bytes": measured(loader)}), flush=True)
        del loader, data
