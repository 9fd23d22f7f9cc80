"""Why a DataLoader's first batch does not come: its workers watched, their stacks taken, and ended if they are stuck.

``DataLoader(timeout=0)``, the default, waits for ever for workers that hang: typically they were forked while other
threads (of Polars, gRPC, an OpenMP pool) held a lock, which is then locked in them for good.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_start_method
from pathlib import Path
from typing import Any

import psutil

from memfit.errors import JobFailedError
from memfit.rundir import current_run, record
from memfit.training._process import say
from memfit.training._worker_death import count_oom_kills, explain_death
from memfit.watchdog import Stack, likely_cause, register_stack_dump, stacks_of

#: How long a first batch is waited for while its workers do nothing.
FIRST_BATCH_SECONDS = 120.0

# Their thread pools do not survive a fork. Sources: the Polars user guide, "Multiprocessing"; jax's warning at os.fork;
# gRPC's doc/fork_support.md; LightGBM's FAQ (OpenMP); tensorflow/tensorflow issue 5448.
_NOT_FOR_FORK = ("polars", "jax", "tensorflow", "grpc", "lightgbm")

_PROC = Path("/proc")
_IDLE_SHARE = 0.01
_FOLDER = "memfit-stacks-"


def start_method(loader: Any) -> str:
    """How a loader starts its workers: ``fork``, ``forkserver`` or ``spawn``."""
    context = getattr(loader, "multiprocessing_context", None)
    return str(get_start_method() if context is None else context.get_start_method())


@dataclass(frozen=True)
class ForkRisk:
    """Threads of this process that a forked worker would miss.

    Attributes:
        num_threads: All of them, beside the one that forks.
        libraries: Those loaded whose threads are known not to survive a fork.
    """

    num_threads: int
    libraries: tuple[str, ...]

    @classmethod
    def of(cls, loader: Any) -> ForkRisk | None:
        """What there is to fear when a loader starts workers now; None if it forks none, or no thread runs."""
        if start_method(loader) != "fork":
            return None
        try:
            num_threads = sum(1 for _ in (_PROC / "self" / "task").iterdir())
        except OSError:
            num_threads = threading.active_count()
        libraries = tuple(name for name in _NOT_FOR_FORK if name in sys.modules)
        return cls(num_threads - 1, libraries) if num_threads > 1 else None

    def __str__(self) -> str:
        threads = f"{self.num_threads} thread{'s' * (self.num_threads > 1)}"
        loaded = f" ({', '.join(self.libraries)} loaded)" if self.libraries else ""
        return f"forked after {threads} beside the main one had been started{loaded}"


def warn_of_forks(loader: Any) -> None:
    """Say that a loader's workers may hang, if they will be forked beside threads of a library known for it."""
    risk = ForkRisk.of(loader) if getattr(loader, "num_workers", 0) else None
    if risk is not None and risk.libraries:
        record("fork_risk", num_threads=risk.num_threads, libraries=risk.libraries)
        say(
            f"the {loader.num_workers} workers of a DataLoader are {risk} and may hang; "
            "pass multiprocessing_context='forkserver' to it"
        )


def register_worker(folder: str) -> None:
    """Let this process, a worker, be asked for its stacks, and write them if it crashes. Fails nothing."""
    with contextlib.suppress(OSError):
        register_stack_dump(folder)
        faulthandler.disable()  # as inherited by a fork: torch has put handlers of its own over its
        faulthandler.enable(open(Path(folder, f"{os.getpid()}.crash"), "w"))  # noqa: SIM115 - open while it lives


class WorkerWatch:
    """Watches the workers of one fit's loader while a first batch is waited for, and explains how one of them died.

    Args:
        loader: A ``DataLoader``.
        seconds: How long a first batch may take while no worker does anything.
    """

    def __init__(self, loader: Any, seconds: float) -> None:
        self.loader = loader
        self.seconds = seconds
        self._folder: Path | None = None
        self._end: Callable[[], Any] | None = None
        self._risk: ForkRisk | None = None
        self._kills = count_oom_kills()

    # --- before workers start

    def prepare(self) -> str:
        """Before workers start: note what they may hang of; returns the folder for ``register_worker``."""
        self._risk = ForkRisk.of(self.loader)
        if self._folder is None:
            _sweep()
            self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
            self._end = weakref.finalize(self, _remove, self._folder, os.getpid())
        return str(self._folder)

    def close(self) -> None:
        """Remove what the workers wrote."""
        if self._end is not None:
            self._end()
        self._folder = self._end = None

    # --- a first batch

    @contextmanager
    def waiting(self, phase: str, workers: Sequence[Any]) -> Iterator[None]:
        """Inside, the first batch of a phase, for example ``epoch 3``, is waited for from these workers.

        Raises:
            JobFailedError: If they did nothing for so long; they have been ended.
        """
        wait = _Wait(self, phase, [worker.pid for worker in workers])
        thread = threading.Thread(target=wait.run, name="memfit-worker-watch", daemon=True)
        try:
            thread.start()  # torch raises a worker's death from a signal handler: anywhere
            yield
        except RuntimeError:
            wait.done.set()
            if thread.ident is not None:
                thread.join()
            if wait.verdict is None:
                raise
            raise wait.verdict from None
        finally:
            wait.done.set()
        thread.join()

    def explain_stuck(self, phase: str, stacks: Mapping[int, Stack], report: Path) -> JobFailedError:
        """The error for workers that do nothing."""
        cause = likely_cause(stacks)
        is_forked = any(stack.start == "fork" for stack in stacks.values())
        if self._risk is not None:
            cause += f" The workers were {self._risk}."
        if is_forked:
            remedy = "pass multiprocessing_context='forkserver' (or 'spawn') to the DataLoader, or num_workers=0"
        else:
            remedy = "see where they wait in that file; num_workers=0 shows it in this process"
        lines = "".join(f"\n  {_line_of(stack)}" for stack in stacks.values())
        return JobFailedError(
            f"No first batch of {phase} came within {self.seconds:g} s, and the workers do nothing: {cause}"
            f"{lines}\n  all stacks: {report}",
            rule=f"a first batch is waited for {self.seconds:g} s (first_batch_seconds) if no worker computes or reads "
            "meanwhile; then they are ended.",
            remedy=f"{remedy}; if they only wait for something slow, pass Trainer(first_batch_seconds=...)",
        )

    def stacks(self, pids: Sequence[int]) -> dict[int, Stack]:
        """What the workers do now."""
        return stacks_of(pids, self._folder or "")

    def explain_death(self, error: RuntimeError) -> JobFailedError | None:
        """The error for a worker that has died, of whatever ``DataLoader``; None if that is not what was raised."""
        return explain_death(error, self._kills, self._folder)


