"""The contract that a backend must pass, a fake backend, and small helpers for tests of jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import UsageError
from memfit.files import read_json
from memfit.jobs import ENDED, Backend, Job, JobStatus, State, Submission, Traits, Verdict, read_status
from memfit.memory import Footprint
from memfit.rundir import RunDir

_PATIENCE_SECONDS = 120.0  # an outcome may show late, by a minute over NFS
MakeJob = Callable[[str, str], Job]

_MARK = "from memfit.rundir import phase; phase('train')"
#: How the contract's jobs behave, and Python code that does so. Those that last mark the phase ``train`` when a stop
#: would reach them.
BEHAVIOURS = {
    "completes": "pass",
    "fails": "raise SystemExit(7)",
    "fails once": (
        "import os, pathlib; mark = pathlib.Path(os.environ['MEMFIT_RUN_DIR'], 'mark'); is_second = mark.exists()\n"
        "mark.touch(); raise SystemExit(0 if is_second else 7)"
    ),
    "runs": f"import time; {_MARK}; time.sleep(300)",
    "saves": (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        + _MARK
        + "; time.sleep(300)"
    ),
    "is taken": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
}


class ListSource:
    """Hands over the jobs of a list, all at once.

    Example:
        >>> source = ListSource([Job("a", command=("true",)), Job("b", command=("true",))])
        >>> [job.id for job in source.next(1)], source.is_done, list(source.next(1))
        (['a', 'b'], True, [])
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._left = tuple(jobs)

    def next(self, num_free: int) -> Sequence[Job]:
        """Return all jobs at the first call, and none after it."""
        jobs, self._left = self._left, ()
        return jobs

    def ended(self, status: JobStatus) -> None:
        """Do nothing: nothing follows from an end."""

    @property
    def is_done(self) -> bool:
        """True once the jobs are handed over."""
        return not self._left


@dataclass(frozen=True)
class FakeJob:
    """How a fake job goes: what it takes at each step, and how it ends.

    Attributes:
        bytes_by_step: Its private bytes at each step; it ends after the last.
        device_bytes: What it takes at each step of each device that it was given; nothing after the last.
        settles_at: The step from which its footprint is a forecast for similar jobs.
        ends: How its first attempts end; after these comes ``state``.
        num_queued: For how many steps the backend's queue holds it before each start.
        exit_code: Its exit code where it does not complete.
    """

    bytes_by_step: tuple[int, ...] = (100,)
    device_bytes: tuple[int, ...] = ()
    settles_at: int = 0
    state: State = "completed"
    ends: tuple[State, ...] = ()
    checkpoint_bytes: int = 0
    num_queued: int = 0
    exit_code: int = 1
    phase: str | None = None


