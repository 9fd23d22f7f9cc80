"""The losses of a ranker: how far the order by score is from the order by target, within one date.

Each loss takes the values of one list along the last dimension, any number of lists in the dimensions before, and which
of them are known; it gives one number per list. A list with fewer than two known targets has no order and costs 0.

A tensor's suffix names its shape:

    G   lists of a batch            B   assets of all lists
    A   assets of the longest list  R   pairs per asset
    H   horizons
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from memfit_workloads.finance.lists import Lists, standardized
from memfit_workloads.folds import answer
from memfit_workloads.ranker.batches import ListBatch


def listnet_loss(scores: torch.Tensor, targets: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """The ListNet loss of each list, (..., A) to (...): every list counts the same, however many assets it has.

    Targets and scores become the probabilities of being first (softmax); the loss is their cross entropy. Targets are
    standardised within the list first, so that a quiet day says as much as a wild one. A score that knows nothing costs
    ``log(n)`` for n assets; a perfect one costs the entropy of the targets' probabilities, not 0.

    Source: Z. Cao, T. Qin, T.-Y. Liu, M.-F. Tsai, H. Li, Learning to Rank: From Pairwise Approach to Listwise Approach,
        ICML 2007: the top-one probability with the exponential as the increasing function.
    """
    absent = torch.finfo(scores.dtype).min
    first = standardized(targets, known).masked_fill(~known, absent).softmax(-1)
    logs = scores.masked_fill(~known, absent).log_softmax(-1).masked_fill(~known, 0.0)
    return -(first * logs).sum(-1) * _has_order(known)


def ranknet_loss(
    scores: torch.Tensor, targets: torch.Tensor, known: torch.Tensor, partners: torch.Tensor
) -> torch.Tensor:
    """The RankNet loss of each list: the mean of ``log(1 + exp(-d))`` over its pairs, d the better asset's lead.

    ``partners`` (..., A, R) are the places, within the list, of the assets that each is compared with. Pairs of equal
    targets, and those with an unknown one, do not count. Scores that are all equal cost ``log(2)``.

    Source: C. Burges et al., Learning to Rank using Gradient Descent, ICML 2005, with a target probability of 0 or 1.
    """
    places = partners.flatten(-2)

    def of_partner(values: torch.Tensor) -> torch.Tensor:
        return values.gather(-1, places).view(partners.shape)

    better = torch.sign(targets.nan_to_num().unsqueeze(-1) - of_partner(targets.nan_to_num()))
    counts = (better != 0) & known.unsqueeze(-1) & of_partner(known)
    costs = functional.softplus(-better * (scores.unsqueeze(-1) - of_partner(scores)))
    return torch.where(counts, costs, 0.0).sum((-2, -1)) / counts.sum((-2, -1)).clamp_min(1)


def mse_loss(scores: torch.Tensor, targets: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """The mean squared error of each list between scores and targets that are standardised within it.

    Scores of 0 cost 1.
    """
    errors = torch.where(known, (scores - standardized(targets, known)).square(), 0.0)
    return errors.sum(-1) / known.sum(-1).clamp_min(1) * _has_order(known)


def _has_order(known: torch.Tensor) -> torch.Tensor:
    return known.sum(-1) >= 2


@dataclass(frozen=True)
class RankerLoss:
    """The loss of a batch: a weighted sum over losses, horizons and dates, and the weight that it is the sum of.

    The weight is that of the dates, over those (date, horizon) that have an order. So within a batch a date with half
    the weight pulls half as much, whatever optimizer and clipping do to the whole gradient.
    """

    listnet: float
    ranknet: float
    mse: float

    def __call__(self, model: torch.nn.Module, batch: ListBatch) -> tuple[torch.Tensor, torch.Tensor]:
        scores_BH = answer(model, batch)
        device = scores_BH.device
        scores_BH = scores_BH.to(torch.promote_types(scores_BH.dtype, torch.float32))
        lists = Lists(torch.from_numpy(batch.lists), device, views=False)  # sums stay as they were
        scores_GHA = lists.padded(scores_BH, 0.0).transpose(1, 2)
        targets_GHA = lists.padded(torch.from_numpy(batch.targets).to(scores_BH), float("nan")).transpose(1, 2)
        known_GHA = targets_GHA.isfinite()
        loss_GH = torch.zeros_like(scores_GHA[:, :, 0])
        if self.listnet:
            loss_GH = loss_GH + self.listnet * listnet_loss(scores_GHA, targets_GHA, known_GHA)
        if self.ranknet:
            partners_GAR = lists.padded(torch.from_numpy(batch.partners).to(device), 0)
            partners_GHAR = partners_GAR.unsqueeze(1).expand(-1, scores_GHA.shape[1], -1, -1)
            loss_GH = loss_GH + self.ranknet * ranknet_loss(scores_GHA, targets_GHA, known_GHA, partners_GHAR)
        if self.mse:
            loss_GH = loss_GH + self.mse * mse_loss(scores_GHA, targets_GHA, known_GHA)
        date_G = torch.from_numpy(batch.weights).to(scores_BH)[lists.first]
        weight_GH = date_G[:, None] * _has_order(known_GHA)
        # A batch without any order, as the last part of a cut date can be, has a loss of 0 and must have a weight.
        return (loss_GH * weight_GH).sum(), weight_GH.sum().clamp_min(1e-12)