class _Wait:
    """One wait for a batch, watched from a thread of its own.

    Attributes:
        done: Set when the batch has come.
        verdict: What was wrong, once the workers have been ended for it.
    """

    def __init__(self, watch: WorkerWatch, phase: str, pids: Sequence[int]) -> None:
        self.watch = watch
        self.phase = phase
        self.pids = pids
        self.done = threading.Event()
        self.verdict: JobFailedError | None = None

    def run(self) -> None:
        """Look again and again, half the time apart: workers that all did nothing in between are stuck."""
        half, begun, told = min(self.watch.seconds / 2, threading.TIMEOUT_MAX), time.monotonic(), False
        if self.done.wait(half):
            return
        before = {pid: _activity(pid) for pid in self.pids}
        while not self.done.wait(half):
            now = {pid: _activity(pid) for pid in self.pids}
            is_stuck = not any(_advanced(before[pid], now[pid], half) for pid in self.pids)
            before = now
            if not any(now.values()):
                return
            if not all(now.values()) or (told and not is_stuck):  # of one that has ended the DataLoader tells
                continue
            stacks = self.watch.stacks(self.pids)
            if self.done.is_set():
                return
            report = _write_report(self.phase, stacks)
            if is_stuck:
                self._end_workers(stacks, report)
                return
            told = True
            seconds = round(time.monotonic() - begun, 1)
            record("loader_slow", phase=self.phase, seconds=seconds, report=str(report))
            say(f"no first batch of {self.phase} after {seconds:g} s; the workers are busy ({report})")

    def _end_workers(self, stacks: Mapping[int, Stack], report: Path) -> None:
        verdict = self.watch.explain_stuck(self.phase, stacks, report)
        record("loader_stuck", phase=self.phase, seconds=self.watch.seconds, cause=verdict.what, report=str(report))
        self.verdict = verdict
        for pid in stacks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _sweep() -> None:
    """Remove what killed processes left among the temporary files."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        pid = left.name.removeprefix(_FOLDER).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked worker holds a copy of what removes it
        shutil.rmtree(folder, ignore_errors=True)


#: Seconds of CPU, times that the main thread went to sleep, and bytes read, of a process and of each below it.
Activity = dict[int, tuple[float, int, int]]


def _activity(pid: int) -> Activity:
    """What a worker and the processes that it started have done so far; empty if it has ended."""
    found: Activity = {}
    with contextlib.suppress(psutil.Error):
        worker = psutil.Process(pid)
        if worker.status() == psutil.STATUS_ZOMBIE:
            return {}
        for process in (worker, *worker.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times, counters = process.cpu_times(), getattr(process, "io_counters", None)
                read = getattr(counters(), "read_chars", 0) if counters is not None else 0
                found[process.pid] = (times.user + times.system, process.num_ctx_switches().voluntary, read)
    return found


def _advanced(before: Activity, now: Activity, seconds: float) -> bool:
    """Whether a worker did something in the seconds between; one that waits for work looks about it every 5 s."""
    if before.keys() != now.keys():
        return True
    changes = [[new - old for new, old in zip(now[pid], before[pid], strict=True)] for pid in now]
    return any(cpu > max(0.02, _IDLE_SHARE * seconds) or slept > 2 + seconds or read for cpu, slept, read in changes)


def _line_of(stack: Stack) -> str:
    where = " < ".join(map(str, stack.frames[:3])) or "no Python stack"
    return f"worker {stack.pid}: {stack.state} {stack.wchan} {where}"


def _write_report(phase: str, stacks: Mapping[int, Stack]) -> Path:
    """A file with the stacks of all workers, and of this process; in the job's folder, or among temporary files."""
    run = current_run()
    name = f"loader_stacks_{phase.replace(' ', '_')}"
    folder = None if run is None else run[0].job_dir(run[1])
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    descriptor, path = tempfile.mkstemp(".txt", f"{name}_" if folder is not None else f"memfit_{name}_", folder)
    with open(descriptor, "w") as file:
        for stack in stacks.values():
            facts = f"state {stack.state}, {stack.wchan or 'not waiting'}, {stack.num_threads} threads, {stack.start}"
            file.write(f"worker {stack.pid}: {facts}\n{stack.text or 'no Python stack'}\n\n")
        file.write(f"the training process {os.getpid()}:\n")
        file.flush()
        faulthandler.dump_traceback(file)
    return Path(path)
