"""What tests of training share."""

import pytest

from memfit import rundir


@pytest.fixture(scope="session", autouse=True)
def _dynamo(dynamo):
    pass


@pytest.fixture
def events(tmp_path, monkeypatch):
    """Gives the events of a kind that were recorded so far."""
    monkeypatch.setenv(rundir.RUN_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setenv(rundir.JOB_ID_VARIABLE, "fold_1")
    return lambda kind: [event for event in rundir.read_events(tmp_path / "events") if event["kind"] == kind]
