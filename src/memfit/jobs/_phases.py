"""Which phase a job is in that marks none: a guess from its log or, where that says nothing, from its memory."""

from __future__ import annotations

import re
from collections.abc import Sequence

# In one line the first that matches counts: a line "saved model after epoch 3" tells of a checkpoint.
_PATTERNS = tuple(
    (phase, re.compile(pattern, re.IGNORECASE))
    for phase, pattern in (
        ("checkpoint", r"\b(?:saving|saved|writing|wrote)\b.*\b(?:checkpoint|model|weights|state)\b"),
        (
            "validate",
            r"\b(?:validat(?:ing|ion)|evaluat(?:ing|ion)|testing)\b|\b(?:val|valid|test|eval)[_ ](?:loss|acc)",
        ),
        ("train", r"\btraining\b|\b(?:epoch|step|iter|iteration)s?\b\s*[:=\[#(]?\s*\d|\btrain[_ ]loss\b"),
        ("build", r"\b(?:building|compiling|creating|constructing|preprocessing|tokenizing)\b"),
        ("load", r"\b(?:loading|reading|downloading|importing)\b"),
    )
)
_SHAPE_SECONDS, _FLAT = 3.0, 1.02


def phase_of_line(line: str) -> str | None:
    """The phase that a line of a log speaks of, or None.

    >>> [phase_of_line(line) for line in ("Loading dataset ...", "Epoch 3/10: loss 0.1", "val_loss=0.3", "hello")]
    ['load', 'train', 'validate', None]
    >>> phase_of_line("Saved checkpoint after epoch 3"), phase_of_line("Building panel"), phase_of_line("steps: many")
    ('checkpoint', 'build', None)
    """
    return next((phase for phase, pattern in _PATTERNS if pattern.search(line)), None)


def phase_of_log(text: str) -> str | None:
    """The phase that the last telling line of a log speaks of.

    >>> phase_of_log("Loading data\\nEpoch 1\\n\\nok\\n")
    'train'
    """
    # A progress bar writes its lines over one another.
    lines = reversed(text.replace("\r", "\n").splitlines())
    return next((phase for line in lines if (phase := phase_of_line(line))), None)


def phase_of_shape(levels: Sequence[tuple[float, int]]) -> str | None:
    """The phase that the course of memory suggests: rising is ``load``, flat is ``train``; None before 3 seconds.

    Args:
        levels: Seconds and bytes, in order of time.

    >>> phase_of_shape([(0, 100), (1, 150), (2, 190), (3, 230)]), phase_of_shape([(0, 100), (2, 101), (4, 100)])
    ('load', 'train')
    >>> phase_of_shape([(0, 100), (1, 150)]) is None
    True
    """
    if not levels or levels[-1][0] - levels[0][0] < _SHAPE_SECONDS:
        return None
    recent = [level for at, level in levels if levels[-1][0] - at <= _SHAPE_SECONDS]
    return "load" if levels[-1][1] > _FLAT * min(recent) else "train"
