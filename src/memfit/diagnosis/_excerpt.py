"""The ends of a large log and what lies around its telling words, in bounded memory and one pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from memfit.diagnosis._unpack import Source

_CHUNK_BYTES = 4 << 20
_HEAD_LINES, _HEAD_BYTES = 400, 1 << 16
_TAIL_BYTES = 1 << 17
_BEFORE, _AFTER = 60, 30
_WINDOW_BYTES = 1 << 15

#: Words of deaths themselves; windows around them are kept apart from those around words that only may belong to one.
_SURE = (
    "out of mem,outofmem,oom-kill,oom_kill,oomkill,killed,memoryerror,bad_alloc,traceback,cancelled,exhausted,"
    "segmentation,no space left,timed out,exceeded,preempt,fatal,allocate,ancdata,too many open,assert,bus error,"
    "sigkill,sigterm"
)
_MAYBE = "error,kill,exception,abort,signal"


def excerpt(first: bytes, rest: Source) -> Iterator[tuple[int, bytes]]:
    """Numbered lines of a log: its first and last ones, and those around telling words."""
    sorts = [_Windows(_SURE, 50), _Windows(_MAYBE, 20)]
    number, before, tail = 1, b"", b""
    for chunk in _chunks(first, rest):
        joined, start = before + chunk, number - before.count(b"\n")
        flat = joined.replace(b"\r", b"\n").lower()
        for one in sorts:
            one.look(joined, flat, len(before), start)
        before = chunk[-_WINDOW_BYTES:]
        number += chunk.count(b"\n")
        tail = (tail + chunk)[-_TAIL_BYTES:]
    found = dict(enumerate(first[:_HEAD_BYTES].split(b"\n")[:_HEAD_LINES], 1))
    windows = [window for one in sorts for window in (*one.first, *one.last)]
    windows.append((number - tail.count(b"\n"), tail))
    for begin, window in windows:
        for place, line in enumerate(window.split(b"\n"), begin):
            if len(line) > len(found.get(place, b"")):  # a window may begin or end within a line
                found[place] = line
    yield from sorted(found.items())


def _chunks(first: bytes, rest: Source) -> Iterator[bytes]:
    """Pieces that end where a line ends, unless a line has no end."""
    left = first
    while True:
        cut = left.rfind(b"\n") + 1
        if cut == 0 and len(left) > 2 * _CHUNK_BYTES:
            cut = left.rfind(b"\r") + 1 or len(left)
        if cut:
            yield left[:cut]
            left = left[cut:]
        more = rest.read(_CHUNK_BYTES)
        if not more:
            break
        left += more
    if left:
        yield left


class _Windows:
    """What stands around one sort of words: the first windows and the last ones."""

    def __init__(self, words: str, most: int) -> None:
        self._words, self._most = words, most
        self.first: list[tuple[int, bytes]] = []
        self.last: deque[tuple[int, bytes]] = deque(maxlen=most)

    def look(self, joined: bytes, flat: bytes, at: int, number: int) -> None:
        """Keep the windows of a text that begins with line ``number``, from an offset on."""
        counted = 0
        hits = _Hits(self._words, flat, at)
        while (hit := hits.after(at)) >= 0:
            begin, end = _back(flat, hit, _BEFORE), _forward(flat, hit, _AFTER)
            number += joined.count(b"\n", counted, begin) if begin >= counted else -joined.count(b"\n", begin, counted)
            counted = begin
            (self.first if len(self.first) < self._most else self.last).append((number, joined[begin:end]))
            at = max(end, hit + 1)


class _Hits:
    """Where words stand in a text, in order; each word is searched for only once over the whole text."""

    def __init__(self, words: str, text: bytes, at: int) -> None:
        self._text = text
        self._next = {word: text.find(word, at) for word in words.encode().split(b",")}

    def after(self, at: int) -> int:
        """The first place at or after an offset; -1 for none."""
        for word, place in self._next.items():
            if 0 <= place < at:
                self._next[word] = self._text.find(word, at)
        return min((place for place in self._next.values() if place >= 0), default=-1)


def _back(flat: bytes, at: int, lines: int) -> int:
    """Where the line begins that stands so many before the one of an offset, not too far off."""
    least = max(0, at - _WINDOW_BYTES // 2)
    for _ in range(lines):
        found = flat.rfind(b"\n", least, at)
        if found < 0:
            return least
        at = found
    return at + 1


def _forward(flat: bytes, at: int, lines: int) -> int:
    """Where the line ends that stands so many after the one of an offset, not too far off."""
    most = min(len(flat), at + _WINDOW_BYTES // 2)
    for _ in range(lines):
        found = flat.find(b"\n", at, most)
        if found < 0:
            return most
        at = found + 1
    return at
