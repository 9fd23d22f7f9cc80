"""The files that words of the command line name."""

from __future__ import annotations

import re
from pathlib import Path

from memfit.errors import UsageError

_NUM_NAMED = 10


def expand_files(words: tuple[str, ...]) -> list[Path]:
    """The files that words name: a word that is no file and holds ``*``, ``?`` or ``[`` names all that match."""
    found: list[Path] = []
    for word in words:
        path = Path(word)
        if path.is_file():
            found.append(path)
            continue
        anchor = Path(path.anchor)
        matches = anchor.glob(str(path.relative_to(anchor))) if set("*?[") & set(word) else ()
        files = sorted(matches, key=_natural)
        if not files:
            there = sorted((entry.name for entry in path.parent.glob("*.pt")), key=lambda name: _natural(Path(name)))
            raise UsageError(
                f"{word} is not there" + (f"; {path.parent} has {', '.join(there[:_NUM_NAMED])}." if there else "."),
                rule="every name is a file and every pattern finds one: a training that stopped early has not written "
                "the snapshots of later epochs.",
                remedy="name the snapshots that are there, or take all that are by a pattern: 'ema_epoch_*.pt'",
            )
        found += files
    return found


def _natural(path: Path) -> list[tuple[int, str]]:
    """The key that sorts ``epoch_3`` before ``epoch_10``.

    >>> sorted([Path("epoch_10"), Path("epoch_3")], key=_natural)
    [PosixPath('epoch_3'), PosixPath('epoch_10')]
    """
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", str(path))]
