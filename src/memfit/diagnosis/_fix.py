"""The corrected batch script or Compose file: the smallest change that answers, with a reason for each line."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.checks import Check
from memfit.errors import UsageError

if TYPE_CHECKING:
    from memfit.diagnosis._diagnose import Diagnosis
    from memfit.diagnosis._job import Job


@dataclass(frozen=True)
class Edit:
    """One changed line.

    Attributes:
        line: Its number in the old file; of a new line, of the one before it.
        old: What stood there; empty for a new line.
        new: What stands there now.
        reason: Why.
    """

    line: int
    old: str
    new: str
    reason: str


@dataclass
class Draft:
    """Lines being edited, each at most once, and why."""

    lines: list[str]
    edits: list[Edit] = field(default_factory=list)
    _pieces: dict[int, list[tuple[int, int, str]]] = field(default_factory=dict)
    _behind: dict[int, list[tuple[str, str]]] = field(default_factory=dict)

    def replace(self, at: int, start: int, end: int, text: str, reason: str) -> None:
        """Put a text in the place of a stretch of a line, whose columns are those of the line as it was."""
        old = self.line(at)
        self._pieces.setdefault(at, []).append((start, end, text))
        self.edits.append(Edit(at + 1, old.strip(), self.line(at).strip(), reason))

    def append_to(self, at: int, column: int, text: str, reason: str) -> None:
        """Add to a line, at a column of what it was."""
        self.replace(at, column, column, text, reason)

    def insert(self, after: int, text: str, reason: str) -> None:
        """Add a line behind another; -1 for the top."""
        self._behind.setdefault(after, []).append((text, reason))
        self.edits.append(Edit(after + 1, "", text.strip(), reason))

    def line(self, at: int) -> str:
        """A line as it is now."""
        text = self.lines[at]
        for start, end, piece in sorted(self._pieces.get(at, []), reverse=True):
            text = text[:start] + piece + text[end:]
        return text

    def behind(self, at: int) -> list[tuple[str, str]]:
        """The new lines behind a line, each with its reason."""
        return self._behind.get(at, [])

    def text(self, note: Callable[[str, str], str], first_of: Callable[[int], int] = int) -> str:
        """The whole, with a note of its reason above each changed or new line.

        Args:
            note: Makes the note from a reason and the line that it is for.
            first_of: The index of the line above which the notes of a line go.
        """
        above: dict[int, list[str]] = {}
        for edit in self.edits:
            if edit.old:
                at = first_of(edit.line - 1)
                said = note(edit.reason, self.lines[at])
                above.setdefault(at, [])
                above[at] += [said] if said not in above[at] else []
        found = [line for text, reason in self.behind(-1) for line in (note(reason, text), text)]
        for at in range(len(self.lines)):
            found += [*above.get(at, []), self.line(at)]
            found += [line for text, reason in self.behind(at) for line in (note(reason, text), text)]
        return "\n".join(found) + "\n"


@dataclass(frozen=True)
class Fix:
    """A corrected file, not yet written.

    Attributes:
        path: The old file.
        text: The new content.
        edits: What was changed, and why.
        checks: Whether the new file is consistent, and what no file can fix.
    """

    path: Path
    text: str
    edits: tuple[Edit, ...]
    checks: tuple[Check, ...] = ()
    new_path: Path | None = None

    @property
    def diff(self) -> str:
        """The unified diff from the old file to the new one; empty when nothing changed."""
        old = self.path.read_text(errors="replace").splitlines()
        named = str(self.new_path or fixed_name(self.path))
        lines = difflib.unified_diff(old, self.text.splitlines(), str(self.path), named, lineterm="")
        return "\n".join(lines)

    def write(self) -> Fix:
        """Write it beside the old file, under a name that is not taken."""
        number, path = 1, fixed_name(self.path)
        while True:
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self.path.stat().st_mode & 0o777)
                break
            except FileExistsError:
                number += 1
                path = fixed_name(self.path, number)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(self.text)
        return Fix(self.path, self.text, self.edits, self.checks, path)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {
            "path": str(self.path),
            "fixed": None if self.new_path is None else str(self.new_path),
            "edits": [vars(edit) for edit in self.edits],
            "checks": [check.to_dict() for check in self.checks],
            "diff": self.diff,
        }


def fixed_name(path: Path, number: int = 1) -> Path:
    """Where the corrected file goes.

    >>> str(fixed_name(Path("a/train.slurm"))), str(fixed_name(Path("compose.yaml"), 2))
    ('a/train.fixed.slurm', 'compose.fixed.2.yaml')
    """
    return path.with_name(f"{path.stem}.fixed{'' if number == 1 else f'.{number}'}{path.suffix}")


def make_fix(
    path: Path, diagnosis: Diagnosis, job: Job | None = None, *, config: Mapping[str, Any] | None = None
) -> Fix:
    """The corrected file: a Compose file by its suffix, else a batch script. Nothing is written.

    Args:
        path: The file that the job was started with.
        diagnosis: What killed the job.
        job: What was measured of it; what the file asks for is read from it.
        config: The model's ``config.json``.

    Raises:
        UsageError: The file cannot be read, or is neither.
    """
    from memfit.diagnosis._fix_compose import fix_compose
    from memfit.diagnosis._fix_script import fix_script
    from memfit.diagnosis._job import Job

    known = job or Job()
    if path.suffix.lower() in (".yml", ".yaml"):
        return fix_compose(path, diagnosis, known)
    return fix_script(path, diagnosis, known, config=config)


def refuse(path: Path, what: str, rule: str, remedy: str) -> UsageError:
    """An error about a file that cannot be corrected."""
    return UsageError(f"{path}: {what}", rule=rule, remedy=remedy)
