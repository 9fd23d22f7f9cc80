"""Controls of a backtest: what it says when the scores are shuffled, late by a date or early by one; and a small sweep.

Shapes: D dates, A assets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from memfit.errors import UsageError
from memfit_workloads.finance._backtest import (
    BacktestInput,
    BacktestResult,
    BacktestSettings,
    BacktestSummary,
    t_of_mean,
)
from memfit_workloads.finance._matrices import Floats


def shuffle_scores(scores: ArrayLike, rng: np.random.Generator) -> Floats:
    """Return the scores of each date, dealt anew among the assets that have one; shape (D, A).

    Example:
        >>> shuffle_scores([[3.0, 3.0, np.nan]], np.random.default_rng(0))
        array([[ 3.,  3., nan]])
    """
    shuffled = np.array(scores, np.float64)
    for row in shuffled:
        usable = np.flatnonzero(np.isfinite(row))
        row[usable] = row[rng.permutation(usable)]
    return shuffled


def shift_scores(scores: ArrayLike, num_dates: int) -> Floats:
    """Return the scores moved to later dates (``num_dates`` > 0: old news) or to earlier ones (< 0: a look ahead).

    Dates that nothing moves to have no scores.

    Example:
        >>> shift_scores([[1.0], [2.0], [3.0]], 1).ravel(), shift_scores([[1.0], [2.0], [3.0]], -1).ravel()
        (array([nan,  1.,  2.]), array([ 2.,  3., nan]))
    """
    score_da = np.asarray(scores, np.float64)
    shifted = np.full_like(score_da, np.nan)
    if num_dates >= 0:
        shifted[num_dates:] = score_da[: max(len(score_da) - num_dates, 0)]
    else:
        shifted[:num_dates] = score_da[-num_dates:]
    return shifted


@dataclass(frozen=True)
class ShiftTest:
    """What scores that are late or early by one date earn, over the dates that all three cover.

    Attributes:
        annual_active_gross: Of the scores as they are: annual gross return beyond the universe's.
        delayed: Of scores that are late by a date. A signal that lasts for the holding period keeps most of it.
        advanced: Of scores that are early by a date, so that they know the next one: far more where scores follow
            prices. It shows what a look ahead would look like.
        kept_share: ``delayed / annual_active_gross``; NaN unless the scores as they are earn more than the universe.
        loss_t: Mean of the daily difference between as they are and delayed, over its standard error.
    """

    annual_active_gross: float
    delayed: float
    advanced: float
    kept_share: float
    loss_t: float


@dataclass(frozen=True)
class Controls:
    """A backtest's controls.

    Attributes:
        num_shuffles: Backtests with shuffled scores.
        shuffled_mean: Mean of their annual gross returns beyond the universe's: about 0.
        shuffled_error: Its standard error, of the daily returns of all of them, taken as independent.
        shuffled_sd: Their standard deviation (divisor n - 1): what luck alone makes of one.
        rank_of_real: Share of them that earned less than the real scores: 0.5 is what luck gives.
        shift: What scores that are late or early by one date earn.
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
    """Run backtests of shuffled, delayed and advanced scores beside the real ones, all before costs.

    Args:
        given: The scores and returns.
        settings: As in the real backtest.
        num_shuffles: How many shuffles, at least 2.
        seed: Of the shuffles.

    Raises:
        UsageError: If ``num_shuffles`` is below 2.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> returns = rng.normal(0.0, 0.02, (300, 30))
        >>> dates = np.arange(300).astype("datetime64[D]")
        >>> oracle = BacktestInput(dates, tuple(map(str, range(30))), returns, returns)
        >>> controls = run_controls(oracle, BacktestSettings(horizon=1), num_shuffles=3)
        >>> controls.rank_of_real, abs(controls.shuffled_mean) < 1, controls.shift.kept_share < 0.1
        (1.0, True, True)
    """
    if num_shuffles < 2:
        raise UsageError(
            f"{num_shuffles} shuffles were asked for.",
            rule="their spread is what luck makes of a backtest, and it takes two.",
            remedy="ask for 2 or more, for example 10",
        )
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
    """Return what scores that are late or early by one date earn beside the real ones, before costs.

    Args:
        given: The scores and returns.
        settings: As in the real backtest.
        real: The backtest of the scores as they are, where it was run before.

    Example:
        >>> returns = np.random.default_rng(0).normal(0.0, 0.02, (300, 30))
        >>> dates = np.arange(300).astype("datetime64[D]")
        >>> yesterday = np.vstack([np.zeros(30), returns[:-1]])  # known at each close, and worth nothing
        >>> test = shift_test(BacktestInput(dates, tuple(map(str, range(30))), yesterday, returns), BacktestSettings())
        >>> test.annual_active_gross < 1 < test.advanced
        True
    """
    # The first `horizon` dates and the last one differ in which sleeves are open, whatever the scores.
    inner, actives = slice(settings.horizon, -1), []
    for shift in (0, 1, -1):
        shifted = given.run(settings, scores=shift_scores(given.scores, shift)) if shift or real is None else real
        actives.append((shifted.days["gross"].to_numpy() - shifted.days["benchmark"].to_numpy())[inner])
    year = settings.dates_per_year
    asis, delayed, advanced = (float(daily.mean()) * year if len(daily) else math.nan for daily in actives)
    return ShiftTest(
        annual_active_gross=asis,
        delayed=delayed,
        advanced=advanced,
        kept_share=delayed / asis if asis > 0 else math.nan,
        loss_t=t_of_mean(actives[0] - actives[1]),
    )


@dataclass(frozen=True)
class SweepRow:
    """A backtest at one value of ``k_ratio``.

    Attributes:
        k_ratio: The share of the assets that is held.
        mean_held: Assets per sleeve: the breadth, which never falls as ``k_ratio`` grows.
        summary: The backtest in numbers.
    """

    k_ratio: float
    mean_held: float
    summary: BacktestSummary


def sweep(given: BacktestInput, settings: BacktestSettings, k_ratios: Sequence[float]) -> tuple[SweepRow, ...]:
    """Run the backtest at several values of ``k_ratio``, in ascending order.

    Every value that is tried is one more chance to be lucky: choose on one fold, and judge on the others.

    Args:
        given: The scores and returns.
        settings: All other settings.
        k_ratios: Shares of the assets, each above 0 and at most 1.

    Raises:
        UsageError: If a share is out of range.

    Example:
        >>> scores = np.tile(np.arange(20.0), (10, 1))
        >>> given = BacktestInput(np.arange(10), tuple(map(str, range(20))), scores, np.zeros((10, 20)))
        >>> [(row.k_ratio, row.mean_held) for row in sweep(given, BacktestSettings(), [0.5, 0.2])]
        [(0.2, 4.0), (0.5, 10.0)]
    """
    if not k_ratios or not all(0 < ratio <= 1 for ratio in k_ratios):
        raise UsageError(
            f"the values of k_ratio are {list(k_ratios)}.",
            rule="k_ratio is the share of the assets that is held: above 0 and at most 1.",
            remedy="for example 0.05, 0.1 and 0.2",
        )
    rows = []
    for ratio in sorted(set(k_ratios)):
        summary = given.run(settings.model_copy(update={"k_ratio": ratio})).summary
        rows.append(SweepRow(k_ratio=ratio, mean_held=summary.mean_held, summary=summary))
    return tuple(rows)
