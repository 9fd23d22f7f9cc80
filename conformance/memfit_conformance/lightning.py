"""Lightning's Trainer, as its documentation has it: ``ModelCheckpoint`` by steps, and ``ckpt_path`` of the newest."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger

from memfit_conformance import _task as task
from memfit_conformance._strike import Trace, watch_model

CHECKPOINTS = "step[=-]*"
FILES = {"model": "lightning.ckpt", "optimizer": "lightning.ckpt"}


def run(folder: Path, options: task.Options, trace: Trace, with_memfit: bool) -> None:
    """Train, from the newest checkpoint in the folder if there is one."""
    if options.version:
        lightning.__version__ = lightning.pytorch.__version__ = options.version
    trace.reach("program")
    seed_everything(0, verbose=False)
    module = _Module(options)
    watch_model(module.net, trace)
    train, valid = task.loader(options), task.loader(options, train=False)
    callbacks: list[Callback] = [_Points(trace)]
    if with_memfit:
        from memfit.integrations.lightning import Exact

        exact = Exact(folder, seed=1, every=task.EVERY)
    if not with_memfit or options.on_exception:
        callbacks.append(
            ModelCheckpoint(
                folder / "own" if with_memfit else folder,
                "{step}",
                monitor="at",
                mode="max",
                save_top_k=task.KEEP,
                every_n_train_steps=task.EVERY,
                save_on_exception=options.on_exception,
            )
        )
    evaluation = {"val_check_interval": task.EVERY * options.accumulation if options.evaluate == "steps" else 1.0}
    size = int(os.environ.get("WORLD_SIZE", 1))
    trainer = _Trainer(
        accelerator="cpu",
        devices=size,
        strategy="ddp" if size > 1 else "auto",
        max_epochs=task.EPOCHS,
        accumulate_grad_batches=options.accumulation,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        logger=_Logger(trace),
        log_every_n_steps=task.EVERY,
        limit_val_batches=None if options.evaluate != "no" else 0,
        num_sanity_val_steps=0,
        enable_checkpointing=not with_memfit or options.on_exception,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        **evaluation,
    )
    trainer.trace = trace
    trace.position = lambda: trainer.global_step
    if with_memfit:
        exact.fit(trainer, module, train, valid)
    else:
        found = sorted(folder.glob("step=*.ckpt"), key=lambda path: int(re.findall(r"\d+", path.name)[0]))
        trainer.fit(module, train, valid, ckpt_path=str(found[-1]) if found else None)
    (optimizer,), (schedule,) = trainer.optimizers, trainer.lr_scheduler_configs
    trace.end(module.state_dict(), optimizer.state_dict(), schedule.scheduler.state_dict())


class _Module(LightningModule):
    def __init__(self, options: task.Options) -> None:
        super().__init__()
        self.options = options
        self.net = task.model(options)

    def training_step(self, batch: Any, number: int) -> Any:
        loss = self.net(**batch).loss
        self.log("at", float(self.global_step))
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.net(**batch)

    def configure_optimizers(self) -> Any:
        optimizer, schedule = task.optimizer(self.net, self.options)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class _Trainer(Trainer):
    trace: Trace

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self.trace.reach("save")
        return super().save_checkpoint(*args, **kwargs)


class _Logger(DummyLogger):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.trace.reach("log")


class _Points(Callback):
    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.trace.reach("train begins")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        self.trace.begin_batch()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
        self.trace.end_batch(batch, outputs["loss"])
        if (number + 1) % trainer.accumulate_grad_batches == 0:
            self.trace.reach("step end")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.trace.reach("evaluated")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.trace.reach("epoch end")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.trace.reach("train end")
