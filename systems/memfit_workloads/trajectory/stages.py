"""The trajectory model as stages: ``TRAJECTORY`` is what a config names. Importing this module loads no torch."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from memfit.pipeline import Context, Stage, Workload
from memfit_workloads.trajectory import data, scoring
from memfit_workloads.trajectory.params import TrajectoryParams


def train(context: Context, params: TrajectoryParams) -> dict[str, Any]:
    from memfit_workloads.trajectory import training

    return training.train(context, params)


def choose(context: Context, params: TrajectoryParams) -> dict[str, Any]:
    from memfit_workloads.trajectory import training

    return training.choose(context, params)


_EACH_PLACE, _EACH_SEED = "place in params.data.places", "seed in params.seeds"
_TABLES = ("prepare", "vocabulary", "teacher")
_TRAINING = ("data", "model", "dataloader", "trainer", "@seed")
_PHASES = ("load", "train", "checkpoint", "validate")

TRAJECTORY = Workload(
    params=TrajectoryParams,
    check=data.check,
    fingerprint=lambda params: {"prepare": f"libsumo {importlib.metadata.version('libsumo')}"},
    stages=(
        Stage("prepare", data.prepare, each=_EACH_PLACE, reads=("data", "@seed")),
        Stage("vocabulary", scoring.vocabulary, needs=("prepare",), reads=("vocabulary", "@seed")),
        Stage("teacher", scoring.teach, needs=_TABLES[:2], each=_EACH_PLACE, reads=("data", "vocabulary")),
        Stage("train", train, needs=_TABLES, each=_EACH_SEED, reads=_TRAINING, phases=_PHASES),
        Stage("choose", choose, needs=(*_TABLES, "train"), each=_EACH_SEED, reads=("data", "model", "dataloader")),
        Stage("report", scoring.report, needs=("prepare", "vocabulary", "choose"), reads=("level", "@seed")),
    ),
)
