"""A panel's manifest: what its folder holds, and how each byte of it is checked."""

from __future__ import annotations

import json
import random
import re
from bisect import bisect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Literal, TypeAlias

from memfit.data._chunks import BLOCK_BYTES, CHUNK_BYTES, block_sums, chunk_digests
from memfit.errors import DamagedError, DataError

#: The layout of a panel's folder, as it is written now; those in `_READABLE` are read, all others refused.
FORMAT_VERSION = 2
_READABLE = (1, 2)

MANIFEST = "manifest.json"
ASSETS = "assets.json"
DATES = "dates.npy"
_LABELS = (ASSETS, DATES)

#: What is read to check files: nothing but their sizes, some blocks of them, or every byte.
Check: TypeAlias = Literal["sizes", "sample", "full"]

#: How many blocks a sample has at most.
_NUM_SAMPLED = 64


@dataclass(frozen=True)
class Manifest:
    """What a panel's folder holds.

    Attributes:
        fingerprint: SHA-256-sized hash of ``key``; the folder's name is its first 16 digits.
        key: All that the values depend on: content of the source, columns and types, parameters, code version.
        num_rows: Rows in the source, one per date and asset.
        arrays: By name, the dtype and shape of ``<name>.npy``; ``segments`` where an array lies in several files.
        files: By file name, its size, the hashes of its chunks and the checksums of its blocks. Older ones have no
            checksums of blocks.
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
        DamagedError: If one byte of the manifest is not as it was written, or if it is another panel's.
    """
    file = path / MANIFEST
    try:
        text = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise _no_panel(path, f"it holds no {MANIFEST}") from None
    try:
        fields = json.loads(text)
        del fields["checksum"]
        is_whole = _sealed(fields).encode() == text
    except (ValueError, TypeError, KeyError):
        is_whole = False
    if not is_whole:
        raise damaged(file, "does not match its own checksum")
    if "arrays" not in fields:
        raise _no_panel(path, f"its {MANIFEST} describes other data")
    if fields["format"] not in _READABLE:
        raise DataError(
            f"{path} has panel format {fields['format']}.",
            rule=f"this memfit reads formats {', '.join(map(str, _READABLE))}.",
            remedy=f"build it again: rm -r {path}",
        )
    manifest = Manifest(**{name: fields[name] for name in Manifest.__dataclass_fields__})
    # A folder that was copied under a name of its user's own is what its manifest says.
    if re.fullmatch("[0-9a-f]{16}", path.name) and path.name != manifest.fingerprint[:16]:
        raise damaged(file, f"is another panel's: the one in {manifest.fingerprint[:16]}")
    return manifest


def _no_panel(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is no panel: {why}.",
        rule="a panel is a folder that Panel.build renamed into place whole.",
        remedy="name such a folder, or build the panel again (after removing this folder, if it is in the way)",
    )


def check_files(
    path: Path, manifest: Manifest, check: Check, *, progress: Callable[[int, int], None] | None = None
) -> None:
    """Compare a panel's files with its manifest: the sizes and the two label files always, and what ``check`` names.

    Args:
        path: The panel's folder.
        manifest: What it is to hold.
        check: How much of the other files to read.
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
        if check == "full" or name in _LABELS:
            check_from(file, facts, 0, None if progress is None else partial(_advance, progress, done, total))
        done += size
    if check == "sample" and (changed := changed_block(path, manifest.files)):
        raise damaged(*changed)


def changed_block(path: Path, files: Mapping[str, Any]) -> tuple[Path, str] | None:
    """Return a file that changed, and where, if a sample of the blocks shows it.

    The sample has 64 blocks of 1 MiB: the first and last of up to 16 files, and others that each call draws anew. Of a
    folder with fewer blocks it has all. A file whose facts hold no checksums of blocks is left out.

    Args:
        path: The folder.
        files: By file name, its size and checksums, as `file_facts` gives them.
    """
    names = [name for name, facts in files.items() if facts.get("blocks")]
    starts = list(accumulate((len(files[name]["blocks"]) // 8 for name in names), initial=0))
    draw = random.SystemRandom()
    some = draw.sample(range(len(names)), min(16, len(names)))
    ends = [number for i in some for number in (starts[i], starts[i + 1] - 1)]
    others = draw.sample(range(starts[-1]), min(starts[-1], _NUM_SAMPLED))
    drawn = sorted(list(dict.fromkeys([*ends, *others]))[:_NUM_SAMPLED])
    for i, numbers in groupby(drawn, lambda number: bisect(starts, number) - 1):
        file, facts = path / names[i], files[names[i]]
        blocks = [number - starts[i] for number in numbers]
        for block, found in zip(blocks, block_sums(file, blocks), strict=True):
            if found != facts["blocks"][8 * block : 8 * block + 8]:
                end = min((block + 1) * BLOCK_BYTES, facts["bytes"])
                return file, f"was changed between bytes {block * BLOCK_BYTES} and {end}"
    return None


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
    blocks = "".join(block_sums(file))
    return {"bytes": file.stat().st_size, "chunks": list(chunk_digests(file)), "blocks": blocks}
