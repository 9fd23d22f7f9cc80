"""Read how far a job was: the counters in its lines, its epochs and its steps."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from memfit.diagnosis._sacct import parse_seconds
from memfit.diagnosis._text import Line, read_streams
from memfit.units import format_count

#: Counters of a training. A bar's name says what it counts; ``value`` is how far it is, ``total`` how far it goes.
_COUNTERS = tuple((name, re.compile(text, re.IGNORECASE)) for name, text in (
    ("bar", r"(?P<name>[^|%]{0,60}?)[ \d]*%(?:\|[^|]*\||(?=\s*\d+/)) *(?P<value>\d+)/(?P<total>\d+)"
            r"(?: *\[(?P<seconds>[\d:]+)<)?"),
    ("bar", r"(?P<name>.{0,60}?) [━╸╺╴][━╸╺╴ ]{2,200}(?P<value>\d+)/(?P<total>\d+)\s+(?P<seconds>[\d:]+) +•"),
    ("bar", r"(?P<name>\b(?:Train|Test|Val\w*|Eval\w*|Epoch)\b:? ?(?:\[?\d+\]?(?:/\d+)?)?:?)\s*"
            r"\[\s*(?P<value>\d+)/\s*(?P<total>\d+)[\s\](]"),
    ("step", r"\b(?:global[ _]?)?(?:step|steps|iter|iters|iteration|it|num_updates)\b[\"']?[ :=#\[(]{1,3}"
             r"(?P<value>\d+)(?:/ *(?P<total>\d+))?"),
    ("epochs", r"\bepoch[ :=#\[(]{1,3}(?P<value>\d+)(?: *(?:/|of) *(?P<total>\d+))?"),
    ("epochs", r"^ *(?P<value>\d+)/(?P<total>\d+) +[\d.]+G "),
))  # fmt: skip
_ANY = re.compile(r"%|━|step|it|updates|epoch|\[|\dG ", re.IGNORECASE)
#: What launchers count, which is no progress: ``srun: step 7 ...``, ``STEP 991.0 ON gpu02``.
_FOREIGN = re.compile(r"srun|slurm|StepId|STEP \d+\.\w+ ON|batch[ _]size", re.IGNORECASE)
#: What a bar of validation, and one of loading, is called.
_NO_TRAINING = re.compile(
    r"\b(?:sanity|(?:val|eval|test|predict|load|download|tokeniz|read|prepar|cach|sav)\w*|map|filter|generating)\b",
    re.IGNORECASE,
)
_EPOCH = re.compile(r"\bepoch\W{0,3}(?P<epoch>\d+)(?:\s*(?:/|of)\s*(?P<epochs>\d+))?", re.IGNORECASE)
_WANTED = re.compile(
    r"\b(?:max[_-]epochs|num[_-](?:train[_-])?epochs|Num Epochs|n_epochs|epochs)['\"]?\s*[:=]\s*(?P<epochs>\d+)"
)
_CLAIM = re.compile(
    r"\b(?:training|job|run|fit(?:ting)?)\b.{0,20}\b(?:complete[d]?|finished|done|ended successfully)\b"
    r"|\bsuccessfully (?:completed|finished|trained)\b",
    re.IGNORECASE,
)
#: Why a training is done before its last epoch.
_REASON = re.compile(
    r"early.?stop|did not improve|no improvement|to stop\b|stopp(?:ed|ing) early|stopped: `max_|max_(?:steps|time)"
    r"|time limit",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Reading:
    """A counter as a line at a position of its stream shows it; ``seconds`` are by a bar's clock."""

    place: int
    counter: str
    value: float
    line: Line
    total: int | None = None
    seconds: int | None = None

    @property
    def is_training(self) -> bool:
        return self.is_bar and not _NO_TRAINING.search(self.counter)

    @property
    def is_bar(self) -> bool:
        return self.counter.startswith("bar")

    @property
    def epoch(self) -> re.Match[str] | None:
        return _EPOCH.search(self.line.text[:400])


def read_counters(lines: Iterable[Line]) -> Iterator[Reading]:
    for place, line in enumerate(lines):
        text = line.text[:400]
        if not _ANY.search(text) or _FOREIGN.search(text):
            continue
        for name, regex in _COUNTERS:
            match = regex.search(text)
            if match is None:
                continue
            found = match.groupdict()
            total = int(found["total"]) if found.get("total") else None
            if name == "bar":
                name = f"bar {found['name'].strip(' :|-')[-30:]}/{total}"
            seconds = parse_seconds(found.get("seconds") or "") or None
            yield Reading(place, name, float(found["value"]), line, total, seconds)


