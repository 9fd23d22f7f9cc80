"""Watch, stop and resume the Trainer of transformers, and make the resume exact: ``docs/frameworks/huggingface.md``."""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from memfit.errors import MissingExtraError as _MissingExtraError

try:
    import torch
    import transformers
    from torch.utils.data import IterableDataset
    from transformers.trainer_utils import rotate_checkpoints
except ModuleNotFoundError as error:
    raise _MissingExtraError.of(str(error.name), "huggingface", __name__) from error

from memfit.errors import StoppedError, UsageError
from memfit.integrations._huggingface import PREFIX, MemfitCallback, Positioned, refuse, steps_of, under_own_names
from memfit.integrations._huggingface_recovery import Recovery
from memfit.rundir import canary_folder
from memfit.training import (
    GOES_ON,
    WHOLE,
    BySample,
    KeyedStream,
    LoopParts,
    Ranks,
    Sealed,
    SealedFolder,
    Stopper,
    Unheard,
    among_peers,
    beat,
    check_first_forward,
    check_loader,
    deaf_workers,
    environment,
    exports_position,
    keep_beats,
    length_of,
    load_checkpoint,
    loading,
    order_of,
    order_sums,
    refuse_changed,
    rehearse,
    remade,
    save_checkpoint,
    stream_identity,
)
from memfit.units import list_some

__all__ = ["MemfitCallback", "exact", "stoppable"]

_STREAM = "stream.pt"
#: Arguments that must not change between a checkpoint and its resume.
_FIXED = [
    "gradient_accumulation_steps",
    "max_grad_norm",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "bf16",
    "fp16",
]


def stoppable(trainer: transformers.Trainer, *, recover: bool = False, allow: Collection[str] = ()) -> None:
    """Let SIGTERM, SIGUSR1 or Ctrl-C stop ``trainer.train()`` after the step under way, and let it go on from there.

    It ends with exit code 75. ``trainer.train()`` takes the newest whole checkpoint by itself. Random numbers stay as
    they are: what the data draw is another after a resume than in a training without a stop. Of several ranks in
    ``DistributedDataParallel`` all stop after the same step, and rank 0 seals what they saved.

    Args:
        trainer: Before its ``train``.
        recover: Split a batch smaller that runs out of memory, and repeat its step; the batch size stays.
        allow: Names of settings that may differ from the checkpoint's, such as ``"learning_rate"``: those of now hold.

    Raises:
        UsageError: What cannot be resumed, by name; also in ``train``, for a checkpoint of another training.
    """
    _Guard(trainer, allow, None, recover)


def exact(
    trainer: transformers.Trainer, *, seed: int | None = None, recover: bool = False, allow: Collection[str] = ()
) -> None:
    """Let ``trainer.train()`` go on to the same bytes, wherever it was stopped or killed, or refuse it before step 1.

    It does what ``stoppable`` does. Order, items, collation and the model's draws are functions of seed and position,
    so they are others than without it, of the same distribution. The number of workers changes no weight; another
    number of ranks is refused.

    Args:
        trainer: Before its ``train``.
        seed: Other seeds, other order and draws; by default the Trainer's ``data_seed`` or ``seed``.
        recover: As for ``stoppable``.
        allow: As for ``stoppable``, and parts that may move, such as ``"collator.counter"``.

    Raises:
        UsageError: As for ``stoppable``, and what cannot be exact.
    """
    args = trainer.args
    if seed is None:
        seed = args.seed if args.data_seed is None else args.data_seed
    guard = _Guard(trainer, allow, KeyedStream(seed, trainer.args.process_index), recover)
    guard.get_train_dataloader()  # it checks the data
    guard.is_checked = True


