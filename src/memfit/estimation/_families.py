"""What a model is made of, read from its ``config.json``: modules, widths and what autograd keeps. Loads no torch.

The counts of parameters follow ``modeling_*.py`` of transformers 5 and are exact for the families named in `FAMILIES`;
any other model is taken for a decoder like Llama, and its anatomy says that it is not exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from memfit.errors import ConfigError
from memfit.estimation._model_config import TOWERS, ModelConfig, count_tower

#: In which dtype a kept tensor is: that of matrix products; that of the stream of hidden states (fp32 under autocast);
#: fp32 always; the 16-bit original beside such an fp32 copy; one byte (masks); or nothing, as it is kept elsewhere.
Kind = Literal["compute", "stream", "fp32", "narrow", "byte", "shared"]


class Linear(NamedTuple):
    """A matrix product with weights: ``copies`` of them (experts), of which a token runs through ``used``."""

    name: str
    inputs: int
    outputs: int
    has_bias: bool = False
    copies: int = 1
    used: int = 1

    @property
    def num_weights(self) -> int:
        return self.inputs * self.outputs * self.copies

    @property
    def num_parameters(self) -> int:
        return self.num_weights + self.outputs * self.has_bias * self.copies


class Kept(NamedTuple):
    """A tensor that autograd keeps, ``width`` numbers a token.

    Attributes:
        tensor: What it is.
        width: Numbers a token.
        kind: Its dtype.
        feeds: The matrix products it is the input of: it is kept for the gradients of their weights alone.
        for_weight: Whether it is kept for the gradient of a weight alone, so not where weights are frozen.
        is_fusible: Whether a compiler makes it again from others in the backward pass: no input of a product
            (ban_recompute_materialized_backward in torch/_functorch/config.py).
    """

    tensor: str
    width: int
    kind: Kind = "compute"
    feeds: tuple[str, ...] = ()
    for_weight: bool = False
    is_fusible: bool = False


class Attention(NamedTuple):
    """Attention of ``heads`` queries a token over keys of the same sequence, or of the source's where it is crossed.

    Attributes:
        heads: Heads of queries.
        kv_heads: Heads of keys and values.
        head_dim: Numbers of a head.
        has_dropout: Whether the scores are dropped out.
        is_crossed: Whether keys are the source's.
        is_eager: Whether there is no fused kernel for it.
        upcasts: Whether its softmax is taken in fp32.
        is_fused_rotary: Whether queries, keys and values are one matrix product and then rotated: the values are a
            view that keeps the whole product beside the rotated copies.
        is_biased: Whether a bias of positions is added to the scores, in a copy of each block's own
            (create_position_bias_mask in integrations/sdpa_attention.py).
        is_capped: Whether the scores go through a hyperbolic tangent, which no fused kernel does.
        is_disentangled: Whether scores of positions are made beside those of tokens (DeBERTa).
    """

    heads: int
    kv_heads: int
    head_dim: int
    has_dropout: bool = False
    is_crossed: bool = False
    is_eager: bool = False
    upcasts: bool = True
    is_fused_rotary: bool = False
    is_biased: bool = False
    is_capped: bool = False
    is_disentangled: bool = False


@dataclass(frozen=True)
class Block:
    """One of the blocks that a model repeats.

    Attributes:
        width: Of the hidden states.
        linears: Its matrix products.
        attentions: One, or two where it also looks at the source.
        kept: What autograd keeps beside attention's own tensors.
        num_norm_parameters: Of its norms and whatever else is no matrix product.
        inner_width: Numbers a token of the gradients inside of its MLP, the widest of its temporaries.
    """

    width: int
    linears: tuple[Linear, ...]
    attentions: tuple[Attention, ...]
    kept: tuple[Kept, ...]
    num_norm_parameters: int
    inner_width: int

    @property
    def num_parameters(self) -> int:
        return sum(linear.num_parameters for linear in self.linears) + self.num_norm_parameters


class Stack(NamedTuple):
    """``num_blocks`` blocks that run over the source's tokens, or over the target's."""

    block: Block
    num_blocks: int
    is_target: bool = False


@dataclass(frozen=True)
class Anatomy:
    """What a model is made of.

    Attributes:
        family: The name in `FAMILIES`, or ``generic``.
        stacks: Its blocks.
        tables: Of each embedding the rows and the width.
        head: What makes the logits from the last hidden states; None for none.
        is_tied: Whether the head's weight is the first table.
        num_other_parameters: Norms, projections and whatever else stands outside of blocks.
        has_token_logits: Whether there are logits for each token, not one row a sample.
        caps_logits: Whether the logits go through a hyperbolic tangent.
        upcasts_logits: Whether they are upcast to fp32 before the loss (ForCausalLMLoss in loss/loss_utils.py).
        tokens: Tokens of a sample where the model decides on them (images); None for the setup's.
        is_exact: Whether the count of parameters is that of transformers.
        has_towers: Whether it also sees or hears, with blocks of which the parameters alone are counted, roughly.
    """

    family: str
    stacks: tuple[Stack, ...]
    tables: tuple[tuple[int, int], ...]
    head: Linear | None
    is_tied: bool
    num_other_parameters: int
    has_token_logits: bool = True
    caps_logits: bool = False
    upcasts_logits: bool = True
    tokens: int | None = None
    is_exact: bool = True
    has_towers: bool = False

    @property
    def num_table_parameters(self) -> int:
        return sum(rows * width for rows, width in self.tables)

    @property
    def num_head_parameters(self) -> int:
        """Of the head, without a weight that is the table's."""
        if self.head is None:
            return 0
        return self.head.num_parameters - (self.head.num_weights if self.is_tied else 0)

    @property
    def num_parameters(self) -> int:
        blocks = sum(stack.block.num_parameters * stack.num_blocks for stack in self.stacks)
        return blocks + self.num_table_parameters + self.num_head_parameters + self.num_other_parameters


