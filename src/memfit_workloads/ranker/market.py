"""Generated markets of any size with a planted signal, for tests and benchmarks. Not market data, and labelled so.

The table has one row per date and listed asset: ``date``, ``code``, ``f00`` ... , ``target``. All features are standard
normal noise; the signal of an asset is the sum of its ``f00`` over the last `SIGNAL_DATES` dates over the root of their
number, so a model that sees one date finds a part of it and a model that sees a window finds it all. The target mixes
the signal with noise that is a moving sum over the next ``horizon`` dates: like forward returns, the labels of
neighbouring dates overlap, and the last ``horizon`` dates have none.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memfit.errors import UsageError

SIGNAL_DATES: Final = 5
_FEATURES, _NOISE, _LISTINGS = range(3)  # streams of random numbers
_FIRST_DATE = np.datetime64("2000-01-03")
_GENERATED_KEY, _MARKET_KEY = b"memfit.generated", b"memfit.market"
_Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Market:
    """What a generated market is made of; two equal markets hold the same numbers (with one version of numpy).

    Attributes:
        num_dates: Business days from 2000-01-03 on.
        num_assets: Assets over the whole time.
        num_features: Features per row; the signal is in the first.
        information_coefficient: The planted rank IC: the expected Spearman correlation of signal and target within a
            date of many assets.
        horizon: Number of dates that a label looks ahead.
        turnover: Share of the assets that are not listed all the time: half of them are listed later than the first
            date, half are delisted before the last. Their other rows are missing.
        seed: Seed of all random numbers.

    Example:
        >>> market = Market(num_dates=250, num_assets=100, num_features=8).resized(64 << 20)
        >>> market.num_dates, market.panel_bytes >> 20
        (18642, 64)
    """

    num_dates: int
    num_assets: int
    num_features: int
    information_coefficient: float = 0.1
    horizon: int = 5
    turnover: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_dates", self.horizon + 1), ("num_assets", 2), ("num_features", 1), ("horizon", 1)):
            if getattr(self, name) < least:
                raise _bad_market(name, getattr(self, name), f"at least {least}")
        if not abs(self.information_coefficient) < 1:
            raise _bad_market("information_coefficient", self.information_coefficient, "between -1 and 1")
        if not 0 <= self.turnover <= 1:
            raise _bad_market("turnover", self.turnover, "from 0 to 1")
        if self.seed < 0:
            raise _bad_market("seed", self.seed, "at least 0")

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The feature columns: f00, f01, ..."""
        return tuple(f"f{number:02d}" for number in range(self.num_features))

    @property
    def panel_bytes(self) -> int:
        """Bytes of the dense float32 panel of all features and the target; missing rows take their place as NaN."""
        return self.num_dates * self._date_bytes

    @property
    def num_rows(self) -> int:
        """Rows of the table, which leaves out the assets that are not listed on a date."""
        listed_from, listed_until = _listings(self)
        return int((listed_until - listed_from).sum())

    def resized(self, panel_bytes: int) -> Market:
        """The same market over the fewest dates whose panel has at least ``panel_bytes``."""
        return replace(self, num_dates=max(-(-panel_bytes // self._date_bytes), self.horizon + 1))

    @property
    def _date_bytes(self) -> int:
        return self.num_assets * (self.num_features + 1) * 4


def write_market(path: Path, market: Market, *, rows_per_group: int = 1 << 17) -> None:
    """Write a generated market as one Parquet file, aside and renamed, one row group in memory at a time.

    The file's metadata say ``memfit.generated = true`` and hold the market's parameters; `read_market` reads them back.

    Args:
        path: The file; its directory must exist.
        market: What to generate.
        rows_per_group: Row groups are cut after as many whole dates as stay within this number of rows (at least one).
            The numbers do not depend on it. Memory is about five row groups: 180 MiB for 64 features by default.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = Path(directory, "market.parquet")
        ...     write_market(path, Market(num_dates=20, num_assets=4, num_features=2, turnover=0.0))
        ...     pq.read_table(path).slice(0, 1).to_pylist()
        [{'date': datetime.date(2000, 1, 3), 'code': 'A00000', 'f00': ..., 'f01': ..., 'target': ...}]
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    schema = _schema(market)
    # Random numbers do not compress, and have no repeated values for a dictionary or bounds worth storing.
    options: dict[str, Any] = {"compression": "none", "use_dictionary": ["code"], "write_statistics": ["date"]}
    try:
        with pq.ParquetWriter(aside, schema, **options) as writer:
            for table in _tables(market, schema, max(1, rows_per_group // market.num_assets)):
                writer.write_table(table, row_group_size=max(len(table), 1))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def read_market(path: Path) -> Market | None:
    """The market that a Parquet file was generated from; None for a file that does not say it was generated."""
    metadata = pq.read_schema(path).metadata or {}
    if metadata.get(_GENERATED_KEY) != b"true":
        return None
    return Market(**json.loads(metadata[_MARKET_KEY]))


def planted_signal(f00: _Floats) -> _Floats:
    """The signal of each date that has `SIGNAL_DATES` - 1 dates before it, from the feature ``f00``.

    Shapes: (num_dates, num_assets) in, (num_dates - SIGNAL_DATES + 1, num_assets) out. Standard normal.

    Example:
        >>> planted_signal(np.ones((6, 2), np.float32)).tolist() == [[np.float32(5**0.5)] * 2] * 2
        True
    """
    num_dates = len(f00) - SIGNAL_DATES + 1
    total = f00[:num_dates].copy()
    for lag in range(1, SIGNAL_DATES):  # one order of summing, wherever a row group begins
        total += f00[lag : lag + num_dates]
    total *= np.float32(SIGNAL_DATES**-0.5)
    return total


def _bad_market(name: str, value: object, wanted: str) -> UsageError:
    return UsageError(
        f"a market with {name}={value} cannot be generated.",
        rule=f"{name} must be {wanted}.",
        remedy=f"pass {name} {wanted}",
    )


def _schema(market: Market) -> pa.Schema:
    features = [pa.field(name, pa.float32()) for name in market.feature_names]
    fields = [pa.field("date", pa.date32()), pa.field("code", pa.string()), *features, pa.field("target", pa.float32())]
    return pa.schema(fields, metadata={_GENERATED_KEY: b"true", _MARKET_KEY: json.dumps(asdict(market)).encode()})


def _random(market: Market, stream: int, date: int = 0) -> np.random.Generator:
    """A generator of its own for each stream and date, so that any block of dates can be drawn by itself."""
    return np.random.Generator(np.random.SFC64([market.seed, stream, date + SIGNAL_DATES]))


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
    days = np.busday_offset(_FIRST_DATE, np.arange(market.num_dates))
    for first in range(0, market.num_dates, dates_per_table):
        dates = np.arange(first, min(first + dates_per_table, market.num_dates))
        listed = (listed_from <= dates[:, None]) & (dates[:, None] < listed_until)
        date_of_row, asset_of_row = np.nonzero(listed)
        features, target = _numbers(market, first, len(dates))
        columns = [features[:, number][listed] for number in range(market.num_features)]
        target = pa.array(target[listed], from_pandas=True)  # NaN, not yet known, becomes null
        yield pa.Table.from_arrays(
            [pa.array(days[dates][date_of_row]), codes.take(pa.array(asset_of_row)), *columns, target],
            schema=schema,
        )


def _numbers(market: Market, first: int, num_dates: int) -> tuple[_Floats, _Floats]:
    """Features (num_dates, num_features, num_assets) and target (num_dates, num_assets) from date ``first`` on.

    The signal needs ``f00`` of the dates before, the noise shocks of the dates after; both are drawn anew.
    """
    features = np.empty((num_dates, market.num_features, market.num_assets), np.float32)
    history = np.empty((num_dates + SIGNAL_DATES - 1, market.num_assets), np.float32)
    for row in range(SIGNAL_DATES - 1):  # the first numbers of a date's stream are its f00
        _random(market, _FEATURES, first + row - SIGNAL_DATES + 1).standard_normal(dtype=np.float32, out=history[row])
    for row in range(num_dates):
        _random(market, _FEATURES, first + row).standard_normal(dtype=np.float32, out=features[row])
    history[SIGNAL_DATES - 1 :] = features[:, 0]

    shocks = np.empty((num_dates + market.horizon - 1, market.num_assets), np.float32)
    for row in range(len(shocks)):
        _random(market, _NOISE, first + 1 + row).standard_normal(dtype=np.float32, out=shocks[row])
    noise = np.zeros((num_dates, market.num_assets), np.float32)
    for ahead in range(market.horizon):
        noise += shocks[ahead : ahead + num_dates]

    # For two normal variables Spearman's correlation is 6/pi asin(r/2): plant the r that has the wanted rank IC.
    pearson = 2 * math.sin(math.pi / 6 * market.information_coefficient)
    target = np.float32(pearson) * planted_signal(history)
    target += np.float32(math.sqrt((1 - pearson**2) / market.horizon)) * noise
    target[max(market.num_dates - market.horizon - first, 0) :] = np.nan
    return features, target
