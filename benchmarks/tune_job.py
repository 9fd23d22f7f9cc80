"""The training that `tune.py` searches: a small network on generated days, whose memory depends on the settings.

The same function trains in a trial of memfit and in a process of Optuna's pool. It runs on one thread of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from memfit.pipeline import Context, Probe, Stage, Workload
from memfit.units import MIB

NUM_TRAIN, NUM_VALIDATE, NUM_FEATURES = 1_048_576, 16_384, 16
#: The searched values. All combinations are equally likely in a uniform draw.
BATCH_SIZES, HIDDEN_SIZES, NUM_LAYERS = (262_144, 524_288, 1_048_576), (32, 64, 96), (2, 3, 4)
LEARNING_RATES = (1e-4, 3e-2)
NUM_EPOCHS = 5
#: What an interpreter with torch holds before it trains.
_BASE_BYTES = 220 * MIB
#: Tensors of batch x hidden that a layer keeps for its backward: its input, and those of norm and activation.
_KEPT_A_LAYER = 3
#: Tensors of that size that come and go while the backward passes a layer.
_PASSING = 2

Data = Mapping[str, npt.NDArray[Any]]


class Params(BaseModel):
    """The settings of one training."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    batch_size: int = BATCH_SIZES[0]
    hidden_size: int = HIDDEN_SIZES[0]
    num_layers: Literal[2, 3, 4] = 2
    learning_rate: float = 3e-3
    num_epochs: int = NUM_EPOCHS


def make_data() -> dict[str, npt.NDArray[Any]]:
    """Return features and a target with a planted signal, the same at each call; about a second of work."""
    chance = np.random.default_rng(7)
    rows = NUM_TRAIN + NUM_VALIDATE
    features = np.empty((rows, NUM_FEATURES), np.float32)
    for start in range(0, rows, 8192):  # as a table is read: block by block, ranks within each
        block = chance.standard_normal((min(8192, rows - start), NUM_FEATURES), np.float32)
        ranks = block.argsort(axis=0).argsort(axis=0).astype(np.float32)
        features[start : start + len(block)] = ranks / len(block) - 0.5
    signal = np.sin(6 * features[:, 0]) * features[:, 1] + np.abs(features[:, 2]) - features[:, 3] * features[:, 4]
    noise = 0.2 * chance.standard_normal(rows, np.float32)
    return {"features": features, "target": (signal + noise).astype(np.float32)}


def least_bytes(params: Params) -> int:
    """Return what a training takes at least: its batch, and what each layer keeps for the backward pass."""
    width = (_KEPT_A_LAYER * params.num_layers + _PASSING) * params.hidden_size + NUM_FEATURES
    return _BASE_BYTES + 4 * params.batch_size * width


def train_network(data: Data, params: Params, report: Callable[[float, int], None]) -> float:
    """Train, report the validation loss after each epoch, and return the last."""
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = x + nn.functional.gelu(self.norm(self.linear(x)))
            return y

    torch.manual_seed(1)
    torch.set_num_threads(1)
    width = params.hidden_size
    layers = [Layer(width) for _ in range(params.num_layers)]
    model = nn.Sequential(nn.Linear(NUM_FEATURES, width), *layers, nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), params.learning_rate)
    loss = float("nan")
    for epoch in range(1, params.num_epochs + 1):
        model.train()
        for start in range(0, NUM_TRAIN, params.batch_size):
            rows = slice(start, start + params.batch_size)
            x, y = (torch.from_numpy(np.array(data[name][rows])) for name in ("features", "target"))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x).squeeze(-1), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            del x, y
        model.eval()
        with torch.no_grad():
            total = 0.0
            for first in range(NUM_TRAIN, NUM_TRAIN + NUM_VALIDATE, 8192):
                rows = slice(first, first + 8192)
                x, y = (torch.from_numpy(np.array(data[name][rows])) for name in ("features", "target"))
                total += float(nn.functional.mse_loss(model(x).squeeze(-1), y, reduction="sum"))
        loss = total / NUM_VALIDATE
        report(loss, epoch)
    return loss


def prepare(context: Context, params: Params) -> None:
    """Build the data once, for all trials."""
    context.save("data", make_data())


def train(context: Context, params: Params) -> dict[str, float]:
    """Train a trial on the prepared data, which all trials map."""
    data = context["prepare"].arrays("data")
    return {"loss": train_network(data, params, lambda loss, epoch: context.report("loss", loss, epoch))}


def train_alone(context: Context, params: Params) -> dict[str, float]:
    """Train a trial on data that it builds itself."""
    return {"loss": train_network(make_data(), params, lambda loss, epoch: context.report("loss", loss, epoch))}


_PREPARE = Stage("prepare", prepare, reads=())
SHARED = Workload(Params, (_PREPARE, Stage("train", train, needs=("prepare",), probe=Probe(memory=least_bytes))))
#: The same without the arithmetic of what a trial takes.
UNKNOWN = Workload(Params, (_PREPARE, Stage("train", train, needs=("prepare",))))
#: The same with the data built by each trial.
OWN_DATA = Workload(Params, (Stage("train", train_alone, probe=Probe(memory=least_bytes)),))