def _rms_norm(width: int, flavour: str = "llama") -> tuple[Kept, ...]:
    """``x.float()`` for its square, and the normalised x that the weight's gradient needs (modeling_llama.py).

    T5's multiplies the 16-bit x itself, so keeps it too; Gemma's multiplies its weight in fp32.
    """
    upcast = Kept("input of a norm in fp32", width, "fp32")
    original = (Kept("input of a norm", width, "narrow", is_fusible=True),) if flavour == "t5" else ()
    kind: Kind = "fp32" if flavour == "gemma" else "stream"
    return (upcast, *original, Kept("normalised", width, kind, for_weight=True, is_fusible=True))


def _layer_norm(width: int) -> tuple[Kept, ...]:
    """Its input, with mean and inverse deviation in fp32 (native_layer_norm)."""
    return Kept("input of a norm", width, "stream"), Kept("statistics of a norm", 2, "fp32")


def _activation(name: str, width: int) -> tuple[Kept, ...]:
    """What an activation keeps beside its result (transformers/activations.py): most their input, relu nothing."""
    known = {"relu": 0, "gelu_new": 4, "gelu_fast": 6, "quick_gelu": 2, "relu2": 2, "gelu_10": 2}
    return tuple(Kept(f"inside {name}", width, is_fusible=number > 0) for number in range(known.get(name, 1)))


def _gated_mlp(width: int, inner: int, act: str, *, bias: bool = False, experts: tuple[int, int] = (1, 1)) -> Block:
    """``down(act(gate(x)) * up(x))``: keeps x, what act keeps, both factors and their product."""
    count, used = experts
    linears = tuple(
        Linear(name, *shape, bias, count, used)
        for name, shape in (("gate_proj", (width, inner)), ("up_proj", (width, inner)), ("down_proj", (inner, width)))
    )
    factors = (*_activation(act, inner), Kept("activated gate", inner, is_fusible=True), Kept("up", inner))
    kept = (
        Kept("input of the MLP", width, "compute", ("gate_proj", "up_proj")),
        *factors,
        Kept("gated", inner, "compute", ("down_proj",)),
    )
    kept = tuple(one._replace(width=one.width * used) for one in kept)
    return Block(width, linears, (), kept, 0, 2 * inner * used)


def _plain_mlp(width: int, inner: int, act: str, names: tuple[str, str], *, bias: bool = True) -> Block:
    """``down(act(up(x)))``."""
    linears = (Linear(names[0], width, inner, bias), Linear(names[1], inner, width, bias))
    kept = (
        Kept("input of the MLP", width, "compute", (names[0],)),
        *_activation(act, inner),
        Kept("activated", inner, "compute", (names[1],)),
    )
    return Block(width, linears, (), kept, 0, inner)


