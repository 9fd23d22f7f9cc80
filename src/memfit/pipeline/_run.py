"""``memfit.run``: from a config to trained folds in a run directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit import config
from memfit.errors import DamagedError, JobFailedError, UsageError
from memfit.jobs import Job, JobStatus, call_in_child, raise_error_of, read_status
from memfit.masking import mask
from memfit.memory import Footprint
from memfit.pipeline._config import FOLD_PHASES, RunConfig, kept_allocator, parse_folds, resolve_with_allocator
from memfit.pipeline._supervise import Known, RunResult, Supervisor, View, supervised, take_up
from memfit.rundir import RunDir, write_atomic

_WORKLOAD = "memfit.pipeline._workload"


@dataclass(frozen=True)
class Order:
    """A resolved order to run: the config, what it means for each child, and its fingerprint.

    ``workflow`` holds the settings of the workflow around the folds; None where the workload has none.
    """

    settings: RunConfig
    params: Mapping[str, Any]
    workflow: Mapping[str, Any] | None
    sweep: Mapping[str, Sequence[Any]]
    in_order: bool
    yaml: str
    origins: Mapping[str, str]
    fingerprint: str
    env: Mapping[str, str]
    folders: Sequence[str]
    force: bool


def run(
    source: Path | str | Mapping[str, Any],
    *,
    overrides: Sequence[config.Override] = (),
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
    if not isinstance(source, str | Path | Mapping):
        raise UsageError(
            f"memfit.run was given {source!r:.80}.",
            rule="it takes a config: a YAML file, or its content as a mapping.",
            remedy="run a command with memfit.pipeline.run_commands(['python', 'train.py'])",
        )
    order = resolve_order(source, overrides, os.environ if env is None else env, force)
    return go_on(order, *find_or_make(order, new=new), view)


Stages = Callable[[Order, Supervisor], RunResult]


def reread_order(run_dir: RunDir) -> Order:
    """The order that a run of folds was given, by its ``config.yaml``; the current folder is that of its start.

    Raises:
        UsageError: If its config was never written, or code or data are others now.
    """
    path = run_dir.path / "config.yaml"
    if not path.exists():
        raise UsageError(
            f"{run_dir.path} holds no config.yaml.",
            rule="a run goes on with the settings that it was started with; this one ended before they were written.",
            remedy="start it by its config: memfit run <config>",
        )
    others = {name: value for name, value in os.environ.items() if not name.upper().startswith("MEMFIT_")}
    order = resolve_order(path, (), others, False, folders=run_dir.header.get("folders") or ())
    if order.fingerprint != run_dir.header.get("fingerprint"):
        raise UsageError(
            f"the code or the data of {run_dir.path} changed since it was started.",
            rule="all folds of a run are trained by one code on one data set (the fingerprint in run.json).",
            remedy="start a run of its own by its config: memfit run <config>",
        )
    return order


def go_on(order: Order, run_dir: RunDir, state: str, view: View | None, stages: Stages | None = None) -> RunResult:
    """Take up a run, new or continued, and pass its stages: those of a run of folds, or others."""
    _check_folds(order, run_dir)
    told = {"state": state, "fingerprint": order.fingerprint}
    with supervised(run_dir, order.settings, force=order.force, view=view, told=told) as supervisor:
        written = run_dir.path / "config.yaml"
        if not written.exists() or written.read_text() != order.yaml:  # new, killed at birth, or other settings of runs
            is_secret = mask(order.params) != order.params
            write_atomic(written, order.yaml, mode=0o600 if is_secret else 0o666)
        if kept := kept_allocator(order.settings, order.origins):
            supervisor.journal.write("plan", why=kept)
        return (stages or run_stages)(order, supervisor)


def _check_folds(order: Order, run_dir: RunDir) -> None:
    """Refuse a fold that there is not while what the run came to before still stands."""
    with contextlib.suppress(DamagedError):  # prepare writes a damaged stage anew
        if stage := run_dir.stage:
            parse_folds(order.settings.folds, len(stage["folds"]))


def resolve_order(
    source: Path | str | Mapping[str, Any],
    overrides: Sequence[config.Override],
    env: Mapping[str, str],
    force: bool,
    folders: Sequence[str] = (),
) -> Order:
    """The order that a config gives, its workload asked in a process of its own."""
    file = Path(source) if isinstance(source, str | Path) else None
    values = None if isinstance(source, str | Path) else source
    resolved = resolve_with_allocator(RunConfig, file=file, values=values, env=env, overrides=overrides)
    settings = resolved.value
    parse_folds(settings.folds)  # before the workload is asked anything
    folders = folders or ([str(file.resolve().parent)] if file else [])
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
    return Order(
        settings=settings,
        params=described["params"],
        workflow=described["workflow"],
        sweep=described["sweep"],
        in_order=described["in_order"],
        yaml=described["yaml"],
        origins=described["origins"],
        fingerprint=config.fingerprint(content),
        env=child_env,
        folders=folders,
        force=force,
    )


def find_or_make(order: Order, *, new: bool) -> tuple[RunDir, str]:
    """Return the newest run of this very config, code and data, or a new one, and which of the two it is."""
    facts = {
        "kind": "folds",
        "target": order.settings.target,
        "cwd": str(Path.cwd()),
        "folders": list(order.folders),
        "origins": dict(order.origins),
    }
    return take_up(order.settings, order.fingerprint, facts, new=new)


def run_stages(order: Order, supervisor: Supervisor) -> RunResult:
    """Prepare the panel, train the folds that the config chooses, and settle what they came to."""
    stage = prepare_panel(order, supervisor)
    if stage is None:
        return finish(supervisor, {})
    folds = parse_folds(order.settings.folds, len(stage["folds"]))
    return finish(supervisor, train_folds(order, supervisor, folds, len(stage["folds"])))


def train_folds(order: Order, supervisor: Supervisor, folds: Sequence[int], num_folds: int) -> dict[str, JobStatus]:
    """Train those of the folds that are not done yet; the last status of each fold of the run that has one."""
    run_dir = supervisor.run
    jobs = [fold_job(order, run_dir, fold) for fold in folds]
    every = [f"fold_{fold}" for fold in range(1, num_folds + 1)]
    done = {
        job_id: status
        for job_id in every
        if not supervisor.backend.is_running(job_id) and (status := finished(run_dir, job_id)) is not None
    }
    left = [job for job in jobs if job.id not in done]
    if not left:
        supervisor.journal.write("done", num_done=len(jobs))
    ended: dict[str, JobStatus] = {}
    for batch in [[job] for job in left] if order.in_order else [left]:
        known = _known(run_dir, order.settings)
        ended |= supervisor.schedule(batch, known=known, num_planned=len(jobs), none_done=not done)
        if order.in_order and any(ended[job.id].state != "completed" for job in batch if job.id in ended):
            break
    # Folds of earlier commands count too: the table is the run's, not the command's.
    statuses = {job.id: JobStatus(job.id, "pending") for job in jobs} | done | ended
    return {job_id: statuses[job_id] for job_id in every if job_id in statuses}


def finished(run_dir: RunDir, job_id: str) -> JobStatus | None:
    """The status of a job that is done: completed, and its result is there; one without it is run again."""
    status = read_status(run_dir, job_id)
    has_result = status.state == "completed" and (run_dir.job_dir(job_id) / "result.json").exists()
    return status if has_result else None


def prepare_panel(order: Order, supervisor: Supervisor) -> dict[str, Any] | None:
    """Have the panel built or opened by a job of its own; the stage that it left, or None when it was stopped."""
    run_dir = supervisor.run
    settings = order.settings
    arguments = {
        "target": settings.target,
        "params": order.params,
        "run_dir": str(run_dir.path),
        "panels_dir": str(settings.panels_dir.absolute()),
    }
    job = Job(
        "prepare",
        target=f"{_WORKLOAD}:run_prepare",
        arguments=arguments,
        cuda_allocator=settings.memory.cuda_allocator,
        env=order.env,
        phases=("load", "build"),
        keeps_group=True,  # the panel's page cache stays charged to it
    )
    status = supervisor.schedule([job]).get("prepare")
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
    return run_dir.stage


def fold_job(order: Order, run_dir: RunDir, fold: int) -> Job:
    """The job that trains one fold."""
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
        cuda_allocator=settings.memory.cuda_allocator,
        env=order.env,
        device_bytes=settings.memory.gpu_job,
    )


def _known(run_dir: RunDir, settings: RunConfig) -> Known:
    """What a fold of this run was measured to take under an earlier command, with the same allocator."""
    decided = run_dir.plan
    if decided is None or decided.get("tight_malloc") != settings.memory.tight_malloc:
        return ()
    return [({}, Footprint.from_dict(decided["footprint"]))]


def finish(supervisor: Supervisor, statuses: Mapping[str, JobStatus]) -> RunResult:
    """Settle the run's state, and write the table of results."""
    result = supervisor.settle(statuses)
    if result.metrics:
        # In a process of its own: Arrow would stay in this one's memory.
        rows = [
            {"job": job_id, "state": s.state, "started": s.started, "ended": s.ended, "peak_bytes": s.peak_bytes}
            for job_id, s in statuses.items()
        ]
        supervisor.journal.drain(supervisor.stop)
        table = {"path": str(result.path / "kfold_results.feather"), "rows": rows, "metrics": result.metrics}
        call_in_child("memfit.pipeline._results:write_kfold_results", table)
    return result
