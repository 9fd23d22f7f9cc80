"""``memfit run --plan --on``: report 3's job before it starts; a plan that is kept, and compared with its run."""

import json
import sys

import pytest

from memfit.rundir import read_events

REPORT_3 = """
experiment: report3
stages: {train: {run: python train.py}}
resources: {ranks: 16, memory: 71.4GB}     # one rank by sacct: AveRSS
"""
NODES = "nodes: 4\ntasks_per_node: 4\ncpus_per_task: 16\ngpus_per_task: 1\ngpu: L40S\nnode_memory: {}\n"


@pytest.fixture
def report_3(tmp_path):
    """Writes the job of report 3 and its nodes; returns the words of a plan."""

    def write(memory):
        (tmp_path / "report3.yaml").write_text(REPORT_3)
        (tmp_path / "machine.yaml").write_text(NODES.format(memory))
        return "run", "report3.yaml", "--plan", "--on", "machine.yaml"

    return write


def test_the_job_of_report_3_is_refused_before_it_starts(memfit, report_3, tmp_path):
    done = memfit(*report_3("256GB"))
    assert done.exit_code == 3 and not (tmp_path / "runs").exists()
    assert "does not fit: 265.99 GiB of each node in phase train (4 x 66.50 GiB), and it has 238.42 GiB" in done.out
    assert "smallest change that fits: 3 tasks a node: 199.49 GiB of each node (cost: 6 nodes for 16 ranks" in done.out
    assert "name what makes them: --set stages.train.loaders=module:function" in done.out
    assert memfit(*report_3("513GB")).exit_code == 0
    many = memfit(*report_3("513GB"), "--nproc", "17")
    assert many.exit_code == 2 and "17 ranks were asked for, and the machine has 4 x 4 tasks" in many.err
    bad = memfit(*report_3("513GB\nfoo: 1"))
    assert bad.exit_code == 2 and "foo is no setting" in bad.err


def test_a_launch_is_laid_out_on_the_same_machine(memfit, report_3):
    report_3("256GB")
    words = "launch", "report3.yaml", "--on", "machine.yaml"
    refused = memfit(*words)
    assert (refused.exit_code, refused.out) == (3, "")
    assert "report3 needs 293.00 GiB of each node" in refused.err and "machine.yaml has 238.42 GiB" in refused.err
    assert "3 tasks a node: 219.44 GiB of each node (cost: 6 nodes for 16 ranks" in refused.err  # with its slack
    small = memfit(*words, "--set", "resources.memory=45GB")
    assert small.exit_code == 0 and "#SBATCH --nodes=4" in small.out and "--nproc-per-node=4" in small.out
    many = memfit(*words, "--set", "resources.ranks=17")
    assert many.exit_code == 2 and "17 ranks were asked for, and the machine has 4 x 4 tasks" in many.err
    wide = memfit(*words, "--set", "slurm.nodes=2")
    assert wide.exit_code == 2 and "ranks of a node: 8 of 4" in wide.err
    report_3("900GB\nshm: 8GiB")
    shm = memfit(*words, "--set", "launch.shm=20GiB")
    assert shm.exit_code == 3 and "in /dev/shm of each node" in shm.err


def test_a_machine_or_a_file_for_the_plan_needs_a_plan(memfit, report_3):
    for flag in ("--on", "--out"):
        done = memfit(*report_3("256GB")[:2], flag, "machine.yaml")
        assert done.exit_code == 2 and f"{flag} was given without --plan" in done.err


def test_a_plan_is_compared_with_a_run_alone(memfit, report_3, tmp_path):
    (tmp_path / "plan.json").write_text('{"stages": []}')
    for words, what in (
        (("none.json", "runs/x"), "names no run and no job"),
        (("plan.json", "runs/x", "--seeds"), "was given with the plan"),
    ):
        done = memfit("compare", *words)
        assert done.exit_code == 2 and what in done.err


LOADERS = """
import sys
from types import SimpleNamespace
from memfit.rundir import loader_settings, phase, record

phase("train")
train = SimpleNamespace(dataset=range(64), batch_size=int(sys.argv[1]), num_workers=2, persistent_workers=False)
if len(sys.argv) > 2:
    phase("validate")
    record("loaders", settings=loader_settings(train) | loader_settings(train, "validation"))
else:
    record("loaders", settings=loader_settings(train) | loader_settings(None, "validation"))
record("epoch", epoch=1, num_epochs=2, text="epoch 1/2")
record("epoch", epoch=2, num_epochs=2, text="epoch 2/2")
"""
SETTINGS = {"ranks": 1, "samples": 64, "batch": 8, "workers": 2, "persistent workers": False, "accumulation": 1}
SETTINGS |= {"validation": True, "validation batch": 8}


