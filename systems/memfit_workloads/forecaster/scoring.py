"""How good forecasts are: of an epoch, of a fold, and of all folds together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memfit.pipeline import Context
from memfit_workloads import finance
from memfit_workloads.finance import quantile_spread, rank_ic, read_scores, summarize
from memfit_workloads.finance.panels import DataParams, market_of
from memfit_workloads.forecaster.params import ForecasterParams

#: The highest mean rank IC that is believed of real daily returns. Published single signals reach 0.02 to 0.06.
BELIEVED_RANK_IC = 0.1
#: A forecast that gives newer dates more weight than the planted signal does is better than it by at most so much.
_ABOVE_PLANTED = 1.11
_YEAR = 252
Floats = npt.NDArray[np.float64]


def information_coefficient(scores: Floats, targets: Floats) -> Floats:
    """Return Pearson's correlation of scores and targets on each date, (D,), over the assets that have both.

    NaN where fewer than 2 assets have both, or either does not differ.
    """
    known = np.isfinite(scores) & np.isfinite(targets)
    count = np.maximum(known.sum(1, keepdims=True), 1)
    score, target = (
        np.where(known, values - np.where(known, values, 0.0).sum(1, keepdims=True) / count, 0.0)
        for values in (scores, targets)
    )
    scale = np.sqrt((score**2).sum(1) * (target**2).sum(1))
    found: Floats = np.divide((score * target).sum(1), scale, out=np.full(len(scores), np.nan), where=scale > 1e-30)
    return found


def daily_figures(scores: pa.Table, data: DataParams) -> dict[str, Floats]:
    """Return, by date in ascending order, ``h5_rank_ic`` and ``h5_ic`` of each horizon, and ``spread``.

    The spread is the return over the next date of the best fifth of the assets less that of the worst fifth, by the
    scores of the main horizon.
    """
    read, found = read_scores(scores), {}
    for horizon in data.horizons:
        score, target = read.of(f"score_h{horizon}"), read.of(f"target_h{horizon}")
        found[f"h{horizon}_rank_ic"] = rank_ic(score, target)
        found[f"h{horizon}_ic"] = information_coefficient(score, target)
    found["spread"] = quantile_spread(read.of(f"score_h{data.main_horizon}"), read.of("target_h1"))
    return found


def validation_figures(scores: pa.Table, data: DataParams) -> dict[str, float]:
    """Return what an epoch is judged by: ``valid_rank_ic`` decides; ``valid_ic`` beside it."""
    days = daily_figures(scores, data)
    return {f"valid_{name}": summarize(days[f"h{data.main_horizon}_{name}"]).mean for name in ("rank_ic", "ic")}


def fold_figures(scores: pa.Table, data: DataParams) -> dict[str, float]:
    """Return the figures of a fold: of the main horizon without a prefix, then of each horizon.

    ``sharpe`` is that of the daily spread, annual, before costs.
    """
    days = daily_figures(scores, data)
    main = summarize(days[f"h{data.main_horizon}_rank_ic"])
    found = {"rank_ic": main.mean, "rank_ic_sd": main.sd, "icir": main.icir, "num_dates": main.num_dates}
    found["ic"] = summarize(days[f"h{data.main_horizon}_ic"]).mean
    found["sharpe"] = summarize(days["spread"]).icir * math.sqrt(_YEAR)
    return found | {name: summarize(values).mean for name, values in days.items() if name != "spread"}


def evaluate(context: Context, params: ForecasterParams) -> dict[str, Any]:
    """Judge the scores of all folds, each date by the model that did not see it.

    Returns:
        For each horizon ``h5_rank_ic`` and ``h5_ic``, with ``_se``, the standard error for labels that overlap, and
        ``_num_dates``; those of the main horizon also without a prefix; ``sharpe`` and ``sharpe_se``; ``implausible``,
        and ``why``.
    """
    folds = {one.unit["fold"]: one.table("scores") for one in context.units("fold")}
    scores, data = finance.join_scores(folds), params.data
    days, found = daily_figures(scores, data), dict[str, Any]()
    for horizon in data.horizons:
        for name in ("rank_ic", "ic"):
            summary = summarize(days[f"h{horizon}_{name}"], horizon=horizon)
            figures = {"": summary.mean, "_se": summary.standard_error, "_num_dates": summary.num_dates}
            found |= {f"h{horizon}_{name}{ending}": value for ending, value in figures.items()}
    main = f"h{data.main_horizon}_"
    found |= {name.removeprefix(main): value for name, value in found.items() if name.startswith(main)}
    found["sharpe"], found["sharpe_se"] = finance.sharpe(days["spread"], periods_per_year=_YEAR)
    found |= plausibility(found["rank_ic"], found["rank_ic_se"], data)
    plain = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in found.items()}
    return plain | {"report": _lines(found, data)}


def plausibility(mean: float, standard_error: float, data: DataParams) -> dict[str, Any]:
    """Return whether a mean rank IC is ``implausible``, and ``why``.

    On real returns the bound is 0.1. On a generated market it is the best that its signal allows, and three standard
    errors.
    """
    bound, what = BELIEVED_RANK_IC, "real daily returns"
    if data.source == "generated":
        planted = abs(market_of(data).rank_ic(data.main_horizon))
        bound = _ABOVE_PLANTED * planted + 3 * (0.0 if math.isnan(standard_error) else standard_error)
        what = f"a market with a planted rank IC of {planted:.3f}"
    if not abs(mean) > bound:
        return {"implausible": False, "why": ""}
    return {
        "implausible": True,
        "why": f"A mean rank IC of {mean:+.3f} on {what} is beyond {bound:.3f}: a bug until proven otherwise. "
        "Look for features that are made of later prices, and for labels that reach into the training dates.",
    }


def _lines(found: dict[str, Any], data: DataParams) -> list[str]:
    lines = []
    for name in (f"h{horizon}" for horizon in data.horizons):
        rank, own = ([found[f"{name}_{one}{end}"] for end in ("", "_se", "_num_dates")] for one in ("rank_ic", "ic"))
        lines.append(f"{name}: rank IC {rank[0]:+.4f} ± {rank[1]:.4f}, IC {own[0]:+.4f} ± {own[1]:.4f}, n {rank[2]}")
    lines.append(f"Sharpe of the daily spread {found['sharpe']:+.2f} ± {found['sharpe_se']:.2f} a year, before costs")
    return [*lines, *filter(None, [found["why"]])]
