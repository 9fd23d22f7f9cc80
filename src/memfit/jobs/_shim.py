"""The small process beside each job: it watches the job from its start, and writes its outcome; standard library only.

It holds ``lock`` in the job's folder while it lives. The file ``stop_requested`` there asks the job to checkpoint and
end within a grace; with the word ``now``, it ends the job at once. A SIGTERM to the shim does the same as the file, but
then the platform asked. A job on several nodes of Slurm has a shim on each, and one that starts and follows those, and
ends as they do.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from memfit.errors import PeerFailedError, StoppedError, UsageError
from memfit.files import (
    open_own,
    outlast,
    read_json,
    read_own,
    read_whole,
    refresh,
    until_next_look,
    write_atomic,
    write_masked,
)
from memfit.jobs._child import ERROR, RESULT
from memfit.jobs._death import Counters, Death, explain_death, memory_place, read_end, read_error, shows_last_epoch
from memfit.jobs._folder import JOB, LOCK, STOP_REQUESTED, ask_to_stop, write_outcome
from memfit.jobs._fork import end_of, stop_targets
from memfit.jobs._monitor import STATUS_SECONDS, Monitor, Unsupervised
from memfit.jobs._processes import become_subreaper, end_children, end_group, remove_segments, spawn, wait_for
from memfit.jobs._ranks import ELSEWHERE, LEAVING_SECONDS, RANKS, Headway, free_port, read_lost
from memfit.masking import mask
from memfit.memory import Footprint, JobGroup, ProcReader, lock_file
from memfit.rundir import (
    CANARY_VARIABLE,
    OUTCOME,
    STATUS,
    EndedBy,
    EventWriter,
    JobStatus,
    RunDir,
    State,
    read_beats,
    read_record,
)
from memfit.units import KIB, MIB, format_bytes

_SAMPLE_SECONDS = 0.1
_LEFT_BYTES = MIB  # less may be the kernel's lag in counting
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
#: Which end is told of all: a node that was short of memory ends the others.
_FIRST = ("out_of_memory", "failed", "timeout", "node_fail", "preempted", "cancelled", "completed")


class Stop:
    """Why the job is to end, and how soon. By the file, memfit or its user asks; by a signal alone, the platform."""

    def __init__(self, job_dir: Path) -> None:
        self._file = job_dir / STOP_REQUESTED
        self.since: float | None = None
        self.now = self.is_asked = False
        self.reason = ""  # why the shim itself ends the job
        signal.signal(signal.SIGTERM, self.begin)
        # Not SIG_IGN, which the job would inherit.
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGHUP, lambda *_: None)

    def begin(self, *_: object) -> None:
        self.since = self.since or time.monotonic()

    def is_over(self, grace_seconds: float) -> bool:
        return self.now or (self.since is not None and time.monotonic() - self.since > grace_seconds)

    def read_request(self) -> None:
        with contextlib.suppress(OSError):
            self.now = read_own(self._file).strip() == b"now" or self.now
            self.is_asked = True
            self.begin()


class Shim:
    """One job from its start to its outcome. A job on several nodes follows, writes and stops in its own way."""

    def __init__(self, job: Mapping[str, Any], job_dir: Path, stop: Stop, *, forks: bool = False) -> None:
        self.job, self.job_dir, self.stop, self.forks = job, job_dir, stop, forks
        self.run_dir = RunDir(job_dir.parent.parent)
        self.group = JobGroup.at(Path(job["group"])) if job["group"] else None
        self.unsupervised = Unsupervised(self.run_dir.path, self.group) if self.group else None
        self.attempt, self.grace_seconds = int(job["attempt"]), float(job["grace_seconds"])
        logs = (job_dir / "out.log", job_dir / "err.log")
        self.logs = {path: path.stat().st_size if path.exists() else 0 for path in logs}  # where this attempt begins
        self.asked: set[int] = set()
        self.is_forked = False

    def run(self) -> JobStatus:
        self.write(JobStatus(self.job_dir.name, "pending", attempt=self.attempt, watcher_pid=os.getpid()))
        started, before = time.time(), Counters.read(self.group)
        first = self.group.state() if self.group else None
        older = frozenset(self.run_dir.events_dir.glob("*.jsonl"))
        self.stop.read_request()
        if self.stop.is_asked:
            return self._not_started("cancelled", "stopped before it started", "user")
        if self.stop.since is not None:
            return self._not_started("preempted", "ended by a signal from outside memfit before it started", "platform")
        known = JobStatus(self.job_dir.name, "running", attempt=self.attempt, started=started)
        known = replace(known, watcher_pid=os.getpid(), node=os.environ.get("SLURMD_NODENAME", ""))
        while True:
            held = ProcReader().status(os.getpid()) if self.forks else None
            try:
                pid, self.is_forked = spawn(self.job, self.job_dir, self.group, forks=self.forks)
            except OSError as error:
                cause = f"could not be started: {error.strerror or error} ({error.filename})"
                return replace(self._not_started("failed", cause, "job"), started=started)
            monitor = Monitor(
                self.run_dir,
                self.job,
                replace(known, pid=pid),
                self.group,
                first,
                older,
                inherited_bytes=held.held if held is not None and self.is_forked else 0,
            )
            monitor.open_series()
            returncode, stopped_by = self.follow(pid, monitor)
            is_asked = stopped_by is not None or self.stop.since is not None
            # One that crashed, not from memory, before it did anything: a fork may not suit it.
            has_crashed = -returncode in _CRASHES and monitor.known.phase in (None, "load")
            if is_asked or not (self.is_forked and has_crashed):
                return self._close(monitor, before, returncode, stopped_by)
            print(f"signal {-returncode} before its first step: starting a new interpreter", file=sys.stderr)
            end_children()
            self.forks = False

    def _not_started(self, state: State, cause: str, ended_by: EndedBy) -> JobStatus:
        if self.group is not None:
            end_group(self.group, keep=bool(self.job["keeps_group"]))
        status = JobStatus(self.job_dir.name, "pending", attempt=self.attempt, asked=self.stop.is_asked)
        return status.ended_as(state, cause, ended_by)

    def write(self, status: JobStatus) -> None:
        with contextlib.suppress(OSError):
            write_atomic(self.job_dir / STATUS, json.dumps(status.to_dict()) + "\n", durable=False)

    def follow(self, pid: int, monitor: Monitor) -> tuple[int, str | None]:
        """Watch until the job's process has ended; return its exit code and the signal that memfit ended it with."""
        stopped_by, next_tick = None, 0.0
        while True:
            monitor.observe()
            self.stop.read_request()
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + STATUS_SECONDS
                self.write(monitor.status())
            with until_next_look():
                self._end_starved(monitor, now)
            if self.stop.since is not None and stopped_by is None and (code := end_of(pid, 0)) is not None:
                return code, None  # by itself, before it was asked
            stopped_by = self.pass_on_stop(pid, stopped_by)
            monitor.note(asked=self.stop.is_asked)
            if (returncode := end_of(pid, _SAMPLE_SECONDS)) is not None:
                return returncode, stopped_by

    def pass_on_stop(self, pid: int, sent: str | None) -> str | None:
        """Pass a request to stop on; return the strongest signal that was sent so far."""
        stop = self.stop
        if stop.since is None:
            return None
        # It is reaped by this process alone, so that its number is still its own.
        if stop.is_over(self.grace_seconds):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            return "SIGKILL"
        if sent is None:
            self.asked = stop_targets(pid)
            for one in self.asked:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(one, signal.SIGTERM)
        return "SIGTERM"

    def _end_starved(self, monitor: Monitor, now: float) -> None:
        if self.unsupervised is None or self.stop.now:
            return
        if reason := self.unsupervised.look(monitor.state, now):
            self.stop.reason = "" if self.stop.since is not None else reason
            self.stop.now = True
            self.stop.begin()

    def _close(self, monitor: Monitor, before: Counters, returncode: int, stopped_by: str | None) -> JobStatus:
        """End what is left, gather the evidence, and say why the job ended."""
        self.write(replace(monitor.status(), pid=None))  # its number may be another's soon
        resident_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * KIB
        if stopped_by == "SIGTERM":  # those whom a shell ran, and who were asked too, use what is left of the grace
            codes = wait_for(self.asked - {monitor.known.pid or 0}, lambda: self.stop.is_over(self.grace_seconds))
            returncode = StoppedError.exit_code if StoppedError.exit_code in codes else returncode
        monitor.observe()
        left = end_children()
        if self.group is not None and self.group.pids():
            self.group.kill()
        remove_segments(monitor.meter.pids_seen | left, since=monitor.known.started or 0.0)
        if monitor.series is not None:
            with contextlib.suppress(OSError):
                monitor.series.close()
        evidence, left_bytes = self._group_evidence(monitor, resident_bytes)
        status = monitor.status()
        state: State = "completed"
        ended_by: EndedBy = "job"
        cause = ""
        if returncode != 0 or self.job["target"] is not None or self.stop.since is not None:
            death = outlast(lambda: self._death(monitor, before, returncode, stopped_by))
            state, cause, ended_by = explain_death(death)
            counters = {"before": death.counters_before.to_dict(), "after": death.counters_after.to_dict()}
            place = memory_place(death)
            evidence |= {
                "oom_kills": counters,
                "place": place,
                "ran_out_by": monitor.growing.explain(place == "device"),
            }
            if returncode and (lost := read_lost(self.job_dir)):
                evidence["rank"], cause = lost["rank"], f"{lost['text']}: {cause}"
        notes = [
            f"{len(left)} process(es) that it left running were ended" if left else "",
            f"it left {format_bytes(left_bytes)} in /dev/shm or another tmpfs" if left_bytes >= _LEFT_BYTES else "",
        ]
        cause = "; ".join(filter(None, (cause, *notes)))
        if self.group is not None:
            end_group(self.group, keep=bool(self.job["keeps_group"]))
        used = resource.getrusage(resource.RUSAGE_CHILDREN)  # it reaps also what its job left
        seconds = round(used.ru_utime + used.ru_stime, 3)
        status = replace(status, exit_code=returncode, evidence=evidence, cpu_seconds=seconds, asked=self.stop.is_asked)
        return status.ended_as(state, cause, ended_by)

    def _group_evidence(self, monitor: Monitor, resident_bytes: int) -> tuple[dict[str, Any], int]:
        """Return the evidence of the job's group, and the shared memory that is still charged to it."""
        evidence: dict[str, Any] = {"start": "warm"} if self.is_forked else {}
        if self.job["data_limit_bytes"] is not None:
            evidence["data_limit_bytes"] = self.job["data_limit_bytes"]
        state = self.group.state() if self.group is not None else None
        # What a process inherited by fork counts as its peak too, so that one below this one's is only a bound.
        is_bound = resident_bytes <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        monitor.note_last_peak(resident_bytes, state, is_bound=is_bound)
        if self.group is None or state is None:
            return evidence, 0
        # A burst between two samples shows here alone; what is cache still was so all the time, or was no burst.
        monitor.note_refusals(state, max(monitor.peak_bytes, state.charged_peak - state.cache_bytes))
        evidence |= {
            "group": self.group.name,
            "wall_bytes": state.wall_bytes,
            "charged_peak_bytes": state.charged_peak,
            "met_wall": state.met_wall - (monitor.first.met_wall if monitor.first else 0),
            "left_shared_memory_bytes": state.shared_memory_bytes,
        }
        return evidence, state.shared_memory_bytes

    def _death(self, monitor: Monitor, before: Counters, returncode: int, stopped_by: str | None) -> Death:
        refused = "its limit" if monitor.known.wants_more else ""
        if self.job["data_limit_bytes"] is not None:
            refused = f"its limit of {format_bytes(self.job['data_limit_bytes'])} of data"
        # What it said may repeat its arguments and variables.
        ends = {path.name: read_end(path, start) for path, start in self.logs.items()}
        said = {"error": read_error(self.job_dir / ERROR), "end": ends["err.log"]}
        said = mask({name: self.job.get(name) for name in ("command", "params", "env")} | said)
        if self.stop.since is not None and not self.stop.is_asked:
            stopped_by = stopped_by or "SIGTERM"  # a platform may have asked the job itself, too
        is_done = (self.job_dir / RESULT).exists()
        if self.job["target"] is None:
            is_done = not stopped_by or monitor.has_trained or self._has_result(monitor.known.started or 0.0)
            is_done = is_done or any(map(shows_last_epoch, ends.values()))
        return Death(
            returncode=returncode,
            stopped_by=stopped_by,
            counters_before=before,
            counters_after=Counters.read(self.group),
            error=said["error"],
            is_done=is_done,
            peak_bytes=monitor.peak_bytes,
            phase=monitor.known.phase,
            refused=refused,
            met_above=self.group.first_met() if returncode and self.group is not None else "",
            last_words=said["end"] if returncode else "",
            starved=self.stop.reason,
            is_asked=self.stop.is_asked,
        )

    def _has_result(self, since: float) -> bool:
        """Return whether a command wrote its result since then."""
        name = self.job_dir.name
        folders = [self.run_dir.manifest_path(stage, name).with_suffix("") for stage in ("", name)]
        return any(one.stat().st_mtime >= since for folder in folders for one in folder.glob("result.json"))


