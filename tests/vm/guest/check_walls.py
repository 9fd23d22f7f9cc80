"""Walls from wherever a process may stand in a real unified tree, as root and as an ordinary user.

What a wall does to a job is in ``tests/memory/test_walls.py``, which runs here too.
"""

import subprocess
import sys

import pytest

from jobs.contract import wait_until
from memfit.memory import JobGroup, Walls, _jobgroup, why_no_walls
from vm.guest.groups import MIB, NOBODY, TOP, call_in, events, groups_below, made_group, own_group

TAKE = "import sys; kept = [bytearray(b'x') * (1 << 20) for _ in range(int(sys.argv[1]))]"


def hold_a_job():
    """Build walls where this process stands, hold a job at one and let it go on; what was seen on the way."""
    before = own_group()
    walls = Walls.build("held", 512 * MIB)
    assert walls is not None, why_no_walls()
    during = own_group()
    walls.grant("a", 32 * MIB)
    with subprocess.Popen([sys.executable, "-c", TAKE, "64"], preexec_fn=(group := walls.find("a")).enter) as job:
        wait_until(lambda: group.state().stalled and group.state().met_wall > 0)
        held = group.state()
        assert job.poll() is None
        walls.grant("a", 128 * MIB)
        assert job.wait(60) == 0
    kills = events(group.path)["oom_kill"]
    walls.close()
    return {
        "before": before,
        "during": during,
        "parent": walls.parent.path,
        "wall": held.wall_bytes,
        "kills": kills,
        "after": own_group(),
    }


@pytest.mark.parametrize("uid", [0, NOBODY])
def test_from_a_delegated_group_the_supervisor_moves_to_a_leaf_and_back(uid):
    with made_group(owner=uid) as group:
        seen = call_in(group, hold_a_job, uid=uid)
        assert (seen["wall"], seen["kills"]) == (32 * MIB, 0)
        assert seen["parent"] == group / "memfit-held"
        assert (seen["before"], seen["during"], seen["after"]) == (group, group / "memfit-held.outside", group)
        assert groups_below(group) == []
        assert (group / "cgroup.subtree_control").read_text().split() == []


def test_a_foreign_limit_on_the_own_group_holds_for_the_jobs_below_it():
    with made_group(memory_max=256 * MIB) as group:
        seen = call_in(group, hold_a_job)
        assert seen["parent"].parent == group
        assert (group / "memory.max").read_text() == f"{256 * MIB}\n"


@pytest.fixture
def stranger():
    """Starts a process that is nobody's child here in a group."""
    started = []

    def start(group):
        started.append(subprocess.Popen(["sleep", "600"]))
        (group / "cgroup.procs").write_text(str(started[-1].pid))
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.wait()


def build_and_close():
    """The parent group of walls built where this process stands or why there are none, and where it stood then."""
    walls = Walls.build("tried", 64 * MIB)
    if walls is None:
        return why_no_walls(), own_group()
    stood = own_group()
    walls.close()
    return walls.parent.path, stood


@pytest.mark.parametrize("knob", ["memory_max", "memory_high"])
def test_beside_a_stranger_a_foreign_limit_is_not_escaped(stranger, knob):
    with made_group(**{knob: 256 * MIB}) as group:
        pid = stranger(group)
        reason, stood = call_in(group, build_and_close)
        assert "holds processes of others (1)" in reason
        assert f"{knob.replace('_', '.', 1)} must not be left" in reason
        assert stood == group
        assert (group / "cgroup.procs").read_text().split() == [str(pid)]
        assert groups_below(group) == []


def test_a_foreign_limit_further_above_is_not_escaped_either(stranger):
    with made_group(memory_max=256 * MIB) as outer:
        (outer / "cgroup.subtree_control").write_text("+memory")
        with made_group("inner", parent=outer) as inner:
            stranger(inner)
            parent, stood = call_in(inner, build_and_close)
            assert (parent, stood) == (outer / "memfit-tried", inner)


def test_beside_a_stranger_without_a_limit_the_groups_are_made_further_up_and_nothing_is_moved(stranger):
    with made_group() as group:
        pid = stranger(group)
        parent, stood = call_in(group, build_and_close)
        assert (parent, stood) == (TOP / "memfit-tried", group)
        assert not parent.exists()
        assert (group / "cgroup.procs").read_text().split() == [str(pid)]


def test_an_ordinary_user_gets_no_walls_in_a_group_that_is_not_delegated_and_hears_why():
    with made_group() as group:
        reason, stood = call_in(group, build_and_close, uid=NOBODY)
        assert reason == f"cgroup v2 /{group.name} cannot be written by this user"
        assert stood == group


def test_an_ordinary_users_supervisor_that_dies_leaves_what_the_next_one_takes_over():
    def die():
        walls = Walls.build("again", 256 * MIB)
        walls.grant("a", 32 * MIB)
        group = walls.find("a")
        subprocess.Popen([sys.executable, "-c", TAKE, "64"], preexec_fn=group.enter, start_new_session=True)
        wait_until(lambda: group.state().stalled)

    def take_over():
        walls = Walls.build("again", 256 * MIB)
        assert walls is not None, why_no_walls()
        group = JobGroup.at(walls.parent.path / "job-a")
        assert group.state().stalled
        walls.grant("a", 128 * MIB)
        wait_until(lambda: not group.pids())
        found = walls.parent.path, events(group.path)["oom_kill"]
        walls.close()
        return found

    with made_group(owner=NOBODY) as group:
        call_in(group, die, uid=NOBODY)
        # The group itself takes no process any more: who joins it later is put where the first process was moved to.
        leaf = group / "memfit-again.outside"
        assert call_in(leaf, take_over, uid=NOBODY) == (group / "memfit-again", 0)
        assert groups_below(group) == [leaf.name]


def test_a_job_that_is_held_shows_in_the_kernels_pressure():
    def hold():
        walls = Walls.build("pressed", 256 * MIB)
        walls.grant("a", 32 * MIB)
        with subprocess.Popen([sys.executable, "-c", TAKE, "64"], preexec_fn=(group := walls.find("a")).enter):
            wait_until(lambda: _stalled_us(group.path) > 200_000)
            assert group.kill() == 1
        counted = events(group.path)
        walls.close()
        return counted

    with made_group() as group:
        counted = call_in(group, hold)
        assert counted["high"] > 0
        assert counted["oom_kill"] == 0
        assert groups_below(group) == []


def test_without_the_kernels_own_kill_all_processes_of_a_group_are_ended():
    fork_away = "import os, time\nwhile True:\n    os.fork() or time.sleep(60)\n    time.sleep(0.02)"
    put = _jobgroup.put

    def before_linux_5_14(file, text):
        if file.name == "cgroup.kill":
            raise FileNotFoundError(file)
        put(file, text)

    def end():
        walls = Walls.build("frozen", 256 * MIB)
        walls.grant("a", 128 * MIB)
        with subprocess.Popen([sys.executable, "-c", fork_away], preexec_fn=(group := walls.find("a")).enter):
            wait_until(lambda: len(group.pids()) > 3)
            _jobgroup.put = before_linux_5_14
            assert group.kill() > 3
        assert group.pids() == []
        walls.close()

    with made_group() as group:
        call_in(group, end)
        assert groups_below(group) == []


def _stalled_us(group):
    """For how long all processes of a group have waited for memory, in microseconds."""
    full = (group / "memory.pressure").read_text().splitlines()[1]
    return int(full.rpartition("total=")[2])
