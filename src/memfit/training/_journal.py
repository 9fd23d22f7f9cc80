"""Write how a training goes into the run directory: phases, steps, epochs, checkpoints and stops.

It knows no trainer, model or optimizer, so any training loop can keep one.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from memfit.memory import ProcReader, read_heap
from memfit.rundir import is_canary, phase, read_devices, record
from memfit.training._oom import device_bytes, reset_device_peaks
from memfit.training._process import say
from memfit.units import format_count

_STEP_EVENT_SECONDS, _BLOCK_BYTES = 0.5, 64


class Journal:
    """Writes the events of one training, and prints the main ones where no run shows them. ``num_epochs`` is None in a
    loop that does not know how many it will make. Positions are whole epochs, then steps of the next one. Seconds are
    those of steps and what they waited for; checkpoints and validation are not in them."""

    def __init__(self, num_epochs: int | None = None) -> None:
        self.num_epochs, self.is_over, self.was_over = num_epochs, False, False
        self._next_step, self._has_loaders = 0.0, False
        #: How often each phase was entered, and an epoch ended.
        self.passed: Counter[str] = Counter()
        self.begin_epoch()
        self._restart()

    def _restart(self) -> None:
        self._seconds = self._wait_seconds = 0.0
        self._num_samples = 0
        self._device_uses: list[float] = []

    # --- phases

    def begin_epoch(self) -> None:
        """Forget the phases so far: those of the preflight belong to no epoch."""
        self._phase = ""
        self._phases: dict[str, dict[str, Any]] = {}

    def phase(self, name: str) -> None:
        """End the phase before with what this process holds now, and start the devices' peaks anew."""
        phase(name)
        self.passed[name] += 1
        self._leave()
        self._phase = name
        reset_device_peaks()

    def _leave(self) -> None:
        if not self._phase:
            return
        noted = self._phases.setdefault(self._phase, {"host_bytes": 0, "devices": {}})
        status = ProcReader().status(os.getpid())
        noted["host_bytes"] = max(noted["host_bytes"], status.private if status else 0)
        for device, sizes in device_bytes().items():
            before = noted["devices"].get(device, {})  # entered before: a checkpoint within the epoch came between
            names = ("allocated_peak_bytes", "reserved_peak_bytes")
            noted["devices"][device] = {name: max(before.get(name, 0), sizes[name]) for name in names}

    def loaders(self, settings: Mapping[str, int | None]) -> None:
        """Record how the loaders of this training are set, once: a run compares that with its plan."""
        if not self._has_loaders:
            self._has_loaders = True
            record("loaders", settings=dict(settings))

    # --- steps

    def step(
        self, where: Mapping[str, int], loss: torch.Tensor | float | None, device: torch.device | None = None
    ) -> None:
        """Record a step, at most twice a second, and read from NVML as often how busy a GPU was. ``where`` has
        ``epoch``, ``step`` and ``num_steps`` from 1; ``loss`` is None when nothing was counted."""
        now = time.monotonic()
        if now < self._next_step:
            return
        self._next_step = now + (0.0 if is_canary() else _STEP_EVENT_SECONDS)
        loss = None if loss is None else float(loss)
        more = read_devices() | ({"heap_bytes": _live_bytes()} if is_canary() else {})
        record("step", **where, num_epochs=self.num_epochs, loss=loss, **more)
        if device is not None and device.type == "cuda":
            with suppress(Exception):  # a driver without NVML: it raises what it likes
                self._device_uses.append(torch.cuda.utilization(device) / 100)

    def took(self, seconds: float, wait_seconds: float, num_samples: int = 0) -> None:
        self._seconds += seconds
        self._wait_seconds += wait_seconds
        self._num_samples += num_samples

    def pace(self) -> dict[str, float]:
        """End the epoch's steps; return ``seconds``, ``wait_share``, and where known ``samples_per_second``,
        ``device_use``."""
        found = {}
        if self._seconds:
            found = {"seconds": self._seconds, "wait_share": self._wait_seconds / self._seconds}
            if self._num_samples:
                found["samples_per_second"] = self._num_samples / self._seconds
            if self._device_uses:
                found["device_use"] = sum(self._device_uses) / len(self._device_uses)
        self._restart()
        return found

    # --- epochs

    def epoch(self, epoch: int, numbers: Mapping[str, float], pace: Mapping[str, float]) -> None:
        """Record an epoch: loss and metrics, ``pace``, and the memory of its phases. The event's ``memory`` names in
        ``metric`` the host's figure: ``non_reclaimable`` (this process without its loader workers). Its ``phases`` hold
        ``host_bytes`` at the end of each phase, and the peaks of its ``devices``."""
        self._leave()
        self.passed["epoch"] += 1
        memory = {"metric": "non_reclaimable", "phases": self._phases}
        self.begin_epoch()
        figures = "  ".join(f"{name} {value:.6g}" for name, value in numbers.items())
        whole = f"/{self.num_epochs}" if self.num_epochs else ""
        text = f"epoch {epoch}{whole}  {figures}  {_describe(pace)}".rstrip()
        shown: dict[str, Any] = {**numbers, **pace, "num_threads": psutil.Process().num_threads(), "memory": memory}
        record("epoch", epoch=epoch, num_epochs=self.num_epochs, **shown, text=text)
        say(text)

    def early_stop(self, epoch: int, why: str, **fields: Any) -> None:
        record("early_stop", epoch=epoch, num_epochs=self.num_epochs, **fields)
        say(f"stops early after epoch {epoch} of {self.num_epochs}: {why}")

    # --- stops

    def resume(self, path: Path, position: tuple[int, int]) -> None:
        epoch, step = position
        where = f"in epoch {epoch + 1} after its step {step}" if step else f"after epoch {epoch}"
        record("resume", path=str(path), epoch=epoch, step=step, text=f"continues {where}")
        of = f", of {format_count(self.num_epochs, 'epoch')}" if self.num_epochs else ""
        self.was_over = self.is_over or (self.num_epochs is not None and epoch >= self.num_epochs)
        say(f"{'nothing is left to train' if self.was_over else 'goes on'} {where}{of} ({path})")
        self._restart()

    def inexact(self, why: str) -> None:
        """Record why a resume does not lead to the same bytes."""
        self.verdict("inexact", f"resumed from a whole checkpoint, but not to the same bytes: {why}")

    def verdict(self, kind: str, text: str, *, is_said: bool = True) -> None:
        """Record how the steps came out that a resume made again."""
        record(kind, text=text)
        if is_said:
            say(text)


class Unheard(Journal):
    """The journal of a rank that tells nothing but, in a canary, its phases: it keeps the times alone."""

    def _ignore(self, *args: Any, **fields: Any) -> None:
        pass

    loaders = step = epoch = early_stop = resume = inexact = verdict = _ignore

    def phase(self, name: str) -> None:
        if is_canary():
            phase(name)


def _live_bytes() -> int:
    """Return what this process has allocated and not freed, small objects of Python by a usual size; 0 if unknown."""
    live = read_heap().get("live_bytes", 0)
    return live and live + _BLOCK_BYTES * sys.getallocatedblocks()


def _describe(figures: Mapping[str, float | None]) -> str:
    """Return the figures as a line for people.
    >>> _describe({"samples_per_second": 412.3, "wait_share": 0.0031})
    '412 samples/s  waits for data 0.3 %'
    """
    words = []
    if (rate := figures.get("samples_per_second")) is not None:
        words.append(f"{rate:,.{0 if rate >= 10 else 2}f} samples/s")
    for name, word in (("wait_share", "waits for data"), ("device_use", "device busy")):
        if (share := figures.get(name)) is not None:
            words.append(f"{word} {share * 100:.1f} %")
    return "  ".join(words)
