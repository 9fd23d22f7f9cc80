"""Overlapping sleeves: which assets each date's scores choose, and what the money in them earns day by day.

Shapes: D dates, A assets, H sleeves (one per date of the holding period).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from memfit.config import Settings

_Floats = NDArray[np.float64]
_Bools = NDArray[np.bool_]
_Ints = NDArray[np.int64]

# Each round of sizing a sleeve net of its own costs leaves the cost rate's share of the last round's error.
_SIZING_ROUNDS = 6
_LEAST_TRADE = 1e-12


class BacktestSettings(Settings):
    """How scores become positions, and what trading costs.

    Attributes:
        horizon: Dates that a sleeve is held; so many sleeves overlap.
        k_ratio: Share of the date's scored, eligible assets that a sleeve holds on each side. Larger: more names, less
            risk of a single one, a weaker average score.
        k_min: The fewest assets per side. With fewer candidates the date falls back to the best ``k_min`` by score.
        min_score: An asset is a candidate only if its score is above this (of a short side: below its negative). None
            lets all pass; 0 suits scores in units of a return, where it means that a gain is expected.
        side: ``long`` buys the best. ``long_short`` puts half of the sleeve's money into the best and sells the worst
            short for the other half, so that gross exposure is 1 in both.
        cost_bps: Costs in basis points (1/10,000) of each unit of money bought or sold.
        max_turnover: The most that is traded on one date, buys and sells together, as a share of the equity. Where a
            rebalance would trade more, it goes only that part of the way from the old positions to the new ones, alike
            for every asset. Replacing whole sleeves trades about ``2 / horizon`` a date. None: no limit.
        missing_return: What a held asset is taken to earn on a date without a return (a delisting: -0.3 is a loss of
            30 %). From then on its money is cash until the sleeve ends.
        dates_per_year: Dates in a year, for annual figures.

    Example:
        >>> BacktestSettings(horizon=20, k_ratio=0.05).max_turnover is None
        True
    """

    horizon: Annotated[int, Field(ge=1)] = 5
    k_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    k_min: Annotated[int, Field(ge=1)] = 3
    min_score: Annotated[float, Field(allow_inf_nan=False)] | None = None
    side: Literal["long", "long_short"] = "long"
    cost_bps: Annotated[float, Field(ge=0.0, le=1000.0)] = 10.0
    max_turnover: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    missing_return: Annotated[float, Field(ge=-1.0, le=0.0)] = 0.0
    dates_per_year: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 252.0


@dataclass(frozen=True)
class Selection:
    """What each date's scores chose.

    Attributes:
        picks: For each date the positions of the assets to hold and the share of the sleeve's money in each, negative
            for a short one: two arrays of one length.
        num_scored: Eligible assets with a score, shape (D,).
        num_candidates: Those that pass ``min_score``, shape (D,); of a long-short book on either side.
        is_fallback: Dates on which fewer than ``k_min`` assets passed, shape (D,).
        is_empty: Dates that were to be traded and on which nothing could be chosen, shape (D,).
        is_traded: Dates with any eligible asset: those on which a sleeve was to be opened, shape (D,).
    """

    picks: tuple[tuple[_Ints, _Floats], ...]
    num_scored: _Ints
    num_candidates: _Ints
    is_fallback: _Bools
    is_empty: _Bools
    is_traded: _Bools


def select(scores: _Floats, eligible: _Bools | None, settings: BacktestSettings) -> Selection:
    """The assets that each date's scores choose.

    Of equal scores the first asset by position wins. A score that is not finite is none.

    Args:
        scores: Shape (D, A).
        eligible: Shape (D, A); None for all.
        settings: ``k_ratio``, ``k_min``, ``min_score`` and ``side`` count here.
    """
    num_dates = len(scores)
    counts = np.zeros((2, num_dates), np.int64)
    flags = np.zeros((3, num_dates), np.bool_)
    picks = []
    for date in range(num_dates):
        usable = np.isfinite(scores[date])
        if eligible is not None:
            usable &= eligible[date]
        where = np.flatnonzero(usable)
        pick, num_candidates, is_fallback = _pick(scores[date, where], settings)
        picks.append((where[pick[0]], pick[1]))
        is_traded = eligible is None or bool(eligible[date].any())
        counts[:, date] = len(where), num_candidates
        flags[:, date] = is_fallback, is_traded and len(pick[0]) == 0, is_traded
    return Selection(tuple(picks), counts[0], counts[1], flags[0], flags[1], flags[2])


def _pick(scores: _Floats, settings: BacktestSettings) -> tuple[tuple[_Ints, _Floats], int, bool]:
    """Positions and weights that one date's finite scores choose, the number of candidates, and the fallback flag."""
    num_sides = 1 if settings.side == "long" else 2
    most = len(scores) // num_sides
    if most == 0:
        return (np.empty(0, np.int64), np.empty(0)), 0, False
    # 0.1 * 30 is 3.0000000000000004: that is 3 assets, not 4.
    size = max(settings.k_min, math.ceil(settings.k_ratio * len(scores) - 1e-9))
    chosen, weights, num_candidates, is_fallback = [], [], 0, False
    for sign in (1.0, -1.0)[:num_sides]:
        signed = sign * scores
        passing = len(scores) if settings.min_score is None else int((signed > settings.min_score).sum())
        num_candidates += passing
        is_fallback |= passing < settings.k_min
        count = min(settings.k_min if passing < settings.k_min else min(size, passing), most)
        # A whole universe, as the benchmark holds it, needs no order.
        order = np.argsort(-signed, kind="stable") if count < len(scores) else np.arange(count)
        chosen.append(order[:count])
        weights.append(np.full(count, sign / (num_sides * count)))
    if settings.min_score is None and num_sides == 2:
        num_candidates = len(scores)
    return (np.concatenate(chosen), np.concatenate(weights)), num_candidates, is_fallback


