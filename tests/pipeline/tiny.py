"""A workload without torch: each fold "trains" by averaging, epoch by epoch, with a checkpoint after each."""

import json
import signal
import sys
import time
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from memfit.data import Panel
from memfit.errors import StoppedError
from memfit.files import write_json
from memfit.pipeline import Context, Stage, Workload
from memfit.rundir import phase, record
from memfit.splits import PurgedKFold


class NoPandas:
    @staticmethod
    def find_spec(name, *_):
        if name == "pandas":
            raise ModuleNotFoundError(name=name)


# pyarrow would load pandas in each job, which takes longer than all else there. It looks for it once.
sys.meta_path.insert(0, NoPandas)
pa.array([0])
sys.meta_path.remove(NoPandas)


class TinyParams(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    num_dates: int = 40
    n_splits: int = 3
    num_epochs: int = 2
    epoch_seconds: float = 0.0
    hold_mib: int = 0
    fail_fold: int = 0
    #: The first fold goes on when the second has begun.
    awaits_second: bool = False


def make_table(params: TinyParams) -> pa.Table:
    days = np.arange(params.num_dates).astype("datetime64[D]")
    values = np.arange(params.num_dates * 2, dtype=np.float64)
    return pa.table({
        "date": np.repeat(days, 2), "code": ["a", "b"] * params.num_dates, "x": values, "y": values % 7,
    })  # fmt: skip


def prepare(context: Context, params: TinyParams) -> dict[str, Any]:
    phase("build")
    panel = Panel.build(make_table(params), context.panels_dir, features=["x"], targets=["y"])
    splits = list(PurgedKFold(params.n_splits, purged_size=1, embargo_size=1).split(panel.dates))
    context.save("panel", panel)
    rows = {f"train_{fold}": train for fold, (train, _) in enumerate(splits, 1)}
    context.save("splits", rows | {f"test_{fold}": test for fold, (_, test) in enumerate(splits, 1)})
    return {"folds": [{"fold": fold, "num_test_dates": len(test)} for fold, (_, test) in enumerate(splits, 1)]}


def train_fold(context: Context, params: TinyParams) -> dict[str, float]:
    phase("load")
    prepared, fold = context["prepare"], context.unit["fold"]
    panel, splits = prepared.panel(), prepared.arrays("splits")
    train, test = splits[f"train_{fold}"], splits[f"test_{fold}"]
    saved = context.dir / "state.json"
    first = json.loads(saved.read_text())["epoch"] + 1 if saved.exists() else 1
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
    (context.dir / "begun").touch()
    second, patience = context.dir.with_name("fold_2") / "begun", time.monotonic() + 60
    while params.awaits_second and fold == 1 and not second.exists() and time.monotonic() < patience:
        time.sleep(0.02)
    block = None
    for epoch in range(first, params.num_epochs + 1):
        phase("train")
        block = np.ones(params.hold_mib << 20, np.uint8)
        time.sleep(params.epoch_seconds)
        if params.fail_fold == fold:
            raise ValueError("a planted bug")
        phase("checkpoint")
        write_json(saved, {"epoch": epoch})
        phase("validate")
        record("epoch", epoch=epoch, num_epochs=params.num_epochs, loss=1 / epoch)
        if stopping:
            raise StoppedError("stopped.", rule="asked to.", remedy="start again")
    del block
    scores = np.asarray(panel.values[test, 0, 0])
    context.save("scores", pa.table({"date": test, "score": scores}))
    draw = np.random.default_rng(context.seed).random()
    return {"mean_x": float(np.nanmean(panel.values[train])), "draw": float(draw)}


TINY = Workload(
    params=TinyParams,
    fingerprint=lambda params: f"tiny-{params.num_dates}",
    stages=(
        Stage("prepare", prepare, reads=("num_dates", "n_splits"), phases=("load", "build")),
        Stage(
            "fold",
            train_fold,
            needs=("prepare",),
            each="fold in prepare.folds",
            reads=("num_epochs", "epoch_seconds", "hold_mib", "fail_fold", "awaits_second", "@seed"),
            phases=("load", "train", "checkpoint", "validate"),
        ),
    ),
)
