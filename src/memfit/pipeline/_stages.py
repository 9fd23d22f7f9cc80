"""What the phases of a workflow do, each in the interpreter of its own job; and a backtest without a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from memfit import config
from memfit.data import Panel
from memfit.errors import DataError, UsageError
from memfit.evaluation import rank_ic, read_scores, summarize_ic
from memfit.pipeline._blend import blend, check_related, join_scores, score, score_out_of_fold
from memfit.pipeline._config import RunConfig
from memfit.pipeline._judge import decide_on, judge_scores, summarize_judged, write_judged
from memfit.pipeline._provenance import Indices, read_provenance
from memfit.pipeline._workflow_settings import WorkflowSettings
from memfit.pipeline._workload import (
    FoldWorkload,
    PrepareContext,
    load_workload,
    read_params,
    read_split,
    read_stage,
)
from memfit.rundir import RunDir, mark_phase, write_json


@dataclass(frozen=True)
class _Work:
    """What a phase works on."""

    workload: FoldWorkload[Any]
    params: Any
    run: RunDir
    panel: Panel
    settings: WorkflowSettings

    @classmethod
    def of(cls, target: str, params: Mapping[str, Any], run_dir: str, settings: Mapping[str, Any]) -> _Work:
        mark_phase("load")
        workload, run = load_workload(target), RunDir(Path(run_dir))
        _, panel = read_stage(run)
        read = WorkflowSettings.model_validate_json(json.dumps(settings))
        return cls(workload, read_params(workload, params), run, panel, read)

    def market(self) -> pa.Table | None:
        """The raw market, where the workload has one."""
        return None if self.workload.market is None else self.workload.market(self.panel, self.params)

    def facts(self, folds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Where results come from."""
        header = self.run.header
        return {"run": header.get("fingerprint"), "panel": self.panel.fingerprint, "folds": list(folds)}

    def blended(self, fold: int) -> tuple[dict[str, Any], pa.Table]:
        """A fold's average of checkpoints, what it is, and its scores on the fold's test dates.

        Reported beside it is the rank IC of the newest checkpoint alone: an average that is worse than it was taken
        over epochs before the training had settled. Nothing is chosen by that, for these are test dates.
        """
        folder = self.run.checkpoint_dir(f"fold_{fold}")
        checkpoint, sources = blend(folder, self.settings.blend)
        provenance = read_provenance(checkpoint)
        check_related({checkpoint: provenance}, self.panel, run=self.run.header.get("fingerprint"))
        dates = chosen_dates(self.panel, read_split(self.run, fold)[1], self.settings)
        dates = dates[provenance.scorable(self.panel)[dates]]
        if not len(dates):
            raise no_dates(self.panel, self.settings)
        table = score(self.workload, self.params, self.panel, checkpoint, dates)
        told: dict[str, Any] = {
            "fold": fold,
            "checkpoint": str(checkpoint.relative_to(self.run.path)),
            "sources": sources,
            "num_dates": len(dates),
            "rank_ic": self._rank_ic(table),
        }
        newest = folder / "latest_checkpoint.pt"
        if newest.exists():
            told["newest_rank_ic"] = self._rank_ic(score(self.workload, self.params, self.panel, newest, dates))
        return told, table

    def _rank_ic(self, table: pa.Table) -> float | None:
        scores, horizon = read_scores(table), self.settings.backtest.horizon
        mean = summarize_ic(rank_ic(scores.of(f"score_h{horizon}"), scores.of(f"target_h{horizon}"))).mean
        return None if np.isnan(mean) else mean


def chosen_dates(panel: Panel, dates: Indices, settings: WorkflowSettings) -> Indices:
    """Those of the positions whose dates the settings choose, both ends included."""
    day = np.asarray(panel.dates[dates]).astype("datetime64[D]")
    kept = np.ones(len(dates), bool)
    if settings.start_date is not None:
        kept &= day >= np.datetime64(settings.start_date, "D")
    if settings.end_date is not None:
        kept &= day <= np.datetime64(settings.end_date, "D")
    return dates[kept]


