"""Train one fold, and predict the videos that it did not train on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import DataLoader

from memfit.pipeline import Context
from memfit.rundir import phase
from memfit.training import (
    BySample,
    EpochRecord,
    StepOutcome,
    Trainer,
    clean_up,
    find_device,
    load_checkpoint,
    save_checkpoint,
    seed_everything,
)
from memfit_workloads import own
from memfit_workloads.video.data import Changes, Clips, changes_by_row, num_outputs
from memfit_workloads.video.model import hash_of_weights
from memfit_workloads.video.params import CleanupParams, VideoParams
from memfit_workloads.video.scores import baselines, logits_in, metrics


def initialize_model(context: Context, params: VideoParams) -> dict[str, Any]:
    """Draw the first weights once, for all folds."""
    seed_everything(context.seed)
    model, network = new_model(context, params), params.model
    arguments = ", ".join(f"{name}={value}" for name, value in network.arguments.items())
    path = context.dir / "first_weights.pt"
    save_checkpoint(path, {"model": model.state_dict()})
    context.save("first_weights", path)
    return {
        "architecture": f"{network.target.partition(':')[2]}({arguments})",
        "seed": context.seed,
        "num_parameters": sum(one.numel() for one in model.parameters()),
        "first_weights": hash_of_weights(model),
    }


def new_model(context: Context, params: VideoParams) -> torch.nn.Module:
    sizes = {"num_outputs": num_outputs(context["load_data"].result["classes"]), "size": params.clip.size}
    return own.build(params.model, **sizes, num_frames=params.clip.num_frames)


def train_fold(context: Context, params: VideoParams) -> dict[str, Any]:
    """Train a fold from the first weights, and save the log-odds of its validation and of the test videos.

    The figures are those of the last epoch's weights: chosen before the validation videos are looked at.
    """
    phase("load")
    data = FoldData(context, params)
    model = new_model(context, params)
    model.load_state_dict(load_checkpoint(context["initialize_model"].path("first_weights"))["model"])
    settings, cleanup = params.train, params.cleanup
    trainer = Trainer(
        model,
        loss=loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=settings.learning_rate),
        device=settings.device,
        precision="auto" if settings.use_amp else None,
        seed=context.seed,
        checkpoint_dir=context.dir,
        max_grad_norm=1.0,
        split=BySample(),
        **collections(cleanup),
    )
    trainer.fit(data.train_batches(), data.batches(data.valid_rows), num_epochs=settings.num_epochs)
    phase("validate")
    valid, test = data.predict(model, data.valid_rows), data.predict(model, data.test_rows)
    train = data.predict(model, data.train_rows)
    context.save("valid_predictions", valid)
    context.save("test_predictions", test)
    found, train_accuracy = metrics(*logits_in(valid)), metrics(*logits_in(train))["accuracy"]
    found |= {"train_accuracy": train_accuracy, "gap": train_accuracy - found["accuracy"]}
    found |= baselines(data.videos, data.classes, data.train_rows, data.valid_rows)
    found |= {
        "batch_size": params.loader.batch_size,
        "microbatch_size": trainer.step.sizes.limit or params.loader.batch_size,
    }
    if cleanup.after_fold:
        clean_up()
    return found


def loss(model: torch.nn.Module, batch: Sequence[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Return the summed cross-entropy of a batch, and its number of videos."""
    frames, classes = batch
    found = answer(model, frames).float()
    if found.shape[1] > 1:
        return cross_entropy(found, classes.long(), reduction="sum"), len(classes)
    return binary_cross_entropy_with_logits(found[:, 0], classes, reduction="sum"), len(classes)


def answer(model: torch.nn.Module, frames: torch.Tensor) -> torch.Tensor:
    """Return what a network says of frames (n, num_frames, 3, size, size) of bytes."""
    return own.call(model, ["frames"], lambda name: frames)


class FoldData:
    """The videos of a fold, as rows of the table and as batches."""

    def __init__(self, context: Context, params: VideoParams) -> None:
        self.context, self.params = context, params
        self.videos = context["load_data"].table("videos")
        fold = context["create_kfold_splits"].table("splits")["fold"].to_numpy()
        own = context.unit["fold"]
        self.valid_rows = np.flatnonzero(fold == own)
        self.test_rows = np.flatnonzero(fold == 0)
        self.train_rows = np.flatnonzero((fold != own) & (fold != 0))
        self.classes = self.videos["class"].to_numpy()
        self._frames = np.load(context["create_datasets"].path("frames"), mmap_mode="r")
        self._changes = changes_by_row(
            context["generate_augmentations"].table("augmentations"), self.videos, self.train_rows.tolist()
        )
        assert not set(self._changes) & {*self.valid_rows.tolist(), *self.test_rows.tolist()}

    def train_batches(self, num_workers: int | None = None) -> DataLoader[Any]:
        """Return the batches of an epoch, in an order of their own each epoch."""
        return self._loader(self.train_rows, self._changes, num_workers, shuffle=True)

    def batches(self, rows: npt.NDArray[np.int64]) -> DataLoader[Any]:
        """Return batches of these rows' videos as they are, in order."""
        return self._loader(rows, {}, None, shuffle=False)

    @torch.no_grad()
    def predict(self, model: torch.nn.Module, rows: npt.NDArray[np.int64]) -> pa.Table:
        """Return class and log-odds of these rows' videos: of the second of two classes, or of each of more."""
        model.eval()
        device = next(model.parameters()).device
        logits = [answer(model, frames.to(device)).cpu().double().numpy() for frames, _ in self.batches(rows)]
        found = np.concatenate(logits) if logits else np.zeros((0, 1))
        listed = pa.array(found[:, 0]) if found.shape[1] == 1 else pa.array(found.tolist())
        items = self.videos["item"].take(pa.array(rows))
        return pa.table({"row": rows, "item": items, "class": self.classes[rows], "logit": listed})

    def _loader(self, rows: Any, changes: Changes, workers: int | None, *, shuffle: bool) -> DataLoader[Any]:
        recipe, clips = self.context["create_loaders"].result, Clips(rows.tolist(), self.classes, changes, self._frames)
        workers = recipe["num_workers"] if workers is None else workers
        return own.batches(clips, self.context.seed, recipe["batch_size"], workers, shuffle=shuffle)


def collections(cleanup: CleanupParams) -> dict[str, Any]:
    """Return what a `Trainer` is to call after steps and epochs."""
    steps = itertools.count(1)

    def on_step(outcome: StepOutcome) -> None:
        is_due = cleanup.every_batches is not None and next(steps) % cleanup.every_batches == 0
        if is_due or (cleanup.after_out_of_memory and outcome.num_ooms):
            clean_up()

    def on_epoch(record: EpochRecord) -> None:
        if cleanup.after_epoch:
            clean_up()

    return {"on_step": on_step, "on_epoch": on_epoch}


def loader(context: Context, params: VideoParams, num_workers: int) -> DataLoader[Any]:
    return FoldData(context, params).train_batches(num_workers)


def training_step(context: Context, params: VideoParams) -> Callable[[Any], None]:
    """Return one step of a fold's training, without what a trainer does around it."""
    model = new_model(context, params).to(find_device(params.train.device))
    return own.step_of(model, torch.optim.AdamW(model.parameters(), lr=params.train.learning_rate), loss)
