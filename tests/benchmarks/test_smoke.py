"""Each benchmark runs with little to do, and says what it measured."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /proc")]
PEERS = {"pandas": "pandas", "polars": "polars", "HF datasets": "datasets", "LitData": "litdata"}


def test_loaders_deliver_the_same_batches_and_leave_nothing_behind(run, tmp_path):
    words = ["--gib", "0.02", "--assets", "200", "--seconds", "0.1", "--num-workers", "0", "--directory", tmp_path]
    done = run("loaders", *words, "--json", tmp_path / "figures.json")
    assert done.returncode in (0, 1), done.stderr
    lines = done.stdout.splitlines()
    installed = {name for name, package in PEERS.items() if importlib.util.find_spec(package) is not None}
    for name in PEERS.keys() - installed:
        assert f"{name}: {PEERS[name]} is not installed, left out" in lines
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert {row["name"] for row in figures} == {"memfit", *installed}
    assert "met    batches are the same for all" in lines
    verdicts = [line[:6] for line in lines if line[:7] in ("met    ", "MISSED ")]
    assert len(verdicts) == 2 and done.returncode == ("MISSED" in verdicts)
    assert list(tmp_path.iterdir()) == [tmp_path / "figures.json"]


def test_tokenised_texts_give_the_same_batches(run, tmp_path):
    words = ["--examples", "200", "--rounds", "1", "--num-workers", "0", "--json", tmp_path / "figures.json"]
    done = run("sequences", *words)
    assert done.returncode in (0, 1), done.stderr
    assert "met    batches are the same for all" in done.stdout.splitlines()
    names = {row["name"] for row in json.loads((tmp_path / "figures.json").read_text())}
    assert {"DataLoader, tokenise", "DataLoader, ids", "memfit, ids"} <= names


def test_the_store_of_the_forecaster_gives_the_same_batches_from_the_panel_and_from_parquet(run):
    done = run("forecaster", "--part", "store", "--rows", "1", "--seconds", "0.05", "--step-ms", "1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "of 112 columns" in lines[0] and lines[-1] == "the same batches: met"
    assert sum("samples/s warm" in line for line in lines) == 3


def test_the_line_of_an_effect_has_the_interval_of_a_paired_t_test(benchmark):
    random = np.random.default_rng(0)
    one, other = ({seed: {"icir": value} for seed, value in enumerate(random.normal(size=7))} for _ in range(2))
    line = benchmark("forecaster").line_of_effect(one, other, "icir")
    values = [[found["icir"] for found in of.values()] for of in (one, other)]
    interval = stats.ttest_rel(*values).confidence_interval(0.95)
    assert f"({interval.low:+.4f} to {interval.high:+.4f})" in line and line.endswith("no difference shown")


def test_the_grid_of_estimates_has_every_row_and_its_verdicts(run, tmp_path):
    done = run("estimate", "--skip-traced", "--json", tmp_path / "figures.json")
    assert done.returncode == 0 and "MISSED" not in done.stdout, done.stdout + done.stderr
    grid = json.loads((tmp_path / "figures.json").read_text())["grid"]
    assert len(grid) == 3 * 3 * 2 * 2
    key = ("gpu", "form", "checkpointing", "optimizer")
    verdicts = {tuple(row[name] for name in key): row["formula"]["verdict"] for row in grid}
    assert verdicts["RTX 4090", "fp32 masters", "full", "adamw8bit"] == "does not fit"
    assert verdicts["RTX 5090", "pure bf16", "full", "adamw"] == "fits"


def test_a_case_for_a_gpu_is_estimated_without_one(benchmark, monkeypatch, capsys):
    gpu = benchmark("gpu")

    def main(*words):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
        return gpu.main(), capsys.readouterr().out

    status, told = main("--trace", "lstm, 64 x 256")
    assert status == 0 and '"method": "traced"' in told and '"name": "H100-80GB"' in told
    if not torch.cuda.is_available():
        assert main("--part", "step") == (2, "there is no GPU here\n")


@pytest.mark.long
def test_decisions_on_overlapping_labels_are_as_promised_and_others_reject_far_too_often(benchmark):
    pytest.importorskip("arch")
    pytest.importorskip("statsmodels")
    decision = benchmark("decision")
    found = decision.rates(240, 5, "normal", num_series=100, seed=1, num_resamples=100)
    # 100 series know a share of 5 % to about ± 2.2 points.
    assert 0.01 <= found.size <= 0.10 and found.decided <= found.size
    assert 0.90 <= found.coverage <= 0.99 and found.basic < found.coverage
    assert found.root_n > 0.8 and found.no_lags > 0.25 and found.bartlett > found.size
    error = decision.true_standard_error(240, 5)
    share = decision.found_share(240, 5, decision.minimal_detectable_effect(error, 240), num_series=300, seed=1)
    assert share == pytest.approx(0.8, abs=0.07)


@pytest.mark.long
@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists(),
    reason="needs root and a cgroup v1 memory hierarchy at /sys/fs/cgroup/memory",
)
def test_two_runs_share_a_real_limit_without_a_kill_or_a_lost_attempt(run, tmp_path):
    words = ["--jobs", "10", "--hold", "0.7", "--limit", "1GiB", "--reserve", "192MiB", "--work", tmp_path / "work"]
    done = run("two_runs", *words, "--json", tmp_path / "figures.json")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())["at_once"]
    assert (figures["kills"]["total"], figures["num_wrong"], figures["missing"]) == (0, 0, [])
    assert figures["states"] == {"completed": 20}
    assert len(list((tmp_path / "work/at_once/runs").glob("share_*/run_*"))) == 2
