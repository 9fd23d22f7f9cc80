"""``memfit.workflow``: one fold and a gate, then the other folds, then all of them judged on dates that they never saw.

Each phase is a job of the run, so it has the run's budget, logs and walls, and what is done stays done: a workflow
that was killed goes on where it stood.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from memfit import config
from memfit.errors import JobFailedError, UsageError, nearest
from memfit.jobs import Job, JobStatus, raise_error_of
from memfit.pipeline._config import parse_folds, replaced
from memfit.pipeline._run import (
    Order,
    find_or_make,
    finish,
    finished,
    fold_job,
    go_on,
    prepare_panel,
    reread_order,
    resolve_order,
    train_folds,
)
from memfit.pipeline._supervise import CONTINUED, RunResult, Supervisor, View
from memfit.rundir import RunDir, read_json, write_json

_STAGES = "memfit.pipeline._stages"
#: Its presence says that the run is a workflow's; it holds how far that has come.
WORKFLOW_FILE = "workflow.json"
#: What a phase's job returns, of that what is read here.
_RESULT = {"result": {"inputs": str, "files": [str]}}
#: In their order.
PHASES = ("health", "folds", "results")
#: Raised when the same scores and settings are judged otherwise than before: then what is kept is judged anew.
_JUDGED_AS = 2
#: What the process ends with when the gate lets nothing pass, by the gate's colour.
GATE_EXIT_CODES: Mapping[str, int] = {"yellow": 10, "red": 11}


def workflow(
    source: Path | str | Mapping[str, Any],
    *,
    overrides: Sequence[config.Override] = (),
    env: Mapping[str, str] | None = None,
    new: bool = False,
    force: bool = False,
    until: str = "results",
    view: View | None = None,
) -> RunResult:
    """Train a workload's folds and judge them, one phase after another, or go on with the workflow that stands.

    1. ``health``: the first fold is trained, its snapshots are averaged, and a backtest on its test dates passes a
       gate. Red stops here with exit code 11; yellow names what to tune, and stops (10) if the config says so.
    2. ``folds``: the other folds, as many at once as fit the budget.
    3. ``results``: every fold's snapshots are averaged; each date is scored by the model that did not see it; the
       scores are backtested and compared with a baseline.

    Args:
        source, overrides, env, new, force, view: As for ``memfit.run``.
        until: The last phase to pass.

    Returns:
        The result; ``results/`` in its folder holds the tables.

    Raises:
        UsageError: If the config is bad, or its workload gives no scores.
        JobFailedError: If a phase itself failed.

    Example:
        ``memfit workflow`` does the same from the command line::

            result = workflow("ranker.yaml", overrides=["folds=1-3"])
            json.loads((result.path / "results" / "backtest.json").read_text())["summary"]
    """
    if until not in PHASES:
        raise UsageError(
            f"a workflow has no phase '{until}'.",
            rule=f"its phases are {', '.join(PHASES)}.",
            remedy=nearest(until, PHASES),
        )
    order = resolve_order(source, overrides, os.environ if env is None else env, force)
    _check_baseline(order)
    if order.workflow is None:
        raise UsageError(
            f"the workload {order.settings.target} gives no scores.",
            rule="a workflow judges folds by the scores of their models: a FoldWorkload with score=...",
            remedy="write score(context, params), or train the folds alone: memfit run",
        )
    return go_on(order, *find_or_make(order, new=new), view, partial(_stages, until=until))


def _check_baseline(order: Order) -> None:
    baseline = (order.workflow or {}).get("decision", {}).get("baseline", "random")
    if baseline != "random" and not Path(baseline).exists():
        raise UsageError(
            f"the baseline {baseline} is not there.",
            rule="workflow.decision.baseline is random, or the folder or table of days of another run.",
            remedy="correct the path, or --set workflow.decision.baseline=random",
        )


def resume_folds(run_dir: RunDir, view: View | None = None) -> RunResult:
    """Go on with a run of folds as its ``config.yaml`` says, and with the workflow around them if it began as one.

    Raises:
        UsageError: If its config was never written, or code or data are others now.
    """
    state = read_json(run_dir.path / WORKFLOW_FILE, {"until": frozenset(PHASES)})
    stages = None if state is None else partial(_stages, until=state["until"])
    return go_on(reread_order(run_dir), run_dir, CONTINUED, view, stages)


def _stages(order: Order, supervisor: Supervisor, *, until: str) -> RunResult:
    return _Workflow(order, supervisor).run(until)


class _Workflow:
    """A workflow under way, in the hands of a supervisor."""

    def __init__(self, order: Order, supervisor: Supervisor) -> None:
        self.order, self.supervisor, self.run_dir = order, supervisor, supervisor.run
        self.settings: Mapping[str, Any] = order.workflow or {}
        self.statuses: dict[str, JobStatus] = {}

    def run(self, until: str) -> RunResult:
        """Pass the phases up to one of them."""
        write_json(self.run_dir.path / WORKFLOW_FILE, {"schema_version": 1, "until": until})
        stage = prepare_panel(self.order, self.supervisor)
        if stage is None:
            return finish(self.supervisor, {})
        num_folds = len(stage["folds"])
        folds = parse_folds(self.order.settings.folds, num_folds)
        judged = self._in_period(folds, stage["folds"])
        if not self._train(judged[:1], num_folds):
            return finish(self.supervisor, self.statuses)
        health = self._stage("health", judged[:1])
        if health is None:
            return self._stopped()
        colour = health["verdict"]["colour"]
        reasons = [f"{one['name']}: {one['text']}" for one in health["verdict"]["reasons"] if one["colour"] == colour]
        self.supervisor.journal.write("gate", colour=colour, why="" if colour == "green" else "; ".join(reasons))
        if colour != "green":
            self._sweep(judged[0])
        if colour == "red" or (colour == "yellow" and self.settings["on_yellow"] == "stop"):
            return self._refused(colour, reasons)
        if until == "health" or not self._train(folds, num_folds) or until == "folds":
            return finish(self.supervisor, self.statuses)
        return finish(self.supervisor, self.statuses) if self._stage("results", judged) else self._stopped()

    def _in_period(self, folds: Sequence[int], facts: Sequence[Mapping[str, Any]]) -> list[int]:
        """Those of the folds that test dates of the period that is judged.

        Raises:
            UsageError: If there is none.
        """
        start, end = self.settings["start_date"] or "", self.settings["end_date"] or "9999"
        dates = {fold: (facts[fold - 1]["first_test_date"], facts[fold - 1]["last_test_date"]) for fold in folds}
        found = [fold for fold, (first, last) in dates.items() if first[:10] <= end and last[:10] >= start]
        if not found:
            raise UsageError(
                f"no fold tests a date from {start or 'the first'} to {self.settings['end_date'] or 'the last'}.",
                rule=f"the folds {', '.join(map(str, folds))} test {min(dates.values())[0][:10]} to "
                f"{max(last for _, last in dates.values())[:10]}, and what is judged are their test dates.",
                remedy="choose another workflow.start_date and workflow.end_date",
            )
        return found

    def _train(self, folds: Sequence[int], num_folds: int) -> bool:
        """Whether all these folds are trained now."""
        self.statuses = train_folds(self.order, self.supervisor, folds, num_folds)
        return all(self.statuses[f"fold_{fold}"].state == "completed" for fold in folds)

    def _stage(self, name: str, folds: Sequence[int]) -> dict[str, Any] | None:
        """What a stage came to, of earlier if what it is made of is the same; None when it was asked to stop."""
        ended = {
            f"fold_{fold}": (read_json(self.run_dir.job_dir(f"fold_{fold}") / "outcome.json") or {}).get("ended")
            for fold in folds
        }
        inputs = config.fingerprint({"settings": self.settings, "ended": ended, "judged_as": _JUDGED_AS})
        folder = self.run_dir.job_dir(name)
        before = read_json(folder / "result.json", _RESULT)
        is_same = before is not None and before["result"]["inputs"] == inputs and self._is_whole(name, before["result"])
        if before is not None and is_same and finished(self.run_dir, name) is not None:
            self.supervisor.journal.write("stage", name=name, state="kept")
            return dict(before["result"])
        arguments = {
            "target": self.order.settings.target,
            "params": self.order.params,
            "run_dir": str(self.run_dir.path),
            "folds": list(folds),
            "settings": self.settings,
            "inputs": inputs,
        }
        job = Job(
            name,
            target=f"{_STAGES}:run_{name}",
            arguments=arguments,
            cuda_allocator=self.order.settings.memory.cuda_allocator,
            env=self.order.env,
        )
        status = self.supervisor.schedule([job]).get(name)
        if status is None or status.state in ("cancelled", "preempted"):
            return None
        if status.state != "completed":
            raise_error_of(folder)
            raise JobFailedError(
                f"the phase '{name}' failed: {status.cause}.",
                rule=f"it judges the scores that {self.order.settings.target} gives ({status.state}).",
                remedy=f"read {folder / 'err.log'}, then run the same command again",
            )
        return dict((read_json(folder / "result.json", _RESULT) or {})["result"])

    def _is_whole(self, name: str, result: Mapping[str, Any]) -> bool:
        """Whether all files that a phase wrote are still there."""
        return all((self._folder(name) / file).exists() for file in result["files"])

    def _folder(self, name: str) -> Path:
        return self.run_dir.path / "results" / ("health" if name == "health" else "")

    def _sweep(self, fold: int) -> None:
        """Train the fold anew with each other setting that the config names, for the table of what to tune."""
        names = self.order.sweep
        jobs = []
        for number, values in enumerate(itertools.product(*names.values()) if names else (), start=1):
            chosen = dict(zip(names, values, strict=True))
            job = fold_job(self.order, self.run_dir, fold)
            changed = {**job.arguments, "params": replaced(self.order.params, chosen), "job_id": f"sweep_{number:02d}"}
            params = {name: str(value) for name, value in chosen.items()}
            jobs.append(replace(job, id=f"sweep_{number:02d}", arguments=changed, params=params))
        left = [job for job in jobs if finished(self.run_dir, job.id) is None]
        if left:
            self.supervisor.schedule(left)

    def _refused(self, colour: str, reasons: Sequence[str]) -> RunResult:
        """The run as one that the gate let not pass."""
        for left in self._folder("results").glob("[!.]*.*"):
            left.unlink()  # of an earlier judgement, which this one takes back
        result = finish(self.supervisor, self.statuses)
        cause = f"the gate is {colour}: {'; '.join(reasons)}"
        outcome = read_json(self.run_dir.path / "outcome.json") or {}
        exit_code = GATE_EXIT_CODES[colour]
        self.supervisor.state = "failed"
        self.supervisor.journal.put(
            "outcome.json", outcome | {"state": "failed", "exit_code": exit_code, "cause": cause}
        )
        return replace(result, state="failed", exit_code=exit_code)

    def _stopped(self) -> RunResult:
        """The run as one that was asked to stop between two folds."""
        result = finish(self.supervisor, self.statuses | {"stage": JobStatus("stage", "preempted")})
        return replace(result, statuses=self.statuses)
