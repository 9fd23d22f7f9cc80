"""What a diagnosis says: the cause, the lines that prove it, the figures in them; and in a few words."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from memfit.diagnosis._figures import NOTICEABLE, Figures
from memfit.diagnosis._phase import JobPhase
from memfit.diagnosis._signs import Kind, Sure
from memfit.units import GIB

#: The figures that the JSON form has.
_FIGURES = ("device_total", "allocated", "reserved", "tried")
_KINDS = {
    "gpu": "out of the GPU's memory",
    "gpu_fragmentation": "out of the GPU's memory, although its cache had room (fragmentation)",
    "host_cgroup": "killed at a limit of host memory",
    "host_kernel": "killed as the whole host ran out of memory",
    "shm": "out of /dev/shm",
    "host_alloc": "refused host memory",
    "pinned": "refused pinned host memory",
    "other_accelerator": "out of the accelerator's memory",
}
_CAUSES = {
    "killed": "killed by SIGKILL; its sender is unknown",
    "exit_status": "ended by itself, with an exit status that is an error",
    "rank_lost": "a rank was lost, and its group began again",
    "limit_touched": "touched its limit of host memory; nothing was killed",
}


@dataclass(frozen=True)
class Moment:
    """A line of the timeline; ``what`` is ``start``, ``last progress``, ``failure`` or ``consequence``."""

    what: str
    time: str
    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Evidence:
    """A line that proves something."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """What happened to a job.

    Attributes:
        oom: Whether it was short of memory.
        recovered: Whether it went on after that, or after a warning.
        kind: The memory that ran out; ``none`` for another cause.
        cause: In a word: ``out_of_memory``, ``killed``, ``walltime``, ``incomplete``, ``unknown`` ...
        phase: What it was doing.
        confidence: ``proved``, ``likely`` or ``not shown``.
        figures: The message's figures in bytes: ``device_total``, ``allocated``, ``reserved``, ``free``, ``tried`` of
            a device; ``used``, ``limit`` of host memory.
        evidence: The lines that prove it.
        where: ``host``, ``rank``, ``node``, ``device``, ``pid``; None if no line names it.
        timeline: Start, last progress, failure, consequences.
        arithmetic: Sums of the figures, each with its scope.
        checks: What to look at by hand.
        remedies: What to change, the cheapest in speed first.
        under_memfit: Whether memfit's own record of the job was read.
        emitter: The library whose message decides: ``torch.cuda``, ``torch.npu``, ``vllm`` ...; empty if not known.
        notes: What a run directory shows besides: memory that grows, the largest tensors.
    """

    oom: bool
    recovered: bool
    kind: Kind
    cause: str
    phase: JobPhase
    confidence: Sure
    figures: dict[str, int] = field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()
    where: dict[str, Any] = field(default_factory=dict)
    timeline: tuple[Moment, ...] = ()
    arithmetic: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    remedies: tuple[Any, ...] = ()
    under_memfit: bool = False
    emitter: str = ""
    notes: tuple[str, ...] = ()

    @property
    def checked(self) -> Figures:
        """The figures, held against each other."""
        return Figures.read(self.figures, " ".join(one.text for one in self.evidence))

    @property
    def happened(self) -> str:
        """What happened, in a few words.

        >>> Diagnosis(True, False, "shm", "out_of_memory", "load", "proved").happened
        'out of /dev/shm'
        """
        checked = self.checked
        is_full = checked.total is not None and (checked.slack or 0) < NOTICEABLE * checked.total
        kind = self.kind.removesuffix("_fragmentation") if is_full else self.kind
        return _CAUSES.get(self.cause) or _KINDS.get(kind, self.cause.replace("_", " "))

    @property
    def headline(self) -> str:
        """The same, and how sure it is."""
        known = f"{self.happened} ({self.confidence})"
        return "unknown: no line proves a cause" if self.cause == "unknown" else known

    @property
    def facts(self) -> str:
        """Kind, cause, phase and place, with commas."""
        where = (f"{name} {value}" for name, value in self.where.items() if value is not None)
        return ", ".join((f"kind {self.kind}", f"cause {self.cause}", f"phase {self.phase}", *where))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form; figures in GiB, None where the text has none."""
        found = asdict(self)
        del found["under_memfit"]
        figures = found.pop("figures")
        sizes = {name: round(figures[name] / GIB, 4) if name in figures else None for name in _FIGURES}
        return found | {f"{name}_gib": size for name, size in sizes.items()}
