"""Real commands that take more than they should, under real walls: nobody is killed by the kernel."""

import json
import os
import sys
from pathlib import Path

import pytest

from memfit.memory import why_no_walls
from memfit.pipeline import run_commands
from memfit.rundir import RunDir
from memfit.units import MIB

pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0 or bool(why_no_walls()), reason=f"needs root and groups that can be made: {why_no_walls()}"
    )
]

HOLD = "import sys, time; mib, hold = int(sys.argv[1]), float(sys.argv[2]); block = bytearray(b'x') * (mib << 20); "
HOLD += "time.sleep(hold); print(len(block) >> 20)"
LEAK = "import sys, time; mib = int(sys.argv[1]); kept = []\nfor _ in range(mib // 10):\n"
LEAK += " kept.append(bytearray(b'x') * (10 << 20)); time.sleep(0.05)\nprint(10 * len(kept))"


def kernel_kills(run_dir):
    """Kills in the groups of all attempts, by their own counters at their ends."""
    found = 0
    for path in run_dir.glob("jobs/*/outcome*.json"):
        counters = json.loads(path.read_text())["evidence"].get("oom_kills")
        found += (counters["after"]["own"] or 0) - (counters["before"]["own"] or 0) if counters else 0
    return found


def run(code, *params, words=(), settings=()):
    how = {"overrides": ["memory.reserve=16MiB", *settings], "env": {}}
    result = run_commands([sys.executable, "-c", code, *words], params=params, **how)
    return result, kernel_kills(result.path)


def events(result, kind):
    return [event for event in RunDir(result.path).events() if event["kind"] == kind]


def printed(result):
    return sorted(path.read_text().strip() for path in (result.path / "jobs").glob("*/out.log"))


@pytest.mark.core
def test_bursts_that_nobody_announced_wait_for_one_another():
    words = ["{mib}", "0.6"]
    result, kills = run(HOLD, "mib=20,100,110,120", words=words, settings=["memory.limit=300MiB", "memory.job=16MiB"])
    assert (result.state, kills) == ("completed", 0)
    assert printed(result) == ["100", "110", "120", "20"]


@pytest.mark.core
def test_leaks_that_cannot_all_stay_give_way_and_come_again():
    settings = ["memory.limit=320MiB", "memory.job=16MiB"]
    result, kills = run(LEAK, "mib=180,190,200", words=["{mib}"], settings=settings)
    assert (result.state, kills) == ("completed", 0)
    assert printed(result) == ["180", "190", "200"]
    assert [status.attempt for status in result.statuses.values()] != [1, 1, 1] or events(result, "grow")


@pytest.mark.slow
def test_a_command_that_wants_more_than_the_whole_budget_is_ended_with_the_arithmetic_and_the_others_go_on():
    words = ["{mib}", "0.1"]
    result, kills = run(HOLD, "mib=10,600,20", words=words, settings=["memory.limit=256MiB"])
    assert (result.exit_code, kills) == (4, 0)
    assert {status.state for status in result.statuses.values()} == {"completed", "out_of_memory"}
    status = result.statuses["cmd_0002"]
    assert status.state == "out_of_memory"
    assert "needs more than the" in status.cause and "256.0 MiB" in status.cause
    assert printed(result) == ["", "10", "20"]


@pytest.mark.slow
@pytest.mark.proves("S0-11")
def test_a_sequence_peaks_where_one_of_it_peaks():
    result, _ = run(HOLD, "seed=1..4", words=["60", "0.4", "{seed}"], settings=["max_parallel=1"])
    peaks = [status.peak_bytes for status in result.statuses.values()]
    assert min(peaks) >= 60 * MIB
    assert max(peaks) <= 1.05 * peaks[0]


@pytest.mark.slow
def test_a_command_that_reads_a_file_of_twice_its_limit_finishes(folder):
    (folder / "large").write_bytes(os.urandom(MIB) * 400)
    code = "import mmap; f = open('large', 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); "
    code += "print(sum(m[i] for i in range(0, len(m), 4096)) > 0)"
    result, kills = run(code, settings=["memory.limit=200MiB"])
    assert (result.state, kills) == ("completed", 0)
    assert printed(result) == ["True"]
    assert result.statuses["cmd_0001"].peak_bytes < 100 * MIB


def test_groups_processes_and_claims_are_gone_when_the_run_is_over():
    result, _ = run(HOLD, "mib=10,20", words=["{mib}", "0.1"])
    (told,) = events(result, "budget")
    assert told["group"] and not Path(told["group"]).exists()
    assert "the kernel makes the job wait" in told["promise"]
