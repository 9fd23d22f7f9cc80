"""An estimate made in a child, so that this process loads no torch and nothing that a model does can end it."""

from __future__ import annotations

import bisect
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from memfit.errors import ConfigError, MissingExtraError, UsageError
from memfit.estimation import (
    TIME_LIMIT,
    AllocatorSettings,
    Estimate,
    Gpu,
    Interval,
    Setup,
    check_allocator,
    check_names,
    estimate_config,
    estimate_formula,
    find_batch,
    find_change,
    find_gpu,
    judge,
    limit_time,
    split_batch,
)
from memfit.jobs import call_in_child
from memfit.units import format_bytes

#: Beyond this difference between trace and formula the answer says so.
_MOST_APART = 0.15
_MOST_SAMPLES = 1 << 14  # of a microbatch that is looked for
#: The names of the numbers of blocks in a config.json.
_NUM_BLOCKS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers",
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """What is to be estimated.

    Attributes:
        config: The content of a model's ``config.json``.
        setup: How it is trained.
        gpu: The device's name or size; None for any.
        allocator: As in ``PYTORCH_CUDA_ALLOC_CONF``; None for torch's defaults.
        formula: Compute and do not trace.
        available_bytes: What others leave of the device; None for all of it.
        largest_batch: Whether ``setup.batch`` is to be replaced by the largest that fits.
        global_batch: Samples an update, which the largest batch then divides; None for any number.
        time_limit: Seconds for all tracing; after them the formula answers.
    """

    config: Mapping[str, Any]
    setup: Setup
    gpu: str | None = None
    allocator: str | None = None
    formula: bool = False
    available_bytes: int | None = None
    largest_batch: bool = False
    global_batch: int | None = None
    time_limit: float = TIME_LIMIT

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form, which is also what ``answer_in_child`` takes."""
        return {**asdict(self), "config": dict(self.config)}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Question:
        """The question that ``to_dict`` gave."""
        setup = found["setup"]
        return cls(**{**found, "setup": Setup(**{**setup, "lora_targets": tuple(setup["lora_targets"])})})

    @property
    def device(self) -> Gpu | None:
        """The device with what others leave of it.

        Raises:
            ConfigError: There is no such GPU.
        """
        if self.gpu is None:
            return None
        device = find_gpu(self.gpu)
        least = min(device.total_bytes, device.total_bytes if self.available_bytes is None else self.available_bytes)
        return replace(device, total_bytes=least)

    @property
    def setups(self) -> Sequence[Setup]:
        """The setups whose largest is looked for, the smallest first."""
        one = self.setup
        if not self.largest_batch:
            return (one,)
        if self.global_batch is None:
            return [replace(one, batch=size) for size in range(1, _MOST_SAMPLES + 1)]
        devices = 1 if one.strategy == "tp" else one.world_size
        split_batch(self.global_batch, 1, devices)
        each = self.global_batch // devices
        sizes = [size for size in range(1, each + 1) if each % size == 0]
        return [replace(one, batch=size, num_microbatches=each // size) for size in sizes]


def ask(question: Question) -> dict[str, Any]:
    """The estimate as ``Estimate.to_dict`` gives it, with the ``setup`` that it is for and what would make it fit.

    ``change`` holds the options of the cheapest change after which it fits, and ``smaller_model``, where none does, how
    many of the model's blocks would; both are None where it fits or there is no device.

    Raises:
        UsageError: The config, the setup, the GPU or the allocator's settings are no such thing.
    """
    device = question.device
    if question.largest_batch and device is None:
        raise UsageError(
            "the largest batch was asked for, and no device to fit.",
            rule="the largest batch is the one whose bound fits a device.",
            remedy="name one: --gpu A100-80GB, or its memory: --gpu 24GiB",
        )
    warned = []
    if question.allocator is not None:
        warned = check_allocator(question.allocator)
        AllocatorSettings.parse(question.allocator)
    check_names(question.config)
    _ = question.setups
    found = _answer(question)
    return found | {"notes": [*found["notes"], *warned]}


def _answer(question: Question) -> dict[str, Any]:
    if question.formula:
        return answer_in_child(**question.to_dict())
    try:
        traced: dict[str, Any] = call_in_child("memfit.planning._estimate:answer_in_child", question.to_dict())
        return traced
    except (ConfigError, MissingExtraError):
        raise
    except UsageError as error:  # the child ended otherwise: killed, aborted
        found = answer_in_child(**replace(question, formula=True).to_dict())
        was_killed = error.what.endswith(f"exit code -{int(signal.SIGKILL)}")
        why = "the process that traced was killed (signal 9): out of memory?" if was_killed else error.what
        return found | {"notes": [f"computed, not traced: {why}", *found["notes"]]}


def answer_in_child(**words: Any) -> dict[str, Any]:
    """Estimate, and look for a change where it does not fit; takes what ``Question.to_dict`` gives."""
    question = Question.from_dict(words)
    with limit_time(question.time_limit):
        return _answer_here(question)


def _answer_here(question: Question) -> dict[str, Any]:
    config, device, setup, chosen = question.config, question.device, question.setup, None
    make = _estimator(question, device)
    guess, unread = _guesser(config, setup, device)
    if question.largest_batch and device is not None:
        setup, found = find_batch(question.setups, device, guess, make)
        chosen = {"batch": setup.batch, "num_microbatches": setup.num_microbatches, "fits": found.fits}
    else:
        found = make(setup)
    notes, looked_for = found.to_dict()["notes"], {"change": None, "smaller_model": None}
    formula = estimate_formula(config, setup, gpu=device) if guess and found.method == "traced" else found
    traced, computed = (one.device["allocated_bytes"].value for one in (found, formula))
    if abs(traced / max(computed, 1) - 1) > _MOST_APART:
        notes.append(
            f"the trace says {format_bytes(traced)} in tensors and the formula {format_bytes(computed)}: the trace "
            "counts, and what the formula proposes is scaled to it"
        )
    if device is not None and not found.fits:
        if guess is None:
            notes.append(f"no change was looked for, as the formula does not read this model's config: {unread}")
        else:
            scale = found.device["device_bytes"].upper / max(formula.device["device_bytes"].upper, 1)
            looked_for = _what_fits(config, setup, device, make, scale)
    return found.to_dict() | {"notes": notes, "setup": asdict(setup), "largest_batch": chosen} | looked_for


def _what_fits(
    config: Mapping[str, Any], setup: Setup, device: Gpu, make: Callable[[Setup], Estimate], scale: float
) -> dict[str, Any]:
    """The cheapest change after which it fits, or else how large a model would; the formula's bounds are scaled."""

    def guess(changed: Setup) -> int:
        return int(_bound(config, changed, device) * scale)

    found = find_change(setup, device, guess, make)
    if found is None:
        return {"change": None, "smaller_model": _smaller_model(config, setup, device, scale)}
    better, after = found
    change = {
        "options": list(better.options),
        "cost": better.cost,
        "same_training": better.same_training,
        "setup": asdict(better.setup),
        "device": after.to_dict()["device"],
        "method": after.method,
    }
    return {"change": change, "smaller_model": None}


