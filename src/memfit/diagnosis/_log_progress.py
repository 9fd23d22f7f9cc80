"""How far a training came, by its own log: epochs, steps, losses, checkpoints, claims of success, a timeline."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from memfit.diagnosis._progress_bars import CHEAP, MOST_CHARS, Bar, read_bar
from memfit.diagnosis._text import Line


@dataclass(frozen=True)
class Saved:
    """A checkpoint that a log names.

    Attributes:
        name: As written.
        epoch, step: In the name; None when it tells none.
        written: It was written; not only read.
        line: Where it stands.
    """

    name: str
    epoch: int | None
    step: int | None
    written: bool
    line: Line


@dataclass(frozen=True)
class Moment:
    """A point of the timeline.

    Attributes:
        time: As the log writes it, or of the last line before it that has one; empty when none has.
        what: In words.
        line: Where it stands.
    """

    time: str
    what: str
    line: Line


@dataclass(frozen=True)
class Progress:
    """How far a training came.

    Attributes:
        steps_per_epoch: By bars of one epoch each; None when there are none.
        num_epochs: How many were wanted; None when not told.
        epochs_done: How many training bars of an epoch came to their end.
        last: The last bar.
        train: The last bar of training.
        first_loss, last_loss: Of the training.
        global_step: The largest that was seen; also from the names of checkpoints.
        checkpoints: What was saved or read, in order.
        claims: Lines that say that it is done.
        timeline: Where phases and epochs begin and end, in order.
    """

    steps_per_epoch: int | None = None
    num_epochs: int | None = None
    epochs_done: int = 0
    last: Bar | None = None
    train: Bar | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    global_step: int | None = None
    checkpoints: tuple[Saved, ...] = ()
    claims: tuple[Line, ...] = ()
    timeline: tuple[Moment, ...] = ()

    @property
    def is_premature(self) -> bool:
        """Whether it says that it is done, and its bars say that it is not.

        A claim that names why it ended (early stopping, a step or time limit) is no false one. Neither is a log whose
        bars show the last epoch: it began at a checkpoint, or counts from 1.
        """
        if not self.claims or self.num_epochs is None or any(_REASON.search(one.text) for one in self.claims):
            return False
        last = (self.train.epoch or 0) + 1 if self.train is not None else 0
        return 1 <= max(self.epochs_done, last) < self.num_epochs


_SAVED = (
    re.compile(r"epoch[=_](?P<epoch>\d+)[-_]step[=_](?P<step>\d+)", re.IGNORECASE),
    re.compile(r"\bcheckpoint-(?P<step>\d+)\b"),
    re.compile(r"\bglobal_?step_?(?P<step>\d+)\b"),
    re.compile(
        r"(?:checkpoint|ckpt|model)[_-]?(?:epoch|ep|e)?[_-]?(?P<epoch>\d+)[\w-]{0,40}\.(?:ckpt|pth?|bin|safetensors)"
    ),
    re.compile(r"(?i:sav(?:ed|ing)) (?:\w+ ){0,3}(?i:checkpoint)s?\b(?: (?:to|at|in|as):?)? ?(?=(?P<name>\S{0,300}))"),
)
_CHECKPOINT = re.compile(r"heckpoint|ckpt|global_?step|epoch[=_]\d|\.pth?\b")
_PATH_CHARS = string.ascii_letters + string.digits + "_./=-"
_READS = re.compile(r"\b(?:load\w*|restor\w*|resum\w*|from|read\w*)\b", re.IGNORECASE)
_WRITES = re.compile(r"\bsav(?:e|ed|ing)\b|\bwr(?:ote|it\w+)\b|\bdump\w*\b", re.IGNORECASE)
_CLAIM = re.compile(
    r"\b(?:training|job|run|fit(?:ting)?)\b.{0,20}\b(?:complete[d]?|finished|done|ended successfully)\b"
    r"|\bsuccessfully (?:completed|finished|trained)\b|`Trainer\.fit` stopped: `max_\w+=\d+` reached",
    re.IGNORECASE,
)
#: Lines that say why a training ends before its last epoch, and is done all the same.
STOPS_EARLY = re.compile(
    r"did not improve|no improvement|signaling trainer to stop|stopp(?:ed|ing) early"
    r"|early.?stopp(?:ed|ing) (?:at|after|trigger|condition)|early.?stop(?:ped|ping)?[.!]",
    re.IGNORECASE,
)
_REASON = re.compile(r"early.?stop|stopped: `max_|max_(?:steps|time)|time limit", re.IGNORECASE)
_WANTED = re.compile(
    r"\b(?:max[_-]epochs|num[_-](?:train[_-])?epochs|Num Epochs|n_epochs)['\"]?\s*[:=]\s*(?P<epochs>\d+)"
)


def read_saved(line: Line) -> Saved | None:
    """The checkpoint that a line names.

    >>> saved = read_saved(Line("-", 1, "Saving latest checkpoint to out/epoch=39-step=9680.ckpt"))
    >>> saved.epoch, saved.step, saved.written
    (39, 9680, True)
    >>> read_saved(Line("-", 1, "Resuming from checkpoint-500")).written
    False
    """
    if not _CHECKPOINT.search(line.text):
        return None
    for pattern in _SAVED:
        if found := pattern.search(line.text):
            groups = found.groupdict()
            written = bool(_WRITES.search(line.text)) or not _READS.search(line.text)
            epoch, step = (int(groups[key]) if groups.get(key) else None for key in ("epoch", "step"))
            return Saved(groups.get("name") or _whole_name(line.text, *found.span()), epoch, step, written, line)
    return None


def _whole_name(text: str, start: int, end: int) -> str:
    """The path that a stretch of a line is part of."""
    before, after = text[max(0, start - 300) : start], text[end : end + 100]
    left = len(before) - len(before.rstrip(_PATH_CHARS))
    right = len(after) - len(after.lstrip(_PATH_CHARS))
    return text[start - left : end + right]


def read_progress(lines: Iterable[Line]) -> Progress:
    """How far a training came, by the lines of its log, or of one rank of it."""
    bars: list[Bar] = []
    saved: list[Saved] = []
    claims: list[Line] = []
    num_epochs, epoch = None, None
    moments: list[Moment] = []
    time = ""
    for line in lines:
        time = line.time or time
        if not CHEAP.search(line.text[:MOST_CHARS]):
            continue
        if len(line.text) > MOST_CHARS:
            line = replace(line, text=line.text[:MOST_CHARS])
        if wanted := _WANTED.search(line.text):
            num_epochs = int(wanted["epochs"])
        bar = read_bar(line)
        if bar is not None:
            if bar.form == "Keras":
                epoch = bar.epoch if bar.epoch is not None else epoch
                bar = replace(bar, epoch=epoch)
            num_epochs = bar.num_epochs + _from_zero(bar) if bar.num_epochs is not None else num_epochs
            moments += _moments(bars[-1] if bars else None, bar, time)
            bars.append(bar)
        elif checkpoint := read_saved(line):
            saved.append(checkpoint)
            moments.append(Moment(time, f"checkpoint {'saved' if checkpoint.written else 'read'}", line))
        elif _CLAIM.search(line.text):
            claims.append(line)
            moments.append(Moment(time, "says that it is done", line))
    return _sum_up(bars, saved, claims, num_epochs, moments)


def _from_zero(bar: Bar) -> int:
    """Rich bars of Lightning write the last epoch's number after the slash, all others how many there are."""
    return 1 if bar.form == "tqdm" and bar.line is not None and "•" in bar.line.text else 0


