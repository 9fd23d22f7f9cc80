"""Save and load a stage's outputs, in open formats."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit.errors import DamagedError, UsageError
from memfit.pipeline._manifest import ENDINGS, is_as_saved, kind_of
from memfit.rundir import write_atomic

#: The name of an array that is saved alone.
_ONLY = "value"


def save_output(folder: Path, name: str, value: Any) -> Path:
    """Save a value in a folder under a name, and return its path. It is renamed into place whole."""
    if not name or not all(one.isalnum() or one in "._-" for one in name) or name.startswith("."):
        raise UsageError(
            f"'{name}' cannot name an output.",
            rule="the name becomes a file: letters, digits, '.', '_' and '-', beginning with a letter or digit.",
            remedy="name it for example scores",
        )
    if isinstance(value, Path):
        return _save_path(folder, value)
    if _is_a(value, "memfit.data", "Panel"):
        # This reads every byte: so the page cache is charged to this job's group, which outlives it, and not to the
        # first job that maps the panel.
        if not value.verified:
            value.verify()
        return _save_json(folder, name, "panel", {"path": str(value.path.resolve()), "fingerprint": value.fingerprint})
    if _is_a(value, "pyarrow", "Table"):
        from pyarrow import feather

        path = folder / f"{name}{ENDINGS['table']}"
        aside = path.with_name(f".{path.name}.tmp")
        feather.write_feather(value, str(aside), compression="uncompressed")  # so that it can be mapped
        return aside.replace(path)
    if _is_a(value, "numpy", "ndarray"):
        value = {_ONLY: value}
    if isinstance(value, Mapping) and value and all(_is_a(one, "numpy", "ndarray") for one in value.values()):
        import numpy as np

        path = folder / f"{name}{ENDINGS['arrays']}"
        aside = path.with_name(f".{path.name}.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for key, array in value.items():
            np.save(aside / f"{key}.npy", array, allow_pickle=False)
        shutil.rmtree(path, ignore_errors=True)
        return aside.rename(path)
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


def _save_path(folder: Path, path: Path) -> Path:
    """Take a file or folder as an output: in place if it lies in the folder, else as a copy."""
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
    """Return the path of an output that a folder holds already, or None."""
    paths = (folder / f"{name}{ending}" for ending in [*ENDINGS.values(), ""])
    return next((path for path in paths if path.exists()), None)


def load_output(manifest: Path, facts: Mapping[str, Any], name: str, kind: str) -> Any:
    """Load an output that a manifest names, after a check of its hash."""
    found = next((one for one in facts["outputs"] if one["name"] == name), None)
    if found is None or kind not in (found["kind"], "path"):
        known = ", ".join(f"{one['name']} ({one['kind']})" for one in facts["outputs"]) or "none"
        raise UsageError(
            f"stage {facts['stage']} saved no {kind} named {name}.",
            rule=f"its outputs are: {known}.",
            remedy=f'save it there: context.save("{name}", ...)',
        )
    path = manifest.with_suffix("") / found["path"]
    if not is_as_saved(path, found):
        raise DamagedError(
            f"{path} is not what stage {facts['stage']} saved.",
            rule="an output is checked against the hash in its manifest when it is opened.",
            remedy="give the same command with --check-files: it finds what is damaged, and makes that again",
        )
    return path if kind == "path" else load_path(path)


def load_path(path: Path) -> Any:
    """Load an output by its kind, memory-mapped where possible."""
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
