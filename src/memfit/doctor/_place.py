"""Facts of a place, read below ``root``: limits of the process, settings of the kernel, file systems."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from memfit.memory import Budget, memory_group, parse_cpu_list, parse_limits, parse_mountinfo

REAL_ROOT = Path("/")
#: Segments of torch, multiprocessing, loky and NCCL.
_SEGMENT = re.compile(r"torch_(?P<pid>\d+)_.*|sem\.(?:mp|loky)-.*|psm_.*|loky-(?P<pid2>\d+)-.*|nccl-.*")


@dataclass(frozen=True)
class Segment:
    """A file of /dev/shm that a library made; in use if a process maps it, holds it open or has its name."""

    name: str
    size_bytes: int
    in_use: bool


@dataclass(frozen=True)
class Place:
    """The folder above proc and sys, and the budget that was read there."""

    root: Path
    budget: Budget

    @property
    def is_real(self) -> bool:
        """Whether this is the machine itself, not a recorded tree."""
        return self.root == REAL_ROOT

    def text(self, path: str) -> str:
        """Return the text of a file below the root; empty if there is none."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace")
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        """Return the first whole number of a file below the root, or None."""
        match = re.match(r"-?\d+", self.text(path).strip())
        return int(match.group()) if match else None

    @cached_property
    def limits(self) -> dict[str, tuple[int | None, int | None]]:
        """Soft and hard limits of this process; None for unlimited."""
        return parse_limits(self.text("proc/self/limits"))

    @cached_property
    def num_host_cpus(self) -> int | None:
        """The CPUs that a library finds if it looks at neither affinity nor quota."""
        if text := self.text("sys/devices/system/cpu/online").strip():
            return parse_cpu_list(text)
        return os.cpu_count() if self.is_real else None

    def kind_of(self, path: Path) -> str:
        """Return the file system that a path is on, such as ``ext4``; empty if unknown."""
        mounts = [one for one in parse_mountinfo(self.text("proc/self/mountinfo")) if path.is_relative_to(one.point)]
        return max(reversed(mounts), key=lambda one: len(one.point)).kind if mounts else ""

    def free_bytes(self, path: Path) -> int | None:
        """Return the free bytes where a path is; None in a recorded tree or without that path."""
        with suppress(OSError):
            if self.is_real:
                facts = os.statvfs(path)
                return facts.f_bavail * facts.f_frsize
        return None

    def group_files(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield the path and the text of a file of this process's memory group, and of the groups above it."""
        group = memory_group(root=self.root)
        for folder in () if group is None else (group, *group.parents):
            if folder == self.root:
                return
            with suppress(OSError):
                yield "/" + str((folder / name).relative_to(self.root)), (folder / name).read_text().strip()

    @cached_property
    def segments(self) -> list[Segment]:
        """The segments of libraries in /dev/shm, the largest first."""
        try:
            entries = {entry: _SEGMENT.fullmatch(entry.name) for entry in os.scandir(self.root / "dev/shm")}
        except OSError:
            return []
        matches = {entry: match for entry, match in entries.items() if match}
        used = self._used_segments() if matches else set()
        found = []
        for entry, match in matches.items():
            pid = match["pid"] or match["pid2"]
            is_alive = bool(pid) and (self.root / f"proc/{pid}").is_dir()
            with suppress(OSError):
                size = entry.stat(follow_symlinks=False).st_blocks * 512
                found.append(Segment(entry.name, size, is_alive or entry.name in used))
        return sorted(found, key=lambda one: (-one.size_bytes, one.name))

    def _used_segments(self) -> set[str]:
        """The names below /dev/shm that processes map or hold open, as far as they may be looked at."""
        used: set[str] = set()
        for process in (self.root / "proc").glob("[0-9]*"):
            with suppress(OSError):
                used.update(re.findall(r" /dev/shm/(\S+)", (process / "maps").read_text(errors="replace")))
                targets = (str(link.readlink()) for link in (process / "fd").iterdir())
                used.update(one.removeprefix("/dev/shm/") for one in targets if one.startswith("/dev/shm/"))
        return used
