"""Watch, stop and resume a training in Lightning, and make the resume exact: ``docs/frameworks/lightning.md``."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from memfit.errors import MissingExtraError as _MissingExtraError

try:
    import torch
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.callbacks import BaseFinetuning, BatchSizeFinder, LearningRateFinder
    from lightning.pytorch.trainer.states import RunningStage
    from lightning.pytorch.utilities import CombinedLoader
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from torch.utils.data import DataLoader, IterableDataset
except ModuleNotFoundError as error:
    raise _MissingExtraError.of(str(error.name), "lightning", __name__) from error

from memfit.errors import StoppedError, UsageError
from memfit.integrations._lightning import (
    MemfitCallback,
    Replayed,
    is_between_steps,
    keeps_state,
    metric_numbers,
    put_means,
    refused_ranks,
    running_means,
    silent,
)
from memfit.training import (
    KeyedStream,
    LoopParts,
    Ranks,
    Sealed,
    SealedFolder,
    Stopper,
    Unheard,
    among_peers,
    beat,
    check_compiled,
    check_loader,
    check_model,
    data_identity,
    deaf_workers,
    environment,
    find_longest,
    keep_beats,
    load_checkpoint,
    loading,
    order_of,
    order_sums,
    refuse_changed,
    rehearse,
    rng_state,
    save_checkpoint,
    say,
    set_rng_state,
    stream_identity,
    tried,
)

__all__ = ["Exact", "MemfitCallback", "Stop"]

_FILE, _DRAWS, _MEANS = "lightning.ckpt", "draws-{}.pt", "means-{}.pt"  # the first is rank 0's


class Stop(MemfitCallback):
    """Stops a training by SIGTERM, SIGUSR1 or Ctrl-C after the optimizer step under way, and resumes it.

    It ends with exit code 75. The newest whole checkpoint is taken, each sample of the epoch is seen once, and random
    numbers stay as Lightning draws them: what the data draw differs from that of a training without a stop. Of several
    ranks (strategy ``"ddp"``) all stop after the same step, and rank 0 seals what they saved.

    Args:
        folder: Where checkpoints are kept.
        every: A checkpoint after so many optimizer steps.
        keep: The newest checkpoints that stay.
        allow: Names of settings that may differ from the checkpoint's, such as ``"learning_rate"``: those of now hold.

    Raises:
        UsageError: In ``fit``, before anything is trained: what cannot be resumed, by name.
        StoppedError: In ``fit``: a signal asked for it; everything up to here is saved.
    """

    stream: KeyedStream | None = None

    def __init__(self, folder: Path | str, *, every: int, keep: int = 2, allow: Collection[str] = ()) -> None:
        super().__init__()
        self.folder, self.every, self.keep, self.allow = SealedFolder(folder), every, keep, frozenset(allow)
        self._stopper = Stopper()
        self._ranks: Ranks | None = None
        self._found: Sealed | None = None
        self._loader: Any = None
        self._data: dict[str, Any] = {}
        self._identity: dict[str, Any] = {}
        self._changed: Mapping[str, Any] = {}
        self._resumed: dict[str, Any] = {}  # what is put back at the first batch
        self._saved = 0
        self._is_asked = self._is_in_epoch = False
        self._stepped: set[torch.optim.Optimizer] = set()
        self._num_open = 0  # batches since each optimizer has stepped
        self._at_end = ExitStack()  # takes off at the end of a fit what it put on

    def fit(
        self, trainer: Any, model: Any, train_dataloaders: Any = None, val_dataloaders: Any = None, **options: Any
    ) -> None:
        """Call ``trainer.fit`` from the newest whole checkpoint.

        Args:
            trainer: The ``lightning.pytorch.Trainer``; its callbacks need not name this one.
            model: The module.
            train_dataloaders: The training loader, or a ``LightningDataModule``; None: the module has its loaders.
            val_dataloaders: As for ``trainer.fit``.
            options: More for ``trainer.fit``. ``ckpt_path`` is taken where nothing has been sealed yet.
        """
        self._refuse(trainer, model)
        trainer.callbacks = [one for one in trainer.callbacks if not isinstance(one, MemfitCallback)] + [self]
        with self._at_end as stack:
            self._join(trainer, stack)
            stack.enter_context(self.folder.held())
            self._stopper.listen()
            stack.callback(self._stopper.close)
            self._found, self._is_asked = None if trainer.fast_dev_run else self.folder.newest(), True
            if self._found is not None:
                self._resumed = {"means": None} | self._drawn(self._found.path)
                options["ckpt_path"] = self._found.path / _FILE
                stack.enter_context(warnings.catch_warnings())  # Lightning knows of no position but its loaders'
                warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch")
            prepare = partial(self._prepare, trainer)
            train = train_dataloaders
            holder = train if isinstance(train, LightningDataModule) else options.get("datamodule") or model
            if train is None or holder is train:
                for name, change in (("train_dataloader", prepare), ("val_dataloader", _deaf)):
                    if is_overridden(name, holder):
                        make = getattr(holder, name)
                        setattr(holder, name, lambda make=make, change=change: change(make()))
                        stack.callback(vars(holder).pop, name)
            else:
                train = prepare(train)
            try:
                trainer.fit(model, train, _deaf(val_dataloaders), **options | {"weights_only": False})
            except Exception:
                with loading(self._found if self._resumed else None):
                    raise

    def _join(self, trainer: Any, stack: ExitStack) -> None:
        signals = trainer._signal_connector
        # it ends a training without a save, and calls a collective alone
        signals._sigterm_notifier_fn = lambda *_: None
        stack.callback(vars(signals).pop, "_sigterm_notifier_fn")
        if trainer.world_size == 1:
            return
        keep_beats(self.folder.path)
        beat("begin")
        stack.enter_context(among_peers())
        trainer.strategy.setup_environment()
        ranks = self._ranks = self.folder.ranks = Ranks.current()
        assert ranks is not None
        self._stopper.join(ranks)
        if ranks.rank:
            self.journal = Unheard()
        if self.stream is not None:
            self.stream.rank = ranks.rank
        data, deals = trainer._data_connector, trainer._data_connector._requires_distributed_sampler
        data._requires_distributed_sampler = lambda one: one is not self._loader and deals(one)
        stack.callback(vars(data).pop, "_requires_distributed_sampler")
        beat("load")

    @property
    def _rank(self) -> int:
        return 0 if self._ranks is None else self._ranks.rank

    def _drawn(self, path: Path) -> dict[str, Any]:
        """Return what this rank had drawn; one that was not there began its epoch as rank 0 did."""
        own, first = (path / _DRAWS.format(rank) for rank in (self._rank, 0))
        if own.exists() or not first.exists():
            return load_checkpoint(own) if own.exists() else {}
        return {"position": load_checkpoint(first)["position"]}

    def _refuse(self, trainer: Any, model: LightningModule) -> None:
        kind = type(trainer)
        self._refuse_any(
            {f"the Trainer is that of {kind.__module__}, not of lightning": not isinstance(trainer, Trainer)}
        )
        cluster = trainer._accelerator_connector.cluster_environment
        if isinstance(cluster, SLURMEnvironment) and cluster.auto_requeue:
            cluster.auto_requeue = False
            say("Lightning's own requeueing is off: a stop ends with exit code 75, on which memfit's script requeues")
        faults = {
            **refused_ranks(trainer, model, self.stream is not None),
            "reload_dataloaders_every_n_epochs is set": bool(trainer.reload_dataloaders_every_n_epochs),
            "overfit_batches is set": trainer.overfit_batches > 0,
            "val_check_interval is a time": self.stream is not None and trainer._val_check_time_interval is not None,
        }
        for one in trainer.callbacks:
            name = f"callbacks.{type(one).__name__}"
            moves = isinstance(one, BaseFinetuning | BatchSizeFinder | LearningRateFinder)
            keeps = self.stream is not None and keeps_state(one)
            faults[f"{name} moves step or optimizer when a fit begins"] = moves and name not in self.allow
            faults[f"{name} steers by what no checkpoint holds"] = keeps and name not in self.allow
        self._refuse_any(faults)
        if self.stream is not None:
            check_compiled(model, self.allow)

    def _refuse_any(self, faults: Mapping[str, bool]) -> None:
        if found := [name for name, is_there in faults.items() if is_there]:
            raise UsageError(
                f"This training cannot be stopped and resumed{' exactly' * bool(self.stream)}: {'; '.join(found)}.",
                rule="it has one process or DDP's ranks, one loader, optimizers that step, and callbacks with a state.",
                remedy="change that (a callback has state_dict and load_state_dict, or is allowed by its name), or "
                "watch it alone: callbacks=[MemfitCallback()]",
            )

    # --- the way to the first step

    def _prepare(self, trainer: Any, train: Any) -> Any:
        """Return the loader to train on, at the place where the checkpoint was."""
        several = isinstance(train, list | tuple | dict | CombinedLoader)
        self._refuse_any({f"the training data are a {type(train).__name__} of loaders": several})
        deals = trainer._data_connector._requires_distributed_sampler
        is_dealt = self._ranks is not None and isinstance(train, DataLoader) and deals(train)
        self._loader = self._bind(trainer, _deaf(train), is_dealt)
        self._data = data_identity(self._loader)
        if self._found is not None:
            changed = self._compare(self._found.facts["data"], self._data)
            epoch, batch = self._found.facts["epoch"], self._batch(trainer)
            self._enter_epoch(epoch, batch)
            if changed and batch:
                self.journal.inexact(f"the changed data go on at batch {batch + 1} of epoch {epoch + 1}")
        return self._loader

    def _batch(self, trainer: Any) -> int:
        """Return the batch of its epoch to go on at: other ranks take the last one before which all was trained."""
        assert self._found is not None
        batch: int = self._found.facts["batch"]
        if self._has_other_ranks(trainer):
            batch = batch * self._found.facts["identity"]["world_size"] // trainer.world_size
            batch -= batch % trainer.accumulate_grad_batches
        return batch

    def _has_other_ranks(self, trainer: Any) -> bool:
        return self._found is not None and self._found.facts["identity"]["world_size"] != trainer.world_size

    def _bind(self, trainer: Any, train: Any, is_dealt: bool) -> Any:
        if is_dealt:
            train = trainer._data_connector._prepare_dataloader(train, shuffle=True, mode=RunningStage.TRAINING)
        made = Replayed(train)
        is_stream = made.source is not None or isinstance(getattr(train, "dataset", None), IterableDataset)
        self._refuse_any({"the training data of several ranks are a stream": is_stream and self._ranks is not None})
        return made

    def _enter_epoch(self, epoch: int, batch: int) -> None:
        if "position" in self._resumed:
            why = self._loader.begin(batch, self._resumed["position"])
            if batch:
                self.journal.inexact(why)

    def _compare(self, saved: Mapping[str, Any], now: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._found is not None
        allow = {*self.allow, *["world_size"] * (self.stream is None)}
        if saved.get("seed", 0) is None and not self._found.facts["batch"]:
            allow |= stream_identity(None).keys()  # between two epochs Stop may become Exact
        return refuse_changed(self._found.path, saved, now, allow)

    def on_load_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._resumed["means"] = checkpoint.get("memfit")
        loops = checkpoint["loops"]["fit_loop"]
        if self._has_other_ranks(trainer):
            self._resumed["means"], counts = None, loops["epoch_loop.batch_progress"]["current"]
            counts |= dict.fromkeys(counts, self._batch(trainer))
        elif self._found is not None and self._rank:
            self._resumed["means"] = torch.load(self._found.path / _MEANS.format(self._rank), weights_only=False)
        at = loops["epoch_progress"]["current"]
        if self._found is None and self.stream is not None:
            self._refuse_any({"the checkpoint lies within an epoch and is not sealed": at["processed"] < at["started"]})
            self.journal.inexact("the checkpoint has no seal of memfit")

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Compare the settings with the checkpoint's, before its state is loaded over them."""
        if not self._is_asked:
            raise UsageError(
                f"{type(self).__name__} was given to the Trainer, and not asked to fit.",
                rule="it chooses the checkpoint before Lightning begins.",
                remedy="call stop.fit(trainer, module, train_loader, val_loader) in place of trainer.fit(...)",
            )
        _parts(trainer).check(self.allow)
        self._identity = {
            **stream_identity(self.stream),
            "accumulation": trainer.accumulate_grad_batches,
            "precision": str(trainer.precision),
            "gradient_clip": [trainer.gradient_clip_val, trainer.gradient_clip_algorithm],
            "limit_train_batches": trainer.limit_train_batches,
            "max_steps": trainer.max_steps,
            "world_size": trainer.world_size,
            **_parts(trainer).identity(),
        }
        if (found := self._found) is not None:
            self._changed = self._compare(found.facts["identity"], self._identity)
            trainer.should_stop = found.facts["is_over"]
            if self.stream is not None:
                found.check_environment()

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        for optimizer in trainer.optimizers:
            hook = optimizer.register_step_post_hook(lambda made, *_: self._after_step(made))
            self._at_end.callback(hook.remove)
        if self._ranks is not None and self.stream is not None:
            order_sums(trainer.strategy.model)
        if self._found is None:
            self._rehearse(trainer, pl_module)
        else:
            moved = f"a callback has moved it from step {self._found.step} to {trainer.global_step}"
            self._refuse_any({moved: trainer.global_step != self._found.step})
            total = trainer.fit_loop.epoch_loop.batch_progress.total
            total.ready = total.completed  # Lightning counts the batch twice in which it was saved
            _parts(trainer).take({name: self._identity[name] for name in self._changed if name in self._identity})
            epoch, batch = self._found.facts["epoch"], self._batch(trainer)
            self.journal.resume(self._found.path, (epoch, batch // trainer.accumulate_grad_batches))
            if batch and self._has_other_ranks(trainer):
                self.journal.inexact(f"the changed ranks go on at batch {batch + 1} of epoch {epoch + 1}")
            self._saved = self._found.step
        self._stopper.listen()
        loop, self._is_in_epoch = trainer.fit_loop.epoch_loop, False
        loop._on_after_fetch = partial(self._after_fetch, trainer, loop._on_after_fetch)  # before a batch's hooks
        self._at_end.callback(vars(loop).pop, "_on_after_fetch")

    def _rehearse(self, trainer: Any, pl_module: LightningModule) -> None:
        """Say whether the largest batch fits; what the module remembers of it is put back."""
        loop, loader = trainer.fit_loop.epoch_loop, getattr(self._loader, "loader", self._loader)

        def loss_of(batch: Any) -> torch.Tensor:
            batch = trainer.precision_plugin.convert_input(batch)
            batch = trainer.strategy.batch_to_device(pl_module._on_before_batch_transfer(batch, dataloader_idx=0))
            with trainer.precision_plugin.train_step_context():
                found: Any = pl_module.training_step(*loop._build_kwargs(OrderedDict(), batch, 0).values())
            loss: torch.Tensor = found["loss"] if isinstance(found, Mapping) else found
            return loss

        if not pl_module.automatic_optimization:
            say("no verdict whether the largest batch fits, and the module is not tried: it makes its steps itself")
            return
        with silent(pl_module):
            if self.stream is not None:
                with tried("the module", "rehearsal", self.allow):
                    loader = longest = find_longest(loader)
                    check_model(pl_module, lambda: loss_of(longest.batch), self.allow | metric_numbers(pl_module))
            if "rehearsal" not in self.allow:
                rehearse(pl_module, trainer.optimizers[0], loss_of, loader)

    # --- steps

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._is_in_epoch = True
        if (order := order_of(self._loader)) is not None:
            order.set_epoch(trainer.current_epoch)  # Lightning tells no batch_sampler

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepped.add(optimizer)
        beat("data")  # callbacks may save, too

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *batch: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *batch)
        beat("data")
        self._num_open += 1
        if len(self._stepped) == len(trainer.optimizers):
            self._stepped.clear()
            self._num_open = 0

    def _is_between_steps(self, trainer: Any, num_batches: int) -> bool:
        """Return whether no accumulation is open; a module that steps by hand closes it by steps of all optimizers."""
        if trainer.lightning_module.automatic_optimization:
            return is_between_steps(trainer, num_batches)
        is_left = self._num_open > trainer.num_training_batches
        self._refuse_any(
            {"the module makes its steps, and an optimizer made none in as many batches as an epoch": is_left}
        )
        return self._num_open == 0

    def _after_fetch(self, trainer: Any, then: Callable[[], None]) -> None:
        """Seed what is drawn between two steps, where a stop ends one process and the next begins."""
        then()
        if not self._is_in_epoch:  # entered midway: Lightning leaves its beginning out
            self._is_in_epoch, module = True, trainer.lightning_module
            hooks = [(one, one.on_train_epoch_start) for one in (*trainer.callbacks, module)]
            own = [pair for pair in hooks if not pair[1].__module__.startswith(("lightning.", "memfit."))]
            with silent(module):  # the means of the epoch are put back
                for one, hook in own:
                    hook(*() if one is module else (trainer, module))
            if own:
                names = ", ".join(type(one).__name__ for one, _ in own)
                say(f"on_train_epoch_start is called again for the rest of the epoch, of {names}")
        if self.stream is not None and self._is_between_steps(trainer, trainer.fit_loop.epoch_loop.batch_idx + 1):
            self.stream.step(-1 - trainer.global_step)

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        resumed, self._resumed = self._resumed, {}
        if resumed.get("means") and batch_idx:
            put_means(trainer, pl_module, resumed["means"])
        if "now" in resumed:
            set_rng_state(resumed["now"])
        self._stopper.vote(trainer.global_step)  # all have their batch: nobody waits for long within the step
        if self._is_between_steps(trainer, batch_idx):
            step, noted = trainer.global_step, self._stopper.noted
            is_due = step // self.every > self._saved // self.every or (noted and step != self._saved)
            if is_due and not trainer.fast_dev_run:
                self._save(trainer, batch_idx)
            if noted:
                where = {"epoch": trainer.current_epoch, "step": batch_idx // trainer.accumulate_grad_batches}
                raise self._stopper.end(f"after step {step}", self.folder.holds(step), **where)
            if self.stream is not None:
                self.stream.step(step)
        beat("microbatch", trainer.global_step)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_validation_batch_start(self, *batch: Any) -> None:
        beat("validate")

    def on_validation_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        beat("vote")  # metrics of all ranks are summed

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        beat("data")

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Save the end, so that the same command ends at once."""
        if trainer.global_step != self._saved and not trainer.fast_dev_run:
            self._save(trainer, 0, is_over=bool(trainer.should_stop))

    def _save(self, trainer: Any, batch_idx: int, *, is_over: bool | None = None) -> None:
        self._enter("checkpoint")
        step, epoch = trainer.global_step, trainer.current_epoch
        path = self.folder.begin(step)
        with self.folder.writing():
            trainer.save_checkpoint(path / _FILE)
            if self.stream is None and is_over is None:
                own = {"position": self._loader.position(batch_idx), "now": rng_state()}
                save_checkpoint(path / _DRAWS.format(self._rank), own)
            if self._rank:
                torch.save(running_means(trainer, trainer.lightning_module), path / _MEANS.format(self._rank))
        facts = {"identity": self._identity, "data": self._data, "environment": environment(), "is_over": bool(is_over)}
        self.folder.seal(step, {"epoch": epoch, "batch": batch_idx, **facts})
        self.folder.prune(self.keep)
        self._saved = step

    def on_save_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the running means, and undo what Lightning adds to its loggers' step at a restart between two steps."""
        loop = trainer.fit_loop.epoch_loop
        if self._phase != "checkpoint":
            return
        checkpoint["memfit"] = running_means(trainer, pl_module)
        if trainer.training and not loop._should_accumulate():
            checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Let a stop close the loggers' runs as finished: they go on."""
        if isinstance(exception, StoppedError):
            for logger in trainer.loggers:
                logger.finalize = lambda status, own=logger.finalize: own("finished")
                self._at_end.callback(vars(logger).pop, "finalize")


class Exact(Stop):
    """Resumes a training to the same bytes, wherever it was stopped or killed, or refuses it before step 1.

    Order, items, collation and the module's draws are functions of seed and position, so they are others than without
    it, of the same distribution. Weights do not depend on the number of workers.

    Args:
        seed: Other seeds, other order and draws.
        allow: As for ``Stop``, and parts that may move, such as ``"collator.counter"``.
        folder, every, keep: As for ``Stop``.

    Raises:
        UsageError: As for ``Stop``, and what cannot be exact, by name.
        StoppedError: As for ``Stop``.
    """

    def __init__(
        self, folder: Path | str, *, seed: int, every: int, keep: int = 2, allow: Collection[str] = ()
    ) -> None:
        super().__init__(folder, every=every, keep=keep, allow=allow)
        self.stream = KeyedStream(seed)

    def _bind(self, trainer: Any, train: Any, is_dealt: bool) -> Any:
        assert self.stream is not None
        made = self.stream.loader(train)
        check_loader(train, self.allow)
        order = order_of(made)
        if is_dealt and self._ranks is not None and order is not None:
            order.deal(self._ranks.rank, self._ranks.size)
        return made

    def _enter_epoch(self, epoch: int, batch: int) -> None:
        order = order_of(self._loader)
        assert order is not None
        order.set_epoch(epoch)
        order.skip(batch * (self._loader.batch_size or 1))


def _parts(trainer: Any) -> LoopParts:
    made = [one for one in trainer.optimizers if type(one).__name__ != "_MockOptimizer"]
    named = [*made, *(one.scheduler for one in trainer.lr_scheduler_configs), trainer.lightning_module]
    return LoopParts({str(number): one for number, one in enumerate(named)})


def _deaf(loaders: Any) -> Any:
    for one in loaders if isinstance(loaders, list | tuple) else [loaders]:
        deaf_workers(one)
    return loaders
