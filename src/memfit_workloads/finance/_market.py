"""The raw market as matrices, and what a check of it finds.

Shapes: D dates, A assets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from memfit.config import Settings
from memfit.errors import DataError

#: Examples of places that a finding names.
MAX_PLACES = 5

_TARGET = re.compile(r"target_h(\d+)")

_Floats = NDArray[np.float64]


class Record(Settings):
    """The base of every model of results: as JSON, what is undefined or infinite is null."""

    model_config = ConfigDict(ser_json_inf_nan="null")


class Finding(Record):
    """Something in the data that a check found.

    Attributes:
        name: Of the fault, in snake case.
        severity: ``red`` where no result that was built on the data counts; ``yellow`` where it may be right and needs
            a look.
        evidence: What was found, with numbers.
        where: The first few places: dates, codes and values.
        count: How many places there are.
        remedy: What to do.

    Example:
        >>> Finding(name="price_jump", severity="red", evidence="1 jump.", where=("A",), count=1, remedy="look").name
        'price_jump'
    """

    name: str
    severity: Literal["red", "yellow"]
    evidence: str
    where: tuple[str, ...]
    count: int
    remedy: str


class QualitySettings(Settings):
    """Bounds of the data checks.

    Attributes:
        max_gap_days: Longer gaps between dates are yellow; markets close for a week at most (10 days leaves room).
        max_jump: A close this many times the one before, or this part of it, is red: 5 is a gain of 400 % in a day.
        spike: A close this many times the one before (or this part of it) that comes back within ``spike_dates`` is
            red as well: 2 is a doubling.
        spike_dates: Dates within which a spike has come back.
        stale_dates: So many dates or more with one and the same close are stale.
        max_share_stale: A larger share of stale closes is red instead of yellow.
        max_share_missing: A larger share of missing closes between an asset's first and last one is yellow.
        max_feature_ic: A feature whose mean rank IC with a forward return is beyond this is red. Published single
            signals reach 0.02 to 0.06; 0.15 a date, on all dates, is not known from any past price or account.
        max_ic_drop: A feature that ranks the coming day's returns better than those of the day after by more than this
            is red, if it also ranks them half as well as those of the day just gone: a feature made of the past falls
            off at the close of its own date, one that looks ahead a date later.
        least_t: Rank ICs count only with a t statistic beyond this.
        max_ic_cells: Rank ICs are taken on all dates, or on evenly spread ones with so many cells in all, 100 at least.

    Example:
        >>> QualitySettings(max_jump=10).spike
        2.0
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


@dataclass(frozen=True)
class Market:
    """A market to be checked, as it was delivered.

    Attributes:
        dates: ``datetime64[D]``, shape (D,); ascending and distinct when all is well.
        codes: Names of the assets, length A.
        closes: Closing prices, shape (D, A), NaN where there is none.
        volumes: Shares or money traded, shape (D, A); None when not delivered.
        features: What a model sees on each date, by name, each of shape (D, A).
        targets: Forward simple returns by horizon in dates, each of shape (D, A).
        duplicates: The first few rows that came more than once, as text.
        num_duplicates: How many rows are such repetitions.

    Raises:
        DataError: If an array is not of the shape (D, A).

    Example:
        >>> Market(np.array(["2024-01-02"], "datetime64[D]"), ("A", "B"), np.array([[1.0, 2.0]])).volumes is None
        True
    """

    dates: NDArray[np.datetime64]
    codes: tuple[str, ...]
    closes: _Floats
    volumes: _Floats | None = None
    features: Mapping[str, _Floats] = field(default_factory=dict)
    targets: Mapping[int, _Floats] = field(default_factory=dict)
    duplicates: tuple[str, ...] = ()
    num_duplicates: int = 0

    def __post_init__(self) -> None:
        shape = (len(self.dates), len(self.codes))
        named = {"closes": self.closes, **self.features}
        named |= {f"target_h{horizon}": values for horizon, values in self.targets.items()}
        named |= {} if self.volumes is None else {"volumes": self.volumes}
        for name, values in named.items():
            if np.shape(values) != shape:
                raise DataError(
                    f"{name} has the shape {np.shape(values)}, and there are {shape[0]} dates and {shape[1]} codes.",
                    rule="a market holds arrays of one shape (num_dates, num_assets).",
                    remedy="fill absent assets with NaN",
                )


