"""Compare what each column of a file takes on disk with what it takes in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from memfit.data._source import NUMBER, TEXT, Source, SourceLike, check_named, is_of, opened

_POINTER = 8
_MOST_DISTINCT = 1_000_000  # values of a column that are told apart; later ones count as different
#: What pandas makes Python objects of, equal ones once; and what it makes of every value.
_SHARED, _OBJECTS = ("binary", "large_binary", "date"), ("decimal", "time", "fixed_size_binary")


@dataclass
class ColumnSize:
    """What a column takes in the files, and as pandas 3 reads it."""

    name: str
    type: pa.DataType
    disk_bytes: int = 0
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
        if is_of(self.type, *NUMBER[0]):
            return "a panel holds it once for all processes: memfit panel build"
        if is_of(self.type, *TEXT):
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
        elif is_of(self.type, *TEXT):
            self._held += pc.sum(pc.binary_length(column.cast(pa.large_string()))).as_py() or 0
        elif is_of(self.type, *_SHARED):
            new = {hash(one): one for one in pc.unique(column).to_pylist() if one is not None}
            self._held += sum(sys.getsizeof(one) for key, one in new.items() if key not in self._seen)
            self._seen.update(new if len(self._seen) < _MOST_DISTINCT else ())
        elif is_of(self.type, *_OBJECTS):
            self._held += sum(sys.getsizeof(one) for one in column.to_pylist() if one is not None)
        elif is_of(self.type, "nested"):  # as Arrow holds it, which is less
            self._held += column.nbytes
        else:  # beside a missing value, integers are floats and truth values are objects
            width = column.to_numpy(zero_copy_only=False).dtype.itemsize
        self._width = max(self._width, width)


def column_sizes(
    source: SourceLike, *, progress: Callable[[int, int], None] | None = None
) -> tuple[int, list[ColumnSize]]:
    """Return the number of rows and the sizes of each column; every row is read, a few thousand at a time."""
    paths, found, num_rows = Source.of(source).paths, dict[str, ColumnSize](), 0
    for number, path in enumerate(paths, start=1):
        one = Source(paths=(path,))
        part, schema = next(one.schemas())
        check_named(part, schema, schema.names)
        decoded = dict.fromkeys(schema.names, 0)
        for name in schema.names:
            found.setdefault(name, ColumnSize(name, schema.field(name).type))
        for batch in one.batches(schema.names) if schema.names else ():
            for name in schema.names:
                decoded[name] += batch.column(name).nbytes
                found[name].add(batch.column(name))
            num_rows += batch.num_rows
        for name, size in _disk_bytes(path, decoded).items():
            found[name].disk_bytes += size
        if progress is not None:
            progress(number, len(paths))
    return num_rows, list(found.values())


def _disk_bytes(path: Path, decoded: dict[str, int]) -> dict[str, int]:
    """Return the compressed bytes of each top column of a Parquet file; those of another file, which does not say, in
    proportion to the ``decoded`` sizes."""
    with opened(path) as file:
        if not isinstance(file, pq.ParquetFile):
            total = max(1, sum(decoded.values()))
            return {name: path.stat().st_size * own // total for name, own in decoded.items()}
        found = dict.fromkeys(decoded, 0)
        leaves = [file.schema.column(number).path for number in range(len(file.schema))]
        owner = [max((name for name in found if f"{leaf}.".startswith(f"{name}.")), key=len) for leaf in leaves]
        for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
            for number, name in enumerate(owner):
                found[name] += group.column(number).total_compressed_size
    return found
