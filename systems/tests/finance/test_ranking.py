"""The metrics of a date beside brute force and alphalens."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from memfit.errors import DataError, UsageError
from memfit_workloads.finance import positive_rate, precision_at_k, quantile_spread

NAN = math.nan


@st.composite
def score_and_target_pairs(draw: st.DrawFn, max_assets: int = 6) -> tuple[np.ndarray, np.ndarray]:
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, max_assets)))
    # Few distinct values make ties; NaN makes absent assets.
    scores = hnp.arrays(np.float64, shape, elements=st.sampled_from([-2.0, 0.5, 1.0, 3.0, NAN]))
    targets = hnp.arrays(np.float64, shape, elements=st.sampled_from([-0.5, -0.25, 0.0, 0.25, 0.5, NAN]))
    return draw(scores), draw(targets)


def mean_over_orders(scores: np.ndarray, targets: np.ndarray, figure) -> float:
    """The mean of a figure of the targets in descending order of scores, over all orders of equal scores."""
    figures = []
    for order in itertools.permutations(range(len(scores))):
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order)):
            figures.append(figure(targets[list(order)]))
    return float(np.mean(figures))


def by_brute_force(pair, figure, *, least):
    result = []
    for score, target in zip(*pair, strict=True):
        both = ~(np.isnan(score) | np.isnan(target))
        result.append(mean_over_orders(score[both], target[both], figure) if both.sum() >= least else NAN)
    return np.array(result)


@settings(max_examples=60, deadline=None)
@given(score_and_target_pairs(), st.integers(1, 4))
def test_precision_is_the_mean_over_all_orders_of_equal_scores(pair, k: int) -> None:
    expected = by_brute_force(pair, lambda targets: (targets[:k] > 0).mean(), least=k)
    np.testing.assert_allclose(precision_at_k(*pair, k=k), expected, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(score_and_target_pairs(), st.integers(2, 3))
def test_the_spread_is_the_mean_over_all_orders_of_equal_scores(pair, num_quantiles: int) -> None:
    def spread(targets: np.ndarray) -> float:
        size = len(targets) // num_quantiles
        return targets[:size].mean() - targets[-size:].mean()

    expected = by_brute_force(pair, spread, least=num_quantiles)
    np.testing.assert_allclose(quantile_spread(*pair, num_quantiles=num_quantiles), expected, atol=1e-12)


def test_the_spread_equals_alphalens_where_the_groups_divide() -> None:
    try:
        import alphalens.performance
        import alphalens.utils
        import pandas as pd
    except (ImportError, Warning) as error:
        pytest.skip(f"alphalens cannot be imported: {error}")
    rng = np.random.default_rng(0)
    scores, targets = rng.standard_normal((2, 8, 30))
    dates = pd.date_range("2024-01-01", periods=8, name="date")
    index = pd.MultiIndex.from_product([dates, [f"A{i:02d}" for i in range(30)]], names=["date", "asset"])
    data = pd.DataFrame({"1D": targets.ravel(), "factor": scores.ravel()}, index=index)
    data["factor_quantile"] = alphalens.utils.quantize_factor(data, quantiles=5)
    means, _ = alphalens.performance.mean_return_by_quantile(data, by_date=True, demeaned=False)
    spread = means.loc[5, "1D"] - means.loc[1, "1D"]
    np.testing.assert_allclose(quantile_spread(scores, targets), spread.to_numpy(), atol=1e-12)


def test_random_scores_have_no_spread() -> None:
    rng = np.random.default_rng(2)
    targets = rng.standard_normal((4000, 30)) + rng.standard_normal((4000, 1))  # whole days go up or down
    scores = rng.standard_normal(targets.shape)
    figure = quantile_spread(scores, targets)
    assert abs(figure.mean()) < 4 * figure.std() / math.sqrt(len(figure))
    assert figure.std() > 0.01


def test_a_ratio_selects_of_the_assets_that_are_eligible_on_the_date() -> None:
    scores = [[6, 5, 4, 3, 2, 1], [6, 5, 4, NAN, NAN, NAN], [6, NAN, NAN, NAN, NAN, NAN]]
    targets = [[1, 1, -1, -1, -1, -1], [1, -1, -1, 1, 1, 1], [1.0] * 6]
    # A quarter of 6 is 1.5, rounded up to 2; of 3 it is 0.75, rounded to 1; of 1 it is at least 1.
    np.testing.assert_allclose(precision_at_k(scores, targets, k_ratio=0.25), [1.0, 1.0, 1.0])
    np.testing.assert_allclose(precision_at_k(scores, targets, k_ratio=0.5), [2 / 3, 0.5, 1.0])


def test_what_cannot_be_selected_is_undefined() -> None:
    scores, targets = [[2, 1, NAN], [NAN] * 3], [[0.1, -0.1, 0.2], [0.1] * 3]
    np.testing.assert_allclose(precision_at_k(scores, targets, k=2), [0.5, NAN])
    assert np.isnan(precision_at_k(scores, targets, k=3)).all()
    assert np.isnan(quantile_spread(scores, targets, num_quantiles=3)).all()
    np.testing.assert_allclose(positive_rate(scores, targets), [0.5, NAN])
    for metric in (positive_rate, quantile_spread):
        assert metric(np.empty((0, 4)), np.empty((0, 4))).shape == (0,)
        assert np.isnan(metric(np.empty((2, 0)), np.empty((2, 0)))).all()


def test_a_return_of_zero_is_not_positive() -> None:
    assert precision_at_k([[2, 1]], [[0.0, 0.1]], k=1).tolist() == [0.0]
    assert positive_rate([[2, 1]], [[0.0, 0.1]]).tolist() == [0.5]


@pytest.mark.parametrize("size", [{}, {"k": 1, "k_ratio": 0.5}, {"k": 0}, {"k_ratio": 0.0}, {"k_ratio": 1.5}])
def test_a_size_that_says_nothing_or_too_much_is_refused(size) -> None:
    with pytest.raises(UsageError, match="exactly one"):
        precision_at_k([[1.0]], [[1.0]], **size)


def test_shapes_infinite_returns_and_one_quantile_are_refused() -> None:
    with pytest.raises(DataError, match=r"positive_rate takes two arrays"):
        positive_rate(np.zeros((2, 3)), np.zeros((3, 2)))
    with pytest.raises(DataError, match="1 targets are infinite"):
        quantile_spread([[1.0, 2.0]], [[math.inf, 0.1]], num_quantiles=2)
    with pytest.raises(UsageError, match="num_quantiles is 1"):
        quantile_spread([[1.0, 2.0]], [[0.2, 0.1]], num_quantiles=1)
