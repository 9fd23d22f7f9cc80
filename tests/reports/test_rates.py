"""The interval of a rate, beside scipy's."""

from __future__ import annotations

import pytest
import scipy.stats

from memfit.reports import wilson_interval


@pytest.mark.proves("S2-01")
@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (0, 20), (3, 7), (17, 20), (999, 1000)])
def test_the_interval_of_a_rate_is_that_of_scipy(successes, n):
    expected = scipy.stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert wilson_interval(successes, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_interval_of_a_rate_never_leaves_0_to_1_and_is_all_of_it_without_a_trial():
    ends = [wilson_interval(successes, n) for n in range(1, 40) for successes in (0, n)]
    assert {low for low, _ in ends[::2]} == {0.0} and {high for _, high in ends[1::2]} == {1.0}
    assert wilson_interval(0, 0) == (0.0, 1.0)
