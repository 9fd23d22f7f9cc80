"""What a user writes to have folds trained: three functions and a model of their parameters.

The functions run in interpreters of their own: ``fingerprint`` and ``prepare`` before the folds, ``train_fold`` once
for each fold. So the process that admits folds loads neither the user's code nor torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import feather
from pydantic import BaseModel

from memfit import config
from memfit.data import Panel
from memfit.errors import DataError, SplitError, UsageError
from memfit.jobs import load_target
from memfit.pipeline._config import RunConfig
from memfit.rundir import RunDir, mark_phase, read_json, write_json

P = TypeVar("P", bound=BaseModel)
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PrepareContext:
    """Where ``prepare`` may write: the cache of panels, shared by all runs."""

    panels_dir: Path


@dataclass(frozen=True)
class Prepared:
    """What all folds share.

    Attributes:
        panel: The panel that every fold maps.
        splits: Per fold the positions in ``panel.dates`` to train on and to test on, int64.
    """

    panel: Panel
    splits: Sequence[tuple[Indices, Indices]]


@dataclass(frozen=True)
class FoldContext:
    """What one fold gets.

    Attributes:
        fold: The fold's number, from 1.
        panel: The shared panel, mapped read-only.
        train_dates, test_dates: Positions in ``panel.dates``, int64.
        checkpoint_dir: Where its checkpoints go.
        seed: Its own seed, from the run's seed and its number alone.
        job_dir: The folder of its logs and tables.
    """

    fold: int
    panel: Panel
    train_dates: Indices
    test_dates: Indices
    checkpoint_dir: Path
    seed: int
    job_dir: Path

    def save_table(self, name: str, table: pa.Table) -> Path:
        """Save a result table beside the fold's logs as ``<name>.feather``."""
        path = self.job_dir / f"{name}.feather"
        aside = path.with_suffix(".tmp")
        feather.write_feather(table, str(aside), compression="zstd")
        return aside.replace(path)


@dataclass(frozen=True)
class FoldWorkload(Generic[P]):
    """A training job in folds, named in the config by ``target: module:NAME``.

    Attributes:
        params: The model of the config's ``params``; an unknown key there is refused.
        fingerprint: A hex digest of the data that the parameters name.
        prepare: Builds or opens the panel and splits its dates.
        train_fold: Trains and tests one fold; its numbers are the fold's metrics.
        loader: For ``memfit bench loader``: a fold's training batches, made by so many worker processes.
        step: For its ``--with-model``: a function that takes one training step of the fold's model on a batch.
    """

    params: type[P]
    fingerprint: Callable[[P], str]
    prepare: Callable[[PrepareContext, P], Prepared]
    train_fold: Callable[[FoldContext, P], Mapping[str, float]]
    loader: Callable[[FoldContext, P, int], Iterable[Any]] | None = None
    step: Callable[[FoldContext, P], Callable[[Any], object]] | None = None


def load_workload(target: str) -> FoldWorkload[Any]:
    """The workload that a config's target names."""
    found = load_target(target)
    if not isinstance(found, FoldWorkload):
        raise UsageError(
            f"target '{target}' is a {type(found).__name__}.",
            rule="a run's target is a memfit.pipeline.FoldWorkload.",
            remedy="name the variable that holds it, for example memfit_workloads.ranker.job:RANKER",
        )
    return found


def describe(target: str, resolved: str) -> dict[str, Any]:
    """The workload's own parameters, checked, and the fingerprints of code and data; ``resolved`` is the config."""
    workload = load_workload(target)
    whole = config.Resolved.from_json(RunConfig, resolved)
    nested = config.resolve_nested(whole, "params", workload.params)
    origins = {name: origin for name, origin in whole.origins.items() if not name.startswith("params")}
    return {
        "params": nested.value.model_dump(mode="json"),
        "origins": origins | dict(nested.origins),
        "yaml": whole.to_yaml(nested),
        "code": fingerprint_code(workload),
        "data": workload.fingerprint(nested.value),
    }


