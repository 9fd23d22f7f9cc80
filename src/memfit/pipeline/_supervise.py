"""What all runs share: one supervisor at a time, signals that stop it, its events, budget, claims and walls."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from memfit import config
from memfit.errors import DataError, DoesNotFitError, MemfitError, UsageError
from memfit.jobs import (
    ASK_SIGNAL,
    ENDED,
    NOW_SIGNAL,
    Backend,
    JobSource,
    JobStatus,
    LocalAdmission,
    LocalBackend,
    Policy,
    Scheduler,
    StopRequest,
    forget_stops,
    running_jobs,
    take_stop,
)
from memfit.memory import (
    HOST,
    Budget,
    Claims,
    Footprint,
    Sizes,
    Walls,
    lock_file,
    sweep_entries,
    sweep_groups,
    why_no_walls,
)
from memfit.pipeline._config import CommandSettings
from memfit.planning import plan
from memfit.rundir import EventWriter, RunDir, write_json

View = Callable[[RunDir], Callable[[], None]]
Known = Sequence[tuple[str, Mapping[str, str], Footprint]]

_TICK_SECONDS = 0.1
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes:
        path: The run directory.
        state: ``completed``, ``failed``, ``stopped`` (by a stage: a gate), ``preempted`` (asked to stop, goes on when
            started again) or ``cancelled``.
        exit_code: What the process should exit with.
        statuses: The jobs' last statuses, by job id.
        metrics: What the stages returned, by job id.
    """

    path: Path
    state: str
    exit_code: int
    statuses: Mapping[str, JobStatus]
    metrics: Mapping[str, Mapping[str, Any]]


@dataclass
class Supervisor:
    """A run in the hands of this process: its jobs are started, held back and watched under one budget.

    Attributes:
        run: The run directory.
        settings: How jobs are run.
        force: Run also what does not fit.
        events: Where its events go.
        stop: The request to stop, set by signals.
        backend: Where jobs run.
        claims: What other runs on this host must know.
        tick: Called at each step, for a live view.
        state: What the run came to so far.
    """

    run: RunDir
    settings: CommandSettings
    force: bool
    events: EventWriter
    stop: StopRequest
    backend: Backend
    claims: Claims
    tick: Callable[[], None]
    state: str = "failed"
    _adopted: set[str] = field(default_factory=set)
    _budget: Budget | None = field(default=None)
    _planned: Sizes = field(default_factory=Counter)
    _num_parallel: int = field(default=0)

    def read_budget(self, in_use_bytes: int = 0) -> Budget:
        """The budget as it is now, under the user's cap on what the jobs use or left in /dev/shm."""
        left_bytes = self.backend.enforcer.left_bytes() if self.backend.enforcer else 0
        self._budget = read_budget(self.settings, in_use_bytes + left_bytes, last=self._budget)
        return self._budget

    def schedule(
        self,
        source: JobSource,
        *,
        known: Known = (),
        num_like: Callable[[str], int] = lambda job_id: 1,
        proven: frozenset[str] = frozenset(),
    ) -> dict[str, JobStatus]:
        """Run the jobs of a source to their ends; the last status of each that was started.

        Args:
            source: Hands over the jobs; those that still run are taken over.
            known: Footprints measured earlier, each with its job's stage and parameters.
            num_like: How many jobs the stage of a job has.
            proven: The stages of which a job is done, for which ``on_failure: first`` means ``continue``.
        """
        memory, most = self.settings.memory, self.settings.max_parallel

        def say(kind: str, **fields: Any) -> None:
            self.events.write(kind, **fields)
            if kind == "footprint" and (number := num_like(str(fields["job"]))) > 1:
                measured = Footprint.from_dict(fields["footprint"])
                asked = admission.running[str(fields["job"])].job.num_devices
                self.plan(measured, str(fields["job"]), number, admission.in_use(), num_devices=asked)

        policy = Policy(
            max_parallel=None if most == "auto" else most,
            on_failure=self.settings.on_failure,
            slack=memory.slack,
            force=self.force,
            retries=self.settings.retries,
            proven_stages=proven,
        )
        admission = LocalAdmission(self.read_budget, policy=policy, known=known, claims=self.claims)
        scheduler = Scheduler(source, self.backend, admission, say=say)
        if not source.is_done:
            (self.run.path / "outcome.json").unlink(missing_ok=True)  # it runs again
        return scheduler.run(
            stop=self.stop,
            on_tick=self.tick,
            still_running=self._adopted,
            stopped=lambda job_id: take_stop(self.run, job_id),
        )

    def adopt(self, goes_on_with: Callable[[str], bool]) -> None:
        """Take over the jobs of an earlier supervisor that still run, and end those that are not asked for any more.

        Call it before anything is decided by what the jobs left: one that ends later is then known to have run.

        Args:
            goes_on_with: Whether a job does exactly what is asked for now; called only for jobs that run.
        """
        jobs = {path.name for path in (self.run.path / "jobs").iterdir()}
        running = self.backend.adopt(jobs)
        forget_stops(self.run, jobs - running)
        self._adopted = {job_id for job_id in running if goes_on_with(job_id)}
        left, level = running - self._adopted, 0
        for job_id in sorted(left):
            self.events.write("plan", why=f"{job_id} still runs, and this start does not go on with it: it is stopped")
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
        """Write the plan that follows from the largest footprint; say so when it is another one than before."""
        sizes = Counter({HOST: footprint.private_bytes, "a device": footprint.bytes_per_device})
        if all(size <= 1.01 * self._planned[place] for place, size in sizes.items()):
            return
        self._planned = sizes
        memory, most = self.settings.memory, self.settings.max_parallel
        try:
            decided = plan(
                footprint,
                num_jobs,
                budget=self.read_budget(in_use[HOST] if in_use else 0),
                max_parallel=None if most == "auto" else most,
                slack=memory.slack,
                in_use=in_use,
                num_devices=num_devices,
            )
        except DoesNotFitError as error:
            # The measured job runs all the same; the scheduler holds the others back.
            self.events.write("plan", why=error.what)
            return
        measured = {"measured_on": measured_on, "tight_malloc": memory.tight_malloc}
        write_json(self.run.path / "plan.json", decided.to_dict() | measured)
        if decided.num_parallel != self._num_parallel:
            self._num_parallel = decided.num_parallel
            self.events.write("plan", why=decided.explain(), num_parallel=decided.num_parallel)

    def settle(
        self,
        statuses: Mapping[str, JobStatus],
        stopped: Mapping[str, Any] | None,
        metrics: Mapping[str, Mapping[str, Any]],
    ) -> RunResult:
        """Write what the run came to.

        Args:
            statuses: The last status of each job.
            stopped: Of the stage that stopped the run: ``exit_code`` and ``why``; None where none did.
            metrics: The results, by job id.
        """
        self.state, exit_code = _state(statuses, self.stop)
        jobs = {job_id: {"state": s.state, "cause": s.cause} for job_id, s in statuses.items()}
        told = {}
        if stopped is not None and self.state != "failed":
            self.state, exit_code, told = "stopped", int(stopped["exit_code"]), {"why": stopped["why"]}
        write_json(self.run.path / "outcome.json", {"state": self.state, "exit_code": exit_code, "jobs": jobs} | told)
        return RunResult(self.run.path, self.state, exit_code, statuses, metrics)


