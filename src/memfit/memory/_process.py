"""Reads what the kernel says about processes: pure parsers, and the walk over a process tree. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from memfit.memory._host import read_text
from memfit.units import KIB


@dataclass(frozen=True)
class Stat:
    """Who a process is; ``pid`` and ``start`` name it for good. ``image`` is the address of its stack, drawn anew by
    every ``exec`` and kept by ``fork``: processes with the same one may share anonymous pages. 0 when the kernel hides
    it. ``cpu_ticks`` includes children that ended and were waited for."""

    pid: int
    parent: int
    group: int
    session: int
    start: float
    image: int = 0
    faults: int = 0
    cpu_ticks: int = 0


@dataclass(frozen=True)
class Status:
    anonymous: int
    swapped: int
    shared_memory: int
    page_tables: int
    file: int
    high_water: int
    data: int = 0  # VmData, which counts for RLIMIT_DATA: reserved, whether written or not

    @property
    def held(self) -> int:
        return self.anonymous + self.swapped

    @property
    def private(self) -> int:
        """Non-reclaimable bytes, if this process shared none of them."""
        return self.held + self.shared_memory + self.page_tables

    @property
    def rss(self) -> int:
        return self.anonymous + self.shared_memory + self.file


@dataclass(frozen=True)
class Rollup:
    """The proportional set size of a process in bytes, whole and by kind; ``held`` is anonymous + swapped.
    ``shared_dirty`` is what it shares with any process and what was written once: the whole of it, not a part."""

    pss: int
    held: int
    shared_memory: int
    file: int
    shared_dirty: int = 0


def parse_stat(text: str) -> Stat | None:
    """Parse ``/proc/<pid>/stat``; None for a zombie, a dead process, or a text that is not whole. Source:
    proc_pid_stat(5).
    >>> parse_stat("7 (a) b) R 1 7 5 0 -1 4194304 90 0 2 0 0 0 0 0 20 0 1 0 812 3133440 425 1 2 3 140")
    Stat(pid=7, parent=1, group=7, session=5, start=812.0, image=140, faults=92, cpu_ticks=0)
    >>> parse_stat("7 (a) Z 1 7 5 0 -1 4194304 90 0 2 0 0 0 0 0 20 0 1 0 812 0 0 1 0 0 0") is None
    True
    """
    head, _, tail = text.rpartition(")")
    state, *words = tail.split(maxsplit=26)[:26] or [""]
    try:
        if state in "ZXx":
            return None
        pid, fields = int(head.split(" ", 1)[0]), [int(word) for word in words]
        parent, group, session = fields[:3]
        faults, ticks = fields[6] + fields[8], sum(fields[10:14])
        return Stat(pid, parent, group, session, float(fields[18]), fields[24], faults, ticks)
    except (ValueError, IndexError):
        return None


def parse_counters(text: str) -> Status | None:
    """Parse ``/proc/<pid>/status``; None for a dying process or a text that is not whole.

    Source: proc_pid_status(5); Linux fs/proc/task_mmu.c, task_mem: VmHWM is never below the present resident size.
    Since Linux 6.2 the counters are kept per CPU and may be off by some hundred KiB per CPU.

    >>> text = "\\nVmHWM: 90 kB\\nRssAnon: 10 kB\\nRssFile: 50 kB\\nRssShmem: 8 kB\\nVmPTE: 4 kB\\nVmSwap: 0 kB\\n"
    >>> parse_counters(text)
    Status(anonymous=10240, swapped=0, shared_memory=8192, page_tables=4096, file=51200, high_water=92160, data=0)
    >>> parse_counters(text[:60]) is None
    True
    """
    sizes = {"VmSwap": 0, "VmData": 0, **_bytes_by_name(_STATUS, text)}
    names = ("RssAnon", "VmSwap", "RssShmem", "VmPTE", "RssFile", "VmHWM", "VmData")
    return Status(*(sizes[name] for name in names)) if sizes.keys() >= set(names) else None


def parse_rollup(text: str) -> Rollup | None:
    """Parse ``/proc/<pid>/smaps_rollup``; None where the kernel (before 5.4) does not split it. Source: Linux
    Documentation/ABI/testing/procfs-smaps_rollup.
    >>> parse_rollup("0-1 ---p 0 [rollup]\\nPss: 322 kB\\nPss_Anon: 108 kB\\nPss_File: 214 kB\\nPss_Shmem: 0 kB\\n")
    Rollup(pss=329728, held=110592, shared_memory=0, file=219136, shared_dirty=0)
    """
    sizes = {"SwapPss": 0, "Shared_Dirty": 0, **_bytes_by_name(_ROLLUP, text)}
    if not sizes.keys() >= {"Pss", "Pss_Anon", "Pss_Shmem", "Pss_File"}:
        return None
    held = sizes["Pss_Anon"] + sizes["SwapPss"]
    return Rollup(sizes["Pss"], held, sizes["Pss_Shmem"], sizes["Pss_File"], sizes["Shared_Dirty"])


# Beginning with a literal, not with "^", lets the search skip from line to line: four times as fast.
_STATUS = re.compile(r"\n(VmHWM|VmData|RssAnon|RssFile|RssShmem|VmPTE|VmSwap):\s+(\d+) kB")
_ROLLUP = re.compile(r"\n(Pss|Pss_Anon|Pss_File|Pss_Shmem|SwapPss|Shared_Dirty):\s+(\d+) kB")


def _bytes_by_name(lines: re.Pattern[str], text: str) -> dict[str, int]:
    return {name: int(kib) * KIB for name, kib in lines.findall(text)}


class ProcReader:
    """Reads Linux's ``/proc`` below ``root``. Every answer may be None: processes vanish while they are read."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc = f"{root}/proc" if str(root) != "/" else "/proc"

    def stat(self, pid: int) -> Stat | None:
        return parse_stat(self._read(f"{pid}/stat"))

    def status(self, pid: int) -> Status | None:
        return parse_counters(self._read(f"{pid}/status"))

    def rollup(self, pid: int) -> Rollup | None:
        return parse_rollup(self._read(f"{pid}/smaps_rollup"))

    def children(self, pid: int) -> list[int]:
        """Return the children of the main thread; those of other threads are found by ``pids``."""
        return [int(word) for word in self._read(f"{pid}/task/{pid}/children").split() if word.isdigit()]

    def pids(self) -> list[int]:
        try:
            return [int(path.name) for path in Path(self._proc).iterdir() if path.name.isdigit()]
        except OSError:
            return []

    def _read(self, name: str) -> str:
        return read_text(f"{self._proc}/{name}") or ""


