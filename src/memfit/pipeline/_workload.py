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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import feather
from pydantic import BaseModel, ValidationError

from memfit import config
from memfit.data import Panel
from memfit.errors import ConfigError, DataError, SplitError, UsageError
from memfit.jobs import load_target
from memfit.pipeline._config import RunConfig, replaced
from memfit.pipeline._provenance import Provenance
from memfit.pipeline._workflow_settings import WorkflowSettings
from memfit.rundir import RunDir, mark_phase, write_json

P = TypeVar("P", bound=BaseModel)
_SECTIONS = ("params", "workflow")
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
        label_dates: How many dates the longest label looks ahead: no model scores a date whose labels overlap with
            those that it was trained on.
        embargo_size: Dates that are kept apart beyond that, after the dates that a model scores.
        forward_only: Whether a model scores only dates after those that it was trained on, as in a walk forward.
    """

    panel: Panel
    splits: Sequence[tuple[Indices, Indices]]
    label_dates: int = 0
    embargo_size: int = 0
    forward_only: bool = False


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
        provenance: What its checkpoints must say of themselves, so that a backtest knows which dates they may score:
            hand it on as ``Trainer(..., provenance=context.provenance)``.
        previous_dir: The checkpoints of the fold before, in a workload whose folds go one after another; else None.
    """

    fold: int
    panel: Panel
    train_dates: Indices
    test_dates: Indices
    checkpoint_dir: Path
    seed: int
    job_dir: Path
    provenance: Mapping[str, Any] = field(default_factory=dict)
    previous_dir: Path | None = None

    def save_table(self, name: str, table: pa.Table) -> Path:
        """Save a result table beside the fold's logs as ``<name>.feather``."""
        path = self.job_dir / f"{name}.feather"
        aside = path.with_suffix(".tmp")
        feather.write_feather(table, str(aside), compression="zstd")
        return aside.replace(path)


@dataclass(frozen=True)
class ScoreContext:
    """What is to be scored.

    Attributes:
        panel: The shared panel, mapped read-only.
        dates: Positions in ``panel.dates``, int64, ascending.
        checkpoint: A file with the weights under ``model``, as `Trainer`, `Ema` and ``memfit average`` write them.
    """

    panel: Panel
    dates: Indices
    checkpoint: Path


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
        score: For ``memfit backtest`` and ``memfit workflow``: a checkpoint's scores on given dates, a table of
            ``date``, ``code`` and for each horizon h of dates ``score_h{h}`` and ``target_h{h}``, the return over it;
            ``target_h1`` is always there, for positions are marked by it from day to day.
        market: What is checked before a profit counts: a table of ``date``, ``code``, ``close`` and, where there is
            one, ``volume``.
        horizons: The horizons that ``score`` gives, so that a workflow that asks for another is refused beforehand.
        in_order: Whether each fold needs the one before to be done, as a warm start does; the folds then run one
            after another.
    """

    params: type[P]
    fingerprint: Callable[[P], str]
    prepare: Callable[[PrepareContext, P], Prepared]
    train_fold: Callable[[FoldContext, P], Mapping[str, float]]
    loader: Callable[[FoldContext, P, int], Iterable[Any]] | None = None
    step: Callable[[FoldContext, P], Callable[[Any], object]] | None = None
    score: Callable[[ScoreContext, P], pa.Table] | None = None
    market: Callable[[Panel, P], pa.Table] | None = None
    horizons: Callable[[P], Iterable[int]] | None = None
    in_order: Callable[[P], bool] | None = None


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
    sections: list[config.Resolved[Any]] = [nested]
    workflow, swept = None, dict[str, Any]()
    if workload.score is not None:
        judged = config.resolve_nested(whole, "workflow", WorkflowSettings)
        sections.append(judged)
        workflow = judged.value.model_dump(mode="json")
        swept = judged.value.swept
        _check_workflow(workload, nested.value, judged.value)
    elif whole.value.workflow:
        raise ConfigError(
            f"the config has a section 'workflow', and {target} gives no scores.",
            rule="a workflow judges the scores of a FoldWorkload with score=...",
            remedy="leave the section out, or write score(context, params)",
        )
    origins = {name: origin for name, origin in whole.origins.items() if name.partition(".")[0] not in _SECTIONS}
    return {
        "params": nested.value.model_dump(mode="json"),
        "workflow": workflow,
        "sweep": swept,
        "in_order": bool(workload.in_order and workload.in_order(nested.value)),
        "origins": origins | {name: origin for one in sections for name, origin in one.origins.items()},
        "yaml": whole.to_yaml(*sections),
        "code": fingerprint_code(workload),
        "data": workload.fingerprint(nested.value),
    }


def _check_workflow(workload: FoldWorkload[P], params: P, settings: WorkflowSettings) -> None:
    """Refuse before anything is trained what could only fail afterwards."""
    known = sorted(workload.horizons(params)) if workload.horizons else None
    for name, horizon in (
        ("backtest.horizon", settings.backtest.horizon),
        ("decision.metric", settings.metric_horizon),
    ):
        if known is not None and horizon not in known:
            raise ConfigError(
                f"workflow.{name} asks for the horizon {horizon}, and the models score {', '.join(map(str, known))}.",
                rule="positions are held, and metrics are taken, at a horizon that the models are trained for.",
                remedy=f"--set workflow.backtest.horizon={known[0]}, or train that horizon too",
            )
    for name, values in settings.swept.items():
        for value in values:
            try:
                changed = replaced(params.model_dump(mode="json"), {name: value})
                workload.params.model_validate_json(json.dumps(changed))
            except ValidationError as error:
                first = error.errors()[0]
                raise ConfigError(
                    f"workflow.sweep sets params.{name} to {value!r}: {first['msg']}.",
                    rule="a sweep names settings below params, each with values that they take.",
                    remedy="correct the name or the value: sweep: {train: {tau_days: [60, 250]}}",
                ) from error


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
        Path(panels_dir).mkdir(parents=True, exist_ok=True)
        done: Any = workload.prepare(PrepareContext(Path(panels_dir)), read_params(workload, params))
    except OSError as error:
        is_there = error.filename is not None and Path(error.filename).is_relative_to(panels_dir)
        if not is_there or isinstance(error, FileNotFoundError):  # what prepare itself looks for
            raise
        raise DataError(
            f"the panel cannot be kept in {error.filename}: {error.strerror}.",
            rule=f"panels are built below panels_dir ({panels_dir}), which must be a folder that can be written.",
            remedy=f"make {panels_dir} a folder that this user can write, or name another: --set panels_dir=<folder>",
        ) from error
    if not isinstance(done, Prepared) or not isinstance(done.panel, Panel):
        found = f"a Prepared with the panel {done.panel!r:.60}" if isinstance(done, Prepared) else f"{done!r:.60}"
        raise UsageError(
            f"prepare of {target} returned {found}.",
            rule="it returns memfit.pipeline.Prepared(panel, splits): all folds map one memfit.Panel.",
            remedy="build it of your table: Panel.build(table, context.panels_dir, features=[...], targets=[...])",
        )
    if not done.splits:
        raise SplitError(
            f"prepare of {target} gave no fold.",
            rule="a run has at least one fold.",
            remedy="set the number of folds in params to 2 or more",
        )
    # Reads every byte, of a panel that was there already too: so its page cache is charged to this job's group, which
    # outlives it, and not to that of the first fold which touches it.
    if not done.panel.verified:
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
        "label_dates": done.label_dates,
        "embargo_size": done.embargo_size,
        "forward_only": done.forward_only,
        "splits_sha256": hashlib.sha256(splits.read_bytes()).hexdigest(),
        "folds": [
            {
                "num_train_dates": len(train),
                "num_test_dates": len(test),
                "first_test_date": str(done.panel.dates[min(test)]),
                "last_test_date": str(done.panel.dates[max(test)]),
            }
            for train, test in done.splits
        ],
    }
    write_json(run.path / "checkpoints" / "stage_prepare.json", stage)
    return stage


def read_params(workload: FoldWorkload[P], params: Mapping[str, Any]) -> P:
    """A workload's parameters from the JSON of a resolved config."""
    return workload.params.model_validate_json(json.dumps(params))


