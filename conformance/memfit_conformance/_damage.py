"""Damage the newest checkpoint, as a kill, a full disk or a bad one does."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path


def damage(name: str, folder: Path, pattern: str, files: Mapping[str, str]) -> None:
    """Do one damage.

    Args:
        name: One of the functions below.
        folder: Where checkpoints are.
        pattern: Of a checkpoint's name: a folder, or the one file that it is.
        files: Names of the model's and the optimizer's file in a checkpoint's folder.
    """
    newest = max(folder.glob(pattern), key=lambda path: int(re.findall(r"\d+", path.name)[0]))
    model, optimizer = (newest / files[kind] if newest.is_dir() else newest for kind in ("model", "optimizer"))
    globals()[f"_{name}"](newest, model, optimizer)


def _tear_model(newest: Path, model: Path, optimizer: Path) -> None:
    os.truncate(model, model.stat().st_size // 2)


def _tear_optimizer(newest: Path, model: Path, optimizer: Path) -> None:
    os.truncate(optimizer, optimizer.stat().st_size // 2)


def _remove_optimizer(newest: Path, model: Path, optimizer: Path) -> None:
    optimizer.unlink()


def _add_foreign(newest: Path, model: Path, optimizer: Path) -> None:
    (newest if newest.is_dir() else newest.parent).joinpath("checkpoint-is-incomplete.txt").write_text("incomplete")


def _flip_bytes(newest: Path, model: Path, optimizer: Path) -> None:
    """Flip one bit in each of 64 bytes in the middle, which are numbers of a tensor."""
    data = bytearray(model.read_bytes())
    middle = len(data) // 2
    for place in range(middle, middle + 64):
        data[place] ^= 1
    model.write_bytes(data)