def held_bytes(pid: int, without: Collection[int] = (), reader: ProcReader | None = None) -> int:
    """Return the anonymous memory of a process and of all that descend from it, except these and what they started."""
    reader = reader or ProcReader()
    status, children = reader.status(pid), [child for child in reader.children(pid) if child not in without]
    return (status.held if status else 0) + sum(held_bytes(child, without, reader) for child in children)


class Tree:
    """A process and all that descends from it. A process whose parent died before it was seen is found if its session
    or process group is led by a process of the tree; so start a job in a session of its own."""

    def __init__(self, pid: int, reader: ProcReader) -> None:
        self._reader = reader
        root = reader.stat(pid)
        self.seen = {pid}
        self.members: dict[int, Stat] = {pid: root} if root else {}

    def refresh(self, *, scan: bool) -> dict[int, Stat]:
        """Return the members alive now; with ``scan``, look for new ones among all processes."""
        current = {pid: self._reader.stat(pid) for pid in self.members}
        self.members = {pid: now for pid, now in current.items() if now and now.start == self.members[pid].start}
        parents = list(self.members)
        while parents:
            parents += self._add(self._stats(self._reader.children(parents.pop())))
        if scan and self.members:
            self._scan()
        return self.members

    def _scan(self) -> None:
        strangers = self._stats(self._reader.pids())
        while True:
            led = {leader for stat in self.members.values() for leader in (stat.session, stat.group)} & self.seen
            ours = [s for s in strangers if s.parent in self.members or s.session in led or s.group in led]
            if not self._add(ours):
                return
            strangers = [stat for stat in strangers if stat.pid not in self.members]

    def _stats(self, pids: Iterable[int]) -> list[Stat]:
        return [stat for pid in pids if pid not in self.members and (stat := self._reader.stat(pid))]

    def _add(self, found: list[Stat]) -> list[int]:
        self.members.update((stat.pid, stat) for stat in found)
        self.seen.update(stat.pid for stat in found)
        return [stat.pid for stat in found]


@dataclass
class _Holding:
    """One process: its bytes at the last sweep, the fewest since, and how many of them it can share."""

    base: int
    low: int
    cap: int

    @property
    def given_back(self) -> int:
        return min(self.cap, self.base - self.low)


class Sharing:
    """Counts bytes that several processes of a tree map (by a fork or shared memory) once.

    A sweep gives the *excess*: the sum over the processes less what is there once, which is at least the largest
    process and at least the sum of PSS. (PSS alone would leave out what is shared with processes outside of the tree.)
    Between sweeps the excess stays, less what processes gave back since."""

    def __init__(self) -> None:
        self._excess = 0
        self._holdings: dict[int, _Holding] = {}

    def sweep(self, sizes: Mapping[int, int], proportional: Mapping[int, int]) -> None:
        """Take in a sweep: each process's bytes, and its proportional share of them where it is known."""
        shares = {pid: min(size, proportional.get(pid, size)) for pid, size in sizes.items()}
        once = max(max(sizes.values(), default=0), sum(shares.values()))
        self._excess = sum(sizes.values()) - once
        # A byte shared by k processes adds 1 - 1/k to size - share, so at most twice that is shared.
        self._holdings = {p: _Holding(size, size, min(size, 2 * (size - shares[p]))) for p, size in sizes.items()}

    def fork(self, parent: int, child: int, shared_bytes: int, sizes: Mapping[int, int]) -> None:
        self._excess += shared_bytes
        for pid in (parent, child):
            size = sizes.get(pid, 0)
            held = self._holdings.get(pid, _Holding(size, size, 0))
            self._excess -= held.given_back
            self._holdings[pid] = _Holding(size, size, min(size, held.cap - held.given_back + shared_bytes))

    def leave(self, pid: int) -> None:
        """Note that a process shares nothing any more, because it called ``exec``."""
        if pid in self._holdings:
            self._holdings[pid].low = 0

    def unique(self, sizes: Mapping[int, int]) -> int:
        """Return the bytes that are there once, given each process's bytes now."""
        for pid, holding in self._holdings.items():
            holding.low = min(holding.low, sizes.get(pid, 0))
        given_back = sum(holding.given_back for holding in self._holdings.values())
        total = sum(sizes.values())
        return max(max(sizes.values(), default=0), total - max(0, self._excess - given_back))
