"""Rows AA: FSDP_QLoRA of 2024-03 over the Llama of transformers 4.37 (AnswerDotAI/fsdp_qlora, train.py).

Rows with CPU offload are not rebuilt: the copies from the host before each gathering are not emulated.

Kept from there: whole layers checkpointed by re-entrance within their FSDP unit; every adapter's two layers units of
their own; adapters in bf16, which is the storage dtype of the 4-bit weights, with dropout 0.1 before them; quantisation
statistics that are not sharded; logits made fp32, shifted by a copy, and held with the output until after the update.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn
from torch.utils.checkpoint import checkpoint

from _ground_truth_programs._layers import NF4Linear, RMSNorm, default_dtype, freeze, make_linear
from _ground_truth_programs._pieces import fully_shard_in_bf16, make_optimizer
from _ground_truth_programs._spec import Spec
from _ground_truth_programs.torchtune import LLAMA_2_7B, Shape
from memfit.estimation import Program

YI_34B = Shape(7168, 60, 56, 8, 20480, 64000)


@dataclass(frozen=True)
class Run:
    """What the rows vary."""

    shape: Shape = LLAMA_2_7B
    batch: int = 1
    seq_len: int = 2048
    nf4: bool = True
    sharded: bool = True
    rank: int = 64


class Adapted(nn.Module):
    """PEFT's adapter of one layer: dropout's result is kept, and the sum is made in place."""

    def __init__(self, run: Run, in_features: int, out_features: int) -> None:
        super().__init__()
        self.base = make_linear(in_features, out_features, nf4=run.nf4)
        self.dropout = nn.Dropout(0.1)
        self.lora_a = nn.Linear(in_features, run.rank, bias=False)
        self.lora_b = nn.Linear(run.rank, out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x)
        if isinstance(self.base, NF4Linear):
            result = result.clone()
        out: torch.Tensor = result + self.lora_b(self.lora_a(self.dropout(x))) * 0.25
        return out


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.size(-1) // 2
    return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)


class Attention(nn.Module):
    """Llama's, through ``scaled_dot_product_attention`` without a mask."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        shape = run.shape
        self.times, self.head_dim = shape.heads // shape.kv_heads, shape.dim // shape.heads
        self.q_proj = Adapted(run, shape.dim, shape.dim)
        self.k_proj = Adapted(run, shape.dim, shape.kv_heads * self.head_dim)
        self.v_proj = Adapted(run, shape.dim, shape.kv_heads * self.head_dim)
        self.o_proj = make_linear(shape.dim, shape.dim, nf4=run.nf4)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            layer(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _turn(query, cos, sin), _turn(key, cos, sin)
        if self.times > 1:
            key, value = (
                part[:, :, None].expand(-1, -1, self.times, -1, -1).reshape(batch, -1, length, self.head_dim)
                for part in (key, value)
            )
        heads = query.contiguous(), key.contiguous(), value.contiguous()
        out = functional.scaled_dot_product_attention(*heads, is_causal=True)
        result: torch.Tensor = self.o_proj(out.transpose(1, 2).contiguous().view(batch, length, -1))
        return result


class MLP(nn.Module):
    """Llama's."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.gate_proj = Adapted(run, run.shape.dim, run.shape.hidden)
        self.up_proj = Adapted(run, run.shape.dim, run.shape.hidden)
        self.down_proj = Adapted(run, run.shape.hidden, run.shape.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A layer that runs again within the backward pass."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(run), MLP(run)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(run.shape.dim), RMSNorm(run.shape.dim)

    def _plain(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self._plain, x, cos, sin, use_reentrant=True, preserve_rng_state=False)
        return out


class Llama(nn.Module):
    """The model; ``kept`` is what its last output holds."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        shape = run.shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.dim)
        self.layers = nn.ModuleList(Layer(run) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.dim)
        self.lm_head = nn.Linear(shape.dim, shape.vocab, bias=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(run.seq_len, shape.dim // shape.heads), persistent=False)
        self.cos: torch.Tensor
        self.sin: torch.Tensor
        self.kept: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens).requires_grad_(True)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        out: torch.Tensor = self.lm_head(self.norm(x)).float()
        return out

    def drop(self) -> None:
        """Lets go of the output."""
        self.kept = None


def _take_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["tokens"])
    object.__setattr__(model, "kept", logits)
    shifted = logits[..., :-1, :].contiguous()
    labels = batch["labels"][..., 1:].contiguous()
    return functional.cross_entropy(shifted.view(-1, shifted.size(-1)), labels.view(-1))


def make(run: Run) -> Program:
    """The program of one rank of two."""
    with default_dtype(torch.bfloat16):
        model = Llama(run)
    freeze(model, except_for="lora")
    batch = {name: torch.zeros(run.batch, run.seq_len, dtype=torch.long) for name in ("tokens", "labels")}
    optimizer = make_optimizer("adamw", model)
    optimizer.register_step_post_hook(lambda *_: model.drop())
    program = Program(model, batch, _take_loss, optimizer)
    if not run.sharded:
        return program
    units: list[nn.Module] = []
    for layer in model.layers:
        units += [part for name, part in layer.named_modules() if name.endswith(("lora_a", "lora_b"))]
        units.append(layer)
    return fully_shard_in_bf16(program, 2, units)


def _spec(gpu: str = "RTX3090", assumed: str = "", **options: Any) -> Spec:
    return Spec(partial(make, Run(**options)), "reserved", gpu, 2, assumed)


SPECS: dict[str, Spec] = {
    "AA-01": _spec(seq_len=512),
    "AA-02": _spec(),
    "AA-05": _spec(batch=4),
    "AA-06": _spec(batch=10),
    "AA-08": _spec(batch=6, nf4=False),
    "AA-09": _spec(batch=8, sharded=False),
    "AA-13": _spec(shape=YI_34B, batch=2),
}
