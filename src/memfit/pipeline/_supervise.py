"""Supervise a run: one process at a time, with its signals, events, budget, claims and cgroup limits."""

from __future__ import annotations

import errno
import functools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from memfit.errors import DataError, DoesNotFitError, MemfitError, UsageError
from memfit.files import AWAY, outlast, refresh, sync_folder, write_json
from memfit.integrations import notifier_of, start_trackers
from memfit.jobs import (
    ASK_SIGNAL,
    ENDED,
    NOW_SIGNAL,
    Backend,
    JobSource,
    JobStatus,
    LocalAdmission,
    Parent,
    Policy,
    Scheduler,
    StopRequest,
    forget_stops,
    take_stop,
)
from memfit.masking import mask
from memfit.memory import HOST, Budget, Claims, Footprint, Sizes, is_lost, lock_file
from memfit.pipeline._config import RunConfig
from memfit.pipeline._places import PLACES, read_budget
from memfit.planning import plan
from memfit.rundir import Event, EventWriter, Reader, RunDir, scope_of

View = Callable[[RunDir], Callable[[], None]]
Known = Sequence[tuple[str, Mapping[str, str], Footprint]]

_TICK_SECONDS = 0.1
_LOCK_SECONDS = 10.0  # how often a supervisor asks whether it still has its lock
_LOOK_SECONDS = 0.5  # how often watchers take in new events
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Source(JobSource, Protocol):
    """A source of jobs that are units of graphs: one graph, or a search over many."""

    def num_like(self, job_id: str) -> int:
        """Return how many jobs are like one."""

    def given_up(self, job_id: str) -> str:
        """Return why a job that has not started yet must not start any more; empty if it may."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        path: The run directory.
        state: ``completed``, ``failed``, ``stopped`` (by a stage: a gate), ``preempted`` (stopped by a signal, and
            continues when started again) or ``cancelled``.
        exit_code: The exit code for the process.
        statuses: The jobs' last statuses, by job id.
        metrics: What the stages returned, by job id.
        why: Why a stage stopped the run, or what a canary found; empty for another run.
        canary: The verdict of a canary, as in its ``canary.json``; None for another run.
    """

    path: Path
    state: str
    exit_code: int
    statuses: Mapping[str, JobStatus]
    metrics: Mapping[str, Mapping[str, Any]]
    why: str = ""
    canary: Mapping[str, Any] | None = None


class Watcher:
    """Follows a run's events while its jobs run, and has a word in how it ends."""

    def take(self, events: Sequence[Event]) -> None:
        """Take in the events that came since the last call, which comes twice a second."""

    def why_no_more(self) -> str:
        """Return why no other job may start; empty if one may."""
        return ""

    def close(self, result: RunResult) -> RunResult:
        """Return how the run ended, once all its jobs have and all events are taken in."""
        return result