def read_market(prices: pa.Table, *others: pa.Table) -> Market:
    """A market from long tables of one row per date and asset, in any order.

    Rows of one date and code that come again are counted, and the first of them is used. Rows of the other tables on a
    date or for a code without prices are left out.

    Args:
        prices: Columns ``date``, ``code``, ``close`` and, optionally, ``volume``.
        others: Tables with ``date`` and ``code``. In all tables, columns ``target_h5`` are targets by horizon, columns
            ``score_h5`` are passed over, and every other column of numbers is a feature.

    Raises:
        DataError: If ``date``, ``code`` or ``close`` is missing, or a date or code is null.

    Example:
        >>> import datetime
        >>> day = datetime.date(2024, 1, 2)
        >>> table = pa.table({"date": [day, day, day], "code": ["A", "B", "B"], "close": [1.0, 2.0, 2.0]})
        >>> market = read_market(table)
        >>> market.closes, market.duplicates
        (array([[1., 2.]]), ('2024-01-02 B',))
    """
    for number, table in enumerate((prices, *others)):
        _refuse_without_keys(table, number)
    dates = np.unique(_days(prices))
    codes = tuple(sorted(prices["code"].cast(pa.string()).unique().to_pylist()))
    found: dict[str, _Floats] = {}
    duplicates: list[str] = []
    num_duplicates = 0
    for table in (prices, *others):
        cells, rows = _cells(table, dates, codes)
        first, again = _first_rows(cells)
        num_duplicates += len(again)
        for cell in cells[again][: MAX_PLACES - len(duplicates)]:
            duplicates.append(f"{dates[cell // len(codes)]} {codes[cell % len(codes)]}")
        for name in table.column_names:
            if name in ("date", "code") or name.startswith("score_h") or not _is_number(table[name].type):
                continue
            values = table[name].cast(pa.float64()).to_numpy(zero_copy_only=False)
            matrix = np.full(len(dates) * len(codes), np.nan)
            matrix[cells[first]] = values[rows[first]]
            found[name] = matrix.reshape(len(dates), len(codes))
    targets = {int(match[1]): values for name, values in found.items() if (match := _TARGET.fullmatch(name))}
    features = {
        name: values
        for name, values in found.items()
        if name not in ("close", "volume") and not _TARGET.fullmatch(name)
    }
    return Market(
        dates=dates,
        codes=codes,
        closes=found["close"],
        volumes=found.get("volume"),
        features=features,
        targets=targets,
        duplicates=tuple(duplicates),
        num_duplicates=num_duplicates,
    )


def _refuse_without_keys(table: pa.Table, number: int) -> None:
    for name in ("date", "code", "close")[: 3 if number == 0 else 2]:
        if name not in table.column_names or (name != "close" and table[name].null_count):
            raise DataError(
                f"table {number} has no column {name!r} without nulls; it has {', '.join(table.column_names)}.",
                rule="a market is one row per date and asset, with the columns date, code and close.",
                remedy="rename the columns, and drop rows without a date or a code",
            )


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


def _days(table: pa.Table) -> NDArray[np.datetime64]:
    days: NDArray[np.datetime64] = table["date"].to_numpy().astype("datetime64[D]")
    return days


def _cells(
    table: pa.Table, dates: NDArray[np.datetime64], codes: tuple[str, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each row on a known date and of a known code its cell in the matrix, and its number in the table."""
    encoded = table["code"].combine_chunks().cast(pa.string()).dictionary_encode()
    place = {code: number for number, code in enumerate(codes)}
    of_code = np.array([place.get(code, -1) for code in encoded.dictionary.to_pylist()], np.int64)
    column = of_code[encoded.indices.to_numpy()] if len(encoded) else np.empty(0, np.int64)
    days = _days(table)
    row = np.searchsorted(dates, days)
    known = (column >= 0) & (row < len(dates))
    known[known] &= dates[row[known]] == days[known]
    rows = np.flatnonzero(known)
    return row[rows] * len(codes) + column[rows], rows


def _first_rows(cells: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Where each distinct cell occurs first, and all other places."""
    _, first = np.unique(cells, return_index=True)
    again = np.ones(len(cells), np.bool_)
    again[first] = False
    return first, np.flatnonzero(again)
