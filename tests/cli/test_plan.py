"""``memfit run --plan --on``: report 3's job before it starts; a plan that is kept, and its run."""

import json
import sys
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.conftest import check_refused
from memfit.jobs import JobStatus
from memfit.memory import Footprint, PhasePeak
from memfit.pipeline import _watchers
from memfit.rundir import RunDir, read

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
    assert memfit(*report_3("513GB")).exit_code == 0
    many = "17 ranks were asked for, and the machine has 4 x 4 tasks"
    check_refused(memfit(*report_3("513GB"), "--nproc", "17"), many)
    check_refused(memfit(*report_3("513GB\nfoo: 1")), "foo is no setting")


def test_a_machine_or_a_file_for_the_plan_needs_a_plan(memfit, report_3):
    for flag in ("--on", "--out"):
        check_refused(memfit(*report_3("256GB")[:2], flag, "machine.yaml"), f"{flag} was given without --plan")


LOADERS = """
import sys
from types import SimpleNamespace
from memfit.rundir import loader_settings, phase, record

phase("train")
block = bytearray(150 << 20)  # the kernel shows it at the end, however seldom it was looked at
train = SimpleNamespace(dataset=range(64), batch_size=int(sys.argv[1]), num_workers=2, persistent_workers=False)
if len(sys.argv) > 2:
    phase("validate")
    record("loaders", settings=loader_settings(train) | loader_settings(train, "validation"))
else:
    record("loaders", settings=loader_settings(train) | loader_settings(None, "validation"))
record("epoch", epoch=1, num_epochs=2, text="epoch 1/2")
record("epoch", epoch=2, num_epochs=2, text="epoch 2/2")
if sys.argv[3:] == ["9"]:
    raise MemoryError
sys.exit(int(*sys.argv[3:]))
"""
SETTINGS = {"ranks": 1, "samples": 64, "batch": 8, "workers": 2, "persistent workers": False, "accumulation": 1}
SETTINGS |= {"validation": True, "validation batch": 8}


@pytest.fixture
def planned(memfit, tmp_path):
    """Runs a training with so large a batch, after a plan, and returns the texts about it."""
    (tmp_path / "loaders.py").write_text(LOADERS)

    def run(*words, exit_code=0, **more):
        forecast = {"settings": SETTINGS, "phases": {"train": 300 << 20, "validate": 290 << 20}, **more}
        (tmp_path / "plan.json").write_text(json.dumps({"stages": [{"name": "train", "forecast": forecast}]}))
        stage = {"run": [sys.executable, "loaders.py", *words]}
        (tmp_path / "config.yaml").write_text(
            json.dumps({"experiment": "held", "stages": {"train": stage}, "retries": 0})
        )
        done = memfit("run", "config.yaml", "--new", "--planned", "plan.json")
        assert done.exit_code == exit_code, done.err
        return done

    return run


def test_a_run_says_how_it_differs_from_its_plan(planned, memfit, tmp_path):
    done = planned("4")
    [run] = RunDir.all(tmp_path / "runs", "held")
    [event] = read(run).planned.values()
    assert event["text"].startswith(
        "train is not as planned: batch 8 planned, 4 in the run; validation True planned, None in the run; host memory 300"
    )
    assert event["text"].endswith(" measured; not compared: accumulation, validation batch, phase validate")
    assert (event["differs"], event["holds"]) == (["batch", "validation"], False)
    assert done.out.count(event["text"]) == 2, "at its end, and in the summary"
    memfit("report", str(run.path))
    assert event["text"] in (run.path / "report.html").read_text()


def test_a_run_that_is_as_planned_says_so_with_what_was_compared(planned, tmp_path):
    done = planned("8", "yes").out
    assert "train is as planned: host memory 300.0 MiB planned, " in done and "; not compared: accumulation\n" in done
    lacking = planned("8", "yes", uncounted=["weights"]).out
    assert "train cannot be called as planned: host memory 300.0 MiB planned, " in lacking
    assert "not compared: accumulation, weights" in lacking and "is as planned" not in lacking


def test_a_run_keeps_its_plan(memfit, planned, tmp_path):
    planned("8", "yes")
    (tmp_path / "plan.json").unlink()
    assert "train is as planned" in memfit("run", "config.yaml", "--planned", "plan.json").out


