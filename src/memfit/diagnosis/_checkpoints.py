"""Say of checkpoint files whether they can be loaded."""

from __future__ import annotations

import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from memfit.diagnosis._runs import open_file

State = Literal["whole", "damaged", "not proved"]

_NAME = re.compile(r".*\.(?:ckpt|pt|pth|safetensors)|pytorch_model.*\.bin|.*\.(?:safetensors|bin)\.index\.json")
#: What torch.save writes is a zip archive.
_ARCHIVE = b"PK\x03\x04"
#: So much is read of a folder's checkpoints, the newest first. Of the others the table of contents and sizes are.
_MOST_READ = 2 << 30
_TORN = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint file; ``damaged`` cannot be loaded, and of ``not proved`` the file itself shows neither."""

    path: Path
    name: str  # the path below the folder that was given
    bytes: int
    written: float  # in Unix seconds
    state: State


def is_checkpoint(path: Path) -> bool:
    """Return whether a file's name is that of a checkpoint, or of an index of its parts."""
    return bool(_NAME.fullmatch(path.name))


def judge_checkpoints(paths: Mapping[Path, str], *, whole: bool = False) -> tuple[Checkpoint, ...]:
    """Return the checkpoints of these names and the parts that an index names; ``whole`` reads every byte."""
    found: dict[Path, str] = {}
    for path, name in paths.items():
        parts = _parts(path) if path.suffix == ".json" else [path.name]
        found |= {path.with_name(part): str(Path(name).with_name(part)) for part in parts}
    about = {path: path.stat() if path.exists() else os.stat_result([0] * 10) for path in found}
    left, judged = _MOST_READ, []
    for path in sorted(found, key=lambda one: (-about[one].st_mtime, one)):
        size = about[path].st_size
        is_read = whole or size <= left
        left -= size if is_read else 0
        judged.append(Checkpoint(path, found[path], size, about[path].st_mtime, _judge(path, is_read)))
    return tuple(sorted(judged, key=lambda one: one.path))


def names_of(checkpoints: Iterable[Checkpoint], state: State) -> str:
    """Return the first checkpoints in a state, with commas."""
    found = [one.name for one in checkpoints if one.state == state]
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")


def _parts(index: Path) -> set[str]:
    """The names of the files that an index of Hugging Face lists; its own if it cannot be read."""
    try:
        with open_file(index) as file:
            return {Path(name).name for name in json.load(file)["weight_map"].values()} - {""}
    except (OSError, *_TORN):
        return {index.name}


def _judge(path: Path, is_read: bool) -> State:
    try:
        with open_file(path) as file:
            head = file.read(8)
            if path.suffix == ".safetensors":
                return _judge_safetensors(file, head)
            if not head.strip(b"\0") or path.suffix == ".json":  # empty, or never written: a disk's zeros
                return "damaged"
            return _judge_archive(file, is_read) if head.startswith(_ARCHIVE) else "not proved"
    except (FileNotFoundError, *_TORN):
        return "damaged"
    except (OSError, NotImplementedError, RuntimeError):  # unreadable, or packed or encrypted in an unknown way
        return "not proved"


def _judge_archive(file: BinaryIO, is_read: bool) -> State:
    """Torch writes the checksum 0 where it was told to make none."""
    with zipfile.ZipFile(file) as archive:
        records, end = archive.infolist(), archive.start_dir
        if any(one.header_offset + one.compress_size > end for one in records):
            return "damaged"
        if not is_read or any(one.file_size and not one.CRC for one in records):
            return "not proved"
        return "whole" if archive.testzip() is None else "damaged"


def _judge_safetensors(file: BinaryIO, head: bytes) -> State:
    """Eight bytes with the header's length, the header, and the tensors up to the file's end."""
    length, size = int.from_bytes(head, "little"), os.fstat(file.fileno()).st_size
    if len(head) < 8 or length > size:
        return "damaged"
    header = json.loads(file.read(length))
    end = max((one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"), default=0)
    return "whole" if 8 + length + end == size else "damaged"
