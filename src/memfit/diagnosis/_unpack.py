"""Read a log as UTF-8 bytes: packed with gzip or not, torn or not, UTF-16 too."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Callable
from typing import BinaryIO, Protocol


class Source(Protocol):
    """Something to read bytes from."""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes, about as many as asked for; none at the end."""
        ...


def unpacked(source: BinaryIO) -> Source:
    """Return a source of UTF-8; a torn archive ends where it is torn."""
    plain = io.BufferedReader(_Raw(source.read))
    if plain.peek(2)[:2] == b"\x1f\x8b":
        archive = gzip.GzipFile(fileobj=plain)

        def read(size: int) -> bytes:
            try:
                return archive.read1(size)
            except (EOFError, gzip.BadGzipFile, zlib.error):
                return b""

        plain = io.BufferedReader(_Raw(read))
    head = plain.peek(512)[:512]
    encoding = _encoding(head)
    if encoding != "utf-8":
        return _Recoded(io.TextIOWrapper(plain, encoding, errors="replace", newline="\n"))
    if head.startswith(codecs.BOM_UTF8):
        plain.read(len(codecs.BOM_UTF8))
    return plain


class _Raw(io.RawIOBase):
    """A reader for `io.BufferedReader` that leaves its source open."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        piece = self._read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


class _Recoded:
    """UTF-16 as UTF-8."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text = text

    def read(self, size: int, /) -> bytes:
        return self._text.read(size).replace("\ufeff", "").encode(errors="replace")


def _encoding(head: bytes) -> str:
    """The encoding by the mark at the beginning, or by every second byte being zero."""
    if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    pairs = min(len(head), 64) // 2
    zeros = [head[start : 2 * pairs : 2].count(0) > 0.7 * pairs for start in (0, 1)]
    if pairs < 4 or zeros[0] == zeros[1]:
        return "utf-8"
    return "utf-16-be" if zeros[0] else "utf-16-le"
