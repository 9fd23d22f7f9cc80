"""Who hears of a request to stop, and how long the job is waited for."""

import sys

import pytest

from jobs.contract import submit, wait_for_end, wait_until
from memfit.jobs import Job, LocalBackend
from memfit.rundir import RunDir

SAVES = """
import pathlib, signal, sys, time
def save(*_):
    time.sleep(0.5)
    pathlib.Path(sys.argv[1]).write_text("saved")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1] + ".ready").touch()
time.sleep(300)
"""
WORKER = """
import pathlib, signal, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
def save(*_):
    try:
        worker.wait(1)
    except subprocess.TimeoutExpired:
        pathlib.Path(sys.argv[1]).write_text("its worker lives")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1] + ".ready").touch()
time.sleep(300)
"""


@pytest.fixture
def backend(tmp_path):
    backend = LocalBackend(RunDir.create(tmp_path / "runs", "stop", "0" * 64), grace_seconds=30)
    yield backend
    backend.close()


def stop(backend, tmp_path, *command):
    submit(backend, Job("job", command=command))
    wait_until((tmp_path / "saved.ready").exists)
    backend.cancel("job")
    return wait_for_end(backend, "job")


def test_what_a_shell_runs_is_asked_too_and_may_save(backend, tmp_path):
    text = f"{sys.executable} -c '{SAVES}' {tmp_path / 'saved'}; echo after"
    status = stop(backend, tmp_path, "sh", "-c", text)
    assert (tmp_path / "saved").read_text() == "saved"
    assert (status.state, status.asked) == ("preempted", True)
    assert "after" not in (backend.run.job_dir("job") / "out.log").read_text()


@pytest.mark.slow
def test_a_trainers_workers_are_not_asked(backend, tmp_path):
    status = stop(backend, tmp_path, sys.executable, "-c", WORKER, str(tmp_path / "saved"))
    assert (tmp_path / "saved").read_text() == "its worker lives"
    assert status.state == "preempted"


def test_the_grace_ends_for_those_below_a_shell_as_well(tmp_path):
    backend = LocalBackend(RunDir.create(tmp_path / "runs", "stop", "0" * 64), grace_seconds=1)
    deaf = "import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    deaf += f"pathlib.Path({str(tmp_path / 'saved.ready')!r}).touch(); time.sleep(300)"
    status = stop(backend, tmp_path, "sh", "-c", f'{sys.executable} -c "{deaf}"; echo after')
    assert status.state == "cancelled"
    backend.close()
