"""A user's list of runs on a host, with real processes, kills, locks and a real second user."""

import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from memfit.memory import Budget, Claims, Entry, Others, claim_counts, list_entries, place_here, sweep_entries
from memfit.rundir import RunDir
from memfit.units import MIB
from nobody import as_nobody, needs_root, shared_folder

RECORDED = Path(__file__).parents[1] / "recorded"

HOLD = """
import sys, time
from collections import Counter
from pathlib import Path
from memfit.memory import Claims
claims = Claims(Path(sys.argv[1]), folder=Path(sys.argv[2]))
claims.write(used=Counter(host=300), unused=Counter(host=200 << int((sys.argv[3:] or ["0"])[0])), group="/group/of/it")
print("ready", flush=True)
time.sleep(300)
"""

#: Takes 10 of what is free each time it may decide, until nothing is; tells how much that was.
RACE = """
import sys
from collections import Counter
from pathlib import Path
from memfit.memory import Claims
run, folder, total = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
claims, mine = Claims(run, folder=folder), 0
print("ready", flush=True)
sys.stdin.readline()
while True:
    with claims.deciding() as others:
        if others.unused["host"] + mine + 10 > total:
            break
        mine += 10
        claims.write(used=Counter(host=0), unused=Counter(host=mine))
print(mine, flush=True)
sys.stdin.readline()
"""


def start(code, *words):
    program = [sys.executable, "-c", code, *map(str, words)]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@contextmanager
def holder(run, folder):
    with start(HOLD, run, folder) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def listed(tmp_path):
    return tmp_path / "claims"


def unused_of_others(run, folder):
    claims = Claims(run, folder=folder)
    try:
        return claims.others().unused["host"]
    finally:
        claims.close()


@pytest.mark.slow
def test_processes_that_race_to_decide_never_lend_the_same_free_bytes(tmp_path, listed):
    racers = [start(RACE, tmp_path / f"run_{number}", listed, 2005) for number in range(3)]
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    taken = [int(racer.stdout.readline()) for racer in racers]
    for racer in racers:
        racer.communicate("end\n")
    # All of it and no more: each saw what the others had lent when it decided.
    assert sum(taken) == 2000


@pytest.mark.slow
def test_an_entry_says_what_its_run_lent_and_is_alive_while_its_supervisor_lives(tmp_path, listed):
    with holder(tmp_path / "run", listed) as process:
        (entry,) = list_entries(listed)
        assert (entry.run, entry.pid, entry.host) == (tmp_path / "run", process.pid, socket.gethostname())
        assert (entry.used["host"], entry.unused["host"], entry.group) == (300, 200, "/group/of/it")
        assert entry.alive
        assert unused_of_others(tmp_path / "another", listed) == 200
        assert unused_of_others(tmp_path / "run", listed) == 0


def test_a_killed_supervisors_entry_is_not_alive_and_is_swept_with_its_group(tmp_path, listed):
    with holder(tmp_path / "run", listed) as process:
        assert sweep_entries(listed) == []
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert [entry.alive for entry in list_entries(listed)] == [False]
        assert unused_of_others(tmp_path / "another", listed) == 0
        assert [(entry.run, entry.group) for entry in sweep_entries(listed)] == [(tmp_path / "run", "/group/of/it")]
        assert list_entries(listed) == []


