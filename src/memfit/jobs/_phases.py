"""Guesses from its log which phase a job is in that marks none."""

from __future__ import annotations

import re

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
