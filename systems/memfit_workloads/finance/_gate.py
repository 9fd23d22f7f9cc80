"""The gate after a backtest: green, yellow or red, with reasons, and the knobs to turn when it is yellow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from memfit.config import Settings
from memfit_workloads.finance._backtest import BacktestResult
from memfit_workloads.finance._checks import Finding
from memfit_workloads.finance._controls import Controls

Colour = Literal["green", "yellow", "red"]

#: A check: its name, its colour, and what was measured.
_Row = tuple[str, Colour, str]
_WORST_FIRST = ("red", "yellow", "green")
_Share = Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True)
class Knob:
    """A setting to turn after a yellow verdict."""

    name: str
    unit: str
    meaning: str
    direction: str
    value: str = ""


#: Each with the yellow checks that it may turn; ``costs`` is a profit that costs took away.
_KNOBS = (
    ("profit luck", Knob("k_ratio", "share of the eligible assets", "how much of the universe a sleeve holds",
         "raise it for more names and less chance, lower it for the strongest scores alone; sweep on one fold only")),
    ("fallback", Knob("k_min", "assets", "the fewest assets of a sleeve, and the size of the fallback",
         "lower it, so that fewer candidates are still a selection by rule")),
    ("fallback", Knob("min_score", "units of the score", "a candidate's score is above it",
         "lower it, or set it to null: with no threshold every scored asset is a candidate")),
    ("profit luck", Knob("tau", "days", "the training's time decay: a sample that is so much older counts 1/e",
         "lower it where old dates mislead, raise it where recent ones are too few; this trains anew")),
    ("costs", Knob("cost_bps", "basis points (1/10,000) of the money traded", "what a trade costs",
         "check it against what is really paid; it is an assumption, never a way to a better result")),
    ("costs", Knob("horizon", "dates", "how long a sleeve is held",
         "raise it to trade less, with a model that was trained on that horizon")),
)  # fmt: skip


class GateSettings(Settings):
    """Thresholds of the gate; docs/workflow.md has each with its unit.

    A bound of plausibility is passed only by more than two standard errors. The upper bounds are far above what is
    known to last: a rank IC of 0.03 to 0.06 a date is good, books of large funds run at Sharpe ratios of 1 to 2. A
    result beyond them is nearly always an error in the data, a look ahead, or a return that is counted more than once.
    The standard error of a rank IC is that of scores without skill, ``sqrt(horizon / (num_dates * (mean assets -
    1)))``. Scores that are late by a date are to keep ``min_kept_share`` of ``(horizon - 1) / horizon``, which a signal
    keeps that lasts evenly.
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
    controls: Controls | None,
    rank_ic: float = math.nan,
    settings: GateSettings | None = None,
) -> Verdict:
    """Judge a backtest. The data come first: no profit counts where they are at fault.

    ``findings`` are those of `check_market`, ``controls`` those of `run_controls`: without them the best verdict is
    yellow. A mean ``rank_ic`` that is NaN skips its check.
    """
    limits = GateSettings() if settings is None else settings
    rows: list[_Row] = [(f"data:{one.name}", one.severity, one.evidence) for one in findings]
    rows = rows or [("data", "green", "no finding in the data")]
    rows += [*_of_summary(result, rank_ic, limits), *_of_controls(controls, result.settings.horizon, limits)]
    net, gross = result.summary.total_return, result.summary.total_return_gross
    rows.append(
        ("profit", _outside(net, limits.min_total_return, math.inf, "yellow", at_least=False),
         f"{net:+,.1%} after costs, {gross:+,.1%} before (more than {limits.min_total_return:+.1%})")
    )  # fmt: skip
    reasons = sorted((Reason(*row) for row in rows), key=lambda reason: _WORST_FIRST.index(reason.colour))
    yellow = {reason.name for reason in reasons if reason.colour == "yellow"}
    yellow |= {"costs"} if "profit" in yellow and gross > net else set()
    values = {name: str(value) for name, value in result.settings}
    knobs = tuple(replace(one, value=values.get(one.name, "")) for of, one in _KNOBS if yellow & {*of.split()})
    return Verdict(reasons[0].colour, tuple(reasons), knobs)


def _outside(value: float, least: float, most: float, colour: Colour = "red", *, at_least: bool = True) -> Colour:
    """Return the colour of a value: green within its bounds (NaN too, unless it must be above the least)."""
    if not at_least:
        return "green" if value > least else colour
    return colour if value < least or value > most else "green"


