"""``memfit.run``: from a config to trained folds in a run directory."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from memfit import config
from memfit.errors import DamagedError, DoesNotFitError, JobFailedError, MemfitError, UsageError
from memfit.jobs import (
    Job,
    JobStatus,
    LocalBackend,
    Policy,
    ReadBudget,
    Scheduler,
    StopRequest,
    call_in_child,
    raise_error_of,
    read_status,
)
from memfit.memory import Budget, Footprint
from memfit.pipeline._config import FOLD_PHASES, RunConfig, parse_folds
from memfit.planning import plan
from memfit.rundir import EventWriter, RunDir, read_json, write_atomic, write_json

_WORKLOAD = "memfit.pipeline._workload"
View = Callable[[RunDir], Callable[[], None]]


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes:
        path: The run directory.
        state: ``completed``, ``failed``, ``preempted`` (asked to stop, goes on when started again) or ``cancelled``.
        exit_code: What the process should exit with.
        statuses: The folds' last statuses, by job id.
        metrics: The numbers of the folds that were trained, by job id.
    """

    path: Path
    state: str
    exit_code: int
    statuses: Mapping[str, JobStatus]
    metrics: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class _Order:
    """A resolved order to run: the config, what it means for each child, and its fingerprint."""

    settings: RunConfig
    params: Mapping[str, Any]
    yaml: str
    origins: Mapping[str, str]
    fingerprint: str
    env: Mapping[str, str]
    force: bool


def run(
    source: Path | str | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    new: bool = False,
    force: bool = False,
    view: View | None = None,
) -> RunResult:
    """Train a workload's folds in parallel under one memory budget, or go on with the run that stands.

    The newest run of the same config, code and data goes on: folds that are done are kept, a fold that still runs is
    taken over, one that was interrupted continues from its last checkpoint. SIGINT and SIGTERM ask the folds to stop
    at a checkpoint; a second one ends them at once.

    Args:
        source: The config: a YAML file, or its content as a mapping.
        overrides: Settings such as ``"params.train.num_epochs=3"``; they count more than environment and file.
        env: Where ``MEMFIT_…`` variables are read; ``os.environ`` when None.
        new: Start over in a new run directory.
        force: Run also what does not fit the budget.
        view: Makes, from the run directory, a function that is called ten times a second while jobs run.

    Returns:
        The result; failed folds are told in it and not raised.

    Raises:
        UsageError: If the config, the data or the split is bad, or another process runs this run.
        DoesNotFitError: If a fold does not fit the budget even alone.
        JobFailedError: If the panel could not be prepared.

    Example:
        A config names its workload; ``docs/workload.md`` writes one::

            result = memfit.run("examples/linear/config.yaml", overrides=["folds=1-2"])
            result.metrics["fold_1"]

        What it cannot mean is refused before anything is made:

        >>> from memfit.errors import ConfigError
        >>> try:
        ...     run({"experiment": "demo", "target": "workload:LINEAR", "fold": "1-2"})
        ... except ConfigError as error:
        ...     print(error.remedy)
        did you mean 'folds'?
    """
    order = _resolve(source, overrides, os.environ if env is None else env, force)
    run_dir = None if new else _find(order)
    continued = run_dir is not None
    run_dir = run_dir or _create(order)
    with _alone(run_dir), _stoppable() as stop:
        _check_folds(order, run_dir)
        (run_dir.path / "outcome.json").unlink(missing_ok=True)  # it runs again
        if not (run_dir.path / "config.yaml").exists():  # new, or killed at birth
            write_atomic(run_dir.path / "config.yaml", order.yaml)
        events, state = EventWriter(run_dir.events_dir), "failed"
        try:
            events.write("run", state="continued" if continued else "started", fingerprint=order.fingerprint)
            result = _run_stages(order, run_dir, events, stop, view(run_dir) if view else lambda: None)
            state = result.state
        finally:
            events.write("run", state=state)
            events.close()
    return result


def _check_folds(order: _Order, run_dir: RunDir) -> None:
    """Refuse a fold that there is not while what the run came to before still stands."""
    with contextlib.suppress(DamagedError):  # prepare writes a damaged stage anew
        if stage := read_json(run_dir.path / "checkpoints" / "stage_prepare.json"):
            parse_folds(order.settings.folds, len(stage["folds"]))


def _resolve(
    source: Path | str | Mapping[str, Any], overrides: Sequence[str], env: Mapping[str, str], force: bool
) -> _Order:
    file = Path(source) if isinstance(source, str | Path) else None
    values = None if isinstance(source, str | Path) else source
    resolved = config.resolve(RunConfig, file=file, values=values, env=env, overrides=overrides)
    settings = resolved.value
    folders = [str(file.resolve().parent)] if file else []
    child_env = {"PYTHONPATH": os.pathsep.join([*folders, str(Path.cwd()), *filter(None, [env.get("PYTHONPATH")])])}
    described = call_in_child(
        f"{_WORKLOAD}:describe",
        {"target": settings.target, "resolved": resolved.to_json()},
        env=dict(os.environ) | child_env,
    )
    content = {
        "target": settings.target,
        "seed": settings.seed,
        "threads_per_job": settings.threads_per_job,
        "params": described["params"],
        "code": described["code"],
        "data": described["data"],
    }
    return _Order(
        settings=settings,
        params=described["params"],
        yaml=described["yaml"],
        origins=described["origins"],
        fingerprint=config.fingerprint(content),
        env=child_env,
        force=force,
    )


