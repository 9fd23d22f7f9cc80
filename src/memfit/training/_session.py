"""What every training does, whoever owns its loop: know where it is, keep that whole, and stop when a signal asks.

| call | when, once in a training unless said | by |
|---|---|---|
| ``with session`` | around all of it: every error passes its end, which decides what the error means | each rank |
| ``join(ranks)`` | before ``open`` | each rank |
| ``open(choose)`` | before the framework looks for a checkpoint | all together |
| ``compare(**settings)`` | optimizers and schedules are made, and nothing is loaded over them | each rank |
| ``begin()`` | all is loaded, and nothing is trained | all together |
| ``loader(loader)`` | for each loader, before it is iterated; ``compare_data`` then refuses other data | each rank |
| ``restore_draws()`` | before the first draw of a resumed epoch; does nothing a second time | each rank |
| ``took(batch)`` | for each batch, before the step that it is of begins | each rank |
| ``begin_step()``, ``is_open = True`` | before a step's first draw, and after its first batch | each rank |
| ``position.batch``, ``.sample`` | count each batch, before the step that it ends | each rank |
| ``stepped(loss)`` | after each step | all together |
| ``made(step)``, ``meet()`` | after each step where a framework counts, and ``position`` is set | all together |
| ``due()`` | elsewhere between two steps: at an epoch's begin, after a validation or a save | each rank |
| ``settle(due, write)`` | as it is due, or ``save``, ``stop``; each rank writes into one folder | all together |
| | ``stop`` may let steps pass first, ``is_leaving``: there nothing is saved or validated | |
| ``end_epoch(numbers)`` | after each epoch's last step, before its save | each rank |
| ``go_back()`` | to take the newest checkpoint again, where the data can begin anew | all together |
"""

from __future__ import annotations

import copy
import enum
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from pydantic import PositiveFloat, PositiveInt

from memfit.errors import MemfitError, UsageError
from memfit.training._beat import beat, keep_beats, leave, lost_peers, peers_lost
from memfit.training._checkpoint import load_checkpoint, save_checkpoint
from memfit.training._checks import Checked, check_compiled, checked_arguments
from memfit.training._identity import check_environment, environment, refuse_changed
from memfit.training._journal import Journal, Unheard
from memfit.training._loop_parts import GOES_ON, LoopParts, data_identity, is_stream, length_of
from memfit.training._notes import note_of
from memfit.training._process import Stopper, rng_state, set_rng_state
from memfit.training._prove import Proof, is_proving
from memfit.training._ranks import SAVE, Ranks, leave_uncaught, order_sums
from memfit.training._replay import PROVING_STEPS, Replay, heard_by
from memfit.training._sealed import Sealed, SealedFolder
from memfit.training._stream import KeyedStream, check_loader, stream_identity
from memfit.training._workers import deaf_workers
from memfit.units import list_some


class Due(enum.IntEnum):
    """What is to be done between two steps; a stop saves first."""

    NOTHING, SAVE, STOP = range(3)


@dataclass
class Position:
    """Whole epochs; batches, samples and optimizer steps of the one under way; steps of all epochs."""

    epoch: int = 0
    batch: int = 0
    sample: int = 0
    epoch_step: int = 0
    step: int = 0


@dataclass
class Resumed:
    """A checkpoint that a training goes on from, until it has begun. ``sealed`` is None of a framework's own one;
    ``drawn`` is what is to be put back of random state and data; ``changed`` are the settings that may differ."""

    path: Path
    sealed: Sealed | None
    drawn: dict[str, Any]
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    is_loaded: bool = False


Attempt = Callable[[Callable[[], object]], object]


def _once(action: Callable[[], object]) -> object:
    return action()


