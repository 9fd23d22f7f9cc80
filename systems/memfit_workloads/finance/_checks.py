"""Checks of the data before any profit counts: dates, codes, prices, volumes, targets, and features that look ahead.

Shapes: D dates, A assets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from memfit.config import Settings
from memfit_workloads.finance._matrices import MAX_PLACES, Floats, Market, forward_returns
from memfit_workloads.finance._metrics import rank_ic

_Bools = NDArray[np.bool_]
_Severity = Literal["red", "yellow"]
# A date on which nearly all prices are those of the date before: at least so many assets, and this share of them.
_LEAST_ASSETS, _SHARE_REPEATED = 5, 0.95
# Dates, evenly spread, on which volumes are looked at; and how straight a line of ranks is.
_VOLUME_DATES, _STRAIGHT = 250, 0.999
# Targets are stored in 32 bits, and closes may be rounded to cents.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
_ALL, _MOST = 0.99, 0.9


@dataclass(frozen=True)
class Finding:
    """Something in the data that a check found.

    Attributes:
        severity: ``red`` where no result that was built on the data counts; ``yellow`` where it may be right.
        where: The first few of ``count`` places: dates, codes and values.
    """

    name: str
    severity: _Severity
    evidence: str
    where: tuple[str, ...]
    count: int
    remedy: str


class QualitySettings(Settings):
    """Bounds of the data checks; docs/workflow.md has each with its unit.

    Published single signals reach a rank IC of 0.02 to 0.06; 0.15 a date, on all dates, is not known from any past
    price or account. A feature made of the past falls off at the close of its own date, one that looks ahead a date
    later: its drop counts if it also ranks the coming day half as well as the day just gone.
    """

    max_gap_days: Annotated[int, Field(ge=1)] = 10
    max_jump: Annotated[float, Field(gt=1)] = 5.0
    spike: Annotated[float, Field(gt=1)] = 2.0
    spike_dates: Annotated[int, Field(ge=1)] = 5
    stale_dates: Annotated[int, Field(ge=2)] = 10
    max_share_stale: Annotated[float, Field(ge=0, le=1)] = 0.2
    max_share_missing: Annotated[float, Field(ge=0, le=1)] = 0.01
    max_feature_ic: Annotated[float, Field(gt=0, le=1)] = 0.15
    max_ic_drop: Annotated[float, Field(gt=0, le=1)] = 0.05
    least_t: Annotated[float, Field(gt=0)] = 5.0
    max_ic_cells: Annotated[int, Field(ge=1)] = 2_000_000


#: A check that found something: name, severity, where (dates, cells, or texts), what, and what to do.
_Row = tuple[str, _Severity, _Bools | Sequence[str], str, str]


def check_market(market: Market, settings: QualitySettings | None = None) -> tuple[Finding, ...]:
    """Return what is wrong with a market as it was delivered, the red findings first; nothing when all is well.

    Red: dates or rows that come twice, dates out of order, codes or whole columns of prices that come twice, closes
    that are not above 0, jumps and spikes that no market makes, volumes that are ranks or below 0, a target that is not
    the return from its date on, a feature that knows the future. Yellow: weekends, long gaps, missing or stale closes.
    """
    bounds = QualitySettings() if settings is None else settings
    found = [
        *_findings(market, _dates_and_codes(market, bounds)),
        *_findings(market, _closes_and_volumes(market, bounds)),
        *_jumps(market, bounds),
        *_stale(market, bounds),
        *_targets(market),
        *_features(market, bounds),
    ]
    return tuple(sorted(found, key=lambda one: one.severity != "red"))


def _findings(
    market: Market, rows: Iterable[_Row], detail: Callable[[int, int], str] = lambda _row, _column: ""
) -> Iterable[Finding]:
    """Return a finding for each row that found something; ``detail`` is added to a cell's date and code.

    A mask of D - 1 rows is of the dates after the first.
    """
    for name, severity, found, what, remedy in rows:
        if not isinstance(found, np.ndarray):
            count, where, of = len(found), tuple(found[:MAX_PLACES]), ""
        else:
            dates, places = market.dates[len(market.dates) - len(found) :], np.argwhere(found)
            count, of = len(places), f" of {len(market.dates)}" if found.ndim == 1 else ""
            where = tuple(
                f"{dates[row]}" + "".join(f" {market.codes[at]}{detail(row, at)}" for at in column)
                for row, *column in places[:MAX_PLACES]
            )
        if count:
            yield Finding(name, severity, f"{count}{of} {what}.", where, count, remedy)


def _dates_and_codes(market: Market, bounds: QualitySettings) -> Iterable[_Row]:
    days = market.dates.astype("datetime64[D]").astype(np.int64)
    steps, codes = np.diff(days), market.codes
    copies, seen = [], dict[bytes, str]()
    for column, code in enumerate(codes):
        closes = market.closes[:, column]
        # A few equal prices prove nothing; 20 that also move do.
        if np.isfinite(closes).sum() >= 20 and np.nanmax(closes) > np.nanmin(closes):
            first = seen.setdefault(np.ascontiguousarray(closes).tobytes(), code)
            copies += [] if first is code else [f"{first} = {code}"]
    twice = sorted({code for code in codes if codes.count(code) > 1}) if len(set(codes)) < len(codes) else []
    return (
        ("duplicated_rows", "red", market.duplicates, "rows have the date and code of an earlier row",
         "keep one row per date and code; find out which of them is right where they differ"),
        ("duplicated_dates", "red", steps == 0, "dates come more than once", "keep one row per date"),
        ("dates_out_of_order", "red", steps < 0, "dates are earlier than the one before", "sort by date"),
        ("date_gap", "yellow", steps > bounds.max_gap_days,
         f"dates come more than {bounds.max_gap_days} days after the one before",
         "fill in the missing dates: a return over a gap is taken for that of one date"),
        ("weekend_dates", "yellow", (days[1:] + 3) % 7 >= 5,  # 1970-01-01 was a Thursday
         "dates are a Saturday or Sunday", "drop them, unless this market trades then"),
        ("duplicated_codes", "red", twice, "codes name more than one column", "keep one column per code"),
        ("same_prices", "red", copies, "codes have every price of another code",
         "drop the copies: the same asset would be held, and counted, more than once"),
    )  # fmt: skip


def _closes_and_volumes(market: Market, bounds: QualitySettings) -> Iterable[_Row]:
    closes, known = market.closes, np.isfinite(market.closes)
    bad = (closes <= 0) | np.isinf(closes)
    listed = np.maximum.accumulate(known, axis=0) & np.maximum.accumulate(known[::-1], axis=0)[::-1]
    missing = listed & ~known & ~bad
    share = missing.sum() / max(int(listed.sum()), 1)
    volumes = np.full(closes.shape, np.nan) if market.volumes is None else market.volumes
    ranked = np.isfinite(volumes) if _are_ranks(volumes) else np.zeros(closes.shape, bool)
    same = closes[1:] == closes[:-1]
    both = (np.isfinite(closes[1:]) & np.isfinite(closes[:-1])).sum(axis=1)
    return (
        ("bad_closes", "red", bad, "closes are 0, negative or infinite", "set them to missing, or correct them"),
        ("no_closes", "red", ~known & ~known.any(), "closes, all of them, are missing", "check the column"),
        ("missing_closes", "yellow", missing & (share > bounds.max_share_missing),
         f"closes ({share:.1%}) are missing between an asset's first and last",
         "fill them from the source: a held asset without a return is taken for delisted"),
        ("repeated_prices", "yellow", (both >= _LEAST_ASSETS) & (same.sum(axis=1) >= _SHARE_REPEATED * both),
         f"dates have the prices of the date before for {_SHARE_REPEATED:.0%} of the assets",
         "drop dates on which the market was closed"),
        ("negative_volumes", "red", volumes < 0, "volumes are below 0", "check the column"),
        ("volume_is_rank", "red", ranked, "volumes are at most 1, or evenly spaced on most dates, as ranks are",
         "use the shares or the money traded: percentile ranks say nothing about what could be traded"),
    )  # fmt: skip


def _are_ranks(volumes: Floats) -> bool:
    """Whether volumes are shares of the highest one, or on most dates a straight line of their own ranks."""
    if not np.isfinite(volumes).any():
        return False
    lines = []
    for row in np.unique(np.linspace(0, len(volumes) - 1, _VOLUME_DATES).astype(np.int64)):
        values = np.sort(volumes[row][np.isfinite(volumes[row])])
        if len(values) >= 10 and values[0] < values[-1]:
            lines.append(np.corrcoef(values, np.arange(len(values)))[0, 1] > _STRAIGHT)
    return bool(np.nanmax(volumes) <= 1 or (lines and np.mean(lines) > 0.5))


def _jumps(market: Market, bounds: QualitySettings) -> Iterable[Finding]:
    logs = _filled_logs(market.closes)
    steps = np.diff(logs, axis=0)
    is_jump = np.abs(steps) > np.log(bounds.max_jump)
    is_spike = np.zeros_like(is_jump)
    for row, column in zip(*np.nonzero((np.abs(steps) > np.log(bounds.spike)) & ~is_jump), strict=True):
        after = logs[row + 2 : row + 2 + bounds.spike_dates, column]
        is_spike[row, column] = bool((np.abs(after - logs[row, column]) < abs(steps[row, column]) / 4).any())
    remedy = (
        "look the prices up: an error of the unit, a split or a decimal point makes any profit; if they are right, "
        f"raise max_jump ({bounds.max_jump:g}) or spike ({bounds.spike:g}) of the quality settings"
    )
    what = f"closes are more than {bounds.max_jump:g} times the one before, or less than 1/{bounds.max_jump:g} of it"
    came_back = f"closes jump and come back within {bounds.spike_dates} dates"
    rows: tuple[_Row, ...] = (
        ("price_jump", "red", is_jump, what, remedy),
        ("price_spike", "red", is_spike, came_back, remedy),
    )
    return _findings(market, rows, lambda row, at: f": {np.exp(logs[row, at]):.6g} to {np.exp(logs[row + 1, at]):.6g}")


def _filled_logs(closes: Floats) -> Floats:
    """Return logarithms of the closes, each missing one that of the last known; NaN before the first."""
    usable = np.isfinite(closes) & (closes > 0)
    last = np.where(usable, np.arange(len(closes))[:, None], 0)
    np.maximum.accumulate(last, axis=0, out=last)
    logs = np.full(closes.shape, np.nan)
    np.log(closes, out=logs, where=usable)
    return np.take_along_axis(logs, last, axis=0)


def _stale(market: Market, bounds: QualitySettings) -> Iterable[Finding]:
    closes = market.closes
    same = closes[1:] == closes[:-1]
    # Length of the run of equal closes that each step ends, in steps.
    row = np.arange(1, len(closes))[:, None]
    length = np.where(same, row - np.maximum.accumulate(np.where(same, 0, row), axis=0), 0)
    ends = length >= bounds.stale_dates - 1
    ends[:-1] &= ~same[1:]
    share = int((length[ends] + 1).sum()) / max(int(np.isfinite(closes).sum()), 1)
    places = [
        f"{market.codes[column]}: {length[end, column] + 1} dates up to {market.dates[end + 1]}"
        for end, column in np.argwhere(ends)
    ]
    what = (
        f"times a close stays the same for {bounds.stale_dates} dates or more, {share:.2%} of all closes; the longest "
        f"is {length.max(initial=0) + 1} dates"
    )
    severity: _Severity = "red" if share > bounds.max_share_stale else "yellow"
    remedy = "set closes without trading to missing: nobody could have traded at them"
    return _findings(market, [("stale_prices", severity, places, what, remedy)])


def _targets(market: Market) -> Iterable[Finding]:
    """Compare each target with the return that the closes give from its own date on."""
    for horizon, target in sorted(market.targets.items()):
        share, wrong = _matches(target, forward_returns(market.closes, horizon))
        if share >= _ALL:
            continue
        places = [
            f"{market.dates[row]} {market.codes[column]}: {target[row, column]:.6g}"
            for row, column in np.argwhere(wrong)[:MAX_PLACES]
        ]
        count = int(wrong.sum())
        severity: _Severity = "yellow"
        if math.isnan(share):
            name, what = "target_unchecked", "has no cell with closes to check it by"
        elif share >= _MOST:
            name = "target_differs"
            what = f"differs from the return over {horizon} dates in {count} cells ({1 - share:.1%})"
        else:
            (name, says), severity = _explain(market, horizon, target), "red"
            what = f"equals the return over {horizon} dates from its own date on in {share:.1%} of its cells only; "
            what += says
        remedy = f"make it close[t + {horizon}] / close[t] - 1, on the dates of the market, by code"
        yield Finding(name, severity, f"target_h{horizon} {what}.", tuple(places), count, remedy)


def _matches(target: Floats, expected: Floats) -> tuple[float, _Bools]:
    """Return the share of common cells that agree, NaN when there are none; and where they do not, (D, A)."""
    common = np.isfinite(target) & np.isfinite(expected)
    wrong = common & ~(np.abs(target - expected) <= _ABSOLUTE + _RELATIVE * np.abs(expected))
    num = int(common.sum())
    return (1.0 - int(wrong.sum()) / num if num else math.nan), wrong


def _explain(market: Market, horizon: int, target: Floats) -> tuple[str, str]:
    """Return what a wrong target is instead, where it is a return over other dates."""
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


def _features(market: Market, bounds: QualitySettings) -> Iterable[Finding]:
    """Compare each feature with the returns after its date.

    A rank IC is taken on evenly spread dates, with as many of them as independent as their distance makes them.
    """
    num_dates = len(market.dates)
    most = max(bounds.max_ic_cells // max(len(market.codes), 1), 100)
    rows = np.unique(np.linspace(0, num_dates - 1, min(most, num_dates)).astype(np.int64))
    spacing = num_dates / max(len(rows), 1)
    ahead = (
        {h: forward_returns(market.closes, h)[rows] for h in sorted({1, *market.targets})} if market.features else {}
    )
    for name, values in market.features.items():
        what = _too_good(values[rows], ahead, spacing, bounds) or _falls_late(
            values[rows], (forward_returns(market.closes, 1, shift)[rows] for shift in (-1, 0, 1)), bounds
        )
        if what:
            remedy = (
                f"make {name} of what is known at the close of its date; a result that is learned from it is worth "
                "nothing; if it is known by then, raise max_feature_ic or max_ic_drop of the quality settings"
            )
            yield Finding("look_ahead_feature", "red", f"{name} {what}.", (name,), 1, remedy)


def _too_good(feature: Floats, ahead: dict[int, Floats], spacing: float, bounds: QualitySettings) -> str:
    for horizon, returns in ahead.items():
        mean, t = _mean_and_t(rank_ic(feature, returns), min(1.0, spacing / horizon))
        if abs(mean) > bounds.max_feature_ic and abs(t) > bounds.least_t:
            return (
                f"has a mean rank IC of {mean:+.3f} (t {t:.0f}) with the return over the {horizon} dates after its "
                f"date; {bounds.max_feature_ic:g} is not plausible"
            )
    return ""


def _falls_late(feature: Floats, days: Iterable[Floats], bounds: QualitySettings) -> str:
    before, coming, after = (rank_ic(feature, returns) for returns in days)
    drop, t = _mean_and_t(coming - after, 1.0)
    gone, now = _mean_and_t(before, 1.0)[0], _mean_and_t(coming, 1.0)[0]
    if not (abs(drop) > bounds.max_ic_drop and abs(t) > bounds.least_t and abs(now) >= abs(gone) / 2):
        return ""
    return (
        f"ranks the returns of the day after its date ({now:+.3f} mean rank IC) much like those of the day before "
        f"({gone:+.3f}), and loses it only a day later (by {drop:+.3f}, t {t:.0f}): it looks a date ahead"
    )


def _mean_and_t(series: Floats, share_independent: float) -> tuple[float, float]:
    known = series[np.isfinite(series)]
    if len(known) < 10:
        return math.nan, math.nan
    mean, error = float(known.mean()), float(known.std(ddof=1)) / math.sqrt(len(known) * share_independent)
    return mean, mean / error if error > 0 else math.copysign(math.inf, mean)
