"""The ends of a large log and what lies around its telling words, in bounded memory and one pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from memfit.diagnosis._unpack import Source

_CHUNK_BYTES = 4 << 20
_HEAD_LINES, _HEAD_BYTES = 400, 1 << 16
_TAIL_BYTES = 1 << 17
_BEFORE, _AFTER = 60, 30
#: A window is at most so large, and so many of each sort are kept from the beginning and from the end.
_WINDOW_BYTES = 1 << 15
_WINDOWS = {"sure": 50, "maybe": 20}

#: Words of deaths themselves; windows around them are kept apart from those around words that only may belong to one.
_SURE = (
    "out of mem,outofmem,oom-kill,oom_kill,oomkill,killed,memoryerror,bad_alloc,traceback,cancelled,exhausted,"
    "segmentation,no space left,timed out,exceeded,preempt,fatal,allocate,ancdata,too many open,assert,bus error,"
    "sigkill,sigterm"
)
_MAYBE = "error,kill,exception,abort,signal"


def excerpt(first: bytes, rest: Source) -> Iterator[tuple[int, bytes]]:
    """Numbered lines of a log: its first and last ones, and those around telling words."""
    kept = _Kept()
    number, before = 1, b""
    for chunk in _chunks(first, rest):
        kept.look(chunk, number, before)
        before = chunk[-_WINDOW_BYTES:]
        number += chunk.count(b"\n")
    yield from kept.lines()


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


class _Kept:
    """What is kept of a large log."""

    def __init__(self) -> None:
        self._head: list[tuple[int, bytes]] = []
        self._tail: tuple[int, bytes] = (1, b"")
        self._found: list[tuple[int, bytes]] = []
        self._sure: deque[tuple[int, bytes]] = deque(maxlen=_WINDOWS["sure"])
        self._maybe: deque[tuple[int, bytes]] = deque(maxlen=_WINDOWS["maybe"])
        self._counts = {"sure": 0, "maybe": 0}

    def look(self, chunk: bytes, number: int, before: bytes) -> None:
        """Keep what matters of a piece that begins with line ``number``; ``before`` ends the piece before it."""
        if not self._head:
            beginning = chunk[:_HEAD_BYTES]
            self._head = list(enumerate(beginning.split(b"\n")[:_HEAD_LINES], number))
        joined = before + chunk
        start = number - before.count(b"\n")
        flat = joined.replace(b"\r", b"\n").lower()
        self._windows(_SURE, "sure", joined, flat, len(before), start)
        self._windows(_MAYBE, "maybe", joined, flat, len(before), start)
        tail = (self._tail[1] + chunk)[-_TAIL_BYTES:] if len(chunk) < _TAIL_BYTES else chunk[-_TAIL_BYTES:]
        self._tail = (number + chunk.count(b"\n") - tail.count(b"\n"), tail)

    def _windows(self, words: str, name: str, joined: bytes, flat: bytes, at: int, number: int) -> None:
        counted = 0
        store = self._sure if name == "sure" else self._maybe
        hits = _Hits(words, flat, at)
        while (hit := hits.after(at)) >= 0:
            begin, end = _back(flat, hit, _BEFORE), _forward(flat, hit, _AFTER)
            number += joined.count(b"\n", counted, begin) if begin >= counted else -joined.count(b"\n", begin, counted)
            counted = begin
            window = (number, joined[begin:end])
            if self._counts[name] < _WINDOWS[name]:
                self._found.append(window)
            else:
                store.append(window)
            self._counts[name] += 1
            at = max(end, hit + 1)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Everything kept, in order, each line once."""
        found = dict(self._head)
        for number, window in (*self._found, *self._sure, *self._maybe, self._tail):
            for place, line in enumerate(window.split(b"\n"), number):
                if len(line) > len(found.get(place, b"")):  # a window may begin or end within a line
                    found[place] = line
        for place in sorted(found):
            yield place, found[place]


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