class FakeBackend:
    """A backend without processes: ``wait`` moves all jobs on by one step, and its clock by a tenth of a second.

    A job whose next step needs more than its limit, or than all may take together, stands still as in the kernel.

    Example:
        >>> backend = FakeBackend({"a": FakeJob((10, 20))})
        >>> backend.submit([Submission(Job("a", command=("true",)))])
        >>> backend.wait(0.1); backend.wait(0.1); backend.poll()["a"].state
        'running'
        >>> backend.wait(0.1); backend.poll()["a"].state
        'completed'
    """

    traits = Traits(enforces_memory=False)

    def __init__(self, scripts: Mapping[str, FakeJob]) -> None:
        self.enforcer = self
        self.scripts = dict(scripts)
        self.submitted: list[str] = []
        self.jobs: dict[str, Job] = {}
        self.cancelled: list[tuple[str, bool]] = []
        self.grants: dict[str, int] = {}
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

    def submit(self, batch: Sequence[Submission]) -> None:
        """Start scripted jobs."""
        for job, _ in batch:
            status = self._status.get(job.id)
            if status is not None and status.state not in ENDED:
                rule = "a job never runs twice at once."
                raise UsageError(f"job {job.id} runs.", rule=rule, remedy="wait for its end")
            self.submitted.append(job.id)
            self.jobs[job.id], self._at[job.id] = job, -1 - self.scripts[job.id].num_queued
            self._status[job.id] = self._at_step(job.id)
        self._count()

    def adopt(self, job_ids: Iterable[str]) -> set[str]:
        """Return those of the jobs that run here."""
        return {name for name in job_ids if name in self._status and self._status[name].state not in ENDED}

    def make_room(self) -> bool:
        """It holds nothing itself."""
        return False

    def close(self) -> None:
        """Do nothing: there is nothing to follow."""

    def grant(self, job_id: str, wall_bytes: int) -> None:
        """Take note of a job's grant."""
        self.grants[job_id] = wall_bytes

    def cap(self, total_bytes: int) -> None:
        """Take note of what all may take together."""
        self.total_bytes = total_bytes

    def left_bytes(self) -> int:
        """Return 0: fake jobs leave nothing."""
        return 0

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
            code = 75 if verdict.state == "preempted" else -9
            ended = known.ended_as(verdict.state, verdict.cause, "user")
            self._status[job_id] = replace(ended, ended=self.now, exit_code=code, asked=True)

    def wait(self, seconds: float) -> None:
        """Move every running job on by one step."""
        self.now += 0.1
        for job_id, status in self._status.items():
            if status.state not in ENDED:
                wall_bytes, steps = self.grants.get(job_id), self.scripts[job_id].bytes_by_step
                at = self._at[job_id] + 1
                room = [wall_bytes] if wall_bytes is not None else []
                if self.total_bytes is not None and room:
                    room.append(self.total_bytes - self.used_bytes + status.used_bytes)
                if room and 0 <= at < len(steps) and steps[at] > min(room):
                    used = max(status.used_bytes, min(room))
                    self._status[job_id] = replace(status, used_bytes=used, stalled=True)
                else:
                    self._at[job_id] = at
                    self._status[job_id] = self._at_step(job_id)
        self._count()

    def _at_step(self, job_id: str) -> JobStatus:
        script, at, attempt = self.scripts[job_id], self._at[job_id], self.submitted.count(job_id)
        if at < -1:
            return JobStatus(job_id, "pending", attempt=attempt, pending_reason="Priority")
        devices = list(filter(None, self.jobs[job_id].env.get("CUDA_VISIBLE_DEVICES", "").split(",")))
        if at < 0:
            unused = dict.fromkeys(devices, 0)
            return JobStatus(job_id, "running", started=0.0, attempt=attempt, device_used_bytes=unused)
        peak = max(script.bytes_by_step[: at + 1])
        over = at >= len(script.bytes_by_step)
        on_device, device_peak = script.device_bytes[at : at + 1] or (0,), max(script.device_bytes[: at + 1], default=0)
        state = script.ends[attempt - 1] if attempt <= len(script.ends) else script.state
        ended: dict[str, Any] = {}
        if over:
            code = 0 if state == "completed" else script.exit_code
            ended = {"ended": float(at), "exit_code": code, "cause": f"exit code {code}" if code else ""}
            ended["ended_by"] = "platform" if state in ("preempted", "node_fail") else "job"
        return JobStatus(
            job_id,
            state if over else "running",
            phase=script.phase,
            settled=at >= script.settles_at,
            used_bytes=0 if over else script.bytes_by_step[at],
            peak_bytes=peak,
            footprint=Footprint(peak, device_bytes=dict.fromkeys(devices, device_peak) if device_peak else {}),
            device_used_bytes=dict.fromkeys(devices, 0 if over else on_device[0]),
            started=0.0,
            attempt=attempt,
            checkpoint_bytes=script.checkpoint_bytes,
            **ended,
        )

    def _count(self) -> None:
        self.most_at_once = max(self.most_at_once, sum(s.state not in ENDED for s in self._status.values()))
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)