@pytest.fixture
def planned(memfit, tmp_path):
    """Runs a training with so large a batch, after a plan, and returns the texts about it."""
    (tmp_path / "loaders.py").write_text(LOADERS)
    forecast = {"settings": SETTINGS, "phases": {"train": 100 << 20, "validate": 300 << 20}}
    (tmp_path / "plan.json").write_text(json.dumps({"stages": [{"name": "train", "forecast": forecast}]}))

    def run(*words):
        stage = {"run": [sys.executable, "loaders.py", *words]}
        (tmp_path / "config.yaml").write_text(json.dumps({"experiment": "held", "stages": {"train": stage}}))
        done = memfit("run", "config.yaml", "--planned", "plan.json")
        assert done.exit_code == 0, done.err
        return done

    return run


def test_a_run_says_once_how_it_differs_from_its_plan(planned, memfit, tmp_path):
    done = planned("4")
    text = (
        "train is not as planned: batch 8 planned, 4 in the run; validation yes planned, none in the run; phase "
        "validate, the worst with 300.0 MiB planned, was not seen (train was, with "
    )
    assert done.out.count(text) == 2, "when it was found, and in the summary"
    assert "in the run); not known of the run: accumulation" in done.out
    [run] = (tmp_path / "runs" / "held").glob("run_*")
    [event] = [one for one in read_events(run / "events") if one["kind"] == "planned"]
    assert (event["differs"], event["job"]) == (["batch", "validation"], "train") and text in event["text"]
    memfit("report", str(run))
    assert "batch 8 planned, 4 in the run" in (run / "report.html").read_text()


def test_a_run_that_is_as_planned_says_so(planned, tmp_path):
    text = "train is as planned: ranks 1, samples 64, batch 8, workers 2, validation yes, validation batch 8; phase "
    assert text + "validate, the worst, was seen; not known of the run: accumulation" in planned("8", "yes").out
    (tmp_path / "plan.json").unlink()
    assert "is as planned" in planned("8", "yes").out, "a run keeps its plan"


@pytest.mark.parametrize("content", ["", '{"stages": []}', '{"stages": [{"name": "train", "forecast": null}]}'])
def test_what_is_no_plan_is_refused_before_a_run(memfit, tmp_path, content):
    (tmp_path / "config.yaml").write_text(json.dumps({"experiment": "held", "stages": {"train": {"run": "true"}}}))
    if content:
        (tmp_path / "plan.json").write_text(content)
    done = memfit("run", "config.yaml", "--planned", "plan.json")
    assert done.exit_code == 2 and "plan.json holds no plan that a run can be compared with" in done.err
    assert not list(tmp_path.glob("runs/*/*/jobs/*"))


HOLD = """
import time
from memfit.rundir import phase

phase("train")
block = bytearray(200 << 20)
time.sleep(1)
phase("validate")
more = bytearray(100 << 20)
time.sleep(1)
"""


@pytest.mark.slow
def test_a_kept_plan_stands_beside_what_its_run_took_and_the_next_counts_with_that(memfit, tmp_path):
    (tmp_path / "hold.py").write_text(HOLD)
    config = {"experiment": "held", "stages": {"train": {"run": [sys.executable, "hold.py"]}}}
    (tmp_path / "config.yaml").write_text(json.dumps(config | {"resources": {"ranks": 2, "memory": "330MiB"}}))
    assert memfit("run", "config.yaml", "--plan", "--out", "plan.json").exit_code == 0
    assert memfit("run", "config.yaml", "-q").exit_code == 0
    found = json.loads(memfit("compare", "plan.json", "held", "--json").out)
    peak = next(line for line in found["lines"] if line["line"] == "host, peak")
    assert (peak["job"], peak["of"], peak["forecast_bytes"]) == ("train", "a node", 660 << 20)
    assert 600 << 20 < peak["measured_bytes"] < 720 << 20
    assert peak["error"] == pytest.approx(peak["forecast_bytes"] / peak["measured_bytes"] - 1)
    text = memfit("compare", "plan.json", "held").out
    assert "train: host, validate" in text and "%" in text
    same = json.loads(memfit("compare", "held", "held", "--plan", "--json").out)["lines"]
    assert {line["line"] for line in same} >= {"host, train", "host, validate", "host, peak", "/dev/shm", "mapped"}
    assert all(line["forecast_bytes"] == line["measured_bytes"] for line in same)
    for content in ('{"stages": 3}', '{"stages": [{"name": "train", "forecast": {"layout": 1}}]}', '{"other": 1}'):
        (tmp_path / "other.json").write_text(content)
        refused = memfit("compare", "other.json", "held")
        assert refused.exit_code == 2 and "other.json is no plan" in refused.err
    [stage] = json.loads(memfit("run", "config.yaml", "--plan", "--new", "--json").out)["stages"]
    assert max(stage["forecast"]["phases"].values()) == pytest.approx(peak["measured_bytes"], abs=2)
    four = json.loads(memfit("run", "config.yaml", "--plan", "--new", "--json", "--nproc", "4").out)["stages"][0]
    assert max(four["forecast"]["phases"].values()) == pytest.approx(2 * peak["measured_bytes"], abs=8)
