"""The gate as a table of cases: one change to a healthy backtest at a time, and the colour it gets."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from memfit_workloads.finance import (
    BacktestInput,
    BacktestResult,
    BacktestSettings,
    Controls,
    Finding,
    GateSettings,
    Verdict,
    judge,
)

NAN = math.nan
CONTROLS = Controls(
    num_shuffles=16, shuffled_mean=0.001, shuffled_error=0.005, rank_of_real=1.0, kept_share=0.8, loss_t=1.0
)


@pytest.fixture(scope="module")
def healthy() -> BacktestResult:
    """A year of a good, plausible book of 5 sleeves."""
    rng = np.random.default_rng(0)
    given = BacktestInput(np.arange(252), tuple("ABCDEF"), rng.random((252, 6)), rng.normal(0, 0.01, (252, 6)))
    result = given.run(BacktestSettings())
    figures = {
        "total_return": 0.12, "total_return_gross": 0.15, "annual_return": 0.12, "annual_return_gross": 0.15,
        "volatility": 0.15, "sharpe": 0.8, "share_fallback": 0.0, "share_empty": 0.0,
    }  # fmt: skip
    return replace(result, summary=replace(result.summary, **figures))


def judged(healthy: BacktestResult, *, controls: Controls = CONTROLS, **figures) -> Verdict:
    result = replace(healthy, summary=replace(healthy.summary, **figures))
    return judge(result, (), controls=controls)


def why(verdict: Verdict) -> set[str]:
    return {reason.name for reason in verdict.reasons if reason.colour == verdict.colour}


def test_a_healthy_backtest_is_green_with_every_check_named_and_no_knobs(healthy: BacktestResult) -> None:
    verdict = judged(healthy)
    assert verdict.colour == "green"
    assert verdict.knobs == ()
    assert why(verdict) == {
        "data", "empty", "fallback", "dates", "annual_return", "sharpe", "shuffled", "luck", "shift", "profit",
    }  # fmt: skip


@pytest.mark.proves("S0-30")
@pytest.mark.parametrize(
    ("change", "colour", "name"),
    [
        ({"share_empty": 0.004}, "red", "empty"),
        ({"mean_held": 0.0}, "red", "empty"),
        ({"mean_held": NAN, "share_fallback": NAN, "share_empty": NAN}, "red", "empty"),
        ({"share_fallback": 0.1999}, "green", "fallback"),
        ({"share_fallback": 0.2}, "yellow", "fallback"),
        ({"total_return": 0.0001}, "green", "profit"),
        ({"total_return": 0.0}, "yellow", "profit"),
        ({"total_return": -0.2}, "yellow", "profit"),
        ({"num_dates": 59}, "yellow", "dates"),
        ({"num_dates": 60}, "green", "dates"),
        # 1,253.91 times the money in 2.83 years: what passed once for a profit.
        ({"total_return_gross": 1253.91, "annual_return_gross": 1254.91 ** (1 / 2.83) - 1}, "red", "annual_return"),
        ({"annual_return_gross": 1.29}, "green", "annual_return"),  # 1 and two standard errors of 0.15
        ({"annual_return_gross": 1.31}, "red", "annual_return"),
        ({"annual_return_gross": -0.95}, "green", "annual_return"),  # a crash of the market is plausible
        ({"sharpe": 4.9}, "green", "sharpe"),  # 3 and two standard errors of 1
        ({"sharpe": 5.1}, "red", "sharpe"),
        ({"sharpe": 4.9, "sharpe_error": 0.3}, "red", "sharpe"),
        ({"sharpe": NAN}, "green", "sharpe"),
    ],
)
def test_each_figure_has_its_colour(healthy: BacktestResult, change, colour: str, name: str) -> None:
    verdict = judged(healthy, **change)
    assert verdict.colour == colour
    assert name in why(verdict)
    if colour != "green":
        assert why(verdict) == {name}


@pytest.mark.parametrize(
    ("change", "colour", "name"),
    [
        ({"shuffled_mean": 0.034}, "green", "shuffled"),  # 0.02 and three standard errors of 0.005
        ({"shuffled_mean": 0.036}, "red", "shuffled"),
        ({"shuffled_mean": -0.036}, "red", "shuffled"),
        ({"rank_of_real": 0.8}, "yellow", "luck"),
        ({"rank_of_real": 0.81}, "green", "luck"),
    ],
)
def test_each_control_has_its_colour(healthy: BacktestResult, change, colour: str, name: str) -> None:
    verdict = judged(healthy, controls=replace(CONTROLS, **change))
    assert verdict.colour == colour
    assert name in why(verdict)


@pytest.mark.parametrize(
    ("kept_share", "loss_t", "horizon", "colour"),
    [
        (0.25, 5.0, 5, "green"),  # 0.3 * 4 / 5 = 0.24
        (0.23, 5.0, 5, "red"),
        (0.23, 3.9, 5, "green"),
        (-0.5, 9.0, 5, "red"),
        (0.28, 5.0, 20, "red"),
        (-0.5, 9.0, 1, "green"),  # a signal of one date has nothing left after it
        (NAN, 9.0, 5, "green"),
    ],
)
def test_a_profit_that_a_delay_of_one_date_takes_away_is_red(
    healthy: BacktestResult, kept_share: float, loss_t: float, horizon: int, colour: str
) -> None:
    result = replace(healthy, settings=BacktestSettings(horizon=horizon))
    verdict = judge(result, (), controls=replace(CONTROLS, kept_share=kept_share, loss_t=loss_t))
    assert verdict.colour == colour
    assert "shift" in why(verdict)


@pytest.mark.proves("C-42")
@pytest.mark.parametrize("severity", ["yellow", "red"])
def test_a_finding_in_the_data_counts_before_any_profit(healthy: BacktestResult, severity) -> None:
    finding = Finding(name="price_jump", severity=severity, evidence="2 jumps.", where=("AAPL",), count=2, remedy="-")
    verdict = judge(healthy, (finding,), controls=CONTROLS)
    assert verdict.colour == severity
    assert (verdict.reasons[0].name, verdict.reasons[0].text) == ("data:price_jump", "2 jumps.")


@pytest.mark.proves("S0-32")
def test_the_worst_reason_decides_and_comes_first(healthy: BacktestResult) -> None:
    verdict = judged(healthy, share_fallback=0.3, sharpe=9.0)
    assert [reason.colour for reason in verdict.reasons[:3]] == ["red", "yellow", "green"]


@pytest.mark.proves("S0-33")
def test_yellow_names_the_knobs_with_value_unit_and_direction(healthy: BacktestResult) -> None:
    for figures in ({"share_fallback": 0.3}, {"total_return": -0.01}):
        k_ratio, tau = judged(healthy, **figures).knobs
        assert (k_ratio.name, k_ratio.value, k_ratio.unit) == ("k_ratio", "0.1", "share of the eligible assets")
        assert (tau.name, tau.value, tau.unit) == ("tau", "", "days")
        assert k_ratio.direction and tau.direction
    assert judged(healthy, num_dates=20).knobs == ()


def test_thresholds_are_settings(healthy: BacktestResult) -> None:
    result = replace(healthy, summary=replace(healthy.summary, share_fallback=0.3, sharpe=5.5))
    loose = GateSettings(max_share_fallback=0.4, max_sharpe=6.0)
    assert judge(result, (), controls=CONTROLS, settings=loose).colour == "green"
    assert judge(result, (), controls=CONTROLS).colour == "red"