def no_dates(panel: Panel, settings: WorkflowSettings) -> UsageError:
    """That the period holds no date to judge."""
    return UsageError(
        f"no date from {settings.start_date or 'the first'} to {settings.end_date or 'the last'} can be judged.",
        rule=f"the panel has the dates {panel.dates[0]} to {panel.dates[-1]}, and a model scores those that it was not "
        "trained on.",
        remedy="choose another workflow.start_date and workflow.end_date (--start-date, --end-date)",
    )


def run_health(
    target: str, params: Mapping[str, Any], run_dir: str, folds: Sequence[int], settings: Mapping[str, Any], inputs: str
) -> dict[str, Any]:
    """Average the first fold's snapshots, backtest them on its test dates, and pass the gate."""
    work = _Work.of(target, params, run_dir, settings)
    mark_phase("score")
    told, table = work.blended(folds[0])
    mark_phase("backtest")
    judged = judge_scores({folds[0]: table}, table, work.panel, work.market(), work.settings)
    file = work.run.path / "results" / "health" / "backtest.json"
    files = write_judged(file, judged, table, facts=work.facts([told]))
    return {"inputs": inputs, **summarize_judged(judged), "folds": [told], "files": files}


def run_results(
    target: str, params: Mapping[str, Any], run_dir: str, folds: Sequence[int], settings: Mapping[str, Any], inputs: str
) -> dict[str, Any]:
    """Average every fold's snapshots, score each date by the models that did not see it, judge it all, and decide."""
    work = _Work.of(target, params, run_dir, settings)
    mark_phase("score")
    told, tables = [], {}
    for fold in folds:
        one, tables[fold] = work.blended(fold)
        told.append(one)
    mark_phase("backtest")
    table = join_scores(tables)
    judged = judge_scores(tables, table, work.panel, work.market(), work.settings)
    run, name = work.run.path, f"{work.run.path.parent.name}/{work.run.path.name}"
    decision: dict[str, Any]
    try:
        decided = decide_on(judged.days, work.settings, name=name, record=run.parent / "comparisons.jsonl")
        decision = {"decision": decided}
    except (DataError, UsageError) as error:  # too few dates, or a baseline of other assets: the rest stands
        decision = {"no_decision": f"{error.what} {error.remedy}."}
    facts = work.facts(told) | decision
    files = write_judged(run / "results" / "backtest.json", judged, table, facts=facts)
    write_json(run / "results" / "inventory.json", {"files": inventory(run)})
    return {"inputs": inputs, **summarize_judged(judged), **decision, "folds": told, "files": files}


def inventory(run: Path) -> list[dict[str, Any]]:
    """Every checkpoint and result of a run: its name, size and SHA-256."""
    found = []
    for path in sorted([*run.glob("checkpoints/**/*"), *run.glob("results/**/*"), *run.glob("*.yaml")]):
        if path.is_file() and not path.name.startswith(".") and path.name != "inventory.json":
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found.append({"name": str(path.relative_to(run)), "bytes": path.stat().st_size, "sha256": digest})
    return found


def backtest_in_child(target: str, resolved: str, checkpoints: Sequence[str], output: str | None) -> dict[str, Any]:
    """Judge checkpoints on the dates that their models may score; ``resolved`` is the config.

    Raises:
        UsageError: If the workload gives no scores, a checkpoint does not belong to the others or to the data, or none
            may score any of the dates.
    """
    workload = load_workload(target)
    whole = config.Resolved.from_json(RunConfig, resolved)
    if workload.score is None:
        raise UsageError(
            f"the workload {target} gives no scores.",
            rule="a backtest trades the scores of a FoldWorkload with score=...",
            remedy="write score(context, params)",
        )
    params = config.resolve_nested(whole, "params", workload.params).value
    settings = config.resolve_nested(whole, "workflow", WorkflowSettings).value
    panel = workload.prepare(PrepareContext(whole.value.panels_dir), params).panel
    dates = chosen_dates(panel, np.arange(len(panel.dates)), settings)
    if not len(dates):
        raise no_dates(panel, settings)
    tables, told = score_out_of_fold(workload, panel, [Path(one) for one in checkpoints], dates)
    table = join_scores(tables)
    market = None if workload.market is None else workload.market(panel, params)
    judged = judge_scores(tables, table, panel, market, settings)
    facts = {"target": target, "panel": panel.fingerprint, "folds": told}
    files = [] if output is None else write_judged(Path(output), judged, table, facts=facts)
    return {**summarize_judged(judged), "folds": told, "files": files}