@dataclass(frozen=True)
class SleeveRun:
    """What the sleeves earned: each of shape (D,), as shares of the equity at the date's close before trading.

    Attributes:
        gross: Earned from this close to the next one, before costs.
        cost: Paid for the trades of this close.
        turnover: Bought and sold, together.
        exposure: Long and short positions together, after the trades.
        net_exposure: Long minus short positions, after the trades.
        num_positions: Distinct assets held over all sleeves (a count).
        num_missing: Of those, without a return (a count).
        is_bound: Whether ``max_turnover`` held a trade back.
        trades: Date, asset and sleeve (positions), the change as a share of the equity, and whether the position was
            dropped for a missing return rather than traded: five arrays of one length.
    """

    gross: _Floats
    cost: _Floats
    turnover: _Floats
    exposure: _Floats
    net_exposure: _Floats
    num_positions: _Ints
    num_missing: _Ints
    is_bound: _Bools
    trades: tuple[_Ints, _Ints, _Ints, _Floats, _Bools]


def run_sleeves(
    selection: Selection, returns_1: _Floats, settings: BacktestSettings, *, record_trades: bool = True
) -> SleeveRun:
    """Open a sleeve on each date, hold it for ``horizon`` dates, and mark all of them daily.

    Each of the H sleeves keeps its own account, starting with 1/H of the money: at the close of date t sleeve
    ``t mod H`` sells what it held and buys the date's picks for all that it has, net of costs (positions that stay are
    adjusted, not sold and bought back). Between its rebalances a sleeve's weights drift with prices: nothing is traded.
    On a row without any return nothing is marked and all positions stay.

    Args:
        selection: The picks of each date.
        returns_1: Simple return from each date's close to the next, shape (D, A), NaN where there is none.
        settings: ``horizon``, costs and limits count here.
        record_trades: Whether to keep single trades.
    """
    num_dates, num_assets = returns_1.shape
    book = _Book(np.zeros((settings.horizon, num_assets)), np.full(settings.horizon, 1.0 / settings.horizon))
    figures = np.zeros((7, num_dates))
    is_bound = np.zeros(num_dates, np.bool_)
    log = _TradeLog() if record_trades else None
    for date in range(num_dates):
        equity = float(book.values.sum())
        if equity <= 0:  # a short book can lose more than it has: from there on there is nothing to invest
            break
        sleeve = date % settings.horizon
        before = book.positions[sleeve].copy()
        cost, bound = book.trade(sleeve, selection.picks[date], equity, settings)
        change = book.positions[sleeve] - before
        held = (book.positions != 0).any(axis=0)
        long_and_short = np.abs(book.positions).sum(), book.positions.sum()
        gain, missing = book.mark(returns_1[date], held, settings.missing_return)
        if log is not None:
            log.add(date, sleeve, change / equity)
            log.add_dropped(date, missing / equity)
        traded = np.abs(change).sum()
        dropped = int((missing != 0).any(axis=0).sum())
        figures[:, date] = *(np.array([gain, cost, traded, *long_and_short]) / equity), held.sum(), dropped
        is_bound[date] = bound
    counts = figures[5:].astype(np.int64)
    trades = log.arrays() if log is not None else _TradeLog().arrays()
    return SleeveRun(figures[0], figures[1], figures[2], figures[3], figures[4], counts[0], counts[1], is_bound, trades)


