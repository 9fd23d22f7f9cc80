"""Train the scorer on one process or on several ranks, and let it choose trajectories."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits, log_softmax, logsigmoid, softmax
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from memfit.pipeline import Context
from memfit.rundir import phase
from memfit.training import Trainer, checkpoint_path, find_device, load_checkpoint, seed_everything
from memfit_workloads import own
from memfit_workloads.trajectory.data import INPUTS, SPLITS, Scenes
from memfit_workloads.trajectory.model import distances
from memfit_workloads.trajectory.params import ModelParams, TrajectoryParams

#: How much each teacher head counts beside the imitation head when a trajectory is chosen.
_TEACHER_SHARES = (1.0, 1.0, 0.2, 0.2)
_NUM_MODES, _APART_METRES = 6, 2.0


def scenes_of(context: Context, split: str) -> Scenes:
    """Return the scenes of a split from the stages ``prepare`` and ``teacher``."""
    places = zip(context.units("prepare"), context.units("teacher"), strict=True)
    return Scenes([(one.path("scenes"), table.path("teacher")) for one, table in places], split)


def loader(
    scenes: Scenes, params: TrajectoryParams, seed: int, num_ranks: int = 1, num_workers: int | None = None
) -> DataLoader[Any]:
    """Return batches of history, raster, future and teacher; of those to train on in another order each epoch."""
    settings = params.dataloader.params
    num_workers = settings.num_workers if num_workers is None else num_workers
    global_size = settings.batch_size * num_ranks  # of which a `Trainer` deals each rank its part
    return own.batches(scenes, seed, global_size, num_workers, shuffle=scenes.split == "train")


def new_model(params: TrajectoryParams, vocabulary: Any) -> Any:
    """Return a network that scores the trajectories of a vocabulary (K, F, 2)."""
    paths, data = np.array(vocabulary, np.float32), params.data
    sizes = {"num_history": data.num_history, "num_future": data.num_future, "raster_size": data.raster_size}
    model: Any = own.build(params.model, vocabulary=paths, **sizes)
    if not hasattr(model, "vocabulary"):  # the loss reads it
        model.register_buffer("vocabulary", torch.from_numpy(paths), persistent=False)
    return model


def training_step(context: Context, params: TrajectoryParams) -> Callable[[Any], None]:
    """Return one step of a training, without what a trainer does around it."""
    model = new_model(params, context["vocabulary"].arrays("vocabulary")["paths"]).to(find_device("auto"))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    return own.step_of(model, optimizer, functools.partial(scorer_loss, params.model))


def scorer_loss(params: ModelParams, model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    """Return the summed loss of a batch and its number of scenes, as ``memfit.training.Trainer`` takes them.

    The imitation head is to spread its mass over the entries by their mean distance to the driven trajectory: the
    softmax of minus the distance in units of ``temperature`` metres. The teacher heads are to say the table's scores.
    """
    history, raster, future, teacher = batch
    scores = answer(model, history, raster)
    target = softmax(-distances(model.vocabulary, future).mean(-1) / params.temperature, dim=1)
    imitation = -(target * log_softmax(scores[:, 0], dim=1)).sum()
    taught = binary_cross_entropy_with_logits(scores[:, 1:], teacher.float(), reduction="none").mean((1, 2)).sum()
    return imitation + params.teacher_weight * taught, len(history)


def answer(model: Any, *inputs: torch.Tensor) -> torch.Tensor:
    """Return what a network says of histories (B, H, 2) and rasters (B, 3, R, R): log-odds (B, 5, K)."""
    return own.call(model, INPUTS, dict(zip(INPUTS, inputs, strict=True)).__getitem__).float()


def train(context: Context, params: TrajectoryParams) -> dict[str, Any]:
    """Train the scorer of a seed; save the weights of its best epoch as ``best``.

    Returns:
        ``best_epoch``, ``train_loss`` of the last epoch, ``valid_loss`` of the best; ``num_train``.
    """
    phase("load")
    seed_everything(context.seed)
    settings, device = params.trainer.params, find_device("auto")
    paths = context["vocabulary"].arrays("vocabulary")["paths"]
    model, num_ranks = new_model(params, paths).to(device), dist.get_world_size() if dist.is_initialized() else 1
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    trainer = Trainer(
        model,
        loss=functools.partial(scorer_loss, params.model),
        optimizer=torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, foreach=False),
        device=device,
        precision="bf16-mixed" if settings.precision == "bf16-mixed" else None,
        seed=context.seed,
        global_batch_size=params.dataloader.params.batch_size * num_ranks * settings.accumulate_grad_batches,
        checkpoint_dir=context.dir,
        max_grad_norm=settings.gradient_clip_val,
    )
    scenes = [scenes_of(context, split) for split in ("train", "valid")]
    batches = loader(scenes[0], params, context.seed, num_ranks), loader(scenes[1], params, context.seed)
    result = trainer.fit(*batches, num_epochs=settings.max_epochs)
    context.save("best", checkpoint_path(context.dir / "best"))
    return {
        "best_epoch": result.best_epoch,
        "train_loss": result.history[-1].train_loss,
        "valid_loss": min(epoch.metrics["valid_loss"] for epoch in result.history if epoch.metrics is not None),
        "num_train": len(scenes[0]),
    }


@torch.no_grad()
def choose(context: Context, params: TrajectoryParams) -> dict[str, Any]:
    """Let the best weights of a seed choose trajectories for the scenes that nothing was trained on.

    Saves for each such split ``chosen_<split>`` (n, 6): entries of the vocabulary, the best first, each with its end
    at least 2 m from those before it.
    """
    phase("validate")
    paths = context["vocabulary"].arrays("vocabulary")["paths"]
    model, device = new_model(params, paths), find_device("auto")
    model.load_state_dict(load_checkpoint(context["train"].path("best"))["model"])
    model = model.to(device).eval()
    ends = torch.from_numpy(np.array(paths[:, -1], np.float32))
    is_near, shares = torch.cdist(ends, ends) < _APART_METRES, torch.tensor(_TEACHER_SHARES)[:, None]
    found = {split: np.zeros((0, _NUM_MODES), np.int64) for split in SPLITS[2:]}
    for split in found:
        for history, raster, *_ in loader(scenes_of(context, split), params, 0):
            scores = answer(model, history.to(device), raster.to(device)).cpu()
            total, picked = log_softmax(scores[:, 0], dim=1) + (shares * logsigmoid(scores[:, 1:])).sum(1), []
            for _ in range(_NUM_MODES):
                picked.append(total.argmax(1))
                total = total - 1e6 * is_near[picked[-1]]
            found[split] = np.concatenate([found[split], torch.stack(picked, dim=1).numpy()])
    context.save("chosen", found)
    return {f"num_{split}": len(one) for split, one in found.items()}
