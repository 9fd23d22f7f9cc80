"""What happens to a supervisor: a full disk, an error of its own."""

import os

import pytest

from memfit.errors import DataError
from memfit.jobs import Job
from memfit.memory import is_locked
from memfit.pipeline._config import CommandSettings
from memfit.pipeline._supervise import supervised
from memfit.rundir import RunDir, read_json
from memfit.testing import ListSource, wait_until


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path, "demo", "0" * 64)


def test_a_full_disk_ends_a_run_in_words_and_keeps_what_is_done(run):
    with (
        pytest.raises(DataError, match=f"the disk of {run.path} is full"),
        supervised(run, CommandSettings(), force=False, view=None, told={}) as supervisor,
    ):
        nowhere = os.open("/dev/full", os.O_WRONLY)
        os.dup2(nowhere, supervisor.events._descriptor)  # the kernel's own answer of a full disk
        os.close(nowhere)
        supervisor.schedule(ListSource([Job("first", command=("true",))]))
    wait_until(lambda: not is_locked(run.path / "supervisor.lock"))  # a process that is being made may hold it too


def test_an_error_of_its_own_ends_a_run_with_an_outcome_that_names_it(run):
    with pytest.raises(ZeroDivisionError), supervised(run, CommandSettings(), force=False, view=None, told={}):
        1 / 0  # noqa: B018
    assert read_json(run.path / "outcome.json") == {"state": "failed", "cause": "ZeroDivisionError: division by zero"}
