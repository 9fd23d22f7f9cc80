"""Watch the Trainer of transformers, and say which ones cannot be resumed."""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers

from memfit.integrations._refuse import refuse_any
from memfit.integrations.accelerate import refused_ranks
from memfit.rundir import CANARY_BATCHES, CANARY_STEPS, canary_folder, canary_over, is_canary, loader_settings, record
from memfit.training import Due, LoopParts, Session, length_of, order_of

PREFIX = "checkpoint-"
_GRAPHS = {"reduce-overhead", "max-autotune", "cudagraphs"}  # modes of torch.compile


class MemfitCallback(transformers.TrainerCallback):
    """Watches a Trainer: phases, steps, epochs, losses and waits become events; nothing else changes.

    The losses are those that the Trainer logs, so they come every ``logging_steps``.

    Example:
        >>> watch = [MemfitCallback()]
        >>> trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=watch)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.session = Session(LoopParts({}))
        self.num_steps, self.is_begun = 1, False
        self._is_training, self._epoch = False, -1
        self._loss: float | None = None
        self._losses, self._logged_step = [0.0, 0.0], 0
        self._numbers: dict[str, float] = {}
        self._mark = self._wait = 0.0
        self._canary_step = 0
        self._has_saved, self._num_validated = False, 0

    def move(self, step: int) -> None:
        """Note the steps that transformers has counted."""
        at = self.session.position
        (at.epoch, at.epoch_step), at.step = divmod(step, self.num_steps), step

    def _phase(self, name: str) -> None:
        if self._is_training:
            self.session.journal.phase(name)
        self._mark = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        session, self.num_steps = self.session, steps_of(train_dataloader, args) or state.max_steps
        session.journal.num_epochs = math.ceil(state.max_steps / self.num_steps)
        self._is_training, self._epoch, self._logged_step = True, -1, state.global_step
        args.output_dir = str(canary_folder(str(args.output_dir)))
        self._canary_step = min(state.global_step + CANARY_STEPS, state.max_steps)
        self.move(state.global_step)
        if session.keeper is not None:
            parts: Any = session.parts
            parts.begin()
            self.stop_if_saved(state)
        elif state.global_step:
            path, at = Path(args.output_dir) / f"{PREFIX}{state.global_step}", session.position
            session.journal.resume(path, (at.epoch, at.epoch_step))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._close_epoch(args, **kwargs)
        at = self.session.position
        self._epoch, at.batch, self.is_begun = at.epoch, 0 if self.is_begun else at.batch, True
        if (order := order_of(kwargs.get("train_dataloader"))) is not None:
            order.set_epoch(at.epoch)  # Accelerate does not reach it where ranks skip batches
        self._phase("train")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._wait = time.perf_counter() - self._mark
        self.stop_if_saved(state)
        self.session.begin_step()
        self.session.is_open = True

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.session.beat("microbatch")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        session, size = self.session, args.train_batch_size * args.gradient_accumulation_steps
        session.journal.took(time.perf_counter() - self._mark, self._wait, size)
        due = session.stepped(self._loss, self.num_steps, args.device)
        self.move(state.global_step)
        is_between = control.should_epoch_stop or not session.position.epoch_step  # then after the epoch's end
        is_held_up = control.should_evaluate or control.should_save or control.should_training_stop
        if session.is_leaving and (due is Due.STOP or is_between or is_held_up):
            session.stop()
        control.should_save |= bool(due) and not is_between and not control.should_training_stop
        self._steer(args, state, control)
        if control.should_evaluate or control.should_save:
            self._phase("validate" if control.should_evaluate else "checkpoint")
        self._mark = time.perf_counter()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # transformers carries the gradients of a stream's last batches over to its next pass
        control.should_save |= bool(self.session.due()) and not control.should_training_stop
        self._steer(args, state, control)
        self._phase("validate" if control.should_evaluate else "checkpoint" if control.should_save else "train")

    def _steer(self, args: Any, state: Any, control: Any) -> None:
        """Let a canary save after a few steps and validate then, whatever the arguments say of the long run."""
        if not is_canary():
            return
        is_due, validates = state.global_step >= self._canary_step, args.eval_strategy != "no"
        control.should_evaluate = is_due and self._has_saved and validates
        control.should_training_stop |= is_due and self._has_saved and not validates
        control.should_save = is_due and not self._has_saved
        self._has_saved |= is_due

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.session.beat("validate")
        if is_canary() and self._has_saved:
            if not self._num_validated:
                self.session.journal.phase("validate")
            self._num_validated += 1
            if self._num_validated == CANARY_BATCHES:
                raise canary_over()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in (logs or {}):
            self._loss, number = float(logs["loss"]), max(1, state.global_step - self._logged_step)
            self._losses = [self._losses[0] + self._loss * number, self._losses[1] + number]
            self._numbers["train_loss"], self._logged_step = self._losses[0] / self._losses[1], state.global_step
        self._mark = time.perf_counter()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        for name, value in (metrics or {}).items():
            if isinstance(value, int | float) and name != "epoch" and not name.endswith(("_runtime", "_per_second")):
                self._numbers[name] = float(value)
        if self._num_validated:
            raise canary_over()
        self._phase("checkpoint" if control.should_save else "train")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.session.keeper is None:  # else the seal was recorded
            path, at = Path(args.output_dir) / f"{PREFIX}{state.global_step}", self.session.position
            size = sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
            record("checkpoint", path=str(path), epoch=at.epoch, step=at.epoch_step, bytes=size)
        self._phase("train")
        if not control.should_training_stop and state.global_step < state.max_steps:
            self.stop_if_saved(state)

    def stop_if_saved(self, state: Any) -> None:
        """End here if a signal asked for it and nothing was trained since the last checkpoint."""
        session = self.session
        if session.due() is Due.STOP and session.saved.step == state.global_step:
            if self._epoch >= 0 and not session.position.epoch_step:
                self._close_epoch()
            session.stop(f"after step {state.global_step} of {state.max_steps}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._close_epoch(args, **kwargs)
        self._is_training = False

    def _close_epoch(
        self, args: Any = None, train_dataloader: Any = None, eval_dataloader: Any = None, **_: Any
    ) -> None:
        """Record the epoch, and the loaders after it: transformers makes that of the evaluation when it evaluates."""
        journal = self.session.journal
        if self._epoch >= 0 and args is not None:
            loaders = loader_settings(train_dataloader) | loader_settings(eval_dataloader, "validation")
            journal.loaders(loaders | {"accumulation": args.gradient_accumulation_steps})
        if self._epoch >= 0:
            journal.epoch(self._epoch + 1, self._numbers, journal.pace())
        self._numbers, self._losses, self._epoch = {}, [0.0, 0.0], -1


def steps_of(loader: Any, args: Any) -> int | None:
    """Return the optimizer steps of an epoch; None of a stream without a length."""
    length = length_of(loader)
    return None if length is None else math.ceil(length / args.gradient_accumulation_steps)


def refuse(trainer: Any, allow: Collection[str], *, is_exact: bool, recover: bool) -> None:
    args, config = trainer.args, getattr(trainer.accelerator, "dataloader_config", None)
    found = [
        *refused_ranks(trainer.accelerator),
        ("recover", recover and args.world_size > 1, "leave it out: a rank that runs out of memory begins again"),
        ("n_gpu", args.n_gpu > 1, "start a rank for each GPU: memfit run --nproc N"),
        ("auto_find_batch_size", args.auto_find_batch_size, "leave it off, and pass recover=True"),
        ("save_only_model", args.save_only_model, "leave it off: a resume needs the optimizer"),
        ("enable_jit_checkpoint", args.enable_jit_checkpoint, "leave it off: memfit saves at a stop"),
        ("model_init", trainer.model_init is not None, "pass model=model_init()"),
        ("adalora", "AdaLoraConfig(" in str(getattr(trainer.model, "peft_config", "")), "take LoRA: no rank is pruned"),
        ("stoppable or exact twice", hasattr(trainer, "memfit"), "call one of them, once"),
    ]
    if recover:
        own_inputs = type(trainer)._prepare_inputs is not transformers.Trainer._prepare_inputs
        is_endless = args.gradient_accumulation_steps > 1 and not hasattr(trainer.train_dataset, "__len__")
        found += [
            ("recover with a step in the backward pass", "lomo" in args.optim.lower(), "take another optimizer"),
            ("recover with an own _prepare_inputs", own_inputs, "leave recover off: it may count its calls"),
            ("recover over a stream with gradient_accumulation_steps", is_endless, "set it to 1"),
        ]
    if is_exact:
        stateful = getattr(config, "use_stateful_dataloader", False)
        kinds = [(type(one).__name__, one._compiled_call_impl) for one in trainer.model.modules()]
        is_compiled = args.torch_compile or any(name == "OptimizedModule" or call for name, call in kinds)
        has_graphs = args.device.type == "cuda" and _GRAPHS & {args.torch_compile_mode, args.torch_compile_backend}
        reused = (getattr(args, "steps_per_generation", 0) or 0) * (getattr(args, "num_iterations", 1) or 1)
        found += [
            ("ignore_data_skip", args.ignore_data_skip, "leave it off: no sample may be seen twice"),
            ("use_stateful_dataloader", stateful, "leave it off: memfit keeps the position of the data"),
            ("steps_per_generation", reused > args.gradient_accumulation_steps, "make one generation for each step"),
            ("torch_compile", is_compiled, "leave it off: what is compiled depends on the batches seen before"),
            ("cuda_graphs", bool(has_graphs), 'take torch_compile_mode="default": graphs were not tried with exact'),
        ]
        # transformers leaves the exported states of callbacks in the checkpoint otherwise
        args.restore_callback_states_from_checkpoint = True
    refuse_any(found, allow, is_exact=is_exact)


@contextmanager
def under_own_names(model: Any) -> Iterator[None]:
    """Let a model be saved under the names that its weights have here, under which the Trainer loads them. Some (a ViT)
    are saved in the format of their first publication, and the Trainer would leave them as initialised."""
    save = getattr(model, "save_pretrained", None)
    if save is None or "save_original_format" not in inspect.signature(save).parameters:
        yield
        return
    model.save_pretrained = functools.partial(save, save_original_format=False)
    try:
        yield
    finally:
        del model.save_pretrained
