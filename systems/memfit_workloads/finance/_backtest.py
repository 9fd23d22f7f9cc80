"""The backtest of a ranking: overlapping sleeves, marked daily, net of costs, against the universe.

Shapes: D dates, A assets, H sleeves (one per date of the holding period).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from memfit.config import Settings
from memfit.errors import DataError
from memfit_workloads.finance._matrices import Floats, check_shapes

_Bools = NDArray[np.bool_]
# Each round of sizing a sleeve net of its own costs leaves the cost rate's share of the last round's error.
_SIZING_ROUNDS = 6


class BacktestSettings(Settings):
    """How scores become positions, and what trading costs; docs/workflow.md has each setting with its unit."""

    horizon: Annotated[int, Field(ge=1)] = 5
    k_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    k_min: Annotated[int, Field(ge=1)] = 3
    min_score: Annotated[float, Field(allow_inf_nan=False)] | None = None
    cost_bps: Annotated[float, Field(ge=0.0, le=1000.0)] = 10.0
    dates_per_year: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 252.0


@dataclass(frozen=True)
class BacktestSummary:
    """A backtest in numbers. Returns are simple and as a share: 0.1 is 10 %. What is undefined is NaN.

    ``num_dates`` were marked and are n of all: they do not overlap, so they count as independent. Returns are after
    costs, those in ``_gross`` before them; ``active`` is the mean daily return beyond the universe's, a year.
    ``volatility`` and ``sharpe`` are a year's, of the daily net returns (divisor n - 1, no interest on cash is taken
    off); ``sharpe_error`` is ``sqrt(dates_per_year / num_dates)``. Shares and ``mean_held`` (assets per sleeve) are
    over the rebalance dates.
    """

    start: str
    end: str
    num_dates: int
    total_return: float
    total_return_gross: float
    annual_return: float
    annual_return_gross: float
    annual_benchmark: float
    annual_active_gross: float
    volatility: float
    sharpe: float
    sharpe_error: float
    share_fallback: float
    share_empty: float
    mean_held: float


@dataclass(frozen=True)
class BacktestResult:
    """A backtest: its settings, one row for each date that was marked, and the whole in numbers.

    In ``days``, ``gross``, ``cost``, ``net``, ``benchmark`` and ``active`` (net minus benchmark) are earned from this
    close to the next, as a share of the equity at this close; ``equity`` is at the next close, 1 at the start;
    ``turnover`` is bought and sold, ``exposure`` what is invested; ``num_held`` counts the sleeve that was opened on
    this date.
    """

    settings: BacktestSettings
    days: pa.Table
    summary: BacktestSummary


@dataclass(frozen=True)
class BacktestInput:
    """What a backtest takes, to run it, and again with a change; arrays are (D, A).

    ``dates`` are consecutive dates of the market in ascending order. Of the ``scores``, higher is better, NaN is none.
    ``returns_1`` are simple returns from each date's close to the next, NaN where unknown: there a held asset earns
    nothing. Rows at the end without any are left out. A date without any ``eligible`` asset is not to be traded; any
    other on which nothing can be chosen is empty.

    Raises:
        DataError: If shapes differ, dates do not ascend, a code comes twice, or a return is below -1 or infinite.
    """

    dates: NDArray[Any]
    codes: tuple[str, ...]
    scores: Floats
    returns_1: Floats
    eligible: _Bools | None = None

    def __post_init__(self) -> None:
        whole = np.ones((len(self.dates), len(self.codes)), bool) if self.eligible is None else self.eligible
        object.__setattr__(self, "dates", np.asarray(self.dates, "datetime64[D]"))
        object.__setattr__(self, "eligible", np.asarray(whole, np.bool_))
        for name in ("scores", "returns_1"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.float64))
        arrays = {"scores": self.scores, "returns_1": self.returns_1, "eligible": whole}
        check_shapes(self.dates, self.codes, arrays)
        early = np.flatnonzero(np.diff(self.dates.astype(np.int64)) <= 0)
        if len(early) or len(set(self.codes)) < len(self.codes):
            what = f"{self.dates[early[0] + 1]} follows {self.dates[early[0]]}" if len(early) else "a code occurs twice"
            raise DataError(
                f"dates are out of order, or dates or codes are not distinct: {what}.",
                rule="a backtest walks through distinct dates in ascending order.",
                remedy="sort by date and drop duplicates",
            )
        if len(bad := np.argwhere((self.returns_1 < -1) | np.isinf(self.returns_1))):
            row, column = bad[0]
            raise DataError(
                f"{self.codes[column]} has the return {self.returns_1[row, column]} on {self.dates[row]}; {len(bad)} "
                "such returns.",
                rule="a simple return is finite and at least -1 (a loss of everything).",
                remedy="check the prices: a close of 0 or a wrong adjustment; check_market names them",
            )

    @property
    def num_dates(self) -> int:
        """How many dates are marked: those up to the last return."""
        return int(np.max(np.flatnonzero(np.isfinite(self.returns_1).any(axis=1)), initial=-1)) + 1

    def trade(self, settings: BacktestSettings, scores: Floats | None = None) -> dict[str, NDArray[Any]]:
        """Return what the scores choose on each date that is marked, and what the sleeves earn with that, (D,) each."""
        assert self.eligible is not None
        chosen, num_dates = self.scores if scores is None else np.asarray(scores, np.float64), self.num_dates
        weights, days = select(chosen[:num_dates], self.eligible[:num_dates], settings)
        return _walk(weights, self.returns_1[:num_dates], settings) | days

    def run(self, settings: BacktestSettings, *, scores: Floats | None = None) -> BacktestResult:
        """Trade on the scores of each date, hold for ``horizon`` dates, and mark every position daily.

        Scores of a date are taken as known at its close, traded at that close, and earn from there on. The money is in
        ``horizon`` sleeves: on each date one of them is sold and opened anew with that date's best assets. So a return
        over h dates is earned once in h dates. Each sleeve keeps its own account, which starts with ``1 / horizon`` of
        the money; its weights are equal when it is opened, and drift with prices until it ends. During the first
        ``horizon - 1`` dates some sleeves are still cash. Positions open at the end are marked, not sold. The benchmark
        is the universe: the same sleeves with every eligible asset that has a score, without costs.

        Source: N. Jegadeesh and S. Titman, Returns to Buying Winners and Selling Losers (1993): overlapping portfolios.
        """
        traded = self.trade(settings, scores)
        whole = {"k_ratio": 1.0, "k_min": 1, "min_score": None, "cost_bps": 0.0}
        universe = self.trade(settings.model_copy(update=whole), scores)["gross"]
        gross, cost = traded.pop("gross"), traded.pop("cost")
        net = gross - cost
        days = {
            "date": self.dates[: len(net)],
            "gross": gross,
            "cost": cost,
            "net": net,
            "benchmark": universe,
            "active": net - universe,
            "equity": np.cumprod(1.0 + net),
            **traded,
        }
        return BacktestResult(settings, pa.table(days), self._summarize(days, settings))

    def _summarize(self, days: dict[str, NDArray[Any]], settings: BacktestSettings) -> BacktestSummary:
        net, gross, universe = days["net"], days["gross"], days["benchmark"]
        year, n = settings.dates_per_year, len(net)
        totals = [float(np.prod(1.0 + daily) - 1.0) for daily in (net, gross, universe)]
        annual, annual_gross, annual_benchmark = (_annual(total, n, year) for total in totals)
        deviation = float(net.std(ddof=1)) if n > 1 else math.nan
        traded = days["is_rebalance"]
        return BacktestSummary(
            start=str(days["date"][0]) if n else "",
            end=str(days["date"][-1]) if n else "",
            num_dates=n,
            total_return=totals[0],
            total_return_gross=totals[1],
            annual_return=annual,
            annual_return_gross=annual_gross,
            annual_benchmark=annual_benchmark,
            annual_active_gross=_mean(gross - universe) * year,
            volatility=deviation * math.sqrt(year),
            sharpe=_mean(net) / deviation * math.sqrt(year) if deviation > 1e-12 else math.nan,
            sharpe_error=math.sqrt(year / n) if n else math.nan,
            share_fallback=_mean(days["is_fallback"][traded]),
            share_empty=_mean(days["is_empty"][traded]),
            mean_held=_mean(days["num_held"][traded]),
        )


def select(scores: Floats, eligible: _Bools, settings: BacktestSettings) -> tuple[Floats, dict[str, NDArray[Any]]]:
    """Return the shares (D, A) of a sleeve's money that each date's scores choose, and what they were chosen from.

    Of equal scores the first ones are chosen; a score is finite. Dates with any eligible asset are ``is_rebalance``; of
    these, ``is_fallback`` had fewer than ``k_min`` above ``min_score``.
    """
    usable, k_min = np.isfinite(scores) & eligible, settings.k_min
    num_scored, is_traded = usable.sum(axis=1), np.asarray(eligible.any(axis=1))
    least = -math.inf if settings.min_score is None else settings.min_score
    weights, passing = np.zeros(scores.shape), (usable & (scores > least)).sum(axis=1)
    for date in np.flatnonzero(num_scored):
        where = np.flatnonzero(usable[date])
        # 0.1 * 30 is 3.0000000000000004: that is 3 assets, not 4.
        size = max(k_min, math.ceil(settings.k_ratio * len(where) - 1e-9))
        count = min(size, passing[date]) if passing[date] >= k_min else min(k_min, len(where))
        best = np.argsort(-scores[date, where], kind="stable")[:count]
        weights[date, where[best]] = 1.0 / count
    return weights, {
        "num_scored": num_scored,
        "num_candidates": passing,
        "num_held": (weights != 0).sum(axis=1),
        "is_rebalance": is_traded,
        "is_fallback": (num_scored > 0) & (passing < k_min),
        "is_empty": is_traded & (num_scored == 0),
    }


def _walk(weights: Floats, returns_1: Floats, settings: BacktestSettings) -> dict[str, NDArray[Any]]:
    """Open a sleeve of ``weights`` (D, A) on each date, as `BacktestInput.run` says; gives what the sleeves earned.

    All is a share of the equity at the date's close before trading.
    """
    num_dates, num_assets = returns_1.shape
    held = np.zeros((settings.horizon, num_assets))  # money in each asset by sleeve
    value = np.full(settings.horizon, 1.0 / settings.horizon)  # money of each sleeve, cash included
    rate, figures, returns = settings.cost_bps / 1e4, np.zeros((4, num_dates)), np.nan_to_num(returns_1)
    for date in range(num_dates):
        sleeve, equity, cost = date % settings.horizon, value.sum(), 0.0
        if equity <= 0:  # all is lost: from there on there is nothing to invest
            break
        old = held[sleeve].copy()
        for _ in range(_SIZING_ROUNDS if rate else 1):
            held[sleeve] = weights[date] * (max(value[sleeve], 0.0) - cost)
            cost = rate * np.abs(held[sleeve] - old).sum()
        value[sleeve] -= cost
        gains = held @ returns[date]
        figures[:, date] = np.array([gains.sum(), cost, np.abs(held[sleeve] - old).sum(), held.sum()]) / equity
        value += gains
        held *= 1.0 + returns[date]
    return dict(zip(("gross", "cost", "turnover", "exposure"), figures, strict=True))


def _annual(total: float, num_dates: int, dates_per_year: float) -> float:
    if not num_dates:
        return math.nan
    try:
        return float((1.0 + max(total, -1.0)) ** (dates_per_year / num_dates) - 1.0)
    except OverflowError:
        return math.inf


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else math.nan


def t_of_mean(daily: Floats) -> float:
    """Return the mean over its standard error, of independent dates; NaN where it is undefined."""
    if len(daily) < 2 or daily.std() < 1e-15:
        return math.nan
    return float(daily.mean() / (daily.std(ddof=1) / math.sqrt(len(daily))))
