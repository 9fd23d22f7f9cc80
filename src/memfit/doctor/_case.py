"""What all checks look at: the place, the command, its script, its interpreter and the environment that it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from memfit.checks import Check
from memfit.doctor._command import Command
from memfit.doctor._interpreter import Interpreter
from memfit.doctor._place import Place
from memfit.doctor._script import LoaderCall, Script

#: Batches that each worker of a DataLoader has ready when the call does not say. Source: torch (2.13) DataLoader.
PREFETCH = 2


@dataclass(frozen=True)
class Setup:
    """How the command is to run, as far as its words do not tell.

    Attributes:
        threads: Threads of each numerical library; None for all usable cores, as ``memfit run`` gives an only job.
        tight_malloc: glibc gives freed memory back at once, as ``memfit run`` sets it.
        cuda_allocator: What ``memfit run`` tells torch's allocator for CUDA; None for nothing.
        runs_dir: The folder of all runs.
        num_workers: Loader workers; None for what the script tells.
        batch_bytes: The size of one batch, or None when it is not known.
        deep: Import and use once, in a short child, the libraries that the script imports, and count their threads.
    """

    threads: int | None = None
    tight_malloc: bool = True
    cuda_allocator: str | None = None
    runs_dir: Path = Path("runs")
    num_workers: int | None = None
    batch_bytes: int | None = None
    deep: bool = False


@dataclass(frozen=True)
class Case:
    """A place and a command as they are examined.

    Attributes:
        place: Where it runs.
        setup: How it runs.
        command: What its words tell.
        script: What its script says of itself.
        interpreter: What its interpreter said of itself; None when none was asked.
        given: The environment before memfit's own variables.
        added: What memfit sets.
        cwd: The folder that it starts in.
    """

    place: Place
    setup: Setup
    command: Command
    script: Script
    interpreter: Interpreter | None
    given: Mapping[str, str]
    added: Mapping[str, str]
    cwd: Path

    @cached_property
    def env(self) -> dict[str, str]:
        """The environment that the command's interpreter gets."""
        return {**self.given, **self.added, **self.command.env}

    @property
    def num_cpus(self) -> int:
        """The cores that can be used at once."""
        return self.place.budget.num_cpus

    @property
    def threads(self) -> int:
        """The threads of each numerical library in one process."""
        text = self.env.get("OMP_NUM_THREADS", "")
        return int(text) if text.isdigit() and int(text) > 0 else self.num_cpus

    @cached_property
    def loaders(self) -> list[LoaderCall]:
        """The loaders that have workers, or may have."""
        return [one for one in self.script.loaders if self.workers_of(one) != 0]

    def workers_of(self, loader: LoaderCall) -> int | None:
        """How many workers a loader has: by its call, else by what the user says; None when neither tells."""
        return self.setup.num_workers if loader.num_workers is None else loader.num_workers

    @property
    def num_workers(self) -> int:
        """The most loader workers at once that are known of; 0 when none is."""
        if self.setup.num_workers is not None:
            return self.setup.num_workers
        return max((one.num_workers or 0 for one in self.loaders), default=0)

    @property
    def workers_source(self) -> str:
        """Who says so."""
        if self.setup.num_workers is not None:
            return "--workers"
        named = [one.site for one in self.loaders if one.num_workers == self.num_workers]
        return named[0] if named else "no loader with workers was found"

    @property
    def prefetch(self) -> int:
        """Batches that each worker has ready."""
        return max((one.prefetch_factor or PREFETCH for one in self.loaders), default=PREFETCH)

    @property
    def start_method(self) -> tuple[str, str]:
        """How processes are started when the call does not say, and who says so; empty when that cannot be told."""
        if self.script.start_methods:
            chosen = self.script.start_methods[0]
            return chosen.name, chosen.site
        asked = self.interpreter
        if asked is not None and asked.start_method:
            return asked.start_method, f"the default of Python {'.'.join(map(str, asked.version[:2]))}"
        return "fork", "the default on Linux below Python 3.14"


def judge(
    check: str,
    finding: str,
    reason: str,
    remedy: str,
    source: str,
    *,
    problem: bool = False,
    warning: bool = False,
) -> Check:
    """Return a check with the worst verdict that holds; only a warning or a problem keeps the remedy."""
    if problem or warning:
        return Check(check, "problem" if problem else "warning", finding, reason, remedy, source)
    return Check(check, "ok", finding, reason, source=source)
