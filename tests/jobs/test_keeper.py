"""Watchers and their keeper: who may die, and what then goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memfit.errors import MemfitError
from memfit.jobs import Grant, Job, LocalBackend, read_status
from memfit.jobs._leftovers import remove_segments
from memfit.jobs._lock import is_held, read_holder
from memfit.jobs._orphan import OrphanWatch
from memfit.memory import GroupState, JobGroup, Walls
from memfit.rundir import RunDir
from memfit.testing import is_alive, wait_for_end, wait_until

MIB = 1 << 20


@pytest.fixture
def run_dir(tmp_path):
    return RunDir.create(tmp_path, "keeper", "0" * 64)


def python(job_id, code):
    return Job(job_id, command=(sys.executable, "-c", code))


def counting(run_dir, name, seconds):
    """A job that leaves a line for each of its starts."""
    starts = run_dir.path / f"{name}.starts"
    return python(
        name, f"import time\nwith open({str(starts)!r}, 'a') as f: f.write('x\\n')\ntime.sleep({seconds})"
    ), starts


def holder_of(run_dir, job_id):
    folder = run_dir.job_dir(job_id)
    wait_until(lambda: (holder := read_holder(folder)) is not None and holder.job_pid is not None and is_held(folder))
    return read_holder(folder)


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_jobs_go_on_when_the_keeper_is_killed_and_further_ones_start(run_dir):
    backend = LocalBackend(run_dir)
    job, starts = counting(run_dir, "survivor", seconds=2)
    backend.submit(job)
    shim = holder_of(run_dir, "survivor").pid
    keeper = backend.keeper_pid()
    assert parent_of(shim) == keeper
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: not is_alive(keeper))
    backend.submit(python("next", "pass"))
    assert wait_for_end(backend, "next").state == "completed"
    assert backend.keeper_pid() != keeper
    while backend.running():
        backend.wait(30.0)
    assert wait_for_end(backend, "survivor").state == "completed"
    assert starts.read_text() == "x\n"


def test_a_keeper_killed_before_it_forked_loses_no_job_and_starts_none_twice(run_dir):
    backend = LocalBackend(run_dir)
    os.kill(backend.keeper_pid(), signal.SIGSTOP)  # so that it takes no order any more
    jobs = [counting(run_dir, f"job_{number}", seconds=0.2) for number in range(5)]
    for job, _ in jobs:
        backend.submit(job)
    os.kill(backend.keeper_pid(), signal.SIGKILL)
    for job, starts in jobs:
        assert wait_for_end(backend, job.id).state == "completed"
        assert starts.read_text() == "x\n"


def test_keepers_killed_again_and_again_lose_no_job_and_start_none_twice(run_dir):
    backend = LocalBackend(run_dir)
    jobs = [counting(run_dir, f"job_{number}", seconds=0.05) for number in range(40)]
    for number, (job, _) in enumerate(jobs):
        backend.submit(job)
        if number % 8 == 5:
            os.kill(backend.keeper_pid(), signal.SIGKILL)
        while len(backend.running()) >= 4:
            backend.wait(0.5)
    for job, starts in jobs:
        assert wait_for_end(backend, job.id).state == "completed"
        assert starts.read_text() == "x\n"


def test_a_keeper_that_cannot_start_is_told_with_its_last_words(run_dir):
    backend = LocalBackend(run_dir, keeper_prefix=["sh", "-c", "echo no such luck >&2; exit 3", "sh"])
    with pytest.raises(MemfitError, match="no such luck"):
        backend.submit(python("never", "pass"))
        wait_until(lambda: bool(backend.poll()) and False)


def test_a_keeper_starts_behind_a_prefix(run_dir):
    backend = LocalBackend(run_dir, keeper_prefix=["env", "MARKED_BY_PREFIX=yes"])
    backend.submit(python("marked", "import os, sys; sys.exit(os.environ.get('MARKED_BY_PREFIX') != 'yes')"))
    assert wait_for_end(backend, "marked").exit_code == 0


def test_the_keeper_leaves_with_its_supervisor_and_the_next_one_takes_the_jobs_over(run_dir):
    job, starts = counting(run_dir, "taken", seconds=3)
    supervisor = (
        "import os, pathlib, signal, time; from memfit.jobs import Job, LocalBackend; from memfit.rundir import RunDir\n"
        f"b = LocalBackend(RunDir(pathlib.Path({str(run_dir.path)!r})))\n"
        f"b.submit(Job('taken', command={job.command!r}))\n"
        "while b.poll()['taken'].state != 'running': time.sleep(0.05)\n"
        "print(b.keeper_pid(), flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", supervisor], check=False, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    wait_until(lambda: not is_alive(int(killed.stdout)))
    assert read_status(run_dir, "taken").state in ("pending", "running")
    backend = LocalBackend(run_dir)
    assert backend.is_running("taken")
    backend.submit(job)
    while backend.running():
        backend.wait(30.0)
    assert wait_for_end(backend, "taken").state == "completed"
    assert starts.read_text() == "x\n"


def test_brief_jobs_share_a_watcher_and_a_long_one_has_its_own(run_dir):
    backend, watchers = LocalBackend(run_dir), []
    for number in range(3):
        backend.submit(python(f"brief_{number}", "pass"))
        assert wait_for_end(backend, f"brief_{number}").state == "completed"
        watchers.append(read_holder(run_dir.job_dir(f"brief_{number}")).pid)
        assert not is_held(run_dir.job_dir(f"brief_{number}"))
        assert not (run_dir.job_dir(f"brief_{number}") / "shim.log").exists()  # nothing was said
    assert len(set(watchers)) == 1
    backend.submit(python("long", "import time; time.sleep(1.5)"))
    assert wait_for_end(backend, "long").state == "completed"
    wait_until(lambda: not is_alive(read_holder(run_dir.job_dir("long")).pid))


def test_a_watcher_that_waits_for_a_job_leaves_with_its_keeper(run_dir):
    backend = LocalBackend(run_dir)
    backend.submit(python("brief", "pass"))
    assert wait_for_end(backend, "brief").state == "completed"
    watcher = read_holder(run_dir.job_dir("brief")).pid
    assert is_alive(watcher)
    os.kill(backend.keeper_pid(), signal.SIGKILL)
    wait_until(lambda: not is_alive(watcher))


def test_a_watcher_killed_between_two_jobs_harms_neither(run_dir):
    backend = LocalBackend(run_dir)
    backend.submit(python("first", "pass"))
    assert wait_for_end(backend, "first").state == "completed"
    os.kill(read_holder(run_dir.job_dir("first")).pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(read_holder(run_dir.job_dir("first")).pid))
    backend.submit(python("second", "pass"))
    assert wait_for_end(backend, "second").state == "completed"


def test_a_shim_that_was_ordered_twice_runs_the_job_once(run_dir):
    backend = LocalBackend(run_dir)
    job, starts = counting(run_dir, "once", seconds=0.3)
    backend.submit(job)
    backend._order_shim("once")
    assert wait_for_end(backend, "once").state == "completed"
    backend._order_shim("once")
    backend.submit(python("after", "pass"))
    assert wait_for_end(backend, "after").state == "completed"
    assert starts.read_text() == "x\n"


def test_a_watcher_has_no_file_of_the_keepers(run_dir):
    backend = LocalBackend(run_dir)
    for name in ("a", "b", "c"):
        backend.submit(python(name, "import time; time.sleep(60)"))
    shims = [holder_of(run_dir, name).pid for name in ("a", "b", "c")]
    keeper = backend.keeper_pid()
    ends = {str(path.readlink()) for path in Path(f"/proc/{keeper}/fd").iterdir()}
    for shim in shims:
        files = [str(path.readlink()) for path in Path(f"/proc/{shim}/fd").iterdir()]
        assert not ends.intersection(files) - {"/dev/null", str(run_dir.path / "keeper.log")}
        assert sum(file.startswith("socket:") for file in files) == 1
        assert os.getsid(shim) == shim
    for name in ("a", "b", "c"):
        backend.cancel(name, now=True)
        assert wait_for_end(backend, name).state == "cancelled"


def test_the_kept_supervisor_end_is_closed_with_the_backend(run_dir):
    backend = LocalBackend(run_dir)
    backend.submit(python("long", "import time; time.sleep(2)"))
    holder_of(run_dir, "long")
    keeper = backend.keeper_pid()
    backend.close()
    assert not is_alive(keeper)
    assert backend.running() == ["long"]
    assert wait_for_end(backend, "long").state == "completed"


@pytest.fixture
def walls(memory_group):
    built = Walls.build(f"orphan-{os.getpid()}", 400 * MIB)
    assert built is not None
    yield built
    for group in built.existing().values():
        group.kill()
    built.close()
    assert not built.parent.path.exists()


@pytest.mark.root
def test_a_stalled_job_without_a_supervisor_gets_what_is_free_by_itself(run_dir, walls):
    supervisor = LocalBackend(run_dir, walls=walls)
    supervisor.submit(python("orphan", "block = bytearray(200 << 20)"), Grant(50 * MIB, 100 * MIB))
    wait_until(lambda: supervisor.poll()["orphan"].stalled)
    # Nobody holds supervisor.lock, and nobody raises the wall.
    status = wait_for_end(supervisor, "orphan")
    assert (status.state, status.wants_more) == ("completed", True)


def stalled(group, monkeypatch, states):
    monkeypatch.setattr(JobGroup, "state", lambda self: states[self.path])
    return states[group.path]


def test_an_orphan_that_can_get_nothing_ends_and_says_why(tmp_path, monkeypatch):
    parent = tmp_path / "memfit-x"
    group = JobGroup(parent / "job-a", 1)
    group.path.mkdir(parents=True)
    full = GroupState(100 * MIB, 100 * MIB, 0, 100 * MIB, True, 1, 0, 1)
    state = stalled(group, monkeypatch, {group.path: full, parent: full})
    watch = OrphanWatch(tmp_path, group)
    reasons = [watch.look(state, float(now)) for now in range(100, 175)]
    assert reasons[0] == "" and reasons[60] == ""
    assert "waited" in reasons[-1] and "100.0 MiB" in reasons[-1] and "no supervisor" in reasons[-1]


def test_an_orphan_is_left_to_a_supervisor_that_is_there(tmp_path, monkeypatch):
    import filelock

    group = JobGroup(tmp_path / "memfit-x" / "job-a", 1)
    group.path.mkdir(parents=True)
    full = GroupState(100 * MIB, 100 * MIB, 0, 100 * MIB, True, 1, 0, 1)
    state = stalled(group, monkeypatch, {group.path: full, group.path.parent: full})
    watch = OrphanWatch(tmp_path, group)
    with filelock.FileLock(tmp_path / "supervisor.lock"):
        assert not any(watch.look(state, float(now)) for now in range(100, 300))


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
    removed = remove_segments({dead.pid, os.getpid()}, since=time.time() - 60, folder=tmp_path)
    assert sorted(removed) == sorted([*theirs, folder.name])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_a_segment_older_than_the_job_is_another_ones(tmp_path):
    old = tmp_path / "torch_999999999_1_0"
    old.touch()
    assert remove_segments({999999999}, since=time.time() + 60, folder=tmp_path) == []
    assert old.exists()


def test_an_outcome_cut_short_by_a_power_loss_is_no_outcome(run_dir):
    backend = LocalBackend(run_dir)
    backend.submit(python("cut", "pass"))
    assert wait_for_end(backend, "cut").state == "completed"
    folder = run_dir.job_dir("cut")
    (folder / "outcome.json").write_bytes(b"")
    (folder / "job.json").write_bytes(b"")
    assert read_status(run_dir, "cut").state == "pending"
    again = LocalBackend(run_dir)
    again.submit(python("cut", "pass"))
    assert wait_for_end(again, "cut").state == "completed"
    assert json.loads((folder / "outcome.json").read_text())["attempt"] == 2
