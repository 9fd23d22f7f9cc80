"""The same training in Lightning, with memfit's adapter: it stops at SIGTERM, goes on, and ends with the same weights.

    memfit run systems/memfit_workloads/trajectory/config.yaml --until teacher
    python -m memfit_workloads.trajectory.lightning_train runs/trajectory dataloader.params.batch_size=16

The first argument is the run, or its experiment's folder: its scenes and its teacher table are mapped. The words behind
it set params of the config by their names. On several ranks: ``memfit run --nproc 2 -- python -m ...``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from memfit.integrations.lightning import Exact  # first: it says how Lightning is installed

# isort: split
from lightning.pytorch import LightningModule, Trainer

from memfit.config import resolve, resolve_nested
from memfit.errors import UsageError
from memfit.pipeline import RunConfig
from memfit.training import seed_everything
from memfit_workloads.trajectory.data import Scenes
from memfit_workloads.trajectory.model import TrajectoryScorer
from memfit_workloads.trajectory.params import TrajectoryParams
from memfit_workloads.trajectory.training import scorer_loss


class Scorer(LightningModule):
    """The scorer of trajectories, its loss and its optimizer."""

    def __init__(self, paths: Any, params: TrajectoryParams) -> None:
        super().__init__()
        self.net = TrajectoryScorer(paths, params.data.num_history, params.model.width)
        self.params = params

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        total, weight = scorer_loss(self.params.model, self.net, batch)
        return total / weight

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        total, weight = scorer_loss(self.params.model, self.net, batch)
        self.log("valid_loss", total / weight, batch_size=weight, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.params.trainer.params.learning_rate, foreach=False)


def train(folder: Path, words: Sequence[str], out: Path, *, seed: int = 1, every: int = 50) -> Scorer:
    """Train from the newest checkpoint, kept in ``out`` after ``every`` optimizer steps, and return the module.

    ``folder`` is a run of the workload, or that of its experiment; ``words`` are params as ``name=value``.

    Raises:
        UsageError: The folder holds no run with a teacher table.
        StoppedError: A signal asked for it; the same call goes on.
    """
    tables = sorted(folder.glob("**/checkpoints/teacher_*/teacher.npy"))
    if not tables:
        raise UsageError(
            f"{folder} holds no run with a teacher table.",
            rule="the training reads what the stages prepare, vocabulary and teacher have left.",
            remedy="memfit run systems/memfit_workloads/trajectory/config.yaml --until teacher",
        )
    kept = tables[-1].parents[1]
    own = [f"params.{one}" for one in words]
    config = resolve(RunConfig, file=kept.with_name("config.yaml"), env={}, overrides=own)
    params = resolve_nested(config, "params", TrajectoryParams).value
    settings, loader = params.trainer.params, params.dataloader.params
    size, here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    seed_everything(seed)
    module = Scorer(np.load(kept / "stage_vocabulary/vocabulary.arrays/paths.npy"), params)
    trainer = Trainer(
        **settings.model_dump(exclude={"strategy", "learning_rate"}),
        strategy=settings.strategy if size > 1 else "auto",
        devices=here,
        num_nodes=size // here,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    places = [(kept / one.parent.name.replace("teacher", "prepare", 1) / "scenes.arrays", one)
              for one in tables if one.is_relative_to(kept)]  # fmt: skip
    scenes: list[Any] = [Scenes(places, split) for split in ("train", "valid")]
    loaders = [
        DataLoader(one, loader.batch_size // size, one.split == "train", num_workers=loader.num_workers)
        for one in scenes
    ]
    Exact(out, seed=seed, every=every).fit(trainer, module, *loaders)
    if trainer.is_global_zero:
        weights = b"".join(one.detach().numpy().tobytes() for one in module.parameters())
        loss = trainer.callback_metrics.get("valid_loss")
        print(f"valid_loss {loss:.4f}" if loss is not None else "done before")
        print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
    return module


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", metavar="RUN", type=Path, help="a run of the workload, or the folder of its experiment"
    )
    parser.add_argument("words", nargs="*", metavar="NAME=VALUE", help="such as trainer.params.max_epochs=2")
    parser.add_argument("--out", type=Path, default=Path("lightning"), help="where checkpoints are kept (lightning)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=50, help="a checkpoint after so many optimizer steps (50)")
    try:
        train(**vars(parser.parse_intermixed_args()))
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
