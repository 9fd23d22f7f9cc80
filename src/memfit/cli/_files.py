"""The files that words of the command line name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memfit.errors import ConfigError, UsageError
from memfit.units import natural_order

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
        files = sorted(matches, key=natural_order)
        if not files:
            there = sorted((entry.name for entry in path.parent.glob("*.pt")), key=natural_order)
            raise UsageError(
                f"{word} is not there" + (f"; {path.parent} has {', '.join(there[:_NUM_NAMED])}." if there else "."),
                rule="every name is a file and every pattern finds one: a training that stopped early has not written "
                "the snapshots of later epochs.",
                remedy="name the snapshots that are there, or take all that are by a pattern: 'ema_epoch_*.pt'",
            )
        found += files
    return found


def read_model_config(path: Path) -> dict[str, Any]:
    """Return the content of a model's config.json, given the file or its folder."""
    file = path / "config.json" if path.is_dir() else path
    rule, found = "--hf-config takes a model's config.json, or the folder that holds it.", None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    except ValueError as error:
        what = f"is no JSON: {error}" if file.stat().st_size else "is empty"
    else:
        what = f"holds a {type(found).__name__}"
    if isinstance(found, dict):
        return found
    remedy = "download all of it from the model's page, or save it: model.config.save_pretrained(folder)"
    raise ConfigError(f"{file} {what}.", rule=rule, remedy=remedy)
