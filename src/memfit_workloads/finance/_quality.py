"""Checks of the data before any profit counts: dates, codes, prices and volumes.

Shapes: D dates, A assets.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from memfit_workloads.finance._leaks import check_features, check_targets
from memfit_workloads.finance._market import MAX_PLACES, Finding, Market, QualitySettings

_Floats = NDArray[np.float64]
_Bools = NDArray[np.bool_]

# A date on which nearly all prices are those of the date before: at least so many assets, and this share of them.
_LEAST_ASSETS, _SHARE_REPEATED = 5, 0.95
# Dates, evenly spread, on which volumes are looked at; and how straight a line of ranks is.
_VOLUME_DATES, _STRAIGHT = 250, 0.999


def check_market(market: Market, settings: QualitySettings | None = None) -> tuple[Finding, ...]:
    """What is wrong with a market, the red findings first; nothing when all is well.

    Red: dates or rows that come twice, dates out of order, codes or whole columns of prices that come twice, closes
    that are not above 0, jumps and spikes that no market makes, volumes that are ranks or below 0, a target that is
    not the return from its date on, a feature that knows the future. Yellow: weekends, long gaps, missing or stale
    closes.

    Args:
        market: As it was delivered; see `read_market` for long tables.
        settings: The bounds.

    Example:
        >>> dates = np.array(["2024-01-02", "2024-01-03", "2024-01-04"], "datetime64[D]")
        >>> closes = np.array([[10.0, 20.0], [1010.0, 20.5], [10.2, 21.0]])  # 100 times too high for a day
        >>> [(found.name, found.where) for found in check_market(Market(dates, ("A", "B"), closes))]
        [('price_jump', ('2024-01-03 A: 10 to 1010', '2024-01-04 A: 1010 to 10.2'))]
    """
    bounds = QualitySettings() if settings is None else settings
    findings = [
        *_check_dates(market, bounds),
        *_check_codes(market),
        *_check_closes(market, bounds),
        *_check_jumps(market, bounds),
        *_check_stale(market, bounds),
        *_check_volumes(market),
        *check_targets(market),
        *check_features(market, bounds),
    ]
    return tuple(sorted(findings, key=lambda finding: finding.severity != "red"))


def _check_dates(market: Market, bounds: QualitySettings) -> Iterable[Finding]:
    if market.num_duplicates:
        yield Finding(
            name="duplicated_rows",
            severity="red",
            evidence=f"{market.num_duplicates} rows have the date and code of an earlier row.",
            where=market.duplicates,
            count=market.num_duplicates,
            remedy="keep one row per date and code; find out which of them is right where they differ",
        )
    days = market.dates.astype("datetime64[D]").astype(np.int64)
    steps = np.diff(days)
    yield from _dates(
        market, steps == 0, "duplicated_dates", "red", "dates come more than once", "keep one row per date"
    )
    yield from _dates(
        market, steps < 0, "dates_out_of_order", "red", "dates are earlier than the one before", "sort by date"
    )
    yield from _dates(
        market,
        steps > bounds.max_gap_days,
        "date_gap",
        "yellow",
        f"dates come more than {bounds.max_gap_days} days after the one before",
        "fill in the missing dates: a return over a gap is taken for that of one date",
    )
    yield from _dates(
        market,
        (days[1:] + 3) % 7 >= 5,  # 1970-01-01 was a Thursday
        "weekend_dates",
        "yellow",
        "dates are a Saturday or Sunday",
        "drop them, unless this market trades then",
    )


def _dates(
    market: Market, is_bad: _Bools, name: str, severity: str, what: str, remedy: str
) -> Iterable[Finding]:  # of the dates after the first
    found = np.flatnonzero(is_bad) + 1
    if len(found):
        yield Finding.model_validate(
            {
                "name": name,
                "severity": severity,
                "evidence": f"{len(found)} of {len(market.dates)} {what}.",
                "where": tuple(str(market.dates[row]) for row in found[:MAX_PLACES]),
                "count": len(found),
                "remedy": remedy,
            }
        )


def _check_codes(market: Market) -> Iterable[Finding]:
    codes = list(market.codes)
    twice = sorted({code for code in codes if codes.count(code) > 1}) if len(set(codes)) < len(codes) else []
    if twice:
        yield Finding(
            name="duplicated_codes",
            severity="red",
            evidence=f"{len(twice)} codes name more than one column.",
            where=tuple(twice[:MAX_PLACES]),
            count=len(twice),
            remedy="keep one column per code",
        )
    seen: dict[bytes, str] = {}
    pairs = []
    for column, code in enumerate(codes):
        closes = market.closes[:, column]
        # A few equal prices prove nothing; 20 that also move do.
        if np.isfinite(closes).sum() >= 20 and np.nanmax(closes) > np.nanmin(closes):
            first = seen.setdefault(np.ascontiguousarray(closes).tobytes(), code)
            if first is not code:
                pairs.append(f"{first} = {code}")
    if pairs:
        yield Finding(
            name="same_prices",
            severity="red",
            evidence=f"{len(pairs)} codes have every price of another code.",
            where=tuple(pairs[:MAX_PLACES]),
            count=len(pairs),
            remedy="drop the copies: the same asset would be held, and counted, more than once",
        )


def _check_closes(market: Market, bounds: QualitySettings) -> Iterable[Finding]:
    closes = market.closes
    bad = (closes <= 0) | np.isinf(closes)
    if bad.any():
        yield _of_cells(
            market,
            bad,
            "bad_closes",
            "red",
            "closes are 0, negative or infinite",
            "set them to missing, or correct them",
        )
    known = np.isfinite(closes)
    started = np.maximum.accumulate(known, axis=0)
    not_ended = np.maximum.accumulate(known[::-1], axis=0)[::-1]
    missing = started & not_ended & ~known & ~bad
    share = missing.sum() / max(int((started & not_ended).sum()), 1)
    if not known.any():
        yield _of_cells(market, ~known, "no_closes", "red", "closes, all of them, are missing", "check the column")
    elif share > bounds.max_share_missing:
        yield _of_cells(
            market,
            missing,
            "missing_closes",
            "yellow",
            f"closes ({share:.1%}) are missing between an asset's first and last",
            "fill them from the source: a held asset without a return is taken for delisted",
        )


def _check_jumps(market: Market, bounds: QualitySettings) -> Iterable[Finding]:
    log_closes = _filled_logs(market.closes)
    steps = np.diff(log_closes, axis=0)
    is_jump = np.abs(steps) > np.log(bounds.max_jump)
    yield from _of_steps(
        market,
        is_jump,
        "price_jump",
        f"closes are more than {bounds.max_jump:g} times the one before, or less than 1/{bounds.max_jump:g} of it",
        bounds,
    )
    is_spike = np.zeros_like(is_jump)
    for row, column in zip(*np.nonzero((np.abs(steps) > np.log(bounds.spike)) & ~is_jump), strict=True):
        after = log_closes[row + 2 : row + 2 + bounds.spike_dates, column]
        is_spike[row, column] = bool((np.abs(after - log_closes[row, column]) < abs(steps[row, column]) / 4).any())
    yield from _of_steps(
        market, is_spike, "price_spike", f"closes jump and come back within {bounds.spike_dates} dates", bounds
    )


def _filled_logs(closes: _Floats) -> _Floats:
    """Logarithms of the closes, each missing one that of the last known; NaN before the first."""
    usable = np.isfinite(closes) & (closes > 0)
    last = np.where(usable, np.arange(len(closes))[:, None], 0)
    np.maximum.accumulate(last, axis=0, out=last)
    logs = np.full(closes.shape, np.nan)
    np.log(closes, out=logs, where=usable)
    return np.take_along_axis(logs, last, axis=0)


def _of_steps(market: Market, is_bad: _Bools, name: str, what: str, bounds: QualitySettings) -> Iterable[Finding]:
    rows, columns = np.nonzero(is_bad)
    if not len(rows):
        return
    logs = _filled_logs(market.closes)
    places = [
        f"{market.dates[row + 1]} {market.codes[column]}: "
        f"{np.exp(logs[row, column]):.6g} to {np.exp(logs[row + 1, column]):.6g}"
        for row, column in zip(rows[:MAX_PLACES], columns[:MAX_PLACES], strict=True)
    ]
    yield Finding(
        name=name,
        severity="red",
        evidence=f"{len(rows)} {what}.",
        where=tuple(places),
        count=len(rows),
        remedy="look the prices up: an error of the unit, a split or a decimal point makes any profit; if they are "
        f"right, raise max_jump ({bounds.max_jump:g}) or spike ({bounds.spike:g}) of the quality settings",
    )


def _check_stale(market: Market, bounds: QualitySettings) -> Iterable[Finding]:
    closes = market.closes
    same = closes[1:] == closes[:-1]
    # Length of the run of equal closes that each step ends, in steps.
    row = np.arange(1, len(closes))[:, None]
    broken = np.maximum.accumulate(np.where(same, 0, row), axis=0)
    length = np.where(same, row - broken, 0)
    ends = length >= bounds.stale_dates - 1
    ends[:-1] &= ~same[1:]
    stale_cells = int((length[ends] + 1).sum())
    if ends.any():
        share = stale_cells / max(int(np.isfinite(closes).sum()), 1)
        rows, columns = np.nonzero(ends)
        places = tuple(
            f"{market.codes[column]}: {length[end, column] + 1} dates up to {market.dates[end + 1]}"
            for end, column in zip(rows[:MAX_PLACES], columns[:MAX_PLACES], strict=True)
        )
        yield Finding(
            name="stale_prices",
            severity="red" if share > bounds.max_share_stale else "yellow",
            evidence=f"{len(rows)} times a close stays the same for {bounds.stale_dates} dates or more, "
            f"{share:.2%} of all closes; the longest is {length.max() + 1} dates.",
            where=places,
            count=len(rows),
            remedy="set closes without trading to missing: nobody could have traded at them",
        )
    both = np.isfinite(closes[1:]) & np.isfinite(closes[:-1])
    repeated = (both.sum(axis=1) >= _LEAST_ASSETS) & (same.sum(axis=1) >= _SHARE_REPEATED * both.sum(axis=1))
    yield from _dates(
        market,
        repeated,
        "repeated_prices",
        "yellow",
        f"dates have the prices of the date before for {_SHARE_REPEATED:.0%} of the assets",
        "drop dates on which the market was closed",
    )


def _check_volumes(market: Market) -> Iterable[Finding]:
    volumes = market.volumes
    if volumes is None or not np.isfinite(volumes).any():
        return
    if (volumes < 0).any():
        yield _of_cells(market, volumes < 0, "negative_volumes", "red", "volumes are below 0", "check the column")
    rows = np.unique(np.linspace(0, len(volumes) - 1, _VOLUME_DATES).astype(np.int64))
    lines = [_straightness(volumes[row]) for row in rows]
    known = [line for line in lines if not np.isnan(line)]
    straight = sum(line > _STRAIGHT for line in known)
    largest = float(np.nanmax(volumes))
    if largest <= 1 or (known and straight > len(known) / 2):
        yield Finding(
            name="volume_is_rank",
            severity="red",
            evidence=f"volumes run from {np.nanmin(volumes):g} to {largest:g}, and are evenly spaced, as ranks are, on "
            f"{straight} of {len(known)} dates that were looked at.",
            where=tuple(str(market.dates[row]) for row in rows[:1]),
            count=int(np.isfinite(volumes).sum()),
            remedy="use the shares or the money traded: percentile ranks say nothing about what could be traded",
        )


def _straightness(volumes: _Floats) -> float:
    """The correlation of a date's volumes with their own ranks: 1 when they are evenly spaced."""
    values = np.sort(volumes[np.isfinite(volumes)])
    if len(values) < 10 or values[0] == values[-1]:
        return float("nan")
    return float(np.corrcoef(values, np.arange(len(values)))[0, 1])


def _of_cells(market: Market, is_bad: _Bools, name: str, severity: str, what: str, remedy: str) -> Finding:
    rows, columns = np.nonzero(is_bad)
    return Finding.model_validate(
        {
            "name": name,
            "severity": severity,
            "evidence": f"{len(rows)} {what}.",
            "where": tuple(
                f"{market.dates[row]} {market.codes[column]}"
                for row, column in zip(rows[:MAX_PLACES], columns[:MAX_PLACES], strict=True)
            ),
            "count": len(rows),
            "remedy": remedy,
        }
    )
