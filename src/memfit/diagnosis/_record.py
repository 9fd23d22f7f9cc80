"""What a diagnosis says: the cause, the lines that prove it, the figures in them; and in a few words."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from memfit.diagnosis._figures import NOTICEABLE, Figures
from memfit.diagnosis._phase import JobPhase
from memfit.diagnosis._signatures import Kind, Sure
from memfit.units import GIB

#: The figures that the JSON form has.
_FIGURES = ("device_total", "allocated", "reserved", "tried")
#: Kinds and causes in words, where they differ from their names.
_WORDS = {
    "gpu": "out of the GPU's memory",
    "gpu_fragmentation": "out of the GPU's memory, although its cache had room (fragmentation)",
    "host_cgroup": "killed at a limit of host memory",
    "host_kernel": "killed as the whole host ran out of memory",
    "shm": "out of /dev/shm",
    "host_alloc": "refused host memory",
    "pinned": "refused pinned host memory",
    "other_accelerator": "out of the accelerator's memory",
    "growth": "grew until its memory ran out",
    "killed": "killed by SIGKILL; its sender is unknown",
    "exit_status": "ended by itself, with an exit status that is an error",
    "rank_lost": "a rank was lost, and its group began again",
    "limit_touched": "touched its limit of host memory; nothing was killed",
}


@dataclass(frozen=True)
class Evidence:
    """A line that proves something."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Moment(Evidence):
    """A line of the timeline."""

    what: str  # ``start``, ``last progress``, ``failure``, ``consequence`` ...
    time: str


@dataclass(frozen=True)
class Diagnosis:
    """What happened to a job."""

    oom: bool  # it was short of memory
    recovered: bool  # it went on after that, or after a warning
    kind: Kind  # the memory that ran out; ``none`` for another cause
    cause: str  # in a word: ``out_of_memory``, ``killed``, ``walltime``, ``incomplete``, ``unknown`` ...
    phase: JobPhase  # what it was doing
    confidence: Sure  # ``proved``, ``likely`` or ``not shown``
    #: In bytes: ``device_total``, ``allocated``, ``reserved``, ``free``, ``tried`` of a device; ``used``, ``limit`` of
    #: host memory.
    figures: dict[str, int] = field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()  # the lines that prove it
    where: dict[str, Any] = field(default_factory=dict)  # host, rank, node, device, pid; None if no line names it
    timeline: tuple[Moment, ...] = ()  # start, last progress, failure, consequences
    arithmetic: tuple[str, ...] = ()  # sums of the figures, each with its scope
    checks: tuple[str, ...] = ()  # what to look at by hand
    remedies: tuple[Any, ...] = ()  # what to change, the cheapest in speed first
    emitter: str = ""  # the library whose message decides: ``torch.cuda``, ``vllm`` ...; empty if not known
    whom: tuple[str, ...] = ()  # who speaks in its logs; ``memfit`` by its own record of the job
    notes: tuple[str, ...] = ()  # what a run directory shows besides: attempts, memory that grows, the largest tensors

    @property
    def checked(self) -> Figures:
        return Figures.read(self.figures, " ".join(one.text for one in self.evidence))

    @property
    def happened(self) -> str:
        checked = self.checked
        is_full = checked.total is not None and (checked.slack or 0) < NOTICEABLE * checked.total
        kind = self.kind.removesuffix("_fragmentation") if is_full else self.kind
        return _WORDS.get(self.cause) or _WORDS.get(kind, self.cause.replace("_", " "))

    @property
    def headline(self) -> str:
        is_known = self.cause != "unknown"
        return f"{self.happened} ({self.confidence})" if is_known else "unknown: no line proves a cause"

    @property
    def facts(self) -> str:
        where = (f"{name} {value}" for name, value in self.where.items() if value is not None)
        return ", ".join((f"kind {self.kind}", f"cause {self.cause}", f"phase {self.phase}", *where))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form; figures in GiB, None where the text has none."""
        found = asdict(self)
        del found["whom"]
        figures = found.pop("figures")
        sizes = {name: round(figures[name] / GIB, 4) if name in figures else None for name in _FIGURES}
        return found | {f"{name}_gib": size for name, size in sizes.items()}
