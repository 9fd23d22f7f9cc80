"""Build a training step on fake tensors from a ``config.json``: any architecture that transformers can build."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from memfit.errors import ConfigError, MissingExtraError, UntraceableError, nearest
from memfit.estimation._blocks import ChunkedHead
from memfit.estimation._lora import CLASSIFIERS, add_lora, quantize_linears
from memfit.estimation._program import find_dtypes
from memfit.estimation._setup import Setup, find_lora_targets

#: Tried in order if the config names no class that transformers knows, or one without a loss: encoders have a causal
#: class too.
_TASKS = (
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForImageClassification",
    "AutoModelForSequenceClassification",
)
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
#: Keys of a config.json that say how weights were saved, not what the model is.
_NOT_THE_MODEL = {"dtype", "torch_dtype", "quantization_config", "auto_map", "transformers_version", "use_cache"}
_Loss = Callable[[nn.Module, Any], torch.Tensor]


def build_step(config: Mapping[str, Any], setup: Setup) -> tuple[Any, dict[str, torch.Tensor], _Loss, list[str]]:
    """Return a model that transformers can build, its batch, its loss, and notes; call it in a fake tensor mode."""
    notes: list[str] = []
    parsed, kind = _parse(config, notes)
    dtype, autocast = find_dtypes(setup)
    model = _build_model(parsed, kind, setup, notes)
    head = model.get_output_embeddings()
    if setup.quantization != "none":  # before any weight has bytes: they are quantised as they are loaded
        classifiers = [one for name, one in model.named_modules() if name.rsplit(".", 1)[-1] in CLASSIFIERS]
        kept = [module for module in (head, *classifiers) if module is not None]
        count = quantize_linears(model, compute_dtype=autocast or dtype, skip=kept)
        notes.append(f"{count} linear layers are held in {setup.quantization}, as bitsandbytes does; the head is not")
    _materialize(model, _fp32_names(model, dtype, notes))
    batch = _make_batch(model, setup, notes)
    if setup.optimizer == "none":
        model.eval().requires_grad_(False)
    else:
        model.train()
    if setup.lora_rank:
        targets = setup.lora_targets or find_lora_targets(model.config.model_type)
        count = add_lora(model, setup.lora_rank, targets, head=head, dropout=setup.lora_dropout)
        notes.append(f"{count} fp32 adapters beside {', '.join(targets)}, as PEFT runs them")
    if setup.loss_chunks > 1:
        head = _chunk_loss(model, setup, head, notes)
    return model, batch, _make_loss(head), notes


@contextlib.contextmanager
def _swapped(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name, None)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _make_loss(head: nn.Module | None) -> _Loss:
    def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        from transformers import masking_utils

        # It takes fake positions for packed sequences; a real step finds none.
        with _swapped(masking_utils, "find_packed_sequence_indices", lambda *_, **__: None):
            if isinstance(head, ChunkedHead):
                inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
                found: torch.Tensor = head(model(**inputs).logits, batch["labels"])
                return found
            outputs = model(**batch)
            own: torch.Tensor | None = getattr(outputs, "loss", None)
            return outputs[0].float().mean() if own is None else own

    return loss


def _is_bare(kind: type[Any]) -> bool:
    """Whether a class of transformers has no head, like ``GPT2Model``, unlike ``GPT2LMHeadModel``."""
    return kind.__name__.endswith("Model") and not kind.__name__.endswith("HeadModel")


def _parse(config: Mapping[str, Any], notes: list[str]) -> tuple[Any, type[Any]]:
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise MissingExtraError.of("transformers", "estimate", "a model's config.json") from error
    named = [getattr(transformers, name, None) for name in config.get("architectures") or ()]
    kind: Any = next((found for found in named if found is not None), None)
    model_type = config.get("model_type") or getattr(getattr(kind, "config_class", None), "model_type", None)
    if model_type is None or model_type not in CONFIG_MAPPING:
        hint = nearest(str(model_type), CONFIG_MAPPING.keys())  # hundreds of names where none is near
        hint = f"; {hint}" if hint.startswith("did you mean") else ""
        raise UntraceableError(
            f"transformers {transformers.__version__} has no model type {model_type!r}{hint}",
            rule="a config.json names a model type that transformers knows.",
            remedy="correct model_type, or estimate a torch module: memfit.estimate(build_model, ...)",
        )
    values = {name: value for name, value in config.items() if name not in _NOT_THE_MODEL and name != "model_type"}
    if "quantization_config" in config:
        notes.append("the config's quantization_config is ignored: the setup says how weights are held")
    try:
        with _quiet():
            parsed = transformers.AutoConfig.for_model(model_type, **values)
            defaults = type(parsed)()
    except Exception as error:  # configs are checked by packages of transformers', with errors of their own
        raise ConfigError(
            f"transformers makes no {model_type} of this config: {str(error)[:300]}",
            rule="Every value of a config.json has the type and range that transformers gives it.",
            remedy="correct the value it names, or leave it out for its default",
        ) from error
    _note_defaults(parsed, defaults, config, notes)
    if config.get("tie_word_embeddings") is False and parsed.tie_word_embeddings:
        version = transformers.__version__
        notes.append(f"transformers {version} ties the head to the embedding, although the config says no")
    if kind is None or _is_bare(kind):
        kind = _find_task(transformers, parsed, kind, notes)
    return parsed, kind


def _note_defaults(parsed: Any, defaults: Any, config: Mapping[str, Any], notes: list[str]) -> None:
    own_names = {name: parsed.attribute_map.get(name, name) for name in _SIZES}
    missing = [
        f"{own} = {getattr(parsed, own)}"
        for name, own in own_names.items()
        if not {name, own} & set(config)
        and isinstance(getattr(parsed, own, None), int)
        and getattr(parsed, own) == getattr(defaults, own, None)
    ]
    if missing:
        notes.append(f"not in the config, so transformers' defaults: {', '.join(missing)}")


def _find_task(transformers: Any, parsed: Any, kind: Any, notes: list[str]) -> Any:
    for task in _TASKS:
        found = getattr(transformers, task)._model_mapping.get(type(parsed), None)
        if found is not None:
            found = found[0] if isinstance(found, tuple) else found
            notes.append(f"the config names no class with a loss: {found.__name__} is assumed")
            return found
    kind = kind or transformers.AutoModel._model_mapping.get(type(parsed), None)
    if kind is None:
        raise ConfigError(
            f"transformers has no model to train for a config of type {parsed.model_type}.",
            rule="The config's architectures name a class of transformers, or its type has one.",
            remedy="estimate a torch module: memfit.estimate(build_model, ...)",
        )
    notes.append(f"{kind.__name__} has no loss: the mean of its first output is taken")
    return kind


def _build_model(parsed: Any, kind: Any, setup: Setup, notes: list[str]) -> Any:
    """Build the model on the meta device, outside of the fake tensor mode."""
    attention = "eager" if setup.attention == "eager" else "sdpa"
    if attention == "sdpa" and not getattr(kind, "_supports_sdpa", False):
        attention = "eager"
        if getattr(parsed, "num_attention_heads", None):
            notes.append(f"{kind.__name__} has only eager attention in transformers: it keeps its scores")
    if setup.attention == "flash":
        notes.append("flash attention is traced as torch's own, whose kernels keep the same")
    dtype = find_dtypes(setup)[0]
    for part in (parsed, *(getattr(parsed, name, None) for name in getattr(parsed, "sub_configs", ()))):
        if part is not None and hasattr(part, "use_cache"):
            part.use_cache = False
    if getattr(parsed, "is_encoder_decoder", False) and getattr(parsed, "decoder_start_token_id", None) is None:
        parsed.decoder_start_token_id = getattr(parsed, "pad_token_id", None) or 0
    experts = any(getattr(parsed, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    extra = {"experts_implementation": _add_experts()} if experts and dtype is not torch.bfloat16 else {}
    try:
        with _disable_current_modes(), torch.device("meta"), _quiet():
            return kind._from_config(parsed, dtype=dtype, attn_implementation=attention, **extra)
    except Exception as error:  # whatever the model's own code raises
        raise ConfigError(
            f"transformers builds no {kind.__name__} of this config: {type(error).__name__}: {str(error)[:300]}",
            rule="The config's sizes fit each other, and its packages are installed.",
            remedy="correct the config, or install what the message names",
        ) from error


def _add_experts() -> str:
    """Register experts with a grouped product for every dtype, and return their name: torch's fake kernel is for bf16.
    The one that transformers falls back to reads the sizes of the groups, which fake tensors do not have."""
    from transformers.integrations import moe

    def product(rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _GroupedProduct.apply(rows.to(weight.dtype), weight)  # type: ignore[no-untyped-call]
        return result

    def forward(module: nn.Module, *args: Any) -> torch.Tensor:
        with _swapped(moe, "_grouped_mm", product):
            result: torch.Tensor = moe.grouped_mm_experts_forward(module, *args)
            return result

    moe.ALL_EXPERTS_FUNCTIONS.register("memfit", forward)
    return "memfit"


class _GroupedProduct(torch.autograd.Function):
    """The tensors of a product of rows (S, in) with the weights (experts, in, out) of their experts, without values."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        return rows.new_empty(len(rows), weight.shape[2])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, weight = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weight)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers: it logs about weights that were not loaded."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _fp32_names(model: Any, dtype: torch.dtype, notes: list[str]) -> set[str]:
    # modeling_utils.py of transformers 5: the first list counts for both 16-bit dtypes, the second for fp16 alone.
    names = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ()) if dtype is not torch.float32 else set()
    if dtype is torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if names:
        notes.append(f"kept in fp32, as transformers loads them: {', '.join(sorted(names))}")
    return names


