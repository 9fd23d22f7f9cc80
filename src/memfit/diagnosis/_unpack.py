"""Bytes of a log as UTF-8, whatever it was packed in or written as, piece by piece and as far as it goes."""

from __future__ import annotations

import codecs
import zlib
from typing import BinaryIO, Protocol

_PIECE = 1 << 16


class Source(Protocol):
    """Something to read bytes from."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes; none at the end."""
        ...


def unpacked(source: BinaryIO) -> Source:
    """A source of UTF-8: packed ones are unpacked, UTF-16 is recoded, torn ones end where they are torn."""
    plain: Source = _Ahead(source)
    if _peek(plain, 2) == b"\x1f\x8b":
        plain = _Ahead(_Gunzip(plain))
    head = _peek(plain, 512)
    encoding = _encoding(head)
    if encoding != "utf-8":
        return _Ahead(_Recoded(plain, encoding))
    if head.startswith(codecs.BOM_UTF8):
        plain.read(len(codecs.BOM_UTF8))
    return plain


def _peek(source: Source, size: int) -> bytes:
    assert isinstance(source, _Ahead)
    return source.peek(size)


class _Ahead:
    """A source whose next bytes can be looked at, and that gives as many as are asked for while there are any."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._ready = b""

    def peek(self, size: int) -> bytes:
        """The next bytes, which stay."""
        self._ready += self._whole(size - len(self._ready))
        return self._ready[:size]

    def read(self, size: int, /) -> bytes:
        """The next bytes."""
        piece, self._ready = self._ready[:size], self._ready[size:]
        return piece + self._whole(size - len(piece)) if len(piece) < size else piece

    def _whole(self, size: int) -> bytes:
        pieces = []
        while size > 0:
            piece = self._source.read(size)
            if not piece:
                break
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)


class _Gunzip:
    """What is in a gzip archive of one or more members, up to where it is torn."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._member = zlib.decompressobj(wbits=31)
        self._left = b""
        self._torn = False

    def read(self, size: int, /) -> bytes:
        """At most so many bytes."""
        while not self._torn:
            packed = self._left or self._source.read(_PIECE)
            if not packed:
                break
            if self._member.eof:
                self._member = zlib.decompressobj(wbits=31)
            try:
                piece = self._member.decompress(packed, size)
            except zlib.error:
                self._torn = True
                break
            self._left = self._member.unconsumed_tail or self._member.unused_data
            if piece:
                return piece
        return b""


class _Recoded:
    """UTF-16 as UTF-8."""

    def __init__(self, source: Source, encoding: str) -> None:
        self._source = source
        self._decoder = codecs.getincrementaldecoder(encoding)(errors="replace")

    def read(self, size: int, /) -> bytes:
        """Some bytes; about as many as asked for."""
        while True:
            piece = self._source.read(max(2, size))
            text = self._decoder.decode(piece, final=not piece)
            if text or not piece:
                return text.replace("\ufeff", "").encode("utf-8", errors="replace") or (b"\n" if piece else b"")


def _encoding(head: bytes) -> str:
    """The encoding by the mark at the beginning, or by every second byte being zero.

    >>> _encoding("loss 0.5 at step 100".encode("utf-16-le")), _encoding(b"loss")
    ('utf-16-le', 'utf-8')
    """
    if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    pairs = min(len(head), 64) // 2
    if pairs >= 4 and head[1 : 2 * pairs : 2].count(0) > 0.7 * pairs and head[: 2 * pairs : 2].count(0) < 0.3 * pairs:
        return "utf-16-le"
    if pairs >= 4 and head[: 2 * pairs : 2].count(0) > 0.7 * pairs and head[1 : 2 * pairs : 2].count(0) < 0.3 * pairs:
        return "utf-16-be"
    return "utf-8"
