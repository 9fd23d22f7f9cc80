"""A session of tests that leaves a process behind fails and names the test."""

import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

TESTS = """
import pathlib, subprocess, sys, time

SLEEP = "import time; time.sleep(600)"

def test_that_ends_what_it_starts():
    child = subprocess.Popen([sys.executable, "-c", SLEEP])
    child.kill()
    child.wait()

def test_that_leaves_a_child():
    subprocess.Popen([sys.executable, "-c", SLEEP])

def test_that_leaves_an_orphan():
    begun = pathlib.Path("begun")
    program = f'import pathlib; pathlib.Path("{begun}").touch(); {SLEEP}'
    subprocess.run(["sh", "-c", f"setsid {sys.executable} -c '{program}' &"], check=True)
    while not begun.exists():  # until then it is a shell
        time.sleep(0.01)
"""


def session(folder, *arguments):
    """Run the tests in a session of their own that waits for no process."""
    folder.joinpath("test_it.py").write_text(TESTS)
    conftest = Path(__file__).with_name("conftest.py").read_text()
    assert "_GRACE = 10.0" in conftest
    folder.joinpath("conftest.py").write_text(conftest.replace("_GRACE = 10.0", "_GRACE = 0.0"))
    folder.joinpath("fixtures.py").write_text(Path(__file__).with_name("fixtures.py").read_text())
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, re.findall(r"test_it.py::(\w+) .call.: process (\d+): (.*)", done.stdout)


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("workers", [[], ["-n", "1"]])
def test_a_process_that_outlives_the_session_fails_it_and_is_named_with_its_test(tmp_path, workers):
    code, left = session(tmp_path, *workers)
    assert code == 1
    assert sorted(test for test, _, _ in left) == ["test_that_leaves_a_child", "test_that_leaves_an_orphan"]
    assert all(command.endswith("time.sleep(600)") for _, _, command in left)
    deadline = time.monotonic() + 30
    while any(is_running(int(pid)) for _, pid, _ in left):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_session_that_leaves_none_passes(tmp_path):
    assert session(tmp_path, "-k", "ends") == (0, [])
