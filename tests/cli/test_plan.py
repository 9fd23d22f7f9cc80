"""``memfit run --plan --on``: report 3's job before it starts; a plan that is kept, and compared with its run."""

import json
import sys

import pytest

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
    for content in ('{"stages": 3}', '{"stages": [{"name": "train", "forecast": {"layout": 1}}]}', '{"other": 1}'):
        (tmp_path / "other.json").write_text(content)
        refused = memfit("compare", "other.json", "held")
        assert refused.exit_code == 2 and "other.json is no plan" in refused.err
    [stage] = json.loads(memfit("run", "config.yaml", "--plan", "--new", "--json").out)["stages"]
    assert max(stage["forecast"]["phases"].values()) == pytest.approx(peak["measured_bytes"], abs=2)
    four = json.loads(memfit("run", "config.yaml", "--plan", "--new", "--json", "--nproc", "4").out)["stages"][0]
    assert max(four["forecast"]["phases"].values()) == pytest.approx(2 * peak["measured_bytes"], abs=8)
