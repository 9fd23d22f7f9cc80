"""The training that ``forecaster.py --part sweep`` searches: a linear model on all rows of a wide store.

The same batches come from memfit's panel or from Parquet, so that two sweeps differ in what they read alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from memfit.data import DateBatches, Loader, Panel
from memfit.pipeline import Context, Stage, Workload

TARGET, LONGEST = "target_h5", 20


class Params(BaseModel):
    """The settings of one training."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    path: Path
    source: Literal["panel", "parquet"] = "panel"
    learning_rate: float = 1e-3


def prepare(context: Context, params: Params) -> dict[str, str]:
    """Build the panel once, for all trials."""
    names = [name for name in pq.read_schema(params.path).names if re.fullmatch(r"f\d+", name)]
    panel = Panel.build(params.path, context.panels_dir, features=names, targets=[TARGET])
    return {"panel": str(panel.path)}


def train(context: Context, params: Params) -> dict[str, Any]:
    """Train one epoch over every window of every date."""
    import torch

    from forecaster import LOOKBACK, ParquetDays
    from memfit.training import Trainer, seed_everything

    panel = Panel.open(context["prepare"].result["panel"], verify="sizes")
    dates = np.arange(LOOKBACK - 1, len(panel.dates) - LONGEST)
    batches: Any
    if params.source == "panel":
        batches = Loader(panel, dates, lookback=LOOKBACK, target=TARGET, shuffle=context.seed)
    else:
        order = DateBatches(panel, dates, lookback=LOOKBACK, target=TARGET, shuffle_seed=context.seed)
        batches = ParquetDays(params.path, order, TARGET)
    seed_everything(context.seed)
    model = torch.nn.Linear(len(panel.feature_names), 1)
    num_rows = 0

    def loss(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        nonlocal num_rows
        num_rows += len(batch.windows)
        scores = model(torch.from_numpy(batch.windows).mean(dim=1)).squeeze(1)
        return (scores - torch.from_numpy(batch.targets)).square().sum(), float(len(scores))

    optimizer = torch.optim.SGD(model.parameters(), lr=params.learning_rate)
    trainer = Trainer(model, loss=loss, optimizer=optimizer, microbatch_size=None)
    last = trainer.fit(batches, num_epochs=1, preflight=False).history[-1]
    found = {"loss": last.train_loss, "wait_share": last.wait_share, "num_rows": num_rows}
    return found | {"rows_per_second": num_rows / (last.seconds or 1)}


SWEPT = Workload(Params, (Stage("prepare", prepare, reads=("path",)), Stage("train", train, needs=("prepare",))))
