"""Read how far a job was: the counters in its lines, its epochs and its steps."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memfit.diagnosis._text import Line, Stream, read_streams
from memfit.units import format_count

#: Counters of a training. A bar's name says what it counts; ``value`` is how far it is, ``total`` how far it goes.
_COUNTERS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(text, re.IGNORECASE))
    for name, text in (
        (
            "bar",
            r"(?P<name>[^|%]{0,60}?)[ \d]*%(?:\|[^|]*\||(?=\s*\d+/)) *(?P<value>\d+)/(?P<total>\d+)"
            r"(?: *\[(?P<seconds>[\d:]+)<)?",
        ),
        (
            "bar",
            r"(?P<name>.{0,60}?) [━╸╺╴][━╸╺╴ ]{2,200}(?P<value>\d+)/(?P<total>\d+)\s+(?P<seconds>[\d:]+) +•",
        ),
        (
            "bar",
            r"(?P<name>\b(?:Train|Test|Val\w*|Eval\w*|Epoch)\b:? ?(?:\[?\d+\]?(?:/\d+)?)?:?)\s*\[\s*(?P<value>\d+)/\s*(?P<total>\d+)[\s\](]",
        ),
        (
            "step",
            r"\b(?:global[ _]?)?(?:step|steps|iter|iters|iteration|it)\b[\"']?[ :=#\[(]{1,3}(?P<value>\d+)(?:/ *(?P<total>\d+))?",
        ),
        ("epochs", r"\bepoch[ :=#\[(]{1,3}(?P<value>\d+)(?: *(?:/|of) *(?P<total>\d+))?"),
        ("epochs", r"^ *(?P<value>\d+)/(?P<total>\d+) +[\d.]+G "),
    )
)
_ANY = re.compile(r"%|━|step|it|epoch|\[|\dG ", re.IGNORECASE)
#: What launchers count, which is no progress: ``srun: step 7 ...``, ``STEP 991.0 ON gpu02``.
_FOREIGN = re.compile(r"srun|slurm|StepId|STEP \d+\.\w+ ON|batch[ _]size", re.IGNORECASE)
_VALIDATION = re.compile(r"\b(?:sanity|val\w*|eval\w*|test\w*|predict\w*)\b", re.IGNORECASE)
_LOADING = re.compile(
    r"\b(?:load\w*|download\w*|map|tokeniz\w*|filter|read\w*|prepar\w*|generating|cach\w*|sav\w*)\b", re.I
)
_EPOCH = re.compile(r"\bepoch\W{0,3}(?P<epoch>\d+)(?:\s*(?:/|of)\s*(?P<epochs>\d+))?", re.IGNORECASE)
_WANTED = re.compile(
    r"\b(?:max[_-]epochs|num[_-](?:train[_-])?epochs|Num Epochs|n_epochs|epochs)['\"]?\s*[:=]\s*(?P<epochs>\d+)"
)
_SAVED = re.compile(r"epoch[=_](?P<epoch>\d+)[-_]step[=_](?P<step>\d+)|\b(?:checkpoint-|global_?step_?)(?P<only>\d+)\b")
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
        """Whether it is a bar of training, not of validation or loading."""
        return self.counter.startswith("bar") and not (
            _VALIDATION.search(self.counter) or _LOADING.search(self.counter)
        )

    @property
    def epoch(self) -> re.Match[str] | None:
        """The epoch that the line names."""
        return _EPOCH.search(self.line.text[:400])


def read_counters(stream: Stream) -> Iterator[Reading]:
    """Yield the counters in a stream's lines, in order."""
    for place, line in enumerate(stream.lines):
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
            clock = [int(part or 0) for part in (found.get("seconds") or "").split(":")]
            seconds = sum(part * 60**at for at, part in enumerate(reversed(clock)))
            yield Reading(place, name, float(found["value"]), line, total, seconds or None)


