"""Arrow arrays and NumPy's, by their buffers.

pyarrow's own ``to_numpy`` and ``pa.array`` import pandas where it is installed, half a second in which Ctrl-C is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[Any]


def numpy_of(column: pa.Array) -> Array:
    """The values of a column of integers or floats, a view where none is missing; missing ones are NaN."""
    kind, length = np.dtype(column.type.to_pandas_dtype()), len(column)
    if not length:
        return np.empty(0, kind)
    values: Array = np.ndarray(length, kind, column.buffers()[1], column.offset * kind.itemsize)
    if not column.null_count:
        return values
    values = values.astype(kind if kind.kind == "f" else "float64")
    values[numpy_of(column.is_null().cast(pa.uint8())).view(bool)] = np.nan
    return values


def text_of(words: Iterable[str]) -> pa.Array:
    """Words as Arrow's ``large_string``."""
    encoded = [word.encode() for word in words]
    ends = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(word) for word in encoded], out=ends[1:])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.large_string(), len(encoded), buffers)
