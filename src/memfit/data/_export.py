"""A panel's rows as one table in a file that pandas, polars and R read."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from memfit.data._arrow import arrow_of, text_of
from memfit.data._publish import FULL, Progress, full_disk
from memfit.errors import DataError
from memfit.rundir import sync_folder

if TYPE_CHECKING:
    from memfit.data._panel import Panel

_BLOCK_BYTES = 8 << 20
_SUFFIXES = (".parquet", ".feather", ".arrow", ".ipc", ".arrows")


def export_panel(panel: Panel, path: Path, *, progress: Progress | None = None) -> int:
    """Write the rows that are present to a file; see `Panel.export`."""
    if path.suffix not in _SUFFIXES:
        raise DataError(
            f"{path} has the suffix '{path.suffix}'.",
            rule=f"the suffix says what is written: {', '.join(_SUFFIXES)}.",
            remedy=f"name it for example {path.with_suffix('.parquet').name}",
        )
    if not path.absolute().parent.is_dir():
        raise DataError(
            f"{path.parent} is no folder.",
            rule="an export is written beside its place and renamed into it.",
            remedy=f"make it: mkdir -p {path.parent}",
        )
    schema = _schema(panel)
    row_bytes = sum(field.type.bit_width // 8 if field.name != _asset(panel) else 16 for field in schema)
    with _written_whole(path, (1 << 20) + panel.num_rows * row_bytes) as sink, _writer(path, sink, schema) as writer:
        for batch in _batches(panel, schema, max(1, _BLOCK_BYTES // row_bytes), progress):
            writer.write_batch(batch)
    return panel.num_rows


def _date(panel: Panel) -> str:
    return str(panel._manifest.key["date"])


def _asset(panel: Panel) -> str:
    return str(panel._manifest.key["asset"])


def _schema(panel: Panel) -> pa.Schema:
    """The columns; a name of two roles comes once."""
    columns = {_date(panel): pa.date32(), _asset(panel): pa.string()}
    for names, array in ((panel.feature_names, panel.values), (panel.target_names, panel.targets)):
        kind = panel.decode(array[:0, :0]).dtype if array is panel.values else array.dtype
        arrow = pa.from_numpy_dtype(np.dtype("float32") if kind == np.float16 else kind)
        for name in names:
            columns.setdefault(name, arrow)
    return pa.schema(list(columns.items()))


def _batches(panel: Panel, schema: pa.Schema, num_cells: int, progress: Progress | None) -> Iterator[pa.RecordBatch]:
    """The rows that are present, cell by cell as the panel lies."""
    num_dates, num_assets = panel.shape[:2]
    codes = text_of(panel.assets).cast(pa.string())
    total = num_dates * num_assets
    for start in range(0, total, num_cells):
        if progress:
            progress(start, total)
        cells = np.arange(start, min(start + num_cells, total))
        date, asset = np.divmod(cells, num_assets) if panel.order == "date" else np.divmod(cells, num_dates)[::-1]
        present = panel.present[date, asset]
        if not present.any():
            continue
        date, asset = date[present], asset[present]
        columns = {
            _date(panel): arrow_of(panel.dates[date].astype(np.int32), pa.date32()),
            _asset(panel): codes.take(arrow_of(asset, pa.int64())),
        }
        values, targets = panel.decode(panel.values[date, asset]), panel.targets[date, asset]
        for names, block in ((panel.feature_names, values), (panel.target_names, targets)):
            for j, name in enumerate(names):
                if name not in columns:
                    columns[name] = _column(block[:, j], schema.field(name).type)
        yield pa.record_batch([columns[name] for name in schema.names], schema=schema)
    if progress:
        progress(total, total)


def _column(numbers: Any, kind: pa.DataType) -> pa.Array:
    numbers = np.ascontiguousarray(numbers, kind.to_pandas_dtype())
    return arrow_of(numbers, kind, np.isnan(numbers) if numbers.dtype.kind == "f" else None)


@contextmanager
def _writer(path: Path, sink: Any, schema: pa.Schema) -> Iterator[Any]:
    if path.suffix == ".parquet":
        # A dictionary of floats would only cost time and memory.
        with pq.ParquetWriter(sink, schema, use_dictionary=[schema.names[0], schema.names[1]]) as writer:
            yield writer
    else:
        make = pa.ipc.new_stream if path.suffix == ".arrows" else pa.ipc.new_file
        with make(sink, schema) as writer:
            yield writer


@contextmanager
def _written_whole(path: Path, needed: int) -> Iterator[Any]:
    """A file that is renamed into place at the end; after an error, or a kill, the old one is what it was.

    What a killed export left is a hidden file that the next one to the same name writes over; its lock tells whether
    another process writes it now.
    """
    aside = path.with_name(f".{path.name}.exporting")
    with open(aside, "ab") as sink:
        if not _is_mine(sink, aside):
            raise DataError(
                f"another process exports to {path} now.",
                rule="a file has one writer at a time.",
                remedy="wait for it, or name another file",
            )
        try:
            sink.truncate(0)
            yield sink
            sink.flush()
            os.fsync(sink.fileno())
            os.replace(aside, path)
        except BaseException as error:
            aside.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in FULL:
                raise full_disk(error, f"{path}", needed, path.absolute().parent) from error
            raise
    sync_folder(path.absolute().parent)


def _is_mine(sink: Any, aside: Path) -> bool:
    """Take the lock of the file aside; False if another process has it, or has just renamed the file into place."""
    try:
        fcntl.flock(sink, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(sink.fileno()).st_ino == aside.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        return False
