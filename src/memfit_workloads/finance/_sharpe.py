"""The Sharpe ratio with its standard error, and what is left of it after many trials."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memfit.errors import DataError, MissingExtraError


@dataclass(frozen=True)
class Sharpe:
    """The Sharpe ratio of a series of returns. A figure that is undefined is NaN.

    Attributes:
        per_period: Mean return over the standard deviation (divisor ``n - 1``), per period.
        annual: ``per_period * sqrt(periods_per_year)``, which takes the periods as uncorrelated.
        standard_error: Of ``per_period``, with the skew and kurtosis of the returns.
        annual_standard_error: Of ``annual``.
        probability: That the true ratio is above 0, of `probabilistic_sharpe`.
        num_periods: Number of returns.
    """

    per_period: float
    annual: float
    standard_error: float
    annual_standard_error: float
    probability: float
    num_periods: int


def sharpe(returns: ArrayLike, *, periods_per_year: float = 252) -> Sharpe:
    """The Sharpe ratio of returns of periods that do not overlap, for example the daily marks of a backtest.

    Returns over h dates taken every date are not such: they are correlated, and sqrt(periods_per_year) would be wrong.

    Args:
        returns: Simple returns in excess of the risk-free rate, one per period, shape (n,); NaN are left out.
        periods_per_year: 252 for trading days.

    Raises:
        DataError: If a return is infinite.
        MissingExtraError: If skfolio is not installed, or too old.

    Source:
        W. Sharpe, The Sharpe ratio (1994); the standard error is that of D. Bailey, M. Lopez de Prado, The Sharpe
        ratio efficient frontier (2012), after E. Mertens (2002).

    Example:
        >>> found = sharpe([0.01, -0.005, 0.02, 0.0, 0.005])
        >>> round(found.per_period, 3), round(found.annual, 2), found.num_periods
        (0.624, 9.9, 5)
    """
    values = _returns(returns)
    measures = _measures()
    num = len(values)
    if num < 3 or values.min() == values.max():
        return Sharpe(math.nan, math.nan, math.nan, math.nan, math.nan, num)
    ratio = float(measures.mean(values) / measures.standard_deviation(values))
    skew, kurtosis = float(measures.skew(values)), float(measures.kurtosis(values))
    variance = (1 - skew * ratio + (kurtosis - 1) / 4 * ratio**2) / (num - 1)
    error = math.sqrt(variance) if variance > 0 else math.nan
    year = math.sqrt(periods_per_year)
    return Sharpe(ratio, ratio * year, error, error * year, probabilistic_sharpe(values), num)


def probabilistic_sharpe(returns: ArrayLike, *, benchmark: float = 0.0) -> float:
    """The probability that the true Sharpe ratio is above a benchmark, by skfolio.

    Args:
        returns: As in `sharpe`, shape (n,); NaN are left out.
        benchmark: A Sharpe ratio per period, not annualised.

    Returns:
        From 0 to 1; NaN with fewer than 3 returns or where all are equal.

    Raises:
        DataError: If a return is infinite.
        MissingExtraError: If skfolio is not installed, or too old.

    Source:
        D. Bailey, M. Lopez de Prado, The Sharpe ratio efficient frontier (2012).

    Example:
        >>> round(probabilistic_sharpe([0.01, -0.005, 0.02, 0.0, 0.005]), 2)
        0.91
    """
    values = _returns(returns)
    if len(values) < 3 or values.min() == values.max():
        return math.nan
    return float(_measures().probabilistic_sharpe_ratio(values, benchmark_sharpe_ratio=benchmark))


def deflated_sharpe(returns: ArrayLike, trial_sharpes: ArrayLike) -> float:
    """The probability that the best of several trials has a true Sharpe ratio above 0, by skfolio.

    The benchmark of `probabilistic_sharpe` becomes the largest ratio that so many worthless trials would be expected to
    show. Trials that are much alike make it too severe, since each is counted as independent.

    Args:
        returns: Of the trial that was chosen, as in `sharpe`.
        trial_sharpes: The Sharpe ratio per period of every trial, the chosen one among them; shape (num_trials,).

    Returns:
        From 0 to 1; at least 0.95 is usually asked for. NaN with fewer than 3 returns or where all are equal.

    Raises:
        DataError: If a return is infinite, or a trial has no finite ratio, or there is none.
        MissingExtraError: If skfolio is not installed, or too old.

    Source:
        D. Bailey, M. Lopez de Prado, The deflated Sharpe ratio (2014).

    Example:
        >>> returns = [0.01, -0.005, 0.02, 0.0, 0.005] * 20
        >>> round(deflated_sharpe(returns, [0.6, 0.2, -0.3, 0.1]), 3) <= round(probabilistic_sharpe(returns), 3)
        True
    """
    trials = np.asarray(trial_sharpes, np.float64).ravel()
    if not len(trials) or not np.isfinite(trials).all():
        raise DataError(
            f"{int((~np.isfinite(trials)).sum())} of {len(trials)} trials have no finite Sharpe ratio.",
            rule="the ratios of all trials say how large the best of them would be by luck.",
            remedy="pass the ratio per period of every trial, and 0 for one that took no position",
        )
    values = _returns(returns)
    if len(values) < 3 or values.min() == values.max():
        return math.nan
    return float(_measures().deflated_sharpe_ratio(values, trials))


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


def _measures() -> Any:
    try:
        from skfolio import measures
    except ImportError as error:
        raise MissingExtraError.of("skfolio", "evaluation", "a Sharpe ratio's distribution") from error
    if not hasattr(measures, "deflated_sharpe_ratio"):
        raise MissingExtraError.of("skfolio 1.12.2 or newer", "evaluation", "a Sharpe ratio's distribution")
    return measures
