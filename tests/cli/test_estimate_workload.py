"""``memfit estimate CONFIG``: what goes with a config and what does not, and the answer on a terminal and as JSON."""

import json

import pytest

from cli.conftest import check_refused
from memfit import jobs

MODULE = """
import dataclasses
import tiny
from memfit.pipeline import Probe

MODEL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}

def model(params):
    from memfit.estimation import Setup

    return MODEL, Setup(batch=params.num_epochs, seq_len=128)

def probed(**probe):
    stages = [dataclasses.replace(one, probe=Probe(**probe)) if one.name == "fold" else one for one in tiny.TINY.stages]
    return dataclasses.replace(tiny.TINY, stages=tuple(stages))

MODELLED = probed(model=model)
"""


@pytest.fixture
def workload(tmp_path, monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "loading.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text("schema_version: 1\nexperiment: tiny\ntarget: loading:MODELLED\nparams: {num_epochs: 7}\n")
    return path


@pytest.mark.slow
def test_a_config_is_estimated_as_a_models_config_is_and_settings_can_be_changed(memfit, workload, tmp_path):
    words = ("estimate", workload, "--gpu", "24GiB", "--formula", "--set", "params.num_epochs=10")
    done = memfit(*words, "--json")
    assert done.exit_code == 0, done.err
    found = json.loads(done.out)
    assert set(found["device"]) == {"allocated_bytes", "active_bytes", "reserved_bytes", "device_bytes"}
    assert (found["setup"]["batch"], found["verdict"], found["method"]) == (10, "fits", "formula")
    assert "the model and the settings of stage fold of 'loading:MODELLED'" in memfit(*words).out
    assert not (tmp_path / "runs").exists() and not (tmp_path / "panels").exists()


def test_what_is_tight_ends_with_3_unless_a_flag_or_the_config_accepts_it(memfit, workload, monkeypatch):
    monkeypatch.setattr(
        "memfit.pipeline._probe.call_in_child", lambda target, asked, env: jobs.load_target(target)(**asked)
    )
    found = json.loads(memfit("estimate", workload, "--gpu", "24GiB", "--formula", "--json").out)
    words = ("estimate", workload, "--formula", "--gpu", f"{int(found['device']['device_bytes']['upper'] / 0.97)} B")
    refused = memfit(*words)
    assert refused.exit_code == 3 and refused.out.startswith("tight: needs ")
    assert "to accept that little: --accept-tight" in refused.out
    assert memfit(*words, "--accept-tight").exit_code == 0
    workload.write_text(workload.read_text() + "accept_tight: true\n")
    assert memfit(*words).exit_code == 0


@pytest.mark.usefixtures("workload")
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
        (["config.yaml", "--set", "target=tiny:TINY"], "no stage of 'tiny:TINY' names a model"),
        (["config.yaml", "--set", "sed=1"], "sed"),
    ],
)
def test_what_does_not_go_together_is_refused_in_three_parts(memfit, words, said):
    check_refused(memfit("estimate", *words), said)


def test_the_allocator_is_that_of_the_flag_else_that_of_your_own_variables_in_torchs_order(
    memfit, workload, monkeypatch
):
    def refused(*words):
        return "max_split_size_mb" in memfit("estimate", workload, "--formula", "--gpu", "24GiB", *words).err

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:1")  # torch refuses less than 20
    assert refused()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert not refused()
    assert refused("--allocator", "max_split_size_mb:2")
