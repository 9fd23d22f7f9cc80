# mypy: disable-error-code="no-any-return, no-untyped-call"
"""Rows TT, TTN and AA: one Llama, with what each of the frameworks that ran does in its own way.

- torchtune as of 2024-11 (commit 1814feb17): norms and rotary embeddings in fp32; a rotary cache of 131072 positions;
  a block mask and ``flex_attention`` for packed data; logits made fp32 whole, or in eight chunks; the output tied to
  the embedding; gradients scaled in place.
- torchtitan as of 2024-12 (commit 9dec370), sharded by FSDP2, in bf16 over fp32 weights: complex rotary embeddings;
  checkpointing that saves the results of every second matrix product and of the attention, or nothing of a layer; a
  loss over fp32 logits that is not compiled; gradients clipped by norm; ``expandable_segments``.
- FSDP_QLoRA of 2024-03 over transformers 4.37 (AnswerDotAI/fsdp_qlora, train.py): whole layers checkpointed by
  re-entrance within their FSDP unit; every adapter's two layers units of their own, in bf16, with dropout before them;
  logits made fp32, shifted by a copy, and held with the output until after the update. Rows with CPU offload are not
  rebuilt: the copies from the host before each gathering are not emulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.library import custom_op
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from _ground_truth_programs._pieces import (
    LoRALinear,
    NF4Linear,
    RMSNorm,
    Spec,
    default_dtype,
    flex_attention,
    freeze,
    fully_shard,
    fully_shard_in_bf16,
    make_linear,
    make_optimizer,
)
from memfit.estimation import Program

Linear = Callable[[str, int, int], nn.Module]


@dataclass(frozen=True)
class Shape:
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
YI_34B = Shape(7168, 60, 56, 8, 20480, 64000)


@dataclass(frozen=True)
class Run:
    """The options of a run; each framework reads its own."""

    shape: Shape
    batch: int = 2
    seq_len: int = 4096
    packed: bool = True
    chunked_loss: bool = False
    checkpointing: bool = False
    selective: bool = True
    step_in_backward: bool = False
    offload: bool = False
    optimizer: str = "adamw_fused"
    lora_rank: int = 0
    lora_names: tuple[str, ...] = ("q", "v", "o", "gate", "up", "down")
    nf4: bool = False
    head_dim: int = 0
    query_norm: bool = False
    world_size: int = 1
    context_parallel: int = 1
    float8: bool = False
    sharded: bool = True

    @property
    def size(self) -> int:
        return self.head_dim or self.shape.dim // self.shape.heads


class MLP(nn.Module):
    def __init__(self, linear: Linear, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = linear("gate", shape.dim, shape.hidden), linear("up", shape.dim, shape.hidden)
        self.down = linear("down", shape.hidden, shape.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.silu(self.gate(x))
        return self.down(hidden * self.up(x))


class Attention(nn.Module):
    """Queries, keys and values, turned and repeated; ``attend`` is the framework's own kernel."""

    def __init__(self, run: Run, linear: Linear, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        shape, self.size, self.attend = run.shape, run.size, attend
        self.q = linear("q", shape.dim, shape.heads * self.size)
        self.k = linear("k", shape.dim, shape.kv_heads * self.size)
        self.v = linear("v", shape.dim, shape.kv_heads * self.size)
        self.o = linear("o", shape.heads * self.size, shape.dim)
        self.norms = nn.ModuleList(RMSNorm(self.size) for _ in range(2 * run.query_norm))
        self.times = shape.heads // shape.kv_heads

    def _heads(self, x: torch.Tensor, turn: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        query, key, value = (layer(x).view(*x.shape[:2], -1, self.size) for layer in (self.q, self.k, self.v))
        if self.norms:
            query, key = self.norms[0](query), self.norms[1](key)
        query, key, value = turn(query).transpose(1, 2), turn(key).transpose(1, 2), value.transpose(1, 2)
        if self.times > 1:
            key, value = (part.unsqueeze(2).expand(-1, -1, self.times, -1, -1).flatten(1, 2) for part in (key, value))
        return query, key, value

    def forward(self, x: torch.Tensor, turn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        out = self.attend(*self._heads(x, turn))
        return self.o(out.transpose(1, 2).contiguous().view(*x.shape[:2], -1))


class Layer(nn.Module):
    def __init__(self, run: Run, linear: Linear, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(run, linear, attend), MLP(linear, run.shape)
        self.norm_1, self.norm_2 = RMSNorm(run.shape.dim), RMSNorm(run.shape.dim)

    def forward(self, x: torch.Tensor, turn: Any, how: dict[str, Any] | None = None) -> torch.Tensor:
        if how is not None:  # within the layer: what shards it gathers once
            return checkpoint(self.forward, x, turn, **how)
        x = x + self.attention(self.norm_1(x), turn)
        return x + self.mlp(self.norm_2(x))


class Llama(nn.Module):
    """The model up to its last norm; ``turn`` gives the rotary embedding of a batch."""

    def __init__(self, run: Run, linear: Linear, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.run, shape = run, run.shape
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.layers = nn.ModuleList(Layer(run, linear, attend) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.dim)
        self.output = nn.Linear(shape.dim, shape.vocab, bias=False)
        if shape.tied:
            self.output.weight = self.embedding.weight

    def body(self, x: torch.Tensor, turn: Callable[[torch.Tensor], torch.Tensor], **how: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, turn, how if self.run.checkpointing else None)
        return self.norm(x)


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _batch(run: Run, *names: str) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(run.batch, run.seq_len, dtype=torch.long) for name in ("tokens", "labels", *names)}


# --- torchtune


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
        for one in (self.back, self.stashed, self.kept, self.away):
            one.clear()


class Decoder(Llama):
    def __init__(self, run: Run) -> None:
        super().__init__(run, self._linear, flex_attention if run.packed else _causal)
        cache = torch.empty(run.shape.max_seq_len, run.size // 2, 2, dtype=torch.float32)
        self.register_buffer("cache", cache, persistent=False)
        self.cache: torch.Tensor
        self.offload = OffloadActivations() if run.offload else None

    def _linear(self, name: str, in_features: int, out_features: int) -> nn.Module:
        base = make_linear(in_features, out_features, nf4=self.run.nf4)
        if self.run.lora_rank and name in self.run.lora_names:
            return LoRALinear(base, in_features, out_features, self.run.lora_rank)
        return base

    def _turn(self, positions: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        """Rotary embeddings of neighbouring pairs, from a cache in fp32."""
        cache = self.cache[: x.size(1)] if positions is None else self.cache[positions]
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        cache = cache.view(-1, pairs.size(1), 1, pairs.size(3), 2)
        (first, second), (cos, sin) = pairs.unbind(-1), cache.unbind(-1)
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1)
        return turned.flatten(3).type_as(x)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """What the output layer gives, whose input is not offloaded."""
        with nullcontext() if self.offload is None else saved_tensors_hooks(lambda one: one, lambda one: one):
            return self.output(x)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor | list[torch.Tensor]:
        x = self.body(self.embedding(tokens), partial(self._turn, positions), use_reentrant=False)
        if self.run.chunked_loss:
            return [self._logits(piece) for piece in x.chunk(8, dim=1)]
        return self._logits(x).float()


def _torchtune_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with model.offload or nullcontext():
        logits = model(batch["tokens"], batch.get("positions"))
    labels = torch.hstack((batch["labels"][..., 1:], batch["ignored"]))
    if isinstance(logits, list):
        total = torch.zeros(())
        for piece, wanted in zip(logits, labels.chunk(8, dim=1), strict=True):
            total = total + _upcast_cross_entropy(piece.reshape(-1, piece.size(-1)), wanted.reshape(-1))
        return total
    logits = logits.reshape(-1, logits.size(-1))
    return functional.cross_entropy(logits, labels.reshape(-1)) * labels.numel()


def _upcast_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float(), labels, reduction="sum")


def _scale_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 1.0


def torchtune(run: Run) -> Program:
    with default_dtype(torch.bfloat16):
        model = Decoder(run)
    if run.lora_rank:
        freeze(model, except_for="lora")
    optimizer = make_optimizer(run.optimizer, model, in_backward=run.step_in_backward)
    if not run.step_in_backward:
        optimizer.register_step_pre_hook(lambda *_: _scale_gradients(model))
    batch = _batch(run, *(["positions"] if run.packed else []))
    batch["ignored"] = torch.zeros(run.batch, 1, dtype=torch.long)
    program = Program(model, batch, _torchtune_loss, optimizer)
    if (offload := model.offload) is not None:
        optimizer.register_step_post_hook(lambda *_: offload.forget())
    return program


# --- torchtitan


@custom_op("ground_truth::flash_attention", mutates_args=())
def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention 2, as one operation that selective checkpointing can save the results of."""
    raise NotImplementedError("runs on fake tensors only")


@_flash.register_fake
def _flash_fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


def _flash_backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Source: mha_bwd in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (2.6): an fp32 sum of the
    gradient of the queries, its rows' sums, and the three gradients."""
    query, key, value, out, logsumexp = ctx.saved_tensors
    rows, accumulated = torch.empty_like(logsumexp), torch.empty_like(query, dtype=torch.float32)
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    del rows, accumulated, out, grad
    return grads


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


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
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Float8Product.apply(x.reshape(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


def _selective_contexts() -> Any:
    """Contexts that save the attention's results and every second matrix product's, from the first on."""
    counts: dict[bool, int] = defaultdict(int)

    def policy(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operation is torch.ops.ground_truth.flash_attention.default
        if operation is torch.ops.aten.mm.default:
            counts[ctx.is_recompute] += 1
            saved = counts[ctx.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Transformer(Llama):
    def __init__(self, run: Run) -> None:
        kind = Float8Linear if run.float8 else nn.Linear
        flash = run.checkpointing and run.selective
        super().__init__(
            run,
            lambda _, inputs, outputs: kind(inputs, outputs, bias=False),
            (lambda *qkv: _flash(*qkv)[0]) if flash else _causal,
        )
        length = run.seq_len * run.context_parallel
        self.register_buffer("frequencies", torch.empty(length, run.size // 2, dtype=torch.complex64))
        self.frequencies: torch.Tensor

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turns = self.frequencies[: x.size(1)].view(1, x.size(1), 1, -1)
        return torch.view_as_real(pairs * turns).flatten(3).type_as(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        more = {"context_fn": _selective_contexts} if self.run.selective else {}
        how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return self.output(self.body(self.embedding(tokens), self._turn, **how, **more))


def _torchtitan_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["tokens"])
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(0, 1))


def torchtitan(run: Run) -> Program:
    model = Transformer(run)
    program = Program(model, _batch(run), _torchtitan_loss, make_optimizer("adamw", model), clip_grad_norm=True)
    if run.world_size > 1:
        return fully_shard(program, run.world_size)
    program.autocast_dtype = torch.bfloat16
    return program


# --- FSDP_QLoRA over transformers


class Adapted(nn.Module):
    """PEFT's adapter of one layer: dropout's result is kept, and the sum is made in place."""

    def __init__(self, run: Run, in_features: int, out_features: int) -> None:
        super().__init__()
        self.base = make_linear(in_features, out_features, nf4=run.nf4)
        self.dropout = nn.Dropout(0.1)
        self.lora_a = nn.Linear(in_features, run.lora_rank, bias=False)
        self.lora_b = nn.Linear(run.lora_rank, out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        if isinstance(self.base, NF4Linear):
            result = result.clone()
        return result + self.lora_b(self.lora_a(self.dropout(x))) * 0.25


class Adapters(Llama):
    """transformers' model with adapters; ``kept`` is what its last output holds."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, self._linear, self._attend)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(run.seq_len, 1, run.size), persistent=False)
        self.cos: torch.Tensor
        self.sin: torch.Tensor
        self.kept: torch.Tensor | None = None

    def _linear(self, name: str, in_features: int, out_features: int) -> nn.Module:
        if name == "o":
            return make_linear(in_features, out_features, nf4=self.run.nf4)
        return Adapted(self.run, in_features, out_features)

    @staticmethod
    def _attend(*heads: torch.Tensor) -> torch.Tensor:
        query, key, value = (one.contiguous() for one in heads)
        return _causal(query, key, value)

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        half = x.size(-1) // 2
        return (x * self.cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * self.sin)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).requires_grad_(True)
        return self.output(self.body(x, self._turn, use_reentrant=True, preserve_rng_state=False)).float()


def _adapters_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["tokens"])
    object.__setattr__(model, "kept", logits)
    shifted, labels = logits[..., :-1, :].contiguous(), batch["labels"][..., 1:].contiguous()
    return functional.cross_entropy(shifted.view(-1, shifted.size(-1)), labels.view(-1))


def adapters(run: Run) -> Program:
    with default_dtype(torch.bfloat16):
        model = Adapters(run)
    freeze(model, except_for="lora")
    optimizer = make_optimizer("adamw", model)
    optimizer.register_step_post_hook(lambda *_: setattr(model, "kept", None))
    program = Program(model, _batch(run), _adapters_loss, optimizer)
    units: list[nn.Module] = []
    for layer in model.layers:
        units += [part for name, part in layer.named_modules() if name.endswith(("lora_a", "lora_b"))]
        units.append(layer)
    return fully_shard_in_bf16(program, 2, units) if run.sharded else program


# --- the rows


def _tune(
    assumed: str = "", gpu: str = "A100-80GB", metric: str = "active", *, compiled: bool = False, **how: Any
) -> Spec:
    run = Run(how.pop("shape", LLAMA_3_2_3B), **how)
    return Spec(partial(torchtune, run), metric, gpu, assumed=assumed, compiled=compiled)


def _titan(assumed: str = "", metric: str = "reserved", *, compiled: bool = False, **how: Any) -> Spec:
    given = {"shape": LLAMA_3_1_8B, "seq_len": 8192, "world_size": 8, "checkpointing": True} | how
    run = Run(**given)  # type: ignore[arg-type]
    large = 95.0 if run.world_size > 1 else None  # the H100 with 96 GB of HBM2e
    return Spec(
        partial(torchtitan, run),
        metric,
        "H100-80GB",
        run.world_size,
        assumed,
        True,
        memory_gib=large,
        compiled=compiled,
    )


def _qlora(**how: Any) -> Spec:
    given = {
        "shape": LLAMA_2_7B,
        "batch": 1,
        "seq_len": 2048,
        "nf4": True,
        "lora_rank": 64,
        "checkpointing": True,
    } | how
    return Spec(partial(adapters, Run(**given)), "reserved", "RTX3090", 2)  # type: ignore[arg-type]


_FUSED = "the optimizer is fused: an unfused one would hold a fifth copy of the weights, more than was measured"
_8_BIT = "torchao's AdamW8bit, which the table's text names, with the stable torch of its date"
_512, _BF16 = "the longest batch has 512 tokens", "weights are gathered in bf16"
_CONTEXT = "the buffers of the ring are left out: the peak is at the loss"
_ALL: dict[str, Any] = {"compiled": True, "chunked_loss": True, "checkpointing": True}
_8B: dict[str, Any] = {"shape": LLAMA_3_1_8B, "seq_len": 2048, **_ALL}
_7B: dict[str, Any] = {
    "metric": "reserved",
    "shape": LLAMA_2_7B,
    "seq_len": 512,
    "packed": False,
    "checkpointing": True,
}
_LONG: dict[str, Any] = {"batch": 1, "seq_len": 32768, "selective": False, "compiled": True, "float8": True}
_QWEN: dict[str, Any] = {"shape": Shape(2048, 28, 16, 8, 6144, 151936, tied=True), "head_dim": 128, "query_norm": True}
_ONE: dict[str, Any] = {"metric": "allocated", "batch": 4, "seq_len": 2048, "world_size": 1, "compiled": True}
_LLAMA_1B = Shape(2048, 16, 32, 8, 8192, 128256, tied=True)
SPECS: dict[str, Spec] = {
    "TT-01": _tune(f"{_FUSED}; {_512}", seq_len=512, packed=False),
    "TT-02": _tune(_FUSED),
    "TT-03": _tune(_FUSED, compiled=True),
    "TT-04": _tune(_FUSED, compiled=True, chunked_loss=True),
    "TT-05": _tune(_FUSED, **_ALL),
    "TT-06": _tune(_FUSED, **_ALL, step_in_backward=True),
    "TT-07": _tune(_FUSED, **_ALL, step_in_backward=True, offload=True),
    "TT-08": _tune(_8_BIT, **_ALL, step_in_backward=True, offload=True, optimizer="torchao_adamw8bit"),
    "TT-09": _tune("", **_ALL, offload=True, lora_rank=64),
    "TT-10": _tune("", **_ALL, offload=True, lora_rank=64, nf4=True),
    "TT-11": _tune("default options", "RTX4090", **_8B, step_in_backward=True, optimizer="paged"),
    "TT-13": _tune("default options", "RTX4090", **_8B, lora_rank=8),
    "TT-14": _tune("default options", "RTX4090", **_8B, lora_rank=8, nf4=True),
    "TT-15": _tune(_512, **_7B, lora_rank=8, lora_names=("q", "v")),
    "TT-16": _tune(_512, **_7B, lora_rank=64, lora_names=("q", "k", "v", "o", "gate", "up", "down")),
    "TTN-01": _titan(),
    "TTN-02": _titan(compiled=True),
    "TTN-03": _titan(_BF16, compiled=True, float8=True),
    "TTN-04": _titan(world_size=128),
    "TTN-06": _titan(_BF16, compiled=True, float8=True, world_size=128),
    "TTN-07": _titan(_BF16, **_LONG),
    "TTN-08": _titan(_CONTEXT, **_LONG, context_parallel=2),
    "TTN-10": _titan(_CONTEXT, **_LONG, context_parallel=8),
    "TTN-12": _titan(**_ONE, shape=_LLAMA_1B, checkpointing=False),
    "TTN-13": _titan(**_ONE, shape=_LLAMA_1B),
    "TTN-15": _titan(**_ONE, **_QWEN, checkpointing=False),
    "TTN-16": _titan(**_ONE, **_QWEN),
    "AA-01": _qlora(seq_len=512),
    "AA-02": _qlora(),
    "AA-05": _qlora(batch=4),
    "AA-06": _qlora(batch=10),
    "AA-08": _qlora(batch=6, nf4=False),
    "AA-09": _qlora(batch=8, sharded=False),
    "AA-13": _qlora(shape=YI_34B, batch=2),
}
