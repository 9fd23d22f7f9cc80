"""A job's memory over time, as an Arrow IPC stream that is written without Arrow.

The process that watches a job would grow severalfold by importing an Arrow library. With a fixed schema and a fixed
number of rows, everything in a record batch but its columns' values is constant: so the constants lie here, and the
columns are packed by hand. Any Arrow reader reads the file.
"""

from __future__ import annotations

import binascii
import errno
import os
import struct
import zlib
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from memfit.errors import DamagedError
from memfit.memory._meter import Sample

if TYPE_CHECKING:
    import pyarrow

#: The columns: ``time`` is float64, ``phase`` bytes of this width, all others are int64; none is ever null.
COLUMNS = (
    "time",
    "num_processes",
    "private_bytes",
    "peak_bytes",
    "shared_bytes",
    "rss_bytes",
    "pss_bytes",
    "device_bytes",
    "phase",
)
PHASE_WIDTH = 32
BATCH_ROWS = 10


def _constant(text: str) -> bytes:
    return zlib.decompress(binascii.a2b_base64(text))


# Made by pyarrow; tests/memory/test_series.py makes them again and compares what readers see.
_SCHEMA = _constant(
    "eNr7////fw8mBgYBBhDgYuBhYGNgZeAAsoCAkQXIZwDyOIAkC5RkYOAE4heMDAxTgDgCiBWA+AlQbA0QlwCxBVSdz7///4EUP8hsGagYCLACcU"
    "FGYnEq0C4OoCgbkK8AxDUQ9UwCUD5MPcgNKallmcmp8UmVJanFILE9ELWMDkBiC5I+ZHtA7iwoLoZr+oCk5wUePUVIelT+I/TI/MftvuKMxKLU"
    "FIT7YpD0hfzHbhcojAtSE7NhuiYg6enAYRcvSE9RZlliCSIwTiDpO4CkTwNNX15pbnxBUX5yanExWB8H0OUcDOzgeIXpF2AQAfPZwb4SgKYLBm"
    "Z0t4PokszcVAZwHLKB4xBoLQMAQwRj6w=="
)
#: The header of a record batch by its number of rows.
_HEADERS = {
    BATCH_ROWS: _constant(
        "eNr7////fw4mBgYRBgjgYRBjYGNgZeAAsnhAAswsDBJA6gAzVAEDF5DPw8ACVMEF5NkwMjAIgEURQIgBNwhAo3GJL0CTX4Am/wFN/gOavAMjqj"
        "yMD5OfgCY/AU3+AZr8AzR5AyZUeRgfJt+AJg/jI7uLEy3cGAYBHwDqfBGp"
    ),
    1: _constant(
        "eNrN0LEKgCAUBdBrWZg4SEQ4Ojo6OjT4Kf3/T9iLiOBSe3e5vnccxNZaMx2w4IrDihEDjJzcueg1gtSOO1ZmBy03rEybAry0wpMZ3zHUX3tP7s"
        "kDeSCP5JE8kSfyTJ7JC3khr+T15V0T/Rt+MB/C2Qg9"
    ),
}
_ROW_BYTES = 8 * (len(COLUMNS) - 1) + PHASE_WIDTH


class SeriesWriter:
    """Appends samples to an Arrow IPC stream; ten at a time, in one write, so that a kill loses the last nine at most.

    A file that is there already is continued, a torn end of it is cut off first. No end-of-stream mark is written (the
    format lets the end of the file stand for it), so that a job's next attempt can go on.

    Args:
        path: The file, for example ``jobs/fold_1/memory.arrows``; its folder must exist.

    Raises:
        DamagedError: If the file holds something else.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "memory.arrows"
        >>> with SeriesWriter(path) as series:
        ...     series.append(Sample(1.5, 2, 300, 40, 350, 320, "train"))
        >>> read_series(path).to_pylist()[0]["phase"]
        'train'
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[Sample] = []
        self._length = _whole_length(path) if path.exists() else 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._descriptor, self._length)
        if not self._length:
            self._write(_SCHEMA)

    def append(self, sample: Sample) -> None:
        """Take a sample; device bytes are summed, a phase's name is cut to 32 bytes.

        Raises:
            OSError: For example on a full disk; the file then still ends with a whole batch.
        """
        self._rows.append(sample)
        if len(self._rows) == BATCH_ROWS:
            rows, self._rows = self._rows, []
            self._write(_batch(rows))

    def close(self) -> None:
        """Write the samples that did not fill a batch, and close the file."""
        rows, self._rows = self._rows, []
        try:
            if rows:
                self._write(b"".join(_batch([row]) for row in rows))
        finally:
            os.close(self._descriptor)

    def __enter__(self) -> SeriesWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, message: bytes) -> None:
        written = os.write(self._descriptor, message)
        if written < len(message):
            os.ftruncate(self._descriptor, self._length)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._length += written


def read_series(path: Path) -> pyarrow.Table:
    """A job's memory over time, a row a sample; a torn end, as a kill leaves it, is passed over.

    Returns:
        A table with the columns ``COLUMNS``: ``time`` in Unix seconds (float64), ``phase`` as a string (empty before
        the first mark), ``device_bytes`` summed over devices, all bytes int64.

    Raises:
        DamagedError: If the file is no such series.
    """
    import pyarrow as pa
    import pyarrow.ipc

    with open(path, "rb") as file:
        whole = file.read(_whole_length(path)) or _SCHEMA
    table = pa.ipc.open_stream(whole).read_all()
    names = [bytes(phase).rstrip(b"\0").decode() for phase in table["phase"].to_pylist()]
    return table.set_column(table.schema.get_field_index("phase"), "phase", pa.array(names, pa.string()))


def _batch(rows: list[Sample]) -> bytes:
    count = len(rows)
    times = struct.pack(f"<{count}d", *(row.time for row in rows))
    numbers = [[getattr(row, name) for row in rows] for name in COLUMNS[1:-2]]
    numbers.append([sum(row.device_bytes.values()) for row in rows])
    phases = b"".join(_fixed(row.phase) for row in rows)
    return b"".join((_HEADERS[count], times, *(struct.pack(f"<{count}q", *column) for column in numbers), phases))


def _fixed(phase: str) -> bytes:
    """A name in exactly ``PHASE_WIDTH`` bytes, cut between two characters."""
    return phase.encode()[:PHASE_WIDTH].decode(errors="ignore").encode().ljust(PHASE_WIDTH, b"\0")


def _whole_length(path: Path) -> int:
    """How many bytes of a series are whole messages; 0 when not even its schema is. Reads the headers only."""
    longest = max(map(len, _HEADERS.values()))
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        begin = file.read(len(_SCHEMA))
        if not _SCHEMA.startswith(begin):
            raise _damaged(path, 0)
        position = len(begin) if begin == _SCHEMA else 0
        while 0 < position < size:
            file.seek(position)
            seen = file.read(longest)
            rows = next((rows for rows, header in _HEADERS.items() if seen.startswith(header)), None)
            if rows is None and not any(header.startswith(seen) for header in _HEADERS.values()):
                raise _damaged(path, position)
            end = position + len(_HEADERS[rows]) + rows * _ROW_BYTES if rows else size + 1
            if end > size:
                break
            position = end
    return position


def _damaged(path: Path, position: int) -> DamagedError:
    return DamagedError(
        f"{path} is no series of memory samples from byte {position} on.",
        rule="memfit appends whole batches of one schema; only the last one may be torn.",
        remedy=f"restore it from a backup, or move it away: mv {path} {path}.broken",
    )
