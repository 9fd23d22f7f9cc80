"""What a training takes on each process, rank, node and GPU, line by line, and which change would make it fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any, Literal

from memfit.amounts import Amount, Layout
from memfit.memory import Footprint
from memfit.units import MIB, format_bytes, format_count, round_up_size, write_size

LEAST_SHM_BYTES = 64 * MIB  # Docker gives a container so much /dev/shm unless it is told otherwise
Metric = Literal["PSS", "RSS", "device"]
_NOBODY = Amount(0, "node")


@dataclass(frozen=True)
class Line:
    name: str
    amount: Amount  # what one thing of its scope takes
    formula: str  # how that follows, in words
    how: Literal["measured", "computed", "declared"]  # where the figure comes from
    metric: Metric = "PSS"  # what is counted: PSS or RSS of processes, or bytes of a device
    phases: tuple[str, ...] = ()  # when it is held, that which it belongs to first; empty for always
    number: int = 1  # of an amount of a process: how many such processes each task has
    is_mapped: bool = False  # it is mapped from files, which the kernel can drop, so that no limit holds for it
    in_shm: bool = False  # it lies in /dev/shm


@dataclass(frozen=True)
class Ledger:
    """Lines, and the layout of the job. Host and devices are never added."""

    layout: Layout
    lines: tuple[Line, ...]

    def on_node(self, line: Line) -> Amount:
        """Return what a line takes on the fullest node; of a GPU on one that has none, what one GPU would take."""
        layout = replace(self.layout, processes_per_task=line.number, gpus_per_node=self.layout.gpus_per_node or 1)
        found = layout.to(line.amount, "node")
        assert found is not None, f"the layout lacks what {line.amount} takes"
        return found

    def by_phase(self) -> dict[str, Amount]:
        """Return the sum of the host's lines on the fullest node by phase, without what is mapped."""
        return {phase: self._in_phase(phase) for phase in self._phases}

    @property
    def _phases(self) -> list[str]:
        return list(dict.fromkeys(line.phases[0] for line in self.lines if line.phases)) or ["train"]

    def _in_phase(self, phase: str, *, in_shm: bool = False) -> Amount:
        counted = (line for line in self.lines if line.amount.place == "host" and not line.is_mapped)
        held = (line for line in counted if not line.phases or phase in line.phases)
        return reduce(add, (self.on_node(line) for line in held if line.in_shm or not in_shm), _NOBODY)

    @property
    def peak(self) -> Amount:
        """The most on a node in any phase."""
        return max(self.by_phase().values())

    @property
    def mapped(self) -> Amount:
        """What a node maps from files, each once."""
        return reduce(add, (self.on_node(line) for line in self.lines if line.is_mapped), _NOBODY)

    @property
    def shm(self) -> Amount:
        """What lies in /dev/shm of a node, at most."""
        return max(self._in_phase(phase, in_shm=True) for phase in self._phases)


def footprint_lines(found: Footprint, num_tasks: int, origin: str) -> Iterator[Line]:
    """Yield the lines of a job with so many tasks on a node: its peaks by phase, its GPU, what it maps."""
    peaks = {name: peak.private_bytes for name, peak in found.phases.items()}
    if found.private_bytes > max(peaks.values(), default=0):  # it was outside of the phases that the job marked
        peaks["unmarked" if peaks else ""] = found.private_bytes
    origin = origin.removeprefix(found.method).lstrip(" :")
    what = f"{origin}, by {num_tasks} ranks" if num_tasks > 1 else origin
    metric: Metric = "PSS" if found.method == "measured" else "RSS"
    for phase, peak in peaks.items():
        each, when = Amount(math.ceil(peak / num_tasks), "task"), (phase,) if phase else ()
        yield Line(found.method, each, what, found.method, metric, phases=when)
    if on_gpu := found.bytes_per_device:
        yield Line("GPU", Amount(on_gpu, "gpu", "device"), origin, found.method, "device")
    if found.shared_bytes:
        yield Line("mapped files", Amount(found.shared_bytes, "node"), origin, found.method, is_mapped=True)