def _materialize(model: nn.Module, fp32_names: set[str]) -> None:
    """Give each parameter and buffer bytes in the active modes; what is tied stays tied."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the original, so that no identity is used twice

    def convert(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in made:
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            made[id(tensor)] = tensor, new
        return made[id(tensor)][1]

    for path, module in model.named_modules():
        for holder in (module._parameters, module._buffers, module.__dict__):
            for name, tensor in list(holder.items()):
                if isinstance(tensor, torch.Tensor):
                    in_fp32 = tensor.is_floating_point() and any(re.search(one, f"{path}.{name}") for one in fp32_names)
                    holder[name] = convert(tensor, torch.float32 if in_fp32 else tensor.dtype)


def _make_batch(model: Any, setup: Setup, notes: list[str]) -> dict[str, torch.Tensor]:
    def ids(*shape: int) -> torch.Tensor:
        return torch.zeros(setup.batch, *shape, dtype=torch.int64)

    config, target, has_loss = model.config, setup.target_len or setup.seq_len, not _is_bare(type(model))
    name = getattr(model, "main_input_name", "input_ids")
    if name == "input_features":  # speech: a fixed number of frames, two for each position
        frames = 2 * getattr(config, "max_source_positions", setup.seq_len)
        return {name: torch.zeros(setup.batch, config.num_mel_bins, frames, dtype=model.dtype), "labels": ids(target)}
    if name == "pixel_values":
        size = getattr(config, "image_size", None)
        if size is None:
            size = 224
            notes.append(f"the config has no image_size: {size} x {size} pixels are assumed")
        shape = (getattr(config, "num_channels", 3), *((size, size) if isinstance(size, int) else size))
        images = torch.zeros(setup.batch, *shape, dtype=model.dtype)
        return {name: images, "labels": ids()} if has_loss else {name: images}
    _check_length(config, setup)
    batch = {"input_ids": ids(setup.seq_len)}
    notes.append("batches have no padding mask: attention is causal or full")
    if config.is_encoder_decoder:
        batch["labels"] = ids(target)
        if setup.loss_chunks > 1:
            batch["decoder_input_ids"] = ids(target)
    elif type(model).__name__.endswith("ForSequenceClassification"):
        config.pad_token_id = None if setup.batch == 1 else (config.pad_token_id or 0)
        config.problem_type = "single_label_classification" if config.num_labels >= 2 else "regression"
        batch["labels"] = ids().to(model.dtype) if config.problem_type == "regression" else ids()
    elif has_loss:
        batch["labels"] = ids(setup.seq_len)
    return batch


def _check_length(config: Any, setup: Setup) -> None:
    positions = getattr(config, "max_position_embeddings", None)
    rotary = any(getattr(config, name, None) for name in ("rope_parameters", "rope_theta", "alibi"))
    relative = getattr(config, "relative_attention", False) or getattr(config, "relative_attention_num_buckets", None)
    if isinstance(positions, int) and not rotary and not relative and setup.seq_len > positions > 0:
        raise ConfigError(
            f"Sequences have {setup.seq_len} tokens; the model has {positions} positions.",
            rule="the config has max_position_embeddings: each position is learned.",
            remedy=f"use --seq-len {positions} or less",
        )


def _chunk_loss(model: Any, setup: Setup, head: Any, notes: list[str]) -> Any:
    if head is None or not isinstance(head, nn.Linear):
        notes.append("the loss is not made in chunks: the model has no single output layer")
        return head
    tokens = setup.batch * (setup.target_len or setup.seq_len)
    chunks = math.ceil(tokens / math.ceil(tokens / setup.loss_chunks))
    chunked = ChunkedHead(head, chunks)
    model.config.final_logit_softcapping = None  # of logits; Gemma 2's are as many without
    model.set_output_embeddings(chunked)
    notes.append("each chunk of the loss is computed again in the backward pass: no logits are kept")
    return chunked
