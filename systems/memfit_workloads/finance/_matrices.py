"""Tables of one row per date and asset as matrices of dates and assets.

Shapes: D dates, A assets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from memfit.data import decode_dates
from memfit.errors import DataError

Floats = NDArray[np.float64]
_SCORE_OR_TARGET = re.compile(r"(score|target)_h([1-9]\d*)")


@dataclass(frozen=True)
class Scores:
    """Scores and forward returns of D dates and A assets, both ascending and distinct.

    ``values`` has ``score_h{h}`` and ``target_h{h}`` by name, each float64 of shape (D, A); NaN where the asset is
    absent or the return is not known.
    """

    dates: NDArray[np.datetime64]
    codes: tuple[str, ...]
    values: Mapping[str, Floats]

    @property
    def horizons(self) -> tuple[int, ...]:
        """The horizons that have both a score and a target, ascending."""
        named = {int(name.removeprefix("score_h")) for name in self.values if name.startswith("score_h")}
        return tuple(sorted(horizon for horizon in named if f"target_h{horizon}" in self.values))

    def of(self, name: str) -> Floats:
        """Return the matrix of one name, for example ``score_h5``."""
        if name not in self.values:
            raise DataError(
                f"the scores have no {name}, but {', '.join(sorted(self.values)) or 'nothing'}.",
                rule="a model scores the horizons it was trained for, and its table holds their targets.",
                remedy="ask for a horizon that is there, or train and score with the one you need",
            )
        return self.values[name]

    def on(self, dates: NDArray[np.datetime64], codes: Sequence[str]) -> dict[str, Floats]:
        """Return the values on other dates and codes; NaN where these have none."""
        _, to_row, row = np.intersect1d(dates, self.dates, return_indices=True)
        _, to_column, column = np.intersect1d(codes, self.codes, return_indices=True)
        found = {name: np.full((len(dates), len(codes)), np.nan) for name in self.values}
        for name, values in self.values.items():
            found[name][np.ix_(to_row, to_column)] = values[np.ix_(row, column)]
        return found


def _matrices(table: pa.Table, names: Sequence[str], what: str) -> Scores:
    """Return columns of a long table as matrices; nulls are NaN."""
    for name in ("date", "code", *names):
        if name not in table.column_names:
            raise DataError(
                f"{what} has no column {name!r}; it has {', '.join(table.column_names)}.",
                rule="a table has one row per date and asset, with the columns date, code and those that are read.",
                remedy="rename its columns",
            )
    for name in ("date", "code"):
        if table.column(name).null_count:
            raise DataError(
                f"{table.column(name).null_count} of {table.num_rows} rows have no {name}.",
                rule="each row is of one date and one asset.",
                remedy=f"drop the rows whose {name} is null",
            )
    dates, row = np.unique(values_of(table, "date"), return_inverse=True)
    text = pc.cast(table.column("code"), pa.string()).combine_chunks()
    codes = pc.unique(text).sort()
    column = pc.index_in(text, codes).to_numpy(zero_copy_only=False).astype(np.int64)
    cells, first = np.unique(row * len(codes) + column, return_index=True)
    if len(again := np.delete(np.arange(len(row)), first)):
        raise DataError(
            f"{len(again)} pairs of date and code come more than once, first {dates[row[again[0]]]} "
            f"{codes[column[again[0]]]} in {what}.",
            rule="a table has one row per date and asset.",
            remedy="keep one row of each; scores of several folds for one date are evaluated fold by fold",
        )
    values = {}
    for name in names:
        values[name] = np.full((len(dates), len(codes)), np.nan)
        values[name].flat[cells] = values_of(table, name)[first]
    return Scores(dates, tuple(codes.to_pylist()), values)


def read_scores(table: pa.Table) -> Scores:
    """Return the matrices of a long table of scores: one row per date and asset, in any order.

    It has ``date``, ``code``, and any of ``score_h{h}`` and ``target_h{h}`` (forward simple return over h dates). Other
    columns are left out. Nulls and NaN mean that there is no value.

    Raises:
        DataError: If a column is missing, a date and code come twice, either is null, or a value is infinite.
    """
    names = [name for name in table.column_names if _SCORE_OR_TARGET.fullmatch(name)]
    if not any(name.startswith("score_h") for name in names):
        raise DataError(
            f"the table has the columns {', '.join(table.column_names) or 'of none'}.",
            rule="a table of scores has date, code and at least one score_h followed by a number of dates.",
            remedy="rename its columns, or score the checkpoint again",
        )
    scores = _matrices(table, names, "the table")
    for name, values in scores.values.items():
        if len(infinite := np.argwhere(np.isinf(values))):
            row, column = infinite[0]
            raise DataError(
                f"{name} is infinite in {len(infinite)} of {table.num_rows} rows, first on {scores.dates[row]}, "
                f"{scores.codes[column]}.",
                rule="scores and returns are finite, or absent.",
                remedy="find the price of 0 or the diverged model behind it",
            )
    return scores


@dataclass(frozen=True)
class Market:
    """A market to be checked, as it was delivered.

    Attributes:
        dates, codes: ``datetime64[D]``, shape (D,), and names of the A assets; both ascending and distinct.
        closes, volumes: Shape (D, A), NaN where there is none; volumes are shares or money traded, None if not
            delivered.
        features: What a model sees on each date, by name, each of shape (D, A).
        targets: Forward simple returns by horizon in dates, each of shape (D, A).
    """

    dates: NDArray[np.datetime64]
    codes: tuple[str, ...]
    closes: Floats
    volumes: Floats | None = None
    features: Mapping[str, Floats] = field(default_factory=dict)
    targets: Mapping[int, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        targets = {f"target_h{horizon}": values for horizon, values in self.targets.items()}
        volumes = {} if self.volumes is None else {"volumes": self.volumes}
        check_shapes(self.dates, self.codes, {"closes": self.closes, **volumes, **self.features, **targets})


def check_shapes(dates: ArrayLike, codes: Sequence[str], arrays: Mapping[str, ArrayLike]) -> None:
    shape = (len(np.asarray(dates)), len(codes))
    for name, values in arrays.items():
        if np.shape(values) != shape:
            raise DataError(
                f"{name} has the shape {np.shape(values)}, and there are {shape[0]} dates and {shape[1]} codes.",
                rule="arrays are of one shape (num_dates, num_assets).",
                remedy="fill absent assets with NaN",
            )


def read_market(prices: pa.Table, *others: pa.Table) -> Market:
    """Return a market from long tables of one row per date and asset, in any order.

    ``prices`` has ``date``, ``code``, ``close`` and, optionally, ``volume``. In all tables, columns ``target_h5`` are
    targets by horizon, columns ``score_h5`` are passed over, and every other column of numbers is a feature. Rows of
    ``others`` without prices are left out.

    Raises:
        DataError: If ``date``, ``code`` or ``close`` is missing, a date or code is null, or both come twice.
    """
    first = _matrices(prices, list(dict.fromkeys(["close", *_numeric(prices)])), "table 0")
    found = dict(first.values)
    for number, table in enumerate(others, 1):
        found |= _matrices(table, _numeric(table), f"table {number}").on(first.dates, first.codes)
    targets = {name: int(match[2]) for name in found if (match := _SCORE_OR_TARGET.fullmatch(name))}
    return Market(
        dates=first.dates,
        codes=first.codes,
        closes=found.pop("close"),
        volumes=found.pop("volume", None),
        targets={horizon: found.pop(name) for name, horizon in targets.items()},
        features=found,
    )


def _numeric(table: pa.Table) -> list[str]:
    """Return the columns of numbers that are no scores."""
    kinds = pa.types.is_floating, pa.types.is_integer
    names = [one.name for one in table.schema if any(is_kind(one.type) for is_kind in kinds)]
    return [name for name in names if name not in ("date", "code") and not name.startswith("score_h")]


def values_of(table: pa.Table, name: str) -> NDArray[Any]:
    """Return the column ``date`` as ``datetime64[D]``, as a panel reads it, and another as numbers; nulls are NaN."""
    column = table.column(name)
    try:
        if name == "date":
            return decode_dates(column.combine_chunks(), name)
        return np.asarray(pc.cast(column, pa.float64()).to_numpy(), np.float64)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"the column {name} is of type {column.type}: {error}.",
            rule="dates are date32, timestamps or texts such as 2024-01-31; scores, targets and metrics are numbers.",
            remedy="convert the column, or name another one",
        ) from error


def forward_returns(closes: Floats, horizon: int, shift: int = 0) -> Floats:
    """Return what is earned from ``shift`` dates later on over ``horizon`` dates, shape (D, A), NaN if not known."""
    returns = np.full(closes.shape, np.nan)
    usable = np.where(np.isfinite(closes) & (closes > 0), closes, np.nan)
    first, last = max(0, -shift), len(closes) - max(horizon + shift, shift, 0)
    if last > first:
        begin = usable[first + shift : last + shift]
        returns[first:last] = usable[first + shift + horizon : last + shift + horizon] / begin - 1.0
    return returns
