"""Read the rows of Parquet and Arrow files and in-memory tables, a few thousand at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from memfit.errors import DataError, nearest

_BUFFER_BYTES = 1 << 18
_DECODED_BYTES = 4 << 20
_SUFFIXES = (".parquet", ".feather", ".arrow", ".ipc")
_NUM_NAMED = 8
#: Files are hashed in pieces of this size, by several threads.
_CHUNK_BYTES, _PIECE_BYTES = 64 << 20, 1 << 20

SourceLike: TypeAlias = "Path | str | Sequence[Path | str] | pa.Table"


@dataclass(frozen=True)
class Source:
    """Files or one table, not read yet.

    Attributes:
        paths: Parquet or Arrow IPC files, told apart by their first bytes.
        table: An in-memory table instead of files.
    """

    paths: tuple[Path, ...] = ()
    table: pa.Table | None = None

    @classmethod
    def of(cls, source: SourceLike) -> Source:
        """Return the source of a path, a folder (all its Parquet and Arrow files), a list of them or a table."""
        if isinstance(source, pa.Table):
            return cls(table=source)
        named = [source] if isinstance(source, str | Path) else list(source)
        paths = tuple(path for name in named for path in _expand(Path(name)))
        if not paths:
            raise DataError(
                "the source names no file.", rule="a panel is built from at least one.", remedy="name a Parquet file"
            )
        for path in paths:
            _form(path)
        return cls(paths=paths)

    def schemas(self) -> Iterator[tuple[str, pa.Schema]]:
        """Yield each part's name and schema, from the files' headers."""
        if self.table is not None:
            yield "the table", self.table.schema
        for path in self.paths:
            with opened(path) as file:
                schema = file.schema_arrow if isinstance(file, pq.ParquetFile) else file.schema
            yield str(path), schema

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of some columns in the source's order, about 4 MiB decoded at once."""
        wanted = list(dict.fromkeys(columns))
        num_rows = int(np.clip(_DECODED_BYTES // (8 * len(wanted)), 1024, 65536))
        if self.table is not None:
            yield from self.table.select(wanted).to_batches(max_chunksize=num_rows)
        for path in self.paths:
            with opened(path, wanted) as file:
                is_parquet = isinstance(file, pq.ParquetFile)
                parts = () if is_parquet else map(file.get_batch, range(file.num_record_batches))
                for batch in file.iter_batches(num_rows, columns=wanted) if is_parquet else parts:
                    for start in range(0, batch.num_rows, num_rows):
                        yield batch.slice(start, num_rows)

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Return inode, size and time of change of each file, to notice a change during a read."""
        facts = [path.stat() for path in self.paths]
        return tuple((fact.st_ino, fact.st_size, fact.st_mtime_ns) for fact in facts)

    def content_digest(self, *, date: str, asset: str, numbers: Sequence[str]) -> str:
        """Return a hash of the bytes of files, in any order, or of the values of a table's columns, in any chunks."""
        if self.table is None:
            files = sorted(f"{path.stat().st_size}:{''.join(_chunk_digests(path))}" for path in self.paths)
            return blake2b("\n".join(files).encode(), digest_size=32).hexdigest()
        hashes = [blake2b(digest_size=32) for _ in range(len(numbers) + 3)]
        for batch in self.batches([date, asset, *numbers]):
            codes = decode_assets(batch.column(asset), asset)
            ends = np.frombuffer(codes.buffers()[1], np.int64)[codes.offset : codes.offset + len(codes) + 1]
            text = memoryview(codes.buffers()[2] or b"")[int(ends[0]) : int(ends[-1])]
            values = [decode_numbers(batch.column(name)).astype("<f8") for name in numbers]
            for number in values:
                number[np.isnan(number)] = np.nan
            days = decode_dates(batch.column(date), date).astype("<i8")
            parts: list[Any] = [days, np.diff(ends), text, *values]
            for digest, part in zip(hashes, parts, strict=True):
                digest.update(part)
        return blake2b(b"".join(digest.digest() for digest in hashes), digest_size=32).hexdigest()


def _chunk_digests(file: Path) -> Iterator[str]:
    """Yield a BLAKE2b hash (128 bits, hex) of each chunk of a file, by up to four threads."""

    def digest_at(offset: int) -> str:
        digest, left = blake2b(digest_size=16), _CHUNK_BYTES
        with open(file, "rb", buffering=0) as opened:
            opened.seek(offset)
            while left and (piece := opened.read(min(left, _PIECE_BYTES))):
                digest.update(piece)
                left -= len(piece)
        return digest.hexdigest()

    with ThreadPoolExecutor(max_workers=min(4, len(os.sched_getaffinity(0)))) as pool:
        yield from pool.map(digest_at, range(0, file.stat().st_size, _CHUNK_BYTES))


def _expand(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        if found:
            return found
    elif path.is_file():
        return [path]
    remedy = "name an existing file or folder"
    what = "holds no Parquet or Arrow file" if path.is_dir() else "is neither a file nor a folder"
    if not path.exists():
        what = "is not there"
        if set("*?[") & set(str(path)):
            remedy += "; a pattern is expanded by the shell, where it is not in quotes and files match it"
    raise DataError(
        f"{path} {what}.",
        rule=f"a panel is built from files, or from a folder of {', '.join(_SUFFIXES)} files.",
        remedy=remedy,
    )


def _form(path: Path) -> Literal["parquet", "arrow"]:
    """Return the form of a file, by its first bytes; a DataError if it has neither."""
    with open(path, "rb") as file:
        head = file.read(6)
    if head[:4] == b"PAR1" or head == b"ARROW1":
        return "parquet" if head[:4] == b"PAR1" else "arrow"
    what = "is an Arrow IPC stream" if head[:4] == b"\xff\xff\xff\xff" else f"begins with {head!r}"
    raise DataError(
        f"{path} is neither a Parquet nor an Arrow file: it {what}.",
        rule="a Parquet file begins with PAR1, and an Arrow IPC file with ARROW1.",
        remedy="convert it; a CSV file: pandas.read_csv(...).to_parquet(...)",
    )


@contextmanager
def opened(path: Path, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """Open a Parquet or a mapped Arrow IPC file for some columns; an error of pyarrow becomes a DataError."""
    try:
        form = _form(path)
        if form == "parquet":
            # pyarrow's default keeps every byte read until the file is closed.
            with pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
                yield file
        else:
            with pa.memory_map(str(path)) as mapped:
                reader = pa.ipc.open_file(mapped)
                if columns is not None:
                    included = sorted(reader.schema.get_field_index(name) for name in columns)
                    reader = pa.ipc.open_file(mapped, options=pa.ipc.IpcReadOptions(included_fields=included))
                yield reader
    except pa.ArrowMemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} cannot be read: {error}",
            rule="the file must be whole; no other process may still be writing it.",
            remedy=f"check or restore it: ls -l {path}",
        ) from error


def match_columns(source: SourceLike, patterns: Sequence[str], *, taken: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the columns of a source that names and shell patterns (``*``, ``?``, ``[abc]``) stand for, each once. A
    name is taken as it is. A pattern finds the columns of numbers that match it, in the source's order, and are not
    ``taken`` by another role."""
    _, schema = next(Source.of(source).schemas())
    free = [field.name for field in schema if field.name not in taken and is_of(field.type, *NUMBER[0])]
    names: dict[str, None] = {}
    for pattern in patterns:
        is_name = pattern in schema.names or not set("*?[") & set(pattern)
        found = [pattern] if is_name else [name for name in free if fnmatchcase(name, pattern)]
        if not found:
            known = ", ".join(schema.names[:_NUM_NAMED]) + (", ..." if len(schema.names) > _NUM_NAMED else "")
            raise DataError(
                f"the pattern '{pattern}' finds no column of numbers; there are {known}.",
                rule="a pattern finds the columns of numbers that match it and have no other role.",
                remedy=nearest(pattern.strip("*"), schema.names),
            )
        names.update(dict.fromkeys(found))
    return tuple(names)


def check_columns(source: Source, *, date: str, asset: str, numbers: Sequence[str]) -> dict[str, list[str]]:
    """Check the columns used; return the Arrow types of each over all files."""
    types: dict[str, set[str]] = {}
    for part, schema in source.schemas():
        check_named(part, schema, [date, asset, *numbers])
        for name, (kinds, rule) in {date: _DATE, asset: _CODE, **dict.fromkeys(numbers, NUMBER)}.items():
            types.setdefault(name, set()).add(str(kind := schema.field(name).type))
            if not is_of(kind, *kinds):
                raise DataError(
                    f"column '{name}' of {part} has type {kind}.",
                    rule=rule,
                    remedy=f"convert the column, or leave '{name}' out",
                )
    return {name: sorted(found) for name, found in types.items()}


def check_named(part: str, schema: pa.Schema, names: Iterable[str]) -> None:
    for name in names:
        if (count := schema.names.count(name)) != 1:
            raise DataError(
                f"{part} has {count} columns named '{name}'.",
                rule="every part of a source holds each column used, once.",
                remedy=nearest(name, set(schema.names)) if count == 0 else "rename or drop one of them",
            )


def is_of(kind: pa.DataType, *names: str) -> bool:
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        kind = kind.value_type
    return any(getattr(pa.types, f"is_{name}")(kind) for name in names)


TEXT = ("string", "large_string", "string_view")
#: What columns of a role may hold, and the rule that says so.
_DATE = ("date", "timestamp", *TEXT), "dates are date32, timestamps or ISO 8601 text."
_CODE = ("integer", *TEXT), "asset codes are text or integers."
NUMBER = ("integer", "floating", "boolean", "decimal"), "features and targets are numbers."


def _plain(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        return column.dictionary_decode()
    return pc.run_end_decode(column) if pa.types.is_run_end_encoded(column.type) else column


def _refuse_nulls(column: pa.Array, name: str) -> None:
    if column.null_count:
        raise DataError(
            f"column '{name}' has no value in {column.null_count} of {len(column)} rows read together.",
            rule="every row names its date and its asset.",
            remedy="drop those rows from the source",
        )


def decode_dates(column: pa.Array, name: str) -> npt.NDArray[np.datetime64]:
    """Return a column's dates as ``datetime64[D]``; a timestamp with a time zone counts in that zone."""
    column = _plain(column)
    _refuse_nulls(column, name)
    if is_of(column.type, *TEXT):
        try:
            column = column.cast(pa.string()).cast(pa.timestamp("us"))
        except pa.ArrowInvalid as error:
            raise DataError(
                f"column '{name}' holds text that is no date: {error}",
                rule="text dates are ISO 8601 without a zone, for example 2024-01-31.",
                remedy="write them so, or convert the column to date32",
            ) from error
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        column = pc.local_timestamp(column)
    if not pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("s" if pa.types.is_date32(column.type) else "ms"))
    days = column.cast(pa.date32(), safe=False)
    is_midnight = pc.equal(days.cast(column.type), column)
    if not pc.all(is_midnight, min_count=0).as_py():
        late = column.filter(pc.invert(is_midnight))
        raise DataError(
            f"column '{name}' has a time of day in {len(late)} of {len(column)} rows read together, first "
            f"{late[:1].cast(pa.timestamp('us'), safe=False)[0].as_py().isoformat()}.",
            rule="a panel has one row per date and asset; timestamps lie on midnight.",
            remedy="aggregate to days, or cut the time off before building",
        )
    return numpy_of(days.cast(pa.int32())).astype(np.int64).astype("datetime64[D]")


def decode_assets(column: pa.Array, name: str) -> pa.Array:
    column = _plain(column)
    _refuse_nulls(column, name)
    return column.cast(pa.large_string())


def decode_numbers(column: pa.Array) -> npt.NDArray[Any]:
    """Return a column's numbers as floats with NaN for missing ones, or as integers when none is missing."""
    column = _plain(column)
    if pa.types.is_boolean(column.type) or pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    return numpy_of(column)


# pyarrow's own ``to_numpy`` and ``pa.array`` import pandas where it is installed: half a second without Ctrl-C. Before
# version 22, so does its method for a dtype of NumPy.


def numpy_of(column: pa.Array) -> npt.NDArray[Any]:
    """The values of a column of integers or floats, a view where none is missing; missing ones are NaN."""
    name, length = str(column.type), len(column)
    kind = np.dtype({"halffloat": "float16", "float": "float32", "double": "float64"}.get(name, name))
    if not length:
        return np.empty(0, kind)
    values: npt.NDArray[Any] = np.ndarray(length, kind, column.buffers()[1], column.offset * kind.itemsize)
    if not column.null_count:
        return values
    values = values.astype(kind if kind.kind == "f" else "float64")
    values[numpy_of(column.is_null().cast(pa.uint8())).view(bool)] = np.nan
    return values


def text_of(words: Iterable[str]) -> pa.Array:
    encoded = [word.encode() for word in words]
    ends = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(word) for word in encoded], out=ends[1:])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.large_string(), len(encoded), buffers)
