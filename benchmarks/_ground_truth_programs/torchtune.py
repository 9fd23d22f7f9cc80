"""Rows TT: the decoder and the single-device recipes of torchtune as of 2024-11 (commit 1814feb17), and its options.

Kept from there: norms and rotary embeddings in fp32; a rotary cache of 131072 positions; keys and values repeated for
grouped heads; a block mask and ``flex_attention`` for packed data, at which a compiled layer breaks into four graphs;
logits made fp32 whole, or in eight chunks; the output tied to the embedding; gradients scaled in place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from _ground_truth_programs._layers import (
    LoRALinear,
    RMSNorm,
    UpcastCrossEntropy,
    default_dtype,
    flex_attention,
    freeze,
    make_linear,
)
from _ground_truth_programs._pieces import compile_modules, make_optimizer
from _ground_truth_programs._spec import Spec
from memfit.estimation import Program


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    tied: bool = False
    max_seq_len: int = 131072


LLAMA_3_2_3B = Shape(3072, 28, 24, 8, 8192, 128256, tied=True)
LLAMA_3_1_8B = Shape(4096, 32, 32, 8, 14336, 128256)
LLAMA_2_7B = Shape(4096, 32, 32, 32, 11008, 32000, max_seq_len=4096)


@dataclass(frozen=True)
class Recipe:
    """The options of a recipe; the defaults are those of the first row of the table that packs."""

    shape: Shape = LLAMA_3_2_3B
    batch: int = 2
    seq_len: int = 4096
    packed: bool = True
    compiled: bool = False
    chunked_loss: bool = False
    checkpointing: bool = False
    step_in_backward: bool = False
    offload: bool = False
    optimizer: str = "adamw_fused"
    lora_rank: int = 0
    lora_names: tuple[str, ...] = ("q", "v", "o", "gate", "up", "down")
    nf4: bool = False


class Rope(nn.Module):
    """Rotary embeddings of neighbouring pairs, from a cache in fp32."""

    def __init__(self, dim: int, max_seq_len: int) -> None:
        super().__init__()
        self.register_buffer("cache", torch.empty(max_seq_len, dim // 2, 2, dtype=torch.float32), persistent=False)
        self.cache: torch.Tensor

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        cache = self.cache[: x.size(1)] if positions is None else self.cache[positions]
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        cache = cache.view(-1, pairs.size(1), 1, pairs.size(3), 2)
        turned = torch.stack(
            [
                pairs[..., 0] * cache[..., 0] - pairs[..., 1] * cache[..., 1],
                pairs[..., 1] * cache[..., 0] + pairs[..., 0] * cache[..., 1],
            ],
            -1,
        )
        return turned.flatten(3).type_as(x)


class Projection(nn.Module):
    """Queries, keys and values, turned and repeated."""

    def __init__(self, linear: Callable[[str, int, int], nn.Module], shape: Shape, rope: Rope) -> None:
        super().__init__()
        self.shape, self.head_dim = shape, shape.dim // shape.heads
        self.q = linear("q", shape.dim, shape.dim)
        self.k = linear("k", shape.dim, shape.kv_heads * self.head_dim)
        self.v = linear("v", shape.dim, shape.kv_heads * self.head_dim)
        self.rope = rope

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch, length, _ = x.shape
        query = self.rope(self.q(x).view(batch, length, -1, self.head_dim), positions).transpose(1, 2)
        key, value = self.k(x), self.v(x)
        key = self.rope(key.view(batch, length, -1, self.head_dim), positions).transpose(1, 2)
        value = value.view(batch, length, -1, self.head_dim).transpose(1, 2)
        if self.shape.heads != self.shape.kv_heads:
            times = self.shape.heads // self.shape.kv_heads
            expanded = (batch, self.shape.kv_heads, times, length, self.head_dim)
            key = key.unsqueeze(2).expand(expanded).flatten(1, 2)
            value = value.unsqueeze(2).expand(expanded).flatten(1, 2)
        return query, key, value


class Output(nn.Module):
    """The output of the attention, heads side by side, projected."""

    def __init__(self, linear: Callable[[str, int, int], nn.Module], shape: Shape) -> None:
        super().__init__()
        self.o = linear("o", shape.dim, shape.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined: torch.Tensor = self.o(x.transpose(1, 2).contiguous().view(x.size(0), x.size(2), -1))
        return joined


class Rest(nn.Module):
    """From the first residual sum to the end of the layer."""

    def __init__(self, linear: Callable[[str, int, int], nn.Module], shape: Shape) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.dim)
        self.gate = linear("gate", shape.dim, shape.hidden)
        self.down = linear("down", shape.hidden, shape.dim)
        self.up = linear("up", shape.dim, shape.hidden)

    def forward(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = attended + x
        normed = self.norm(x)
        hidden = functional.silu(self.gate(normed))
        out: torch.Tensor = x + self.down(hidden * self.up(normed))
        return out


class Layer(nn.Module):
    """A layer, in the four pieces that compilation makes of it around ``flex_attention``."""

    def __init__(self, linear: Callable[[str, int, int], nn.Module], shape: Shape, rope: Rope, *, flex: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.dim)
        self.projection = Projection(linear, shape, rope)
        self.output = Output(linear, shape)
        self.rest = Rest(linear, shape)
        self.flex = flex

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        query, key, value = self.projection(self.norm(x), positions)
        if self.flex:
            attended = flex_attention(query, key, value)
        else:
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        del query, key, value
        result: torch.Tensor = self.rest(self.output(attended), x)
        return result


class OffloadActivations(saved_tensors_hooks):
    """Activations wait in pinned host memory: the last five stay until copied, and in the backward pass those of the
    node before are dropped when the next one fetches its own (torchtune/training/_activation_offloading.py)."""

    def __init__(self, *, stash: int = 5, smallest: int = 1024) -> None:
        self.away: dict[int, tuple[torch.Size, torch.dtype]] = {}
        self.kept: dict[int, torch.Tensor] = {}
        self.stashed: dict[int, torch.Tensor] = {}
        self.back: list[torch.Tensor] = []
        self.number = 0
        self.stash, self.smallest = stash, smallest
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> int:
        self.number += 1
        if tensor.nbytes < self.smallest or isinstance(tensor, nn.Parameter | nn.Buffer):
            self.kept[self.number] = tensor
        else:
            for number in [n for n in self.stashed if n <= self.number - self.stash]:
                del self.stashed[number]
            self.away[self.number] = tensor.shape, tensor.dtype
            self.stashed[self.number] = tensor
        return self.number

    def _unpack(self, number: int) -> torch.Tensor:
        self.back.clear()
        if number in self.kept:
            return self.kept.pop(number)
        shape, dtype = self.away.pop(number)
        found = self.stashed.get(number)
        tensor = torch.empty(shape, dtype=dtype) if found is None else found
        self.stashed.clear()
        self.back.append(tensor)
        return tensor

    def forget(self) -> None:
        """Drops what the last node had fetched."""
        self.back.clear()
        self.stashed.clear()
        self.kept.clear()
        self.away.clear()


class _Kept(saved_tensors_hooks):
    """Undoes an outer hook for the output layer, which is not offloaded."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor, lambda tensor: tensor)


