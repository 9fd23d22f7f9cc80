"""Watch the worker processes of a ``DataLoader``: end them with the trainer, and explain one that hangs or dies.

A usual cause is a fork while a thread of a library (Polars, gRPC) held a lock: no thread of the worker will free it.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import faulthandler
import multiprocessing
import multiprocessing.context
import multiprocessing.process
import os
import re
import shutil
import signal
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
from torch.utils.data import DataLoader

from memfit.errors import JobFailedError
from memfit.memory import memory_group, oom_kills_above
from memfit.rundir import record
from memfit.training._process import STOP_SIGNALS
from memfit.training._stacks import likely_cause, register_stack_dump, stacks_of
from memfit.units import format_bytes

#: How long a first batch is waited for while its workers do nothing.
FIRST_BATCH_SECONDS = 120.0

_IDLE_CPU_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SHM_FULL = re.compile(r"</?torch_\w+>.*: No space left on device \(28\)")
# Sources: torch/csrc/DataLoader.cpp and torch/utils/data/dataloader.py (PyTorch 2.6 to 2.13)
_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: |exited unexpectedly)")
_FEWER = "lower num_workers or prefetch_factor"
_MORE_SHM = "give /dev/shm more room (docker run --shm-size=..., mount -o remount,size=... /dev/shm)"


class Workers:
    """Starts a loader's workers, watches them until a first batch is there, and ends them; any loader may have none."""

    def __init__(self, loader: Any, seconds: float) -> None:
        self.loader, self.seconds = loader, seconds
        self.iterator: Any = None
        self._stacks = ""
        self._kills = _count_oom_kills()

    def open(self, phase: str) -> Iterator[Any]:
        """Return the batches of a phase, made by deaf workers that end when this process ends. Until the first batch is
        there, workers that neither compute nor read for ``seconds`` are ended."""
        self.iterator = self._start()
        return self._batches(phase)

    def _start(self) -> Iterator[Any]:
        loader = self.loader
        if not isinstance(loader, DataLoader) or loader.num_workers == 0:
            return iter(loader)
        if not self._stacks:
            self._stacks = tempfile.mkdtemp(prefix="memfit-stacks-")
            weakref.finalize(self, _remove, self._stacks, os.getpid())
        context, then = loader.multiprocessing_context, loader.worker_init_fn
        deaf_workers(loader).worker_init_fn = partial(_start_worker, then, self._stacks)
        try:
            return iter(loader)
        finally:
            loader.multiprocessing_context, loader.worker_init_fn = context, then

    def _batches(self, phase: str) -> Iterator[Any]:
        iterator = self.iterator
        with contextlib.suppress(StopIteration):
            yield self._first(iterator, phase)
            while True:
                yield next(iterator)

    def _first(self, iterator: Any, phase: str) -> Any:
        workers = workers_in(iterator)
        if not workers or getattr(iterator, "_timeout", True):  # a timeout of the user's own
            return next(iterator)
        iterator._timeout = self.seconds
        seen = _activity(workers)
        try:
            while True:
                try:
                    return next(iterator)
                except RuntimeError as error:
                    if not str(error).startswith("DataLoader timed out"):
                        raise
                before, seen = seen, _activity(workers)
                if seen[0] <= before[0] + _IDLE_CPU_SECONDS and seen[1:] == before[1:]:
                    raise self._stuck(phase, workers)
        finally:
            iterator._timeout = 0

    def _stuck(self, phase: str, workers: Sequence[Any]) -> JobFailedError:
        """End the workers, and print their stacks to standard error."""
        stacks = stacks_of([worker.pid for worker in workers], self._stacks)
        for _ in range(2):
            with contextlib.suppress(RuntimeError):  # torch raises their end from a signal handler: anywhere, once
                for worker in workers:
                    worker.kill()
                for worker in workers:
                    worker.join()
        remedy = "run with num_workers=0 to see it in this process"
        if any(stack.is_forked for stack in stacks.values()):
            remedy = "pass multiprocessing_context='forkserver' (or 'spawn') to the DataLoader, or num_workers=0"
        for pid, stack in stacks.items():
            print(f"worker {pid}, state {stack.state} {stack.wchan}\n{stack.text}", file=sys.stderr, flush=True)
        error = JobFailedError(
            f"No first batch of {phase} came within {self.seconds:g} s, and the workers do nothing: "
            f"{likely_cause(stacks)} All stacks are on standard error.",
            rule=f"workers that neither compute nor read for {self.seconds:g} s (first_batch_seconds) are ended.",
            remedy=f"{remedy}; if they only wait for something slow, pass Trainer(first_batch_seconds=...)",
        )
        record("loader_stuck", phase=phase, seconds=self.seconds, cause=error.what)
        return error

    def explain(self, error: RuntimeError) -> JobFailedError | None:
        """Return the error for a worker, of any ``DataLoader``, that died or found ``/dev/shm`` full; else None."""
        if _SHM_FULL.search(str(error)):
            record("shm_full", room=_shm_room())
            return JobFailedError(
                f"A batch found no room in shared memory: {_shm_room()} now.",
                rule="workers hand batches over in /dev/shm: up to num_workers x prefetch_factor of them at once.",
                remedy=f"{_FEWER}; {_MORE_SHM}",
            )
        match = _DIED.search(str(error))
        if match is None:
            return None
        pids = [int(pid) for pid in match[1].split(",")]
        code = _exit_code(pids)
        what, remedy = self._cause_of(code)
        record("loader_worker_died", pids=pids, exit_code=code, cause=what)
        return JobFailedError(
            f"DataLoader worker {', '.join(map(str, pids))} {what}.",
            rule="a batch that a worker was to make is lost with it, so the epoch cannot go on.",
            remedy=remedy,
        )

    def _cause_of(self, code: int | None) -> tuple[str, str]:
        if code == -signal.SIGKILL:
            before, now = self._kills, _count_oom_kills()
            rose = [f"{name} ({before.get(name, 0)} -> {now[name]})" for name in now if now[name] > before.get(name, 0)]
            what = "was killed (SIGKILL), perhaps for memory, though the kernel counts no such kill here"
            if rose:
                what = f"was killed by the kernel for memory: its count of such kills rose in {', '.join(rose)}"
            return what, f"{_FEWER}, give more memory, or pack lists of objects: memfit.data.pack(objects)"
        if code == -signal.SIGBUS:
            return (
                f"ended with a bus error (SIGBUS): it touched memory of a file that is not there. {_shm_room()}",
                f"{_FEWER}; {_MORE_SHM}; a mapped file must not be cut short while it is read",
            )
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
            return f"was ended by {name}; its stack is on standard error", "run with num_workers=0 to see it here"
        ended = "ended" if code is None else f"ended by itself with exit code {code}"
        return f"{ended} without an exception", "look for exit() or os._exit() in the data set; try num_workers=0"

    def close(self, *, persistent_too: bool = False) -> None:
        """End the workers, by SIGKILL where they do not end; persistent ones only with ``persistent_too``."""
        iterator, self.iterator = self.iterator, None
        if getattr(self.loader, "persistent_workers", False):
            if not persistent_too:
                return
            iterator, self.loader._iterator = self.loader._iterator, None
        workers = workers_in(iterator)
        for name in ("_shutdown_workers", "close"):
            if (end := getattr(iterator, name, None)) is not None:
                end()
                break
        for worker in workers:
            if worker.is_alive():  # busy in the user's code: what torch sends it then is blocked
                worker.kill()
                worker.join()
        if self._stacks:
            _remove(self._stacks, os.getpid())
            self._stacks = ""


