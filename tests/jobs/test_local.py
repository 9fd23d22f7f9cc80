"""The local backend: the contract, and what only it promises."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jobs.contract import EnforcerContract, ProcessContract, is_alive, python, submit, wait_for_end, wait_until
from memfit.errors import UsageError
from memfit.jobs import Job, LocalBackend, Verdict, read_status
from memfit.memory import Walls, is_locked, read_series
from memfit.rundir import RunDir

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.mark.core
class TestLocalBackend(ProcessContract):
    @pytest.fixture
    def make_backend(self, run_dir):
        return lambda: LocalBackend(run_dir, grace_seconds=5)


@pytest.mark.root
class TestLocalBackendWithWalls(ProcessContract):
    @pytest.fixture
    def make_backend(self, run_dir, walls):
        built = walls(run_dir, 4096 * MIB)
        return lambda: WithGrants(run_dir, grace_seconds=5, walls=built)


#: What a group has a part in; the rest of the contract is the same with and without one.
_OF_GROUPS = re.compile("memory|grandchild|leaves_running|adopts|stranger")
for _name in [name for name in dir(ProcessContract) if name.startswith("test_") and not _OF_GROUPS.search(name)]:
    setattr(TestLocalBackendWithWalls, _name, None)


@pytest.mark.core
@pytest.mark.root
class TestWalls(EnforcerContract):
    @pytest.fixture
    def backend(self, run_dir, walls):
        return LocalBackend(run_dir, grace_seconds=5, walls=walls(run_dir, 1024 * MIB))


class WithGrants(LocalBackend):
    """Gives every job a grant, as the scheduler does."""

    def submit(self, batch):
        for job, _ in batch:
            if not self.adopt([job.id]):
                self.enforcer.grant(job.id, 2048 * MIB)
        super().submit(batch)


@pytest.fixture
def walls(memory_group):
    """Makes real walls below this process's group and removes them; needs what ``memory_group`` needs."""
    made = []

    def make(run_dir, capacity_bytes):
        built = Walls.build(f"test-{os.getpid()}-{len(made)}", capacity_bytes)
        assert built is not None
        made.append(built)
        return built

    yield make
    for built in made:
        built.parent.kill()
        built.close()
        assert not built.parent.path.exists()


@pytest.fixture
def run_dir(tmp_path):
    return RunDir.create(tmp_path, "local", "0" * 64)


def sleeper(job_id="long", seconds=300):
    return Job(job_id, command=(sys.executable, "-c", f"import time; time.sleep({seconds})"))


def shim_of(run_dir, job_id):
    """The watcher's process id, once the job itself runs."""
    wait_until(lambda: read_status(run_dir, job_id).pid is not None)
    return read_status(run_dir, job_id).watcher_pid


