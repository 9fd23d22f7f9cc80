"""Real daily prices for a workload on stocks: the closing prices of 20 large US stocks, 1990-01-02 to 2022-12-28.

They come with the package skfolio (BSD-3-Clause) as one CSV file. The file is read as it lies on disk; skfolio itself
is never imported, since that would load pandas, scikit-learn and an optimizer.

The 20 are companies that were still large in 2022, so returns on them say nothing about a strategy (survivorship).
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from memfit.errors import DataError
from memfit_workloads.finance._matrices import forward_returns

FEATURES: Final = ("return_1", "return_5", "return_20", "volatility_20", "distance_high_60")
#: The sector of each ticker of the file, as S&P Dow Jones and MSCI class them (GICS).
SECTORS: Final = {
    "AAPL": "technology", "AMD": "technology", "MSFT": "technology", "BAC": "financials", "JPM": "financials",
    "BBY": "discretionary", "HD": "discretionary", "KO": "staples", "PEP": "staples", "PG": "staples",
    "WMT": "staples", "CVX": "energy", "RRC": "energy", "XOM": "energy", "GE": "industrials", "JNJ": "health",
    "LLY": "health", "MRK": "health", "PFE": "health", "UNH": "health",
}  # fmt: skip
HISTORY_DATES: Final = 60
"""Dates, the current one included, that a row's features look at: the first row is on the 60th date of the file."""

_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Prices:
    """Closing prices in dollars (D, A), adjusted for splits and dividends as the file has them.

    ``dates`` are trading days in ascending order, ``codes`` the ticker symbols of the assets.
    """

    dates: NDArray[np.datetime64]
    codes: tuple[str, ...]
    closes: _Floats


def read_prices() -> Prices:
    """All prices of the file."""
    table = pa.csv.read_csv(_prices_path())
    dates = table.column(0).to_numpy().astype("datetime64[D]")
    closes = np.column_stack([column.to_numpy() for column in table.columns[1:]]).astype(np.float64)
    return Prices(dates, tuple(table.column_names[1:]), closes)


def prices_fingerprint() -> str:
    """The SHA-256 of the price file's bytes, in hex: what a panel built from it depends on."""
    return hashlib.sha256(_prices_path().read_bytes()).hexdigest()


def daily_features(start: date | str, end: date | str, horizons: Sequence[int]) -> pa.Table:
    """One row per date and asset: the features known at the close, the close, and the returns from there on.

    Nothing after ``end``, which is included, is used: a label that would be known later is null. Features of the first
    rows look back before ``start``. A target is the plain return: within a date, rank IC and ranking losses do not
    change when the mean of the date is taken off. The columns, ordered by date and code, are ``date``, ``code``,
    `FEATURES`, ``close`` (dollars) and for each horizon h ``target_h<h>``.

    Raises:
        DataError: If a horizon is below 1, or no row between the two dates has a target at the longest.
    """
    prices = read_prices()
    first, stop = span_of(prices, start, end, horizons)
    known = prices.closes[:stop]
    features = features_of(known)[first:]
    columns = {
        "date": pa.array(np.repeat(prices.dates[first:stop], len(prices.codes))),
        "code": pa.array(list(prices.codes) * (stop - first)),
        **{name: pa.array(features[:, :, i].ravel().astype(np.float32)) for i, name in enumerate(FEATURES)},
        "close": pa.array(known[first:].ravel()),
    }
    for horizon in horizons:
        targets = forward_returns(known, horizon)[first:].ravel().astype(np.float32)
        columns[f"target_h{horizon}"] = pa.array(targets, from_pandas=True)
    return pa.table(columns)


def span_of(prices: Prices, start: date | str, end: date | str, horizons: Sequence[int]) -> tuple[int, int]:
    """Return the first of the dates with features from ``start`` to ``end``, and the one after the last."""
    first, stop = np.searchsorted(prices.dates, [np.datetime64(start, "D"), np.datetime64(end, "D") + 1]).tolist()
    first = max(first, HISTORY_DATES - 1)
    if min(horizons) < 1 or stop - first <= max(horizons):
        named = ", ".join(map(str, horizons))
        raise DataError(
            f"{max(stop - first, 0)} dates with features lie from {start} to {end}, at a horizon of {named}.",
            rule=f"the prices run from {prices.dates[0]} to {prices.dates[-1]}; the first {HISTORY_DATES - 1} dates "
            "are history for the features, and the last dates before the end have no target at their horizon.",
            remedy=f"choose start and end within {prices.dates[HISTORY_DATES - 1]} to {prices.dates[-1]}, more than "
            "the longest horizon apart in trading days, and horizons of at least 1",
        )
    return first, stop


def features_of(closes: _Floats) -> _Floats:
    """The features (D, A, 5) of each date and asset, in the order of `FEATURES`, from closes up to that date only.

    ``return_1``, ``return_5``, ``return_20``: return over that many dates. ``volatility_20``: standard deviation of the
    last 20 daily returns. ``distance_high_60``: close over the highest of the last 60 closes, minus 1. Each is then
    standardised across the assets of its date (all 0 where they do not differ). NaN on the first `HISTORY_DATES` - 1
    dates.
    """
    features = np.full((*closes.shape, len(FEATURES)), np.nan)
    if len(closes) < HISTORY_DATES:
        return features
    begin = HISTORY_DATES - 1
    found = [closes[begin:] / closes[begin - span : -span] - 1 for span in (1, 5, 20)]
    # Windows, not running sums: a rounding error of the past would leak from date to date.
    daily = closes[begin - 19 :] / closes[begin - 20 : -1] - 1
    found.append(sliding_window_view(daily, 20, axis=0).std(axis=-1))
    found.append(closes[begin:] / sliding_window_view(closes, HISTORY_DATES, axis=0).max(axis=-1) - 1)
    known = np.stack(found, axis=-1)
    known -= known.mean(axis=1, keepdims=True)
    spread = known.std(axis=1, keepdims=True)
    # Equal values leave a spread of rounding errors, which would be blown up to 1.
    features[begin:] = np.divide(known, spread, out=np.zeros_like(known), where=spread > 1e-12)
    return features


def _prices_path() -> Path:
    spec = importlib.util.find_spec("skfolio")
    assert spec is not None and spec.submodule_search_locations  # a requirement of memfit-systems
    return Path(spec.submodule_search_locations[0], "datasets", "data", "sp500_dataset.csv.gz")