def _attention(
    width: int,
    attention: Attention,
    names: tuple[str, ...],
    *,
    bias: tuple[bool, bool] = (False, False),
    source: int | None = None,
) -> Block:
    """Projections of queries, keys and values, apart (four names) or in one (two names), and of the result."""
    queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    if len(names) == 2:
        into: tuple[Linear, ...] = (Linear(names[0], width, queries + 2 * keys, bias[0]),)
    else:
        over = source or width
        into = tuple(
            Linear(name, inputs, outputs, bias[0])
            for name, inputs, outputs in zip(names, (width, over, over), (queries, keys, keys), strict=False)
        )
    out = Linear(names[-1], queries, width, bias[1])
    read = names[:1] if attention.is_crossed else names[:-1]
    kept = (
        Kept("input of attention", width, "compute", read),
        Kept("result of attention", queries, "shared", (names[-1],)),
    )
    return Block(width, (*into, out), (attention,), kept, 0, queries + 2 * keys)


def _join(parts: tuple[Block, ...], norms: tuple[Kept, ...], num_norm_parameters: int, masks: int = 0) -> Block:
    """One block of several, with its norms and ``masks`` dropout masks as wide as the hidden states."""
    dropped = tuple(Kept("dropout mask", parts[0].width, "byte") for _ in range(masks))
    return Block(
        width=parts[0].width,
        linears=tuple(linear for part in parts for linear in part.linears),
        attentions=tuple(attention for part in parts for attention in part.attentions),
        kept=(*norms, *(kept for part in parts for kept in part.kept), *dropped),
        num_norm_parameters=num_norm_parameters + sum(part.num_norm_parameters for part in parts),
        inner_width=max(part.inner_width for part in parts),
    )


_APART = ("q_proj", "k_proj", "v_proj", "o_proj")


def _gated_decoder(config: ModelConfig, family: str) -> Anatomy:
    """Llama, Mistral, Qwen, Gemma, Phi-3, Mixtral, StableLM and their like."""
    width, heads, dim = config.hidden, config.heads, config.head_dim
    if family in ("gemma", "gemma2", "gemma3") or family == "qwen3":
        dim = config.size("head_dim", default=128 if family == "qwen3" else 256)
    kv_heads = config.size("num_key_value_heads", default=heads, least=1)
    is_layer_norm = family == "stablelm"
    flavour = "gemma" if family.startswith("gemma") else "llama"
    has_qk_norm = family in ("qwen3", "qwen3_moe", "gemma3")
    num_norms = 4 if family in ("gemma2", "gemma3") else 2
    bias = bool(config.get("attention_bias", "use_qkv_bias", default=False))
    biases = {"qwen2": (True, False), "qwen2_moe": (True, False), "stablelm": (bias, False)}.get(family, (bias, bias))
    is_fused = family == "phi3"
    caps = family == "gemma2" and "attn_logit_softcapping" in config.entries
    is_capped = bool(config.get("attn_logit_softcapping", default=0.0 if caps else 50.0)) and family == "gemma2"
    drops = config.drops("attention_dropout")
    attention = Attention(
        heads, kv_heads, dim, drops, is_eager=is_capped, is_capped=is_capped, is_fused_rotary=is_fused
    )
    attend = _attention(width, attention, ("qkv_proj", "o_proj") if is_fused else _APART, bias=biases)
    norms = tuple(
        k for _ in range(num_norms) for k in (_layer_norm(width) if is_layer_norm else _rms_norm(width, flavour))
    )
    if has_qk_norm:
        norms += _rms_norm(heads * dim, flavour) + _rms_norm(kv_heads * dim, flavour)
    num_norm = (2 if is_layer_norm else 1) * width
    mlp = _gated_experts(config, family, width)
    if is_fused:
        joined = Linear("gate_up_proj", width, 2 * config.inner)
        first = Kept("input of the MLP", width, "compute", ("gate_up_proj",))
        mlp = replace(mlp, linears=(joined, mlp.linears[2]), kept=(first, *mlp.kept[1:]))
    masks = 2 if config.drops("resid_pdrop", "hidden_dropout") else 0
    block = _join((attend, mlp), norms, num_norms * num_norm + 2 * dim * has_qk_norm, masks)
    tied = bool(config.get("tie_word_embeddings", default=family.startswith("gemma")))
    vocabulary = config.size("vocab_size")
    head = Linear("lm_head", width, vocabulary)
    stacks: tuple[Stack, ...] = (Stack(block, config.layers),)
    decoders = config.size("decoder_layers", default=0) if family == "generic" else 0
    if decoders:  # BART, Whisper and their like
        cross = _attention(width, attention._replace(is_crossed=True), _APART, bias=biases)
        stacks += (Stack(_join((attend, cross, mlp), norms, 3 * num_norm, masks), decoders, is_target=True),)
    caps_logits = bool(config.get("final_logit_softcapping", default=30.0 if family == "gemma2" else 0.0))
    exact = family in FAMILIES
    tables = ((vocabulary, width),)
    return Anatomy(family, stacks, tables, head, tied, num_norm, caps_logits=caps_logits, is_exact=exact)


