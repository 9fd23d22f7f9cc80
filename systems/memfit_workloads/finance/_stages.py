"""The stages that judge trained folds: blend, health, backtest, decision.

The stages ``prepare`` and ``fold`` are the workload's own: ``prepare`` returns what `save_folds` gives, and ``fold``
saves checkpoints (``context.save``) that say what `provenance` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from memfit_workloads.finance._blend import Score, blend, check_related, check_scores, join_scores
from memfit_workloads.finance._days import read_days
from memfit_workloads.finance._inference import summarize
from memfit_workloads.finance._judge import decide_on, judge_scores, summarize_judged, write_report
from memfit_workloads.finance._lines import decision_lines, judged_lines
from memfit_workloads.finance._matrices import read_scores
from memfit_workloads.finance._metrics import rank_ic
from memfit_workloads.finance._provenance import fold_of, read_provenance
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
    return (
        Stage(
            "blend",
            partial(_blend, score),
            needs=("prepare", "fold"),
            each="fold in prepare.folds",
            reads=(*reads, "blend"),
            check=check,
        ),
        Stage(
            "health",
            partial(_health, market),
            needs=("prepare", "blend"),
            holds="fold",
            reads=(*reads, *_JUDGING, "on_yellow"),
            check=check,
        ),
        Stage(
            "backtest",
            partial(_backtest, market),
            needs=("prepare", "blend"),
            after=("health",),
            reads=(*reads, *_JUDGING),
            check=check,
        ),
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


def _blend(score: Score, context: Context, params: Any) -> dict[str, Any]:
    """A fold's average, its scores on the fold's test dates, and their rank IC at each horizon.

    Beside it stands that of the newest checkpoint alone: an average that is worse was taken over epochs before the
    training had settled. Nothing is chosen by that, for these are test dates.
    """
    phase("load")
    panel, _, dates = fold_of(context)
    fold, checkpoint = context["fold"], context.dir / "blended.pt"
    sources = blend(fold, params.blend, checkpoint)
    trained = read_provenance(checkpoint)
    check_related({checkpoint: trained}, panel)
    dates = dates[trained.scorable(panel)[dates]]
    phase("score")
    table = check_scores(score(panel, dates, checkpoint, params))
    context.save("blended", checkpoint)
    context.save("scores", table)
    found = {"sources": sources, "num_dates": len(dates), **_rank_ics(table, "")}
    newest = fold.dir / "latest"
    return found | (_rank_ics(score(panel, dates, newest, params), "newest_") if newest.exists() else {})


def _rank_ics(table: pa.Table, prefix: str) -> dict[str, float | None]:
    scores, found = read_scores(table), {}
    for horizon in scores.horizons:
        mean = summarize(rank_ic(scores.of(f"score_h{horizon}"), scores.of(f"target_h{horizon}"))).mean
        found[f"{prefix}h{horizon}_rank_ic"] = None if np.isnan(mean) else mean
    return found


def _health(market: MarketOf | None, context: Context, params: JudgeSettings) -> dict[str, Any]:
    """The first fold, backtested on its test dates, and what the gate says."""
    (first,) = context.units("blend")
    fold = first.unit["fold"]
    if not len(in_period(first.table("scores"), params)):
        start, end = str(params.start_date or ""), str(params.end_date or "9999")
        folds = context["prepare"].result["folds"]
        if not any(one["first_test_date"][:10] <= end and one["last_test_date"][:10] >= start for one in folds):
            raise _no_dates(folds, params)
        return {"report": [f"gate: not asked. Fold {fold} has no date {period_text(params)}."]}
    found = _judged(market, context, params, [first])
    verdict = found["verdict"]
    found["report"] = [_blend_line(first, params), *found["report"]]
    if verdict["knobs"]:
        halved, doubled = (params.backtest.k_ratio * times for times in (0.5, 2.0))
        found["report"].append(
            f"try it on the first fold: memfit run --param k={halved:g},{min(doubled, 1.0):g} -- "
            "memfit run CONFIG --until health --set params.backtest.k_ratio={k}"
        )
    if verdict["colour"] == "red" or (verdict["colour"] == "yellow" and params.on_yellow == "stop"):
        reasons = [f"{one['name']}: {one['text']}" for one in verdict["reasons"] if one["colour"] == verdict["colour"]]
        why = f"the gate is {verdict['colour']}: {'; '.join(reasons)}"
        raise Stop(why, exit_code=GATE_EXIT_CODES[verdict["colour"]], result=found)
    return found


def _blend_line(output: Output, params: JudgeSettings) -> str:
    horizon, found = params.backtest.horizon, output.result
    text = f"fold {output.unit['fold']}, the mean of {', '.join(found['sources'])}"
    blended, newest = (found.get(f"{prefix}h{horizon}_rank_ic") for prefix in ("", "newest_"))
    if blended is None or newest is None:
        return text
    return f"{text}: rank IC {blended:+.4f}, of the newest checkpoint alone {newest:+.4f}"


def _backtest(market: MarketOf | None, context: Context, params: JudgeSettings) -> dict[str, Any]:
    found = _judged(market, context, params, context.units("blend"))
    return found | {
        "report": [f"{found['num_folds']} folds, each date scored by models that did not see it", *found["report"]]
    }


def _judged(
    market: MarketOf | None, context: Context, params: JudgeSettings, blends: Sequence[Output]
) -> dict[str, Any]:
    """What the scores of some folds came to, its tables and files saved."""
    phase("load")
    prepared = context["prepare"]
    panel, data = prepared.panel(), prepared.facts["parts"].get("data", "")
    tables = {one.unit["fold"]: in_period(one.table("scores"), params) for one in blends}
    tables = {fold: table for fold, table in tables.items() if len(table)}
    if not tables:
        raise _no_dates(context["prepare"].result["folds"], params)
    phase("backtest")
    table = join_scores(tables)
    judged = judge_scores(tables, table, panel, market(panel, params) if market else None, params, data=data)
    context.save("scores", table)
    context.save("days", judged.days)
    folds = [{"fold": one.unit["fold"], **one.result} for one in blends if one.unit["fold"] in tables]
    facts = {"panel": panel.fingerprint, "folds": folds}
    for path in write_report(context.dir / "backtest.json", judged, facts=facts):
        context.save(path.name.replace(".", "_"), path)
    found = summarize_judged(judged)
    return found | {"num_folds": len(folds), "report": list(judged_lines(found))}


def in_period(table: pa.Table, params: JudgeSettings) -> pa.Table:
    """The rows of the dates that the settings choose, both ends included."""
    for compare, limit in ((pc.greater_equal, params.start_date), (pc.less_equal, params.end_date)):
        if limit is not None:
            table = table.filter(compare(table["date"], pa.scalar(limit, pa.date32())))
    return table


def period_text(params: JudgeSettings) -> str:
    return f"from {params.start_date or 'the first'} to {params.end_date or 'the last'}"


def _no_dates(folds: Sequence[Mapping[str, Any]], params: JudgeSettings) -> UsageError:
    return UsageError(
        f"no fold tests a date {period_text(params)}.",
        rule=f"the folds test {min(one['first_test_date'] for one in folds)[:10]} to "
        f"{max(one['last_test_date'] for one in folds)[:10]}, and what is judged are their test dates.",
        remedy="choose another period: --set params.start_date=... --set params.end_date=...",
    )


def _decide(context: Context, params: JudgeSettings) -> dict[str, Any]:
    run = context.dir.parents[1]  # runs/<experiment>/<run>/checkpoints/stage_decision
    name, baseline = f"{run.parent.name}/{run.name}", params.decision.baseline
    try:
        decision, second = decide_on(context["backtest"].table("days"), params, name=name)
    except OSError as error:  # of the record
        why = f"{error}. The comparison was not counted: name a folder for records in XDG_STATE_HOME, and run it again."
        return {"no_decision": why, "report": [f"decision: none. {why}"]}
    except (DataError, UsageError) as error:  # too few dates, or a baseline of other assets: the rest stands
        why = f"{error.what} {error.remedy}."
        return {"no_decision": why, "report": [f"decision: none. {why}"]}
    found = {"a": name, "b": baseline, **decision.to_dict()}
    if second:  # its figures, and no verdict: it is no comparison on record
        found["beside"] = {one: value for one, value in second.to_dict().items() if one != "verdict"}
    return found | {"report": list(decision_lines(decision, second, baseline))}
