"""A workload whose model is a memory: it knows the future of every date that it was trained on, and of no other."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from memfit.data import Panel
from memfit.pipeline import Context, Stage, Workload
from memfit.rundir import phase, record
from memfit.splits import PurgedKFold
from memfit_workloads import finance

NUM_ASSETS, HORIZON = 30, 5


class MemoriserParams(finance.JudgeSettings):
    num_dates: int = 160
    n_splits: int = 4
    skill: float = 0.0  # how much the scores know of the target on dates that were not trained on
    drift: float = 0.0005
    epoch_seconds: float = 0.0
    die_fold: int = 0
    price_error: bool = False
    calm: bool = False  # assets differ in volatility, and the scores prefer calm ones

    @property
    def scored_horizons(self) -> tuple[int, ...]:
        return (HORIZON,)


def daily_returns(params: MemoriserParams) -> np.ndarray:
    """(num_dates, NUM_ASSETS); the last row is not known."""
    noise = np.random.default_rng(5).normal(params.drift, 0.02, (params.num_dates, NUM_ASSETS))
    if params.calm:
        noise *= np.linspace(0.5, 1.5, NUM_ASSETS)
    noise[-1] = np.nan
    return noise


def forward_returns(daily: np.ndarray, horizon: int) -> np.ndarray:
    ahead = np.full(daily.shape, np.nan)
    for date in range(len(daily) - horizon):
        ahead[date] = np.prod(1 + daily[date : date + horizon], axis=0) - 1
    return ahead


def closes(params: MemoriserParams) -> np.ndarray:
    daily = np.nan_to_num(daily_returns(params))
    values = 100 * np.cumprod(np.vstack([np.ones(NUM_ASSETS), 1 + daily[:-1]]), axis=0)
    if params.price_error:
        values[params.num_dates // 2, 3] *= 100
    return values


def prepare(context: Context, params: MemoriserParams) -> dict[str, Any]:
    phase("build")
    daily = daily_returns(params)
    days = np.busday_offset("2020-01-01", np.arange(params.num_dates), roll="forward")
    columns = {
        "date": np.repeat(days, NUM_ASSETS),
        "code": [f"A{i:02d}" for i in range(NUM_ASSETS)] * params.num_dates,
        "x": np.random.default_rng(6).normal(size=daily.size),
        "target_h1": daily.ravel(),
        f"target_h{HORIZON}": forward_returns(daily, HORIZON).ravel(),
    }
    table = pa.table({name: pa.array(values, from_pandas=True) for name, values in columns.items()})
    targets = [name for name in columns if name.startswith("target")]
    panel = Panel.build(table, context.panels_dir, features=["x"], targets=targets)
    usable = np.arange(params.num_dates - HORIZON)
    splits = list(PurgedKFold(params.n_splits, purged_size=HORIZON, embargo_size=2).split(usable))
    return finance.save_folds(context, panel, splits, label_dates=HORIZON, embargo_size=2)


def train_fold(context: Context, params: MemoriserParams) -> dict[str, float]:
    import torch

    from memfit.training import save_checkpoint

    phase("load")
    fold, (panel, train_dates, _) = context.unit["fold"], finance.fold_of(context)
    for epoch in (1, 2):
        phase("train")
        time.sleep(params.epoch_seconds)
        if params.die_fold == fold:
            os.kill(os.getpid(), signal.SIGKILL)
        memory = np.zeros((len(panel.dates), NUM_ASSETS), np.float32)
        memory[train_dates] = np.nan_to_num(panel.targets[train_dates, :, 1])
        known = np.zeros(len(memory), np.uint8)
        known[train_dates] = 1
        state = {
            "memfit_checkpoint": 1, "epoch": epoch, "fit": f"fold {fold}", "identity": {},
            "model": {"memory": torch.from_numpy(memory), "known": torch.from_numpy(known)}, "provenance": finance.provenance(context, params),
        }  # fmt: skip
        phase("checkpoint")
        path = context.dir / f"ema_epoch_{epoch}.pt"
        save_checkpoint(path, state)
        context.save(path.stem, path)
        phase("validate")
        record("epoch", epoch=epoch, num_epochs=2, loss=1 / epoch)
    return {"num_train": float(len(train_dates))}


def score(panel: Panel, dates: np.ndarray, checkpoint: Path, params: MemoriserParams) -> pa.Table:
    from memfit.training import load_checkpoint

    model = load_checkpoint(checkpoint)["model"]
    memory, known = model["memory"].numpy()[dates], model["known"].numpy()[dates, None]
    truth = np.nan_to_num(panel.targets[dates, :, 1])
    noise = np.random.default_rng(8).normal(0, 0.04, memory.shape)
    scores = np.where(known, memory, noise + params.skill * truth)
    if params.calm:
        scores -= np.arange(NUM_ASSETS)
    return pa.table({
        "date": pa.array(np.repeat(panel.dates[dates], NUM_ASSETS), pa.date32()),
        "code": list(panel.assets) * len(dates),
        f"score_h{HORIZON}": scores.astype(np.float32).ravel(),
        "target_h1": pa.array(panel.targets[dates, :, 0].astype(np.float32).ravel(), from_pandas=True),
        f"target_h{HORIZON}": pa.array(panel.targets[dates, :, 1].astype(np.float32).ravel(), from_pandas=True),
    })  # fmt: skip


def market(panel: Panel, params: MemoriserParams) -> pa.Table:
    return pa.table({
        "date": pa.array(np.repeat(panel.dates, NUM_ASSETS), pa.date32()),
        "code": list(panel.assets) * len(panel.dates),
        "close": closes(params).ravel(),
    })  # fmt: skip


SCORED = ("num_dates", "skill", "drift", "calm", "price_error")
MEMORISER = Workload(
    params=MemoriserParams,
    fingerprint=lambda params: {"decision": finance.fingerprint(params)},
    stages=(
        Stage("prepare", prepare, reads=("num_dates", "n_splits", "drift", "calm"), phases=("load", "build")),
        Stage(
            "fold",
            train_fold,
            needs=("prepare",),
            each="fold in prepare.folds",
            reads=(*SCORED, "epoch_seconds", "die_fold", "@seed"),
            phases=("load", "train", "checkpoint", "validate"),
        ),
        *finance.stages(score, market, reads=SCORED),
    ),
)