def _state_space(config: ModelConfig, family: str) -> Anatomy:
    """Mamba without its fused kernels: the states of every time step are kept, in fp32 (modeling_mamba.py)."""
    width, states = config.hidden, config.size("state_size", least=1)
    inner, bias = config.size("expand", default=2) * width, bool(config.get("use_bias", default=False))
    rank = -(-width // 16) if config.get("time_step_rank") == "auto" else config.size("time_step_rank", least=1)
    linears = (
        Linear("in_proj", width, 2 * inner, bias),
        Linear("x_proj", inner, rank + 2 * states),
        Linear("dt_proj", rank, inner, True),
        Linear("out_proj", inner, width, bias),
    )
    kept = (
        *_rms_norm(width),
        Kept("input", width, "compute", ("in_proj",)),
        Kept("gates", 4 * inner),
        Kept("states", 4 * inner * states, "fp32"),
    )
    each = config.size("conv_kernel", default=4) + bool(config.get("use_conv_bias", default=True)) + states + 1
    block = Block(width, linears, (), kept, width + inner * each, 8 * inner * states)
    vocabulary, tied = config.size("vocab_size"), bool(config.get("tie_word_embeddings", default=True))
    head = Linear("lm_head", width, vocabulary)
    return Anatomy(family, (Stack(block, config.layers),), ((vocabulary, width),), head, tied, width)


def _gated_experts(config: ModelConfig, family: str, width: int) -> Block:
    act = config.text("hidden_activation", "hidden_act", default="silu")
    count = config.size("num_local_experts", "num_experts", "n_routed_experts", default=1)
    if count <= 1:
        return _gated_mlp(width, config.inner, act, bias=bool(config.get("mlp_bias", default=False)))
    used = config.size("num_experts_per_tok", "moe_top_k", default=2)
    inner = config.size("moe_intermediate_size", default=config.inner)
    experts = _gated_mlp(width, inner, act, experts=(count, used))
    router = Block(width, (Linear("gate", width, count),), (), (Kept("scores of experts", count, "fp32"),), 0, 0)
    if family != "qwen2_moe":
        number = config.size("n_shared_experts", default=0) if family == "generic" else 0
        both = (experts, router) if not number else (experts, router, _gated_mlp(width, number * inner, act))
        return _join(both, (), 0)
    shared = _gated_mlp(width, config.size("shared_expert_intermediate_size", default=inner), act)
    return _join((experts, router, shared), (), width)  # the shared expert's gate has one output


class _Plain(NamedTuple):
    """How a decoder with LayerNorm and an MLP without a gate differs from GPT-2."""

    names: tuple[str, ...]
    mlp: tuple[str, str]
    act: str
    bias: bool = True
    num_norms: int = 2
    is_tied: bool = True
    is_rotary: bool = True
    has_head_bias: bool = False


_PLAIN = {
    "gpt2": _Plain(("c_attn", "c_proj"), ("c_fc", "mlp.c_proj"), "gelu_new", is_rotary=False),
    "gpt_neox": _Plain(("query_key_value", "dense"), ("dense_h_to_4h", "dense_4h_to_h"), "gelu", is_tied=False),
    "falcon": _Plain(("query_key_value", "dense"), ("dense_h_to_4h", "dense_4h_to_h"), "gelu", bias=False),
    "phi": _Plain((*_APART[:3], "dense"), ("fc1", "fc2"), "gelu_new", num_norms=1, is_tied=False, has_head_bias=True),
    "opt": _Plain((*_APART[:3], "out_proj"), ("fc1", "fc2"), "relu", is_rotary=False),
    "bloom": _Plain(("query_key_value", "dense"), ("dense_h_to_4h", "dense_4h_to_h"), "gelu", is_rotary=False),
}


def _plain_decoder(config: ModelConfig, family: str) -> Anatomy:
    """GPT-2, GPT-NeoX, Falcon, Phi, OPT and BLOOM."""
    plain, width, heads = _PLAIN[family], config.hidden, config.heads
    bias = bool(config.get("attention_bias", "bias", "enable_bias", default=plain.bias))
    kv_heads = config.size("num_key_value_heads", default=heads, least=1) if family == "phi" else heads
    num_norms = plain.num_norms
    if family == "falcon":
        is_new = bool(config.get("new_decoder_architecture", default=False))
        one = 1 if config.get("multi_query", default=True) else heads
        kv_heads = config.size("num_kv_heads", default=heads) if is_new else one
        both = config.size("num_ln_in_parallel_attn", default=2) if is_new else 1
        num_norms = both if is_new or config.get("parallel_attn", default=True) else 2
    drops = config.drops("attention_dropout", "attn_pdrop", default=0.1 if family == "gpt2" else 0.0)
    is_fused = plain.is_rotary and len(plain.names) == 2
    attention = Attention(
        heads, kv_heads, config.split_width, drops, upcasts=family == "bloom", is_fused_rotary=is_fused
    )
    attend = _attention(width, attention, plain.names, bias=(bias, bias))
    act = config.text("activation_function", "hidden_act", "activation", default=plain.act)
    mlp_bias = bias if family in ("falcon", "opt") else True
    inner = config.inner
    if family in ("bloom", "falcon"):
        inner = 4 * width if family == "bloom" else config.size("ffn_hidden_size", default=4 * width)
    mlp = _plain_mlp(width, inner, act, plain.mlp, bias=mlp_bias)
    default = 0.1 if family in ("gpt2", "opt") else 0.0
    drops_stream = config.drops("resid_pdrop", "hidden_dropout", "dropout", default=default)
    norms = tuple(kept for _ in range(num_norms) for kept in _layer_norm(width))
    block = _join((attend, mlp), norms, num_norms * 2 * width, 2 * drops_stream)
    vocabulary = config.size("vocab_size")
    narrow = config.size("word_embed_proj_dim", default=width) if family == "opt" else width
    tables = [(vocabulary, narrow)]
    if family in ("gpt2", "opt"):
        offset = 2 if family == "opt" else 0
        tables.append((config.size("max_position_embeddings", "n_positions", default=1024) + offset, width))
    others = 2 * width * (2 if family == "bloom" else 1)
    if family == "opt":
        has_norm = config.get("do_layer_norm_before", default=True) and not config.get("_remove_final_layer_norm")
        others = 2 * width * bool(has_norm) + (2 * width * narrow if narrow != width else 0)
    head = Linear("lm_head", narrow, vocabulary, plain.has_head_bias)
    tied = bool(config.get("tie_word_embeddings", default=plain.is_tied))
    return Anatomy(family, (Stack(block, config.layers),), tuple(tables), head, tied, others)


def _t5(config: ModelConfig, family: str) -> Anatomy:
    """T5 and mT5, of version 1 and 1.1. Their scores take a learned bias of positions."""
    width, heads = config.hidden, config.heads
    dim, inner = config.size("d_kv", default=64), config.size("d_ff", default=2048)
    words = str(config.get("feed_forward_proj", default="gated-gelu" if family == "mt5" else "relu")).split("-")
    act = {"gelu": "gelu_new"}.get(words[-1], words[-1]) if words[0] == "gated" else words[-1]
    drops = config.drops("dropout_rate", default=0.1)
    attention = Attention(heads, heads, dim, drops, upcasts=False, is_biased=True)
    names = ("q", "k", "v", "o")
    attend = _attention(width, attention, names)
    cross = _attention(width, attention._replace(is_crossed=True, is_biased=False), names)
    if words[0] == "gated":
        mlp = _gated_mlp(width, inner, act)
        mlp = replace(mlp, linears=tuple(map(_renamed, mlp.linears)), kept=tuple(_refed(kept) for kept in mlp.kept))
    else:
        mlp = _plain_mlp(width, inner, act, ("wi", "wo"), bias=False)
    if drops:
        mlp = replace(mlp, kept=(*mlp.kept, Kept("dropout mask", inner, "byte")))
        if words[0] != "gated" and act == "relu":  # relu keeps its result, wo the dropped one
            mlp = replace(mlp, kept=(*mlp.kept, Kept("result of relu", inner)))
    norm = _rms_norm(width, "t5")
    encoder = _join((attend, mlp), norm * 2, 2 * width, 2 * drops)
    decoder = _join((attend, cross, mlp), norm * 3, 3 * width, 3 * drops)
    encoders, decoders = config.layers, config.size("num_decoder_layers", default=config.layers)
    buckets = config.size("relative_attention_num_buckets", default=32) * heads
    vocabulary = config.size("vocab_size")
    head, tied = Linear("lm_head", width, vocabulary), bool(config.get("tie_word_embeddings", default=True))
    stacks = (Stack(encoder, encoders), Stack(decoder, decoders, is_target=True))
    others = 2 * (width + buckets)
    return Anatomy(family, stacks, ((vocabulary, width),), head, tied, others, upcasts_logits=False)


_T5_NAMES = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}


