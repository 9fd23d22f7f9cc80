# mypy: disable-error-code="no-any-return, no-untyped-call"
"""Rows LG and LGT: LitGPT's model and scripts as of 2024-05 (pre-training) and 2024-10 (fine-tuning).

Kept from there: queries, keys and values in one projection, permuted, split, and repeated for grouped heads; halves
rotated and joined by ``cat``; ``bf16-true``, out of which Fabric gives fp32 logits; when fine-tuning, logits and
losses in pieces of 128 tokens, sequences cut at 512, and an fp32 rotary cache; when pre-training, a bf16 one and a
loss at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from _ground_truth_programs._pieces import (
    RMSNorm,
    Spec,
    default_dtype,
    distribute,
    freeze,
    fully_shard_in_bf16,
    make_linear,
    make_optimizer,
)
from memfit.estimation import Program


@dataclass(frozen=True)
class Config:
    """The part of LitGPT's configuration that decides on memory, and the options of a run."""

    dim: int
    layers: int
    heads: int
    groups: int
    hidden: int
    vocab: int
    head_size: int = 0
    rotary: float = 1.0
    bias: bool = False
    head_bias: bool = False
    norm: str = "rms"
    mlp: str = "llama"
    parallel_residual: bool = False
    shared_norm: bool = False
    tied: bool = False
    block_size: int = 2048
    batch: int = 1
    seq_len: int = 512
    lora_rank: int = 0
    lora_names: str = "q v"
    dropout: float = 0.05
    nf4: bool = False
    pretraining: bool = False
    strategy: str = "none"


#: bitsandbytes 0.42, which its ``pyproject.toml`` asks for: autograd/_functions.py, ``MatMul4Bit``.
_BNB = {"double": False, "keeps_input": True}


