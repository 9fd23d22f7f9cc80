"""A forecaster of all assets of a day: it selects features, pools the look-back, and attends along a graph of the day.

A tensor's suffix names its shape:

    N   rows: assets of all days    D   width (``hidden_size``)
    L   dates of look-back          H   attention heads
    F   features                    W   width of a head, D / H
    Z   horizons                    G   days
    K   neighbours of an asset      A   assets of the largest day
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from memfit_workloads.finance.lists import Lists

_HEADS_SD = 0.02  # small: returns say little, and a score of 0 is the best guess before training
_ALIGNMENT = 8  # of a mask's rows: CUDA's memory-efficient kernel copies others, once for each layer


class VariableSelection(nn.Module):
    """Weighs the features of each date against each other, and embeds their weighted sum.

    A gated residual network sees all features and which of them are known; a softmax of its outputs gives weights.
    A feature that is not known has weight 0. Each feature has a linear embedding of its own.

    Source: B. Lim, S. O. Arik, N. Loeff, T. Pfister, Temporal Fusion Transformers, International Journal of
        Forecasting 2021, section 4.2; there each embedding passes through a network of its own as well.
    """

    def __init__(self, num_features: int, width: int) -> None:
        super().__init__()
        self.skip = nn.Linear(2 * num_features, num_features)
        self.widen = nn.Linear(2 * num_features, width)
        self.gate = nn.Linear(width, 2 * num_features)
        self.norm = nn.LayerNorm(num_features)
        self.scale_FD = nn.Parameter(torch.randn(num_features, width))
        self.shift_FD = nn.Parameter(torch.randn(num_features, width))

    def forward(self, x_NLF: torch.Tensor, known_NLF: torch.Tensor) -> torch.Tensor:
        seen_NL2F = torch.cat([x_NLF, known_NLF.to(x_NLF.dtype)], -1)
        gated_NLF = functional.glu(self.gate(functional.elu(self.widen(seen_NL2F))))
        logits_NLF = self.norm(self.skip(seen_NL2F) + gated_NLF)
        share_NLF = logits_NLF.masked_fill(~known_NLF, torch.finfo(logits_NLF.dtype).min).softmax(-1) * known_NLF
        embedded_NLD: torch.Tensor = (share_NLF * x_NLF) @ self.scale_FD + share_NLF @ self.shift_FD
        return embedded_NLD


class TemporalPool(nn.Module):
    """Attention of the newest date over the look-back: (N, L, D) to (N, D)."""

    def __init__(self, lookback: int, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.position_LD = nn.Parameter(torch.randn(lookback, width))
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.join = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, z_NLD: torch.Tensor) -> torch.Tensor:
        z_NLD = z_NLD + self.position_LD
        normed_NLD = self.norm(z_NLD)
        q_NH1W = self.query(normed_NLD[:, -1:]).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k_NHLW, v_NHLW = self.key_value(normed_NLD).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed_NH1W = functional.scaled_dot_product_attention(q_NH1W, k_NHLW, v_NHLW)
        pooled_ND: torch.Tensor = z_NLD[:, -1] + self.dropout(self.join(mixed_NH1W.flatten(1)))
        return pooled_ND


class GraphAttention(nn.Module):
    """Dot-product attention along the edges of each day's graph: (N, D) to (N, D), heads side by side.

    The first half of the heads follows the first kind of edges, the second half the second. This is ``TransformerConv``
    of torch-geometric once for each kind, without its root weight. The scores of a fused kernel are never kept: memory
    grows with A squared only by the masks, which all layers share.

    Source: Y. Shi et al., Masked Label Prediction, IJCAI 2021, equations 3 and 4.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(width, 3 * width)

    def forward(self, z_ND: torch.Tensor, lists: Lists, masks_2G1AA: torch.Tensor) -> torch.Tensor:
        """Attend where a mask is 0; where it is minus infinity there is no edge. Each row has one at least."""
        split_N3HW = self.query_key_value(z_ND).unflatten(-1, (3, self.num_heads, -1))
        halves = lists.padded(split_N3HW, 0.0).permute(2, 0, 3, 1, 4).chunk(2, dim=2)
        mixed_GHAW = torch.cat(
            [
                functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
                for (q, k, v), mask in zip(halves, masks_2G1AA, strict=True)
            ],
            dim=1,
        )
        return lists.rows(mixed_GHAW.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention along the graph, then a layer for each row; both normalise first and add."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = GraphAttention(width, num_heads)
        self.join = nn.Linear(width, width)
        self.norm_layer = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, z_ND: torch.Tensor, lists: Lists, masks_2G1AA: torch.Tensor) -> torch.Tensor:
        mixed_ND = self.attention(self.norm_attention(z_ND), lists, masks_2G1AA)
        z_ND = z_ND + self.dropout(self.join(mixed_ND))
        wide_N2D = functional.gelu(self.widen(self.norm_layer(z_ND)))
        out_ND: torch.Tensor = z_ND + self.dropout(self.narrow(wide_N2D))
        return out_ND


