"""Measures a process tree by cheap counters often and by proportional sizes seldom."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from memfit.errors import UsageError
from memfit.memory._footprint import Footprint, PhasePeak
from memfit.memory._jobgroup import GroupState, JobGroup
from memfit.memory._process import ProcReader, Rollup, Sharing, Stat, Status, Tree

if TYPE_CHECKING:
    from memfit.memory._devices import DeviceReader

#: At most these shares of one core go into sweeps (of PSS; of devices), and into looking through all processes.
SWEEP_SHARE, SCAN_SHARE = 0.01, 0.0025


@dataclass(frozen=True)
class Sample:
    """A process tree now, in bytes.

    ``private_bytes`` is non-reclaimable, shared pages once; ``peak_bytes`` its peak since the sample before, high-water
    marks included. ``shared_bytes`` are mapped file pages, each once. ``rss_bytes`` counts shared pages
    once per process. ``pss_bytes`` is as of the last sweep; 0 before the first.

    For growth, the lowest since the sample before: ``low_bytes`` of the tree, ``ranks`` of each rank's processes,
    ``allocated_bytes`` of the tensors on each device. ``resident_bytes`` are RssAnon + RssShmem, ``reserved_bytes``
    VmData + RssShmem; ``step`` is so far, 0 where nobody counts."""

    time: float
    num_processes: int
    private_bytes: int
    shared_bytes: int
    rss_bytes: int
    pss_bytes: int
    phase: str
    device_bytes: Mapping[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    cpu_seconds: float = 0.0
    low_bytes: int = 0
    resident_bytes: int = 0
    reserved_bytes: int = 0
    step: float = 0.0
    ranks: Mapping[str, int] = field(default_factory=dict)
    allocated_bytes: Mapping[str, int] = field(default_factory=dict)

    def joined(self, later: Sample) -> Sample:
        """Return both as one: the later, with the highest peak and, of one phase, the lowest sizes of both."""
        peak = max(self.peak_bytes, later.peak_bytes)
        if self.phase != later.phase:
            return replace(later, peak_bytes=peak)
        low = min(self, later, key=lambda one: one.low_bytes)
        ranks = {**self.ranks, **{name: min(held, self.ranks.get(name, held)) for name, held in later.ranks.items()}}
        before, after = self.allocated_bytes, later.allocated_bytes
        allocated = {**before, **{name: min(held, before.get(name, held)) for name, held in after.items()}}
        low = replace(later, low_bytes=low.low_bytes, step=low.step)
        return replace(low, peak_bytes=peak, ranks=ranks, allocated_bytes=allocated)


class _Paced:
    """Runs an action as often as a share of one core pays for it, by the CPU time of the last run."""

    def __init__(self, share: float, clock: Callable[[], float], cpu: Callable[[], float]) -> None:
        self._wait_per_cost, self._clock, self._cpu = 1 / share - 1, clock, cpu
        self._next = float("-inf")

    @property
    def due(self) -> bool:
        return self._clock() >= self._next

    @contextmanager
    def run(self) -> Iterator[None]:
        begin = self._cpu()
        yield
        self._next = self._clock() + (self._cpu() - begin) * self._wait_per_cost


class TreeMeter:
    """Measures a process tree each time that ``sample`` is called.

    **Private bytes** are non-reclaimable: anonymous (swapped included), mapped shared memory, page tables. A page that
    processes of the tree share counts once, as of the last sweep. Before the first sweep of a process the
    figure is an upper bound.

    **High-water marks**: where a process's ``VmHWM`` rose since the sample before, the peak in between was ``VmHWM``
    less the file pages mapped then or now, whichever are more. A fork's copies of inherited pages raise no ``VmHWM``:
    they show in the peak of ``group``, less its page cache then or now. A spike below an earlier mark is not seen.

    ``inherited_bytes`` is anonymous memory that the root has by a fork from outside of the tree: what it has not
    written since is not counted. ``counts_from_birth``: what the tree did before the first sample counts."""

    def __init__(
        self,
        pid: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        group: JobGroup | None = None,
        devices: DeviceReader | None = None,
        reader: ProcReader | None = None,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._reader = reader or ProcReader()
        self._tree = Tree(pid, self._reader)
        self._root, self._clock, self._devices, self._group = pid, clock, devices, group
        self.state: GroupState | None = None
        self._known: GroupState | None = None
        self._unix_offset = time.time() - clock()
        self._sweeps, self._scans = _Paced(SWEEP_SHARE, clock, cpu), _Paced(SCAN_SHARE, clock, cpu)
        self._device_reads, self._device_bytes = _Paced(SWEEP_SHARE, clock, cpu), dict[str, int]()
        self.inherited_bytes, self.counts_from_birth = 0, False
        self._held, self._shared_memory = Sharing(), Sharing()
        self._before: dict[int, tuple[Stat, Status]] = {}
        self.pids, self.pids_seen = set[int](), self._tree.seen
        self._last: Sample | None = None
        self.pss_of: Mapping[int, int] = {}
        self._spikes = dict[int, int]()
        self._own: dict[int, tuple[int, int]] = {}  # PSS without files at the last sweep, and what was resident then
        self._swept_file = self._swept_pss = 0
        self._phase, self._phase_since = "", clock()
        self._parts: dict[str, int] = {}
        self._whole, self._phases = PhasePeak(0), dict[str, PhasePeak]()

    def sample(self) -> Sample | None:
        """Return the tree now, or None when no process of it is left."""
        now = self._read()
        self.pids = set(now)
        self._add_seconds()
        if not now:
            return None
        self._note_forks(now)
        inherited, burst = self.inherited_bytes, self.burst_bytes()
        swept_pss = self._sweep(now) if self._sweeps.due else 0
        parts, charged = self._measure_parts(now), 0
        parts["anonymous"] -= min(self.inherited_bytes, parts["anonymous"])
        level = parts["anonymous"] + parts["shared_memory"] + parts["page_tables"]
        if self._group is not None and (charged := self._group.charged_peak()):
            charged += sum(status.swapped for _, status in now.values())
            if inherited and level > charged:  # pages that its parent left to it alone are charged to the parent
                parts["anonymous"] -= (more := min(level - charged, parts["anonymous"]))
                level -= more
        if self.state is not None and (missing := self.state.used_bytes - level) > 0:
            copied = min(missing, inherited)  # since the last sweep
            parts["anonymous"] += copied
            parts |= {"other": missing - copied} if missing > copied else {}
            level = self.state.used_bytes
        peak = max(level, self._last.private_bytes if self._last else 0)
        self._spikes = {pid: self._spike(pid, *reading) for pid, reading in now.items()}
        peak += sum(self._spikes.values())
        peak = max(peak, min(peak + inherited, burst))
        if charged:
            # A mark also counts shared memory that the group knows from before it was mapped.
            peak = max(level, min(peak, charged))
        parts["anonymous"] += peak - level
        self._last = Sample(
            time=self._unix_offset + self._clock(),
            num_processes=len(now),
            private_bytes=level,
            shared_bytes=parts["file"],
            rss_bytes=sum(status.rss for _, status in now.values()),
            pss_bytes=self._swept_pss,
            phase=self._phase,
            device_bytes=self._read_devices(),
            peak_bytes=peak,
            low_bytes=level,
            resident_bytes=max(level, sum(_resident(status) for _, status in now.values())),
            reserved_bytes=max(level, sum(status.data + status.shared_memory for _, status in now.values())),
        )
        self._before = now
        self._last = replace(self._last, cpu_seconds=self.cpu_seconds)
        if peak > self._whole.private_bytes:
            self._parts = parts
        taken = PhasePeak(peak, self._last.shared_bytes, swept_pss, self._last.device_bytes)
        self._whole = self._whole.merge(taken)
        if self._phase:
            self._take(self._phase, taken)
        return self._last

    def burst_bytes(self) -> int:
        """Return the most that was charged to the group beside page cache since the last call; 0 if it did not rise."""
        before, now = self._known, self.state or self._known
        self._known = now
        if now is None or before is None or now.charged_peak <= before.charged_peak:
            return 0
        return now.charged_peak - max(before.cache_bytes, now.cache_bytes)

    def below(self, pid: int) -> set[int]:
        """Return a process of the tree and all that come from it, as of the last sample."""
        found = {pid} & self.pids
        while more := {one for one, (stat, _) in self._before.items() if stat.parent in found} - found:
            found |= more
        return found

    def own_bytes(self, pids: Iterable[int]) -> tuple[int, int]:
        """Return what processes hold, without file pages: by PSS at the last sweep, and what became resident since; and
        the most since the sample before, by their high-water marks, 0 as long as one of them was never swept."""
        now = {pid: _resident(self._before[pid][1]) for pid in pids if pid in self._before}
        swept = {pid: self._own.get(pid, (held, held)) for pid, held in now.items()}
        own = sum(max(0, swept[pid][0] + held - swept[pid][1]) for pid, held in now.items())
        return own, (own + sum(self._spikes[pid] for pid in now)) * (now.keys() <= self._own.keys())

    @property
    def cpu_seconds(self) -> float:
        """The CPU time of the tree at the last sample, with that of children that ended."""
        return sum(stat.cpu_ticks for stat, _ in self._before.values()) / os.sysconf("SC_CLK_TCK")

    def enter_phase(self, name: str, *, exact: bool = False) -> None:
        """Begin a phase, or go on with one of this name. Without ``exact`` the mark was read later than the change, so
        what happened since the last sample counts for both phases."""
        taken = self.sample()
        self._phase = name
        begin = PhasePeak(0)
        if (last := taken or self._last) is not None:
            peak_bytes = last.peak_bytes if taken and not exact else last.private_bytes
            begin = PhasePeak(peak_bytes, last.shared_bytes, 0, last.device_bytes)
        self._take(name, begin)

    def footprint(self) -> Footprint:
        """Return the peaks so far, whole and by phase."""
        whole = self._whole
        return Footprint(whole.private_bytes, whole.shared_bytes, whole.device_bytes, {**self._parts}, {**self._phases})

    def _read(self) -> dict[int, tuple[Stat, Status]]:
        scan = self._scans.due
        with self._scans.run() if scan else nullcontext():
            stats = self._tree.refresh(scan=scan)
        return {pid: (stat, status) for pid, stat in stats.items() if (status := self._reader.status(pid))}

    def _read_devices(self) -> Mapping[str, int]:
        if self._devices and self._device_reads.due:
            with self._device_reads.run():
                self._device_bytes = dict(self._devices(self.pids))
        return self._device_bytes

    def _take(self, phase: str, peak: PhasePeak) -> None:
        self._phases[phase] = self._phases.get(phase, PhasePeak(0)).merge(peak)

    def _add_seconds(self) -> None:
        now = self._clock()
        if self._phase:
            peak = self._phases[self._phase]
            self._phases[self._phase] = replace(peak, seconds=peak.seconds + now - self._phase_since)
        self._phase_since = now

    def _note_forks(self, now: Mapping[int, tuple[Stat, Status]]) -> None:
        """Count a child that was forked since the last sample with what it can have written."""
        sizes = {pid: status.held for pid, (_, status) in now.items()}
        families = {stat.image: pid for pid, (stat, _) in self._before.items() if stat.image}
        for pid, (stat, status) in now.items():
            before = self._before.get(pid)
            if before and before[0].image != stat.image:
                if pid == self._root:
                    self.inherited_bytes = 0
                self._held.leave(pid)
                self._shared_memory.leave(pid)
            elif not before and stat.image in families:
                parent = self._before.get(stat.parent)
                relative = stat.parent if parent and parent[0].image == stat.image else families[stat.image]
                inherited = min(status.held, self._before[relative][1].held)
                self._held.fork(relative, pid, max(0, inherited - stat.faults * mmap.PAGESIZE), sizes)

    def _sweep(self, now: Mapping[int, tuple[Stat, Status]]) -> int:
        with self._sweeps.run():
            rollups: dict[int, Rollup] = {pid: rollup for pid in now if (rollup := self._reader.rollup(pid))}
        if self._root in rollups:
            self.inherited_bytes = min(self.inherited_bytes, rollups[self._root].shared_dirty)
        self._held.sweep({p: s.held for p, (_, s) in now.items()}, {p: r.held for p, r in rollups.items()})
        self._shared_memory.sweep(
            {p: s.shared_memory for p, (_, s) in now.items()}, {p: r.shared_memory for p, r in rollups.items()}
        )
        self.pss_of = {pid: rollup.pss for pid, rollup in rollups.items()}
        self._own = {pid: (one.held + one.shared_memory, _resident(now[pid][1])) for pid, one in rollups.items()}
        self._swept_pss = sum(self.pss_of.values())
        self._swept_file = sum(rollup.file for rollup in rollups.values())
        return self._swept_pss

    def _measure_parts(self, now: Mapping[int, tuple[Stat, Status]]) -> dict[str, int]:
        files = [status.file for _, status in now.values()]
        return {
            "anonymous": self._held.unique({pid: status.held for pid, (_, status) in now.items()}),
            "shared_memory": self._shared_memory.unique({pid: s.shared_memory for pid, (_, s) in now.items()}),
            "page_tables": sum(status.page_tables for _, status in now.values()),
            # Two lower bounds; one is exact where all processes map the same files, the other where each maps its own.
            "file": min(sum(files), max(max(files), self._swept_file)),
        }

    def _spike(self, pid: int, stat: Stat, status: Status) -> int:
        """Return how far the process rose, between two samples, above both of them."""
        if not self._before and not (self.counts_from_birth and pid == self._root):
            return 0  # what was before the measurement is not part of it
        earlier, level, file = self._before.get(pid), status.private, status.file
        if earlier and (earlier[0].start, earlier[0].image) == (stat.start, stat.image):
            if status.high_water <= earlier[1].high_water:
                return 0
            level, file = max(level, earlier[1].private), max(file, earlier[1].file)
        elif any(stat.image and stat.image == other.image for other, _ in self._before.values()):
            return 0  # just forked: until an exec the mark may be the parent's
        return max(0, status.high_water - file + status.swapped + status.page_tables - level)


def _resident(status: Status) -> int:
    return status.held + status.shared_memory


class Meter:
    """Marks phases, and gives the footprint so far; made by ``measure``."""

    def __init__(self, tree: TreeMeter) -> None:
        self._tree = tree
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def phase(self, name: str) -> None:
        with self._lock:
            self._tree.enter_phase(name, exact=True)

    @property
    def footprint(self) -> Footprint:
        with self._lock:
            return self._tree.footprint()

    def _sample(self) -> bool:
        with self._lock:
            return self._tree.sample() is not None

    def _watch(self, stop: threading.Event, interval_seconds: float) -> None:
        try:
            while not stop.wait(interval_seconds) and self._sample():
                pass
            self._sample()
        except BaseException as error:
            self._error = error


@contextmanager
def measure(pid: int | None = None, *, interval_seconds: float = 0.1) -> Iterator[Meter]:
    """Measure this process and its children, or another tree, while a block runs.

    Args:
        pid: The root of the tree; by default this process.
        interval_seconds: Time between samples.

    Yields:
        A meter: ``phase(name)`` marks a phase, ``footprint`` gives the peaks, also after the block.

    Raises:
        UsageError: If there is no such process, or no interval. What fails in the sampling thread is raised at the end
            of the block.

    Example:
        >>> with measure() as meter:
        ...     meter.phase("load")
        >>> list(meter.footprint.phases)
        ['load']
    """
    pid = os.getpid() if pid is None else pid
    from memfit.memory._devices import device_reader

    meter = Meter(TreeMeter(pid, devices=device_reader()))
    if interval_seconds <= 0 or not meter._sample():
        raise UsageError(
            f"process {pid} cannot be measured each {interval_seconds:g} s.",
            rule="a tree is measured from a living process, by /proc, at intervals above 0 s.",
            remedy="start it first, or leave both out",
        )
    stop = threading.Event()
    thread = threading.Thread(target=meter._watch, args=(stop, interval_seconds), name="memfit-measure", daemon=True)
    thread.start()
    try:
        yield meter
    finally:
        stop.set()
        thread.join()
    if meter._error:
        raise meter._error
