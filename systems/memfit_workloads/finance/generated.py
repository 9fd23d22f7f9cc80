"""Generated markets of any size with a planted signal, for tests and benchmarks. Not market data, and labelled so.

The table has one row per date and listed asset: ``date``, ``code``, ``f00`` ... , ``close``, ``target_h1`` ... All
features are standard normal noise; the signal of an asset is the sum of its ``f00`` over the last `SIGNAL_DATES` dates
over the root of their number. The logarithm of each day's return is the signal of the day before, times a loading, plus
noise. The closes are what these returns compound to, and ``target_h5`` is their simple return over the next 5 dates.

With c_h the sum of the signal's autocorrelations ``max(0, 1 - k / SIGNAL_DATES)`` over k = 0 ... h - 1, and v_h the
variance of the sum of h signals in a row, the signal and the next h daily returns have, at a loading a, the correlation
``a c_h / sqrt(a^2 v_h + (1 - a^2) h)``. Chosen is the loading that gives the wanted rank IC at the main horizon.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memfit.errors import UsageError, check_counts
from memfit.files import replacing
from memfit_workloads.finance._matrices import forward_returns

SIGNAL_DATES: Final = 5
_FEATURES, _NOISE, _LISTINGS = range(3)  # streams of random numbers
FIRST_DATE = np.datetime64("2000-01-03")
_FIRST_CLOSE = 100.0
_Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Market:
    """What a generated market is made of; two equal markets hold the same numbers (with one version of numpy).

    Attributes:
        num_dates: Business days from 2000-01-03 on.
        num_features: Features per row; the signal is in the first.
        information_coefficient: The planted rank IC: the expected Spearman correlation, within a date of many assets,
            of the signal and the return over the next ``horizon`` dates.
        horizons: Further horizons that have a label; 1 and the main one always have.
        volatility: Standard deviation of a day's log return.
        turnover: Share of the assets that are not listed all the time: half of them are listed later than the first
            date, half are delisted before the last. Their other rows are missing.
    """

    num_dates: int
    num_assets: int
    num_features: int
    information_coefficient: float = 0.1
    horizon: int = 5
    horizons: tuple[int, ...] = ()
    volatility: float = 0.02
    turnover: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(UsageError, 1, horizon=self.labels[0])
        check_counts(UsageError, self.labels[-1] + 1, num_dates=self.num_dates)
        if not 0 <= self._share < 1:
            raise UsageError(
                f"a market with information_coefficient={self.information_coefficient} cannot be generated.",
                rule=f"returns over {self.horizon} dates are the signals of as many, and do not follow one so closely.",
                remedy="pass an information_coefficient closer to 0",
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(f"f{number:02d}" for number in range(self.num_features))

    @property
    def labels(self) -> tuple[int, ...]:
        """The horizons of all labels, ascending."""
        return tuple(sorted({1, self.horizon, *self.horizons}))

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(f"target_h{horizon}" for horizon in self.labels)

    def rank_ic(self, horizon: int) -> float:
        """The expected rank IC of the signal with the return over so many dates, within a date of many assets.

        A forecast that gives the last dates of ``f00`` more weight is a little better beyond a horizon of 1, for the
        signal of tomorrow is made of them too: by 11 % at 5 dates.
        """
        loading = self.loading
        common, variance = _signal_moments(horizon)
        return _spearman(loading * common / math.sqrt(loading**2 * variance + (1 - loading**2) * horizon))

    @property
    def loading(self) -> float:
        """The correlation of the signal with the next day's log return."""
        return math.copysign(math.sqrt(self._share), self.information_coefficient)

    @property
    def _share(self) -> float:
        """The share of the signal in the variance of a day's log return; not from 0 to 1 where there is none."""
        pearson = 2 * math.sin(math.pi / 6 * self.information_coefficient)
        common, variance = _signal_moments(self.horizon)
        return pearson**2 * self.horizon / (common**2 - pearson**2 * (variance - self.horizon))


