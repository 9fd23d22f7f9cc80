"""Read a log in pieces of UTF-8, packed or torn; of a large one, in one pass, its ends and what may tell a cause."""

from __future__ import annotations

import codecs
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import BinaryIO

_PIECE_BYTES = 4 << 20
_HEAD_LINES, _HEAD_BYTES = 400, 1 << 16
_TAIL_BYTES = 1 << 17
_BEFORE, _AFTER = 60, 30
_REACH_BYTES = 1 << 14
_LONGEST_LINE = 8 << 20
#: Words of deaths, and words that may belong to one, each with the number of first and of last windows that are kept.
_WORDS = (
    (
        b"out of mem,outofmem,oom-kill,oom_kill,oomkill,killed,memoryerror,bad_alloc,traceback,cancelled,exhausted,"
        b"segmentation,no space left,timed out,exceeded,preempt,fatal,allocate,ancdata,too many open,assert,bus error,"
        b"sigkill,sigterm",
        50,
    ),
    (b"error,kill,exception,abort,signal", 20),
)


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
    decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
    for piece in chain([first], pieces):
        yield decoder.decode(piece).replace("\ufeff", "").encode(errors="replace")


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


class _Windows:
    """The first and the last windows of text around one sort of words."""

    def __init__(self, words: bytes, most: int) -> None:
        self._words, self._most = words.split(b","), most
        self.first: list[tuple[int, bytes]] = []
        self.last: deque[tuple[int, bytes]] = deque(maxlen=most)

    def search(self, text: bytes, flat: bytes, at: int, number: int) -> None:
        """Keep the windows of a text from an offset on; ``number`` is the number of its first line."""
        counted, hits = 0, {word: flat.find(word, at) for word in self._words}
        while found := [place for place in hits.values() if place >= 0]:
            hit = min(found)
            before = flat[max(0, hit - _REACH_BYTES) : hit].split(b"\n")[-_BEFORE:]
            after = flat[hit : hit + _REACH_BYTES].split(b"\n")[:_AFTER]
            begin, at = hit - len(b"\n".join(before)), hit + max(len(b"\n".join(after)), 1)
            number += text.count(b"\n", counted, begin) if begin >= counted else -text.count(b"\n", begin, counted)
            counted = begin
            (self.first if len(self.first) < self._most else self.last).append((number, text[begin:at]))
            hits = {word: flat.find(word, at) if 0 <= place < at else place for word, place in hits.items()}


def excerpt(pieces: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the numbered lines of a log that are kept."""
    sorts = [_Windows(words, most) for words, most in _WORDS]
    number, head, before, tail = 1, b"", b"", b""
    for piece in _whole_lines(pieces):
        text = before + piece
        flat = text.replace(b"\r", b"\n").lower()
        for one in sorts:
            one.search(text, flat, len(before), number - before.count(b"\n"))
        head += piece[: _HEAD_BYTES - len(head)]
        before, tail = piece[-2 * _REACH_BYTES :], (tail + piece)[-_TAIL_BYTES:]
        number += piece.count(b"\n")
    found = dict(enumerate(head.split(b"\n")[:_HEAD_LINES], 1))
    windows = [window for one in sorts for window in (*one.first, *one.last)]
    for begin, window in [*windows, (number - tail.count(b"\n"), tail)]:
        for place, line in enumerate(window.split(b"\n"), begin):
            if len(line) > len(found.get(place, b"")):  # a window may begin or end within a line
                found[place] = line
    yield from sorted(found.items())


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
