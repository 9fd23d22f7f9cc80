"""Measure what an epoch's steps take, what they wait for, and how much of their batches is padding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.training._split import BySample, is_opaque, leaves

_MASKS = ("attention_mask", "decoder_attention_mask")
_NO_LABEL = -100


@dataclass
class Pace:
    """What the steps of the epoch under way took. Checkpoints and validation are not in ``seconds``."""

    seconds: float = 0.0
    wait_seconds: float = 0.0
    num_samples: int = 0
    device_uses: list[float] = field(default_factory=list)

    def add(self, seconds: float, wait_seconds: float, batches: Sequence[Any] = ()) -> None:
        """Add a step, or a wait without one."""
        self.seconds += seconds
        self.wait_seconds += wait_seconds
        self.num_samples += sum(map(samples_in, batches))

    def look_at(self, device: torch.device) -> None:
        """Take a sample of how busy a GPU was in the last second or less, by NVML; nothing for a CPU."""
        if device.type == "cuda":
            with suppress(Exception):  # a driver without NVML: it raises what it likes
                self.device_uses.append(torch.cuda.utilization(device) / 100)

    def figures(self) -> dict[str, float]:
        """Return what is known of ``seconds``, ``samples_per_second``, ``wait_share`` and ``device_use``."""
        if not self.seconds:
            return {}
        found = {"seconds": self.seconds, "wait_share": self.wait_seconds / self.seconds}
        if self.num_samples:
            found["samples_per_second"] = self.num_samples / self.seconds
        if self.device_uses:
            found["device_use"] = sum(self.device_uses) / len(self.device_uses)
        return found


def samples_in(batch: Any) -> int:
    """Return the samples of a batch; 0 if only its author can count them, as in a batch of graphs."""
    content = list(leaves(batch))
    if any(is_opaque(leaf) for _, leaf in content):
        return 0
    try:
        return BySample().count_of(content)
    except UsageError:  # its tensors are not equally long: a split of the user's own cuts it
        return 0


def has_decoder(model: Any) -> bool:
    """Return whether a model of transformers reads one text and writes another, as T5 does."""
    config = getattr(getattr(model, "module", model), "config", None)
    return getattr(config, "is_encoder_decoder", False) is True


def padding_in(batch: Any, labels_too: bool) -> tuple[int, int]:
    """Return how many positions of a batch are padding by its masks, and how many it has.

    Args:
        batch: A mapping with ``attention_mask``; anything else has none.
        labels_too: Without a ``decoder_attention_mask``, labels of -100 are the decoder's padding.
    """
    if not isinstance(batch, Mapping):
        return 0, 0
    real = [batch[name] != 0 for name in _MASKS if _is_matrix(batch.get(name))]
    if labels_too and "decoder_attention_mask" not in batch and _is_matrix(batch.get("labels")):
        real.append(batch["labels"] != _NO_LABEL)
    positions = sum(math.prod(one.shape) for one in real)
    return positions - sum(int(one.sum()) for one in real), positions


def _is_matrix(value: Any) -> bool:
    return getattr(value, "ndim", 0) == 2


def describe(figures: Mapping[str, float | None]) -> str:
    """Return the figures as a line for people.

    >>> describe({"samples_per_second": 412.3, "wait_share": 0.0031, "pad_share": 0.12})
    '412 samples/s  waits 0.3 %  pads 12.0 %'
    """
    words = []
    if (rate := figures.get("samples_per_second")) is not None:
        words.append(f"{rate:,.{0 if rate >= 10 else 2}f} samples/s")
    for name, word in (("wait_share", "waits"), ("pad_share", "pads"), ("device_use", "device busy")):
        if (share := figures.get(name)) is not None:
            words.append(f"{word} {share * 100:.1f} %")
    return "  ".join(words)
