"""What one unit of a stage left, as a file beside its folder: no result counts before it is there.

The manifest is written last, by rename, so a stage that was killed has none. It says what the result depends on (the
key, by parts), what it is (numbers, outputs with hashes) and what it took.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit.errors import DamagedError
from memfit.masking import mask
from memfit.rundir import read_json, write_atomic

#: Files above this are checked by a sample where they are opened, and hashed whole where they are made.
SAMPLED_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
_NUM_PIECES = 16
#: How the files of each kind of output end.
ENDINGS = {"panel": ".panel.json", "table": ".feather", "arrays": ".arrays", "json": ".json"}
#: The file in a unit's folder that says for which key it was made.
KEY_FILE = ".key"
MANIFEST_VERSION = 1
_OUTPUT = {"name": str, "kind": str, "path": str, "bytes": int, "sha256": str, "sample": str}
_SHAPE = {
    "schema_version": int,
    "stage": str,
    "job": str,
    "status": frozenset({"completed", "stopped"}),
    "why": str,
    "exit_code": int,
    "key": str,
    "parts": {str: str},
    "settings": dict,
    "code": {str: str},
    "result": dict,
    "outputs": [_OUTPUT],
    "digest": str,
    "seconds": (float, int),
    "unforeseen": {str: [str]},
    "reused_from": (str, type(None)),
}


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest that must be there.

    Raises:
        DamagedError: If it is not, or is damaged.
    """
    found = read_json(path, _SHAPE)
    if found is None:
        raise DamagedError(
            f"{path} is not there.",
            rule="a stage's result is read by its manifest.",
            remedy="run the same command again: what is missing is made anew",
        )
    return found


def find_manifest(path: Path) -> dict[str, Any] | None:
    """Return a manifest whose outputs are all there in their size, or None: what is damaged is made anew."""
    try:
        found = read_json(path, _SHAPE)
    except DamagedError:
        return None
    for output in found["outputs"] if found else ():
        file = path.with_suffix("") / output["path"]
        if not file.exists() or size_of(file) != output["bytes"]:
            return None
    return found


def write_result(
    path: Path,
    facts: Mapping[str, Any],
    *,
    result: Mapping[str, Any],
    outputs: Sequence[Mapping[str, Any]],
    seconds: float,
    **more: Any,
) -> None:
    """Write the manifest of a result that has just been made.

    Args:
        path: Where.
        facts: What it was made of: ``stage``, ``unit``, ``job``, ``key``, ``parts``, ``settings``, ``code``.
        result: What the stage returned.
        outputs: What ``describe_outputs`` says.
        seconds: What making it took.
        more: Further entries: ``status``, ``why`` and ``exit_code`` of a stage that stopped the run, ``unforeseen``.
    """
    made = {"schema_version": MANIFEST_VERSION, "status": "completed", "why": "", "exit_code": 0, "unforeseen": {}}
    made |= {**facts, "result": result, "outputs": outputs, "seconds": round(seconds, 3), "reused_from": None}
    _write(
        path, made | {"digest": digest([result, sorted([o["name"], o["kind"], o["sha256"]] for o in outputs)])} | more
    )


