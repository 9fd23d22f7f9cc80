"""A sign: one thing that a log or another witness says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from memfit.diagnosis._signatures import MEANINGS, Kind, Meaning
from memfit.diagnosis._text import Line

_ORDER = {name: place for place, name in enumerate(MEANINGS)}


@dataclass(frozen=True)
class Sign:
    """One thing that a log or another witness says: its heading, its lines, and the figures in them."""

    name: str
    lines: tuple[Line, ...]
    values: Mapping[str, Any] = field(default_factory=dict)  # figures and names in them, sizes in bytes
    stream: int = 0  # the number of its stream
    place: int = 0  # the position of its first line there
    of: Kind | Literal[""] = ""  # which memory, if the words alone do not say; empty for that of the heading
    before: str = ""  # the text before it in its line
    emitter: str = ""  # the library that prints it, such as torch.npu or vllm

    @property
    def meaning(self) -> Meaning:
        return MEANINGS[self.name]

    @property
    def kind(self) -> Kind:
        return self.of or self.meaning.kind

    @property
    def cause(self) -> str:
        return self.meaning.cause

    @property
    def rank(self) -> int:
        return _ORDER[self.name]

    @property
    def file(self) -> str:
        return self.lines[0].file if self.lines else ""

    @property
    def number(self) -> int:
        return self.lines[0].number if self.lines else 0

    @property
    def text(self) -> str:
        return " ".join(line.text for line in self.lines)
