"""The small process beside each local job: it owns the job's watch and its outcome.

It starts the job's process, samples the memory of its whole tree ten times a second, follows its phase marks, passes
a request to stop on to it, ends what it leaves behind, and writes ``outcome.json``. It holds ``lock`` in the job's
folder as long as it lives, so that a supervisor that starts anew knows a running job from a dead one by the lock, not
by a process id. It imports the standard library only: about 15 MB.

Signals: SIGTERM asks the job to checkpoint and end, and ends it after a grace; SIGQUIT ends it now.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from memfit.errors import DamagedError
from memfit.jobs._child import ERROR, REQUEST, RESULT
from memfit.jobs._death import Counters, Death, explain
from memfit.memory import Sample, SeriesWriter, TreeMeter, nvml_reader
from memfit.rundir import EventTail, RunDir, read_json, write_json

SAMPLE_SECONDS = 0.1
STATUS_SECONDS = 0.5
SERIES_SECONDS = 1.0
LOCK, STATUS, OUTCOME, SHIM, JOB = "lock", "status.json", "outcome.json", "shim.json", "job.json"
#: The shim's own exit code when another shim holds the job.
BUSY = 4

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_OOM_SCORE_ADJ = 500


@dataclass
class _Watch:
    """What the shim knows of its job while it runs."""

    run: RunDir
    job_id: str
    phases: tuple[str, ...]
    child: subprocess.Popen[bytes]
    meter: TreeMeter
    series: SeriesWriter | None
    attempt: int
    started: float
    older: frozenset[Path]
    sample: Sample | None = None
    phase: str | None = None
    passed: list[str] = field(default_factory=list)
    tails: dict[Path, EventTail] = field(default_factory=dict)
    looked: float = 0.0
    unwritten_peak: int = 0
    written: float = 0.0

    def observe(self) -> None:
        """Follow the phase marks, then take a sample."""
        self._follow_marks()
        sample = self.meter.sample()
        if sample is not None:
            changed = self.sample is None or self.sample.phase != sample.phase
            self.sample = sample
            self.unwritten_peak = max(self.unwritten_peak, sample.peak_bytes)
            if changed or time.monotonic() - self.written >= SERIES_SECONDS:
                self.write_series()

    def write_series(self) -> None:
        """Append the last sample to the series, with the peak since the one before it there."""
        if self.series is None or self.sample is None:
            return
        try:
            self.series.append(replace(self.sample, peak_bytes=self.unwritten_peak))
        except OSError as error:  # a full disk ends the series, not the job
            print(f"memory.arrows ends here: {error}", file=sys.stderr, flush=True)
            self.series = None
        self.unwritten_peak, self.written = 0, time.monotonic()

    def _follow_marks(self) -> None:
        if not self.tails or time.monotonic() - self.looked >= STATUS_SECONDS:
            self.looked = time.monotonic()
            self._find_event_files()
        for tail in self.tails.values():
            for record in tail.read():
                if record.get("kind") == "phase" and record.get("job") == self.job_id:
                    self._enter(str(record.get("phase")))

    def _find_event_files(self) -> None:
        pids = {str(pid) for pid in self.meter.pids}
        for path in self.run.events_dir.glob("*.jsonl"):
            # A file that was there before the job belongs to a process id used before.
            if path not in self.tails and path not in self.older and pids.intersection(path.stem.split("-")[-2:-1]):
                self.tails[path] = EventTail(path)

    def _enter(self, phase: str) -> None:
        if self.phase is not None and self.phase != phase and self.phase not in self.passed:
            self.passed.append(self.phase)
        self.phase = phase
        self.meter.enter_phase(phase)

    def status(self) -> dict[str, Any]:
        footprint = self.meter.footprint()
        return {
            "state": "running",
            "phase": self.phase,
            "num_phases_passed": sum(phase in self.passed for phase in self.phases),
            "used_bytes": self.sample.private_bytes if self.sample else 0,
            "peak_bytes": footprint.private_bytes,
            "pss_bytes": self.sample.pss_bytes if self.sample else 0,
            "footprint": footprint.to_dict(),
            "started": self.started,
            "ended": None,
            "exit_code": None,
            "cause": "",
            "attempt": self.attempt,
            "pid": self.child.pid,
        }


class _Stop:
    """Set by signals: ask (SIGTERM) or now (SIGQUIT)."""

    def __init__(self) -> None:
        self.asked_at: float | None = None
        self.now = False
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGQUIT, self._at_once)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _ask(self, *_: object) -> None:
        self.asked_at = self.asked_at or time.monotonic()

    def _at_once(self, *_: object) -> None:
        self.asked_at, self.now = self.asked_at or time.monotonic(), True


def main(job_dir: Path) -> int:
    """Run the job whose folder this is; 0 when its outcome was written, whatever that outcome is."""
    with open(job_dir / LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return BUSY
        job = read_json(job_dir / JOB)
        if job is None:
            print(f"{job_dir / JOB} is missing", file=sys.stderr)
            return 1
        stop = _Stop()
        _become_subreaper()
        write_json(job_dir / SHIM, {"pid": os.getpid(), "attempt": job["attempt"]}, durable=False)
        write_json(job_dir / OUTCOME, _run(job, job_dir, stop))
        (job_dir / STATUS).unlink(missing_ok=True)
    return 0


def _run(job: dict[str, Any], job_dir: Path, stop: _Stop) -> dict[str, Any]:
    """Start the job, watch it to its end, and explain that end."""
    attempt, started, before = int(job["attempt"]), time.time(), Counters.read()
    run = RunDir(job_dir.parent.parent)
    older = frozenset(run.events_dir.glob("*.jsonl"))
    series = _open_series(job_dir / f"memory{'' if attempt == 1 else f'_{attempt}'}.arrows")
    with open(job_dir / "out.log", "ab") as out, open(job_dir / "err.log", "ab") as err:
        try:
            child = _start(job, job_dir, out, err)
        except OSError as error:
            cause = f"could not be started: {error.strerror or error} ({error.filename})"
            return {"state": "failed", "started": started, "ended": time.time(), "cause": cause, "attempt": attempt}
    watch = _Watch(
        run=run,
        job_id=str(job["id"]),
        phases=tuple(job["phases"]),
        child=child,
        meter=TreeMeter(child.pid, devices=nvml_reader()),
        series=series,
        attempt=attempt,
        started=started,
        older=older,
    )
    stopped_by = _follow(watch, job_dir, stop, float(job["grace_seconds"]))
    watch.observe()
    watch.write_series()
    num_left = _end_tree(watch)
    if series is not None:
        with contextlib.suppress(OSError):
            series.close()
    death = Death(
        returncode=child.returncode,
        stopped_by=stopped_by,
        counters_before=before,
        counters_after=Counters.read(),
        error=read_json(job_dir / ERROR),
        has_result=job["target"] is None or (job_dir / RESULT).exists(),
        peak_bytes=watch.meter.footprint().private_bytes,
        phase=watch.phase,
    )
    state, cause = explain(death)
    if num_left:
        cause = "; ".join(filter(None, (cause, f"{num_left} process(es) that it left running were ended")))
    ended = {"state": state, "ended": time.time(), "exit_code": child.returncode, "cause": cause}
    return watch.status() | ended | {"used_bytes": 0, "pss_bytes": 0}


def _open_series(path: Path) -> SeriesWriter | None:
    """The series of the job's memory, or None when it cannot be written: the job runs all the same."""
    try:
        return SeriesWriter(path)
    except (OSError, DamagedError) as error:
        print(f"no {path.name}: {error}", file=sys.stderr, flush=True)
        return None