class BackendContract:
    """What every backend must pass: subclass it in a test module and give ``make_backend``.

    The tests look at statuses only, so that a job may run on another host. A backend without processes gives
    ``make_job`` too. One that starts processes must also pass ``ProcessContract``.
    """

    @pytest.fixture
    def run_dir(self, tmp_path: Path) -> RunDir:
        """A fresh run directory; override it where jobs see another disk."""
        return RunDir.create(tmp_path, "contract", "0" * 64)

    @pytest.fixture
    def make_backend(self, run_dir: RunDir) -> Callable[[], Backend]:
        """What makes another backend object on the same run directory, as a later supervisor does."""
        raise NotImplementedError

    @pytest.fixture
    def backend(self, make_backend: Callable[[], Backend]) -> Backend:
        """The backend under test."""
        return make_backend()

    @pytest.fixture
    def make_job(self) -> Callable[[str, str], Job]:
        """What makes a job of a name that behaves as one of ``BEHAVIOURS`` says."""
        return lambda name, behaviour: python(name, BEHAVIOURS[behaviour])

    @pytest.fixture
    def outage(self, run_dir: RunDir) -> Callable[[], AbstractContextManager[None]]:
        """What hides the place where the backend reads the states of jobs; override it where a controller is asked."""

        @contextmanager
        def hide() -> Iterator[None]:
            jobs = run_dir.path / "jobs"
            aside = jobs.rename(run_dir.path / "hidden")
            try:
                yield
            finally:
                aside.rename(jobs)

        return hide

    def test_each_job_of_a_batch_completes_or_fails_by_its_own_exit_code(
        self, backend: Backend, make_job: MakeJob
    ) -> None:
        wanted = ["completes", "fails", "completes", "fails", "completes"]
        backend.submit([Submission(make_job(f"job_{n}", behaviour)) for n, behaviour in enumerate(wanted)])
        for status, behaviour in zip([wait_for_end(backend, f"job_{n}") for n in range(5)], wanted, strict=True):
            assert status.started is not None and status.ended is not None and status.started <= status.ended
            assert status.ended_by == "job"
            assert (status.state, status.exit_code) == (("completed", 0) if behaviour == "completes" else ("failed", 7))
            assert status.cause == "" if behaviour == "completes" else "exit code 7" in status.cause

    def test_a_cancelled_job_may_save_and_is_preempted_by_the_user(self, backend: Backend, make_job: MakeJob) -> None:
        submit(backend, make_job("polite", "saves"))
        wait_for(backend, lambda: backend.poll()["polite"].phase == "train")
        backend.cancel("polite")
        status = wait_for_end(backend, "polite")
        assert (status.state, status.exit_code) == ("preempted", 75)
        assert (status.asked, status.ended_by) == (True, "user")

    def test_a_job_that_is_cancelled_before_it_starts_never_starts(self, backend: Backend, make_job: MakeJob) -> None:
        statuses = []
        for number in range(5):  # on a busy host one may be faster
            submit(backend, make_job(f"early_{number}", "runs"))
            backend.cancel(f"early_{number}", now=True)
            statuses.append(wait_for_end(backend, f"early_{number}"))
        assert {(one.state, one.asked, one.ended_by) for one in statuses} == {("cancelled", True, "user")}
        assert any(one.started is None for one in statuses)

    def test_only_a_verdict_cancels_a_job_that_was_never_submitted(self, backend: Backend) -> None:
        with pytest.raises(UsageError, match="nobody"):
            backend.cancel("nobody")
        backend.cancel("nobody", verdict=Verdict("out_of_memory", "it is too large"))
        status = backend.poll()["nobody"]
        assert (status.state, status.cause, status.attempt) == ("out_of_memory", "it is too large", 0)

    def test_a_job_never_runs_twice_at_once(self, backend: Backend, make_job: MakeJob) -> None:
        job = make_job("once", "runs")
        submit(backend, job)
        with pytest.raises(UsageError, match="once"):
            submit(backend, job)
        backend.cancel("once", now=True)
        assert wait_for_end(backend, "once").state == "cancelled"

    def test_an_ended_job_runs_again_as_the_next_attempt(self, backend: Backend, make_job: MakeJob) -> None:
        job = make_job("retry", "fails once")
        submit(backend, job)
        assert wait_for_end(backend, "retry").state == "failed"
        submit(backend, job)
        status = wait_for_end(backend, "retry")
        assert (status.state, status.attempt) == ("completed", 2)

    def test_a_later_backend_adopts_a_job_that_runs(
        self, backend: Backend, make_backend: Callable[[], Backend], make_job: MakeJob
    ) -> None:
        job = make_job("long", "runs")
        submit(backend, job)
        wait_for(backend, lambda: backend.poll()["long"].phase == "train")
        later = make_backend()
        assert later.adopt(["long", "never"]) == {"long"}
        with pytest.raises(UsageError, match="long"):
            submit(later, job)
        later.cancel("long", now=True)
        assert wait_for_end(later, "long").attempt == 1
        assert later.adopt(["long"]) == set()  # it may start again
        assert wait_for_end(backend, "long").state == "cancelled"

    def test_a_signal_from_the_platform_is_no_request_of_the_users(self, backend: Backend, make_job: MakeJob) -> None:
        submit(backend, make_job("taken", "is taken"))
        status = wait_for_end(backend, "taken")
        assert (status.state, status.asked, status.ended_by) == ("preempted", False, "platform")

    def test_a_state_that_cannot_be_read_for_a_while_stays_as_it_was(
        self, backend: Backend, make_job: MakeJob, outage: Callable[[], AbstractContextManager[None]]
    ) -> None:
        submit(backend, make_job("steady", "runs"))
        wait_for(backend, lambda: backend.poll()["steady"].phase == "train")
        with outage():
            assert backend.poll()["steady"].state == "running"
        backend.cancel("steady", now=True)
        assert wait_for_end(backend, "steady").state == "cancelled"