@pytest.mark.proves("S2-05")
def test_threads_and_allocator_are_set_before_the_first_import(run_dir):
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    backend = LocalBackend(run_dir)
    submit(backend, Job("env", command=(sys.executable, "-c", code), threads=3))
    assert wait_for_end(backend, "env").state == "completed"
    env = json.loads((run_dir.job_dir("env") / "out.log").read_text())
    assert {env[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS")} == {"3"}
    assert (env["MALLOC_TRIM_THRESHOLD_"], env["MEMFIT_JOB_ID"]) == ("0", "env")


@pytest.mark.proves("S3-02")
def test_peaks_are_told_by_the_phase_that_the_job_marked(run_dir):
    code = (
        "import time; from memfit.rundir import phase\n"
        "phase('load'); time.sleep(0.5)\n"
        "phase('train'); time.sleep(0.4); block = bytearray(60 << 20); time.sleep(0.8); del block; time.sleep(0.4)\n"
        "phase('validate'); time.sleep(0.4); block = bytearray(160 << 20); time.sleep(0.8); del block; time.sleep(0.4)\n"
        "phase('train'); time.sleep(0.5)\n"
    )
    backend = LocalBackend(run_dir)
    submit(backend, Job("phased", command=(sys.executable, "-c", code), phases=("load", "train", "validate")))
    status = wait_for_end(backend, "phased")
    peaks = {name: peak.private_bytes >> 20 for name, peak in status.footprint.phases.items()}
    assert status.settled and status.footprint.peak_phase == "validate"
    assert peaks["load"] < 60 <= peaks["train"] and peaks["validate"] >= 160
    series = read_series(run_dir.job_dir("phased") / "memory.jsonl")
    assert len(series) >= 5 and max(sample.peak_bytes for sample in series) >= 160 << 20


def test_a_job_whose_watcher_is_killed_is_ended_and_told_apart(run_dir):
    backend = LocalBackend(run_dir)
    submit(backend, sleeper("watched"))
    wait_until(lambda: backend.poll()["watched"].state == "running")
    child = backend.poll()["watched"].pid
    os.kill(shim_of(run_dir, "watched"), signal.SIGKILL)
    status = wait_for_end(backend, "watched")
    assert status.state == "node_fail" and "watcher died" in status.cause
    wait_until(lambda: not is_alive(child))


def test_a_job_whose_watcher_and_supervisor_are_both_killed_ends_and_is_told_by_the_next(run_dir):
    # A second attempt beside a first one that lives on would write into the same checkpoints.
    first = LocalBackend(run_dir)
    submit(first, sleeper("left"))
    shim_of(run_dir, "left")
    child = read_status(run_dir, "left").pid
    os.kill(shim_of(run_dir, "left"), signal.SIGKILL)
    wait_until(lambda: not is_alive(child))
    second = LocalBackend(run_dir)
    assert second.adopt(["left"]) == set()
    assert read_status(run_dir, "left").state == wait_for_end(first, "left").state == "node_fail"


def test_a_job_whose_watcher_is_just_starting_is_taken_over_and_not_started_again(run_dir, tmp_path, monkeypatch):
    slow, starts = tmp_path / "python", tmp_path / "starts"
    slow.write_text(f'#!/bin/sh\nsleep 1\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    job = Job("once", command=("sh", "-c", f"echo start >> {starts}"))
    for attempt in (1, 2):  # the lock file of the first attempt is there at the second
        first = LocalBackend(run_dir)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(slow))
            patch.delattr(os, "pidfd_open")  # as where no process is there to fork watchers from
            submit(first, job)
        second = LocalBackend(run_dir)  # the first supervisor was killed here
        assert second.adopt(["once"]) == {"once"}
        with pytest.raises(UsageError, match="running already"):
            submit(LocalBackend(run_dir), job)
        ended = wait_for_end(second, "once")
        assert (ended.state, ended.attempt) == ("completed", attempt)
        assert wait_for_end(first, "once") == ended
    assert starts.read_text() == "start\n" * 2


def test_a_new_attempt_has_a_number_of_its_own_when_a_supervisor_was_killed_while_it_prepared_one(run_dir):
    backend = LocalBackend(run_dir)
    for attempt in (1, 2):
        submit(backend, Job("again", command=(sys.executable, "-c", "raise SystemExit(3)")))
        assert wait_for_end(backend, "again").attempt == attempt
    folder = run_dir.job_dir("again")
    (folder / "outcome.json").rename(folder / "outcome_2.json")  # killed here
    third = LocalBackend(run_dir)
    submit(third, Job("again", command=(sys.executable, "-c", "pass")))
    assert wait_for_end(third, "again").attempt == 3
    assert [json.loads((folder / f"outcome_{n}.json").read_text())["state"] for n in (1, 2)] == ["failed"] * 2


def test_a_series_that_cannot_be_written_costs_the_series_and_not_the_job(run_dir):
    folder = run_dir.job_dir("full")
    (folder / "memory.jsonl").mkdir(parents=True)
    backend = LocalBackend(run_dir)
    submit(backend, sleeper("full", seconds=0.8))
    assert wait_for_end(backend, "full").state == "completed"
    assert "memory.jsonl" in (folder / "shim.log").read_text()


def test_phase_marks_are_followed_whatever_the_clock_and_strange_files_do(run_dir):
    (run_dir.events_dir / "strange.jsonl").write_text("x\n")
    (run_dir.events_dir / "a-b-c.jsonl").write_text("x\n")
    code = (
        "import time; time.time_ns = lambda: 10**18\n"  # an hour of the past, as after a clock that was set back
        "from memfit.rundir import phase\n"
        "phase('load'); time.sleep(0.8); phase('train'); time.sleep(0.8)\n"
    )
    backend = LocalBackend(run_dir)
    submit(backend, Job("phased", command=(sys.executable, "-c", code), phases=("load", "train")))
    status = wait_for_end(backend, "phased")
    assert (status.state, list(status.footprint.phases)) == ("completed", ["load", "train"])


@pytest.mark.proves("C-31")
def test_the_first_attempts_outcome_and_log_are_kept(run_dir, tmp_path):
    mark = tmp_path / "mark"
    code = f"import pathlib; m = pathlib.Path({str(mark)!r}); s = m.exists(); m.touch(); print('second' if s else 'first'); import time; time.sleep(0.8)"
    backend = LocalBackend(run_dir)
    for _ in range(2):
        submit(backend, Job("again", command=(sys.executable, "-c", code + "; raise SystemExit(not s)")))
        wait_for_end(backend, "again")
    folder = run_dir.job_dir("again")
    assert (folder / "out.log").read_text() == "first\nsecond\n"
    assert json.loads((folder / "outcome_1.json").read_text())["state"] == "failed"
    assert json.loads((folder / "outcome.json").read_text())["attempt"] == 2
    assert (folder / "memory.jsonl").exists() and (folder / "memory_2.jsonl").exists()


def test_the_watcher_loads_the_standard_library_alone():
    code = "import sys; from memfit.jobs import run_element; print([m for m in ('numpy', 'pyarrow', 'pydantic', 'psutil', 'torch') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_job_starts_in_its_folder_with_its_variables_last(run_dir, tmp_path):
    code = "import os; print(os.getcwd(), os.environ['OMP_NUM_THREADS'], os.environ['PYTHONUNBUFFERED'])"
    backend = LocalBackend(run_dir)
    submit(backend, python("where", code, cwd=str(tmp_path), env={"OMP_NUM_THREADS": "7"}, params={"lr": "1e-3"}))
    assert wait_for_end(backend, "where").state == "completed"
    folder = run_dir.job_dir("where")
    assert (folder / "out.log").read_text().split() == [str(tmp_path), "7", "1"]
    assert json.loads((folder / "job.json").read_text())["params"] == {"lr": "1e-3"}


@pytest.mark.parametrize(
    ("command", "cwd", "name"),
    [
        ("absent-program", None, "absent-program"),
        ("/etc/passwd", None, "/etc/passwd"),
        ("true", "/no/folder", "/no/folder"),
    ],
)
def test_a_program_or_a_folder_that_cannot_be_used_is_told_by_its_name(run_dir, command, cwd, name):
    backend = LocalBackend(run_dir)
    submit(backend, Job("odd", command=(command,), cwd=cwd))
    status = wait_for_end(backend, "odd")
    assert (status.state, status.exit_code) == ("failed", None)
    assert f"({name})" in status.cause and "could not be started" in status.cause


def test_a_job_holds_no_file_and_ignores_no_signal_of_memfits(run_dir):
    code = (
        "import os\n"
        "print(sorted(os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if int(n) > 2 and os.path.exists(f'/proc/self/fd/{n}')))\n"
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith(('SigIgn', 'SigBlk'))])\n"
    )
    backend = LocalBackend(run_dir)
    submit(backend, Job("clean", command=(sys.executable, "-I", "-c", code)))
    assert wait_for_end(backend, "clean").state == "completed"
    files, masks = (run_dir.job_dir("clean") / "out.log").read_text().splitlines()
    blocked, ignored = (int(mask, 16) for mask in ast.literal_eval(masks))
    own = next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line[:6] == "SigIgn")
    python_ignores = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    # The C library's own two, which no program sees: its posix_spawn leaves them ignored, and its system() does so too.
    internal = 1 << 31 | 1 << 32
    assert (files, blocked) == ("[]", 0)
    assert ignored & ~(python_ignores | internal | int(own, 16)) == 0
    assert not ignored & (1 << (signal.SIGINT - 1) | 1 << (signal.SIGHUP - 1) | 1 << (signal.SIGTERM - 1))


