"""The gate after a backtest: green, yellow or red, with reasons, and the knobs to turn when it is yellow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from memfit.config import Settings
from memfit_workloads.finance._backtest import BacktestResult
from memfit_workloads.finance._checks import Finding
from memfit_workloads.finance._controls import Controls

Colour = Literal["green", "yellow", "red"]

_WORST_FIRST = ("red", "yellow", "green")
#: Checks that a knob may turn from yellow.
_TUNABLE = {"profit", "luck", "fallback"}
#: A loss by delay below this t statistic may be chance.
_SHIFT_T = 4.0
_Share = Annotated[float, Field(ge=0.0, le=1.0)]
_Positive = Annotated[float, Field(gt=0.0)]


@dataclass(frozen=True)
class Knob:
    """A setting to turn after a yellow verdict."""

    name: str
    unit: str
    direction: str
    value: str = ""


class GateSettings(Settings):
    """Thresholds of the gate; docs/workflow.md has each with its unit.

    A bound of plausibility is passed only by more than two standard errors. The bounds are far above what is known to
    last: books of large funds run at Sharpe ratios of 1 to 2. A result beyond them is nearly always an error in the
    data, a look ahead, or a return that is counted more than once. Scores that are late by a date are to keep
    ``min_kept_share`` of ``(horizon - 1) / horizon``, which a signal keeps that lasts evenly.
    """

    max_share_fallback: _Share = 0.2
    max_annual_return: _Positive = 1.0
    max_sharpe: _Positive = 3.0
    min_dates: Annotated[int, Field(ge=2)] = 60
    max_shuffled: Annotated[float, Field(ge=0)] = 0.02
    min_rank_of_real: _Share = 0.8
    min_kept_share: _Share = 0.3


@dataclass(frozen=True)
class Reason:
    """One check of the gate."""

    name: str
    colour: Colour
    text: str


@dataclass(frozen=True)
class Verdict:
    """What the gate says: every check, the worst first, its colour, and what to turn where one is yellow."""

    colour: Colour
    reasons: tuple[Reason, ...]
    knobs: tuple[Knob, ...]


def judge(
    result: BacktestResult,
    findings: Sequence[Finding],
    *,
    controls: Controls,
    settings: GateSettings | None = None,
) -> Verdict:
    """Judge a backtest. The data come first: no profit counts where they are at fault.

    ``findings`` are those of `check_market`, ``controls`` those of `run_controls`.
    """
    limits = GateSettings() if settings is None else settings
    rows = [Reason(f"data:{one.name}", one.severity, one.evidence) for one in findings]
    rows = rows or [Reason("data", "green", "no finding in the data")]
    rows += [*_of_summary(result, limits), *_of_controls(controls, result.settings.horizon, limits)]
    net, gross = result.summary.total_return, result.summary.total_return_gross
    text = f"{net:+,.1%} after costs, {gross:+,.1%} before (more than 0)"
    rows.append(Reason("profit", _if(not net > 0, "yellow"), text))
    reasons = tuple(sorted(rows, key=lambda reason: _WORST_FIRST.index(reason.colour)))
    tunable = any(reason.colour == "yellow" and reason.name in _TUNABLE for reason in reasons)
    return Verdict(reasons[0].colour, reasons, _knobs(result) if tunable else ())


def _knobs(result: BacktestResult) -> tuple[Knob, ...]:
    return (
        Knob(
            "k_ratio",
            "share of the eligible assets",
            "how much of the universe a sleeve holds: raise it for more names and less chance, lower it for the "
            "strongest scores alone; sweep on one fold only",
            str(result.settings.k_ratio),
        ),
        Knob(
            "tau",
            "days",
            "the training's time decay, after which a sample counts 1/e: lower it where old dates mislead, raise it "
            "where recent ones are too few; this trains anew",
        ),
    )


def _if(fails: bool, colour: Colour) -> Colour:
    return colour if fails else "green"


def _of_summary(result: BacktestResult, limits: GateSettings) -> Iterable[Reason]:
    found, n = result.summary, result.summary.num_dates
    if not found.mean_held > 0:
        yield Reason("empty", "red", f"nothing was ever held on {n} dates")
        return
    empty, fallback, annual = found.share_empty, found.share_fallback, found.annual_return_gross
    yield Reason(
        "empty", _if(empty > 0, "red"), f"{empty:.1%} of the rebalance dates have an empty selection (none may)"
    )
    yield Reason(
        "fallback",
        _if(fallback >= limits.max_share_fallback, "yellow"),
        f"{fallback:.1%} of the rebalance dates fell back to k_min (below {limits.max_share_fallback:.0%})",
    )
    text = f"{n} dates (at least {limits.min_dates}); annual figures of few dates are mostly luck"
    yield Reason("dates", _if(n < limits.min_dates, "yellow"), text)
    most_sharpe = limits.max_sharpe + 2 * found.sharpe_error
    most_annual = limits.max_annual_return + 2 * found.sharpe_error * np.nan_to_num(found.volatility)
    yield Reason(
        "annual_return",
        _if(annual > most_annual, "red"),
        f"{annual:+,.1%} a year before costs, {found.total_return_gross:+,.0%} in all (plausible: up to "
        f"{most_annual:+.0%} a year)",
    )
    text = f"Sharpe {found.sharpe:.2f}, n {n} dates (plausible: up to {most_sharpe:.2f})"
    if too_good := found.sharpe > most_sharpe:
        text += "; many assets that move independently, as generated ones do, pass it honestly: raise gate.max_sharpe"
    yield Reason("sharpe", _if(too_good, "red"), text)


def _of_controls(controls: Controls, horizon: int, limits: GateSettings) -> Iterable[Reason]:
    shuffled, rank, kept = controls.shuffled_mean, controls.rank_of_real, controls.kept_share
    most = limits.max_shuffled + 3 * controls.shuffled_error
    yield Reason(
        "shuffled",
        _if(abs(shuffled) > most, "red"),
        f"shuffled scores earn {shuffled:+.2%} a year beyond the universe, mean of {controls.num_shuffles} (0 within "
        f"{most:.2%})",
    )
    text = f"the scores earn more than {rank:.0%} of the shuffled ones (must be above {limits.min_rank_of_real:.0%})"
    yield Reason("luck", _if(not rank > limits.min_rank_of_real, "yellow"), text)
    least = limits.min_kept_share * (horizon - 1) / horizon
    # A signal of one date has nothing left a date later, and is not to be blamed for it.
    suspect = horizon > 1 and kept < least and controls.loss_t > _SHIFT_T
    late = "the scores earn nothing beyond the universe before costs, so a delay has nothing to take"
    if not math.isnan(kept):
        late = (
            f"scores that are a date late keep {kept:.0%} of the gross active return (t of the loss "
            f"{controls.loss_t:.1f}; below {least:.0%} at t above {_SHIFT_T:g} the scores knew the next date)"
        )
    yield Reason("shift", _if(suspect, "red"), late)