class Decoder(nn.Module):
    """torchtune's decoder with its loss."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        shape = recipe.shape
        self.recipe = recipe
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        rope = Rope(shape.dim // shape.heads, shape.max_seq_len)
        linear = partial(self._linear, recipe)
        self.layers = nn.ModuleList(Layer(linear, shape, rope, flex=recipe.packed) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.dim)
        self.output = None if shape.tied else nn.Linear(shape.dim, shape.vocab, bias=False)
        self.chunk_loss = UpcastCrossEntropy()
        self.offload = OffloadActivations() if recipe.offload else None

    @staticmethod
    def _linear(recipe: Recipe, name: str, in_features: int, out_features: int) -> nn.Module:
        base = make_linear(in_features, out_features, nf4=recipe.nf4)
        if recipe.lora_rank and name in recipe.lora_names:
            return LoRALinear(base, in_features, out_features, recipe.lora_rank)
        return base

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.embedding.weight if self.output is None else self.output.weight
        with _Kept() if self.offload is not None else nullcontext():
            return functional.linear(x, weight)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor | list[torch.Tensor]:
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.recipe.checkpointing:
                x = checkpoint(layer, x, positions, use_reentrant=False)
            else:
                x = layer(x, positions)
        x = self.norm(x)
        if self.recipe.chunked_loss:
            return [self._logits(piece) for piece in x.chunk(8, dim=1)]
        return self._logits(x).float()


def take_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a recipe, times its tokens."""
    assert isinstance(model, Decoder)
    with model.offload or nullcontext():
        logits = model(batch["tokens"], batch.get("positions"))
    labels = torch.hstack((batch["labels"][..., 1:], batch["ignored"]))
    if isinstance(logits, list):
        total = torch.zeros(())
        for piece, wanted in zip(logits, labels.chunk(8, dim=1), strict=True):
            total = total + model.chunk_loss(piece.reshape(-1, piece.size(-1)), wanted.reshape(-1))
        return total
    logits = logits.reshape(-1, logits.size(-1))
    return functional.cross_entropy(logits, labels.reshape(-1)) * labels.numel()