def test_a_marker_file_asks_a_job_to_stop_and_a_retry_is_not_stopped_by_it(run_dir):
    backend = LocalBackend(run_dir)
    submit(backend, sleeper("marked"))
    shim_of(run_dir, "marked")
    (run_dir.job_dir("marked") / "stop_requested").touch()
    status = wait_for_end(backend, "marked")
    assert (status.state, status.asked) == ("cancelled", True)
    submit(backend, sleeper("marked", seconds=1))
    status = wait_for_end(backend, "marked")
    assert (status.state, status.asked, status.attempt) == ("completed", False, 2)


def test_a_job_that_is_ended_with_a_verdict_is_recorded_with_it(run_dir):
    backend = LocalBackend(run_dir)
    submit(backend, sleeper("large"))
    shim_of(run_dir, "large")
    backend.cancel("large", now=True, verdict=Verdict("out_of_memory", "it needs more than there is"))
    status = wait_for_end(backend, "large")
    assert (status.state, status.cause) == ("out_of_memory", "it needs more than there is")
    submit(backend, python("large", "raise SystemExit(3)"))
    assert wait_for_end(backend, "large").state == "failed"


def test_what_an_earlier_attempt_said_is_no_evidence_of_this_one(run_dir):
    code = "import os, pathlib, signal, sys, time; mark = pathlib.Path(os.environ['MEMFIT_RUN_DIR'], 'mark')\n"
    code += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nif not mark.exists():\n    mark.touch()\n"
    code += "    print('epoch 3/3 loss 0.1'); print('MemoryError', file=sys.stderr); sys.exit(1)\n"
    ended, backend = {}, LocalBackend(run_dir)
    for name, then in (("silent", "sys.exit(1)"), ("left", "(mark.parent / 'ready').touch(); time.sleep(300)")):
        (run_dir.path / "mark").unlink(missing_ok=True)
        submit(backend, python(name, code + then))
        assert wait_for_end(backend, name).state == "out_of_memory"
        submit(backend, python(name, code + then))
        if name == "left":
            wait_until((run_dir.path / "ready").exists)
            backend.cancel(name)
        ended[name] = wait_for_end(backend, name).state
    assert ended == {"silent": "failed", "left": "preempted"}


