"""The stages that judge trained folds: blend, health, backtest, decision.

The stages ``prepare`` and ``fold`` are the workload's own: ``prepare`` returns what `save_folds` gives, and ``fold``
saves checkpoints (``context.save``) that say what `provenance` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memfit import config
from memfit.data import Panel
from memfit.errors import DataError, UsageError
from memfit.pipeline import Context, Output, Stage, Stop
from memfit.rundir import phase
from memfit_workloads.finance._blend import Score, blend, check_related, join_scores
from memfit_workloads.finance._days import read_days
from memfit_workloads.finance._inference import summarize
from memfit_workloads.finance._judge import Judged, decide_on, judge_scores
from memfit_workloads.finance._lines import decision_lines, judged_lines
from memfit_workloads.finance._matrices import read_scores
from memfit_workloads.finance._metrics import rank_ic
from memfit_workloads.finance._provenance import fold_of, read_provenance
from memfit_workloads.finance._report import write_backtest
from memfit_workloads.finance._settings import JudgeSettings

#: Gives the raw market of a panel: a table of ``date``, ``code``, ``close`` and, where there is one, ``volume``.
MarketOf = Callable[[Panel, Any], pa.Table]

#: What the process ends with when the gate lets nothing pass, by the gate's colour.
GATE_EXIT_CODES: Mapping[str, int] = {"yellow": 10, "red": 11}
_PERIOD = ("start_date", "end_date")
_JUDGING = (*_PERIOD, "k_ratio", "backtest", "quality", "gate")


def stages(
    score: Score,
    market: MarketOf | None = None,
    *,
    reads: Sequence[str] = ("data", "model"),
    check: Callable[[Any], None] | None = None,
) -> tuple[Stage, ...]:
    """The stages that judge the folds of a workload whose params derive from `JudgeSettings`.

    1. ``blend``, for each fold: average its late checkpoints, and score the dates that it tests.
    2. ``health``: backtest the first fold and ask the gate. The other folds wait for it. Red ends the run with exit
       code 11; yellow names what to tune, and ends it with 10 if ``on_yellow`` is ``stop``.
    3. ``backtest``: trade the scores of all folds, each date by the models that did not see it.
    4. ``decision``: compare them with the baseline.

    Args:
        score: Gives, from the panel, positions in ``panel.dates``, a checkpoint and the params, a table of ``date``,
            ``code`` and for each horizon of h dates ``score_h{h}`` and ``target_h{h}``, the return over it.
            ``target_h1`` is always there: positions are marked by it each day.
        market: Gives the raw market, which is checked before a profit counts, from the panel and the params.
        reads: The settings that these two read.
        check: Refuses params with which scores cannot be judged, before the first job.
    """
    judging = Judging(score, market)
    scored: dict[str, Any] = {"needs": ("prepare", "blend"), "check": check}
    folds: dict[str, Any] = {"needs": ("prepare", "fold"), "each": "fold in prepare.folds"}
    return (
        Stage("blend", judging.blend, reads=(*reads, "blend"), check=check, **folds),
        Stage("health", judging.health, holds="fold", reads=(*reads, *_JUDGING, "on_yellow"), **scored),
        Stage("backtest", judging.backtest, after=("health",), reads=(*reads, *_JUDGING), **scored),
        Stage("decision", _decide, needs=("backtest",), reads=("backtest", "decision")),
    )


def fingerprint(params: JudgeSettings) -> str:
    """A digest of the baseline that the stage ``decision`` reads, for ``Workload.fingerprint``."""
    baseline = params.decision.baseline
    if baseline == "random":
        return baseline
    if not Path(baseline).exists():
        raise UsageError(
            f"the baseline {baseline} is not there.",
            rule="decision.baseline is random, or the folder or table of days of another run.",
            remedy="correct the path, or --set params.decision.baseline=random",
        )
    return config.fingerprint(read_days(Path(baseline)).to_pydict())


@dataclass(frozen=True)
class Judging:
    """How a workload's folds are judged: its functions that give scores and raw market, as `stages` has them."""

    score: Score
    market: MarketOf | None

    def blend(self, context: Context, params: Any) -> dict[str, Any]:
        """A fold's average, its scores on the fold's test dates, and their rank IC at each horizon."""
        phase("load")
        panel, _, dates = fold_of(context)
        fold, checkpoint = context["fold"], context.dir / "blended.pt"
        sources = blend(fold, params.blend, checkpoint)
        trained = read_provenance(checkpoint)
        check_related({checkpoint: trained}, panel)
        dates = dates[trained.scorable(panel)[dates]]
        phase("score")
        table = self.score(panel, dates, checkpoint, params)
        context.save("blended", checkpoint)
        context.save("scores", table)
        return {"sources": sources, "num_dates": len(dates), **_rank_ics(table)}

    def health(self, context: Context, params: JudgeSettings) -> dict[str, Any]:
        """The first fold, backtested on its test dates, and what the gate says."""
        (first,) = context.units("blend")
        if not len(_in_period(first.table("scores"), params)):
            start, end = str(params.start_date or ""), str(params.end_date or "9999")
            folds = context["prepare"].result["folds"]
            if not any(one["first_test_date"][:10] <= end and one["last_test_date"][:10] >= start for one in folds):
                raise _no_dates(folds, params)
            return {"report": [f"gate: not asked. Fold {first.unit['fold']} has no date {params.period}."]}
        found = self._judged(context, params, [first])
        verdict = found["verdict"]
        blended = f"fold {first.unit['fold']}, the mean of {', '.join(first.result['sources'])}"
        found["report"] = [blended, *found["report"]]
        colour = verdict["colour"]
        if colour == "red" or (colour == "yellow" and params.on_yellow == "stop"):
            reasons = [f"{one['name']}: {one['text']}" for one in verdict["reasons"] if one["colour"] == colour]
            raise Stop(f"the gate is {colour}: {'; '.join(reasons)}", exit_code=GATE_EXIT_CODES[colour], result=found)
        return found

    def backtest(self, context: Context, params: JudgeSettings) -> dict[str, Any]:
        """The scores of all folds, traded."""
        found = self._judged(context, params, context.units("blend"))
        head = f"{found['num_folds']} folds, each date scored by models that did not see it"
        return found | {"report": [head, *found["report"]]}

    def _judged(self, context: Context, params: JudgeSettings, blends: Sequence[Output]) -> dict[str, Any]:
        """What the scores of some folds came to, its tables and files saved."""
        phase("load")
        tables = {one.unit["fold"]: _in_period(one.table("scores"), params) for one in blends}
        tables = {fold: table for fold, table in tables.items() if len(table)}
        if not tables:
            raise _no_dates(context["prepare"].result["folds"], params)
        phase("backtest")
        table, judged = self.judge(tables, context["prepare"], params)
        context.save("scores", table)
        context.save("days", judged.days)
        folds = [{"fold": one.unit["fold"], **one.result} for one in blends if one.unit["fold"] in tables]
        facts = {"panel": context["prepare"].panel().fingerprint, "folds": folds}
        for path in write_backtest(context.dir / "backtest.json", judged.result, **judged.facts, **facts):
            context.save(path.name.replace(".", "_"), path)
        found = judged.to_dict()
        return found | {"num_folds": len(folds), "report": list(judged_lines(found))}

    def judge(self, tables: Mapping[int, pa.Table], prepared: Output, params: JudgeSettings) -> tuple[pa.Table, Judged]:
        """Judge the scores of some folds on the prepared panel; gives them as one table, and what they came to."""
        panel, table, data = prepared.panel(), join_scores(tables), prepared.facts["parts"].get("data", "")
        market = self.market(panel, params) if self.market else None
        return table, judge_scores(tables, table, panel, market, params, data=data)