def read_budget(settings: CommandSettings, in_use_bytes: int = 0, *, last: Budget | None = None) -> Budget:
    """The budget as it is now, under the user's cap on what the jobs use."""
    memory = settings.memory
    return Budget.read(cap_bytes=memory.limit, cap_used_bytes=in_use_bytes, reserve_bytes=memory.reserve, last=last)


@contextmanager
def supervised(
    run: RunDir, settings: CommandSettings, *, force: bool, view: View | None, told: Mapping[str, Any]
) -> Iterator[Supervisor]:
    """Take a run into this process's hands until the end of the block; ``told`` is written with its beginning.

    SIGINT and SIGTERM ask the jobs to stop at a checkpoint; a second one ends them at once.

    Raises:
        UsageError: If another process runs this run.
    """
    lock = _lock(run)
    events, state, before = EventWriter(run.events_dir), "failed", psutil.cpu_times()
    try:
        with _stoppable() as stop, ExitStack() as stack:
            events.write("run", **told)
            backend, claims = _set_up(run, settings, events, stack)
            tick = view(run) if view else lambda: None
            supervisor = Supervisor(run, settings, force, events, stop, backend, claims, tick)
            yield supervisor
        state = supervisor.state
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise DataError(
                f"the disk of {run.path} is full.",
                rule="a run needs room for its events and results.",
                remedy="free some space and give the same command again: it goes on, and what still runs is taken over",
            ) from error
        if not (run.path / "outcome.json").exists():  # else it says what came of the jobs, now or at an earlier time
            cause = error.what if isinstance(error, MemfitError) else f"{type(error).__name__}: {error}"
            write_json(run.path / "outcome.json", {"state": "failed", "cause": cause})
        raise
    finally:
        with suppress(OSError):  # a full disk
            events.write("run", state=state, cpu=_cpu_use(before, psutil.cpu_times()))
        events.close()
        os.close(lock)


