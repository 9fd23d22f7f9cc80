"""How a DataLoader's workers begin: they end with the process that started them, whose signals are not theirs."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import active_children, resource_tracker
from typing import Any

from torch.utils.data import DataLoader

from memfit.training._process import STOP_SIGNALS
from memfit.training._worker_death import workers_in
from memfit.training._worker_watch import WorkerWatch, register_worker, start_method

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class _WorkerInit:
    """A worker's first act: to die with the process that started it, and to show its stacks; then the user's own.

    Attributes:
        then: The loader's own ``worker_init_fn``.
        parent: The pid of the process that starts the worker; 0 if it is the fork server.
        stacks: The folder where it writes its stacks when it is asked for them; empty if it will not be asked.
    """

    then: Callable[[int], None] | None
    parent: int
    stacks: str = ""

    def __call__(self, number: int) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if self.parent and os.getppid() != self.parent:  # it died before it was asked to be followed
                os._exit(1)
        if self.stacks:
            register_worker(self.stacks)
        if self.then is not None:
            self.then(number)


@contextmanager
def _begun_well(loader: Any, stacks: str) -> Iterator[None]:
    """Workers that are started inside end with this process, however that ends, and show their stacks when asked."""
    then = getattr(loader, "worker_init_fn", None)
    loader.worker_init_fn = _WorkerInit(then, 0 if start_method(loader) == "forkserver" else os.getpid(), stacks)
    try:
        yield
    finally:
        loader.worker_init_fn = then


@contextmanager
def workers_of(loader: Any, stacks: str) -> Iterator[None]:
    """Workers that are started inside end with this process, however that ends, and not by what asks a fit to stop.

    They never receive its signals, as when all processes of a job are told: those that are forked would call the fit's
    own handler, others would die of it, and the step's batches with them.

    Args:
        loader: Any batches.
        stacks: The folder where a worker writes its stacks when it is asked for them; empty if it will not be asked.
    """
    if getattr(loader, "num_workers", 0) == 0 or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it unblocks SIGTERM when it is started
    others = set(active_children())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*STOP_SIGNALS, signal.SIGINT])
    try:
        with _begun_well(loader, stacks):
            yield
    except (
        BaseException
    ):  # one of them has died at once: nobody has a hold on the others, and SIGTERM does not end them
        for child in set(active_children()) - others:
            child.kill()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def watched(batches: Iterable[Any], seconds: float, phase: str) -> Iterator[Any]:
    """The batches; of a ``DataLoader`` with workers the first one is watched for.

    Args:
        batches: Any.
        seconds: How long it may take while no worker does anything.
        phase: What it is the first batch of.

    Raises:
        JobFailedError: If the workers were stuck.
    """
    if not isinstance(batches, DataLoader) or batches.num_workers == 0:
        yield from batches
        return
    watch = WorkerWatch(batches, seconds)
    try:
        stacks, living = watch.prepare(), workers_in(getattr(batches, "_iterator", None))
        with _begun_well(batches, stacks), watch.waiting(phase, living) if living else nullcontext():
            iterator = iter(batches)
        with watch.waiting(phase, workers_in(iterator)):
            first = list(itertools.islice(iterator, 1))
        yield from first
        yield from iterator
    finally:
        watch.close()
