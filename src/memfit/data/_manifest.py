"""A panel's manifest: what its folder holds, and how each byte of it is checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from memfit.data._chunks import CHUNK_BYTES, chunk_digests
from memfit.errors import DamagedError, DataError

#: The layout of a panel's folder, as it is written now; those in `_READABLE` are read, all others refused.
FORMAT_VERSION = 2
_READABLE = (1, 2)

MANIFEST = "manifest.json"
ASSETS = "assets.json"
DATES = "dates.npy"
_LABELS = (ASSETS, DATES)


@dataclass(frozen=True)
class Manifest:
    """What a panel's folder holds.

    Attributes:
        fingerprint: SHA-256-sized hash of ``key``; the folder's name is its first 16 digits.
        key: All that the values depend on: content of the source, columns and types, parameters, code version.
        num_rows: Rows in the source, one per date and asset.
        arrays: By name, the dtype and shape of ``<name>.npy``; ``segments`` where an array lies in several files.
        files: By file name, its size and the hashes of its chunks.
    """

    fingerprint: str
    key: Mapping[str, Any]
    num_rows: int
    arrays: Mapping[str, Any]
    files: Mapping[str, Any]

    def to_text(self) -> str:
        """The one text of this manifest; its last entry is a checksum of the rest."""
        return _sealed({"format": FORMAT_VERSION, "chunk_bytes": CHUNK_BYTES, **asdict(self)})


def _sealed(fields: Mapping[str, Any]) -> str:
    checksum = blake2b(canonical_json(fields), digest_size=16).hexdigest()
    return json.dumps({**fields, "checksum": checksum}, indent=1) + "\n"


def canonical_json(value: Any) -> bytes:
    """The one JSON text of a value, for hashing."""
    return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()


def read_manifest(path: Path) -> Manifest:
    """A panel's manifest.

    Raises:
        DataError: If the folder is no panel, or has another format version.
        DamagedError: If one byte of the manifest is not as it was written.
    """
    file = path / MANIFEST
    try:
        text = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{path} is no panel: it holds no {MANIFEST}.",
            rule="a panel is a folder that Panel.build renamed into place whole.",
            remedy="name such a folder, or build the panel again (after removing this folder, if it is in the way)",
        ) from None
    try:
        fields = json.loads(text)
        del fields["checksum"]
        is_whole = _sealed(fields).encode() == text
    except (ValueError, TypeError, KeyError):
        is_whole = False
    if not is_whole:
        raise damaged(file, "does not match its own checksum")
    if fields["format"] not in _READABLE:
        raise DataError(
            f"{path} has panel format {fields['format']}.",
            rule=f"this memfit reads formats {', '.join(map(str, _READABLE))}.",
            remedy=f"build it again: rm -r {path}",
        )
    return Manifest(**{name: fields[name] for name in Manifest.__dataclass_fields__})


def check_files(
    path: Path, manifest: Manifest, *, full: bool, progress: Callable[[int, int], None] | None = None
) -> None:
    """Compare a panel's files with its manifest: sizes and the two label files always, every byte if ``full``.

    Args:
        path: The panel's folder.
        manifest: What it is to hold.
        full: Whether to read every byte.
        progress: Called with (bytes read, bytes in all).

    Raises:
        DamagedError: Naming the first file that differs, and where.
    """
    done, total = 0, sum(int(facts["bytes"]) for facts in manifest.files.values())
    for name, facts in manifest.files.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size is None or size != facts["bytes"]:
            raise damaged(file, "is not there" if size is None else f"has {size} bytes instead of {facts['bytes']}")
        if full or name in _LABELS:
            check_from(file, facts, 0, None if progress is None else partial(_advance, progress, done, total))
        done += size


def _advance(progress: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    progress(before + done, total)


def check_from(file: Path, facts: Mapping[str, Any], offset: int, advance: Callable[[int], None] | None = None) -> None:
    """Compare a file's bytes, from the chunk that holds an offset on, with what its manifest says.

    Raises:
        DamagedError: Naming the chunk that differs.
    """
    first = offset // CHUNK_BYTES
    found = chunk_digests(file, first)
    for i, (digest, wanted) in enumerate(zip(found, facts["chunks"][first:], strict=True), first):
        end = min((i + 1) * CHUNK_BYTES, facts["bytes"])
        if digest != wanted:
            raise damaged(file, f"was changed between bytes {i * CHUNK_BYTES} and {end}")
        if advance:
            advance(end)


def damaged(file: Path, what: str) -> DamagedError:
    """The error for a panel's file that is not as it was written."""
    return DamagedError(
        f"{file} {what}.",
        rule=f"a panel is written once, and its {MANIFEST} holds the size and checksums of each file.",
        remedy=f"build the panel again from its source: rm -r {file.parent}",
    )


def file_facts(file: Path) -> dict[str, Any]:
    """What a manifest says of one file."""
    return {"bytes": file.stat().st_size, "chunks": list(chunk_digests(file))}