def _moments(before: Bar | None, bar: Bar, time: str) -> Iterator[Moment]:
    assert bar.line is not None
    label = " ".join(filter(None, (bar.phase or bar.name, "" if bar.epoch is None else f"epoch {bar.epoch}")))
    is_new = before is None or (before.phase, before.epoch, before.name) != (bar.phase, bar.epoch, bar.name)
    if is_new:
        yield Moment(time, f"{label} begins", bar.line)
    if bar.is_full and (is_new or not (before and before.is_full)):
        yield Moment(time, f"{label} reached {bar.step}/{bar.total}", bar.line)


def _sum_up(
    bars: Sequence[Bar], saved: list[Saved], claims: list[Line], num_epochs: int | None, moments: list[Moment]
) -> Progress:
    train = [bar for bar in bars if bar.phase == "train"]
    of_epoch = [bar for bar in train if bar.total and not bar.is_global]
    full = {(bar.epoch, bar.line.number if bar.epoch is None and bar.line else 0) for bar in of_epoch if bar.is_full}
    totals = Counter(bar.total for bar in of_epoch if bar.is_full) or Counter(bar.total for bar in of_epoch)
    losses = [bar.loss for bar in train if bar.loss is not None]
    steps = [bar.step for bar in train if bar.is_global and bar.step is not None]
    steps += [one.step for one in saved if one.step is not None]
    return Progress(
        steps_per_epoch=totals.most_common(1)[0][0] if totals else None,
        num_epochs=num_epochs,
        epochs_done=len(full),
        last=bars[-1] if bars else None,
        train=train[-1] if train else None,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        global_step=max(steps, default=None),
        checkpoints=tuple(saved),
        claims=tuple(claims),
        timeline=tuple(moments),
    )
