"""Watch, stop and resume the Trainer of transformers, and make the resume exact: ``docs/frameworks/huggingface.md``.

Private names that have no public way: ``_save_checkpoint`` (the seal comes after all that it writes); ``_tr_loss``,
``_total_loss_scalar``, ``_globalstep_last_logged``, ``_initial_global_step`` (logged losses go on); for ``recover``,
``_loss_shifts_labels``. Of torch, ``_shutdown_workers``.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any

from memfit.errors import MissingExtraError as _MissingExtraError

try:
    import torch
    import transformers
    from accelerate.utils import send_to_device
    from torch.utils.data import IterableDataset
    from transformers.trainer_utils import rotate_checkpoints
except ModuleNotFoundError as error:
    raise _MissingExtraError.of(str(error.name), "huggingface", __name__) from error

from memfit.errors import StoppedError, UsageError
from memfit.integrations._huggingface import PREFIX, MemfitCallback, refuse, steps_of, under_own_names
from memfit.integrations._huggingface_recovery import Recovery
from memfit.integrations.accelerate import refuse_stream
from memfit.rundir import canary_folder
from memfit.training import (
    WHOLE,
    BySample,
    Course,
    KeyedStream,
    LoopParts,
    Position,
    Ranks,
    Sealed,
    SealedFolder,
    Session,
    deaf_workers,
    length_of,
    order_of,
    rehearse,
)
from memfit.units import list_some

__all__ = ["MemfitCallback", "exact", "stoppable"]

#: Arguments that must not change between a checkpoint and its resume.
_FIXED = ["gradient_accumulation_steps", "max_grad_norm", "label_smoothing_factor", "neftune_noise_alpha"]
_FIXED += ["bf16", "fp16", "world_size"]
#: By what transformers counts epochs.
_COUNTED = {"num_samples", "batch_size", "gradient_accumulation_steps", "drop_last", "world_size"}


def stoppable(trainer: transformers.Trainer, *, recover: bool = False, allow: Collection[str] = ()) -> None:
    """Let SIGTERM, SIGUSR1 or Ctrl-C stop ``trainer.train()`` after the step under way, and let it go on from there.

    It ends with exit code 75. ``trainer.train()`` takes the newest whole checkpoint by itself. Random numbers stay as
    they are: what the data draw is another after a resume than in a training without a stop. Of several ranks in
    ``DistributedDataParallel`` all stop after the same step, and rank 0 seals what they saved.

    Args:
        trainer: Before its ``train``; its class becomes one that inherits from what it was.
        recover: Split a batch smaller that runs out of memory, and repeat its step; the batch size stays.
        allow: Names of settings that may differ from the checkpoint's, such as ``"learning_rate"``: those of now hold.

    Raises:
        UsageError: What cannot be resumed, by name; also in ``train``, for a checkpoint of another training.
    """
    _adapt(trainer, allow, None, recover)


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
        allow: As for ``stoppable``, and names of what is refused otherwise, such as ``"data"``.

    Raises:
        UsageError: As for ``stoppable``, and what cannot be exact.
    """
    args = trainer.args
    if seed is None:
        seed = args.seed if args.data_seed is None else args.data_seed
    _adapt(trainer, allow, KeyedStream(seed), recover)
    trainer.get_train_dataloader()  # it checks the data


def _adapt(trainer: Any, allow: Collection[str], stream: KeyedStream | None, recover: bool) -> None:
    refuse(trainer, allow, is_exact=stream is not None, recover=recover)
    trainer.args.output_dir = str(canary_folder(str(trainer.args.output_dir)))
    memfit = MemfitCallback()
    keeper = SealedFolder(trainer.args.output_dir, PREFIX)
    memfit.session = Session(_Parts(trainer), keeper, stream=stream, allow=allow)
    trainer.pop_callback(MemfitCallback)  # this one watches too
    trainer.add_callback(memfit)
    kind, own = type(trainer), vars(trainer)
    # what was put over a method of the instance is what super() reaches
    replaced = {name: staticmethod(own.pop(name)) for name in vars(_Adapted).keys() & own.keys()}
    recovery = Recovery(trainer) if recover else None
    named = {"__module__": kind.__module__, "memfit": memfit, "recovery": recovery, "_loaders": []}
    trainer.__class__ = type(kind.__name__, (_Adapted, type(kind.__name__, (kind,), replaced)), named)


