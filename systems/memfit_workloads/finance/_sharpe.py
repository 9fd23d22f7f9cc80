"""The Sharpe ratio with its standard error, and what is left of it after many trials."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memfit.errors import DataError


@dataclass(frozen=True)
class Sharpe:
    """The Sharpe ratio of a series of returns, per period and ``annual``; a figure that is undefined is NaN.

    ``annual`` takes the periods as uncorrelated. The standard errors allow for the skew and kurtosis of the returns.
    ``probability`` is that of a true ratio above 0, of `probabilistic_sharpe`.
    """

    per_period: float
    annual: float
    standard_error: float
    annual_standard_error: float
    probability: float
    num_periods: int


def sharpe(returns: ArrayLike, *, periods_per_year: float = 252) -> Sharpe:
    """The Sharpe ratio of returns of periods that do not overlap, for example the daily marks of a backtest.

    They are simple returns in excess of the risk-free rate, shape (n,); NaN are left out.

    Raises:
        DataError: If a return is infinite.

    Source: W. Sharpe, The Sharpe ratio (1994); the standard error is that of D. Bailey, M. Lopez de Prado, The Sharpe
        ratio efficient frontier (2012), after E. Mertens (2002).
    """
    from skfolio import measures  # slow to load

    values = _returns(returns)
    num = len(values)
    if _is_undefined(values):
        return Sharpe(math.nan, math.nan, math.nan, math.nan, math.nan, num)
    ratio = float(measures.mean(values) / measures.standard_deviation(values))
    skew, kurtosis = float(measures.skew(values)), float(measures.kurtosis(values))
    variance = (1 - skew * ratio + (kurtosis - 1) / 4 * ratio**2) / (num - 1)
    error = math.sqrt(variance) if variance > 0 else math.nan
    year = math.sqrt(periods_per_year)
    return Sharpe(ratio, ratio * year, error, error * year, probabilistic_sharpe(values), num)


def probabilistic_sharpe(returns: ArrayLike, *, benchmark: float = 0.0) -> float:
    """The probability that the true Sharpe ratio is above a benchmark, a ratio per period; NaN where undefined.

    Source:
        D. Bailey, M. Lopez de Prado, The Sharpe ratio efficient frontier (2012).
    """
    from skfolio import measures

    values = _returns(returns)
    if _is_undefined(values):
        return math.nan
    return float(measures.probabilistic_sharpe_ratio(values, benchmark_sharpe_ratio=benchmark))


def deflated_sharpe(returns: ArrayLike, trial_sharpes: ArrayLike) -> float:
    """The probability that the best of several trials has a true Sharpe ratio above 0; NaN where it is undefined.

    The benchmark of `probabilistic_sharpe` becomes the largest ratio that so many worthless trials would be expected to
    show. Trials that are much alike make it too severe, since each is counted as independent. ``trial_sharpes`` are the
    ratios per period of every trial, the chosen one among them.

    Raises:
        DataError: If a return is infinite, or a trial has no finite ratio, or there is none.

    Source: D. Bailey, M. Lopez de Prado, The deflated Sharpe ratio (2014).
    """
    from skfolio import measures

    trials = np.asarray(trial_sharpes, np.float64).ravel()
    if not len(trials) or not np.isfinite(trials).all():
        raise DataError(
            f"{int((~np.isfinite(trials)).sum())} of {len(trials)} trials have no finite Sharpe ratio.",
            rule="the ratios of all trials say how large the best of them would be by luck.",
            remedy="pass the ratio per period of every trial, and 0 for one that took no position",
        )
    values = _returns(returns)
    return math.nan if _is_undefined(values) else float(measures.deflated_sharpe_ratio(values, trials))


def _is_undefined(values: NDArray[np.float64]) -> bool:
    return len(values) < 3 or bool(values.min() == values.max())


def _returns(returns: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(returns, np.float64).ravel()
    values = values[~np.isnan(values)]
    if np.isinf(values).any():
        raise DataError(
            f"{int(np.isinf(values).sum())} of {len(values)} returns are infinite.",
            rule="a Sharpe ratio is taken over finite returns.",
            remedy="check the prices behind them",
        )
    return values
