"""Watch, stop and resume a training in Lightning, and make the resume exact: ``docs/frameworks/lightning.md``.

Private names that have no public way: ``_signal_connector`` (its handler of SIGTERM ends a training without a save),
``_data_connector`` and ``_auto_add_worker_init_fn`` (what is done with a ``DataLoader``), ``_accelerator_connector``
(who started the ranks), ``_on_before_batch_transfer`` (the hook may be the data module's), ``fit_loop._restarting``
(its setter takes no False where ``max_steps`` is set), what a strategy keeps. Of torchmetrics, ``_update_count``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Mapping
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
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
    from torch.utils.data import DataLoader
except ModuleNotFoundError as error:
    raise _MissingExtraError.of(str(error.name), "lightning", __name__) from error

from memfit.errors import StoppedError, UsageError
from memfit.integrations._lightning import (
    Batches,
    MemfitCallback,
    acts_late,
    metric_states,
    monitors,
    put_metrics,
    refuse_means,
    refused_ranks,
    silent,
)
from memfit.integrations._refuse import Cause, refuse_any
from memfit.training import (
    Due,
    KeyedStream,
    LoopParts,
    Position,
    Ranks,
    SealedFolder,
    Session,
    beat,
    deaf_workers,
    is_stream,
    keep_beats,
    order_of,
    rehearse,
    say,
)

__all__ = ["Exact", "MemfitCallback", "Stop"]

_FILE, _METRICS = "lightning.ckpt", "metrics-{}.pt"


class Stop(MemfitCallback):
    """Stops a training by SIGTERM, SIGUSR1 or Ctrl-C after the optimizer step under way, and resumes it.

    It ends with exit code 75. The newest whole checkpoint is taken, each sample of the epoch is seen once, and random
    numbers stay as Lightning draws them: what the data draw differs from that of a training without a stop. Of several
    ranks (strategy ``"ddp"``) all stop after the same step, and rank 0 seals what they saved.

    Args:
        folder: Where checkpoints are kept.
        every: A checkpoint after so many optimizer steps, beside that at the end.
        every_seconds: A checkpoint when the last one is so old; None: none by time.
        keep: The newest checkpoints that stay.
        allow: Names of settings that may differ from the checkpoint's, such as ``"learning_rate"``: those of now hold.

    Raises:
        UsageError: In ``fit``, before anything is trained: what cannot be resumed, by name.
        StoppedError: In ``fit``: a signal asked for it; everything up to here is saved.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        every: int | None = None,
        every_seconds: float | None = 600.0,
        keep: int = 2,
        allow: Collection[str] = (),
    ) -> None:
        super().__init__()
        times: Any = {"every": every, "every_seconds": every_seconds, "keep": keep}
        self.session = Session(LoopParts({}), SealedFolder(folder), allow=allow, **times)
        self._loader: Any = None
        self._is_asked = self._is_in_epoch = False
        self._followed: dict[str, str] = {}
        self._stepped: set[torch.optim.Optimizer] = set()
        self._num_open = 0  # batches since the last step, of each optimizer where the module makes its steps

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
        self._check(trainer, model)
        trainer.callbacks = [one for one in trainer.callbacks if not isinstance(one, MemfitCallback)] + [self]
        session, self._num_open = self.session, 0
        self._is_asked = self._is_in_epoch = True
        with session:
            self._join(trainer)
            session.position = Position()
            path = session.open((lambda: (None, None)) if trainer.fast_dev_run else None)
            if path is not None:
                at, then = session.position, session.facts["identity"]["world_size"]
                if then != trainer.world_size:  # the last batch before which all was trained
                    at.batch = at.batch * then // trainer.world_size
                    at.batch -= at.batch % trainer.accumulate_grad_batches
                    at.epoch_step = at.batch // trainer.accumulate_grad_batches
                options["ckpt_path"] = path / _FILE
                session.at_end.enter_context(warnings.catch_warnings())  # Lightning knows no position but its loaders'
                warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch")
            prepare = partial(self._prepare, trainer)
            train = train_dataloaders
            holder = train if isinstance(train, LightningDataModule) else options.get("datamodule") or model
            if train is None or holder is train:
                for name, change in (("train_dataloader", prepare), ("val_dataloader", _deaf)):
                    if is_overridden(name, holder):
                        make = getattr(holder, name)
                        setattr(holder, name, lambda make=make, change=change: change(make()))
                        session.at_end.callback(vars(holder).pop, name)
            else:
                train = prepare(train)
            trainer.fit(model, train, _deaf(val_dataloaders), **options | {"weights_only": False})
            if session.resumed is not None and not session.resumed.is_loaded:  # Lightning has begun nothing
                session.journal.is_over, at = True, session.position
                session.journal.resume(session.resumed.path, (at.epoch, at.epoch_step))

    def _join(self, trainer: Any) -> None:
        session, signals = self.session, trainer._signal_connector
        # it ends a training without a save, and calls a collective alone
        signals._sigterm_notifier_fn = lambda *_: None
        session.at_end.callback(vars(signals).pop, "_sigterm_notifier_fn")
        if trainer.world_size == 1:
            return
        assert session.keeper is not None
        keep_beats(session.keeper.path)
        beat("begin")
        trainer.strategy.setup_environment()
        session.join(Ranks.current())

    def _check(self, trainer: Any, model: LightningModule) -> None:
        is_exact, kind = self.session.stream is not None, type(trainer).__module__
        cluster = trainer._accelerator_connector.cluster_environment
        if isinstance(cluster, SLURMEnvironment) and cluster.auto_requeue:
            cluster.auto_requeue = False
            say("Lightning's own requeueing is off: a stop ends with exit code 75, on which memfit's script requeues")
        is_timed = is_exact and trainer._val_check_time_interval is not None
        causes = [
            (f"a Trainer of {kind}", not isinstance(trainer, Trainer), "take that of lightning.pytorch"),
            *refused_ranks(trainer, model, is_exact),
            ("reload_dataloaders_every_n_epochs", trainer.reload_dataloaders_every_n_epochs > 0, "leave it off"),
            ("overfit_batches", trainer.overfit_batches > 0, "leave it off, and train on a part of the data set"),
            ("a val_check_interval in time", is_timed, "give it as a number of batches"),
        ]
        for one in trainer.callbacks:
            name = f"callbacks.{type(one).__name__}"
            moves = isinstance(one, BaseFinetuning | BatchSizeFinder | LearningRateFinder)
            why = "it changes step or optimizer when a fit begins: set what it found, and leave it out"
            late = "it acts later by what no checkpoint holds: leave it out"
            causes.append((name, moves, f"{why}; or allow=({name!r},)"))
            causes.append((name, is_exact and acts_late(one), f"{late}; or allow=({name!r},)"))
        self._refuse(*causes)

    def _refuse(self, *causes: Cause) -> None:
        refuse_any(causes, self.session.allow, is_exact=self.session.stream is not None)

    # --- the way to the first step

    def _prepare(self, trainer: Any, train: Any) -> Any:
        """Return the loader to train on, at the place where the checkpoint was."""
        session, at, ranks = self.session, self.session.position, self.session.ranks
        several = isinstance(train, list | tuple | dict | CombinedLoader)
        self._refuse((f"a {type(train).__name__} of training loaders", several, "pass one loader"))
        data, made = trainer._data_connector, session.loader(train)
        is_dealt = ranks is not None and isinstance(train, DataLoader) and data._requires_distributed_sampler(train)
        order = order_of(made)
        if is_dealt and ranks is not None and order is not None:
            order.deal(ranks.rank, ranks.size)
        elif is_dealt:
            made = data._prepare_dataloader(made, shuffle=True, mode=RunningStage.TRAINING)
        self._loader = Batches(made, trainer.global_rank, partial(self._fetched, trainer))
        session.course = self._loader if session.stream is None else None
        streams = session.course is not None and (session.course.source is not None or is_stream(made))
        self._refuse(("a stream on several ranks", streams and ranks is not None, "train in one process"))
        session.compare_data(self._loader)
        if session.resumed is not None:
            if order is not None:
                order.set_epoch(at.epoch)
                order.skip(at.batch * (self._loader.batch_size or 1))
            elif session.course is not None and "start" in session.resumed.drawn:
                why = session.course.go_on(at.batch, session.resumed.drawn)
                if at.batch:
                    session.journal.inexact(why)
            if session.resumed.changed and at.batch:
                session.journal.inexact(f"the changed data go on at batch {at.batch + 1} of epoch {at.epoch + 1}")
        return self._loader

    def _has_other_ranks(self, trainer: Any) -> bool:
        then = self.session.facts.get("identity", {}).get("world_size", trainer.world_size)
        return bool(then != trainer.world_size)

    def on_load_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        session, loops = self.session, checkpoint["loops"]["fit_loop"]
        if self._has_other_ranks(trainer):
            counts = loops["epoch_loop.batch_progress"]["current"]
            counts |= dict.fromkeys(counts, session.position.batch)
        at = loops["epoch_progress"]["current"]
        if session.resumed is None and session.stream is not None:
            is_within, ends = at["processed"] < at["started"], "pass one of an epoch's end as ckpt_path"
            self._refuse(("Lightning's own checkpoint from within an epoch", is_within, ends))
            session.journal.inexact("the checkpoint has no seal of memfit")

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Compare the settings with the checkpoint's, before its state is loaded over them."""
        if not self._is_asked:
            raise UsageError(
                f"{type(self).__name__} was given to the Trainer, and not asked to fit.",
                rule="it chooses the checkpoint before Lightning begins.",
                remedy="call stop.fit(trainer, module, train_loader, val_loader) in place of trainer.fit(...)",
            )
        session = self.session
        session.parts = _Parts(trainer)
        session.parts.check(session.allow)
        session.compare(
            accumulation=trainer.accumulate_grad_batches,
            precision=str(trainer.precision),
            gradient_clip=[trainer.gradient_clip_val, trainer.gradient_clip_algorithm],
            limit_train_batches=trainer.limit_train_batches,
            max_steps=trainer.max_steps,
            world_size=trainer.world_size,
        )
        if session.resumed is not None:
            trainer.should_stop = session.facts["is_over"]

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        session, at = self.session, self.session.position
        for optimizer in trainer.optimizers:
            hook = optimizer.register_step_post_hook(lambda made, *_: self._after_step(made))
            session.at_end.callback(hook.remove)
        if session.resumed is not None:
            moved = f"a callback that moved it from step {at.step} to {trainer.global_step}"
            self._refuse((moved, trainer.global_step != at.step, "leave it out"))
            total = trainer.fit_loop.epoch_loop.batch_progress.total
            total.ready = total.completed  # Lightning counts the batch twice in which it was saved
        session.begin()
        if session.resumed is None and "rehearsal" not in session.allow:
            self._rehearse(trainer, pl_module)
        elif at.batch:
            say("the epoch's means of self.log begin anew; metrics of torchmetrics go on")
            if self._has_other_ranks(trainer):
                session.journal.inexact(f"the changed ranks go on at batch {at.batch + 1} of epoch {at.epoch + 1}")
        self._followed = {} if session.stream is None else monitors(trainer, session.allow)
        session.at_end.callback(vars(pl_module).pop, "log", None)
        session.listen()
        self._is_in_epoch = False

    def _rehearse(self, trainer: Any, pl_module: LightningModule) -> None:
        """Say whether the largest batch fits; what the module remembers of it is put back."""

        def loss_of(batch: Any) -> torch.Tensor:
            batch = trainer.precision_plugin.convert_input(batch)
            batch = trainer.strategy.batch_to_device(pl_module._on_before_batch_transfer(batch, dataloader_idx=0))
            with trainer.precision_plugin.train_step_context():
                is_numbered = is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)
                found: Any = pl_module.training_step(batch, *[0] * is_numbered)
            loss: torch.Tensor = found["loss"] if isinstance(found, Mapping) else found
            return loss

        if not pl_module.automatic_optimization:
            say("no verdict whether the largest batch fits: the module makes its steps itself")
            return
        before = copy.deepcopy(metric_states(pl_module))
        with silent(pl_module):
            rehearse(pl_module, trainer.optimizers[0], loss_of, self._loader.loader)
        put_metrics(pl_module, before)

    # --- steps

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._is_in_epoch = True
        if (order := order_of(self._loader)) is not None:
            order.set_epoch(trainer.current_epoch)  # Lightning tells no batch_sampler

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepped.add(optimizer)
        beat("data")  # callbacks may save, too

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        session = self.session
        vars(pl_module).pop("log", None)
        beat("data")
        self._num_open += 1
        is_made = trainer.global_step != self.session.position.step  # also one that a scaler skipped
        if not pl_module.automatic_optimization:
            is_made = len(self._stepped) == len(trainer.optimizers)
            idle = not is_made and self._num_open > trainer.num_training_batches
            self._refuse(("an optimizer that made no step in an epoch's batches", idle, "step it, or do not return it"))
        if is_made:
            self._stepped.clear()
            self._num_open = 0
            batches, every = trainer.num_training_batches, trainer.accumulate_grad_batches
            session.made(trainer.global_step, 0 if batches == float("inf") else -(-batches // every))
        if is_made and session.is_leaving:
            self._move(trainer, batch_idx + 1)
            if session.due() is Due.STOP or batch_idx + 1 >= trainer.num_training_batches:
                session.stop()

    def _fetched(self, trainer: Any) -> None:
        """Seed what is drawn between two steps, where a stop ends one process and the next begins."""
        if not self._is_in_epoch:  # entered midway: Lightning leaves its beginning out
            self._is_in_epoch, module = True, trainer.lightning_module
            hooks = [(one, one.on_train_epoch_start) for one in (*trainer.callbacks, module)]
            own = [pair for pair in hooks if not pair[1].__module__.startswith(("lightning.", "memfit."))]
            with silent(module):  # Lightning lets nothing be logged here
                for one, hook in own:
                    hook(*() if one is module else (trainer, module))
            if own:
                names = ", ".join(type(one).__name__ for one, _ in own)
                say(f"on_train_epoch_start is called again for the rest of the epoch, of {names}")
            if (resumed := self.session.resumed) is not None:
                trainer.fit_loop._restarting = False  # else no schedule follows what this epoch logs
                if not self._has_other_ranks(trainer):
                    found = torch.load(resumed.path / _METRICS.format(trainer.global_rank), weights_only=False)
                    put_metrics(module, found["metrics"])
                    trainer.callback_metrics.update(found["figures"])
        if self.session.stream is not None and self._num_open == 0:
            self.session.stream.step(-1 - trainer.global_step)

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        session = self.session
        session.restore_draws()
        self._move(trainer, batch_idx)
        due = session.meet()  # all have their batch: nobody waits for long within the step
        if self._num_open == 0:
            is_saved = session.saved.step == trainer.global_step or session.is_leaving
            if due and not is_saved and not trainer.fast_dev_run:
                self._save(trainer)
            if due is Due.STOP:
                session.stop()
            session.begin_step()
        session.took(batch)
        session.beat("microbatch")
        if self._followed:
            refuse_means(pl_module, self._followed)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def _move(self, trainer: Any, batch: int) -> None:
        epoch_step, step = batch // trainer.accumulate_grad_batches, trainer.global_step
        self.session.position = Position(trainer.current_epoch, batch, epoch_step=epoch_step, step=step)

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        if self.session.is_leaving:
            self.session.stop()
        super().on_validation_start(trainer, pl_module)

    def on_validation_batch_start(self, *batch: Any) -> None:
        beat("validate")

    def on_validation_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        beat("vote")  # metrics of all ranks are summed

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        beat("data")

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Save the end, so that the same command ends at once."""
        session = self.session
        if trainer.global_step != session.saved.step and not trainer.fast_dev_run:
            self._move(trainer, 0)
            if session.course is not None:
                session.course.draws = {}
            self._save(trainer, is_over=bool(trainer.should_stop))

    def _save(self, trainer: Any, *, is_over: bool = False) -> None:
        def write(path: Path) -> None:
            trainer.save_checkpoint(path / _FILE)
            found = {"metrics": metric_states(trainer.lightning_module), "figures": dict(trainer.callback_metrics)}
            torch.save(found, path / _METRICS.format(trainer.global_rank))

        self._enter("checkpoint")
        self.session.save(write, is_over=is_over)

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Let a stop close the loggers' runs as finished: they go on."""
        if isinstance(exception, StoppedError):
            for logger in trainer.loggers:
                logger.finalize = lambda status, own=logger.finalize: own("finished")
                self.session.at_end.callback(vars(logger).pop, "finalize")


class Exact(Stop):
    """Resumes a training to the same bytes, wherever it was stopped or killed, or refuses it before step 1.

    Order, items, collation and the module's draws are functions of seed and position, so they are others than without
    it, of the same distribution. Weights do not depend on the number of workers.

    Args:
        seed: Other seeds, other order and draws.
        allow: As for ``Stop``, and names of what is refused otherwise, such as ``"data"``.
        folder, every, every_seconds, keep: As for ``Stop``.

    Raises:
        UsageError: As for ``Stop``, and what cannot be exact, by name.
        StoppedError: As for ``Stop``.
    """

    def __init__(self, folder: Path | str, *, seed: int, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.session.stream = KeyedStream(seed)


class _Parts(LoopParts):
    """What a Trainer of Lightning has; it saves and loads them itself."""

    def __init__(self, trainer: Any) -> None:
        made = [one for one in trainer.optimizers if type(one).__name__ != "_MockOptimizer"]
        named = [*made, *(one.scheduler for one in trainer.lr_scheduler_configs), trainer.lightning_module]
        super().__init__({str(number): one for number, one in enumerate(named)})
        self.trainer = trainer

    def wrappers(self) -> list[Any]:
        return [self.trainer.strategy.model]

    def load(self, path: Path) -> None:
        """Nothing is left to do."""


def _deaf(loaders: Any) -> Any:
    for one in loaders if isinstance(loaders, list | tuple) else [loaders]:
        deaf_workers(one)
    return loaders
