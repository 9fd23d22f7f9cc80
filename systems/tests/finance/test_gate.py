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
        "annual_active_gross": 0.03, "volatility": 0.15, "sharpe": 0.8, "hit_rate": 0.53, "share_fallback": 0.0, "share_empty": 0.0,
    }  # fmt: skip
    return replace(result, summary=replace(result.summary, **figures))


def judged(
    healthy: BacktestResult, *, controls: Controls | None = CONTROLS, rank_ic: float = 0.03, **figures
) -> Verdict:
    result = replace(healthy, summary=replace(healthy.summary, **figures))
    return judge(result, (), controls=controls, rank_ic=rank_ic)


def why(verdict: Verdict) -> set[str]:
    return {reason.name for reason in verdict.reasons if reason.colour == verdict.colour}


def test_a_healthy_backtest_is_green_with_every_check_named_and_no_knobs(healthy: BacktestResult) -> None:
    verdict = judged(healthy)
    assert verdict.colour == "green"
    assert verdict.knobs == ()
    assert why(verdict) == {
        "data", "empty", "fallback", "dates", "annual_return", "active_return", "sharpe", "hit_rate", "rank_ic",
        "shuffled", "luck", "shift", "profit",
    }  # fmt: skip


@pytest.mark.proves("S0-30")
@pytest.mark.parametrize(
    ("change", "colour", "name"),
    [
        ({"share_empty": 0.004}, "red", "empty"),
        ({"mean_held": 0.0}, "red", "empty"),
        ({"mean_held": NAN, "num_dates": 0, "share_fallback": NAN, "share_empty": NAN}, "red", "empty"),
        ({"share_fallback": 0.1999}, "green", "fallback"),
        ({"share_fallback": 0.2}, "yellow", "fallback"),
        ({"share_fallback": 0.4999}, "yellow", "fallback"),
        ({"share_fallback": 0.5}, "red", "fallback"),
        ({"total_return": 0.0001}, "green", "profit"),
        ({"total_return": 0.0}, "yellow", "profit"),
        ({"total_return": -0.2}, "yellow", "profit"),
        ({"num_dates": 59}, "yellow", "dates"),
        ({"num_dates": 60}, "green", "dates"),
        ({"num_unmarked": 1}, "yellow", "unmarked"),
        # 1,253.91 times the money in 2.83 years: what passed once for a profit.
        ({"total_return_gross": 1253.91, "annual_return_gross": 1254.91 ** (1 / 2.83) - 1}, "red", "annual_return"),
        ({"annual_return_gross": 1.29}, "green", "annual_return"),  # 1 and two standard errors of 0.15
        ({"annual_return_gross": 1.31}, "red", "annual_return"),
        ({"annual_return_gross": -0.95}, "green", "annual_return"),  # a crash of the market is plausible
        ({"annual_active_gross": -0.89}, "green", "active_return"),  # -0.6 and two standard errors of 0.15
        ({"annual_active_gross": -0.91}, "red", "active_return"),
        ({"sharpe": 4.9}, "green", "sharpe"),  # 3 and two standard errors of 1
        ({"sharpe": 5.1}, "red", "sharpe"),
        ({"sharpe": 4.9, "sharpe_error": 0.3}, "red", "sharpe"),
        ({"sharpe": NAN}, "green", "sharpe"),
        ({"hit_rate": 0.70}, "green", "hit_rate"),
        ({"hit_rate": 0.72}, "red", "hit_rate"),
        ({"rank_ic": 0.275}, "green", "rank_ic"),  # 0.15 and two standard errors of (5 / 252 / 5) ** 0.5
        ({"rank_ic": 0.277}, "red", "rank_ic"),
        ({"rank_ic": -0.277}, "red", "rank_ic"),
    ],
)
def test_each_figure_has_its_colour(healthy: BacktestResult, change, colour: str, name: str) -> None:
    verdict = judged(healthy, **change)
    assert verdict.colour == colour
    assert name in why(verdict)
    if colour != "green":
        assert why(verdict) == {name}


def test_a_rank_ic_that_is_not_known_is_not_judged(healthy: BacktestResult) -> None:
    assert "rank_ic" not in why(judged(healthy, rank_ic=NAN))


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


def test_without_controls_the_best_is_yellow(healthy: BacktestResult) -> None:
    assert why(judged(healthy, controls=None)) == {"controls"}
    assert judged(healthy, controls=None).colour == "yellow"


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
    fallback = {knob.name: knob for knob in judged(healthy, share_fallback=0.3).knobs}
    assert set(fallback) == {"k_min", "min_score"}
    assert (fallback["k_min"].value, fallback["k_min"].unit) == ("3", "assets")
    profit = {knob.name: knob for knob in judged(healthy, total_return=-0.01).knobs}
    assert set(profit) == {"k_ratio", "tau", "cost_bps", "horizon"}
    assert (profit["tau"].value, profit["tau"].unit) == ("", "days")
    assert profit["k_ratio"].value == "0.1"
    assert all(knob.meaning and knob.direction for knob in profit.values())
    free = judged(healthy, total_return=-0.01, total_return_gross=-0.01)
    assert {knob.name for knob in free.knobs} == {"k_ratio", "tau"}


def test_thresholds_are_settings(healthy: BacktestResult) -> None:
    result = replace(healthy, summary=replace(healthy.summary, share_empty=0.01, sharpe=5.5))
    loose = GateSettings(max_share_empty=0.05, max_sharpe=6.0)
    assert judge(result, (), controls=CONTROLS, settings=loose).colour == "green"
    assert judge(result, (), controls=CONTROLS).colour == "red"
