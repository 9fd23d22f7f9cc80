"""Read a JSON Lines file row by row, by an index of where its lines begin; without loading it."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import operator
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from memfit.errors import DataError

_FORMAT = 1
_HEAD = 4  # numbers before the offsets: what _head gives, and the bytes of a last line that was cut off
_EMPTY = 2  # bytes of an empty line: LF, or CR and LF
_READ_BYTES = 1 << 17
_LINES_AT_ONCE = 1 << 16


class JsonLines(Sequence[Any]):
    r"""The rows of a JSON Lines file, each read and parsed when it is asked for.

    Where the lines begin is written into an index once: 8 bytes a row, mapped and so shared by all processes. Empty
    lines are no rows. A last line that was cut off is no row either.

    Args:
        path: The file: UTF-8, one JSON value a line.
        index: The index, made if it is not there. None: beside the file, with ``.index`` behind its name.

    Attributes:
        index_path: Where the index lies.
        torn_bytes: The length of a last line that was cut off; 0 if there is none.

    Raises:
        DataError: If the file cannot be read, has no row, or has changed since its index was made.

    Example:
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "pairs.jsonl").write_text('{"in": "two"}\n{"in": "three"}\n{"in": "fo')
        >>> rows = JsonLines(folder / "pairs.jsonl")
        >>> len(rows), rows[1], rows.torn_bytes
        (2, {'in': 'three'}, 10)
    """

    def __init__(self, path: Path | str, index: Path | str | None = None) -> None:
        self.path = Path(path)
        self.index_path = self.path.with_name(f"{self.path.name}.index") if index is None else Path(index)
        try:
            if not self.index_path.exists():
                _make_index(self.path, self.index_path)
            found: npt.NDArray[np.int64] = np.memmap(self.index_path, "<i8", "r")
            head = _head(self.path)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.path} or its index cannot be used: {error}.",
                rule="a JSON Lines file is read, and its index is made once, beside it or where index= says.",
                remedy="name a file that can be read, and an index in a folder that can be written",
            ) from None
        if found[: len(head)].tolist() != head:
            raise DataError(
                f"{self.path} has changed since {self.index_path.name} was made.",
                rule="an index says where the lines of one file begin; it is not for another.",
                remedy=f"index it anew: rm {self.index_path}",
            )
        self._starts = found[_HEAD:]
        self.torn_bytes = int(found[_HEAD - 1])
        if not len(self):
            raise DataError(f"{self.path} has no row.", rule="a row is a line.", remedy="name a file with rows")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start, end = self._starts[number : number + 2].tolist()
        return self.parse(os.pread(self._file, end - start, start), number)

    def __iter__(self) -> Iterator[Any]:
        for number, line in enumerate(self.lines()):
            yield self.parse(line, number)

    def lines(self) -> Iterator[bytes]:
        """Yield the rows' bytes in order, unparsed."""
        with open(self.path, "rb", buffering=_READ_BYTES) as file:
            yield from itertools.islice((line for line in file if len(line) > _EMPTY or line.strip()), len(self))

    def parse(self, line: bytes, number: int) -> Any:
        """Return the value of a row; ``number`` is for the error.

        Raises:
            DataError: Naming the row, if it is no JSON.
        """
        try:
            return _parser()(line)
        except ValueError as error:
            raise DataError(
                f"row {number} of {self.path} is no JSON: {error}.",
                rule="each line is one JSON value in UTF-8.",
                remedy="correct it, or leave such rows out",
            ) from None

    @functools.cached_property
    def _file(self) -> int:
        return os.open(self.path, os.O_RDONLY)

    def __del__(self) -> None:
        if "_file" in self.__dict__:
            os.close(self._file)

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonLines, (self.path, self.index_path)


def _make_index(path: Path, index: Path) -> None:
    """Write the end of each row; whole or not at all."""
    with tempfile.NamedTemporaryFile("w+b", dir=index.parent, prefix=f".{index.name}.", delete=False) as aside:
        try:
            np.array([*_head(path), 0, 0], "<i8").tofile(aside)  # nothing is torn yet; the first row begins at 0
            at = 0
            with open(path, "rb", buffering=_READ_BYTES) as file:
                while len(lengths := np.fromiter(map(len, itertools.islice(file, _LINES_AT_ONCE)), "<i8")):
                    ends = at + np.cumsum(lengths)
                    at = int(ends[-1])
                    short = [(one, int(lengths[one]), int(ends[one])) for one in np.flatnonzero(lengths <= _EMPTY)]
                    empty = [one for one, size, end in short if not os.pread(file.fileno(), size, end - size).strip()]
                    (np.delete(ends, empty) if empty else ends).tofile(aside)
                file.seek(max(0, at - 1))
                if at and file.read() != b"\n":
                    _judge_last(file, aside, at)
            aside.flush()
            os.fsync(aside.fileno())
            os.replace(aside.name, index)
        except BaseException:
            with suppress(FileNotFoundError):
                Path(aside.name).unlink()
            raise


def _judge_last(file: IO[bytes], index: IO[bytes], size: int) -> None:
    """Take back a last line without an end if it is no JSON: it was cut off."""
    index.seek(-16, os.SEEK_END)
    start, end = np.frombuffer(index.read(16), "<i8").tolist()
    if end == size:
        file.seek(start)
        try:
            _parser()(file.read())
        except ValueError:
            index.seek(-8, os.SEEK_END)
            index.truncate()
            end = start
    index.seek(8 * (_HEAD - 1))
    index.write(np.array([size - end], "<i8").tobytes())


def _head(path: Path) -> list[int]:
    """Return what an index must agree with: the format, and the size and time of the file."""
    facts = path.stat()
    return [_FORMAT, facts.st_size, facts.st_mtime_ns]


@functools.cache
def _parser() -> Callable[[bytes], Any]:
    """Return orjson's parser, or Python's with the same rules."""
    if importlib.util.find_spec("orjson") is not None:
        import orjson

        return orjson.loads
    warnings.warn(
        "orjson is not installed: JSON is read by Python's own parser, slower; pip install orjson", stacklevel=4
    )

    def parse(line: bytes) -> Any:
        return json.loads(line.decode(), parse_constant=_refuse)

    return parse


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