def _renamed(linear: Linear) -> Linear:
    return linear._replace(name=_T5_NAMES[linear.name])


def _refed(kept: Kept) -> Kept:
    return kept._replace(feeds=tuple(_T5_NAMES[name] for name in kept.feeds))


_ENCODER_NAMES = {
    "bert": ("query", "key", "value", "attention.output.dense"),
    "deberta": ("in_proj", "attention.output.dense"),
    "deberta-v2": ("query_proj", "key_proj", "value_proj", "attention.output.dense"),
    "distilbert": ("q_lin", "k_lin", "v_lin", "out_lin"),
}


def _encoder_block(config: ModelConfig, family: str, act: str) -> Block:
    width, heads = config.hidden, config.heads
    drops = config.drops("attention_probs_dropout_prob", "attention_dropout", default=0.1 if family != "vit" else 0.0)
    is_disentangled = family.startswith("deberta")
    attention = Attention(
        heads,
        heads,
        config.split_width,
        drops,
        is_eager=is_disentangled,
        is_disentangled=is_disentangled,
        upcasts=family == "vit",
    )
    bias = bool(config.get("qkv_bias", default=True))
    attend = _attention(width, attention, _ENCODER_NAMES.get(family, _ENCODER_NAMES["bert"]), bias=(bias, True))
    num_other = 0
    kinds = config.get("pos_att_type", default=())
    if family == "deberta":  # one product without biases, biases of queries and values, and of positions
        num_other = 2 * width - 3 * width
        num_other += width * width * ("c2p" in kinds) + (width * width + width) * ("p2c" in kinds)
    elif family == "deberta-v2" and not config.get("share_att_key", default=False):
        num_other = (width * width + width) * (("c2p" in kinds) + ("p2c" in kinds))
    mlp = _plain_mlp(
        width, config.inner, act, ("lin1", "lin2") if family == "distilbert" else ("intermediate.dense", "output.dense")
    )
    drops_stream = config.drops("hidden_dropout_prob", "dropout", default=0.1 if family != "vit" else 0.0)
    return _join((attend, mlp), _layer_norm(width) * 2, 4 * width + num_other, 2 * drops_stream)


