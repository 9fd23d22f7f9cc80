"""Make the first steps of a job that nobody has measured, as one rank and as two, and carry them to any number."""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memfit.amounts import Amount
from memfit.config import fingerprint
from memfit.errors import DamagedError, InterruptedRunError, MemfitError
from memfit.files import fits, read_json, write_json
from memfit.jobs import ENDED, JobStatus, Parent, read_status
from memfit.memory import DEVICE_RESERVE_BYTES, Footprint, ProcReader, Status, Tree
from memfit.pipeline._command import own_stdin
from memfit.pipeline._describe import StageSpec
from memfit.pipeline._graph import Graph
from memfit.pipeline._order import Order
from memfit.pipeline._results import made_for
from memfit.pipeline._run import earlier_runs, go_on
from memfit.pipeline._supervise import Supervisor
from memfit.pipeline._watchers import Canary, as_canary
from memfit.planning import Line
from memfit.rundir import Event, RunDir
from memfit.units import format_bytes, format_count, format_duration, list_some

BOUND = 0.2  # a bound is so much above the value
_SECONDS, _MORE = 60.0, 5  # so long at most, and so much longer in a graph, unless canary_seconds is given
_SOON = 2.0  # a job that ends sooner may have been seen before its peak alone
_ALIKE = 0.1  # ranks that differ by less than this take the same
_SPLIT = 1.1  # one rank that takes more than this multiple of one of two has data that the ranks split
_PARTS = ("main", "below", "shm")  # what a rank holds: its process, those below it, and what they share
_LAUNCHER = re.compile(r"(\S*/)?torchrun|torch\.distributed\.run")
_PER_NODE = re.compile(r"--nproc[-_]per[-_]node(?:=(\S+))?")
_SHAPE: dict[str, Any] = dict.fromkeys(("private", "once", "between", "files", "device"), int)
_SHAPE |= {"seconds": (int, float), "notes": [str], "phases": {str: int}}
_SHAPE |= {"ranks": [dict.fromkeys((*_PARTS, "number"), int)]}


