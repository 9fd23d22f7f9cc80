"""The trajectory model as stages: ``TRAJECTORY`` is what a config names. Importing this module loads no torch."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np

from memfit.pipeline import Context, Probe, Stage, Workload
from memfit_workloads import own
from memfit_workloads.trajectory import data, scoring
from memfit_workloads.trajectory.params import TrajectoryParams


def _training() -> Any:
    """Return the module that loads torch."""
    from memfit_workloads.trajectory import training

    return training


def train(context: Context, params: TrajectoryParams) -> Any:
    return _training().train(context, params)


def choose(context: Context, params: TrajectoryParams) -> Any:
    return _training().choose(context, params)


def _loader(context: Context, params: TrajectoryParams, num_workers: int) -> Any:
    return _training().loader(_training().scenes_of(context, "train"), params, context.seed, num_workers=num_workers)


def _step(context: Context, params: TrajectoryParams) -> Any:
    return _training().training_step(context, params)


def check(params: TrajectoryParams) -> None:
    """Refuse a simulator or a place that is not there, and a network that does not fit."""
    data.check(params)
    one, size = params.data, params.data.raster_size
    inputs = {"history": ("float32", (2, one.num_history, 2)), "raster": ("uint8", (2, 3, size, size))}
    paths = np.zeros((params.vocabulary.size, one.num_future, 2))
    own.try_out(params.model, lambda: _training().new_model(params, paths), inputs, (2, 5, params.vocabulary.size))


_EACH_PLACE, _EACH_SEED = "place in params.data.places", "seed in params.seeds"
_TABLES = ("prepare", "vocabulary", "teacher")
_TRAINING = ("data", "model", "dataloader", "trainer", "@seed")
_PHASES = ("load", "train", "checkpoint", "validate")

TRAJECTORY = Workload(
    params=TrajectoryParams,
    check=check,
    fingerprint=lambda params: {
        "prepare": f"libsumo {importlib.metadata.version('libsumo')}",
        "train": params.model.fingerprint(),
    },
    stages=(
        Stage("prepare", data.prepare, each=_EACH_PLACE, reads=("data", "@seed")),
        Stage("vocabulary", scoring.vocabulary, needs=("prepare",), reads=("vocabulary", "@seed")),
        Stage("teacher", scoring.teach, needs=_TABLES[:2], each=_EACH_PLACE, reads=("data", "vocabulary")),
        Stage("train", train, _TABLES, each=_EACH_SEED, reads=_TRAINING, phases=_PHASES, probe=Probe(_loader, _step)),
        Stage("choose", choose, needs=(*_TABLES, "train"), each=_EACH_SEED, reads=("data", "model", "dataloader")),
        Stage("report", scoring.report, needs=("prepare", "vocabulary", "choose"), reads=()),
    ),
)
