"""Write a panel's rows as one table that pandas, polars and R read."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from memfit.data._arrow import arrow_of, text_of
from memfit.data._dtypes import decode
from memfit.data._publish import Progress, naming_full_disk
from memfit.errors import DataError
from memfit.rundir import sync_folder

_BLOCK_BYTES = 8 << 20
_SUFFIXES = (".parquet", ".feather", ".arrow", ".ipc")

#: Columns that lie in one array: their names, the array (num_dates, num_assets, num_columns), and its panel's dtype.
Block = tuple[tuple[str, ...], npt.NDArray[Any], str]


def export_rows(
    path: Path,
    *,
    index: tuple[str, str],
    dates: npt.NDArray[np.datetime64],
    assets: Sequence[str],
    present: npt.NDArray[np.bool_],
    blocks: Sequence[Block],
    progress: Progress | None = None,
) -> int:
    """Write the rows that are present to a file, and return their number; see `Panel.export`."""
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
    columns = {index[0]: pa.date32(), index[1]: pa.string()}
    for names, array, dtype in blocks:
        kind = decode(dtype, array[:0, :0]).dtype
        for name in names:  # one of two roles comes once
            columns.setdefault(name, pa.from_numpy_dtype(np.dtype("float32") if kind == np.float16 else kind))
    schema = pa.schema(list(columns.items()))
    row_bytes = sum(16 if field.name == index[1] else field.type.bit_width // 8 for field in schema)
    num_cells, num_rows, step = present.size, 0, max(1, _BLOCK_BYTES // row_bytes)
    codes = text_of(assets).cast(pa.string())
    needed = (1 << 20) + int(np.count_nonzero(present)) * row_bytes
    with _written_whole(path, needed) as sink, _writer(path, sink, schema) as writer:
        for start in range(0, num_cells, step):
            if progress:
                progress(start, num_cells)
            date, asset = np.divmod(np.arange(start, min(start + step, num_cells)), len(assets))
            kept = present[date, asset]
            date, asset = date[kept], asset[kept]
            rows = {
                index[0]: arrow_of(dates[date].astype(np.int32), pa.date32()),
                index[1]: codes.take(arrow_of(asset, pa.int64())),
            }
            for names, array, dtype in blocks:
                block = decode(dtype, array[date, asset])
                for j, name in enumerate(names):
                    if name not in rows:
                        rows[name] = _column(block[:, j], schema.field(name).type)
            if len(date):
                writer.write_batch(pa.record_batch([rows[name] for name in schema.names], schema=schema))
            num_rows += len(date)
        if progress:
            progress(num_cells, num_cells)
    return num_rows


def _column(numbers: Any, kind: pa.DataType) -> pa.Array:
    numbers = np.ascontiguousarray(numbers, kind.to_pandas_dtype())
    return arrow_of(numbers, kind, np.isnan(numbers) if numbers.dtype.kind == "f" else None)


def _writer(path: Path, sink: Any, schema: pa.Schema) -> Any:
    if path.suffix == ".parquet":
        # A dictionary of floats would only cost time and memory.
        return pq.ParquetWriter(sink, schema, use_dictionary=[schema.names[0], schema.names[1]])
    return pa.ipc.new_file(sink, schema)


@contextmanager
def _written_whole(path: Path, needed: int) -> Iterator[Any]:
    """Give a locked hidden file that is renamed into place at the end; after an error or a kill the old one stays."""
    aside = path.with_name(f".{path.name}.exporting")
    with naming_full_disk(str(path), needed, path.absolute().parent), open(aside, "ab") as sink:
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
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    sync_folder(path.absolute().parent)


def _is_mine(sink: Any, aside: Path) -> bool:
    """Take the lock of the file aside; False if another process has it, or has just renamed the file into place."""
    try:
        fcntl.flock(sink, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(sink.fileno()).st_ino == aside.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        return False