def _bound(config: Mapping[str, Any], setup: Setup, device: Gpu | None) -> int:
    """The formula's bound of the device's peak."""
    return estimate_formula(config, setup, gpu=device).device["device_bytes"].upper


def _guesser(config: Mapping[str, Any], setup: Setup, device: Gpu | None) -> tuple[Callable[[Setup], int] | None, str]:
    """What computes the bound of a setup's peak; None, with the reason, where the formula does not read the config."""
    try:
        _bound(config, setup, device)
    except ConfigError as error:
        return None, error.what
    return lambda changed: _bound(config, changed, device), ""


def _estimator(question: Question, device: Gpu | None) -> Callable[[Setup], Estimate]:
    """What estimates the question's model in one setup."""
    settings = None if question.allocator is None else AllocatorSettings.parse(question.allocator)

    def make(setup: Setup) -> Estimate:
        if question.formula:
            return estimate_formula(question.config, setup, gpu=device)
        few = replace(setup, num_microbatches=min(setup.num_microbatches, 2))  # those after the second take no more
        return estimate_config(question.config, few, gpu=device, allocator=settings)

    return make


def _smaller_model(config: Mapping[str, Any], setup: Setup, device: Gpu, scale: float) -> dict[str, Any] | None:
    """The most blocks of a model of the same widths whose scaled bound fits, with what saves most else."""
    numbers = {name: config[name] for name in _NUM_BLOCKS if isinstance(config.get(name), int)}
    saving = replace(setup, foreach=False)
    if setup.optimizer != "none":
        parts = setup.batch
        saving = replace(saving, gradient_checkpointing="full", loss_chunks=max(8, setup.loss_chunks), batch=1)
        saving = replace(saving, num_microbatches=setup.num_microbatches * parts, optimizer_in_backward=False)
    total = max(numbers.values(), default=0)

    def shrink(blocks: int) -> dict[str, Any]:
        return {**config, **{name: max(1, round(count * blocks / total)) for name, count in numbers.items()}}

    def sizes_of(blocks: int) -> dict[str, Interval]:
        found = estimate_formula(shrink(blocks), saving, gpu=device)
        return {name: one.times(scale) for name, one in found.device.items()}

    def is_too_large(blocks: int) -> bool:
        return judge(sizes_of(blocks)["device_bytes"], device.total_bytes) != "fits"

    fits = bisect.bisect_left(range(1, total), True, key=is_too_large)  # fewer blocks take less
    if not fits:
        return None
    smaller, sizes = shrink(fits), sizes_of(fits)
    alone = Setup(dtype="fp32", optimizer="none")
    return {
        "num_blocks": {name: smaller[name] for name in numbers},
        "num_parameters": estimate_formula(smaller, alone).parts["weights"].value // 4,
        "device": {name: vars(one) for name, one in sizes.items()},
        "text": f"{fits} of {total} blocks of these widths would, by the formula: at most "
        f"{format_bytes(sizes['device_bytes'].upper)}",
    }
