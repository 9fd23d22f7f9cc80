"""The local backend: the contract, and what only it promises."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.jobs import Job, LocalBackend, read_status
from memfit.memory import read_series
from memfit.rundir import RunDir
from memfit.testing import BackendContract, is_alive, wait_for_end, wait_until


class TestLocalBackend(BackendContract):
    @pytest.fixture
    def backend(self, run_dir):
        return LocalBackend(run_dir, grace_seconds=5)


@pytest.fixture
def run_dir(tmp_path):
    return RunDir.create(tmp_path, "local", "0" * 64)


def sleeper(job_id="long", seconds=300):
    return Job(job_id, command=(sys.executable, "-c", f"import time; time.sleep({seconds})"))


def shim_of(run_dir, job_id):
    path = run_dir.job_dir(job_id) / "shim.json"
    wait_until(path.exists)
    return int(json.loads(path.read_text())["pid"])


def test_threads_and_allocator_are_set_before_the_first_import(run_dir):
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    backend = LocalBackend(run_dir)
    backend.submit(Job("env", command=(sys.executable, "-c", code), threads=3))
    assert wait_for_end(backend, "env").state == "completed"
    env = json.loads((run_dir.job_dir("env") / "out.log").read_text())
    assert {env[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS")} == {"3"}
    assert env["MALLOC_TRIM_THRESHOLD_"] == "0"
    assert env["MEMFIT_JOB_ID"] == "env"


def test_the_allocator_can_be_left_alone(run_dir):
    backend = LocalBackend(run_dir)
    code = "import os, sys; sys.exit(any(name.startswith('MALLOC_') for name in os.environ))"
    backend.submit(Job("env", command=(sys.executable, "-c", code), tight_malloc=False))
    assert wait_for_end(backend, "env").exit_code == 0


def test_freed_memory_goes_back_to_the_kernel_unless_the_allocator_is_left_alone(run_dir):
    code = (
        "blocks, kept = [], []\n"
        "for _ in range(3):\n"
        "    for _ in range(600): blocks.append(bytearray(100_000)); kept.append(bytearray(2000))\n"
        "    del blocks[:]\n"
        "print([int(l.split()[1]) >> 10 for l in open('/proc/self/status') if l.startswith('RssAnon')][0])\n"
    )
    backend = LocalBackend(run_dir)
    resident = {}
    for name, tight in (("tight", True), ("loose", False)):
        backend.submit(Job(name, command=(sys.executable, "-c", code), tight_malloc=tight))
        assert wait_for_end(backend, name).state == "completed"
        resident[name] = int((run_dir.job_dir(name) / "out.log").read_text())
    assert resident["loose"] > 55
    assert resident["tight"] < 25


def test_peaks_are_told_by_the_phase_that_the_job_marked(run_dir):
    code = (
        "import time; from memfit.rundir import mark_phase\n"
        "mark_phase('load'); time.sleep(0.5)\n"
        "mark_phase('train'); time.sleep(0.4); block = bytearray(60 << 20); time.sleep(0.8); del block; time.sleep(0.4)\n"
        "mark_phase('validate'); time.sleep(0.4); block = bytearray(160 << 20); time.sleep(0.8); del block; time.sleep(0.4)\n"
        "mark_phase('train'); time.sleep(0.5)\n"
    )
    backend = LocalBackend(run_dir)
    backend.submit(Job("phased", command=(sys.executable, "-c", code), phases=("load", "train", "validate")))
    status = wait_for_end(backend, "phased")
    peaks = {name: peak.private_bytes >> 20 for name, peak in status.footprint.phases.items()}
    assert status.num_phases_passed == 3
    assert status.footprint.peak_phase == "validate"
    assert peaks["train"] >= 60
    assert peaks["validate"] >= 160
    assert peaks["load"] < 60
    series = read_series(run_dir.job_dir("phased") / "memory.arrows")
    assert series.num_rows >= 5
    assert max(series["peak_bytes"].to_pylist()) >= 160 << 20


def test_a_new_supervisor_takes_over_the_job_that_still_runs(run_dir):
    first = LocalBackend(run_dir)
    first.submit(sleeper())
    shim = shim_of(run_dir, "long")
    second = LocalBackend(run_dir)
    second.submit(sleeper())
    assert shim_of(run_dir, "long") == shim
    wait_until(lambda: second.poll()["long"].state == "running")
    second.cancel("long")
    status = wait_for_end(second, "long")
    assert (status.state, status.attempt) == ("cancelled", 1)
    assert wait_for_end(first, "long") == status


def test_jobs_outlive_a_supervisor_that_is_killed(run_dir, tmp_path):
    done = tmp_path / "done"
    code = f"import pathlib, time; time.sleep(1.5); pathlib.Path({str(done)!r}).touch()"
    supervisor = (
        "import os, pathlib, signal, sys, time; from memfit.jobs import Job, LocalBackend; from memfit.rundir import RunDir\n"
        f"b = LocalBackend(RunDir(pathlib.Path({str(run_dir.path)!r})))\n"
        f"b.submit(Job('survivor', command=(sys.executable, '-c', {code!r})))\n"
        "while b.poll()['survivor'].state != 'running': time.sleep(0.05)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", supervisor], check=False)
    assert killed.returncode == -signal.SIGKILL
    wait_until(lambda: read_status(run_dir, "survivor").state == "completed")
    assert done.exists()


def test_a_job_whose_watcher_is_killed_is_ended_and_told_apart(run_dir):
    backend = LocalBackend(run_dir)
    backend.submit(sleeper("watched"))
    wait_until(lambda: backend.poll()["watched"].state == "running")
    child = json.loads((run_dir.job_dir("watched") / "status.json").read_text())["pid"]
    os.kill(shim_of(run_dir, "watched"), signal.SIGKILL)
    status = wait_for_end(backend, "watched")
    assert status.state == "node_fail"
    assert "watcher died" in status.cause
    wait_until(lambda: not is_alive(child))


def test_a_job_whose_watcher_and_supervisor_are_both_killed_ends_and_is_told_by_the_next(run_dir):
    # A second attempt beside a first one that lives on would write into the same checkpoints.
    first = LocalBackend(run_dir)
    first.submit(sleeper("left"))
    wait_until(lambda: read_status(run_dir, "left").state == "running")
    child = json.loads((run_dir.job_dir("left") / "status.json").read_text())["pid"]
    os.kill(shim_of(run_dir, "left"), signal.SIGKILL)
    wait_until(lambda: not is_alive(child))
    second = LocalBackend(run_dir)
    assert not second.is_running("left")
    assert read_status(run_dir, "left") == wait_for_end(first, "left")
    assert wait_for_end(first, "left").state == "node_fail"


def test_a_job_that_ends_while_it_is_taken_over_does_not_run_again(run_dir):
    first = LocalBackend(run_dir)
    first.submit(sleeper("brief"))
    shim_of(run_dir, "brief")
    second = LocalBackend(run_dir)
    assert second.is_running("brief")
    first.cancel("brief", now=True)
    ended = wait_for_end(first, "brief")
    second.submit(sleeper("brief"))
    assert second.poll()["brief"] == ended
    assert ended.attempt == 1


def test_a_new_attempt_has_a_number_of_its_own_when_a_supervisor_was_killed_while_it_prepared_one(run_dir):
    backend = LocalBackend(run_dir)
    for attempt in (1, 2):
        backend.submit(Job("again", command=(sys.executable, "-c", "raise SystemExit(3)")))
        assert wait_for_end(backend, "again").attempt == attempt
    folder = run_dir.job_dir("again")
    (folder / "outcome.json").rename(folder / "outcome_2.json")
    (folder / "shim.json").unlink()  # killed here
    third = LocalBackend(run_dir)
    third.submit(Job("again", command=(sys.executable, "-c", "pass")))
    assert wait_for_end(third, "again").attempt == 3
    assert json.loads((folder / "outcome_1.json").read_text())["attempt"] == 1


def test_a_request_to_stop_reaches_a_watcher_that_was_taken_over_before_it_listened(run_dir):
    first = LocalBackend(run_dir)
    first.submit(sleeper("early"))
    shim = shim_of(run_dir, "early")
    file = run_dir.job_dir("early") / "shim.json"
    kept = file.read_text()
    file.unlink()  # as if it had not come so far
    second = LocalBackend(run_dir)
    second.submit(sleeper("early"))
    second.cancel("early", now=True)
    assert is_alive(shim) and second.poll()["early"].state != "cancelled"
    file.write_text(kept)
    assert wait_for_end(second, "early").state == "cancelled"
    assert wait_for_end(first, "early").state == "cancelled"


def test_a_series_that_cannot_be_written_costs_the_series_and_not_the_job(run_dir):
    folder = run_dir.job_dir("full")
    (folder / "memory.arrows").mkdir(parents=True)
    backend = LocalBackend(run_dir)
    backend.submit(Job("full", command=(sys.executable, "-c", "pass")))
    assert wait_for_end(backend, "full").state == "completed"
    assert "memory.arrows" in (folder / "shim.log").read_text()


def test_phase_marks_are_followed_whatever_the_clock_and_strange_files_do(run_dir):
    (run_dir.events_dir / "strange.jsonl").write_text("x\n")
    (run_dir.events_dir / "a-b-c.jsonl").write_text("x\n")
    code = (
        "import time; time.time_ns = lambda: 10**18\n"  # an hour of the past, as after a clock that was set back
        "from memfit.rundir import mark_phase\n"
        "mark_phase('load'); time.sleep(0.8); mark_phase('train'); time.sleep(0.8)\n"
    )
    backend = LocalBackend(run_dir)
    backend.submit(Job("phased", command=(sys.executable, "-c", code), phases=("load", "train")))
    status = wait_for_end(backend, "phased")
    assert (status.state, list(status.footprint.phases)) == ("completed", ["load", "train"])


def test_a_job_that_is_asked_to_stop_and_does_not_is_ended_after_the_grace(run_dir, tmp_path):
    ready = tmp_path / "ready"
    code = f"import pathlib, signal, time; signal.signal(15, signal.SIG_IGN); pathlib.Path({str(ready)!r}).touch(); time.sleep(300)"
    backend = LocalBackend(run_dir, grace_seconds=0.5)
    backend.submit(Job("stubborn", command=(sys.executable, "-c", code)))
    wait_until(ready.exists)
    backend.cancel("stubborn")
    assert wait_for_end(backend, "stubborn").exit_code == -signal.SIGKILL


def test_a_job_cancelled_before_its_watcher_listens_is_cancelled_all_the_same(run_dir):
    backend = LocalBackend(run_dir)
    backend.submit(sleeper("early"))
    backend.cancel("early")
    assert wait_for_end(backend, "early").state == "cancelled"


def test_the_first_attempts_outcome_and_log_are_kept(run_dir, tmp_path):
    mark = tmp_path / "mark"
    code = f"import pathlib; m = pathlib.Path({str(mark)!r}); s = m.exists(); m.touch(); print('second' if s else 'first'); raise SystemExit(not s)"
    backend = LocalBackend(run_dir)
    for _ in range(2):
        backend.submit(Job("again", command=(sys.executable, "-c", code)))
        wait_for_end(backend, "again")
    folder = run_dir.job_dir("again")
    assert (folder / "out.log").read_text() == "first\nsecond\n"
    assert json.loads((folder / "outcome_1.json").read_text())["state"] == "failed"
    assert json.loads((folder / "outcome.json").read_text())["attempt"] == 2
    assert (folder / "memory.arrows").exists() and (folder / "memory_2.arrows").exists()


def test_the_watcher_loads_the_standard_library_alone():
    code = "import sys, memfit.jobs._shim; print([m for m in ('numpy', 'pyarrow', 'pydantic', 'psutil', 'torch') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.root
def test_a_job_killed_by_the_kernel_is_told_by_the_groups_counter(run_dir, memory_group):
    group = memory_group(64 << 20)
    code = (
        "import pathlib, sys; from memfit.jobs import Job, LocalBackend, read_status; from memfit.rundir import RunDir\n"
        "from memfit.testing import wait_for_end\n"
        f"b = LocalBackend(RunDir(pathlib.Path({str(run_dir.path)!r})))\n"
        "b.submit(Job('hog', command=(sys.executable, '-c', 'bytearray(200 << 20)')))\n"
        "print(wait_for_end(b, 'hog').state)\n"
    )
    enter = f'echo $$ > {group}/cgroup.procs; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", enter, "sh", sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    status = read_status(run_dir, "hog")
    assert done.stdout.split() == ["out_of_memory"], done.stderr
    assert status.exit_code == -signal.SIGKILL
    assert Path(group).name in status.cause and "rose from 0 to 1" in status.cause