def _of_summary(result: BacktestResult, rank_ic: float, limits: GateSettings) -> Iterable[_Row]:
    found, n = result.summary, result.summary.num_dates
    if n == 0 or found.mean_held == 0 or math.isnan(found.mean_held):
        return [("empty", "red", f"nothing was ever held on {n} dates")]
    empty, fallback = found.share_empty, found.share_fallback
    annual, active = found.annual_return_gross, found.annual_active_gross
    two_errors = 2 * found.sharpe_error
    loose = two_errors * (0.0 if math.isnan(found.volatility) else found.volatility)
    most_annual, least_active = limits.max_annual_return + loose, limits.min_annual_active - loose
    most_sharpe, most_hits = limits.max_sharpe + two_errors, limits.max_hit_rate + 1 / math.sqrt(n)
    hint = "; many assets that move independently, as generated ones do, pass it honestly: raise gate.max_sharpe"
    fell_back: Colour = "yellow" if fallback >= limits.max_share_fallback else "green"
    rows: list[_Row] = [
        ("empty", _outside(empty, 0, limits.max_share_empty),
         f"{empty:.1%} of the rebalance dates have an empty selection (at most {limits.max_share_empty:.1%})"),
        ("fallback", "red" if fallback >= limits.red_share_fallback else fell_back,
         f"{fallback:.1%} of the rebalance dates fell back to k_min (below {limits.max_share_fallback:.0%}; red "
         f"from {limits.red_share_fallback:.0%})"),
        ("dates", _outside(n, limits.min_dates, math.inf, "yellow"),
         f"{n} dates (at least {limits.min_dates}); annual figures of few dates are mostly luck"),
        ("annual_return", _outside(annual, -math.inf, most_annual),
         f"{annual:+,.1%} a year before costs, {found.total_return_gross:+,.0%} in all (plausible: up to "
         f"{most_annual:+.0%} a year)"),
        ("active_return", _outside(active, least_active, math.inf),
         f"{active:+,.1%} a year beyond the universe before costs (plausible: from {least_active:+.0%})"),
        ("sharpe", _outside(found.sharpe, -math.inf, most_sharpe),
         f"Sharpe {found.sharpe:.2f}, n {n} dates (plausible: up to {most_sharpe:.2f})"
         + (hint if found.sharpe > most_sharpe else "")),
        ("hit_rate", _outside(found.hit_rate, 0.0, most_hits),
         f"a gain on {found.hit_rate:.1%} of the dates (plausible: up to {most_hits:.1%})"),
    ]  # fmt: skip
    if found.num_unmarked:
        text = f"{found.num_unmarked} dates between the first and the last have no return of any asset"
        rows.append(("unmarked", "yellow", text))
    num_scored = result.days["num_scored"].to_numpy()
    if not math.isnan(rank_ic) and num_scored.any():
        independent = len(num_scored) / result.settings.horizon * max(float(num_scored.mean()) - 1.0, 1.0)
        most = limits.max_rank_ic + 2 / math.sqrt(independent)
        text = f"mean rank IC {rank_ic:+.3f} (plausible: up to {most:.3f} either way)"
        rows.append(("rank_ic", _outside(rank_ic, -most, most), text))
    return rows


def _of_controls(controls: Controls | None, horizon: int, limits: GateSettings) -> Iterable[_Row]:
    if controls is None:
        return [("controls", "yellow", "shuffled and shifted scores were not tried")]
    most, rank, kept = limits.max_shuffled + 3 * controls.shuffled_error, controls.rank_of_real, controls.kept_share
    least = limits.min_kept_share * (horizon - 1) / horizon
    # A signal of one date has nothing left a date later, and is not to be blamed for it.
    suspect = horizon > 1 and kept < least and controls.loss_t > limits.shift_t
    late = "the scores earn nothing beyond the universe before costs, so a delay has nothing to take"
    if not math.isnan(kept):
        late = (
            f"scores that are a date late keep {kept:.0%} of the gross active return (t of the loss "
            f"{controls.loss_t:.1f}; below {least:.0%} at t above {limits.shift_t:g} the scores knew the next date)"
        )
    return [
        ("shuffled", _outside(controls.shuffled_mean, -most, most),
         f"shuffled scores earn {controls.shuffled_mean:+.2%} a year beyond the universe, mean of "
         f"{controls.num_shuffles} (0 within {most:.2%})"),
        ("luck", _outside(rank, limits.min_rank_of_real, math.inf, "yellow", at_least=False),
         f"the scores earn more than {rank:.0%} of the shuffled ones (must be above {limits.min_rank_of_real:.0%})"),
        ("shift", "red" if suspect else "green", late),
    ]  # fmt: skip
