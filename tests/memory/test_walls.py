"""Walls: real groups, real processes that meet them, and the choice of where groups may be made."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from jobs.contract import is_alive, wait_until
from memfit.memory import (
    NO_WALL_BYTES,
    Base,
    JobGroup,
    Walls,
    find_base,
    locate,
    oom_kills_above,
    sweep_groups,
    systemd_scope_command,
    why_no_walls,
)

MIB = 1 << 20

# Takes memory in pieces of 1 MiB: first so many, then more when a line comes, and holds it until the end of input.
HOG = """
import sys
kept = []
for line in sys.stdin:
    for _ in range(int(line)):
        kept.append(bytearray(b"x") * (1 << 20))
    print("took", line.strip(), flush=True)
"""
READER = """
import os, sys
with open(sys.argv[1], "rb", buffering=0) as file:
    os.fsync(file.fileno())  # Pages that wait to be written are not dropped, and stay their writer's.
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    while file.read(1 << 20):
        pass
"""


@pytest.fixture
def build():
    """Builds real walls below this process's own group; everything is ended and removed afterwards."""
    if reason := why_no_walls():
        pytest.skip(f"needs control groups: {reason}")
    made = []

    def make(capacity_bytes=1 << 30, name=None) -> Walls:
        walls = Walls.build(name or f"test-{uuid.uuid4().hex[:8]}", capacity_bytes)
        assert walls is not None
        made.append(walls)
        return walls

    yield make
    for walls in made:
        walls.parent.kill()
        walls.close()
        assert not walls.parent.path.exists()


class Running:
    """A program in a group, that is told what to take."""

    def __init__(self, group, code=HOG, *words):
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            preexec_fn=group.enter,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        with self.process:
            pass  # Closes its pipes and reaps it.

    def take(self, num_mib):
        """Ask for so much more."""
        self.process.stdin.write(f"{num_mib}\n")
        self.process.stdin.flush()

    def took(self):
        """Wait until it has it."""
        return self.process.stdout.readline().startswith("took")

    def end(self):
        """Its exit code, after its end of input."""
        self.process.stdin.close()
        return self.process.wait(60)


def granted(walls, job_id, wall_bytes):
    walls.grant(job_id, wall_bytes)
    return walls.find(job_id)


def waits(group):
    return group.state().stalled


def groups_of(walls):
    """The groups of jobs that are there, by the job's id."""
    folders = (path.parent for path in walls.parent.path.glob("job-*/cgroup.procs"))
    return {folder.name.removeprefix("job-"): JobGroup.at(folder) for folder in folders}


def test_a_process_at_its_wall_waits_and_goes_on_when_the_wall_is_raised(build):
    walls = build()
    group = granted(walls, "a", 64 * MIB)
    with Running(group) as hog:
        hog.take(150)
        wait_until(lambda: waits(group))
        state = group.state()
        assert state.wall_bytes == 64 * MIB
        assert state.met_wall > 0
        assert 0.8 * 64 * MIB < state.used_bytes <= 1.3 * 64 * MIB
        walls.grant("a", 256 * MIB)
        assert hog.took()
        assert not waits(group)
        assert hog.end() == 0
    assert group.charged_peak() > 150 * MIB or group.charged_peak() == 0  # 0: a kernel that keeps no peak
    assert oom_kills_above(group.path)[group.path] == 0


def test_a_group_that_is_gone_has_nothing_and_takes_no_harm(build):
    walls = build()
    group = granted(walls, "a", 64 * MIB)
    assert group.remove()
    assert group.state() is None
    walls.grant("a", MIB)
    group.set_wall(MIB)
    assert (group.pids(), group.kill(), group.charged_peak(), group.remove()) == ([], 0, 0, True)
    assert groups_of(walls) == {}


def test_kill_ends_a_process_that_waits_at_its_wall_with_its_grandchildren(build):
    walls = build()
    group = granted(walls, "a", 64 * MIB)
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        "start_new_session=True); print(p.pid, flush=True); k = [bytearray(b'x') * (1 << 20) for _ in range(200)]"
    )
    with Running(group, code) as hog:
        grandchild = int(hog.process.stdout.readline())
        wait_until(lambda: waits(group))
        assert sorted(group.pids()) == sorted([hog.process.pid, grandchild])
        assert not group.remove()
        assert group.kill() == 2
        assert hog.process.wait(60) == -9
    wait_until(lambda: not is_alive(grandchild))
    assert group.remove()
    assert not group.path.exists()


