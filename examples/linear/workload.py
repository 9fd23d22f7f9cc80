"""A workload in one file: a linear model that predicts tomorrow from the last five days of eight random series."""

from typing import Any

import numpy as np
import pyarrow as pa

from memfit import config
from memfit.data import DateBatches, Panel
from memfit.pipeline import Context, Stage, Workload
from memfit.rundir import phase
from memfit.splits import PurgedKFold

LOOKBACK = 5


class Params(config.Settings):
    num_dates: int = 200
    num_epochs: int = 3
    learning_rate: float = 0.05


def make_table(params: Params) -> pa.Table:
    """One row per date and series: what is known on the date (value), and what is known a day later (tomorrow)."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(params.num_dates + 1, 8)).cumsum(axis=0) * 0.1
    dates = np.arange(params.num_dates).astype("datetime64[D]")
    return pa.table({
        "date": np.repeat(dates, 8),
        "code": np.tile([f"series_{i}" for i in range(8)], params.num_dates),
        "value": values[:-1].ravel(),
        "tomorrow": (values[1:] - values[:-1]).ravel(),
    })  # fmt: skip


def prepare(context: Context, params: Params) -> dict[str, Any]:
    """Build the panel once, and split its dates. The label of a date is known one date later: purge by 1."""
    phase("build")
    panel = Panel.build(make_table(params), context.panels_dir, features=["value"], targets=["tomorrow"])
    dates = np.arange(LOOKBACK - 1, len(panel.dates))  # those with a whole window
    folds = []
    for fold, (train, test) in enumerate(PurgedKFold(4, purged_size=1, embargo_size=2).split(panel.dates[dates]), 1):
        context.save(f"dates_{fold}", {"train": dates[train], "test": dates[test]})
        folds.append({"fold": fold, "num_test_dates": len(test)})
    context.save("panel", panel)
    return {"num_dates": len(panel.dates), "folds": folds}  # each of the folds is a job


def train_fold(context: Context, params: Params) -> dict[str, float]:
    """Runs in the fold's own process: only here is torch imported."""
    import torch

    from memfit import Trainer

    def loss(model: torch.nn.Module, batch):  # a sum, and the weight that it is the sum of
        error = model(torch.from_numpy(batch.windows)[:, :, 0]).squeeze(-1) - torch.from_numpy(batch.targets)
        return (error**2).sum(), len(error)

    phase("load")
    prepared = context["prepare"]
    panel, dates = prepared.panel(), prepared.arrays(f"dates_{context.unit['fold']}")
    train = DateBatches(panel, dates["train"], lookback=LOOKBACK, target="tomorrow", shuffle_seed=1)
    test = DateBatches(panel, dates["test"], lookback=LOOKBACK, target="tomorrow")
    torch.manual_seed(context.seed)
    model = torch.nn.Linear(LOOKBACK, 1)
    trainer = Trainer(
        model,
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=params.learning_rate),
        checkpoint_dir=context.dir,
        seed=context.seed,
    )
    trainer.fit(train, test, num_epochs=params.num_epochs)
    with torch.no_grad():
        scores = [model(torch.from_numpy(batch.windows)[:, :, 0]).squeeze(-1).numpy() for batch in test]
    pairs = [(score.argsort(), batch.targets.argsort()) for score, batch in zip(scores, test, strict=True)]  # by date
    return {"rank_ic": float(np.mean([np.corrcoef(one.argsort(), other.argsort())[0, 1] for one, other in pairs]))}


LINEAR = Workload(
    params=Params,
    stages=(
        Stage("prepare", prepare, reads=("num_dates",), phases=("load", "build")),
        Stage(
            "fold",
            train_fold,
            needs=("prepare",),
            each="fold in prepare.folds",
            reads=("num_epochs", "learning_rate", "@seed"),
            phases=("load", "train", "checkpoint", "validate"),
        ),
    ),
)
