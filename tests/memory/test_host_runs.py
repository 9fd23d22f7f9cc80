"""A user's list of runs on a host, with real processes, kills, locks and a real second user."""

import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from memfit.memory import Claims, Others, list_entries, sweep_entries
from nobody import as_nobody, needs_root, shared_folder

HOLD = """
import sys, time
from collections import Counter
from pathlib import Path
from memfit.memory import Claims
claims = Claims(Path(sys.argv[1]), folder=Path(sys.argv[2]))
claims.write(used=Counter(host=300), unused=Counter(host=200), group="/group/of/it")
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


def test_an_entry_of_another_host_is_listed_and_neither_counted_nor_swept(tmp_path, listed):
    claims = Claims(tmp_path / "far", folder=listed)
    claims.write(used=Counter(host=5000), unused=Counter(host=5000))
    (path,) = listed.glob("*.run")
    path.write_text(path.read_text().replace(socket.gethostname(), "another-host"))
    claims.close(keep=True)
    assert [entry.host for entry in list_entries(listed)] == ["another-host"]
    assert unused_of_others(tmp_path / "run", listed) == 0
    assert sweep_entries(listed) == []


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
