"""Facts of a place: limits of the process, settings of the kernel, file systems; read below ``root``, parsed purely."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from memfit.memory import Budget, memory_group

REAL_ROOT = Path("/")
#: Segments that libraries leave: torch, multiprocessing, loky, NCCL.
_SEGMENT = re.compile(r"torch_(?P<pid>\d+)_.*|sem\.(?:mp|loky)-.*|psm_.*|loky-(?P<pid2>\d+)-.*|nccl-.*")


@dataclass(frozen=True)
class Segment:
    """A file of /dev/shm that a library made.

    Attributes:
        name: Its name.
        size_bytes: What it takes, as blocks.
        in_use: A process that can be seen here maps it or holds it open, or the one of its name lives.
    """

    name: str
    size_bytes: int
    in_use: bool


@dataclass(frozen=True)
class Place:
    """Where something is to run: the folder above proc and sys, and the budget that was read there."""

    root: Path
    budget: Budget

    @property
    def is_real(self) -> bool:
        """Whether this is the machine itself and not a recorded tree."""
        return self.root == REAL_ROOT

    def text(self, path: str) -> str | None:
        """The text of a file below the root, or None."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace")
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """The first whole number of a file below the root, or None."""
        match = re.match(r"-?\d+", (self.text(path) or "").strip())
        return int(match.group()) if match else None

    @cached_property
    def limits(self) -> dict[str, tuple[int | None, int | None]]:
        """Soft and hard limits of this process, which its children inherit; None for none."""
        return parse_rlimits(self.text("proc/self/limits"))

    @cached_property
    def mounts(self) -> list[tuple[str, str]]:
        """Mount points and their file systems' types."""
        return parse_mounts(self.text("proc/self/mountinfo"))

    @cached_property
    def num_host_cpus(self) -> int | None:
        """What a library sees that looks at neither affinity nor quota."""
        text = self.text("sys/devices/system/cpu/online")
        if text:
            spans = (span.partition("-") for span in text.strip().split(","))
            return sum(int(last or first) - int(first) + 1 for first, _, last in spans)
        return os.cpu_count() if self.is_real else None

    def kind_of(self, path: Path) -> str:
        """The type of the file system that a path lies on, such as ``ext4``; empty when nothing tells."""
        found = [(point, kind) for point, kind in self.mounts if path.is_relative_to(point)]
        longest = max((len(point) for point, _ in found), default=0)
        return next((kind for point, kind in reversed(found) if len(point) == longest), "")

    def free_bytes(self, path: Path) -> int | None:
        """What is free where a path lies, or None in a recorded tree or without that path."""
        if not self.is_real:
            return None
        try:
            facts = os.statvfs(path)
        except OSError:
            return None
        return facts.f_bavail * facts.f_frsize

    def group_files(self, name: str) -> Iterator[tuple[str, str]]:
        """A file of this process's memory group and of the groups above it: its path and its text."""
        group = memory_group(root=self.root)
        for folder in () if group is None else (group, *group.parents):
            if folder == self.root:
                return
            try:
                yield "/" + str((folder / name).relative_to(self.root)), (folder / name).read_text().strip()
            except OSError:
                continue

    @cached_property
    def segments(self) -> list[Segment]:
        """What libraries have in /dev/shm."""
        try:
            entries = [entry for entry in os.scandir(self.root / "dev/shm") if _SEGMENT.fullmatch(entry.name)]
        except OSError:
            return []
        used = _used_segments(self.root / "proc") if entries else set()
        found = []
        for entry in entries:
            match = _SEGMENT.fullmatch(entry.name)
            pid = match and (match["pid"] or match["pid2"])
            is_alive = bool(pid) and (self.root / f"proc/{pid}").is_dir()
            with suppress(OSError):
                size = entry.stat(follow_symlinks=False).st_blocks * 512
                found.append(Segment(entry.name, size, is_alive or entry.name in used))
        return sorted(found, key=lambda one: (-one.size_bytes, one.name))


def _used_segments(proc: Path) -> set[str]:
    """The names below /dev/shm that processes map or hold open, of the processes that may be looked at."""
    used: set[str] = set()
    for process in proc.glob("[0-9]*"):
        try:
            used.update(re.findall(r" /dev/shm/(\S+)", (process / "maps").read_text(errors="replace")))
            for link in (process / "fd").iterdir():
                target = str(link.readlink())
                if target.startswith("/dev/shm/"):
                    used.add(target.removeprefix("/dev/shm/"))
        except OSError:
            continue
    return used


def parse_rlimits(text: str | None) -> dict[str, tuple[int | None, int | None]]:
    """Soft and hard limits of /proc/<pid>/limits; None for unlimited."""
    rows = re.findall(r"^Max (.+?) {2,}(\d+|unlimited) +(\d+|unlimited)", text or "", re.M)
    return {
        name: (int(soft) if soft.isdigit() else None, int(hard) if hard.isdigit() else None)
        for name, soft, hard in rows
    }


def parse_mounts(text: str | None) -> list[tuple[str, str]]:
    """Mount points and types of /proc/self/mountinfo, in its order."""
    found = []
    for line in (text or "").splitlines():
        left, _, right = line.partition(" - ")
        if right and len(left.split(" ")) > 4:
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), left.split(" ")[4])
            found.append((point, right.split(" ")[0]))
    return found
