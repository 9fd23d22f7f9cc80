"""The interval of a rate, beside scipy's."""

from __future__ import annotations

import pytest
import scipy.stats

from memfit.errors import UsageError
from memfit.evaluation import wilson_interval


@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (0, 20), (3, 7), (17, 20), (999, 1000)])
def test_the_interval_of_a_rate_is_that_of_scipy(successes, n, level):
    expected = scipy.stats.binomtest(successes, n).proportion_ci(level, method="wilson")
    assert wilson_interval(successes, n, level) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_interval_of_a_rate_never_leaves_0_to_1_and_is_all_of_it_without_a_trial():
    ends = [wilson_interval(successes, n) for n in range(1, 40) for successes in (0, n)]
    assert {low for low, _ in ends[::2]} == {0.0} and {high for _, high in ends[1::2]} == {1.0}
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("given", "said"), [((2, 1), "successes is 2"), ((-1, 1), "-1"), ((1, 2.5), "2.5"), ((1, 2, 1.0), "level is 1.0")]
)
def test_a_rate_that_cannot_be_is_refused(given, said):
    with pytest.raises(UsageError, match=said):
        wilson_interval(*given)
