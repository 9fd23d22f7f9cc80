"""What all checks look at: a place, read below ``root``, and a command with its script and its environment."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from memfit.checks import Check
from memfit.doctor._command import Command
from memfit.doctor._script import Script, Start
from memfit.jobs import own_threads
from memfit.memory import Budget, memory_group, parse_limits, parse_mountinfo

PREFETCH = 2  # batches that each worker of a DataLoader keeps ready by default. Source: torch (2.13) DataLoader.
REAL_ROOT = Path("/")


@dataclass(frozen=True)
class Setup:
    """How a command is to run."""

    threads: int | None = None  # of each numerical library; None: OMP_NUM_THREADS, or all usable cores
    cuda_allocator: str | None = None
    runs_dir: Path = Path("runs")
    num_workers: int | None = None  # None: those of the script
    batch_bytes: int | None = None


@dataclass(frozen=True)
class Interpreter:
    version: str = ""  # such as ``3.11``
    start_method: str = ""  # the default of ``multiprocessing``
    error: str = ""  # why nothing is known


@dataclass(frozen=True)
class Case:
    root: Path  # the folder above proc and sys: that of this machine, or of a recorded tree
    budget: Budget
    setup: Setup
    command: Command
    script: Script
    interpreter: Interpreter | None  # None if none was started
    env: Mapping[str, str]  # of the command's interpreter
    cwd: Path

    def text(self, path: str) -> str:
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        match = re.match(r"-?\d+", self.text(path))
        return int(match.group()) if match else None

    @cached_property
    def limits(self) -> dict[str, tuple[int | None, int | None]]:
        """Soft and hard limits of this process; None for unlimited."""
        return parse_limits(self.text("proc/self/limits"))

    def is_in_memory(self, path: Path) -> bool:
        mounts = [one for one in parse_mountinfo(self.text("proc/self/mountinfo")) if path.is_relative_to(one.point)]
        return bool(mounts) and max(reversed(mounts), key=lambda one: len(one.point)).kind in ("tmpfs", "ramfs")

    def group_files(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield the path and the text of a file of this process's memory group, and of the groups above it."""
        group = memory_group(root=self.root)
        for folder in () if group is None else (group, *group.parents):
            if folder == self.root:
                return
            with suppress(OSError):
                yield "/" + str((folder / name).relative_to(self.root)), (folder / name).read_text().strip()

    @property
    def threads(self) -> int:
        """The threads of each numerical library in one process."""
        return own_threads(self.env) or self.budget.num_cpus

    @cached_property
    def loaders(self) -> list[Start]:
        return [one for one in self.script.loaders if self.workers_of(one) != 0]

    def workers_of(self, loader: Start) -> int | None:
        """Return a loader's workers: by its call, else by ``--workers``; None if unknown."""
        return self.setup.num_workers if loader.num_workers is None else loader.num_workers

    @cached_property
    def workers(self) -> tuple[int, str]:
        """The most loader workers at once that are known of, and where that number is from."""
        if self.setup.num_workers is not None:
            return self.setup.num_workers, "--workers"
        named = [(one.num_workers, one.site) for one in self.loaders if one.num_workers]
        return max(named, key=lambda one: one[0], default=(0, "no loader with workers was found"))

    @property
    def prefetch(self) -> int:
        return max((one.prefetch_factor or PREFETCH for one in self.loaders), default=PREFETCH)

    @property
    def start_method(self) -> tuple[str, str]:
        """How processes are started by default (empty if unknown), and where that is from."""
        if self.script.start_methods:
            return self.script.start_methods[0].name, self.script.start_methods[0].site
        if (asked := self.interpreter) is not None and asked.start_method:
            return asked.start_method, f"the default of Python {asked.version}"
        return "fork", "the default on Linux below Python 3.14"


def judge(
    check: str, finding: str, reason: str, remedy: str, source: str, *, problem: bool = False, warning: bool = False
) -> Check:
    """Return a check with the worst verdict that holds; only a warning or a problem keeps the remedy."""
    if problem or warning:
        return Check(check, "problem" if problem else "warning", finding, reason, remedy, source)
    return Check(check, "ok", finding, reason, source=source)
