"""What a job leaves behind: who leaves by itself is let go, who stays is ended."""

import os
import subprocess
import sys

import pytest

CODE = """
import os, subprocess, sys
from memfit.jobs._processes import end_children
from memfit.jobs._processes import become_subreaper
become_subreaper()
child = subprocess.Popen(["sleep", sys.argv[1]])
print(len(end_children()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are inherited on Linux only")
@pytest.mark.parametrize(("seconds", "num_ended"), [("0.05", 0), ("60", 1)])
def test_a_helper_that_is_about_to_leave_is_not_counted_as_left_running(seconds, num_ended):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, seconds],
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert int(done.stdout) == num_ended
