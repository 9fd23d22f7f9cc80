"""What a model is made of, read from its ``config.json``: modules, widths and what autograd keeps. Loads no torch.

The counts of parameters follow ``modeling_*.py`` of transformers 5 and are exact for the families named in `FAMILIES`.
Any other model is counted like one of them, Llama if nothing nearer is known; its anatomy says that it is not exact.
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
        family: The name in `FAMILIES` of the family that it is counted like.
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
    """Llama, Mistral, Qwen, Gemma, Phi-3, Mixtral and their like."""
    width, heads, dim = config.hidden, config.heads, config.head_dim
    if family in ("gemma", "gemma2", "gemma3") or family == "qwen3":
        dim = config.size("head_dim", default=128 if family == "qwen3" else 256)
    kv_heads = config.size("num_key_value_heads", default=heads, least=1)
    flavour = "gemma" if family.startswith("gemma") else "llama"
    has_qk_norm = family in ("qwen3", "qwen3_moe", "gemma3")
    num_norms = 4 if family in ("gemma2", "gemma3") else 2
    bias = bool(config.get("attention_bias", "use_qkv_bias", default=False))
    biases = (True, False) if family in ("qwen2", "qwen2_moe") else (bias, bias)
    is_fused = family == "phi3"
    caps = family == "gemma2" and "attn_logit_softcapping" in config.entries
    is_capped = bool(config.get("attn_logit_softcapping", default=0.0 if caps else 50.0)) and family == "gemma2"
    drops = config.drops("attention_dropout")
    attention = Attention(
        heads, kv_heads, dim, drops, is_eager=is_capped, is_capped=is_capped, is_fused_rotary=is_fused
    )
    attend = _attention(width, attention, ("qkv_proj", "o_proj") if is_fused else _APART, bias=biases)
    norms = _rms_norm(width, flavour) * num_norms
    if has_qk_norm:
        norms += _rms_norm(heads * dim, flavour) + _rms_norm(kv_heads * dim, flavour)
    mlp = _gated_experts(config, family, width)
    if is_fused:
        joined = Linear("gate_up_proj", width, 2 * config.inner)
        first = Kept("input of the MLP", width, "compute", ("gate_up_proj",))
        mlp = replace(mlp, linears=(joined, mlp.linears[2]), kept=(first, *mlp.kept[1:]))
    masks = 2 if config.drops("resid_pdrop", "hidden_dropout") else 0
    block = _join((attend, mlp), norms, num_norms * width + 2 * dim * has_qk_norm, masks)
    tied = bool(config.get("tie_word_embeddings", default=family.startswith("gemma")))
    vocabulary = config.size("vocab_size")
    head = Linear("lm_head", width, vocabulary)
    stacks: tuple[Stack, ...] = (Stack(block, config.layers),)
    decoders = config.size("decoder_layers", default=0)
    if decoders:  # BART, Whisper and their like
        cross = _attention(width, attention._replace(is_crossed=True), _APART, bias=biases)
        stacks += (Stack(_join((attend, cross, mlp), norms, 3 * width, masks), decoders, is_target=True),)
    caps_logits = bool(config.get("final_logit_softcapping", default=30.0 if family == "gemma2" else 0.0))
    return Anatomy(family, stacks, ((vocabulary, width),), head, tied, width, caps_logits=caps_logits)


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
        number = config.size("n_shared_experts", default=0)
        both = (experts, router) if not number else (experts, router, _gated_mlp(width, number * inner, act))
        return _join(both, (), 0)
    shared = _gated_mlp(width, config.size("shared_expert_intermediate_size", default=inner), act)
    return _join((experts, router, shared), (), width)  # the shared expert's gate has one output


def _plain_decoder(config: ModelConfig, family: str) -> Anatomy:
    """GPT-2 and GPT-NeoX: LayerNorms and an MLP without a gate."""
    width, heads, is_neox = config.hidden, config.heads, family == "gpt_neox"
    names, mlp_names, act = (
        (("query_key_value", "dense"), ("dense_h_to_4h", "dense_4h_to_h"), "gelu")
        if is_neox
        else (("c_attn", "c_proj"), ("c_fc", "mlp.c_proj"), "gelu_new")
    )
    default = 0.0 if is_neox else 0.1
    drops = config.drops("attention_dropout", "attn_pdrop", default=default)
    attention = Attention(heads, heads, config.split_width, drops, upcasts=False, is_fused_rotary=is_neox)
    bias = bool(config.get("attention_bias", default=True))
    attend = _attention(width, attention, names, bias=(bias, bias))
    act = config.text("activation_function", "hidden_act", "activation", default=act)
    mlp = _plain_mlp(width, config.inner, act, mlp_names)
    drops_stream = config.drops("resid_pdrop", "hidden_dropout", "dropout", default=default)
    block = _join((attend, mlp), _layer_norm(width) * 2, 4 * width, 2 * drops_stream)
    vocabulary = config.size("vocab_size")
    tables = [(vocabulary, width)]
    if not is_neox:
        tables.append((config.size("max_position_embeddings", "n_positions", default=1024), width))
    tied = bool(config.get("tie_word_embeddings", default=not is_neox))
    head = Linear("lm_head", width, vocabulary)
    return Anatomy(family, (Stack(block, config.layers),), tuple(tables), head, tied, 2 * width)


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


def _encoder_block(config: ModelConfig, family: str) -> Block:
    width, heads = config.hidden, config.heads
    default = 0.1 if family != "vit" else 0.0
    drops = config.drops("attention_probs_dropout_prob", "attention_dropout", default=default)
    attention = Attention(heads, heads, config.split_width, drops, upcasts=family == "vit")
    names = ("query", "key", "value", "attention.output.dense")
    attend = _attention(width, attention, names, bias=(bool(config.get("qkv_bias", default=True)), True))
    act = config.text("hidden_act", "activation", default="gelu")
    mlp = _plain_mlp(width, config.inner, act, ("intermediate.dense", "output.dense"))
    drops_stream = config.drops("hidden_dropout_prob", "dropout", default=default)
    return _join((attend, mlp), _layer_norm(width) * 2, 4 * width, 2 * drops_stream)


def _encoder(config: ModelConfig, family: str) -> Anatomy:
    """BERT and RoBERTa, bare or with the head that ``architectures`` names."""
    width, vocabulary = config.hidden, config.size("vocab_size")
    positions, types = config.size("max_position_embeddings", default=512), config.size("type_vocab_size", default=2)
    tables = ((vocabulary, width), (positions, width), *(((types, width),) if types else ()))
    dense, labels, others = width * width + width, _num_labels(config), 2 * width
    wanted = str((config.get("architectures") or ["Model"])[0])
    stacks = (Stack(_encoder_block(config, family), config.layers),)
    if wanted.endswith(("ForMaskedLM", "ForPreTraining")):
        head = Linear("decoder", width, vocabulary, has_bias=True)
        others += dense + 2 * width
        if wanted.endswith("ForPreTraining") and family == "bert":
            others += dense + 2 * width + 2
        return Anatomy(family, stacks, tables, head, True, others, upcasts_logits=False)
    if wanted.endswith(("ForSequenceClassification", "ForTokenClassification")):
        others += 0 if wanted.endswith("ForTokenClassification") else dense
        head = Linear("classifier", width, labels, has_bias=True)
        return Anatomy(family, stacks, tables, head, False, others, has_token_logits=False)
    return Anatomy(family, stacks, tables, None, False, others + dense, has_token_logits=False)  # with the pooler


def _num_labels(config: ModelConfig) -> int:
    names = config.get("id2label")
    return len(names) if isinstance(names, Mapping) else config.size("num_labels", default=2)


def _vit(config: ModelConfig, family: str) -> Anatomy:
    """ViT, bare (with its pooler) or as a classifier."""
    width = config.hidden
    image, patch = config.size("image_size", default=224), config.size("patch_size", default=16, least=1)
    tokens = (image // patch) ** 2 + 1
    block = _encoder_block(config, family)
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
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe"), _gated_decoder),
    **dict.fromkeys(("gpt2", "gpt_neox"), _plain_decoder),
    **dict.fromkeys(("t5", "mt5"), _t5),
    **dict.fromkeys(("bert", "roberta"), _encoder),
    "vit": _vit,
    "mamba": _state_space,
}
_ALIASES = {"gemma3_text": "gemma3", "xlm-roberta": "roberta", "camembert": "roberta"}
#: What others are counted like, with the wide bound; the rest like Llama.
_LIKE = {
    **dict.fromkeys(("falcon", "phi", "opt", "bloom"), "gpt_neox"),
    **dict.fromkeys(("deberta", "deberta-v2", "electra", "distilbert"), "bert"),
}


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
    kind = _ALIASES.get(kind, kind)
    family = kind if kind in FAMILIES else _LIKE.get(kind, "llama")
    try:
        found = FAMILIES[family](read, family)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ConfigError(
            f"the model's config has a value that is none of its entry's: {type(error).__name__}: {error}.",
            rule="each entry of a config.json is of the kind that transformers writes there.",
            remedy="give the config.json of the model's own page, or one saved by config.save_pretrained",
        ) from error
    towers = sum(count_tower(config[name]) for name in TOWERS if config.get(name))
    others = found.num_other_parameters + towers
    is_exact = family == kind and not towers
    return replace(found, num_other_parameters=others, is_exact=is_exact, has_towers=bool(towers))
