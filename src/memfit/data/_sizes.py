"""Compare what each column of a file takes on disk with what it takes in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from memfit.data._source import NUMBER, Source, SourceLike, batches_of, decode_assets, decode_dates, is_of, opened
from memfit.errors import DataError
from memfit.units import format_bytes

#: A pointer; the head of a NumPy array, as sys.getsizeof has it.
_POINTER, _ARRAY = 8, 112
#: So many different values of a column are told apart; later ones count as different.
_MOST_DISTINCT = 1_000_000
_TEXT = ("string", "large_string", "string_view")
#: What pandas makes Python objects of, equal ones once; and what it makes of every value.
_SHARED, _OBJECTS = ("binary", "large_binary", "date"), ("decimal", "time", "nested", "fixed_size_binary")


@dataclass(frozen=True)
class ColumnSize:
    """What a column takes, in bytes.

    Attributes:
        name: The column.
        type: Its Arrow type.
        disk_bytes: In the files. An Arrow file's bytes are shared out by the columns' decoded sizes.
        pandas_bytes: As pandas 3 reads it: text in Arrow's buffers.
        pandas2_bytes: As pandas 2 reads it: text as Python objects, equal ones once.
        panel_bytes: As a feature or target of a panel; None for what is no number.
        remedy: What takes less.
    """

    name: str
    type: str
    disk_bytes: int
    pandas_bytes: int
    pandas2_bytes: int
    panel_bytes: int | None
    remedy: str

    @property
    def ratio(self) -> float:
        """How many times what it takes on disk it takes in pandas, 2 or 3, the larger one."""
        return max(self.pandas_bytes, self.pandas2_bytes) / max(1, self.disk_bytes)


def column_sizes(
    source: SourceLike,
    *,
    index: tuple[str, str] | None = None,
    dtype: str = "float32",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[int, list[ColumnSize]]:
    """Return the number of rows and the sizes of each column; every row is read, a few thousand at a time.

    Args:
        source: Parquet or Arrow IPC files, or folders of them.
        index: The columns of dates and asset codes: a panel has a cell for each pair of them. None: one for each row.
        dtype: The type of a panel's values.
        progress: Called with the rows done and all rows.

    Raises:
        DataError: If a file cannot be read, or has no such index.

    Example:
        >>> import tempfile, pyarrow as pa, pyarrow.parquet as pq
        >>> with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        ...     pq.write_table(pa.table({"x": [0.0] * 100_000}), file.name)
        ...     num_rows, (x,) = column_sizes(file.name)
        >>> num_rows, x.pandas_bytes, x.panel_bytes, x.ratio > 1000
        (100000, 800000, 400000, True)
    """
    paths = Source.of(source).paths
    tallies: dict[str, _Tally] = {}
    dates, assets = np.empty(0, "datetime64[D]"), set[str]()
    done, total = 0, sum(map(_num_rows, paths))
    for path in paths:
        with opened(path) as file:
            schema = file.schema_arrow if isinstance(file, pq.ParquetFile) else file.schema
            on_disk = _parquet_bytes(file) if isinstance(file, pq.ParquetFile) else None
        _check_names(path, schema.names, index or ())
        decoded = dict.fromkeys(schema.names, 0)
        for batch in Source(paths=(path,)).batches(schema.names) if schema.names else ():
            for name in schema.names:
                decoded[name] += batch.column(name).nbytes
                tallies.setdefault(name, _Tally(schema.field(name).type)).add(batch.column(name))
            if index is not None:
                dates = np.union1d(dates, decode_dates(batch.column(index[0]), index[0]))
                assets.update(pc.unique(decode_assets(batch.column(index[1]), index[1])).to_pylist())
            done += batch.num_rows
            if progress is not None:
                progress(done, total)
        size = path.stat().st_size
        for name, own in decoded.items():
            tallies.setdefault(name, _Tally(schema.field(name).type)).disk += (
                on_disk[name] if on_disk is not None else size * own // max(1, sum(decoded.values()))
            )
    cells = len(dates) * len(assets) if index is not None else total
    return total, [one.size(name, cells * np.dtype(dtype).itemsize) for name, one in tallies.items()]


def _num_rows(path: Path) -> int:
    with opened(path) as file:
        if isinstance(file, pq.ParquetFile):
            return int(file.metadata.num_rows)
        return sum(batch.num_rows for batch in batches_of(file))


def _check_names(path: Path, names: Iterable[str], index: Iterable[str]) -> None:
    names = list(names)
    for name in [*names, *index]:
        if names.count(name) != 1:
            raise DataError(
                f"{path} has {names.count(name)} columns named '{name}'.",
                rule="each column is named once, and --index names two of them.",
                remedy="rename or drop one of them, or correct --index",
            )


def _parquet_bytes(file: pq.ParquetFile) -> Mapping[str, int]:
    """Return the compressed bytes of each top column: those of its leaves in all row groups."""
    names = file.schema_arrow.names
    found = dict.fromkeys(names, 0)
    owner = [
        max((name for name in names if f"{leaf.path}.".startswith(f"{name}.")), key=len)
        for leaf in map(file.schema.column, range(len(file.schema)))
    ]
    for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
        for number, name in enumerate(owner):
            found[name] += group.column(number).total_compressed_size
    return found


@dataclass
class _Tally:
    """What a column takes so far.

    Attributes:
        content: Bytes of all texts.
        distinct: Bytes of the different texts.
        objects: Bytes of Python objects.
        seen: Hashes of the different values.
    """

    type: pa.DataType
    rows: int = 0
    nulls: int = 0
    disk: int = 0
    content: int = 0
    distinct: int = 0
    objects: int = 0
    seen: set[int] = field(default_factory=set)
    _categories: pa.Array | None = None

    def add(self, column: pa.Array) -> None:
        """Count some rows."""
        self.rows += len(column)
        self.nulls += column.null_count
        if pa.types.is_dictionary(self.type):
            if self._categories is None or not self._categories.equals(column.dictionary):
                self._categories = column.dictionary
                self._add_distinct(column.dictionary)
        elif is_of(self.type, *_TEXT):
            text = column.cast(pa.large_string())
            self.content += pc.sum(pc.binary_length(text)).as_py() or 0
            self._add_distinct(text)
        elif is_of(self.type, *_SHARED):
            self._add_distinct(column)
        elif is_of(self.type, "list", "large_list") and is_of(self.type.value_type, "integer", "floating"):
            self.objects += _ARRAY * (len(column) - column.null_count) + column.flatten().nbytes
        elif is_of(self.type, *_OBJECTS):
            self.objects += sum(map(_object_bytes, column.to_pylist()))

    def _add_distinct(self, column: pa.Array) -> None:
        for value in pc.unique(column).to_pylist():
            if value is not None and (key := hash(value)) not in self.seen:
                self.objects += sys.getsizeof(value)
                self.distinct += len(value.encode()) if isinstance(value, str) else 0
                if len(self.seen) < _MOST_DISTINCT:
                    self.seen.add(key)

    def size(self, name: str, panel_bytes: int) -> ColumnSize:
        """Return the sizes of all rows that were counted."""
        pointers = _POINTER * self.rows
        if pa.types.is_dictionary(self.type):
            has_text = is_of(self.type, *_TEXT)
            new, old = self._category_bytes(self.distinct), self._category_bytes(self.objects if has_text else 0)
        elif is_of(self.type, *_TEXT):
            new = pointers + self.content + (self.rows // 8 if self.nulls else 0)
            old = pointers + self.objects
        elif is_of(self.type, *_SHARED, *_OBJECTS):
            new = old = pointers + self.objects
        else:
            new = old = self.rows * self._width()
        held = panel_bytes if is_of(self.type, *NUMBER[0]) else None
        return ColumnSize(name, str(self.type), self.disk, new, old, held, self._remedy(name, min(new, old), held))

    def _width(self) -> int:
        """Return the bytes of a number: pandas has none for a missing integer or truth value."""
        kind = pa.array([], self.type).to_numpy(zero_copy_only=False).dtype
        return kind.itemsize if not self.nulls or kind.kind in "fmM" else _POINTER

    def _category_bytes(self, distinct: int) -> int:
        """Return the bytes of all rows as codes of categories, of the categories and of pandas' table to find them.

        Source: pandas' khash, whose table is full at 0.77; 16 bytes for each place.
        """
        width = next((size for size in (1, 2) if len(self.seen) < 1 << (8 * size - 1)), 4)
        table = 16 << int(len(self.seen) / 0.77).bit_length()
        return self.rows * width + distinct + _POINTER * len(self.seen) + table

    def _remedy(self, name: str, least: int, panel_bytes: int | None) -> str:
        if panel_bytes is not None:
            return f"a panel holds it once for all processes: memfit panel build ({format_bytes(panel_bytes)})"
        if is_of(self.type, *_TEXT) and (small := self._category_bytes(self.objects)) < least // 2:
            return (
                f"as a category it takes {format_bytes(small)}: pyarrow's read_table(..., read_dictionary=['{name}'])"
            )
        if is_of(self.type, "date"):
            return f"as a timestamp it takes {format_bytes(_POINTER * self.rows)}: astype('datetime64[s]')"
        return "leave it out where it is not used: read_parquet(..., columns=[...])"


def _object_bytes(value: Any) -> int:
    """Return the bytes of a value as pandas holds it: a list is an array of its values."""
    if value is None:
        return 0
    if isinstance(value, list):
        return _ARRAY + sum(_POINTER + _object_bytes(one) for one in value)
    inner = sum(map(_object_bytes, value.values())) if isinstance(value, dict) else 0
    return sys.getsizeof(value) + inner
