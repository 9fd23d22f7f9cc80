"""Read CSV files in blocks, with types that hold for all rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

_BLOCK_BYTES = 1 << 20
#: The types that a column may have, the first that all its values fit; text otherwise. A code such as 007 stays text.
_TYPES = (
    (pa.int64(), r"^-?(0|[1-9]\d{0,17})$"),
    (pa.float64(), r"^(-?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d+)?|-?(nan|NaN|inf|Inf))$"),
    (pa.bool_(), "^(true|false|True|False)$"),
)


def is_csv(path: Path) -> bool:
    return path.name.lower().endswith((".csv", ".csv.gz"))


def open_csv(path: Path, columns: Sequence[str] | None = None) -> csv.CSVStreamingReader:
    """Open a CSV file with a header: commas, double quotes, UTF-8; an empty field is a missing value. The types follow
    from all rows, which are read once for that. Only some ``columns`` are read if they are given."""
    facts = path.stat()
    return _open(path, _infer(path, facts.st_ino, facts.st_size, facts.st_mtime_ns), columns)


def _open(path: Path, schema: pa.Schema | None, columns: Sequence[str] | None = None) -> csv.CSVStreamingReader:
    types = None if schema is None else {field.name: field.type for field in schema}
    how = csv.ConvertOptions(
        column_types=types, null_values=[""], strings_can_be_null=True, include_columns=list(columns or ())
    )
    return csv.open_csv(path, csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES), convert_options=how)


@lru_cache(maxsize=256)
def _infer(path: Path, *_: int) -> pa.Schema:
    """Return the names of the columns and the types that hold for all rows; kept until the file changes."""
    with _open(path, None) as first:
        names = first.schema.names
    fitting = [list(_TYPES) for _ in names]
    with _open(path, pa.schema([(name, pa.string()) for name in names])) as reader:
        for batch in reader:
            for place, column in enumerate(batch.columns):
                fitting[place] = [
                    (kind, form)
                    for kind, form in fitting[place]
                    if pc.all(pc.match_substring_regex(column, form), min_count=0).as_py()
                ]
    return pa.schema([(name, fits[0][0] if fits else pa.string()) for name, fits in zip(names, fitting, strict=True)])
