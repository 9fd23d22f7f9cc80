"""Standard errors of daily series beside statsmodels' regression on a constant, and beside what is true."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from statsmodels.regression import linear_model

from memfit.errors import DataError, UsageError
from memfit_workloads.finance import sharpe, slow_variation, standard_error, summarize


def overlapping(seed: int, num: int, horizon: int) -> np.ndarray:
    return np.convolve(np.random.default_rng(seed).standard_normal(num + horizon - 1), np.ones(horizon), "valid")


def by_regression(values: np.ndarray, lags: int, kernel: str) -> float:
    fit = linear_model.OLS(values, np.ones_like(values)).fit(
        cov_type="HAC", cov_kwds={"maxlags": lags, "kernel": kernel}
    )
    return float(fit.bse[0])


def factor(num: int, horizon: int) -> float:
    return math.sqrt((num + 1 - 2 * horizon + horizon * (horizon - 1) / num) / num)


@pytest.mark.parametrize("horizon", [2, 5, 20])
def test_it_is_statsmodels_rectangular_one_with_the_small_sample_factor(horizon: int) -> None:
    values = overlapping(0, 240, horizon)
    expected = by_regression(values, horizon - 1, "uniform") / factor(240, horizon)
    assert standard_error(values, horizon) == (pytest.approx(expected), "rectangular")


def test_without_overlap_it_is_that_of_independent_dates() -> None:
    values = np.random.default_rng(1).standard_normal(50)
    assert standard_error(values, 1)[0] == pytest.approx(scipy.stats.sem(values))


def test_a_variance_that_is_not_positive_becomes_bartletts() -> None:
    values = np.tile([1.0, -1.0], 20) + np.linspace(0, 0.1, 40)
    result, kernel = standard_error(values, 2)
    assert kernel == "bartlett"
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
    assert standard_error(np.full(10, 0.1), 3) == (0.0, "none")


def test_undefined_dates_are_counted_and_left_out() -> None:
    series = [0.5, math.nan, -0.1, 0.2, math.nan, 0.4]
    summary = summarize(series, horizon=2)
    assert (summary.num_dates, summary.num_undefined) == (4, 2)
    assert summary.standard_error == summarize([0.5, -0.1, 0.2, 0.4], horizon=2).standard_error
    assert summary.mean == pytest.approx(0.25)


def test_a_horizon_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="horizon is 0"):
        summarize([0.1, 0.2], horizon=0)


@pytest.mark.parametrize(("num", "horizon"), [(60, 1), (60, 5), (240, 5), (1000, 5), (1000, 20)])
def test_a_steady_series_is_seldom_called_slow(num: int, horizon: int) -> None:
    found = [slow_variation(overlapping(seed, num, horizon), horizon) for seed in range(200)]
    assert np.mean([one.is_shown for one in found]) < 0.1
    assert np.mean([one.statistic for one in found]) == pytest.approx(0, abs=0.35)


def test_the_error_factor_is_how_much_larger_the_true_error_is() -> None:
    rng = np.random.default_rng(0)
    starts = 100 + np.arange(200) * 50
    kept = np.convolve(rng.standard_normal(20_000), 0.9 ** np.arange(200), "valid") * math.sqrt(1 - 0.81)
    series = [kept[start : start + 1000] + rng.standard_normal(1000) for start in starts if start + 1000 < len(kept)]
    # The long-run variance is 1 + (1 + 0.9) / (1 - 0.9) = 20, of which the error at a horizon of 1 sees 2.
    factors = [slow_variation(values, 1).error_factor for values in series]
    assert np.mean(factors) == pytest.approx(math.sqrt(10), rel=0.1)


def test_equal_values_are_not_slow() -> None:
    found = slow_variation(np.full(100, 0.1), 5)
    assert not found.is_shown and math.isnan(found.statistic) and math.isnan(found.error_factor)


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
