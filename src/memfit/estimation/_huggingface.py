"""From a model's ``config.json`` to a training step on fake tensors: any architecture that transformers can build."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from memfit.errors import ConfigError, MissingExtraError, UntraceableError, nearest
from memfit.estimation._blocks import ChunkedHead, checkpoint_blocks, offload_activations
from memfit.estimation._lora import add_lora
from memfit.estimation._optimizers import build_optimizer
from memfit.estimation._program import Program, find_blocks
from memfit.estimation._quantization import quantize_linears
from memfit.estimation._setup import Setup, find_lora_targets

_WEIGHT_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "bf16-amp": torch.float32,
    "fp16-amp": torch.float32,
}
_AUTOCAST_DTYPES = {"bf16-amp": torch.bfloat16, "fp16-amp": torch.float16}
#: Tried in order when the config names no class that transformers knows, or one that gives no loss: encoders have a
#: causal class too.
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
_DEFAULT_IMAGE_SIZE = 224
_NO_LABELS = 2


def build_program(config: Mapping[str, Any], setup: Setup) -> Program:
    """The training step of a model that transformers can build; called within a fake tensor mode.

    Args:
        config: The content of a ``config.json``; needs ``model_type`` or ``architectures``. What it lacks has
            transformers' default, with a note.
        setup: How the model is trained. ``strategy``, ``world_size`` and ``compiled`` are not looked at.

    Raises:
        MissingExtraError: transformers is not installed.
        UntraceableError: transformers does not know the model's type.
        ConfigError: The config or the setup makes no model.
    """
    notes: dict[str, None] = {}
    parsed, kind = _parse(config, notes)
    model = _build_model(parsed, kind, setup, notes)
    head = model.get_output_embeddings()
    if setup.quantization != "none":  # before any weight has bytes: they are quantised as they are loaded
        _quantize(model, setup, head, notes)
    _materialize(model, _fp32_names(model, _WEIGHT_DTYPES[setup.dtype], notes))
    batch = _make_batch(model, setup, notes)
    if setup.optimizer == "none":
        model.eval().requires_grad_(False)
    else:
        model.train()
    if setup.lora_rank:
        targets = setup.lora_targets or find_lora_targets(model.config.model_type)
        count = add_lora(model, setup.lora_rank, targets, head=head)
        notes[f"{count} adapters in float32 beside {', '.join(targets)}, without dropout, as PEFT runs them"] = None
    if setup.loss_chunks > 1:
        head = _chunk_loss(model, setup, head, notes)
    checkpoint_blocks(find_blocks(model), setup.gradient_checkpointing)
    optimizer, assumed = build_optimizer(model, setup)
    notes.update(dict.fromkeys(assumed))
    clip = setup.clip_grad_norm and optimizer is not None
    if clip and setup.optimizer_in_backward:
        clip = False
        notes["gradients are not clipped: each is dropped within the backward pass"] = None
    return Program(
        model=model,
        batch=batch,
        loss=_Loss(head, offload=setup.offload_activations),
        optimizer=optimizer,
        autocast_dtype=_AUTOCAST_DTYPES.get(setup.dtype),
        num_microbatches=setup.num_microbatches,
        clip_grad_norm=clip,
        notes=tuple(notes),
    )


@contextlib.contextmanager
def _one_sequence_a_row() -> Iterator[None]:
    """Without the search for several sequences in a row, which takes fake positions for a compiler's and finds some.

    A real step finds none and leaves the mask out (transformers 5, masking_utils.py, ``find_packed_sequence_indices``).
    """
    from transformers import masking_utils as found

    masking_utils: Any = found
    before = getattr(masking_utils, "find_packed_sequence_indices", None)
    masking_utils.find_packed_sequence_indices = lambda *_args, **_kwargs: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before


class _Loss:
    """The loss of a batch: the model's own, or that of a head which makes it in pieces."""

    def __init__(self, head: nn.Module | None, *, offload: bool) -> None:
        self.head = head
        self.offload = offload

    def __call__(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_one_sequence_a_row())
            if self.offload:
                stack.enter_context(offload_activations(model, head=self.head))
            if isinstance(self.head, ChunkedHead):
                inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
                loss: torch.Tensor = self.head(model(**inputs).logits, batch["labels"])
                return loss
            outputs = model(**batch)
            own: torch.Tensor | None = getattr(outputs, "loss", None)
            return outputs[0].float().mean() if own is None else own


def _is_bare(kind: type[Any]) -> bool:
    """Whether a class of transformers has no head: ``GPT2Model``, and not ``GPT2LMHeadModel``."""
    return kind.__name__.endswith("Model") and not kind.__name__.endswith("HeadModel")


def _parse(config: Mapping[str, Any], notes: dict[str, None]) -> tuple[Any, type[Any]]:
    """A config of transformers and the class of the model."""
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
        notes["the config's quantization_config is not looked at: the setup says how weights are held"] = None
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
        notes[f"transformers {version} ties the head to the embedding; the config says that it does not"] = None
    if kind is None or _is_bare(kind):
        kind = _find_task(transformers, parsed, kind, notes)
    return parsed, kind


