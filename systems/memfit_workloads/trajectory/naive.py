"""The training of the trajectory model as it is often written: plain torch, and each rank loads its data for itself.

    srun python naive.py CHECKPOINTS --epochs 3 --batch_size 16

CHECKPOINTS is the folder of a run of this workload. The validation data are loaded when the first validation begins,
and the weights are saved after it. Model, loss and batches are those of the workload.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from memfit import phase
from memfit_workloads.trajectory.data import Scenes
from memfit_workloads.trajectory.model import TrajectoryScorer
from memfit_workloads.trajectory.params import ModelParams
from memfit_workloads.trajectory.training import scorer_loss


def load(folder: Path, split: str) -> Any:
    """Return the scenes of a split with their rows of the teacher table, in this process's own memory."""
    tables = sorted(folder.glob("teacher_*/teacher.npy"))
    names = [one.parent.name.replace("teacher", "prepare") for one in tables]
    scenes = Scenes([(folder / name / "scenes.arrays", one) for name, one in zip(names, tables, strict=True)], split)
    return [scenes[number] for number in range(len(scenes))]


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("folder", type=Path)
    flags.add_argument("--epochs", type=int, default=3)
    flags.add_argument("--batch_size", type=int, default=16)
    flags.add_argument("--steps", type=int, default=1 << 30)
    given = flags.parse_args()
    for name, own in (("RANK", "PROCID"), ("WORLD_SIZE", "NTASKS"), ("LOCAL_RANK", "LOCALID")):
        os.environ.setdefault(name, os.environ.get(f"SLURM_{own}", ""))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    group.init_process_group("gloo")
    rank, size = group.get_rank(), group.get_world_size()
    if rank == 0:
        print(f"epochs: {given.epochs}, batch_size: {given.batch_size}", flush=True)
    train, valid = load(given.folder, "train"), None
    paths = torch.from_numpy(np.load(given.folder / "stage_vocabulary/vocabulary.arrays/paths.npy"))
    model = DistributedDataParallel(TrajectoryScorer(paths, train[0][0].shape[0]))
    model.vocabulary, loss_of = model.module.vocabulary, partial(scorer_loss, ModelParams())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sampler: Any = DistributedSampler(train)
    loader: Any = DataLoader(train, given.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(given.epochs):
        phase("train")
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader):
            if step == given.steps:
                break
            total, weight = loss_of(model, batch)
            torch.autograd.backward(total / weight)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and (step % 20 == 19 or step + 1 == len(loader)):
                said = f"epoch {epoch + 1}/{given.epochs} step {step + 1}/{len(loader)}"
                print(f"{said} loss {total.item() / weight:.3f}", flush=True)
        phase("validate")
        if rank == 0:
            print("validation: loading its table", flush=True)
        if valid is None:
            valid = load(given.folder, "valid")
        with torch.no_grad():
            sums = [loss_of(model.module, batch)[0] for batch in DataLoader(valid, given.batch_size)]
        summed = torch.stack(sums).sum()
        group.all_reduce(summed)  # the mean over the ranks is known when all have validated
        if rank == 0:
            mean = summed.item() / size / len(valid)
            print(f"epoch {epoch + 1}/{given.epochs} valid_loss {mean:.3f}", flush=True)
            phase("checkpoint")
            torch.save(model.module.state_dict(), Path(os.environ.get("MEMFIT_CANARY", ".")) / "last.pt")
            print("saved last.pt", flush=True)
        group.barrier()
    if rank == 0:
        print("training finished", flush=True)
    group.destroy_process_group()


if __name__ == "__main__":
    main()
