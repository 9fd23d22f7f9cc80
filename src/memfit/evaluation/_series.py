"""A metric of a day table as a series over distinct dates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from memfit.errors import DataError, nearest
from memfit.evaluation._matrix import divide
from memfit.evaluation._scores import as_days

#: The columns of a day table that are no metrics.
KEYS = ("fold", "date", "num_assets")


@dataclass(frozen=True)
class Series:
    """A metric by date, ascending; D dates. ``num_assets`` is NaN where the table does not say."""

    dates: NDArray[np.datetime64]
    values: NDArray[np.float64]
    num_assets: NDArray[np.float64]


def by_date(days: pa.Table, metric: str, which: str) -> Series:
    """A metric by distinct date: the mean of the date's folds, NaN where none of them defines it."""
    for name in ("date", metric):
        if name not in days.column_names:
            known = [column for column in days.column_names if column not in KEYS]
            raise DataError(
                f"{which} has no column {name}.",
                rule="a day table has the column date and one column for each metric, as evaluate_days writes it.",
                remedy=nearest(name, known or days.column_names),
            )
    dates, row = np.unique(as_days(days.column("date")), return_inverse=True)
    sizes = column(days, "num_assets") if "num_assets" in days.column_names else np.full(len(row), np.nan)
    return Series(dates, _means(row, column(days, metric), len(dates)), _means(row, sizes, len(dates)))


def column(days: pa.Table, name: str) -> NDArray[np.float64]:
    """A column of numbers; nulls are NaN; shape (n,).

    >>> column(pa.table({"n": [1, None]}), "n")
    array([ 1., nan])
    """
    try:
        return np.asarray(pc.cast(days.column(name), pa.float64()).to_numpy(), np.float64)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"the column {name} is of type {days.schema.field(name).type}.",
            rule="a metric is a number, or absent.",
            remedy="name a column of numbers",
        ) from error


def _means(row: NDArray[np.int64], values: NDArray[np.float64], num: int) -> NDArray[np.float64]:
    defined = ~np.isnan(values)
    counts = np.bincount(row[defined], minlength=num)
    sums = np.bincount(row[defined], weights=values[defined], minlength=num)
    return divide(sums, counts, counts > 0)
