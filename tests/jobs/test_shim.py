"""The shim: it starts by itself and runs a job once, whoever dies."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs.contract import python, submit, wait_for_end, wait_until
from memfit.errors import UsageError
from memfit.jobs import Job, LocalBackend, Unsupervised, read_status, remove_segments
from memfit.memory import GroupState, JobGroup, Walls, is_locked
from memfit.rundir import RunDir

MIB = 1 << 20


@pytest.fixture
def run_dir(tmp_path):
    return RunDir.create(tmp_path, "shim", "0" * 64)


def counting(run_dir, name, seconds):
    """A job that leaves a line for each of its starts."""
    starts = run_dir.path / f"{name}.starts"
    return python(
        name, f"import time\nwith open({str(starts)!r}, 'a') as f: f.write('x\\n')\ntime.sleep({seconds})"
    ), starts


def shim_pid(run_dir, job_id):
    """The shim's process id, once the job itself runs."""
    wait_until(lambda: read_status(run_dir, job_id).pid is not None)
    return read_status(run_dir, job_id).watcher_pid


def shim(run_dir, job_id):
    """Start a shim as a batch system does."""
    command = [sys.executable, "-P", "-m", "memfit.jobs", "shim", str(run_dir.path), "--job", job_id]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_shim_started_again_runs_the_job_once_and_tells_its_exit_code(run_dir):
    backend, starts, go = LocalBackend(run_dir), run_dir.path / "starts", run_dir.path / "go"
    code = (
        f"import pathlib, time\nwith open({str(starts)!r}, 'a') as f: f.write('x')\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.05)\nraise SystemExit(7)"
    )
    submit(backend, python("once", code))
    shim_pid(run_dir, "once")
    with shim(run_dir, "once") as beside:
        assert beside.wait() == 0
    assert backend.poll()["once"].state == "running"
    go.touch()
    assert wait_for_end(backend, "once").exit_code == 7
    outcome = (run_dir.job_dir("once") / "outcome.json").read_text()
    with shim(run_dir, "once") as after:
        assert after.wait() == 7
    assert (run_dir.job_dir("once") / "outcome.json").read_text() == outcome
    assert starts.read_text() == "x"


def test_a_shim_without_an_order_says_what_is_missing(run_dir):
    run_dir.job_dir("nothing").mkdir(parents=True)
    with shim(run_dir, "nothing") as process:
        _, said = process.communicate()
    assert process.returncode == 1 and "job.json is missing" in said


def test_a_shim_that_cannot_start_is_told_as_a_watcher_that_died(run_dir, monkeypatch):
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    backend = LocalBackend(run_dir)
    submit(backend, Job("never", command=("true",)))
    status = wait_for_end(backend, "never")
    assert (status.state, "shim.log" in status.cause) == ("node_fail", True)
    assert "/nonexistent/python" in (run_dir.job_dir("never") / "shim.log").read_text()


def test_a_shim_that_the_platform_ends_has_its_job_save_and_says_who_it_was(run_dir):
    backend, ready = LocalBackend(run_dir, grace_seconds=30), run_dir.path / "ready"
    code = f"import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); pathlib.Path({str(ready)!r}).touch(); time.sleep(300)"
    submit(backend, python("taken", code))
    wait_until(ready.exists)
    os.kill(shim_pid(run_dir, "taken"), signal.SIGTERM)
    status = wait_for_end(backend, "taken")
    assert (status.state, status.exit_code, status.asked, status.ended_by) == ("preempted", 75, False, "platform")


@pytest.mark.slow
def test_a_shim_is_in_a_session_of_its_own_and_leaves_no_empty_log(run_dir):
    backend = LocalBackend(run_dir)
    job, _ = counting(run_dir, "quiet", seconds=1)
    submit(backend, job)
    pid = shim_pid(run_dir, "quiet")
    assert os.getsid(pid) == pid
    assert wait_for_end(backend, "quiet").state == "completed"
    assert not (run_dir.job_dir("quiet") / "shim.log").exists()


@pytest.mark.core
def test_a_job_is_held_from_its_order_on_and_a_later_supervisor_does_not_start_it_again(run_dir):
    for number in range(5):
        job, starts = counting(run_dir, f"job_{number}", seconds=0.3)
        submit(LocalBackend(run_dir), job)  # whose process is killed here
        later = LocalBackend(run_dir)
        assert later.adopt([job.id]) == {job.id}
        with pytest.raises(UsageError, match="running already"):
            submit(later, job)
        assert wait_for_end(later, job.id).attempt == 1
        assert starts.read_text() == "x\n"


@pytest.mark.slow
def test_a_job_that_ran_when_a_supervisor_came_is_not_started_again_however_soon_it_ends(run_dir):
    job, _ = counting(run_dir, "brief", seconds=1)
    submit(LocalBackend(run_dir), job)
    later = LocalBackend(run_dir)
    wait_until(
        lambda: read_status(run_dir, "brief").state == "completed" and not is_locked(run_dir.job_dir("brief") / "lock")
    )
    assert later.adopt(["brief"]) == {"brief"}
    assert later.poll()["brief"].state == "completed"
    assert later.adopt(["brief"]) == {"brief"}


