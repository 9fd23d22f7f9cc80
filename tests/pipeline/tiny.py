"""A workload without torch: each fold "trains" by averaging, epoch by epoch, with a checkpoint after each."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from memfit.data import Panel
from memfit.errors import StoppedError
from memfit.pipeline import FoldContext, FoldWorkload, PrepareContext, Prepared
from memfit.rundir import mark_phase, record, write_json
from memfit.splits import PurgedKFold


class TinyParams(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    num_dates: int = 40
    n_splits: int = 3
    num_epochs: int = 2
    epoch_seconds: float = 0.0
    hold_mib: int = 0
    fail_fold: int = 0
    die_fold: int = 0


def make_table(params: TinyParams) -> pa.Table:
    days = np.arange(params.num_dates).astype("datetime64[D]")
    values = np.arange(params.num_dates * 2, dtype=np.float64)
    return pa.table({
        "date": np.repeat(days, 2), "code": ["a", "b"] * params.num_dates, "x": values, "y": values % 7,
    })  # fmt: skip


def prepare(context: PrepareContext, params: TinyParams) -> Prepared:
    mark_phase("build")
    panel = Panel.build(make_table(params), context.panels_dir, features=["x"], targets=["y"])
    splitter = PurgedKFold(params.n_splits, purged_size=1, embargo_size=1)
    return Prepared(panel, list(splitter.split(np.arange(params.num_dates))))


def train_fold(context: FoldContext, params: TinyParams) -> dict[str, float]:
    saved = context.checkpoint_dir / "state.json"
    first = json.loads(saved.read_text())["epoch"] + 1 if saved.exists() else 1
    stopping: list[int] = []
    import signal

    signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
    block = None
    for epoch in range(first, params.num_epochs + 1):
        mark_phase("train")
        block = np.ones(params.hold_mib << 20, np.uint8)
        time.sleep(params.epoch_seconds)
        if params.fail_fold == context.fold:
            raise ValueError("a planted bug")
        if params.die_fold == context.fold:
            os.kill(os.getpid(), signal.SIGKILL)
        mark_phase("checkpoint")
        write_json(saved, {"epoch": epoch})
        mark_phase("validate")
        record("epoch", epoch=epoch, num_epochs=params.num_epochs, loss=1 / epoch)
        if stopping:
            raise StoppedError("stopped.", rule="asked to.", remedy="start again")
    del block
    table = pa.table({"date": context.test_dates, "score": np.asarray(context.panel.values[context.test_dates, 0, 0])})
    Path(context.save_table("scores", table))
    rng = np.random.default_rng(context.seed)
    return {"mean_x": float(np.nanmean(context.panel.values[context.train_dates])), "draw": float(rng.random())}


TINY = FoldWorkload(
    params=TinyParams, fingerprint=lambda params: f"tiny-{params.num_dates}", prepare=prepare, train_fold=train_fold
)