@dataclass
class _Book:
    positions: _Floats  # money in each asset by sleeve, (H, A), negative when short
    values: _Floats  # money of each sleeve, cash included, (H,)

    def trade(
        self, sleeve: int, pick: tuple[_Ints, _Floats], equity: float, settings: BacktestSettings
    ) -> tuple[float, bool]:
        """Rebalance one sleeve to the picks; gives the costs in money, and whether the turnover limit held it back."""
        old, value = self.positions[sleeve], max(float(self.values[sleeve]), 0.0)
        rate = settings.cost_bps / 1e4
        cost = 0.0
        for _ in range(_SIZING_ROUNDS if rate else 1):
            target = np.zeros_like(old)
            target[pick[0]] = pick[1] * (value - cost)
            traded = float(np.abs(target - old).sum())
            settled = abs(rate * traded - cost) <= 1e-12 * value
            cost = rate * traded
            if settled:
                break
        limit = math.inf if settings.max_turnover is None else settings.max_turnover * equity
        bound = traded > limit * (1 + 1e-12)
        if bound:
            target = old + (target - old) * (limit / traded)
            cost = rate * limit
        self.positions[sleeve] = target
        self.values[sleeve] -= cost
        return cost, bound

    def mark(self, returns: _Floats, held: _Bools, missing_return: float) -> tuple[float, _Floats]:
        """Let all sleeves earn a date's returns; gives the gain, and the positions (H, A) that ended without one."""
        absent = np.isnan(returns)
        if absent.all():
            return 0.0, np.zeros((len(self.values), 0))
        lost = np.flatnonzero(absent & held)
        dropped = np.zeros_like(self.positions) if len(lost) else np.zeros((len(self.values), 0))
        dropped[:, lost] = self.positions[:, lost]
        earned = np.where(absent, missing_return, returns)
        gains = self.positions @ earned
        self.values += gains
        self.positions *= 1.0 + earned
        self.positions[:, lost] = 0.0
        return float(gains.sum()), dropped


class _TradeLog:
    def __init__(self) -> None:
        self._rows: list[tuple[_Ints, _Ints, _Ints, _Floats, _Bools]] = []

    def add(self, date: int, sleeve: int, change: _Floats) -> None:
        assets = np.flatnonzero(np.abs(change) > _LEAST_TRADE)
        self._append(date, assets, np.full(len(assets), sleeve), change[assets], False)

    def add_dropped(self, date: int, lost: _Floats) -> None:
        sleeves, assets = np.nonzero(lost)
        if len(assets):
            self._append(date, assets, sleeves, -lost[sleeves, assets], True)

    def _append(self, date: int, assets: _Ints, sleeves: _Ints, change: _Floats, is_dropped: bool) -> None:
        size = len(assets)
        self._rows.append((np.full(size, date), assets, sleeves, change, np.full(size, is_dropped)))

    def arrays(self) -> tuple[_Ints, _Ints, _Ints, _Floats, _Bools]:
        if not self._rows:
            nothing = np.empty(0, np.int64)
            return nothing, nothing, nothing, np.empty(0), np.empty(0, np.bool_)
        dates, assets, sleeves, changes, dropped = zip(*self._rows, strict=True)
        return (
            np.concatenate(dates),
            np.concatenate(assets),
            np.concatenate(sleeves),
            np.concatenate(changes),
            np.concatenate(dropped),
        )
