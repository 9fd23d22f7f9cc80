"""Watch a training in Lightning, replay its loader, and keep its metrics; see ``lightning.py``."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torchmetrics import Metric, MetricCollection

from memfit.errors import UsageError
from memfit.integrations._refuse import Cause
from memfit.rundir import (
    CANARY_BATCHES,
    CANARY_STEPS,
    canary_folder,
    canary_over,
    is_canary,
    loader_settings,
    scratch_folder,
)
from memfit.training import Course, LoopParts, Session, Unheard, length_of, order_of, samples_in


class MemfitCallback(Callback):
    """Watches a training: phases, steps, epochs, losses and waits become events; nothing else changes.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> watch = MemfitCallback()
        >>> quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        >>> trainer = Trainer(max_epochs=1, callbacks=[watch], accelerator="cpu", enable_checkpointing=False, **quiet)
        >>> trainer.fit(BoringModel())  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.session = Session(LoopParts({}))
        self._began = self._ended = 0.0
        self._phase = ""

    def _enter(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            self.session.journal.phase(phase)

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        if not trainer.is_global_zero:
            self.session.journal = Unheard()
        journal = self.session.journal
        journal.is_over, journal.num_epochs = False, max(trainer.max_epochs or 0, 0) or None
        if is_canary() and stage == "fit":
            trainer.limit_train_batches = CANARY_STEPS * trainer.accumulate_grad_batches
            trainer.limit_val_batches = CANARY_BATCHES if trainer.limit_val_batches else 0
            trainer.val_check_interval, trainer.check_val_every_n_epoch = 1.0, 1
        if scratch_folder() is not None and stage == "fit":
            for one in trainer.checkpoint_callbacks:
                one.dirpath = str(canary_folder(trainer.default_root_dir))

    def _end_canary(self, trainer: Any) -> None:
        """Save in a canary that has trained and validated, and end it there."""
        if is_canary():
            self._enter("checkpoint")
            trainer.save_checkpoint(canary_folder(trainer.default_root_dir) / "canary.ckpt")
            raise canary_over()

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.session.journal.begin_epoch()
        self._phase = ""

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._enter("train")
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        waited = self._began - self._ended if self._ended else 0.0
        self.session.journal.took(now - self._began + waited, waited, samples_in(batch))
        self._ended = now
        every, num = trainer.accumulate_grad_batches, trainer.num_training_batches
        if (batch_idx + 1) % every == 0 or batch_idx + 1 == num:
            step = -(-(batch_idx + 1) // every)
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            num_steps = step if num == float("inf") else -(-int(num) // every)
            where = {"epoch": trainer.current_epoch + 1, "step": step, "num_steps": num_steps}
            self.session.journal.step(where, loss, pl_module.device)

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._enter("validate")

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self._ended = 0.0
        if not trainer.sanity_checking:
            self._end_canary(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self._end_canary(trainer)
        loaders = loader_settings(trainer.train_dataloader) | loader_settings(trainer.val_dataloaders, "validation")
        self.session.journal.loaders(loaders | {"accumulation": trainer.accumulate_grad_batches})
        numbers = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        self.session.journal.epoch(trainer.current_epoch + 1, numbers, self.session.journal.pace())
        self._ended = 0.0


class Batches(Course):
    """A training loader of which Lightning knows no more than that it gives batches: it deals and saves nothing of it.
    It begins when its first batch is asked for: Lightning makes iterators before it knows the epoch."""

    def __init__(self, loader: Any, rank: int, fetched: Callable[[], None]) -> None:
        _auto_add_worker_init_fn(loader, rank)
        super().__init__(loader, LoopParts({}), runs_forward=length_of(loader) is not None)
        self.fetched = fetched

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__() if order_of(self.loader) is None else self.loader:
            self.fetched()
            yield batch


def acts_late(callback: Callback) -> bool:
    """Return whether a callback of Lightning's acts by what no checkpoint holds, later than in a resume's first steps:
    an average that is used at the end, another accumulation in a later epoch."""
    if isinstance(callback, GradientAccumulationScheduler):
        return len(callback.scheduling) > 1  # an epoch that is entered in its midst does not ask it
    return isinstance(callback, StochasticWeightAveraging)


def refused_ranks(trainer: Any, module: LightningModule, is_exact: bool) -> list[Cause]:
    """Return what several ranks may have that no checkpoint holds."""
    strategy, size, cluster = trainer.strategy, trainer.world_size, trainer._accelerator_connector.cluster_environment
    if size == 1:
        started = isinstance(cluster, TorchElasticEnvironment) and cluster.world_size() > 1
        return [("several ranks and a Trainer of one device", started, 'pass devices= and strategy="ddp"')]
    kind = type(strategy)
    if kind is not DDPStrategy:
        return [(f"{size} ranks in {kind.__name__}", True, 'pass strategy="ddp", or train in one process')]
    starts = strategy._start_method != "popen" or not cluster.creates_processes_externally
    by_hand, has_state = not module.automatic_optimization, is_exact and strategy._ddp_comm_state is not None
    return [
        ("ranks that Lightning starts", starts, f"let memfit start them: memfit run --nproc {size} -- python train.py"),
        ("automatic_optimization=False on several ranks", by_hand, "train in one process"),
        ("sync_batchnorm", strategy._layer_sync is not None, "leave it off"),
        ("a communication hook that has a state", has_state, "take another one, or Stop in place of Exact"),
        ("a model_averaging_period", strategy._model_averaging_period is not None, "leave it off"),
    ]


# --- what Lightning computes on the way, and saves in no checkpoint


def metric_states(module: LightningModule) -> dict[str, dict[str, Any]]:
    """Return what the metrics of torchmetrics have gathered so far, for ``put_metrics``."""
    for one in module.modules():
        if isinstance(one, MetricCollection):
            one.values()  # gives each metric of a group the state that they share
    metrics = {name: one for name, one in module.named_modules() if isinstance(one, Metric)}
    return {name: {**one.metric_state, "_update_count": one.update_count} for name, one in metrics.items()}


def put_metrics(module: LightningModule, states: Mapping[str, Mapping[str, Any]]) -> None:
    named = dict(module.named_modules())
    for name, state in states.items():
        for key, value in state.items():
            setattr(named[name], key, value)


def monitors(trainer: Any, allow: Collection[str]) -> dict[str, str]:
    """Return which callbacks and schedules follow a figure, by its name."""
    found = {one.monitor: type(one).__name__ for one in trainer.callbacks if getattr(one, "monitor", None)}
    plateaus = [one for one in trainer.lr_scheduler_configs if one.reduce_on_plateau]
    found |= {one.monitor: type(one.scheduler).__name__ for one in plateaus}
    return {name: who for name, who in found.items() if f"monitor.{name}" not in allow}


def refuse_means(module: LightningModule, followed: Mapping[str, str]) -> None:
    """Let the module's next steps refuse to log a plain mean that is followed."""
    own = module.log

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        found = {name, f"{name}_epoch"} & followed.keys() if options.get("on_epoch") else set()
        if found and not isinstance(value, Metric):
            name = found.pop()
            raise UsageError(
                f"{followed[name]} follows {name!r}, a plain mean of the steps of an epoch.",
                rule="exact: Lightning saves no such mean, so it begins anew where an epoch is resumed in its midst.",
                remedy="log a torchmetrics.MeanMetric() under that name, or follow a figure of the validation; or pass "
                f'allow=("monitor.{name}",)',
            )
        own(name, value, *args, **options)

    vars(module)["log"] = log


# --- a step that is tried


@contextmanager
def silent(module: LightningModule) -> Iterator[None]:
    """Let a step be tried that logs."""
    vars(module).update(log=lambda *_, **__: None, log_dict=lambda *_, **__: None)
    try:
        yield
    finally:
        del module.__dict__["log"], module.__dict__["log_dict"]
