"""transformers' Trainer, as its documentation has it: ``train(resume_from_checkpoint=get_last_checkpoint(folder))``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers.trainer_jit_checkpoint import CheckpointManager
from transformers.trainer_utils import get_last_checkpoint

from memfit_conformance import _task as task
from memfit_conformance._strike import Trace, watch_model

CHECKPOINTS = "checkpoint-*"
FILES = {"model": "model.safetensors", "optimizer": "optimizer.pt"}


def run(folder: Path, options: task.Options, trace: Trace, with_memfit: bool) -> None:
    """Train, from the newest checkpoint in the folder if there is one."""
    if options.version:
        transformers.__version__ = options.version
    trace.reach("program")
    evaluation = {} if options.evaluate == "no" else {"eval_strategy": options.evaluate, "eval_steps": task.EVERY}
    if options.evaluate == "epoch" and options.best:
        raise ValueError("the best model needs evaluations at the steps of saves")
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulation,
        num_train_epochs=task.EPOCHS,
        learning_rate=options.rate,
        warmup_steps=options.warmup,
        weight_decay=0.01,
        save_strategy="steps",
        save_steps=task.EVERY,
        save_total_limit=task.KEEP,
        load_best_model_at_end=options.best,
        logging_steps=task.EVERY,
        dataloader_num_workers=options.workers,
        dataloader_persistent_workers=options.persistent and options.workers > 0,
        dataloader_drop_last=options.drop_last,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        prediction_loss_only=True,
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
        enable_jit_checkpoint=options.own_stop,
        **evaluation,
    )
    if options.own_stop:  # its wait of 3 s is longer than this training
        CheckpointManager._sigterm_handler = lambda self, *_: self._enable_checkpoint()
    net = task.model(options)
    watch_model(net, trace)
    trainer = _Trainer(
        net,
        args,
        data_collator=task.Collate(options.masks),
        train_dataset=task.Words(options.samples),
        eval_dataset=task.Words(16) if evaluation else None,
        callbacks=[_Points(trace)],
    )
    trainer.trace = trace
    if with_memfit:
        from memfit.integrations.huggingface import exact

        exact(trainer)
    trace.position = lambda: trainer.state.global_step
    if with_memfit:
        trainer.train()
    else:
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    if trainer.state.global_step < trainer.state.max_steps:
        return
    trace.end(trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.lr_scheduler.state_dict())


class _Trainer(transformers.Trainer):
    trace: Trace

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.trace.begin_batch()
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.trace.end_batch(inputs, loss)
        return loss

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self.trace.reach("save")
        return super()._save_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        self.trace.reach("best")
        super()._load_best_model()


class _Points(transformers.TrainerCallback):
    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trace.reach("train begins")

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        self.trace.reach("log")

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.trace.reach("step end")

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.trace.reach("evaluated")

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self.trace.reach("epoch end")

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.trace.reach("train end")
