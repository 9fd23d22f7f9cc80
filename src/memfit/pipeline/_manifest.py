"""Save and load the outputs of a unit in open formats, and its manifest: what its result depends on, with hashes.

The manifest is written last, by rename. Without it, a result does not count.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit.config import fingerprint
from memfit.errors import DamagedError, UsageError
from memfit.files import damaged, read_json, replacing, write_atomic
from memfit.masking import mask

_SAMPLED_BYTES = 64 << 20  # of larger raw data a sample is read
_PIECE_BYTES = 1 << 20
_NUM_PIECES = 16
ENDINGS = {"panel": ".panel.json", "table": ".feather", "arrays": ".arrays", "json": ".json"}
_ONLY = "value"  # the name of an array that is saved alone
_OUTPUT = {"name": str, "kind": str, "path": str, "bytes": int, "sha256": str}
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
    """Return a manifest; raise DamagedError if it is not there, or not whole."""
    found = read_json(path, _SHAPE)
    if found is None:
        raise DamagedError(
            f"{path} is not there.",
            rule="a stage's result is read by its manifest.",
            remedy="give the same command again: it makes what is missing",
        )
    if found["digest"] != _digest_of(found["result"], found["outputs"]):
        raise damaged(path, "has another digest than its result and outputs")
    return found


def find_manifest(path: Path) -> dict[str, Any] | None:
    """Return a manifest whose outputs are all there with their sizes, or None."""
    try:
        found = read_manifest(path)
    except DamagedError:
        return None
    for output in found["outputs"]:
        file = path.with_suffix("") / output["path"]
        if not file.exists() or _size_of(file) != output["bytes"]:
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
    made = {"schema_version": 1, "status": "completed", "why": "", "exit_code": 0, "unforeseen": {}}
    made |= {**facts, "result": result, "outputs": outputs, "seconds": round(seconds, 3), "reused_from": None}
    _write(path, made | {"digest": _digest_of(result, outputs)} | more)


def _digest_of(result: Mapping[str, Any], outputs: Sequence[Mapping[str, Any]]) -> str:
    return fingerprint([result, sorted([one["name"], one["kind"], one["sha256"]] for one in outputs)])


def _write(path: Path, manifest: Mapping[str, Any]) -> None:
    is_secret = mask(manifest) != manifest  # a secret is for its owner alone
    write_atomic(path, json.dumps(manifest, indent=2) + "\n", mode=0o600 if is_secret else 0o666)


def remove_result(manifest: Path) -> None:
    (manifest.with_suffix("") / ".key").unlink(missing_ok=True)  # first: nothing goes on from what a kill leaves
    manifest.unlink(missing_ok=True)
    shutil.rmtree(manifest.with_suffix(""), ignore_errors=True)


def is_foreseen(manifest: Mapping[str, Any]) -> bool:
    """Return whether the files of code that a result loaded without naming them are unchanged."""
    files = manifest["unforeseen"].values()
    return all(len(one) == 2 and Path(one[0]).is_file() and hash_file(Path(one[0])) == one[1] for one in files)


def key_of(manifest: Path) -> str:
    """Return the key that a unit's folder was made for; empty without a folder."""
    path = manifest.with_suffix("") / ".key"
    return path.read_text(errors="replace") if path.is_file() else ""


def open_folder(manifest: Path, key: str, outcome: Path) -> Path:
    """Make a unit's folder for a key; remove what another key or a kill left, and the outcome of its job."""
    folder = manifest.with_suffix("")
    if key_of(manifest) != key:
        outcome.unlink(missing_ok=True)
        remove_result(manifest)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / ".key", key)  # never again: a full disk would leave it empty, and all checkpoints go
    _remove_asides(folder)
    return folder


def _remove_asides(folder: Path, name: str = ".+") -> None:
    for aside in folder.iterdir():
        if re.fullmatch(rf"\.{name}\.\d+-\d+\.tmp", aside.name):
            shutil.rmtree(aside) if aside.is_dir() else aside.unlink()


