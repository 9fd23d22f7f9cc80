"""The flags of ``memfit estimate`` that say how a model is trained, and the setup that they make."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from typer import Option

from memfit.checks import check_one_given
from memfit.errors import UsageError, nearest
from memfit.estimation import Optimizer, Setup, equation_of_batch, split_batch

#: Torch's own names of types.
_ALIASES = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "amp": "bf16-amp",
}


@dataclass(frozen=True)
class Training:
    """The flags of a training. One that has the name of a field of ``Setup`` gives its value."""

    batch: Annotated[str, Option(help="Samples of a microbatch; auto: as many as fit.", metavar="N|auto")] = "1"
    global_batch: Annotated[int | None, Option(min=1, help="Samples an update, over all devices.", metavar="N")] = None
    seq_len: Annotated[int, Option(min=1, help="Tokens of a sample, padding included.", metavar="N")] = 512
    target_len: Annotated[int | None, Option(min=1, help="Tokens of a target, for a decoder.", metavar="N")] = None
    lengths: Annotated[
        Path | None, Option(help="The data's lengths: the longest batch counts, cut at --seq-len.", metavar="FILE")
    ] = None
    dtype: Annotated[
        str,
        Option(
            "--dtype", help="fp32, bf16, fp16 (weights too), bf16-amp, fp16-amp (weights in fp32).", metavar="DTYPE"
        ),
    ] = "bf16"
    optimizer: Annotated[str, Option(help=f"One of {', '.join(get_args(Optimizer))}.", metavar="NAME")] = "adamw"
    state_dtype: Annotated[str, Option(help="Type of moments; none: the weights'.", metavar="DTYPE")] = "none"
    master_weights: Annotated[bool, Option(help="The optimizer holds an fp32 copy of 16-bit weights.")] = False
    optimizer_in_backward: Annotated[bool, Option(help="Update each weight within the backward pass.")] = False
    foreach: Annotated[bool, Option(help="Update all weights at once; fused=True is --no-foreach.")] = True
    gradient_checkpointing: Annotated[bool, Option(help="Keep only the inputs of blocks.")] = False
    selective_checkpointing: Annotated[bool, Option(help="Keep the results of expensive operations.")] = False
    attention: Annotated[str, Option(help="sdpa, flash, or eager, which keeps its scores.", metavar="NAME")] = "sdpa"
    loss_chunks: Annotated[int, Option(min=1, help="Make the logits in so many pieces.", metavar="N")] = 1
    compiled: Annotated[
        bool, Option("--compile/--no-compile", help="Blocks run through torch.compile: counted as without.")
    ] = False
    lora: Annotated[str | None, Option(help="Adapters: rank, and modules.", metavar="RANK[:NAME,NAME]")] = None
    quantization: Annotated[str, Option("--quant", help="Frozen weights: none, nf4, int8.", metavar="FORM")] = "none"
    world_size: Annotated[int, Option(min=1, help="Devices.", metavar="N")] = 1
    strategy: Annotated[str | None, Option(help="ddp, zero1, zero2, zero3, fsdp.", metavar="NAME")] = None
    load: Annotated[
        str, Option(help="Loading of sharded weights: shards, whole (all on each device first), any.", metavar="HOW")
    ] = "any"
    microbatches: Annotated[int | None, Option(min=1, help="Forward and backward passes an update.", metavar="N")] = (
        None
    )
    clip_grad_norm: Annotated[bool, Option("--clip/--no-clip", help="Gradients are clipped by their norm.")] = True

    @property
    def is_auto(self) -> bool:
        """True if the largest batch that fits is asked for."""
        return self.batch == "auto"

    def setup(self) -> Setup:
        """Return the setup; its batch is 1 where the largest is asked for.

        Raises:
            UsageError: A value is not known, or two contradict each other.
        """
        given: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(Setup) if hasattr(self, one.name)}
        full, selective = self.gradient_checkpointing, self.selective_checkpointing
        rank, targets = parse_lora(self.lora)
        given |= {
            "batch": parse_batch(self.batch),
            "dtype": _ALIASES.get(self.dtype, self.dtype),
            "state_dtype": None if self.state_dtype == "none" else _ALIASES.get(self.state_dtype, self.state_dtype),
            "optimizer": self.optimizer.lower(),
            "gradient_checkpointing": "full" if full else "selective" if selective else "none",
            "lora_rank": rank,
            "lora_targets": targets,
            "strategy": self.strategy or ("ddp" if self.world_size > 1 else "none"),
            "num_microbatches": self.microbatches or 1,
        }
        _check_names(given)
        _check(self)
        setup = Setup(**given)
        if self.global_batch is not None and not self.is_auto:
            setup = self._with_microbatches(setup, self.global_batch)
        return setup

    def _with_microbatches(self, setup: Setup, global_batch: int) -> Setup:
        """The setup with as many microbatches as make up the samples of an update."""
        found = split_batch(global_batch, setup.batch, setup.world_size)
        if self.microbatches not in (None, found):
            raise UsageError(
                f"--microbatches {self.microbatches} with --global-batch {global_batch}, which needs {found}.",
                rule=equation_of_batch(setup.batch, found, setup.world_size) + ".",
                remedy="leave one of them out",
            )
        return replace(setup, num_microbatches=found)


def parse_batch(text: str) -> int:
    """Return the samples of a microbatch; 1 for as many as fit, which is where the search begins.

    >>> parse_batch("8"), parse_batch("auto")
    (8, 1)
    """
    if text == "auto":
        return 1
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise UsageError(
            f"--batch {text} is no number of samples.",
            rule="a microbatch has one sample or more.",
            remedy="write for example --batch 8, or --batch auto for as many as fit",
        )
    return int(text)


def parse_lora(text: str | None) -> tuple[int, tuple[str, ...]]:
    """Return a rank and the names behind it.

    >>> parse_lora("16:q_proj,v_proj"), parse_lora("8"), parse_lora(None)
    ((16, ('q_proj', 'v_proj')), (8, ()), (0, ()))
    """
    if text is None:
        return 0, ()
    rank, _, names = text.partition(":")
    if not (rank.isascii() and rank.isdigit() and int(rank) > 0):
        raise UsageError(
            f"--lora {text} names no rank.",
            rule="it is a whole number from 1, and the names of modules behind a colon.",
            remedy="write for example --lora 16 or --lora 16:q_proj,v_proj",
        )
    return int(rank), tuple(name.strip() for name in names.split(",") if name.strip())


def _check_names(given: dict[str, Any]) -> None:
    """Refuse a word that is none of those that its field of ``Setup`` may have."""
    for name, hint in get_type_hints(Setup).items():
        value, known = given.get(name), _choices(hint)
        if known and value is not None and value not in known:
            flag = {"quantization": "quant"}.get(name, name).replace("_", "-")
            rule = f"it is one of {', '.join(known)}."
            raise UsageError(f"--{flag} {value} is not known.", rule=rule, remedy=nearest(value, known))


def _choices(hint: Any) -> tuple[str, ...]:
    """The words of a ``Literal``, also of one that may be None."""
    found = get_args(hint)
    return found if get_origin(hint) is Literal else tuple(word for one in found for word in _choices(one))


def _check(flags: Training) -> None:
    """Refuse flags that contradict each other; what a setup contradicts in itself it refuses when it is made."""
    check_one_given(
        {
            "--gradient-checkpointing": flags.gradient_checkpointing,
            "--selective-checkpointing": flags.selective_checkpointing,
        },
        rule="blocks keep their inputs only, or the results of expensive operations too.",
        remedy="leave one of them out",
    )
    given = f"--microbatches {flags.microbatches}" if flags.microbatches is not None else ""
    given = given or ("--optimizer-in-backward" if flags.optimizer_in_backward else "")
    if flags.is_auto and flags.global_batch is not None and given:
        raise UsageError(
            f"{given} with --batch auto and --global-batch {flags.global_batch}.",
            rule="the batch that fits decides how many microbatches, and sums of their gradients, make up an update.",
            remedy="leave one of them out, or give --batch a number",
        )