def test_jobs_that_go_on_without_a_supervisor_still_count_and_are_not_swept(tmp_path, listed):
    run = tmp_path / "run"
    (run / "jobs" / "cmd_0001").mkdir(parents=True)
    with open(run / "jobs/cmd_0001/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        claims = Claims(run, folder=listed)
        claims.write(used=Counter(host=900), unused=Counter(host=70))
        claims.close(keep=True)
        assert [(entry.alive, entry.unused["host"]) for entry in list_entries(listed)] == [(False, 70)]
        assert unused_of_others(tmp_path / "another", listed) == 70
        assert sweep_entries(listed) == []
    assert unused_of_others(tmp_path / "another", listed) == 0
    assert [entry.run for entry in sweep_entries(listed)] == [run]


def test_a_resumed_run_takes_its_old_entry_over(tmp_path, listed):
    old = Claims(tmp_path / "run", folder=listed)
    old.write(used=Counter(host=1), unused=Counter(host=1))
    old.close(keep=True)
    new = Claims(tmp_path / "run", folder=listed)
    assert [(entry.alive, entry.unused["host"]) for entry in list_entries(listed)] == [(True, 0)]
    new.close()
    assert list_entries(listed) == []


def test_the_folder_and_what_is_in_it_are_for_their_user_alone_whatever_the_umask(tmp_path, listed):
    before = os.umask(0)
    try:
        claims = Claims(tmp_path / "run", folder=listed)
    finally:
        os.umask(before)
    assert stat.S_IMODE(listed.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in listed.iterdir()} == {0o600}
    claims.close()


@pytest.mark.parametrize("content", [b"", b"nonsense", b"{}", b"[]", b"\xff" * 5000, b'{"run": 5}'])
def test_a_damaged_entry_is_passed_over(tmp_path, listed, content):
    claims = Claims(tmp_path / "run", folder=listed)
    (listed / f"{'0' * 16}.run").write_bytes(content)
    (listed / "link.run").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(listed / "pipe.run")
    (listed / "folder.run").mkdir()
    assert [entry.run for entry in list_entries(listed)] == [tmp_path / "run"]
    assert unused_of_others(tmp_path / "another", listed) == 0
    assert sweep_entries(listed) == []
    claims.close()


def test_processes_with_other_folders_for_temporary_files_find_the_same_list(tmp_path, monkeypatch):
    monkeypatch.delenv("MEMFIT_CLAIMS_DIR")
    for name in ("TMPDIR", "XDG_RUNTIME_DIR", "HOME"):  # as a login, a cron job and a Slurm step have them
        monkeypatch.setenv(name, str(tmp_path / name))
    with start(HOLD.replace(", folder=Path(sys.argv[2])", ""), tmp_path / "run") as process:
        for name in ("TMPDIR", "XDG_RUNTIME_DIR", "HOME"):
            monkeypatch.delenv(name)
        assert process.pid in [entry.pid for entry in list_entries()]
        process.kill()
        process.wait()
        assert tmp_path / "run" in [entry.run for entry in sweep_entries()]


def taken_by_a_folder(path):
    path.mkdir()
    path.chmod(0o777)
    (path / "0000.run").write_text(json.dumps({"run": "/theirs", "host": socket.gethostname(), "pid": 1, "started": 0}))


def taken_by_a_link(path):
    path.symlink_to(path.parent / "victim")


@needs_root
@pytest.mark.parametrize("take", [taken_by_a_folder, taken_by_a_link, os.mkfifo, Path.touch])
def test_a_name_that_another_user_took_first_ends_the_sharing_with_its_reason_and_nothing_else(tmp_path, take):
    with shared_folder() as folder:
        (folder / "victim").mkdir(mode=0o700)
        kept = Claims(tmp_path / "mine", folder=folder / "victim")
        kept.close(keep=True)
        as_nobody(lambda: take(folder / "claims"))
        claims = Claims(tmp_path / "run", folder=folder / "claims")
        claims.write(used=Counter(host=1), unused=Counter(host=1))
        with claims.deciding() as others:
            assert others == Others()
        assert (list_entries(folder / "claims"), sweep_entries(folder / "claims")) == ([], [])
        assert str(folder / "claims") in claims.problem
        if take is taken_by_a_folder:
            assert "uid 65534" in claims.problem
            assert len(list((folder / "claims").iterdir())) == 1
        assert [entry.run for entry in list_entries(folder / "victim")] == [tmp_path / "mine"]
        claims.close()


@needs_root
def test_another_user_can_neither_read_nor_add_nor_lock_an_entry(tmp_path):
    with shared_folder() as folder:
        claims = Claims(tmp_path / "run", folder=folder / "claims")
        entry = next((folder / "claims").glob("*.run"))

        def attack():
            for path in (folder / "claims", entry, folder / "claims" / "forged.run"):
                with pytest.raises(PermissionError):
                    os.open(path, os.O_RDONLY if path.suffix != ".run" else os.O_RDWR | os.O_CREAT)

        as_nobody(attack)
        claims.close()


@needs_root
def test_a_list_that_others_may_write_to_is_not_used(tmp_path, listed):
    listed.mkdir()
    listed.chmod(0o777)
    claims = Claims(tmp_path / "run", folder=listed)
    assert "others may open it" in claims.problem
    assert list(listed.iterdir()) == []
    listed.chmod(0o700)
    claims.write(used=Counter(host=1), unused=Counter(host=0))
    assert (claims.problem, len(list_entries(listed))) == ("", 1)
    claims.close()


#: What an entry says of its place: changed, or taken out. Then whether it counts, and whether it is this host's to sweep.
PLACES = {
    "of another kernel": ({"boot": "another", "host": "another"}, False),
    "of another kernel with this host's name": ({"boot": "another"}, False),
    "of a container, which has another name": ({"host": "container"}, True),
    "of jobs in Slurm's queue": ({"boot": "that of no job's host"}, False),
    "of an earlier memfit": ({"boot": None, "groups": None, "sees_root": None}, True),
    "of an earlier memfit on another host": (
        {"boot": None, "groups": None, "sees_root": None, "host": "another"},
        False,
    ),
    "of a later memfit": ({"more": 1}, True),
}


@pytest.mark.parametrize(("said", "does_count"), PLACES.values(), ids=PLACES)
def test_an_entry_is_listed_wherever_it_is_from_and_counts_if_its_jobs_may_run_on_this_host(
    tmp_path, listed, said, does_count
):
    with holder(tmp_path / "far", listed):
        (path,) = listed.glob("*.run")
        found = json.loads(path.read_bytes()) | said
        path.write_text(json.dumps({name: value for name, value in found.items() if value is not None}).ljust(1 << 14))
        assert [entry.host for entry in list_entries(listed)] == [found["host"]]
        assert unused_of_others(tmp_path / "run", listed) == 200 * does_count
    if found["host"] != socket.gethostname():
        assert [entry.run.name for entry in sweep_entries(listed)] == []


def test_a_holder_that_is_stopped_is_passed_by_in_the_end(tmp_path, listed):
    claims = Claims(tmp_path / "run", folder=listed, patience_seconds=0.2)
    code = HOLD.replace('print("ready", flush=True)', 'claims.deciding().__enter__(); print("ready", flush=True)')
    with start(code, tmp_path / "stopped", listed) as process:
        with claims.deciding() as others:
            assert others.unused["host"] == 200
        process.kill()
    claims.close()


def test_a_list_that_cannot_be_made_fails_no_run(tmp_path):
    (tmp_path / "file").write_text("")
    claims = Claims(tmp_path / "run", folder=tmp_path / "file" / "claims")
    claims.write(used=Counter(host=1), unused=Counter(host=1))
    with claims.deciding() as others:
        assert others.unused["host"] == 0
    claims.close()
    assert "file" in claims.problem
    assert list_entries(tmp_path / "file" / "claims") == []
    assert sweep_entries(tmp_path / "absent") == []


def test_many_looks_never_keep_a_run_from_its_entry(tmp_path, listed):
    code = "import sys; from pathlib import Path; from memfit.memory import list_entries\n"
    code += "print('ready', flush=True)\nwhile True: list_entries(Path(sys.argv[1]))"
    with start(code, listed) as process:
        try:
            for _ in range(200):
                claims = Claims(tmp_path / "run", folder=listed)
                assert [entry.run for entry in list_entries(listed)] == [tmp_path / "run"]
                claims.close()
        finally:
            process.kill()


def test_a_write_that_changes_nothing_costs_nothing(tmp_path, listed):
    claims = Claims(tmp_path / "run", folder=listed)
    claims.write(used=Counter(host=5), unused=Counter(host=5), group="/g")
    (path,) = listed.glob("*.run")
    os.utime(path, (1, 1))
    claims.write(used=Counter(host=5), unused=Counter(host=5))
    assert path.stat().st_mtime == 1
    claims.write(used=Counter(host=5), unused=Counter(host=4))
    assert path.stat().st_mtime > 1
    assert [(entry.unused["host"], entry.group) for entry in list_entries(listed)] == [(4, "/g")]
    claims.close()


@pytest.mark.parametrize("field", ["used", "started", "run"])
def test_an_entry_of_another_version_is_passed_over(tmp_path, field):
    folder = tmp_path / "claims"
    with holder(tmp_path / "a", folder):
        [path] = folder.glob("*.run")
        entry = json.loads(path.read_bytes())
        path.write_text(json.dumps(entry | {field: None}).ljust(1 << 14))
        assert list_entries(folder) == []
        with Claims(tmp_path / "b", folder=folder).deciding() as others:
            assert others == Others()


# Which claims count against which limit


def group_id(folder):
    found = folder.stat()
    return f"{found.st_dev}:{found.st_ino}"


@pytest.fixture
def entry(tmp_path):
    """Makes entries of runs whose memory group is a folder; they see it and what is above it, up to a folder."""

    def make(name, *, top="root", boot="kernel", **more):
        folder = tmp_path / "root" / name
        folder.mkdir(parents=True, exist_ok=True)
        tops = [folder, *folder.parents]
        above = tops[: tops.index(tmp_path / top) + 1] if top else []
        groups = {group_id(one): str(one) for one in above}
        return Entry(Path("/run"), "host", 1, 0.0, boot=boot, groups=groups, sees_root=top == "root", **more)

    return make


SEES_NOTHING, IN_CONTAINER = {"top": ""}, {"top": "root/slice/box"}
#: A limit of mine, where I am, where the other is (more of it), and whether its claim counts.
COUNTS = {
    "of one group": ("slice/a", "slice/a", "slice/a", {}, True),
    "of siblings, their parent's": ("slice", "slice/a", "slice/b", {}, True),
    "of siblings, one's own": ("slice/a", "slice/a", "slice/b", {}, False),
    "of siblings, the host's": ("host", "slice/a", "slice/b", {}, True),
    "of siblings, a hidden one": ("hidden", "slice/a", "slice/b", {}, True),
    "of one that holds the other": ("slice/a", "slice/a", "slice/a/inner", {}, True),
    "of one within the other": ("slice/a/inner", "slice/a/inner", "slice/a", {}, False),
    "of Slurm jobs of a node, a job's": ("slurm/job_1", "slurm/job_1/step_0", "slurm/job_2/step_0", {}, False),
    "of steps of a Slurm job, the job's": ("slurm/job_1", "slurm/job_1/step_0", "slurm/job_1/step_1", {}, True),
    "above a container that sees only itself": ("slice", "slice/a", "slice/box", IN_CONTAINER, True),
    "beside a container that sees only itself": ("slice/a", "slice/a", "slice/box", IN_CONTAINER, False),
    "beside one that sees no group": ("slice/a", "slice/a", "slice/b", SEES_NOTHING, True),
    "of another kernel": ("slice/a", "slice/a", "slice/a", {"boot": "another"}, False),
    "of another kernel, the host's": ("host", "slice/a", "slice/a", {"boot": "another"}, False),
}


@pytest.mark.parametrize(("limit", "mine", "other", "more", "expected"), COUNTS.values(), ids=COUNTS)
def test_a_claim_counts_against_limits_that_hold_for_its_jobs_too(tmp_path, entry, limit, mine, other, more, expected):
    mine, other = entry(mine), entry(other, **more)
    limit = limit if limit in ("host", "hidden") else group_id(tmp_path / "root" / limit)
    assert claim_counts(limit, mine, other) is expected


def test_a_container_counts_others_against_limits_that_it_shares_with_its_host(tmp_path, entry):
    mine, other = entry("slice/box", **IN_CONTAINER), entry("slice/a")
    own = group_id(tmp_path / "root/slice/box")
    assert [claim_counts(limit, mine, other) for limit in (own, "hidden", "host")] == [False, True, True]


POD = "kubepods-burstable-pod0b5c7f2e_91d4_4c3a_8d27_6a1f3e5b9c04.slice"
#: A tree, the group of its process, another one there, and the limits (by the last folder of their group) that they share.
TREES = {
    "v1, another Slurm job": ("slurm_v1", "uid_0/job_1/step_1/task_0", "uid_0/job_2/step_0/task_0", set()),
    "v1, another step": ("slurm_v1", "job_1/step_1/task_0", "job_1/step_2/task_0", {"job_1"}),
    "v2, another Slurm job": ("slurm_v2", "job_42/step_0/user/task_0", "job_43/step_0/user/task_0", set()),
    "v2, another step": ("slurm_v2", "job_42/step_0/user/task_0", "job_42/step_1/user/task_0", {"job_42"}),
    "v2, another container of a pod": ("kubernetes_v2", "/cri-containerd-", "/another-", {"kubepods.slice", POD}),
    "v1, a fold beside": ("hybrid_v1_nested", "folds/fold_3", "folds/fold_4", {"folds", "memfit-recorded"}),
}


@pytest.mark.parametrize(("tree", "own", "other", "shared"), TREES.values(), ids=TREES)
def test_in_recorded_trees_runs_share_the_limits_of_the_groups_that_hold_both(tmp_path, tree, own, other, shared):
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(RECORDED / tree, here, symlinks=True)
    shutil.copytree(here / "proc", there / "proc", symlinks=True)
    (there / "sys").symlink_to(here / "sys")
    place = (here / "proc/self/cgroup").read_text()
    (there / "proc/self/cgroup").write_text(place.replace(own, other))
    mine = Entry(Path("/run"), "host", 1, 0.0, **place_here(here))
    Path(next(iter(mine.groups.values())).replace(own, other)).mkdir(parents=True)
    theirs = Entry(Path("/run"), "host", 1, 0.0, **place_here(there))
    assert (mine.sees_root, len(mine.groups)) == (theirs.sees_root, len(theirs.groups))
    limits = [one for one in Budget.read(root=here, env={}).limits if one.scope == "group"]
    assert limits and all(one.id in mine.groups for one in limits)
    assert all(claim_counts(one.id, mine, mine) for one in limits)
    assert {Path(mine.groups[one.id]).name for one in limits if claim_counts(one.id, mine, theirs)} == shared


def start_in(group, folder, *words, **options):
    enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *map(str, words)]
    return subprocess.Popen(enter, cwd=folder, text=True, stdout=subprocess.PIPE, **options)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("shared", ["nothing", "the group", "the group above"])
