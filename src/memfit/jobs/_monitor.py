"""Follows a running job for its shim: memory, limit, phases, checkpoints."""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memfit.errors import DamagedError
from memfit.files import fits, until_next_look
from memfit.jobs._folder import device_share
from memfit.jobs._growing import Growing
from memfit.memory import (
    HOST,
    Footprint,
    GroupState,
    JobGroup,
    Sample,
    SeriesWriter,
    Sizes,
    TreeMeter,
    device_reader,
    is_locked,
    visible_uuids,
)
from memfit.rundir import (
    SUPERVISOR,
    Beat,
    Event,
    EventTail,
    EventWriter,
    JobStatus,
    RunDir,
    event_time,
    is_further,
    read_beats,
    read_record,
)
from memfit.units import format_bytes

STATUS_SECONDS = 0.5
_SETTLED_SECONDS, _GROWN = 3.0, 1.02
#: After so long without a supervisor a job may take what the run has, and is ended. The jobs of a run end at different
#: times, so that the others get what the first gives back.
_ALONE_SECONDS, _STARVED_SECONDS = 5.0, 60.0
_MOST_BYTES = 1 << 50
_HELD = ("bytes", "peak_bytes", "allocated_bytes")
_AT_WALL = 0.9  # a refusal counts from this part of the limit on; below it the kernel reclaimed page cache


