"""Say of checkpoint files whether they can be loaded."""

from __future__ import annotations

import functools
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from memfit.diagnosis._runs import open_file
from memfit.units import list_some

State = Literal["whole", "damaged", "not proved"]

#: Names of checkpoints, and of a list of the parts of one.
CHECKPOINT = re.compile(r".*\.(?:ckpt|pt|pth|safetensors)|pytorch_model.*\.bin|.*\.(?:safetensors|bin)\.index\.json")
#: So much is read of a folder's checkpoints, the newest first. Of the others the table of contents and sizes are.
_MOST_READ = 2 << 30
#: MS-DOS's mark of a folder. torch reads nothing of a record that has it: its tensor is what lay in memory before.
_FOLDER = 0x10
_TORN = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


class Checkpoint(NamedTuple):
    """A file and its path below the folder that was given. A ``damaged`` one cannot be loaded."""

    name: str
    bytes: int
    written: float  # in Unix seconds
    state: State


def judge_checkpoints(paths: Mapping[Path, str], *, whole: bool = False) -> tuple[Checkpoint, ...]:
    """Return the checkpoints of these names and the parts that a list names; ``whole`` reads every byte."""
    names: dict[Path, str] = {}
    for path, name in paths.items():
        parts = _parts(path) if path.suffix == ".json" else [path.name]
        names |= {path.with_name(part): str(Path(name).with_name(part)) for part in parts}
    about = {path: path.stat() if path.exists() else os.stat_result([0] * 10) for path in names}
    found, left = [], _MOST_READ
    for path, stat in sorted(about.items(), key=lambda one: (-one[1].st_mtime, one[0])):
        is_read = whole or stat.st_size <= left
        left -= stat.st_size if is_read else 0
        found.append(
            Checkpoint(names[path], stat.st_size, stat.st_mtime, _judge(path, is_read, stat.st_size, stat.st_mtime_ns))
        )
    return tuple(sorted(found))


def names_of(checkpoints: Iterable[Checkpoint], state: State) -> str:
    """Return the first checkpoints in a state, with commas."""
    return list_some([one.name for one in checkpoints if one.state == state])


def _parts(index: Path) -> set[str]:
    """The names of the files that Hugging Face's list holds; its own if it cannot be read."""
    try:
        with open_file(index) as file:
            return {Path(name).name for name in json.load(file)["weight_map"].values()} - {""}
    except (OSError, *_TORN):
        return {index.name}


@functools.lru_cache(maxsize=1024)
def _judge(path: Path, is_read: bool, *_: int) -> State:
    """Judge a file of a size and a time once, although diagnosis and settings both ask."""
    try:
        with open_file(path) as file:
            head = file.read(8)
            if path.suffix == ".safetensors":
                return _judge_safetensors(file, head)
            if not head.strip(b"\0") or path.suffix == ".json":  # empty, or a disk's zeros
                return "damaged"
            return _judge_archive(file, is_read) if head.startswith(b"PK\x03\x04") else "not proved"
    except (FileNotFoundError, *_TORN):
        return "damaged"
    except (OSError, RuntimeError):  # not to be opened; packed or encrypted in an unknown way
        return "not proved"


def _judge_archive(file: BinaryIO, is_read: bool) -> State:
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if any(one.header_offset + one.compress_size > archive.start_dir for one in records):
            return "damaged"
        if any(one.file_size and (one.is_dir() or one.external_attr & _FOLDER) for one in records):
            return "damaged"
        if not is_read or any(one.file_size and not one.CRC for one in records):  # torch was told to make no checksums
            return "not proved"
        return "whole" if archive.testzip() is None else "damaged"


def _judge_safetensors(file: BinaryIO, head: bytes) -> State:
    """Eight bytes with the header's length, the header, and the tensors up to the file's end."""
    length, size = int.from_bytes(head, "little"), os.fstat(file.fileno()).st_size
    header = json.loads(file.read(length)) if length < size else {}
    end = max((one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"), default=0)
    return "whole" if 8 + length + end == size else "damaged"