def _start(job: dict[str, Any], job_dir: Path, out: IO[bytes], err: IO[bytes]) -> subprocess.Popen[bytes]:
    for name in (RESULT, ERROR):
        (job_dir / name).unlink(missing_ok=True)
    command = job["command"]
    if job["target"] is not None:
        write_json(job_dir / REQUEST, {"target": job["target"], "arguments": job["arguments"]}, durable=False)
        command = [sys.executable, "-m", "memfit.jobs", "child", str(job_dir)]
    child = subprocess.Popen(
        command,
        env=os.environ | job["env"],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
        preexec_fn=partial(_die_with, os.getpid()) if sys.platform == "linux" else None,
    )
    # When memory does run out, let the kernel take a job and never the shim, the supervisor or a stranger.
    with contextlib.suppress(OSError):
        Path(f"/proc/{child.pid}/oom_score_adj").write_text(str(_OOM_SCORE_ADJ))
    return child


def _follow(watch: _Watch, job_dir: Path, stop: _Stop, grace_seconds: float) -> str | None:
    """Watch until the job's process has ended; the signal that memfit ended it with, or None."""
    wait = _waiter(watch.child)
    asked, status_at = False, 0.0
    stopped_by: str | None = None
    while True:
        watch.observe()
        if time.monotonic() - status_at >= STATUS_SECONDS:
            status_at = time.monotonic()
            with contextlib.suppress(OSError):
                write_json(job_dir / STATUS, watch.status(), durable=False)
        if stop.asked_at is not None:
            overdue = time.monotonic() - stop.asked_at > grace_seconds
            if stop.now or overdue:
                stopped_by = "SIGKILL"
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(watch.child.pid, signal.SIGKILL)
            elif not asked:
                asked, stopped_by = True, "SIGTERM"
                watch.child.send_signal(signal.SIGTERM)
        if wait(SAMPLE_SECONDS):
            return stopped_by


def _waiter(child: subprocess.Popen[bytes]) -> Callable[[float], bool]:
    """A function that waits some seconds for the child's end and tells whether it came."""
    if not hasattr(os, "pidfd_open"):

        def wait_by_sleep(seconds: float) -> bool:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(seconds)
            return child.returncode is not None

        return wait_by_sleep
    ended = select.poll()
    ended.register(os.pidfd_open(child.pid), select.POLLIN)

    def wait(seconds: float) -> bool:
        if ended.poll(seconds * 1000):
            child.wait()
            return True
        return False

    return wait


def _die_with(watcher: int) -> None:
    """Have the kernel end the job when its watcher dies, so that no later attempt runs beside it (Linux only)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != watcher:  # it died before that held
        os.kill(os.getpid(), signal.SIGKILL)


def _become_subreaper() -> None:
    """Have orphaned grandchildren handed to this process, so that none escapes the watch (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_tree(watch: _Watch) -> int:
    """End what the job left running, and tell how many processes that were."""
    left: set[int] = set()
    for _ in range(50):
        watch.meter.sample()
        alive = {pid for pid in watch.meter.pids if pid not in (os.getpid(), watch.child.pid)}
        left |= alive
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not alive:
            break
        time.sleep(0.02)
    return len(left)
