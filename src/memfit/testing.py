"""For those who write a backend: the contract that it must pass, and a fake for those who use one."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from memfit.errors import UsageError
from memfit.jobs import ENDED, Backend, Grant, Job, JobStatus, State, Verdict
from memfit.memory import Footprint
from memfit.rundir import RunDir

_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class FakeJob:
    """How a fake job goes: what it takes at each step, and how it ends.

    Attributes:
        bytes_by_step: Its private bytes at each step; it ends after the last.
        settles_at: The step from which its footprint speaks for its like.
        state: How it ends.
        ends: How its first attempts end; after these comes ``state``.
        checkpoint_bytes: The size of the checkpoint that it reports at its first step.
        wanted_cpus: How many cores it wants while it runs.
    """

    bytes_by_step: tuple[int, ...] = (100,)
    settles_at: int = 0
    state: State = "completed"
    ends: tuple[State, ...] = ()
    checkpoint_bytes: int = 0
    wanted_cpus: float = 0.0


class FakeBackend:
    """A backend without processes: ``wait`` moves all jobs on by one step, and its clock by a tenth of a second.

    A job whose next step needs more than its wall, or than all may take together, stands still as in the kernel.

    Attributes:
        most_at_once: The most jobs that ran at the same time.
        peak_bytes: The most private bytes that they had together.
        grants: The last grant of each job.
        total_bytes: What all may take together, as it was said last.

    Example:
        >>> backend = FakeBackend({"a": FakeJob((10, 20))})
        >>> backend.submit(Job("a", command=("true",)))
        >>> backend.wait(0.1); backend.wait(0.1); backend.poll()["a"].state
        'running'
        >>> backend.wait(0.1); backend.poll()["a"].state
        'completed'
    """

    def __init__(self, scripts: Mapping[str, FakeJob]) -> None:
        self.scripts = dict(scripts)
        self.submitted: list[str] = []
        self.jobs: dict[str, Job] = {}
        self.cancelled: list[tuple[str, bool]] = []
        self.grants: dict[str, Grant | None] = {}
        self.total_bytes: int | None = None
        self.most_at_once = 0
        self.peak_bytes = 0
        self.now = 0.0
        self._at: dict[str, int] = {}
        self._status: dict[str, JobStatus] = {}

    def clock(self) -> float:
        """Seconds since the beginning; stands in for ``time.monotonic``."""
        return self.now

    @property
    def used_bytes(self) -> int:
        """The private bytes of all that run."""
        return sum(status.used_bytes for status in self._status.values() if status.state not in ENDED)

    def submit(self, job: Job, grant: Grant | None = None) -> None:
        """Start a scripted job."""
        status = self._status.get(job.id)
        if status is not None and status.state not in ENDED:
            raise UsageError(f"job {job.id} runs.", rule="a job never runs twice at once.", remedy="wait for its end")
        self.submitted.append(job.id)
        self.jobs[job.id], self._at[job.id], self.grants[job.id] = job, -1, grant
        self._status[job.id] = self._at_step(job.id)
        self._count()

    def resize(self, job_id: str, grant: Grant) -> None:
        """Take note of a job's grant."""
        self.grants[job_id] = grant

    def cap(self, total_bytes: int) -> None:
        """Take note of what all may take together."""
        self.total_bytes = total_bytes

    def poll(self) -> dict[str, JobStatus]:
        """All statuses."""
        return dict(self._status)

    def cancel(self, job_id: str, *, now: bool = False, verdict: Verdict | None = None) -> None:
        """End a job at once, as preempted or cancelled, or with the verdict; record one that does not run."""
        known = self._status.get(job_id)
        if verdict is not None and (known is None or known.state in ENDED):
            known = known or JobStatus(job_id, verdict.state, attempt=0)
            self._status[job_id] = replace(known, state=verdict.state, cause=verdict.cause)
            return
        if known is None:
            raise UsageError(f"there is no job {job_id}.", rule="only a submitted job ends.", remedy="submit it first")
        self.cancelled.append((job_id, now))
        if known.state not in ENDED:
            verdict = verdict or Verdict("cancelled" if now else "preempted", "as asked")
            ended = {"state": verdict.state, "cause": verdict.cause, "ended": self.now, "asked": True}
            self._status[job_id] = replace(known, used_bytes=0, stalled=False, **ended)  # type: ignore[arg-type]

    def wait(self, seconds: float) -> None:
        """Move every running job on by one step."""
        self.now += 0.1
        for job_id, status in self._status.items():
            if status.state not in ENDED:
                grant, steps = self.grants[job_id], self.scripts[job_id].bytes_by_step
                at = self._at[job_id] + 1
                room = [grant.wall_bytes] if grant is not None else []
                if self.total_bytes is not None and grant is not None:
                    room.append(self.total_bytes - self.used_bytes + status.used_bytes)
                if room and at < len(steps) and steps[at] > min(room):
                    used = max(status.used_bytes, min(room))
                    self._status[job_id] = replace(status, used_bytes=used, stalled=True)
                else:
                    self._at[job_id] = at
                    self._status[job_id] = self._at_step(job_id)
        self._count()

    def _at_step(self, job_id: str) -> JobStatus:
        script, at, attempt = self.scripts[job_id], self._at[job_id], self.submitted.count(job_id)
        if at < 0:
            return JobStatus(job_id, "running", started=0.0, attempt=attempt)
        peak = max(script.bytes_by_step[: at + 1])
        over = at >= len(script.bytes_by_step)
        state = script.ends[attempt - 1] if attempt <= len(script.ends) else script.state
        return JobStatus(
            job_id,
            state if over else "running",
            settled=at >= script.settles_at,
            used_bytes=0 if over else script.bytes_by_step[at],
            peak_bytes=peak,
            footprint=Footprint(peak),
            started=0.0,
            ended=float(at) if over else None,
            attempt=attempt,
            checkpoint_bytes=script.checkpoint_bytes,
            wanted_cpus=0.0 if over else script.wanted_cpus,
        )

    def _count(self) -> None:
        self.most_at_once = max(self.most_at_once, sum(s.state not in ENDED for s in self._status.values()))
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)