def _encoder(config: ModelConfig, family: str) -> Anatomy:
    """BERT, RoBERTa, DistilBERT, ELECTRA and DeBERTa, bare or with the head that ``architectures`` names."""
    width, vocabulary = config.hidden, config.size("vocab_size")
    block = _encoder_block(config, family, config.text("hidden_act", "activation", default="gelu"))
    narrow = config.size("embedding_size", default=width) if family in ("electra", "deberta-v2") else width
    tables = [(vocabulary, narrow)]
    if config.get("position_biased_input", default=True):
        tables.append((config.size("max_position_embeddings", default=512), narrow))
    types = config.size("type_vocab_size", default=0 if family[:7] in ("distilb", "deberta") else 2)
    tables += [(types, narrow)] if types and family != "distilbert" else []
    others = 2 * narrow + (narrow * width + (0 if family == "deberta-v2" else width)) * (narrow != width)
    if family.startswith("deberta") and config.get("relative_attention", default=False):
        reach = config.size("max_relative_positions", default=-1, least=-1)
        reach = reach if reach >= 1 else config.size("max_position_embeddings", default=512)
        buckets = config.size("position_buckets", default=-1, least=-1)
        tables.append((2 * (buckets if family == "deberta-v2" and buckets > 0 else reach), width))
        others += 2 * width * ("layer_norm" in str(config.get("norm_rel_ebd", default="none")))
        kernel = config.size("conv_kernel_size", default=0) if family == "deberta-v2" else 0
        others += (width * width * kernel + 3 * width) if kernel > 0 else 0
    dense, labels = width * width + width, _num_labels(config)
    wanted = str((config.get("architectures") or ["Model"])[0])
    stacks = (Stack(block, config.layers),)
    if wanted.endswith(("ForMaskedLM", "ForPreTraining")):
        head = Linear("decoder", narrow, vocabulary, has_bias=True)
        others += narrow * width + narrow + 2 * narrow
        if wanted.endswith("ForPreTraining"):
            others += dense + 2 * width + 2 if family == "bert" else 0
        return Anatomy(family, stacks, tuple(tables), head, True, others, upcasts_logits=False)
    if wanted.endswith(("ForSequenceClassification", "ForTokenClassification")):
        others += 0 if wanted.endswith("ForTokenClassification") else dense
        head = Linear("classifier", width, labels, has_bias=True)
        return Anatomy(family, stacks, tuple(tables), head, False, others, has_token_logits=False)
    others += dense if family in ("bert", "roberta") else 0  # the pooler
    return Anatomy(family, stacks, tuple(tables), None, False, others, has_token_logits=False)


