"""Write a table of results: one row for each unit of a stage, readable by pandas, polars and R."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import feather

from memfit.pipeline._manifest import replacing


class _NoPandas:
    def find_spec(self, name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name=name)


def _leave_pandas_out() -> None:
    """Have pyarrow not load pandas to see whether a list is of its types: that takes longer than all else here."""
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    pa.array([0])  # it looks for pandas once
    sys.meta_path.remove(finder)


def write_tables(tables: Sequence[Mapping[str, Any]]) -> None:
    """Write a Feather file for each table: the unit, its state, seconds and peak, and a column for each number."""
    _leave_pandas_out()
    for table in tables:
        path, variable = Path(table["path"]), table["variable"]
        rows = sorted(table["rows"], key=lambda row: (len(row["unit"]) if row["unit"].isdigit() else 0, row["unit"]))
        labels = [row["unit"] for row in rows]
        are_numbers = all(label.isdigit() and len(label) < 10 for label in labels)
        columns = {variable: pa.array([int(label) for label in labels], pa.int32()) if are_numbers else labels}
        for name, kind in (("state", pa.string()), ("seconds", pa.float64()), ("peak_private_bytes", pa.int64())):
            columns[name] = pa.array([row[name] for row in rows], kind)
        for name in dict.fromkeys(name for row in rows for name, value in row["result"].items() if _is_number(value)):
            values = [row["result"].get(name) for row in rows]
            numbers = [float(value) if _is_number(value) else None for value in values]
            columns.setdefault(name, pa.array(numbers, pa.float64()))
        with replacing(path) as aside:
            feather.write_feather(pa.table(columns), str(aside), compression="zstd")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
