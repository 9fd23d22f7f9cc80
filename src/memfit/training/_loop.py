"""Watch, stop and resume a training loop that you write yourself, and make the resume exact.

Between two steps a ``Loop`` holds weights, optimizer, schedule and position, so a checkpoint is written there alone. An
optimizer step is one that the optimizer says: batches that only accumulate belong to the step that they are part of.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from memfit.errors import StoppedError, UsageError
from memfit.rundir import CANARY_STEPS, canary_over, is_canary, loader_settings
from memfit.training._feed import is_numbered
from memfit.training._loop_parts import LoopParts, length_of
from memfit.training._preflight import rehearse, say_verdict
from memfit.training._process import say
from memfit.training._sealed import SealedFolder
from memfit.training._session import Course, Due, Session
from memfit.training._split import samples_in
from memfit.training._stream import KeyedStream, keyed_rng, order_of


class Loop:
    """Watches a training loop; with a folder it stops and resumes it, with a seed it does so exactly.

    | | |
    |---|---|
    | ``Loop()`` | *watch*: phases, steps, epochs, losses and waits become events; nothing else changes |
    | ``Loop(folder, model=model, ...)`` | *stop*: SIGTERM, SIGUSR1 or Ctrl-C saves after the step under way
      and ends with exit code 75; the newest whole checkpoint is taken; random numbers stay as they are |
    | ``Loop(folder, seed=1, model=model, ...)`` | *exact*: the same bytes, wherever it was stopped, or a refusal before
      the first step |

    A step is counted when each optimizer that is named has stepped; without one, each batch is a step.

    Args:
        folder: Where checkpoints are kept; None: nothing is saved.
        seed: Makes order, items, collation and the model's draws functions of it and of the position.
        every: A checkpoint after so many optimizer steps, beside those at each epoch's end.
        every_seconds: A checkpoint when the last one is so old; None: none by time.
        keep: The newest checkpoints that stay.
        allow: Names of settings that may differ from the checkpoint's, such as ``"learning_rate"``: those of now hold.
            Or names of what is refused otherwise, such as ``"data"``.
        settings: Plain values of your own that must not change between a checkpoint and its resume.
        loss: Returns the loss of a batch, as your loop makes it. With it the largest batch that can be found goes
            forward and backward before the first step, and one line says whether it fits.
        parts: What a checkpoint holds: ``model=``, ``optimizer=``, ``schedule=``, ``scaler=``, or anything with
            ``state_dict`` and ``load_state_dict``.

    Raises:
        UsageError: When the loop begins: data or settings that cannot be exact, or a checkpoint of another
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
        ...     loop = Loop(folder, seed=1, loss=loss_of, model=model, optimizer=optimizer)
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

    def __init__(  # noqa: PLR0913
        self,
        folder: Path | str | None = None,
        *,
        seed: int | None = None,
        every: int | None = None,
        every_seconds: float | None = 600.0,
        keep: int = 2,
        allow: Collection[str] = (),
        settings: Mapping[str, Any] | None = None,
        loss: Callable[[Any], torch.Tensor] | None = None,
        **parts: Any,
    ) -> None:
        self.settings, self._loss_of = dict(settings or {}), loss
        keeper, stream = None if folder is None else SealedFolder(folder), None if seed is None else KeyedStream(seed)
        times: Any = {"every": every, "every_seconds": every_seconds, "keep": keep}
        self.session = Session(LoopParts(parts), keeper, stream=stream, allow=allow, **times)
        self._depth = 0
        self._num_batches: int | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._stepped: set[int] = set()
        self._is_in_epochs = self._was_iterated = self._is_tried = False
        self._loss: Any = None
        self._losses: list[Any] = [0.0, 0]
        self._numbers: dict[str, float] = {}

    # --- what a loop says

    @property
    def step(self) -> int:
        """The optimizer steps so far, of all epochs and starts."""
        return self.session.position.step

    @property
    def batch(self) -> int:
        """The batches of this epoch so far, with the one in hand; ``enumerate`` would start anew after a resume."""
        return self.session.position.batch

    def log(self, loss: torch.Tensor | float | None = None, **numbers: float) -> None:
        """Tell the mean loss of a batch, for ``watch`` and the epoch's mean; or the epoch's metrics."""
        if loss is not None:
            self._loss = loss
            if isinstance(loss, torch.Tensor):  # summed where it is: a GPU need not be waited for
                self._loss = loss.detach()
                loss = self._loss.to(torch.float64)
            self._losses = [self._losses[0] + loss, self._losses[1] + 1]
        self._numbers |= {name: float(number) for name, number in numbers.items()}

    def __enter__(self) -> Loop:
        if self._depth == 0:
            with ExitStack() as stack:
                stack.push(self.session)
                self._begin()
                stack.pop_all()
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.session.__exit__(kind, error, traceback)

    def epochs(self, num: int | None = None) -> Iterator[int]:
        """Yield the epochs that are left, counted from 0; the first may be one that was stopped in.

        An epoch's batches may be left by ``break``. Leaving the epochs themselves saves nothing more.

        Args:
            num: The epochs of the whole training; None: until the loop is left.
        """
        is_begun, self.session.journal.num_epochs = self._depth > 0, num
        with self:
            if is_begun and num is not None and self.session.position.epoch >= num:
                say(f"nothing is left to train after epoch {num}")
            self._is_in_epochs = True
            try:
                while num is None or self.session.position.epoch < num:
                    self._was_iterated = False
                    yield self.session.position.epoch
                    self._end_epoch(is_last=self.session.position.epoch + 1 == num)
            finally:
                self._is_in_epochs = False

    def loader(self, loader: Any) -> Any:
        """Return the loader that ``loop(loader)`` goes over: in *exact* another one, checked and with keyed draws."""
        is_ready = self.session.stream is not None and (is_numbered(loader) or order_of(loader) is not None)
        return loader if is_ready else self.session.loader(loader)

    def __call__(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of an epoch that are left.

        Args:
            loader: A DataLoader, or any batches that can be iterated once per epoch.
        """
        is_alone = not self._is_in_epochs
        if is_alone:
            self.session.journal.num_epochs = 1
        with self:
            if self._was_iterated:
                raise UsageError(
                    "The loop goes over training data a second time in one epoch.",
                    rule="the position in an epoch is that in its one loader; epochs are counted by loop.epochs(n).",
                    remedy="write: for epoch in loop.epochs(3): for batch in loop(loader): ...",
                )
            self._was_iterated = True
            self.session.journal.loaders(loader_settings(loader))
            if not is_alone or self.session.position.epoch == 0:  # else the one epoch is over
                yield from self._batches(self.loader(loader))
                if is_alone:
                    self._end_epoch(is_last=True)

    # --- what it says to its session

    def _begin(self) -> None:
        session, parts = self.session, self.session.parts
        self._optimizers = parts.optimizers()
        for optimizer in self._optimizers:
            hook = optimizer.register_step_post_hook(lambda one, *_: self._stepped.add(id(one)))
            session.at_end.callback(hook.remove)
        if session.keeper is not None:
            parts.check(session.allow)
        session.open()
        if not session.identity:  # else these schedules have begun, in this process
            session.compare(**self.settings)
        session.begin()
        self._losses = list(session.facts.get("losses", self._losses))
        at, resumed = session.position, session.resumed
        if not at.batch:
            session.restore_draws()
        elif resumed is not None and "world_size" in resumed.changed:
            at.sample = parts.dealt(at.sample, *resumed.changed["world_size"])
            session.journal.inexact("other ranks are dealt other batches; what is left over of a step is seen again")

    def _batches(self, loader: Any) -> Iterator[Any]:
        session, self._num_batches = self.session, length_of(loader)
        session.compare_data(loader)
        self._rehearse(loader)
        session.journal.phase("train")
        self._settle(session.due())
        at, batches = session.position, self._open(loader)
        while True:
            began = time.perf_counter()
            session.beat("data")
            batch = next(batches, batches)
            waited = time.perf_counter() - began
            session.restore_draws()
            if batch is batches:
                break
            session.took(batch)
            session.begin_step()
            was_open, session.is_open = session.is_open, True
            at.batch, at.sample = at.batch + 1, at.sample + self._data_size
            try:
                yield batch
            except GeneratorExit:  # left by a break: after a step, or with a batch that was not wanted
                session.is_open = was_open
                self._count()
                raise
            session.journal.took(time.perf_counter() - began, waited, samples_in(batch))
            if (due := self._count()) is None:
                continue
            is_over = is_canary() and at.step >= CANARY_STEPS  # a canary begins at 0
            if due is Due.SAVE and at.batch == self._num_batches and self._is_in_epochs:
                due = Due.NOTHING  # the epoch's end saves
            self._settle(max(due, Due(is_over)))
            if is_over:
                break
        if session.is_leaving:  # what follows may take long
            self._settle(Due.STOP)
        session.journal.phase("validate")
        session.beat("end")
        if session.stream:
            session.stream.step(at.step)

    @property
    def _data_size(self) -> int:
        return (self.session.data or {}).get("batch_size") or 1

    def _open(self, loader: Any) -> Iterator[Any]:
        """Begin an epoch, at the batch after those that were trained."""
        session, at, order = self.session, self.session.position, order_of(loader)
        session.parts.enter_epoch(loader, at.epoch)
        count = at.batch = at.sample // self._data_size
        if order is not None:
            order.set_epoch(at.epoch)
            is_over = count == self._num_batches
            return iter(() if is_over else session.parts.skip_ordered(loader, order, at.sample, count))
        if is_numbered(loader):
            session.restore_draws()
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(at.epoch + 1)
            return (self._item(loader, number) for number in range(count, len(loader)))
        if session.keeper is None:
            return iter(loader)
        if session.course is None or session.course.loader is not loader:
            session.course = Course(loader, session.parts)
        drawn = {} if session.resumed is None else session.resumed.drawn
        why = session.course.go_on(count, drawn)
        if count and count != self._num_batches and not drawn.get("is_over"):
            session.journal.inexact(why)
        return iter(session.course)

    def _item(self, batches: Any, number: int) -> Any:
        stream = self.session.stream
        with nullcontext() if stream is None else keyed_rng(stream.seed, self.session.position.epoch, number):
            return batches[number]

    def _rehearse(self, loader: Any) -> None:
        session, loss_of, is_tried, self._is_tried = self.session, self._loss_of, self._is_tried, True
        if is_tried or "rehearsal" in session.allow or (loss_of is None and session.keeper is None):
            return
        models = list(session.parts.models().values())
        if loss_of is None or not models or not self._optimizers:
            say_verdict(
                "no verdict whether the largest batch fits: pass loss=, which returns the loss of a batch; or "
                "allow=('rehearsal',)"
            )
            return
        model = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
        rehearse(model, self._optimizers[0], lambda batch: loss_of(session.parts.placed(batch)), loader)

    def _count(self) -> Due | None:
        """Count a step if the batch in hand ended one; return what is due then."""
        if len(self._stepped) < len(self._optimizers):
            return None
        self._stepped.clear()
        at, num_steps = self.session.position, 0
        if self._num_batches is not None:  # as far as the batches so far tell
            num_steps = math.ceil(self._num_batches * (at.epoch_step + 1) / at.batch)
        return self.session.stepped(self._loss, num_steps)

    def _end_epoch(self, *, is_last: bool) -> None:
        session, at, (total, number) = self.session, self.session.position, self._losses
        if session.is_leaving:  # its batches were left by a break
            self._settle(Due.STOP)
        if at.batch and not at.epoch_step:
            raise UsageError(
                f"Epoch {at.epoch + 1} had {at.batch} batches and no optimizer step.",
                rule="steps are counted when every optimizer that is named has stepped; saves are made there.",
                remedy="name the optimizers that step, and step them by optimizer.step()",
            )
        session.journal.passed["validate"] -= not self._numbers  # nobody knows whether it has validated
        session.end_epoch(({"train_loss": float(total) / number} if number else {}) | self._numbers)
        self._numbers, self._losses = {}, [0.0, 0]
        due = max(session.due(), Due(not (is_canary() and session.saved.step)))
        self._settle(min(due, Due.SAVE) if is_last else due)
        if is_canary() and self._is_in_epochs:
            raise canary_over()

    def _settle(self, due: Due) -> None:
        """Save what is not saved, and stop if a signal asked for it."""
        session = self.session
        if due:
            self._losses[0] = float(self._losses[0])
        try:
            session.settle(due, session.parts.save, losses=self._losses)
        except StoppedError:
            session.__exit__(None, None, None)  # nobody closes a generator
            raise