def _note_defaults(parsed: Any, defaults: Any, config: Mapping[str, Any], notes: dict[str, None]) -> None:
    own_names = {name: parsed.attribute_map.get(name, name) for name in _SIZES}
    missing = [
        f"{own} = {getattr(parsed, own)}"
        for name, own in own_names.items()
        if not {name, own} & set(config)
        and isinstance(getattr(parsed, own, None), int)
        and getattr(parsed, own) == getattr(defaults, own, None)
    ]
    if missing:
        notes[f"not in the config, so transformers' defaults: {', '.join(missing)}"] = None


def _find_task(transformers: Any, parsed: Any, kind: Any, notes: dict[str, None]) -> Any:
    for task in _TASKS:
        found = getattr(transformers, task)._model_mapping.get(type(parsed), None)
        if found is not None:
            found = found[0] if isinstance(found, tuple) else found
            notes[f"the config names no class with a loss: it is taken to be {found.__name__}"] = None
            return found
    kind = kind or transformers.AutoModel._model_mapping.get(type(parsed), None)
    if kind is None:
        raise ConfigError(
            f"transformers has no model to train for a config of type {parsed.model_type}.",
            rule="The config's architectures name a class of transformers, or its type has one.",
            remedy="estimate a torch module: memfit.estimate(build_model, ...)",
        )
    notes[f"{kind.__name__} has no loss: the mean of its first result stands for it"] = None
    return kind


def _build_model(parsed: Any, kind: Any, setup: Setup, notes: dict[str, None]) -> Any:
    """The model on fake tensors: built on the meta device outside of the modes, then given new bytes within them."""
    attention = "eager" if setup.attention == "eager" else "sdpa"
    if attention == "sdpa" and not getattr(kind, "_supports_sdpa", False):
        attention = "eager"
        if getattr(parsed, "num_attention_heads", None):
            notes[f"{kind.__name__} has only eager attention in transformers: it keeps its scores"] = None
    if setup.attention == "flash":
        notes["flash attention is traced as torch's own, whose kernels keep the same"] = None
    dtype = _WEIGHT_DTYPES[setup.dtype]
    for part in (parsed, *(getattr(parsed, name, None) for name in getattr(parsed, "sub_configs", ()))):
        if part is not None and hasattr(part, "use_cache"):
            part.use_cache = False
    if getattr(parsed, "is_encoder_decoder", False) and getattr(parsed, "decoder_start_token_id", None) is None:
        parsed.decoder_start_token_id = getattr(parsed, "pad_token_id", None) or 0
    extra = {} if dtype is torch.bfloat16 or not _has_experts(parsed) else {"experts_implementation": _add_experts()}
    try:
        with _disable_current_modes(), torch.device("meta"), _quiet():
            model = kind._from_config(parsed, dtype=dtype, attn_implementation=attention, **extra)
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ConfigError(
            f"transformers builds no {kind.__name__} of this config: {type(error).__name__}: {str(error)[:300]}",
            rule="The config's sizes fit each other, and its packages are installed.",
            remedy="correct the config, or install what the message names",
        ) from error
    return model