@pytest.mark.slow
def test_two_jobs_meet_the_wall_of_their_parent_and_one_goes_on_when_the_other_ends(build):
    walls = build(160 * MIB)
    first, second = (granted(walls, name, 400 * MIB) for name in ("a", "b"))
    with Running(first) as one, Running(second) as two:
        one.take(90)
        assert one.took()
        assert not waits(first)
        two.take(120)
        wait_until(lambda: waits(second))
        assert not waits(first)  # It sleeps too, but for its next line and not for memory.
        assert walls.parent.state().stalled
        assert one.end() == 0
        assert two.took()
        assert two.end() == 0
    assert [oom_kills_above(group.path)[group.path] for group in (first, second, walls.parent)] == [0, 0, 0]


def test_the_parents_wall_can_be_raised(build):
    walls = build(96 * MIB)
    group = granted(walls, "a", 400 * MIB)
    with Running(group) as hog:
        hog.take(150)
        wait_until(lambda: waits(group))
        walls.cap(300 * MIB)
        assert hog.took()


def on_disk(folder):
    """Whether files there become page cache that can be dropped."""
    kinds = {one.split()[1]: one.split()[2] for one in Path("/proc/mounts").read_text().splitlines()}
    mount = next(str(path) for path in (folder, *folder.parents) if str(path) in kinds)
    return kinds[mount] not in ("tmpfs", "overlay", "ramfs")


@pytest.mark.slow
def test_page_cache_stalls_no_job(build, tmp_path):
    if not on_disk(tmp_path):
        pytest.skip(f"needs a disk below {tmp_path}")
    path = tmp_path / "large"
    path.write_bytes(bytes(128 * MIB))
    walls = build()
    for attempt in range(5):  # A busy kernel may take cache back at any moment.
        group = granted(walls, f"a{attempt}", 64 * MIB)
        with Running(group, READER, str(path)) as reader:
            assert reader.process.wait(60) == 0
        state = group.state()
        assert (oom_kills_above(group.path)[group.path], state.stalled) == (0, False)
        if state.used_bytes + state.cache_bytes > 40 * MIB:
            break
    assert state.used_bytes + state.cache_bytes > 40 * MIB > state.used_bytes


def test_a_wall_below_what_is_used_is_set_as_low_as_possible_and_kills_nothing(build):
    walls = build()
    group = granted(walls, "a", 256 * MIB)
    with Running(group) as hog:
        hog.take(100)
        assert hog.took()
        group.set_wall(16 * MIB)
        state = group.state()
        if group.version == 1:
            assert state.used_bytes <= state.wall_bytes < 128 * MIB
        else:
            assert state.wall_bytes == 16 * MIB
        group.set_wall(256 * MIB)
        assert group.state().wall_bytes == 256 * MIB
        hog.take(50)
        assert hog.took()
        assert hog.end() == 0


def test_shared_memory_counts_and_stays_charged_until_it_is_unlinked(build):
    walls = build()
    group = granted(walls, "a", 256 * MIB)
    path = Path("/dev/shm", f"memfit-test-{uuid.uuid4().hex[:8]}")
    code = "import sys; f = open(sys.argv[1], 'wb'); [f.write(bytes(1 << 20)) for _ in range(20)]"
    try:
        with Running(group, code, str(path)) as writer:
            assert writer.process.wait(60) == 0
        assert group.state().shared_memory_bytes == 20 * MIB
        assert group.state().used_bytes >= 20 * MIB
    finally:
        path.unlink(missing_ok=True)
    wait_until(lambda: group.state().shared_memory_bytes == 0)  # the kernel counts a little late


@pytest.mark.parametrize("job_id", ["memory.stat", "cgroup.procs", "tasks", "cmd_0001", "a.b-c"])
def test_any_job_id_can_name_a_group(build, job_id):
    walls = build()
    group = granted(walls, job_id, 64 * MIB)
    assert groups_of(walls) == {job_id: group} == {job_id: JobGroup.at(group.path)}
    assert group.name == f"{walls.parent.name}/{group.path.name}"
    assert granted(walls, job_id, 32 * MIB) == group
    assert group.state().wall_bytes == 32 * MIB


