"""Logs as they are found: packed, torn, coloured, wrapped, interleaved and larger than memory.

A log becomes `Line`s with their numbers. What is searched is not the lines but each rank's `Stream`: its lines without
any white space, because consoles wrap inside of words and numbers.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from memfit.diagnosis._excerpt import excerpt
from memfit.diagnosis._unpack import unpacked

#: How much of a log is read whole; of a larger one its ends and what lies around telling words.
_WHOLE_BYTES = 1 << 18
_MOST_CHARS = 4000

#: Of a stream longer than this, only what lies so near to a telling word is searched.
_SEARCHED_LINES = 500
_TELLING = re.compile(
    r"memor|oom|kill|trace|err|excep|abort|sign|fault|cancel|time|space|exceed|preempt|evict|exhaust"
    r"|alloc|ancdata|die|crash"
    r"|hut|term|fail|assert|thread|limit|warn|skip|retry|batch.{0,9}size|finish|complet|done|stop|fork|hang|死",
    re.IGNORECASE,
)
_NEAR_BEFORE, _NEAR_AFTER = 3, 12
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_RANK = re.compile(
    r"\s*(?:\[rank ?(\d{1,5})\]:? ?|\[default(\d{1,5})\]:|\[?rank[:= ](\d{1,5})\]?[:|] "
    r"|\[\d{1,5},(\d{1,5})\]<std\w{3}>:)"
)
#: The mark of ``srun --label``, believed only where most lines have it.
_LABEL = re.compile(r" *(\d{1,5}): ?")
_PREFIX = re.compile(
    r"\s*(?:"
    r">+ |E   +|\|\s(?=\s*\S)|[\w.-]+-\d+ +\| |\[pod/[^\]]{1,200}\] |"
    r"\((?:[A-Za-z_][\w.]*)(?: pid=\d+)?(?:, ip=[\d.]+)?\) (?!in )|"
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:? |"
    r"(?:INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[\S{1,80}:\d+\] ?|"
    r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?P<host>\S+) (?=kernel:|systemd|slurm|earlyoom|oom)|"
    r"kernel: |<\d>|\[ *\d+\.\d{4,6}\] ?|"
    r"\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\] )"
)
_BOX = re.compile(r"^\s*[│┃] ?(.*?)\s*[│┃]\s*$")
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d|\b\d\d/\d\d/\d{4} \d\d:\d\d:\d\d"
    r"|\b[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d\b|\b\d\d:\d\d:\d\d\b"
)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a log.

    Attributes:
        file: Where it stands; ``-`` for standard input.
        number: Its number there, from 1. Pieces that a carriage return divides have the same.
        text: The line without colours, carriage returns and the marks that launchers set before it.
        rank: The rank that such a mark names; None without.
        time: Its time as it is written there; empty without.
        host: The host that a system log names before it; empty without.
    """

    file: str
    number: int
    text: str
    rank: int | None = None
    time: str = ""
    host: str = ""


@dataclass
class Stream:
    """The lines of one rank of one file, and their text without white space.

    Attributes:
        lines: In order.
        telling: The positions of those that are searched: all, or in a long stream those near to telling words.
        squeezed: The text of these without white space, one after another.
    """

    lines: list[Line]
    telling: list[int] = field(init=False)
    squeezed: str = field(init=False)
    _starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.telling = self._find_telling()
        near = set(self.telling)
        pieces, at = [], 0
        self._starts = []
        for place, line in enumerate(self.lines):
            piece = "".join(line.text.split()) if place in near else ""
            self._starts.append(at)
            pieces.append(piece)
            at += len(piece)
        self.squeezed = "".join(pieces)

    def _find_telling(self) -> list[int]:
        if len(self.lines) <= _SEARCHED_LINES:
            return list(range(len(self.lines)))
        near: set[int] = set()
        for place, line in enumerate(self.lines):
            if _TELLING.search(line.text):
                near.update(range(max(0, place - _NEAR_BEFORE), min(len(self.lines), place + _NEAR_AFTER + 1)))
        return sorted(near)

    def line_at(self, offset: int) -> int:
        """The position in ``lines`` of the line that a character of the squeezed text stands in."""
        return max(0, bisect.bisect_right(self._starts, offset) - 1)

    def start_of(self, place: int) -> int:
        """The offset in the squeezed text of a line's first character."""
        return self._starts[place]

    def between(self, start: int, end: int) -> tuple[Line, ...]:
        """The lines that a stretch of the squeezed text stands in."""
        first, last = self.line_at(start), self.line_at(max(start, end - 1))
        return tuple(line for line in self.lines[first : last + 1] if line.text.strip())


