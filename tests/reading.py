"""A text, diagnosed as the log of one file."""

from memfit.diagnosis._diagnose import Diagnosis, diagnose_streams
from memfit.diagnosis._text import Stream, clean


def look(text: str) -> Diagnosis:
    """What a text says, line by line."""
    lines = [line for number, raw in enumerate(text.split("\n"), 1) for line in clean(raw, "log", number)]
    return diagnose_streams([Stream(lines)])