def _lock(run: RunDir) -> int:
    """Lock a run until the descriptor is closed: no second supervisor admits the same jobs."""
    descriptor = lock_file(run.path / "supervisor.lock", 0.5)  # `memfit stop` may be looking who holds it
    if descriptor is None:
        raise UsageError(
            f"{run.path} is being run by another process.",
            rule="one supervisor at a time admits a run's jobs (supervisor.lock).",
            remedy="wait for it, or start a separate run: the same command with --new",
        )
    return descriptor


def _cpu_use(before: Any, after: Any) -> dict[str, float]:
    """What the host's cores did between two readings, as shares of all their time: ``busy``, and idle for a disk.

    >>> from types import SimpleNamespace as Times
    >>> times = Times(user=1.0, system=0.0, idle=0.0, iowait=0.0, _fields=("user", "system", "idle", "iowait"))
    >>> later = Times(user=4.0, system=1.0, idle=5.0, iowait=1.0, _fields=times._fields)
    >>> _cpu_use(times, later)
    {'busy': 0.4, 'disk': 0.1}
    """
    # A guest's time is a part of its user's, as /proc/stat counts it.
    spent = {name: getattr(after, name) - getattr(before, name) for name in after._fields if "guest" not in name}
    total, disk = sum(spent.values()), max(0.0, spent.get("iowait", 0.0))
    if total <= 0:
        return {"busy": 0.0, "disk": 0.0}
    return {"busy": round(1 - (spent["idle"] + disk) / total, 3), "disk": round(disk / total, 3)}


def _set_up(
    run: RunDir, settings: CommandSettings, events: EventWriter, stack: ExitStack
) -> tuple[LocalBackend, Claims]:
    """The backend with its walls, and the claims; what dead runs left of either is removed first."""
    for entry in sweep_entries():
        # A run that another supervisor takes up at this moment keeps its group.
        with suppress(OSError):
            descriptor = lock_file(entry.run / "supervisor.lock", 0.0)
            if descriptor is not None:
                if entry.group:
                    sweep_groups(Path(entry.group), uid=os.geteuid())
                os.close(descriptor)
    claims, budget, group = Claims(run.path), read_budget(settings), ""
    if claims.problem:
        print(f"memfit: your runs on this host do not share one budget: {claims.problem}", file=sys.stderr, flush=True)
    # Last of all: what still has processes or groups stays on the list, or nobody would ever sweep it.
    stack.callback(lambda: claims.close(keep=Path(group).is_dir() if group else bool(running_jobs(run))))
    backend, promise = _walled(run, settings, budget, stack)
    group = str(backend.walls.parent.path) if backend.walls else ""
    claims.write(used=Counter(), unused=Counter(), group=group)
    permission = backend.walls.permission if backend.walls else "none"
    events.write("budget", **budget.to_dict() | {"permission": permission, "promise": promise, "group": group})
    return backend, claims


def _walled(run: RunDir, settings: CommandSettings, budget: Budget, stack: ExitStack) -> tuple[LocalBackend, str]:
    """The backend with walls where any can be made, and what then holds, in words."""
    name, capacity_bytes = _group_name(run), max(1, budget.lendable_bytes)
    walls, promise = Walls.build(name, capacity_bytes), budget.promise
    if walls is not None:
        stack.callback(walls.close)
    elif budget.permission != "none":
        promise = (
            f"no walls, although groups can be made here ({why_no_walls() or 'the kernel refused one'}): jobs are "
        )
        promise += "admitted by measured non-reclaimable bytes and watched by sampling"
    backend = LocalBackend(run, grace_seconds=settings.grace_seconds, walls=walls)
    stack.callback(backend.close)
    return backend, promise


def _group_name(run: RunDir) -> str:
    """A name for its control group that no other run has, wherever on this host that lies."""
    return f"{run.path.name}-{config.fingerprint(str(run.path))[:8]}"


@contextmanager
def _stoppable() -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request to stop, and the next into an end at once; `memfit stop` has
    signals of its own, of which a second one changes nothing."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(*_: object) -> None:
        if stop.level:
            stop.now()
        else:
            stop.ask()

    handlers: dict[int, Callable[..., None]] = {
        signal.SIGINT: handle,
        signal.SIGTERM: handle,
        ASK_SIGNAL: lambda *_: stop.ask(),
        NOW_SIGNAL: lambda *_: stop.now(),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _state(statuses: Mapping[str, JobStatus], stop: StopRequest) -> tuple[str, int]:
    states = {status.state for status in statuses.values()}
    if statuses and states == {"completed"}:
        return "completed", 0
    if states - {"completed", "preempted", "cancelled", "pending"}:
        return "failed", 4
    return ("cancelled", 130) if stop.level > 1 else ("preempted", 75)
