"""``kfold_results.feather``: one row for each fold, readable by pandas, polars and R."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import feather


def write_kfold_results(
    path: str, rows: Sequence[Mapping[str, Any]], metrics: Mapping[str, Mapping[str, float]]
) -> None:
    """Write the table: fold, state, seconds, peak of private bytes, then one column for each metric.

    Args:
        path: The file; replaced whole.
        rows: Per fold ``job``, ``state``, ``started``, ``ended`` (Unix seconds or None) and ``peak_bytes``.
        metrics: The numbers of the folds that were trained, by job id.
    """
    names = list(dict.fromkeys(name for found in metrics.values() for name in found))
    seconds = [row["ended"] - row["started"] if row["ended"] and row["started"] else None for row in rows]
    columns: dict[str, pa.Array] = {
        "fold": pa.array([int(row["job"].removeprefix("fold_")) for row in rows], pa.int32()),
        "state": pa.array([row["state"] for row in rows], pa.string()),
        "seconds": pa.array(seconds, pa.float64()),
        "peak_private_bytes": pa.array([row["peak_bytes"] for row in rows], pa.int64()),
    }
    for name in names:
        columns[name] = pa.array([metrics.get(row["job"], {}).get(name) for row in rows], pa.float64())
    whole = Path(path)
    aside = whole.with_suffix(".tmp")
    feather.write_feather(pa.table(columns), str(aside), compression="zstd")
    aside.replace(whole)