def last_counter(log: bytes) -> tuple[str, float | None]:
    """Return how far the end of a log says that a training is, as text (empty if it counts nothing) and as a share.

    The share is None where the whole is not known: of a counter without a total, or of one epoch of unknown many.

    >>> last_counter(b"Epoch 3/10: loss 0.1"), last_counter(b"step 400, loss 0.2"), last_counter(b"hello")
    (('epoch 3/10', 0.3), ('step 400', None), ('', None))
    >>> last_counter(b"Loading weights: 100%|##| 9/9\\n 12%|#   | 120/1000 [00:10<01:00]\\nlr is 0.1")
    ('120/1000', 0.12)
    >>> last_counter(b"epoch 2/4 step 50/100"), last_counter(b"Epoch 2: 50%|##  | 50/100 [00:10<00:10]")
    (('step 50/100', 0.375), ('50/100', None))
    """
    found: Reading | None = None
    for stream in read_streams("log", io.BytesIO(log)):
        for one in read_counters(stream):
            is_later = found is None or one.place > found.place or one.line.rank != found.line.rank
            if is_later and (one.is_training or not one.counter.startswith("bar")):  # a line's bar comes first
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


def went_on(readings: Sequence[Reading], place: int, least: int = 2) -> bool:
    """Return whether a counter took ``least`` values after a line: above its last value before it, if it has one."""
    before: dict[str, float] = {}
    after: dict[str, set[float]] = {}
    for one in readings:
        if one.place <= place:
            before[one.counter] = one.value
        elif one.value > before.get(one.counter, -1.0):
            after.setdefault(one.counter, set()).add(one.value)
    return any(len(values) >= least for values in after.values())


def clock_between(readings: Sequence[Reading], first: int, last: int) -> int:
    """Return the seconds for which a bar's own clock ran between two lines, at least."""
    known = {one.counter: one.seconds for one in readings if one.place <= first and one.seconds}
    later = [one for one in readings if first < one.place <= last]
    return max((one.seconds - known.get(one.counter, 0) for one in later if one.seconds), default=0)


@dataclass(frozen=True)
class Progress:
    """How far a training came."""

    steps_per_epoch: int | None = None  # by bars of one epoch each
    num_epochs: int | None = None
    epochs_done: int = 0  # whose bars came to their end
    epoch_seconds: int | None = None  # of the last whole one, with its validation
    global_step: int | None = None  # the largest that a checkpoint's name shows
    bar: Reading | None = None
    claim: Line | None = None  # that says that it is done
    has_reason: bool = False  # a line says why it ended before its last epoch

    @property
    def doubt(self) -> str:
        """A sentence, if it says that it is done and its bars say that it is not."""
        if self.claim is None or self.has_reason or self.num_epochs is None:
            return ""
        epoch = self.bar.epoch if self.bar else None  # a log that begins at a checkpoint shows the last epochs alone
        last = int(epoch["epoch"]) + 1 if epoch else 0
        is_early = 1 <= max(self.epochs_done, last) < self.num_epochs
        return (
            f"the log says that it is done after {self.epochs_done} of {format_count(self.num_epochs or 0, 'epoch')}"
            if is_early
            else ""
        )


def read_progress(stream: Stream) -> Progress:
    """Return how far a training came, by the lines of its log."""
    bars = [one for one in read_counters(stream) if one.counter.startswith("bar")]
    train = [one for one in bars if one.is_training and one.epoch]
    full = [one for one in train if one.total and one.value == one.total]
    totals = Counter(one.total for one in full or train if one.total)
    wanted, steps, claim, has_reason = None, [], None, False
    for line in stream.lines:
        text = line.text[:700]
        if ("poch" in text) and (found := _WANTED.search(text)):
            wanted = int(found["epochs"])
        if "step" in text or "heckpoint" in text:
            steps += [int(one["step"] or one["only"]) for one in _SAVED.finditer(text)]
        claim = line if _CLAIM.search(text) else claim
        has_reason = has_reason or bool(_REASON.search(text))
    for one in train:
        if (epoch := one.epoch) and epoch["epochs"]:  # Rich bars of Lightning write the last epoch's number there
            wanted = int(epoch["epochs"]) + ("•" in one.line.text)
    last = train[-1] if train else None
    seconds = full[-1].seconds if full else None
    if seconds and bars[-1] is not full[-1] and not bars[-1].is_training and bars[-1].value == bars[-1].total:
        seconds += bars[-1].seconds or 0
    return Progress(
        steps_per_epoch=totals.most_common(1)[0][0] if totals else None,
        num_epochs=wanted,
        epochs_done=len({one.epoch["epoch"] for one in full if one.epoch}),
        epoch_seconds=seconds,
        global_step=max(steps, default=None),
        bar=last,
        claim=claim,
        has_reason=has_reason,
    )