def _write(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest, for its owner alone where a unit or a result looks like a secret."""
    is_secret = mask(manifest) != manifest
    write_atomic(path, json.dumps(manifest, indent=2) + "\n", mode=0o600 if is_secret else 0o666)


def remove_result(manifest: Path) -> None:
    """Remove what a unit left: its manifest, and its folder with all checkpoints."""
    manifest.unlink(missing_ok=True)
    shutil.rmtree(manifest.with_suffix(""), ignore_errors=True)


def is_foreseen(manifest: Mapping[str, Any]) -> bool:
    """Whether the files of code that it loaded without naming them are as they were."""
    return all(Path(path).is_file() and hash_file(Path(path)) == sha for path, sha in manifest["unforeseen"].values())


def canonical(value: Any) -> str:
    """A value as JSON, the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def digest(value: Any) -> str:
    """The SHA-256 of a JSON value.

    >>> digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})
    True
    """
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """The SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_path(path: Path) -> str:
    """The SHA-256 of a file, or of a folder's files and their names."""
    if path.is_dir():
        return digest([[str(one.relative_to(path)), hash_file(one)] for one in files_in(path)])
    return hash_file(path)


def sample_path(path: Path) -> str:
    """A digest of sizes and of evenly spaced pieces: it reads at most 16 MiB of each file."""
    found = []
    for one in files_in(path) if path.is_dir() else [path]:
        size, sha = one.stat().st_size, hashlib.sha256()
        with open(one, "rb") as file:
            for piece in range(_NUM_PIECES if size > _NUM_PIECES * _PIECE_BYTES else 1):
                file.seek(piece * (size - _PIECE_BYTES) // (_NUM_PIECES - 1) if piece else 0)
                sha.update(file.read(_PIECE_BYTES if size > _NUM_PIECES * _PIECE_BYTES else size))
        found.append([one.name, size, sha.hexdigest()])
    return digest(found)


def size_of(path: Path) -> int:
    """The bytes of a file, or of all files in a folder."""
    return sum(one.stat().st_size for one in files_in(path)) if path.is_dir() else path.stat().st_size


def files_in(folder: Path) -> list[Path]:
    """The files in a folder and below, in order, without hidden ones."""
    return sorted(one for one in folder.rglob("*") if one.is_file() and not one.name.startswith("."))


def fingerprint_files(*paths: Path | str) -> str:
    """A digest of raw data files, for ``Workload(fingerprint=...)``.

    A file of up to 64 MiB counts by its content; a larger one by path, size, time of change and a sample, so that no
    start reads it whole. A folder counts by all files in it.

    Raises:
        FileNotFoundError: If one is not there.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "prices.csv"
        >>> _ = path.write_text("day,close")
        >>> before = fingerprint_files(path)
        >>> _ = path.write_text("day,open")
        >>> before == fingerprint_files(path)
        False
    """
    found: list[list[Any]] = []
    for given in map(Path, paths):
        for path in files_in(given) if given.is_dir() else [given]:
            stat = path.stat()
            name = str(path.relative_to(given)) if given.is_dir() else path.name
            if stat.st_size <= SAMPLED_BYTES:
                found.append([name, hash_file(path)])
            else:
                found.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns, sample_path(path)])
    return digest(found)


def describe_outputs(folder: Path, saved: Mapping[str, Path]) -> list[dict[str, Any]]:
    """The outputs of a folder with their sizes and hashes."""
    found = []
    for name, path in saved.items():
        size, relative = size_of(path), path.relative_to(folder)
        sample = sample_path(path) if size > SAMPLED_BYTES else ""
        facts = {"name": name, "kind": kind_of(path), "path": str(relative), "bytes": size}
        found.append(facts | {"sha256": hash_output(path), "sample": sample})
    return found


def hash_output(path: Path) -> str:
    """The hash of an output's content: of a panel its own, wherever it lies."""
    return str(json.loads(path.read_text())["fingerprint"]) if kind_of(path) == "panel" else hash_path(path)


def kind_of(path: Path) -> str:
    """Which of the kinds of output a path holds, by its name."""
    return next((kind for kind, ending in ENDINGS.items() if path.name.endswith(ending)), "path")


def open_folder(manifest: Path, key: str, outcome: Path | None = None) -> Path:
    """Make a unit's folder for a key: what another key left in it is removed, what this one left stays.

    Args:
        manifest: Where the unit's manifest is to lie.
        key: The key of what is to be made.
        outcome: For a command, the file that says how its last start ended: it goes with what that start left.
    """
    if not is_made_for(manifest, key):
        if outcome is not None:
            outcome.unlink(missing_ok=True)
        remove_result(manifest)
    folder = manifest.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / KEY_FILE).write_text(key)
    return folder


def is_made_for(manifest: Path, key: str) -> bool:
    """Whether a unit's folder was made for a key."""
    path = manifest.with_suffix("") / KEY_FILE
    return path.exists() and path.read_text() == key


def write_command_result(path: Path, facts: Mapping[str, Any], seconds: float) -> None:
    """Write a command's manifest: its outputs are the files in its folder, its result the ``result.json`` there.

    Raises:
        DamagedError: If ``result.json`` holds no JSON object.
        OSError: If a file cannot be read.
    """
    folder = path.with_suffix("")
    outputs = describe_outputs(folder, {str(one.relative_to(folder)): one for one in files_in(folder)})
    write_result(path, facts, result=read_json(folder / "result.json") or {}, outputs=outputs, seconds=seconds)


def link_result(source: Path, target: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """Take over a result of another run: its files as hard links, or copies across file systems; its manifest last."""
    remove_result(target)
    aside = target.with_suffix(".taken")
    shutil.rmtree(aside, ignore_errors=True)
    if source.with_suffix("").is_dir():
        shutil.copytree(source.with_suffix(""), aside, copy_function=_link)
        aside.rename(target.with_suffix(""))
    made = dict(found) | {"reused_from": found["reused_from"] or str(source)}
    _write(target, made)
    return made


def _link(source: str, target: str) -> None:
    # What is written again in place must not reach the other run's file: only what is renamed into place is linked.
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
