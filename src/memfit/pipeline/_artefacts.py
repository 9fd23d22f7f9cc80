"""How a stage's outputs are saved and read: open formats, each put in place whole, each checked where it is opened."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import DamagedError, UsageError
from memfit.pipeline._manifest import ENDINGS, SAMPLED_BYTES, hash_output, kind_of, sample_path
from memfit.rundir import write_atomic

if TYPE_CHECKING:
    import numpy as np

#: The name of an array that is saved alone.
_ONLY = "value"


def save_output(folder: Path, name: str, value: Any) -> Path:
    """Save a value below a folder under a name; where it lies."""
    if not name or not all(one.isalnum() or one in "._-" for one in name) or name.startswith("."):
        raise UsageError(
            f"'{name}' cannot name an output.",
            rule="the name becomes a file: letters, digits, '.', '_' and '-', beginning with a letter or digit.",
            remedy="name it for example scores",
        )
    if isinstance(value, Path):
        return _take(folder, value)
    if _is_a(value, "memfit.data", "Panel"):
        # Reads every byte, of a panel that was there already too: so its page cache is charged to this job's group,
        # which outlives it, and not to that of the first job that maps it.
        if not value.verified:
            value.verify()
        pointer = {"path": str(value.path.resolve()), "fingerprint": value.fingerprint}
        return _save_json(folder / f"{name}{ENDINGS['panel']}", pointer)
    if _is_a(value, "pyarrow", "Table"):
        from pyarrow import feather

        path = folder / f"{name}{ENDINGS['table']}"
        aside = path.with_name(f".{path.name}.tmp")
        feather.write_feather(value, str(aside), compression="uncompressed")  # so that it can be mapped
        return aside.replace(path)
    if _is_a(value, "numpy", "ndarray"):
        value = {_ONLY: value}
    if isinstance(value, Mapping) and value and all(_is_a(one, "numpy", "ndarray") for one in value.values()):
        return _save_arrays(folder / f"{name}{ENDINGS['arrays']}", value)
    if isinstance(value, Mapping | Sequence):
        return _save_json(folder / f"{name}{ENDINGS['json']}", value)
    raise UsageError(
        f"output {name} is a {type(value).__name__}.",
        rule="a stage saves panels, Arrow tables, arrays, mappings or lists of plain JSON, and paths: nothing pickled.",
        remedy=f'write the file yourself and save its path: context.save("{name}", context.dir / "{name}.pt")',
    )


def _is_a(value: Any, module: str, name: str) -> bool:
    """Whether a value is of a class that is loaded only where such values are made."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def _save_json(path: Path, value: Any) -> Path:
    write_atomic(path, json.dumps(value) + "\n")
    return path


def _save_arrays(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Path:
    import numpy as np

    aside = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for name, array in arrays.items():
        np.save(aside / f"{name}.npy", array, allow_pickle=False)
    shutil.rmtree(path, ignore_errors=True)
    return aside.rename(path)


def _take(folder: Path, path: Path) -> Path:
    """A file or folder of the user's as an output: in place where it lies in the folder, else as a copy."""
    if not path.exists():
        raise UsageError(
            f"{path} is not there.",
            rule="a path that is saved names a file or folder that the stage has written.",
            remedy="write it first",
        )
    if path.resolve().is_relative_to(folder.resolve()):
        return folder / path.resolve().relative_to(folder.resolve())
    target = folder / path.name
    aside = folder / f".{path.name}.tmp"
    if path.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(path, aside)
        shutil.rmtree(target, ignore_errors=True)
    else:
        shutil.copy2(path, aside)
    os.replace(aside, target)
    return target


def find_output(folder: Path, name: str) -> Path | None:
    """Where an output of that name lies already, or None."""
    paths = (folder / f"{name}{ending}" for ending in [*ENDINGS.values(), ""])
    return next((path for path in paths if path.exists()), None)


def load_output(manifest: Path, facts: Mapping[str, Any], name: str, kind: str) -> Any:
    """Read an output that a manifest names, after a check of its hash.

    Raises:
        UsageError: If there is none of that name and kind.
        DamagedError: If it is not what was saved.
    """
    found = next((one for one in facts["outputs"] if one["name"] == name), None)
    if found is None or kind not in (found["kind"], "path"):
        known = ", ".join(f"{one['name']} ({one['kind']})" for one in facts["outputs"]) or "none"
        raise UsageError(
            f"stage {facts['stage']} saved no {kind} named {name}.",
            rule=f"its outputs are: {known}.",
            remedy=f'save it there: context.save("{name}", ...)',
        )
    path = manifest.with_suffix("") / found["path"]
    is_large = found["bytes"] > SAMPLED_BYTES
    if not path.exists() or (
        sample_path(path) != found["sample"] if is_large else hash_output(path) != found["sha256"]
    ):
        raise DamagedError(
            f"{path} is not what stage {facts['stage']} saved.",
            rule="an output is checked against the hash in its manifest where it is opened.",
            remedy=f"make it anew: the same command with --from {facts['stage']}",
        )
    return path if kind == "path" else load_path(path)


def load_path(path: Path) -> Any:
    """Read an output by its kind: mapped where it can be."""
    kind = kind_of(path)
    if kind == "panel":
        from memfit.data import Panel

        return Panel.open(Path(json.loads(path.read_text())["path"]))
    if kind == "table":
        from pyarrow import feather

        return feather.read_table(str(path), memory_map=True)
    if kind == "arrays":
        import numpy as np

        arrays = {one.stem: np.load(one, mmap_mode="r", allow_pickle=False) for one in sorted(path.glob("*.npy"))}
        return arrays[_ONLY] if list(arrays) == [_ONLY] else arrays
    return json.loads(path.read_text()) if kind == "json" else path
