"""A table of scores as matrices of dates and assets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from memfit.errors import DataError

_COLUMN = re.compile(r"(score|target)_h([1-9]\d*)")


@dataclass(frozen=True)
class Scores:
    """Scores and forward returns of D dates and A assets.

    Attributes:
        dates: Ascending, distinct, ``datetime64[D]``, shape (D,).
        codes: The assets in ascending order, A of them.
        values: ``score_h{h}`` and ``target_h{h}`` by name, each float64 of shape (D, A); NaN where the asset is absent
            or the return is not known.
    """

    dates: NDArray[np.datetime64]
    codes: tuple[str, ...]
    values: Mapping[str, NDArray[np.float64]]

    @property
    def horizons(self) -> tuple[int, ...]:
        """The horizons that have both a score and a target, ascending."""
        named = {int(name.removeprefix("score_h")) for name in self.values if name.startswith("score_h")}
        return tuple(sorted(horizon for horizon in named if f"target_h{horizon}" in self.values))

    def of(self, name: str) -> NDArray[np.float64]:
        """Return the matrix of one name, for example ``score_h5``.

        Raises:
            DataError: If there is none.
        """
        if name not in self.values:
            raise DataError(
                f"the scores have no {name}, but {', '.join(sorted(self.values)) or 'nothing'}.",
                rule="a model scores the horizons it was trained for, and its table holds their targets.",
                remedy="ask for a horizon that is there, or train and score with the one you need",
            )
        return self.values[name]


def read_scores(table: pa.Table) -> Scores:
    """Return the matrices of a long table: one row per date and asset, in any order.

    Args:
        table: ``date``, ``code``, and any of ``score_h{h}`` and ``target_h{h}`` (forward simple return over h dates).
            Other columns are left out. Nulls and NaN mean that there is no value.

    Raises:
        DataError: If a column is missing, a date and code come twice, either is null, or a value is infinite.

    Example:
        >>> import datetime
        >>> day = datetime.date(2024, 1, 2)
        >>> columns = {"score_h5": [0.2, 0.1], "target_h5": [0.03, None]}
        >>> table = pa.table({"date": [day, day], "code": ["B", "A"]} | columns)
        >>> scores = read_scores(table)
        >>> scores.codes, scores.horizons, scores.values["target_h5"]
        (('A', 'B'), (5,), array([[ nan, 0.03]]))
    """
    names = [name for name in table.column_names if _COLUMN.fullmatch(name)]
    missing = [name for name in ("date", "code") if name not in table.column_names]
    if missing or not any(name.startswith("score_h") for name in names):
        raise DataError(
            f"the table has the columns {', '.join(table.column_names) or 'of none'}.",
            rule="a table of scores has date, code and at least one score_h followed by a number of dates.",
            remedy="rename its columns, or score the checkpoint again",
        )
    for name in ("date", "code"):
        if table.column(name).null_count:
            raise DataError(
                f"{table.column(name).null_count} of {table.num_rows} rows have no {name}.",
                rule="each row of a table of scores is of one date and one asset.",
                remedy=f"drop the rows whose {name} is null",
            )
    dates, row = np.unique(as_days(table.column("date")), return_inverse=True)
    code_column = pc.cast(table.column("code"), pa.string()).combine_chunks()
    codes = pc.array_sort_indices(pc.unique(code_column))
    distinct = pc.unique(code_column).take(codes)
    column = pc.index_in(code_column, distinct).to_numpy(zero_copy_only=False).astype(np.int64)
    _, first, counts = np.unique(row * len(distinct) + column, return_index=True, return_counts=True)
    if len(twice := first[counts > 1]):
        at = twice.min()
        raise DataError(
            f"{len(twice)} pairs of date and code come more than once, first {dates[row[at]]}, {distinct[column[at]]}.",
            rule="a table of scores has one row per date and asset.",
            remedy="keep one row of each; scores of several folds for one date are evaluated fold by fold",
        )
    values = {}
    for name in names:
        cells = numbers(table, name)
        infinite = np.flatnonzero(np.isinf(cells))
        if len(infinite):
            where = f"{table.column('date')[infinite[0]]}, {table.column('code')[infinite[0]]}"
            raise DataError(
                f"{name} is infinite in {len(infinite)} of {len(cells)} rows, first on {where}.",
                rule="scores and returns are finite, or absent.",
                remedy="find the price of 0 or the diverged model behind it",
            )
        values[name] = np.full((len(dates), len(distinct)), np.nan)
        values[name][row, column] = cells
    return Scores(dates, tuple(distinct.to_pylist()), values)


def as_days(column: pa.ChunkedArray) -> NDArray[np.datetime64]:
    """Return a column of dates, timestamps or ISO texts as ``datetime64[D]``."""
    try:
        days = pc.cast(column, pa.timestamp("s") if pa.types.is_string(column.type) else pa.date32(), safe=False)
        return np.asarray(days.to_numpy()).astype("datetime64[D]")
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"the column of dates is of type {column.type}: {error}.",
            rule="dates are date32, timestamps, or texts such as 2024-01-31.",
            remedy="convert the column to dates",
        ) from error


def numbers(table: pa.Table, name: str) -> NDArray[np.float64]:
    """Return a column of numbers; nulls are NaN."""
    try:
        return np.asarray(pc.cast(table.column(name), pa.float64()).to_numpy(), np.float64)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"the column {name} is of type {table.schema.field(name).type}.",
            rule="scores, targets and metrics are numbers, or absent.",
            remedy="convert the column to float32, or name another one",
        ) from error
