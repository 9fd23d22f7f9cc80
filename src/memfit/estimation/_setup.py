"""How a model is trained: every setting beside the model that decides its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from memfit.errors import ConfigError, UsageError, check_counts
from memfit.units import format_count

Dtype = Literal["fp32", "bf16", "fp16", "bf16-amp", "fp16-amp"]
Optimizer = Literal[
    "adamw", "adam", "adamw8bit", "paged_adamw", "paged_adamw8bit", "adafactor", "sgd", "momentum", "none"
]
Checkpointing = Literal["none", "selective", "full"]
Attention = Literal["sdpa", "flash", "eager"]
Strategy = Literal["none", "ddp", "fsdp"]
Quantization = Literal["none", "nf4"]

#: How many weights in 4 bits, and how many moments in 8 bits, share an fp32 scale: bitsandbytes 0.45, functional.py
#: (double quantisation takes less) and optim/optimizer.py (2048 moments before 0.44: fewer bytes).
NF4_BLOCK, STATE_BLOCK = 64, 256
NOT_COMPILED = "torch.compile is left out: these figures are without it; most published compiled steps took less"
#: What PEFT 0.17 adapts by default (utils/constants.py), by model type; others have q_proj and v_proj.
_LORA_TARGETS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("t5", "mt5"), ("q", "v")),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    **dict.fromkeys(("bloom", "gpt_neox", "falcon", "chatglm"), ("query_key_value",)),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "layoutlm", "vit"), ("query", "value")),
    "deberta-v2": ("query_proj", "value_proj"),
    "deberta": ("in_proj",),
    "mpt": ("Wqkv",),
    "codegen": ("qkv_proj",),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "phi3": ("qkv_proj",),
}


@dataclass(frozen=True)
class Setup:
    """How a model is trained.

    Attributes:
        batch: Samples of one microbatch on one device.
        seq_len: Tokens of a sample (encoder-decoder models: of the source), padding included.
        target_len: Tokens of a target of an encoder-decoder model; None for ``seq_len``.
        dtype: ``bf16`` and ``fp16``: weights, gradients and optimizer states are 16-bit. With ``-amp`` they are fp32
            and forward and loss run under autocast.
        master_weights: Whether the optimizer holds an fp32 copy of 16-bit weights.
        optimizer: The optimizer's name; a paged one is that of bitsandbytes, whose large moments may leave the device.
        optimizer_in_backward: Whether the backward pass updates each weight and drops its gradient.
        foreach: Whether the update runs over all weights at once, with temporaries of all of them: torch's default on
            CUDA. ``fused`` kernels and ``False`` need none.
        gradient_checkpointing: ``full`` keeps the inputs of blocks; ``selective`` also results of expensive operations.
        attention: ``sdpa`` and ``flash`` keep no scores; ``eager`` does.
        loss_chunks: In how many chunks logits and loss are computed.
        compiled: Whether blocks run through ``torch.compile``. It is counted as without, and a note says so.
        lora_rank: The rank of LoRA adapters; 0 for none. The base weights are frozen then.
        lora_targets: The names of the modules that get adapters; empty for PEFT's default.
        lora_dropout: Dropout of the adapters' inputs; PEFT's own default is 0, that of most recipes 0.05.
        quantization: How frozen base weights are held. One device trains the rest in fp32, under autocast.
        world_size: Devices.
        strategy: What the devices share out.
        num_microbatches: Forward and backward passes before each update.
        clip_grad_norm: Whether gradients are clipped by their norm.
        learning_rate: Says whether updates survive the precision; None for 1e-4.
    """

    batch: int = 1
    seq_len: int = 512
    target_len: int | None = None
    dtype: Dtype = "bf16"
    master_weights: bool = False
    optimizer: Optimizer = "adamw"
    optimizer_in_backward: bool = False
    foreach: bool = True
    gradient_checkpointing: Checkpointing = "none"
    attention: Attention = "sdpa"
    loss_chunks: int = 1
    compiled: bool = False
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    lora_dropout: float = 0.05
    quantization: Quantization = "none"
    world_size: int = 1
    strategy: Strategy = "none"
    num_microbatches: int = 1
    clip_grad_norm: bool = True
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        """Refuse a setup that contradicts itself, in the options of ``memfit estimate``."""
        faults = (
            (
                self.quantization not in get_args(Quantization),
                f"--train quantization={self.quantization}.",
                "frozen weights are held as they are, or in 4 bits: nf4.",
                "--train quantization=nf4, or leave it out",
            ),
            (
                self.optimizer_in_backward and self.num_microbatches > 1,
                f"--train optimizer_in_backward=true with --microbatches {self.num_microbatches}.",
                "each gradient is dropped at once, so that microbatches cannot be summed.",
                "leave one of them out",
            ),
            (
                self.strategy != "none" and self.world_size == 1,
                f"--strategy {self.strategy} on one device.",
                "a strategy shares memory among several devices.",
                "--world-size 8, or leave --strategy out",
            ),
            (
                self.master_weights and self.dtype not in ("bf16", "fp16"),
                f"--train master_weights=true with --dtype {self.dtype}.",
                "only 16-bit weights have an fp32 copy; with -amp the weights are fp32.",
                "--dtype bf16, or leave master_weights out",
            ),
            (
                self.quantization != "none" and not self.lora_rank and self.optimizer != "none",
                f"--train quantization={self.quantization} without --lora.",
                "quantised weights are frozen: only adapters beside them are trained.",
                "--lora 16, or --optimizer none for inference",
            ),
        )
        for is_wrong, what, rule, remedy in faults:
            if is_wrong:
                raise ConfigError(what, rule=rule, remedy=remedy)

    @property
    def is_sharded(self) -> bool:
        """Whether each device holds a part of the weights and gathers them for each block."""
        return self.world_size > 1 and self.strategy == "fsdp"

    @property
    def autocasts(self) -> bool:
        """Whether a step casts fp32 weights, as also after PEFT's ``prepare_model_for_kbit_training``."""
        prepared = self.quantization != "none" and self.optimizer != "none" and not self.is_sharded
        return prepared or self.dtype.endswith("-amp")


def find_lora_targets(model_type: str) -> tuple[str, ...]:
    """Return the names of the layers that PEFT adapts by default in models of a type."""
    return _LORA_TARGETS.get(model_type, ("q_proj", "v_proj"))


def equation_of_batch(batch: int, num_microbatches: int, world_size: int) -> str:
    """Return the size of the batch that one update sees, as an equation.

    >>> equation_of_batch(8, 16, 1)
    '8 samples x 16 microbatches x 1 device = 128 samples an update'
    """
    check_counts(UsageError, 1, samples=batch, microbatches=num_microbatches, devices=world_size)
    factors = ((batch, "sample"), (num_microbatches, "microbatch"), (world_size, "device"))
    total = format_count(batch * num_microbatches * world_size, "sample")
    return f"{' x '.join(format_count(*one) for one in factors)} = {total} an update"


def split_batch(total: int, batch: int, world_size: int = 1) -> int:
    """Return how many microbatches make ``total`` samples an update, with ``batch`` samples on each device."""
    check_counts(UsageError, 1, total=total, batch=batch, world_size=world_size)
    at_once = batch * world_size
    if total % at_once:
        raise UsageError(
            f"{total} samples an update are no multiple of {batch} x {world_size} = {at_once} samples at once.",
            rule="samples an update = samples of a microbatch x microbatches x devices, all whole numbers.",
            remedy=f"take {max(total // at_once, 1) * at_once} samples an update, or a microbatch that divides {total}",
        )
    return total // at_once
