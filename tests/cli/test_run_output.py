"""``memfit run`` when nobody reads it any more."""

import os
import pty
import signal
import sys

import pytest

from jobs.contract import wait_until
from memfit.rundir import RunDir

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "memfit", "run", "--param", "n=1..2", "--", "sleep", "0.{n}"]


def state_of(folder):
    runs = RunDir.all(folder / "runs", "sleep")
    return runs[0].state if runs else ""


def test_a_closed_terminal_leaves_the_run_as_it_is(tmp_path):
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(sys.executable, COMMAND)
    while b"cmd_0001" not in os.read(terminal, 65536):
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    wait_until(lambda: state_of(tmp_path) == "completed")
