"""The host's list of runs, with real processes, real kills and real locks."""

import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from memfit.memory._claims import Claims, Entry, _encode, list_entries, sweep_entries

HOLD = """
import sys, time
from pathlib import Path
from memfit.memory._claims import Claims
claims = Claims(Path(sys.argv[1]), folder=Path(sys.argv[2]), group="/group/of/it")
claims.write(used_bytes=300, unused_bytes=200)
print("ready", flush=True)
time.sleep(300)
"""

#: Takes 10 of what is free each time it may decide, until nothing is; tells how much that was.
RACE = """
import sys
from pathlib import Path
from memfit.memory._claims import Claims
run, folder, total = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
claims, mine = Claims(run, folder=folder), 0
print("ready", flush=True)
sys.stdin.readline()
while True:
    with claims.deciding() as others:
        if others.unused_bytes + mine + 10 > total:
            break
        mine += 10
        claims.write(used_bytes=0, unused_bytes=mine)
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
        return claims.others().unused_bytes
    finally:
        claims.close()


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


def test_an_entry_says_what_its_run_lent_and_is_alive_while_its_supervisor_lives(tmp_path, listed):
    with holder(tmp_path / "run", listed) as process:
        (entry,) = list_entries(listed)
        assert (entry.run, entry.pid, entry.host) == (tmp_path / "run", process.pid, socket.gethostname())
        assert (entry.used_bytes, entry.unused_bytes, entry.group) == (300, 200, "/group/of/it")
        assert (entry.alive, entry.uid) == (True, os.geteuid())
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
        claims.write(used_bytes=900, unused_bytes=70)
        claims.close(keep=True)
        assert [(entry.alive, entry.unused_bytes) for entry in list_entries(listed)] == [(False, 70)]
        assert unused_of_others(tmp_path / "another", listed) == 70
        assert sweep_entries(listed) == []
    assert unused_of_others(tmp_path / "another", listed) == 0
    assert [entry.run for entry in sweep_entries(listed)] == [run]


def test_a_resumed_run_takes_its_old_entry_over(tmp_path, listed):
    old = Claims(tmp_path / "run", folder=listed)
    old.write(used_bytes=1, unused_bytes=1)
    old.close(keep=True)
    new = Claims(tmp_path / "run", folder=listed)
    assert [(entry.alive, entry.unused_bytes) for entry in list_entries(listed)] == [(True, 0)]
    new.close()
    assert list_entries(listed) == []


def test_the_folder_is_open_to_all_users_and_sticky_whatever_the_umask(tmp_path, listed):
    before = os.umask(0o077)
    try:
        claims = Claims(tmp_path / "run", folder=listed)
        with claims.deciding():
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE(listed.stat().st_mode) == 0o1777
    assert {stat.S_IMODE(path.stat().st_mode) for path in listed.iterdir()} == {0o644}
    claims.close()


@pytest.mark.parametrize(
    "content",
    [b"", b"nonsense", b"00000000 {}", b"zz", b"\xff" * 5000, b"x" * 100_000,
     _encode(Entry(Path("/r"), "h", 0, 1, 0.0, -5, 0, "")), _encode(Entry(Path("relative"), "h", 0, 1, 0.0, 0, 0, "")),
     _encode(Entry(Path("/r"), "h", 0, 1, 0.0, 5, 9, "")).replace(b'"used_bytes": 5', b'"used_bytes": 6')],
    ids=["empty", "text", "checksum", "short", "binary", "large", "negative", "relative", "changed"],
)  # fmt: skip
def test_a_damaged_entry_is_passed_over(tmp_path, listed, content):
    claims = Claims(tmp_path / "run", folder=listed)
    (listed / f"{'0' * 16}-{os.geteuid()}.run").write_bytes(content)
    (listed / "link.run").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(listed / "pipe.run")
    (listed / "folder.run").mkdir()
    assert [entry.run for entry in list_entries(listed)] == [tmp_path / "run"]
    assert unused_of_others(tmp_path / "another", listed) == 0
    assert sweep_entries(listed) == []
    claims.close()


def test_an_entry_of_another_host_is_listed_and_neither_counted_nor_swept(tmp_path, listed):
    listed.mkdir()
    (listed / "far-0.run").write_bytes(_encode(Entry(tmp_path / "far", "another-host", 0, 1, 0.0, 5000, 5000, "")))
    assert [entry.host for entry in list_entries(listed)] == ["another-host"]
    assert unused_of_others(tmp_path / "run", listed) == 0
    assert sweep_entries(listed) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_another_users_entry_is_counted_and_left_alone(tmp_path, listed):
    with holder(tmp_path / "theirs", listed) as process:
        (path,) = listed.glob("*.run")
        os.chown(path, 12345, 12345)
        assert [entry.uid for entry in list_entries(listed)] == [12345]
        assert unused_of_others(tmp_path / "run", listed) == 200
        process.kill()
        process.wait()
        assert sweep_entries(listed) == []
        assert path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_second_user_decides_under_the_first_users_lock(tmp_path):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own folders are closed to others
        Path(folder).chmod(0o755)
        listed = Path(folder) / "claims"
        mine = Claims(tmp_path / "mine", folder=listed)
        mine.write(used_bytes=500, unused_bytes=300)
        with mine.deciding():
            pass
        code = RACE.replace("claims, mine =", "import os; os.setgid(12345); os.setuid(12345)\nclaims, mine =")
        with start(code, "/theirs", listed, 350) as process:
            with mine.deciding():
                process.stdin.write("go\n")
                process.stdin.flush()
                time.sleep(0.2)  # it must wait here; if it did not, it would not see the claim below
                mine.write(used_bytes=500, unused_bytes=330)
            assert process.stdout.readline() == "20\n"
            assert sorted(entry.uid for entry in list_entries(listed)) == [0, 12345]
            process.communicate("end\n")
        mine.close()


def test_a_holder_that_is_stopped_is_passed_by_in_the_end(tmp_path, listed, monkeypatch):
    monkeypatch.setattr("memfit.memory._claims._PATIENCE_SECONDS", 0.2)
    claims = Claims(tmp_path / "run", folder=listed)
    code = HOLD.replace('print("ready", flush=True)', 'claims.deciding().__enter__(); print("ready", flush=True)')
    with start(code, tmp_path / "stopped", listed) as process:
        with claims.deciding() as others:
            assert others.unused_bytes == 200
        process.kill()
    claims.close()


def test_an_entry_is_kept_up_to_date_on_a_full_disk(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        claims = Claims(tmp_path / "run", folder=disk / "claims")
        with pytest.raises(OSError, match="No space"), open(disk / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        claims.write(used_bytes=700, unused_bytes=60)
        assert [entry.unused_bytes for entry in list_entries(disk / "claims")] == [60]
        late = Claims(tmp_path / "late", folder=disk / "claims")  # there is no room for its entry
        late.write(used_bytes=1, unused_bytes=1)
        with late.deciding() as others:
            assert others.unused_bytes == 60
        (disk / "filler").unlink()
        late.write(used_bytes=1, unused_bytes=1)
        assert sorted(entry.unused_bytes for entry in list_entries(disk / "claims")) == [1, 60]
        late.close()
        claims.close()
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_list_that_cannot_be_made_fails_no_run(tmp_path):
    (tmp_path / "file").write_text("")
    claims = Claims(tmp_path / "run", folder=tmp_path / "file" / "claims")
    claims.write(used_bytes=1, unused_bytes=1)
    with claims.deciding() as others:
        assert others.unused_bytes == 0
    claims.close()
    assert list_entries(tmp_path / "file" / "claims") == []
    assert sweep_entries(tmp_path / "absent") == []


def test_many_looks_never_keep_a_run_from_its_entry(tmp_path, listed):
    listed.mkdir()
    code = "import sys; from pathlib import Path; from memfit.memory._claims import list_entries\n"
    code += "print('ready', flush=True)\nwhile True: list_entries(Path(sys.argv[1]))"
    with start(code, listed) as process:
        for _ in range(200):
            claims = Claims(tmp_path / "run", folder=listed)
            assert claims._descriptor is not None
            claims.close()
        process.kill()


def test_a_write_that_changes_nothing_costs_nothing(tmp_path, listed):
    claims = Claims(tmp_path / "run", folder=listed)
    claims.write(used_bytes=5, unused_bytes=5, group="/g")
    (path,) = listed.glob("*.run")
    os.utime(path, (1, 1))
    claims.write(used_bytes=5, unused_bytes=5)
    assert path.stat().st_mtime == 1
    claims.write(used_bytes=5, unused_bytes=4)
    assert path.stat().st_mtime > 1
    assert [(entry.unused_bytes, entry.group) for entry in list_entries(listed)] == [(4, "/g")]
    claims.close()


def test_a_process_that_watches_jobs_may_load_it_at_no_cost():
    code = (
        "import sys, memfit.memory._claims; print(*sorted({'filelock', 'psutil', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