def test_after_a_crash_the_same_name_takes_the_groups_over(build):
    name = f"test-{uuid.uuid4().hex[:8]}"
    walls = build(name=name)
    group = granted(walls, "a", 64 * MIB)
    with Running(group) as hog:
        hog.take(100)
        wait_until(lambda: waits(group) and group.state().used_bytes > 60 * MIB)  # the kernel's counters lag
        taken = build(512 * MIB, name)
        assert groups_of(taken) == {"a": group}
        assert taken.parent.state().wall_bytes >= 512 * MIB + 60 * MIB  # what the job has is not what may be lent
        assert granted(taken, "a", 256 * MIB) == group
        assert hog.took()
        assert hog.end() == 0


def test_the_peak_of_a_group_that_is_used_again_starts_anew(build):
    walls = build()
    group = granted(walls, "a", 128 * MIB)
    if group.version == 2:
        pytest.skip("v2 keeps a peak for good; a group is removed between attempts")
    with Running(group) as hog:
        hog.take(50)
        assert hog.took()
    wait_until(lambda: not group.pids())
    assert group.charged_peak() > 50 * MIB
    walls.forget("a")
    granted(walls, "a", 128 * MIB)
    assert group.charged_peak() < 50 * MIB


def test_a_sweep_ends_what_a_dead_run_left_and_removes_it(build):
    walls = build()
    group = granted(walls, "a", 64 * MIB)
    granted(walls, "b", 64 * MIB)
    with Running(group) as hog:
        hog.take(100)
        wait_until(lambda: waits(group))
        assert sweep_groups(walls.parent.path, uid=os.getuid() + 1) == 0
        assert sweep_groups(group.path) == 0  # Not a parent group.
        assert hog.process.poll() is None
        assert sweep_groups(walls.parent.path) == 1
        assert hog.process.wait(60) == -9
    assert not walls.parent.path.exists()
    assert sweep_groups(walls.parent.path) == 0


def test_a_sweep_leaves_a_folder_alone_that_is_no_group(tmp_path):
    folder = tmp_path / "memfit-x"
    folder.mkdir()
    assert sweep_groups(folder) == 0
    assert folder.exists()


def test_close_leaves_a_group_with_a_process_and_what_is_above_it(build):
    walls = build()
    busy, idle = granted(walls, "busy", 64 * MIB), granted(walls, "idle", 64 * MIB)
    with Running(busy) as hog:
        hog.take(1)
        assert hog.took()
        walls.close()
        assert busy.path.exists()
        assert not idle.path.exists()
    wait_until(lambda: not busy.pids())
    walls.close()
    assert not walls.parent.path.exists()


@pytest.mark.root
def test_on_v1_a_jobs_killer_is_off_and_it_is_never_swapped(build):
    walls = build()
    group = granted(walls, "a", 64 * MIB)
    if group.version == 2:
        pytest.skip("needs a cgroup v1 memory hierarchy")
    assert "oom_kill_disable 1" in (group.path / "memory.oom_control").read_text()
    assert (group.path / "memory.swappiness").read_text() == "0\n"


@pytest.mark.root
def test_the_walls_of_another_process_are_below_its_own_group(memory_group):
    foreign = memory_group(-1)
    child = subprocess.Popen(["sleep", "600"], preexec_fn=JobGroup(foreign, 1).enter)
    walls = Walls.build("of-another", 64 * MIB, pid=child.pid)
    try:
        assert walls is not None
        assert walls.parent.path == foreign / "memfit-of-another"
        assert walls.parent.name == f"cgroup v1 /{foreign.name}/memfit-of-another"
    finally:
        child.kill()
        child.wait()
        if walls:
            walls.close()


# What follows has no kernel in it: made-up trees of a unified hierarchy.

MOUNT = "30 25 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"