def _find(order: _Order) -> RunDir | None:
    """The newest run of this very config, code and data."""
    runs = RunDir.all(order.settings.runs_dir, order.settings.experiment)
    return next((run for run in runs if run.header.get("fingerprint") == order.fingerprint), None)


def _create(order: _Order) -> RunDir:
    facts = {"origins": dict(order.origins), "target": order.settings.target}
    return RunDir.create(order.settings.runs_dir, order.settings.experiment, order.fingerprint, facts)


@contextmanager
def _alone(run_dir: RunDir) -> Iterator[None]:
    """Hold the run's lock, so that no second supervisor admits the same jobs."""
    lock = filelock.FileLock(run_dir.path / "supervisor.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise UsageError(
            f"{run_dir.path} is being run by another process.",
            rule="one supervisor at a time admits a run's jobs (supervisor.lock).",
            remedy="wait for it, or start a separate run with --new",
        ) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _stoppable() -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request to stop, and the next into an end at once."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(*_: object) -> None:
        if stop.level:
            stop.now()
        else:
            stop.ask()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_stages(
    order: _Order, run_dir: RunDir, events: EventWriter, stop: StopRequest, tick: Callable[[], None]
) -> RunResult:
    memory = order.settings.memory

    def read_budget(in_use_bytes: int) -> Budget:
        return Budget.read(cap_bytes=memory.limit, cap_used_bytes=in_use_bytes, reserve_bytes=memory.reserve)

    events.write("budget", **read_budget(0).to_dict())
    backend = LocalBackend(run_dir, grace_seconds=order.settings.grace_seconds)
    try:
        stage = _prepare(order, run_dir, backend, read_budget, events, stop, tick)
        if stage is None:
            return _finish(run_dir, {}, stop)
        folds = parse_folds(order.settings.folds, len(stage["folds"]))
        jobs = [_fold_job(order, run_dir, fold) for fold in folds]
        still_running = [job.id for job in jobs if backend.is_running(job.id)]  # asked first: one may end meanwhile
        every = [f"fold_{fold}" for fold in range(1, len(stage["folds"]) + 1)]
        done = {job_id: status for job_id in every if (status := _finished(run_dir, job_id)) is not None}
        listener = _Listener(run_dir, events, order.settings, len(jobs), read_budget)
        scheduler = Scheduler(
            [job for job in jobs if job.id not in done],
            backend,
            read_budget,
            policy=_policy(order),
            known=_known_footprint(run_dir, order.settings),
            say=listener,
        )
        if all(job.id in done for job in jobs):
            events.write("done", num_done=len(jobs))
        elif scheduler.known is not None:
            listener.decide(scheduler.known, "an earlier command", 0)
        statuses = done | scheduler.run(stop=stop, on_tick=tick, still_running=still_running)
    except MemfitError as error:
        write_json(run_dir.path / "outcome.json", {"state": "failed", "cause": error.what})
        raise
    # Folds of earlier commands count too: the table is the run's, not the command's.
    statuses = {job.id: JobStatus(job.id, "pending") for job in jobs} | statuses
    return _finish(run_dir, {job_id: statuses[job_id] for job_id in every if job_id in statuses}, stop)


def _finished(run_dir: RunDir, job_id: str) -> JobStatus | None:
    """The status of a fold that is done: completed, and its result is there; one without it is trained again."""
    status = read_status(run_dir, job_id)
    has_result = status.state == "completed" and (run_dir.job_dir(job_id) / "result.json").exists()
    return status if has_result else None


def _prepare(
    order: _Order,
    run_dir: RunDir,
    backend: LocalBackend,
    read_budget: ReadBudget,
    events: EventWriter,
    stop: StopRequest,
    tick: Callable[[], None],
) -> dict[str, Any] | None:
    """Have the panel built or opened by a job of its own; the stage that it left, or None when it was stopped."""
    settings = order.settings
    arguments = {
        "target": settings.target,
        "params": order.params,
        "run_dir": str(run_dir.path),
        "panels_dir": str(settings.panels_dir.absolute()),
    }
    job = Job(
        "prepare", target=f"{_WORKLOAD}:run_prepare", arguments=arguments, env=order.env, phases=("load", "build")
    )
    statuses = Scheduler([job], backend, read_budget, policy=Policy(force=order.force), say=events.write).run(
        stop=stop, on_tick=tick, still_running=["prepare"] if backend.is_running("prepare") else []
    )
    status = statuses.get("prepare")
    if status is None or status.state in ("cancelled", "preempted"):
        return None
    if status.state != "completed":
        folder = run_dir.job_dir("prepare")
        raise_error_of(folder)
        raise JobFailedError(
            f"the panel could not be prepared: {status.cause}.",
            rule=f"the folds start when {settings.target} has prepared their panel ({status.state}).",
            remedy=f"read {folder / 'err.log'}, then run the same command again",
        )
    return read_json(run_dir.path / "checkpoints" / "stage_prepare.json")


