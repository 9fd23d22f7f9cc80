"""Rows of several lists as padded matrices. This module needs torch, so the package does not import it by itself.

B   rows of all lists           A   rows of the longest list
G   lists
"""

from __future__ import annotations

import torch


class Lists:
    """Rows of several lists, one after the other, as a matrix of lists padded to the longest.

    Equal numbers of ``lists_B`` stand together. With ``views``, equally long lists are padded without a copy: gradients
    then lie in another order in memory, so that their sums differ in the last digit. ``list_B`` and ``place_B`` are the
    list of each row, counted from 0, and its place in it; ``first`` (G,) is the first row of each list, ``shape`` (G,
    A).
    """

    def __init__(self, lists_B: torch.Tensor, device: torch.device, *, views: bool = True) -> None:
        _, list_B, counts = torch.unique_consecutive(lists_B, return_inverse=True, return_counts=True)
        first = counts.cumsum(0) - counts
        place_B = torch.arange(len(lists_B), device=lists_B.device) - first[list_B]
        self.list_B, self.first, self.place_B = (index.to(device) for index in (list_B, first, place_B))
        self.shape = (len(counts), int(counts.max()))
        self._is_full = views and len(lists_B) == self.shape[0] * self.shape[1]

    def padded(self, values: torch.Tensor, fill: float) -> torch.Tensor:
        """Return (B, ...) values as (G, A, ...)."""
        if self._is_full:
            return values.reshape(*self.shape, *values.shape[1:])
        empty = torch.full((*self.shape, *values.shape[1:]), fill, dtype=values.dtype, device=values.device)
        return empty.index_put((self.list_B, self.place_B), values)

    def rows(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return (G, A, ...) values as (B, ...)."""
        return matrix.flatten(0, 1) if self._is_full else matrix[self.list_B, self.place_B]


def standardized(targets: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return (..., A) targets less their mean in the list, over their standard deviation.

    A target that is not known is 0, and so are targets that are all equal.
    """
    count = known.sum(-1, keepdim=True).clamp_min(1)
    plain = torch.where(known, targets, 0.0)
    centred = torch.where(known, plain - plain.sum(-1, keepdim=True) / count, 0.0)
    sd = (centred.square().sum(-1, keepdim=True) / count).sqrt()
    return torch.where(sd > 0, centred / sd, 0.0)  # equal targets name no order: every asset is first as likely