def _start_worker(then: Callable[[int], None] | None, stacks: str, number: int) -> None:
    """Let a worker die with its parent and show its stacks; then run the user's own function."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if (parent := multiprocessing.parent_process()) is None or not parent.is_alive():  # it died before this line
        os._exit(1)
    with contextlib.suppress(OSError):
        register_stack_dump(stacks)
    faulthandler.disable()  # as inherited by a fork: torch has put handlers of its own over its
    faulthandler.enable()
    if then is not None:
        then(number)


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:  # a forked worker holds a copy of what removes it
        shutil.rmtree(folder, ignore_errors=True)


def workers_in(iterator: Any) -> list[Any]:
    """Return the worker processes of a ``DataLoader``'s iterator; none of anything else."""
    workers = getattr(iterator, "_workers", None)
    return workers if isinstance(workers, list) else []


def _activity(workers: Sequence[Any]) -> tuple[float, int, int]:
    """Return CPU seconds and bytes read of workers and the processes they started; and how many these are."""
    cpu, read, number = 0.0, 0, 0
    for worker in workers:
        with contextlib.suppress(psutil.Error):
            for process in (own := psutil.Process(worker.pid), *own.children(recursive=True)):
                times = process.cpu_times()
                cpu, number = cpu + times.user + times.system, number + 1
                read += getattr(process.io_counters(), "read_chars", 0) if hasattr(process, "io_counters") else 0
    return cpu, read, number


def _exit_code(pids: Sequence[int]) -> int | None:
    """Return the exit code of the first of these workers that ended, negative for a signal; None if it is not known."""
    for worker in list(multiprocessing.process._dangling):  # type: ignore[attr-defined]  # all that something refers to
        if worker.pid in pids:
            worker.join(1.0)
            if worker.exitcode is not None:
                return int(worker.exitcode)
    return None


def _count_oom_kills() -> dict[str, int]:
    """Return the kernel's counts of processes that it killed for memory, by place."""
    group = memory_group()
    kills = {str(name): number for name, number in oom_kills_above(group).items()} if group is not None else {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        kills["the machine"] = int(Path("/proc/vmstat").read_text().partition("\noom_kill ")[2].split()[0])
    return kills


def _shm_room() -> str:
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage("/dev/shm")
        return f"/dev/shm has {format_bytes(usage.free)} ({usage.free} bytes) free of {format_bytes(usage.total)}"
    return "/dev/shm is not there"


def deaf_workers(loader: Any) -> Any:
    """Return a loader whose workers no signal reaches that stops a training: batches would be lost with them. What
    Slurm, ``timeout`` or a terminal sends goes to all processes of a job. Torch ends them by SIGKILL then."""
    if not getattr(loader, "num_workers", 0):
        return loader
    context: Any = loader.multiprocessing_context or multiprocessing.get_context(multiprocessing.get_start_method())
    if issubclass(context.Process, _Deaf):
        return loader
    resource_tracker.ensure_running()  # it unblocks SIGTERM when it is started
    loader.multiprocessing_context = deaf = copy.copy(context)
    deaf.Process = _DEAF[context.get_start_method()]
    return loader


class _Deaf:
    """A process that has the stop signals blocked from its first moment on."""

    def start(self) -> None:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [*STOP_SIGNALS, signal.SIGINT])
        try:
            super().start()  # type: ignore[misc]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        process: Any = self
        process._popen.terminate = process._popen.kill

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [*STOP_SIGNALS, signal.SIGINT])  # not inherited from a fork server
        super().run()  # type: ignore[misc]


class _DeafFork(_Deaf, multiprocessing.context.ForkProcess):
    pass


class _DeafSpawn(_Deaf, multiprocessing.context.SpawnProcess):
    pass


class _DeafForkServer(_Deaf, multiprocessing.context.ForkServerProcess):
    pass


_DEAF = {"fork": _DeafFork, "spawn": _DeafSpawn, "forkserver": _DeafForkServer}
