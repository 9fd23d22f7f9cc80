"""``memfit run`` when nobody reads it any more."""

import os
import pty
import shutil
import signal
import sys
from pathlib import Path

import pytest

from jobs.contract import wait_until
from memfit.rundir import RunDir

pytestmark = pytest.mark.slow

CONFIG = "experiment: tiny\ntarget: tiny:TINY\nparams:\n  num_epochs: 2\n  n_splits: 2\n  epoch_seconds: 0.5\n"
COMMAND = [sys.executable, "-m", "memfit", "run", "config.yaml"]


def write_config(folder):
    shutil.copy(Path(__file__).parents[1] / "pipeline" / "tiny.py", folder / "tiny.py")
    (folder / "config.yaml").write_text(CONFIG)


def state_of(folder):
    runs = RunDir.all(folder / "runs", "tiny")
    return runs[0].state if runs else ""


def test_a_closed_terminal_leaves_the_run_as_it_is(tmp_path):
    write_config(tmp_path)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(sys.executable, COMMAND)
    while b"prepare started" not in os.read(terminal, 65536):
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    wait_until(lambda: state_of(tmp_path) == "completed")
