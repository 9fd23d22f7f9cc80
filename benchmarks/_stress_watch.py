"""Watches what runs in a real control group with a limit, from outside: its use, its kills, its jobs' attempts.

The standard library alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _stress_job
from harness import Limited

PROGRAM = Path(_stress_job.__file__).resolve()
#: How fast the neighbour takes and gives back, in MiB a second.
NEIGHBOUR_RATE = 200.0
INTERVAL_SECONDS = 0.1
#: The most of the time that is spent on looking: on a slow machine it is looked more seldom.
MOST_LOOKING = 0.1


class Kills:
    """Every kill for want of memory in the arena since now, also those in groups that have vanished since."""

    def __init__(self, arena: Limited) -> None:
        self._arena = arena
        self._last: dict[Path, int] = {}
        self._counted = 0
        self._host = _host_kills()
        self._log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(self._log, 0, os.SEEK_END)

    def look(self) -> None:
        """Read the counters of all groups that stand now."""
        for group in self._arena.groups() if self._arena.v1 else [self._arena.path]:
            now, before = self._arena.kills(group), self._last.get(group, 0)
            self._counted += now - before if now >= before else now
            self._last[group] = now

    def close(self) -> dict[str, int]:
        """What was counted below the limit, on the host, and how much of the latter the kernel's log puts elsewhere."""
        self.look()
        # The log names the groups; where it has dropped a line, the kill counts as one of the arena's.
        elsewhere = sum(self._arena.path.name not in line for line in self._lines() if "oom-kill:" in line)
        os.close(self._log)
        host = _host_kills() - self._host
        return {
            "groups": self._counted,
            "host": host,
            "elsewhere": elsewhere,
            "total": max(self._counted, host - elsewhere),
        }

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                yield os.read(self._log, 8192).decode(errors="replace")
            except BrokenPipeError:  # lines were overwritten before they were read; the next read goes on after them
                continue
            except BlockingIOError:
                return


def _host_kills() -> int:
    return int(re.findall(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)[0])


@dataclass
class Attempt:
    """One start of a job, as its journal lines and its process tell it."""

    seed: int
    pid: int
    started: float
    seen: float
    end: str = ""

    @property
    def seconds(self) -> float:
        return self.seen - self.started


@dataclass(frozen=True)
class Sample:
    """What was used at one moment, in bytes: by all that is tried, by its jobs alone, by the neighbour."""

    time: float
    run: int
    jobs: int
    neighbour: int
    num_running: int


@dataclass
class Observer:
    """Watches an arena ten times a second, or as often as ``MOST_LOOKING`` allows, in a thread of its own."""

    arena: Limited
    journal: Path
    samples: list[Sample] = field(default_factory=list)
    attempts: dict[tuple[int, int], Attempt] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kills = Kills(self.arena)
        self._read = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look a last time and end; what never said "done" came to nothing."""
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        seconds = INTERVAL_SECONDS
        while not self._stop.wait(seconds):
            began = time.monotonic()
            self._look()
            seconds = max(INTERVAL_SECONDS, (time.monotonic() - began) / MOST_LOOKING)

    def _look(self) -> None:
        now = time.time()
        self._read_journal()
        open_ones = [attempt for attempt in self.attempts.values() if not attempt.end]
        for attempt in open_ones:
            if _lives(attempt.pid):
                attempt.seen = max(attempt.seen, now)
            else:
                self._read_journal()  # its last line may have come between the two looks
                attempt.end = attempt.end or "killed"
        run = self.arena.path / "run"
        own = [group for group in run.iterdir() if group.is_dir() and group.name.startswith("memfit-")]
        jobs = sum(self.arena.used(group) for group in own if not group.name.endswith(".outside"))
        neighbour = self.arena.used(self.arena.path / "neighbour")
        self.samples.append(Sample(now, self.arena.used(run), jobs, neighbour, len(open_ones)))
        self.kills.look()

    def _read_journal(self) -> None:
        with suppress(FileNotFoundError), open(self.journal) as lines:
            lines.seek(self._read)
            for line in iter(lines.readline, ""):
                what, seed, pid, when = line.split()
                key = (int(seed), int(pid))
                if what == "start":
                    self.attempts[key] = Attempt(*key, float(when), float(when))
                else:
                    self.attempts[key].seen, self.attempts[key].end = float(when), what
            self._read = lines.tell()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass(frozen=True)
class Trial:
    """What was seen while one framework ran the jobs."""

    exit_code: int | None
    seconds: float
    samples: Sequence[Sample]
    attempts: Sequence[Attempt]
    kills: Mapping[str, int]
    neighbour_ended: bool
    peak_bytes: int
    left_in_shm: Sequence[str]


def try_out(
    arena: Limited, command: Sequence[str], work: Path, *, neighbour_mib: int, tag: str, **options: Any
) -> Trial:
    """Run a command in the arena beside a neighbour and watch it; ended when it takes longer than ``timeout`` seconds.

    What it prints lies in ``out.log`` and ``err.log`` of the working folder.
    """
    timeout: float = options.pop("timeout")
    beside = ["--kind", "neighbour", "--size", str(neighbour_mib), "--seed", "7", "--rate", str(NEIGHBOUR_RATE)]
    started = time.time()
    with open(work / "out.log", "wb") as out, open(work / "err.log", "wb") as err:
        other = arena.start([sys.executable, str(PROGRAM), *beside], below="neighbour")
        observer = Observer(arena, work / "journal")
        process = arena.start(command, below="run", stdout=out, stderr=err, cwd=work, **options)
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            seconds = time.time() - started
            gone = other.poll() is not None
            arena.end_all()
            process.wait()
            other.wait()
            observer.close()
    left = [str(path) for path in Path("/dev/shm").glob(f"torch_*_{tag}*")]
    for path in left:
        Path(path).unlink(missing_ok=True)
    attempts = sorted(observer.attempts.values(), key=lambda attempt: attempt.started)
    kills = observer.kills.close()
    return Trial(code, seconds, observer.samples, attempts, kills, gone, arena.peak_bytes, left)
