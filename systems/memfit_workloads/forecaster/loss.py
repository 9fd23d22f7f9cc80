"""The loss of a forecaster: squared error, and a regulariser of the order within each day.

A tensor's suffix names its shape:

    N   rows: assets of all days    G   days
    Z   horizons                    A   assets of the largest day
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from memfit_workloads.finance.lists import Lists, standardized
from memfit_workloads.folds import answer
from memfit_workloads.forecaster.model import on_device

_LEAST_ORDERED = 3
_CHUNK_ELEMENTS = 1 << 20  # 4 MiB of float32, held a few times
_FLOOR = 1e-9  # of the variance of soft ranks, as a share of that of the targets' ranks


def soft_spearman(
    scores: torch.Tensor, targets: torch.Tensor, temperature: float, *, chunk_elements: int = _CHUNK_ELEMENTS
) -> torch.Tensor:
    """Return Spearman's rank correlation of each list (..., A), with soft ranks of the scores: it has a gradient.

    The soft rank of a score is a sum of ``sigmoid((score - other) / temperature)`` over all others: it is the rank as
    the temperature goes to 0. Targets have their ranks, equal ones the mean, NaN none. A list without an order gives 0.
    The pairs are made some rows at a time, and again in the backward pass: memory grows with ``chunk_elements``, not
    with the square of A.

    Source: T. Qin, T.-Y. Liu, H. Li, A General Approximation Framework for Direct Optimization of Information Retrieval
        Measures, Information Retrieval 2010: the approximation of a position by sigmoids.
    """
    known = ~targets.isnan()
    count = known.sum(-1, keepdim=True)
    middle = (count + 1) / 2
    soft = torch.where(known, _soft_ranks(scores / temperature, known, chunk_elements) - middle, 0.0)
    hard = torch.where(known, _ranks(targets, known).to(scores.dtype) - middle, 0.0)
    spread = hard.square().sum(-1)
    scale = ((soft.square().sum(-1) + _FLOOR * spread) * spread).clamp_min(torch.finfo(scores.dtype).tiny).sqrt()
    return (soft * hard).sum(-1) / scale


def _soft_ranks(scaled: torch.Tensor, known: torch.Tensor, chunk_elements: int) -> torch.Tensor:
    others = scaled.masked_fill(~known, math.inf)  # nothing is above it

    def ranks_of(some: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(some.unsqueeze(-1) - others.unsqueeze(-2)).sum(-1) + 0.5

    chunks = torch.split(scaled, max(1, chunk_elements // scaled.numel()), -1)
    ranks = [checkpoint(ranks_of, some, use_reentrant=False, preserve_rng_state=False) for some in chunks]
    return torch.cat(ranks, -1)


def _ranks(targets: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return the ranks of the known targets from 1, equal ones their mean."""
    plain = torch.where(known, targets, math.inf).contiguous()
    order = plain.sort(-1).values
    return (torch.searchsorted(order, plain) + torch.searchsorted(order, plain, right=True) + 1) / 2


@dataclass(frozen=True)
class ForecastLoss:
    """The loss of a batch of whole days: a weighted sum, and the weight that it is the sum of.

    Each known target costs the squared error of its score, times the weights of its row and its horizon. Targets are
    standardised within day and horizon, so that all days and horizons have one scale. With a rank weight, each day and
    horizon with three known targets or more costs ``rank_weight * (1 - Spearman)`` as well, times the weights of its
    targets; the temperature of the soft ranks is in standard deviations. A batch that is cut between days has the same
    gradient.
    """

    horizon_weights: tuple[float, ...]
    rank_weight: float
    rank_temperature: float = 0.05

    def __call__(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scores_NZ = answer(model, batch)
        scores_NZ = scores_NZ.to(torch.promote_types(scores_NZ.dtype, torch.float32))
        lists = Lists(torch.as_tensor(batch.days), scores_NZ.device)
        targets_GZA = lists.padded(on_device(batch.targets, scores_NZ).to(scores_NZ.dtype), math.nan).transpose(1, 2)
        weights_GA = lists.padded(on_device(batch.weights, scores_NZ).to(scores_NZ.dtype), 0.0)
        scores_GZA = lists.padded(scores_NZ, 0.0).transpose(1, 2)
        known_GZA = ~targets_GZA.isnan()
        horizons_Z1 = scores_NZ.new_tensor(self.horizon_weights)[:, None]
        weights_GZA = weights_GA[:, None] * horizons_Z1 * known_GZA
        errors_GZA = (scores_GZA - standardized(targets_GZA, known_GZA)).square()
        total = (weights_GZA * errors_GZA).sum()
        if self.rank_weight:
            order_GZ = soft_spearman(scores_GZA, targets_GZA, self.rank_temperature)
            weights_GZ = weights_GZA.sum(-1) * (known_GZA.sum(-1) >= _LEAST_ORDERED)
            total = total + self.rank_weight * (weights_GZ * (1 - order_GZ)).sum()
        # A batch without any known target has a loss of 0 and must have a weight.
        return total, weights_GZA.sum().clamp_min(1e-12)
