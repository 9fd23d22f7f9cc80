"""Checks that targets are what they say, and that features know nothing of the future.

Shapes: D dates, A assets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from memfit.evaluation._market import MAX_PLACES, Finding, Market, QualitySettings
from memfit.evaluation._rank_ic import rank_ic

_Floats = NDArray[np.float64]

# Targets are stored in 32 bits, and closes may be rounded to cents.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
_ALL, _MOST = 0.99, 0.9


def forward_returns(closes: _Floats, horizon: int, shift: int = 0) -> _Floats:
    """The return from ``shift`` dates later on over ``horizon`` dates, shape (D, A), NaN where it is not known.

    Example:
        >>> closes = np.array([[1.0], [2.0], [3.0], [4.5]])
        >>> forward_returns(closes, 1).ravel(), forward_returns(closes, 1, 1).ravel()
        (array([1. , 0.5, 0.5, nan]), array([0.5, 0.5, nan, nan]))
    """
    num_dates = len(closes)
    returns = np.full(closes.shape, np.nan)
    usable = np.where(np.isfinite(closes) & (closes > 0), closes, np.nan)
    first, last = max(0, -shift), num_dates - max(horizon + shift, shift, 0)
    if last > first:
        begin = usable[first + shift : last + shift]
        returns[first:last] = usable[first + shift + horizon : last + shift + horizon] / begin - 1.0
    return returns


def check_targets(market: Market) -> Iterable[Finding]:
    """Each target against the return that the closes give from its own date on."""
    for horizon, target in sorted(market.targets.items()):
        share, wrong = _matches(target, forward_returns(market.closes, horizon))
        if math.isnan(share):
            yield _target_finding("target_unchecked", "yellow", horizon, "has no cell with closes to check it by", 0)
            continue
        if share >= _ALL:
            continue
        places = tuple(
            f"{market.dates[row]} {market.codes[column]}: {target[row, column]:.6g}"
            for row, column in zip(*(found[:MAX_PLACES] for found in np.nonzero(wrong)), strict=True)
        )
        count = int(wrong.sum())
        if share >= _MOST:
            what = f"differs from the return over {horizon} dates in {count} cells ({1 - share:.1%})"
            yield _target_finding("target_differs", "yellow", horizon, what, count, places)
            continue
        name, says = _explain(market, horizon, target)
        what = f"equals the return over {horizon} dates from its own date on in {share:.1%} of its cells only; {says}"
        yield _target_finding(name, "red", horizon, what, count, places)


def _matches(target: _Floats, expected: _Floats) -> tuple[float, NDArray[np.bool_]]:
    """The share of common cells that agree, NaN when there are none; and where they do not, (D, A)."""
    common = np.isfinite(target) & np.isfinite(expected)
    wrong = common & ~(np.abs(target - expected) <= _ABSOLUTE + _RELATIVE * np.abs(expected))
    num = int(common.sum())
    return (1.0 - int(wrong.sum()) / num if num else math.nan), wrong


def _explain(market: Market, horizon: int, target: _Floats) -> tuple[str, str]:
    """What a wrong target is instead, where it is a return over other dates."""
    for shift in (1, -1, 2, -2, -horizon):
        share, _ = _matches(target, forward_returns(market.closes, horizon, shift))
        if share >= _MOST:
            when = f"{shift} dates later" if shift > 0 else f"{-shift} dates earlier"
            by = "one" if abs(shift) == 1 else str(abs(shift))
            return "target_shifted", f"it is shifted by {by}: it is the return that starts {when} ({share:.1%})"
    for other in (horizon - 1, horizon + 1):
        share, _ = _matches(target, forward_returns(market.closes, other)) if other else (0.0, None)
        if share >= _MOST:
            return "target_horizon", f"it is the return over {other} dates ({share:.1%})"
    ic = rank_ic(target, forward_returns(market.closes, horizon))
    mean = float(np.nanmean(ic)) if np.isfinite(ic).any() else math.nan
    return "target_unknown", f"its mean rank IC with that return is {mean:.2f}"


def _target_finding(
    name: str, severity: str, horizon: int, what: str, count: int, places: tuple[str, ...] = ()
) -> Finding:
    return Finding.model_validate(
        {
            "name": name,
            "severity": severity,
            "evidence": f"target_h{horizon} {what}.",
            "where": places,
            "count": count,
            "remedy": f"make it close[t + {horizon}] / close[t] - 1, on the dates of the market, by code",
        }
    )


def check_features(market: Market, bounds: QualitySettings) -> Iterable[Finding]:
    """Each feature against the returns after its date.

    A rank IC is taken on evenly spread dates, with as many of them as independent as their distance makes them.
    """
    if not market.features:
        return
    num_dates = len(market.dates)
    most = max(bounds.max_ic_cells // max(len(market.codes), 1), 100)
    rows = np.unique(np.linspace(0, num_dates - 1, min(most, num_dates)).astype(np.int64))
    spacing = num_dates / max(len(rows), 1)
    ahead = {h: forward_returns(market.closes, h)[rows] for h in sorted({1, *market.targets})}
    day_after = forward_returns(market.closes, 1, 1)[rows]
    day_before = forward_returns(market.closes, 1, -1)[rows]
    for name, values in market.features.items():
        feature = values[rows]
        finding = _too_good(name, feature, ahead, spacing, bounds)
        finding = finding or _falls_late(name, feature, (day_before, ahead[1], day_after), bounds)
        if finding is not None:
            yield finding


def _too_good(
    name: str, feature: _Floats, ahead: dict[int, _Floats], spacing: float, bounds: QualitySettings
) -> Finding | None:
    for horizon, returns in ahead.items():
        mean, t = _mean_and_t(rank_ic(feature, returns), min(1.0, spacing / horizon))
        if abs(mean) > bounds.max_feature_ic and abs(t) > bounds.least_t:
            what = (
                f"{name} has a mean rank IC of {mean:+.3f} (t {t:.0f}) with the return over the {horizon} dates after "
                f"its date; {bounds.max_feature_ic:g} is not plausible."
            )
            return _feature_finding(name, what)
    return None


def _falls_late(
    name: str, feature: _Floats, days: tuple[_Floats, _Floats, _Floats], bounds: QualitySettings
) -> Finding | None:
    before, coming, after = (rank_ic(feature, returns) for returns in days)
    drop, t = _mean_and_t(coming - after, 1.0)
    gone, now = _mean_and_t(before, 1.0)[0], _mean_and_t(coming, 1.0)[0]
    if not (abs(drop) > bounds.max_ic_drop and abs(t) > bounds.least_t and abs(now) >= abs(gone) / 2):
        return None
    what = (
        f"{name} ranks the returns of the day after its date ({now:+.3f} mean rank IC) much like those of the day "
        f"before ({gone:+.3f}), and loses it only a day later (by {drop:+.3f}, t {t:.0f}): it looks a date ahead."
    )
    return _feature_finding(name, what)


def _mean_and_t(series: _Floats, share_independent: float) -> tuple[float, float]:
    known = series[np.isfinite(series)]
    if len(known) < 10:
        return math.nan, math.nan
    mean, error = float(known.mean()), float(known.std(ddof=1)) / math.sqrt(len(known) * share_independent)
    return mean, mean / error if error > 0 else math.copysign(math.inf, mean)


def _feature_finding(name: str, what: str) -> Finding:
    return Finding(
        name="look_ahead_feature",
        severity="red",
        evidence=what,
        where=(name,),
        count=1,
        remedy=f"make {name} of what is known at the close of its date; a result that is learned from it is worth "
        "nothing; if it is known by then, raise max_feature_ic or max_ic_drop of the quality settings",
    )
