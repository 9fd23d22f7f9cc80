"""Watches one job from its start to its outcome, beside it: what a shim does."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.errors import StoppedError
from memfit.files import outlast, read_own, until_next_look, write_atomic
from memfit.jobs._child import ERROR, RESULT
from memfit.jobs._death import Counters, Death, explain_death, memory_place, read_end, read_error, shows_last_epoch
from memfit.jobs._folder import STOP_REQUESTED
from memfit.jobs._fork import end_of, stop_targets
from memfit.jobs._monitor import STATUS_SECONDS, Monitor, Unsupervised
from memfit.jobs._processes import end_children, end_group, remove_segments, spawn, wait_for
from memfit.jobs._ranks import read_lost
from memfit.masking import mask
from memfit.memory import JobGroup, ProcReader
from memfit.rundir import STATUS, EndedBy, JobStatus, RunDir, State
from memfit.units import KIB, MIB, format_bytes

_SAMPLE_SECONDS = 0.1
_LEFT_BYTES = MIB  # less may be the kernel's lag in counting
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


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
            evidence |= {"oom_kills": counters, "place": memory_place(death)}
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
        # What a process inherited by fork counts as its peak too, so that a lower one than this one's tells nothing.
        if resident_bytes <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB:
            resident_bytes = 0
        if self.group is None or state is None:
            monitor.note_last_peak(resident_bytes, None)
            return evidence, 0
        # What is charged to it still is memory that outlives its processes, or page cache.
        charged_peak, cache = self.group.charged_peak(), state.charged_bytes - state.used_bytes
        monitor.note_last_peak(resident_bytes, charged_peak - cache)
        # A burst between two samples shows here alone; what is cache still was so all the time, or was no burst.
        monitor.note_refusals(state, max(monitor.peak_bytes, charged_peak - cache))
        evidence |= {
            "group": self.group.name,
            "wall_bytes": state.wall_bytes,
            "charged_peak_bytes": charged_peak,
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
