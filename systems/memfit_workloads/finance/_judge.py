"""From scores to a verdict: the data checked, the scores traded, compared with luck, and tabled by day."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.lib.stride_tricks import sliding_window_view

from memfit.data import Panel
from memfit.errors import UsageError
from memfit_workloads.finance._backtest import BacktestInput, BacktestResult, BacktestSummary
from memfit_workloads.finance._checks import Finding, check_market
from memfit_workloads.finance._controls import Controls, run_controls, sweep
from memfit_workloads.finance._days import evaluate_folds, read_days, summarize_days
from memfit_workloads.finance._decision import Decision, decide_on_record, record_of
from memfit_workloads.finance._gate import Verdict, judge
from memfit_workloads.finance._inference import Summary, summarize
from memfit_workloads.finance._matrices import Floats, Market, Scores, forward_returns, read_market, read_scores
from memfit_workloads.finance._metrics import rank_ic
from memfit_workloads.finance._report import plain
from memfit_workloads.finance._settings import JudgeSettings

#: Shares of the assets that are tried beside the one that was asked for, as multiples of it.
_SWEEP = (0.5, 1.0, 2.0)


#: Dates before a score whose returns make its asset's volatility; half of them must be known.
PAST_DATES = 60
#: A mean rank correlation of this size, of either sign, is a warning.
WARN_FROM = 0.5
#: On fewer dates it may be chance.
LEAST_DATES = 8


@dataclass(frozen=True)
class VolatilityCorrelation:
    """How far scores rank assets by their volatility: the mean over dates of their rank correlation with it.

    It ``warns`` from 0.5 on, of either sign. ``past_dates`` before a score make its volatility.
    """

    mean: float
    num_dates: int
    past_dates: int
    warns: bool


def volatility_correlation(scores: Floats, returns_1: Floats) -> VolatilityCorrelation:
    """Correlate scores with the volatility that was known when they were made.

    Assets of equal expected return differ in how often they rise and in their median return: calm ones are above more
    often. So scores that follow volatility can have a rank IC or a precision at k without any skill.

    Args:
        scores: Shape (D, A); NaN where there is none.
        returns_1: Simple returns from each date to the next, shape (D, A); NaN where there is none.
    """
    correlation = summarize(rank_ic(scores, _realised(returns_1)))
    warns = correlation.num_dates >= LEAST_DATES and abs(correlation.mean) >= WARN_FROM
    return VolatilityCorrelation(correlation.mean, correlation.num_dates, PAST_DATES, warns)


def _realised(returns_1: Floats) -> Floats:
    """Return the standard deviation of the returns that are known on each date, of the last `PAST_DATES`."""
    unknown = np.full((PAST_DATES, returns_1.shape[1]), np.nan)
    past = sliding_window_view(np.vstack([unknown, returns_1])[:-1], PAST_DATES, axis=0)
    known = np.isfinite(past).sum(axis=-1)
    mean = np.nansum(past, axis=-1) / np.maximum(known, 1)
    variance = np.nansum((past - mean[..., None]) ** 2, axis=-1) / np.maximum(known, 1)
    return np.where(known >= PAST_DATES // 2, np.sqrt(variance), np.nan)


@dataclass(frozen=True)
class Judged:
    """What scores came to: backtest, findings in the data, controls, the gate's verdict, and the metrics.

    ``days`` has a row for each fold and date; ``tried`` are the same scores with other shares of the assets.
    """

    result: BacktestResult
    findings: tuple[Finding, ...]
    controls: Controls
    verdict: Verdict
    days: pa.Table
    metrics: Mapping[str, Summary]
    tried: Mapping[str, BacktestSummary]
    volatility: VolatilityCorrelation

    @property
    def facts(self) -> dict[str, Any]:
        """All but the backtest and the table of days, by name."""
        names = ("verdict", "metrics", "findings", "controls", "tried", "volatility")
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; a figure that is undefined is None."""
        return dict(plain({"settings": self.result.settings, "summary": self.result.summary, **self.facts}))


