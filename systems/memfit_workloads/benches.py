"""What the benchmarks of the systems share: a run of memfit, and all that it left, to be compared."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memfit.pipeline import Output
from memfit.training import load_checkpoint


def command(config: Path, settings: Mapping[str, Any], *more: str) -> list[str]:
    """Return the words of ``memfit run --json``; settings that end in ``_dir`` are the run's, the others of params."""
    named = {name if name.endswith("_dir") else f"params.{name}": value for name, value in settings.items()}
    chosen = [word for name, value in named.items() for word in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "memfit", "run", "--json", str(config), *chosen, *more]


def run(config: Path, settings: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """Run it to its end, and return its summary."""
    done = subprocess.run(command(config, settings, *more), capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{config} {settings} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def contents(run_dir: Path) -> dict[str, Any]:
    """Return the results of all jobs of a run, the bytes of its tables and arrays, and each tensor of checkpoints."""
    folder = run_dir / "checkpoints"
    found: dict[str, Any] = {one.stem: Output(one).result for one in folder.glob("*.json")}
    for file in folder.rglob("*"):
        name = str(file.relative_to(folder))
        if file.suffix in (".feather", ".npy"):
            found[name] = file.read_bytes()
        elif file.suffix == ".pt":
            for path, value in pytree.tree_flatten_with_path(load_checkpoint(file))[0]:
                if isinstance(value, torch.Tensor):  # by its bytes: a NaN equals itself, and 0.0 not -0.0
                    kept = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                    found[f"{name}{pytree.keystr(path)}"] = (value.dtype, value.shape, kept)
    return found


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the names of what is not the same in both, or in one alone."""
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