def _make_batch(recipe: Recipe) -> dict[str, torch.Tensor]:
    size = (recipe.batch, recipe.seq_len)
    batch = {name: torch.zeros(size, dtype=torch.long) for name in ("tokens", "labels")}
    batch["ignored"] = torch.zeros(recipe.batch, 1, dtype=torch.long)
    if recipe.packed:
        batch["positions"] = torch.zeros(size, dtype=torch.long)
    return batch


def make(recipe: Recipe) -> Program:
    """The program of a recipe."""
    with default_dtype(torch.bfloat16):
        model = Decoder(recipe)
    if recipe.lora_rank:
        freeze(model, except_for="lora")
    optimizer = make_optimizer(recipe.optimizer, model, in_backward=recipe.step_in_backward)
    if not recipe.step_in_backward:
        optimizer.register_step_pre_hook(lambda *_: _scale_gradients(model))
    program = Program(model, _make_batch(recipe), take_loss, optimizer)
    if (offload := model.offload) is not None:
        optimizer.register_step_post_hook(lambda *_: offload.forget())
    if recipe.compiled:
        pieces: list[nn.Module] = []
        for layer in model.layers:
            assert isinstance(layer, Layer)
            pieces += [layer.norm, layer.projection, layer.output, layer.rest] if recipe.packed else [layer]
        if recipe.chunked_loss:  # the whole loss is handed to torch.compile too, but what it returns is not kept
            pieces.append(model.chunk_loss)
        program = compile_modules(program, pieces)
    return program


def _scale_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 1.0


def _spec(assumed: str = "", gpu: str = "A100-80GB", metric: str = "active", **options: Any) -> Spec:
    return Spec(partial(make, Recipe(**options)), metric, gpu, assumed=assumed)


_FUSED = "the optimizer is fused: an unfused one would hold a fifth copy of the weights, more than was measured"
_8_BIT = "torchao's AdamW8bit, which the table's text names, with the stable torch of its date"
_ALL: dict[str, Any] = {"compiled": True, "chunked_loss": True, "checkpointing": True}
_8B: dict[str, Any] = {"shape": LLAMA_3_1_8B, "seq_len": 2048, **_ALL}
SPECS: dict[str, Spec] = {
    "TT-01": _spec(_FUSED + "; the longest batch has 512 tokens", seq_len=512, packed=False),
    "TT-02": _spec(_FUSED),
    "TT-03": _spec(_FUSED, compiled=True),
    "TT-04": _spec(_FUSED, compiled=True, chunked_loss=True),
    "TT-05": _spec(_FUSED, **_ALL),
    "TT-06": _spec(_FUSED, **_ALL, step_in_backward=True),
    "TT-07": _spec(_FUSED, **_ALL, step_in_backward=True, offload=True),
    "TT-08": _spec(_8_BIT, **_ALL, step_in_backward=True, offload=True, optimizer="torchao_adamw8bit"),
    "TT-09": _spec("", **_ALL, offload=True, lora_rank=64),
    "TT-10": _spec("", **_ALL, offload=True, lora_rank=64, nf4=True),
    "TT-11": _spec("default options", "RTX4090", **_8B, step_in_backward=True, optimizer="paged"),
    "TT-13": _spec("default options", "RTX4090", **_8B, lora_rank=8),
    "TT-14": _spec("default options", "RTX4090", **_8B, lora_rank=8, nf4=True),
    "TT-15": _spec(
        "the longest batch has 512 tokens",
        metric="reserved",
        shape=LLAMA_2_7B,
        seq_len=512,
        packed=False,
        checkpointing=True,
        lora_rank=8,
        lora_names=("q", "v"),
    ),
    "TT-16": _spec(
        "the longest batch has 512 tokens",
        metric="reserved",
        shape=LLAMA_2_7B,
        seq_len=512,
        packed=False,
        checkpointing=True,
        lora_rank=64,
        lora_names=("q", "k", "v", "o", "gate", "up", "down"),
    ),
}
