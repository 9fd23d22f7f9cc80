"""``memfit bench loader``: a table and a sentence for a workload with a loader, three parts for one without."""

import dataclasses
import json
from pathlib import Path

import pytest

from memfit.cli import _bench
from memfit.cli._terminal import console
from memfit.data import LoaderReport, Pace, choose_num_workers, verdict

pytestmark = pytest.mark.slow

RANKER = Path(__file__).parents[2] / "src" / "memfit_workloads" / "ranker" / "config.yaml"
MODULE = """
import dataclasses, time
import tiny
from memfit.data import DateBatches, Loader
from memfit.pipeline import Probe

def data_of(context):
    prepared = context["prepare"]
    return prepared.panel(), prepared.arrays("splits")["train_1"]

def loader(context, params, num_workers):
    panel, dates = data_of(context)
    assert context.dir.is_dir() and len(dates) and context.unit["fold"] == 1
    assert num_workers in (0, 1)
    return DateBatches(panel, dates, lookback=1, target="y")

def step(context, params):
    return lambda batch: time.sleep(0.001 * len(batch.targets))


def probed(**probe):
    stages = [dataclasses.replace(one, probe=Probe(**probe)) if one.name == "fold" else one for one in tiny.TINY.stages]
    return dataclasses.replace(tiny.TINY, stages=tuple(stages))

BOTH = probed(loader=loader, step=step)
NO_STEP = probed(loader=loader)

def with_workers(context, params, num_workers):
    return Loader(*data_of(context), lookback=1, target="y", num_workers=num_workers)

WITH_WORKERS = probed(loader=with_workers)
"""


@pytest.fixture
def workload(tmp_path):
    def write(target):
        (tmp_path / "loading.py").write_text(MODULE)
        (tmp_path / "config.yaml").write_text(
            f"schema_version: 1\nexperiment: tiny\ntarget: {target}\nparams: {{n_splits: 2}}\n"
        )
        return tmp_path / "config.yaml"

    return write


def test_a_loader_is_measured_for_each_count_and_beside_the_workloads_own_step(memfit, workload, tmp_path):
    words = ["--num-workers", "0,1", "--seconds", "0.02", "--with-model", "--json"]
    done = memfit("bench", "loader", workload("loading:BOTH"), *words)
    assert (done.exit_code, done.err) == (0, "")
    found = json.loads(done.out)
    assert [one["num_workers"] for one in found["reports"]] == [0, 1]
    for one in found["reports"]:
        assert one["trained"]["num_batches"] >= 1
        assert one["trained"]["compute_seconds"] / one["trained"]["num_batches"] >= 0.002
        assert one["verdict"]["is_bottleneck"] in (True, False)
        assert one["warm"]["num_samples"] == 2 * one["warm"]["num_batches"]
    assert found["num_workers"] in (0, 1)
    assert len(list((tmp_path / "panels").iterdir())) >= 1, "the panel is kept where a run finds it"
    assert not (tmp_path / "runs").exists()