def _fold_job(order: _Order, run_dir: RunDir, fold: int) -> Job:
    settings = order.settings
    declared = settings.memory.job
    return Job(
        f"fold_{fold}",
        target=f"{_WORKLOAD}:run_fold",
        arguments={
            "target": settings.target,
            "params": order.params,
            "run_dir": str(run_dir.path),
            "fold": fold,
            "seed": settings.seed,
        },
        footprint=Footprint.declared(declared) if declared else None,
        phases=FOLD_PHASES,
        threads=settings.threads_per_job,
        tight_malloc=settings.memory.tight_malloc,
        env=order.env,
    )


def _policy(order: _Order) -> Policy:
    settings = order.settings
    most = None if settings.max_parallel == "auto" else settings.max_parallel
    return Policy(most, settings.on_failure, settings.memory.slack, order.force)


def _known_footprint(run_dir: RunDir, settings: RunConfig) -> Footprint | None:
    """What a fold of this run was measured to take under an earlier command, with the same allocator."""
    decided = read_json(run_dir.path / "plan.json")
    if decided is None or decided.get("tight_malloc") != settings.memory.tight_malloc:
        return None
    return Footprint.from_dict(decided["footprint"])


class _Listener:
    """Writes the scheduler's events, and the plan as soon as a fold's footprint is known."""

    def __init__(
        self,
        run_dir: RunDir,
        events: EventWriter,
        settings: RunConfig,
        num_jobs: int,
        read_budget: ReadBudget,
    ) -> None:
        self.run_dir = run_dir
        self.events = events
        self.settings = settings
        self.num_jobs = num_jobs
        self.read_budget = read_budget
        self.num_parallel = 0

    def __call__(self, kind: str, **fields: Any) -> None:
        self.events.write(kind, **fields)
        if kind == "footprint":
            self.decide(Footprint.from_dict(fields["footprint"]), str(fields["job"]), int(fields["in_use_bytes"]))

    def decide(self, footprint: Footprint, measured_on: str, in_use_bytes: int) -> None:
        """Write the plan that follows from a footprint; say so when it is another one than before."""
        most = None if self.settings.max_parallel == "auto" else self.settings.max_parallel
        try:
            decided = plan(
                footprint,
                self.num_jobs,
                budget=self.read_budget(in_use_bytes),
                max_parallel=most,
                slack=self.settings.memory.slack,
                in_use_bytes=in_use_bytes,
            )
        except DoesNotFitError as error:
            # The measured job runs all the same; the scheduler holds the others back.
            self.events.write("plan", why=error.what)
            return
        measured = {"measured_on": measured_on, "tight_malloc": self.settings.memory.tight_malloc}
        write_json(self.run_dir.path / "plan.json", decided.to_dict() | measured)
        if decided.num_parallel != self.num_parallel:
            self.num_parallel = decided.num_parallel
            self.events.write("plan", why=decided.explain(), num_parallel=decided.num_parallel)


def _finish(run_dir: RunDir, statuses: Mapping[str, JobStatus], stop: StopRequest) -> RunResult:
    """Settle the run's state, and write the table of results and the outcome."""
    metrics = {
        job_id: result["result"]
        for job_id, status in statuses.items()
        if status.state == "completed" and (result := read_json(run_dir.job_dir(job_id) / "result.json"))
    }
    state, exit_code = _state(statuses, stop)
    if metrics:
        # In a process of its own: Arrow would stay in this one's memory.
        rows = [
            {"job": job_id, "state": s.state, "started": s.started, "ended": s.ended, "peak_bytes": s.peak_bytes}
            for job_id, s in statuses.items()
        ]
        call_in_child(
            "memfit.pipeline._results:write_kfold_results",
            {"path": str(run_dir.path / "kfold_results.feather"), "rows": rows, "metrics": metrics},
        )
    write_json(
        run_dir.path / "outcome.json",
        {
            "state": state,
            "exit_code": exit_code,
            "jobs": {job_id: {"state": s.state, "cause": s.cause} for job_id, s in statuses.items()},
        },
    )
    return RunResult(run_dir.path, state, exit_code, statuses, metrics)


def _state(statuses: Mapping[str, JobStatus], stop: StopRequest) -> tuple[str, int]:
    states = {status.state for status in statuses.values()}
    if statuses and states == {"completed"}:
        return "completed", 0
    if states - {"completed", "preempted", "cancelled", "pending"}:
        return "failed", 4
    return ("cancelled", 130) if stop.level > 1 else ("preempted", 75)
