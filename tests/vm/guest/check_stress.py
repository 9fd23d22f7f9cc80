"""The stress benchmark, small, on cgroup v2: jobs that burst, leak, lie, fork, map files and fill /dev/shm, unkilled."""

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[3] / "benchmarks/stress.py"
# Each job costs some six seconds of an emulated CPU; how well the budget is used says nothing here.
SMALL = ["--jobs", "8", "--limit", "512MiB", "--reserve", "128MiB", "--hold", "2", "--timeout", "270"]


def test_jobs_that_burst_leak_lie_and_fork_beside_a_neighbour_are_all_right_and_none_is_killed(tmp_path):
    told = subprocess.run(
        [sys.executable, BENCHMARK, *SMALL, "--json", tmp_path / "figures"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    print(told.stdout)
    figures = json.loads((tmp_path / "figures").read_text())
    assert (figures["kills"]["total"], figures["neighbour_killed"], figures["memfit_oom_kills"]) == (0, False, 0)
    assert (figures["num_wrong"], figures["num_missing"], figures["states"]) == (0, 0, {"completed": 8}), told.stdout
    assert (figures["exit_code"], figures["left_in_shm"]) == (0, 0), told.stdout
    assert figures["restarts"] <= 0.02
    assert figures["events"]["grow"] > 0, "no job met its wall: this shows nothing"