@dataclass(frozen=True)
class FirstSteps:
    """What the first steps of a stage took, by the number of their ranks; ``why`` they tell nothing, if they do not."""

    found: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    why: str = ""

    @property
    def origin(self) -> str:
        return f"first steps of {' and '.join(map(str, self.found))} rank{'s' * (max(self.found) > 1)}"

    def lines(self, ranks: int, tasks: int, workers: int | None = None) -> Iterator[Line]:
        """Yield what a job of so many ranks takes, by parts of a rank; with ``workers`` in place of its own."""
        seen = self.found[min(ranks, max(self.found))]
        first, other = self._of_ranks(ranks)
        peaks = dict(seen["phases"])
        if seen["private"] > max(peaks.values(), default=0):
            peaks["unmarked" if peaks else ""] = seen["private"]
        top = max(peaks, key=lambda name: peaks[name])
        origin, when = self.origin, (top,) if top else ()

        def line(name: str, size: float, per: Any, what: str, **more: Any) -> Line:
            return Line(name, Amount(math.ceil(size), per), f"{origin}: {what}", "measured", phases=when, **more)

        parts = seen["ranks"][-1]
        share = other / (sum(parts[name] for name in _PARTS) or 1)
        number = parts["number"]
        few = number if workers is None else workers
        left = few / number if number else 1.0
        yield line("rank", parts["main"] * share if any(parts.values()) else other, "task", "its main process")
        if few and number:
            yield line("workers", parts["below"] * share / number, "process", "each process below it", number=few)
        if parts["shm"]:
            yield line("batches", parts["shm"] * share * left, "task", "shared by the processes of a rank", in_shm=True)
        once = seen["once"] + first - other
        if once > 0:
            yield line("once", once, "node", "beside the ranks, between them, and of rank 0 alone")
        for name, size in peaks.items():
            if name != top:
                each = (other * tasks + once) * size / peaks[top] / tasks
                yield replace(line("rank", each, "task", "with all below it"), phases=(name,))
        if seen["files"]:
            files = Amount(seen["files"], "node")
            yield Line("mapped files", files, f"{origin}: each once", "measured", is_mapped=True)
        if self.on_gpu:
            yield Line("GPU", Amount(self.on_gpu, "gpu", "device"), origin, "measured", "device")

    @property
    def on_gpu(self) -> int:
        """What one rank takes of a GPU."""
        return int(self.found[1]["device"])

    def _of_ranks(self, ranks: int) -> tuple[float, float]:
        """Return what rank 0 and each other rank take in a job of so many, without what lies beside them."""
        alone, (first, other) = self._own(1), self._of_two
        if ranks == 1 or 2 not in self.found:
            return alone, alone
        less = self.split_bytes * (0.5 - 1 / ranks)
        return first - less, other - less

    def _own(self, number: int) -> float:
        return float(self.found[number]["private"] - self.found[number]["once"])

    @property
    def _of_two(self) -> tuple[float, float]:
        """What each of two ranks takes; of one, where nothing is known of two."""
        if 2 not in self.found:
            return self._own(1), self._own(1)
        sums = [sum(one[name] for name in _PARTS) for one in self.found[2]["ranks"]]
        if len(sums) != 2 or abs(sums[0] - sums[1]) < _ALIKE * max(sums):
            sums = [1, 1]
        return self._own(2) * sums[0] / sum(sums), self._own(2) * sums[1] / sum(sums)

    @property
    def split_bytes(self) -> float:
        """What the ranks split among them, as far as one and two show it."""
        between = self.found[2]["between"] if 2 in self.found else 0  # what two ranks share, one has for itself
        more = self._own(1) - between - self._of_two[0]
        return 2 * more if more > (_SPLIT - 1) * self._own(1) else 0.0

    def notes(self, ranks: int, value: int) -> Iterator[str]:
        took = [f"{format_count(n, 'rank')} {format_bytes(one['private'])} in {format_duration(one['seconds'])}"
                for n, one in self.found.items()]  # fmt: skip
        most = format_bytes(math.ceil(value * (1 + BOUND)))
        yield f"first steps: {', '.join(took)}; a node takes at most {most}, {BOUND:.0%} more"
        yield from dict.fromkeys(note for one in self.found.values() for note in one["notes"])
        yield from [f"first steps {self.why}"] if self.why else []
        if ranks > 2:
            split = f"the ranks split {format_bytes(math.ceil(self.split_bytes))}; " if self.split_bytes else ""
            yield f"{split}not seen with two ranks: buffers that grow with their number, as of all_gather"


