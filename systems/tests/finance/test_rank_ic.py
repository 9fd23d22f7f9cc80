"""Rank IC against scipy, date by date."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from memfit.errors import DataError
from memfit_workloads.finance import rank_ic, summarize


def spearman_by_date(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """scipy's answer on the assets that both have; NaN where scipy warns that it is undefined."""
    result = []
    for score, target in zip(scores, targets, strict=True):
        both = ~(np.isnan(score) | np.isnan(target))
        if both.sum() < 2:
            result.append(math.nan)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", scipy.stats.ConstantInputWarning)
            result.append(scipy.stats.spearmanr(score[both], target[both]).statistic)
    return np.array(result)


@st.composite
def score_and_target_pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    shape = (draw(st.integers(1, 6)), draw(st.integers(1, 12)))
    # Few distinct values make ties; NaN makes absent assets; infinities are values like others.
    values = st.sampled_from([-math.inf, -1.5, 0.0, -0.0, 1e-30, 0.25, 2.0, 3.0, math.inf, math.nan])
    arrays = hnp.arrays(draw(st.sampled_from([np.float32, np.float64])), shape, elements=values)
    return draw(arrays), draw(arrays)


@settings(max_examples=200, deadline=None)
@given(score_and_target_pairs())
def test_it_equals_scipys_spearman_with_ties_and_absent_assets(pair: tuple[np.ndarray, np.ndarray]) -> None:
    np.testing.assert_allclose(rank_ic(*pair), spearman_by_date(*pair), atol=1e-12)


def test_it_equals_scipys_spearman_on_many_dates_in_several_blocks() -> None:
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((60, 50)).astype(np.float32)
    targets = rng.standard_normal((60, 50)).round(1)
    scores[rng.random(scores.shape) < 0.2] = np.nan
    whole = rank_ic(scores, targets)
    np.testing.assert_allclose(whole, spearman_by_date(scores, targets), atol=1e-12)
    many = np.tile(scores, (100, 1)), np.tile(targets, (100, 1))  # 300,000 cells are two blocks
    assert rank_ic(*many).tolist() == np.tile(whole, 100).tolist()


def test_fewer_than_two_common_assets_or_no_spread_is_undefined() -> None:
    scores = [[1.0, math.nan, 2.0], [1.0, 1.0, 1.0], [0.1, 0.2, 0.3], [math.nan] * 3]
    targets = [[1.0, 2.0, math.nan], [1.0, 2.0, 3.0], [5.0, 5.0, 5.0], [1.0, 2.0, 3.0]]
    assert np.isnan(rank_ic(scores, targets)).all()


def test_no_dates_give_no_figures() -> None:
    assert rank_ic(np.empty((0, 5)), np.empty((0, 5))).shape == (0,)
    assert np.isnan(rank_ic(np.empty((3, 0)), np.empty((3, 0)))).tolist() == [True] * 3
    summary = summarize([])
    assert summary.num_dates == summary.num_undefined == 0
    assert math.isnan(summary.mean)


def test_shapes_that_do_not_match_are_refused() -> None:
    with pytest.raises(DataError, match=r"\(2, 3\) and targets \(3, 2\)"):
        rank_ic(np.zeros((2, 3)), np.zeros((3, 2)))
    with pytest.raises(DataError, match="one shape"):
        rank_ic(np.zeros(3), np.zeros(3))


def test_a_summary_of_one_date_or_of_equal_dates_has_no_icir() -> None:
    assert math.isnan(summarize([0.3]).sd)
    assert math.isnan(summarize([0.3]).icir)
    assert math.isnan(summarize([0.1, 0.1, 0.1]).icir)
    assert summarize([0.1, 0.1, 0.1]).sd == 0