@dataclass
class Supervisor:
    """A run that this process supervises: it starts the jobs and keeps them within one budget."""

    run: RunDir
    settings: RunConfig
    force: bool
    events: EventWriter
    stop: StopRequest
    backend: Backend
    claims: Claims
    show: Callable[[], None]
    lock: _RunLock
    parent: Parent | None = None
    watchers: list[Watcher] = field(default_factory=list)
    state: str = "failed"
    _look_at: float = 0.0
    _adopted: set[str] = field(default_factory=set)
    _budget: Budget | None = None
    _planned: Sizes = field(default_factory=Counter)
    _num_parallel: int = 0

    def tick(self) -> None:
        self.show()
        self.lock.look()
        if time.monotonic() >= self._look_at:
            self.look()

    def look(self, *, anew: bool = False) -> None:
        """Let the watchers take in new events; ``anew`` as in ``FolderTail``."""
        self._look_at = time.monotonic() + _LOOK_SECONDS
        events = self._reader.read(anew=anew) if self.watchers else ()
        for one in self.watchers:
            one.take(events)

    @functools.cached_property
    def _reader(self) -> Reader:
        return Reader(self.run)

    def read_budget(self, in_use_bytes: int = 0) -> Budget:
        """Read the budget; the user's limit also counts what jobs left in /dev/shm."""
        left_bytes = self.backend.enforcer.left_bytes() if self.backend.enforcer else 0
        left_bytes += self.parent.used_bytes if self.parent else 0  # once, whatever is forked from it
        self._budget = read_budget(self.settings, in_use_bytes + left_bytes, last=self._budget)
        return self._budget

    def schedule(self, graph: Source, known: Known, *, largest_first: bool = False) -> dict[str, JobStatus]:
        """Run the jobs of a graph to their ends, and return the last status of each that was started."""

        def say(kind: str, **fields: Any) -> None:
            self.events.write(kind, **fields)
            job_id = str(fields.get("job"))
            if kind == "footprint" and (number := graph.num_like(job_id)) > 1:
                num_devices = admission.running[job_id].job.num_devices
                self.plan(Footprint.from_dict(fields["footprint"]), job_id, number, admission.in_use(), num_devices)

        policy = Policy(
            max_parallel=self.settings.most_at_once,
            on_failure=self.settings.on_failure,
            slack=self.settings.memory.slack,
            force=self.force,
            retries=self.settings.retries,
            largest_first=largest_first,
            # A search's declared sizes are the least that its trials take.
            refuse_tight=not (self.settings.accept_tight or largest_first),
        )
        is_shared = not self.backend.traits.is_cluster
        claims = self.claims if is_shared else None
        admission = LocalAdmission(self.read_budget, policy=policy, known=known, claims=claims, is_shared=is_shared)
        admission.budget.read_own = admission.read_own if is_shared else int
        scheduler = Scheduler(graph, self.backend, admission, say=say)
        if not graph.is_done:
            (self.run.path / "outcome.json").unlink(missing_ok=True)  # it runs again

        def stopped(job_id: str) -> str:
            self.look()
            why = graph.given_up(job_id) or take_stop(self.run, job_id)
            return why or next(filter(None, (one.why_no_more() for one in self.watchers)), "")

        return scheduler.run(stop=self.stop, on_tick=self.tick, still_running=self._adopted, stopped=stopped)

    def adopt(self, goes_on_with: Callable[[str], bool]) -> None:
        """Take over running jobs of an earlier supervisor for which ``goes_on_with`` is true, and stop the others.

        Call it before looking at what the jobs left: a job that ends later is then known to have run.
        """
        jobs = {path.name for path in (self.run.path / "jobs").iterdir()}
        running = self.backend.adopt(jobs)
        forget_stops(self.run, jobs - running)
        self._adopted = {job_id for job_id in running if goes_on_with(job_id)}
        left, level = running - self._adopted, 0
        for job_id in sorted(left):
            self.events.write("plan", text=f"{job_id} still runs and this run does not need it: memfit stops it")
            self.backend.cancel(job_id)
        while any(self.backend.poll()[job_id].state not in ENDED for job_id in left):
            if self.stop.level > 1 and level < 2:
                level = 2
                for job_id in left:
                    self.backend.cancel(job_id, now=True)
            self.backend.wait(_TICK_SECONDS)
            self.tick()

    def plan(
        self,
        footprint: Footprint,
        measured_on: str,
        num_jobs: int,
        in_use: Sizes | None = None,
        num_devices: int | None = None,
    ) -> None:
        """Write the plan for the largest footprint, and say how many run at once if that changed."""
        if self.backend.traits.is_cluster:
            return  # its queue decides how many run at once
        sizes = Counter({HOST: footprint.private_bytes, "a device": footprint.bytes_per_device})
        if all(size <= 1.01 * self._planned[place] for place, size in sizes.items()):
            return
        self._planned = sizes
        memory = self.settings.memory
        try:
            decided = plan(
                footprint,
                num_jobs,
                budget=self.read_budget(in_use[HOST] if in_use else 0),
                max_parallel=self.settings.most_at_once,
                slack=memory.slack,
                in_use=in_use,
                num_devices=num_devices,
            )
        except DoesNotFitError as error:
            # The measured job runs all the same; the scheduler holds the others back.
            self.events.write("plan", text=error.what)
            return
        measured = {"measured_on": measured_on, "tight_malloc": memory.tight_malloc}
        write_json(self.run.path / "plan.json", decided.to_dict() | measured)
        if decided.num_parallel != self._num_parallel:
            self._num_parallel = decided.num_parallel
            self.events.write("plan", text=decided.explain(), num_parallel=decided.num_parallel)

    @property
    def interrupted(self) -> tuple[str, int]:
        """The state and the exit code of a run that was stopped before its end."""
        return ("cancelled", 130) if self.stop.level > 1 else ("preempted", 75)

    def settle(
        self,
        statuses: Mapping[str, JobStatus],
        metrics: Mapping[str, Mapping[str, Any]],
        *,
        end: tuple[str, int] | None = None,
        stopped: Mapping[str, Any] | None = None,
    ) -> RunResult:
        """Write how the run ended: with the state and exit code ``end``, or by its jobs where that is None."""
        states, why = {status.state for status in statuses.values()}, ""
        if end is None and states - {"completed", "preempted", "cancelled", "pending"}:
            end = "failed", 4
        elif end is None and stopped is not None:
            end, why = ("stopped", int(stopped["exit_code"])), stopped["why"]
        elif end is None:
            end = ("completed", 0) if states == {"completed"} else self.interrupted
        result = RunResult(self.run.path, *end, statuses, metrics, why)
        self.look(anew=True)
        for one in self.watchers:
            result = one.close(result)
        self.state = result.state
        jobs = {job_id: {"state": s.state, "cause": s.cause} for job_id, s in statuses.items()}
        outcome = {"state": result.state, "exit_code": result.exit_code, "jobs": jobs}
        write_json(self.run.path / "outcome.json", outcome | ({"why": result.why} if result.why else {}))
        return result


