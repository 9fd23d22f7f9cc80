"""The small process beside each local job: it owns the job's watch and its outcome.

The keeper forks it. It starts the job's process in the job's control group, samples the memory of the whole tree ten
times a second, follows its events, passes a request to stop on to it, ends what it leaves behind, and writes
``outcome.json``. It holds ``lock`` in the job's folder as long as it lives, so that a supervisor that starts anew knows
a running job from a dead one by the lock, not by a process id. It imports the standard library only.

Signals: SIGTERM asks the job to checkpoint and end, and ends it after a grace; SIGQUIT ends it now. The file
``stop_requested`` in the job's folder does the same, at once when it says ``now``.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.errors import DamagedError, StoppedError
from memfit.jobs._child import ERROR, ERROR_SHAPE, RESULT
from memfit.jobs._death import Counters, Death, explain, place_of, read_kernel_line
from memfit.jobs._job import STATES
from memfit.jobs._leftovers import end_children, remove_segments, stop_targets, wait_for
from memfit.jobs._lock import JOB, OUTCOME, STATUS, STOP_REQUESTED, VERDICT, JobLock, complain
from memfit.jobs._orphan import OrphanWatch
from memfit.jobs._start import become_subreaper, start
from memfit.jobs._watch import STATUS_SECONDS, Watch
from memfit.masking import mask
from memfit.memory import JobGroup
from memfit.rundir import RunDir, read_json, read_whole, write_atomic
from memfit.units import MIB, format_bytes

#: A job is sampled so often, from a certain age on: to look at one costs as much as a brief one itself.
SAMPLE_SECONDS, _FIRST_SAMPLE_SECONDS = 0.1, 0.25
#: A job that lived less leaves no series and no status.
_BRIEF_SECONDS = 0.5
#: The outcome of a job that ran less is not forced to disk: it is run again sooner than that takes.
_DURABLE_SECONDS = 2.0
#: How long a job that was asked to end waits for a full disk to take its outcome.
_FULL_SECONDS = 30.0
#: Less shared memory than that may be the kernel's lag in counting.
_LEFT_BYTES = MIB
#: A disk with less than that is full: some keep a few blocks for themselves.
_FULL_BYTES = 64 << 10
#: The shim's own exit code when another shim holds the job.
BUSY = 4
_VERDICT_SHAPE = {"state": frozenset(STATES), "cause": str}


def prepare() -> None:
    """Do once, before the first fork, what every shim would do again."""
    Counters.read()


class _Stop:
    """Set by signals and by the watch itself: ask (SIGTERM) or now (SIGQUIT)."""

    def __init__(self) -> None:
        self.asked_at: float | None = None
        self.now = False
        #: Why the watcher itself ends the job; nobody asked for that.
        self.reason = ""
        signal.signal(signal.SIGTERM, self.ask)
        signal.signal(signal.SIGQUIT, self.at_once)
        # Not SIG_IGN, which the job would inherit.
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGHUP, lambda *_: None)

    def ask(self, *_: object) -> None:
        self.asked_at = self.asked_at or time.monotonic()

    def at_once(self, *_: object) -> None:
        self.asked_at, self.now = self.asked_at or time.monotonic(), True

    def is_over(self, grace_seconds: float) -> bool:
        """Whether the job has to end now: that was asked for, or the grace is over."""
        return self.now or (self.asked_at is not None and time.monotonic() - self.asked_at > grace_seconds)

    def read_request(self, job_dir: Path) -> None:
        """Obey the file that asks for a stop."""
        with contextlib.suppress(OSError):
            text = (job_dir / STOP_REQUESTED).read_text()
            (self.at_once if text.strip() == "now" else self.ask)()


def main(job_dir: Path) -> int:
    """Run the job whose folder this is; 0 when its outcome is written, whatever that outcome is."""
    lock = JobLock.take(job_dir)
    if lock is None:
        return BUSY
    try:
        return _main(job_dir, lock)
    finally:
        lock.release()


def _main(job_dir: Path, lock: JobLock) -> int:
    if os.access(f"{job_dir}/{OUTCOME}", os.F_OK):  # ordered twice, when a keeper died, and over already
        return 0
    job = read_whole(job_dir / JOB)
    if job is None:
        complain(f"{job_dir}/{JOB} is missing")
        return 1
    stop = _Stop()
    become_subreaper()
    lock.patiently(lambda: lock.tell(attempt=int(job["attempt"])))
    shim = _Shim(job, job_dir, lock, stop)
    outcome = shim.run()
    is_durable = time.time() - outcome["started"] > _DURABLE_SECONDS
    # Whoever asked for its end does not wait for a disk for ever: without an outcome it runs again.
    lock.patiently(
        lambda: write_atomic(f"{job_dir}/{OUTCOME}", json.dumps(outcome) + "\n", durable=is_durable),
        gives_up=lambda: stop.asked_at is not None and time.monotonic() - stop.asked_at > _FULL_SECONDS,
    )
    (job_dir / STATUS).unlink(missing_ok=True)
    return 0


class _Shim:
    """One job from its start to its outcome."""

    def __init__(self, job: Mapping[str, Any], job_dir: Path, lock: JobLock, stop: _Stop) -> None:
        self.job, self.job_dir, self.lock, self.stop = job, job_dir, lock, stop
        self.run_dir = RunDir(job_dir.parent.parent)
        self.group = JobGroup.at(Path(job["group"])) if job["group"] else None
        self.orphan = OrphanWatch(self.run_dir.path, self.group) if self.group else None
        self.attempt, self.grace_seconds = int(job["attempt"]), float(job["grace_seconds"])
        self.env_differs: dict[str, Any] = {}
        #: The processes that were asked to stop.
        self.told: set[int] = set()

    def run(self) -> dict[str, Any]:
        """Start the job, watch it to its end, and explain that end."""
        started, is_first = time.time(), self.attempt == 1
        # A group that was never used has met nothing; the first attempt's files are all its own.
        before = Counters(0, self.group.path.name) if self.group and is_first else Counters.read(self.group)
        state = self.group.state() if self.group and not is_first else None
        older = frozenset[Path]() if is_first else frozenset(self.run_dir.events_dir.glob("*.jsonl"))
        try:
            pid = self.lock.patiently(
                lambda: start(self.job, self.job_dir, self.group, lambda: self.stop.is_over(self.grace_seconds)),
                gives_up=lambda: self.stop.asked_at is not None,
            )
        except OSError as error:
            self._remove_group()
            cause = f"could not be started: {error.strerror or error} ({error.filename})"
            ended = {"started": started, "ended": time.time(), "attempt": self.attempt}
            return {"state": "failed", "cause": cause, **ended, "asked": self.stop.asked_at is not None}
        with contextlib.suppress(OSError):
            self.lock.tell(job_pid=pid, started=started)
        watch = Watch(
            run=self.run_dir,
            job_id=str(self.job["id"]),
            phases=tuple(self.job["phases"]),
            pid=pid,
            group=self.group,
            attempt=self.attempt,
            started=started,
            met_before=state.met_wall if state else 0,
            older=older,
        )
        returncode, stopped_by = self._follow(watch)
        return self._close(watch, before, returncode, stopped_by)

    def _follow(self, watch: Watch) -> tuple[int, str | None]:
        """Watch until the job's process has ended; its exit code, and the signal that memfit ended it with."""
        waiter = _Waiter(watch)
        stopped_by = self._obey(watch, None)
        status_at = first_at = watch.born + _BRIEF_SECONDS
        seconds = _FIRST_SAMPLE_SECONDS
        while (returncode := waiter.wait(seconds)) is None:
            seconds = SAMPLE_SECONDS
            watch.observe()
            now = time.monotonic()
            if now >= status_at:
                self._tick(watch, is_first=status_at == first_at)
                status_at = now + STATUS_SECONDS
            self._see_to_orphan(watch, now)
            stopped_by = self._obey(watch, stopped_by)
        return returncode, stopped_by

    def _obey(self, watch: Watch, sent: str | None) -> str | None:
        """Pass a request to stop on; the strongest signal that was sent so far."""
        stop = self.stop
        if stop.asked_at is None:
            return None
        watch.asked = not stop.reason
        # It is reaped by this process alone, so that its number is still its own.
        if stop.is_over(self.grace_seconds):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(watch.pid, signal.SIGKILL)
            return "SIGKILL"
        if sent is None:
            self.told = stop_targets(watch.pid)
            for pid in self.told:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGTERM)
        return "SIGTERM"

    def _wait_for_told(self, watch: Watch, returncode: int, stopped_by: str | None) -> int:
        """Let those whom a shell ran, and who were asked to stop too, use what is left of the grace."""
        left = self.told - {watch.pid}
        if stopped_by != "SIGTERM" or not left:
            return returncode
        codes = wait_for(left, lambda: self.stop.is_over(self.grace_seconds))
        return StoppedError.exit_code if StoppedError.exit_code in codes else returncode

    def _tick(self, watch: Watch, *, is_first: bool) -> None:
        """What is due twice a second once the job has lived a while."""
        if is_first:
            watch.open_series(self.job_dir / f"memory{'' if self.attempt == 1 else f'_{self.attempt}'}.arrows")
            self._check_env(watch.pid)
        self.stop.read_request(self.job_dir)
        watch.guess_phase()
        watch.measure_cpu()
        watch.look_for_stopped()
        try:
            write_atomic(self.job_dir / STATUS, json.dumps(watch.status()) + "\n", durable=False)
        except OSError as error:
            if not self.lock.holder.note:
                with contextlib.suppress(OSError):
                    self.lock.tell(note=f"its status cannot be written: {error.strerror}")
            return
        if self.lock.holder.note:
            with contextlib.suppress(OSError):
                self.lock.tell(note="")

    def _see_to_orphan(self, watch: Watch, now: float) -> None:
        if self.orphan is None or self.stop.now:
            return
        if reason := self.orphan.look(watch.state, now):
            self.stop.reason = "" if self.stop.asked_at is not None else reason
            self.stop.at_once()

    def _check_env(self, pid: int) -> None:
        """Record the variables that memfit set as the job's process really has them."""
        try:
            content = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return
        real = dict(line.split("=", 1) for line in os.fsdecode(content).split("\0") if "=" in line)
        wanted = self.job["env"]
        self.env_differs = mask({name: real.get(name) for name, value in wanted.items() if real.get(name) != value})
        for name, value in self.env_differs.items():
            complain(f"{name} is {value!r} in the job, not {mask(wanted)[name]!r} as set")
        with contextlib.suppress(OSError):
            found = mask({name: real.get(name) for name in wanted})
            write_atomic(self.job_dir / "environ.json", json.dumps(found, indent=2) + "\n", durable=False)

    def _close(self, watch: Watch, before: Counters, returncode: int, stopped_by: str | None) -> dict[str, Any]:
        """End what is left, gather the evidence, and say why the job ended."""
        returncode = self._wait_for_told(watch, returncode, stopped_by)
        if watch.meter is not None:
            watch.observe()
            watch.write_series()
        left = end_children(lambda: (watch.meter.pids if watch.meter else set()) - {os.getpid(), watch.pid})
        if self.group is not None and self.group.pids():
            self.group.kill()
        with contextlib.suppress(OSError):
            self.lock.tell(job_pid=None)  # its number may be another's soon
        remove_segments(watch.pids | left, since=watch.started)
        if watch.series is not None:
            with contextlib.suppress(OSError):
                watch.series.close()
        evidence, left_bytes = self._group_evidence(watch, returncode)
        status = watch.status()
        if returncode == 0 and self.job["target"] is None and not left and left_bytes < _LEFT_BYTES:
            state, cause = "completed", ""
        else:
            death = self._death(watch, before, returncode, stopped_by)
            state, cause = explain(death)
            counters = {"before": death.counters_before.to_dict(), "after": death.counters_after.to_dict()}
            evidence |= {"oom_kills": counters, "place": place_of(death)}
            notes = [
                f"{len(left)} process(es) that it left running were ended" if left else "",
                f"it left {format_bytes(left_bytes)} in /dev/shm or another tmpfs" if left_bytes >= _LEFT_BYTES else "",
            ]
            cause = "; ".join(filter(None, (cause, *notes)))
            # Its last words may repeat its arguments.
            cause = mask({"command": self.job["command"], "params": self.job.get("params"), "cause": cause})["cause"]
        self._remove_group()
        ended = {"state": state, "ended": time.time(), "exit_code": returncode, "cause": cause, "evidence": evidence}
        now_nothing = {"used_bytes": 0, "pss_bytes": 0, "stalled": False, "stopped_pid": None, "wanted_cpus": 0.0}
        used = resource.getrusage(resource.RUSAGE_CHILDREN)  # it reaps also what its job left
        ended["cpu_seconds"] = round(used.ru_utime + used.ru_stime, 3)
        asked = self.stop.asked_at is not None and not self.stop.reason
        return status | ended | now_nothing | {"asked": asked}

    def _group_evidence(self, watch: Watch, returncode: int) -> tuple[dict[str, Any], int]:
        """What the job's group tells at the end, and the shared memory that is still charged to it."""
        evidence: dict[str, Any] = {"env_differs": self.env_differs} if self.env_differs else {}
        if self.job["data_limit_bytes"] is not None:
            evidence["data_limit_bytes"] = self.job["data_limit_bytes"]
        # What is charged to it still is memory that outlives its processes, or page cache.
        is_plain = returncode == 0 and watch.meter is None
        if self.group is None:
            return evidence, 0
        charged_peak = self.group.charged_peak()
        if is_plain and self.group.charged_bytes() < _LEFT_BYTES:
            watch.bound_peak(charged_peak, cache_bytes=0)
            return evidence | {"charged_peak_bytes": charged_peak}, 0
        if (state := self.group.state()) is None:
            return evidence, 0
        cache = state.charged_bytes - state.used_bytes
        watch.bound_peak(charged_peak, cache)
        # A burst between two samples shows here alone; what is cache still was so all the time, or was no burst.
        watch.note_refusals(state, max(watch.peak_bytes, charged_peak - cache))
        evidence |= {
            "group": self.group.name,
            "wall_bytes": state.wall_bytes,
            "charged_peak_bytes": charged_peak,
            "met_wall": state.met_wall - watch.met_before,
            "left_shared_memory_bytes": state.shared_memory_bytes,
        }
        return evidence, state.shared_memory_bytes

    def _death(self, watch: Watch, before: Counters, returncode: int, stopped_by: str | None) -> Death:
        refused = "its wall" if watch.wants_more else ""
        if self.job["data_limit_bytes"] is not None:
            refused = f"its limit of {format_bytes(self.job['data_limit_bytes'])} of data"
        after = Counters.read(self.group)
        needs_log = returncode == -signal.SIGKILL and stopped_by != "SIGKILL" and after.own is None
        reason = {"state": "out_of_memory", "cause": self.stop.reason} if self.stop.reason else None
        return Death(
            returncode=returncode,
            stopped_by=stopped_by,
            counters_before=before,
            counters_after=after,
            error=_read_left(self.job_dir / ERROR, ERROR_SHAPE),
            has_result=self.job["target"] is None or (self.job_dir / RESULT).exists(),
            peak_bytes=watch.peak_bytes,
            phase=watch.phase,
            refused=refused,
            met_above=self.group.first_met() if returncode and self.group is not None else "",
            last_words=_read_end(self.job_dir / "err.log") if returncode else "",
            kernel_line=read_kernel_line(watch.pid, watch.born) if needs_log else "",
            full_disk=str(self.job_dir) if _is_full(self.job_dir) else "",
            verdict=reason or _read_left(self.job_dir / VERDICT, _VERDICT_SHAPE),
        )

    def _remove_group(self) -> None:
        if self.group is not None and not self.job["keeps_group"]:
            self.group.remove()


