"""What a log says, one typed fact for each thing, with the lines that say it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from memfit.diagnosis._text import Line, Stream

#: A size in squeezed text: a number and its unit.
SIZE = r"(\d[\d.,]{0,24})(bytes?|[KMGTE]i?[Bb]|[KMGT](?![a-zA-Z]))"
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "e": 1 << 60}

FactKind = Literal[
    # Accelerators.
    "device_oom",
    "device_error_oom",
    "mps_oom",
    "xpu_oom",
    "library_alloc",
    "nccl_oom",
    "xla_oom",
    "tf_oom",
    # Host memory.
    "cpu_alloc",
    "array_alloc",
    "memory_error",
    "bad_alloc",
    "errno_12",
    "page_file",
    "pinned",
    "shm_bus",
    "shm_write",
    "shm_map",
    "worker_killed",
    # Who kills.
    "cgroup_kill",
    "limit_kill",
    "limit_touched",
    "global_kill",
    "oom_kill",
    "sigkill",
    # Other causes.
    "walltime",
    "preempted",
    "node_fail",
    "cancelled",
    "hangup",
    "terminated",
    "segfault",
    "illegal_access",
    "collective_timeout",
    "disk_full",
    "open_files",
    "process_limit",
    "assertion",
    "import_error",
    "missing_file",
    "config_error",
    "chip_memory",
    "own_exception",
    "hang",
    "worker_exited",
    "aborted",
    "device_lost",
    "bus_error",
    "exit_code",
    # Not fatal.
    "pressure",
    "skipped_batches",
    "caught",
    "progress",
    "success",
]


@dataclass(frozen=True)
class Fact:
    """One thing that a log says.

    Attributes:
        kind: What.
        lines: The lines that say it.
        values: Figures and names in them, sizes in bytes.
        stream: The number of the stream that it stands in.
        place: The position of its first line there.
    """

    kind: FactKind
    lines: tuple[Line, ...]
    values: Mapping[str, Any] = field(default_factory=dict)
    stream: int = 0
    place: int = 0

    @property
    def file(self) -> str:
        """The file that it stands in."""
        return self.lines[0].file if self.lines else ""

    @property
    def number(self) -> int:
        """The number of its first line."""
        return self.lines[0].number if self.lines else 0


@dataclass(frozen=True)
class Pattern:
    """A form of words that makes a fact, matched against text without white space.

    Attributes:
        kind: The fact's kind.
        regex: The words.
        values: Figures from the match and the text after it; None drops the match.
        by_line: Whether it is matched against each line, with its spaces, instead.
    """

    kind: FactKind
    regex: re.Pattern[str]
    values: Callable[[re.Match[str], str], dict[str, Any] | None] | None = None
    by_line: bool = False


def words(text: str, *, flags: int = 0) -> re.Pattern[str]:
    """A pattern for squeezed text: spaces in it are for its reader."""
    return re.compile(text.replace(" ", ""), flags)


def to_bytes(number: str, unit: str) -> int:
    """A size of squeezed text in bytes; decimal units count in 1024s, as torch and most tools mean them.

    >>> to_bytes("1.5", "GiB"), to_bytes("926.", "GiB") == 926 << 30, to_bytes("0", "bytes")
    (1610612736, True, 0)
    """
    number = number.replace(",", "").rstrip(".")
    return int(float(number or 0) * _UNITS[unit[0].lower()]) if number.count(".") < 2 else 0


def find_facts(stream: Stream, patterns: tuple[Pattern, ...], index: int = 0) -> Iterator[Fact]:
    """The facts that the patterns find in a stream, pattern by pattern."""
    for pattern in patterns:
        yield from _by_line(stream, pattern, index) if pattern.by_line else _squeezed(stream, pattern, index)


def _values(pattern: Pattern, match: re.Match[str], after: str) -> dict[str, Any] | None:
    """A match's figures; None drops it, as a number does that is none or that no machine can hold."""
    try:
        return pattern.values(match, after) if pattern.values else {}
    except (ValueError, OverflowError):
        return None


def _squeezed(stream: Stream, pattern: Pattern, index: int) -> Iterator[Fact]:
    end = -1
    for match in pattern.regex.finditer(stream.squeezed):
        if match.start() < end:
            continue
        after = stream.squeezed[match.end() : match.end() + 1500]
        values = _values(pattern, match, after)
        if values is None:
            continue
        end = match.end() + int(values.pop("_reach", 0))
        lines = stream.between(match.start(), end)[:8]
        yield Fact(pattern.kind, lines, values, index, stream.line_at(match.start()))


def _by_line(stream: Stream, pattern: Pattern, index: int) -> Iterator[Fact]:
    for place in stream.telling:
        line = stream.lines[place]
        match = pattern.regex.search(line.text)
        values = None if match is None else _values(pattern, match, line.text[match.end() :])
        if values is not None:
            yield Fact(pattern.kind, (line,), values, index, place)