@contextmanager
def supervised(
    run: RunDir,
    settings: RunConfig,
    *,
    force: bool,
    view: View | None,
    facts: Mapping[str, Any],
    parent: Parent | None = None,
) -> Iterator[Supervisor]:
    """Supervise a run until the end of the block; its first event holds ``facts``."""
    state = "failed"
    with closing(_RunLock(run.path)) as lock, ExitStack() as ends, _said_in_words(run):
        for folder in run.path.glob("*/*/"):
            refresh(folder)  # the last supervisor may have been on another host
        events = EventWriter(run.events_dir, scope=scope_of(run.header))
        ends.callback(lambda: _end_events(events, state))
        psutil.cpu_times_percent()  # the next call counts from here
        with _stoppable() as stop, ExitStack() as stack:
            events.write("run", **facts)
            backend, claims = stack.enter_context(PLACES[settings.backend](run, settings, events, parent))
            show = view(run) if view else lambda: None
            supervisor = Supervisor(run, settings, force, events, stop, backend, claims, show, lock, parent)
            if (notifier := notifier_of(settings.notify, run, events)) is not None:
                stack.callback(lambda: notifier.close(supervisor.state))
            if (tracking := start_trackers(settings.track, run, events)) is not None:
                stack.callback(lambda: tracking.close(supervisor.state))
            yield supervisor
        state = supervisor.state


def _end_events(events: EventWriter, state: str) -> None:
    spent = psutil.cpu_times_percent()
    disk = getattr(spent, "iowait", 0.0)
    shares = {"busy": round(1 - (spent.idle + disk) / 100, 3), "disk": round(disk / 100, 3)}
    with suppress(OSError):  # a full disk
        events.write("run", state=state, cpu=shares)
    with suppress(OSError):  # a network drive tells of lost writes here
        events.close()


@contextmanager
def _said_in_words(run: RunDir) -> Iterator[None]:
    """Raise what a disk refuses as an error in words, and write into the run what ended it, unless its jobs did."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise DataError(
                f"the disk of {run.path} is full.",
                rule="a run needs room for its events and results.",
                remedy="free some space and give the same command again: it continues, and takes over running jobs",
            ) from error
        if isinstance(error, OSError) and error.errno in AWAY:
            raise DataError(
                f"{run.path} cannot be reached: {error.strerror}.",
                rule="a run needs its directory. Jobs that run go on without memfit.",
                remedy=f"see to the disk or the network drive, then: memfit resume {run.path}",
            ) from error
        if not (run.path / "outcome.json").exists():  # an outcome that is there says how the jobs ended
            cause = error.what if isinstance(error, MemfitError) else f"{type(error).__name__}: {error}"
            write_json(run.path / "outcome.json", {"state": "failed", "cause": mask(cause)})
        raise


class _RunLock:
    """The lock of a run's only supervisor; taken again where the server of a network drive has forgotten it."""

    def __init__(self, run_path: Path) -> None:
        self._run_path, self._look_at = run_path, 0.0
        mounts = [one for one in psutil.disk_partitions(all=True) if run_path.is_relative_to(one.mountpoint)]
        self._on_nfs = max(mounts, key=lambda one: len(one.mountpoint)).fstype.startswith("nfs") if mounts else False
        self._take()

    def _take(self) -> None:
        descriptor = lock_file(self._run_path / "supervisor.lock", 0.5)  # `memfit stop` may hold it for a moment
        if descriptor is None:
            raise UsageError(
                f"{self._run_path} is being run by another process.",
                rule="one process at a time starts a run's jobs (supervisor.lock).",
                remedy="wait for it, or start a separate run: the same command with --new",
            )
        self._descriptor = descriptor

    def look(self) -> None:
        """Look after the lock now and then, on NFS."""
        if self._on_nfs and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOCK_SECONDS
            if is_lost(self._descriptor):
                outlast(lambda: sync_folder(self._run_path))
                self.close()
                self._take()

    def close(self) -> None:
        with suppress(OSError):  # likewise
            os.close(self._descriptor)


@contextmanager
def _stoppable() -> Iterator[StopRequest]:
    """Turn SIGTERM and the first SIGINT into a request to stop, and the next SIGINT into an end at once.

    A second SIGTERM changes nothing: Slurm repeats it if a node answered late.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    handlers: dict[int, Callable[..., None]] = {
        signal.SIGINT: lambda *_: stop.now() if stop.level else stop.ask(),
        signal.SIGTERM: lambda *_: stop.ask(),
        ASK_SIGNAL: lambda *_: stop.ask(),
        NOW_SIGNAL: lambda *_: stop.now(),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