def test_a_real_run_waits_for_another_whose_limit_holds_for_it_too_and_else_starts_at_once(
    tmp_path, listed, memory_group, shared
):
    above = memory_group(1500 * MIB if shared == "the group above" else -1)
    first = memory_group(-1 if shared == "the group above" else 1500 * MIB, above)
    second = first if shared == "the group" else memory_group(-1 if "above" in shared else 1500 * MIB, above)
    program = Path(sys.executable).with_name("memfit")
    env = {**os.environ, "MEMFIT_CLAIMS_DIR": str(listed)}
    held = start_in(first, tmp_path, sys.executable, "-c", HOLD, tmp_path / "held", listed, 22)  # 800 MiB
    try:
        assert held.stdout.readline() == "ready\n"
        words = (program, "run", "--memory", "700MiB", "--", "true")
        run = start_in(second, tmp_path, *words, env=env, stderr=subprocess.STDOUT)

        def events(kind):
            runs = RunDir.all(tmp_path / "runs", "true")
            return [one for found in runs for one in found.events() if one["kind"] == kind]

        deadline = time.monotonic() + 60
        while shared != "nothing" and not events("wait") and run.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if shared != "nothing":
            held.kill()
        said, _ = run.communicate(timeout=60)
        assert run.returncode == 0, said
        assert bool(events("wait")) == (shared != "nothing"), said
        assert not events("aside") and not events("retry")
    finally:
        held.kill()
        held.communicate()
