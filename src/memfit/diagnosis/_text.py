"""Read logs as they are found: packed, torn, coloured, wrapped, interleaved, larger than memory.

A log becomes one `Stream` of `Line`s per rank. Its text is searched without white space, because consoles wrap inside
words and numbers.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import BinaryIO

from memfit.diagnosis._large import excerpt, read_pieces
from memfit.masking import strip_controls

#: A log up to this size is read whole, a larger one by `excerpt`.
_WHOLE_BYTES = 1 << 18
_MOST_CHARS = 4000
#: Bytes that no text in any encoding has many of; noise and packed files have one in ten.
_LEAST_BINARY = 100
_BINARY, _SAMPLE_BYTES = bytes({*range(1, 0x20)} - {*b"\a\b\t\n\f\r\x1b"}), 1 << 16
_RANK = re.compile(
    r"\s*(?:\[rank ?(\d{1,5})\]:? ?|\[default(\d{1,5})\]:|\[?rank[:= ](\d{1,5})\]?[:|] "
    r"|\[\d{1,5},(\d{1,5})\]<std\w{3}>:)"
)
#: The mark of ``srun --label``, which counts only where most lines have it.
_LABEL = re.compile(r" *(\d{1,5}): ?")
#: Lines of Slurm's own begin so, and go on with no line of a rank.
_OF_SLURM = re.compile(r"srun: |slurmstepd\b")
_PREFIX = re.compile(
    r"\s*(?:"
    r">+ |E   +|\|\s(?=\s*\S)|[\w.-]+-\d+ +\| |\[pod/[^\]]{1,200}\] |"
    r"\((?:[A-Za-z_][\w.]*)(?: pid=\d+)?(?:, ip=[\d.]+)?\) (?!in )|"
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:? |"
    r"(?:INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[\S{1,80}:\d+\] ?|"
    r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?P<host>\S+) (?=kernel:|systemd|slurm|earlyoom|oom)|"
    r"(?P<node>[\w.-]+) (?=kernel: )|kernel: |<\d+>|\d+,\d+,\d+,[^;]{0,20};|\[ *\d+\.\d{4,6}\](?:\[ *[TC]\d+\])? ?|"
    r"\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\] )"
)
_BOX = re.compile(r"^\s*[│┃] ?(.*?)\s*[│┃]\s*$")
_TIME = re.compile(
    r"[A-Z][a-z]{2} [A-Z][a-z]{2} +\d+ [\d:]{8} \d{4}|(?<=^\[) *\d+\.\d{6}(?=\])|"
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d|\b\d\d/\d\d/\d{4} \d\d:\d\d:\d\d"
    r"|\b[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d\b|\b\d\d:\d\d:\d\d\b"
)


@dataclass(frozen=True, slots=True)
class Line:
    file: str
    number: int  # from 1; pieces that a carriage return divides have the same
    text: str  # without colours, carriage returns and the marks that launchers set before it
    rank: int | None = None  # that such a mark names
    time: str = ""  # as written
    host: str = ""


class Stream:
    """The lines of one rank; ``squeezed`` is their text without white space, ``flat`` the same in lower case."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = list(lines)
        pieces = ["".join(line.text.split()) for line in lines]
        self.squeezed = "".join(pieces)
        flat = self.squeezed.lower()  # a few letters become two
        self.flat = flat if len(flat) == len(self.squeezed) else "".join(one.lower()[:1] for one in self.squeezed)
        self.starts = list(accumulate(map(len, pieces[:-1]), initial=0))  # offsets in ``squeezed`` of the lines

    def lines_with(self, words: Iterable[str]) -> list[int]:
        found: set[int] = set()
        for word in words:
            at = self.flat.find(word)
            while at >= 0:
                place = self.line_at(at)
                found.add(place)
                at = self.flat.find(word, max(at + 1, self.starts[place + 1] if place + 1 < len(self.starts) else at))
        return sorted(found)

    def line_at(self, offset: int) -> int:
        return max(0, bisect.bisect_right(self.starts, offset) - 1)

    def between(self, start: int, end: int) -> tuple[Line, ...]:
        first, last = self.line_at(start), self.line_at(max(start, end - 1))
        return tuple(line for line in self.lines[first : last + 1] if line.text.strip())


def read_streams(name: Path | str, source: BinaryIO) -> list[Stream]:
    """Return the streams of a log: the lines without a rank, and those of each rank. What is no text has none."""
    by_rank: dict[int | None, list[Line]] = {}
    for line in _lines(source, str(name)):
        by_rank.setdefault(line.rank, []).append(line)
    return [Stream(lines) for lines in by_rank.values()]


def _lines(source: BinaryIO, name: str) -> Iterator[Line]:
    pieces, first = read_pieces(source), b""
    raw: Iterable[tuple[int, bytes]] = ()
    for piece in pieces:
        first += piece
        if len(first) > _WHOLE_BYTES:
            raw = excerpt(chain([first], pieces))
            break
    sample = first[:_SAMPLE_BYTES].replace(b"\0", b"")  # a log that was cut while it was written begins with zeros
    if len(sample) - len(sample.translate(None, _BINARY)) > max(_LEAST_BINARY, 0.03 * len(sample)):
        return
    beginning = [line.decode("utf-8", errors="replace").rstrip("\r") for line in first.split(b"\n")]
    lengths = [len(line) for line in beginning]
    # The width at which a console wrapped: the longest line's, if several lines have it.
    width = max(lengths) if 40 <= max(lengths) <= 400 and lengths.count(max(lengths)) > 1 else 0
    filled = [line for line in beginning[:400] if line.strip()]
    is_labelled = 2 * sum(bool(_LABEL.match(line)) for line in filled) >= max(2, len(filled))
    rank, is_wrapped = None, False
    for number, line in raw or enumerate(first.split(b"\n"), 1):
        text = line.decode("utf-8", errors="replace")
        for piece_of in _pieces(text):
            one = read_line(piece_of, name, number, is_labelled=is_labelled)
            if one.rank is None and is_wrapped and not _OF_SLURM.match(one.text):
                one = replace(one, rank=rank)
            rank = one.rank
            yield one
        is_wrapped = rank is not None and len(text.rstrip("\r")) == width


def _pieces(text: str) -> Iterator[str]:
    """The parts of a raw line that carriage returns divide, without colours."""
    pieces = map(strip_controls, text.split("\r"))
    for piece in [piece for piece in pieces if piece.strip()] or [""]:
        yield piece[:_MOST_CHARS] + piece[-_MOST_CHARS:] if len(piece) > 2 * _MOST_CHARS else piece


def read_line(piece: str, file: str, number: int, *, is_labelled: bool = False) -> Line:
    """Return a line without the marks that launchers and loggers set before it."""
    stamp = _TIME.search(piece[:100])
    rank: int | None = None
    host = ""
    if is_labelled and (label := _LABEL.match(piece)):
        rank, piece = int(label[1]), piece[label.end() :]
    for _ in range(4):
        marked = _RANK.match(piece) if rank is None else None
        if marked:
            rank = int(next(group for group in marked.groups() if group is not None))
            piece = piece[marked.end() :]
            continue
        prefix = _PREFIX.match(piece)
        if not prefix:
            break
        host = prefix["host"] or prefix["node"] or host
        piece = piece[prefix.end() :]
    if "│" in piece or "┃" in piece:
        boxed = _BOX.match(piece)
        piece = boxed[1] if boxed else piece
    return Line(file, number, piece, rank, stamp[0].strip() if stamp else "", host)
