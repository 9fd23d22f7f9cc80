"""The video classifier as stages: ``VIDEO`` is what a config names. Importing this module loads no torch."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit.pipeline import Context, Probe, Stage, Workload, fingerprint_files
from memfit_workloads.video import data, scores
from memfit_workloads.video.params import VideoParams

_NOTEBOOK = Path(__file__).with_name("notebook.ipynb")


def staged(run: Callable[[Context, Any], dict[str, Any]], context: Context, params: VideoParams) -> dict[str, Any]:
    """Run a stage, with the garbage collections before and after it that were asked for."""
    if params.cleanup.before_stage or params.cleanup.after_stage:
        from memfit.training import clean_up
    if params.cleanup.before_stage:
        clean_up()
    found = run(context, params)
    if params.cleanup.after_stage:
        clean_up()
    return found


def _training() -> Any:
    """Return the module that loads torch."""
    from memfit_workloads.video import training

    return training


def initialize_model(context: Context, params: VideoParams) -> Any:
    return _training().initialize_model(context, params)


def train_fold(context: Context, params: VideoParams) -> Any:
    return _training().train_fold(context, params)


def notebook(context: Context, params: VideoParams) -> dict[str, Any]:
    """Run the notebook beside this file, save it with what it printed, and return the metrics that it wrote."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(_NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    os.environ |= {"VIDEO_PARAMS": params.model_dump_json(), "VIDEO_SEED": str(context.seed)}
    os.environ |= {name: str(context.dir / "jupyter") for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    client = NotebookClient(book, timeout=None, kernel_name="python3", resources={"metadata": {"path": context.dir}})
    try:
        client.execute()
    finally:  # a cell that failed is read there
        nbformat.write(book, context.dir / "notebook.ipynb")  # type: ignore[no-untyped-call]
    context.save("notebook", context.dir / "notebook.ipynb")
    found: dict[str, Any] = json.loads((context.dir / "metrics.json").read_text())
    return found


_DATA = ("load_data", "create_kfold_splits", "generate_augmentations", "create_datasets", "create_loaders")
_FOLD_READS = ("clip", "loader", "num_versions", "train", "model", "@seed")


def _stage(
    name: str, run: Callable[[Context, Any], dict[str, Any]], *needs: str, reads: tuple[str, ...], **more: Any
) -> Stage:
    return Stage(name, functools.partial(staged, run), needs=needs, reads=(*reads, "cleanup"), **more)


VIDEO = Workload(
    params=VideoParams,
    check=data.check,
    fingerprint=lambda params: {
        "load_data": data.fingerprint(params),
        "initialize_model": params.model.fingerprint(),
        "notebook": data.fingerprint(params) + fingerprint_files(_NOTEBOOK),
    },
    stages=(
        _stage("load_data", data.load_data, reads=("data",)),
        _stage("create_kfold_splits", data.create_kfold_splits, "load_data", reads=("splits", "@seed")),
        _stage("generate_augmentations", data.generate_augmentations, "load_data", reads=("num_versions", "@seed")),
        _stage("create_datasets", data.create_datasets, "load_data", reads=("clip",)),
        _stage("create_loaders", data.create_loaders, "create_datasets", reads=("loader", "@seed")),
        _stage("initialize_model", initialize_model, "load_data", reads=("clip", "model", "@seed")),
        _stage(
            "fold",
            train_fold,
            *_DATA,
            "initialize_model",
            reads=_FOLD_READS,
            each="fold in create_kfold_splits.folds",
            phases=("load", "train", "checkpoint", "validate"),
            probe=Probe(lambda *given: _training().loader(*given), lambda *given: _training().training_step(*given)),
        ),
        _stage("evaluate", scores.evaluate, "load_data", "fold", reads=("@seed",)),
        Stage("notebook", notebook, reads=(*_FOLD_READS, "data", "splits")),
    ),
    choose=lambda params: (
        ("notebook",) if params.entry == "notebook" else (*_DATA, "initialize_model", "fold", "evaluate")
    ),
)