class _Watch(Canary):
    """Follows first steps: it reads what each rank holds, and ends a job without marks that grows no more."""

    def __init__(self, order: Order, graph: Graph) -> None:
        self._order, self._graph = order, graph
        self.most: dict[str, dict[str, Any]] = {}
        self._live: list[JobStatus] = []
        self._reader = ProcReader()
        self._trees: dict[int, Tree] = {}
        self._before: dict[int, Status] = {}

    def of(self, supervisor: Supervisor) -> Canary:
        super().__init__(supervisor)
        return self

    def _has_readers(self, job_id: str) -> bool:
        """Return whether other stages wait for a job."""
        names = {name for name, units in self._graph.units.items() for unit in units if unit.job_id == job_id}
        return any(names.intersection(self._order.waits_for(other)) for other in self._graph.asked)

    def take(self, events: Sequence[Event]) -> None:
        super().take(events)
        statuses = [read_status(self.run, path.name) for path in (self.run.path / "jobs").iterdir()]
        self._live = [one for one in statuses if one.pid is not None and not one.node and one.state not in ENDED]
        for one in self._live:
            is_old = time.time() - (one.started or time.time()) > min(_patience(), self.settings.canary_seconds) * 0.75
            is_over = is_old and one.settled and not (self._seen.get(one.job_id) or self._has_readers(one.job_id))
            if is_over and not self.stop.level:
                self._has_asked = True
                self.stop.ask()

    def sample(self) -> None:
        """Read what each rank of each job holds: each page once."""
        for status in self._live:
            if (found := self._read(status, status.pid or 0)) is not None:
                most = self.most.get(status.job_id, {"private": 0})
                self.most[status.job_id] = found if found["private"] > most["private"] else most

    def _read(self, status: JobStatus, pid: int) -> dict[str, Any] | None:
        tree = self._trees.setdefault(pid, Tree(pid, self._reader)).refresh(scan=False)
        held = {one: rollup for one in tree if (rollup := self._reader.rollup(one))}
        said = {one: number for one in tree if (number := _rank_of(one)) is not None}
        numbers = {one: number for one, number in said.items() if said.get(tree[one].parent) != number}
        numbers |= {rank["pid"]: rank["rank"] for rank in status.ranks if rank["pid"] in tree}
        if pid not in held or not all(map(self._reader.status, tree)):
            return None  # one ended meanwhile: others may hold its pages twice
        ranks, inside, names = list[dict[str, int]](), set[int](), list[dict[str, int]]()
        for root in sorted(numbers or {pid: 0}, key=lambda one: numbers.get(one, 0)):
            own = {root}
            while more := {one for one, stat in tree.items() if stat.parent in own} - own:
                own |= more
            inside |= own
            sizes = {one: held[one] for one in own if one in held}
            main = sizes[root].held + self._rose(root) if root in sizes else 0
            below = sum(one.held for child, one in sizes.items() if child != root)
            names.append({key: size for one in own for key, size in _shared_objects(one)})
            shm = sum(one.shared_memory for one in sizes.values())
            ranks.append({"main": main, "below": below, "shm": shm, "number": len(own) - 1})
        between = _between(names, sum(one["shm"] for one in ranks))
        for one in ranks:
            one["shm"] = max(0, one["shm"] - between // len(ranks))
        once = between + sum(one.held + one.shared_memory for child, one in held.items() if child not in inside)
        private = once + sum(one[name] for one in ranks for name in _PARTS)
        return {"private": private, "once": once, "between": between, "ranks": ranks}

    def _rose(self, pid: int) -> int:
        """Return how far a process rose between two samples."""
        before, now = self._before.get(pid), self._reader.status(pid)
        self._before |= {pid: now} if now else {}
        if now is None or before is None or now.high_water <= before.high_water:
            return 0
        return max(0, now.high_water - max(now.rss, before.rss))


def _rank_of(pid: int) -> int | None:
    """Return the rank that a process was started as, by its environment."""
    with suppress(OSError):
        found = re.search(rb"(?:^|\0)RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes() + b"\0")
        return int(found[1]) if found else None
    return None


def _shared_objects(pid: int) -> Iterator[tuple[str, int]]:
    """Yield the shared memory that a process maps: device and inode, and bytes."""
    with suppress(OSError):
        for row in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, _, _, device, inode, *name = row.split(maxsplit=5)
            if name and name[0].startswith(("/dev/shm/", "/memfd:", "/SYSV")):
                begin, end = (int(word, 16) for word in span.split("-"))
                yield f"{device} {inode}", end - begin


def _between(names: Sequence[Mapping[str, int]], most: int) -> int:
    """Return the bytes of shared memory that several ranks map."""
    sizes = {key: size for one in names for key, size in one.items()}
    return min(most, sum(size for key, size in sizes.items() if sum(key in one for one in names) > 1))


def jobs_on_gpu(each: int, total: int) -> str:
    """Say how many jobs share a GPU.

    >>> jobs_on_gpu(7 << 30, 24 << 30)
    '3 such jobs on a GPU of 24.00 GiB: 7.00 GiB each'
    """
    number = format_count(max(0, total - DEVICE_RESERVE_BYTES) // each, "such job")
    return f"{number} on a GPU of {format_bytes(total)}: {format_bytes(each)} each"


# The runs


def launch_of(command: Sequence[str] | None, number: int = 0) -> tuple[int, list[str]]:
    """Return how many ranks torchrun starts on a node by its words, 0 if it is another command, and the command with
    ``number`` of them.

    >>> launch_of(["torchrun", "--nproc_per_node", "4", "train.py"], 2)
    (4, ['torchrun', '--nproc-per-node=2', 'train.py'])
    """
    words = (command or [""])[0].split(" ") if len(command or ()) == 1 else list(command or ())
    if (at := next((n for n, word in enumerate(words) if _LAUNCHER.fullmatch(word)), None)) is None:
        return 0, list(command or ())
    ranks, left = 1, list[str]()
    rest = iter(words[at + 1 :])
    for word in rest:
        if (found := _PER_NODE.fullmatch(word)) is None:
            left.append(word)
        elif (text := found[1] or next(rest, "")).isdecimal():
            ranks = int(text)
    words = [*words[: at + 1], f"--nproc-per-node={number}", *left]
    return ranks, [" ".join(words)] if len(command or ()) == 1 else words


def _as_steps(order: Order, ranks: int) -> Order:
    """Return the order of first steps with so many ranks at most: a canary of the first unit."""
    settings = order.settings
    launched = {one.name: launch_of(one.command, ranks) for one in order.stages}
    stages = [replace(one, command=launched[one.name][1]) if one.command else one for one in order.stages]
    few = 1 if any(number for number, _ in launched.values()) else min(ranks, settings.resources.ranks)
    own = {
        name: one.model_copy(update={"resources": one.resources.model_copy(
            update={"ranks": min(ranks, one.resources.ranks)})})
        if one.resources else one
        for name, one in settings.stages.items()
    }  # fmt: skip
    update: dict[str, Any] = {
        "resources": settings.resources.model_copy(update={"ranks": few}),
        "threads_per_job": settings.threads_per_rank * few,
        "stages": own,
        "canary": True,
        "planned": None,
        "grace_seconds": min(10.0, settings.grace_seconds),
    }
    update["canary_seconds"] = _seconds_of(order)
    if settings.backend == "slurm":
        update["slurm"] = settings.slurm.model_copy(update={"nodes": 1})
    units = order.choice.units if order.choice.units != "all" else "1"
    choice = replace(order.choice, units="all" if order.kind == "commands" else units)
    return as_canary(replace(order, settings=settings.model_copy(update=update), stages=stages, choice=choice))


def _seconds_of(order: Order) -> float:
    """Return how long a job may take: longer where it may be one that the training waits for."""
    if "canary_seconds" in order.settings.model_fields_set:
        return order.settings.canary_seconds
    return round(_patience() * (_MORE if len(order.stages) > 1 else 1))


def _patience() -> float:
    """Return how long first steps may take on this machine, by its load."""
    return _SECONDS * min(_MORE, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def make_first_steps(
    order: Order, names: Sequence[str], parent: Parent | None, say: Callable[[str], None] | None, *, new: bool
) -> dict[str, FirstSteps]:
    """Run stages that nobody has measured as one rank, and those of several ranks as two; return what they took.

    What earlier first steps took is kept beside the runs; without ``say`` that alone is returned.
    """
    stages = [one for one in order.stages if one.name in names]
    if say is not None and order.kind == "commands" and own_stdin(order.stages[0].units or ()) is not None:
        return {one.name: FirstSteps(why="left out: its standard input can be read once") for one in stages}
    file = order.settings.runs_dir / order.settings.experiment / "first_steps.json"
    keys = {one.name: _key_of(order, one) for one in stages}
    kept = {} if new and say else _read(file)
    found: dict[str, dict[int, Mapping[str, Any]]] = {name: {} for name in names}
    why = dict.fromkeys(names, "")
    for number in (1, 2):
        left = []
        for one in stages:
            key = f"{keys[one.name]} {number}"
            if key in kept:
                found[one.name][number] = kept[key]
            elif number == 1 or (order.ranks_of(one) > 1 and found[one.name]):
                left.append(one.name)
        if not left or say is None:
            continue
        what = f"first steps of {list_some(left)} as {format_count(number, 'rank')}"
        say(f"{what}: at most {_seconds_of(order):g} s a job (--no-steps leaves them out)")
        try:
            made = _make(_as_steps(order, number), order, parent)
        except InterruptedRunError:
            raise
        except MemfitError as error:
            made = dict.fromkeys(left, error.what)
        for name in left:
            taken = made.get(name, "it was not reached")
            if isinstance(taken, str):
                why[name] = f"as {format_count(number, 'rank')}: {taken}"
            else:
                found[name][number] = kept[f"{keys[name]} {number}"] = taken
    if kept and say is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, kept)
    return {name: FirstSteps(found[name], why[name]) for name in names if found[name] or why[name]}


def _make(order: Order, asked: Order, parent: Parent | None) -> dict[str, dict[str, Any] | str]:
    """Run first steps in a run that is removed; return what each stage took, or why that is not known."""
    graph = Graph(order)
    run = RunDir.create(order.settings.runs_dir, order.settings.experiment, order.fingerprint, order.facts)
    try:
        graph.look(run, earlier_runs(asked, run))
        watch = _Watch(order, graph)
        result = go_on(
            order, graph, "started", force=False, view=lambda run: watch.sample, parent=parent, watch=watch.of
        )
        if watch.stop.level > watch._has_asked:  # its user stopped it
            raise InterruptedRunError(
                "first steps were stopped before they had shown what the job takes.",
                rule="a plan counts first steps that came to their end, and keeps no others.",
                remedy="give the same command again, or leave them out: --no-steps",
            )
        found: dict[str, dict[str, Any] | str] = {}
        for name, units in graph.units.items():
            statuses = [result.statuses[one.job_id] for one in units if one.job_id in result.statuses]
            own = max(statuses, key=lambda one: one.peak_bytes, default=None)
            if own is not None and own.footprint is not None:
                is_whole = own.state == "completed" or own.asked or own.exit_code == 75
                is_forked = parent is not None and graph.stages[name].command is None
                found[name] = _taken(own, watch, result.canary, is_forked=is_forked) if is_whole else own.cause
        return found
    finally:
        shutil.rmtree(run.path, ignore_errors=True)
        with suppress(OSError):
            run.path.parent.rmdir()


def _taken(status: JobStatus, watch: _Watch, verdict: Mapping[str, Any] | None, *, is_forked: bool) -> dict[str, Any]:
    footprint = status.footprint or Footprint(0)
    unseen = {"private": footprint.private_bytes, "ranks": [dict.fromkeys([*_PARTS, "number"], 0)]}
    most = {"once": 0, "between": 0, **watch.most.get(status.job_id, unseen)}
    seconds = (status.ended or 0.0) - (status.started or 0.0)
    if is_forked or seconds < _SOON:  # the meter alone knows a forked job's own pages, and a short one's peak
        share = footprint.private_bytes / max(most["private"], 1)
        most |= {"private": footprint.private_bytes, "once": int(most["once"] * share)}
    part = most["private"] / max(footprint.private_bytes, 1)  # else it counts forked pages as copied until it looks
    marked, notes = list(watch._seen.get(status.job_id, {}).get(0, {})), []
    if status.asked and not marked:
        notes.append(f"it marked no phase and was stopped after {format_duration(seconds)}: what comes later was not "
                     'seen; mark with memfit.phase("validate"), "checkpoint"')  # fmt: skip
    elif status.asked and (missing := (verdict or {}).get("not_covered")):
        notes.append(f"not seen: phase {list_some(missing)}")
    return {
        **most,
        "files": footprint.shared_bytes,
        "device": footprint.bytes_per_device,
        "phases": {name: round(part * peak.private_bytes) for name, peak in footprint.phases.items()},
        "seconds": seconds,
        "notes": notes,
    }


def _key_of(order: Order, stage: StageSpec) -> str:
    """Return what first steps depend on: settings, command, code, and the files that a command names."""
    words = [word for text in stage.command or () for word in text.split()]
    files = [(word, Path(word).stat().st_mtime_ns) for word in words if Path(word).is_file()]
    alone = replace(stage, command=launch_of(stage.command, 1)[1])
    own = [made_for(alone), dict(stage.code), stage.data, files, order.settings.threads_per_rank, stage.units]
    return fingerprint([*own, order.settings.canary_args, stage.name])[:16]


def _read(file: Path) -> dict[str, Mapping[str, Any]]:
    with suppress(DamagedError):
        return {key: one for key, one in (read_json(file) or {}).items() if fits(one, _SHAPE)}
    return {}