def fingerprint_code(workload: FoldWorkload[Any]) -> str:
    """A hex digest of the version of memfit and of all Python files beside the workload's own."""
    digest = hashlib.sha256(importlib.metadata.version("memfit").encode())
    source = inspect.getsourcefile(sys.modules[workload.train_fold.__module__])
    files = sorted(Path(source).parent.glob("*.py")) if source else []
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def run_prepare(target: str, params: Mapping[str, Any], run_dir: str, panels_dir: str) -> dict[str, Any]:
    """Build or open the panel, verify it, split its dates, and leave both for the folds as a stage."""
    mark_phase("load")
    workload, run = load_workload(target), RunDir(Path(run_dir))
    try:
        done = workload.prepare(PrepareContext(Path(panels_dir)), _read_params(workload, params))
    except OSError as error:
        if error.filename is None or not Path(error.filename).is_relative_to(panels_dir):
            raise
        raise DataError(
            f"the panel cannot be kept in {error.filename}: {error.strerror}.",
            rule=f"panels are built below panels_dir ({panels_dir}), which must be a folder that can be written.",
            remedy="make it writable, or name another: --set panels_dir=<folder>",
        ) from error
    if not done.splits:
        raise SplitError(
            f"prepare of {target} gave no fold.",
            rule="a run has at least one fold.",
            remedy="set the number of folds in params to 2 or more",
        )
    # Reads every byte, of a panel that was there already too: so its page cache is charged to this job's group, which
    # outlives it, and not to that of the first fold which touches it.
    done.panel.verify()
    splits = run.path / "checkpoints" / "stage_prepare.npz"
    aside = splits.with_suffix(".tmp")
    with open(aside, "wb") as file:
        np.savez(file, allow_pickle=False, **_by_name(done.splits))
    aside.replace(splits)
    stage = {
        "panel": str(done.panel.path),
        "panel_fingerprint": done.panel.fingerprint,
        "panel_reused": done.panel.reused,
        "panel_changed": list(done.panel.changed),
        "panel_bytes": done.panel.nbytes,
        "num_dates": len(done.panel.dates),
        "num_assets": len(done.panel.assets),
        "num_features": len(done.panel.feature_names),
        "first_date": str(done.panel.dates[0]),
        "last_date": str(done.panel.dates[-1]),
        "splits_sha256": hashlib.sha256(splits.read_bytes()).hexdigest(),
        "folds": [{"num_train_dates": len(train), "num_test_dates": len(test)} for train, test in done.splits],
    }
    write_json(run.path / "checkpoints" / "stage_prepare.json", stage)
    return stage


def _read_params(workload: FoldWorkload[P], params: Mapping[str, Any]) -> P:
    return workload.params.model_validate_json(json.dumps(params))


def _by_name(splits: Sequence[tuple[Indices, Indices]]) -> dict[str, Any]:
    rows = {f"train_{fold}": np.asarray(train, np.int64) for fold, (train, _) in enumerate(splits, 1)}
    return rows | {f"test_{fold}": np.asarray(test, np.int64) for fold, (_, test) in enumerate(splits, 1)}


def run_fold(target: str, params: Mapping[str, Any], run_dir: str, fold: int, seed: int) -> dict[str, float]:
    """Train and test one fold from what the prepare stage left."""
    mark_phase("load")
    workload, run = load_workload(target), RunDir(Path(run_dir))
    stage = read_json(run.path / "checkpoints" / "stage_prepare.json")
    if stage is None:
        raise UsageError(
            f"{run.path} holds no prepared stage.",
            rule="a fold trains on the panel and the splits that the prepare stage left.",
            remedy="start the run again: memfit run <its config>",
        )
    with np.load(run.path / "checkpoints" / "stage_prepare.npz", allow_pickle=False) as splits:
        train, test = splits[f"train_{fold}"], splits[f"test_{fold}"]
    job_id = f"fold_{fold}"
    context = FoldContext(
        fold=fold,
        panel=Panel.open(Path(stage["panel"])),
        train_dates=train,
        test_dates=test,
        checkpoint_dir=run.checkpoint_dir(job_id),
        seed=_fold_seed(seed, fold),
        job_dir=run.job_dir(job_id),
    )
    context.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    metrics = workload.train_fold(context, _read_params(workload, params))
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            f"train_fold of {target} returned {metrics!r:.200}: {error}.",
            rule="a fold returns its metrics: a mapping of names to numbers.",
            remedy="return for example {'rank_ic': 0.03}",
        ) from error


def first_fold(prepared: Prepared, seed: int, folder: Path) -> FoldContext:
    """The first fold of what was prepared, outside of a run: what it writes goes into the folder."""
    train, test = prepared.splits[0]
    return FoldContext(
        fold=1,
        panel=prepared.panel,
        train_dates=train,
        test_dates=test,
        checkpoint_dir=folder,
        seed=_fold_seed(seed, 1),
        job_dir=folder,
    )


def _fold_seed(seed: int, fold: int) -> int:
    """A fold's seed, which depends on no other fold and on no order."""
    return int(np.random.SeedSequence([seed, fold]).generate_state(1)[0])
