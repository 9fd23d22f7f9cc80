"""Writes a job's memory over time: one JSON object a line, in a file of bounded length."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from memfit.errors import DamagedError
from memfit.files import fits, parse_json, read_own, replacing
from memfit.memory._meter import Sample

_SIZES = ("num_processes", "private_bytes", "shared_bytes", "rss_bytes", "pss_bytes", "peak_bytes")
_TIMES = dict.fromkeys(("time", "cpu_seconds"), (int, float))
_SHAPE = {"phase": str, "device_bytes": {str: int}} | _TIMES | dict.fromkeys(_SIZES, int)
_NONE = type(None)
#: With what lines of earlier versions lack.
_ALL = {
    **_SHAPE,
    **dict.fromkeys(("low_bytes", "resident_bytes", "reserved_bytes"), (int, _NONE)),
    **dict.fromkeys(("ranks", "allocated_bytes"), ({str: int}, _NONE)),
    "step": (int, float, _NONE),
}


class SeriesWriter:
    """Appends samples to a file: one at each change of the phase, and two in each second. Each line is written at once
    and holds the highest peak since the line before, and the lowest sizes of its phase. A file of ``max_lines`` (about
    4 MB) joins each two, and from then on the time between two lines is twice as long."""

    def __init__(self, path: Path, *, max_lines: int = 8192) -> None:
        self._max_lines = max_lines
        self._path, self._seconds, self._next = path, 0.5, 0.0
        self._waiting: Sample | None = None
        self._phase: str | None = None
        self._num_lines = len(read_series(path)) if path.exists() else 0
        self._descriptor = _open(path)
        if os.fstat(self._descriptor).st_size:
            os.write(self._descriptor, b"\n")  # ends a line that a kill cut

    def append(self, sample: Sample) -> Sample | None:
        """Take in a sample; return the line that was written, if one was due."""
        line = self._waiting = self._waiting.joined(sample) if self._waiting else sample
        is_due = sample.phase != self._phase or sample.time >= self._next
        if is_due:
            self._write()
        if self._num_lines >= self._max_lines:
            self._thin()
        return line if is_due else None

    def close(self) -> None:
        try:
            self._write()
        finally:
            os.close(self._descriptor)

    def _write(self) -> None:
        if self._waiting is not None:
            self._phase, self._next = self._waiting.phase, self._waiting.time + self._seconds
            os.write(self._descriptor, _line(self._waiting))
            self._waiting = None
            self._num_lines += 1

    def _thin(self) -> None:
        samples = read_series(self._path)
        pairs = zip(samples[::2], samples[1::2], strict=False)
        kept = [first.joined(second) for first, second in pairs]
        with replacing(self._path, durable=False) as aside:
            aside.write_bytes(b"".join(map(_line, kept)))
        os.close(self._descriptor)
        self._descriptor, self._num_lines, self._seconds = _open(self._path), len(kept), 2 * self._seconds


def read_series(path: Path) -> list[Sample]:
    """Return a job's memory over time, oldest first; a line that a kill cut is left out.

    Raises:
        OSError: As for ``memfit.files.read_own``.
        DamagedError: If no line of the file is a sample.
    """
    samples, lines = [], read_own(path).split(b"\n")
    for line in lines:
        with suppress(ValueError, TypeError, RecursionError):
            found = parse_json(line)
            if fits(found, _ALL):
                samples.append(Sample(**{name: found[name] for name in _ALL if found.get(name) is not None}))
    if not samples and len(lines) > 1:
        raise DamagedError(
            f"{path} is no series of memory samples.",
            rule="a series holds one JSON object a line.",
            remedy=f"move it away: mv {path} {path}.broken",
        )
    return samples


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _line(sample: Sample) -> bytes:
    return json.dumps(vars(sample)).encode() + b"\n"
