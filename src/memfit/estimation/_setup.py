"""How a model will be trained: everything beside the model that decides on its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memfit.errors import ConfigError, UsageError

Dtype = Literal["fp32", "bf16", "fp16", "bf16-amp", "fp16-amp"]
Optimizer = Literal["adamw", "adam", "adamw8bit", "adafactor", "sgd", "momentum", "none"]
Checkpointing = Literal["none", "selective", "full"]
Attention = Literal["sdpa", "flash", "eager"]
Strategy = Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp", "tp"]
Quantization = Literal["none", "nf4", "int8"]
Loading = Literal["any", "shards", "whole"]


#: The strategies that the formula computes; the others are traced.
COMPUTED: tuple[Strategy, ...] = ("zero1", "zero2", "zero3", "tp")
#: What PEFT 0.17 adapts when it is told nothing (utils/constants.py), by model type; others have q_proj and v_proj.
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
        seq_len: Tokens of a sample (of an encoder and decoder: the source's), padding included.
        target_len: Tokens of a target of an encoder-decoder model; None for ``seq_len``.
        dtype: ``bf16`` and ``fp16`` are pure: weights, gradients and optimizer states are in it. With ``-amp`` they are
            in fp32 and forward and loss run under autocast.
        state_dtype: The dtype of the optimizer's moments; None for that of the weights.
        master_weights: Whether the optimizer holds an fp32 copy of 16-bit weights.
        optimizer: The optimizer's name.
        optimizer_in_backward: Whether each weight is updated, and its gradient dropped, within the backward pass.
        foreach: Whether the update runs over all weights at once, with temporaries of all of them, as torch does on
            CUDA by default; ``fused`` kernels and ``False`` need none.
        gradient_checkpointing: ``full`` keeps only the inputs of blocks; ``selective`` keeps the results of expensive
            operations and makes the rest again.
        offload_activations: Whether kept activations wait in host memory.
        attention: ``sdpa`` and ``flash`` keep no scores; ``eager`` does.
        loss_chunks: The logits are made, and their loss taken, in so many pieces.
        compiled: Whether blocks run through ``torch.compile``.
        lora_rank: The rank of low-rank adapters; 0 for none. The base weights are frozen then.
        lora_targets: The names of the modules that get adapters; empty for the usual ones of the model's family.
        quantization: How frozen base weights are held.
        world_size: Devices.
        strategy: What is shared out among them.
        load: How weights that are shared out are loaded: ``shards`` one block after the other, ``whole`` with the whole
            model on each device before it is sharded, ``any`` with the first as the value and the second as the bound.
        num_microbatches: Forward and backward passes before each update.
        clip_grad_norm: Whether gradients are clipped by their norm.
    """

    batch: int = 1
    seq_len: int = 512
    target_len: int | None = None
    dtype: Dtype = "bf16"
    state_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    master_weights: bool = False
    optimizer: Optimizer = "adamw"
    optimizer_in_backward: bool = False
    foreach: bool = True
    gradient_checkpointing: Checkpointing = "none"
    offload_activations: bool = False
    attention: Attention = "sdpa"
    loss_chunks: int = 1
    compiled: bool = False
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    quantization: Quantization = "none"
    world_size: int = 1
    strategy: Strategy = "none"
    load: Loading = "any"
    num_microbatches: int = 1
    clip_grad_norm: bool = True

    def __post_init__(self) -> None:
        """Refuse a setup that contradicts itself.

        Raises:
            ConfigError: It does. The text names the options of ``memfit estimate``.
        """
        faults = (
            (
                self.optimizer_in_backward and self.num_microbatches > 1,
                f"--optimizer-in-backward with --microbatches {self.num_microbatches}.",
                "a gradient is dropped as soon as it is there, so none is summed up over microbatches.",
                "leave one of them out",
            ),
            (
                self.strategy != "none" and self.world_size == 1,
                f"--strategy {self.strategy} on one device.",
                "a strategy shares out among devices.",
                "--world-size 8, or leave --strategy out",
            ),
            (
                self.master_weights and self.dtype not in ("bf16", "fp16"),
                f"--master-weights with --dtype {self.dtype}.",
                "an fp32 copy is held of 16-bit weights; with -amp the weights are in fp32 already.",
                "--dtype bf16, or leave --master-weights out",
            ),
            (
                self.quantization != "none" and not self.lora_rank and self.optimizer != "none",
                f"--quant {self.quantization} without --lora.",
                "quantised weights are frozen: what is trained are adapters beside them.",
                "--lora 16, or --optimizer none for inference",
            ),
            (
                self.quantization != "none" and self.strategy == "tp",
                f"--quant {self.quantization} with --strategy tp.",
                "the blocks of a quantised weight do not split by rows and columns.",
                "--strategy fsdp, or leave --quant out",
            ),
        )
        for is_wrong, what, rule, remedy in faults:
            if is_wrong:
                raise ConfigError(what, rule=rule, remedy=remedy)

    @property
    def is_sharded(self) -> bool:
        """Whether each device holds a part of the weights and gathers them block by block."""
        return self.world_size > 1 and self.strategy in ("fsdp", "zero3")