class Session:
    """One training: its position, its keeper, its parts. Without a ``keeper`` of checkpoints it is watched alone.
    ``stream`` makes its random numbers functions of seed and position. ``every``, ``every_seconds`` and ``keep`` are as
    in ``Loop``; with None the loop decides. ``allow`` is None where nobody can name a setting that may differ."""

    @checked_arguments
    def __init__(
        self,
        parts: LoopParts,
        keeper: SealedFolder | None = None,
        *,
        stream: KeyedStream | None = None,
        every: Checked[PositiveInt | None] = None,
        every_seconds: Checked[PositiveFloat | None] = None,
        keep: Checked[PositiveInt | None] = None,
        allow: Collection[str] | None = (),
    ) -> None:
        self.parts, self.keeper, self.stream = parts, keeper, stream
        self.every, self.every_seconds, self.keep = every, every_seconds or math.inf, keep
        self.allow, self._has_allow = frozenset(allow or ()), allow is not None
        self.journal = Journal()
        self.position, self.saved = Position(), Position()
        #: Whether the step under way has taken a batch: nothing can be saved.
        self.is_open = False
        #: The data in their own order, of which a checkpoint holds the place.
        self.course: Course | None = None
        self.resumed: Resumed | None = None
        self.identity: dict[str, Any] = {}
        self.data: Mapping[str, Any] | None = None
        self.at_end = ExitStack()
        self.stopper = Stopper()
        self._made: tuple[Any, Any] = (None, None)
        self._saved_at = math.inf
        #: ``stop`` or ``warn`` after a resume that is not exact; empty: as keys and ``allow`` say.
        self.on_inexact = ""
        self.replay: Replay | None = None
        self.proof: Proof | None = None
        self._is_judged, self._proves = True, Path()
        #: The step after which a stop ends the training that has its checkpoint already.
        self._last_step: int | None = None
        self._stepped_at, self._step_seconds = 0.0, deque[float]((), 3)

    @property
    def ranks(self) -> Ranks | None:
        return None if self.keeper is None else self.keeper.ranks

    @property
    def facts(self) -> Mapping[str, Any]:
        return {} if self.resumed is None or self.resumed.sealed is None else self.resumed.sealed.facts

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Take off what was put on, and decide what an error means: that a rank is lost, which ends this one with exit
        code 79; or, before the training has begun, that it cannot load its checkpoint."""
        self.at_end.close()
        self._end_replay(error)
        is_foreign = isinstance(error, Exception) and not isinstance(error, MemfitError)
        if error is not None and is_foreign and self.ranks is not None and peers_lost(error):
            leave(lost_peers(error))
        self.beat("end")  # what follows is the script's own
        resumed = self.resumed
        if error is None or not is_foreign or resumed is None or resumed.sealed is None or resumed.is_loaded:
            return
        if self.ranks is not None:  # of one rank alone: its group begins again, and no more often than it comes further
            error.add_note(f"while {resumed.path} was loaded")
            return
        raise UsageError(
            f"{resumed.path} cannot be loaded: {type(error).__name__}: {' '.join(str(error).split()):.300}",
            rule="a resume gives each part the state that it had; this one is built, or has become, of another shape.",
            remedy="build model and optimizer as they were, or start over in another folder",
        ) from error

    # --- the way to the first step

    def join(self, ranks: Ranks | None) -> None:
        """Stop, save and resume together with the other ranks of a group; None in a process that trains alone."""
        if ranks is None:
            return
        if ranks.rank:
            self.journal = Unheard()
        if self.stream is not None:
            self.stream.rank = ranks.rank
        if self.keeper is not None:
            self.keeper.ranks = ranks
            self.stopper.join(ranks)
            ranks.wants = self._wants
            keep_beats(self.keeper.path)
            leave_uncaught()  # an error in a generator's consumer passes no end

    def open(self, choose: Callable[[], tuple[Path | None, Sealed | None]] | None = None) -> Path | None:
        """Be the only training that writes here, listen to signals, and return the checkpoint to go on from."""
        self.resumed = self.data = None
        if self.keeper is None:
            return None
        self.beat("load")
        self.at_end.enter_context(self.keeper.held())
        self.listen()
        return self._find(choose or self._newest)

    def _find(self, choose: Callable[[], tuple[Path | None, Sealed | None]]) -> Path | None:
        path, found = choose()
        if path is not None:
            self.resumed = Resumed(path, found, {} if found is None else self._read_draws(path))
        if found is not None:
            self.position, self.data = Position(**found.facts["position"]), found.facts["data"]
        self.saved = replace(self.position)
        return path

    def _newest(self) -> tuple[Path | None, Sealed | None]:
        assert self.keeper is not None
        found = self.keeper.newest()
        return None if found is None else found.path, found

    def listen(self, *, interrupt: bool = True) -> None:
        """Hear the signals that stop; again, after a framework has put its own handlers in their place."""
        self.stopper.listen(interrupt=interrupt)
        self.at_end.callback(self.stopper.close)

    def go_back(self) -> None:
        """Take the newest checkpoint once more, in a training that has begun; ``resumed`` is None if there is none."""
        self.resumed = None
        if self.keeper is not None and self._find(self._newest) is not None:
            self.begin()
            self.restore_draws()

    def compare(self, **settings: Any) -> None:
        """Refuse the checkpoint of another training; an allowed change is an event."""
        self.identity = stream_identity(self.stream) | settings | self.parts.identity()
        if saved := self.facts.get("identity"):
            allow = {*self.allow, *["world_size"] * (self.stream is None)}
            if saved["seed"] is None and not self.position.epoch_step:  # between two epochs it may become exact
                allow |= stream_identity(None).keys()
            assert self.resumed is not None
            named = allow if self._has_allow else None
            self.resumed.changed |= refuse_changed(self.resumed.path, saved, self.identity, named)

    def begin(self) -> None:
        """Put the parts back, with the settings of now where that is allowed; say where the training goes on."""
        at, resumed = self.position, self.resumed
        if resumed is not None:
            if resumed.sealed is not None:
                self.parts.load(resumed.path)
                self.parts.take({name: self.identity[name] for name in resumed.changed if name in self.identity})
                if self.stream is not None:
                    check_environment(resumed.path, self.facts["environment"])
            resumed.is_loaded = True
            self.journal.resume(resumed.path, (at.epoch, at.epoch_step))
        self.saved, self._saved_at = replace(at), time.monotonic()
        self._begin_replay()
        if self.stream is not None:
            for wrapper in self.parts.wrappers() if self.ranks else ():
                order_sums(wrapper)
            for model in self.parts.models().values():
                check_compiled(model, self.allow)

    def _read_draws(self, path: Path) -> dict[str, Any]:
        """Return what this rank had drawn; one that was not there began its epoch as rank 0 did."""
        own, first = path / self._draws_file, path / "draws.pt"
        if self.stream is not None or not first.exists():
            return {}
        found = load_checkpoint(own if own.exists() else first)
        return found if own.exists() else {name: value for name, value in found.items() if name != "now"}

    @property
    def _draws_file(self) -> str:
        return f"draws-{self.ranks.rank}.pt" if self.ranks is not None and self.ranks.rank else "draws.pt"

    def restore_draws(self) -> None:
        """Put the random state back to that of the checkpoint, once."""
        if self.resumed is not None and "now" in self.resumed.drawn:
            set_rng_state(self.resumed.drawn.pop("now"))

    # --- data

    def loader(self, loader: Any, *, checks: bool = True) -> Any:
        """Return a loader under keys, tried; without keys it is the same, its workers out of reach of signals."""
        if self.stream is None:
            if self.keeper is not None:
                deaf_workers(getattr(loader, "base_dataloader", loader))
            return loader
        if self._made[0] is not loader:
            made = self.stream.loader(loader)
            if checks:
                check_loader(loader, self.allow)
            self._made = (loader, made)
        return self._made[1]

    def compare_data(self, loader: Any) -> None:
        """Refuse other data than those of the checkpoint, or of the epoch before."""
        before, self.data = self.data, data_identity(loader)
        if self.keeper is not None and before is not None and before != self.data:
            changed = refuse_changed((self.resumed or self.keeper).path, before, self.data, self.allow)
            if self.resumed is not None:
                self.resumed.changed |= changed
            if changed:
                self.waive()

    # --- steps

    def beat(self, place: str) -> None:
        if self.keeper is not None:
            beat(place, self.position.step)

    def took(self, batch: Any) -> None:
        """Note a batch of the next step, and at the first one after a checkpoint what the user's own state is."""
        if self.replay is None:
            return
        self._judge()
        if self.replay.is_note_due and not self.is_open:
            self.replay.note(self.position.step, note_of(self.parts.models().values()))
        self.replay.took(batch)

    def begin_step(self) -> None:
        """Seed what the model draws in the next step, if none is open."""
        if self.stream is not None and not self.is_open:
            self.stream.step(self.position.step)
        self.beat("microbatch")

    def stepped(
        self, loss: Any = None, num_steps: int = 0, device: Any = None, *, parts: int = 1, has_voted: bool = False
    ) -> Due:
        """Count a step, and hear what all ranks ask for, unless they have voted in it. ``num_steps``: those of the
        epoch, as far as is known. ``parts``: how often a step without keys went backward."""
        at, self.is_open = self.position, False
        at.step, at.epoch_step = at.step + 1, at.epoch_step + 1
        where = {"epoch": at.epoch + 1, "step": at.epoch_step, "num_steps": max(num_steps, at.epoch_step)}
        self.journal.step(where, loss, device)
        if self.replay is not None and self.stream is None:
            self.replay.heard(math.nan if loss is None else loss, parts)
        self.made(at.step, num_steps)
        return self.due() if has_voted else self.meet()

    def made(self, step: int, num_steps: int = 0) -> None:
        """Note a step that was made. What is not as it was ends the training at its next batch or save: a loop that is
        left by ``break`` would lose the error. ``num_steps``: as for ``stepped``."""
        before, self._stepped_at = self._stepped_at, time.perf_counter()
        if before:
            self._step_seconds.append(self._stepped_at - before)
        if self.replay is not None:
            self.replay.end_step(step)
            if self.proof is not None:
                self.proof.made(step, num_steps, min(self._step_seconds, default=0.0))

    def meet(self) -> Due:
        self.stopper.vote(self.position.step)
        return self.due()

    def _wants(self) -> int:
        """Return the signal that this process has noted, or ``SAVE`` if one is due, which rank 0 decides; else 0."""
        if self.stopper.own is not None:
            return int(signal.Signals[self.stopper.own])
        is_old, every = time.monotonic() - self._saved_at >= self.every_seconds, self.every
        is_due = is_old or (every is not None and self.position.step // every > self.saved.step // every)
        return SAVE if is_due and (self.ranks is None or self.ranks.rank == 0) else 0

    def due(self) -> Due:
        """Return what is to be done here: nothing within a step, or where nobody knows how the data go on."""
        batch, course = self.position.batch, self.course
        is_lost = course is not None and batch > 0 and course.at(batch).get("source", 0) is None
        if self.is_open or is_lost:
            return Due.NOTHING
        if self._last_step is not None:
            return Due.STOP if self.position.step >= self._last_step else Due.NOTHING
        if self.stopper.noted:
            return Due.STOP
        proves = self.proof is not None and self.proof.wants(self.position.step)
        asked = self._wants() if self.ranks is None else self.ranks.request
        return Due.SAVE if (asked == SAVE or proves) and self.is_unsaved else Due.NOTHING

    def end_epoch(self, numbers: Mapping[str, float] | None = None) -> None:
        """Begin the next epoch, and record the one that is over; None: its loop does that itself, later."""
        at = self.position
        if numbers is not None:
            self.journal.epoch(at.epoch + 1, numbers, self.journal.pace())
        self.position, self.resumed = Position(epoch=at.epoch + 1, step=at.step), None
        if self.replay is not None:
            self.replay.drop()
        if self.course is not None:
            self.course.draws = {}

    @property
    def is_unsaved(self) -> bool:
        return self.keeper is not None and self.position.step > 0 and self.position != self.saved

    # --- checkpoints and stops

    def settle(self, due: Due, write: Callable[[Path], object], where: str = "", **facts: Any) -> None:
        """Save what is due and not saved, and stop if a signal asked for it."""
        if due and self.is_unsaved and not self.is_leaving:
            self.journal.phase("checkpoint")
            self.save(write, **facts)
            self.journal.phase("train")
        if due is Due.STOP:
            self.stop(where)

    def save(self, write: Callable[[Path], object], attempt: Attempt = _once, **facts: Any) -> Path:
        """Seal what ``write`` leaves in a folder, with the position and these facts; all ranks together. What may be
        done again after an out-of-memory is called by ``attempt``."""
        assert self.keeper is not None
        self._judge()
        at, keeper = self.position, self.keeper
        path = keeper.begin(at.step)
        now = rng_state()

        def write_all() -> None:
            write(path)
            if self.stream is None:
                began = {} if self.course is None else self.course.at(at.batch)
                save_checkpoint(path / self._draws_file, {**began, "now": now})

        with keeper.writing():
            attempt(write_all)
        own = {"identity": self.identity, "data": self.data, "position": asdict(at), "environment": environment()}
        keeper.seal(at.step, {"epoch": at.epoch, **own, **facts})
        if self.keep:
            keeper.prune(self.keep)
        self.saved, self._saved_at = replace(at), time.monotonic()
        if self.replay is not None and (self.proof is None or not self.proof.is_sealed):
            self.replay.seal(path if self.proof is None else self.proof.sealed(path, at.step))
        return path

    @property
    def is_leaving(self) -> bool:
        """Whether a stop has saved, and steps are made for the proof alone."""
        return self._last_step is not None

    def stop(self, where: str = "", *, at_once: bool = False) -> None:
        """End with exit code 75: nothing was trained since the newest checkpoint. If there is time, let the steps
        pass first that prove the resume; ``at_once``: none follows, or other ranks are not here."""
        at, saved = self.position, self.saved
        if self.replay is not None and not self.is_leaving and saved.step:
            self.replay.mark(saved.step)
            if not at_once and self.keeper is not None and self.keeper.lead(self._has_time):
                self._last_step, self._where = at.step + PROVING_STEPS, where
                return
        kept = "without a folder of checkpoints nothing is saved: it will start over."
        if self.keeper is not None:
            kept = self.keeper.holds(saved.step, at.step - saved.step)
        place = (self._where if self.is_leaving else where) or f"after step {saved.step}"
        raise self.stopper.end(place, kept, epoch=saved.epoch, step=saved.epoch_step)

    def _has_time(self) -> bool:
        """Return whether half of what a stop leaves is enough for the steps that prove the resume."""
        return 0 < min(self._step_seconds, default=0.0) * PROVING_STEPS < self.stopper.seconds_left / 2

    # --- the proof of a resume

    def _begin_replay(self) -> None:
        on_inexact = self.on_inexact or ("warn" if "replay" in self.allow else "stop") * (self.stream is not None)
        if self.keeper is None or not (on_inexact or is_proving()):
            return
        self.on_inexact = on_inexact
        self.keeper.has_journal = True
        if self.replay is None:
            self.replay = Replay(self.ranks.rank if self.ranks is not None else 0, goes_on=on_inexact == "warn")
            self.replay.splits = self.stream is None or bool(self.identity.get("recover"))
            self.at_end.enter_context(heard_by(self.replay))
        resumed = self.resumed
        if resumed is not None and resumed.sealed is not None:
            self.replay.open([resumed.path, *self.keeper.since(resumed.path)], self.position.step)
            on_gpu = any(one.is_cuda for model in self.parts.models().values() for one in model.parameters())
            adds_freely = on_gpu and not torch.are_deterministic_algorithms_enabled()
            self.replay.drifts = adds_freely or self.facts["environment"] != environment()
            self._is_judged, self._proves = False, resumed.path
            if resumed.changed:
                self.waive()
        if self.proof is None and is_proving():
            self._is_judged = True  # the command judges
            self.proof = Proof(self.keeper, self.parts, self.journal, self.replay, self.position.step)
            if not on_inexact:
                self.proof.end("its training stops and resumes, and is not exact")

    def waive(self) -> None:
        """Compare no step with what it was: settings are other ones."""
        if self.replay is not None:
            self.replay.forget()
        self._is_judged = True

    def _judge(self, *, is_over: bool = False) -> None:
        """Say once, when the steps of before were made again, how they came out; end what is not exact."""
        replay, path = self.replay, self._proves
        if replay is None or self._is_judged or not (replay.difference or is_over or not replay.left):
            return
        self._is_judged = True
        if not replay.difference:
            self.journal.verdict("proved", replay.verdict(path))
            return
        what = f"This resume is NOT exact: {replay.difference}{replay.words}"
        self.journal.verdict("inexact", what, is_said=self.on_inexact == "warn")
        if self.on_inexact == "warn":
            return
        own, way = list_some(replay.strange) or "what moves", "allow=('replay',)"
        way = way if self._has_allow else "allow_inexact=True"
        raise UsageError(
            f"{what}.",
            rule=f"exact: the steps after {path} are made again and compared; what no checkpoint holds begins anew.",
            remedy=f"let a checkpoint hold {own} (state_dict, a buffer), or make it a function of the step, and start "
            f"over in another folder; or pass {way} to go on to other weights",
        )

    def _end_replay(self, error: BaseException | None) -> None:
        replay = self.replay
        if replay is None:
            return
        try:
            replay.read_late(wait=True)
            if self.proof is not None and error is None:
                self.proof.end()
            if error is None and (replay.compared or not (self.journal.was_over or self.stopper.noted)):
                self._judge(is_over=True)
        finally:
            replay.mark(self.position.step)
            replay.close()
            self.replay = None


class Course:
    """The batches of a loader in its own order, pass by pass; a pass may begin behind some of them. It keeps what began
    the pass, and where a stream was after each of its last batches: a framework fetches ahead. ``runs_forward``: a
    stream that exports no position is read up to where it was."""

    def __init__(self, loader: Any, parts: LoopParts, *, runs_forward: bool = False) -> None:
        self.loader, self.parts, self.source, self.runs_forward = loader, parts, parts.source(loader), runs_forward
        #: What began the pass under way.
        self.draws: dict[str, Any] = {}
        self._states: dict[int, Any] = {}
        self._first_state: Any = None
        self._next: tuple[int, Mapping[str, Any]] = (0, {})

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "state_dict", "load_state_dict"):  # a framework would keep a position of its own
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def at(self, count: int) -> dict[str, Any]:
        """Return what begins the pass under way again behind so many batches: a ``source`` of None is not known."""
        if not self.draws:
            return {}
        is_over = self.parts.is_over(self.loader)
        source = {} if self.source is None else {"source": {} if is_over else self._states.get(count)}
        return {**self.draws, **source, "is_over": is_over}

    def go_on(self, count: int, draws: Mapping[str, Any]) -> str:
        """Let the next pass begin behind so many batches; return why that is not exact."""
        self._next = (count, draws)
        if draws.get("source") is not None:
            return GOES_ON
        if not is_stream(self.loader):
            return self.parts.order_again(self.loader, draws_again="start" in draws)
        number, how = count * (getattr(self.loader, "batch_size", None) or 1), "run forward"
        return f"{number} samples are {how if self.runs_forward else 'seen again'}: no state_dict of them"

    def __iter__(self) -> Iterator[Any]:
        (count, draws), self._next = self._next, (0, {})
        loader, source = self.loader, self.source
        if draws.get("is_over") or (count and count == length_of(loader)):
            return
        if "start" in draws:
            self.draws = {name: draws[name] for name in ("start", "generators")}
            self.parts.draw_again(loader, draws)
        else:
            self.draws = self.parts.draws(loader)
        is_known = draws.get("source") is not None
        if is_known:
            if source is not loader:  # a data set may begin each pass at what it was given last
                self._first_state = copy.deepcopy(source.state_dict())
            source.load_state_dict(draws["source"])
        elif self._first_state is not None:
            source.load_state_dict(self._first_state)
            self._first_state = None
        skips = count and not is_known and (self.runs_forward or not is_stream(loader))
        batches = iter(self.parts.skip(loader, count) if skips else loader)
        ahead, self._states = self.parts.look_ahead, {}
        if source is not None and not ahead:
            self._states[count] = copy.deepcopy(source.state_dict())
        for number, batch in enumerate(batches, count + 1):
            if source is not None:
                self._states = {key: one for key, one in self._states.items() if key > number + ahead - 4}
                self._states[number + ahead] = copy.deepcopy(source.state_dict())
            if source is loader and number == length_of(loader):
                next(batches, None)  # a framework that counts asks for no more, and a loader may end its pass only then
            yield batch
