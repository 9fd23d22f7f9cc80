"""Tests, errors and intervals of daily series, beside statsmodels, the formulas, and what is true."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from statsmodels.regression import linear_model
from statsmodels.tsa import stattools

from memfit.errors import DataError, UsageError
from memfit_workloads.finance import (
    diebold_mariano,
    minimum_dates,
    sharpe,
    standard_error,
    summarize,
)


def overlapping(seed: int, num: int = 240, horizon: int = 5) -> np.ndarray:
    return np.convolve(np.random.default_rng(seed).standard_normal(num + horizon - 1), np.ones(horizon), "valid")


def by_regression(values: np.ndarray, lags: int, kernel: str) -> float:
    fit = linear_model.OLS(values, np.ones_like(values)).fit(
        cov_type="HAC", cov_kwds={"maxlags": lags, "kernel": kernel}
    )
    return float(fit.bse[0])


def factor(num: int, horizon: int) -> float:
    return math.sqrt((num + 1 - 2 * horizon + horizon * (horizon - 1) / num) / num)


def test_a_variance_that_is_not_positive_becomes_bartletts() -> None:
    values = np.tile([1.0, -1.0], 20) + np.linspace(0, 0.1, 40)
    result = standard_error(values, 2)
    assert result == pytest.approx(by_regression(values, 3, "bartlett") / factor(40, 2))
    assert result > 0


def test_too_few_or_equal_dates_have_no_estimate() -> None:
    assert math.isnan(summarize([1.0, 2.0, 3.0], horizon=2).standard_error)
    assert math.isnan(summarize([1.0], horizon=1).standard_error)
    assert standard_error(np.full(10, 0.1), 3) == 0.0


def test_undefined_dates_are_counted_and_left_out() -> None:
    series = [0.5, math.nan, -0.1, 0.2, math.nan, 0.4]
    summary = summarize(series, horizon=2)
    assert (summary.num_dates, summary.num_undefined) == (4, 2)
    assert summary.standard_error == summarize([0.5, -0.1, 0.2, 0.4], horizon=2).standard_error
    assert summary.mean == pytest.approx(0.25)


def test_a_horizon_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="horizon is 0"):
        summarize([0.1, 0.2], horizon=0)


@pytest.mark.proves("S2-23")
def test_the_sharpe_ratio_and_its_error_are_the_papers() -> None:
    returns = np.random.default_rng(0).standard_t(5, 500) * 0.01 + 0.001
    ratio = returns.mean() / returns.std(ddof=1)
    skew, kurtosis = scipy.stats.skew(returns), scipy.stats.kurtosis(returns, fisher=False)
    error = math.sqrt((1 - skew * ratio + (kurtosis - 1) / 4 * ratio**2) / 499)
    expected = ratio * math.sqrt(252), error * math.sqrt(252)
    assert sharpe(np.append(returns, math.nan), periods_per_year=252) == pytest.approx(expected)
    rng = np.random.default_rng(1)
    ratios, errors = zip(*[sharpe(rng.standard_normal(250) * 0.01 + 0.001) for _ in range(400)], strict=True)
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.1)  # it is right in the mean


def test_a_sharpe_ratio_of_too_few_or_equal_returns_is_undefined() -> None:
    for returns in ([], [0.01, 0.02], [0.01] * 10):
        assert all(map(math.isnan, sharpe(returns)))


@pytest.mark.proves("S0-38")
def test_it_is_the_formula_of_harvey_leybourne_and_newbold() -> None:
    num, horizon = 240, 5
    values = overlapping(0)
    deviations = values - values.mean()
    autocovariances = [(deviations[lag:] * deviations[: num - lag]).sum() / num for lag in range(horizon)]
    variance = (autocovariances[0] + 2 * sum(autocovariances[1:])) / num
    factor = math.sqrt((num + 1 - 2 * horizon + horizon * (horizon - 1) / num) / num)
    expected = values.mean() / math.sqrt(variance) * factor
    test = diebold_mariano(values, horizon)
    assert test.statistic == pytest.approx(expected)
    assert test.p_value == pytest.approx(2 * scipy.stats.t.sf(abs(expected), num - 1))
    assert test.num_dates == num
    assert test.mean / test.standard_error == pytest.approx(test.statistic)


@pytest.mark.proves("S0-38", "S0-39", "C-40")
@pytest.mark.slow
@pytest.mark.parametrize(("num", "horizon"), [(240, 1), (240, 5), (240, 10)])
def test_without_a_difference_3_to_8_percent_are_rejected_the_interval_holds_0_and_others_reject_far_more(
    num: int, horizon: int
) -> None:
    series = [overlapping(seed, num, horizon) for seed in range(1000)]
    tests = [diebold_mariano(values, horizon) for values in series]
    assert 0.03 <= np.mean([test.p_value < 0.05 for test in tests]) <= 0.08
    assert 0.90 <= np.mean([test.lower <= 0 <= test.upper for test in tests]) <= 0.97
    by_root_n = [2 * scipy.stats.norm.sf(abs(test.statistic) * math.sqrt(num)) for test in tests]
    assert np.mean(np.array(by_root_n) < 0.05) > 0.8
    if horizon > 1:
        assert np.mean([scipy.stats.ttest_1samp(values, 0).pvalue < 0.05 for values in series]) > 0.25


@pytest.mark.proves("C-40")
def test_without_overlap_it_is_statsmodels_test() -> None:
    differences = np.random.default_rng(1).standard_normal(100) + 0.1
    zeros = np.zeros(100)
    expected = stattools.diebold_mariano_test(
        zeros, differences, zeros, criterion=lambda _, forecast: forecast, lags=0, harvey_adj=True
    )
    test = diebold_mariano(differences, 1)
    assert test.statistic == pytest.approx(expected.statistic)
    assert test.p_value == pytest.approx(expected.pvalue)


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_equal_differences_show_nothing(value: float) -> None:
    test = diebold_mariano(np.full(60, value), 5)
    assert math.isnan(test.statistic)
    assert (test.p_value, test.standard_error, test.lower) == (1.0, 0.0, test.upper)


def test_the_interval_is_students_at_the_level() -> None:
    values = np.random.default_rng(1).standard_normal(100)
    found = diebold_mariano(values, 1, level=0.9)
    assert (found.lower, found.upper) == pytest.approx(scipy.stats.ttest_1samp(values, 0).confidence_interval(0.9))
    with pytest.raises(UsageError, match="the level is 95"):
        diebold_mariano(values, 1, level=95)


def test_too_few_dates_and_infinite_differences_are_refused() -> None:
    assert minimum_dates(5) == 60
    with pytest.raises(DataError, match="59 dates are there"):
        diebold_mariano(np.append(overlapping(3, 59), math.nan), 5)
    with pytest.raises(DataError, match="1 of them infinite"):
        diebold_mariano(np.append(overlapping(3, 60), math.inf), 5)
