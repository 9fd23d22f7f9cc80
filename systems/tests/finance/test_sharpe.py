"""Sharpe ratios beside the papers' formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from memfit.errors import DataError
from memfit_workloads.finance import deflated_sharpe, probabilistic_sharpe, sharpe

pytest.importorskip("skfolio")

RETURNS = np.random.default_rng(0).standard_t(5, 500) * 0.01 + 0.001


def normal_score(ratio: float, returns: np.ndarray) -> float:
    """The ratio of sample and benchmark in standard errors, by the formula of Bailey and Lopez de Prado."""
    sample = returns.mean() / returns.std(ddof=1)
    skew, kurtosis = scipy.stats.skew(returns), scipy.stats.kurtosis(returns, fisher=False)
    variance = 1 - skew * sample + (kurtosis - 1) / 4 * sample**2
    return (sample - ratio) * math.sqrt(len(returns) - 1) / math.sqrt(variance)


@pytest.mark.proves("S2-23")
def test_the_ratio_is_per_period_and_annual_with_its_standard_error() -> None:
    found = sharpe(np.append(RETURNS, math.nan), periods_per_year=252)
    ratio = RETURNS.mean() / RETURNS.std(ddof=1)
    assert found.per_period == pytest.approx(ratio)
    assert found.annual == pytest.approx(ratio * math.sqrt(252))
    assert found.standard_error == pytest.approx(ratio / normal_score(0.0, RETURNS), rel=0.02)
    assert found.annual_standard_error == pytest.approx(found.standard_error * math.sqrt(252))
    assert found.num_periods == 500


def test_the_standard_error_is_right_in_the_mean() -> None:
    rng = np.random.default_rng(1)
    found = [sharpe(rng.standard_normal(250) * 0.01 + 0.001) for _ in range(400)]
    assert np.mean([one.standard_error for one in found]) == pytest.approx(
        np.std([one.per_period for one in found]), rel=0.1
    )


def test_the_probability_is_the_papers() -> None:
    assert probabilistic_sharpe(RETURNS) == pytest.approx(scipy.stats.norm.cdf(normal_score(0.0, RETURNS)), abs=1e-3)
    assert sharpe(RETURNS).probability == probabilistic_sharpe(RETURNS)
    assert probabilistic_sharpe(RETURNS, benchmark=0.2) == pytest.approx(
        scipy.stats.norm.cdf(normal_score(0.2, RETURNS)), abs=1e-3
    )


def test_the_deflated_ratio_is_measured_against_the_best_of_worthless_trials() -> None:
    trials = np.random.default_rng(2).standard_normal(50) * 0.03
    spread, count = trials.std(ddof=1), len(trials)
    quantile = scipy.stats.norm.ppf
    best = spread * (
        (1 - np.euler_gamma) * quantile(1 - 1 / count) + np.euler_gamma * quantile(1 - 1 / (count * math.e))
    )
    expected = scipy.stats.norm.cdf(normal_score(best, RETURNS))
    assert deflated_sharpe(RETURNS, trials) == pytest.approx(expected, abs=2e-3)
    assert deflated_sharpe(RETURNS, trials) < probabilistic_sharpe(RETURNS)
    assert deflated_sharpe(RETURNS, trials[:1]) == probabilistic_sharpe(RETURNS)


def test_too_few_or_equal_returns_are_undefined() -> None:
    for returns in ([], [0.01, 0.02], [0.01] * 10):
        assert math.isnan(sharpe(returns).per_period)
        assert math.isnan(probabilistic_sharpe(returns))
        assert math.isnan(deflated_sharpe(returns, [0.1]))


def test_infinite_returns_and_trials_without_a_ratio_are_refused() -> None:
    with pytest.raises(DataError, match="1 of 2 returns are infinite"):
        sharpe([0.1, math.inf])
    with pytest.raises(DataError, match="1 of 2 trials"):
        deflated_sharpe(RETURNS, [0.1, math.nan])
    with pytest.raises(DataError, match="0 of 0 trials"):
        deflated_sharpe(RETURNS, [])
