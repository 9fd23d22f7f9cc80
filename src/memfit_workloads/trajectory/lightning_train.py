"""The same training in Lightning, with memfit's adapter: it stops at SIGTERM, goes on, and ends with the same weights.

    memfit run src/memfit_workloads/trajectory/config.yaml --until teacher
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

from memfit.config import resolve, resolve_nested
from memfit.errors import MemfitError, MissingExtraError, UsageError
from memfit.pipeline import RunConfig
from memfit.training import seed_everything
from memfit_workloads.trajectory.data import Scenes
from memfit_workloads.trajectory.params import TrajectoryParams
from memfit_workloads.trajectory.training import ScorerLoss, build

try:
    from lightning.pytorch import LightningModule, Trainer
except ModuleNotFoundError as error:
    raise MissingExtraError.of("lightning", "lightning", __name__) from error

from memfit.integrations.lightning import Exact


class Scorer(LightningModule):
    """The scorer of trajectories, its loss and its optimizer."""

    def __init__(self, paths: Any, params: TrajectoryParams) -> None:
        super().__init__()
        self.net = build(paths, params)
        self.loss = ScorerLoss(params.model.temperature, params.model.teacher_weight)
        self.learning_rate = params.trainer.params.learning_rate

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the mean loss of a batch."""
        total, weight = self.loss(self.net, batch)
        return total / weight

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the mean loss as ``valid_loss``."""
        total, weight = self.loss(self.net, batch)
        self.log("valid_loss", total / weight, batch_size=weight, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the workload."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, foreach=False)


def train(folder: Path, words: Sequence[str], out: Path, *, seed: int = 1, every: int = 50) -> Scorer:
    """Train from the newest checkpoint, and return the module.

    Args:
        folder: A run of the workload, or the folder of its experiment.
        words: Params as ``name=value``; what is not named is as in that run.
        out: Where checkpoints are kept.
        seed: All random numbers follow from it.
        every: A checkpoint after so many optimizer steps.

    Raises:
        UsageError: The folder holds no run with a teacher table.
        StoppedError: A signal asked for it; the same call goes on.
    """
    runs = [one for one in (folder, *sorted(folder.glob("run_*"), reverse=True)) if (one / "checkpoints").is_dir()]
    given = next((one for one in runs if (one / "checkpoints/stage_vocabulary").is_dir()), None)
    if given is None:
        raise UsageError(
            f"{folder} holds no run with a vocabulary.",
            rule="the training reads what the stages prepare, vocabulary and teacher have left.",
            remedy="memfit run src/memfit_workloads/trajectory/config.yaml --until teacher",
        )
    kept = given / "checkpoints"
    config = resolve(RunConfig, file=given / "config.yaml", env={}, overrides=[f"params.{one}" for one in words])
    params = resolve_nested(config, "params", TrajectoryParams).value
    places = [
        (kept / f"prepare_{one}/scenes.arrays", kept / f"teacher_{one}/teacher.npy") for one in params.data.places
    ]
    settings, size = params.trainer.params, int(os.environ.get("WORLD_SIZE", "1"))
    seed_everything(seed)
    module = Scorer(np.load(kept / "stage_vocabulary/vocabulary.arrays/paths.npy"), params)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = Trainer(
        max_epochs=settings.max_epochs,
        accumulate_grad_batches=settings.accumulate_grad_batches,
        precision=settings.precision,
        gradient_clip_val=settings.gradient_clip_val,
        strategy="ddp" if size > 1 else "auto",
        devices=here if size > 1 else 1,
        num_nodes=max(1, size // here),
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = params.dataloader.params
    scenes: dict[str, Any] = {split: Scenes(places, split) for split in ("train", "valid")}
    loaders = [
        DataLoader(one, loader.batch_size // size, split == "train", num_workers=loader.num_workers)
        for split, one in scenes.items()
    ]
    Exact(out, seed=seed, every=every).fit(trainer, module, *loaders)
    if trainer.is_global_zero:
        loss = trainer.callback_metrics.get("valid_loss")
        print(f"valid_loss {loss:.4f}" if loss is not None else "done before", flush=True)
    return module


def main() -> int:
    """Train as the command line says, and print a digest of the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run of the workload, or the folder of its experiment")
    parser.add_argument("params", nargs="*", metavar="NAME=VALUE", help="such as trainer.params.max_epochs=2")
    parser.add_argument("--out", type=Path, default=Path("lightning"), help="where checkpoints are kept (lightning)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=50, help="a checkpoint after so many optimizer steps (50)")
    given = parser.parse_intermixed_args()
    try:
        module = train(given.run, given.params, given.out, seed=given.seed, every=given.every)
    except MemfitError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if os.environ.get("RANK", "0") == "0":
        weights = b"".join(one.detach().numpy().tobytes() for one in module.parameters())
        print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
