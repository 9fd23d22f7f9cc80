"""Watch, stop and resume a training loop that you write yourself, and make the resume exact.

Between two steps a ``Loop`` holds weights, optimizer, schedule and position, so a checkpoint is written there alone. An
optimizer step is one that the optimizer says: batches that only accumulate belong to the step that they are part of.
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.rundir import CANARY_STEPS, canary_over, is_canary, loader_settings
from memfit.training._beat import beat, keep_beats
from memfit.training._checkpoint import load_checkpoint, save_checkpoint
from memfit.training._identity import environment, refuse_changed
from memfit.training._journal import Journal
from memfit.training._keyed import _kind_of, keyed_rng
from memfit.training._loop_parts import GOES_ON, LoopParts, data_identity, is_stream, length_of, order_of
from memfit.training._preflight import rehearse, say_verdict
from memfit.training._probes import check_first_forward, check_loader
from memfit.training._process import Stopper, rng_state, set_rng_state
from memfit.training._ranks import Ranks, leave_uncaught, order_sums
from memfit.training._sealed import Sealed, SealedFolder, loading
from memfit.training._split import samples_in
from memfit.training._stream import KeyedStream, deaf_workers, stream_identity


@dataclass
class _Position:
    """Where a training is: the epoch, what it has trained of it, and the optimizer steps of all epochs."""

    epoch: int = 0
    batch: int = 0
    sample: int = 0
    epoch_step: int = 0
    step: int = 0
    loss_sum: Any = 0.0
    num_losses: int = 0


class Loop:
    """Watches a training loop; with a folder it stops and resumes it, with a seed it does so exactly.

    | | |
    |---|---|
    | ``Loop()`` | *watch*: phases, steps, epochs, losses and waits become events; nothing else changes |
    | ``Loop(folder, every=500, model=model, ...)`` | *stop*: SIGTERM, SIGUSR1 or Ctrl-C saves after the step under way
      and ends with exit code 75; the newest whole checkpoint is taken; random numbers stay as they are |
    | ``Loop(folder, seed=1, every=500, model=model, ...)`` | *exact*: the same bytes, wherever it was stopped, or a
      refusal before the first step |

    A step is counted when each optimizer that is named has stepped; without one, each batch is a step.

    Args:
        folder: Where checkpoints are kept; None: nothing is saved.
        seed: Makes order, items, collation and the model's draws functions of it and of the position.
        every: A checkpoint after so many optimizer steps, beside those at each epoch's end.
        keep: The newest checkpoints that stay.
        allow: Names of parts that may move, or of settings that may differ from the checkpoint's, such as
            ``"collator.counter"`` or ``"learning_rate"``: the settings of now hold then.
        settings: Plain values of your own that must not change between a checkpoint and its resume.
        loss: Returns the loss of a batch, as your loop makes it. With it the largest batch that can be found goes
            forward and backward before the first step, and one line says whether it fits.
        parts: What a checkpoint holds: ``model=``, ``optimizer=``, ``schedule=``, ``scaler=``, or anything with
            ``state_dict`` and ``load_state_dict``.

    Raises:
        UsageError: When the loop begins: data, a model or settings that cannot be exact, or a checkpoint of another
            training.
        DoesNotFitError: Before the first step: the largest batch does not fit.
        StoppedError: A signal asked for it; everything up to here is saved.

    Example:
        >>> import tempfile
        >>> from torch.utils.data import DataLoader
        >>> def train(folder):
        ...     torch.manual_seed(0)
        ...     model = torch.nn.Linear(2, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     def loss_of(batch):
        ...         return model(batch).square().mean()
        ...     loop = Loop(folder, seed=1, every=3, loss=loss_of, model=model, optimizer=optimizer)
        ...     loader = DataLoader(torch.arange(16.0).view(8, 2) / 16, batch_size=2, shuffle=True)
        ...     for epoch in loop.epochs(2):
        ...         for batch in loop(loader):
        ...             loss = loss_of(batch)
        ...             loss.backward()
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        ...             loop.log(loss)
        ...     return loop.step
        >>> train(tempfile.mkdtemp())
        8
    """

    def __init__(
        self,
        folder: Path | str | None = None,
        *,
        seed: int | None = None,
        every: int | None = None,
        keep: int = 2,
        allow: Collection[str] = (),
        settings: Mapping[str, Any] | None = None,
        loss: Callable[[Any], torch.Tensor] | None = None,
        **parts: Any,
    ) -> None:
        if folder is not None and (every is None or every < 1 or keep < 1):
            raise UsageError(
                f"every is {every} and keep is {keep}.",
                rule="a checkpoint is written after so many optimizer steps, and at least one stays.",
                remedy="pass for example every=500",
            )
        self.allow, self.settings = frozenset(allow), dict(settings or {})
        self.parts = LoopParts(parts)
        self.journal = Journal()
        self._folder = None if folder is None else SealedFolder(folder)
        self._every, self._keep = every or 0, keep
        self._stream = None if seed is None else KeyedStream(seed)
        self._stopper = Stopper()
        self._stack, self._depth = ExitStack(), 0
        self._at = _Position()
        self._saved: _Position | None = None
        self._identity: dict[str, Any] = {}
        self._data: Mapping[str, Any] | None = None
        self._data_size = 1
        self._num_batches: int | None = None
        self._checked: list[Any] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._stepped: set[int] = set()
        self._is_open = self._is_in_epochs = self._was_iterated = False
        self._draws: dict[str, Any] | None = None
        self._loss_of, self._is_tried = loss, False
        self._first_state: Any = None
        self._loss: Any = None
        self._numbers: dict[str, float] = {}
        self._ranks: Ranks | None = None

    def _join(self, ranks: Ranks) -> None:
        """Stop, save and resume together with the other ranks of a group."""
        self._ranks = ranks
        if self._stream is not None:
            self._stream.rank = ranks.rank
        if self._folder is not None:
            self._folder.ranks = ranks
            self._stopper.join(ranks)
            keep_beats(self._folder.path)
            leave_uncaught()

    # --- what a loop says

    @property
    def step(self) -> int:
        """The optimizer steps so far, of all epochs and starts."""
        return self._at.step

    @property
    def batch(self) -> int:
        """The batches of this epoch so far, with the one in hand; ``enumerate`` would start anew after a resume."""
        return self._at.batch

    def log(self, loss: torch.Tensor | float | None = None, **numbers: float) -> None:
        """Tell the mean loss of a batch, for ``watch`` and the epoch's mean; or the epoch's metrics."""
        if loss is not None:
            self._loss = loss
            if isinstance(loss, torch.Tensor):  # summed where it is: a GPU need not be waited for
                self._loss = loss.detach()
                loss = self._loss.to(torch.float64)
            self._at.loss_sum = self._at.loss_sum + loss
            self._at.num_losses += 1
        self._numbers |= {name: float(number) for name, number in numbers.items()}

    def __enter__(self) -> Loop:
        self._depth += 1
        if self._depth == 1:
            try:
                self._begin()
            except BaseException:
                self._depth = 0
                self._stack.close()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._stack.close()

    def epochs(self, num: int | None = None) -> Iterator[int]:
        """Yield the epochs that are left, counted from 0; the first may be one that was stopped in.

        An epoch's batches may be left by ``break``. Leaving the epochs themselves saves nothing more.

        Args:
            num: The epochs of the whole training; None: until the loop is left.
        """
        self.journal.num_epochs = num
        with self:
            self._is_in_epochs = True
            try:
                while num is None or self._at.epoch < num:
                    self._was_iterated = False
                    yield self._at.epoch
                    self._end_epoch(is_last=self._at.epoch + 1 == num)
            finally:
                self._is_in_epochs = False

    def loader(self, loader: Any) -> Any:
        """Return the loader that ``loop(loader)`` goes over: in *exact* another one, checked and with keyed draws."""
        if self._stream is None or _kind_of(loader) == "indexed":
            if self._folder is not None:
                deaf_workers(getattr(loader, "base_dataloader", loader))
            return loader
        for given, made in self._checked:
            if given is loader:
                return made
        if order_of(loader) is not None:
            return loader
        made = self._stream.loader(loader)
        check_loader(loader, self.allow)
        self._checked = [(loader, made)]
        return made

    def __call__(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of an epoch that are left.

        Args:
            loader: A DataLoader, or any batches that can be iterated once per epoch.
        """
        with self:
            is_alone = not self._is_in_epochs
            if self._was_iterated:
                raise UsageError(
                    "The loop goes over training data a second time in one epoch.",
                    rule="the position in an epoch is that in its one loader; epochs are counted by loop.epochs(n).",
                    remedy="write: for epoch in loop.epochs(3): for batch in loop(loader): ...",
                )
            self._was_iterated = True
            self.journal.loaders(loader_settings(loader))
            if not is_alone or self._at.epoch == 0:  # else the one epoch is over
                yield from self._batches(self.loader(loader))
                if is_alone:
                    self._end_epoch(is_last=True)

    # --- batches

    def _batches(self, loader: Any) -> Iterator[Any]:
        self._check_data(loader)
        self._rehearse(loader)
        self.journal.phase("train")
        self._stop_or_save()
        at, num_batches = self._at, length_of(loader)
        source = None if self._stream or self._folder is None else self.parts.source(loader)
        states: deque[Any] = deque([None] * self.parts.look_ahead, maxlen=self.parts.look_ahead + 1)
        batches = self._open(loader, source)
        while True:
            began = time.perf_counter()
            self._beat("data")
            batch = next(batches, batches)
            waited = time.perf_counter() - began
            self._restore_draws()
            if batch is batches:
                break
            if source is not None and self._draws is not None:
                states.append(copy.deepcopy(source.state_dict()))
                self._draws |= {"source": states[0], "is_over": self.parts.is_over(loader)}
            if self._stream and not self._is_open:
                self._stream.step(at.step)
            self._beat("microbatch")
            was_open, self._is_open = self._is_open, True
            at.batch, at.sample = at.batch + 1, at.sample + self._data_size
            try:
                yield batch
            except GeneratorExit:  # left by a break: after a step, or with a batch that was not wanted
                self._is_open = was_open
                self._count()
                raise
            self.journal.took(time.perf_counter() - began, waited, samples_in(batch))
            if self._count():
                is_due = at.step % (self._every or at.step) == 0
                is_over = is_canary() and at.step >= CANARY_STEPS  # a canary begins at 0
                self._stop_or_save(is_due=is_over or (is_due and not (at.batch == num_batches and self._is_in_epochs)))
                if is_over:
                    break
        self.journal.phase("validate")
        self._beat("end")  # what follows is the script's own
        if self._stream:
            self._stream.step(at.step)

    def _rehearse(self, loader: Any) -> None:
        """Say once whether the largest batch fits."""
        loss_of, is_tried, self._is_tried = self._loss_of, self._is_tried, True
        if is_tried or "rehearsal" in self.allow or (loss_of is None and self._folder is None):
            return
        models = list(self.parts.models().values())
        if loss_of is None or not models or not self._optimizers:
            say_verdict(
                "no verdict whether the largest batch fits: pass loss=, which returns the loss of a batch; or "
                "allow=('rehearsal',)"
            )
            return
        model = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
        rehearse(model, self._optimizers[0], lambda batch: loss_of(self.parts.placed(batch)), loader)

    def _restore_draws(self) -> None:
        """Put the random state back to that of the checkpoint, once."""
        if self._draws is not None and "now" in self._draws:
            set_rng_state(self._draws.pop("now"))

    def _open(self, loader: Any, source: Any) -> Iterator[Any]:
        """Begin an epoch, at the batch after those that were trained."""
        at, order, draws = self._at, order_of(loader), self._draws
        self.parts.enter_epoch(loader, at.epoch)
        count = at.batch = at.sample // self._data_size
        if order is not None:
            order.set_epoch(at.epoch)
            left = () if count == self._num_batches else self.parts.skip_ordered(loader, order, at.sample, count)
            return iter(left)
        if _kind_of(loader) == "indexed":
            self._restore_draws()
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(at.epoch + 1)
            return (self._item(loader, number) for number in range(count, len(loader)))
        if count == self._num_batches or (draws or {}).get("is_over"):
            return iter(())
        if draws is None or not count:
            draws = self._draws = self.parts.draws(loader)
        else:
            self.parts.draw_again(loader, draws)
        if count:
            return self._go_on(loader, source, count, draws)
        if self._first_state is not None and source is not None:
            source.load_state_dict(self._first_state)
            self._first_state = None
        return iter(loader)

    def _go_on(self, loader: Any, source: Any, count: int, draws: Mapping[str, Any]) -> Iterator[Any]:
        """Go on within an epoch of data in the loader's own order, after ``count`` batches; say what is not exact."""
        if source is None and is_stream(loader):
            at = self._at
            why = f"{count * self._data_size} samples of epoch {at.epoch + 1} are seen again: no state_dict of them"
            self.journal.inexact(why)
            return iter(loader)
        if source is not None and (state := draws.get("source")) is not None:
            if source is not loader:  # a data set may begin each pass at what it was given last
                self._first_state = copy.deepcopy(source.state_dict())
            source.load_state_dict(state)
            self.journal.inexact(GOES_ON)
            return iter(loader)
        self.journal.inexact(self.parts.order_again(loader))
        return iter(self.parts.skip(loader, count))

    def _item(self, batches: Any, number: int) -> Any:
        with nullcontext() if self._stream is None else keyed_rng(self._stream.seed, self._at.epoch, number):
            return batches[number]

    def _count(self) -> bool:
        """Count a step if the batch in hand ended one; return whether it did."""
        at = self._at
        if len(self._stepped) < len(self._optimizers):
            return False
        self._stepped.clear()
        self._is_open = False
        at.step, at.epoch_step = at.step + 1, at.epoch_step + 1
        where = {"epoch": at.epoch + 1, "step": at.epoch_step, "num_steps": self._steps_of(at)}
        self.journal.step(where, self._loss)
        self._stopper.vote(at.step)
        return True

    def _steps_of(self, at: _Position) -> int:
        """Return the steps of this epoch, as far as the batches so far tell."""
        if self._num_batches is None:
            return at.epoch_step
        return max(at.epoch_step, math.ceil(self._num_batches * at.epoch_step / at.batch))

    def _end_epoch(self, *, is_last: bool) -> None:
        at = self._at
        if at.batch and not at.epoch_step:
            raise UsageError(
                f"Epoch {at.epoch + 1} had {at.batch} batches and no optimizer step.",
                rule="steps are counted when every optimizer that is named has stepped; saves are made there.",
                remedy="name the optimizers that step, and step them by optimizer.step()",
            )
        numbers = {"train_loss": float(at.loss_sum) / at.num_losses} if at.num_losses else {}
        self.journal.epoch(at.epoch + 1, numbers | self._numbers, self.journal.pace())
        self._numbers, self._draws = {}, None
        self._at = _Position(epoch=at.epoch + 1, step=at.step)
        self._stop_or_save(is_due=not (is_canary() and self._saved), may_stop=not is_last)
        if is_canary() and self._is_in_epochs:
            raise canary_over()

    # --- checkpoints and stops

    def _stop_or_save(self, *, is_due: bool = False, may_stop: bool = True) -> None:
        """Save if it is time to, and end if a signal asked for it; both only where a step has just ended."""
        draws = self._draws or {}
        if self._folder is None or self._is_open or draws.get("source", 0) is None:
            return
        at, noted = self._at, self._stopper.noted if may_stop else None
        if (is_due or noted) and at != self._saved and at.step:
            self._save(self._folder)
        if noted:
            self._stack.close()
            raise self._stopper.end(
                f"after step {at.step}", self._folder.holds(at.step), epoch=at.epoch, step=at.epoch_step
            )

    def _save(self, folder: SealedFolder) -> None:
        at = self._at
        at.loss_sum = float(at.loss_sum)
        self.journal.phase("checkpoint")
        path = folder.begin(at.step)
        with folder.writing():
            self.parts.save(path)
            if self._stream is None:
                save_checkpoint(path / self._draws_file, {**(self._draws or {}), "now": rng_state()})
        facts = {"identity": self._identity, "data": self._data, "position": asdict(at), "environment": environment()}
        folder.seal(at.step, {"epoch": at.epoch, **facts})
        folder.prune(self._keep)
        self._saved = replace(at)
        self.journal.phase("train")

    def _begin(self) -> None:
        """Count steps, listen to signals, go on from the newest checkpoint, and rehearse the models."""
        self._optimizers = self.parts.optimizers()
        for optimizer in self._optimizers:
            self._stack.callback(optimizer.register_step_post_hook(self._note_step).remove)
        if self._folder is not None:
            self.parts.check(self.allow)
            self._identity = stream_identity(self._stream)
            self._identity |= self.settings | self.parts.identity()
            self._beat("load")
            self._stack.callback(self._beat, "end")
            self._stack.enter_context(self._folder.held())
            self._stopper.listen()
            self._stack.callback(self._stopper.close)
            if (found := self._folder.newest()) is not None:
                self._resume(found)
        for wrapper in self.parts.wrappers() if self._stream and self._ranks else ():
            order_sums(wrapper)
        for model in self.parts.models().values() if self._stream else ():
            self._stack.callback(check_first_forward(model, lambda: self._is_open, self.allow).remove)

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped.add(id(optimizer))

    def _resume(self, found: Sealed) -> None:
        facts, allow = found.facts, set(self.allow)
        self._at = _Position(**facts["position"])
        if facts["identity"]["seed"] is None and not self._at.batch:  # between two epochs Stop may become Exact
            allow |= stream_identity(None).keys()
        if self._stream is None:
            allow.add("world_size")
        changed = refuse_changed(found.path, facts["identity"], self._identity, allow)
        with loading(found):
            self.parts.load(found.path)
        self.parts.take({name: self._identity[name] for name in changed if name in self._identity})
        if "world_size" in changed and self._at.batch:
            self._at.sample = self.parts.dealt(self._at.sample, *changed["world_size"])
            self.journal.inexact("other ranks are dealt other batches; what is left over of a step is seen again")
        if self._stream is None and (found.path / self._draws_file).exists():
            self._draws = load_checkpoint(found.path / self._draws_file)
            if not self._at.batch:
                set_rng_state(self._draws["now"])
        else:
            found.check_environment()
        self._data = facts["data"]
        self._saved = replace(self._at)
        self.journal.resume(found.path, (self._at.epoch, self._at.epoch_step))

    def _beat(self, place: str) -> None:
        if self._folder is not None:
            beat(place, self._at.step)

    @property
    def _draws_file(self) -> str:
        return f"draws-{self._ranks.rank}.pt" if self._ranks is not None and self._ranks.rank else "draws.pt"

    def _check_data(self, loader: Any) -> None:
        now = data_identity(loader)
        if self._data is not None and self._folder is not None and self._data != now:
            refuse_changed(self._folder.path, self._data, now, self.allow)
        self._data, self._num_batches = now, length_of(loader)
        self._data_size = now["batch_size"] or 1