def _rank_ics(table: pa.Table) -> dict[str, float | None]:
    scores, found = read_scores(table), {}
    for horizon in scores.horizons:
        mean = summarize(rank_ic(scores.of(f"score_h{horizon}"), scores.of(f"target_h{horizon}"))).mean
        found[f"h{horizon}_rank_ic"] = None if np.isnan(mean) else mean
    return found


def _in_period(table: pa.Table, params: JudgeSettings) -> pa.Table:
    """The rows of the dates that the settings choose, both ends included."""
    for compare, limit in ((pc.greater_equal, params.start_date), (pc.less_equal, params.end_date)):
        if limit is not None:
            table = table.filter(compare(table["date"], pa.scalar(limit, pa.date32())))
    return table


def _no_dates(folds: Sequence[Mapping[str, Any]], params: JudgeSettings) -> UsageError:
    return UsageError(
        f"no fold tests a date {params.period}.",
        rule=f"the folds test {min(one['first_test_date'] for one in folds)[:10]} to "
        f"{max(one['last_test_date'] for one in folds)[:10]}, and what is judged are their test dates.",
        remedy="choose another period: --set params.start_date=... --set params.end_date=...",
    )


def _decide(context: Context, params: JudgeSettings) -> dict[str, Any]:
    run = context.dir.parents[1]  # runs/<experiment>/<run>/checkpoints/stage_decision
    name, baseline = f"{run.parent.name}/{run.name}", params.decision.baseline
    try:
        decision = decide_on(context["backtest"].table("days"), params, name=name)
    except (OSError, DataError, UsageError) as error:  # the rest stands
        if isinstance(error, OSError):
            why = f"{error}. The comparison was not counted: name a folder for records in XDG_STATE_HOME"
        else:  # too few dates, or a baseline of other assets
            why = f"{error.what} {error.remedy}"
        return {"no_decision": f"{why}.", "report": [f"decision: none. {why}."]}
    report = list(decision_lines(decision, baseline))
    return {"a": name, "b": baseline, **decision.to_dict(), "report": report}
