"""A ranker in the style of PatchTST: patches of the look-back as tokens of a small transformer encoder.

Every asset of a date passes through the same weights, alone; assets meet only in the loss. Unlike PatchTST, which
passes each channel through the encoder by itself, a patch holds all features of its dates: the features of a stock
speak about one another.

A tensor's suffix names its shape:

    B   assets of a batch           S   dates per patch
    L   dates of look-back          D   width of a token
    F   features                    P   patches, L / S
    H   attention heads             K   width of a head, D / H
    Z   horizons

Source: Y. Nie, N. H. Nguyen, P. Sinthong, J. Kalagnanam, A Time Series is Worth 64 Words, ICLR 2023 (PatchTST).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class EncoderBlock(nn.Module):
    """Attention between the patches of one asset, then a layer for each patch; both normalise first and add."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.norm_layer = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, z_BPD: torch.Tensor) -> torch.Tensor:
        split_BP3HK = self.query_key_value(self.norm_attention(z_BPD)).unflatten(-1, (3, self.num_heads, -1))
        q_BHPK, k_BHPK, v_BHPK = split_BP3HK.permute(2, 0, 3, 1, 4)
        mixed_BHPK = functional.scaled_dot_product_attention(q_BHPK, k_BHPK, v_BHPK)
        z_BPD = z_BPD + self.dropout(self.join(mixed_BHPK.transpose(1, 2).flatten(2)))
        wide_BPD2 = functional.gelu(self.widen(self.norm_layer(z_BPD)))
        out_BPD: torch.Tensor = z_BPD + self.dropout(self.narrow(wide_BPD2))
        return out_BPD


class PatchRanker(nn.Module):
    """A score for each asset and horizon: the higher, the better its return is expected to be against the others.

    All horizons share the encoder; each has a head of its own.
    """

    def __init__(  # noqa: PLR0913 - one each for the sizes that make an encoder
        self,
        *,
        num_features: int,
        lookback: int,
        patch_size: int,
        width: int,
        num_layers: int,
        num_heads: int,
        dropout: float,
        num_horizons: int,
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.embed = nn.Linear(patch_size * num_features, width)
        self.position_PD = nn.Parameter(0.02 * torch.randn(lookback // patch_size, width))
        self.blocks = nn.ModuleList(EncoderBlock(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.heads = nn.Linear(lookback // patch_size * width, num_horizons)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Scores (B, Z) of windows (B, L, F)."""
        patches_BPSF: torch.Tensor = windows.unflatten(1, (-1, self.patch_size))  # type: ignore[no-untyped-call]
        z_BPD = self.embed(patches_BPSF.flatten(2)) + self.position_PD
        for block in self.blocks:
            z_BPD = block(z_BPD)
        scores_BZ: torch.Tensor = self.heads(self.norm(z_BPD).flatten(1))
        return scores_BZ


def scaled(model: nn.Module, mean_F: torch.Tensor, sd_F: torch.Tensor) -> nn.Module:
    """Let a network see features less their mean, over their standard deviation, cut to five of these.

    Both are fixed, as they were found on the training dates; the network's checkpoints hold them.
    """
    model.register_buffer("scale_mean_F", mean_F)
    model.register_buffer("scale_sd_F", sd_F)
    model.register_forward_pre_hook(_scale, with_kwargs=True)
    return model


def _scale(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    windows = args[0] if args else kwargs["windows"]
    seen = ((windows - model.scale_mean_F) / model.scale_sd_F).clamp(-5.0, 5.0)
    return ((seen, *args[1:]), kwargs) if args else (args, kwargs | {"windows": seen})
