"""The local backend with walls on a real unified tree: jobs that complete, that are killed, and what is left of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest

from jobs.contract import is_alive, submit, wait_for_end, wait_until
from memfit.jobs import Job, LocalBackend
from memfit.memory import JobGroup, Walls, why_no_walls
from memfit.rundir import RunDir
from vm.guest.groups import MIB, NOBODY, TOP, call_in, events, groups_below, made_group, own_group

HOLD = "import sys, time; kept = [bytearray(b'x') * (1 << 20) for _ in range(int(sys.argv[1]))]; time.sleep(1)"

# Starts a grandchild in a session of its own, takes 32 MiB and, when the file "more" is there, 200 MiB more.
GROWS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
kept = [bytearray(b"x") * (1 << 20) for _ in range(32)]
pathlib.Path("pids.part").write_text(str(child.pid))
pathlib.Path("pids.part").rename("pids")
while not pathlib.Path("more").exists():
    time.sleep(0.05)
kept += [bytearray(b"x") * (1 << 20) for _ in range(200)]
"""
READS = """
import mmap, sys
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
    print(len(content), sum(content[at] for at in range(0, len(content), 4096)))
"""


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    """One backend for all tests; no group is left of it."""
    before = own_group()
    run_dir = RunDir.create(tmp_path_factory.mktemp("local"), "guest", "0" * 64)
    walls = Walls.build("local", 1 << 30)
    assert walls is not None, why_no_walls()
    backend = LocalBackend(run_dir, walls=walls)
    yield backend
    backend.close()
    walls.close()
    assert own_group() == before
    assert groups_below(before) == []
    assert (before / "cgroup.procs").read_text().split() == [str(os.getpid())]


def test_a_job_completes_in_its_own_group_and_its_peak_is_told(backend):
    submit(backend, Job("good", command=(sys.executable, "-c", HOLD, "64")), 200 * MIB)
    status = wait_for_end(backend, "good")
    assert (status.state, status.exit_code, status.cause) == ("completed", 0, "")
    assert 64 * MIB < status.peak_bytes < 100 * MIB
    assert status.evidence["group"] == f"{backend.enforcer.parent.name}/job-good"
    assert status.evidence["wall_bytes"] == 200 * MIB
    assert status.evidence["charged_peak_bytes"] >= 64 * MIB
    assert (status.evidence["met_wall"], status.wants_more) == (0, False)
    assert not (backend.enforcer.parent.path / "job-good").exists()


def test_a_job_that_meets_its_wall_is_told_as_stalled_and_completes_when_it_gets_more(backend):
    submit(backend, Job("held", command=(sys.executable, "-c", HOLD, "64")), 32 * MIB)
    wait_until(lambda: backend.poll()["held"].stalled)
    held = backend.poll()["held"]
    assert (held.state, held.wants_more) == ("running", True)
    wait_until(lambda: events(JobGroup.at(backend.enforcer.parent.path / "job-held").path)["high"] > 0)
    backend.enforcer.grant("held", 128 * MIB)
    status = wait_for_end(backend, "held")
    assert (status.state, status.cause, status.stalled) == ("completed", "", False)
    assert status.evidence["met_wall"] > 0


def test_a_kill_at_memory_max_is_proven_by_the_groups_own_counter_and_takes_the_grandchildren(backend, tmp_path):
    job = Job("killed", command=(sys.executable, "-c", GROWS), cwd=str(tmp_path), keeps_group=True)
    submit(backend, job, 500 * MIB)
    wait_until((tmp_path / "pids").exists)
    group = JobGroup.at(backend.enforcer.parent.path / "job-killed")
    (group.path / "memory.max").write_text(str(64 * MIB))
    (tmp_path / "more").touch()
    status = wait_for_end(backend, "killed")
    assert (status.state, status.exit_code) == ("out_of_memory", -9)
    assert "the oom_kill counter of" in status.cause
    assert "rose from 0 to" in status.cause
    counted = events(group.path)
    before, after = (status.evidence["oom_kills"][when]["own"] for when in ("before", "after"))
    assert (before, after) == (0, counted["oom_kill"])
    assert counted["oom_group_kill"] == 1  # the kernel itself took all of them, not the job's watcher
    assert not is_alive(int((tmp_path / "pids").read_text()))
    assert group.pids() == []


def test_a_job_killed_by_a_stranger_is_not_taken_for_one_that_ran_out_of_memory(backend):
    submit(backend, Job("shot", command=("sleep", "600")), 128 * MIB)
    wait_until(lambda: backend.poll()["shot"].pid is not None)
    os.kill(backend.poll()["shot"].pid, 9)
    status = wait_for_end(backend, "shot")
    assert status.state == "failed"
    assert "the oom_kill counter of its own group stayed at 0" in status.cause


