"""Checks of the data before any profit counts: dates, prices, volumes, targets, and features that look ahead.

Shapes: D dates, A assets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import Field

from memfit.config import Settings
from memfit_workloads.finance._matrices import Floats, Market, forward_returns
from memfit_workloads.finance._metrics import rank_ic

_Bools = NDArray[np.bool_]
_Severity = Literal["red", "yellow"]
_MAX_PLACES = 5
# Days between two dates; dates with one close, and the share of the closes that may be so; share without a close.
_GAP_DAYS, _STALE_DATES, _MOST_STALE, _MOST_MISSING = 10, 10, 0.2, 0.01
# Dates, evenly spread, on which volumes are looked at; cells of a feature; the least t of a rank IC that counts.
_VOLUME_DATES, _CELLS, _LEAST_T = 250, 2_000_000, 5.0
# Targets are stored in 32 bits, and closes may be rounded to cents. Shares of them that agree: all, or most.
_RELATIVE, _ABSOLUTE, _ALL, _MOST = 1e-3, 1e-4, 0.99, 0.9


@dataclass(frozen=True)
class Finding:
    """Something in the data that a check found.

    Attributes:
        severity: ``red`` where no result that was built on the data counts; ``yellow`` where it may be right.
        where: The first few of ``count`` places: dates and codes, or the name of a column.
    """

    name: str
    severity: _Severity
    evidence: str
    where: tuple[str, ...]
    count: int
    remedy: str


class QualitySettings(Settings):
    """Bounds of the data checks that true data may pass: a close over the one before, and a feature's rank IC.

    Published single signals reach a rank IC of 0.02 to 0.06; 0.15 a date, on all dates, is not known from any past
    price or account.
    """

    max_jump: Annotated[float, Field(gt=1)] = 5.0
    max_feature_ic: Annotated[float, Field(gt=0, le=1)] = 0.15


#: What a check looked for: name, severity, where it is (dates or cells, or a column), what it is, and what to do.
_Row = tuple[str, _Severity, _Bools | Sequence[str], str, str]


def check_market(market: Market, settings: QualitySettings | None = None) -> tuple[Finding, ...]:
    """Return what is wrong with a market as it was delivered, the red findings first; nothing when all is well.

    Red: closes that are not above 0, or jump as in no market; volumes that are ranks or below 0; a target that is not
    the return from its date on; a feature that knows the future. Yellow: long gaps, missing or stale closes.
    """
    bounds = QualitySettings() if settings is None else settings
    rows = [*_closes(market, bounds), *_volumes(market), *_targets(market), *_features(market, bounds)]
    found = [_finding(market, *row) for row in rows]
    return tuple(sorted((one for one in found if one.count), key=lambda one: one.severity != "red"))


def _finding(
    market: Market, name: str, severity: _Severity, found: _Bools | Sequence[str], what: str, remedy: str
) -> Finding:
    """Return a row as a finding, its first places in words. A mask of fewer rows is of the last dates."""
    places, where = len(found), list(found[:_MAX_PLACES])
    if isinstance(found, np.ndarray):
        dates, cells = market.dates[len(market.dates) - len(found) :], np.argwhere(found)
        places = len(cells)
        where = [" ".join([f"{dates[row]}", *(market.codes[at] for at in of)]) for row, *of in cells[:_MAX_PLACES]]
    return Finding(name, severity, f"{places} {what}.", tuple(where), places, remedy)


def _closes(market: Market, bounds: QualitySettings) -> Iterable[_Row]:
    closes, known = market.closes, np.isfinite(market.closes)
    bad = (closes <= 0) | np.isinf(closes)
    listed = np.maximum.accumulate(known, axis=0) & np.maximum.accumulate(known[::-1], axis=0)[::-1]
    missing = listed & ~known & ~bad
    share = missing.sum() / max(int(listed.sum()), 1)
    same = closes[1:] == closes[:-1]
    before = np.pad(same, ((_STALE_DATES - 1, 0), (0, 0)))
    stale = np.asarray(sliding_window_view(before, _STALE_DATES - 1, axis=0).all(axis=-1))
    much: _Severity = "red" if stale.sum() > _MOST_STALE * known.sum() else "yellow"
    return (
        ("date_gap", "yellow", np.diff(market.dates) > np.timedelta64(_GAP_DAYS, "D"),
         f"dates come more than {_GAP_DAYS} days after the one before",
         "fill in the missing dates: a return over a gap is taken for that of one date"),
        ("bad_closes", "red", bad, "closes are 0, negative or infinite", "set them to missing, or correct them"),
        ("missing_closes", "yellow", missing & (share > _MOST_MISSING),
         f"closes ({share:.1%}) are missing between an asset's first and last",
         "fill them from the source: a held asset earns nothing on a date without a return"),
        ("price_jump", "red", np.abs(np.diff(_filled_logs(closes), axis=0)) > np.log(bounds.max_jump),
         f"closes are more than {bounds.max_jump:g} times the one before, or less than 1/{bounds.max_jump:g} of it",
         "look the prices up: an error of the unit, a split or a decimal point makes any profit; if they are right, "
         f"raise quality.max_jump ({bounds.max_jump:g})"),
        ("stale_prices", much, stale, f"closes are the same for {_STALE_DATES} dates up to theirs",
         "set closes without trading to missing: nobody could have traded then"),
    )  # fmt: skip


def _filled_logs(closes: Floats) -> Floats:
    """Return logarithms of the closes, each missing one that of the last known; NaN before the first."""
    usable = np.isfinite(closes) & (closes > 0)
    last = np.maximum.accumulate(np.where(usable, np.arange(len(closes))[:, None], 0), axis=0)
    logs = np.full(closes.shape, np.nan)
    np.log(closes, out=logs, where=usable)
    return np.take_along_axis(logs, last, axis=0)


def _volumes(market: Market) -> Iterable[_Row]:
    if (volumes := market.volumes) is None or not np.isfinite(volumes).any():
        return
    yield "negative_volumes", "red", volumes < 0, "volumes are below 0", "check the column"
    some = volumes[:: max(1, len(volumes) // _VOLUME_DATES)]
    steps = np.diff(np.sort(some[np.isfinite(some).sum(axis=1) >= 10], axis=1), axis=1)  # NaN come last
    usual = np.nanmedian(steps, axis=1, keepdims=True)
    is_even = (np.abs(steps - usual) < 0.1 * usual).sum(axis=1) > 0.8 * np.isfinite(steps).sum(axis=1)
    yield (
        "volume_is_rank",
        "red",
        np.isfinite(volumes) & bool(np.nanmax(volumes) <= 1 or is_even.sum() > len(steps) / 2),
        "volumes are at most 1, or evenly spaced on most dates, as ranks are",
        "use the shares or the money traded: percentile ranks say nothing about what could be traded",
    )


def _targets(market: Market) -> Iterable[_Row]:
    """Compare each target with the return that the closes give from its own date on."""
    for horizon, target in sorted(market.targets.items()):
        expected = forward_returns(market.closes, horizon)
        common = np.isfinite(target) & np.isfinite(expected)
        wrong = common & ~(np.abs(target - expected) <= _ABSOLUTE + _RELATIVE * np.abs(expected))
        share = 1 - wrong.sum() / max(int(common.sum()), 1)
        if share < _ALL:
            yield (
                "wrong_target",
                "red" if share < _MOST else "yellow",
                wrong,
                f"cells of target_h{horizon} ({1 - share:.1%}) are not the return over {horizon} dates from theirs on",
                f"make it close[t + {horizon}] / close[t] - 1, on the dates of the market, by code",
            )


def _features(market: Market, bounds: QualitySettings) -> Iterable[_Row]:
    """Compare each feature with the returns after its date.

    A rank IC is taken on evenly spread dates, with as many of them as independent as their distance makes them.
    """
    num_dates, num_assets = market.closes.shape
    most = max(_CELLS // max(num_assets, 1), 100)
    rows = np.unique(np.linspace(0, num_dates - 1, min(most, num_dates)).astype(np.int64))
    ahead = {horizon: forward_returns(market.closes, horizon)[rows] for horizon in sorted({1, *market.targets})}
    for name, values in market.features.items():
        for horizon, returns in ahead.items():
            ic = rank_ic(values[rows], returns)
            ic = ic[np.isfinite(ic)]
            mean = float(ic.mean()) if len(ic) >= 10 else math.nan
            independent = len(ic) * min(1.0, num_dates / max(len(rows), 1) / horizon)
            if abs(mean) > bounds.max_feature_ic and mean**2 * independent > _LEAST_T**2 * ic.var(ddof=1):
                yield (
                    "look_ahead_feature",
                    "red",
                    [name],
                    f"feature knows the future: {name} has a mean rank IC of {mean:+.3f} with the return over the "
                    f"{horizon} dates after its date; {bounds.max_feature_ic:g} is not plausible",
                    f"make {name} of what is known at the close of its date: a result that is learned from it is worth "
                    "nothing; if it is known by then, raise quality.max_feature_ic",
                )
                break
