"""The small process beside each local job: it owns the job's watch and its outcome.

It starts by itself: ``python -m memfit.jobs shim RUN_DIR --job ID``. It starts the job's process in the job's control
group, samples the memory of the whole tree ten times a second, follows its events, passes a request to stop on to it,
ends what it leaves behind, and writes ``outcome.json``. It holds ``lock`` in the job's folder as long as it lives, so
that a supervisor that starts anew knows a running job from a dead one by the lock, not by a process id. It imports the
standard library only.

Signals: SIGTERM asks the job to checkpoint and end, and ends it after a grace; SIGQUIT ends it now. The files
``cancel.json`` and ``stop_requested`` in the job's folder do the same, and tell that memfit or its user asked.
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

from memfit.errors import DamagedError, StoppedError, UsageError
from memfit.jobs._child import ERROR, ERROR_SHAPE, RESULT
from memfit.jobs._death import Counters, Death, explain, place_of, read_kernel_line
from memfit.jobs._job import STATES
from memfit.jobs._leftovers import end_children, remove_segments, stop_targets, wait_for
from memfit.jobs._lock import CANCEL, JOB, OUTCOME, STATUS, STOP_REQUESTED, JobLock, complain
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
#: Less shared memory than that may be the kernel's lag in counting.
_LEFT_BYTES = MIB
#: A disk with less than that is full: some keep a few blocks for themselves.
_FULL_BYTES = 64 << 10
_CANCEL_SHAPE = {"now": bool, "state": (frozenset(STATES), type(None)), "cause": (str, type(None))}


class _Stop:
    """Why the job is to end, and how soon.

    memfit and its user ask by a file (``cancel.json``, ``stop_requested``). A signal alone is the platform's.
    """

    def __init__(self, job_dir: Path) -> None:
        self._job_dir = job_dir
        self.since: float | None = None
        self.now = self.is_asked = False
        #: Why the watcher itself ends the job; nobody asked for that.
        self.reason = ""
        signal.signal(signal.SIGTERM, self.begin)
        signal.signal(signal.SIGQUIT, self.end_now)
        # Not SIG_IGN, which the job would inherit.
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGHUP, lambda *_: None)

    def begin(self, *_: object) -> None:
        self.since = self.since or time.monotonic()
        self.read_request()

    def end_now(self, *_: object) -> None:
        self.now = True
        self.begin()

    def is_over(self, grace_seconds: float) -> bool:
        """Whether the job has to end now: that was asked for, or the grace is over."""
        return self.now or (self.since is not None and time.monotonic() - self.since > grace_seconds)

    def read_request(self) -> None:
        """Obey the files that ask for a stop."""
        with contextlib.suppress(OSError):
            self._take((self._job_dir / STOP_REQUESTED).read_text().strip() == "now")
        if order := _read_left(self._job_dir / CANCEL, _CANCEL_SHAPE):
            self._take(order["now"])

    def _take(self, now: bool) -> None:
        self.since, self.is_asked, self.now = self.since or time.monotonic(), True, self.now or now


def main(job_dir: Path) -> int:
    """Run the job whose folder this is, as its ``job.json`` says.

    Starting it again is harmless: an attempt that has ended is not run twice, and one that runs is left alone.

    Returns:
        The job's exit code, 128 + n when signal n ended it; 0 when another watcher has the job.
    """
    lock = JobLock.take(job_dir)
    if lock is None:
        return 0
    try:
        outcome = read_json(job_dir / OUTCOME) or _run(job_dir, lock)
    finally:
        lock.release()
    with contextlib.suppress(OSError):
        if not (log := job_dir / "shim.log").stat().st_size:
            log.unlink()
    code = outcome.get("exit_code")
    if code is None:
        return 1
    return int(code) if code >= 0 else 128 - int(code)


def _run(job_dir: Path, lock: JobLock) -> dict[str, Any]:
    job = read_whole(job_dir / JOB)
    if job is None:
        raise UsageError(
            f"{job_dir / JOB} is missing.",
            rule="a shim runs the job that this file describes.",
            remedy="have the supervisor start the job: memfit resume RUN",
        )
    stop = _Stop(job_dir)
    become_subreaper()
    lock.tell(attempt=int(job["attempt"]))
    outcome = _Shim(job, job_dir, lock, stop).run()
    is_durable = time.time() - outcome["started"] > _DURABLE_SECONDS
    write_atomic(job_dir / OUTCOME, json.dumps(outcome) + "\n", durable=is_durable)
    (job_dir / STATUS).unlink(missing_ok=True)
    return outcome


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
            process = start(self.job, self.job_dir, self.group)
        except OSError as error:
            self._remove_group()
            cause = f"could not be started: {error.strerror or error} ({error.filename})"
            ended = {"started": started, "ended": time.time(), "attempt": self.attempt}
            return {"state": "failed", "cause": cause, **ended, "asked": self.stop.is_asked, "ended_by": "job"}
        self.lock.tell(job_pid=process.pid, started=started)
        watch = Watch(
            run=self.run_dir,
            job_id=str(self.job["id"]),
            phases=tuple(self.job["phases"]),
            pid=process.pid,
            group=self.group,
            attempt=self.attempt,
            started=started,
            met_before=state.met_wall if state else 0,
            older=older,
            devices=_devices_of(self.job),
        )
        process.returncode, stopped_by = self._follow(watch)
        returncode = process.returncode
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
        if stop.since is None:
            return None
        watch.asked = stop.is_asked
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
        self.stop.read_request()
        watch.guess_phase()
        watch.measure_cpu()
        watch.look_for_stopped()
        with contextlib.suppress(OSError):
            write_atomic(self.job_dir / STATUS, json.dumps(watch.status()) + "\n", durable=False)

    def _see_to_orphan(self, watch: Watch, now: float) -> None:
        if self.orphan is None or self.stop.now:
            return
        if reason := self.orphan.look(watch.state, now):
            self.stop.reason = "" if self.stop.since is not None else reason
            self.stop.end_now()

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
        self.lock.tell(job_pid=None)  # its number may be another's soon
        remove_segments(watch.pids | left, since=watch.started)
        if watch.series is not None:
            with contextlib.suppress(OSError):
                watch.series.close()
        evidence, left_bytes = self._group_evidence(watch, returncode)
        status = watch.status()
        if returncode == 0 and self.job["target"] is None and not left and left_bytes < _LEFT_BYTES:
            state, cause, ended_by = "completed", "", "job"
        else:
            death = self._death(watch, before, returncode, stopped_by)
            state, cause, ended_by = explain(death)
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
        return status | ended | now_nothing | {"asked": self.stop.is_asked, "ended_by": ended_by}

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
        verdict = {"state": "out_of_memory", "cause": self.stop.reason} if self.stop.reason else None
        order = _read_left(self.job_dir / CANCEL, _CANCEL_SHAPE) or {}
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
            verdict=verdict or (order if order.get("state") else None),
            is_asked=self.stop.is_asked,
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


def _devices_of(job: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the devices that a job was given, by UUID."""
    visible = job["env"].get("CUDA_VISIBLE_DEVICES", "") if job["num_devices"] else ""
    return tuple(filter(None, visible.split(",")))
