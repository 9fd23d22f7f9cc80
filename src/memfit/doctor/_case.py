"""What all checks look at: the place, the command, its script, its interpreter and its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from memfit.checks import Check
from memfit.doctor._command import Command
from memfit.doctor._interpreter import Interpreter
from memfit.doctor._place import Place
from memfit.doctor._script import Script, Start
from memfit.jobs import own_threads

PREFETCH = 2  # batches that each worker of a DataLoader keeps ready by default. Source: torch (2.13) DataLoader.


@dataclass(frozen=True)
class Setup:
    """How a command is to run."""

    threads: int | None = None  # of each numerical library; None: OMP_NUM_THREADS, or all usable cores
    cuda_allocator: str | None = None
    runs_dir: Path = Path("runs")
    num_workers: int | None = None  # None: those of the script
    batch_bytes: int | None = None


@dataclass(frozen=True)
class Case:
    """A place and a command to examine."""

    place: Place
    setup: Setup
    command: Command
    script: Script
    interpreter: Interpreter | None  # what the command's own said of itself; None if none was started
    env: Mapping[str, str]  # of the command's interpreter
    cwd: Path

    @property
    def num_cpus(self) -> int:
        return self.place.budget.num_cpus

    @property
    def threads(self) -> int:
        """The threads of each numerical library in one process."""
        return own_threads(self.env) or self.num_cpus

    @cached_property
    def loaders(self) -> list[Start]:
        """The loaders that have workers, or may have."""
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
    def num_workers(self) -> int:
        """The most loader workers at once that are known of."""
        return self.workers[0]

    @property
    def prefetch(self) -> int:
        """Batches that each worker keeps ready."""
        return max((one.prefetch_factor or PREFETCH for one in self.loaders), default=PREFETCH)

    @property
    def start_method(self) -> tuple[str, str]:
        """How processes are started by default (empty if unknown), and where that is from."""
        if self.script.start_methods:
            return self.script.start_methods[0].name, self.script.start_methods[0].site
        if (asked := self.interpreter) is not None and asked.start_method:
            return asked.start_method, f"the default of Python {'.'.join(map(str, asked.version[:2]))}"
        return "fork", "the default on Linux below Python 3.14"


def judge(
    check: str, finding: str, reason: str, remedy: str, source: str, *, problem: bool = False, warning: bool = False
) -> Check:
    """Return a check with the worst verdict that holds; only a warning or a problem keeps the remedy."""
    if problem or warning:
        return Check(check, "problem" if problem else "warning", finding, reason, remedy, source)
    return Check(check, "ok", finding, reason, source=source)
