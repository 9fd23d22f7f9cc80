"""Controls of a backtest: what it says when the scores are shuffled, late by a date or early by one; and a small sweep.

Shapes: D dates, A assets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from memfit_workloads.finance._backtest import (
    BacktestInput,
    BacktestResult,
    BacktestSettings,
    BacktestSummary,
    t_of_mean,
)
from memfit_workloads.finance._matrices import Floats


def shuffle_scores(scores: ArrayLike, rng: np.random.Generator) -> Floats:
    """Return the scores of each date, dealt anew among the assets that have one; shape (D, A)."""
    shuffled = np.array(scores, np.float64)
    for row in shuffled:
        usable = np.flatnonzero(np.isfinite(row))
        row[usable] = row[rng.permutation(usable)]
    return shuffled


def shift_scores(scores: ArrayLike, num_dates: int) -> Floats:
    """Return the scores moved to later dates (``num_dates`` > 0: old news) or to earlier ones (< 0: a look ahead).

    Dates that nothing moves to have no scores.
    """
    shifted = np.roll(np.asarray(scores, np.float64), num_dates, axis=0)
    shifted[slice(num_dates) if num_dates >= 0 else slice(num_dates, None)] = np.nan
    return shifted


@dataclass(frozen=True)
class ShiftTest:
    """Annual gross returns beyond the universe's of scores as they are, ``delayed`` and ``advanced`` by one date.

    ``kept_share`` is ``delayed / annual_active_gross``, NaN unless that is above 0; a signal that lasts for the holding
    period keeps most. ``loss_t`` is the mean of the daily loss by delay over its standard error. ``advanced`` shows
    what a look ahead would look like.
    """

    annual_active_gross: float
    delayed: float
    advanced: float
    kept_share: float
    loss_t: float


@dataclass(frozen=True)
class Controls:
    """A backtest's controls: annual gross returns beyond the universe's of shuffled scores, about 0 in the mean.

    ``shuffled_error`` is of the daily returns of all, taken as independent; ``shuffled_sd`` (divisor n - 1) is what
    luck alone makes of one. ``rank_of_real`` is the share that earned less than the real scores: 0.5 is what luck
    gives.
    """

    num_shuffles: int
    shuffled_mean: float
    shuffled_error: float
    shuffled_sd: float
    rank_of_real: float
    shift: ShiftTest


def run_controls(
    given: BacktestInput, settings: BacktestSettings, *, num_shuffles: int = 10, seed: int = 0
) -> Controls:
    """Run backtests of two shuffles or more, and of delayed and advanced scores, beside the real ones, before costs."""
    rng, real = np.random.default_rng(seed), given.run(settings)
    num_dates = real.days.num_rows
    # A shuffle leaves the universe as it is, so the benchmark is that of the real scores.
    benchmark = real.days["benchmark"].to_numpy()
    shuffled, errors = np.full((2, num_shuffles), np.nan)
    for number in range(num_shuffles):
        gross = given.trade(settings, shuffle_scores(given.scores, rng))[1].gross
        if num_dates > 1:
            active = (gross - benchmark) * settings.dates_per_year
            shuffled[number], errors[number] = active.mean(), active.std(ddof=1) / math.sqrt(num_dates)
    return Controls(
        num_shuffles=num_shuffles,
        shuffled_mean=float(shuffled.mean()),
        shuffled_error=math.sqrt(float((errors**2).mean()) / num_shuffles),
        shuffled_sd=float(shuffled.std(ddof=1)),
        rank_of_real=float((shuffled < real.summary.annual_active_gross).mean()),
        shift=shift_test(given, settings, real=real),
    )


def shift_test(given: BacktestInput, settings: BacktestSettings, *, real: BacktestResult | None = None) -> ShiftTest:
    """Return what scores that are late or early by one date earn beside the real ones, before costs."""
    # The first `horizon` dates and the last one differ in which sleeves are open, whatever the scores.
    inner, actives = slice(settings.horizon, -1), []
    for shift in (0, 1, -1):
        shifted = given.run(settings, scores=shift_scores(given.scores, shift)) if shift or real is None else real
        actives.append((shifted.days["gross"].to_numpy() - shifted.days["benchmark"].to_numpy())[inner])
    year = settings.dates_per_year
    asis, delayed, advanced = (float(daily.mean()) * year if len(daily) else math.nan for daily in actives)
    kept_share = delayed / asis if asis > 0 else math.nan
    return ShiftTest(asis, delayed, advanced, kept_share, t_of_mean(actives[0] - actives[1]))


@dataclass(frozen=True)
class SweepRow:
    """A backtest at one value of ``k_ratio``; ``mean_held`` (assets per sleeve) never falls as it grows."""

    k_ratio: float
    mean_held: float
    summary: BacktestSummary


def sweep(given: BacktestInput, settings: BacktestSettings, k_ratios: Sequence[float]) -> tuple[SweepRow, ...]:
    """Run the backtest at several values of ``k_ratio``, each above 0 and at most 1, in ascending order.

    Every value that is tried is one more chance to be lucky: choose on one fold, and judge on the others.
    """
    ratios = sorted(set(k_ratios))
    found = [given.run(settings.model_copy(update={"k_ratio": ratio})).summary for ratio in ratios]
    return tuple(SweepRow(ratio, one.mean_held, one) for ratio, one in zip(ratios, found, strict=True))
