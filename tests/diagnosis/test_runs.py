"""Run directories of real jobs that died in different ways, and records with the kernel's counts as it leaves them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.diagnosis._runs import find_run, logs_of, run_signs
from memfit.rundir import RunDir

MIB = 1 << 20
PROGRAM = """\
import os, signal, sys, time
from memfit.rundir import mark_phase
mark_phase("train")
time.sleep(0.6)
how = sys.argv[1]
if how == "stranger":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "hog":
    held = []
    while True:
        held.append(bytearray(os.urandom(1) * (8 << 20)))
if how == "once" and not os.path.exists("seen"):
    open("seen", "w").close()
    raise MemoryError("no room")
"""


@pytest.fixture
def died(tmp_path):
    """Runs a program under ``memfit run`` that dies in the way named; gives its run directory."""

    def run(how):
        (tmp_path / "program.py").write_text(PROGRAM)
        words = ["run", "-q", "--new", "--name", how, "--runs-dir", "runs", "--limit", "200MiB", "--memory", "60MiB"]
        subprocess.run(
            [sys.executable, "-m", "memfit", *words, "--retries", "1", "--", sys.executable, "program.py", how],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            timeout=60,
            check=False,
        )
        return RunDir.all(tmp_path / "runs", how)[0]

    return run


def needs_group(end):
    if end.values["own_kills"][1] is None:
        pytest.skip("needs root and a cgroup v1 memory hierarchy: without a group of its own nothing is counted")


@pytest.mark.slow
def test_a_strangers_kill_is_told_from_one_for_memory(died):
    run = died("stranger")
    end = run_signs(run)[0]
    needs_group(end)
    assert (end.name, end.values["stranger"], end.values["phase"]) == ("killed", True, "train")
    assert end.values["own_kills"] == (0, 0)
    assert end.file == str(run.job_dir("cmd_0001") / "outcome.json")


@pytest.mark.slow
def test_a_job_that_met_its_wall_was_ended_by_memfit_for_memory(died):
    end = [one for one in run_signs(died("hog")) if "attempt" in one.values][-1]
    needs_group(end)
    assert (end.name, end.values["who"]) == ("cgroup_kill", "memfit")
    assert 0.9 * end.values["limit_bytes"] < end.values["used_bytes"] <= end.values["limit_bytes"]


@pytest.mark.slow
def test_an_attempt_that_a_later_one_made_good_is_recovered(died):
    run = died("once")
    first, second = run_signs(run)
    assert (first.name, first.values["attempt"], first.values["recovered"]) == ("host_refused", 1, True)
    assert (second.name, second.values["recovered"]) == ("success", False)
    logs = logs_of(run, "cmd_0001")
    assert [path.name for path in logs] == ["err.log"]
    assert find_run(logs[0]).path == run.path


def recorded(tmp_path, before, after, *, state="out_of_memory", code=-9, place="host", **more):
    """A run directory with one job's record."""
    run = RunDir.create(tmp_path / "runs", "made", "0123abcd" * 8)
    folder = run.job_dir("fold_1")
    folder.mkdir(parents=True)
    evidence = {"wall_bytes": 100 * MIB, "place": place, "oom_kills": {"before": before, "after": after}}
    record = {"state": state, "exit_code": code, "phase": "validate", "cause": "words", "attempt": 1, "peak_bytes": MIB}
    (folder / "outcome.json").write_text(json.dumps(record | {"evidence": evidence} | more))
    return run


def counters(own=None, above=None, host=None):
    return {"own": own, "above": above or {}, "host": host}


@pytest.mark.parametrize(
    ("before", "after", "more", "name", "killer"),
    [
        (counters(0), counters(1), {}, "cgroup_kill", "the kernel"),
        (counters(0), counters(1), {"code": 1}, "cgroup_kill", ""),  # a worker was killed, its parent gave up
        (counters(above={"/jobs": 3}, host=7), counters(above={"/jobs": 4}, host=8), {}, "cgroup_kill", "the kernel"),
        (counters(above={"/jobs": 3}, host=7), counters(above={"/jobs": 3}, host=8), {}, "global_kill", "the kernel"),
        (counters(2), counters(2), {}, "cgroup_kill", "memfit"),
        (counters(0), counters(0), {"code": 1, "place": "device"}, "device_refused", ""),
        (counters(0), counters(0), {"code": 1}, "host_refused", ""),
        (counters(0), counters(0), {"state": "failed"}, "killed", ""),
        (counters(), counters(), {"state": "failed"}, "killed", ""),
        (counters(0), counters(0), {"state": "cancelled"}, "cancelled", "memfit"),
        (counters(0), counters(0), {"state": "preempted", "code": 75}, "preempted", ""),
    ],
)
def test_the_counters_tell_whose_memory_ran_out_and_who_killed(tmp_path, before, after, more, name, killer):
    end = run_signs(recorded(tmp_path, before, after, **more))[0]
    assert (end.name, end.values["who"]) == (name, killer)


def test_a_programs_own_error_is_no_shortage(tmp_path):
    cause = "exit code 1 in phase train: ValueError: wrong shape"
    [end] = run_signs(recorded(tmp_path, counters(0), counters(0), state="failed", code=1, cause=cause))
    assert (end.name, end.values["name"]) == ("own_exception", "ValueError")


def test_a_kill_by_an_unknown_hand_is_not_said_to_be_for_memory_nor_not(tmp_path):
    [sign] = run_signs(recorded(tmp_path, counters(), counters(), state="failed"))
    assert (sign.name, sign.values["stranger"]) == ("killed", False)


def test_a_job_without_a_record_of_its_end_gives_no_fact(tmp_path):
    run = recorded(tmp_path, counters(0), counters(0))
    folder = run.job_dir("fold_1")
    (folder / "outcome.json").rename(folder / "status.json")
    status = json.loads((folder / "status.json").read_text()) | {"state": "running", "exit_code": None}
    (folder / "status.json").write_text(json.dumps(status))
    assert run_signs(run) == []


def test_what_a_training_met_and_survived_is_told_with_its_line(tmp_path):
    run = recorded(tmp_path, counters(0), counters(0), state="completed", code=0)
    events = [
        {"time": 1.0, "job": "fold_1", "kind": "phase", "phase": "train"},
        {"time": 2.0, "job": "fold_1", "kind": "oom", "memory": "device", "error": "CUDA out of memory"},
        {"time": 3.0, "job": "fold_1", "kind": "loader_worker_died", "pids": [7], "exit_code": -9},
        {"time": 4.0, "job": "fold_1", "kind": "loader_worker_died", "pids": [8], "exit_code": 1},
        {"time": 5.0, "job": "fold_2", "kind": "shm_full", "room": 0},
    ]
    path = run.events_dir / "host-1-1.jsonl"
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events) + '{"time": 6.0, "kind": "oo')
    found = run_signs(run, "fold_1")
    assert [(sign.name, sign.number) for sign in found] == [
        ("success", 1),
        ("skipped_batches", 2),
        ("killed", 3),
    ]
    assert Path(found[1].file) == path


def test_a_damaged_record_and_a_folder_of_something_else_are_passed_over(tmp_path):
    run = recorded(tmp_path, counters(0), counters(0))
    (run.job_dir("fold_1") / "outcome.json").write_text("{torn")
    assert run_signs(run) == []
    assert find_run(tmp_path) is None