class Tree:
    """A made-up tree: groups with their processes and knobs, and who is whose parent."""

    def __init__(self, root, own, pid=100):
        self.root, self.pid = root, pid
        self.process(pid, 1)
        (root / "proc/self").mkdir()
        for folder in ("self", str(pid)):
            (root / f"proc/{folder}/cgroup").write_text(f"0::{own}\n")
        (root / "proc/self/status").write_text(f"Pid:\t{pid}\nUid:\t1000\t1000\t1000\t1000\n")
        (root / "proc/self/mountinfo").write_text(MOUNT)
        self.group("/", procs=[1])
        (root / "sys/fs/cgroup/cgroup.type").unlink()
        self.denied = set()

    def process(self, pid, parent):
        folder = self.root / f"proc/{pid}"
        folder.mkdir(parents=True)
        (folder / "status").write_text(f"Pid:\t{pid}\nPPid:\t{parent}\n")

    def group(self, path, *, procs=(), controllers="cpu memory", enabled="", **knobs):
        folder = self.root / "sys/fs/cgroup" / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        files = {
            "cgroup.type": "domain",
            "cgroup.procs": "".join(f"{pid}\n" for pid in procs),
            "cgroup.controllers": controllers,
            "cgroup.subtree_control": enabled,
            **{name.replace("_", ".", 1): text for name, text in knobs.items()},
        }
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n" if text and not text.endswith("\n") else text)
        return self

    def deny(self, *paths):
        self.denied = {self.root / "sys/fs/cgroup" / path.lstrip("/") for path in paths}

    def base(self, **options):
        def may_write(path):
            return not {path, path.parent} & self.denied

        return find_base(self.root, locate(self.root, "memory", **options), may_write=may_write)


@pytest.fixture
def scope(tmp_path):
    """A process in a delegated scope of an ordinary user, as systemd's user manager makes it."""
    own = "/user.slice/user@1000.service/app.slice/run.scope"
    tree = Tree(tmp_path, own)
    tree.group("/", procs=[1], enabled="cpu memory")
    (tmp_path / "sys/fs/cgroup/cgroup.type").unlink()
    tree.group("/user.slice", enabled="cpu memory")
    tree.group("/user.slice/user@1000.service", enabled="cpu memory")
    tree.group("/user.slice/user@1000.service/app.slice", enabled="memory")
    tree.group(own, procs=[100], controllers="memory")
    tree.deny("/", "/user.slice")
    return tree


OWN = "/user.slice/user@1000.service/app.slice/run.scope"


ABOVE = OWN.rpartition("/")[0]
FREE = {"memory_max": "max", "memory_high": "max", "cpu_max": "max 100000", "cpuset_cpus": ""}
MINE, STRANGERS = [100, 101, 102], [50, 100]


@pytest.mark.parametrize(
    ("procs", "knobs", "base"),
    [
        (MINE, {}, (OWN, True, (100, 101, 102))),  # its processes move out of the way
        ([], {"enabled": "memory"}, (OWN, False, ())),  # enabled for children already
        (MINE[:1], {"memory_max": "1073741824"}, (OWN, True, (100,))),  # its own limit holds for what is below it
        (STRANGERS, {}, (ABOVE, False, ())),  # left for the one above
        (STRANGERS, FREE, (ABOVE, False, ())),
        (MINE[:1], {"controllers": "pids"}, (ABOVE, False, ())),
    ],
)
def test_the_nearest_group_that_may_hold_groups_is_the_base(scope, procs, knobs, base):
    for pid, parent in ((101, 100), (102, 101), (50, 1)):
        scope.process(pid, parent)
    scope.group(OWN, **{"procs": procs, "controllers": "memory", **knobs})
    found = scope.base()
    assert (found.version, found.group.path, found.enables, found.moves) == (2, *base)


@pytest.mark.parametrize("limit", ["memory_max", "memory_high", "cpu_max", "cpuset_cpus"])
def test_a_foreign_limit_is_never_escaped(scope, limit):
    scope.process(50, 1)
    text = {"cpu_max": "50000 100000", "cpuset_cpus": "0"}.get(limit, "1073741824")
    scope.group(OWN, procs=STRANGERS, controllers="memory", **{limit: text})
    reason = scope.base()
    assert "holds processes of others (1)" in reason
    assert f"{limit.replace('_', '.', 1)} must not be left" in reason


