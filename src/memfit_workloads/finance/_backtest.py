"""The backtest of a ranking: overlapping sleeves, marked daily, net of costs, against the universe.

Shapes: D dates, A assets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray
from pydantic import BeforeValidator, WithJsonSchema

from memfit.errors import DataError
from memfit_workloads.finance._market import Record
from memfit_workloads.finance._sleeves import BacktestSettings, Selection, SleeveRun, run_sleeves, select

NUM_QUANTILES = 5

_Floats = NDArray[np.float64]
_Bools = NDArray[np.bool_]


def _nan_for_null(value: object) -> object:
    return math.nan if value is None else value


#: A float that is NaN where it is undefined; JSON has ``null`` for that.
Figure = Annotated[
    float, BeforeValidator(_nan_for_null), WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}]})
]


class BacktestSummary(Record):
    """A backtest in numbers. Returns are simple and as a share: 0.1 is 10 %. What is undefined is NaN.

    Attributes:
        start: First date, ISO format; empty when there is none.
        end: Last date that was marked.
        num_dates: Dates that were marked, n of all figures below.
        num_unmarked: Dates between the first and the last on which no asset had a return: positions stood still.
        num_trailing: Dates at the end without any return, which were left out.
        total_return: Return over all dates, after costs.
        total_return_gross: The same with the costs added back date by date.
        annual_return: ``(1 + total_return) ** (dates_per_year / num_dates) - 1``.
        annual_return_gross: The same before costs.
        annual_benchmark: The universe's annual return.
        annual_active: Mean of the daily returns after costs beyond the benchmark's, times ``dates_per_year``.
        annual_active_gross: The same before costs.
        active_t: Mean of the daily gross returns beyond the benchmark's over its standard error, n = ``num_dates``.
            Daily marks do not overlap, so dates count as independent.
        volatility: Standard deviation (divisor n - 1) of the daily net returns, times ``sqrt(dates_per_year)``.
        sharpe: Mean over standard deviation of the daily net returns, times ``sqrt(dates_per_year)``; no interest on
            cash is taken off.
        sharpe_error: Its standard error where the true one is small: ``sqrt(dates_per_year / num_dates)``.
        max_drawdown: The deepest fall below an earlier high of the equity, net, at most 0.
        mean_turnover: Bought and sold per date, together, as a share of the equity.
        hit_rate: Share of dates with a net return above 0 among those with a position.
        share_fallback: Share of rebalance dates on which the best ``k_min`` were taken for want of candidates.
        share_empty: Share of rebalance dates on which nothing could be chosen.
        mean_held: Assets per sleeve, mean over the rebalance dates.
        num_missing: Positions that ended for want of a return.
        num_bound: Dates on which ``max_turnover`` held a trade back.
    """

    start: str
    end: str
    num_dates: int
    num_unmarked: int
    num_trailing: int
    total_return: Figure
    total_return_gross: Figure
    annual_return: Figure
    annual_return_gross: Figure
    annual_benchmark: Figure
    annual_active: Figure
    annual_active_gross: Figure
    active_t: Figure
    volatility: Figure
    sharpe: Figure
    sharpe_error: Figure
    max_drawdown: Figure
    mean_turnover: Figure
    hit_rate: Figure
    share_fallback: Figure
    share_empty: Figure
    mean_held: Figure
    num_missing: int
    num_bound: int


class QuantileRow(Record):
    """A fifth of the scores.

    Attributes:
        quantile: 1 the worst scores, 5 the best.
        mean_return: Over ``horizon`` dates, averaged over assets and then over dates.
        mean_excess: The same beyond the mean of the date.
        num_dates: Dates that count.

    Example:
        >>> QuantileRow(quantile=5, mean_return=0.01, mean_excess=0.002, num_dates=250).mean_excess
        0.002
    """

    quantile: int
    mean_return: Figure
    mean_excess: Figure
    num_dates: int


@dataclass(frozen=True)
class BacktestResult:
    """A backtest: its settings, days, trades and summary.

    Attributes:
        settings: How it was run.
        days: One row per marked date. ``date``; ``gross``, ``cost``, ``net`` (gross minus cost), ``benchmark`` and
            ``active`` (net minus benchmark): earned from this close to the next, as a share of the equity at this
            close; ``equity`` and ``equity_benchmark`` at the next close, 1 at the start; ``drawdown`` of the equity,
            at most 0; ``turnover`` (bought and sold); ``exposure`` (long and short positions together) and
            ``net_exposure``; ``num_scored``, ``num_candidates``, ``num_held`` (by the sleeve opened on this date),
            ``num_positions`` (by all sleeves), ``num_missing``; ``is_rebalance``, ``is_fallback``, ``is_empty``,
            ``is_bound``.
        trades: One row per trade: ``date``, ``code``, ``sleeve`` (0 to horizon - 1), ``side`` (``buy``, ``sell``, or
            ``drop`` where a position ended for want of a return), ``weight_change`` as a share of the equity.
        quantiles: One row per fifth of the scores, with the columns of `QuantileRow`.
        summary: The whole in numbers.
    """

    settings: BacktestSettings
    days: pa.Table
    trades: pa.Table
    quantiles: pa.Table
    summary: BacktestSummary


def backtest(
    dates: ArrayLike,
    codes: tuple[str, ...],
    scores: ArrayLike,
    returns_1: ArrayLike,
    settings: BacktestSettings,
    *,
    eligible: ArrayLike | None = None,
) -> BacktestResult:
    """Trade on the scores of each date, hold for ``horizon`` dates, and mark every position daily.

    Scores of a date are taken as known at its close, traded at that close, and earn from there on. The money is in
    ``horizon`` sleeves: on each date one of them is sold and opened anew with that date's best assets. So a return
    over h dates is earned once in h dates, and never once a date. Each sleeve keeps its own account, which starts with
    ``1 / horizon`` of the money; its weights are equal when it is opened, and drift with prices until it ends. During
    the first ``horizon - 1`` dates some sleeves are still cash (``exposure``). Positions open at the end are marked,
    not sold.

    The benchmark is the universe: the same sleeves with every eligible asset that has a score, without costs. A
    ``long_short`` book is measured against cash.

    Args:
        dates: Consecutive dates of the market in ascending order, shape (D,).
        codes: Names of the assets, length A.
        scores: Higher is better, NaN where there is none, shape (D, A).
        returns_1: Simple return from each date's close to the next, shape (D, A), NaN where unknown. Rows at the end
            without any return are left out.
        settings: How scores become positions, and what trading costs.
        eligible: Which assets may be bought on which date, shape (D, A); None for all. A date without any is not to be
            traded; any other date on which nothing can be chosen counts as empty.

    Raises:
        DataError: If shapes differ, dates do not ascend, a code comes twice, or a return is below -1 or infinite.

    Source:
        N. Jegadeesh and S. Titman, Returns to Buying Winners and Selling Losers (1993): overlapping portfolios.

    Example:
        >>> dates = np.arange("2024-01-01", "2024-02-10", dtype="datetime64[D]")
        >>> growth = np.full((40, 2), 1.01 ** (1 / 20) - 1)  # 1 % in 20 dates
        >>> result = backtest(dates, ("A", "B"), np.ones((40, 2)), growth, BacktestSettings(horizon=20, cost_bps=0))
        >>> equity = result.days["equity"].to_numpy()
        >>> f"{equity[39] / equity[19] - 1:.4f}"
        '0.0100'
    """
    date, score_da, return_da, eligible_da = _checked(dates, codes, scores, returns_1, eligible)
    with_return: _Bools = np.asarray(np.isfinite(return_da).any(axis=1))
    num_dates = int(np.max(np.flatnonzero(with_return), initial=-1)) + 1
    num_trailing = len(date) - num_dates
    date, score_da, return_da = date[:num_dates], score_da[:num_dates], return_da[:num_dates]
    eligible_da = None if eligible_da is None else eligible_da[:num_dates]
    selection = select(score_da, eligible_da, settings)
    run = run_sleeves(selection, return_da, settings)
    days = _days_table(date, selection, run, _benchmark(score_da, eligible_da, return_da, settings))
    summary = _summarize(days, settings, num_trailing, int((~with_return[:num_dates]).sum()))
    quantiles = _quantiles_table(score_da, eligible_da, return_da, settings.horizon)
    return BacktestResult(settings, days, _trades_table(date, codes, run), quantiles, summary)


def _checked(
    dates: ArrayLike, codes: tuple[str, ...], scores: ArrayLike, returns_1: ArrayLike, eligible: ArrayLike | None
) -> tuple[NDArray[Any], _Floats, _Floats, _Bools | None]:
    date = np.asarray(dates, "datetime64[D]")
    score_da, return_da = np.asarray(scores, np.float64), np.asarray(returns_1, np.float64)
    eligible_da = None if eligible is None else np.asarray(eligible, np.bool_)
    shapes = {score_da.shape, return_da.shape, (len(date), len(codes))}
    if len(shapes) > 1 or (eligible_da is not None and eligible_da.shape not in shapes):
        raise DataError(
            f"there are {len(date)} dates and {len(codes)} codes; scores have the shape {score_da.shape}, returns "
            f"{return_da.shape}, eligible {None if eligible_da is None else eligible_da.shape}.",
            rule="a backtest takes arrays of one shape (num_dates, num_assets).",
            remedy="fill absent assets with NaN",
        )
    early = np.flatnonzero(np.diff(date.astype(np.int64)) <= 0)
    if len(early) or len(set(codes)) < len(codes):
        what = f"{date[early[0] + 1]} follows {date[early[0]]}" if len(early) else "a code occurs twice"
        raise DataError(
            f"dates are out of order, or dates or codes are not distinct: {what}.",
            rule="a backtest walks through distinct dates in ascending order.",
            remedy="sort by date and drop duplicates; check_market names them",
        )
    bad = (return_da < -1) | np.isinf(return_da)
    if bad.any():
        row, column = (int(found[0]) for found in np.nonzero(bad))
        raise DataError(
            f"{codes[column]} has the return {return_da[row, column]} on {date[row]}; {int(bad.sum())} such returns.",
            rule="a simple return is finite and at least -1 (a loss of everything).",
            remedy="check the prices: a close of 0 or a wrong adjustment; check_market names them",
        )
    return date, score_da, return_da, eligible_da


def _benchmark(
    scores: _Floats, eligible: _Bools | None, returns_1: _Floats, settings: BacktestSettings
) -> _Floats | None:
    """Daily returns of the whole scored universe in the same sleeves, before costs; None for a long-short book."""
    if settings.side == "long_short":
        return None
    whole = settings.model_copy(
        update={"k_ratio": 1.0, "k_min": 1, "min_score": None, "cost_bps": 0.0, "max_turnover": None}
    )
    return run_sleeves(select(scores, eligible, whole), returns_1, whole, record_trades=False).gross


def _days_table(dates: NDArray[Any], selection: Selection, run: SleeveRun, benchmark: _Floats | None) -> pa.Table:
    net = run.gross - run.cost
    universe = np.zeros(len(net)) if benchmark is None else benchmark
    equity = np.cumprod(1.0 + net)
    return pa.table(
        {
            "date": pa.array(dates, pa.date32()),
            "gross": run.gross,
            "cost": run.cost,
            "net": net,
            "benchmark": universe,
            "active": net - universe,
            "equity": equity,
            "equity_benchmark": np.cumprod(1.0 + universe),
            "drawdown": equity / np.maximum.accumulate(np.maximum(equity, 1.0)) - 1.0,
            "turnover": run.turnover,
            "exposure": run.exposure,
            "net_exposure": run.net_exposure,
            "num_scored": selection.num_scored,
            "num_candidates": selection.num_candidates,
            "num_held": np.array([len(assets) for assets, _ in selection.picks], np.int64),
            "num_positions": run.num_positions,
            "num_missing": run.num_missing,
            "is_rebalance": selection.is_traded,
            "is_fallback": selection.is_fallback,
            "is_empty": selection.is_empty,
            "is_bound": run.is_bound,
        }
    )


def _trades_table(dates: NDArray[Any], codes: tuple[str, ...], run: SleeveRun) -> pa.Table:
    date, asset, sleeve, change, is_dropped = run.trades
    side = np.where(is_dropped, 2, (change < 0).astype(np.int64))
    return pa.table(
        {
            "date": pa.array(dates[date], pa.date32()),
            "code": pa.DictionaryArray.from_arrays(pa.array(asset, pa.int32()), pa.array(codes, pa.string())),
            "sleeve": pa.array(sleeve, pa.int32()),
            "side": pa.DictionaryArray.from_arrays(pa.array(side, pa.int8()), pa.array(["buy", "sell", "drop"])),
            "weight_change": change,
        }
    )


def _quantiles_table(scores: _Floats, eligible: _Bools | None, returns_1: _Floats, horizon: int) -> pa.Table:
    """Mean return over the next ``horizon`` dates by fifth of the score; a date needs as many assets as fifths."""
    sums, num_dates = np.zeros((2, NUM_QUANTILES)), 0
    ahead_da = compound(returns_1, horizon)
    for date in range(len(ahead_da)):
        usable = np.isfinite(scores[date]) & np.isfinite(ahead_da[date])
        if eligible is not None:
            usable &= eligible[date]
        ahead, score = ahead_da[date, usable], scores[date, usable]
        if len(ahead) < NUM_QUANTILES:
            continue
        fifth = np.empty(len(ahead), np.int64)
        fifth[np.argsort(score, kind="stable")] = np.arange(len(ahead)) * NUM_QUANTILES // len(ahead)
        means = np.bincount(fifth, ahead) / np.bincount(fifth)
        sums += means, means - ahead.mean()
        num_dates += 1
    means = sums / num_dates if num_dates else np.full_like(sums, np.nan)
    return pa.table(
        {
            "quantile": np.arange(1, NUM_QUANTILES + 1),
            "mean_return": means[0],
            "mean_excess": means[1],
            "num_dates": np.full(NUM_QUANTILES, num_dates),
        }
    )


def compound(returns_1: _Floats, horizon: int) -> _Floats:
    """The return over ``horizon`` dates from each date on, shape (max(D - horizon + 1, 0), A), NaN where one misses.

    Example:
        >>> compound(np.array([[0.1], [0.1], [-0.5]]), 2).round(3).tolist()
        [[0.21], [-0.45]]
    """
    num_dates = max(len(returns_1) - horizon + 1, 0)
    growth = np.ones((num_dates, returns_1.shape[1]))
    for later in range(horizon if num_dates else 0):
        growth *= 1.0 + returns_1[later : later + num_dates]
    growth -= 1.0
    return growth


def _summarize(days: pa.Table, settings: BacktestSettings, num_trailing: int, num_unmarked: int) -> BacktestSummary:
    columns = {name: days[name].to_numpy() for name in days.column_names}
    net, gross, universe = columns["net"], columns["gross"], columns["benchmark"]
    year, n = settings.dates_per_year, len(net)
    totals = {name: float(np.prod(1.0 + daily) - 1.0) for name, daily in (("", net), ("_gross", gross))}
    deviation = float(net.std(ddof=1)) if n > 1 else math.nan
    invested, traded = columns["exposure"] > 0, columns["is_rebalance"]
    return BacktestSummary(
        start=str(columns["date"][0]) if n else "",
        end=str(columns["date"][-1]) if n else "",
        num_dates=n,
        num_unmarked=num_unmarked,
        num_trailing=num_trailing,
        total_return=totals[""],
        total_return_gross=totals["_gross"],
        annual_return=_annual(totals[""], n, year),
        annual_return_gross=_annual(totals["_gross"], n, year),
        annual_benchmark=_annual(float(np.prod(1.0 + universe) - 1.0), n, year),
        annual_active=_mean(net - universe) * year,
        annual_active_gross=_mean(gross - universe) * year,
        active_t=t_of_mean(gross - universe),
        volatility=deviation * math.sqrt(year),
        sharpe=_mean(net) / deviation * math.sqrt(year) if deviation > 1e-12 else math.nan,
        sharpe_error=math.sqrt(year / n) if n else math.nan,
        max_drawdown=float(columns["drawdown"].min()) if n else math.nan,
        mean_turnover=_mean(columns["turnover"]),
        hit_rate=_mean(net[invested] > 0),
        share_fallback=_mean(columns["is_fallback"][traded]),
        share_empty=_mean(columns["is_empty"][traded]),
        mean_held=_mean(columns["num_held"][traded]),
        num_missing=int(columns["num_missing"].sum()),
        num_bound=int(columns["is_bound"].sum()),
    )


def _annual(total: float, num_dates: int, dates_per_year: float) -> float:
    if not num_dates:
        return math.nan
    try:
        return float((1.0 + max(total, -1.0)) ** (dates_per_year / num_dates) - 1.0)
    except OverflowError:
        return math.inf


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else math.nan


def t_of_mean(daily: _Floats) -> float:
    """The mean over its standard error, of independent dates; NaN where it is undefined."""
    if len(daily) < 2 or daily.std() < 1e-15:
        return math.nan
    return float(daily.mean() / (daily.std(ddof=1) / math.sqrt(len(daily))))
