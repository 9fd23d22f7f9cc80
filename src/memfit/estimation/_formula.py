"""Compute the device memory of a training step from a ``config.json`` and a setup. No torch.

What is kept is counted tensor by tensor (`_families`), what lives together moment by moment. The bounds are wider than
those of a traced step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import ceil
from typing import Any

from memfit.errors import ConfigError, nearest
from memfit.estimation._assumptions import list_assumptions
from memfit.estimation._estimate import Estimate, Metric, judge
from memfit.estimation._events import Part, Phase
from memfit.estimation._families import Anatomy, Attention, Kept, Stack, check_names, find_anatomy
from memfit.estimation._gpus import ANY_GPU, Gpu
from memfit.estimation._interval import Interval
from memfit.estimation._setup import NF4_BLOCK, STATE_BLOCK, Setup, find_lora_targets

#: The versions whose memory the formula counts.
_RULES_OF = {"torch": "2.13", "transformers": "5"}
_SIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
#: Bytes of a weight in 4 bits, and of both moments in 8 bits, with their fp32 scales.
_IN_4_BITS = 0.5 + 4 / NF4_BLOCK
_STATES_IN_8_BITS = 2 + 2 * 4 / STATE_BLOCK
#: How many moments as large as the weights each optimizer holds.
_MOMENTS = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0, "none": 0}
#: Frequencies of rotary positions and similar: kilobytes.
_BUFFERS = 1 << 20
#: How far the truth may lie above the count of parameters, kept tensors and temporaries: of a known family or not.
_ABOVE = {True: (1.0, 1.2, 2.0), False: (2.0, 2.0, 4.0)}


def estimate_formula(config: Mapping[str, Any], setup: Setup, *, gpu: Gpu | None = None, reason: str = "") -> Estimate:
    """Compute what training the model of a ``config.json`` takes, without torch.

    Args:
        config: The content of the ``config.json``.
        setup: How the model is trained.
        gpu: The device; None for any.
        reason: Why the step was not traced, for the notes.

    Raises:
        ConfigError: The config lacks widths or layers, or an adapter's target is no module.

    Example:
        >>> config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
        >>> found = estimate_formula(config, Setup(batch=2, seq_len=128, dtype="fp32"))
        >>> found.parts["weights"], found.peak_phase
        (Interval(value=497759232, upper=497759232), 'step')
    """
    check_names(config)
    case = _Case(find_anatomy(config), setup)
    moments = case.moments()
    by_phase = {
        phase: Interval.highest(Interval.total(moment.values()) for moment in found) for phase, found in moments.items()
    }
    every = [moment for found in moments.values() for moment in found]
    highest = max(every, key=lambda moment: Interval.total(moment.values()).value)
    peak = Interval.highest(found for phase, found in by_phase.items() if phase != "build")
    reserved = peak + Interval(peak.value // 50, peak.upper // 10)  # fragments
    device = gpu or ANY_GPU
    figures: dict[Metric, Interval] = {
        "allocated_bytes": peak,
        "active_bytes": peak,
        "reserved_bytes": reserved,
        "device_bytes": reserved + device.outside_bytes(setup.world_size),
    }
    return Estimate(
        figures,
        {part: share for part, share in highest.items() if share.upper},
        by_phase,
        "formula",
        gpu,
        judge(figures["device_bytes"], gpu.total_bytes) if gpu else None,
        (*((f"computed, not traced: {reason}",) if reason else ()), *case.notes(), *list_assumptions(setup)),
        _RULES_OF,
    )


_Moment = dict[Part, Interval]


class _Case:
    """One model in one setup; all bytes are those of one device."""

    def __init__(self, anatomy: Anatomy, setup: Setup) -> None:
        self.anatomy, self.setup = anatomy, setup
        self.above_count, self.above_kept, self.above_temporary = _ABOVE[anatomy.is_exact]
        self.is_amp = setup.autocasts
        self.compute = _SIZE[setup.dtype.removesuffix("-amp")]  # bytes of a number in matrix products
        self.held = 4 if self.is_amp else self.compute  # of a weight, and of the hidden states
        self.trained = 4 if setup.lora_rank else self.held  # adapters are fp32 (PEFT's autocast_adapter_dtype)
        self.has_masters = self.trained == 2 and setup.master_weights
        self.state = 4 if self.has_masters else self.trained
        self.share = 1 / setup.world_size if setup.is_sharded else 1.0
        #: The matrix products of the blocks, and how many blocks have each.
        self.linears = [(one, stack.num_blocks) for stack in anatomy.stacks for one in stack.block.linears]
        self.targets = self._find_targets() if setup.lora_rank else ()
        self.num_weights = sum(count * one.num_weights for one, count in self.linears)
        self.num_beside = anatomy.num_parameters - sum(
            one.num_blocks * one.block.num_parameters for one in anatomy.stacks
        )
        self.num_trained = anatomy.num_parameters  # numbers that have gradients, before these are shared out
        largest = [rows * width for rows, width in anatomy.tables] + [one.num_weights for one, _ in self.linears]
        num_adapters = 0
        if rank := setup.lora_rank:
            adapted = [(one, count) for one, count in self.linears if one.name in self.targets]
            largest = [rank * max(one.inputs, one.outputs) for one, _ in adapted]
            num_adapters = sum(count * rank * (one.inputs + one.outputs) for one, count in adapted)
            self.num_trained = num_adapters
        self.num_largest = max(largest, default=0)
        rest = (anatomy.num_parameters - self.num_weights) * self.held
        in_blocks = ceil(self.num_weights * (self.held if setup.quantization == "none" else _IN_4_BITS))
        self.weights = self._shared(self._wide(Interval(in_blocks + rest + num_adapters * self.trained)))
        one_gradient = self.num_largest * self.trained
        self.gradients = self._wide(
            Interval(one_gradient, 2 * one_gradient)
            if setup.optimizer_in_backward
            else self._shared(Interval(self.num_trained * self.trained))
        )

    def _find_targets(self) -> tuple[str, ...]:
        names = sorted({linear.name for linear, _ in self.linears})
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

    def _shared(self, whole: Interval) -> Interval:
        """One device's share of weights, gradients or optimizer states; rows may be padded."""
        return whole.times(self.share, 1.02 * self.share) if self.setup.is_sharded else whole

    def _wide(self, counted: Interval) -> Interval:
        """The count with room above it where the family's parameters are not known exactly."""
        return counted.times(1, self.above_count)

    @cached_property
    def optimizer(self) -> Interval:
        name, count = self.setup.optimizer, self.num_trained
        if name == "adafactor":  # a row's and a column's mean of each matrix (Shazeer and Stern 2018)
            lines = [(one.inputs + one.outputs) * count for one, count in self.linears]
            lines += [rows + width for rows, width in self.anatomy.tables]
            moments = Interval(sum(lines) * self.state, 2 * sum(lines) * max(self.state, 4))
        elif name.startswith("paged"):  # scales of 8 bits, and small moments
            scales = ceil(count * (_STATES_IN_8_BITS - 2)) if name.endswith("8bit") else 0
            moments = Interval(scales, scales + ceil(0.02 * 8 * count))
        elif name == "adamw8bit":
            moments = Interval(ceil(count * _STATES_IN_8_BITS)).times(1, 1.02)  # small weights have fp32 states
        else:
            moments = Interval(count * _MOMENTS[name] * self.state)
        if self.has_masters:
            moments += Interval(4 * count)
        return self._wide(self._shared(moments))

    @cached_property
    def step_temporaries(self) -> Interval:
        """What the update makes: Adam the root of its second moments, of all weights at once with ``foreach``."""
        name, one = self.setup.optimizer, self.num_largest
        every = one if self.setup.optimizer_in_backward else ceil(self.num_trained * self.share)
        if name == "adafactor":
            size = self.trained
            found = Interval(every * size, 3 * every * size) if self.setup.foreach else Interval(0, 8 * one * size)
            return self._wide(found)
        if name in ("adamw", "adam"):
            found = Interval(every * self.state) if self.setup.foreach else Interval(0, 2 * one * self.state)
        elif name.endswith("8bit") or name == "paged_adamw":  # a kernel, or fp32 copies of one weight after another
            found = Interval(0, 8 * one)
        else:
            found = Interval()
        return self._wide(found + Interval(4 * every * self.has_masters))  # fp32 copies of gradients

    # What autograd keeps

    def _kept_bytes(self, kept: Kept) -> tuple[float, float]:
        """Bytes of one number of ``kept``: the value and the bound."""
        is_own = kept.kind != "shared"
        if kept.feeds:
            adapted = sum(name in self.targets for name in kept.feeds)
            if not self.setup.lora_rank:
                found = self.compute * (len(kept.feeds) if self.is_amp else 1) * is_own
            elif self.setup.lora_dropout:  # of each adapter: a mask, and what is left in the dtype of its product
                found = adapted * (1 + (self.compute if self.is_amp else self.trained))
            elif self.is_amp or self.trained == self.compute:
                found = self.compute * (adapted if self.is_amp else min(adapted, 1)) * is_own
            else:  # each adapter casts the input to its fp32 anew
                found = 4 * adapted
            return found, found + 4 * adapted * bool(self.setup.lora_dropout)  # a copy beside it
        if kept.for_weight and self.setup.lora_rank:
            return 0, 0
        own = self.compute if self.setup.quantization == "none" else self.held  # bitsandbytes gives its input's dtype
        sizes = {"compute": own, "stream": self.held, "fp32": 4, "byte": 1, "shared": 0}
        size = sizes.get(kept.kind, 2 if self.held == 2 else 0)
        return size, size

    def _keeps_scores(self, one: Attention) -> bool:
        """Whether no fused kernel runs: none takes fewer heads of keys in fp32 (ATen/.../cuda/sdp_utils.cpp)."""
        return self.setup.attention == "eager" or (self.compute == 4 and one.kv_heads != one.heads)

    def _attention_kept(self, one: Attention, queries: int, keys: int) -> Interval:
        """Queries, keys, values, result and log-sum-exp of a fused kernel; the scores of an eager one."""
        wide, narrow = one.heads * one.head_dim, one.kv_heads * one.head_dim
        batch, size = self.setup.batch, self.compute
        value = batch * (2 * queries * wide + 2 * keys * narrow) * size
        repeated = batch * 2 * keys * (wide - narrow) * size
        pairs = one.heads * queries * keys
        if self._keeps_scores(one):
            scores = 4 if one.upcasts or self.is_amp else size
            scores += (size if one.has_dropout or scores != size else 0) + one.has_dropout
            return Interval(value + repeated + batch * pairs * scores)
        value += batch * queries * one.heads * 4
        bias = pairs * size if one.is_biased else 0
        return Interval(value + bias, value + bias * batch + repeated)

    def _tokens(self, stack: Stack) -> tuple[int, int]:
        """Tokens of a sample that the stack runs over, and those of the source."""
        source = self.setup.seq_len
        return ((self.setup.target_len or source) if stack.is_target else source), source

    def block_kept(self, stack: Stack) -> Interval:
        block, (tokens, source) = stack.block, self._tokens(stack)
        count = self.setup.batch * tokens
        value = upper = 0.0
        for kept in block.kept:
            low, high = self._kept_bytes(kept)
            value += count * kept.width * low
            upper += count * kept.width * high
        ranks = sum(one.name in self.targets for one in block.linears) * count * self.setup.lora_rank * self.compute
        found = Interval(ceil(value), ceil(max(value, upper))) + Interval(ranks, 2 * ranks)
        for one in block.attentions:
            found += self._attention_kept(one, tokens, source if one.is_crossed else tokens)
        return found.times(1, self.above_kept)

    def _checkpoint(self, stack: Stack) -> Interval:
        whole, block = self.block_kept(stack), stack.block
        count = self.setup.batch * self._tokens(stack)[0]
        entry = Interval(count * block.width * self.held)
        if self.setup.gradient_checkpointing == "none":
            return whole
        if self.setup.gradient_checkpointing == "full":
            return entry
        numbers = [linear.outputs for linear in block.linears]
        results = sum(one.heads * one.head_dim for one in block.attentions)
        half, every = (count * (sum(some) + results) * self.compute for some in (numbers[::2], numbers))
        value = min(entry.value + half, whole.value)  # torchtitan keeps every second product, others all
        return Interval(value, max(value, min(entry.value + ceil(1.2 * every), whole.upper)))

    def block_temporaries(self, stack: Stack) -> Interval:
        """The most that the backward pass of one block makes beside gradients of weights."""
        block, (tokens, source) = stack.block, self._tokens(stack)
        count = self.setup.batch * tokens
        mlp = (block.inner_width + block.width) * self.compute
        wide = max((one.heads * one.head_dim for one in block.attentions), default=0)
        attention = 4 * wide * self.compute + 4 * wide  # gradients of q, k, v and the result; an fp32 sum of q's
        found = count * max(mlp, attention, 3 * 4 * block.width)  # the last: a norm in fp32
        if any(self._keeps_scores(one) or one.is_biased for one in block.attentions):
            scores = count * max(tokens, source) * max(one.heads for one in block.attentions)
            found = max(found, scores * (4 + self.compute))
        if self.setup.quantization != "none":  # one weight made whole again
            found += max(linear.inputs * linear.outputs for linear in block.linears) * self.compute
        return Interval(found).times(1, self.above_temporary)

    # Logits and loss

    def _logits(self) -> tuple[Interval, Interval]:
        """The most that logits and loss take in the forward pass, and in the backward pass. A loss in chunks is
        computed again chunk by chunk, or keeps all log-probabilities."""
        head, batch = self.anatomy.head, self.setup.batch
        rows = batch * self._tokens(self.anatomy.stacks[-1])[0]
        numbers, chunks = rows * head.outputs, max(self.setup.loss_chunks, 1)
        wide = 4 if self.anatomy.upcasts_logits or self.is_amp else self.compute
        forward = ceil(numbers * (self.compute + wide * (wide != self.compute) + wide) / chunks)
        backward, pieces = ceil(numbers * 3 * wide / chunks), numbers * wide * (chunks > 1)
        return Interval(forward, forward + pieces), Interval(backward, backward + pieces + numbers * self.compute)

    # Moments

    @property
    def _cast(self) -> Interval:
        """Weights in autocast's dtype: all of them at the end of the forward pass."""
        if self.held == self.compute or self.setup.is_sharded:
            return Interval()
        numbers = self.num_weights * (self.setup.quantization == "none") + self.anatomy.head.num_weights
        return self._wide(Interval(numbers * self.compute))

    @property
    def _tied_gradients(self) -> Interval:
        """What the backward pass ends with beside all gradients: the head's, the embedding's, and then their sum."""
        if not self.anatomy.is_tied or self.setup.lora_rank or not self.anatomy.tables:
            return Interval()
        rows, width = self.anatomy.tables[0]
        return Interval(2 * rows * width * self.trained)

    @cached_property
    def communication(self) -> tuple[Interval, Interval, Interval]:
        """Buffers that always live, those of the forward pass, and those of the backward pass and the update."""
        if not self.setup.is_sharded:  # DDP's buckets are as large as all gradients (c10d/reducer.cpp)
            buckets = self.num_trained * self.trained * (self.setup.strategy == "ddp")
            return Interval(buckets), Interval(), Interval()
        block, root = max(stack.block.num_parameters for stack in self.anatomy.stacks), self.num_beside
        gathered = Interval((2 * block + root) * self.compute, (3 * block + root) * self.compute)
        reduced = 0 if self.setup.lora_rank else block * self.trained
        return Interval(), gathered, gathered + Interval(reduced, 2 * reduced + root * self.trained)

    @cached_property
    def always(self) -> _Moment:
        tokens = sum(self._tokens(stack)[0] for stack in self.anatomy.stacks)
        inputs = self.setup.batch * tokens * 16  # ids and labels
        return {
            "weights": self.weights,
            "buffers": Interval(0, _BUFFERS),
            "optimizer": self.optimizer,
            "inputs": Interval(inputs, 2 * inputs),
            "communication": self.communication[0],
        }

    def _moment(self, communication: Interval, **others: Interval) -> _Moment:
        always = self.always
        return {**always, "communication": always["communication"] + communication, **others}  # type: ignore[dict-item]

    def moments(self) -> dict[Phase, list[_Moment]]:
        setup, stacks = self.setup, self.anatomy.stacks
        _, gathered, reduced = self.communication
        widths = [setup.batch * self._tokens(stack)[0] * stack.block.width for stack in stacks]
        ends = Interval(sum(widths) * (4 + self.held + self.compute)).times(1, 2)  # last norms, embedding's dropout
        kept = Interval.total([ends, *(self._checkpoint(stack).times(stack.num_blocks) for stack in stacks)])
        again = setup.gradient_checkpointing != "none"
        one = Interval.highest(self.block_kept(stack) for stack in stacks)
        inside = Interval.highest(self.block_temporaries(stack) for stack in stacks)
        halved = Interval(inside.value // 2, (inside + one).upper if again else inside.upper)
        made, torn = self._logits()
        threads = ANY_GPU.cublas_workspace_bytes.times(2)
        accumulated = self.gradients if setup.num_microbatches > 1 else Interval()
        spare = Interval(self.num_largest * self.trained)  # a gradient before it is added to one that is there
        run = {"cast_weights": self._cast, "gradients": accumulated}
        ahead = {"activations": kept, "workspaces": ANY_GPU.cublas_workspace_bytes, **run}
        forward = [self._moment(gathered, temporaries=one_of, **ahead) for one_of in (made, halved)]

        if setup.optimizer == "none":
            return {"build": [self.always], "forward": forward[:1]}

        late = spare if accumulated.value else Interval()
        if setup.optimizer_in_backward:
            late += self.step_temporaries
        late += self._tied_gradients
        run["gradients"] = accumulated if accumulated.value else spare  # the head's
        recomputed, full = one if again else Interval(), {"gradients": self.gradients, "workspaces": threads}
        backward = [
            self._moment(reduced, temporaries=torn, **{**ahead, "workspaces": threads}),
            self._moment(reduced, activations=kept + recomputed, temporaries=inside, workspaces=threads, **run),
            self._moment(reduced, activations=ends + one, temporaries=inside, **full),
            self._moment(reduced, activations=ends, temporaries=late, **full),
        ]
        updated = {"temporaries": self.step_temporaries, **full}
        step = self._moment(Interval(), **({"workspaces": threads} if setup.optimizer_in_backward else updated))
        built: _Moment = {"weights": self.weights, "buffers": Interval(0, _BUFFERS)}
        if self.has_masters:
            built["optimizer"] = Interval(0, self.optimizer.upper)
        return {"build": [built], "forward": forward, "backward": backward, "step": [step]}

    def notes(self) -> list[str]:
        found = []
        if not self.anatomy.is_exact:
            family = self.anatomy.family
            found.append(f"this model's family is unknown: it is counted like {family}, and bounds are twice as wide")
        if self.setup.lora_rank:
            found.append("adapters are in fp32")
        return found
