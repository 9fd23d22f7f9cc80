"""The 64 moments, as data: where a run is struck, what is done to its files, and with what it is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memfit_conformance._strike import Strike


@dataclass(frozen=True)
class Moment:
    """One of the 64."""

    number: str  # as in the design's list; a letter after it is a variant
    name: str  # what happens
    stops: tuple[tuple[Strike, ...], ...] = ()  # the strikes of each run before the last one, which ends
    options: Mapping[str, Any] = field(default_factory=dict)  # what this moment needs of a combination
    damage: str = ""  # what is done to the newest checkpoint before the last run: a name in ``_damage``
    resume: Mapping[str, Any] = field(default_factory=dict)  # what is other in the last run
    is_change: bool = False  # whether the last run must be refused: it would not be the same training
    may_die: bool = False  # whether a signal may end the process without a save, since nothing is to be saved yet
    only: str = ""  # the one framework that has the setting that it is about; empty: all
    # why a framework has it not, by framework (``*`` all), without memfit; ``+`` before it: also with memfit
    absent: Mapping[str, str] = field(default_factory=dict)

    def why_absent(self, framework: str, with_memfit: bool) -> str:
        """Return why the framework has no such moment, or an empty string."""
        if self.only not in ("", framework):
            return f"a setting of {self.only}"
        for name in (framework, "*"):
            if (why := self.absent.get(f"+{name}")) or (not with_memfit and (why := self.absent.get(name))):
                return why
        return ""

    def is_run(self, framework: str, with_memfit: bool) -> bool:
        """Return whether there is anything to run: all but what a framework has not and what no strike would find."""
        is_struck = self.only in ("", framework) and bool(self.stops) and "own_stop" not in self.options
        return is_struck or not self.why_absent(framework, with_memfit)


def _at(point: str, step: int | None = 7, nth: int = 0, action: str = "stop") -> tuple[tuple[Strike, ...], ...]:
    return ((Strike(point, step, nth, action),),)


_KILLED = _at("batch", 12, 1, "KILL")
_ONE_FILE = {"+lightning": "a checkpoint is one file"}
_NO_FSYNC = {"*": "no file is forced to disk"}
_NO_SEAL = {"*": "a checkpoint has no seal"}
_EVALUATE = {"evaluate": "steps"}
_WORKERS = {"workers": 2}
_OWN_STOP = {"+lightning": "no such option", "+accelerate": "no such option"}

MOMENTS: tuple[Moment, ...] = (
    # start
    Moment("1", "before the handler is set", _at("program", None), may_die=True),
    Moment("2", "rehearsal", _at("rehearsal", None), may_die=True, absent={"+accelerate": "no loss=", "*": "untried"}),
    Moment("3", "while a checkpoint is read", (*_at("batch", 7, 1, "KILL"), *_at("load", None)), may_die=True),
    Moment("4", "workers starting", _at("worker started", None), _WORKERS, may_die=True),
    Moment("5", "before the first batch", _at("train begins", None), may_die=True),
    # step
    Moment("6", "first micro-batch", _at("batch")),
    Moment("7", "second micro-batch", _at("batch", 7, 1)),
    Moment("8", "in backward", _at("in backward")),
    Moment("9", "before clipping", _at("clip")),
    Moment("10", "between backward and optimizer", _at("optimizer")),
    Moment("11", "inside optimizer.step", _at("in optimizer", 7, 1)),
    Moment("12", "before the schedule", _at("schedule")),
    Moment("13", "before the step counter", _at("counter")),
    Moment("14", "logging step", _at("log", 10)),
    Moment("15", "step skipped by a grad scaler", absent={"+*": "its scaler needs a GPU"}),
    Moment("16", "last step of warm-up", _at("batch", 3, 1)),
    # save
    Moment("17", "save due but not begun", _at("step end", 10)),
    Moment("18", "after the model file", _at("file", 10)),
    Moment("19", "after the optimizer's file", _at("file", 10, 1), absent=_ONE_FILE),
    Moment("20", "after the random state's file", _at("file", 10, 3), absent=_ONE_FILE),
    Moment("21", "first fsync of a save", _at("fsync", 10), absent=_NO_FSYNC),
    Moment("22", "second fsync", _at("fsync", 10, 1), absent=_NO_FSYNC),
    Moment("23", "third fsync", _at("fsync", 10, 2), absent=_NO_FSYNC),
    Moment("24", "fourth fsync", _at("fsync", 10, 3), absent=_NO_FSYNC),
    Moment("25", "before the seal's rename", _at("seal", 10), absent=_NO_SEAL),
    Moment("26", "after the seal's rename", _at("sealed", 10), absent=_NO_SEAL),
    Moment("27", "inside the removal of old ones", _at("removal", 15)),
    Moment(
        "28",
        "saving over an existing folder",
        ((Strike("save", 10, action="FOLDER"), Strike("batch", 12, action="KILL")),),
        absent={"lightning": "a checkpoint is a file that is renamed"},
    ),
    Moment("29", "disk full", _at("write", 10, action="ENOSPC")),
    Moment("30", "no permission to write", _at("write", 10, action="EACCES")),
    # evaluation
    Moment("31", "first batch of an evaluation", _at("evaluation", 10), _EVALUATE),
    Moment("32", "middle of an evaluation", _at("evaluation", 10, 2), _EVALUATE),
    Moment("33", "after it, before the best model is chosen", _at("evaluated", 10), _EVALUATE),
    Moment("34", "between evaluation and save", _at("save", 10), _EVALUATE),
    Moment("35", "evaluation at an epoch's end", _at("evaluation", 12), {"evaluate": "epoch"}),
    # epoch
    Moment("36", "last micro-batch of an epoch", _at("batch", 11, 1)),
    Moment("37", "epoch's end, before the next iter()", _at("epoch end", 12)),
    Moment("37b", "after a checkpoint at an epoch's end", _at("batch", 6), {"accumulation": 5}),
    Moment("38", "first step of epoch 2", _at("batch", 12)),
    Moment("39", "middle of epoch 2", _at("batch", 18, 1)),
    Moment(
        "39b",
        "middle of epoch 2, with use_seedable_sampler",
        _at("batch", 18, 1),
        {"seedable": True},
        only="accelerate",
    ),
    Moment("40", "accumulation that does not divide the epoch", _at("batch", 6, 1), {"accumulation": 7}),
    Moment("41", "drop_last", _at("batch", 7), {"batch": 5, "drop_last": True}),
    Moment("42", "last step of all", _at("batch", 23, 1)),
    Moment("43", "after it, before the final save", _at("train end", 24)),
    Moment(
        "44",
        "loading the best model",
        _at("best", 24),
        {"evaluate": "steps", "best": True},
        absent={
            "+lightning": "the script loads the best model, not the Trainer",
            "+accelerate": "the script loads the best model",
        },
    ),
    # signals
    Moment("45", "SIGTERM to the group, from outside", _at("batch", action="GROUP"), _WORKERS),
    Moment("46", "SIGTERM twice", ((Strike("backward", action="TERM"), Strike("in backward", action="TERM")),)),
    Moment(
        "46b", "SIGTERM, with enable_jit_checkpoint", _at("batch", action="TERM"), {"own_stop": True}, absent=_OWN_STOP
    ),
    Moment(
        "46c",
        "the same, then SIGKILL in its save",
        ((Strike("batch", action="TERM"), Strike("file", action="KILL")),),
        {"own_stop": True},
        absent=_OWN_STOP,
    ),
    Moment(
        "46d",
        "SIGTERM, with save_on_exception of ModelCheckpoint",
        _at("batch", 7, 1, "TERM"),
        {"on_exception": True},
        only="lightning",
    ),
    Moment(
        "47",
        "SIGTERM, then SIGKILL after the grace",
        ((Strike("backward", action="TERM"), Strike("file", 8, action="KILL")),),
    ),
    Moment("48", "SIGUSR1 ahead", _at("batch", action="USR1")),
    Moment("49", "SIGINT", _at("batch", action="INT")),
    Moment("50", "one worker killed", _at("batch", action="WORKER"), _WORKERS),
    # resume
    Moment("51", "torn model", _KILLED, damage="tear_model"),
    Moment("52", "torn optimizer", _KILLED, damage="tear_optimizer"),
    Moment("53", "missing file", _KILLED, damage="remove_optimizer"),
    Moment("54", "foreign file", _KILLED, damage="add_foreign"),
    Moment("55", "flipped bytes, same size", _KILLED, damage="flip_bytes"),
    Moment("56", "only a torn one", _at("batch", 7, 1, "KILL"), damage="tear_model"),
    Moment("57", "nothing saved", _at("batch", 2, action="KILL")),
    Moment("58", "six stops in a chain", tuple(_at("batch", step, 1)[0] for step in (2, 6, 9, 13, 17, 21))),
    Moment("59", "stopped again before the first new save", (*_at("batch", 7, 1), *_at("batch", 8, 1))),
    Moment("60", "other number of workers", _KILLED, resume={"workers": 2}),
    Moment("61", "learning rate changed", _KILLED, resume={"rate": 1e-2}, is_change=True),
    Moment("61b", "data changed", _KILLED, resume={"samples": 88}, is_change=True),
    Moment("61c", "batch changed", _KILLED, resume={"batch": 8}, is_change=True),
    Moment("62", "other thread count", _KILLED, resume={"threads": 2}),
    Moment("63", "finished already"),
    Moment("64", "newer framework (its version as it says it)", _KILLED, resume={"version": "99.0.0"}),
)
