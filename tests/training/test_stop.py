"""A fit that is asked to stop, or is torn off, at any moment goes on in a fresh trainer to the same bytes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memfit import rundir
from training import stop_driver
from training.stop_driver import KINDS, stop, sweep, tear


@pytest.fixture
def in_a_run(tmp_path, monkeypatch):
    """Events are written, and a SIGTERM that no fit notes ends nothing."""
    monkeypatch.setenv(rundir.RUN_DIR_VARIABLE, str(tmp_path / "run"))
    monkeypatch.setenv(rundir.JOB_ID_VARIABLE, "fold_1")
    monkeypatch.setattr(rundir._Current, "writer", None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield
    signal.signal(signal.SIGTERM, earlier)
    if rundir._Current.writer is not None:
        rundir._Current.writer.close()


@pytest.mark.usefixtures("in_a_run")
@pytest.mark.parametrize("act", [stop, tear])
@pytest.mark.parametrize("name", KINDS)
def test_a_fit_that_ends_at_any_moment_goes_on_to_identical_bytes(name, act, tmp_path):
    names, different = sweep(tmp_path, KINDS[name], act)
    assert different == []
    assert {"save", "loss in training", "loss in validation", "event epoch", "event checkpoint"} <= set(names)
    assert len(names) >= 40


@pytest.mark.usefixtures("in_a_run")
@pytest.mark.parametrize("name", [name for name in KINDS if "DataLoader" not in name])
def test_it_goes_on_with_the_very_loaders_that_it_left(name, tmp_path):
    assert sweep(tmp_path, KINDS[name], stop, same_loaders=True)[1] == []


def test_a_real_signal_between_two_processes_loses_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, stop_driver.__file__, tmp_path],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            rundir.RUN_DIR_VARIABLE: str(tmp_path / "run"),
            rundir.JOB_ID_VARIABLE: "fold_1",
        },
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert len(answer) == 6
    assert all(end == [75, 0, True] for end in answer.values()), answer
