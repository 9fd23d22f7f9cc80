"""Read a log in pieces; of a large one, in one pass, its ends and what the table may match."""

from __future__ import annotations

import codecs
import re
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain, takewhile
from typing import BinaryIO, NamedTuple

from memfit.diagnosis._signatures import SIGNATURES, Row

_PIECE_BYTES = 4 << 20
_HEAD_LINES, _HEAD_BYTES = 400, 1 << 16
_TAIL_BYTES = 1 << 17
_LONGEST_LINE, _MOST_BYTES = 8 << 20, 4000
#: The pieces kept around a match; of how many first and last matches of a row; how many places of a word are tried.
_BEFORE, _AFTER, _KEPT, _TRIED = 60, 30, 4, 40
#: Pieces are alike if they are the same in lower case, without blanks, and with 0 for each digit.
_ALIKE = bytes(range(256)).lower().translate(bytes.maketrans(b"123456789", b"000000000"))


def read_pieces(source: BinaryIO) -> Iterator[bytes]:
    """Yield the log as UTF-8; a torn archive ends where it is torn."""
    pieces = iter(lambda: source.read(_PIECE_BYTES), b"")
    first = next(pieces, b"")
    if first.startswith(b"\x1f\x8b"):
        pieces = _unzip(chain([first], pieces))
        first = next(pieces, b"")
    if first[:2] not in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from pieces
        return
    for text in codecs.iterdecode(chain([first], pieces), "utf-16", errors="replace"):
        yield text.replace("\ufeff", "").encode(errors="replace")


def _unzip(pieces: Iterable[bytes]) -> Iterator[bytes]:
    archive = zlib.decompressobj(wbits=31)
    with suppress(zlib.error):
        for piece in pieces:
            while piece:
                if archive.eof:  # another archive follows
                    archive = zlib.decompressobj(wbits=31)
                yield archive.decompress(piece, _PIECE_BYTES)
                piece = archive.unconsumed_tail or archive.unused_data
        yield archive.flush()


class Piece(NamedTuple):
    """A line, or a part of one; its position among all pieces, and its number."""

    position: int
    number: int
    text: bytes


class _Windows:
    """The pieces around the first and the last matches of each row of the table."""

    def __init__(self) -> None:
        self._rows = (*SIGNATURES, Row("traceback", re.compile(r"Traceback \(most recent call")))
        self._first: list[list[Sequence[Piece]]] = [[] for _ in self._rows]
        self._last: list[deque[Sequence[Piece]]] = [deque(maxlen=_KEPT) for _ in self._rows]

    def __iter__(self) -> Iterator[Piece]:
        return chain.from_iterable(chain.from_iterable((*self._first, *self._last)))

    def search(self, pieces: Sequence[Piece], begin: int, end: int) -> None:
        """Keep what is around the matches that begin between two positions of these pieces."""
        alike: dict[bytes, list[int]] = {}
        for at in range(begin, end):
            alike.setdefault(pieces[at].text.translate(_ALIKE, b" \t"), []).append(at)
        text, groups = b"\n".join(alike), [*alike.values()]
        starts = [*accumulate((len(one) + 1 for one in alike), initial=0)]
        for row, first, last in zip(self._rows, self._first, self._last, strict=True):
            told = sorted({at for word in row.words for group in _places(word, text, starts) for at in groups[group]})
            tried = told if len(told) <= 2 * _TRIED else [*told[:_TRIED], *told[-_TRIED:]]
            found = [at for at in tried if _is_match(row, pieces, at)]
            windows = [pieces[max(0, at - _BEFORE) : at + _AFTER] for at in found]
            num_first = _KEPT - len(first)
            first += windows[:num_first]
            last += windows[num_first:]


def _places(word: str, text: bytes, starts: Sequence[int]) -> Iterator[int]:
    at = text.find(alike := word.encode().translate(_ALIKE))
    while at >= 0:
        yield (place := bisect_right(starts, at) - 1)
        at = text.find(alike, starts[place + 1])


def _is_match(row: Row, pieces: Sequence[Piece], at: int) -> bool:
    """Whether a row may match here; of lines it says more once the marks before them are taken off."""
    if row.by_line:
        return True
    near = b"".join(piece.text for piece in pieces[max(0, at - 3) : at + 12]).decode(errors="replace")
    return row.regex.search("".join(near.split())) is not None


def excerpt(texts: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the numbered lines of a log that are kept: its beginning, its end, and what is around matches."""
    windows, pieces, begin, number, position = _Windows(), list[Piece](), 0, 1, 0
    head, head_bytes = list[Piece](), 0
    for text in _whole_lines(texts):
        for at, line in enumerate(text.split(b"\n")):
            number += at > 0
            for part in [part for part in line.split(b"\r") if part.strip()] or [b""]:
                part = part if len(part) <= 2 * _MOST_BYTES else part[:_MOST_BYTES] + part[-_MOST_BYTES:]
                pieces.append(Piece(position, number, part))
                if number <= _HEAD_LINES and head_bytes < _HEAD_BYTES:
                    head.append(pieces[-1])
                    head_bytes += len(part)
                position += 1
        end = max(begin, len(pieces) - _AFTER)
        windows.search(pieces, begin, end)
        cut = max(0, min(end - _BEFORE, _tail(pieces)))
        pieces, begin = pieces[cut:], end - cut
    windows.search(pieces, begin, len(pieces))
    for piece in sorted({*head, *windows, *pieces[_tail(pieces) :]}):
        yield piece.number, piece.text


def _tail(pieces: Sequence[Piece]) -> int:
    sizes = accumulate(len(piece.text) + 1 for piece in reversed(pieces))
    return max(0, len(pieces) - 1 - len([*takewhile(lambda size: size <= _TAIL_BYTES, sizes)]))


def _whole_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The text in pieces that end where a line ends, unless a line has no end."""
    left = b""
    for piece in pieces:
        left += piece
        cut = left.rfind(b"\n") + 1
        if cut == 0 and len(left) > _LONGEST_LINE:
            cut = left.rfind(b"\r") + 1 or len(left)
        if cut:
            yield left[:cut]
            left = left[cut:]
    if left:
        yield left