def test_a_job_that_maps_a_file_of_twice_its_limit_and_reads_all_of_it_finishes(backend):
    # One of the machine's, on its disk: what is written here first would be in the cache already.
    file = max(Path(pyarrow.__file__).parent.glob("*.so*"), key=lambda path: path.stat().st_size)
    size = file.stat().st_size
    assert size > 32 * MIB
    grant = size // 2
    submit(backend, Job("maps", command=(sys.executable, "-c", READS, str(file))), grant)
    status = wait_for_end(backend, "maps")
    assert (status.state, status.cause) == ("completed", "")
    assert (backend.run.job_dir("maps") / "out.log").read_text().startswith(f"{size} ")
    assert status.evidence["met_wall"] > 0
    assert status.peak_bytes < grant - MIB
    assert status.evidence["charged_peak_bytes"] > grant - 4 * MIB


# Does what systemd's user manager does for `systemd-run --user --scope --property=Delegate=yes -- COMMAND`.
SYSTEMD_RUN = """#!/bin/sh
echo "$*" >> "$XDG_RUNTIME_DIR/calls"
while [ "$1" != -- ]; do shift; done
shift
scope=/sys/fs/cgroup/user.slice/app/run-$$.scope
mkdir $scope && echo $$ > $scope/cgroup.procs && exec "$@"
"""


@pytest.fixture
def session(tmp_path):
    """An ordinary user's login session, beside a folder in which his user manager makes scopes: its group, and env."""
    bin_folder, runtime = tmp_path / "bin", tmp_path / "runtime"
    for folder in (bin_folder, runtime / "systemd", tmp_path / "work"):
        folder.mkdir(parents=True)
    (runtime / "systemd/private").touch()
    (bin_folder / "systemd-run").write_text(SYSTEMD_RUN)
    for path in (*tmp_path.parents[:2], tmp_path):
        path.chmod(path.stat().st_mode | 0o005)
    for path in (runtime, tmp_path / "work"):
        os.chown(path, NOBODY, NOBODY)
    (bin_folder / "systemd-run").chmod(0o755)
    env = {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(runtime),
        "HOME": str(tmp_path / "work"),
    }
    with made_group("user.slice") as slice_:
        (slice_ / "cgroup.subtree_control").write_text("+memory")
        # Stands for the manager's right to attach the session's processes to a scope.
        os.chown(slice_ / "cgroup.procs", NOBODY, NOBODY)
        with made_group("app", parent=slice_, owner=NOBODY) as app, made_group("session", parent=slice_) as session:
            (app / "cgroup.subtree_control").write_text("+memory")
            yield session, env


def test_an_ordinary_users_jobs_get_their_walls_in_a_scope_of_the_user_manager(session, tmp_path):
    group, env = session
    job = "import sys, pathlib; print(pathlib.Path('/proc/self/cgroup').read_text(), sys.argv[1])"
    words = ["run", "--param", "x=1..2", "--", sys.executable, "-c", job, "{x}"]

    def run():
        return subprocess.run(
            [sys.executable, "-m", "memfit", *words],
            cwd=tmp_path / "work",
            env={**os.environ, **env},
            capture_output=True,
            text=True,
        )

    result = call_in(group, run, uid=NOBODY)
    assert result.returncode == 0, result.stderr
    (runtime,) = tmp_path.glob("runtime/calls")
    assert "--user --scope" in runtime.read_text()
    logs = sorted(path.read_text() for path in tmp_path.glob("work/runs/*/*/jobs/*/out.log"))
    assert [log.split()[-1] for log in logs] == ["1", "2"]
    assert all(".scope/memfit-" in log for log in logs)
    written = [path.read_text() for path in tmp_path.glob("work/runs/*/*/events/*.jsonl")]
    said = [json.loads(line) for text in written for line in text.splitlines()]
    (budget,) = (event for event in said if event["kind"] == "budget")
    assert budget["permission"] == "cgroup v2"
    assert str(TOP / "user.slice/app") in budget["group"]
    # A scope goes with its last process where there is a manager; here it stays, and nothing in it does.
    scopes = groups_below(TOP / "user.slice/app")
    assert len(scopes) == 2  # one to see that walls can be made there, one for the run
    for scope in scopes:
        assert groups_below(TOP / "user.slice/app" / scope) == []
        assert (TOP / "user.slice/app" / scope / "cgroup.procs").read_text() == ""
