"""The memory of an epoch, by part and by phase, for its event."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import psutil
import torch
from torch.utils._pytree import tree_leaves

from memfit.memory import ProcReader
from memfit.training._checkpoint import bytes_by_device
from memfit.training._ema import Ema
from memfit.training._oom import device_bytes


class EpochMemory:
    """Notes what this process holds at the end of each phase of an epoch, and what its devices held at most.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> memory = EpochMemory(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
        >>> memory.enter("train")
        >>> memory.count_parts()
        >>> found = memory.end()
        >>> found["parts"]["cpu"]["weights_bytes"], list(found["phases"])
        (16, ['train'])
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None) -> None:
        self._model, self._optimizer, self._ema = model, optimizer, ema
        self.begin()

    def begin(self) -> None:
        """Begin an epoch with nothing noted."""
        self._phase = ""
        self._phases: dict[str, dict[str, Any]] = {}
        self._parts: dict[str, dict[str, int]] = {}

    def enter(self, phase: str) -> None:
        """End the phase before, and start the devices' peaks anew."""
        self._leave()
        self._phase = phase
        for name in device_bytes():
            kind, _, index = name.partition(":")
            getattr(torch, kind).reset_peak_memory_stats(int(index))

    def count_parts(self) -> None:
        """Count what training holds between two steps: weights, gradients, the optimizer's states, the average."""
        model, ema = self._model, self._ema
        parts = {
            "weights_bytes": model.parameters(),
            "buffers_bytes": model.buffers(),
            "gradients_bytes": (one.grad for one in model.parameters() if one.grad is not None),
            "optimizer_bytes": tree_leaves(list(self._optimizer.state.values())),
            "average_bytes": () if ema is None else ema.state_dict()["average"].values(),
        }
        self._parts = {}
        for name, tensors in parts.items():
            for device, size in bytes_by_device(tensors).items():
                self._parts.setdefault(device, {})[name] = size

    def end(self) -> dict[str, Any]:
        """End the epoch, and return its memory.

        ``metric`` names the host's figure: ``non_reclaimable`` (this process without its loader workers), or ``rss``
        where the kernel does not tell that. ``parts`` are by device. ``phases`` hold ``host_bytes`` at the end of each
        phase, and the peaks of its ``devices``.
        """
        self._leave()
        found = {"metric": _read_host()[0], "parts": self._parts, "phases": self._phases}
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