@pytest.mark.slow
def test_an_outcome_that_is_written_while_a_supervisor_comes_is_kept(run_dir, monkeypatch):
    job, _ = counting(run_dir, "brief", seconds=0.5)
    first = LocalBackend(run_dir)
    submit(first, job)

    flock = fcntl.flock

    def look_until_the_end(descriptor, kind):
        if kind & fcntl.LOCK_SH:
            monkeypatch.undo()
            wait_for_end(first, "brief")  # its shim ends while the lock is looked at
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", look_until_the_end)
    LocalBackend(run_dir)
    assert read_status(run_dir, "brief").state == "completed"


def test_a_job_that_is_asked_to_stop_before_it_starts_never_starts(run_dir):
    job, starts = counting(run_dir, "late", seconds=1)
    submit(LocalBackend(run_dir), job)
    backend = LocalBackend(run_dir)
    backend.cancel("late", now=True)
    wait_for_end(backend, "late")
    folder = run_dir.job_dir("late")
    starts.unlink(missing_ok=True)
    (folder / "outcome.json").unlink()
    (folder / "stop_requested").write_text("stop\n")
    with shim(run_dir, "late") as process:
        assert process.wait() == 1
    status = read_status(run_dir, "late")
    assert (status.state, status.asked, status.ended_by, status.started) == ("cancelled", True, "user", None)
    assert not starts.exists()


@pytest.mark.slow
def test_a_closed_backend_still_tells_how_its_jobs_end(run_dir):
    backend = LocalBackend(run_dir)
    submit(backend, python("long", "import time; time.sleep(1)"))
    backend.close()
    assert wait_for_end(backend, "long").state == "completed"


@pytest.fixture
def walls(memory_group):
    built = Walls.build(f"orphan-{os.getpid()}", 400 * MIB)
    assert built is not None
    yield built
    built.parent.kill()
    built.close()
    assert not built.parent.path.exists()


@pytest.mark.slow
@pytest.mark.root
def test_a_stalled_job_without_a_supervisor_gets_what_is_free_by_itself(run_dir, walls):
    supervisor = LocalBackend(run_dir, walls=walls)
    submit(supervisor, python("orphan", "block = bytearray(200 << 20)"), 100 * MIB)
    wait_until(lambda: supervisor.poll()["orphan"].stalled)
    # Nobody holds supervisor.lock, and nobody raises the wall.
    status = wait_for_end(supervisor, "orphan")
    assert (status.state, status.wants_more) == ("completed", True)


@pytest.fixture
def starving(tmp_path, monkeypatch):
    """A job at its wall, below the full wall of its run."""
    group = JobGroup(tmp_path / "memfit-x" / "job-a", 1)
    full = GroupState(100 * MIB, 100 * MIB, 0, 100 * MIB, True, 1)
    monkeypatch.setattr(JobGroup, "state", lambda self: full)
    watch = Unsupervised(tmp_path, group)
    return lambda seconds: [watch.look(full, float(now)) for now in seconds]


def test_a_job_that_can_get_nothing_without_a_supervisor_ends_and_says_why(starving):
    reasons = starving(range(100, 221))
    assert not any(reasons[:60])
    assert "waited" in reasons[-1] and "100.0 MiB" in reasons[-1] and "no supervisor" in reasons[-1]


def test_a_job_at_its_wall_is_left_to_a_supervisor_that_is_there(starving, tmp_path):
    import filelock

    with filelock.FileLock(tmp_path / "supervisor.lock"):
        assert not any(starving(range(100, 300)))


def test_segments_are_removed_by_their_makers_number_alone(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    other = dead.pid + 1 if not Path(f"/proc/{dead.pid + 1}").exists() else dead.pid + 2
    theirs = [f"torch_{dead.pid}_9_0", f"pym-{dead.pid}-xyz", f"__KMP_REGISTERED_LIB_{dead.pid}_0"]
    kept = [f"torch_{other}_9_0", f"torch_{os.getpid()}_1", f"data_{dead.pid}_1", "torch_x_1"]
    for name in theirs + kept:
        (tmp_path / name).touch()
    folder = tmp_path / f"joblib_memmapping_folder_{dead.pid}_1"
    folder.mkdir()
    (folder / "array.pkl").touch()
    ours = {dead.pid, os.getpid()}
    remove_segments(ours, since=time.time() + 60, folder=tmp_path)  # what is older is an earlier process's
    assert len([*tmp_path.iterdir()]) == len(theirs + kept) + 1
    remove_segments(ours, since=time.time() - 60, folder=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


@pytest.mark.slow
def test_an_outcome_cut_short_by_a_power_loss_is_no_outcome(run_dir):
    backend = LocalBackend(run_dir)
    submit(backend, python("cut", "pass"))
    assert wait_for_end(backend, "cut").state == "completed"
    folder = run_dir.job_dir("cut")
    (folder / "outcome.json").write_bytes(b"")
    (folder / "job.json").write_bytes(b"")
    assert read_status(run_dir, "cut").state == "pending"
    again = LocalBackend(run_dir)
    submit(again, python("cut", "pass"))
    assert wait_for_end(again, "cut").state == "completed"
    assert json.loads((folder / "outcome.json").read_text())["attempt"] == 2
