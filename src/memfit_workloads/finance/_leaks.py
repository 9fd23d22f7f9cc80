"""Checks that targets are what they say, and that features know nothing of the future.

Shapes: D dates, A assets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from memfit.evaluation import rank_ic
from memfit_workloads.finance._market import MAX_PLACES, Finding, Market, QualitySettings

_Floats = NDArray[np.float64]

# Targets are stored in 32 bits, and closes may be rounded to cents.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
_ALL, _MOST = 0.99, 0.9
#: The dates that volatilities are usually taken over: looked at beside the horizons of the targets, and one by one.
_SIZE_DATES = 20


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
    """Each feature against the returns after its date, and against their sizes.

    A rank IC is taken on evenly spread dates, with as many of them as independent as their distance makes them.

    A feature that looks ahead may know how large returns become and not which way they go, as a volatility of coming
    dates does. Sizes last: what is made of past returns ranks the sizes of coming ones nearly as well as those of past
    ones, no better, and hardly worse one date further on. What ranks the coming ones better, or falls off at a later
    date, is yellow and not red, for it may be known beforehand: a date of earnings, a volatility that options imply.
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
    thin = rows[:: math.ceil(10 * len(rows) * len(market.codes) / bounds.max_ic_cells) or 1]
    windows, days = _sizes(market.closes, sorted({*ahead, _SIZE_DATES}), rows), _sizes_by_day(market.closes, thin)
    for name, values in market.features.items():
        feature = values[rows]
        finding = _too_good(name, feature, ahead, spacing, bounds)
        finding = finding or _falls_late(name, feature, (day_before, ahead[1], day_after), bounds)
        finding = finding or _knows_sizes(name, feature, windows, spacing, bounds)
        finding = finding or _falls_late_on_sizes(name, values[thin], days, bounds)
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


def _sizes(closes: _Floats, horizons: Sequence[int], rows: NDArray[np.int64]) -> dict[int, tuple[_Floats, _Floats]]:
    """By horizon, the mean size of the daily returns over so many dates after each row's, and over as many before."""
    size = np.abs(forward_returns(closes, 1))  # of the date after
    total = np.vstack([np.zeros((1, size.shape[1])), np.cumsum(np.nan_to_num(size), axis=0)])
    known = np.vstack([np.zeros((1, size.shape[1])), np.cumsum(np.isfinite(size), axis=0)])

    def mean(first: int, length: int) -> _Floats:
        """From ``first`` dates after each row's on; NaN where one is not known."""
        begin = rows + first
        inside = (begin >= 0) & (begin + length <= len(size))
        begin = np.where(inside, begin, 0)
        end = np.minimum(begin + length, len(size))
        is_whole = inside[:, None] & (known[end] - known[begin] == length)
        return np.where(is_whole, (total[end] - total[begin]) / length, np.nan)

    return {horizon: (mean(0, horizon), mean(-horizon, horizon)) for horizon in horizons}


def _sizes_by_day(closes: _Floats, rows: NDArray[np.int64]) -> list[_Floats]:
    """The sizes of the returns of each of the dates after each row's."""
    return [np.abs(forward_returns(closes, 1, after))[rows] for after in range(_SIZE_DATES + 1)]


def _knows_sizes(
    name: str, feature: _Floats, sizes: Mapping[int, tuple[_Floats, _Floats]], spacing: float, bounds: QualitySettings
) -> Finding | None:
    for horizon, (coming, past) in sizes.items():
        ahead, back = rank_ic(feature, coming), rank_ic(feature, past)
        now, before = _mean_and_t(ahead, 1.0)[0], _mean_and_t(back, 1.0)[0]
        more, t = _mean_and_t(np.sign(now) * ahead - np.sign(before) * back, min(1.0, spacing / (2 * horizon)))
        if more > bounds.max_ic_drop and t > bounds.least_t:
            what = (
                f"{name} ranks the sizes of the returns over the {horizon} dates after it better ({now:+.3f} mean "
                f"rank IC) than over the {horizon} dates before ({before:+.3f}, t {t:.0f}); sizes of the past do not."
            )
            return _size_finding(name, what)
    return None


def _falls_late_on_sizes(
    name: str, feature: _Floats, sizes: Sequence[_Floats], bounds: QualitySettings
) -> Finding | None:
    at = rank_ic(feature, sizes[0])
    for number, following in enumerate(sizes[1:], start=1):
        behind = rank_ic(feature, following)
        now, later = _mean_and_t(at, 1.0)[0], _mean_and_t(behind, 1.0)[0]
        drop, t = _mean_and_t(np.sign(now) * at - np.sign(later) * behind, 1.0)
        if drop > bounds.max_ic_drop and t > bounds.least_t:
            what = (
                f"{name} ranks the sizes of returns up to {number} dates after its own ({now:+.3f} mean rank IC) and "
                f"falls off at the next ({later:+.3f}, t {t:.0f}); what is made of the past falls off at its own date."
            )
            return _size_finding(name, what)
        at = behind
    return None


def _size_finding(name: str, what: str) -> Finding:
    return Finding(
        name="looks_ahead_at_sizes",
        severity="yellow",
        evidence=what,
        where=(name,),
        count=1,
        remedy=f"make {name} of what is known at the close of its date; leave it if it is announced or implied by then",
    )


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
