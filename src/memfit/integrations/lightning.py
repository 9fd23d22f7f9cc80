"""Watch, stop and resume a training in Lightning, and make the resume exact: ``docs/frameworks/lightning.md``."""

from __future__ import annotations

import copy
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from memfit.errors import MissingExtraError as _MissingExtraError

try:
    import torch
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.pytorch import Callback, LightningModule
except ModuleNotFoundError as error:
    raise _MissingExtraError.of(str(error.name), "lightning", __name__) from error

from memfit.errors import StoppedError, UsageError
from memfit.rundir import record
from memfit.training import (
    CheckpointWarning,
    Journal,
    KeyedStream,
    LoopParts,
    Sealed,
    SealedFolder,
    Stopper,
    check_loader,
    check_model,
    data_identity,
    deaf_workers,
    environment,
    find_longest,
    order_of,
    refuse_changed,
    rehearse,
    samples_in,
    say,
)

__all__ = ["Exact", "MemfitCallback", "Stop"]

_FILE = "lightning.ckpt"


class MemfitCallback(Callback):
    """Watches a training: phases, steps, epochs, losses and waits become events; nothing else changes.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> watch = MemfitCallback()
        >>> quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        >>> trainer = Trainer(max_epochs=1, callbacks=[watch], accelerator="cpu", enable_checkpointing=False, **quiet)
        >>> trainer.fit(BoringModel())
    """

    def __init__(self) -> None:
        self.journal = Journal()
        self._began = self._ended = 0.0
        self._phase = ""

    def _enter(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            self.journal.phase(phase)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.journal.num_epochs = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else None

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.journal.begin_epoch()
        self._phase = ""

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._enter("train")
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        waited = self._began - self._ended if self._ended else 0.0
        self.journal.took(now - self._began + waited, waited, samples_in(batch))
        self._ended = now
        if _is_between_steps(trainer, batch_idx + 1):
            every = trainer.accumulate_grad_batches
            step, num_steps = -(-(batch_idx + 1) // every), -(-int(trainer.num_training_batches) // every)
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            where = {"epoch": trainer.current_epoch + 1, "step": step, "num_steps": num_steps}
            self.journal.step(where, loss, pl_module.device)

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._enter("validate")

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self._ended = 0.0

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        numbers = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        self.journal.epoch(trainer.current_epoch + 1, numbers, self.journal.pace())
        self._ended = 0.0


class Stop(MemfitCallback):
    """Stops a training by SIGTERM, SIGUSR1 or Ctrl-C after the optimizer step under way, and resumes it.

    It ends with exit code 75. The newest whole checkpoint is taken; random numbers stay as Lightning draws them.

    Args:
        folder: Where checkpoints are kept.
        every: A checkpoint after so many optimizer steps.
        keep: The newest checkpoints that stay.
        allow: Names of settings that may differ from the checkpoint's, such as ``"learning_rate"``.

    Raises:
        UsageError: In ``fit``, before anything is trained: what cannot be resumed, by name.
        StoppedError: In ``fit``: a signal asked for it; everything up to here is saved.
    """

    stream: KeyedStream | None = None

    def __init__(self, folder: Path | str, *, every: int, keep: int = 2, allow: Collection[str] = ()) -> None:
        super().__init__()
        self.folder, self.every, self.keep, self.allow = SealedFolder(folder), every, keep, frozenset(allow)
        self._stopper = Stopper()
        self._found: Sealed | None = None
        self._loader: Any = None
        self._data: dict[str, Any] = {}
        self._identity: dict[str, Any] = {}
        self._changed: Mapping[str, Any] = {}
        self._saved = -1

    def fit(self, trainer: Any, model: LightningModule, train: Any, val: Any = None, **options: Any) -> None:
        """Call ``trainer.fit`` from the newest whole checkpoint.

        Args:
            trainer: The ``lightning.pytorch.Trainer``; its callbacks need not name this one.
            model: The module.
            train: The training loader.
            val: Validation loaders, as for ``trainer.fit``.
            options: More for ``trainer.fit``.
        """
        self._refuse(trainer, model, train)
        trainer.callbacks = [one for one in trainer.callbacks if one is not self] + [self]
        self._loader = self._prepare(train)
        for one in val if isinstance(val, list | tuple) else [val]:
            deaf_workers(one)
        with self.folder.held():
            self._stopper.listen()
            try:
                self._found = self.folder.newest()
                path = None if self._found is None else self._found.path / _FILE
                trainer.fit(model, self._loader, val, ckpt_path=path, weights_only=False, **options)
            finally:
                self._stopper.close()

    def _refuse(self, trainer: Any, model: LightningModule, train: Any) -> None:
        cluster = trainer._accelerator_connector.cluster_environment
        if isinstance(cluster, SLURMEnvironment) and cluster.auto_requeue:
            cluster.auto_requeue = False
            say("Lightning's own requeueing is off: a stop ends with exit code 75, on which memfit's script requeues")
        faults = {
            f"the training has {trainer.world_size} processes": trainer.world_size > 1,
            "reload_dataloaders_every_n_epochs is set": bool(trainer.reload_dataloaders_every_n_epochs),
            "overfit_batches is set": trainer.overfit_batches > 0,
            "the module optimizes by hand (automatic_optimization=False)": not model.automatic_optimization,
            f"the training data are a {type(train).__name__}": not hasattr(train, "dataset"),
        }
        if found := [name for name, is_there in faults.items() if is_there]:
            raise UsageError(
                f"This training cannot be stopped and resumed: {'; '.join(found)}.",
                rule="it has one process, one DataLoader, and steps that Lightning makes.",
                remedy="change that, or watch it alone: callbacks=[MemfitCallback()]",
            )

    def _prepare(self, train: Any) -> Any:
        deaf_workers(train)
        self._data = data_identity(train)
        return train

    # --- the way to the first step

    def on_load_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Enter the epoch where it was left, before its iterator is made."""
        progress = checkpoint["loops"]["fit_loop"]
        epochs = progress["epoch_progress"]["current"]
        batches = progress["epoch_loop.batch_progress"]["current"]["completed"]
        if epochs["processed"] == epochs["started"]:
            batches = 0
        if (order := order_of(self._loader)) is not None:
            order.set_epoch(epochs["processed"])
            order.skip(batches * (self._loader.batch_size or 1))
        elif batches and not hasattr(self._loader, "load_state_dict"):
            why = f"epoch {epochs['processed'] + 1} goes on in another order: some samples come twice, some not at all"
            record("inexact", reason=why, text=f"resumed, sealed and not exact: {why}")
            say(f"resumed, sealed and not exact: {why}")

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Compare the settings with the checkpoint's, before its state is loaded over them."""
        if self._loader is None:
            raise UsageError(
                f"{type(self).__name__} was given to the Trainer, and not asked to fit.",
                rule="it chooses the checkpoint before Lightning begins.",
                remedy="call stop.fit(trainer, module, train_loader, val_loader) in place of trainer.fit(...)",
            )
        self._identity = {
            "seed": self.stream and self.stream.seed,
            "stream": self.stream and self.stream.version,
            "accumulation": trainer.accumulate_grad_batches,
            "precision": str(trainer.precision),
            "gradient_clip": [trainer.gradient_clip_val, trainer.gradient_clip_algorithm],
            **self._data,
            **_parts(trainer).identity(),
        }
        if (found := self._found) is not None:
            allow = self.allow | ({"seed", "stream"} if found.facts["identity"]["seed"] is None else set())
            self._changed = refuse_changed(found.path, found.facts["identity"], self._identity, allow)
            if found.facts["environment"] != environment():
                text = f"{found.path} was made with {found.facts['environment']}, this is {environment()}."
                warnings.warn(f"{text} It may not be exact.", CheckpointWarning, stacklevel=2)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._found is None:
            self._rehearse(trainer, pl_module)
        else:
            _parts(trainer).take({name: self._identity[name] for name in self._changed if name in self._identity})
            facts = self._found.facts
            self.journal.resume(self._found.path, (facts["epoch"], facts["epoch_step"]))
            self._saved = self._found.step
        self._stopper.listen()
        trainer._signal_connector.received_sigterm = False  # it would end the training without a save, with exit code 0
        if self.stream is not None:
            loop = trainer.fit_loop.epoch_loop
            loop._on_after_fetch = partial(self._seed_between, trainer, loop._on_after_fetch)  # before a batch's hooks

    def _rehearse(self, trainer: Any, pl_module: LightningModule) -> None:
        """Say whether the largest batch fits; what the module remembers of it is put back."""
        loop = trainer.fit_loop.epoch_loop

        def loss_of(batch: Any) -> torch.Tensor:
            batch = trainer.precision_plugin.convert_input(batch)
            batch = trainer.strategy.batch_to_device(pl_module._on_before_batch_transfer(batch, dataloader_idx=0))
            with trainer.precision_plugin.train_step_context():
                found: Any = pl_module.training_step(*loop._build_kwargs(OrderedDict(), batch, 0).values())
            loss: torch.Tensor = found["loss"] if isinstance(found, Mapping) else found
            return loss

        with _silent(pl_module):
            self._try(pl_module, trainer.optimizers[0], loss_of)

    def _try(self, module: LightningModule, optimizer: Any, loss: Callable[[Any], torch.Tensor]) -> None:
        with _kept(module):
            rehearse(module, optimizer, loss, self._loader)

    # --- steps

    def _seed_between(self, trainer: Any, then: Callable[[], None]) -> None:
        """Seed what is drawn between two steps, where a stop ends one process and the next begins."""
        then()
        if self.stream is not None and _is_between_steps(trainer, trainer.fit_loop.epoch_loop.batch_idx + 1):
            self.stream.step(-1 - trainer.global_step)

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if _is_between_steps(trainer, batch_idx):
            step, noted = trainer.global_step, self._stopper.noted
            if step and step != self._saved and (noted or step % self.every == 0):
                self._save(trainer, batch_idx)
            if noted:
                where = {"epoch": trainer.current_epoch, "step": batch_idx // trainer.accumulate_grad_batches}
                kept = f"{self.folder.folder_of(step)} holds this very moment: nothing will be repeated."
                raise self._stopper.end(
                    f"after step {step}",
                    kept if step else "nothing was trained yet: nothing will be repeated.",
                    **where,
                )
            if self.stream is not None:
                self.stream.step(step)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Save the end, so that the same command ends at once."""
        if trainer.global_step != self._saved:
            self._save(trainer, 0)

    def _save(self, trainer: Any, batch_idx: int) -> None:
        self._enter("checkpoint")
        step, epoch = trainer.global_step, trainer.current_epoch
        path = self.folder.begin(step)
        with self.folder.writing():
            trainer.save_checkpoint(path / _FILE)
        facts = {"identity": self._identity, "environment": environment()}
        epoch_step = batch_idx // trainer.accumulate_grad_batches
        self.folder.seal(step, {"epoch": epoch, "epoch_step": epoch_step, **facts})
        self.folder.prune(self.keep)
        self._saved = step

    def on_save_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Undo what Lightning adds to its loggers' step at a restart from between two steps."""
        loop = trainer.fit_loop.epoch_loop
        if self._phase == "checkpoint" and trainer.training and not loop._should_accumulate():
            checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Let a stop close the loggers' runs as finished: they go on."""
        if isinstance(exception, StoppedError):
            for logger in trainer.loggers:
                logger.finalize = partial(_finalize, logger.finalize)


class Exact(Stop):
    """Resumes a training to the same bytes, wherever it was stopped or killed, or refuses it before step 1.

    Order, items, collation and the module's draws are functions of seed and position, so they are others than without
    it, of the same distribution. Weights do not depend on the number of workers.

    Args:
        folder: Where checkpoints are kept.
        seed: Other seeds, other order and draws.
        every: A checkpoint after so many optimizer steps.
        keep: The newest checkpoints that stay.
        allow: As for ``Stop``, and parts that may move, such as ``"collator.counter"``.

    Raises:
        UsageError: As for ``Stop``, and what cannot be exact, by name.
        StoppedError: As for ``Stop``.
    """

    def __init__(
        self, folder: Path | str, *, seed: int, every: int, keep: int = 2, allow: Collection[str] = ()
    ) -> None:
        super().__init__(folder, every=every, keep=keep, allow=allow)
        self.stream = KeyedStream(seed)

    def _prepare(self, train: Any) -> Any:
        assert self.stream is not None
        made = self.stream.loader(train)
        check_loader(train, self.allow)
        self._data = data_identity(made)
        return made

    def _try(self, module: LightningModule, optimizer: Any, loss: Callable[[Any], torch.Tensor]) -> None:
        batch = find_longest(self._loader).batch
        with _kept(module):
            check_model(module, lambda: loss(batch), self.allow)
        super()._try(module, optimizer, loss)


def _is_between_steps(trainer: Any, num_batches: int) -> bool:
    return bool(num_batches % trainer.accumulate_grad_batches == 0 or num_batches == trainer.num_training_batches)


def _parts(trainer: Any) -> LoopParts:
    named = [*trainer.optimizers, *(one.scheduler for one in trainer.lr_scheduler_configs)]
    return LoopParts({str(number): one for number, one in enumerate(named)})


def _finalize(finalize: Callable[[str], None], status: str) -> None:
    finalize("finished")


@contextmanager
def _silent(module: LightningModule) -> Iterator[None]:
    """Let a step be tried that logs."""
    vars(module).update(log=lambda *_, **__: None, log_dict=lambda *_, **__: None)
    try:
        yield
    finally:
        del module.__dict__["log"], module.__dict__["log_dict"]


@contextmanager
def _kept(module: LightningModule) -> Iterator[None]:
    """Put back what the modules' attributes held: numbers, tensors, and lists, dicts and sets of anything."""
    kinds = (int, float, str, torch.Tensor, type(None))
    held: list[tuple[Any, str, Any, Any]] = []
    for one in module.modules():
        for name, value in vars(one).items():
            if name.startswith("_") or name == "training":
                continue
            if isinstance(value, list | dict | set):
                held.append((one, name, value, copy.copy(value)))
            elif isinstance(value, kinds):
                held.append((one, name, value, value.clone() if isinstance(value, torch.Tensor) else value))
    try:
        yield
    finally:
        for one, name, value, before in held:
            if isinstance(value, list):
                value[:] = before
            elif isinstance(value, dict | set):
                value.clear()
                value.update(before)
            vars(one)[name] = value if isinstance(value, list | dict | set) else before
