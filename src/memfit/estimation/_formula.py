"""The device memory of a training step by arithmetic alone: from a ``config.json`` and a setup, on any machine.

What is kept is counted tensor by tensor (`_families`), what lives together moment by moment. It is less exact than a
traced step, and its bounds are wider. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from memfit.errors import ConfigError, nearest
from memfit.estimation._bounds import bound_load
from memfit.estimation._events import Part, Phase
from memfit.estimation._families import Anatomy, Attention, Block, Kept, Linear, Stack, find_anatomy
from memfit.estimation._interval import Interval
from memfit.estimation._model_config import check_names
from memfit.estimation._setup import Setup, find_lora_targets

#: The versions whose memory the formula counts.
RULES_OF = {"torch": "2.13", "transformers": "5"}
_SIZE = {"fp32": 4, "bf16": 2, "fp16": 2}

#: Bytes of a number in 4 bits: blocks of 64 with a scale in fp32 each (bitsandbytes functional.py; scales that are
#: quantised once more take 0.05 less). In 8 bits: a row of a thousand or more shares one scale.
_QUANTISED = {"nf4": 0.5 + 4 / 64, "int8": 1 + 4 / 1024}
#: Bytes of both moments in 8 bits, with a scale in fp32 for each block of 256 numbers (bitsandbytes optim/optimizer.py,
#: torchao optim/subclass_8bit.py).
_STATES_IN_8_BITS = 2 + 2 * 4 / 256
#: Moments of a size with the weights, by optimizer.
_MOMENTS = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0, "none": 0}
#: DeepSpeed's reduce_bucket_size and allgather_bucket_size, in numbers (runtime/zero/config.py).
_BUCKET = 500_000_000
#: cuBLAS's workspace for each thread that multiplies: 4096 KiB x 2 + 16 KiB x 8, 32 MiB on Hopper
#: (aten/src/ATen/cuda/CublasHandlePool.cpp, PyTorch 2.13).
_WORKSPACE = Interval(2 * 4096 * 1024 + 8 * 16 * 1024, 32 << 20)
#: Frequencies of rotary positions and the like: kilobytes.
_BUFFERS = 1 << 20

#: How far what is kept and what is temporary may lie above its count; the second for families that are not known.
_ABOVE_COUNT = (1.0, 2.0)  # of parameters
_ABOVE_KEPT = (1.2, 2.0)
_ABOVE_TEMPORARY = (2.0, 4.0)


@dataclass(frozen=True)
class FormulaEstimate:
    """What a training step takes by the formula, in bytes.

    Attributes:
        parts: What the bytes of the highest moment are for.
        by_phase: The peak of each phase.
        num_parameters: Of the model, adapters included; over all devices.
        is_exact_family: Whether the model's family is one whose parameters are counted exactly.
        notes: What was assumed, in words.
    """

    parts: Mapping[Part, Interval]
    by_phase: Mapping[Phase, Interval]
    num_parameters: int
    is_exact_family: bool
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> Interval:
        """The highest moment of the step; weights may take more while they are built."""
        return Interval.highest(found for phase, found in self.by_phase.items() if phase != "build")


def estimate_by_formula(config: Mapping[str, Any], setup: Setup) -> FormulaEstimate:
    """The memory of a training step on one device, by arithmetic.

    Args:
        config: The content of the model's ``config.json``.
        setup: How it is trained.

    Raises:
        ConfigError: If the config does not tell widths and layers, or an adapter's target is no module.

    Example:
        >>> config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
        >>> found = estimate_by_formula(config, Setup(batch=2, seq_len=128, dtype="fp32"))
        >>> found.parts["weights"], max(found.by_phase, key=lambda phase: found.by_phase[phase].value)
        (Interval(value=497759232, upper=497759232), 'step')
    """
    case = _Case(find_anatomy(_with_task(config)), setup)
    moments = case.moments()
    by_phase = {
        phase: Interval.highest(Interval.total(moment.values()) for moment in found) for phase, found in moments.items()
    }
    every = [moment for found in moments.values() for moment in found]
    highest = max(every, key=lambda moment: Interval.total(moment.values()).value)
    parts = {part: share for part, share in highest.items() if share.upper}
    exact = case.anatomy.is_exact
    return FormulaEstimate(parts, by_phase, case.num_base + case.num_adapters, exact, case.notes)


def _with_task(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config that names no class with a loss is that of a language model, or of a classifier of images."""
    check_names(config)
    named = (config.get("architectures") or ["Model"])[0]
    task = "ForImageClassification" if config.get("model_type") == "vit" else "ForMaskedLM"
    return {**config, "architectures": [task]} if named.endswith("Model") else config