class BackendContract:
    """What every backend must pass: subclass it in a test module and give ``backend``.

    Example::

        class TestMyBackend(BackendContract):
            @pytest.fixture
            def backend(self, run_dir):
                return MyBackend(run_dir)
    """

    @pytest.fixture
    def run_dir(self, tmp_path: Path) -> RunDir:
        """A fresh run directory."""
        return RunDir.create(tmp_path, "contract", "0" * 64)

    @pytest.fixture
    def backend(self, run_dir: RunDir) -> Backend:
        """The backend under test."""
        raise NotImplementedError

    def test_a_job_that_ends_with_0_is_completed(self, backend: Backend) -> None:
        backend.submit(Job("good", command=(sys.executable, "-c", "pass")))
        status = wait_for_end(backend, "good")
        assert (status.state, status.exit_code, status.cause) == ("completed", 0, "")
        assert status.started is not None and status.ended is not None and status.started <= status.ended

    def test_a_job_that_ends_with_another_code_has_failed_and_says_so(self, backend: Backend) -> None:
        backend.submit(Job("bad", command=(sys.executable, "-c", "raise SystemExit(7)")))
        status = wait_for_end(backend, "bad")
        assert (status.state, status.exit_code) == ("failed", 7)
        assert "exit code 7" in status.cause

    def test_a_command_that_is_not_there_has_failed_and_says_so(self, backend: Backend) -> None:
        backend.submit(Job("absent", command=("/nonexistent/program",)))
        status = wait_for_end(backend, "absent")
        assert status.state == "failed"
        assert "/nonexistent/program" in status.cause

    def test_a_function_job_that_raises_has_failed_with_its_last_line(self, backend: Backend) -> None:
        backend.submit(Job("boom", target="memfit.units:parse_bytes", arguments={"text": "12 parsecs"}))
        status = wait_for_end(backend, "boom")
        assert (status.state, status.exit_code) == ("failed", 2)
        assert "12 parsecs" in status.cause

    def test_memory_of_the_whole_tree_is_measured(self, backend: Backend) -> None:
        hold = "import time; block = bytearray(80 << 20); time.sleep(1.5)"
        spawn = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}], check=True)"
        backend.submit(Job("tree", command=(sys.executable, "-c", spawn)))
        status = wait_for_end(backend, "tree")
        assert status.state == "completed"
        assert 80 << 20 < status.peak_bytes < 200 << 20
        assert status.footprint is not None and status.footprint.private_bytes == status.peak_bytes

    def test_a_cancelled_job_may_save_and_is_preempted(self, backend: Backend, tmp_path: Path) -> None:
        ready, saved = tmp_path / "ready", tmp_path / "saved"
        code = (
            "import pathlib, signal, sys, time\n"
            f"def save(*_): pathlib.Path({str(saved)!r}).touch(); sys.exit(75)\n"
            "signal.signal(signal.SIGTERM, save)\n"
            f"pathlib.Path({str(ready)!r}).touch()\n"
            "time.sleep(300)\n"
        )
        backend.submit(Job("polite", command=(sys.executable, "-c", code)))
        wait_until(ready.exists)
        backend.cancel("polite")
        status = wait_for_end(backend, "polite")
        assert (status.state, status.exit_code) == ("preempted", 75)
        assert saved.exists()

    def test_a_job_cancelled_now_is_ended_with_its_grandchildren(self, backend: Backend, tmp_path: Path) -> None:
        pid_file = tmp_path / "grandchild"
        deaf = "import os, pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        deaf += f"p = pathlib.Path({str(pid_file)!r}); t = p.with_suffix('.tmp'); "
        deaf += "t.write_text(str(os.getpid())); t.rename(p); time.sleep(300)"
        spawn = (
            "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            f"subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True); time.sleep(300)"
        )
        backend.submit(Job("deaf", command=(sys.executable, "-c", spawn)))
        wait_until(pid_file.exists)
        grandchild = int(pid_file.read_text())
        backend.cancel("deaf", now=True)
        assert wait_for_end(backend, "deaf").state == "cancelled"
        wait_until(lambda: not is_alive(grandchild))

    def test_what_a_job_leaves_running_is_ended(self, backend: Backend, tmp_path: Path) -> None:
        pid_file = tmp_path / "orphan"
        spawn = (
            "import pathlib, subprocess, sys, time\n"
            "sleep = [sys.executable, '-c', 'import time; time.sleep(300)']\n"
            "orphan = subprocess.Popen(sleep, start_new_session=True)\n"
            f"pathlib.Path({str(pid_file)!r}).write_text(str(orphan.pid)); time.sleep(1)\n"
        )
        backend.submit(Job("leaver", command=(sys.executable, "-c", spawn)))
        assert wait_for_end(backend, "leaver").state == "completed"
        wait_until(lambda: not is_alive(int(pid_file.read_text())))

    def test_a_stranger_that_kills_a_job_is_not_taken_for_the_kernel(self, backend: Backend, tmp_path: Path) -> None:
        pid_file = tmp_path / "pid"
        code = f"import os, pathlib, time; p = pathlib.Path({str(pid_file)!r}); t = p.with_suffix('.tmp'); "
        code += "t.write_text(str(os.getpid())); t.rename(p); time.sleep(300)"
        backend.submit(Job("victim", command=(sys.executable, "-c", code)))
        wait_until(pid_file.exists)
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
        status = wait_for_end(backend, "victim")
        assert (status.state, status.exit_code) == ("failed", -signal.SIGKILL)
        assert "SIGKILL" in status.cause

    def test_a_job_never_runs_twice_at_once(self, backend: Backend) -> None:
        job = Job("once", command=(sys.executable, "-c", "import time; time.sleep(300)"))
        backend.submit(job)
        with pytest.raises(UsageError, match="once"):
            backend.submit(job)
        backend.cancel("once", now=True)
        assert wait_for_end(backend, "once").state == "cancelled"

    def test_a_job_that_failed_can_be_submitted_again(self, backend: Backend, tmp_path: Path) -> None:
        mark = tmp_path / "mark"
        code = f"import pathlib; m = pathlib.Path({str(mark)!r}); second = m.exists(); m.touch(); "
        code += "raise SystemExit(not second)"
        job = Job("retry", command=(sys.executable, "-c", code))
        backend.submit(job)
        assert wait_for_end(backend, "retry").state == "failed"
        backend.submit(job)
        status = wait_for_end(backend, "retry")
        assert (status.state, status.attempt) == ("completed", 2)

    def test_a_job_that_does_not_run_is_recorded_with_a_verdict(self, backend: Backend) -> None:
        backend.submit(Job("ended", command=(sys.executable, "-c", "raise SystemExit(7)")))
        wait_for_end(backend, "ended")
        for name in ("ended", "never_started"):
            backend.cancel(name, verdict=Verdict("out_of_memory", "it is too large"))
        found = backend.poll()
        assert {(found[name].state, found[name].cause) for name in ("ended", "never_started")} == {
            ("out_of_memory", "it is too large")
        }
        assert (found["ended"].exit_code, found["never_started"].attempt) == (7, 0)

    def test_a_job_that_was_never_submitted_cannot_be_cancelled(self, backend: Backend) -> None:
        with pytest.raises(UsageError, match="nobody"):
            backend.cancel("nobody")


def wait_for_end(backend: Backend, job_id: str) -> JobStatus:
    """A job's last status; fails the test when it has not ended in a minute."""
    wait_until(lambda: backend.poll()[job_id].state in ENDED)
    return backend.poll()[job_id]


def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait for a condition; fails the test after a minute."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while not is_true():
        if time.monotonic() > end:
            pytest.fail(f"waited {_PATIENCE_SECONDS:.0f} s in vain")
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has reaped yet does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
