"""The backtest against a ledger kept by hand, and on days made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from memfit.errors import DataError
from memfit_workloads.finance import BacktestInput, BacktestResult, BacktestSettings

NAN = math.nan


def run(scores, returns_1, *, eligible=None, **chosen) -> BacktestResult:
    scores = np.asarray(scores, float)
    codes = tuple(f"C{number}" for number in range(scores.shape[1]))
    dates = np.datetime64("2024-01-01") + np.arange(len(scores))
    return BacktestInput(dates, codes, scores, returns_1, eligible).run(BacktestSettings(**chosen))


def column(result: BacktestResult, name: str) -> list:
    return result.days[name].to_pylist()


def ledger(scores: np.ndarray, returns_1: np.ndarray, chosen: BacktestSettings) -> list[float]:
    """Equity after each date, by accounts in dictionaries: a second opinion that shares no code with the engine."""
    sleeves = [{"cash": 1 / chosen.horizon, "held": {}} for _ in range(chosen.horizon)]
    rate, equity = chosen.cost_bps / 1e4, []
    for date, row in enumerate(scores):
        book = sleeves[date % chosen.horizon]
        ranked = sorted((-score, asset) for asset, score in enumerate(row) if not math.isnan(score))
        passing = [asset for score, asset in ranked if chosen.min_score is None or -score > chosen.min_score]
        size = max(chosen.k_min, math.ceil(round(chosen.k_ratio * len(ranked), 9)))
        picks = passing[:size] if len(passing) >= chosen.k_min else [asset for _, asset in ranked][: chosen.k_min]
        old = book["held"]
        value = book["cash"] + sum(old.values())
        low, high = 0.0, value  # the cost that pays for itself, by bisection
        for _ in range(200):
            cost = (low + high) / 2
            new = {asset: (value - cost) / len(picks) for asset in picks}
            due = rate * sum(abs(new.get(asset, 0.0) - old.get(asset, 0.0)) for asset in {*new, *old})
            low, high = (cost, high) if due > cost else (low, cost)
        book["held"], book["cash"] = new, value - cost - sum(new.values())
        for sleeve in sleeves:
            for asset in sleeve["held"]:
                earned = returns_1[date, asset]
                sleeve["held"][asset] *= 1.0 if math.isnan(earned) else 1 + earned
        equity.append(sum(sleeve["cash"] + sum(sleeve["held"].values()) for sleeve in sleeves))
    return equity


@pytest.mark.proves("C-44")
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from([None, 0.0, 1.0]), st.sampled_from([0.0, 10.0, 200.0]))
def test_the_equity_is_that_of_accounts_kept_one_by_one(seed, horizon, min_score, cost_bps) -> None:
    rng = np.random.default_rng(seed)
    scores, returns_1 = rng.standard_normal((14, 6)).round(1), rng.normal(0, 0.1, (14, 6))
    scores[rng.random(scores.shape) < 0.2] = NAN
    returns_1[rng.random(returns_1.shape) < 0.1] = NAN
    returns_1[-1, 0] = 0.01
    chosen = {"horizon": horizon, "k_ratio": 0.4, "k_min": 2, "min_score": min_score, "cost_bps": cost_bps}
    result = run(scores, returns_1, **chosen)
    expected = ledger(scores, returns_1, BacktestSettings(**chosen))
    np.testing.assert_allclose(column(result, "equity"), expected, rtol=1e-9)


@pytest.mark.parametrize("horizon", [1, 5, 20])
def test_a_constant_growth_of_one_percent_in_20_dates_is_earned_once_in_20_dates(horizon) -> None:
    growth = np.full((120, 4), 1.01 ** (1 / 20) - 1)
    result = run(np.random.default_rng(0).random((120, 4)), growth, horizon=horizon, cost_bps=0)
    equity = column(result, "equity")
    assert equity[99] / equity[79] - 1 == pytest.approx(0.01, rel=1e-6)
    assert result.summary.total_return == pytest.approx(1.01 ** (120 / 20) - 1, rel=0.2)
    assert column(result, "active") == pytest.approx([0.0] * 120, abs=1e-15)


def test_sleeves_open_one_by_one_and_their_weights_drift() -> None:
    returns_1 = np.zeros((4, 2))
    returns_1[0, 0] = 1.0
    result = run([[2, 1]] * 4, returns_1, horizon=4, k_ratio=1.0, k_min=1, cost_bps=0)
    # The first sleeve's halves of 1/4 become 1/4 and 1/8: equity 1.125, of which the sleeve is 0.375.
    assert column(result, "equity") == pytest.approx([1.125] * 4)
    assert column(result, "exposure") == pytest.approx([0.25, 0.625 / 1.125, 0.875 / 1.125, 1.0])
    assert column(result, "turnover") == pytest.approx([0.25, 0.25 / 1.125, 0.25 / 1.125, 0.25 / 1.125])


@pytest.mark.proves("S0-29")
def test_a_date_without_scores_is_empty_and_its_sleeve_is_cash() -> None:
    scores = np.ones((4, 3))
    scores[1] = NAN
    result = run(scores, np.full((4, 3), 0.01), horizon=1, k_min=1, cost_bps=0)
    assert column(result, "is_empty") == [False, True, False, False]
    assert column(result, "net") == pytest.approx([0.01, 0.0, 0.01, 0.01])
    assert column(result, "num_candidates") == [3, 0, 3, 3]
    assert result.summary.share_empty == 0.25


def test_a_date_that_is_not_to_be_traded_is_no_empty_one() -> None:
    eligible = np.ones((4, 3), bool)
    eligible[1] = False
    result = run(np.ones((4, 3)), np.full((4, 3), 0.01), horizon=1, k_min=1, eligible=eligible)
    assert column(result, "is_rebalance") == [True, False, True, True]
    assert (result.summary.share_empty, result.summary.mean_held) == (0.0, 1.0)


def test_too_few_candidates_fall_back_to_the_best_k_min() -> None:
    scores = [[0.3, 0.2, 0.1, -1], [0.5, -0.1, -0.2, -0.3], [-1, -2, -3, -4], [0.1, 0.2, 0.3, 0.4]]
    result = run(scores, np.zeros((4, 4)), horizon=1, k_ratio=0.75, k_min=2, min_score=0.0)
    assert column(result, "num_candidates") == [3, 1, 0, 4]
    assert column(result, "is_fallback") == [False, True, True, False]
    assert column(result, "num_held") == [3, 2, 2, 3]
    assert result.summary.share_fallback == 0.5


def test_a_book_that_loses_all_ends_there() -> None:
    returns_1 = np.zeros((6, 2))
    returns_1[1, 0] = -1.0
    result = run([[1.0, 0.0]] * 6, returns_1, horizon=1, k_min=1, k_ratio=0.5, cost_bps=0)
    assert column(result, "equity")[1:] == [0.0] * 5
    assert column(result, "exposure")[2:] == [0.0] * 4
    assert result.summary.annual_return == -1.0


def test_the_benchmark_is_the_whole_universe_in_the_same_sleeves() -> None:
    rng = np.random.default_rng(1)
    scores, returns_1 = rng.random((30, 8)), rng.normal(0, 0.03, (30, 8))
    result = run(scores, returns_1, horizon=4, k_ratio=0.25)
    whole = run(scores, returns_1, horizon=4, k_ratio=1.0, cost_bps=0)
    assert column(result, "benchmark") == pytest.approx(column(whole, "net"))
    assert column(whole, "active") == pytest.approx([0.0] * 30)


def test_without_a_return_there_is_no_figure() -> None:
    result = run(np.ones((3, 2)), np.full((3, 2), NAN))
    assert result.days.num_rows == result.summary.num_dates == 0
    assert math.isnan(result.summary.sharpe) and math.isnan(result.summary.annual_return)


def test_dates_at_the_end_without_returns_are_left_out_and_others_stand_still() -> None:
    returns_1 = np.full((6, 2), 0.01)
    returns_1[4:], returns_1[2] = NAN, NAN
    result = run(np.ones((6, 2)), returns_1, horizon=1, k_min=1, cost_bps=0)
    assert result.days.num_rows == 4
    assert column(result, "net") == pytest.approx([0.01, 0.01, 0.0, 0.01])
    assert result.summary.end == "2024-01-04"


def test_the_summary_is_what_the_days_say() -> None:
    rng = np.random.default_rng(2)
    result = run(rng.random((80, 10)), rng.normal(0.001, 0.02, (80, 10)), horizon=5)
    net, gross = np.array(column(result, "net")), np.array(column(result, "gross"))
    found = result.summary
    assert found.num_dates == 80
    assert found.total_return == pytest.approx(np.prod(1 + net) - 1)
    assert found.annual_return == pytest.approx((1 + found.total_return) ** (252 / 80) - 1)
    assert found.sharpe == pytest.approx(net.mean() / net.std(ddof=1) * 252**0.5)
    assert found.sharpe_error == pytest.approx((252 / 80) ** 0.5)
    assert found.volatility == pytest.approx(net.std(ddof=1) * 252**0.5)
    assert found.annual_active_gross == pytest.approx((gross - column(result, "benchmark")).mean() * 252)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"returns_1": np.zeros((2, 3))}, "returns_1 has the shape"),
        ({"codes": ("A", "A")}, "a code occurs twice"),
        ({"dates": ["2024-01-02", "2024-01-02", "2024-01-03"]}, "2024-01-02 follows 2024-01-02"),
        ({"returns_1": [[0, 0], [0, -1.5], [0, 0]]}, "B has the return -1.5 on 2024-01-02"),
        ({"returns_1": [[0, 0], [math.inf, 0], [0, 0]]}, "A has the return inf"),
        ({"eligible": np.ones((3, 1), bool)}, "eligible has the shape"),
    ],
)
def test_what_cannot_be_walked_through_is_refused(change, message) -> None:
    given_values = {
        "dates": ["2024-01-01", "2024-01-02", "2024-01-03"],
        "codes": ("A", "B"),
        "scores": np.zeros((3, 2)),
        "returns_1": np.zeros((3, 2)),
    } | change
    with pytest.raises(DataError, match=message):
        BacktestInput(**given_values)


@pytest.mark.parametrize("wrong", [{"k_ratio": 0.0}, {"k_ratio": 1.1}, {"horizon": 0}, {"tau": 90}, {"cost_bps": -1}])
def test_settings_out_of_range_or_of_another_part_are_refused(wrong) -> None:
    with pytest.raises(ValidationError):
        BacktestSettings(**wrong)
