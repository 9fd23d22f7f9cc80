"""Compare what each column of a file takes on disk with what it takes in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from memfit.data._source import NUMBER, Source, SourceLike, decode_assets, decode_dates, is_of, opened
from memfit.errors import DataError
from memfit.units import format_bytes

#: A pointer; the head of a NumPy array, as sys.getsizeof has it.
_POINTER, _ARRAY = 8, 112
#: So many different values of a column are told apart; later ones count as different.
_MOST_DISTINCT = 1_000_000
_TEXT = ("string", "large_string", "string_view")
#: What pandas makes Python objects of, equal ones once; and what it makes of every value.
_SHARED, _OBJECTS = ("binary", "large_binary", "date"), ("decimal", "time", "nested", "fixed_size_binary")


@dataclass
class ColumnSize:
    """What a column takes in the files, as pandas 3 reads it, and in a panel (None for what is no number)."""

    name: str
    type: pa.DataType
    disk_bytes: int = 0
    panel_bytes: int | None = None
    _rows: int = 0
    _width: int = 0  # bytes of a value in pandas' array: a number, a code or a pointer
    _held: int = 0  # bytes beside that array
    _seen: set[int] = field(default_factory=set)

    @property
    def pandas_bytes(self) -> int:
        return self._rows * self._width + self._held

    @property
    def ratio(self) -> float:
        return self.pandas_bytes / max(1, self.disk_bytes)

    @property
    def remedy(self) -> str:
        if self.panel_bytes is not None:
            return f"a panel holds it once for all processes: memfit panel build ({format_bytes(self.panel_bytes)})"
        if is_of(self.type, *_TEXT):
            return f"as a category, each text is held once: pyarrow's read_table(..., read_dictionary=['{self.name}'])"
        return "leave it out where it is not used: read_parquet(..., columns=[...])"

    def add(self, column: pa.Array) -> None:
        self._rows += len(column)
        width = _POINTER
        if pa.types.is_dictionary(self.type):
            number = len(column.dictionary)
            width = np.min_scalar_type(-number - 1).itemsize
            table = 16 << int(number / 0.77).bit_length()  # pandas' khash is full at 0.77
            self._held = max(self._held, column.dictionary.nbytes + number * _POINTER // 2 + table)
        elif is_of(self.type, *_TEXT):
            self._held += pc.sum(pc.binary_length(column.cast(pa.large_string()))).as_py() or 0
        elif is_of(self.type, *_SHARED):
            new = {hash(one): one for one in pc.unique(column).to_pylist() if one is not None}
            self._held += sum(sys.getsizeof(one) for key, one in new.items() if key not in self._seen)
            self._seen.update(new if len(self._seen) < _MOST_DISTINCT else ())
        elif is_of(self.type, "list", "large_list") and is_of(self.type.value_type, "integer", "floating"):
            self._held += _ARRAY * (len(column) - column.null_count) + column.flatten().nbytes
        elif is_of(self.type, *_OBJECTS):
            self._held += sum(map(_object_bytes, column.to_pylist()))
        else:  # beside a missing value, integers are floats and truth values are objects
            width = column.to_numpy(zero_copy_only=False).dtype.itemsize
        self._width = max(self._width, width)


def column_sizes(
    source: SourceLike, *, index: tuple[str, str] | None = None, progress: Callable[[int, int], None] | None = None
) -> tuple[int, list[ColumnSize]]:
    """Return the number of rows and the sizes of each column; every row is read, a few thousand at a time. ``index``
    names the columns of dates and asset codes: a panel has a cell for each pair. None: one for each row."""
    paths, found, num_rows = Source.of(source).paths, dict[str, ColumnSize](), 0
    dates, assets = np.empty(0, "datetime64[D]"), set[str]()
    for number, (path, (_, schema)) in enumerate(zip(paths, Source(paths=paths).schemas(), strict=True)):
        for name in [*schema.names, *(index or ())]:
            if schema.names.count(name) != 1:
                raise DataError(
                    f"{path} has {schema.names.count(name)} columns named '{name}'.",
                    rule="each column is named once, and --index names two of them.",
                    remedy="rename or drop one of them, or correct --index",
                )
        decoded = dict.fromkeys(schema.names, 0)
        for batch in Source(paths=(path,)).batches(schema.names) if schema.names else ():
            for name in schema.names:
                decoded[name] += batch.column(name).nbytes
                found.setdefault(name, ColumnSize(name, schema.field(name).type)).add(batch.column(name))
            if index is not None:
                dates = np.union1d(dates, decode_dates(batch.column(index[0]), index[0]))
                assets.update(pc.unique(decode_assets(batch.column(index[1]), index[1])).to_pylist())
            num_rows += batch.num_rows
        for name, size in (_disk_bytes(path) or _share(path.stat().st_size, decoded)).items():
            found.setdefault(name, ColumnSize(name, schema.field(name).type)).disk_bytes += size
        if progress is not None:
            progress(number + 1, len(paths))
    cells = len(dates) * len(assets) if index is not None else num_rows
    for one in found.values():
        one.panel_bytes = 4 * cells if is_of(one.type, *NUMBER[0]) else None
    return num_rows, list(found.values())


def _share(total: int, decoded: dict[str, int]) -> dict[str, int]:
    """Return a file's bytes by column, in proportion to the decoded sizes: Arrow and CSV files do not say more."""
    return {name: total * own // max(1, sum(decoded.values())) for name, own in decoded.items()}


def _disk_bytes(path: Any) -> dict[str, int]:
    """Return the compressed bytes of each top column of a Parquet file; empty for another file."""
    with opened(path) as file:
        if not isinstance(file, pq.ParquetFile):
            return {}
        found = dict.fromkeys(file.schema_arrow.names, 0)
        leaves = [file.schema.column(number).path for number in range(len(file.schema))]
        owner = [max((name for name in found if f"{leaf}.".startswith(f"{name}.")), key=len) for leaf in leaves]
        for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
            for number, name in enumerate(owner):
                found[name] += group.column(number).total_compressed_size
    return found


def _object_bytes(value: Any) -> int:
    """Return the bytes of a value as pandas holds it: a list is an array of its values."""
    if value is None:
        return 0
    if isinstance(value, list):
        return _ARRAY + sum(_POINTER + _object_bytes(one) for one in value)
    inner = sum(map(_object_bytes, value.values())) if isinstance(value, dict) else 0
    return sys.getsizeof(value) + inner
