"""Made-up batches of whole days."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class DayBatch:
    INPUTS: ClassVar = ("batch",)
    windows: torch.Tensor
    targets: torch.Tensor
    days: torch.Tensor
    neighbours: torch.Tensor
    sectors: torch.Tensor
    weights: torch.Tensor


def make_days(sizes, *, lookback=5, num_features=6, num_horizons=3, num_neighbours=2, dtype=torch.float64, seed=0):
    """Random days of these sizes; a tenth of the targets is unknown."""
    draw, rows = torch.Generator().manual_seed(seed), sum(sizes)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=dtype)

    def rare(*shape):
        return torch.rand(shape, generator=draw) < 0.1

    neighbours = [torch.randint(-1, size, (size, num_neighbours), generator=draw) for size in sizes]
    return DayBatch(
        windows=normal(rows, lookback, num_features),
        targets=normal(rows, num_horizons).masked_fill(rare(rows, num_horizons), float("nan")),
        days=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
        neighbours=torch.cat(neighbours),
        sectors=torch.randint(-1, 3, (rows,), generator=draw),
        weights=(0.5 + torch.rand(len(sizes), generator=draw, dtype=dtype)).repeat_interleave(torch.tensor(sizes)),
    )


def take(batch, rows):
    """These rows of every field."""
    return DayBatch(**{field.name: getattr(batch, field.name)[rows] for field in dataclasses.fields(batch)})