def link_result(source: Path, target: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """Take over a result of another run: its files as hard links, or copies across file systems; its manifest last."""
    remove_result(target)
    _remove_asides(target.parent, re.escape(target.stem))
    if source.with_suffix("").is_dir():
        with replacing(target.with_suffix(""), durable=False) as aside:
            shutil.copytree(source.with_suffix(""), aside, copy_function=_link)
    made = dict(found) | {"reused_from": found["reused_from"] or str(source)}
    _write(target, made)
    return made


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


# Outputs


def save_output(folder: Path, name: str, value: Any) -> Path:
    """Save a value in a folder under a name, and return its path. It is renamed into place whole."""
    if not name or not all(one.isalnum() or one in "._-" for one in name) or name.startswith("."):
        raise UsageError(
            f"'{name}' cannot name an output.",
            rule="the name becomes a file: letters, digits, '.', '_' and '-', beginning with a letter or digit.",
            remedy="name it for example scores",
        )
    if isinstance(value, Path):
        return _save_path(folder, name, value)
    if _is_a(value, "memfit.data", "Panel"):
        # This reads every byte: so the page cache is charged to this job's group, which outlives it, and not to the
        # first job that maps the panel.
        if not value.verified:
            value.verify()
        at, place = value.path.resolve(), folder.resolve()
        moves = all(one.is_relative_to(Path.cwd()) for one in (at, place))  # with the folder that holds both
        found = {"path": os.path.relpath(at, place) if moves else str(at), "fingerprint": value.fingerprint}
        return _save_json(folder, name, "panel", found)
    if _is_a(value, "pyarrow", "Table"):
        from pyarrow import feather

        with replacing(path := folder / f"{name}{ENDINGS['table']}", durable=False) as aside:
            feather.write_feather(value, str(aside), compression="uncompressed")  # so that it can be mapped
        return path
    if _is_a(value, "numpy", "ndarray"):
        value = {_ONLY: value}
    if isinstance(value, Mapping) and value and all(_is_a(one, "numpy", "ndarray") for one in value.values()):
        import numpy as np

        with replacing(path := folder / f"{name}{ENDINGS['arrays']}", durable=False) as aside:
            aside.mkdir()
            for key, array in value.items():
                np.save(aside / f"{key}.npy", array, allow_pickle=False)
        return path
    if isinstance(value, Mapping | Sequence):
        return _save_json(folder, name, "json", value)
    raise UsageError(
        f"output {name} is a {type(value).__name__}.",
        rule="a stage saves panels, Arrow tables, arrays, mappings or lists of plain JSON, and paths: nothing pickled.",
        remedy=f'write the file yourself and save its path: context.save("{name}", context.dir / "{name}.pt")',
    )


def _is_a(value: Any, module: str, name: str) -> bool:
    """Return whether a value is of a class, without importing its module."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def _save_json(folder: Path, name: str, kind: str, value: Any) -> Path:
    path = folder / f"{name}{ENDINGS[kind]}"
    write_atomic(path, json.dumps(value) + "\n")
    return path


def _save_path(folder: Path, name: str, path: Path) -> Path:
    """Take a file or folder as an output: in place if it lies in the folder, else as a copy; note where it is."""
    place = Path(path.name)
    if path.resolve().is_relative_to(folder.resolve()):
        place = path.resolve().relative_to(folder.resolve())
    else:
        with replacing(folder / place, durable=False) as aside:
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, aside)
    if str(place) != name:
        write_atomic(folder / f".{name}.path", str(place))
    return folder / place


def find_output(folder: Path, name: str) -> Path | None:
    note = folder / f".{name}.path"
    names = [*(f"{name}{ending}" for ending in ENDINGS.values()), note.read_text() if note.is_file() else name]
    return next((folder / one for one in names if (folder / one).exists()), None)


def load_output(manifest: Path, facts: Mapping[str, Any], name: str, kind: str) -> Any:
    """Load an output that a manifest names, if it is what was saved."""
    found = next((one for one in facts["outputs"] if one["name"] == name), None)
    if found is None or kind not in (found["kind"], "path"):
        known = ", ".join(f"{one['name']} ({one['kind']})" for one in facts["outputs"]) or "none"
        raise UsageError(
            f"stage {facts['stage']} saved no {kind} named {name}.",
            rule=f"its outputs are: {known}.",
            remedy=f'save it there: context.save("{name}", ...)',
        )
    path = manifest.with_suffix("") / found["path"]
    # What was not touched since it was hashed is not read again.
    if not path.exists() or (identity_of(path) != found.get("identity") and hash_output(path) != found["sha256"]):
        raise DamagedError(
            f"{path} is not what stage {facts['stage']} saved.",
            rule="an output that was touched since is compared with the hash in its manifest when it is opened.",
            remedy="give the same command with --check-files: it finds what is damaged, and makes that again",
        )
    return path if kind == "path" else load_path(path)


def load_path(path: Path) -> Any:
    """Load an output by its kind, memory-mapped where possible."""
    kind = kind_of(path)
    if kind == "panel":
        from memfit.data import Panel

        return Panel.open(_read_panel(path)[0])
    if kind == "table":
        from pyarrow import feather

        return feather.read_table(str(path), memory_map=True)
    if kind == "arrays":
        import numpy as np

        arrays = {one.stem: np.load(one, mmap_mode="r", allow_pickle=False) for one in sorted(path.glob("*.npy"))}
        return arrays[_ONLY] if list(arrays) == [_ONLY] else arrays
    return json.loads(path.read_text()) if kind == "json" else path


# Hashes


def hash_file(path: Path, count: Callable[[int], None] | None = None) -> str:
    sha = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            sha.update(piece)
            (count or int)(len(piece))
    return sha.hexdigest()


def kind_of(path: Path) -> str:
    return next((kind for kind, ending in ENDINGS.items() if path.name.endswith(ending)), "path")


def describe_outputs(folder: Path, saved: Mapping[str, Path]) -> list[dict[str, Any]]:
    found = []
    for name, path in saved.items():
        size, relative = _size_of(path), str(path.relative_to(folder))
        facts = {"name": name, "kind": kind_of(path), "path": relative, "bytes": size, "identity": identity_of(path)}
        found.append(facts | {"sha256": hash_output(path)})
    return found


def hash_output(path: Path, count: Callable[[int], None] | None = None) -> str:
    """Return the hash of an output's content; of a folder, names count too, and of a panel it is its own.

    ``count`` takes the number of bytes that were read last. Without it a panel's files are not read.
    """
    if kind_of(path) == "panel":
        panel, own = _read_panel(path)
        if count:
            from memfit.data import check_panel

            check_panel(panel, lambda *_: count(0))
        return own
    if path.is_dir():
        return fingerprint([[str(one.relative_to(path)), hash_file(one, count)] for one in files_in(path)])
    return hash_file(path, count)


def _read_panel(path: Path) -> tuple[Path, str]:
    found = read_json(path, {"path": str, "fingerprint": str}) or {"path": "", "fingerprint": ""}
    return (path.parent / found["path"]).resolve(), found["fingerprint"]


def identity_of(path: Path) -> str:
    """Return a digest of the inode, size and time of change of an output's files; a hard link has the same."""
    is_panel = kind_of(path) == "panel"
    files = files_in(path) if path.is_dir() else [path, *(files_in(_read_panel(path)[0]) if is_panel else ())]
    stats = [(one.name, one.stat()) for one in files]
    return fingerprint([[name, stat.st_ino, stat.st_size, stat.st_mtime_ns] for name, stat in stats])


def _sample(path: Path, size: int) -> str:
    """Return a digest of evenly spaced pieces of a large file: 16 MiB."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in range(_NUM_PIECES):
            file.seek(piece * (size - _PIECE_BYTES) // (_NUM_PIECES - 1))
            sha.update(file.read(_PIECE_BYTES))
    return sha.hexdigest()


def _size_of(path: Path) -> int:
    return sum(one.stat().st_size for one in files_in(path)) if path.is_dir() else path.stat().st_size


def mapped_bytes(path: Path) -> int:
    """Return the bytes of a result that those who read it map: its panels, tables and arrays."""
    outputs, folder = (find_manifest(path) or {}).get("outputs", ()), path.with_suffix("")
    own: int = sum(one["bytes"] for one in outputs if one["kind"] in ("table", "arrays"))
    panels = (_read_panel(folder / one["path"])[0] for one in outputs if one["kind"] == "panel")
    return own + sum(map(_size_of, panels))


def files_in(folder: Path) -> list[Path]:
    return sorted(one for one in folder.rglob("*") if one.is_file() and not one.name.startswith("."))


def fingerprint_files(*paths: Path | str) -> str:
    """Return a digest of raw data files, for ``Workload(fingerprint=...)``.

    A file of up to 64 MiB counts by its content. A larger one counts by path, size, time of change and a sample, so
    that no start reads it whole. A folder counts by all files in it.

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
            if stat.st_size <= _SAMPLED_BYTES:
                found.append([name, hash_file(path)])
            else:
                found.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns, _sample(path, stat.st_size)])
    return fingerprint(found)