def test_checkpoints_that_a_job_reports_are_told(run_dir):
    code = (
        "import time; from memfit.rundir import record\n"
        "record('checkpoint', bytes='x'); record('checkpoint', bytes=10**400); record('checkpoint', bytes=-1)\n"
        "record('checkpoint', bytes=300); record('checkpoint', bytes=200); time.sleep(1.5)\n"
    )
    backend = LocalBackend(run_dir)
    submit(backend, python("saver", code))
    status = wait_for_end(backend, "saver")
    assert status.checkpoint_bytes == 300
    assert status.started <= status.checkpointed <= status.ended


def test_a_job_without_phases_is_settled_when_it_has_stopped_growing(run_dir):
    backend = LocalBackend(run_dir)
    submit(backend, sleeper("flat"))
    submit(
        backend,
        python("growing", "import time; kept = []\nwhile True: kept.append(bytearray(4 << 20)); time.sleep(0.2)"),
    )
    wait_until(lambda: backend.poll()["flat"].settled)
    assert not backend.poll()["growing"].settled
    for name in ("flat", "growing"):
        backend.cancel(name, now=True)
        wait_for_end(backend, name)


def test_without_walls_a_grant_limits_what_a_job_can_allocate(run_dir):
    backend = LocalBackend(run_dir)
    submit(backend, python("large", "block = bytearray(400 << 20)"), 256 * MIB)
    status = wait_for_end(backend, "large")
    assert (status.state, status.exit_code) == ("out_of_memory", 1)
    assert "MemoryError" in status.cause and "256.0 MiB" in status.cause
    assert status.evidence["place"] == "host"


