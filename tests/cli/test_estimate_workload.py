"""``memfit estimate CONFIG``: what goes with a config and what does not, and the answer on a terminal and as JSON."""

import json

import pytest

from cli.conftest import check_refused
from memfit import jobs

MODULE = """
import dataclasses
import numpy as np
import tiny
from memfit.pipeline import Probe

def loader(context, params, num_workers):
    return [np.ones((rows, 32), np.float32) for rows in (4, 16, 8)]

def step(context, params):
    import torch

    model = torch.nn.Linear(32, params.num_epochs)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(batch):
        optimizer.zero_grad()
        model(torch.from_numpy(batch)).sum().backward()
        optimizer.step()

    return train

def probed(**probe):
    stages = [dataclasses.replace(one, probe=Probe(**probe)) if one.name == "fold" else one for one in tiny.TINY.stages]
    return dataclasses.replace(tiny.TINY, stages=tuple(stages))

BOTH = probed(loader=loader, step=step)
"""


@pytest.fixture
def workload(tmp_path, monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "loading.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text("schema_version: 1\nexperiment: tiny\ntarget: loading:BOTH\nparams: {n_splits: 2, num_epochs: 7}\n")
    return path


@pytest.fixture
def here(monkeypatch):
    """Has estimates made in this process, where torch is loaded once; the first test has them made in a child."""
    monkeypatch.setattr(
        "memfit.pipeline._probe.call_in_child", lambda target, asked, env: jobs.load_target(target)(**asked)
    )


@pytest.mark.slow
def test_a_config_is_estimated_as_a_models_config_is_and_settings_can_be_changed(memfit, workload, tmp_path):
    done = memfit("estimate", workload, "--gpu", "24GiB", "--set", "params.num_epochs=10", "--json")
    assert done.exit_code == 0, done.err
    found = json.loads(done.out)
    assert set(found["device"]) == {"allocated_bytes", "active_bytes", "reserved_bytes", "device_bytes"}
    assert found["parts"]["weights"]["value"] == 4 * (32 * 10 + 10)
    assert (found["data"]["batch_bytes"], found["data"]["is_longest"], found["data"]["num_batches_seen"]) == (
        *(16 * 32 * 4, True, 3),
    )
    assert found["data"]["panel_bytes"] > 0
    assert (found["setup"], found["verdict"]) == (None, "fits")
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("here")
def test_a_person_reads_whether_it_fits_what_the_batch_is_and_what_the_host_holds(memfit, workload):
    done = memfit("estimate", workload, "--gpu", "1GiB")
    assert done.exit_code == 3
    assert "does not fit: needs" in done.out or "may fit: needs" in done.out
    assert "the largest of all 3 batches: 2.0 KiB" in done.out and "host, beside the device: panel" in done.out


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_what_is_tight_ends_with_3_unless_a_flag_or_the_config_accepts_it(memfit, workload):
    found = json.loads(memfit("estimate", workload, "--gpu", "24GiB", "--json").out)
    words = ("estimate", workload, "--gpu", f"{int(found['device']['device_bytes']['upper'] / 0.97)} B")
    refused = memfit(*words)
    assert refused.exit_code == 3 and refused.out.startswith("tight: needs ")
    assert "to accept that little: --accept-tight" in refused.out
    assert memfit(*words, "--accept-tight").exit_code == 0
    workload.write_text(workload.read_text() + "accept_tight: true\n")
    assert memfit(*words).exit_code == 0


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "was given neither a config nor --hf-config"),
        (
            ["config.yaml", "--hf-config", "config.json"],
            "a config (config.yaml) and --hf-config config.json are both given",
        ),
        (
            ["config.yaml", "--batch", "8", "--train", "foreach=false"],
            "--batch and --train beside a config",
        ),
        (["--hf-config", "config.json", "--set", "seed=1"], "--set beside --hf-config"),
        (["config.yaml", "--allocator", "expandable_segments:True,max_split_size_mb:64"], "max_split_size_mb:64"),
        (["config.yaml", "--formula"], "no stage of 'loading:BOTH' names a model"),
        (["config.yaml", "--set", "sed=1"], "sed"),
    ],
)
def test_what_does_not_go_together_is_refused_in_three_parts(memfit, workload, words, said):
    check_refused(memfit("estimate", *words), said)


@pytest.mark.slow
def test_the_allocator_is_that_of_the_flag_else_that_of_your_own_variables_in_torchs_order(
    memfit, workload, monkeypatch
):
    def refused(*words):
        return "max_split_size_mb" in memfit("estimate", workload, "--gpu", "24GiB", *words).err

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:1")  # torch refuses less than 20
    assert refused()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert not refused()
    assert refused("--allocator", "max_split_size_mb:2")
