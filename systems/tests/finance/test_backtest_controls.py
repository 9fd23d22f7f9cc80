"""Shuffled and late scores on real prices, and the sweep."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit_workloads.finance import (
    BacktestInput,
    BacktestSettings,
    forward_returns,
    judge,
    run_controls,
    shuffle_scores,
    sweep,
)
from memfit_workloads.finance.prices import features_of, read_prices


@pytest.fixture(scope="module")
def market() -> BacktestInput:
    """400 dates of real prices, scored by momentum."""
    prices = read_prices()
    some = slice(7900, 8300)
    scores = features_of(prices.closes)[some, :, 2]
    return BacktestInput(prices.dates[some], prices.codes, scores, forward_returns(prices.closes, 1)[some])


@pytest.mark.slow
def test_shuffled_scores_earn_nothing_beyond_the_universe(market: BacktestInput) -> None:
    controls = run_controls(market, BacktestSettings(horizon=5), num_shuffles=8)
    assert controls.num_shuffles == 8
    assert abs(controls.shuffled_mean) < 3 * controls.shuffled_error < 0.15


@pytest.mark.slow
def test_the_benchmark_of_a_shuffle_is_that_of_a_backtest_of_it(market: BacktestInput) -> None:
    chosen = BacktestSettings(horizon=5)
    controls = run_controls(market, chosen, num_shuffles=2, seed=3)
    rng = np.random.default_rng(3)
    ones = [market.run(chosen, scores=shuffle_scores(market.scores, rng)) for _ in range(2)]
    assert controls.shuffled_mean == pytest.approx(np.mean([one.summary.annual_active_gross for one in ones]))


@pytest.mark.proves("S0-31")
@pytest.mark.parametrize("horizon", [1, 5])
def test_scores_that_know_the_next_date_are_red_by_plausibility(market: BacktestInput, horizon: int) -> None:
    chosen, oracle = BacktestSettings(horizon=horizon), replace(market, scores=market.returns_1)
    verdict = judge(oracle.run(chosen), (), controls=run_controls(oracle, chosen, num_shuffles=2))
    assert verdict.colour == "red"
    assert verdict.reasons[0].name in {"annual_return", "sharpe"}


def test_scores_that_know_the_next_date_are_red_by_delay_where_the_profit_is_not_too_high(market) -> None:
    chosen = BacktestSettings(horizon=20, k_ratio=0.3)
    oracle = BacktestInput(market.dates, market.codes, market.returns_1, market.returns_1)
    verdict = judge(oracle.run(chosen), (), controls=run_controls(oracle, chosen, num_shuffles=2))
    assert [reason.name for reason in verdict.reasons if reason.colour == "red"] == ["shift"]


@pytest.mark.slow
def test_delay_costs_a_lasting_signal_little(market: BacktestInput) -> None:
    ahead = forward_returns(np.cumprod(1 + np.nan_to_num(market.returns_1), axis=0), 20, -1)
    noise = np.random.default_rng(0).normal(0, 0.05, ahead.shape)
    lasting = BacktestInput(market.dates, market.codes, ahead + noise, market.returns_1)
    found = run_controls(lasting, BacktestSettings(horizon=20), num_shuffles=2)
    assert found.rank_of_real == 1.0 and 0.7 < found.kept_share < 1.1


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_a_shuffle_deals_each_dates_scores_among_the_assets_that_have_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.random((5, 7))
    scores[rng.random(scores.shape) < 0.3] = np.nan
    shuffled = shuffle_scores(scores, rng)
    assert (np.isnan(shuffled) == np.isnan(scores)).all()
    np.testing.assert_array_equal(np.sort(shuffled, axis=1), np.sort(scores, axis=1))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.floats(0.01, 1.0), min_size=2, max_size=5))
def test_breadth_never_falls_as_k_ratio_grows(seed: int, ratios: list[float]) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((12, 15))
    scores[rng.random(scores.shape) < 0.2] = np.nan
    market = BacktestInput(np.arange(12), tuple(map(str, range(15))), scores, np.zeros((12, 15)))
    rows = sweep(market, BacktestSettings(min_score=0.0), ratios)
    assert list(rows) == sorted(set(ratios))
    breadths = [row.mean_held for row in rows.values()]
    assert breadths == sorted(breadths)
    assert sweep(market, BacktestSettings(), [0.05, 1.0])[1.0].mean_held > 3 + 5