class ProcessContract(BackendContract):
    """What a backend must pass that runs each job as a process beside a shim, here or on another host.

    Example::

        class TestMyBackend(ProcessContract):
            @pytest.fixture
            def make_backend(self, run_dir):
                return lambda: MyBackend(run_dir)
    """

    def test_a_command_that_is_not_there_has_failed_and_says_so(self, backend: Backend) -> None:
        submit(backend, Job("absent", command=("/nonexistent/program",)))
        status = wait_for_end(backend, "absent")
        assert status.state == "failed"
        assert "/nonexistent/program" in status.cause

    def test_a_later_attempt_begins_a_line_of_its_own_in_the_logs(self, backend: Backend, run_dir: RunDir) -> None:
        torn = Job("torn", command=("sh", "-c", "printf 'epoch 1'; printf 'whole\\n' >&2; exit 1"))
        for _ in range(2):
            submit(backend, torn)
            wait_for_end(backend, "torn")
        folder = run_dir.job_dir("torn")
        assert (folder / "out.log").read_text() == "epoch 1\nepoch 1"
        assert (folder / "err.log").read_text() == "whole\nwhole\n"

    def test_a_function_job_that_raises_has_failed_with_its_last_line(self, backend: Backend) -> None:
        submit(backend, Job("boom", target="memfit.units:parse_bytes", arguments={"text": "12 parsecs"}))
        status = wait_for_end(backend, "boom")
        assert (status.state, status.exit_code) == ("failed", 2)
        assert "12 parsecs" in status.cause

    def test_memory_of_the_whole_tree_is_measured(self, backend: Backend) -> None:
        hold = "import time; block = bytearray(80 << 20); time.sleep(1.5)"
        submit(backend, python("tree", f"{_SPAWN}; subprocess.run([sys.executable, '-c', {hold!r}], check=True)"))
        status = wait_for_end(backend, "tree")
        assert status.state == "completed"
        assert 80 << 20 < status.peak_bytes < 200 << 20
        assert status.footprint is not None and status.footprint.private_bytes == status.peak_bytes

    def test_a_command_that_answers_a_stop_with_0_is_done_only_where_something_shows_it(self, backend: Backend) -> None:
        leaves = "import os, pathlib, signal, sys, time; from memfit.rundir import record\n"
        leaves += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        folder = "pathlib.Path(os.environ['MEMFIT_RUN_DIR'], 'checkpoints', 'wrote')"
        before = {
            "left": "print('epoch 3/3 loss 0.1')\nprint('epoch 1/3 loss 0.2', flush=True)",
            "counted": "print('epoch 3/3 loss 0.1', flush=True)",
            "wrote": f"{folder}.mkdir(); ({folder} / 'result.json').write_text('{{}}')",
            "told": "record('step', epoch=3); record('epoch', epoch=3, num_epochs=3)",
            "told less": "record('epoch', epoch=3, num_epochs=3); record('step', epoch=1)",
        }
        jobs = {
            name: python(name.replace(" ", "_"), f"{leaves}{code}\n{_MARK}; time.sleep(300)")
            for name, code in before.items()
        }
        backend.submit([Submission(job) for job in jobs.values()])
        for job in jobs.values():
            wait_for(backend, lambda job=job: backend.poll()[job.id].phase == "train")
            backend.cancel(job.id)
        ends = {name: wait_for_end(backend, job.id) for name, job in jobs.items()}
        assert {end.exit_code for end in ends.values()} == {0} and all(end.asked for end in ends.values())
        assert {name for name, end in ends.items() if end.state == "completed"} == {"counted", "wrote", "told"}
        assert {(ends[name].state, ends[name].ended_by) for name in ("left", "told less")} == {("preempted", "user")}
        assert "nothing shows that it was done" in ends["left"].cause

    def test_a_job_cancelled_now_is_ended_with_its_grandchildren(self, backend: Backend, run_dir: RunDir) -> None:
        beats = run_dir.path / "beats"
        code = f"{_SPAWN}; import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        submit(backend, python("deaf", code + _start_beating(beats) + "; time.sleep(300)"))
        wait_until(beats.exists)
        backend.cancel("deaf", now=True)
        status = wait_for_end(backend, "deaf")
        assert (status.state, status.ended_by) == ("cancelled", "user")
        wait_until(lambda: not _grows(beats))

    def test_what_a_job_leaves_running_is_ended(self, backend: Backend, run_dir: RunDir) -> None:
        beats = run_dir.path / "beats"
        wait = f"\nimport os\nwhile not os.path.exists({str(beats)!r}): pass"
        submit(backend, python("leaver", f"{_SPAWN}; " + _start_beating(beats) + wait))
        assert wait_for_end(backend, "leaver").state == "completed"
        wait_until(lambda: not _grows(beats))

    def test_a_stranger_that_kills_a_job_is_not_taken_for_the_kernel(self, backend: Backend) -> None:
        submit(backend, python("victim", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
        status = wait_for_end(backend, "victim")
        assert (status.state, status.exit_code) == ("failed", -9)
        assert "SIGKILL" in status.cause

    def test_a_grandchild_that_runs_out_of_memory_is_told(self, backend: Backend) -> None:
        code = f"{_SPAWN}; sys.exit(subprocess.run([sys.executable, '-c', 'raise MemoryError']).returncode)"
        submit(backend, python("parent", code))
        status = wait_for_end(backend, "parent")
        assert (status.state, status.exit_code) == ("out_of_memory", 1)

    def test_more_memory_than_was_requested_is_out_of_memory(self, backend: Backend) -> None:
        if not backend.traits.enforces_memory:
            pytest.skip("this backend does not enforce a request")
        backend.submit([Submission(python("large", "block = bytearray(400 << 20)"), 256 << 20)])
        assert wait_for_end(backend, "large").state == "out_of_memory"

    def test_an_end_that_nobody_watched_is_read_right_and_kept_beside_the_next(
        self, backend: Backend, make_backend: Callable[[], Backend], run_dir: RunDir
    ) -> None:
        submit(backend, python("alone", "import time; time.sleep(0.5); raise SystemExit(3)"))
        backend.close()
        wait_until(lambda: read_status(run_dir, "alone").state in ENDED)
        assert read_status(run_dir, "alone").exit_code == 3
        later = make_backend()
        wait_until(lambda: is_submitted(later, python("alone", "pass")))
        assert wait_for_end(later, "alone").attempt == 2
        kept = read_json(run_dir.job_dir("alone") / "outcome_1.json")
        assert kept is not None and kept["state"] == "failed"


class EnforcerContract:
    """What a backend that offers an enforcer must pass; give ``backend`` with a capacity of 1 GiB."""

    @pytest.fixture
    def backend(self) -> Backend:
        """The backend under test."""
        raise NotImplementedError

    def test_a_job_waits_at_its_wall_and_goes_on_when_the_wall_is_raised(self, backend: Backend) -> None:
        assert backend.enforcer is not None
        code = "import time; time.sleep(0.2); block = bytearray(200 << 20); time.sleep(0.5)"
        submit(backend, python("grower", code), 100 << 20)
        wait_for(backend, lambda: backend.poll()["grower"].stalled)
        status = backend.poll()["grower"]
        assert status.wants_more and 80 << 20 < status.used_bytes <= 100 << 20
        backend.enforcer.grant("grower", 400 << 20)
        status = wait_for_end(backend, "grower")
        assert (status.state, status.wants_more) == ("completed", True)
        assert status.peak_bytes > 200 << 20

    def test_jobs_wait_at_the_wall_of_all_and_go_on_when_it_is_raised(self, backend: Backend) -> None:
        assert backend.enforcer is not None
        backend.enforcer.cap(100 << 20)
        code = "import time; time.sleep(0.2); block = bytearray(200 << 20)"
        submit(backend, python("held", code), 400 << 20)
        wait_until(lambda: backend.poll()["held"].stalled)
        backend.enforcer.cap(1 << 30)
        assert wait_for_end(backend, "held").state == "completed"

    def test_a_grant_for_a_job_that_has_ended_does_nothing(self, backend: Backend) -> None:
        assert backend.enforcer is not None
        submit(backend, python("brief", "pass"), 400 << 20)
        wait_until(lambda: backend.poll()["brief"].state == "completed")
        assert backend.enforcer.left_bytes() < 64 << 20


_SPAWN = "import subprocess, sys"


def _start_beating(path: Path) -> str:
    """Code that starts a process in a session of its own, deaf to SIGTERM, which appends to a file for ever."""
    beat = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    beat += f"while True:\n    open({str(path)!r}, 'a').write('x'); time.sleep(0.02)"
    return f"subprocess.Popen([sys.executable, '-c', {beat!r}], start_new_session=True)"


def _grows(path: Path) -> bool:
    size = path.stat().st_size
    time.sleep(0.5)
    return path.stat().st_size > size


def python(job_id: str, code: str, **options: Any) -> Job:
    """A job that runs Python code."""
    return Job(job_id, command=(sys.executable, "-c", code), **options)


def submit(backend: Backend, job: Job, wall_bytes: int | None = None) -> None:
    """Start one job, held back by a limit where one is given."""
    if wall_bytes is not None and backend.enforcer is not None:
        backend.enforcer.grant(job.id, wall_bytes)
    backend.submit([Submission(job, wall_bytes)])


def is_submitted(backend: Backend, job: Job) -> bool:
    """Submit a job if the shim of its last attempt has left; whether it was submitted."""
    with suppress(UsageError):
        submit(backend, job)
        return True
    return False


def wait_for(backend: Backend, is_true: Callable[[], bool]) -> None:
    """Wait until something is true of a backend's jobs; fails the test after a minute and the backend's patience."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while not is_true():
        if time.monotonic() > end:
            pytest.fail(f"waited in vain; the jobs: {backend.poll()}")
        backend.wait(0.02)


def wait_for_end(backend: Backend, job_id: str) -> JobStatus:
    """Return a job's last status."""
    wait_for(backend, lambda: backend.poll()[job_id].state in ENDED)
    return backend.poll()[job_id]


def wait_until(is_true: Callable[[], bool], seconds: float = _PATIENCE_SECONDS) -> None:
    """Wait for a condition; fails the test after so many seconds."""
    end = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > end:
            pytest.fail(f"waited {seconds:.0f} s in vain")
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has reaped yet does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
