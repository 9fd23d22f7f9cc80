"""Read from a ``config.json`` what a model is made of: matrix products, widths, and what autograd keeps. No torch.

Counts of parameters follow ``modeling_*.py`` of transformers 5 and are exact for the families in `FAMILIES`. Any other
model is counted like the nearest of them (`Anatomy.is_exact` is False then).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from memfit.errors import ConfigError

_LARGEST = 1 << 40  # beyond any width, count or vocabulary
#: Entries of models of images and speech, alone or beside a language model, of state spaces, of BART, and of experts.
_NOT_COUNTED = (
    *("vision_config", "audio_config", "image_size", "num_mel_bins", "state_size", "decoder_layers"),
    *("num_local_experts", "num_experts", "n_routed_experts"),
)
#: The dtype of a kept tensor: that of matrix products; that of the hidden states (fp32 under autocast); fp32; the
#: 16-bit original beside an fp32 copy; one byte (masks); or nothing, because it is kept elsewhere.
Kind = Literal["compute", "stream", "fp32", "narrow", "byte", "shared"]


class ModelConfig:
    """A config whose entries have several names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        inner = config.get("text_config")
        self.entries: dict[str, Any] = {**config, **inner} if isinstance(inner, Mapping) else dict(config)

    def get(self, *names: str, default: Any = None) -> Any:
        return next((self.entries[name] for name in names if self.entries.get(name) is not None), default)

    def size(self, *names: str, default: int | None = None, least: int = 0) -> int:
        def holds(one: Any) -> bool:
            return type(one) is int and least <= one <= _LARGEST

        return int(self.checked(names, default, holds, f"a whole number from {least} up"))

    def text(self, *names: str, default: str) -> str:
        return str(self.checked(names, default, lambda one: isinstance(one, str), "a name"))

    def drops(self, *names: str, default: float = 0.0) -> bool:
        return bool(self.checked(names, default, lambda one: isinstance(one, int | float), "a number") > 0)

    def checked(self, names: tuple[str, ...], default: Any, holds: Callable[[Any], bool], wanted: str) -> Any:
        found = self.get(*names, default=default)
        if holds(found):
            return found
        named = next((name for name in names if self.entries.get(name) is not None), names[0])
        raise ConfigError(
            f"the model's config has {named} = {_shortened(found)}.",
            rule=f"memfit reads {wanted} from {' or '.join(names)}.",
            remedy="give the config.json of the model's own page, or one saved by config.save_pretrained",
        )

    @property
    def hidden(self) -> int:
        return self.size("hidden_size", "n_embd", "d_model", "dim", least=1)

    @property
    def layers(self) -> int:
        return self.size("num_hidden_layers", "n_layer", "num_layers", "n_layers", least=1)

    @property
    def heads(self) -> int:
        return self.size("num_attention_heads", "n_head", "num_heads", "n_heads", least=1)

    @property
    def split_width(self) -> int:
        """The width of one head where the heads divide the hidden states."""
        width, heads = self.hidden, self.heads
        if width % heads:
            raise ConfigError(
                f"the model's config has a width of {width} and {heads} heads.",
                rule="without a head_dim the heads divide the width of the hidden states.",
                remedy="correct hidden_size or num_attention_heads in the config, or write head_dim",
            )
        return width // heads

    @property
    def inner(self) -> int:
        names = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "hidden_dim", "d_ff")
        return self.size(*names, default=4 * self.hidden)


