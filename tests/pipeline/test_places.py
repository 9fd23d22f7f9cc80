"""Device memory of real jobs: measured, admitted, grown, claimed and refused as host memory is, on stand-in GPUs."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from memfit.reports import find_run
from memfit.rundir import read_events

pytestmark = pytest.mark.slow

GIB = 1 << 30
STAND_IN = Path(__file__).parents[1] / "gpus"
#: Notes when it has which GPUs, takes each size for its seconds, and ends.
JOB = """
import json, os, sys, time
import stand_in_cuda
name, *steps = sys.argv[1:]
began = time.time()
for step in steps:
    gib, seconds = step.split("x")
    stand_in_cuda.hold(int(float(gib) * 2**30))
    time.sleep(float(seconds))
note = {"began": began, "ended": time.time(), "gpus": stand_in_cuda.visible()}
with open(os.path.join(os.environ["STAND_IN_GPUS"], f"job_{name}"), "w") as file:
    json.dump(note, file)
"""


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """A folder of no GPUs yet; what is started from here on sees those that are put there."""
    folder = tmp_path / "gpus"
    folder.mkdir()
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAND_IN_GPUS", str(folder))
    monkeypatch.setenv("MEMFIT_CLAIMS_DIR", str(tmp_path / "claims"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]))
    return folder


def make(gpus, num):
    """Make GPUs of 10 GiB."""
    (gpus / "gpus.json").write_text(json.dumps({f"GPU-{n}": 10 * GIB for n in range(num)}))


def start(*words, job, runs="runs"):
    command = [sys.executable, "-m", "memfit", "run", "--memory", "200MiB", "--runs-dir", runs, *words, "--"]
    command += [sys.executable, "job.py", *job]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    out = process.communicate(timeout=120)[0]
    assert process.returncode == 0, out
    return out


def notes(gpus):
    """Return what the jobs noted, by the time of their beginning."""
    found = [json.loads(path.read_text()) for path in gpus.glob("job_*")]
    return sorted(found, key=lambda note: note["began"])


def events(kind, runs="runs"):
    return [event for event in read_events(find_run(root=Path(runs)).events_dir) if event["kind"] == kind]


def test_two_jobs_have_two_gpus_each_of_four_and_a_third_waits_for_one_to_end(gpus):
    make(gpus, 4)
    finish(start("--num-gpus", "2", "--gpu-memory", "6GiB", "--param", "n=1..3", job=("{n}", "5x1")))
    first, second, third = notes(gpus)
    assert len({*first["gpus"], *second["gpus"]}) == 4
    assert second["began"] < first["ended"]
    assert third["began"] > min(first["ended"], second["ended"])
    assert any(event["on"] == "device" for event in events("wait"))


def test_a_job_whose_torch_refuses_more_comes_again_with_more(gpus):
    make(gpus, 1)
    finish(start("--gpu-memory", "2GiB", job=("a", "1x1", "8x1")))
    assert [round(event["devices"]["GPU-0"] / GIB, 2) for event in events("admit")] == [2.0, 3.0, 9.75]
    assert all("ran out of device memory" in event["reason"] for event in events("retry"))


def test_two_runs_at_once_do_not_promise_one_gpu_twice(gpus):
    make(gpus, 1)
    # Each takes what it was promised long after its start: until then the other sees it as free.
    runs = [start("--gpu-memory", "6GiB", job=(name, "0x1", "5x1"), runs=name) for name in ("a", "b")]
    for run in runs:
        finish(run)
    first, second = notes(gpus)
    assert second["began"] > first["ended"]
    assert Counter(event["devices"]["GPU-0"] for name in ("a", "b") for event in events("admit", name)) == {6 * GIB: 2}


def test_the_plan_counts_what_the_first_job_took_of_its_gpu(gpus):
    make(gpus, 2)
    finish(start("--num-gpus", "1", "--param", "n=1..5", job=("{n}", "4x2")))
    decided = json.loads((find_run(root=Path("runs")).path / "plan.json").read_text())
    assert (decided["num_parallel"], decided["num_fitting"], decided["limited_by"]) == (4, 4, "memory")
    assert decided["device_reservation_bytes"] == round(1.1 * 4 * GIB)
    began = notes(gpus)
    assert max(sum(one["began"] < at["ended"] <= one["ended"] for one in began) for at in began) <= 4
    words = ("--num-gpus", "1", "--param", "n=1..6", "--plan", "--json")
    [stage] = json.loads(finish(start(*words, job=("{n}", "4x2"))))["stages"]
    assert [row["num_jobs"] for row in stage["rows"] if row["fits"]] == [1, 2, 3, 4]
    assert all(row["margin_bytes"] > 0 for row in stage["rows"])