def step_line(answer: Mapping[str, Any]) -> Line:
    """Return the line of a training step on a GPU, from an answer of ``memfit.planning.ask``."""
    terms = " + ".join(f"{name} {format_bytes(one['value'])}" for name, one in answer["parts"].items() if one["value"])
    on_gpu = Amount(answer["device"]["device_bytes"]["upper"], "gpu", "device")
    return Line("training step", on_gpu, f"at most, with torch's cache and a context: {terms}", "computed", "device")


@dataclass(frozen=True)
class Mode:
    """One way to run the training: its peak on the fullest node, whether that fits (None: not known), and its cost."""

    name: str
    peak: Amount
    fits: bool | None
    cost: str


@dataclass(frozen=True)
class Forecast:
    """A ledger against the memory of a node."""

    ledger: Ledger
    limit: Amount  # the host memory of a node
    limit_from: str  # who says so
    ranks: tuple[int, ...] = ()  # their measured peaks
    shm_limit: Amount | None = None  # what /dev/shm of a node holds; None if that is not known
    num_ranks: int = 1  # the ranks of the job
    num_nodes: int = 1  # the nodes that there are
    slack: float = 0.0  # what is requested on top, as a share
    slack_counts: bool = False  # the request must fit, and not the peak alone
    fewer: Mapping[int, tuple[Line, ...]] = field(default_factory=dict)  # the ledger's lines with fewer workers
    batch: str = ""  # the equation of the global batch and the steps of an epoch, in words; empty if they are not known
    notes: tuple[str, ...] = ()  # what could not be counted, and how to name it
    settings: Mapping[str, int | None] = field(default_factory=dict)  # of loaders, ranks and accumulation
    uncounted: tuple[str, ...] = ()  # what is in no line and no peak; if there is any, nobody knows whether it fits
    made_for: Mapping[str, Any] = field(default_factory=dict)  # the stage's settings, masked, and its command's digest

    def needs(self, ledger: Ledger) -> Amount:
        """Return what must fit a node."""
        return ledger.peak.scaled(1 + self.slack * self.slack_counts)

    def has_room(self, ledger: Ledger) -> bool | None:
        """Return whether a ledger fits a node, host memory and /dev/shm; None if it does, and something lacks in it."""
        found = self.needs(ledger) <= self.limit and (self.shm_limit is None or ledger.shm <= self.shm_limit)
        return None if found and self.uncounted else found

    @property
    def fits(self) -> bool | None:
        return self.has_room(self.ledger)

    @property
    def why(self) -> str:
        """Why it does not fit: the sum; empty if it does."""
        phases, tasks = self.ledger.by_phase(), self.ledger.layout.tasks_per_node or 1
        phase = max(phases, key=lambda name: phases[name].bytes)
        if not (most := self.needs(self.ledger)) <= self.limit:
            each = f" ({tasks} x {format_bytes(math.ceil(most.bytes / tasks))})" if tasks > 1 else ""
            return f"{most} in phase {phase}{each}, and it has {format_bytes(self.limit.bytes)}"
        if self.shm_limit is not None and not self.ledger.shm <= self.shm_limit:
            return f"{self.ledger.shm} in /dev/shm, which holds {format_bytes(self.shm_limit.bytes)}"
        return ""

    def list_modes(self) -> list[Mode]:
        """Return the mode that was asked for, then changes, the cheapest first."""
        found = [self._mode("as it is", self.ledger, "")]
        for number, lines in self.fewer.items():
            few = replace(self.ledger, lines=lines)
            found.append(self._mode(format_count(number, "worker"), few, "slower where loading limits the step"))
        return [*found, *self._fewer_tasks()]

    def _mode(self, name: str, ledger: Ledger, cost: str) -> Mode:
        return Mode(name, self.needs(ledger), self.has_room(ledger), cost)

    def _fewer_tasks(self) -> list[Mode]:
        """Return the most tasks on a node that fit, or none if fewer are no use."""
        layout = self.ledger.layout
        tasks = layout.tasks_per_node or 1 if self.fits is False else 0
        for number in range(tasks - 1, 0, -1):
            gpus = (layout.gpus_per_node or 0) * number // tasks
            fewer = replace(self.ledger, layout=replace(layout, tasks_per_node=number, gpus_per_node=gpus))
            if self.has_room(fewer) is not False:
                nodes = math.ceil(self.num_ranks / number)
                cost = f"{format_count(nodes, 'node')} for {self.num_ranks} ranks" + (
                    f", of {self.num_nodes}: or --nproc {number * self.num_nodes} and accumulation"
                    if nodes > self.num_nodes
                    else ""
                )
                return [self._mode(f"{number} {'tasks' if number > 1 else 'task'} a node", fewer, cost)]
        return []

    @property
    def change(self) -> str:
        """The smallest change after which it fits, or what is counted does; empty if none is needed."""
        if self.fits is not False:
            return ""
        best = next((mode for mode in self.list_modes() if mode.fits is not False), None)
        larger = f"--mem={self.request['mem']} on nodes that have it" if self.request["mem"] else "larger nodes"
        return larger if best is None else f"{best.name}: {best.peak} (cost: {best.cost}); or {larger}"

    @property
    def request(self) -> dict[str, str | None]:
        """What to ask Slurm for: ``--mem``, None where that is not known, and /dev/shm."""
        peak, most = math.ceil(self.ledger.peak.bytes * (1 + self.slack)), self.limit.bytes
        size = round_up_size(peak + self.ledger.mapped.bytes)
        return {
            "mem": None if self.uncounted or not size else write_size(min(size, most) if self.fits else size),
            "shm": write_size(round_up_size(shm_bytes(self.ledger.shm.bytes, self.slack))),
        }

    @property
    def rank(self) -> Amount:
        """What one rank takes, with its share of mapped files."""
        alone = replace(self.ledger, layout=replace(self.ledger.layout, tasks_per_node=1))
        return alone.peak + self.ledger.mapped.scaled(1 / (self.ledger.layout.tasks_per_node or 1))

    def to_dict(self) -> dict[str, Any]:
        lines = [asdict(line) | {"node_bytes": self.ledger.on_node(line).bytes} for line in self.ledger.lines]
        return {
            "lines": lines,
            "layout": asdict(self.ledger.layout),
            "phases": {phase: size.bytes for phase, size in self.ledger.by_phase().items()},
            "ranks": list(self.ranks) or [self.rank.bytes] * self.num_ranks,
            "mapped_bytes": self.ledger.mapped.bytes,
            "limit_bytes": self.limit.bytes,
            "limit_from": self.limit_from,
            "fits": self.fits,
            "why": self.why,
            "change": self.change,
            "modes": [asdict(mode) for mode in self.list_modes()],
            "request": self.request,
            "batch": self.batch,
            "notes": list(self.notes),
            "settings": dict(self.settings),
            "uncounted": list(self.uncounted),
            "most": 1 + max(0.1, self.slack * self.slack_counts),  # as planned up to so many times its size
            "made_for": dict(self.made_for),
        }


def shm_bytes(batches: int, slack: float) -> int:
    """Return the size of /dev/shm for the batches of a node, in bytes: 64 MiB at least."""
    return max(LEAST_SHM_BYTES, math.ceil(batches * (1 + slack)))


def describe_batch(
    samples: int, valid: int | None, batch: int, num_ranks: int, accumulation: int, *, drops: bool = False
) -> str:
    """Return the equation of the global batch, and the steps of an epoch; empty if the batch is not known, 0."""
    if not batch:
        return ""
    whole = batch * num_ranks * accumulation
    steps = samples // whole if drops else math.ceil(samples / whole)
    text = f"global batch {whole} = {batch} per rank x {format_count(num_ranks, 'rank')} x {accumulation} accumulated; "
    text += f"{format_count(steps, 'step')} an epoch of {samples:,} samples"
    return text + ("" if valid is None else f", {valid:,} validated")