def test_a_job_that_needs_a_device_has_no_limit_on_its_data(run_dir):
    backend = LocalBackend(run_dir)
    code = "import resource, sys; sys.exit(resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY)"
    submit(backend, python("device", code, num_devices=1), MIB)
    assert wait_for_end(backend, "device").exit_code == 0


def test_segments_named_after_a_process_of_the_job_are_removed_and_others_are_not(run_dir):
    stranger = Path(f"/dev/shm/torch_{os.getpid()}_memfit_test")
    other = Path(f"/dev/shm/memfit-test-{os.getpid()}")
    code = f"import os, pathlib; pathlib.Path(f'/dev/shm/torch_{{os.getpid()}}_1_2').touch(); pathlib.Path({str(other)!r}).touch(); print(os.getpid())"
    backend = LocalBackend(run_dir)
    stranger.touch()
    try:
        submit(backend, python("leaver", code))
        assert wait_for_end(backend, "leaver").state == "completed"
        pid = (run_dir.job_dir("leaver") / "out.log").read_text().strip()
        assert not Path(f"/dev/shm/torch_{pid}_1_2").exists()
        assert stranger.exists() and other.exists()
    finally:
        stranger.unlink()
        other.unlink(missing_ok=True)


@pytest.mark.parametrize(("seconds", "words"), [("0.05", ""), ("60", "1 process(es) that it left running were ended")])
def test_a_helper_that_is_about_to_leave_is_let_go_and_one_that_stays_is_ended(run_dir, seconds, words):
    backend = LocalBackend(run_dir)
    submit(backend, python("parent", f"import subprocess; subprocess.Popen(['sleep', '{seconds}'])"))
    status = wait_for_end(backend, "parent")
    assert (status.state, status.cause) == ("completed", words)


@pytest.mark.root
def test_shared_memory_that_a_job_leaves_is_told_and_kept(run_dir, walls):
    left = Path(f"/dev/shm/memfit-test-{os.getpid()}")
    code = f"import pathlib; pathlib.Path({str(left)!r}).write_bytes(bytes(8 << 20))"
    backend = LocalBackend(run_dir, walls=walls(run_dir, 1024 * MIB))
    try:
        submit(backend, python("leaver", code), 512 * MIB)
        status = wait_for_end(backend, "leaver")
        assert left.exists()
        assert status.state == "completed" and "8.0 MiB in /dev/shm or another tmpfs" in status.cause
    finally:
        left.unlink(missing_ok=True)


@pytest.mark.root
def test_a_file_in_shared_memory_that_no_process_maps_counts_as_used(run_dir, walls):
    left = Path(f"/dev/shm/memfit-test-{os.getpid()}")
    code = f"import pathlib, time; p = pathlib.Path({str(left)!r}); p.write_bytes(bytes(64 << 20)); time.sleep(1); p.unlink()"
    backend = LocalBackend(run_dir, walls=walls(run_dir, 1024 * MIB))
    try:
        submit(backend, python("writer", code), 512 * MIB)
        status = wait_for_end(backend, "writer")
        assert status.peak_bytes >= 64 * MIB and status.footprint.parts["other"] >= 40 * MIB
    finally:
        left.unlink(missing_ok=True)


def walls_of(backend):
    return backend.enforcer.parent.path


