"""Four ranks train, validate and save; with ``--copy`` each rank copies the validation data, else all map one file.

memfit run --canary --canary-args '--steps 5' --nproc 4 -- python examples/canary/train.py
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as group
from torch.nn.parallel import DistributedDataParallel

from memfit import phase

ROWS, WIDTH = 49152, 1024  # 192 MiB

flags = argparse.ArgumentParser()
flags.add_argument("--steps", type=int, default=100_000)
flags.add_argument("--copy", action="store_true")
given = flags.parse_args()

group.init_process_group("gloo")
rank = group.get_rank()
model = DistributedDataParallel(torch.nn.Linear(WIDTH, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

phase("train")
for _ in range(given.steps):
    model(torch.randn(8, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0 and not Path("valid.npy").exists():
    np.lib.format.open_memmap("valid.npy", "w+", "f4", (ROWS, WIDTH))[:] = 1.0
group.barrier()

phase("validate")
valid = np.load("valid.npy", mmap_mode="r")
if given.copy:
    valid = np.array(valid)
with torch.no_grad():
    for begin in range(0, ROWS, 8):
        model(torch.from_numpy(np.array(valid[begin : begin + 8])))

if rank == 0:
    phase("checkpoint")
    folder = Path(os.environ.get("MEMFIT_CANARY", "."))  # a canary's checkpoint is not that of the long run
    torch.save(model.state_dict(), folder / "last.pt")
group.barrier()