def read_streams(path: Path | str, source: BinaryIO | None = None) -> list[Stream]:
    """The streams of a log, or of a source of that name: of the lines without a rank, and of each rank."""
    if source is not None:
        return split_ranks(_read(source, str(path)))
    with open(path, "rb") as file:
        return split_ranks(_read(file, str(path)))


def split_ranks(lines: Iterable[Line]) -> list[Stream]:
    """Lines by the rank that they name, each rank's in order."""
    by_rank: dict[int | None, list[Line]] = {}
    for line in lines:
        by_rank.setdefault(line.rank, []).append(line)
    return [Stream(found) for found in by_rank.values()]


def clean(text: str, file: str = "-", number: int = 1, *, labelled: bool = False) -> Iterator[Line]:
    """The pieces of a raw line; ``labelled``: a number and a colon at its beginning are a rank."""
    text = _ANSI.sub("", text) if "\x1b" in text else text
    pieces = [piece for piece in text.split("\r") if piece.strip()] if "\r" in text else [text]
    for piece in pieces or [""]:
        if len(piece) > 2 * _MOST_CHARS:
            piece = piece[:_MOST_CHARS] + piece[-_MOST_CHARS:]
        yield _line(_CONTROL.sub("", piece.rstrip("\n")), file, number, labelled)


def _line(piece: str, file: str, number: int, labelled: bool) -> Line:
    stamp = _TIME.search(piece[:100])
    rank: int | None = None
    host = ""
    if labelled and (label := _LABEL.match(piece)):
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
        host = prefix["host"] or host
        piece = piece[prefix.end() :]
    if "│" in piece or "┃" in piece:
        boxed = _BOX.match(piece)
        piece = boxed[1] if boxed else piece
    return Line(file, number, piece, rank, stamp.group(0) if stamp else "", host)


def _read(source: BinaryIO, name: str) -> Iterator[Line]:
    plain = unpacked(source)
    first = plain.read(_WHOLE_BYTES)
    more = plain.read(1)
    raw: Iterable[tuple[int, bytes]]
    raw = excerpt(first + more, plain) if more else enumerate(first.split(b"\n"), 1)
    labelled, width = _is_labelled(first[:200_000]), _width(first)
    rank, wrapped = None, False
    for number, line in raw:
        text = line.decode("utf-8", errors="replace")
        for one in clean(text, name, number, labelled=labelled):
            if one.rank is None and wrapped:
                one = replace(one, rank=rank)
            rank = one.rank
            yield one
        wrapped = rank is not None and len(text.rstrip("\r")) == width


def _width(beginning: bytes) -> int:
    """The width that a console wrapped its lines at: the longest one's, when it is that of several; else 0."""
    lengths = [len(line.decode("utf-8", errors="replace").rstrip("\r")) for line in beginning.split(b"\n")]
    longest = max(lengths)
    return longest if 40 <= longest <= 400 and lengths.count(longest) > 1 else 0


def _is_labelled(beginning: bytes) -> bool:
    """Whether at least half of the lines begin with a number and a colon, as ``srun --label`` writes them."""
    lines = [line for line in beginning.decode("utf-8", errors="replace").split("\n")[:400] if line.strip()]
    return 2 * sum(bool(_LABEL.match(line)) for line in lines) >= max(2, len(lines))
