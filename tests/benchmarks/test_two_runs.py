"""Two runs at once under one real limit, each with a few jobs: what the benchmark of them says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "two_runs.py"


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists(),
    reason="needs root and a cgroup v1 memory hierarchy at /sys/fs/cgroup/memory",
)
def test_two_runs_share_a_real_limit_without_a_kill_or_a_lost_attempt(tmp_path):
    command = [sys.executable, str(SCRIPT), "--jobs", "10", "--hold", "0.7", "--limit", "1GiB", "--reserve", "192MiB"]
    command += ["--work", str(tmp_path / "work"), "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())["at_once"]
    assert (figures["kills"]["total"], figures["num_wrong"], figures["missing"]) == (0, 0, [])
    assert figures["states"] == {"completed": 20}
    assert len(list((tmp_path / "work/at_once/runs").glob("share_*/run_*"))) == 2