class LoRA(nn.Module):
    """LitGPT's adapter of one linear layer: two products with transposed weights, scaled after."""

    def __init__(self, config: Config, base: nn.Module, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear, self.dropout = base, nn.Dropout(config.dropout)
        self.lora_a = nn.Parameter(torch.empty(config.lora_rank, in_features))
        self.lora_b = nn.Parameter(torch.empty(out_features, config.lora_rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.linear(x)
        adapter = self.dropout(x) @ self.lora_a.transpose(0, 1) @ self.lora_b.transpose(0, 1)
        return result + adapter * 2.0


class LoRAQKV(nn.Module):
    """Its adapter of the joint projection: one product down, a convolution up, zeros in the place of what has none."""

    def __init__(self, config: Config, base: nn.Module, sizes: tuple[int, int, int]) -> None:
        super().__init__()
        self.linear, self.dropout, self.out_features = base, nn.Dropout(config.dropout), sum(sizes)
        enabled = [name in config.lora_names.split() for name in ("q", "k", "v")]
        self.sizes = [size for size, use in zip(sizes, enabled, strict=True) if use]
        self.grouped = config.heads != config.groups
        self.lora_a = nn.Parameter(torch.empty(config.lora_rank * len(self.sizes), config.dim))
        self.lora_b = nn.Parameter(torch.empty(sum(self.sizes), config.lora_rank))
        where = torch.zeros(sum(self.sizes), dtype=torch.long)
        self.register_buffer("where", where, persistent=False)
        self.where: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.linear(x)
        down = functional.linear(self.dropout(x), self.lora_a).transpose(-2, -1)
        weight = self.lora_b.unsqueeze(-1)
        if self.grouped:
            pieces = zip(down.chunk(len(self.sizes), dim=1), torch.split(weight, self.sizes), strict=True)
            up = torch.cat([functional.conv1d(piece, part) for piece, part in pieces], dim=1)
        else:
            up = functional.conv1d(down, weight, groups=len(self.sizes))
        up = up.transpose(-2, -1)
        if len(self.sizes) < 3:
            padded = up.new_zeros(*up.shape[:-1], self.out_features)
            up = padded.index_copy_(-1, self.where, up)
        return result + up * 2.0


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.size(-1) // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (turned * sin)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: Config, linear: Callable[[str, int, int], nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.size = config.head_size or config.dim // config.heads
        wide = (config.heads + 2 * config.groups) * self.size
        base = make_linear(config.dim, wide, nf4=config.nf4, bias=config.bias, **_BNB)
        sizes = config.heads * self.size, config.groups * self.size, config.groups * self.size
        adapted = config.lora_rank and any(name in config.lora_names.split() for name in "qkv")
        self.attn = LoRAQKV(config, base, sizes) if adapted else base
        self.proj = linear("proj", config.heads * self.size, config.dim)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        config, (batch, length, _) = self.config, x.shape
        times = config.heads // config.groups
        joint = self.attn(x).view(batch, length, config.groups, times + 2, self.size).permute(0, 2, 3, 1, 4)
        query, key, value = joint.split((times, 1, 1), dim=2)
        if times > 1:
            key = key.expand(batch, config.groups, times, length, self.size)
            value = value.expand(batch, config.groups, times, length, self.size)
        query, key, value = (part.reshape(batch, -1, length, self.size) for part in (query, key, value))
        turned = int(config.rotary * self.size)
        query = torch.cat((_turn(query[..., :turned], cos, sin), query[..., turned:]), dim=-1)
        key = torch.cat((_turn(key[..., :turned], cos, sin), key[..., turned:]), dim=-1)
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, config: Config, linear: Callable[[str, int, int], nn.Module]) -> None:
        super().__init__()
        self.fc_1 = linear("mlp", config.dim, config.hidden)
        self.fc_2 = None if config.mlp == "neox" else linear("mlp", config.dim, config.hidden)
        self.proj = linear("mlp", config.hidden, config.dim)
        self.gelu = config.mlp == "gemma"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fc_2 is None:
            return self.proj(functional.gelu(self.fc_1(x)))
        gate, up = self.fc_1(x), self.fc_2(x)
        gate = functional.gelu(gate, approximate="tanh") if self.gelu else functional.silu(gate)
        return self.proj(gate * up)


def _norm(config: Config) -> nn.Module:
    if config.norm == "layer":
        return nn.LayerNorm(config.dim)
    return RMSNorm(config.dim, unit_offset=config.mlp == "gemma", squares_by_product=True)


class Block(nn.Module):
    """A layer, with the residual sums in sequence or at once."""

    def __init__(self, config: Config, linear: Callable[[str, int, int], nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.norm_1 = _norm(config)
        self.attn = Attention(config, linear)
        self.norm_2 = None if config.shared_norm else _norm(config)
        self.mlp = MLP(config, linear)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(x)
        attended = self.attn(normed, cos, sin)
        if self.config.parallel_residual:
            normed = normed if self.norm_2 is None else self.norm_2(x)
            return attended + x + self.mlp(normed)
        assert self.norm_2 is not None
        x = attended + x
        return self.mlp(self.norm_2(x)) + x


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        linear = partial(self._linear, config)
        self.wte = nn.Embedding(config.vocab, config.dim)
        # With 4 bits the embedding is changed for bitsandbytes' StableEmbedding after the optimizer was made: the old
        # one lives on in its list, and the new one, which nobody froze, gets gradients.
        self.old_wte = nn.Embedding(config.vocab, config.dim) if config.nf4 else None
        self.wte_norm = nn.LayerNorm(config.dim) if config.nf4 else nn.Identity()
        self.h = nn.ModuleList(Block(config, linear) for _ in range(config.layers))
        self.ln_f = _norm(config)
        self.lm_head = linear("head", config.dim, config.vocab)
        if config.tied and not config.lora_rank:
            assert isinstance(self.lm_head, nn.Linear)
            self.lm_head.weight = self.wte.weight
        turned = int(config.rotary * (config.head_size or config.dim // config.heads))
        length, dtype = (config.block_size, torch.bfloat16) if config.pretraining else (config.seq_len, torch.float32)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(length, turned, dtype=dtype), persistent=False)
        self.cos: torch.Tensor
        self.sin: torch.Tensor

    @staticmethod
    def _linear(config: Config, name: str, in_features: int, out_features: int) -> nn.Module:
        bias = config.head_bias if name == "head" else config.bias
        base = make_linear(in_features, out_features, nf4=config.nf4, bias=bias, **_BNB)
        if config.lora_rank and name in config.lora_names.split():
            return LoRA(config, base, in_features, out_features)
        return base

    def forward(self, tokens: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        x = self.wte_norm(self.wte(tokens))
        if self.config.mlp == "gemma":
            x = x * self.config.dim**0.5
        length = tokens.size(1)
        for block in self.h:
            x = block(x, self.cos[:length], self.sin[:length])
        x = self.ln_f(x)
        if self.config.pretraining:
            return self.lm_head(x)
        return [self.lm_head(piece) for piece in x.split(128, dim=1)]


def _take_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss over logits that Fabric has made fp32, as it does with all that leaves a ``bf16-true`` module."""
    logits, labels = model(batch["tokens"]), batch["labels"]
    if not isinstance(logits, list):
        logits = logits.float()
        return functional.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))
    logits = [piece.float() for piece in logits]
    logits[-1] = logits[-1][..., :-1, :]
    labels = labels[..., 1:]
    pieces = [piece.reshape(-1, piece.size(-1)) for piece in logits]
    wanted = [piece.reshape(-1) for piece in torch.split(labels, 128, dim=1)]
    losses = [
        functional.cross_entropy(piece, label, reduction="none") for piece, label in zip(pieces, wanted, strict=True)
    ]
    loss = torch.cat(losses).sum() / (labels != -100).sum()
    model.loss = loss  # the script's variable: the graph of the last batch lives until that of this one is there
    return loss


def make(config: Config) -> Program:
    with default_dtype(torch.bfloat16):
        model = GPT(config)
    if config.lora_rank:
        freeze(model, except_for="lora")
    optimizer = make_optimizer("paged" if config.nf4 else "adamw_fused" if config.pretraining else "adamw", model)
    if config.nf4:
        model.wte.requires_grad_(True)
        model.wte_norm.requires_grad_(True)
    batch = {name: torch.zeros(config.batch, config.seq_len, dtype=torch.long) for name in ("tokens", "labels")}
    program = Program(model, batch, _take_loss, optimizer, num_microbatches=2)
    if config.strategy == "ddp":
        return distribute(program, 8)
    if config.strategy == "fsdp":
        return fully_shard_in_bf16(program, 8)
    return program


_FALCON = Config(4544, 32, 71, 1, 18176, 65024, norm="layer", mlp="neox", parallel_residual=True, shared_norm=True)
_ALL = "q k v proj mlp head"
_GEMMA_2B = Config(2048, 18, 8, 1, 16384, 256000, mlp="gemma", lora_names=_ALL, dropout=0.1, lora_rank=8)
_GEMMA_7B = replace(_GEMMA_2B, dim=3072, layers=28, heads=16, groups=16, head_size=256, hidden=24576)
_LLAMA_2 = Config(4096, 32, 32, 32, 11008, 32000)
_LLAMA_3 = Config(4096, 32, 32, 8, 14336, 128256)
_LLAMA_1B = Config(2048, 16, 32, 8, 8192, 128256)
_LLAMA_3B = Config(3072, 28, 24, 8, 8192, 128256)
_MISTRAL = Config(4096, 32, 32, 8, 14336, 32000)
_PHI_2 = Config(
    2560, 32, 32, 32, 10240, 51200, rotary=0.4, bias=True, head_bias=True, norm="layer", mlp="neox",
    parallel_residual=True, shared_norm=True, lora_names=_ALL, lora_rank=8,
)  # fmt: skip
_PHI_3 = Config(3072, 32, 32, 32, 8192, 32064, lora_names=_ALL, lora_rank=8)
_STABLE = Config(
    4096, 16, 32, 32, 16384, 50688, rotary=0.25, bias=True, norm="layer", mlp="neox", parallel_residual=True
)  # fmt: skip
_TINY = Config(2048, 22, 32, 4, 5632, 32000)
_PRETRAIN = replace(_TINY, batch=4, seq_len=2048, pretraining=True)


def _spec(config: Config, *, world_size: int = 1, **options: Any) -> Spec:
    config = replace(config, **options)
    if config.pretraining:
        return Spec(partial(make, config), "allocated", "A100-40GB", world_size)
    return Spec(partial(make, config), "allocated", "A10G", assumed="the longest batch has 512 tokens")


_LORA: dict[str, Any] = {"lora_rank": 32}
_QLORA: dict[str, Any] = {"lora_rank": 32, "nf4": True}
SPECS: dict[str, Spec] = {
    "LG-01": _spec(_FALCON, **_LORA),
    "LG-02": _spec(_FALCON, **_QLORA),
    "LG-03": _spec(_GEMMA_2B, batch=2),
    "LG-04": _spec(_GEMMA_2B, batch=2, lora_rank=16, nf4=True),
    "LG-05": _spec(_GEMMA_7B, lora_rank=16, nf4=True),
    "LG-07": _spec(_LLAMA_2, batch=2, **_LORA),
    "LG-10": _spec(_LLAMA_3, batch=2, **_QLORA),
    "LG-11": _spec(_LLAMA_1B, **_LORA),
    "LG-12": _spec(_LLAMA_1B, batch=2, **_QLORA),
    "LG-13": _spec(_LLAMA_3B, **_LORA),
    "LG-14": _spec(_LLAMA_3B, batch=2, **_QLORA),
    "LG-16": _spec(_MISTRAL, batch=2, **_QLORA),
    "LG-17": _spec(_PHI_2, batch=4),
    "LG-18": _spec(_PHI_3, batch=4),
    "LG-19": _spec(_STABLE, **_LORA),
    "LG-20": _spec(_STABLE, **_QLORA),
    "LG-21": _spec(_TINY, batch=8, lora_names=_ALL, **_LORA),
    "LG-23": _spec(_TINY, batch=4),
    "LGT-01": _spec(_PRETRAIN),
    "LGT-02": _spec(_PRETRAIN, strategy="ddp", world_size=8),
    "LGT-03": _spec(_PRETRAIN, strategy="fsdp", world_size=8),
}
