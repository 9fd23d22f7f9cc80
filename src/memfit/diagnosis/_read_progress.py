"""How far a job was: counters of steps, what its trainer caught and went on from, and words of a good end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memfit.diagnosis._facts import Pattern, words
from memfit.diagnosis._text import Stream


def _fraction(match: re.Match[str], after: str) -> dict[str, Any] | None:
    """A trainer's own count of batches that it skipped for memory; 0 is none."""
    return {"share": float(match.group(1))} if float(match.group(1)) > 0 else None


MILD: tuple[Pattern, ...] = (
    Pattern("skipped_batches", re.compile(r"\"?\boom\"?[=:] ?\"?(\d+(?:\.\d+)?(?:e-?\d+)?)"), _fraction, by_line=True),
    Pattern(
        "skipped_batches",
        words(
            r"ran out of memory (?:in [\w/]+)? [,:;-]* (?:skipping|retrying)"
            r"| (?:skipping|skipped) (?:this )?batch[^!]{0,60}?(?:out of memory|OOM)"
            r"| (?:OOM|out of memory)[^!]{0,60}? (?:skipping (?:the|this)? batch|retrying)"
            r"| Attempting to copy inputs of [^!]{0,200}? to CPU due to CUDA OOM | Decreasing batch size to: \d"
            r"| Batch size \d+ failed, trying batch size \d"
            r"| attempting to recover from OOM | retrying with (?:a )?(?:smaller|reduced|lower) (?:micro)?batch",
            flags=re.I,
        ),
    ),
    Pattern(
        "skipped_batches",
        words(
            r"Failed to clone\(\) tensor with name [^!]{0,600}?(?:out of memory|OOM)"
            r"| (?:out of memory|OOM)[^!]{0,200}? (?<!try)(?<!consider)(?<!by) (?:reducing|halving"
            r"|decreasing) (?:the)? (?:micro)? batch",
            flags=re.I,
        ),
    ),
    Pattern(
        "caught",
        re.compile(
            r"skipping (?:this |the )?(?:batch|sample|image|trial|step)|retrying|(?:decreas|reduc"
            r"|halv|lower)ing (?:the |micro ?)*batch"
            r"|trying (?:a )?(?:smaller )?batch[ _]?size|AutoBatch:|batch size \d+ failed|trial \d+ (?:failed|pruned)"
            r"|recover(?:ing|ed) from (?:the )?(?:OOM|out of memory)|falling back to|^\s*caught\b"
            r"|UserWarning: Failed to clone",
            re.I,
        ),
        by_line=True,
    ),
    Pattern(
        "progress",
        re.compile(
            r"server is listening|server listening on|Application startup complete|Uvicorn running on"
            r"|^ *(?P<all>\d+)/(?P=all) \[=+\]",
        ),
        by_line=True,
    ),
    Pattern(
        "success",
        re.compile(
            r"Pipeline completed at|Training (?:has )?(?:finished|completed?)\b|State: COMPLETED"
            r"|training (?:is )?done|Done training"
            r"|Evaluation (?:is |has )?(?:finished|completed?|done)\b"
            r"|Finished training|`?Trainer\.(?:fit|test)`? stopped: `max_|train_runtime"
            r"|successfully completed|job finished successfully",
            re.I,
        ),
        by_line=True,
    ),
)

#: Counters of a training, each with a name for what it counts.
_COUNTERS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("bar", re.compile(r"^(?P<name>[^|%\d]{0,60}?)[ \d]*%\|[^|]*\| *(?P<value>\d+)/(?P<total>\d+)")),
    ("update", re.compile(r"\bnum_updates[\"']?[=:] ?(?P<value>\d+)")),
    ("epoch", re.compile(r"[\"']epoch[\"']: (?P<value>\d+(?:\.\d+)?)")),
    (
        "step",
        re.compile(
            r"\b(?:global[ _])?(?:step|steps|iter|iters|iteration|it)\b[\"']?[ :=#\[(]{1,3}(?P<value>\d+)", re.I
        ),
    ),
    ("batch", re.compile(r"\b(?:epoch|ep)[ :=#]{0,3}\[?\d+\]?[^\d]{1,3}\[? *(?P<value>\d+) ?/ ?(?P<total>\d+)", re.I)),
    ("keras", re.compile(r"^ *(?P<value>\d+)/(?P<total>\d+) \[[=>.]+\]")),
    ("epochs", re.compile(r"\bepoch[ :=#\[(]{1,3}(?P<value>\d+)", re.I)),
    ("epochs", re.compile(r"^ *(?P<value>\d+)/(?P<total>\d+) +[\d.]+G ")),
    ("sample", re.compile(r"\b(?:sample|example|request|question)\b[ :#]{1,3}(?P<value>\d+) ?/ ?\d+", re.I)),
    ("trial", re.compile(r"\bTrial (?P<value>\d+) finished")),
    ("count", re.compile(r"\b(?:update|batch|round|episode)s?[ :=#]{1,3}(?P<value>\d+)\b", re.I)),
)
_ANY_COUNTER = re.compile(
    r"%\||step|iter|epoch|\[[=>.]|num_updates|trial|batch|update|round|episode|sample"
    r"|example|request|question|\dG |\bit\b|\bep\b",
    re.I,
)


@dataclass(frozen=True)
class Reading:
    """A counter as a line shows it.

    Attributes:
        place: The line's position in its stream.
        counter: What is counted.
        value: Its value.
    """

    place: int
    counter: str
    value: float


def read_counters(stream: Stream) -> Iterator[Reading]:
    """The readings of the counters that a stream's lines show, in order.

    >>> from memfit.diagnosis._text import clean
    >>> lines = [line for text in ("step 10 loss 0.5", "Train:  10%|# | 3/30 [00:01]") for line in clean(text)]
    >>> [(one.counter, one.value) for one in read_counters(Stream(lines))]
    [('step', 10.0), ('bar Train:/30', 3.0)]
    """
    for place, line in enumerate(stream.lines):
        text = line.text[:400]
        if not _ANY_COUNTER.search(text):
            continue
        for name, regex in _COUNTERS:
            match = regex.search(text)
            if match is None:
                continue
            found = match.groupdict()
            if name == "bar":
                name = f"bar {(found['name'] or '').strip()[:30]}/{found['total']}"
            yield Reading(place, name, float(found["value"]))


def went_on(readings: list[Reading], place: int, least: int = 2) -> bool:
    """Whether a counter rose at least so often after a line: past its last value before it, or at all without one.

    Args:
        readings: Of the line's stream, in order.
        place: The line's position.
        least: So many different values.
    """
    before: dict[str, float] = {}
    after: dict[str, set[float]] = {}
    for one in readings:
        if one.place <= place:
            before[one.counter] = one.value
        elif one.value > before.get(one.counter, -1.0):
            after.setdefault(one.counter, set()).add(one.value)
    return any(len(values) >= least for values in after.values())