def last_counter(log: bytes) -> tuple[str, float | None]:
    """Return how far the end of a log says that a training is, as text (empty if it counts nothing) and as a share (or None).

    >>> last_counter(b"Epoch 3/10: loss 0.1"), last_counter(b"step 400, loss 0.2"), last_counter(b"hello")
    (('epoch 3/10', 0.3), ('step 400', None), ('', None))
    >>> last_counter(b"Loading weights: 100%|##| 9/9\\n 12%|#   | 120/1000 [00:10<01:00]\\nlr is 0.1")
    ('120/1000', 0.12)
    >>> last_counter(b"epoch 2/4 step 50/100"), last_counter(b"Epoch 2: 50%|##  | 50/100 [00:10<00:10]")
    (('step 50/100', 0.375), ('50/100', None))
    """
    found: Reading | None = None
    for stream in read_streams("log", io.BytesIO(log)):
        for one in read_counters(stream.lines):
            is_later = found is None or one.place > found.place or one.line.rank != found.line.rank
            if is_later and (one.is_training or not one.is_bar):  # a line's bar comes first
                found = one
    if found is None:
        return "", None
    name = {"step": "step ", "epochs": "epoch "}.get(found.counter, "")
    text, share = f"{name}{found.value:g}", None
    if found.total:
        text, share = f"{text}/{found.total}", min(1.0, found.value / found.total)
        if (epoch := found.epoch) and found.counter != "epochs":
            share = (max(0, int(epoch["epoch"]) - 1) + share) / int(epoch["epochs"]) if epoch["epochs"] else None
    return text, share


def went_on(readings: Sequence[Reading], place: int) -> bool:
    """Return whether a counter took two values after a line: above its last value before it, if it has one."""
    before = {one.counter: one.value for one in readings if one.place <= place}
    after = [one for one in readings if one.place > place and one.value > before.get(one.counter, -1.0)]
    return max(Counter(name for name, _ in {(one.counter, one.value) for one in after}).values(), default=0) >= 2


@dataclass(frozen=True)
class Progress:
    steps_per_epoch: int | None = None  # by bars of one epoch each
    num_epochs: int | None = None
    epochs_done: int = 0  # whose bars came to their end
    epoch_seconds: int | None = None  # of the last whole one, with its validation
    bar: Reading | None = None
    claim: Line | None = None  # that says that it is done, if none says why it ended before its last epoch

    @property
    def doubt(self) -> str:
        """A sentence, if it says that it is done and its bars say that it is not."""
        if self.claim is None or self.num_epochs is None:
            return ""
        epoch = self.bar.epoch if self.bar else None  # a log that begins at a checkpoint shows the last epochs alone
        is_early = 1 <= max(self.epochs_done, int(epoch["epoch"]) + 1 if epoch else 0) < self.num_epochs
        said = f"the log says that it is done after {self.epochs_done} of {format_count(self.num_epochs, 'epoch')}"
        return said if is_early else ""


def read_progress(lines: Iterable[Line], readings: Iterable[Reading]) -> Progress:
    """Return how far a training came, by the lines of its logs: one may name its epochs, and another show its bars."""
    bars = [one for one in readings if one.is_bar]
    train = [one for one in bars if one.is_training and one.epoch]
    full = [one for one in train if one.total and one.value == one.total]
    totals = Counter(one.total for one in full or train if one.total)
    wanted, claim, has_reason = None, None, False
    for line in lines:
        text = line.text[:700]
        if ("poch" in text) and (found := _WANTED.search(text)):
            wanted = int(found["epochs"])
        claim = line if _CLAIM.search(text) else claim
        has_reason = has_reason or bool(_REASON.search(text))
    for one in train:
        if (epoch := one.epoch) and epoch["epochs"]:  # Rich bars of Lightning write the last epoch's number there
            wanted = int(epoch["epochs"]) + ("•" in one.line.text)
    seconds = full[-1].seconds if full else None
    if seconds and bars[-1] is not full[-1] and not bars[-1].is_training and bars[-1].value == bars[-1].total:
        seconds += bars[-1].seconds or 0
    return Progress(
        steps_per_epoch=totals.most_common(1)[0][0] if totals else None,
        num_epochs=wanted,
        epochs_done=len({one.epoch["epoch"] for one in full if one.epoch}),
        epoch_seconds=seconds,
        bar=train[-1] if train else None,
        claim=None if has_reason else claim,
    )
