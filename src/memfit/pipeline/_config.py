"""The config of ``memfit run``, and which folds it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from memfit.config import ByteSize, Settings
from memfit.errors import ConfigError
from memfit.memory import DEFAULT_SLACK

#: The phases that every fold passes; each once, and its footprint is known.
FOLD_PHASES = ("load", "train", "checkpoint", "validate")


class MemorySettings(Settings):
    """What of the machine's memory the run may use.

    Attributes:
        limit: A cap of your own on the host memory of all jobs together; the smallest limit counts.
        reserve: What is never lent; None for a stated share of the limit.
        slack: What each job reserves on top of the measured peak of its like, as a share of it.
        job: What one job is declared to take: a hint that is checked before the first starts; the measured figure
            counts from then on.
        tight_malloc: Have glibc give freed memory back at once, so that resident memory follows live memory.
    """

    limit: ByteSize | None = None
    reserve: ByteSize | None = None
    slack: Annotated[float, Field(ge=0.0, le=10.0)] = DEFAULT_SLACK
    job: ByteSize | None = None
    tight_malloc: bool = True


class RunConfig(Settings):
    """The config of a run.

    Attributes:
        schema_version: The version of this format.
        experiment: Names the folder below ``runs_dir``.
        target: The workload as ``module:NAME``.
        seed: All random numbers follow from it.
        folds: ``all``, or numbers and ranges such as ``2-5`` or ``1,3``.
        max_parallel: ``auto`` for as many folds at once as fit, or the most.
        on_failure: When a fold fails, ``continue`` with the others or ``stop`` them at their next checkpoint.
        threads_per_job: Threads of each fold's numerical libraries, however many folds run at once.
        grace_seconds: How long a fold that is asked to stop may take to do so.
        runs_dir: The folder of all runs, from where memfit is started.
        panels_dir: The cache of panels, shared by all runs.
        memory: What of the machine's memory the run may use.
        params: The workload's own parameters.
    """

    schema_version: Literal[1] = 1
    experiment: str
    target: str
    seed: Annotated[int, Field(ge=0)] = 0
    folds: str = "all"
    max_parallel: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    on_failure: Literal["stop", "continue"] = "continue"
    threads_per_job: Annotated[int, Field(ge=1)] = 1
    grace_seconds: Annotated[float, Field(gt=0)] = 60.0
    runs_dir: Path = Path("runs")
    panels_dir: Path = Path("panels")
    memory: MemorySettings = MemorySettings()
    params: dict[str, Any] = Field(default_factory=dict)


def parse_folds(text: str, num_folds: int) -> list[int]:
    """The fold numbers that a choice names, in order.

    Raises:
        ConfigError: If the text is no choice, or names a fold that there is not.

    >>> parse_folds("all", 3), parse_folds("2-5", 5), parse_folds("1,3", 5), parse_folds("2", 5)
    ([1, 2, 3], [2, 3, 4, 5], [1, 3], [2])
    """
    if text == "all":
        return list(range(1, num_folds + 1))
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        first = int(match.group(1)) if match else 0
        last = int(match.group(2) or first) if match else 0
        if not 1 <= first <= last <= num_folds:
            raise ConfigError(
                f"'{part.strip()}' names no fold.",
                rule=f"folds are numbered from 1 to {num_folds} (params), and a range runs upward.",
                remedy=f"write for example --folds 1, --folds 1-{num_folds} or --folds all",
            )
        chosen |= set(range(first, last + 1))
    return sorted(chosen)
