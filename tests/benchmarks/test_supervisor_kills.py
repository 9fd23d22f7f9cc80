"""The benchmark of killed supervisors, with few of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "supervisor_kills.py"


def test_after_every_kill_the_results_are_the_same_and_no_job_was_started_twice(tmp_path):
    command = [sys.executable, str(SCRIPT), "--kills", "6", "--jobs", "10", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["kills"] == 6 and told["same_results"] and told["starts"] == told["jobs"]
    assert (told["twice_at_once"], told["left_over"]) == (0, [])