def test_a_step_of_a_given_length_stands_in_for_the_model_and_the_verdict_is_a_sentence(memfit, workload):
    words = ["--num-workers", "0", "--seconds", "0.02", "--step-ms", "5", "--limit", "1GiB"]
    done = memfit("bench", "loader", workload("loading:NO_STEP"), *words)
    assert (done.exit_code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert "Panel(" in lines[0] and lines[1].split()[:3] == ["workers", "samples/s", "batches/s"]
    assert lines[2].split()[0] == "0"
    assert "no bottleneck: 0 workers" in done.out or "the trainer waits" in done.out
    assert "num_workers: 0 workers, " in done.out and "(the workers may take 1.00 GiB)" in done.out


@pytest.mark.parametrize(
    ("target", "words", "said"),
    [
        ("tiny:TINY", [], "no stage of 'tiny:TINY' says how it is measured."),
        ("loading:NO_STEP", ["--with-model"], "stage fold of 'loading:NO_STEP' names no step."),
        ("loading:BOTH", ["--with-model", "--step-ms", "5"], "--step-ms and --with-model were both given."),
        ("loading:BOTH", ["--num-workers", "0,two"], "--num-workers 0,two is no list of counts."),
        ("loading:BOTH", ["--set", "target_=x"], "target_"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_three_parts(memfit, workload, target, words, said):
    done = memfit("bench", "loader", workload(target), *words)
    assert done.exit_code == 2
    assert said in done.err and "\n  rule: " in done.err and "\n  do:   " in done.err
    assert done.out == ""


def test_a_config_that_is_not_there_is_named(memfit):
    done = memfit("bench", "loader", "nothing.yaml")
    assert done.exit_code == 2
    assert "nothing.yaml" in done.err


def test_the_table_shows_each_count_and_dashes_where_nothing_was_measured(capsys):
    slow = LoaderReport(0, 0.5, Pace(10, 320, 10**9, 2.0, 0.0, 1.0), None, Pace(4, 128, 0, 1.0, 3.0))
    fast = LoaderReport(2, 1.5, Pace(10, 320, 10**9, 0.5), Pace(5, 160, 10**9, 4.0, 0.0, 0.03), None, 1 << 20, 3 << 20)
    found = {
        "data": "Panel('/p'), 7 dates of fold 1",
        "reports": [
            dataclasses.asdict(one) | {"verdict": dataclasses.asdict(verdict(one)), "forecast_bytes": forecast}
            for one, forecast in ((slow, None), (fast, 2 << 20))
        ],
        "num_workers": 0,
        "choice": choose_num_workers([slow]).text,
        "budget_bytes": 1 << 30,
    }
    _bench._print(found, console())
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["0", "160", "5.0", "0.500", "-", "-", "0.50", "s", "25.0", "%", "0", "B", "-", "0", "B"]
    assert lines[3].split() == [
        *["2", "640", "20.0", "2.000", "0.250", "3", "%", "1.50", "s", "-", "1.0", "MiB", "2.0", "MiB", "3.0", "MiB"]
    ]
    assert "the trainer waits 25.0 % of its time (2 % at most)" in lines[5]


def test_the_ranker_is_measured_out_of_the_box_beside_its_own_model(memfit):
    pytest.importorskip("torch")
    data = {"source": "generated", "num_dates": 300, "num_assets": 20}
    words = [word for name, value in data.items() for word in ("--set", f"params.data.{name}={value}")]
    words += ["--num-workers", "0", "--seconds", "0.05", "--with-model", "--json"]
    done = memfit("bench", "loader", RANKER, *words)
    assert (done.exit_code, done.err) == (0, "")
    (alone,) = json.loads(done.out)["reports"]
    assert 0 < alone["trained"]["num_samples"] <= 8 * 20 * alone["trained"]["num_batches"]
    assert alone["cold"]["num_batches"] > 0


def test_modes_are_compared_and_one_is_chosen_with_a_reason_for_each_that_is_not(memfit, workload):
    words = ["--modes", "--num-workers", "0,1", "--seconds", "0.02", "--step-ms", "5", "--epochs", "3"]
    done = memfit("bench", "loader", workload("loading:NO_STEP"), *words, "--limit", "1GiB")
    assert (done.exit_code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert "Panel(" in lines[0] and lines[1].split()[:5] == ["mode", "workers", "samples/s", "waits", "starts"]
    assert [line.split()[:2] for line in lines[2:5]] == [["safe", "0"], ["preload", "0"], ["workers", "1"]]
    assert lines[6].startswith("mode: ") and "(the loader may take 1.00 GiB)" in lines[7]

    found = json.loads(memfit("bench", "loader", workload("loading:NO_STEP"), *words, "--limit", "1KiB", "--json").out)
    preload = found["modes"][1]
    assert preload["refused"].endswith("of data, more than the 1.0 KiB that are left") and preload["data_bytes"] > 1024
    assert found["mode"] in ("safe", "workers") and found["choice"].count("\n") == 3


def test_a_forecast_says_what_the_batches_ahead_take(memfit, workload):
    words = ["--num-workers", "0,1", "--seconds", "0.02", "--json", "--set", "params.n_splits=2"]
    done = memfit("bench", "loader", workload("loading:WITH_WORKERS"), *words)
    none, one = json.loads(done.out)["reports"]
    assert none["forecast_bytes"] is None
    assert one["forecast_bytes"] > 0 == one["worker_private_bytes"], "threads take no process"