class _Guard(MemfitCallback):
    """Stands in for some methods of one Trainer, and hears its events."""

    def __init__(
        self, trainer: transformers.Trainer, allow: Collection[str], stream: KeyedStream | None, recover: bool
    ) -> None:
        super().__init__()
        refuse(trainer, allow, is_exact=stream is not None, recover=recover)
        self.trainer: Any = trainer
        self.allow, self.stream, self.is_checked = frozenset(allow), stream, False
        trainer.args.output_dir = str(canary_folder(str(trainer.args.output_dir)))
        self.folder, self.stopper = SealedFolder(trainer.args.output_dir, PREFIX), Stopper()
        self.ranks = self.folder.ranks = Ranks.current()
        if self.ranks is not None:
            self.stopper.join(self.ranks)
            keep_beats(self.folder.path)
            self.journal = Unheard() if self.ranks.rank else self.journal
        self.found: Sealed | None = None
        self.loader: Any = None
        self.source: Positioned | None = None
        #: Whole passes over the data, and the batches of the next one; at first what the checkpoint says.
        self.at = [0, 0]
        self.is_open = self.is_begun = False
        self.identity: dict[str, Any] = {}
        self.saved_step, self.began, self.seconds = 0, 0.0, 0.0
        self.trainer.pop_callback(MemfitCallback)  # this one watches too
        self.trainer.add_callback(self)
        seams = [self.train, self.get_train_dataloader, self.get_eval_dataloader, self._load_optimizer_and_scheduler]
        seams += [self.get_batch_samples, self._save_checkpoint, self._finalize_training]
        seams += [self._issue_warnings_after_load, self._load_from_checkpoint]
        self.own = {one.__name__: getattr(trainer, one.__name__) for one in seams}
        for name in self.own:
            setattr(trainer, name, getattr(self, name))
        self.recovery = Recovery(trainer) if recover else None

    # --- in place of the Trainer's own methods

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            beat("load")
            if self.ranks is not None:
                stack.enter_context(among_peers())
            stack.enter_context(self.folder.held())
            stack.callback(setattr, self.trainer.args, "ignore_data_skip", self.trainer.args.ignore_data_skip)
            self.stopper.listen()
            stack.callback(self.stopper.close)
            self.trainer.callback_handler.callbacks.sort(key=lambda one: one is self)  # the last to hear of a save
            self.seconds, self.identity = 0.0, {}
            path, self.found = self.folder.lead(lambda: self._choose(resume_from_checkpoint))
            self.at, self.is_begun = [0, 0] if self.found is None else [*self.found.facts["pass"]], False
            if self.stream is not None:
                stack.callback(check_first_forward(self.trainer.model, allow=self.allow).remove)
            self.began = time.time()
            try:
                return self.own["train"](path, *args, **kwargs)
            except StoppedError as error:
                traceback.clear_frames(error.__traceback__)  # with them goes what iterates, and its workers
                for loader in self.trainer.accelerator._dataloaders:
                    if (lasting := getattr(loader, "_iterator", None)) is not None:
                        lasting._shutdown_workers()
                raise

    def _choose(self, named: Any) -> tuple[str | None, Sealed | None]:
        """Return the checkpoint to go on from, and its seal: the one that is named, or the newest whole one."""
        if named is False:
            return None, None
        newest = SealedFolder(self.folder.path, PREFIX)
        path = Path(named) if isinstance(named, str | Path) else None
        is_there = path is not None and path.is_dir()
        found, foreign = newest.newest(), newest.foreign()
        if path is not None and is_there == path.is_dir():  # else it was torn, and is removed now
            folder, number = SealedFolder(path.parent, PREFIX), path.name.removeprefix(PREFIX)
            is_sealed = is_there and number.isdigit() and path not in folder.foreign()
            return str(path), folder.read(int(number)) if is_sealed else None
        if foreign and (found is None or int(foreign[0].name.removeprefix(PREFIX)) > found.step):
            if named is True:
                return str(foreign[0]), None
            raise UsageError(
                f"{foreign[0]} is newer than what memfit has sealed there.",
                rule="a checkpoint without a seal may be torn, so it is taken only when it is named.",
                remedy=f'trainer.train(resume_from_checkpoint="{foreign[0]}"), or take another output_dir',
            )
        return str(found.path) if found else None, found

    def get_train_dataloader(self) -> Any:
        loader = self._prepared(self.own["get_train_dataloader"], self._change)
        if self.stream is not None and not hasattr(loader, "base_dataloader"):
            loader = self.trainer.accelerator.prepare(loader)  # a plain one would not be told the epoch
        if self.stream is not None and order_of(loader) is None:
            raise UsageError(
                f"{type(self.trainer).__name__}.get_train_dataloader gives a loader that was prepared before.",
                rule="exact: order and draws are bound to seed and position before Accelerate wraps a loader.",
                remedy="let it make the DataLoader in each call, and return it plain or prepare it there",
            )
        self.loader, self._num_steps = loader, steps_of(loader, self.trainer.args) or 1
        return loader

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return self._prepared(lambda: self.own["get_eval_dataloader"](*args, **kwargs), deaf_workers)

    def _prepared(self, make: Callable[[], Any], change: Callable[[Any], Any]) -> Any:
        """Make a loader, and change it before Accelerate wraps it."""
        accelerator, prepare = self.trainer.accelerator, self.trainer.accelerator.prepare
        seen: list[Any] = []

        def changed(*parts: Any, **options: Any) -> Any:
            seen.extend(parts)
            loaders = [change(one) if isinstance(one, torch.utils.data.DataLoader) else one for one in parts]
            return prepare(*loaders, **options)

        accelerator.prepare = changed
        try:
            made = make()
        finally:
            del accelerator.prepare
        return made if seen or hasattr(made, "base_dataloader") else change(made)

    def _change(self, loader: Any) -> Any:
        if self.stream is None:
            return self._position_stream(deaf_workers(loader))
        if not self.is_checked:
            # transformers wraps the collator in one that drops columns
            inner = {name.replace("collator.", "collator.data_collator.", 1) for name in self.allow}
            check_loader(loader, self.allow | inner)
        return self.stream.loader(loader)

    def _position_stream(self, loader: Any) -> Any:
        """Return a loader whose stream begins where the checkpoint says, if the stream can."""
        self.source = None
        data = loader.dataset
        if not isinstance(data, IterableDataset):
            return loader
        if self.ranks is not None:
            raise UsageError(
                f"The training data are a stream ({type(data).__name__}), and there are {self.ranks.size} ranks.",
                rule="the position of a stream is kept in one process alone.",
                remedy="give the data an index, or train in one process",
            )
        if loader.num_workers or not exports_position(data):
            if self.at[0] and length_of(loader) is None:  # transformers runs forward within one pass only
                self.trainer.args.ignore_data_skip = True
            return loader
        self.source = Positioned(data, loader.batch_size or 1, loader.drop_last)
        if self.found is not None and (self.found.path / _STREAM).exists():
            self.source.go_on(load_checkpoint(self.found.path / _STREAM))
            self.trainer.args.ignore_data_skip = True  # nor is it run forward
        return remade(loader, dataset=self.source, batch_size=loader.batch_size, drop_last=loader.drop_last)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        beat("data")
        batches, number = self.own["get_batch_samples"](*args, **kwargs)
        self.at[1] += len(batches)
        if self.source is not None:
            self.source.num_taken += len(batches)
        if self.recovery is not None:
            self.recovery.begin(batches)
        return batches, number

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        trainer, stream = self.trainer, self.stream
        trainer.callback_handler.callbacks.sort(key=lambda one: one is self)  # some may have been made anew
        parts, changed, is_between = self._parts(), {}, not self._position(trainer.state)[1]
        self.identity = self._identify(parts)
        if self.found is not None:
            saved = dict(self.found.facts["identity"])
            if is_between and saved["stream"] is None:  # between two epochs stoppable may become exact
                saved |= {name: self.identity[name] for name in stream_identity(None)}
            allow = self.allow if stream is not None else {*self.allow, "world_size"}
            changed = refuse_changed(self.found.path, saved, self.identity, allow)
        elif stream is not None and not is_between:
            raise UsageError(
                f"{checkpoint} was saved within an epoch, and not by exact.",
                rule="exact: an epoch's order and draws are functions of the seed from its first batch on.",
                remedy="begin exact at an epoch's end; until there, call stoppable(trainer)",
            )
        with loading(self.found):
            self.own["_load_optimizer_and_scheduler"](checkpoint)
        parts.take({name: self.identity[name] for name in changed if name in self.identity})
        counted = {"num_samples", "batch_size", "gradient_accumulation_steps", "drop_last", "world_size"}
        if changed.keys() & counted:
            now = trainer.state.global_step / self._num_steps
            self.journal.inexact(
                f"{trainer.state.epoch:.2f} epochs were trained, and transformers goes on at {now:.2f}"
            )

    def _load_from_checkpoint(self, checkpoint: str, *args: Any) -> None:
        with loading(self.found):
            self.own["_load_from_checkpoint"](checkpoint, *args)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse a checkpoint of which not every weight was taken: transformers only logs that."""
        weights = self.trainer.model.state_dict(keep_vars=True)
        taken = {id(one) for name, one in weights.items() if name not in load_result.missing_keys}
        lost = [name for name in load_result.missing_keys if name in weights and id(weights[name]) not in taken]
        if found := [*lost, *load_result.unexpected_keys]:
            raise UsageError(
                f"The checkpoint has other weights than the model: {list_some(found)}.",
                rule="a resume takes every weight; what is missing would go on as it was initialised.",
                remedy="build the model as it was, or take another output_dir",
            )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        trainer, args, state = self.trainer, self.trainer.args, self.trainer.state
        step, limit = state.global_step, args.save_total_limit
        self.folder.begin(step)
        args.save_total_limit = None  # nothing is removed before the seal
        try:
            with self.folder.writing():
                with under_own_names(trainer.model):
                    self.own["_save_checkpoint"](model, trial)
                if self.source is not None:
                    save_checkpoint(self.folder.folder_of(step) / _STREAM, self.source.position())
        finally:
            args.save_total_limit = limit
        running = [float(trainer._tr_loss), float(trainer._total_loss_scalar), trainer._globalstep_last_logged]
        sums = [running] if self.ranks is None else self.ranks.gather(running)
        facts = {"identity": self.identity, "environment": environment(), "epochs": state.epoch, "running": sums}
        if self.recovery is not None:
            facts["recovery"] = self.recovery.step.state_dict()
        seconds = self.seconds + time.time() - self.began
        at = [self.at[0] + 1, 0] if getattr(self.loader, "end_of_dataloader", False) else self.at
        self.folder.seal(step, {"epoch": self._position(state)[0], "seconds": seconds, "pass": at, **facts})
        self.saved_step = step
        if args.should_save:
            rotate_checkpoints(args.output_dir, limit, state.best_model_checkpoint, use_mtime=True)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        return self.own["_finalize_training"](trial, num_train_samples, start_time - self.seconds)

    # --- what must not change

    def _parts(self) -> LoopParts:
        made, schedule = self.trainer.optimizer, self.trainer.lr_scheduler
        return LoopParts(
            {"model": self.trainer.model, "optimizer": getattr(made, "optimizer", made), "schedule": schedule}
        )

    def _identify(self, parts: LoopParts) -> dict[str, Any]:
        trainer, args, stream = self.trainer, self.trainer.args, self.stream
        parts.check(self.allow)
        shapes = [(name, [*one.shape], one.requires_grad) for name, one in trainer.model.named_parameters()]
        return {
            **{name: getattr(args, name, None) for name in _FIXED},
            "num_samples": length_of(self.loader.dataset),
            "batch_size": trainer._train_batch_size,
            "drop_last": args.dataloader_drop_last,
            "sampler": str(getattr(args, "train_sampling_strategy", None)),
            "recover": self.recovery is not None,
            "world_size": args.world_size,
            "weights": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
            **stream_identity(stream),
            **parts.identity(),
        }

    # --- events

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        self.identity = self.identity or self._identify(self._parts())
        self.saved_step = state.global_step
        super().on_train_begin(args, state, control, train_dataloader)
        if self.recovery is not None:
            saved = None if self.found is None else self.found.facts.get("recovery")
            self.recovery.open(self._parts().optimizers()[0], saved)
        if self.found is not None:
            facts, trainer = self.found.facts, self.trainer
            rank = args.process_index if args.process_index < len(facts["running"]) else 0
            loss, trainer._total_loss_scalar, trainer._globalstep_last_logged = facts["running"][rank]
            trainer._tr_loss = torch.tensor(loss, device=args.device)
            trainer._initial_global_step, self.seconds = 0, facts["seconds"]
            if self.stream is not None:
                self.found.check_environment()
        if self.stream is None and self._position(state)[1]:
            self.journal.inexact(self._inexact(args, state))
        elif self.found is None and state.global_step:
            self.journal.inexact("the checkpoint has no seal of memfit")
        self._end_if_saved(state)
        if self.ranks is not None and self.stream is not None:
            order_sums(self.trainer.model_wrapped)
        is_over = bool(self.found) and state.global_step >= state.max_steps
        if not ({"rehearsal"} & self.allow or is_over or isinstance(self.loader.dataset, IterableDataset)):
            self._rehearse()

    def _rehearse(self) -> None:
        """Say whether the largest batch fits, or refuse it."""
        trainer = self.trainer
        model = trainer.model_wrapped if self.ranks is None else trainer.model  # no peer is waited for here

        def loss(batch: Any) -> torch.Tensor:
            with trainer.compute_loss_context_manager():
                found: torch.Tensor = trainer.compute_loss(model, trainer._prepare_inputs(batch))
            return found

        model.train()
        split = WHOLE if self.recovery is None else BySample()
        rehearse(model, self._parts().optimizers()[0], loss, self.loader, split)

    def _inexact(self, args: Any, state: Any) -> str:
        if not isinstance(self.loader.dataset, IterableDataset):
            return LoopParts.order_again(self.loader, draws_again=False)
        if self.found is not None and (self.found.path / _STREAM).exists():
            return GOES_ON
        batches = state.global_step * args.gradient_accumulation_steps if self.found is None else self.at[1]
        number = batches * args.train_batch_size
        return f"{number} samples are {'seen again' if args.ignore_data_skip else 'run forward'}: no state_dict of them"

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.is_begun:
            self.at = [self.at[0] + 1, 0]
        elif args.ignore_data_skip and self.source is None:
            self.at[1] = 0
        self.is_begun = True
        if (order := order_of(self.loader)) is not None:  # Accelerate does not reach it where ranks skip batches
            order.set_epoch(self._position(state)[0])
        super().on_epoch_begin(args, state, control, **kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_begin(args, state, control, **kwargs)
        self._end_if_saved(state)
        beat("microbatch", state.global_step)
        if self.stream is not None:
            self.stream.step(state.global_step)
        if self.recovery is not None:
            epoch, step = self._position(state)
            self.recovery.step.where = {"epoch": epoch + 1, "step": step + 1, "num_steps": self._num_steps}

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.is_open = True
        beat("microbatch", state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        beat("validate")
        super().on_prediction_step(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.is_open = False
        self.stopper.vote(state.global_step)
        is_between = control.should_epoch_stop or not self._position(state)[1]  # then after what the epoch's end brings
        control.should_save |= bool(self.stopper.noted) and not is_between and not control.should_training_stop
        super().on_step_end(args, state, control, **kwargs)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # transformers carries the gradients of a stream's last batches over to its next pass
        control.should_save |= bool(self.stopper.noted) and not (self.is_open or control.should_training_stop)
        super().on_epoch_end(args, state, control, **kwargs)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._phase("train")  # the seal was recorded
        if not control.should_training_stop and state.global_step < state.max_steps:
            self._end_if_saved(state)

    def _end_if_saved(self, state: Any) -> None:
        """End here if a signal asked for it and nothing was trained since the last checkpoint."""
        if not self.stopper.noted or state.global_step != self.saved_step:
            return
        epoch, step = self._position(state)
        if self._epoch >= 0 and not step:
            self._close_epoch()
        where, kept = f"after step {state.global_step} of {state.max_steps}", self.folder.holds(state.global_step)
        raise self.stopper.end(where, kept, epoch=epoch, step=step)
