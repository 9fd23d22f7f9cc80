"""Seed, save and restore the global random state, and note the signals that ask a fit to stop."""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from memfit.errors import DamagedError, StoppedError
from memfit.files import read_json
from memfit.rundir import current_run, record

#: The signals that ask a training to stop at its next step.
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


def say(text: str) -> None:
    """Print how the training goes, where no run shows its events."""
    if current_run() is None:
        print(f"memfit: {text}", file=sys.stderr, flush=True)


_saves_checked: set[str] = set()
_KILL_WAIT_SECONDS = 30  # Slurm's default
_SHELL_SECONDS = 10  # what docker stop leaves


def grace_seconds() -> float | None:
    """Return what a job of this run has between the request to stop and its end; None outside of a run."""
    current, grace = current_run(), None
    with suppress(DamagedError, OSError):
        if current is not None:
            grace = (read_json(current[0].job_dir(current[1]) / "job.json") or {}).get("grace_seconds")
    return grace if isinstance(grace, int | float) else None


def check_save_seconds(seconds: float) -> None:
    """Say once if a save takes longer than a job has between the request to stop and its end."""
    current = current_run()
    place = os.environ.get("SLURM_JOB_ID", "") if current is None else str(current[0].path)
    grace = _KILL_WAIT_SECONDS if current is None else grace_seconds()
    if place and place not in _saves_checked and grace is not None and seconds > grace:
        more = math.ceil(2 * seconds)
        how = (
            f"sbatch --signal=TERM@{more} or more"
            if current is None
            else f"grace_seconds in the config, or --grace {more}"
        )
        text = f"the first save took {seconds:.0f} s, and a stop leaves {grace:g} s: it would be killed while it saves"
        record("slow_save", seconds=round(seconds, 1), grace_seconds=grace, text=f"{text}. Give it more: {how}")
        print(f"memfit: {text}. Give it more: {how}", file=sys.stderr, flush=True)
    _saves_checked.add(place)


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch (every device).

    Call it before a model is built, so that its first weights are the same in every run. NumPy takes seeds from 0 up to
    2**32 - 1.

    Example:
        >>> seed_everything(7)
        >>> first = torch.rand(2)
        >>> seed_everything(7)
        >>> torch.equal(first, torch.rand(2))
        True
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the state of the global generators as tensors and plain values that ``weights_only`` loading accepts.

    Example:
        >>> state = rng_state()
        >>> first = torch.rand(2)
        >>> set_rng_state(state)
        >>> torch.equal(first, torch.rand(2))
        True
    """
    python, numpy, cpu, cuda = read_rng()
    words = torch.from_numpy(np.asarray(numpy["state"]["key"], np.int64))
    position, has_gauss = int(numpy["state"]["pos"]), int(numpy["has_gauss"])
    named = (str(numpy["bit_generator"]), words, position, has_gauss, float(numpy["gauss"]))
    return {"python": python, "numpy": named, "torch": cpu, "cuda": cuda}


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put the global generators back to what ``rng_state`` gave, on the GPUs that are visible now."""
    version, internal, gauss = state["python"]
    name, keys, *others = state["numpy"]
    numpy = (name, keys.numpy().astype(np.uint32), *others)
    cuda = state["cuda"][: torch.cuda.device_count()]  # those of GPUs that are not visible any more have nowhere to go
    # a view into a larger tensor would be a segmentation fault in torch 2.13
    write_rng(((version, tuple(internal), gauss), numpy, state["torch"].clone(), cuda))


def read_rng() -> tuple[Any, ...]:
    """Return the state of the global generators as ``write_rng`` wants it: cheap, and for this process only."""
    # asking a GPU that nothing has touched yet would cost this process a CUDA context
    cuda = [torch.cuda.get_rng_state(one) for one in _devices()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state(), cuda


def write_rng(state: tuple[Any, ...]) -> None:
    """Put the global generators back to what ``read_rng`` gave."""
    python, numpy, cpu, cuda = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    for one, device in zip(cuda, _devices() if cuda else (), strict=False):
        torch.cuda.set_rng_state(one, device)


def _devices() -> Sequence[int]:
    """Return the GPUs whose generators are this process's: all that are visible, or a rank's own."""
    is_rank = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return [torch.cuda.current_device()] if is_rank else range(torch.cuda.device_count())


def seed_rank(seed: int, rank: int) -> None:
    """Seed the global generators of a rank: rank 0 as a process that trains alone, each other one by itself."""
    seed_everything(int(np.random.SeedSequence((seed, rank)).generate_state(1)[0]) if rank else seed)


@contextmanager
def preserved_rng() -> Iterator[None]:
    before = read_rng()
    try:
        yield
    finally:
        write_rng(before)


class Stopper:
    """Notes SIGTERM, SIGUSR1 or Ctrl-C, for a loop that stops between two steps."""

    def __init__(self) -> None:
        #: The name of the signal that this process alone has noted.
        self.own: str | None = None
        self._noted_at = 0.0
        self._before: dict[int, Any] = {}
        self._ranks: Any = None

    @property
    def seconds_left(self) -> float:
        """The seconds from now until a stop that was noted becomes a kill."""
        outside = _KILL_WAIT_SECONDS if os.environ.get("SLURM_JOB_ID") else _SHELL_SECONDS
        grace = grace_seconds()
        return (outside if grace is None else grace) - (time.monotonic() - self._noted_at if self.own else 0.0)

    @property
    def noted(self) -> str | None:
        """The name of the signal that asks for a stop, on any rank at the last vote; None if none does."""
        if self._ranks is None:
            return self.own
        return signal.Signals(self._ranks.request).name if self._ranks.request > 0 else None

    def join(self, ranks: Any) -> None:
        """Stop where all ``Ranks`` of a group stop: each tells in its votes what it has noted."""
        self._ranks = ranks
        ranks.wants = lambda: 0 if self.own is None else int(signal.Signals[self.own])

    def vote(self, step: int) -> None:
        """Hear, after an optimizer step, what the other ranks have noted; nothing in a process that trains alone."""
        if self._ranks is not None:
            self._ranks.step = step
            self._ranks.settle()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.own is not None:
                raise KeyboardInterrupt
            os.write(2, b"\nstops after this step, with a checkpoint; Ctrl-C again interrupts at once\n")
        self.own, self._noted_at = signal.Signals(number).name, time.monotonic()

    def listen(self, *, interrupt: bool = True) -> None:
        """Note the signals from now on, in the main thread only; with ``interrupt`` also the first Ctrl-C. Again, after
        a framework has put handlers of its own in their place."""
        if not self._before and threading.current_thread() is threading.main_thread():
            # what ignores Ctrl-C, or has a handler of its own, keeps that
            is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            heard = [*STOP_SIGNALS, *[signal.SIGINT] * (interrupt and is_default)]
            self._before = {number: signal.getsignal(number) for number in heard}
        for number in self._before:
            signal.signal(number, self._note)

    def close(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            if handler is not None:  # None: it was not installed from Python, and cannot be put back from here
                signal.signal(number, handler)

    def end(self, where: str, kept: str, **position: int) -> StoppedError:
        """Record the stop, and return what ends the process with exit code 75 when it is raised. ``where`` is how far
        the training is (``after step 730``), ``kept`` a sentence on which checkpoint holds it."""
        name = self.noted or self.own
        record("stop", signal=name, **position)
        return StoppedError(f"Stopped by {name} {where}.", rule=kept, remedy="run the same command again")
