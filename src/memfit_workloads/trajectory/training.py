"""Train the scorer on one process or on several ranks, and let it choose trajectories.

What another training of the same model takes from here: `scenes_of` (the mapped data of a split), `ScorerLoss`,
`build`, and `loader`. A batch is (history, raster, future, teacher) of `memfit_workloads.trajectory.data.Scenes`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits, log_softmax, logsigmoid, softmax
from torch.utils.data import DataLoader

from memfit.pipeline import Context
from memfit.rundir import phase
from memfit.training import KeyedDataset, KeyedSampler, Trainer, find_device, load_checkpoint, seed_everything
from memfit_workloads.trajectory.data import SPLITS, Scenes
from memfit_workloads.trajectory.model import TrajectoryScorer, distances
from memfit_workloads.trajectory.params import TrajectoryParams

#: How much each teacher head counts beside the imitation head when a trajectory is chosen.
_TEACHER_SHARES = (1.0, 1.0, 0.2, 0.2)
_NUM_MODES, _APART_METRES = 6, 2.0


def scenes_of(context: Context, split: str) -> Scenes:
    """Return the scenes of a split from the stages ``prepare`` and ``teacher``."""
    places = zip(context.units("prepare"), context.units("teacher"), strict=True)
    return Scenes([(one.path("scenes"), table.path("teacher")) for one, table in places], split)


def loader(scenes: Scenes, params: TrajectoryParams, seed: int, num_workers: int | None = None) -> DataLoader[Any]:
    """Return batches of scenes: those to train on in another order each epoch, others as they lie."""
    settings, items = params.dataloader.params, KeyedDataset(scenes, seed)
    workers = settings.num_workers if num_workers is None else num_workers
    return DataLoader(
        items,
        batch_size=settings.batch_size,
        sampler=KeyedSampler(items, seed, shuffle=scenes.split == "train"),
        num_workers=workers,
        multiprocessing_context="forkserver" if workers else None,
    )


def build(vocabulary: npt.NDArray[np.floating[Any]], params: TrajectoryParams) -> TrajectoryScorer:
    """Return the model for a vocabulary, shape (K, F, 2), with first weights from torch's generator."""
    trajectories = torch.from_numpy(np.array(vocabulary, np.float32))
    return TrajectoryScorer(trajectories, params.data.num_history, params.model.width)


class ScorerLoss:
    """The summed loss of a batch and its number of scenes: imitation, and agreement with the teachers.

    The imitation head is to spread its mass over the entries by their mean distance to the driven trajectory: the
    softmax of minus the distance in units of ``temperature`` metres. The teacher heads are to say the table's scores.
    """

    def __init__(self, temperature: float, teacher_weight: float) -> None:
        self.temperature, self.teacher_weight = temperature, teacher_weight

    def __call__(self, model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        """Return sum and weight, as ``memfit.training.Trainer`` takes them."""
        history, raster, future, teacher = batch
        scores = model(history, raster).float()
        target = softmax(-distances(model.vocabulary, future).mean(-1) / self.temperature, dim=1)
        imitation = -(target * log_softmax(scores[:, 0], dim=1)).sum()
        taught = binary_cross_entropy_with_logits(scores[:, 1:], teacher.float(), reduction="none").mean((1, 2)).sum()
        return imitation + self.teacher_weight * taught, len(history)


def train(context: Context, params: TrajectoryParams) -> dict[str, Any]:
    """Train the scorer of a seed; save the weights of its best epoch as ``best``.

    Returns:
        ``best_epoch``, ``num_epochs``, ``train_loss`` of the last epoch, ``valid_loss`` of the best; ``num_train``.
    """
    phase("load")
    seed_everything(context.seed)
    settings = params.trainer.params
    train_scenes, valid_scenes = scenes_of(context, "train"), scenes_of(context, "valid")
    model: Any = build(context["vocabulary"].arrays("vocabulary")["paths"], params)
    device = find_device("auto")
    model = _on_ranks(model.to(device), settings.strategy)
    trainer = Trainer(
        model,
        loss=ScorerLoss(params.model.temperature, params.model.teacher_weight),
        optimizer=torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, foreach=False),
        device=device,
        precision="bf16-mixed" if settings.precision == "bf16-mixed" else None,
        seed=context.seed,
        global_batch_size=params.dataloader.params.batch_size * settings.accumulate_grad_batches,
        checkpoint_dir=context.dir,
        max_grad_norm=settings.gradient_clip_val,
    )
    result = trainer.fit(
        loader(train_scenes, params, context.seed),
        loader(valid_scenes, params, context.seed),
        num_epochs=settings.max_epochs,
    )
    context.save("best", (context.dir / "best_model.pt").resolve())
    losses = [epoch.metrics["valid_loss"] for epoch in result.history if epoch.metrics is not None]
    return {
        "best_epoch": result.best_epoch,
        "num_epochs": len(result.history),
        "train_loss": result.history[-1].train_loss,
        "valid_loss": min(losses),
        "num_train": len(train_scenes),
    }


def _on_ranks(model: torch.nn.Module, strategy: str) -> torch.nn.Module:
    """Return the model as its group trains it; alone, as it is."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return model
    if strategy == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    return model


def load_best(path: Path, model: TrajectoryScorer) -> TrajectoryScorer:
    """Put the weights of the best epoch into a model: of one file, or of the shards of several ranks."""
    if path.is_dir():
        import torch.distributed.checkpoint as dcp

        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=path, no_dist=True)  # type: ignore[attr-defined]
    else:
        state = load_checkpoint(path)
    model.load_state_dict(state["model"])
    return model.eval()


def choose(context: Context, params: TrajectoryParams) -> dict[str, Any]:
    """Let the best weights of a seed choose trajectories for the scenes that nothing was trained on.

    Saves for each such split ``chosen_<split>`` (n, 6): entries of the vocabulary, the best first, each with its end
    at least 2 m from those before it.
    """
    phase("validate")
    vocabulary = context["vocabulary"].arrays("vocabulary")["paths"]
    model = load_best(context["train"].path("best"), build(vocabulary, params)).to(find_device("auto"))
    ends = torch.from_numpy(np.array(vocabulary[:, -1], np.float32))
    is_near = torch.cdist(ends, ends) < _APART_METRES
    found = {}
    for split in SPLITS[2:]:
        scenes = scenes_of(context, split)
        chosen = [_pick(model, batch, is_near) for batch in loader(scenes, params, 0)] if len(scenes) else []
        found[split] = np.concatenate(chosen) if chosen else np.zeros((0, _NUM_MODES), np.int64)
    context.save("chosen", found)
    return {f"num_{split}": len(one) for split, one in found.items()}


@torch.no_grad()
def _pick(model: TrajectoryScorer, batch: Any, is_near: torch.Tensor) -> npt.NDArray[np.int64]:
    history, raster, *_ = (one.to(model.vocabulary.device) for one in batch)
    scores = model(history, raster).float().cpu()
    shares = torch.tensor(_TEACHER_SHARES)[:, None]
    total = log_softmax(scores[:, 0], dim=1) + (shares * logsigmoid(scores[:, 1:])).sum(1)
    picked = []
    for _ in range(_NUM_MODES):
        picked.append(total.argmax(1))
        total = total - 1e6 * is_near[picked[-1]]
    return cast("npt.NDArray[np.int64]", torch.stack(picked, dim=1).numpy())
