"""Rates and paired seeds: the intervals beside scipy's, and when there is no verdict."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from memfit.errors import DataError
from memfit.reports import compare_seeds, wilson_interval


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (0, 20), (3, 7), (17, 20), (999, 1000)])
def test_the_interval_of_a_rate_is_that_of_scipy(successes, n):
    expected = scipy.stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert wilson_interval(successes, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_interval_of_a_rate_never_leaves_0_to_1_and_is_all_of_it_without_a_trial():
    ends = [wilson_interval(successes, n) for n in range(1, 40) for successes in (0, n)]
    assert {low for low, _ in ends[::2]} == {0.0} and {high for _, high in ends[1::2]} == {1.0}
    assert wilson_interval(0, 0) == (0.0, 1.0)


def draws(seed: int, n: int, shift: float = 0.0, scale: float = 1.0) -> dict[int, float]:
    return dict(enumerate(np.random.default_rng(seed).normal(shift, scale, n).tolist(), 1))


def test_the_interval_is_that_of_a_paired_t_test():
    a, b = draws(0, 8), draws(1, 8)
    found = compare_seeds(a, b)
    expected = scipy.stats.ttest_rel(list(a.values()), list(b.values())).confidence_interval(0.95)
    assert (found.lower, found.upper) == pytest.approx((expected.low, expected.high))
    assert (found.n, found.difference) == (8, pytest.approx(found.mean_a - found.mean_b))


def test_seeds_that_make_all_the_difference_give_a_verdict_either_way_and_equal_draws_none():
    a, b = draws(0, 6, shift=3.0, scale=0.1), draws(1, 6, scale=0.1)
    assert compare_seeds(a, b).verdict == "A is higher"
    assert compare_seeds(b, a).verdict == "A is lower"
    assert compare_seeds(draws(0, 6), draws(1, 6)).verdict == "no difference shown"


def test_the_interval_holds_the_true_difference_as_often_as_its_level_says():
    found = [compare_seeds(draws(seed, 5, 1.0), draws(seed + 9000, 5)) for seed in range(400)]
    assert 0.92 < sum(one.lower < 1 < one.upper for one in found) / 400 < 0.98


def test_seeds_are_paired_by_number_and_the_others_are_named():
    found = compare_seeds({3: 1.0, 1: 2.0, 8: 9.0}, {1: 1.0, 3: 0.5, 4: 7.0})
    assert dict(found.pairs) == {1: (2.0, 1.0), 3: (1.0, 0.5)}
    assert found.unpaired == (4, 8)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_fewer_than_five_pairs_give_no_verdict(n):
    found = compare_seeds(draws(0, n, shift=50.0), draws(1, n))
    assert found.verdict == "too few pairs"
    assert (found.lower == -math.inf) is (n == 1)


def test_a_number_that_no_seed_changes_gives_no_verdict():
    found = compare_seeds(dict.fromkeys(range(9), 2.0), dict.fromkeys(range(9), 1.0))
    assert found.verdict == "the seed changes nothing"


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [({1: 0.0}, {2: 0.0}, "A has 1, B has 2"), ({}, {2: 0.0}, "A has none"), ({1: math.nan}, {1: 0.0}, "A is nan")],
)
def test_seeds_that_cannot_be_paired_are_refused(a, b, said):
    with pytest.raises(DataError, match=said):
        compare_seeds(a, b)