@pytest.mark.root
def test_a_group_that_is_to_be_kept_outlives_its_job(run_dir, walls):
    backend = LocalBackend(run_dir, walls=walls(run_dir, 1024 * MIB))
    submit(backend, python("panel", "pass", keeps_group=True), 512 * MIB)
    assert wait_for_end(backend, "panel").state == "completed"
    assert (walls_of(backend) / "job-panel").exists()


def group_of(pid):
    """The memory group of a process, by its path below the mount."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next(line.split(":", 2)[2] for line in lines if "memory" in line.split(":")[1] or line.startswith("0::"))


@pytest.mark.root
def test_a_job_begins_in_its_group_and_its_watcher_stays_outside(run_dir, walls):
    backend = LocalBackend(run_dir, walls=walls(run_dir, 1024 * MIB))
    code = (
        "sleep 0.3; read line; echo $line; cat /proc/self/cgroup; cat /proc/self/oom_score_adj; ulimit -d; pwd;"
        "grep -E 'SigIgn|SigBlk' /proc/self/status; exec sleep 300"
    )
    (run_dir.path / "words").write_text("hello\n")
    job = Job("inside", command=("sh", "-c", code), cwd="/usr", stdin=str(run_dir.path / "words"))
    submit(backend, job, 512 * MIB)
    shim, log = shim_of(run_dir, "inside"), run_dir.job_dir("inside") / "out.log"
    wait_until(lambda: log.read_text().count("Sig") == 2)
    text, pid = log.read_text(), read_status(run_dir, "inside").pid
    assert text.startswith("hello\n") and "/job-inside\n" in text and "\n1000\nunlimited\n/usr\n" in text
    own = Path("/proc/self/status").read_text()
    own_ignored = next(int(line.split()[1], 16) for line in own.splitlines() if line.startswith("SigIgn"))
    blocked, ignored = (int(line.split()[1], 16) for line in text.splitlines() if line.startswith("Sig"))
    internal = 1 << 31 | 1 << 32  # as above
    assert blocked == 0 and ignored & ~own_ignored & ~internal == 0
    assert os.getsid(pid) == pid and group_of(pid).endswith("/job-inside")
    assert group_of(shim) == group_of(os.getpid())
    assert Path(f"/proc/{shim}/oom_score_adj").read_text() == Path("/proc/self/oom_score_adj").read_text()
    backend.cancel("inside", now=True)
    assert wait_for_end(backend, "inside").state == "cancelled"


@pytest.mark.root
@pytest.mark.parametrize(
    "job",
    [
        Job("odd", command=("/nonexistent/name",)),
        Job("odd", command=("true",), cwd="/nonexistent/name"),
        Job("odd", command=("true",), stdin="/nonexistent/name"),
    ],
    ids=["program", "folder", "standard input"],
)
def test_what_is_missing_is_named_and_leaves_no_group(run_dir, walls, job):
    backend = LocalBackend(run_dir, walls=walls(run_dir, 1024 * MIB))
    submit(backend, job, 512 * MIB)
    status = wait_for_end(backend, "odd")
    assert (status.state, status.cause) == (
        "failed",
        "could not be started: No such file or directory (/nonexistent/name)",
    )
    assert not (walls_of(backend) / "job-odd").exists()


@pytest.mark.root
def test_a_program_is_looked_for_on_the_jobs_own_path_and_not_in_its_folder(run_dir, walls, tmp_path):
    program = tmp_path / "train"
    program.write_text("#!/bin/sh\necho found\n")
    program.chmod(0o755)
    backend = LocalBackend(run_dir, walls=walls(run_dir, 1024 * MIB))
    for name, env, state in (("absent", {}, "failed"), ("there", {"PATH": str(tmp_path)}, "completed")):
        submit(backend, Job(name, command=("train",), cwd=str(tmp_path), env=env), 512 * MIB)
        assert wait_for_end(backend, name).state == state
    assert (run_dir.job_dir("there") / "out.log").read_text() == "found\n"


@pytest.mark.root
def test_no_attempt_runs_beside_one_whose_watcher_was_killed_right_after_the_start(run_dir, walls):
    built = walls(run_dir, 1024 * MIB)
    program = (
        f"import os, time; open({str(run_dir.path / 'pids')!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(300)"
    )
    folder, pids = run_dir.job_dir("twice"), []
    for number in range(4):
        first = LocalBackend(run_dir, walls=built)
        submit(first, python("twice", program), 512 * MIB)
        wait_until(lambda: read_status(run_dir, "twice").watcher_pid is not None)
        time.sleep(0.04 * number)  # before, while and after it starts
        os.kill(read_status(run_dir, "twice").watcher_pid, signal.SIGKILL)
        wait_until(lambda: not is_locked(folder / "lock"))
        first.close()
        second = LocalBackend(run_dir, walls=built)  # as the next supervisor
        assert read_status(run_dir, "twice").state == "node_fail"
        assert not (built.parent.path / "job-twice").exists()
        if (run_dir.path / "pids").exists():
            pids = [int(pid) for pid in (run_dir.path / "pids").read_text().split()]
            assert not any(is_alive(pid) for pid in pids)
        second.close()


@pytest.mark.core
@pytest.mark.root
def test_a_job_killed_by_the_kernel_in_its_own_group_is_told_by_that_groups_counter(run_dir, walls):
    backend = LocalBackend(run_dir, walls=walls(run_dir, 1024 * MIB))
    submit(backend, python("hog", "import time; time.sleep(1); block = bytearray(200 << 20)"), 100 * MIB)
    (walls_of(backend) / "job-hog" / "memory.oom_control").write_text("0")  # let the kernel kill here
    status = wait_for_end(backend, "hog")
    assert (status.state, status.exit_code) == ("out_of_memory", -signal.SIGKILL)
    assert "oom_kill counter of job-hog rose from 0 to 1" in status.cause
    counters = status.evidence["oom_kills"]
    assert (counters["before"]["own"], counters["after"]["own"], status.evidence["wall_bytes"]) == (0, 1, 100 * MIB)
    assert status.evidence["charged_peak_bytes"] == 100 * MIB


@pytest.mark.root
def test_a_file_in_shared_memory_that_the_wall_above_all_jobs_refuses_is_a_lack_of_memory(run_dir, walls):
    # Its own wall is far: the wall above is met, and a write to a file in /dev/shm fails there with ENOMEM.
    code = """
        import os
        block = bytes(1 << 20)
        descriptor = os.open(f"/dev/shm/torch_{os.getpid()}_1_0", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            for _ in range(200):
                os.write(descriptor, block)
        finally:
            os.ftruncate(descriptor, 0)  # a fault of this process would wait at the wall
    """
    backend = LocalBackend(run_dir, walls=walls(run_dir, 100 * MIB))
    submit(backend, Job("full", command=(sys.executable, "-c", textwrap.dedent(code))), 400 * MIB)
    status = wait_for_end(backend, "full")
    assert (status.state, status.exit_code) == ("out_of_memory", 1), status.cause
    assert "has met its limit" in status.cause


def test_watchers_of_commands_beside_others_are_forked_or_begin_in_interpreters(run_dir, monkeypatch):
    backend = LocalBackend(run_dir)
    submit(backend, sleeper("first"))
    with monkeypatch.context() as patch:
        patch.setattr("memfit.jobs._local.start_interpreter", None)
        submit(backend, Job("second", command=("true",)))
    assert wait_for_end(backend, "second").state == "completed"
    backend.close()
    submit(backend, Job("third", command=("true",)))
    backend.cancel("first", now=True)
    assert (wait_for_end(backend, "third").state, wait_for_end(backend, "first").state) == ("completed", "cancelled")


def test_a_wait_is_over_when_a_job_has_ended(run_dir, monkeypatch):
    backend, most = LocalBackend(run_dir), 3600.0  # longer than a test may take
    monkeypatch.setattr(backend, "look_seconds", most)
    submit(backend, Job("brief", command=("true",)))
    backend.wait(most)
    assert backend.poll()["brief"].state == "completed"
