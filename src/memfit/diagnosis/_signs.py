"""What a message means: the headings of the table of signatures, in the order in which they explain each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from memfit.diagnosis._text import Line

Kind = Literal[
    "gpu",
    "gpu_fragmentation",
    "host_cgroup",
    "host_kernel",
    "shm",
    "host_alloc",
    "pinned",
    "other_accelerator",
    "none",
]
#: How far words show a cause.
Sure = Literal["proved", "likely", "not shown"]
#: Tiers of causes. A cause of an earlier tier explains those of later ones.
MEMORY, OTHER, OWN, ENDED, FOLLOWED = range(5)
#: Not causes: warnings, what a program caught, counters and words of a good end.
MARK = 9


@dataclass(frozen=True)
class Meaning:
    """What a heading of the table means; within a tier, earlier headings explain later ones."""

    tier: int
    kind: Kind = "none"
    cause: str = "out_of_memory"
    sure: Sure = "proved"  # how far the words show it
    doubtful: bool = False  # the same words follow an assertion or a lost device, which then is the cause
    told: bool = False  # the program gets an error, and may go on


MEANINGS: dict[str, Meaning] = {
    "chip_memory": Meaning(MEMORY, "none", "chip_memory", told=True),
    "device_oom": Meaning(MEMORY, "gpu", told=True),
    "device_refused": Meaning(MEMORY, "gpu", told=True),
    "nccl_oom": Meaning(MEMORY, "gpu", sure="likely", doubtful=True),
    "library_alloc": Meaning(MEMORY, "gpu", sure="likely", doubtful=True, told=True),
    "other_device": Meaning(MEMORY, "other_accelerator", told=True),
    "xpu_error": Meaning(MEMORY, "other_accelerator", sure="likely", doubtful=True, told=True),
    "pinned": Meaning(MEMORY, "pinned", told=True),
    "shm": Meaning(MEMORY, "shm"),
    "host_refused": Meaning(MEMORY, "host_alloc", told=True),
    "bad_alloc": Meaning(MEMORY, "host_alloc", sure="likely", doubtful=True),
    "no_fork": Meaning(MEMORY, "host_alloc", doubtful=True, told=True),
    "other_words": Meaning(MEMORY, "other_accelerator", sure="likely", doubtful=True, told=True),
    "device_words": Meaning(MEMORY, "gpu", sure="likely", doubtful=True, told=True),
    "cgroup_kill": Meaning(MEMORY, "host_cgroup"),
    "global_kill": Meaning(MEMORY, "host_kernel"),
    "oom_kill": Meaning(MEMORY, "host_kernel"),
    "walltime": Meaning(OTHER, cause="walltime"),
    "preempted": Meaning(OTHER, cause="preempted"),
    "node_fail": Meaning(OTHER, cause="node_fail"),
    "assertion": Meaning(OTHER, cause="assertion", told=True),
    "illegal_access": Meaning(OTHER, cause="illegal_access"),
    "open_files": Meaning(OTHER, cause="open_files", told=True),
    "process_limit": Meaning(OTHER, cause="process_limit", told=True),
    "disk_full": Meaning(OTHER, cause="disk_full", told=True),
    "segfault": Meaning(OTHER, cause="segfault"),
    "import_error": Meaning(OTHER, cause="import_error", told=True),
    "device_lost": Meaning(OTHER, cause="device_lost", told=True),
    "config_error": Meaning(OTHER, cause="config_error", told=True),
    "missing_file": Meaning(OTHER, cause="missing_file", told=True),
    "hangup": Meaning(OTHER, cause="hangup"),
    "limit_touched": Meaning(ENDED, cause="limit_touched", sure="likely"),
    "killed": Meaning(ENDED, cause="killed", sure="not shown"),
    "bus_error": Meaning(ENDED, cause="bus_error", sure="likely"),
    "own_exception": Meaning(OWN, cause="own_exception", sure="likely", told=True),
    "exit_status": Meaning(FOLLOWED, cause="exit_status", sure="likely"),
    "hang": Meaning(FOLLOWED, cause="hang", sure="likely", told=True),
    "collective_timeout": Meaning(FOLLOWED, cause="collective_timeout", sure="likely"),
    "aborted": Meaning(FOLLOWED, cause="aborted", sure="likely"),
    "worker_exited": Meaning(FOLLOWED, cause="worker_exited", sure="likely"),
    "cancelled": Meaning(FOLLOWED, cause="cancelled", sure="likely"),
    "terminated": Meaning(FOLLOWED, cause="terminated", sure="likely"),
    "skipped_batches": Meaning(MARK, "gpu", sure="likely"),
    "rank_lost": Meaning(MARK, cause="rank_lost"),
    "pressure": Meaning(MARK, cause="recovered", sure="likely"),
    "caught": Meaning(MARK),
    "success": Meaning(MARK),
}
_ORDER = {name: place for place, name in enumerate(MEANINGS)}


@dataclass(frozen=True)
class Sign:
    """One thing that a log or another witness says: its heading, its lines, and the figures in them."""

    name: str
    lines: tuple[Line, ...]
    values: Mapping[str, Any] = field(default_factory=dict)  # figures and names in them, sizes in bytes
    stream: int = 0  # the number of its stream
    place: int = 0  # the position of its first line there
    of: Kind | Literal[""] = ""  # which memory, if the words alone do not say; empty for that of the heading
    before: str = ""  # the text before it in its line
    emitter: str = ""  # the library that prints it, such as torch.npu or vllm

    @property
    def meaning(self) -> Meaning:
        """The meaning of its heading."""
        return MEANINGS[self.name]

    @property
    def kind(self) -> Kind:
        """Which memory ran out."""
        return self.of or self.meaning.kind

    @property
    def cause(self) -> str:
        """The cause in a word."""
        return self.meaning.cause

    @property
    def rank(self) -> int:
        """The position of its heading in `MEANINGS`."""
        return _ORDER[self.name]

    @property
    def file(self) -> str:
        """The file that it is in."""
        return self.lines[0].file if self.lines else ""

    @property
    def number(self) -> int:
        """The number of its first line."""
        return self.lines[0].number if self.lines else 0

    @property
    def text(self) -> str:
        """Its lines."""
        return " ".join(line.text for line in self.lines)