def find_lora_targets(model_type: str) -> tuple[str, ...]:
    """Return the names of the layers that PEFT adapts in models of a type when it is told nothing.

    >>> find_lora_targets("t5"), find_lora_targets("qwen2")
    (('q', 'v'), ('q_proj', 'v_proj'))
    """
    return _LORA_TARGETS.get(model_type, ("q_proj", "v_proj"))


def list_assumptions(setup: Setup) -> tuple[str, ...]:
    """Return what a setup leaves open or loses, in words.

    >>> list_assumptions(Setup(dtype="bf16", master_weights=True)), len(list_assumptions(Setup(dtype="bf16")))
    ((), 1)
    """
    found = []
    partitions = setup.strategy in ("zero1", "zero2", "zero3") and setup.world_size > 1  # DeepSpeed's are in fp32
    full = not setup.lora_rank and setup.optimizer != "none"
    if setup.dtype == "bf16" and full and not setup.master_weights and not partitions:
        found.append(
            "pure bf16 loses every update that is less than about 1/256 of its weight; --master-weights or --dtype "
            "bf16-amp keeps them"
        )
    if setup.is_sharded and setup.load == "any":
        found.append(
            "load: the value loads shard by shard, the bound loads the whole model on each device before sharding it; "
            "--load shards or --load whole says which"
        )
    elif setup.quantization != "none":
        found.append(
            f"load: from_pretrained puts one weight after the other on the device and makes it {setup.quantization} "
            "there; the bound has what is not quantised in fp32, as after PEFT's prepare_model_for_kbit_training"
        )
    return tuple(found)


def equation_of_batch(batch: int, num_microbatches: int, world_size: int) -> str:
    """The size of the batch that one update sees, as an equation.

    >>> equation_of_batch(8, 16, 1)
    '8 samples x 16 microbatches x 1 device = 128 samples an update'
    """
    factors = ((batch, "sample"), (num_microbatches, "microbatch"), (world_size, "device"))
    for count, name in factors:
        if count < 1:
            raise UsageError(
                f"a batch of {count} {name}s has no sample.",
                rule="samples, microbatches and devices are at least 1 each.",
                remedy="give whole numbers above 0",
            )
    words = " x ".join(f"{count} {_plural(name, count)}" for count, name in factors)
    total = batch * num_microbatches * world_size
    return f"{words} = {total} {_plural('sample', total)} an update"


def _plural(name: str, count: int) -> str:
    return name if count == 1 else name + ("es" if name.endswith("ch") else "s")


def split_batch(total: int, batch: int, world_size: int = 1) -> int:
    """The number of microbatches that makes ``total`` samples an update of ``batch`` samples on each device.

    Raises:
        UsageError: If ``total`` is no multiple of what the devices take at once.

    >>> split_batch(128, 8), split_batch(128, 4, world_size=8)
    (16, 4)
    """
    at_once = batch * world_size
    if at_once < 1 or total < 1 or total % at_once:
        below = max(at_once, 1) * max(total // max(at_once, 1), 1)
        raise UsageError(
            f"{total} samples an update are no multiple of {batch} x {world_size} = {at_once} samples at once.",
            rule="samples an update = samples of a microbatch x microbatches x devices, all whole numbers.",
            remedy=f"take {below} samples an update, or a microbatch that divides {total}",
        )
    return total // at_once
