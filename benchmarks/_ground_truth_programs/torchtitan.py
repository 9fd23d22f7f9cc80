"""Rows TTN: torchtitan's Llama as of 2024-12 (commit 9dec370), sharded by FSDP2, in bf16 over fp32 weights.

Kept from there: complex rotary embeddings in fp32; keys and values repeated; checkpointing that saves the results of
every second matrix product and of the attention, or nothing of a layer; a loss over fp32 logits that is not compiled,
whose bf16 logits are dropped before the backward pass; gradients clipped by norm; ``expandable_segments``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn
from torch.library import custom_op
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from _ground_truth_programs._layers import RMSNorm
from _ground_truth_programs._pieces import compile_modules, fully_shard, make_optimizer
from _ground_truth_programs._spec import Spec
from _ground_truth_programs.torchtune import LLAMA_3_1_8B, Shape
from memfit.estimation import Program


@dataclass(frozen=True)
class Run:
    """What the rows vary."""

    shape: Shape = LLAMA_3_1_8B
    batch: int = 2
    seq_len: int = 8192
    head_dim: int | None = None
    query_norm: bool = False
    world_size: int = 8
    context_parallel: int = 1
    selective: bool = True
    checkpointing: bool = True
    compiled: bool = False
    float8: bool = False
    optimizer: str = "adamw"


@custom_op("ground_truth::flash_attention", mutates_args=())
def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention 2, as one operation that selective checkpointing can save the results of."""
    raise NotImplementedError("runs on fake tensors only")


@_flash.register_fake
def _flash_fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _flash_backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Source: mha_bwd in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (2.6): an fp32 sum of the
    gradient of the queries, its rows' sums, and the three gradients."""
    query, key, value, out, logsumexp = ctx.saved_tensors
    rows, accumulated = torch.empty_like(logsumexp), torch.empty_like(query, dtype=torch.float32)
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    del rows, accumulated, out, grad
    return grads


_flash.register_autograd(_flash_backward, setup_context=_save)


class _Float8Product(torch.autograd.Function):
    """A product of operands cast to 8 bits on the way; what is kept is the bf16 input (torchao.float8 of 2024-12)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        casts = _cast(x), _cast(weight)
        out = torch.mm(x, weight.t())
        del casts
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        casts = [_cast(grad), _cast(weight)]
        for_x = torch.mm(grad, weight)
        casts = [casts[0], _cast(x)]
        for_weight = torch.mm(grad.t(), x)
        del casts
        return for_x, for_weight


def _cast(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.uint8)


class Float8Linear(nn.Linear):
    """A linear layer of float8 training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Float8Product.apply(x.reshape(-1, x.size(-1)), self.weight)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], -1)


class Attention(nn.Module):
    """Grouped attention with complex rotary embeddings."""

    def __init__(self, run: Run, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        shape = run.shape
        self.head_dim = run.head_dim or shape.dim // shape.heads
        self.times = shape.heads // shape.kv_heads
        self.compiled = run.compiled and not (run.checkpointing and run.selective)
        self.wq = linear(shape.dim, shape.heads * self.head_dim, bias=False)
        self.wk = linear(shape.dim, shape.kv_heads * self.head_dim, bias=False)
        self.wv = linear(shape.dim, shape.kv_heads * self.head_dim, bias=False)
        self.wo = linear(shape.heads * self.head_dim, shape.dim, bias=False)
        self.q_norm = RMSNorm(self.head_dim) if run.query_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim) if run.query_norm else nn.Identity()

    def _turn(self, x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turns = frequencies[: x.size(1)].view(1, x.size(1), 1, -1)
        return torch.view_as_real(pairs * turns).flatten(3).type_as(x)

    def _repeat(self, x: torch.Tensor) -> torch.Tensor:
        if self.times == 1:
            return x
        batch, length, heads, dim = x.shape
        wide = x.unsqueeze(3).expand(batch, length, heads, self.times, dim)
        return wide.reshape(batch, length, heads * self.times, dim)

    def forward(self, x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (layer(x).view(batch, length, -1, self.head_dim) for layer in (self.wq, self.wk, self.wv))
        query, key = self.q_norm(query), self.k_norm(key)
        query, key = self._turn(query, frequencies), self._turn(key, frequencies)
        key, value = self._repeat(key), self._repeat(value)
        heads = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        causal = partial(functional.scaled_dot_product_attention, is_causal=True)
        out = causal(*heads) if self.compiled else _flash(*heads)[0]
        result: torch.Tensor = self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))
        return result


