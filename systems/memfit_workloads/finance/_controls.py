"""Controls of a backtest: what it says when the scores are shuffled or late by a date; and a small sweep.

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


@dataclass(frozen=True)
class Controls:
    """A backtest's controls: annual gross returns beyond the universe's of shuffled scores, about 0 in the mean.

    ``shuffled_error`` is of the daily returns of all, taken as independent. ``rank_of_real`` is the share that earned
    less than the real scores: 0.5 is what luck gives. ``kept_share`` is what scores that are a date late earn, of what
    they earn as they are, NaN unless that is above 0; a signal that lasts for the holding period keeps most. ``loss_t``
    is the mean of the daily loss by delay over its standard error.
    """

    num_shuffles: int
    shuffled_mean: float
    shuffled_error: float
    rank_of_real: float
    kept_share: float
    loss_t: float


def run_controls(
    given: BacktestInput, settings: BacktestSettings, *, num_shuffles: int = 10, seed: int = 0
) -> Controls:
    """Run backtests of shuffled scores and of scores that are a date late, beside the real ones, before costs."""
    rng, real = np.random.default_rng(seed), given.run(settings)
    num_dates, year = real.days.num_rows, settings.dates_per_year
    # A shuffle leaves the universe as it is, so the benchmark is that of the real scores.
    benchmark = real.days["benchmark"].to_numpy()
    shuffled, errors = np.full((2, num_shuffles), np.nan)
    for number in range(num_shuffles):
        gross = given.trade(settings, shuffle_scores(given.scores, rng))["gross"]
        if num_dates > 1:
            active = (gross - benchmark) * year
            shuffled[number], errors[number] = active.mean(), active.std(ddof=1) / math.sqrt(num_dates)
    late = given.run(settings, scores=np.vstack([np.full_like(given.scores[:1], np.nan), given.scores[:-1]]))
    # The first `horizon` dates and the last one differ in which sleeves are open, whatever the scores.
    inner = slice(settings.horizon, -1)
    asis, delayed = ((one.days["gross"].to_numpy() - one.days["benchmark"].to_numpy())[inner] for one in (real, late))
    earns = len(asis) > 0 and asis.mean() > 0
    return Controls(
        num_shuffles=num_shuffles,
        shuffled_mean=float(shuffled.mean()),
        shuffled_error=math.sqrt(float((errors**2).mean()) / num_shuffles),
        rank_of_real=float((shuffled < real.summary.annual_active_gross).mean()),
        kept_share=(float(delayed.mean()) * year) / (float(asis.mean()) * year) if earns else math.nan,
        loss_t=t_of_mean(asis - delayed),
    )


def sweep(given: BacktestInput, settings: BacktestSettings, k_ratios: Sequence[float]) -> dict[float, BacktestSummary]:
    """Run the backtest at several values of ``k_ratio``, each above 0 and at most 1, in ascending order.

    Every value that is tried is one more chance to be lucky: choose on one fold, and judge on the others.
    """
    return {ratio: given.run(settings.model_copy(update={"k_ratio": ratio})).summary for ratio in sorted(set(k_ratios))}
