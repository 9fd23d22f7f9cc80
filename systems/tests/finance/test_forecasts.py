"""The paired test beside statsmodels and the formula, and its power."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from statsmodels.tsa import stattools

from memfit.errors import DataError
from memfit_workloads.finance import diebold_mariano, minimal_detectable_effect, minimum_dates, power


def overlapping(seed: int, num: int = 240, horizon: int = 5) -> np.ndarray:
    return np.convolve(np.random.default_rng(seed).standard_normal(num + horizon - 1), np.ones(horizon), "valid")


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
    assert (test.num_dates, test.kernel) == (num, "rectangular")
    assert test.mean / test.standard_error == pytest.approx(test.statistic)


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
    assert (test.p_value, test.standard_error, test.kernel) == (1.0, 0.0, "none")


def test_too_few_dates_and_infinite_differences_are_refused() -> None:
    assert minimum_dates(5) == 60
    with pytest.raises(DataError, match="59 dates are there"):
        diebold_mariano(np.append(overlapping(3, 59), math.nan), 5)
    with pytest.raises(DataError, match="1 of them infinite"):
        diebold_mariano(np.append(overlapping(3, 60), math.inf), 5)


@pytest.mark.parametrize("alpha", [0.05, 0.01])
def test_power_is_that_of_students_noncentral_t(alpha: float) -> None:
    for size in (0.0, 1.0, 2.5, 8.0):
        critical = scipy.stats.t.isf(alpha / 2, 239)
        expected = scipy.stats.nct.sf(critical, 239, size) + scipy.stats.nct.cdf(-critical, 239, size)
        assert power(size * 0.3, 0.3, 240, alpha=alpha) == pytest.approx(expected, abs=1e-9)
        assert power(-size * 0.3, 0.3, 240, alpha=alpha) == power(size * 0.3, 0.3, 240, alpha=alpha)
    assert power(60.0, 0.3, 240) == pytest.approx(1.0)


def test_the_minimal_detectable_effect_is_found_with_the_wanted_power() -> None:
    for wanted in (0.5, 0.8, 0.99):
        effect = minimal_detectable_effect(0.3, 60, alpha=0.01, wanted_power=wanted)
        assert power(effect, 0.3, 60, alpha=0.01) == pytest.approx(wanted, abs=1e-6)
    assert minimal_detectable_effect(0.0, 60) == 0.0