def _shortened(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value > _LARGEST:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_names(config: Mapping[str, Any]) -> None:
    """Refuse a config whose ``model_type`` or ``architectures`` are no names."""

    def are_names(found: Any) -> bool:
        return isinstance(found, list | tuple) and all(isinstance(name, str) for name in found)

    read = ModelConfig({name: config[name] for name in ("model_type", "architectures") if name in config})
    read.text("model_type", default="")
    read.checked(("architectures",), [], are_names, "a list of names of classes")


class Linear(NamedTuple):
    """A matrix product with weights."""

    name: str
    inputs: int
    outputs: int
    has_bias: bool = False

    @property
    def num_weights(self) -> int:
        return self.inputs * self.outputs

    @property
    def num_parameters(self) -> int:
        return self.num_weights + self.outputs * self.has_bias


class Kept(NamedTuple):
    """A tensor that autograd keeps for the backward pass."""

    tensor: str  # what it is
    width: int  # numbers for each token
    kind: Kind = "compute"
    feeds: tuple[str, ...] = ()  # the matrix products whose input it is: kept for the gradients of their weights
    for_weight: bool = False  # a frozen weight makes it unnecessary


class Attention(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    has_dropout: bool = False  # of the scores
    is_crossed: bool = False  # keys come from the source sequence
    upcasts: bool = True  # its softmax runs in fp32
    # Each block adds its own bias of positions (create_position_bias_mask in integrations/sdpa_attention.py).
    is_biased: bool = False


@dataclass(frozen=True)
class Block:
    """One of the blocks that a model repeats, or a part of it."""

    width: int  # of the hidden states
    linears: tuple[Linear, ...]
    attentions: tuple[Attention, ...]
    kept: tuple[Kept, ...]  # without the attentions' own tensors
    num_norm_parameters: int  # outside of matrix products
    inner_width: int  # the widest gradient inside of its MLP, in numbers for each token

    @property
    def num_parameters(self) -> int:
        return sum(linear.num_parameters for linear in self.linears) + self.num_norm_parameters


class Stack(NamedTuple):
    """Equal blocks that run over the source's tokens, or over the target's."""

    block: Block
    num_blocks: int
    is_target: bool = False


@dataclass(frozen=True)
class Anatomy:
    family: str  # of `FAMILIES`: the one that it is counted like
    stacks: tuple[Stack, ...]
    tables: tuple[tuple[int, int], ...]  # rows and width of each embedding
    head: Linear  # makes the logits
    is_tied: bool  # the head's weight is the first embedding
    num_other_parameters: int  # outside of blocks, embeddings and head
    upcasts_logits: bool = True  # the loss needs them in fp32 (ForCausalLMLoss in loss/loss_utils.py)
    is_exact: bool = True  # the count of parameters is that of transformers

    @property
    def num_parameters(self) -> int:
        found = sum(stack.block.num_parameters * stack.num_blocks for stack in self.stacks) + self.num_other_parameters
        found += sum(rows * width for rows, width in self.tables)
        return found + self.head.num_parameters - self.head.num_weights * self.is_tied


def _language_model(
    config: ModelConfig, family: str, stacks: tuple[Stack, ...], *, tied: bool, others: int, **more: Any
) -> Anatomy:
    """A model whose head gives logits for each token."""
    width, vocabulary = config.hidden, config.size("vocab_size")
    tables = ((vocabulary, width), *more.pop("tables", ()))
    is_tied = bool(config.get("tie_word_embeddings", default=tied))
    return Anatomy(family, stacks, tables, Linear("lm_head", width, vocabulary), is_tied, others, **more)


def _rms_norm(width: int, *, keeps_input: bool = False) -> tuple[Kept, ...]:
    """The input in fp32, and its normalised form for the weight's gradient; T5 also keeps the 16-bit input."""
    upcast = Kept("input of a norm in fp32", width, "fp32")
    original = (Kept("input of a norm", width, "narrow"),) if keeps_input else ()
    return (upcast, *original, Kept("normalised", width, "stream", for_weight=True))


def _layer_norm(width: int) -> tuple[Kept, ...]:
    return Kept("input of a norm", width, "stream"), Kept("statistics of a norm", 2, "fp32")


def _activation(name: str, width: int) -> tuple[Kept, ...]:
    """What an activation keeps beside its result (transformers/activations.py): most keep their input, relu nothing."""
    known = {"relu": 0, "gelu_new": 4, "gelu_fast": 6, "quick_gelu": 2, "relu2": 2, "gelu_10": 2}
    return (Kept(f"inside {name}", width),) * known.get(name, 1)


def _gated_mlp(
    width: int,
    inner: int,
    act: str,
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    *,
    bias: bool = False,
) -> Block:
    """``down(act(gate(x)) * up(x))``."""
    *into, out = names
    linears = (*(Linear(name, width, inner, bias) for name in into), Linear(out, inner, width, bias))
    kept = (
        Kept("input of the MLP", width, "compute", tuple(into)),
        *_activation(act, inner),
        Kept("activated gate", inner),
        Kept("up", inner),
        Kept("gated", inner, "compute", (out,)),
    )
    return Block(width, linears, (), kept, 0, 2 * inner)


def _plain_mlp(width: int, inner: int, act: str, names: tuple[str, str], *, bias: bool = True) -> Block:
    linears = (Linear(names[0], width, inner, bias), Linear(names[1], inner, width, bias))
    kept = (
        Kept("input of the MLP", width, "compute", (names[0],)),
        *_activation(act, inner),
        Kept("activated", inner, "compute", (names[1],)),
    )
    return Block(width, linears, (), kept, 0, inner)


def _attention(
    width: int, attention: Attention, names: tuple[str, ...], *, bias: tuple[bool, bool] = (False, False)
) -> Block:
    """Projections of queries, keys and values (four names) or one for all three (two names), and of the result."""
    queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    outputs = (queries + 2 * keys,) if len(names) == 2 else (queries, keys, keys)
    into = (Linear(name, width, size, bias[0]) for name, size in zip(names, outputs, strict=False))
    read = names[:1] if attention.is_crossed else names[:-1]
    kept = (
        Kept("input of attention", width, "compute", read),
        Kept("result of attention", queries, "shared", (names[-1],)),
    )
    return Block(width, (*into, Linear(names[-1], queries, width, bias[1])), (attention,), kept, 0, queries + 2 * keys)


def _join(parts: tuple[Block, ...], norms: tuple[Kept, ...], num_norm_parameters: int, masks: int = 0) -> Block:
    """One block of several parts, with its norms and ``masks`` dropout masks as wide as the hidden states."""
    dropped = tuple(Kept("dropout mask", parts[0].width, "byte") for _ in range(masks))
    return Block(
        width=parts[0].width,
        linears=tuple(linear for part in parts for linear in part.linears),
        attentions=tuple(attention for part in parts for attention in part.attentions),
        kept=(*norms, *(kept for part in parts for kept in part.kept), *dropped),
        num_norm_parameters=num_norm_parameters + sum(part.num_norm_parameters for part in parts),
        inner_width=max(part.inner_width for part in parts),
    )


def _gated_decoder(config: ModelConfig, family: str) -> Anatomy:
    """Llama, Mistral, Qwen and models like them."""
    width, heads = config.hidden, config.heads
    default = 128 if family == "qwen3" else None
    is_split = config.get("head_dim") is None and default is None
    dim = config.split_width if is_split else config.size("head_dim", default=default, least=1)
    kv_heads = config.size("num_key_value_heads", default=heads, least=1)
    bias = bool(config.get("attention_bias", "use_qkv_bias", default=False))
    biases = (True, False) if family == "qwen2" else (bias, bias)
    attention = Attention(heads, kv_heads, dim, config.drops("attention_dropout"))
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    attend = _attention(width, attention, names, bias=biases)
    norms = _rms_norm(width) * 2
    if has_qk_norm := family == "qwen3":
        norms += _rms_norm(heads * dim) + _rms_norm(kv_heads * dim)
    act = config.text("hidden_activation", "hidden_act", default="silu")
    mlp = _gated_mlp(width, config.inner, act, bias=bool(config.get("mlp_bias", default=False)))
    masks = 2 if config.drops("resid_pdrop", "hidden_dropout") else 0
    block = _join((attend, mlp), norms, 2 * width + 2 * dim * has_qk_norm, masks)
    tied = str(config.entries.get("model_type")).startswith("gemma")
    return _language_model(config, family, (Stack(block, config.layers),), tied=tied, others=width)


def _plain_decoder(config: ModelConfig, family: str) -> Anatomy:
    """GPT-2: LayerNorms and an MLP without a gate."""
    width, heads = config.hidden, config.heads
    drops = config.drops("attention_dropout", "attn_pdrop", default=0.1)
    attention = Attention(heads, heads, config.split_width, drops, upcasts=False)
    attend = _attention(width, attention, ("c_attn", "c_proj"), bias=(True, True))
    act = config.text("activation_function", "hidden_act", "activation", default="gelu_new")
    mlp = _plain_mlp(width, config.inner, act, ("c_fc", "mlp.c_proj"))
    masks = 2 * config.drops("resid_pdrop", "hidden_dropout", "dropout", default=0.1)
    stacks = (Stack(_join((attend, mlp), _layer_norm(width) * 2, 4 * width, masks), config.layers),)
    positions = ((config.size("max_position_embeddings", "n_positions", default=1024), width),)
    return _language_model(config, family, stacks, tied=True, others=2 * width, tables=positions)


def _t5(config: ModelConfig, family: str) -> Anatomy:
    """T5 and mT5, of version 1 and 1.1: a learned bias of positions is added to the scores."""
    width, heads = config.hidden, config.heads
    dim, inner = config.size("d_kv", default=64), config.size("d_ff", default=2048)
    words = str(config.get("feed_forward_proj", default="gated-gelu" if family == "mt5" else "relu")).split("-")
    drops = config.drops("dropout_rate", default=0.1)
    attention = Attention(heads, heads, dim, drops, upcasts=False, is_biased=True)
    attend = _attention(width, attention, ("q", "k", "v", "o"))
    cross = _attention(width, attention._replace(is_crossed=True, is_biased=False), ("q", "k", "v", "o"))
    dropped: tuple[Kept, ...] = (Kept("dropout mask", inner, "byte"),) if drops else ()
    if words[0] == "gated":
        mlp = _gated_mlp(width, inner, {"gelu": "gelu_new"}.get(words[-1], words[-1]), ("wi_0", "wi_1", "wo"))
    else:
        mlp = _plain_mlp(width, inner, words[-1], ("wi", "wo"), bias=False)
        if drops and words[-1] == "relu":  # relu keeps its result, wo the one after dropout
            dropped += (Kept("result of relu", inner),)
    mlp = replace(mlp, kept=mlp.kept + dropped)
    norm = _rms_norm(width, keeps_input=True)
    encoder = _join((attend, mlp), norm * 2, 2 * width, 2 * drops)
    decoder = _join((attend, cross, mlp), norm * 3, 3 * width, 3 * drops)
    decoders = config.size("num_decoder_layers", default=config.layers)
    stacks = (Stack(encoder, config.layers), Stack(decoder, decoders, is_target=True))
    others = 2 * (width + config.size("relative_attention_num_buckets", default=32) * heads)
    return _language_model(config, family, stacks, tied=True, others=others, upcasts_logits=False)


#: The families whose parameters are counted exactly, by ``model_type``.
FAMILIES: Mapping[str, Callable[[ModelConfig, str], Anatomy]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _gated_decoder),
    "gpt2": _plain_decoder,
    **dict.fromkeys(("t5", "mt5"), _t5),
}
#: Counted like GPT-2; the others without exact counts like Llama.
_LIKE_GPT2 = ("gpt_neox", "falcon", "phi", "opt", "bloom")


def find_anatomy(config: Mapping[str, Any]) -> Anatomy:
    """Return what a config's model is made of; refuse one that is no language model of attention alone."""
    read = ModelConfig(config)
    kind = read.text("model_type", default="").removesuffix("_text")  # Gemma 3
    encoder = f"model_type = {kind!r}" if "bert" in kind or kind == "electra" else ""
    if other := next((name for name in _NOT_COUNTED if read.get(name)), encoder):
        raise ConfigError(
            f"the model's config has {other}.",
            rule="the formula counts decoders and T5; BERT, BART, experts, images, speech and state spaces are traced.",
            remedy="trace it: memfit estimate --hf-config config.json, without --formula",
        )
    family = kind if kind in FAMILIES else "gpt2" if kind in _LIKE_GPT2 else "llama"
    return replace(FAMILIES[family](read, family), is_exact=family == kind)