@dataclass
class Monitor:
    run: RunDir
    job: Mapping[str, Any]  # ``job.json``
    known: JobStatus  # what is known of it, without its memory
    group: JobGroup | None = None
    first: GroupState | None = None  # the state of its group before it began
    older: frozenset[Path] = frozenset()  # event files that were there before it
    devices: tuple[str, ...] = field(init=False)  # that it was given, by UUID, in the order in which it numbers them
    born: float = field(default_factory=time.monotonic)
    meter: TreeMeter = field(init=False)
    series: SeriesWriter | None = None
    sample: Sample | None = None
    state: GroupState | None = None
    passed: list[str] = field(default_factory=list)
    has_trained: bool = False  # the last epoch of its training was the last of all
    last_peak_bytes: int = 0  # private, by the kernel at the end; a burst after the last sample shows there alone
    inherited_bytes: int = 0  # what its process got by a fork from its watcher, in anonymous memory
    _tails: dict[Path, EventTail] = field(default_factory=dict)
    #: What torch holds in each process now, at its peak, and of it in tensors, by event file and device.
    _reports: dict[tuple[Path, str], tuple[int, ...]] = field(default_factory=dict)
    growing: Growing = field(default_factory=Growing)
    _rank_pids: dict[int, set[int]] = field(default_factory=dict)
    _rank_peaks: Sizes = field(default_factory=Counter)
    _looked: float = 0.0
    _settled: Sizes = field(default_factory=Counter)
    _grown_at: float = 0.0
    _num_met: int = 0
    _has_met: bool = False
    _wall_bytes: int = sys.maxsize
    #: The furthest checkpoint of each training in earlier attempts.
    _before: dict[str, Sequence[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._grown_at = self.born
        for path in self.run.job_dir(self.known.job_id).glob("outcome_*.json"):
            with suppress(DamagedError, OSError):
                found = last.furthest.items() if (last := read_record(path)) is not None else ()
                self._before |= {name: at for name, at in found if is_further(self._before, name, at)}
        self.note(furthest=self._before)
        visible = self.job["env"].get("CUDA_VISIBLE_DEVICES", "") if self.job["num_devices"] else ""
        self.devices = tuple(filter(None, visible.split(",")))
        if self.job["num_devices"] and not visible:
            self.devices = visible_uuids(os.environ)  # those that Slurm gave
        if self.first is not None:
            self._num_met, self._wall_bytes = self.first.met_wall, self.first.wall_bytes
        reader = device_reader(has_devices=bool(self.devices))
        self.meter = TreeMeter(self.known.pid or 0, group=self.group, devices=reader)
        self.meter.state = self.first
        self.meter.burst_bytes()  # an earlier attempt's in the same group
        self.meter.inherited_bytes = self.inherited_bytes
        self.meter.counts_from_birth = True

    def note(self, **fields: Any) -> None:
        self.known = replace(self.known, **fields)

    @property
    def peak_bytes(self) -> int:
        return self.footprint().private_bytes

    def observe(self) -> None:
        self.look_at_group()
        self.meter.state = self.state
        with until_next_look():
            self._follow_events()
        sample = self.meter.sample()
        if sample is None:
            return
        self.sample = sample
        if self.series is not None:
            with suppress(OSError):  # a full disk costs the samples, not the job
                line = self.series.append(self._placed(sample))
                if line is not None and self.growing.look(line, self._limits):
                    self._tell_growth()
        sizes = Counter({HOST: sample.peak_bytes, **self.device_used_bytes()})
        if any(size > _GROWN * self._settled[place] for place, size in sizes.items()):
            self._settled, self._grown_at = self._settled | sizes, time.monotonic()

    def _placed(self, sample: Sample) -> Sample:
        """Return a sample with the step that the job is at, and what each rank and the tensors on each device take."""
        own = {str(rank): self.meter.own_bytes(pids) for rank, pids in self._rank_pids.items()}
        self._rank_peaks |= {rank: peak for rank, (_, peak) in own.items()}
        ranks = {rank: low for rank, (low, _) in own.items()}
        allocated, alive = Counter[str](), {str(pid) for pid in self.meter.pids} if self._reports else set()
        for (path, uuid), (_, _, size) in self._reports.items():
            allocated[uuid] += size * (_pid_of(path) in alive)
        sample = replace(sample, step=self.growing.steps.at(sample.time), ranks=ranks if len(ranks) > 1 else {})
        return replace(sample, device_bytes=self.device_used_bytes(), allocated_bytes=dict(allocated))

    def _limits(self) -> dict[str, int]:
        """Return what it can hold on the host and on each device, as long as others keep what they hold."""
        from memfit.memory import Budget  # not needed by a job that ends soon

        budget, own = Budget.read(), self.sample.private_bytes if self.sample and self.meter.pids else 0
        rooms = [budget.headroom_bytes + own]
        if self.group is not None and (run := JobGroup(self.group.path.parent, self.group.version).state()):
            rooms.append(run.wall_bytes - run.used_bytes + (self.state.used_bytes if self.state else own))
        elif self.job.get("data_limit_bytes"):
            rooms.append(self.job["data_limit_bytes"])
        share = device_share(self.job["env"])
        return {HOST: min(rooms), **{one.uuid: round(share * one.total_bytes) for one in budget.devices}}

    def _tell_growth(self) -> None:
        grown = self.growing.told
        assert grown is not None
        fields = grown.to_dict()
        fields |= {"what": fields.pop("kind"), "text": f"{self.known.job_id}: {grown.text}"}
        events = EventWriter(self.run.events_dir, self.known.job_id)
        events.write("growth", **fields)
        events.close()

    def look_at_group(self) -> None:
        if self.group is None:
            return
        self.state = self.group.state()
        if self.state is not None:
            self.note_refusals(self.state, self.state.used_bytes)

    def note_refusals(self, state: GroupState, used_bytes: int) -> None:
        """Note whether an allocation was refused or delayed at its limit, given the most that was used."""
        # The limit may have been raised since it was met.
        wall_bytes = min(state.wall_bytes, self._wall_bytes)
        has_met = state.met_wall > self._num_met
        refused = (has_met or self._has_met) and used_bytes >= _AT_WALL * wall_bytes
        self.note(wants_more=self.known.wants_more or state.stalled or refused, stalled=state.stalled)
        self._num_met, self._wall_bytes = state.met_wall, state.wall_bytes
        # A process that ends for it has freed most by now: the next look may know the peak.
        self._has_met = has_met and not refused

    def open_series(self) -> None:
        """Begin the memory series; if it cannot be written, the job runs all the same."""
        suffix = "" if self.known.attempt == 1 else f"_{self.known.attempt}"
        path = self.run.job_dir(self.known.job_id) / f"memory{suffix}.jsonl"
        try:
            self.series = SeriesWriter(path)
        except (OSError, DamagedError) as error:
            print(f"no {path.name}: {error}", file=sys.stderr)

    def _follow_events(self) -> None:
        of_nodes = self.job.get("num_nodes", 1) > 1  # then its processes are elsewhere, too
        if not self._tails or time.monotonic() - self._looked >= STATUS_SECONDS:
            self._looked, pids = time.monotonic(), {str(pid) for pid in self.meter.pids}
            for path in self.run.events_dir.glob("*.jsonl"):
                # A file that was there before the job belongs to a process id used before.
                if path not in self._tails and path not in self.older and (of_nodes or _pid_of(path) in pids):
                    self._tails[path] = EventTail(path)
        for path, tail in self._tails.items():
            for record in tail.read():
                if record.get("job") != self.known.job_id:
                    continue
                if fits(held_by := record.get("devices"), [dict.fromkeys(_HELD, int)]):
                    for uuid, held in zip(self.devices, held_by or (), strict=False):
                        self._reports[path, uuid] = tuple(min(held[name], _MOST_BYTES) for name in _HELD)
                if not record.get("rank"):  # rank 0 tells of the job
                    self._take_in(record)

    def _take_in(self, event: Event) -> None:
        kind = event.get("kind")
        if kind == "phase":
            self._enter(str(event.get("phase")))
        elif kind == "checkpoint":
            self._note_checkpoint(event)
        elif kind in ("step", "epoch", "early_stop"):
            if kind == "step":
                self.growing.steps.take(event)
            self.has_trained = kind != "step" and (kind != "epoch" or event.get("epoch") == event.get("num_epochs"))

    def _note_checkpoint(self, record: Mapping[str, Any]) -> None:
        told: Any = record.get("bytes")
        size = max(self.known.checkpoint_bytes, told if fits(told, int) else 0)
        self.note(checkpoint_bytes=size, checkpointed=self.known.checkpointed or self.known.started)
        training = str(Path(str(record.get("path"))).parent)
        at: Any = [record.get("epoch") or 0, record.get("step") or 0]
        if fits(at, [(int, float)]) and is_further(self._before, training, at):
            self.note(checkpointed=event_time(record) or time.time(), furthest={**self._before, training: at})

    def _enter(self, phase: str) -> None:
        marked = self.known.phase
        if marked is not None and marked != phase and marked not in self.passed:
            self.passed.append(marked)
        self.note(phase=phase)
        self.meter.enter_phase(phase)

    def device_used_bytes(self) -> dict[str, int]:
        """Return what it holds on each device now, by NVML, or by torch where NVML cannot see its processes."""
        alive = {str(pid) for pid in self.meter.pids}
        seen = self.sample.device_bytes if self.sample else {}
        found = Counter(dict.fromkeys(self.devices, 0))
        for (path, uuid), (held, *_) in self._reports.items():
            found[uuid] += held if _pid_of(path) in alive else 0
        return {uuid: max(found[uuid], seen.get(uuid, 0)) for uuid in {**found, **seen}}

    @property
    def settled(self) -> bool:
        """True if its footprint is a forecast for similar jobs."""
        if self.job["phases"]:
            return all(phase in self.passed for phase in self.job["phases"])
        if {"train", "validate"} <= {*self.passed}:  # a training by memfit's own marks: it was in each phase once
            return True
        now = time.monotonic()
        return self.sample is not None and now - self._grown_at >= max(_SETTLED_SECONDS, (now - self.born) / 2)

    def note_last_peak(self, resident_bytes: int, state: GroupState | None, *, is_bound: bool) -> None:
        """Take in the resident peak of the largest process at its end, or a bound of it, and its group's state."""
        self.meter.state = state
        state = state if state is not None and state.charged_peak else None
        if state is not None and (self.inherited_bytes or is_bound):
            self.last_peak_bytes = min(self.meter.burst_bytes(), resident_bytes)
        elif not is_bound:
            resident_bytes -= self.inherited_bytes + (self.sample.shared_bytes if self.sample else 0)
            most_bytes = state.charged_peak - state.cache_bytes if state is not None else resident_bytes
            self.last_peak_bytes = min(resident_bytes, most_bytes)
        seen, began = self.sample.time if self.sample else 0.0, self.known.started or 0.0
        if self.last_peak_bytes <= 0 and state is None and 2 * seen < began + time.time():
            self.sample = None  # more than half of its life was not seen: what it took is not known

    def footprint(self) -> Footprint:
        found = self.meter.footprint()
        reported = Counter[str]()
        for (_, uuid), (_, peak, _) in self._reports.items():
            reported[uuid] += peak
        found = replace(found, device_bytes=dict(reported | Counter(found.device_bytes)))
        late = max(0, self.last_peak_bytes - found.private_bytes)
        parts = {**found.parts, "anonymous": found.parts.get("anonymous", 0) + late}
        return replace(found, private_bytes=found.private_bytes + late, parts=parts)

    def ranks(self) -> list[dict[str, Any]]:
        """Return what each rank of a group does and holds, by the beats of its newest generation."""
        found, job_dir = [], self.run.job_dir(self.known.job_id)
        beats: Mapping[int, Beat] = {}
        with until_next_look():
            folders = [*self.run.path.glob("ranks/*/"), *job_dir.glob("ranks/*/")]  # of all nodes, or of this host
            beats = read_beats(max(folders, key=lambda one: one.stat().st_mtime_ns)) if folders else {}
        own = {rank: one for rank, one in sorted(beats.items()) if one.host == socket.gethostname()}
        for rank, one in own.items():
            pids = self._rank_pids[rank] = self.meter.below(one.pid)
            pss = sum(self.meter.pss_of.get(pid, 0) for pid in pids)
            held = sum(held for (path, _), (held, *_) in self._reports.items() if _pid_of(path) == str(one.pid))
            sizes = {"pss_bytes": pss, "device_bytes": held, "peak_bytes": self._rank_peaks[str(rank)]}
            found.append({"rank": rank, "pid": one.pid, "place": one.place, "step": one.step, **sizes})
        return found

    def status(self) -> JobStatus:
        footprint = self.footprint()
        is_measured = self.sample is not None or self.last_peak_bytes > 0  # without /proc by its end alone
        return replace(
            self.known,
            settled=self.settled,
            used_bytes=self.sample.private_bytes if self.sample else 0,
            peak_bytes=footprint.private_bytes if is_measured else 0,
            pss_bytes=self.sample.pss_bytes if self.sample else 0,
            device_used_bytes=self.device_used_bytes(),
            footprint=footprint if is_measured else None,
            cpu_seconds=round(self.meter.cpu_seconds, 2),
            ranks=self.ranks(),
            growth=self.growing.told.to_dict() if self.growing.told else {},
        )


class Unsupervised:
    """Follows one job that may wait at its limit while no supervisor holds the run's ``supervisor.lock``."""

    def __init__(self, run_path: Path, group: JobGroup) -> None:
        self._lock, self._group = run_path / SUPERVISOR, group
        self._ends_after = _STARVED_SECONDS * random.uniform(1, 2)
        self._look_at = 0.0
        self._since: float | None = None

    def look(self, state: GroupState | None, now: float) -> str:
        """Raise a stalled job's limit to that of the whole run; return why to end the job if that did not help."""
        if state is not None and state.stalled and now < self._look_at:
            return ""
        self._look_at = now + 1.0
        if state is None or not state.stalled or is_locked(self._lock):
            self._since = None
            return ""
        self._since = self._since or now
        waited = now - self._since
        if waited >= self._ends_after:
            return (
                f"it waited {waited:.0f} s at its limit with {format_bytes(state.used_bytes)} in use, no supervisor "
                "was there, and none of its run's memory was free: ended by its watcher"
            )
        if waited >= _ALONE_SECONDS and (run := JobGroup(self._group.path.parent, self._group.version).state()):
            self._group.set_wall(run.wall_bytes)
        return ""


def _pid_of(event_file: Path) -> str:
    """Return the number of the process that writes an event file, as text."""
    return "".join(event_file.stem.split("-")[-2:-1])
