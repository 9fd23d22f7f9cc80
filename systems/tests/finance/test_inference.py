"""Tests, errors, intervals and power of daily series, beside statsmodels, the formulas, and what is true."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from statsmodels.regression import linear_model
from statsmodels.tsa import stattools

from memfit.errors import DataError, UsageError
from memfit_workloads.finance import (
    bootstrap_interval,
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


def test_without_overlap_it_is_that_of_independent_dates() -> None:
    values = np.random.default_rng(1).standard_normal(50)
    assert standard_error(values, 1) == pytest.approx(scipy.stats.sem(values))


def test_a_variance_that_is_not_positive_becomes_bartletts() -> None:
    values = np.tile([1.0, -1.0], 20) + np.linspace(0, 0.1, 40)
    result = standard_error(values, 2)
    assert result == pytest.approx(by_regression(values, 3, "bartlett") / factor(40, 2))
    assert result > 0


def test_it_is_right_in_the_mean_for_labels_that_overlap() -> None:
    means, errors = [], []
    for seed in range(300):
        values = overlapping(seed, 240, 5)
        means.append(values.mean())
        errors.append(summarize(values, horizon=5).standard_error)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(means), rel=0.12)
    # Taken as independent, they would be too small by about the square root of 5.
    naive = summarize(overlapping(0, 240, 5), horizon=1).standard_error
    assert errors[0] > 1.5 * naive


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


def test_a_sharpe_ratio_of_too_few_or_equal_returns_is_undefined_and_of_infinite_ones_refused() -> None:
    for returns in ([], [0.01, 0.02], [0.01] * 10):
        assert all(map(math.isnan, sharpe(returns)))
    with pytest.raises(DataError, match="1 of 2 returns are infinite"):
        sharpe([0.1, math.inf])


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


@pytest.mark.proves("S0-38", "C-40")
@pytest.mark.slow
@pytest.mark.parametrize(("num", "horizon"), [(240, 1), (240, 5), (240, 10), (1000, 5)])
def test_without_a_difference_it_rejects_3_to_8_percent_and_others_far_more(num: int, horizon: int) -> None:
    series = [overlapping(seed, num, horizon) for seed in range(1000)]
    tests = [diebold_mariano(values, horizon) for values in series]
    assert 0.03 <= np.mean([test.p_value < 0.05 for test in tests]) <= 0.08
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


def test_a_to_b_is_b_to_a_with_the_other_sign() -> None:
    forward, backward = diebold_mariano(overlapping(2), 5), diebold_mariano(-overlapping(2), 5)
    assert forward.statistic == -backward.statistic
    assert forward.p_value == backward.p_value


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_equal_differences_show_nothing(value: float) -> None:
    test = diebold_mariano(np.full(60, value), 5)
    assert math.isnan(test.statistic)
    assert (test.p_value, test.standard_error) == (1.0, 0.0)


def test_too_few_dates_and_infinite_differences_are_refused() -> None:
    assert minimum_dates(5) == 60
    with pytest.raises(DataError, match="59 dates are there"):
        diebold_mariano(np.append(overlapping(3, 59), math.nan), 5)
    with pytest.raises(DataError, match="1 of them infinite"):
        diebold_mariano(np.append(overlapping(3, 60), math.inf), 5)


def test_the_same_seed_gives_the_same_interval_and_another_one_nearly() -> None:
    first, again, other = (bootstrap_interval(overlapping(0), 5, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert other.upper - other.lower == pytest.approx(first.upper - first.lower, rel=0.15)


def test_it_lies_around_the_mean_and_moves_with_it() -> None:
    values = overlapping(1)
    here, there = bootstrap_interval(values, 5), bootstrap_interval(values * 2 + 3, 5)
    assert (here.lower + here.upper) / 2 == pytest.approx(values.mean())
    assert there.lower == pytest.approx(2 * here.lower + 3)
    assert there.upper == pytest.approx(2 * here.upper + 3)


def test_a_higher_level_is_wider_and_it_is_somewhat_wider_than_students() -> None:
    values = overlapping(2)
    widths = [
        found.upper - found.lower for found in (bootstrap_interval(values, 5, level) for level in (0.8, 0.95, 0.99))
    ]
    assert widths == sorted(widths)
    assert 1.0 < widths[1] / (2 * 1.97 * diebold_mariano(values, 5).standard_error) < 1.6


def test_blocks_hold_the_dates_of_a_label_and_at_most_an_eighth_of_all() -> None:
    independent = np.random.default_rng(3).standard_normal(240)
    assert bootstrap_interval(independent, 5, num_resamples=100).block_length == 5
    assert bootstrap_interval(independent, 20, num_resamples=100).block_length == 20
    trending = np.cumsum(np.random.default_rng(3).standard_normal(40))
    assert bootstrap_interval(trending, 1, num_resamples=100).block_length == 5


def test_undefined_dates_are_left_out() -> None:
    values = overlapping(4, 100)
    assert bootstrap_interval(np.append(values, np.nan), 5) == bootstrap_interval(values, 5)


def test_equal_differences_have_an_interval_of_one_point() -> None:
    found = bootstrap_interval(np.full(60, 0.25), 5)
    assert (found.lower, found.upper) == (0.25, 0.25)


def test_differences_that_are_nearly_all_equal_have_a_wide_interval() -> None:
    values = np.zeros(60)
    values[7] = 1.0  # blocks without it tell nothing
    found = bootstrap_interval(values, 1)
    assert found.lower < 0 < found.upper


def test_levels_and_dates_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match=r"the level is 95"):
        bootstrap_interval(overlapping(0), 5, 95)
    with pytest.raises(DataError, match="59 dates are there"):
        bootstrap_interval(overlapping(0, 59), 5)


@pytest.mark.proves("S0-39")
def test_with_many_independent_dates_it_is_that_of_the_normal_distribution() -> None:
    values = np.random.default_rng(5).standard_normal(2000)
    found = bootstrap_interval(values, 1, num_resamples=4000)
    assert (found.upper - found.lower) / 2 == pytest.approx(1.96 * values.std() / np.sqrt(2000), rel=0.07)