def _has_experts(parsed: Any) -> bool:
    return any(getattr(parsed, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _add_experts() -> str:
    """The name of an implementation of experts whose products have fake results in every dtype.

    That of transformers sends all tokens through all experts' weights in one grouped product, whose fake kernel knows
    bf16 alone; its own way around the product has one for all.
    """
    from transformers.integrations import moe

    def forward(module: nn.Module, *args: Any) -> torch.Tensor:
        before = moe._can_use_grouped_mm
        moe._can_use_grouped_mm = lambda *_: False
        try:
            result: torch.Tensor = moe.grouped_mm_experts_forward(module, *args)
            return result
        finally:
            moe._can_use_grouped_mm = before

    moe.ALL_EXPERTS_FUNCTIONS.register("memfit", forward)
    return "memfit"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers logs on building: it is about weights that were not loaded."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _fp32_names(model: Any, dtype: torch.dtype, notes: dict[str, None]) -> set[str]:
    # modeling_utils.py of transformers 5: the first list counts for fp16 alone, the second for both 16-bit dtypes.
    names = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ()) if dtype is not torch.float32 else set()
    if dtype is torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if names:
        notes[f"kept in fp32, as transformers does on loading: {', '.join(sorted(names))}"] = None
    return names


def _materialize(model: nn.Module, fp32_names: set[str]) -> None:
    """Gives each parameter and buffer bytes in the modes that are active; what is tied stays tied."""
    made: dict[int, torch.Tensor] = {}

    def convert(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in made:
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            made[id(tensor)] = new
        return made[id(tensor)]

    originals: list[torch.Tensor] = []  # so that no identity is used twice
    for path, module in model.named_modules():
        in_fp32 = bool(set(path.split(".")) & fp32_names)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                originals.append(parameter)
                dtype = torch.float32 if in_fp32 and parameter.is_floating_point() else parameter.dtype
                module._parameters[name] = convert(parameter, dtype)
        others = (*module._buffers.items(), *module.__dict__.items())
        for name, tensor in others:
            if isinstance(tensor, torch.Tensor):
                originals.append(tensor)
                holder = module._buffers if name in module._buffers else module.__dict__
                holder[name] = convert(tensor, tensor.dtype)


def _make_batch(model: Any, setup: Setup, notes: dict[str, None]) -> dict[str, torch.Tensor]:
    config = model.config
    name = getattr(model, "main_input_name", "input_ids")
    if name == "pixel_values":
        return _make_images(model, setup, notes)
    if name == "input_features":  # speech: a fixed number of frames, two for each position
        frames = 2 * getattr(config, "max_source_positions", setup.seq_len)
        features = torch.zeros(setup.batch, config.num_mel_bins, frames, dtype=model.dtype)
        return {name: features, "labels": _tokens(setup.batch, setup.target_len or setup.seq_len)}
    _check_length(config, setup)
    batch = {"input_ids": _tokens(setup.batch, setup.seq_len)}
    notes["batches come without a padding mask: attention takes its causal or full path"] = None
    if config.is_encoder_decoder:
        target = setup.target_len or setup.seq_len
        batch["labels"] = _tokens(setup.batch, target)
        if setup.loss_chunks > 1:
            batch["decoder_input_ids"] = _tokens(setup.batch, target)
    elif type(model).__name__.endswith("ForSequenceClassification"):
        batch["labels"] = torch.zeros(setup.batch, dtype=torch.int64)
        config.pad_token_id = None if setup.batch == 1 else (config.pad_token_id or 0)
        config.problem_type = "single_label_classification" if config.num_labels >= _NO_LABELS else "regression"
        if config.problem_type == "regression":
            batch["labels"] = batch["labels"].to(model.dtype)
    elif not _is_bare(type(model)):
        batch["labels"] = _tokens(setup.batch, setup.seq_len)
    return batch


def _make_images(model: Any, setup: Setup, notes: dict[str, None]) -> dict[str, torch.Tensor]:
    size = getattr(model.config, "image_size", None)
    if size is None:
        size = _DEFAULT_IMAGE_SIZE
        notes[f"the config has no image_size: {size} x {size} pixels are assumed"] = None
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    channels = getattr(model.config, "num_channels", 3)
    batch = {"pixel_values": torch.zeros(setup.batch, channels, height, width, dtype=model.dtype)}
    if not _is_bare(type(model)):
        batch["labels"] = torch.zeros(setup.batch, dtype=torch.int64)
    return batch


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.int64)


def _check_length(config: Any, setup: Setup) -> None:
    """Refuses sequences that a table of learned positions does not reach."""
    positions = getattr(config, "max_position_embeddings", None)
    rotary = any(getattr(config, name, None) for name in ("rope_parameters", "rope_theta", "alibi"))
    relative = getattr(config, "relative_attention", False) or getattr(config, "relative_attention_num_buckets", None)
    if isinstance(positions, int) and not rotary and not relative and setup.seq_len > positions > 0:
        raise ConfigError(
            f"Sequences have {setup.seq_len} tokens; the model has {positions} positions.",
            rule="max_position_embeddings of the config: positions are learned, one by one.",
            remedy=f"use --seq-len {positions} or less",
        )


def _quantize(model: Any, setup: Setup, head: Any, notes: dict[str, None]) -> None:
    kind: Any = setup.quantization
    skip = [module for module in (head, *_heads(model)) if module is not None]
    compute = _AUTOCAST_DTYPES.get(setup.dtype, _WEIGHT_DTYPES[setup.dtype])
    count = quantize_linears(model, kind, compute_dtype=compute, skip=skip)
    notes[f"{count} linear layers are held in {kind}, as bitsandbytes does; the output layer is not"] = None


def _heads(model: nn.Module) -> list[nn.Module]:
    """The last layers of a classifier, which are not quantised."""
    return [module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] in ("classifier", "score")]


def _chunk_loss(model: Any, setup: Setup, head: Any, notes: dict[str, None]) -> Any:
    if head is None or not isinstance(head, nn.Linear):
        notes["loss_chunks has no effect: the model has no single output layer"] = None
        return head
    softcap = getattr(model.config, "final_logit_softcapping", None)
    tokens = setup.batch * (setup.target_len or setup.seq_len)
    chunks = math.ceil(tokens / math.ceil(tokens / setup.loss_chunks))
    chunked = ChunkedHead(head, chunks, softcap=softcap)
    if softcap is not None:
        model.config.final_logit_softcapping = None
    model.set_output_embeddings(chunked)
    notes["each piece of the loss is made again in the backward pass: no logits are kept"] = None
    return chunked
