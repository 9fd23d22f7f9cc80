"""``memfit run`` when nobody reads it any more."""

import os
import pty
import signal
import sys
from contextlib import suppress

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


#: Orders to a terminal, in a parameter's value, an event, a phase and the last words; no markup of ours either.
ORDERS = "\x1b]0;title\x07\x1b[2J\x1b[31m[/x]:smile:\x1b]8;;never ended \x9b5m\u202e"
ORDERING = """
import sys, memfit
from memfit.rundir import record
memfit.phase("[/train]\\x1b[2J")
record("oom", text=sys.argv[1])
sys.exit("no " + sys.argv[1])
"""


def test_no_text_of_a_job_gives_the_terminal_an_order(memfit, tmp_path):
    (tmp_path / "job.py").write_text(ORDERING)
    words = ["--name", "orders", "--param", f"t={ORDERS},b", "--"]
    told = [memfit("run", "--verbose", *words, sys.executable, "job.py", "{t}")]
    told += [memfit("watch", "orders"), memfit("ps", "--all"), memfit("diagnose", "runs/orders", "--verbose")]
    told += [memfit("diagnose", "runs/orders", "--report", "incident.md"), memfit("resume", "orders")]
    told.append(memfit("run", "--plan", "--no-steps", "--new", *words, "echo", "{t}"))
    told.append(memfit("run", "--name", ORDERS, "--", "true"))
    assert [one.exit_code for one in told] == [4, 0, 0, 0, 0, 4, 0, 2]
    text = "".join(one.out + one.err for one in told) + (tmp_path / "incident.md").read_text()
    assert [sign for sign in "\x1b\x07\x9b\u202e" if sign in text] == []
    assert "no 0;title[/x]:smile:8;;never ended 5m" in told[0].out  # rich takes the BEL out before


def test_a_terminal_gets_the_orders_of_memfit_alone(tmp_path):
    (tmp_path / "job.py").write_text(ORDERING)
    words = ["run", "--param", f"t={ORDERS},b", "--", sys.executable, "job.py", "{t}"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "-m", "memfit", *words])
    written = b""
    with suppress(OSError):  # the other end is closed
        while piece := os.read(terminal, 65536):
            written += piece
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    assert b"\x1b[2K" in written and b"no 0;title[/x]:smile:8;;never ended 5m" in written
    assert not any(order in written for order in (b"\x1b]", b"\x1b[2J", b"\x07", "\x9b".encode(), "\u202e".encode()))
