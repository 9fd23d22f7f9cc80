"""Estimate a model in a child process: this one loads no torch, and no model can end it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

from memfit import estimation, jobs
from memfit.errors import ConfigError, JobFailedError, MissingExtraError, UsageError
from memfit.estimation import (
    LEAST_SHARE,
    TIME_LIMIT,
    AllocatorSettings,
    Change,
    Estimate,
    Gpu,
    Setup,
    check_allocator,
    check_names,
    estimate_formula,
    find_batch,
    find_gpu,
    in_words,
    limit_time,
    list_changes,
    rank_changes,
    share_that_moves,
    split_batch,
    time_left,
)
from memfit.memory import Budget
from memfit.units import format_bytes

_MOST_SAMPLES = 1 << 14


@dataclass(frozen=True)
class Question:
    config: Mapping[str, Any]  # the content of a model's ``config.json``
    setup: Setup
    gpu: str | None = None  # the device's name or size; None for any device
    allocator: str | None = None  # as in ``PYTORCH_CUDA_ALLOC_CONF``; None for torch's defaults
    formula: bool = False  # compute, do not trace
    available_bytes: int | None = None  # the free memory of the device; None for all of it
    largest_batch: bool = False  # replace ``setup.batch`` by the largest that fits
    global_batch: int | None = None  # samples per update, a multiple of the largest batch; None for any number
    time_limit: float = TIME_LIMIT  # seconds of CPU for traces; then the formula answers
    settings: Mapping[str, str] | None = None  # a workload's names for the options of ``memfit estimate``
    weights: str = ""  # the folder of the model's real weights

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "config": dict(self.config)}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Question:
        setup = found["setup"]
        return cls(**{**found, "setup": Setup(**{**setup, "lora_targets": tuple(setup["lora_targets"])})})

    @property
    def device(self) -> Gpu | None:
        """The device with its free memory; ConfigError if there is no such GPU."""
        if self.gpu is None:
            return None
        device = find_gpu(self.gpu)
        least = min(device.total_bytes, device.total_bytes if self.available_bytes is None else self.available_bytes)
        return replace(device, total_bytes=least)

    @property
    def setups(self) -> Sequence[Setup]:
        one = self.setup
        if not self.largest_batch:
            return (one,)
        if self.global_batch is None:
            return [replace(one, batch=size) for size in range(1, _MOST_SAMPLES + 1)]
        each = split_batch(self.global_batch, 1, one.world_size)
        sizes = [size for size in range(1, each + 1) if each % size == 0]
        return [replace(one, batch=size, num_microbatches=each // size) for size in sizes]


def find_this_gpu(budget: Budget) -> tuple[str | None, int | None, list[str]]:
    """Return the name or size of a machine's first GPU, its free bytes, and a note on who uses the rest."""
    if not budget.devices:
        return None, None, []
    here = budget.devices[0]
    available = max(0, here.total_bytes - here.foreign_bytes)
    try:
        name = find_gpu(here.name).name
    except ConfigError:
        name = f"{here.total_bytes} B"
    others = ", ".join(
        f"{one.name} ({one.pid}) {'?' if one.used_bytes is None else format_bytes(one.used_bytes)}"
        for one in here.processes
    )
    note = (
        f"GPU {here.index} of this machine, {here.name}: {format_bytes(available)} of "
        f"{format_bytes(here.total_bytes)} are free; other processes: {others or 'none'}"
    )
    return name, available, [note]


def ask(question: Question) -> dict[str, Any]:
    """Return the estimate as ``Estimate.to_dict`` does, with its ``setup`` and what would make it fit.

    ``change`` holds the options of the best change after which it fits and learns, ``others`` those of the next ones.
    ``change`` is None if there is none, if it fits as it is and learns, or if no device is named.

    Raises:
        UsageError: If the config, the setup, the GPU or the allocator's settings are bad.
    """
    device = question.device
    if question.largest_batch and device is None:
        raise UsageError(
            "the largest batch was asked for, and no device to fit.",
            rule="the largest batch is the one whose bound fits a device.",
            remedy="name one: --gpu A100-80GB, or its memory: --gpu 24GiB",
        )
    notes = list[str]()
    if question.allocator is not None:
        check_allocator(question.allocator)
        AllocatorSettings.parse(question.allocator)
    check_names(question.config)
    _ = question.setups
    if not question.formula:
        try:
            found: dict[str, Any] = jobs.call_in_child(f"{__name__}:answer_in_child", question.to_dict())
        except (ConfigError, MissingExtraError):
            raise
        except (JobFailedError, UsageError) as error:  # the child ended otherwise: killed, aborted
            was_killed = error.what.endswith(f"ended by signal {int(signal.SIGKILL)}.")
            why = "the process that traced was killed (signal 9): out of memory?" if was_killed else error.what
            question, notes = replace(question, formula=True), [f"computed, not traced: {why}"]
    if question.formula:
        found = answer_in_child(**question.to_dict())
    return found | {"notes": [*notes, *found["notes"]]}


