"""What happens to a supervisor: a full disk, an error of its own."""

import errno
import os
from pathlib import Path

import pytest

from jobs.contract import wait_until
from memfit.errors import DataError
from memfit.files import read_json
from memfit.memory import is_locked
from memfit.pipeline import run_commands
from memfit.rundir import EventWriter, RunDir


@pytest.mark.parametrize(
    ("name", "number", "said"),
    [
        ("__init__", errno.ENOSPC, "the disk of .* is full"),  # before anything starts
        ("write", errno.ENOSPC, "the disk of .* is full"),
        ("write", errno.EIO, "cannot be reached: .* resume .*/run_"),
    ],
)
def test_a_disk_that_is_full_or_away_ends_a_run_in_words_and_keeps_what_is_done(monkeypatch, name, number, said):
    call = getattr(EventWriter, name)

    def refused(self, *words, **fields):
        if "end" in words or name == "__init__":
            raise OSError(number, os.strerror(number))
        call(self, *words, **fields)

    monkeypatch.setattr(EventWriter, name, refused)
    with pytest.raises(DataError, match=f"(?s){said}"):
        run_commands(["true"])
    [run] = RunDir.all(Path("runs"), "true")
    wait_until(lambda: not is_locked(run.path / "supervisor.lock"))  # a process that is being made may hold it too
    monkeypatch.undo()
    os.chdir(run.path.parents[2])
    again = run_commands(["true"])
    assert (again.path, again.state, again.statuses["cmd_0001"].attempt) == (run.path, "completed", 1)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (DataError("no room is left.", rule="a view needs room.", remedy="make some"), "no room is left."),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
    ],
)
def test_an_error_ends_a_run_with_an_event_and_an_outcome_that_names_it(error, cause):
    def fail():
        raise error

    with pytest.raises(type(error)):
        run_commands(["true"], view=lambda run: fail)
    [run] = RunDir.all(Path("runs"), "true")
    assert [one["state"] for one in run.events() if one["kind"] == "run"] == ["started", "failed"]
    assert read_json(run.path / "outcome.json") == {"state": "failed", "cause": cause}
