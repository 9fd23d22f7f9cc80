"""The loss of a ranker: how far the order by score is from the order by target, within one date."""

from __future__ import annotations

import torch


def listnet_loss(scores_B: torch.Tensor, targets_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The ListNet loss of one list, as a sum and a weight of 1: every date counts the same, however many assets it has.

    Targets and scores become the probabilities of being first (softmax); the loss is their cross entropy. Targets are
    standardised within the list first, so that a quiet day says as much as a wild one. A score that knows nothing costs
    ``log(B)``; a perfect one costs the entropy of the targets' probabilities, not 0.

    The loss couples the assets of a date: a batch may be split between dates, never within one.

    Args:
        scores_B: (B,) scores.
        targets_B: (B,) finite targets, in any unit.

    Returns:
        The summed loss and its weight, both without dimensions.

    Source:
        Z. Cao, T. Qin, T.-Y. Liu, M.-F. Tsai, H. Li, Learning to Rank: From Pairwise Approach to Listwise Approach,
        ICML 2007: the top-one probability with the exponential as the increasing function.

    Example:
        >>> loss, weight = listnet_loss(torch.zeros(8), torch.arange(8.0))
        >>> round(loss.item(), 4), weight.item()
        (2.0794, 1.0)
    """
    centred_B = targets_B - targets_B.mean()
    sd = centred_B.square().mean().sqrt()
    standard_B = torch.where(sd > 0, centred_B / sd, 0.0)  # equal targets name no order: every asset is first as likely
    loss = -(standard_B.softmax(0) * scores_B.log_softmax(0)).sum()
    return loss, torch.ones_like(loss)