_Trainer: Any = object


class _Adapted(_Trainer):  # type: ignore[misc]
    """What a Trainer's class inherits from first, so that its loop calls a session."""

    memfit: MemfitCallback
    recovery: Recovery | None
    accelerator: Any
    _loaders: list[Any]
    _lost: dict[str, Any] | None = None
    _is_checked = False

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        memfit, session, options = self.memfit, self.memfit.session, self.args
        keeper: Any = session.keeper
        with session:
            session.at_end.callback(setattr, options, "ignore_data_skip", options.ignore_data_skip)
            session.join(Ranks.current())
            self._move_last()
            session.position, session.course, session.is_open = Position(), None, False
            memfit.is_begun = False
            path = session.open(lambda: keeper.lead(lambda: choose(resume_from_checkpoint, keeper.path)))
            self._lost = None
            if not hasattr(self.model, "peft_config"):  # a checkpoint holds its adapters alone
                note = self.model.register_load_state_dict_post_hook(lambda *load: self._note_load(*load))
                session.at_end.callback(note.remove)
            try:
                return super().train(None if path is None else str(path), *args, **kwargs)
            except StoppedError as error:
                traceback.clear_frames(error.__traceback__)  # with them goes what iterates, and its workers
                for loader in self._loaders:
                    if (lasting := getattr(loader, "_iterator", None)) is not None:
                        lasting._shutdown_workers()
                raise

    def _move_last(self) -> None:
        """Let the session be the last to hear: others may ask for a save."""
        self.callback_handler.callbacks.sort(key=lambda one: one is self.memfit)

    # --- data

    def get_train_dataloader(self) -> Any:
        session, own = self.memfit.session, self.accelerator
        self.accelerator = plain = _WrapsNothing(own)
        try:
            made = super().get_train_dataloader()
        finally:
            self.accelerator = own
        streams, is_plain = isinstance(made.dataset, IterableDataset), not hasattr(made, "base_dataloader")
        if is_plain:
            made, self._is_checked = session.loader(made, checks=not self._is_checked), True
        session.compare_data(made)
        if is_plain and (plain.was_asked or streams or session.stream is not None):
            made = own.prepare(made)  # a plain one would not be told the epoch
        if session.stream is not None and order_of(made) is None:
            raise UsageError(
                f"{type(self).__name__}.get_train_dataloader gives a loader that was prepared before.",
                rule="exact: order and draws are bound to seed and position before Accelerate wraps a loader.",
                remedy="let it make the DataLoader in each call, and return it plain or prepare it there",
            )
        made = self._stream_of(made) if streams else made
        self.memfit.num_steps = steps_of(made, self.args) or 1
        self._loaders.append(made)
        return made

    def _stream_of(self, loader: Any) -> Any:
        """Return a stream that goes on by itself."""
        session, args = self.memfit.session, self.args
        refuse_stream(loader.dataset, args.world_size)
        session.course = _Passes(loader, session.parts, runs_forward=not args.ignore_data_skip)
        args.ignore_data_skip |= session.resumed is not None
        return session.course

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super().get_eval_dataloader(*args, **kwargs)
        deaf_workers(getattr(loader, "base_dataloader", loader))
        self._loaders.append(loader)
        return loader

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        session = self.memfit.session
        session.beat("data")
        batches, number = super().get_batch_samples(*args, **kwargs)
        session.position.batch += len(batches)
        for batch in batches:
            session.took(batch)
        if session.course is not None:
            session.restore_draws()
        if self.recovery is not None:
            epoch, step = divmod(self.state.global_step, self.memfit.num_steps)
            self.recovery.begin(batches)
            self.recovery.step.where = {"epoch": epoch + 1, "step": step + 1, "num_steps": self.memfit.num_steps}
        return batches, number

    # --- the way to the first step

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Compare the settings: optimizer and schedule are made, and nothing is loaded over them."""
        made, session = super().create_scheduler(*args, **kwargs), self.memfit.session
        if self._lost:
            raise UsageError(
                f"The checkpoint has other weights than the model: {list_some(list(self._lost))}.",
                rule="a resume takes every weight; what is missing would go on as it was initialised.",
                remedy="build the model as it was, or take another output_dir",
            )
        self._move_last()  # some may have been made anew
        self.memfit.move(self.state.global_step)
        resumed, is_within = session.resumed, not session.facts and session.position.epoch_step
        if session.stream is not None and resumed is not None and is_within:
            raise UsageError(
                f"{resumed.path} was saved within an epoch, and not by exact.",
                rule="exact: an epoch's order and draws are functions of the seed from its first batch on.",
                remedy="begin exact at an epoch's end; until there, call stoppable(trainer)",
            )
        session.parts.check(session.allow)
        shapes = [(name, [*one.shape], one.requires_grad) for name, one in self.model.named_parameters()]
        weights = hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]
        settings = {name: getattr(self.args, name, None) for name in _FIXED}
        session.compare(recover=self.recovery is not None, weights=weights, **settings)
        return made

    def _note_load(self, model: torch.nn.Module, found: Any) -> None:
        """Note what a checkpoint lacks of the model, and the model of it."""
        weights = model.state_dict(keep_vars=True)
        taken = {id(one) for name, one in weights.items() if name not in found.missing_keys}
        lost = (weights if self._lost is None else self._lost).items()
        self._lost = {name: one for name, one in lost if id(one) not in taken} | dict.fromkeys(found.unexpected_keys)

    def _rehearse(self, loader: Any) -> None:
        model = self.model_wrapped if self.memfit.session.ranks is None else self.model  # no peer is waited for here

        def loss(batch: Any) -> torch.Tensor:
            with self.compute_loss_context_manager():
                found: torch.Tensor = self.compute_loss(model, send_to_device(batch, self.args.device))
            return found

        model.train()
        optimizer = self.memfit.session.parts.optimizers()[0]
        rehearse(model, optimizer, loss, loader, WHOLE if self.recovery is None else BySample())

    # --- checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        args, session, write = self.args, self.memfit.session, super()._save_checkpoint
        limit, args.save_total_limit = args.save_total_limit, None  # nothing is removed before the seal
        running = [float(self._tr_loss), float(self._total_loss_scalar), self._globalstep_last_logged]
        facts: dict[str, Any] = {"running": [running] if session.ranks is None else session.ranks.gather(running)}
        if self.recovery is not None:
            facts["recovery"] = self.recovery.step.state_dict()
        if is_over := bool(getattr(self.callback_handler.train_dataloader, "end_of_dataloader", False)):
            session.position.batch = 0
        if session.course is not None:
            facts["pass"] = session.course.passes + is_over
        try:
            with under_own_names(self.model):
                session.save(lambda _: write(model, trial), **facts)
        finally:
            args.save_total_limit = limit
        if args.should_save:
            rotate_checkpoints(args.output_dir, limit, self.state.best_model_checkpoint, use_mtime=True)


class _Passes(Course):
    """The passes of a stream, which transformers counts from 0 in each start."""

    first = passes = 0

    def set_epoch(self, epoch: int) -> None:
        self.passes = self.first + epoch
        self.loader.set_epoch(self.passes)


class _WrapsNothing:
    """An Accelerator that leaves loaders as they are: keys come first."""

    def __init__(self, own: Any) -> None:
        self.own, self.was_asked = own, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def prepare(self, *parts: Any, **options: Any) -> Any:
        self.was_asked = True
        return parts[0] if len(parts) == 1 else parts


class _Parts(LoopParts):
    """What a Trainer has; it saves and loads them itself."""

    look_ahead = 1  # Accelerate fetches a batch before it gives one

    def __init__(self, trainer: Any) -> None:
        super().__init__({})
        self.trainer = trainer

    def models(self) -> dict[str, torch.nn.Module]:
        return {"model": self.trainer.model}

    def wrappers(self) -> list[Any]:
        return [self.trainer.model_wrapped]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)]

    def schedules(self) -> list[Any]:
        return [self.trainer.lr_scheduler]

    def load(self, path: Path) -> None:
        """Nothing is left to do."""

    def is_over(self, loader: Any) -> bool:
        return bool(loader.end_of_dataloader)

    def source(self, loader: Any) -> Any:
        return super().source(getattr(loader, "base_dataloader", loader))

    def begin(self) -> None:
        """Begin the session, when transformers has loaded all."""
        trainer, session, state = self.trainer, self.trainer.memfit.session, self.trainer.state
        args, facts, at, why = trainer.args, session.facts, session.position, ""
        loader, num_steps = trainer.callback_handler.train_dataloader, trainer.memfit.num_steps
        is_over = session.journal.is_over = bool(facts) and state.global_step >= state.max_steps
        session.begin()
        if trainer.recovery is not None:
            trainer.recovery.open(self.optimizers()[0], facts.get("recovery"))
        if facts:
            rank = args.process_index if args.process_index < len(facts["running"]) else 0
            loss, trainer._total_loss_scalar, trainer._globalstep_last_logged = facts["running"][rank]
            trainer._tr_loss, trainer._initial_global_step = torch.tensor(loss, device=args.device), 0
            if session.resumed.changed.keys() & _COUNTED:
                now = state.global_step / num_steps
                session.journal.inexact(f"{state.epoch:.2f} epochs were trained, and transformers goes on at {now:.2f}")
        if session.course is not None and session.resumed is not None:
            if not facts:
                at.batch = at.epoch_step * args.gradient_accumulation_steps
            session.course.first = 0 if length_of(loader) else facts.get("pass", 0)
            why = session.course.go_on(at.batch, session.resumed.drawn if at.batch else {})
        elif session.stream is None:
            why = LoopParts.order_again(loader, draws_again=False)
        if at.epoch_step and why:
            session.journal.inexact(why)
        elif not facts and state.global_step:
            session.journal.inexact("the checkpoint has no seal of memfit")
        if not ({"rehearsal"} & session.allow or is_over or isinstance(loader.dataset, IterableDataset)):
            trainer._rehearse(loader)


def choose(named: Any, path: Path) -> tuple[Path | None, Sealed | None]:
    """Return the checkpoint to go on from, and its seal: the one that is named, or the newest whole one."""
    if named is False:
        return None, None
    newest = SealedFolder(path, PREFIX)
    given = Path(named) if isinstance(named, str | Path) else None
    is_there = given is not None and given.is_dir()
    found, foreign = newest.newest(), newest.foreign()
    if given is not None and is_there == given.is_dir():  # else it was torn, and is removed now
        folder, number = SealedFolder(given.parent, PREFIX), given.name.removeprefix(PREFIX)
        is_sealed = is_there and number.isdigit() and given not in folder.foreign()
        return given, folder.read(int(number)) if is_sealed else None
    if foreign and (found is None or int(foreign[0].name.removeprefix(PREFIX)) > found.step):
        if named is True:
            return foreign[0], None
        raise UsageError(
            f"{foreign[0]} is newer than what memfit has sealed there.",
            rule="a checkpoint without a seal may be torn, so it is taken only when it is named.",
            remedy=f'trainer.train(resume_from_checkpoint="{foreign[0]}"), or take another output_dir',
        )
    return None if found is None else found.path, found