def _num_labels(config: ModelConfig) -> int:
    names = config.get("id2label")
    return len(names) if isinstance(names, Mapping) else config.size("num_labels", default=2)


def _vit(config: ModelConfig, family: str) -> Anatomy:
    """ViT, bare (with its pooler) or as a classifier."""
    width = config.hidden
    image, patch = config.size("image_size", default=224), config.size("patch_size", default=16, least=1)
    tokens = (image // patch) ** 2 + 1
    block = _encoder_block(config, family, config.text("hidden_act", default="gelu"))
    others = width + tokens * width  # the class token and the positions
    others += config.size("num_channels", default=3) * patch * patch * width + width + 2 * width
    wanted = str((config.get("architectures") or ["Model"])[0])
    is_classifier = wanted.endswith("ForImageClassification")
    head = Linear("classifier", width, _num_labels(config), has_bias=True) if is_classifier else None
    others += 0 if is_classifier else width * width + width
    stacks = (Stack(block, config.layers),)
    return Anatomy(family, stacks, (), head, False, others, has_token_logits=False, tokens=tokens)


#: The families whose parameters are counted exactly, by ``model_type``.
FAMILIES: Mapping[str, Callable[[ModelConfig, str], Anatomy]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3"), _gated_decoder),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "stablelm"), _gated_decoder),
    **dict.fromkeys(_PLAIN, _plain_decoder),
    **dict.fromkeys(("t5", "mt5"), _t5),
    **dict.fromkeys(("bert", "roberta", "distilbert", "electra", "deberta", "deberta-v2"), _encoder),
    "vit": _vit,
    "mamba": _state_space,
}
_ALIASES = {"gemma3_text": "gemma3", "xlm-roberta": "roberta", "camembert": "roberta", "umt5": "generic"}


def find_anatomy(config: Mapping[str, Any]) -> Anatomy:
    """What the model of a ``config.json`` is made of.

    Args:
        config: The content of ``config.json``.

    Raises:
        ConfigError: If the config does not even tell widths and layers, or an entry is of another kind.

    >>> gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    >>> find_anatomy(gpt2).num_parameters
    124439808
    """
    read = ModelConfig(config)
    kind = read.text("model_type", default="")
    family = _ALIASES.get(kind, kind)
    try:
        found = FAMILIES.get(family, _gated_decoder)(read, family if family in FAMILIES else "generic")
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ConfigError(
            f"the model's config has a value that is none of its entry's: {type(error).__name__}: {error}.",
            rule="each entry of a config.json is of the kind that transformers writes there.",
            remedy="give the config.json of the model's own page, or one saved by config.save_pretrained",
        ) from error
    towers = sum(count_tower(config[name]) for name in TOWERS if config.get(name))
    if not towers:
        return found
    return replace(found, num_other_parameters=found.num_other_parameters + towers, is_exact=False, has_towers=True)
