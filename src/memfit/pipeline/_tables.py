"""Tables of results: one row for each unit of a stage, readable by pandas, polars and R."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import feather


def write_tables(tables: Sequence[Mapping[str, Any]]) -> None:
    """Write a Feather file for each table: the unit, its state, seconds and peak, then one column for each number.

    Args:
        tables: Per table its ``path``, the name of the first column (``variable``) and the ``rows``: ``unit``,
            ``state``, ``seconds`` or None, ``peak_private_bytes``, and ``result`` by name.
    """
    for table in tables:
        path = Path(table["path"])
        aside = path.with_suffix(".tmp")
        rows = sorted(table["rows"], key=lambda row: (len(row["unit"]) if row["unit"].isdigit() else 0, row["unit"]))
        feather.write_feather(_table(table["variable"], rows), str(aside), compression="zstd")
        aside.replace(path)


def _table(variable: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    labels = [row["unit"] for row in rows]
    are_numbers = all(label.isdigit() for label in labels)
    columns: dict[str, pa.Array] = {
        variable: pa.array([int(label) for label in labels], pa.int32()) if are_numbers else pa.array(labels),
        "state": pa.array([row["state"] for row in rows], pa.string()),
        "seconds": pa.array([row["seconds"] for row in rows], pa.float64()),
        "peak_private_bytes": pa.array([row["peak_private_bytes"] for row in rows], pa.int64()),
    }
    for name in dict.fromkeys(name for row in rows for name, value in row["result"].items() if _is_number(value)):
        if name not in columns:
            values = [row["result"].get(name) for row in rows]
            columns[name] = pa.array([value if _is_number(value) else None for value in values], pa.float64())
    return pa.table(columns)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