class FeedForward(nn.Module):
    """A gated layer."""

    def __init__(self, shape: Shape, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.w1 = linear(shape.dim, shape.hidden, bias=False)
        self.w2 = linear(shape.hidden, shape.dim, bias=False)
        self.w3 = linear(shape.dim, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


class Body(nn.Module):
    """A layer of the model."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        linear = Float8Linear if run.float8 else nn.Linear
        self.attention, self.feed_forward = Attention(run, linear), FeedForward(run.shape, linear)
        self.attention_norm, self.ffn_norm = RMSNorm(run.shape.dim), RMSNorm(run.shape.dim)

    def forward(self, x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), frequencies)
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Block(nn.Module):
    """A layer, checkpointed as asked."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.body, self.run = Body(run), run

    def forward(self, x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        if not self.run.checkpointing:
            plain: torch.Tensor = self.body(x, frequencies)
            return plain
        more: dict[str, Any] = {"context_fn": _selective_contexts} if self.run.selective else {}
        out: torch.Tensor = checkpoint(self.body, x, frequencies, use_reentrant=False, preserve_rng_state=False, **more)
        return out


def _selective_contexts() -> Any:
    """Contexts that save the attention's results and every second matrix product's, from the first on."""
    counts: dict[bool, int] = defaultdict(int)

    def policy(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operation is torch.ops.ground_truth.flash_attention.default
        if operation is torch.ops.aten.mm.default:
            counts[ctx.is_recompute] += 1
            saved = counts[ctx.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


class Transformer(nn.Module):
    """The model."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        shape = run.shape
        self.tok_embeddings = nn.Embedding(shape.vocab, shape.dim)
        half = (run.head_dim or shape.dim // shape.heads) // 2
        length = run.seq_len * run.context_parallel
        self.register_buffer("frequencies", torch.empty(length, half, dtype=torch.complex64))
        self.frequencies: torch.Tensor
        self.layers = nn.ModuleList(Block(run) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.dim)
        self.output = nn.Linear(shape.dim, shape.vocab, bias=False)
        if shape.tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.frequencies)
        out: torch.Tensor = self.output(self.norm(x))
        return out


def _take_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["tokens"])
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(0, 1))


def make(run: Run) -> Program:
    """The program of one rank."""
    model = Transformer(run)
    batch = {name: torch.zeros(run.batch, run.seq_len, dtype=torch.long) for name in ("tokens", "labels")}
    optimizer = make_optimizer(run.optimizer, model)
    program = Program(model, batch, _take_loss, optimizer, clip_grad_norm=True)
    if run.compiled and not (run.checkpointing and run.selective):
        program = compile_modules(program, [layer.body for layer in model.layers if isinstance(layer, Block)])
    if run.world_size > 1:
        program = fully_shard(program, run.world_size)
    else:
        program.autocast_dtype = torch.bfloat16
    return program


def _spec(assumed: str = "", metric: str = "reserved", **options: Any) -> Spec:
    run = Run(**options)
    large = 95.0 if run.world_size > 1 else None  # the H100 with 96 GB of HBM2e
    return Spec(
        partial(make, run), metric, "H100-80GB", run.world_size, assumed, expandable_segments=True, memory_gib=large
    )


_LONG: dict[str, Any] = {"batch": 1, "seq_len": 32768, "selective": False, "compiled": True, "float8": True}
_CONTEXT = "the buffers of the ring are left out: the peak is at the loss"
_LLAMA_1B = Shape(2048, 16, 32, 8, 8192, 128256, tied=True)
_QWEN: dict[str, Any] = {"shape": Shape(2048, 28, 16, 8, 6144, 151936, tied=True), "head_dim": 128, "query_norm": True}
_ONE: dict[str, Any] = {"metric": "allocated", "batch": 4, "seq_len": 2048, "world_size": 1, "compiled": True}
_BF16 = "weights are gathered in bf16"
_EAGER = "what selective checkpointing keeps is that of the eager step"
_GRAPH = "a traced graph is taken for compiled blocks under autocast"
SPECS: dict[str, Spec] = {
    "TTN-01": _spec(),
    "TTN-02": _spec(_EAGER, compiled=True),
    "TTN-03": _spec(f"{_EAGER}; {_BF16}", compiled=True, float8=True),
    "TTN-04": _spec(world_size=128),
    "TTN-06": _spec(f"{_EAGER}; {_BF16}", compiled=True, float8=True, world_size=128),
    "TTN-07": _spec(_BF16, **_LONG),
    "TTN-08": _spec(_CONTEXT, **_LONG, context_parallel=2),
    "TTN-10": _spec(_CONTEXT, **_LONG, context_parallel=8),
    "TTN-12": _spec(_GRAPH, **_ONE, shape=_LLAMA_1B, checkpointing=False),
    "TTN-13": _spec(_GRAPH, **_ONE, shape=_LLAMA_1B),
    "TTN-15": _spec(_GRAPH, **_ONE, **_QWEN, checkpointing=False),
    "TTN-16": _spec(_GRAPH, **_ONE, **_QWEN),
}
