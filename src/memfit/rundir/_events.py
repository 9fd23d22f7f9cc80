"""Events: who writes them, the level of each, and how they are read on.

*Append-only* files, one writer each; a process that dies in the middle of a line leaves a torn last record, which every
reader passes over.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from memfit.files import REFUSED, open_own, parse_json, pass_over, until_next_look
from memfit.masking import mask_line

Event = Mapping[str, Any]
#: Where an event is a line: in every view; where jobs are few, for a table shows it too; where all is asked for.
Level = Literal["line", "table", "verbose"]
LEVELS: tuple[Level, ...] = get_args(Level)
#: What a supervisor runs, where a view of it shows less: a study of trials, or a single command.
Scope = Literal["", "study", "command"]
_IN_TABLE = frozenset({"admit", "epoch"})  # events that a table of the jobs shows
_ROUTINE = ("memory", "device", "cores", "max_parallel")  # waits that are normal in a run of many jobs
#: Events that say less than the end of a trial, or than the summary of a single command.
_LESS: Mapping[Scope, frozenset[str]] = {
    "": frozenset(),
    "study": frozenset({"admit", "end", "stage"}),
    "command": frozenset({"admit", "end", "plan", "grow", "grow_device"}),
}
_LAST_TIME = 221_845_392_000  # Unix seconds of the year 9000: no clock is there


def level_of(event: Event, scope: Scope = "") -> Level:
    """Return the level that an event bears, or else that of its kind.

    >>> level_of({"kind": "epoch"}), level_of({"kind": "oom"}), level_of({"kind": "end"}, "study")
    ('table', 'line', 'verbose')
    """
    kind = event.get("kind")
    for level in LEVELS:
        if level == event.get("level"):
            return level
    if kind in _LESS[scope] and not left_something(event):
        return "verbose"
    return "table" if kind in _IN_TABLE or (kind == "wait" and event.get("on") in _ROUTINE) else "line"


def left_something(event: Event) -> bool:
    """Return whether a job completed and left processes or shared memory behind."""
    return event.get("kind") == "end" and event.get("state") == "completed" and bool(event.get("cause"))


class EventWriter:
    """Appends one process's events to a file of its own, a line each. Every line reaches the kernel in one write before
    ``write`` returns, so it survives SIGKILL of the writer."""

    def __init__(self, events_dir: Path, job_id: str | None = None, scope: Scope = "") -> None:
        self.job_id, self.scope = job_id, scope
        self.pid = os.getpid()
        start = time.time_ns() // 1_000_000
        events_dir.mkdir(parents=True, exist_ok=True)
        self.path = events_dir / f"{socket.gethostname()}-{self.pid}-{start}.jsonl"
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event: ``time`` in Unix seconds, ``job`` (a supervisor names it), ``kind``, ``level``, fields."""
        own: dict[str, Any] = {"time": time.time(), "job": self.job_id or fields.get("job"), "kind": kind}
        own["level"] = level_of(fields | own, self.scope)
        record = own | fields | own  # first in the line, and not to be overwritten
        line = mask_line(json.dumps(record, separators=(",", ":")))
        os.write(self._descriptor, f"{line}\n".encode())

    def close(self) -> None:
        os.close(self._descriptor)


class EventTail:
    """Reads one event file on from where the last call stopped; a torn last line waits for its rest."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self._line = 0

    def read(self) -> list[dict[str, Any]]:
        """The whole records that came since the last call."""
        return [record for _, record in self.read_lines()]

    def read_lines(self) -> list[tuple[int, dict[str, Any]]]:
        """The same, each with the number of its line, counted from where this tail began."""
        try:
            with open_own(self.path) as file:
                file.seek(self.offset)
                chunk = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            pass_over(f"{self.path}: {error.strerror}")
            return []
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self.offset += len(whole)
        records = []
        for line in whole.split(b"\n")[:-1]:
            self._line += 1
            with suppress(ValueError, RecursionError, AttributeError):  # no object
                if isinstance(record := parse_json(mask_line(line.decode())), dict):
                    records.append((self._line, record))
        return records


class FolderTail:
    """Reads all event files of a folder on from where the last call stopped, or from ``offsets``; one that did not grow
    stays closed."""

    def __init__(self, events_dir: Path, offsets: Mapping[str, int] | None = None) -> None:
        self._dir, self._begin = events_dir, offsets or {}
        self._tails: dict[str, tuple[EventTail, int]] = {}

    def read(self, *, anew: bool = False) -> list[dict[str, Any]]:
        """The whole records since the last call, in order of time; ``anew`` trusts no size that NFS remembers."""
        records = []
        with until_next_look():
            for path in sorted(self._dir.glob("*.jsonl")):
                tail, size = self._tails.get(path.name) or (EventTail(path, self._begin.get(path.name, 0)), -1)
                if (size_now := path.lstat().st_size) != size or anew:
                    records += tail.read()
                    self._tails[path.name] = (tail, size_now)
        return sorted(records, key=event_time)

    @property
    def offsets(self) -> dict[str, int]:
        return {name: tail.offset for name, (tail, _) in self._tails.items()}


def event_time(event: Event) -> float:
    """Return an event's Unix seconds, or 0 when it tells none.

    >>> event_time({"time": 2.5}), event_time({"time": "noon"}), event_time({"time": 1e300})
    (2.5, 0.0, 0.0)
    """
    told = event.get("time")
    return float(told) if isinstance(told, int | float) and 0 < told < _LAST_TIME else 0.0


def read_events(events_dir: Path) -> list[dict[str, Any]]:
    """All whole records of all writers in a folder, in order of time; torn records are passed over."""
    return FolderTail(events_dir).read()
