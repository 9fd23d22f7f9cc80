"""What happens to a supervisor: a full disk, a lock that is removed, an error of its own."""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from memfit.errors import UsageError
from memfit.jobs import Job, StopRequest
from memfit.memory import is_locked, lock_file
from memfit.pipeline._config import CommandSettings
from memfit.pipeline._supervise import DISK_RESERVE_BYTES, Journal, RunLock, _Backend, supervised
from memfit.rundir import RunDir, read_json
from memfit.testing import wait_for_end, wait_until


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path, "demo", "0" * 64)


@contextmanager
def full(journal):
    """The kernel's own answer of a full disk to each write of events."""
    kept, nowhere = os.dup(journal._descriptor), os.open("/dev/full", os.O_WRONLY)
    os.dup2(nowhere, journal._descriptor)
    yield
    os.dup2(kept, journal._descriptor)
    os.close(kept)
    os.close(nowhere)


def kinds(run):
    return [event["kind"] for event in run.events()]


def test_events_wait_while_the_disk_is_full_and_keep_their_order_and_time(run, capsys):
    journal = Journal(run)
    journal.write("one", job="a")
    with full(journal):
        journal.write("two", job="b")
        journal.write("three")
        assert journal.hold().startswith(f"the disk of {run.path} is full")
        assert kinds(run) == ["one"]
    wait_until(lambda: journal.flush() or len(run.events()) == 3)
    assert kinds(run) == ["one", "two", "three"]
    times = [event["time"] for event in run.events()]
    assert times == sorted(times) and journal.hold() == ""
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and "the disk is full: no job starts" in told[0] and "there is room again" in told[1]


def test_files_wait_too_and_only_the_last_content_is_written(run):
    journal = Journal(run)
    with full(journal):
        journal.write("one")
        journal.put("outcome.json", {"state": "failed"})
        journal.put("outcome.json", {"state": "completed"})
        assert read_json(run.path / "outcome.json") is None
    journal.drain(StopRequest())
    assert run.state == "completed" and kinds(run) == ["one"]


def test_the_end_waits_for_room_until_it_is_told_to_end_now(run):
    journal, stop = Journal(run), StopRequest()
    with full(journal):
        journal.write("one")
        waiting = threading.Thread(target=journal.drain, args=(stop,))
        waiting.start()
        stop.ask()
        waiting.join(0.5)
        assert waiting.is_alive()
        stop.now()
        waiting.join(60)
        assert not waiting.is_alive()


def test_another_error_than_a_full_disk_is_raised(run):
    journal = Journal(run)
    journal.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        journal.write("one")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of little more than what is kept free."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = DISK_RESERVE_BYTES + (8 << 20)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs to mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_run_on_a_disk_that_fills_up_waits_and_goes_on_when_there_is_room(small_disk, tmp_path):
    ballast = small_disk / "ballast"
    # The first command fills the disk; those after it must wait, and the first one's end must not be lost.
    text = f"echo {{a}} >> {tmp_path}/ran; test {{a}} != 1 || cat /dev/zero > {ballast} 2> /dev/null; true"
    words = [sys.executable, "-m", "memfit", "map", "--param", "a=1..3", "--max-parallel", "1"]
    words += ["--runs-dir", str(small_disk / "runs"), "--", "sh", "-c", text]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(ballast.exists)
        assert process.stderr.readline().startswith("memfit: ")
        assert Path(tmp_path / "ran").read_text() == "1\n"
        ballast.unlink()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    assert Path(tmp_path / "ran").read_text() == "1\n2\n3\n"
    [run] = RunDir.all(small_disk / "runs", "sh")
    assert run.state == "completed"
    ends = [event["job"] for event in run.events() if event["kind"] == "end"]
    assert ends == ["cmd_0001", "cmd_0002", "cmd_0003"]


def test_an_order_that_meets_a_full_disk_is_given_again_when_there_is_room(small_disk):
    run = RunDir.create(small_disk, "demo", "0" * 64)
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space left"), open(ballast, "wb") as file:
        while True:
            file.write(bytes(1 << 16))
    backend = _Backend(run)
    waiting = threading.Thread(target=backend.submit, args=(Job("late", command=("true",)),))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    ballast.unlink()
    waiting.join(60)
    assert wait_for_end(backend, "late").state == "completed"
    backend.close()


def test_an_error_of_its_own_ends_a_run_with_an_outcome_that_names_it(run):
    with pytest.raises(ZeroDivisionError), supervised(run, CommandSettings(), force=False, view=None, told={}):
        1 / 0  # noqa: B018
    assert read_json(run.path / "outcome.json") == {"state": "failed", "cause": "ZeroDivisionError: division by zero"}


def test_a_lock_that_is_removed_is_taken_again_or_the_run_is_left_to_who_was_faster(run):
    path, other = run.path / "supervisor.lock", run.path / "other.lock"
    with (
        pytest.raises(UsageError, match="being run by another process"),
        supervised(run, CommandSettings(), force=False, view=None, told={}) as supervisor,
    ):
        path.unlink()
        supervisor.schedule([Job("first", command=("true",))])
        assert is_locked(path)
        with pytest.raises(UsageError):
            RunLock(run)
        descriptor = lock_file(other)
        other.rename(path)
        supervisor.schedule([Job("second", command=("true",))])
    os.close(descriptor)
    assert not run.job_dir("second").exists()
    assert not (run.path / "outcome.json").exists()  # the other one writes it
