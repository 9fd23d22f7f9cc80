"""The metrics of a date beside scipy, brute force and alphalens."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from memfit.errors import DataError, UsageError
from memfit_workloads.finance import positive_rate, precision_at_k, quantile_spread, rank_ic, summarize

NAN = math.nan


@st.composite
def pairs(draw: st.DrawFn, values: tuple[float, ...], max_assets: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and targets of few distinct values, which make ties; NaN makes absent assets."""
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, max_assets)))
    arrays = hnp.arrays(draw(st.sampled_from([np.float32, np.float64])), shape, elements=st.sampled_from(values))
    return draw(arrays), draw(arrays)


def by_date(pair, figure, least: int) -> np.ndarray:
    """A figure of each date's assets that have both, NaN where fewer do."""
    both = ~(np.isnan(pair[0]) | np.isnan(pair[1]))
    rows = zip(*pair, both, strict=True)
    return np.array([figure(score[on], target[on]) if on.sum() >= least else NAN for score, target, on in rows])


def over_orders(figure):
    """The mean of a figure of the targets in descending order of scores, over all orders of equal scores."""

    def mean(scores: np.ndarray, targets: np.ndarray) -> float:
        orders = map(list, itertools.permutations(range(len(scores))))
        return float(np.mean([figure(targets[one]) for one in orders if (np.diff(scores[one]) <= 0).all()]))

    return mean


def spearman(scores: np.ndarray, targets: np.ndarray) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.stats.ConstantInputWarning)  # then it is undefined
        return scipy.stats.spearmanr(scores, targets).statistic


@settings(max_examples=200, deadline=None)
@given(pairs((-math.inf, -1.5, 0.0, -0.0, 1e-30, 0.25, 2.0, math.inf, NAN), 12))
def test_the_rank_ic_equals_scipys_spearman_with_ties_and_absent_assets(pair) -> None:
    np.testing.assert_allclose(rank_ic(*pair), by_date(pair, spearman, 2), atol=1e-12)


def test_the_rank_ic_of_many_dates_in_several_blocks_is_that_of_each() -> None:
    rng = np.random.default_rng(0)
    scores, targets = rng.standard_normal((60, 50)).astype(np.float32), rng.standard_normal((60, 50)).round(1)
    scores[rng.random(scores.shape) < 0.2] = np.nan
    whole = rank_ic(scores, targets)
    np.testing.assert_allclose(whole, by_date((scores, targets), spearman, 2), atol=1e-12)
    many = np.tile(scores, (100, 1)), np.tile(targets, (100, 1))  # 300,000 cells are two blocks
    assert rank_ic(*many).tolist() == np.tile(whole, 100).tolist()


@settings(max_examples=60, deadline=None)
@given(pairs((-2.0, -0.25, 0.0, 0.5, 1.0, NAN), 6), st.sampled_from([0.2, 0.5, 1.0]))
def test_precision_and_spread_are_means_over_all_orders_of_equal_scores(pair, k_ratio: float) -> None:
    def precision(targets: np.ndarray) -> float:
        return (targets[: max(1, math.floor(k_ratio * len(targets) + 0.5))] > 0).mean()

    expected = by_date(pair, over_orders(precision), 1)
    np.testing.assert_allclose(precision_at_k(*pair, k_ratio=k_ratio), expected, atol=1e-6)
    expected = by_date(pair, over_orders(lambda targets: targets[0] - targets[-1]), 5)
    np.testing.assert_allclose(quantile_spread(*pair), expected, atol=1e-6)


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


def test_a_return_of_zero_is_not_positive() -> None:
    assert precision_at_k([[2, 1]], [[0.0, 0.1]], k_ratio=0.5).tolist() == [0.0]
    assert positive_rate([[2, 1]], [[0.0, 0.1]]).tolist() == [0.5]


@pytest.mark.parametrize(
    "metric", [rank_ic, positive_rate, quantile_spread, lambda *pair: precision_at_k(*pair, k_ratio=0.2)]
)
def test_what_is_undefined_is_nan_and_other_shapes_are_refused(metric) -> None:
    assert metric(np.empty((0, 4)), np.empty((0, 4))).shape == (0,)
    assert np.isnan(metric(np.empty((2, 0)), np.empty((2, 0)))).all()
    assert np.isnan(metric([[2.0, NAN]], [[NAN, 1.0]])).all()
    for other in (np.zeros((3, 2)), np.zeros(3)):
        with pytest.raises(DataError, match="takes two arrays of one shape"):
            metric(np.zeros((2, 3)), other)


def test_infinite_returns_and_shares_out_of_range_are_refused() -> None:
    with pytest.raises(DataError, match="1 targets are infinite"):
        quantile_spread([[1.0, 2.0]], [[math.inf, 0.1]])
    for k_ratio in (0.0, 1.5):
        with pytest.raises(UsageError, match="k_ratio is"):
            precision_at_k([[1.0]], [[1.0]], k_ratio=k_ratio)


def test_a_summary_of_no_or_one_date_or_of_equal_dates_has_no_icir() -> None:
    nothing = summarize([])
    assert (nothing.num_dates, nothing.num_undefined, math.isnan(nothing.mean)) == (0, 0, True)
    assert math.isnan(summarize([0.3]).sd)
    assert math.isnan(summarize([0.3]).icir)
    assert math.isnan(summarize([0.1, 0.1, 0.1]).icir)
    assert summarize([0.1, 0.1, 0.1]).sd == 0