def write_market(path: Path, market: Market, *, rows_per_group: int = 1 << 17) -> None:
    """Write a generated market as one Parquet file, aside and renamed, one row group in memory at a time.

    Row groups are cut after as many whole dates as stay within ``rows_per_group`` (at least one); the numbers do not
    depend on it. Memory is about five row groups: 180 MiB for 64 features by default.
    """
    numbers = dict.fromkeys(market.feature_names, pa.float32()) | {"close": pa.float64()}
    numbers |= dict.fromkeys(market.label_names, pa.float32())
    schema = pa.schema({"date": pa.date32(), "code": pa.string()} | numbers)
    # Random numbers do not compress, and have no repeated values for a dictionary or bounds worth storing.
    options: dict[str, Any] = {"compression": "none", "use_dictionary": ["code"], "write_statistics": ["date"]}
    with replacing(path) as aside, pq.ParquetWriter(aside, schema, **options) as writer:
        for table in _tables(market, schema, max(1, rows_per_group // market.num_assets)):
            writer.write_table(table, row_group_size=max(len(table), 1))


def planted_signal(f00: _Floats) -> _Floats:
    """The signal of each date that has `SIGNAL_DATES` - 1 dates before it, from the feature ``f00``.

    Shapes: (num_dates, num_assets) in, (num_dates - SIGNAL_DATES + 1, num_assets) out. Standard normal.
    """
    num_dates = len(f00) - SIGNAL_DATES + 1
    total = f00[:num_dates].copy()
    for lag in range(1, SIGNAL_DATES):  # one order of summing, wherever a row group begins
        total += f00[lag : lag + num_dates]
    total *= np.float32(SIGNAL_DATES**-0.5)
    return total


def _random(market: Market, stream: int, date: int = 0) -> np.random.Generator:
    """A generator of its own for each stream and date, so that any block of dates can be drawn by itself."""
    return np.random.Generator(np.random.SFC64([market.seed, stream, date + SIGNAL_DATES]))


def _normal(market: Market, stream: int, first: int, num_dates: int, *shape: int) -> _Floats:
    """Normal numbers of a stream for the dates from ``first`` on, (num_dates, ...)."""
    values = np.empty((num_dates, *shape), np.float32)
    for row in range(num_dates):
        _random(market, stream, first + row).standard_normal(dtype=np.float32, out=values[row])
    return values


def _signal_moments(horizon: int) -> tuple[float, float]:
    """The covariance of a date's signal with the sum of it and the next ones, and that sum's variance."""
    lags = range(1, min(horizon, SIGNAL_DATES))
    common = 1.0 + sum(SIGNAL_DATES - lag for lag in lags) / SIGNAL_DATES
    variance = horizon + 2 * sum((horizon - lag) * (SIGNAL_DATES - lag) for lag in lags) / SIGNAL_DATES
    return common, variance


def _spearman(pearson: float) -> float:
    return 6 / math.pi * math.asin(pearson / 2)


def _listings(market: Market) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first date of each asset, and the date after its last one."""
    listed_from = np.zeros(market.num_assets, np.int64)
    listed_until = np.full(market.num_assets, market.num_dates, np.int64)
    random = _random(market, _LISTINGS)
    moving = random.permutation(market.num_assets)[: round(market.turnover * market.num_assets)]
    late, early = moving[::2], moving[1::2]
    listed_from[late] = random.integers(1, market.num_dates, len(late))
    listed_until[early] = random.integers(1, market.num_dates, len(early))
    return listed_from, listed_until


def _tables(market: Market, schema: pa.Schema, dates_per_table: int) -> Iterator[pa.Table]:
    listed_from, listed_until = _listings(market)
    codes = pa.array([f"A{number:05d}" for number in range(market.num_assets)])
    days = np.busday_offset(FIRST_DATE, np.arange(market.num_dates))
    level = np.full(market.num_assets, math.log(_FIRST_CLOSE))
    for first in range(0, market.num_dates, dates_per_table):
        dates = np.arange(first, min(first + dates_per_table, market.num_dates))
        listed = (listed_from <= dates[:, None]) & (dates[:, None] < listed_until)
        date_of_row, asset_of_row = np.nonzero(listed)
        features = _normal(market, _FEATURES, first, len(dates), market.num_features, market.num_assets)
        returns = _returns(market, first, len(dates) + market.labels[-1])
        returns[0] += level
        levels = returns.cumsum(axis=0)  # one order of summing, wherever a row group begins
        level, closes = levels[len(dates) - 1], np.exp(levels)
        columns = [pa.array(days[dates][date_of_row]), codes.take(pa.array(asset_of_row))]
        columns += [pa.array(features[:, number][listed]) for number in range(market.num_features)]
        columns.append(pa.array(closes[: len(dates)][listed]))
        for ahead in market.labels:
            label = forward_returns(closes, ahead)[: len(dates)].astype(np.float32)
            label[dates + ahead >= market.num_dates] = np.nan
            columns.append(pa.array(label[listed], from_pandas=True))  # NaN, not yet known, becomes null
        yield pa.Table.from_arrays(columns, schema=schema)


def _returns(market: Market, first: int, num_dates: int) -> NDArray[np.float64]:
    """The log returns of the dates from ``first`` on, (num_dates, num_assets)."""
    # The signal behind a date's return ends on the date before. The first numbers of a date's stream are its f00.
    history = _normal(market, _FEATURES, first - SIGNAL_DATES, num_dates + SIGNAL_DATES - 1, market.num_assets)
    returns = market.loading * planted_signal(history).astype(np.float64)
    returns += math.sqrt(1 - market.loading**2) * _normal(market, _NOISE, first, num_dates, market.num_assets)
    returns *= market.volatility
    return returns