@given(*[st.lists(st.integers(0, 9), min_size=5, max_size=5)] * 2, st.booleans(), st.sampled_from([[], ["weights"]]))
def test_a_job_is_as_planned_if_host_phases_and_ranks_are_within_a_tenth_of_the_plan(plan, taken, died, uncounted):
    phases, state = dict(zip("ab", plan, strict=False)), "failed" if died else "completed"
    forecast = {"settings": {"ranks": 2}, "phases": phases, "ranks": plan[2:4], "uncounted": uncounted}
    peaks = {name: PhasePeak(size) for name, size in zip("ab", taken, strict=False) if size}
    ranks = [{"rank": rank, "peak_bytes": size} for rank, size in enumerate(taken[2:4])]
    status = JobStatus("x", state, peak_bytes=taken[4], footprint=Footprint(9, phases=peaks), ranks=ranks)
    order, events = mock.Mock(ranks_of=lambda _: 2), mock.Mock()
    graph = mock.Mock(stages={"x": None}, units={"x": [mock.Mock(job_id="x")]})
    with mock.patch.object(_watchers, "read_status", return_value=status):
        _watchers.Planned(order, graph, {"x": forecast}, events).take([{"job": "x", "kind": "end", "state": state}])
    pairs = [*zip(plan[:4], taken[:4], strict=True), (max(plan[:2]), taken[4])]
    over = not uncounted and any(now > 1.1 * then for then, now in pairs)
    found = events.write.call_args.kwargs
    assert found["holds"] is (False if died or over else None if uncounted or not taken[4] else True)
    assert ("is as planned: host memory" in found["text"]) == (found["holds"] is True)
    for name in peaks:
        assert f"phase {name} {phases[name]} B planned, {peaks[name].private_bytes} B measured" in found["text"]


@pytest.mark.slow
@pytest.mark.parametrize(("code", "said"), [("7", "failed"), ("9", "out of memory")])
def test_a_job_that_dies_is_not_as_planned_whatever_its_first_epoch_was(planned, code, said):
    assert f"train is not as planned: it ended {said}; host memory" in planned("8", "yes", code, exit_code=4).out


@pytest.mark.slow
def test_a_run_with_other_params_or_another_command_is_not_as_planned(memfit, tmp_path):
    def run(word, *words):
        stage = {"run": [word, "{params.n}"]}
        config = {"experiment": "held", "stages": {"train": stage}, "params": {"n": 1, "token": "tr0ub4dor"}}
        (tmp_path / "config.yaml").write_text(json.dumps(config | {"resources": {"ranks": 2, "memory": "330MiB"}}))
        done = memfit("run", "config.yaml", "--new", *words)
        assert done.exit_code == 0
        return done.out

    run("true", "--plan", "--out", "plans/plan.json")
    (tmp_path / "plans/plan.json").rename(tmp_path / "plan.json")
    assert "tr0ub4dor" not in (tmp_path / "plan.json").read_text()
    assert "train is as planned: host memory 660.0 MiB planned, " in run("true", "--planned", "plan.json")
    other = run("true", "--planned", "plan.json", "--set", "params.n=2")
    assert "train is not as planned: params.n 1 planned, 2 in the run; host memory 660.0 MiB planned, " in other
    assert "train is not as planned: another command" in run("echo", "--planned", "plan.json")


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


def test_a_plan_says_that_it_runs_first_steps_and_runs_none_if_they_are_left_out(memfit):
    assert "first steps" not in (left_out := memfit("run", "--plan", "--no-steps", "--", "true")).err
    assert left_out.out.endswith("Nothing was started.\n")
    assert "first steps of cmd as 1 rank: at most" in memfit("run", "--plan", "--", "true").err


@pytest.mark.slow
def test_the_next_plan_counts_with_what_a_run_took(memfit, tmp_path):
    (tmp_path / "hold.py").write_text(HOLD)
    config = {"experiment": "held", "stages": {"train": {"run": [sys.executable, "hold.py"]}}}
    (tmp_path / "config.yaml").write_text(json.dumps(config | {"resources": {"ranks": 2, "memory": "330MiB"}}))
    assert memfit("run", "config.yaml", "-q").exit_code == 0
    [stage] = json.loads(memfit("run", "config.yaml", "--plan", "--new", "--json").out)["stages"]
    peak = max(stage["forecast"]["phases"].values())
    assert 600 << 20 < peak < 720 << 20
