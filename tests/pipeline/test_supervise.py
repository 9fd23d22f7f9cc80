"""What happens to a supervisor: a full disk, a lock that is removed, an error of its own."""

import os
import threading
from contextlib import contextmanager

import pytest

from memfit.errors import UsageError
from memfit.jobs import Job, StopRequest
from memfit.memory import is_locked, lock_file
from memfit.pipeline._config import CommandSettings
from memfit.pipeline._supervise import Journal, RunLock, supervised
from memfit.rundir import RunDir, read_json
from memfit.testing import ListSource, wait_until


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
        supervisor.schedule(ListSource([Job("first", command=("true",))]))
        assert is_locked(path)
        with pytest.raises(UsageError):
            RunLock(run)
        descriptor = lock_file(other)
        other.rename(path)
        supervisor.schedule(ListSource([Job("second", command=("true",))]))
    os.close(descriptor)
    assert not run.job_dir("second").exists()
    assert not (run.path / "outcome.json").exists()  # the other one writes it
