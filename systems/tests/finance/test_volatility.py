"""Scores beside the volatility that was known when they were made."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from memfit_workloads.finance import volatility_correlation

NUM_DATES, NUM_ASSETS = 150, 12


@pytest.fixture
def returns() -> np.ndarray:
    found = np.random.default_rng(0).standard_normal((NUM_DATES, NUM_ASSETS)) * np.linspace(0.01, 0.03, NUM_ASSETS)
    found[::7, 2] = math.nan
    found[:100, 5] = math.nan
    return found


def test_it_is_the_mean_of_the_rank_correlations_with_the_past_by_date(returns: np.ndarray) -> None:
    scores = np.random.default_rng(1).standard_normal(returns.shape) - np.arange(NUM_ASSETS) / 4
    scores[80, :] = scores[81:, 3] = math.nan
    expected = []
    for date in range(30, NUM_DATES):  # half of the 60 returns before are known from here on
        past = returns[max(0, date - 60) : date]
        volatility = np.array([np.nanstd(one) if np.isfinite(one).sum() >= 30 else math.nan for one in past.T])
        both = np.isfinite(volatility) & np.isfinite(scores[date])
        if both.any():
            expected.append(scipy.stats.spearmanr(scores[date, both], volatility[both]).statistic)
    found = volatility_correlation(scores, returns)
    assert found.num_dates == len(expected) == NUM_DATES - 31
    assert found.mean == pytest.approx(np.mean(expected))


def test_a_preference_for_calm_or_wild_assets_is_warned_of_and_none_or_too_short_a_history_is_not(returns) -> None:
    calm = np.tile(-np.arange(NUM_ASSETS, dtype=float), (NUM_DATES, 1))
    assert volatility_correlation(calm, returns).warns
    assert volatility_correlation(-calm, returns).warns
    assert not volatility_correlation(np.random.default_rng(2).standard_normal(returns.shape), returns).warns
    found = volatility_correlation(calm[:20], returns[:20])
    assert math.isnan(found.mean) and found.num_dates == 0 and not found.warns
