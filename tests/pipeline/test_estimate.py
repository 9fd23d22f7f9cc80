"""An estimate of a workload's own step on the longest batch of its own data, and the host's side beside it."""

import itertools

import pytest

from memfit.errors import ConfigError, UsageError
from memfit.estimation import estimate_step
from memfit.jobs import load_target
from memfit.pipeline import estimate_workload
from memfit.training import find_longest
from memfit_workloads.ranker.params import RankerParams
from memfit_workloads.ranker.stages import RANKER
from stages_here import StagesHere

PARAMS = {
    "data": {"source": "generated", "num_dates": 110, "num_assets": 30, "num_features": 3, "turnover": 0.3,
             "information_coefficient": 0.5, "horizons": [1, 2], "main_horizon": 2, "lookback": 10},
    "splits": {"n_splits": 3, "embargo_size": 2},
    "model": {"patch_size": 5, "width": 64, "num_layers": 2, "num_heads": 2, "dropout": 0.1},
    "train": {"dates_per_batch": 2},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    """Estimates are made in this process, which has loaded torch; tests/cli/test_estimate_workload.py has a child."""
    monkeypatch.setattr("memfit.pipeline._probe.call_in_child", lambda target, asked, env: load_target(target)(**asked))


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes a config of the ranker on a small generated market."""
    monkeypatch.chdir(tmp_path)

    def write(top="", target="memfit_workloads.ranker.stages:RANKER", params=PARAMS):
        path = tmp_path / "config.yaml"
        path.write_text(f"schema_version: 1\nexperiment: small\ntarget: {target}\n{top}\nparams: {params}\n")
        return path

    return write


@pytest.mark.slow
def test_the_ranker_is_estimated_from_its_config_alone_with_host_and_device_apart(config, tmp_path):
    found = estimate_workload(config(), gpu="24GiB")
    assert (found["method"], found["verdict"], found["gpu"]["total_bytes"]) == ("traced", "fits", 24 << 30)
    for one in found["device"].values():
        assert 0 < one["value"] <= one["upper"]
    assert found["data"]["is_longest"] and "the longest batch, as its loader says it" in found["data"]["text"]
    assert found["parts"]["inputs"]["value"] >= found["data"]["batch_bytes"] * 0.9
    assert found["data"]["panel_bytes"] > 0 and "mapped once for all jobs" in found["data"]["text"]
    assert found["parts"]["optimizer"]["value"] == pytest.approx(2 * found["parts"]["weights"]["value"], rel=0.01)
    assert not any("depends on the data" in note for note in found["notes"]), (
        "the lists' lengths are those of the batch"
    )
    assert not (tmp_path / "runs").exists() and list((tmp_path / "panels").iterdir())


@pytest.mark.slow
def test_the_traced_step_of_the_ranker_follows_its_batch(tmp_path):
    params = RankerParams.model_validate(PARAMS)
    context, probe = StagesHere(tmp_path, RANKER, params, seed=0).context("fold", 1), RANKER.stage("fold").probe
    loader = probe.loader(context, params, 0)

    def peak_of(batch):
        def make():
            step = probe.step(context, params)
            return lambda: step(batch)

        return estimate_step(make).to_dict()["device"]["allocated_bytes"]["value"]

    longest = find_longest(loader)
    others = [peak_of(batch) for batch in itertools.islice(loader, 4)]
    assert longest.how == "known" and all(peak_of(longest.batch) >= one for one in others)
    assert len(set(others)) > 1, "the market's lists differ in length"


def test_a_config_without_a_loader_and_a_step_is_refused_with_what_to_write(tiny, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="no stage of 'tiny:TINY' says how it is measured") as caught:
        estimate_workload(tiny())
    assert "Stage(..., probe=Probe(loader, step))" in str(caught.value)


def test_what_contradicts_itself_is_refused_before_anything_is_prepared(config, tmp_path):
    with pytest.raises(ConfigError, match="together with max_split_size_mb:64"):
        estimate_workload(config(), allocator="expandable_segments:True,max_split_size_mb:64")
    with pytest.raises(ConfigError, match="does not model roundup_power2_divisions"):
        estimate_workload(config("memory: {cuda_allocator: 'roundup_power2_divisions:4'}"))
    with pytest.raises(ConfigError):
        estimate_workload(config(), gpu="a toaster")
    assert not (tmp_path / "panels").exists()


def test_a_trace_that_takes_too_long_is_refused(config):
    with pytest.raises(UsageError, match="the trace was not done after 0 s") as refused:
        estimate_workload(config(), time_limit=0)
    assert "--time-limit" in refused.value.remedy