_Moment = dict[Part, Interval]


def _most(count: float) -> int:
    return int(count) + (count > int(count))


@dataclass(frozen=True)
class _Case:
    """One model in one setup; all bytes are those of one device."""

    anatomy: Anatomy
    setup: Setup

    # Dtypes and shares

    @property
    def is_amp(self) -> bool:
        return self.setup.dtype.endswith("-amp")  # with ZeRO no autocast runs, and nothing is cast

    @property
    def compute(self) -> int:
        """Bytes of a number in matrix products."""
        return _SIZE[self.setup.dtype.removesuffix("-amp")]

    @property
    def held(self) -> int:
        """Bytes of a number of a weight and of its gradient; ZeRO holds 16-bit weights and casts nothing."""
        return 4 if self.is_amp and not self.has_partitions else self.compute

    @property
    def has_partitions(self) -> bool:
        """Whether the optimizer works on fp32 copies of its share (DeepSpeed, runtime/zero/stage_1_and_2.py)."""
        return self.setup.strategy in ("zero1", "zero2", "zero3") and self.setup.world_size > 1

    @property
    def has_masters(self) -> bool:
        return self.trained == 2 and (self.setup.master_weights or self.has_partitions)

    @property
    def stream(self) -> int:
        """Bytes of a number of the hidden states: autocast adds to fp32 embeddings."""
        return self.held

    @property
    def trained(self) -> int:
        """Bytes of a number of what is trained: adapters are fp32 (PEFT's autocast_adapter_dtype)."""
        return 4 if self.setup.lora_rank else self.held

    @property
    def state(self) -> int:
        if self.setup.state_dtype:
            return _SIZE[self.setup.state_dtype]
        return 4 if self.has_masters else self.trained

    def _share(self, *strategies: str) -> float:
        return 1 / max(self.setup.world_size, 1) if self.setup.strategy in strategies else 1.0

    # Parameters

    @property
    def blocks(self) -> list[tuple[Stack, Block]]:
        return [(stack, stack.block) for stack in self.anatomy.stacks]

    @property
    def num_base(self) -> int:
        return self.anatomy.num_parameters

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """The names of matrix products that have adapters."""
        if not self.setup.lora_rank:
            return ()
        names = sorted({linear.name for _, block in self.blocks for linear in block.linears})
        wanted = self.setup.lora_targets or find_lora_targets(self.anatomy.family)
        if "all-linear" in wanted:
            return tuple(names)
        found = {want: [name for name in names if name == want or name.endswith("." + want)] for want in wanted}
        if missing := [want for want, hits in found.items() if not hits]:
            raise ConfigError(
                f"no module of the {self.anatomy.family} model is named {missing[0]!r}.",
                rule=f"adapters go to matrix products of its blocks; {nearest(missing[0], names)}",
                remedy=f"choose from {', '.join(names)}, or all-linear",
            )
        return tuple(name for hits in found.values() for name in hits)

    def _adapted(self, block: Block) -> list[Linear]:
        return [linear for linear in block.linears if linear.name in self.targets]

    @cached_property
    def num_adapters(self) -> int:
        rank = self.setup.lora_rank
        counts = (
            stack.num_blocks * rank * (linear.inputs + linear.outputs) * linear.copies
            for stack, block in self.blocks
            for linear in self._adapted(block)
        )
        return sum(counts)

    @property
    def num_trained(self) -> float:
        """Numbers that have gradients here, before any sharing of gradients and states."""
        base = self.num_adapters if self.setup.lora_rank else self.num_base
        return base * self._share("tp")

    @property
    def num_largest(self) -> int:
        """Numbers of the largest weight that is trained."""
        if self.setup.lora_rank:
            every = [
                self.setup.lora_rank * max(one.inputs, one.outputs) for _, b in self.blocks for one in self._adapted(b)
            ]
        else:
            every = [rows * width for rows, width in self.anatomy.tables]
            every += [linear.num_weights for _, block in self.blocks for linear in block.linears]
        return _most(max(every, default=0) * self._share("tp"))

    def _wide(self, counted: Interval) -> Interval:
        """With the room above that a family has of which not even the parameters are known."""
        return counted.times(1, _ABOVE_COUNT[not self.anatomy.is_exact])

    @cached_property
    def whole(self) -> Interval:
        """The weights before any sharing; libraries may widen what is not quantised to fp32."""
        in_blocks = sum(
            stack.num_blocks * linear.num_weights for stack, block in self.blocks for linear in block.linears
        )
        size, rest = _QUANTISED.get(self.setup.quantization, self.held), (self.num_base - in_blocks) * self.held
        whole = Interval(_most(in_blocks * size) + rest)
        whole += Interval(self.num_adapters * self.trained * bool(self.setup.lora_rank))
        return self._wide(whole + Interval(0, rest * (self.setup.quantization != "none" and self.held == 2)))

    @cached_property
    def weights(self) -> Interval:
        share = self._share("zero3", "fsdp", "tp")
        return self.whole.times(share, share if share == 1 else share * 1.02)  # rows may be padded

    @property
    def load(self) -> Interval | None:
        """What loading the weights takes."""
        blocks = [block.num_parameters for _, block in self.blocks]
        beside = self.num_base - sum(stack.num_blocks * block.num_parameters for stack, block in self.blocks)
        largest = max((one.num_weights for _, block in self.blocks for one in block.linears), default=0)
        largest *= self.held * (self.setup.quantization != "none")
        return bound_load(self.setup, self.whole, max(beside, *blocks) * self.held, largest)

    @cached_property
    def gradients(self) -> Interval:
        if self.setup.optimizer_in_backward:
            return self._wide(Interval(self.num_largest * self.trained, 2 * self.num_largest * self.trained))
        whole = Interval(_most(self.num_trained * self.trained))
        share = self._share("zero2", "zero3", "fsdp")
        return self._wide(whole.times(share, share if share == 1 else share * 1.02))

    @cached_property
    def optimizer(self) -> Interval:
        name, count = self.setup.optimizer, self.num_trained
        if name == "adafactor":  # a row's and a column's mean of each matrix (Shazeer and Stern 2018)
            lines = [(one.inputs + one.outputs) * stack.num_blocks for stack, b in self.blocks for one in b.linears]
            lines += [rows + width for rows, width in self.anatomy.tables]
            moments = Interval(sum(lines) * self.state, 2 * sum(lines) * max(self.state, 4))
        elif name == "adamw8bit":
            moments = Interval(_most(count * _STATES_IN_8_BITS)).times(1, 1.02)  # small weights have fp32 states
        else:
            moments = Interval(_most(count * _MOMENTS[name] * self.state))
        if self.has_masters:
            moments += Interval(_most(4 * count))
        share = self._share("zero1", "zero2", "zero3", "fsdp")
        return self._wide(moments.times(share, share if share == 1 else share * 1.02))

    @cached_property
    def step_temporaries(self) -> Interval:
        """What the update makes: Adam the root of its second moments, of all weights at once with ``foreach``."""
        name, share = self.setup.optimizer, self._share("zero1", "zero2", "zero3", "fsdp")
        one = self.num_largest
        every = _most(one if self.setup.optimizer_in_backward else self.num_trained * share)
        if name == "adafactor":
            size = self.trained
            found = Interval(every * size, 3 * every * size) if self.setup.foreach else Interval(0, 8 * one * size)
            return self._wide(found)
        if name in ("adamw", "adam"):
            size = self.state
            copies = 2 if size != self.trained and not self.has_masters else 1
            found = Interval(every * size * copies) if self.setup.foreach else Interval(0, 2 * one * size)
        elif name == "adamw8bit":  # a kernel of its own, or fp32 copies of one weight after another
            found = Interval(0, 8 * one)
        else:
            found = Interval()
        return self._wide(found + Interval(4 * every * self.has_masters))  # fp32 copies of gradients

    # What autograd keeps

    def _kept_bytes(self, kept: Kept) -> tuple[float, float]:
        """Bytes of one number of ``kept``: the value, and without a compiler."""
        if kept.feeds:
            adapted = sum(name in self.targets for name in kept.feeds)
            if not self.setup.lora_rank:
                found = 0 if kept.kind == "shared" else self.compute * (len(kept.feeds) if self.is_amp else 1)
            elif self.is_amp or self.trained == self.compute:
                found = 0 if kept.kind == "shared" else self.compute * (adapted if self.is_amp else min(adapted, 1))
            else:  # each adapter casts the input to its fp32 anew
                found = 4 * adapted
            if self.setup.quantization == "int8" and kept.kind != "shared":  # MatMul8bitLt keeps its input
                found += self.compute
            dropped = 5 * adapted  # with dropout: a mask, and the result beside the input
            return found, found + dropped
        sizes = {"compute": self.compute, "stream": self.stream, "fp32": 4, "byte": 1, "shared": 0}
        eager = sizes.get(kept.kind, 2 if self.stream == 2 else 0)
        if kept.for_weight and self.setup.lora_rank:
            return 0, 0
        if not self.setup.compiled:
            return eager, eager
        is_made_again = kept.is_fusible or kept.kind == "byte"
        return (0 if is_made_again else self.stream if kept.kind == "fp32" else eager), eager

    def _keeps_scores(self, one: Attention) -> bool:
        """No fused kernel takes fewer heads of keys in fp32 (ATen/native/transformers/cuda/sdp_utils.cpp)."""
        return self.setup.attention == "eager" or one.is_eager or (self.compute == 4 and one.kv_heads != one.heads)

    def _attention_kept(self, one: Attention, queries: int, keys: int) -> Interval:
        """Queries, keys, values, result and log-sum-exp of a fused kernel; the scores of an eager one."""
        wide, narrow = one.heads * one.head_dim, one.kv_heads * one.head_dim
        batch, size = self.setup.batch, self.compute
        value = batch * (2 * queries * wide + 2 * keys * narrow) * size
        value += batch * queries * (wide + narrow) * size * one.is_fused_rotary
        repeated = batch * 2 * keys * (wide - narrow) * size
        pairs = one.heads * queries * keys
        if self._keeps_scores(one):
            scores = 4 if one.upcasts or self.is_amp else size
            scores += (size if one.has_dropout or scores != size else 0) + one.has_dropout + size * one.is_capped
            return Interval(value + repeated + batch * pairs * scores)
        value += batch * queries * one.heads * 4
        bias = pairs * size if one.is_biased else 0
        return Interval(value + bias, value + bias * batch + repeated)

    def _tokens(self, stack: Stack) -> tuple[int, int]:
        """Tokens of a sample that the stack runs over, and those of the source."""
        source = self.anatomy.tokens or self.setup.seq_len
        target = self.setup.target_len or source
        return (target if stack.is_target else source), source

    def block_kept(self, stack: Stack) -> Interval:
        """What one block keeps for its backward pass."""
        block, (tokens, source) = stack.block, self._tokens(stack)
        count, share = self.setup.batch * tokens, self._share("tp")
        value = upper = 0.0
        for kept in block.kept:
            inside = share if kept.width != block.width else 1.0
            low, high = self._kept_bytes(kept)
            value += count * kept.width * low * inside
            upper += count * kept.width * high * inside
        ranks = sum(count * self.setup.lora_rank * self.compute for _ in self._adapted(block))
        found = Interval(_most(value), _most(max(value, upper))) + Interval(ranks, 2 * ranks)
        for one in block.attentions:
            found += self._attention_kept(one, tokens, source if one.is_crossed else tokens).times(share)
        return found.times(1, _ABOVE_KEPT[not self.anatomy.is_exact])

    def _checkpoint(self, stack: Stack) -> Interval:
        """What one block keeps through the whole forward pass."""
        if self.setup.offload_activations:
            return Interval()
        whole, block = self.block_kept(stack), stack.block
        count = self.setup.batch * self._tokens(stack)[0]
        entry = Interval(count * block.width * self.stream)
        if self.setup.gradient_checkpointing == "none":
            return whole
        if self.setup.gradient_checkpointing == "full":
            return entry
        share = self.compute * self._share("tp")
        numbers = [linear.outputs * linear.used for linear in block.linears]
        results = sum(one.heads * one.head_dim for one in block.attentions)
        half, every = (_most(count * (sum(some) + results) * share) for some in (numbers[::2], numbers))
        value = min(entry.value + half, whole.value)  # torchtitan keeps every second product, others all
        return Interval(value, max(value, min(entry.value + _most(1.2 * every), whole.upper)))

    def block_temporaries(self, stack: Stack) -> Interval:
        """What the backward pass of one block makes beside gradients of weights, at its highest."""
        block, (tokens, source) = stack.block, self._tokens(stack)
        count, share = self.setup.batch * tokens, self._share("tp")
        mlp = (block.inner_width * share + block.width) * self.compute
        wide = max((one.heads * one.head_dim for one in block.attentions), default=0)
        attention = 4 * wide * self.compute + 4 * wide  # gradients of q, k, v and the result; an fp32 sum of q's
        norm = 3 * 4 * block.width
        found = count * max(mlp, attention * share, norm)
        scores = (
            self.setup.batch * tokens * max(tokens, source) * max((one.heads for one in block.attentions), default=0)
        )
        if any(self._keeps_scores(one) or one.is_biased for one in block.attentions):
            found = max(found, scores * (4 + self.compute) * share)
        if self.setup.quantization != "none":  # one weight made whole again
            found += max(linear.inputs * linear.outputs for linear in block.linears) * self.compute
        return Interval(_most(found)).times(1, _ABOVE_TEMPORARY[not self.anatomy.is_exact])

    # Logits and loss

    def _logits(self) -> tuple[Interval, Interval]:
        """The highest bytes of logits and loss in the forward pass and in the backward one.

        Forward: the logits, their fp32 copy and the log-probabilities, which are kept. Backward: these, their gradient
        and that of the logits. A loss in pieces is made again piece by piece, or keeps all log-probabilities.
        """
        head, batch = self.anatomy.head, self.setup.batch
        if head is None:
            return Interval(), Interval()
        rows = batch * self._tokens(self.anatomy.stacks[-1])[0] if self.anatomy.has_token_logits else batch
        numbers, chunks = rows * head.outputs, max(self.setup.loss_chunks, 1)
        wide = 4 if self.anatomy.upcasts_logits or self.is_amp else self.compute
        capped = self.compute * self.anatomy.caps_logits  # the result of the hyperbolic tangent
        forward = numbers * (capped + self.compute + wide * (wide != self.compute) + wide)
        backward, pieces = numbers * (3 * wide + capped), numbers * wide * (chunks > 1)
        return (
            Interval(_most(forward / chunks), _most(forward / chunks) + pieces),
            Interval(_most(backward / chunks), _most(backward / chunks) + pieces + numbers * self.compute),
        )

    # Moments

    @property
    def _cast(self) -> Interval:
        """Weights in autocast's dtype: all of them at the end of the forward pass."""
        if self.held == self.compute or self.setup.is_sharded:
            return Interval()
        numbers = sum(stack.num_blocks * one.num_weights for stack, block in self.blocks for one in block.linears)
        numbers += self.anatomy.head.num_weights if self.anatomy.head else 0
        return self._wide(Interval(_most(numbers * self.compute * self._share("tp"))))

    @property
    def _tied_gradients(self) -> Interval:
        """What the backward pass ends with beside all gradients: the head's, the embedding's, and then their sum."""
        if not self.anatomy.is_tied or self.setup.lora_rank or not self.anatomy.tables:
            return Interval()
        rows, width = self.anatomy.tables[0]
        return Interval(_most(2 * rows * width * self.trained * self._share("tp")))

    def _communication(self) -> tuple[Interval, Interval, Interval]:
        """Buffers that always live, those of the forward pass, and those of the backward pass and the update."""
        strategy, world = self.setup.strategy, self.setup.world_size
        if world <= 1 or strategy == "none":
            return Interval(), Interval(), Interval()
        if strategy == "ddp":  # buckets as large as all gradients (torch/csrc/distributed/c10d/reducer.cpp)
            return Interval(_most(self.num_trained * self.trained)), Interval(), Interval()
        if strategy in ("zero1", "zero2"):
            bucket = _most(min(self.num_trained, _BUCKET) * self.trained)
            return Interval(), Interval(), Interval(bucket, 2 * bucket)
        if strategy == "tp":
            widest = max(self.setup.batch * self._tokens(stack)[0] * block.width for stack, block in self.blocks)
            return Interval(), Interval(0, 2 * widest * self.compute), Interval(0, 2 * widest * self.compute)
        block = max(block.num_parameters for _, block in self.blocks)
        root = self.num_base - sum(stack.num_blocks * block.num_parameters for stack, block in self.blocks)
        gathered = Interval((2 * block + root) * self.compute, (3 * block + root) * self.compute)
        reduced = 0 if self.setup.lora_rank else block * self.trained
        return Interval(), gathered, gathered + Interval(reduced, 2 * reduced + root * self.trained)

    def _always(self) -> _Moment:
        tokens = sum(self._tokens(stack)[0] for stack in self.anatomy.stacks)
        inputs = self.setup.batch * tokens * 16  # ids and labels
        if self.anatomy.tokens:
            inputs = self.setup.batch * tokens * 16 * 16 * 3 * self.held  # patches of 16 x 16 pixels in three colours
        return {
            "weights": self.weights,
            "buffers": Interval(0, _BUFFERS),
            "optimizer": self.optimizer,
            "inputs": Interval(inputs, 2 * inputs),
            "communication": self._communication()[0],
        }

    def moments(self) -> dict[Phase, list[_Moment]]:
        """What lives at each moment that may be the highest of its phase."""
        always, stacks = self._always(), self.anatomy.stacks
        widths = [self.setup.batch * self._tokens(stack)[0] * stack.block.width for stack in stacks]
        ends = Interval(sum(widths) * (4 + self.stream + self.compute)).times(1, 2)  # last norms, embedding's dropout
        kept = Interval.total([ends, *(self._checkpoint(stack).times(stack.num_blocks) for stack in stacks)])
        again = self.setup.gradient_checkpointing != "none" or self.setup.offload_activations
        one = Interval.highest(self.block_kept(stack) for stack in stacks)
        inside = Interval.highest(self.block_temporaries(stack) for stack in stacks)
        halved = Interval(inside.value // 2, (inside + one).upper if again else inside.upper)
        made, torn = self._logits()
        _, gathered, reduced = self._communication()
        accumulated = self.gradients if self.setup.num_microbatches > 1 else Interval()
        spare = Interval(self.num_largest * self.trained)  # a gradient before it is added to one that is there
        first = accumulated if accumulated.value else spare  # the head's
        late = spare if accumulated.value else Interval()
        if self.setup.optimizer_in_backward:
            late += self.step_temporaries
        late += self._tied_gradients
        recomputed, threads = (one if again else Interval()), _WORKSPACE.times(2)

        def moment(communication: Interval, **others: Interval) -> _Moment:
            return {**always, "communication": always["communication"] + communication, **others}  # type: ignore[dict-item]

        run = {"cast_weights": self._cast, "gradients": accumulated}
        forward = [
            moment(gathered, activations=kept, temporaries=made, workspaces=_WORKSPACE, **run),
            moment(gathered, activations=kept, temporaries=halved, workspaces=_WORKSPACE, **run),
        ]
        last = {"cast_weights": self._cast, "gradients": first}
        backward = [
            moment(reduced, activations=kept, temporaries=torn, workspaces=threads, **run),
            moment(reduced, activations=kept + recomputed, temporaries=inside, workspaces=threads, **last),
            moment(reduced, activations=ends + one, temporaries=inside, gradients=self.gradients, workspaces=threads),
            moment(reduced, activations=ends, temporaries=late, gradients=self.gradients, workspaces=threads),
        ]
        step = moment(Interval(), gradients=self.gradients, temporaries=self.step_temporaries, workspaces=threads)
        if self.setup.strategy in ("zero1", "zero2"):
            step["communication"] += reduced
        steps = [step]
        if self.setup.optimizer_in_backward:
            steps = [moment(Interval(), workspaces=threads)]
        load = self.load
        loads: dict[Phase, list[_Moment]] = {} if load is None else {"load": [{"weights": load}]}
        if self.setup.optimizer == "none":
            return loads | {"build": [always], "forward": forward[:1]}
        built: _Moment = {"weights": self.weights, "buffers": Interval(0, _BUFFERS)}
        if self.has_masters:
            built["optimizer"] = Interval(0, self.optimizer.upper)
        return loads | {"build": [built], "forward": forward, "backward": backward, "step": steps}

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed."""
        found = []
        if self.anatomy.has_towers:
            found.append(
                "what sees or hears beside the language model is counted roughly: its parameters and not what it keeps"
            )
        elif not self.anatomy.is_exact:
            like = self.anatomy.family
            found.append(f"this model's family is unknown: it is counted like {like}, and bounds are twice as wide")
        if self.setup.lora_rank:
            found.append("adapters are held in fp32; their inputs are bounded with dropout")
        if self.setup.compiled:
            found.append(
                "of compiled blocks the value keeps inputs of products and what is dear to make again, the bound all"
            )
        return tuple(found)