def _read_left(path: Path, shape: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        return read_json(path, shape)
    except DamagedError as error:  # torn by a full disk
        complain(str(error))
        return None


def _is_full(folder: Path) -> bool:
    """Return whether a disk has next to nothing left for this user; a quota does not show here."""
    disk = os.statvfs(folder)
    free = disk.f_bavail if os.geteuid() else disk.f_bfree
    return bool(disk.f_blocks) and free * disk.f_frsize < _FULL_BYTES


def _read_end(path: Path) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        return file.read().decode(errors="replace")
    return ""


class _Waiter:
    """Waits for the end of a job's process."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self._poll = watch, select.poll()
        self._pidfd = os.pidfd_open(watch.pid) if hasattr(os, "pidfd_open") else None
        if self._pidfd is not None:
            self._poll.register(self._pidfd, select.POLLIN)

    def wait(self, seconds: float) -> int | None:
        """The exit code when the end came in so many seconds; without pidfds it is seen one sample late."""
        self._poll.poll(seconds * 1000)
        pid, status, used = os.wait4(self._watch.pid, os.WNOHANG)
        if pid == 0:
            return None
        if self._pidfd is not None:
            os.close(self._pidfd)
        unit = 1024 if sys.platform == "linux" else 1
        self._watch.resident_peak_bytes = used.ru_maxrss * unit
        # What it inherited by fork counts as its peak too, so that a lower one than this process's own tells nothing.
        if used.ru_maxrss > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss:
            self._watch.own_peak_bytes = used.ru_maxrss * unit
        return os.waitstatus_to_exitcode(status)
