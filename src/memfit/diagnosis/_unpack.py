"""Read a log in pieces of UTF-8, whether it is packed with gzip, torn, or in UTF-16."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import BinaryIO

_PIECE_BYTES = 4 << 20


def read_pieces(source: BinaryIO) -> Iterator[bytes]:
    """Yield the log as UTF-8; a torn archive ends where it is torn."""
    pieces = iter(lambda: source.read(_PIECE_BYTES), b"")
    first = next(pieces, b"")
    if first.startswith(b"\x1f\x8b"):
        pieces = _unzip(chain([first], pieces))
        first = next(pieces, b"")
    encoding = _encoding(first)
    if encoding == "utf-8":
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from pieces
        return
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
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


def _encoding(head: bytes) -> str:
    """The encoding by the mark at the beginning, or by every second byte being zero."""
    if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    pairs = min(len(head), 64) // 2
    zeros = [head[start : 2 * pairs : 2].count(0) > 0.7 * pairs for start in (0, 1)]
    if pairs < 4 or zeros[0] == zeros[1]:
        return "utf-8"
    return "utf-16-be" if zeros[0] else "utf-16-le"
