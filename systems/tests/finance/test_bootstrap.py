"""Bootstrap intervals: repeatable, of the right shape, and of blocks that hold a label's dates."""

from __future__ import annotations

import numpy as np
import pytest

from memfit.errors import DataError, UsageError
from memfit_workloads.finance import bootstrap_interval, diebold_mariano


def overlapping(seed: int, num: int = 240, horizon: int = 5) -> np.ndarray:
    return np.convolve(np.random.default_rng(seed).standard_normal(num + horizon - 1), np.ones(horizon), "valid")


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