def judge_scores(
    folds: Mapping[int, pa.Table],
    table: pa.Table,
    panel: Panel,
    market: pa.Table | None,
    settings: JudgeSettings,
    *,
    data: str = "",
) -> Judged:
    """Judge the scores of all folds together: ``table`` has one for each date and asset, and is traded.

    The panel's features are checked for looks ahead. Positions are marked by the closes of the raw ``market``, or by
    ``target_h1`` where there is none. ``data`` is the fingerprint of the data, else the panel's counts.
    """
    scores = read_scores(table)
    horizon = settings.backtest.horizon
    raw = None if market is None else read_market(market, table)
    given = _input(scores, raw, horizon)
    result = given.run(settings.backtest)
    findings = () if raw is None else check_market(_with_features(raw, panel), settings.quality)
    controls = run_controls(given, settings.backtest)
    days = evaluate_folds(folds, horizons=scores.horizons, k_ratio=settings.k_ratio)
    # Its comparisons are counted with those of all tables of the same data.
    days = days.replace_schema_metadata(days.schema.metadata | {b"memfit_data": (data or panel.fingerprint).encode()})
    verdict = judge(result, findings, controls=controls, settings=settings.gate)
    tried = sweep(given, settings.backtest, [min(1.0, round(settings.backtest.k_ratio * times, 4)) for times in _SWEEP])
    named = {f"{ratio:g}": summary for ratio, summary in tried.items()}
    volatility = volatility_correlation(given.scores, given.returns_1)
    return Judged(result, findings, controls, verdict, days, summarize_days(days), named, volatility)


def _input(scores: Scores, market: Market | None, horizon: int) -> BacktestInput:
    """What is traded: on all dates of the market from the first score until the last position has ended."""
    score = scores.of(f"score_h{horizon}")
    if market is None:
        return BacktestInput(scores.dates, scores.codes, score, scores.of("target_h1"))
    missing = sorted(set(scores.codes) - set(market.codes))
    first, last = np.searchsorted(market.dates, scores.dates[[0, -1]])
    chosen = slice(int(first), min(int(last) + horizon + 1, len(market.dates)))
    dates = market.dates[chosen]
    if missing or not np.isin(scores.dates, dates).all():
        raise UsageError(
            f"the market has no closes of {missing[0] if missing else 'some of the scored dates'}.",
            rule="market() of the workload gives a row for each date and asset of the panel.",
            remedy="give the closes of all of them",
        )
    columns = np.searchsorted(np.array(market.codes), np.array(scores.codes))
    placed = scores.on(dates, scores.codes)[f"score_h{horizon}"]
    # A date that no model may score is not to be traded; it does not count as one on which nothing could be chosen.
    eligible = np.repeat(np.isin(dates, scores.dates)[:, None], len(scores.codes), axis=1)
    ahead = forward_returns(market.closes, 1)[chosen][:, columns]
    return BacktestInput(dates, scores.codes, placed, ahead, eligible)


def _with_features(market: Market, panel: Panel) -> Market:
    """The market with the panel's features as views, where both have the same dates and assets."""
    same = np.array_equal(market.dates, np.asarray(panel.dates).astype("datetime64[D]"))
    if not same or market.codes != tuple(panel.assets):
        return market
    return replace(market, features={name: panel.values[:, :, at] for at, name in enumerate(panel.feature_names)})


def decide_on(days: pa.Table, settings: JudgeSettings, *, name: str) -> Decision:
    """Decide whether the scores are better than the baseline, corrected for all comparisons on the same data."""
    baseline, level, metric = settings.decision.baseline, settings.decision.level, settings.metric
    other = "random" if baseline == "random" else read_days(Path(baseline))
    record, names = record_of(days, other, metric), (name, baseline)
    return decide_on_record(days, other, metric, settings.metric_horizon, record=record, level=level, names=names)