def test_where_no_group_can_be_made_the_reason_says_so(scope):
    scope.deny("/", "/user.slice", "/user.slice/user@1000.service", ABOVE, OWN)
    assert scope.base() == f"cgroup v2 {OWN} cannot be written by this user"
    scope.deny("/", "/user.slice")
    scope.process(50, 1)
    scope.group(OWN, procs=[100], controllers="pids")
    scope.group(ABOVE, procs=[50], controllers="memory", enabled="pids")
    scope.group("/user.slice/user@1000.service", procs=[50], enabled="cpu")
    assert scope.base() == f"cgroup v2 {OWN} has no memory controller"


def test_the_leaf_of_an_earlier_start_is_not_built_in(scope):
    leaf = f"{OWN}/memfit-x.outside"
    scope.group(OWN, controllers="memory", enabled="memory")
    scope.group(leaf, procs=[100], controllers="memory")
    (scope.root / "proc/self/cgroup").write_text(f"0::{leaf}\n")
    assert scope.base() == Base(2, scope.base().group)
    assert scope.base().group.path == OWN


def test_the_root_group_may_hold_processes_beside_groups(tmp_path):
    tree = Tree(tmp_path, "/", pid=100)
    tree.group("/", procs=[1, 100])
    (tmp_path / "sys/fs/cgroup/cgroup.type").unlink()
    base = tree.base()
    assert (base.group.path, base.enables, base.moves) == ("/", True, ())


def test_the_base_of_another_process_is_found_from_its_own_group(scope):
    other = "/user.slice/user@1000.service/app.slice/other.scope"
    scope.process(200, 1)
    (scope.root / "proc/200/cgroup").write_text(f"0::{other}\n")
    scope.group(other, procs=[200], controllers="memory")
    assert scope.base(pid=200).moves == (200,)
    assert scope.base(pid=200).group.path == other


def test_walls_are_refused_where_no_group_can_be_made(tmp_path):
    recorded = Path(__file__).parents[1] / "recorded"
    assert Walls.build("x", MIB, root=recorded / "docker_v2") is None
    assert why_no_walls(root=recorded / "docker_v2") == "cgroup v2 is mounted read-only"
    assert why_no_walls(root=tmp_path) == "no control group with a memory controller is visible"
    assert why_no_walls(root=recorded / "slurm_v2") == ""


def test_a_users_manager_gives_a_scope_where_it_answers(tmp_path):
    env = {"PATH": "/usr/local/bin:/usr/bin", "XDG_RUNTIME_DIR": "/run/user/1000"}
    assert systemd_scope_command(env=env, root=tmp_path) is None
    (tmp_path / "run/user/1000/systemd").mkdir(parents=True)
    (tmp_path / "run/user/1000/systemd/private").touch()
    assert systemd_scope_command(env=env, root=tmp_path) is None
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/systemd-run").touch(mode=0o755)
    command = systemd_scope_command(env=env, root=tmp_path)
    assert command == ["systemd-run", "--user", "--scope", "--quiet", "--property=Delegate=yes", "--"]
    assert systemd_scope_command(env={"PATH": env["PATH"]}, root=tmp_path) is None


def test_a_group_without_a_wall_says_so(build):
    group = build(NO_WALL_BYTES).parent
    assert group.state().wall_bytes == NO_WALL_BYTES


@pytest.mark.parametrize("version", [1, 2])
def test_the_nearest_group_with_a_limit_that_was_met_is_named(tmp_path, version):
    limit, met = ("memory.limit_in_bytes", "memory.failcnt") if version == 1 else ("memory.max", "memory.events")
    count = "{}\n" if version == 1 else "low 0\nmax {}\noom 0\n"
    unlimited = "9223372036854771712\n" if version == 1 else "max\n"
    above, run, job = tmp_path / "above", tmp_path / "above/run", tmp_path / "above/run/job-a"
    job.mkdir(parents=True)
    for path, text, number in ((above, f"{200 * MIB}\n", 3), (run, unlimited, 4), (job, f"{100 * MIB}\n", 0)):
        (path / limit).write_text(text)
        (path / met).write_text(count.format(number))
    group = JobGroup(job, version)
    assert group.first_met() == "above", "the one in between has no limit, and its own was not met"
    (job / met).write_text(count.format(1))
    assert group.first_met() == "job-a"
    for path in (job, above):
        (path / met).write_text(count.format(0))
    assert group.first_met() == ""
    assert JobGroup(tmp_path / "gone", version).first_met() == ""
