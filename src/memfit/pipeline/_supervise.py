"""What all runs share: one supervisor at a time, signals that stop it, its events, budget, claims and walls."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from memfit import config
from memfit.errors import DamagedError, DoesNotFitError, MemfitError, UsageError
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
    is_at,
    lock_file,
    sweep_entries,
    sweep_groups,
    why_no_walls,
)
from memfit.pipeline._config import CommandSettings
from memfit.planning import plan
from memfit.rundir import EventWriter, RunDir, encode_event, write_json
from memfit.units import MIB, format_bytes

View = Callable[[RunDir], Callable[[], None]]
Known = Sequence[tuple[str, Mapping[str, str], Footprint]]

#: No job is started while less than this is free on the disk of the run: what the others write needs it.
DISK_RESERVE_BYTES = 16 * MIB
_AGAIN_SECONDS = 1.0
_TICK_SECONDS = 0.1
_DRAIN_SECONDS = 10.0
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


class Journal(EventWriter):
    """The supervisor's events and files, which wait in memory while the disk is full, and are written when it is not.

    Example:
        >>> import tempfile
        >>> run = RunDir.create(Path(tempfile.mkdtemp()), "demo", "0" * 64)
        >>> journal = Journal(run)
        >>> journal.write("wait", job="fold_2")
        >>> journal.hold(), run.events()[0]["kind"]
        ('', 'wait')
    """

    def __init__(self, run: RunDir) -> None:
        super().__init__(run.events_dir)
        self.run = run
        self.is_full = self._told = False
        self._lines = bytearray()
        self._files: dict[Path, Mapping[str, Any]] = {}
        self._next = 0.0

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event, with the time of now, as soon as there is room for it."""
        own = {"time": time.time(), "job": fields.get("job"), "kind": kind}
        self._lines += encode_event(own | fields | own)
        self.flush()

    def put(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace a JSON file of the run's folder, as soon as there is room for it."""
        self._files[self.run.path / name] = value
        self.flush()

    def flush(self) -> None:
        """Write what waits; while the disk is full, look again each second."""
        if not (self._lines or self._files) or time.monotonic() < self._next:
            return
        try:
            while self._lines:  # a disk that fills up takes the first part of a line
                del self._lines[: os.write(self._descriptor, self._lines)]
            for path in list(self._files):
                write_json(path, self._files[path])
                del self._files[path]
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._next = time.monotonic() + _AGAIN_SECONDS
            self.is_full = True
            self._tell(full=True)
        else:
            self._next, self.is_full = 0.0, False

    def hold(self) -> str:
        """Why no job may start now: the disk is full, or nearly so; empty when it is not."""
        disk = os.statvfs(self.run.path)
        free_bytes = disk.f_bavail * disk.f_frsize
        is_short = self.is_full or bool(disk.f_blocks and free_bytes < DISK_RESERVE_BYTES)
        self._tell(full=is_short)
        if not is_short:
            return ""
        least = format_bytes(DISK_RESERVE_BYTES)
        return f"the disk of {self.run.path} is full; {format_bytes(free_bytes)} of it are free, {least} are needed"

    def _tell(self, *, full: bool) -> None:
        if full != self._told:
            self._told = full
            text = "the disk is full: no job starts, and what cannot be written waits in memory, until there is room"
            # Not through the view: that reads the files which cannot be written now.
            with contextlib.suppress(OSError):
                print(f"memfit: {self.run.path}: {text if full else 'there is room again'}", file=sys.stderr)

    def drain(self, stop: StopRequest) -> None:
        """Write all that waits, however long the disk stays full; once a stop is asked for, only for some seconds."""
        self.flush()
        end = time.monotonic() + _DRAIN_SECONDS
        while (self._lines or self._files) and stop.level < 2 and not (stop.level and time.monotonic() > end):
            time.sleep(_AGAIN_SECONDS / 10)
            self.flush()


class RunLock:
    """The lock of a run, held until ``close``: no second supervisor admits the same jobs.

    Raises:
        UsageError: If another process holds it.
    """

    def __init__(self, run: RunDir) -> None:
        self._path = run.path / "supervisor.lock"
        self._descriptor = self._take(0.5)  # `memfit stop` may be looking who holds it

    def _take(self, seconds: float) -> int:
        descriptor = lock_file(self._path, seconds)
        if descriptor is not None:
            return descriptor
        raise UsageError(
            f"{self._path.parent} is being run by another process.",
            rule="one supervisor at a time admits a run's jobs (supervisor.lock).",
            remedy="wait for it, or start a separate run: the same command with --new",
        )

    @property
    def is_there(self) -> bool:
        """Whether the locked file is still the one that others look at."""
        return is_at(self._descriptor, self._path)

    def keep(self) -> None:
        """Lock the file anew when somebody has removed it.

        Raises:
            UsageError: If another process was faster.
        """
        if not self.is_there:
            lost, self._descriptor = self._descriptor, self._take(0.0)
            os.close(lost)

    def close(self) -> None:
        """Let it go."""
        os.close(self._descriptor)


@dataclass
class Supervisor:
    """A run in the hands of this process: its jobs are started, held back and watched under one budget.

    Attributes:
        run: The run directory.
        settings: How jobs are run.
        force: Run also what does not fit.
        lock: The run's lock.
        journal: Its events and files.
        stop: The request to stop, set by signals.
        backend: Where jobs run.
        claims: What other runs on this host must know.
        tick: Called at each step, for a live view.
        state: What the run came to so far.
    """

    run: RunDir
    settings: CommandSettings
    force: bool
    lock: RunLock
    journal: Journal
    stop: StopRequest
    backend: Backend
    claims: Claims
    tick: Callable[[], None]
    state: str = "failed"
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
            self.journal.write(kind, **fields)
            if kind == "footprint" and (number := num_like(str(fields["job"]))) > 1:
                measured = Footprint.from_dict(fields["footprint"])
                asked = admission.running[str(fields["job"])].job.num_devices
                self.plan(measured, str(fields["job"]), number, admission.in_use(), num_devices=asked)

        def hold() -> str:
            self.lock.keep()
            return self.journal.hold()

        def tick() -> None:
            self.journal.flush()
            self.tick()

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
        jobs = {path.name for path in (self.run.path / "jobs").iterdir()}
        still_running = self.backend.adopt(jobs)
        forget_stops(self.run, jobs.difference(still_running))
        return scheduler.run(
            stop=self.stop,
            on_tick=tick,
            still_running=still_running,
            hold=hold,
            stopped=lambda job_id: take_stop(self.run, job_id),
        )

    def end_stale(self, is_stale: Callable[[str], bool]) -> None:
        """End the jobs of an earlier supervisor that still run and work on what is not asked for any more."""
        found = self.backend.adopt([job_id for job_id in running_jobs(self.run) if is_stale(job_id)])
        for job_id in found:
            self.journal.write("plan", why=f"{job_id} still ran with other code or data: it is ended, and starts anew")
            self.backend.cancel(job_id, now=True)
        while any(self.backend.poll()[job_id].state not in ENDED for job_id in found):
            self.backend.wait(_TICK_SECONDS)

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
            self.journal.write("plan", why=error.what)
            return
        measured = {"measured_on": measured_on, "tight_malloc": memory.tight_malloc}
        self.journal.put("plan.json", decided.to_dict() | measured)
        if decided.num_parallel != self._num_parallel:
            self._num_parallel = decided.num_parallel
            self.journal.write("plan", why=decided.explain(), num_parallel=decided.num_parallel)

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
        self.journal.put("outcome.json", {"state": self.state, "exit_code": exit_code, "jobs": jobs} | told)
        return RunResult(self.run.path, self.state, exit_code, statuses, metrics)


#: What a run's first event says of it: it is new, or one that stood already.
STARTED, CONTINUED = "started", "continued"
_TAKE_UP_SECONDS = 60.0


def take_up(
    settings: CommandSettings,
    fingerprint: str,
    facts: Mapping[str, Any],
    *,
    new: bool = False,
    keeps: Callable[[RunDir], bool] = lambda run: True,
) -> tuple[RunDir, str]:
    """Return the newest run of this fingerprint, or a new one, and which of the two: two starts at once find one run.

    Args:
        settings: They name the folder of runs and the experiment.
        fingerprint: Of what is to be run.
        facts: For the ``run.json`` of a new run.
        new: Make a new one in any case.
        keeps: Whether the run that was found is to go on.

    Raises:
        UsageError: If the experiment's name is bad, or other starts hold its folder.
    """
    folder = RunDir.folder_of(settings.runs_dir, settings.experiment)
    path = folder / f".lock-{os.geteuid()}"  # other users' runs are theirs alone
    lock = lock_file(path, _TAKE_UP_SECONDS)
    if lock is None:
        raise UsageError(
            f"another start of {settings.experiment} holds {path} for {_TAKE_UP_SECONDS:.0f} s.",
            rule="one start at a time looks for its run or makes it.",
            remedy=f"see which process it is: fuser {path}",
        )
    try:
        if not new:
            _check_newest(settings)
        found = None if new else RunDir.newest(settings.runs_dir, settings.experiment, fingerprint)
        if found is not None and keeps(found):
            return found, CONTINUED
        return RunDir.create(settings.runs_dir, settings.experiment, fingerprint, facts), STARTED
    finally:
        path.unlink(missing_ok=True)  # who waits for it takes the next one
        os.close(lock)


def _check_newest(settings: CommandSettings) -> None:
    """Refuse to start beside an unfinished run of an older memfit, which its user may take for going on."""
    newest = next(iter(RunDir.all(settings.runs_dir, settings.experiment)), None)
    with contextlib.suppress(DamagedError):
        if newest is not None and newest.state != "completed":
            newest.check_version()


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
    lock = RunLock(run)
    with contextlib.closing(lock), _stoppable() as stop:
        (run.path / "outcome.json").unlink(missing_ok=True)  # it runs again
        journal, state, before = Journal(run), "failed", psutil.cpu_times()
        try:
            journal.write("run", **told)
            with ExitStack() as stack:
                backend, claims = _set_up(run, settings, journal, stack)
                tick = view(run) if view else lambda: None
                supervisor = Supervisor(run, settings, force, lock, journal, stop, backend, claims, tick)
                yield supervisor
            state = supervisor.state
        except Exception as error:
            cause = error.what if isinstance(error, MemfitError) else f"{type(error).__name__}: {error}"
            if lock.is_there:  # else another process runs it
                journal.put("outcome.json", {"state": "failed", "cause": cause})
            raise
        finally:
            journal.write("run", state=state, cpu=_cpu_use(before, psutil.cpu_times()))
            journal.drain(stop)
            journal.close()


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


def _set_up(run: RunDir, settings: CommandSettings, journal: Journal, stack: ExitStack) -> tuple[LocalBackend, Claims]:
    """The backend with its walls, and the claims; what dead runs left of either is removed first."""
    for entry in sweep_entries():
        # A run that another supervisor takes up at this moment keeps its group.
        with contextlib.suppress(OSError):
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
    journal.write("budget", **budget.to_dict() | {"permission": permission, "promise": promise, "group": group})
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
