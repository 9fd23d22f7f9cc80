"""Measure what a source's columns take on disk and in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from memfit.data._source import Source, SourceLike, ipc_batches, opened

#: A column that grows by more than this when it is read, to at least 1 MiB, is worth a look before it is loaded.
ABSURD_RATIO = 100


@dataclass(frozen=True)
class ColumnSize:
    """A column's bytes on disk and in memory.

    Attributes:
        name: The column.
        type: Its Arrow type.
        disk_bytes: Compressed bytes in the file; None where there is no file, or where it does not say so per column
            (a compressed Arrow file).
        memory_bytes: Bytes of the Arrow column once read whole.
    """

    name: str
    type: str
    disk_bytes: int | None
    memory_bytes: int

    @property
    def ratio(self) -> float | None:
        """Bytes in memory per byte on disk."""
        return None if self.disk_bytes is None else self.memory_bytes / max(self.disk_bytes, 1)

    @property
    def is_absurd(self) -> bool:
        """Whether the column grows more than 100-fold when read, to at least 1 MiB."""
        return (self.ratio or 0) > ABSURD_RATIO and self.memory_bytes >= 1 << 20


def column_sizes(source: SourceLike) -> list[ColumnSize]:
    """Return what each column takes on disk and in memory, before anything is loaded.

    Numbers and dates of 32 bits and more in Parquet come from the footer; other columns are streamed once.

    Args:
        source: As for `Panel.build`.

    Returns:
        One entry per column, in order of appearance, summed over the files.

    Raises:
        DataError: If a file cannot be read.

    Example:
        >>> import tempfile, pyarrow as pa, pyarrow.parquet as pq
        >>> path = Path(tempfile.mkdtemp()) / "flat.parquet"
        >>> pq.write_table(pa.table({"zero": pa.array([0.0] * 1_000_000)}), path)
        >>> [size] = column_sizes(path)
        >>> size.memory_bytes, size.ratio > 1000, size.is_absurd
        (8125000, True, True)
    """
    found = Source.of(source)
    sizes: dict[str, ColumnSize] = {}
    if (table := found.table) is not None:
        parts = [ColumnSize(name, str(table[name].type), None, table[name].nbytes) for name in table.column_names]
    else:
        parts = [size for path in found.paths for size in _file_sizes(path)]
    for part in parts:
        old = sizes.get(part.name, ColumnSize(part.name, part.type, 0, 0))
        disk = None if old.disk_bytes is None or part.disk_bytes is None else old.disk_bytes + part.disk_bytes
        sizes[part.name] = ColumnSize(part.name, old.type, disk, old.memory_bytes + part.memory_bytes)
    return list(sizes.values())


def _file_sizes(path: Path) -> list[ColumnSize]:
    with opened(path) as file:
        if isinstance(file, pq.ParquetFile):
            return [_parquet_size(file, field) for field in file.schema_arrow]
        fields = list(file.schema)
    memory = []
    for field in fields:
        with opened(path, [field.name]) as file:
            memory.append(_batch_bytes(batch.column(0) for batch in ipc_batches(file)))
    is_compressed = sum(memory) > path.stat().st_size
    return [
        ColumnSize(field.name, str(field.type), None if is_compressed else size, size)
        for field, size in zip(fields, memory, strict=True)
    ]


def _parquet_size(file: pq.ParquetFile, field: pa.Field) -> ColumnSize:
    metadata = file.metadata
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    leaves = [i for i, path in enumerate(paths) if path == field.name or path.startswith(field.name + ".")]
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    disk = sum(group.column(i).total_compressed_size for group in groups for i in leaves)
    width = getattr(field.type, "bit_width", 0) if pa.types.is_primitive(field.type) else 0
    if width >= 32:  # of narrow ones pyarrow keeps the validity bitmap only where a value is missing
        bits = [width, 1] if field.nullable else [width]
        memory = sum(-(-group.num_rows * each // 8) for group in groups for each in bits)
    else:
        batches = (file.iter_batches(8192, row_groups=[i], columns=[field.name]) for i in range(len(groups)))
        memory = sum(_batch_bytes(batch.column(field.name) for batch in group) for group in batches)
    return ColumnSize(field.name, str(field.type), disk, memory)


def _batch_bytes(columns: Iterable[pa.Array]) -> int:
    """Return the bytes of one row group's column: the rows of all its batches, but its dictionary once."""
    rows, dictionary = 0, 0
    for column in columns:
        is_dictionary = pa.types.is_dictionary(column.type)
        rows += column.indices.nbytes if is_dictionary else column.nbytes
        dictionary = max(dictionary, column.dictionary.nbytes if is_dictionary else 0)
    return rows + dictionary