def _by_name(splits: Sequence[tuple[Indices, Indices]]) -> dict[str, Any]:
    rows = {f"train_{fold}": np.asarray(train, np.int64) for fold, (train, _) in enumerate(splits, 1)}
    return rows | {f"test_{fold}": np.asarray(test, np.int64) for fold, (_, test) in enumerate(splits, 1)}


def run_fold(
    target: str, params: Mapping[str, Any], run_dir: str, fold: int, seed: int, job_id: str | None = None
) -> dict[str, float]:
    """Train and test one fold from what the prepare stage left; as another job of the same fold where one is named."""
    mark_phase("load")
    workload, run = load_workload(target), RunDir(Path(run_dir))
    stage, panel = read_stage(run)
    train, test = read_split(run, fold)
    job_id = job_id or f"fold_{fold}"
    previous = run.checkpoint_dir(f"fold_{fold - 1}")
    read = read_params(workload, params)
    context = FoldContext(
        fold=fold,
        panel=panel,
        train_dates=train,
        test_dates=test,
        checkpoint_dir=run.checkpoint_dir(job_id),
        seed=_fold_seed(seed, fold),
        job_dir=run.job_dir(job_id),
        provenance=Provenance.of_fold(
            run.header.get("fingerprint", ""), fold, panel, train, stage, read.model_dump(mode="json")
        ).to_dict(),
        previous_dir=previous if fold > 1 and workload.in_order and workload.in_order(read) else None,
    )
    context.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    metrics = workload.train_fold(context, read)
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            f"train_fold of {target} returned {metrics!r:.200}: {error}.",
            rule="a fold returns its metrics: a mapping of names to numbers.",
            remedy="return for example {'rank_ic': 0.03}",
        ) from error


def read_stage(run: RunDir) -> tuple[dict[str, Any], Panel]:
    """What the prepare stage left, and the panel that it named."""
    stage = run.stage
    if stage is None:
        raise UsageError(
            f"{run.path} holds no prepared stage.",
            rule="a fold trains on the panel and the splits that the prepare stage left.",
            remedy="start the run again: memfit run <its config>",
        )
    return stage, Panel.open(Path(stage["panel"]))


def read_split(run: RunDir, fold: int) -> tuple[Indices, Indices]:
    """The positions that a fold trains on and is tested on."""
    with np.load(run.path / "checkpoints" / "stage_prepare.npz", allow_pickle=False) as splits:
        return splits[f"train_{fold}"], splits[f"test_{fold}"]


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
