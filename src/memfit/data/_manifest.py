"""Read and write the manifest of a folder, and check its files against it."""

from __future__ import annotations

import json
import os
import random
import re
import zlib
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Literal, TypeAlias

from memfit.errors import DamagedError, DataError

#: The layout of a panel's folder.
FORMAT_VERSION = 3

MANIFEST = "manifest.json"
ASSETS = "assets.json"
DATES = "dates.npy"

#: What is read to check files: nothing but their sizes, some blocks of them, or every byte.
Check: TypeAlias = Literal["sizes", "sample", "full"]

#: Files have a checksum for each piece of this size.
BLOCK_BYTES = 1 << 20
_NUM_SAMPLED = 64


@dataclass(frozen=True)
class Manifest:
    """What a panel's folder holds. ``key`` is all that the values depend on (content of the source, columns and types,
    parameters, code version); ``fingerprint`` is its hash, 64 hex digits, and the folder's name the first 16.
    ``num_rows`` counts those of the source. ``files`` has the size and the checksums of the blocks of each file."""

    fingerprint: str
    key: Mapping[str, Any]
    num_rows: int
    arrays: Mapping[str, Any]
    files: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        write_sealed(folder, {"format": FORMAT_VERSION, "block_bytes": BLOCK_BYTES, **asdict(self)})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        fields = read_sealed(folder, "panel", (FORMAT_VERSION,))
        manifest = cls(**{name: fields[name] for name in cls.__dataclass_fields__})
        # A copy of a folder may have any other name.
        if re.fullmatch("[0-9a-f]{16}", folder.name) and folder.name != manifest.fingerprint[:16]:
            raise damaged(folder / MANIFEST, f"is another panel's: the one in {manifest.fingerprint[:16]}")
        return manifest


def canonical_json(value: Any) -> bytes:
    """Return the one JSON text of a value, for hashing."""
    return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()


def _sealed(fields: Mapping[str, Any]) -> str:
    checksum = blake2b(canonical_json(fields), digest_size=16).hexdigest()
    return json.dumps({**fields, "checksum": checksum}, indent=1) + "\n"


def write_sealed(folder: Path, fields: Mapping[str, Any]) -> None:
    """Write a folder's manifest, whose last entry is a checksum of the rest, and force it to disk."""
    with open(folder / MANIFEST, "wb") as file:
        file.write(_sealed(fields).encode())
        file.flush()
        os.fsync(file.fileno())


def read_sealed(folder: Path, kind: str, formats: Iterable[int]) -> dict[str, Any]:
    """Return the manifest of a folder of this kind (``panel`` or ``packed objects``) in one of the formats."""
    file = folder / MANIFEST
    try:
        text = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise _not_a(kind, folder, f"it has no {MANIFEST}") from None
    try:
        fields: dict[str, Any] = json.loads(text)
        del fields["checksum"]
        is_whole = _sealed(fields).encode() == text
    except (ValueError, TypeError, KeyError):
        is_whole = False
    if not is_whole:
        raise damaged(file, "does not match its own checksum")
    if (found := fields.get("kind", "panel" if "arrays" in fields else "other data")) != kind:
        raise _not_a(kind, folder, f"its {MANIFEST} describes {found}")
    if fields["format"] not in formats:
        raise DataError(
            f"{folder} has the {kind} format {fields['format']}.",
            rule=f"this memfit reads {', '.join(map(str, formats))}.",
            remedy=f"make it again from its source, after rm -r {folder}",
        )
    return fields


def _not_a(kind: str, folder: Path, why: str) -> DataError:
    makers = {"panel": "Panel.build", "packed objects": "memfit.data.pack"}
    return DataError(
        f"{folder} holds no {kind}: {why}.",
        rule=f"a folder of that kind was renamed into place whole by {makers[kind]}.",
        remedy="name such a folder, or make one (after removing this folder, if it is in the way)",
    )


def damaged(file: Path, what: str) -> DamagedError:
    return DamagedError(
        f"{file} {what}.",
        rule=f"its folder is written once, and its {MANIFEST} holds the size and checksums of each file.",
        remedy=f"make the folder again from its source, after rm -r {file.parent}",
    )


def check_files(
    folder: Path, files: Mapping[str, Any], check: Check, *, progress: Callable[[int, int], None] | None = None
) -> None:
    """Compare files with the manifest: sizes and a panel's labels always, and what ``check`` names."""
    for name, facts in files.items():
        file = folder / name
        size = file.stat().st_size if file.is_file() else -1
        if size != facts["bytes"]:
            raise damaged(file, "is not there" if size < 0 else f"has {size} bytes instead of {facts['bytes']}")
    done, total = 0, sum(int(facts["bytes"]) for facts in files.values())
    drawn = _drawn(files) if check == "sample" else {}
    for name, facts in files.items():
        is_whole = check == "full" or name in (ASSETS, DATES)
        blocks = range(len(facts["blocks"]) // 8) if is_whole else drawn.get(name, ())
        for block, found in zip(blocks, _block_sums(folder / name, blocks), strict=True):
            end = min((block + 1) * BLOCK_BYTES, facts["bytes"])
            if found != facts["blocks"][8 * block : 8 * block + 8]:
                raise damaged(folder / name, f"was changed between bytes {block * BLOCK_BYTES} and {end}")
            if progress:
                progress(done + end, total)
        done += facts["bytes"]


def newest(path: Path) -> Path:
    """Return a panel's folder, or that of the newest panel in a cache folder."""
    if (path / MANIFEST).exists():
        return path
    found = {file.stat().st_mtime_ns: file.parent.resolve() for file in path.glob(f"[!.]*/{MANIFEST}")}
    if not found:
        raise DataError(
            f"{path} holds no panel." if path.is_dir() else f"{path} is no folder.",
            rule=f"a panel is a folder with a {MANIFEST}; a cache folder holds such folders.",
            remedy=f"build one there: memfit panel build SOURCE --index date,code --features ... -o {path}",
        )
    return found[max(found)]


def check_panel(folder: Path, advance: Callable[[int, int], None]) -> None:
    """Compare every byte of a panel with its checksums, as `Panel.verify` does, and load no NumPy for that."""
    check_files(folder, Manifest.read(folder).files, "full", progress=advance)


def _drawn(files: Mapping[str, Any]) -> dict[str, list[int]]:
    """Draw 64 blocks to check: the first and last of up to 16 files that are not empty, and random ones."""
    names = [name for name, facts in files.items() if facts["blocks"]]
    starts = list(accumulate((len(files[name]["blocks"]) // 8 for name in names), initial=0))
    draw = random.SystemRandom()
    some = draw.sample(range(len(names)), min(16, len(names)))
    ends = [number for i in some for number in (starts[i], starts[i + 1] - 1)]
    others = draw.sample(range(starts[-1]), min(starts[-1], _NUM_SAMPLED))
    drawn = sorted(list(dict.fromkeys([*ends, *others]))[:_NUM_SAMPLED])
    by_file = groupby(drawn, lambda number: bisect(starts, number) - 1)
    return {names[i]: [number - starts[i] for number in numbers] for i, numbers in by_file}


def file_facts(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    return {"bytes": size, "blocks": "".join(_block_sums(file, range(-(-size // BLOCK_BYTES))))}


def _block_sums(file: Path, numbers: Iterable[int]) -> Iterator[str]:
    """Yield the CRC-32 (8 hex digits) of blocks of a file; it maps nothing."""
    with open(file, "rb", buffering=0) as opened:
        for number in numbers:
            yield f"{zlib.crc32(os.pread(opened.fileno(), BLOCK_BYTES, number * BLOCK_BYTES)):08x}"
