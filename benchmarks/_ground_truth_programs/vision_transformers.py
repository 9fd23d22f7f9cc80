"""Rows AO and TM: timm's vision transformers, ConvNeXt and Swin by hand.

Rows AO are torchao's benchmark of low-bit optimizers (benchmarks/benchmark_low_bit_adam.py): the whole model compiled
under bf16 autocast, fp32 weights, 45 classes. Rows TM are a plain loop in fp32.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as functional
from torch import nn
from torch.utils.checkpoint import checkpoint

from _ground_truth_programs._layers import default_dtype
from _ground_truth_programs._pieces import compile_modules
from _ground_truth_programs._spec import Spec
from _ground_truth_programs.convolutions import by_timm, make_classifier
from memfit.estimation import Program


class Attention(nn.Module):
    """One projection for queries, keys and values; the fused kernel."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        joint = self.qkv(x).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(*joint.unbind(0))
        result: torch.Tensor = self.proj(out.transpose(1, 2).reshape(batch, length, dim))
        return result


class Mlp(nn.Module):
    """Two layers, or three with a gate (SwiGLU, packed)."""

    def __init__(self, dim: int, hidden: int, *, gated: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.gated = nn.Linear(dim, hidden), nn.Linear(hidden // (1 + gated), dim), gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            x = functional.silu(gate) * up
        else:
            x = functional.gelu(x)
        out: torch.Tensor = self.two(x)
        return out


class Layer(nn.Module):
    """A layer, its branches scaled in DINOv2's."""

    def __init__(self, dim: int, heads: int, hidden: int, *, dino: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.mlp = Attention(dim, heads), Mlp(dim, hidden, gated=dino)
        self.scale_1 = nn.Parameter(torch.ones(dim)) if dino else None
        self.scale_2 = nn.Parameter(torch.ones(dim)) if dino else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, branch, scale in (
            (self.norm_1, self.attn, self.scale_1),
            (self.norm_2, self.mlp, self.scale_2),
        ):
            out = branch(norm(x))
            x = x + (out if scale is None else out * scale)
        return x


class VisionTransformer(nn.Module):
    """timm's, for 224 x 224 images."""

    def __init__(
        self, dim: int, depth: int, heads: int, *, patch: int = 16, classes: int = 1000, dino_hidden: int = 0,
        checkpointing: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        tokens = (224 // patch) ** 2 + 1
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, dim)), nn.Parameter(torch.zeros(1, tokens, dim))
        hidden = dino_hidden or 4 * dim
        self.blocks = nn.ModuleList(Layer(dim, heads, hidden, dino=bool(dino_hidden)) for _ in range(depth))
        self.norm, self.head, self.checkpointing = nn.LayerNorm(dim), nn.Linear(dim, classes), checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False) if self.checkpointing else block(x)
        out: torch.Tensor = self.head(self.norm(x)[:, 0])
        return out


class ConvNextBlock(nn.Module):
    """Depthwise convolution, then channels last."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(dim, dim, 7, 1, 3, groups=dim), nn.LayerNorm(dim)
        self.mlp, self.gamma = Mlp(dim, 4 * dim), nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.mlp(self.norm(self.conv(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        result: torch.Tensor = out.mul(self.gamma.reshape(1, -1, 1, 1)) + x
        return result


class ChannelNorm(nn.LayerNorm):
    """Over the channels of images: permuted there and back, as timm's ``LayerNorm2d``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def make_convnext() -> nn.Module:
    """timm's ``convnext_base``."""
    sizes, layers = (128, 256, 512, 1024), [nn.Conv2d(3, 128, 4, 4), ChannelNorm(128)]
    for index, (dim, depth) in enumerate(zip(sizes, (3, 3, 27, 3), strict=True)):
        if index:
            layers += [ChannelNorm(sizes[index - 1]), nn.Conv2d(sizes[index - 1], dim, 2, 2)]
        layers += [ConvNextBlock(dim) for _ in range(depth)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(1024), nn.Linear(1024, 1000))


class SwinLayer(nn.Module):
    """Attention within windows of 7 x 7, every other time shifted, with a bias by relative position."""

    def __init__(self, dim: int, heads: int, side: int, *, shifted: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj, self.mlp = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), Mlp(dim, 4 * dim)
        self.table = nn.Parameter(torch.zeros(169, heads))
        self.register_buffer("index", torch.zeros(49 * 49, dtype=torch.long))
        self.index: torch.Tensor
        self.heads, self.shift = heads, 3 if shifted and side > 7 else 0
        windows = (side // 7) ** 2
        self.register_buffer("mask", torch.zeros(windows, 49, 49) if self.shift else None)
        self.mask: torch.Tensor | None

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        windows, length, dim = x.shape
        joint = self.qkv(x).reshape(windows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index].view(49, 49, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        if self.mask is not None:
            count = self.mask.shape[0]
            mask = self.mask.view(1, count, 1, 49, 49).expand(windows // count, -1, self.heads, -1, -1)
            bias = bias + mask.reshape(-1, self.heads, 49, 49)
        query, key, value = joint.unbind(0)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        result: torch.Tensor = self.proj(out.transpose(1, 2).reshape(windows, length, dim))
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, side, _, dim = x.shape
        normed = self.norm_1(x)
        if self.shift:
            normed = torch.roll(normed, (-self.shift, -self.shift), (1, 2))
        parts = normed.view(batch, side // 7, 7, side // 7, 7, dim).permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, dim)
        out = self._attend(parts).view(batch, side // 7, side // 7, 7, 7, dim)
        out = out.permute(0, 1, 3, 2, 4, 5).reshape(batch, side, side, dim)
        if self.shift:
            out = torch.roll(out, (self.shift, self.shift), (1, 2))
        x = (x + out).reshape(batch, -1, dim)
        x = x + self.mlp(self.norm_2(x))
        return x.reshape(batch, side, side, dim)


class Merge(nn.Module):
    """Four neighbours to one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, side, _, dim = x.shape
        x = x.reshape(batch, side // 2, 2, side // 2, 2, dim).permute(0, 1, 3, 4, 2, 5).flatten(3)
        out: torch.Tensor = self.reduction(self.norm(x))
        return out


class Swin(nn.Module):
    """timm's ``swin_base_patch4_window7_224``."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.first = nn.Conv2d(3, 128, 4, 4), nn.LayerNorm(128)
        layers: list[nn.Module] = []
        for index, depth in enumerate((2, 2, 18, 2)):
            dim, side = 128 << index, 56 >> index
            if index:
                layers.append(Merge(dim // 2))
            layers += [SwinLayer(dim, 4 << index, side, shifted=number % 2 == 1) for number in range(depth)]
        self.layers = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(1024), nn.Linear(1024, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.first(self.patches(x).permute(0, 2, 3, 1)))
        out: torch.Tensor = self.head(self.norm(x).mean((1, 2)))
        return out


def _make_low_bit(optimizer: str) -> Program:
    build = partial(VisionTransformer, 1280, 32, 16, patch=14, classes=45)
    program = make_classifier(build, 8, optimizer)
    program.autocast_dtype = torch.bfloat16
    return compile_modules(program, [program.model])


def _make_giant() -> Program:
    build = partial(
        VisionTransformer, 1536, 40, 24, patch=14, classes=45, dino_hidden=8192, checkpointing=True
    )  # fmt: skip
    with default_dtype(torch.bfloat16):
        return make_classifier(build, 32, "adamw_fused")


_ADA = "RTX 4070 Ti SUPER"
_SMALL, _BASE = partial(VisionTransformer, 384, 12, 6), partial(VisionTransformer, 768, 12, 12)
_LARGE = partial(VisionTransformer, 1024, 24, 16)
SPECS: dict[str, Spec] = {
    "AO-04": Spec(partial(_make_low_bit, "adamw8bit"), "allocated", _ADA, assumed="fp8 states take what int8 ones do"),
    "AO-06": Spec(_make_giant, "allocated", _ADA, assumed="224 x 224 pixels"),
    "TM-19": by_timm(make_convnext, 8),
    "TM-20": by_timm(make_convnext, 32),
    "TM-21": by_timm(make_convnext, 128),
    "TM-22": by_timm(_SMALL, 8),
    "TM-23": by_timm(_SMALL, 32),
    "TM-25": by_timm(_BASE, 8),
    "TM-26": by_timm(_BASE, 32),
    "TM-28": by_timm(_LARGE, 8),
    "TM-29": by_timm(_LARGE, 32),
    "TM-31": by_timm(Swin, 32),
    "TM-32": by_timm(Swin, 128),
}