# Several nodes


def make_nodes(job_dir: Path, order: Mapping[str, Any], generation: int) -> Path:
    """Write the orders of the nodes' shims; return their folder, a new one for each generation of ranks."""
    folder = job_dir / (f"nodes_{order['attempt']}" + f"_{generation}" * bool(generation))
    (folder / "events").mkdir(parents=True, exist_ok=True)
    num_nodes, ranks = order["num_nodes"], order["ranks"]
    # torchrun takes these for its arguments. Source: torch.distributed.run, the action "env" of its parser.
    rendezvous = {
        "PET_NNODES": str(num_nodes),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ID": os.environ["SLURM_JOB_ID"],
        "PET_RDZV_ENDPOINT": f"{socket.gethostname()}:{free_port()}",
        "PET_MAX_RESTARTS": "0",
    } | ({"MEMFIT_GENERATION": str(generation)} if ranks > 1 else {})
    for index in range(num_nodes):
        path = folder / "jobs" / f"node_{index}"
        path.mkdir(parents=True, exist_ok=True)
        own = {"id": path.name, "node": index, "num_nodes": 1, "num_devices": order["num_devices"] // num_nodes}
        if ranks > 1:
            own["threads"] = max(1, order["threads"] // num_nodes)
        write_masked(path / JOB, {**order, **own, "env": rendezvous | order["env"]}, durable=False)
    return folder


class NodesShim(Shim):
    """Starts a shim on each node, and is one job to the supervisor: the peak is that of the node that took most. If a
    rank is lost, all begin again in another step of the same allocation."""

    def __init__(self, job: Mapping[str, Any], job_dir: Path, stop: Stop, *, forks: bool = False) -> None:
        self.order, self.generation, self.headway = job, 0, Headway(CANARY_VARIABLE in job["env"])
        self._was_lost = False
        super().__init__(self._make_step(job_dir), job_dir, stop)

    def _make_step(self, job_dir: Path) -> dict[str, Any]:
        self._look_at, self._lost_at = 0.0, math.inf
        self.folder = make_nodes(job_dir, self.order, self.generation)
        # Ranks leave by themselves once one is lost, and say what they saw.
        ends = ("--kill-on-bad-exit=0", "--wait=0") if self.has_ranks else ("--kill-on-bad-exit=1", "--wait=60")
        shim = (sys.executable, "-P", "-m", "memfit.jobs", "shim", str(self.folder), "--node")
        return {**self.order, "command": ["srun", *self.order["step"], *ends, *shim], "target": None, "ranks": 1}

    @property
    def has_ranks(self) -> bool:
        return int(self.order["ranks"]) > 1

    def run(self) -> JobStatus:
        status, ends = super().run(), self._ends()
        if not ends:
            return status
        worst = _worst(ends)
        for name, node in ((RESULT, "node_0"), (ERROR, worst)):
            with contextlib.suppress(OSError):
                shutil.copyfile(self.folder / "jobs" / node / name, self.job_dir / name)
        end, status = ends[worst], self._merged(status)
        if self._was_lost and end.state != "out_of_memory" and (gone := self._without_end(ends)):
            cause = f"{', '.join(gone)} failed: its ranks left no outcome, and those of the other nodes lost them"
            return replace(status, state="node_fail", cause=cause, ended_by="platform")
        if end.state == "completed" or self.stop.since is not None:
            return status
        cause = f"{end.node or worst}: {end.cause}"
        return replace(status, state=end.state, cause=cause, ended_by=end.ended_by, evidence=end.evidence)

    def follow(self, pid: int, monitor: Monitor) -> tuple[int, str | None]:
        while True:
            returncode, stopped_by = super().follow(pid, monitor)
            self._take_logs()
            if self.stop.since is not None or not self._begins_again():
                self._was_lost |= self.has_ranks and stopped_by is None  # all ended before a stop was passed on
                return returncode, stopped_by
            self.generation += 1
            self.job = self._make_step(self.job_dir)
            pid, _ = spawn(self.job, self.job_dir, self.group)
            monitor.note(pid=pid)

    def _begins_again(self) -> bool:
        """Return whether the ranks begin again after a loss, and say so."""
        ends = self._ends()
        if not self.has_ranks or len(ends) < self.order["num_nodes"]:  # a node is gone: another allocation is needed
            return False
        end = ends[_worst(ends)]
        beats = read_beats(self.folder / RANKS / f"{self.attempt}_{self.generation}").values()
        if end.state != "failed" or not self.headway.begins_again(beats, end.exit_code):
            return False
        text = (
            f"{end.node}: {end.cause}. All {self.order['ranks']} ranks begin again from the last checkpoint "
            f"(generation {self.generation + 1})"
        )
        events = EventWriter(self.run_dir.events_dir, self.job_dir.name)
        events.write("ranks_again", generation=self.generation + 1, text=f"{self.job_dir.name} {text}")
        events.close()
        return True

    def _take_logs(self) -> None:
        for log in ("out.log", "err.log"):
            for path in self._files(log):
                with contextlib.suppress(OSError), open_own(path) as own, open(self.job_dir / log, "ab") as file:
                    shutil.copyfileobj(own, file)

    def _files(self, name: str) -> list[Path]:
        """Return the files of this name that the nodes have; other hosts write them, so none is taken for absent."""
        found = [folder / name for folder in sorted(self.folder.glob("jobs/*")) if refresh(folder)]
        return [path for path in found if path.exists()]

    def _ends(self) -> dict[str, JobStatus]:
        found = outlast(lambda: [read_record(path) for path in self._files(OUTCOME)])
        return {end.job_id: end for end in found if end is not None}

    def _without_end(self, ends: Mapping[str, JobStatus]) -> list[str]:
        """Return the nodes whose shims wrote no outcome: they were killed with all else there, or never began."""
        folders = [path.parent for path in self._files(JOB) if path.parent.name not in ends]
        known = [(folder.name, read_record(folder / STATUS)) for folder in folders]
        return [one.node if one is not None and one.node else name for name, one in known]

    def _merged(self, status: JobStatus) -> JobStatus:
        """Return the job's status with the memory of the node that takes most, in each phase too."""
        files = [*self._files(STATUS), *self._files(OUTCOME)]
        nodes = [one for path in files if (one := read_record(path)) is not None]
        if not nodes:
            return status
        sizes = [one.footprint for one in nodes if one.footprint is not None]
        every = [{**one, "node": node.node} for node in nodes for one in node.ranks]
        ranks = {one["rank"]: one for one in sorted(every, key=itemgetter("peak_bytes"))}
        devices = {uuid: held for one in nodes for uuid, held in one.device_used_bytes.items()}
        return replace(
            status,
            device_used_bytes=devices,
            ranks=[ranks[rank] for rank in sorted(ranks)],
            used_bytes=max(one.used_bytes for one in nodes),
            peak_bytes=max(one.peak_bytes for one in nodes),
            footprint=functools.reduce(Footprint.merge, sizes) if sizes else None,
            growth=next((one.growth for one in nodes if one.growth), {}),
            node=f"{self.order['num_nodes']} nodes",
        )

    def write(self, status: JobStatus) -> None:
        with contextlib.suppress(OSError):
            super().write(self._merged(status))

    def pass_on_stop(self, pid: int, sent: str | None) -> str | None:
        """Ask the nodes' shims to stop, and end ``srun`` only after them."""
        if self.stop.since is None:
            self._end_late()
            return None
        if sent is None:  # of a node that is gone Slurm may tell, by this stop, just when the others noticed it
            ended = self.has_ranks and any(end.state == "failed" for end in self._ends().values())
            self._was_lost = ended or self._lost_at < math.inf
        is_over = self.stop.is_over(self.grace_seconds)
        word = "SIGKILL" if is_over else "SIGTERM"
        if word != sent:
            for path in self._files(JOB):
                ask_to_stop(path.parent, now=is_over)
        return word

    def _end_late(self) -> None:
        """End the ranks of nodes that have not left a while after those of another node."""
        now = time.monotonic()
        if not self.has_ranks or now < self._look_at:
            return
        self._look_at, ends = now + 1.0, self._ends()
        if any(end.state != "completed" for end in ends.values()):
            self._lost_at = min(self._lost_at, now)
        if now - self._lost_at > LEAVING_SECONDS:
            for path in self._files(JOB):
                if path.parent.name not in ends:
                    ask_to_stop(path.parent, now=True)


def _worst(ends: Mapping[str, JobStatus]) -> str:
    """Return the node whose end is told of all: of ranks, the one where the first was lost."""
    return min(
        ends,
        key=lambda name: (
            _FIRST.index(ends[name].state),
            ends[name].exit_code == PeerFailedError.exit_code,
            ELSEWHERE in (ends[name].cause or ""),
            ends[name].ended or 0.0,
            name,
        ),
    )


# How a shim starts


def main(job_dir: Path, lock: int | None = None, *, forks: bool = False) -> int:
    """Run the job whose folder this is, as its ``job.json`` says; return its exit code, or 128 + n for signal n.
    Starting it again is harmless: an attempt that has ended is not run twice, and one that runs is left alone (0)."""
    if lock is None and (lock := lock_file(job_dir / LOCK)) is None:
        return 0
    os.set_inheritable(lock, False)  # or the lock would live as long as any process of the job
    status = read_record(job_dir / OUTCOME) or _run(job_dir, forks)
    with contextlib.suppress(OSError):
        if not (log := job_dir / "shim.log").stat().st_size:
            log.unlink()
    if status.exit_code is None:
        return 1
    return status.exit_code if status.exit_code >= 0 else 128 - status.exit_code


def run_element(run_dir: Path, array: Path) -> int:
    """Run the job of an element of a Slurm array, unless it has a later attempt; return its exit code."""
    found = read_json(array, {"jobs": [[(str, int)]]}) or {"jobs": []}
    job_id, attempt = found["jobs"][int(os.environ["SLURM_ARRAY_TASK_ID"])]
    order = read_whole(job_dir / JOB) if refresh(job_dir := run_dir / "jobs" / job_id) else None
    return main(job_dir) if order is not None and order["attempt"] == attempt else 0


def _run(job_dir: Path, forks: bool) -> JobStatus:
    job = read_whole(job_dir / JOB)
    if job is None:
        raise UsageError(
            f"{job_dir / JOB} is missing.",
            rule="a shim runs the job that this file describes.",
            remedy="have the supervisor start the job: memfit resume RUN",
        )
    stop, kind = Stop(job_dir), NodesShim if job.get("num_nodes", 1) > 1 else Shim
    become_subreaper()
    status = kind(job, job_dir, stop, forks=forks).run()
    write_outcome(job_dir, status)
    return status


def run_node(folder: Path) -> int:
    return main(folder / "jobs" / f"node_{os.environ['SLURM_NODEID']}")
