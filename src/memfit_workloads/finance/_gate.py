"""The gate after a backtest: green, yellow or red, with reasons, and the knobs to turn when it is yellow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import Field

from memfit.config import Settings
from memfit_workloads.finance._backtest import BacktestResult, BacktestSummary
from memfit_workloads.finance._controls import Controls
from memfit_workloads.finance._market import Finding, Record
from memfit_workloads.finance._sleeves import BacktestSettings

Colour = Literal["green", "yellow", "red"]

_RANK: dict[Colour, int] = {"green": 0, "yellow": 1, "red": 2}
_Share = Annotated[float, Field(ge=0.0, le=1.0)]

# Name, unit, meaning, and which way to turn it.
_KNOBS = (
    ("k_ratio", "share of the eligible assets", "how much of the universe a sleeve holds",
     "raise it for more names and less chance, lower it for the strongest scores alone; sweep on one fold only"),
    ("k_min", "assets", "the fewest assets of a sleeve, and the size of the fallback",
     "lower it, so that fewer candidates are still a selection by rule"),
    ("min_score", "units of the score", "a candidate's score is above it",
     "lower it, or set it to null: with no threshold every scored asset is a candidate"),
    ("tau", "days", "the training's time decay: a sample that is so much older counts 1/e",
     "lower it where old dates mislead, raise it where recent ones are too few; this trains anew"),
    ("cost_bps", "basis points (1/10,000) of the money traded", "what a trade costs",
     "check it against what is really paid; it is an assumption, never a way to a better result"),
    ("max_turnover", "share of the equity bought and sold per date", "a limit on trading",
     "lower it to trade and pay less, at the price of older positions"),
    ("horizon", "dates", "how long a sleeve is held",
     "raise it to trade less, with a model that was trained on that horizon"),
)  # fmt: skip


class GateSettings(Settings):
    """Thresholds of the gate. A bound of plausibility is passed only by more than two standard errors.

    The upper bounds are far above what is known to last: a rank IC of 0.03 to 0.06 a date is good, books of large
    funds run at Sharpe ratios of 1 to 2, and a result beyond the bounds is nearly always an error in the data, a look
    ahead, or a return that is counted more than once.

    Attributes:
        max_share_empty: More rebalance dates without any selection are red; 0 allows none.
        max_share_fallback: From this share of fallback dates on it is yellow.
        red_share_fallback: From this share on it is red: the scores decide nothing any more.
        min_total_return: At this return after costs or below it is yellow.
        min_annual_active: A lower annual gross return beyond the universe's is red, as implausible as a very high one:
            scores of the wrong sign.
        max_annual_return: A higher annual return before costs is red.
        max_sharpe: A higher Sharpe ratio is red.
        max_hit_rate: A higher share of dates with a gain is red.
        max_rank_ic: A mean rank IC beyond it, of either sign, is red; its standard error is that of scores without
            skill on independent assets, ``sqrt(horizon / (num_dates * (mean assets - 1)))``.
        min_dates: Fewer dates are yellow: too few to judge by.
        max_shuffled: How far the mean of shuffled scores may be from 0, as an annual return, beside 3 standard errors.
        min_rank_of_real: The real scores are to earn more than this share of the shuffled ones, else it is yellow.
        min_kept_share: Scores that are late by a date are to keep at least this part of ``(horizon - 1) / horizon``,
            which a signal keeps that lasts evenly over the holding period.
        shift_t: Only a loss by delay with a larger t statistic counts, else noise would.

    Example:
        >>> GateSettings(max_share_empty=0.01).max_share_fallback
        0.2
    """

    max_share_empty: _Share = 0.0
    max_share_fallback: _Share = 0.2
    red_share_fallback: _Share = 0.5
    min_total_return: float = 0.0
    min_annual_active: float = -0.6
    max_annual_return: Annotated[float, Field(gt=0)] = 1.0
    max_sharpe: Annotated[float, Field(gt=0)] = 3.0
    max_hit_rate: _Share = 0.65
    max_rank_ic: _Share = 0.15
    min_dates: Annotated[int, Field(ge=2)] = 60
    max_shuffled: Annotated[float, Field(ge=0)] = 0.02
    min_rank_of_real: _Share = 0.8
    min_kept_share: _Share = 0.3
    shift_t: Annotated[float, Field(gt=0)] = 4.0


class Knob(Settings):
    """A setting to turn after a yellow verdict.

    Attributes:
        name: As in the settings.
        value: What it was, as text; empty where this result does not say.
        unit: The unit of the value.
        meaning: What it sets.
        direction: Which way to turn it, and what that does.
    """

    name: str
    value: str
    unit: str
    meaning: str
    direction: str


class Reason(Record):
    """One check of the gate.

    Attributes:
        name: Of the check.
        colour: What it says by itself.
        text: What was measured, and the bound.
    """

    name: str
    colour: Colour
    text: str


class Verdict(Record):
    """What the gate says.

    Attributes:
        colour: The worst of all reasons: ``green`` go on, ``yellow`` turn the knobs first, ``red`` look for an error.
        reasons: Every check, the worst first.
        knobs: What to turn; only where some reason is yellow.
    """

    colour: Colour
    reasons: tuple[Reason, ...]
    knobs: tuple[Knob, ...]


def judge(
    result: BacktestResult,
    findings: Sequence[Finding],
    *,
    controls: Controls | None,
    rank_ic: float = math.nan,
    settings: GateSettings | None = None,
) -> Verdict:
    """Judge a backtest. The data come first: no profit counts where they are at fault.

    Args:
        result: The backtest.
        findings: Of `check_market`.
        controls: Of `run_controls`; without them the best verdict is yellow.
        rank_ic: Mean rank IC over dates; NaN where it is not known, which skips its check.
        settings: The thresholds.

    Example:
        >>> from memfit_workloads.finance._backtest import backtest
        >>> import numpy as np
        >>> returns = np.random.default_rng(0).normal(0, 0.02, (100, 30))  # the scores know the next day
        >>> oracle = backtest(np.arange(100), tuple(map(str, range(30))), returns, returns, BacktestSettings(horizon=1))
        >>> verdict = judge(oracle, (), controls=None)
        >>> verdict.colour, verdict.reasons[0].name
        ('red', 'annual_return')
    """
    limits = GateSettings() if settings is None else settings
    summary = result.summary
    reasons = [
        *_of_findings(findings),
        *_of_selection(summary, limits),
        *_of_plausibility(summary, limits),
        *_of_rank_ic(rank_ic, result, limits),
        *_of_controls(controls, result.settings, limits),
        _of_profit(summary, limits),
    ]
    reasons.sort(key=lambda reason: -_RANK[reason.colour])
    knobs = _knobs({reason.name for reason in reasons if reason.colour == "yellow"}, result)
    return Verdict(colour=reasons[0].colour, reasons=tuple(reasons), knobs=knobs)


def _of_findings(findings: Sequence[Finding]) -> Iterable[Reason]:
    for finding in findings:
        yield Reason(name=f"data:{finding.name}", colour=finding.severity, text=finding.evidence)
    if not findings:
        yield Reason(name="data", colour="green", text="no finding in the data")


def _of_selection(summary: BacktestSummary, limits: GateSettings) -> Iterable[Reason]:
    n = summary.num_dates
    if n == 0 or summary.mean_held == 0 or math.isnan(summary.mean_held):
        yield Reason(name="empty", colour="red", text=f"nothing was ever held on {n} dates")
        return
    empty, fallback = summary.share_empty, summary.share_fallback
    yield Reason(
        name="empty",
        colour="red" if empty > limits.max_share_empty else "green",
        text=f"{empty:.1%} of the rebalance dates have an empty selection (at most {limits.max_share_empty:.1%})",
    )
    colour: Colour = "yellow" if fallback >= limits.max_share_fallback else "green"
    yield Reason(
        name="fallback",
        colour="red" if fallback >= limits.red_share_fallback else colour,
        text=f"{fallback:.1%} of the rebalance dates fell back to k_min (below {limits.max_share_fallback:.0%}; red "
        f"from {limits.red_share_fallback:.0%})",
    )
    yield Reason(
        name="dates",
        colour="yellow" if n < limits.min_dates else "green",
        text=f"{n} dates (at least {limits.min_dates}); annual figures of few dates are mostly luck",
    )
    if summary.num_unmarked:
        text = f"{summary.num_unmarked} dates between the first and the last have no return of any asset"
        yield Reason(name="unmarked", colour="yellow", text=text)


def _of_plausibility(summary: BacktestSummary, limits: GateSettings) -> Iterable[Reason]:
    if not summary.num_dates:
        return
    error = 0.0 if math.isnan(summary.sharpe_error) else summary.sharpe_error
    volatility = 0.0 if math.isnan(summary.volatility) else summary.volatility
    most = limits.max_annual_return + 2 * error * volatility
    annual = summary.annual_return_gross
    yield Reason(
        name="annual_return",
        colour=_within(annual, -math.inf, most),
        text=f"{annual:+,.1%} a year before costs, {summary.total_return_gross:+,.0%} in all (plausible: up to "
        f"{most:+.0%} a year)",
    )
    least, active = limits.min_annual_active - 2 * error * volatility, summary.annual_active_gross
    yield Reason(
        name="active_return",
        colour=_within(active, least, math.inf),
        text=f"{active:+,.1%} a year beyond the universe before costs (plausible: from {least:+.0%})",
    )
    most = limits.max_sharpe + 2 * error
    colour = _within(summary.sharpe, -math.inf, most)
    hint = "; many assets that move independently, as generated ones do, pass it honestly: raise gate.max_sharpe"
    yield Reason(
        name="sharpe",
        colour=colour,
        text=f"Sharpe {summary.sharpe:.2f}, n {summary.num_dates} dates (plausible: up to {most:.2f})"
        + (hint if colour == "red" else ""),
    )
    most = limits.max_hit_rate + 1 / math.sqrt(summary.num_dates)
    yield Reason(
        name="hit_rate",
        colour=_within(summary.hit_rate, 0.0, most),
        text=f"a gain on {summary.hit_rate:.1%} of the dates (plausible: up to {most:.1%})",
    )


def _of_rank_ic(rank_ic: float, result: BacktestResult, limits: GateSettings) -> Iterable[Reason]:
    num_scored = result.days["num_scored"].to_numpy()
    if math.isnan(rank_ic) or not num_scored.any():
        return
    independent = len(num_scored) / result.settings.horizon * max(float(num_scored.mean()) - 1.0, 1.0)
    most = limits.max_rank_ic + 2 / math.sqrt(independent)
    yield Reason(
        name="rank_ic",
        colour=_within(rank_ic, -most, most),
        text=f"mean rank IC {rank_ic:+.3f} (plausible: up to {most:.3f} either way)",
    )


def _within(value: float, least: float, most: float) -> Colour:
    return "red" if value > most or value < least else "green"


def _of_controls(
    controls: Controls | None, backtest_settings: BacktestSettings, limits: GateSettings
) -> Iterable[Reason]:
    if controls is None:
        yield Reason(name="controls", colour="yellow", text="shuffled and shifted scores were not tried")
        return
    most = limits.max_shuffled + 3 * controls.shuffled_error
    yield Reason(
        name="shuffled",
        colour=_within(controls.shuffled_mean, -most, most),
        text=f"shuffled scores earn {controls.shuffled_mean:+.2%} a year beyond the universe, mean of "
        f"{controls.num_shuffles} (0 within {most:.2%})",
    )
    rank = controls.rank_of_real
    yield Reason(
        name="luck",
        colour="green" if rank > limits.min_rank_of_real else "yellow",
        text=f"the scores earn more than {rank:.0%} of the shuffled ones (must be above {limits.min_rank_of_real:.0%})",
    )
    shift, horizon = controls.shift, backtest_settings.horizon
    least = limits.min_kept_share * (horizon - 1) / horizon
    # A signal of one date has nothing left a date later, and is not to be blamed for it.
    suspect = horizon > 1 and shift.kept_share < least and shift.loss_t > limits.shift_t
    text = "the scores earn nothing beyond the universe before costs, so a delay has nothing to take"
    if not math.isnan(shift.kept_share):
        text = (
            f"scores that are a date late keep {shift.kept_share:.0%} of the gross active return (t of the loss "
            f"{shift.loss_t:.1f}; below {least:.0%} at t above {limits.shift_t:g} the scores knew the next date)"
        )
    yield Reason(name="shift", colour="red" if suspect else "green", text=text)


def _of_profit(summary: BacktestSummary, limits: GateSettings) -> Reason:
    net = summary.total_return
    return Reason(
        name="profit",
        colour="green" if net > limits.min_total_return else "yellow",
        text=f"{net:+,.1%} after costs, {summary.total_return_gross:+,.1%} before (more than "
        f"{limits.min_total_return:+.1%})",
    )


def _knobs(yellow: set[str], result: BacktestResult) -> tuple[Knob, ...]:
    """What to turn for the reasons that are yellow, each knob once."""
    chosen: set[str] = set()
    if "fallback" in yellow:
        chosen |= {"min_score", "k_min"}
    if "profit" in yellow:
        chosen |= {"k_ratio", "tau"}
        if result.summary.total_return_gross > result.summary.total_return:
            chosen |= {"cost_bps", "max_turnover", "horizon"}
    if "luck" in yellow:
        chosen |= {"k_ratio", "tau"}
    settings = result.settings
    return tuple(
        Knob(
            name=name,
            value="" if name == "tau" else str(getattr(settings, name)),
            unit=unit,
            meaning=meaning,
            direction=direction,
        )
        for name, unit, meaning, direction in _KNOBS
        if name in chosen
    )