class Forecaster(nn.Module):
    """A score for each asset and horizon: the higher, the better its return is expected to be against the others.

    Widths and heads of all layers come from ``hidden_size``, a multiple of ``num_heads``, of which half follows each
    kind of edges. Batches may be split between days: no layer takes statistics over rows, and attention stays within a
    day.
    """

    def __init__(
        self,
        num_features: int,
        lookback: int,
        num_horizons: int,
        *,
        hidden_size: int,
        num_layers: int,
        num_heads: int = 4,
        dropout: float,
    ) -> None:
        super().__init__()
        self.selection = VariableSelection(num_features, hidden_size)
        self.trunk = TemporalPool(lookback, hidden_size, num_heads, dropout)
        self.layers = nn.ModuleList(Block(hidden_size, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size)
        self.heads = nn.Linear(hidden_size, num_horizons)
        nn.init.normal_(self.heads.weight, std=_HEADS_SD)
        nn.init.zeros_(self.heads.bias)

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the scores (N, Z) of a batch of whole days, whose fields are arrays or tensors."""
        scores_NZ: torch.Tensor = self.heads(self.encode(batch))
        return scores_NZ

    def encode(self, batch: Any, hidden_NF: torch.Tensor | None = None) -> torch.Tensor:
        """Return what the heads see of each asset, (N, D), where some features of the newest date may be hidden."""
        like = self.heads.weight
        x_NLF = on_device(batch.windows, like).to(like.dtype)
        known_NLF = torch.ones_like(x_NLF, dtype=torch.bool)
        if hidden_NF is not None:
            known_NLF[:, -1] = ~hidden_NF
            x_NLF = x_NLF * known_NLF
        lists = Lists(torch.as_tensor(batch.days), like.device)
        masks_2G1AA = self._masks(batch, lists, like)
        z_ND = self.trunk(self.selection(x_NLF, known_NLF))
        for layer in self.layers:
            z_ND = layer(z_ND, lists, masks_2G1AA)
        encoded_ND: torch.Tensor = self.norm(z_ND)
        return encoded_ND

    def _masks(self, batch: Any, lists: Lists, like: torch.Tensor) -> torch.Tensor:
        """Return 0 for an edge and minus infinity for none: one storage, in the dtype of attention, for all layers."""
        edges_2GAA = graph_edges(on_device(batch.neighbours, like), on_device(batch.sectors, like), lists)
        size, kind = edges_2GAA.shape[-1], like.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype
        aligned = functional.pad(edges_2GAA, (0, -size % _ALIGNMENT)).unsqueeze(2)
        masks = torch.zeros(aligned.shape, dtype=dtype, device=like.device)
        return masks.masked_fill_(~aligned, float("-inf"))[..., :size]

    def kept_bytes(self, rows: int, largest_day: int) -> int:
        """Return what a training step keeps for its backward pass in float32, at least.

        What a kernel needs while it runs comes on top: on a CPU the measured peak of a step was 1.2 to 1.6 times as
        much as this and the weights' states. ``rows`` are the assets of all days of a batch, ``largest_day`` those of
        its largest.
        """
        lookback, width = self.trunk.position_LD.shape
        per_date = 10 * self.selection.norm.normalized_shape[0] + 6 * width
        per_row = lookback * per_date + 4 * width + len(self.layers) * 13 * width
        per_mask = 2 * -(-rows // largest_day) * largest_day**2
        return 4 * (rows * per_row + per_mask)


def graph_edges(neighbours_NK: torch.Tensor, sectors_N: torch.Tensor, lists: Lists) -> torch.Tensor:
    """Return the graph of each day as (2, G, A, A) bool: correlation edges both ways, and those within a sector.

    Every asset, and every place without one, has an edge to itself in both. In ``neighbours_NK``, places within the
    day, -1 is none; in ``sectors_N`` not known.
    """
    num_days, size = lists.shape
    near = torch.zeros((num_days, size, size + 1), dtype=torch.bool, device=neighbours_NK.device)  # one place for none
    places_NK = torch.where(neighbours_NK < 0, size, neighbours_NK)
    near[lists.list_B[:, None], lists.place_B[:, None], places_NK] = True
    near_GAA = near[:, :, :size]
    sector_GA = lists.padded(sectors_N, -1)
    same_GAA = (sector_GA[:, :, None] == sector_GA[:, None, :]) & (sector_GA >= 0)[:, :, None]
    itself_AA = torch.eye(size, dtype=torch.bool, device=near.device)
    return torch.stack([near_GAA | near_GAA.transpose(1, 2), same_GAA]) | itself_AA


class Masked(nn.Module):
    """A forecaster with a head that reconstructs hidden features of the newest date, for pre-training its encoder."""

    def __init__(self, forecaster: Forecaster) -> None:
        super().__init__()
        self.forecaster = forecaster
        self.reconstruct = nn.Linear(forecaster.heads.in_features, forecaster.selection.norm.normalized_shape[0])

    def forward(self, batch: Any, hidden_NF: torch.Tensor) -> torch.Tensor:
        """Return the features (N, F) of the newest date."""
        features_NF: torch.Tensor = self.reconstruct(self.forecaster.encode(batch, hidden_NF))
        return features_NF


def pretraining_loss(model: Masked, batch: Any, *, share: float = 0.15) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed squared error of reconstructed features, and how many were hidden.

    A share of the features of the newest date is hidden, each by itself, and reconstructed from the rest. In training
    mode torch's global generator chooses them, as it does for dropout; in evaluation mode they are the same each time.
    """
    weight = model.reconstruct.weight
    newest_NF = on_device(batch.windows, weight)[:, -1]
    generator = None if model.training else torch.Generator().manual_seed(0)
    hidden_NF = (torch.rand(newest_NF.shape, generator=generator) < share).to(weight.device)
    errors_NF = (model(batch, hidden_NF) - newest_NF).square()
    return torch.where(hidden_NF, errors_NF, 0.0).sum(), hidden_NF.sum().to(weight.dtype).clamp_min(1e-12)


def on_device(values: Any, like: torch.Tensor) -> torch.Tensor:
    """Return an array or tensor as a tensor where ``like`` lies."""
    return torch.as_tensor(values).to(like.device)