def answer_in_child(**words: Any) -> dict[str, Any]:
    """Answer what ``Question.to_dict`` wrote: estimate, and look for a change if it does not fit."""
    question = Question.from_dict(words)
    with limit_time(question.time_limit):
        return _answer_here(question)


def _answer_here(question: Question) -> dict[str, Any]:
    config, device, setup, chosen = question.config, question.device, question.setup, None
    settings = None if question.allocator is None else AllocatorSettings.parse(question.allocator)

    def make(setup: Setup) -> Estimate:
        if question.formula:
            return estimate_formula(config, setup, gpu=device)
        few = replace(setup, num_microbatches=min(setup.num_microbatches, 2))  # those after the second take no more
        return estimation.estimate_config(config, few, gpu=device, allocator=settings)

    def bound_of(setup: Setup) -> int:
        return estimate_formula(config, setup, gpu=device).device["device_bytes"].upper

    guess: Callable[[Setup], int] | None = bound_of
    unread = ""
    try:
        bound_of(setup)
    except ConfigError as error:
        guess, unread = None, error.what
    if question.largest_batch and device is not None:
        setup, found = find_batch(question.setups, device, guess, make)
        chosen = {"batch": setup.batch, "num_microbatches": setup.num_microbatches, "fits": found.fits}
    else:
        found = make(setup)
    notes = found.to_dict()["notes"]
    better: dict[str, Any] = {"change": None, "others": []}
    if question.largest_batch and not question.formula and time_left() <= 0:
        notes.append("the time for traces was over: a larger batch may fit; use --time-limit 1800")
    share = cache(partial(share_that_moves, weights=question.weights if not question.formula else ""))
    moves, how = share(setup)
    if "real" in how:
        notes.append(f"{how}, about {moves * 100:.0f} % of the weights move in a step")
    if device is not None and not (found.fits and moves >= LEAST_SHARE):
        if guess is None:
            notes.append(f"no change was looked for, as the formula does not read this model's config: {unread}")
        else:
            scale = found.device["device_bytes"].upper / max(bound_of(setup), 1)  # the trace counts
            changes = partial(list_changes, settings=question.settings)
            ranked = rank_changes(
                setup,
                device,
                lambda changed: int(bound_of(changed) * scale),
                make,
                changes,
                lambda changed: share(changed)[0] >= LEAST_SHARE,
            )
            answers = [_to_dict(*one, share(one[0].setup), question) for one in ranked]
            better["change"], better["others"] = next(iter(answers), None), answers[1:]
    better["notes"] = [_in_words(note, question.settings) for note in notes]
    return found.to_dict() | {"setup": asdict(setup), "largest_batch": chosen} | better


def _to_dict(change: Change, found: Estimate, moves: tuple[float, str], question: Question) -> dict[str, Any]:
    cost, setup, (share, how) = change.cost, change.setup, moves
    if share < LEAST_SHARE:
        cost += f"; {how}, about {share * 100:.0f} % of the weights move in a step"
    if setup.optimizer.startswith("paged"):
        ways = (setup, replace(setup, optimizer="adamw"))
        sizes = [estimate_formula(question.config, one).parts["optimizer"].value for one in ways]
        cost = cost.replace("host memory", f"{format_bytes(sizes[1] - sizes[0])} of host memory")
    return {
        "options": list(in_words(change.options, question.settings)),
        "cost": cost,
        "same_training": change.same_training,
        "share_that_moves": share,
        "setup": asdict(setup),
        "verdict": found.verdict,
        "device": found.to_dict()["device"],
        "method": found.method,
    }


def _in_words(note: str, settings: Mapping[str, str] | None) -> str:
    """Return a note with the options that it advises as a workload's settings, without those that it lacks."""
    fact, use, advice = note.partition("; use ")
    words = [word for option in advice.split(" or ") for word in in_words([option], settings)]
    return f"{fact}{use}{' or '.join(words)}" if use and words else fact
