"""Measure an epoch: what its steps take and wait for, and the memory of its phases."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from memfit.errors import UsageError
from memfit.memory import ProcReader
from memfit.training._oom import device_bytes
from memfit.training._split import BySample, is_opaque, leaves


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


def describe(figures: Mapping[str, float | None]) -> str:
    """Return the figures as a line for people.

    >>> describe({"samples_per_second": 412.3, "wait_share": 0.0031})
    '412 samples/s  waits 0.3 %'
    """
    words = []
    if (rate := figures.get("samples_per_second")) is not None:
        words.append(f"{rate:,.{0 if rate >= 10 else 2}f} samples/s")
    for name, word in (("wait_share", "waits"), ("device_use", "device busy")):
        if (share := figures.get(name)) is not None:
            words.append(f"{word} {share * 100:.1f} %")
    return "  ".join(words)


class EpochMemory:
    """Notes what this process holds at the end of each phase of an epoch, and what its devices held at most.

    Example:
        >>> memory = EpochMemory()
        >>> memory.enter("train")
        >>> list(memory.end()["phases"])
        ['train']
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin an epoch with nothing noted."""
        self._phase = ""
        self._phases: dict[str, dict[str, Any]] = {}

    def enter(self, phase: str) -> None:
        """End the phase before, and start the devices' peaks anew."""
        self._leave()
        self._phase = phase
        for name in device_bytes():
            kind, _, index = name.partition(":")
            getattr(torch, kind).reset_peak_memory_stats(int(index))

    def end(self) -> dict[str, Any]:
        """End the epoch, and return its memory.

        ``metric`` names the host's figure: ``non_reclaimable`` (this process without its loader workers), or ``rss``
        where the kernel does not tell that. ``phases`` hold ``host_bytes`` at the end of each
        phase, and the peaks of its ``devices``.
        """
        self._leave()
        found = {"metric": _read_host()[0], "phases": self._phases}
        self.begin()
        return found

    def _leave(self) -> None:
        if not self._phase:
            return
        peaks = ("allocated_peak_bytes", "reserved_peak_bytes")
        devices = {device: {name: sizes[name] for name in peaks} for device, sizes in device_bytes().items()}
        now: dict[str, Any] = {"host_bytes": _read_host()[1], "devices": devices}
        before = self._phases.get(self._phase, now)  # entered twice: after a checkpoint within the epoch
        self._phases[self._phase] = _highest(before, now)


def _highest(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the larger of each figure.

    >>> _highest({"host_bytes": 3, "devices": {"cuda:0": {"a": 1}}}, {"host_bytes": 2, "devices": {"cuda:0": {"a": 4}}})
    {'host_bytes': 3, 'devices': {'cuda:0': {'a': 4}}}
    """
    found = dict(one)
    for name, value in other.items():
        before = found.get(name)
        if isinstance(value, Mapping):
            found[name] = _highest(before or {}, value)
        else:
            found[name] = value if before is None else max(before, value)
    return found


def _read_host() -> tuple[str, int]:
    status = ProcReader().status(os.getpid())
    if status is None:
        return "rss", psutil.Process().memory_info().rss
    return "non_reclaimable", status.private
