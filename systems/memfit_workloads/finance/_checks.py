"""Checks of the data before any profit counts: dates, codes, prices, volumes, targets, and features that look ahead.

Shapes: D dates, A assets.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
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


#: What a check looked for: name, severity, where it is (dates or cells, or texts), what it is, and what to do.
_Row = tuple[str, _Severity, _Bools | Sequence[str], str, str]


def check_market(market: Market, settings: QualitySettings | None = None) -> tuple[Finding, ...]:
    """Return what is wrong with a market as it was delivered, the red findings first; nothing when all is well.

    Red: dates, rows or codes that come twice, dates out of order, closes that are not above 0, jumps and spikes that no
    market makes, volumes that are ranks or below 0, a target that is not the return from its date on, a feature that
    knows the future. Yellow: long gaps, missing or stale closes.
    """
    bounds = QualitySettings() if settings is None else settings
    checks = (_dates_and_codes, _closes_and_volumes, _jumps, _stale, _targets, _features)
    found = [_finding(market, *row) for check in checks for row in check(market, bounds)]
    return tuple(sorted((one for one in found if one.count), key=lambda one: one.severity != "red"))


def _finding(
    market: Market, name: str, severity: _Severity, found: _Bools | Sequence[str], what: str, remedy: str
) -> Finding:
    """Return a row as a finding, its first places in words. A mask of D - 1 rows is of the dates after the first."""
    count, where = len(found), found[:MAX_PLACES]
    if isinstance(found, np.ndarray):
        dates, places = market.dates[len(market.dates) - len(found) :], np.argwhere(found)
        first = places[:MAX_PLACES]
        count, where = (
            len(places),
            [" ".join([f"{dates[row]}", *(market.codes[at] for at in of)]) for row, *of in first],
        )
    return Finding(name, severity, f"{count} {what}.", tuple(where), count, remedy)


def _dates_and_codes(market: Market, bounds: QualitySettings) -> Iterable[_Row]:
    steps, codes = np.diff(market.dates.astype("datetime64[D]").astype(np.int64)), Counter(market.codes)
    copies, seen = [], dict[bytes, str]()
    for code, closes in zip(market.codes, market.closes.T, strict=True):
        # A few equal prices prove nothing; 20 that also move do.
        if np.isfinite(closes).sum() >= 20 and np.nanmax(closes) > np.nanmin(closes):
            first = seen.setdefault(closes.tobytes(), code)
            copies += [] if first is code else [f"{first} = {code}"]
    return (
        ("duplicated_rows", "red", market.duplicates, "rows have the date and code of an earlier row",
         "keep one row per date and code; find out which of them is right where they differ"),
        ("duplicated_dates", "red", steps == 0, "dates come more than once", "keep one row per date"),
        ("dates_out_of_order", "red", steps < 0, "dates are earlier than the one before", "sort by date"),
        ("date_gap", "yellow", steps > bounds.max_gap_days,
         f"dates come more than {bounds.max_gap_days} days after the one before",
         "fill in the missing dates: a return over a gap is taken for that of one date"),
        ("duplicated_codes", "red", sorted(code for code, count in codes.items() if count > 1),
         "codes name more than one column", "keep one column per code"),
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
    return (
        ("bad_closes", "red", bad, "closes are 0, negative or infinite", "set them to missing, or correct them"),
        ("no_closes", "red", ~known & ~known.any(), "closes, all of them, are missing", "check the column"),
        ("missing_closes", "yellow", missing & (share > bounds.max_share_missing),
         f"closes ({share:.1%}) are missing between an asset's first and last",
         "fill them from the source: a held asset without a return is taken for delisted"),
        ("negative_volumes", "red", volumes < 0, "volumes are below 0", "check the column"),
        ("volume_is_rank", "red", np.isfinite(volumes) & _are_ranks(volumes),
         "volumes are at most 1, or evenly spaced on most dates, as ranks are",
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


def _jumps(market: Market, bounds: QualitySettings) -> Iterable[_Row]:
    logs = _filled_logs(market.closes)
    steps = np.diff(logs, axis=0)
    jumps, spikes = list[str](), list[str]()
    for row, column in np.argwhere(np.abs(steps) > np.log(min(bounds.spike, bounds.max_jump))):
        size, after = abs(steps[row, column]), logs[row + 2 : row + 2 + bounds.spike_dates, column]
        before, now = np.exp(logs[row : row + 2, column])
        text = f"{market.dates[row + 1]} {market.codes[column]}: {before:.6g} to {now:.6g}"
        if size > np.log(bounds.max_jump):
            jumps.append(text)
        elif size > np.log(bounds.spike) and (np.abs(after - logs[row, column]) < size / 4).any():
            spikes.append(text)
    remedy = (
        "look the prices up: an error of the unit, a split or a decimal point makes any profit; if they are right, "
        f"raise max_jump ({bounds.max_jump:g}) or spike ({bounds.spike:g}) of the quality settings"
    )
    what = f"closes are more than {bounds.max_jump:g} times the one before, or less than 1/{bounds.max_jump:g} of it"
    yield "price_jump", "red", jumps, what, remedy
    yield "price_spike", "red", spikes, f"closes jump and come back within {bounds.spike_dates} dates", remedy


def _filled_logs(closes: Floats) -> Floats:
    """Return logarithms of the closes, each missing one that of the last known; NaN before the first."""
    usable = np.isfinite(closes) & (closes > 0)
    last = np.maximum.accumulate(np.where(usable, np.arange(len(closes))[:, None], 0), axis=0)
    logs = np.full(closes.shape, np.nan)
    np.log(closes, out=logs, where=usable)
    return np.take_along_axis(logs, last, axis=0)


def _stale(market: Market, bounds: QualitySettings) -> Iterable[_Row]:
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
    yield "stale_prices", severity, places, what, "set closes without trading to missing: nobody could have traded then"


def _targets(market: Market, _: QualitySettings) -> Iterable[_Row]:
    """Compare each target with the return that the closes give from its own date on."""
    for horizon, target in sorted(market.targets.items()):
        name = f"target_h{horizon}"
        share, wrong = _matches(target, forward_returns(market.closes, horizon))
        remedy = f"make it close[t + {horizon}] / close[t] - 1, on the dates of the market, by code"
        if math.isnan(share):
            yield (
                "target_unchecked",
                "yellow",
                [name],
                f"target, {name}, has no cell with closes to check it by",
                remedy,
            )
        elif share < _MOST:
            found, says = _explain(market, horizon, target)
            yield (
                found,
                "red",
                wrong,
                f"cells of {name} are no return over {horizon} dates from their date on: {says}",
                remedy,
            )
        elif share < _ALL:
            what = f"cells of {name} ({1 - share:.1%}) differ from the return over {horizon} dates"
            yield "target_differs", "yellow", wrong, what, remedy


def _matches(target: Floats, expected: Floats) -> tuple[float, _Bools]:
    """Return the share of common cells that agree, NaN when there are none; and where they do not, (D, A)."""
    common = np.isfinite(target) & np.isfinite(expected)
    wrong = common & ~(np.abs(target - expected) <= _ABSOLUTE + _RELATIVE * np.abs(expected))
    num = int(common.sum())
    return (1.0 - int(wrong.sum()) / num if num else math.nan), wrong


def _explain(market: Market, horizon: int, target: Floats) -> tuple[str, str]:
    """Return what a wrong target is instead, where it is a return over other dates."""
    shifted = [(horizon, shift) for shift in (1, -1, 2, -2, -horizon)]
    for over, shift in (*shifted, (horizon - 1, 0), (horizon + 1, 0)):
        share, _ = _matches(target, forward_returns(market.closes, over, shift))
        if share >= _MOST and shift:
            by, when = "one" if abs(shift) == 1 else abs(shift), "later" if shift > 0 else "earlier"
            return "target_shifted", f"shifted by {by}, the return that starts {abs(shift)} dates {when} ({share:.1%})"
        if share >= _MOST:
            return "target_horizon", f"the return over {over} dates ({share:.1%})"
    ic = rank_ic(target, forward_returns(market.closes, horizon))
    mean = float(np.nanmean(ic)) if np.isfinite(ic).any() else math.nan
    return "target_unknown", f"their mean rank IC with it is {mean:.2f}"


def _features(market: Market, bounds: QualitySettings) -> Iterable[_Row]:
    """Compare each feature with the returns after its date.

    A rank IC is taken on evenly spread dates, with as many of them as independent as their distance makes them.
    """
    if not market.features:
        return
    num_dates = len(market.dates)
    most = max(bounds.max_ic_cells // max(len(market.codes), 1), 100)
    rows = np.unique(np.linspace(0, num_dates - 1, min(most, num_dates)).astype(np.int64))
    spacing = num_dates / max(len(rows), 1)
    ahead = {horizon: forward_returns(market.closes, horizon)[rows] for horizon in sorted({1, *market.targets})}
    days = [forward_returns(market.closes, 1, shift)[rows] for shift in (-1, 0, 1)]
    for name, values in market.features.items():
        if says := _too_good(values[rows], ahead, spacing, bounds) or _falls_late(values[rows], days, bounds):
            remedy = (
                f"make {name} of what is known at the close of its date; a result that is learned from it is worth "
                "nothing; if it is known by then, raise max_feature_ic or max_ic_drop of the quality settings"
            )
            yield "look_ahead_feature", "red", [name], f"feature knows the future: {name} {says}", remedy


def _too_good(feature: Floats, ahead: dict[int, Floats], spacing: float, bounds: QualitySettings) -> str:
    for horizon, returns in ahead.items():
        mean, t = _mean_and_t(rank_ic(feature, returns), min(1.0, spacing / horizon))
        if abs(mean) > bounds.max_feature_ic and abs(t) > bounds.least_t:
            return (
                f"has a mean rank IC of {mean:+.3f} (t {t:.0f}) with the return over the {horizon} dates after its "
                f"date; {bounds.max_feature_ic:g} is not plausible"
            )
    return ""


def _falls_late(feature: Floats, days: Sequence[Floats], bounds: QualitySettings) -> str:
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
