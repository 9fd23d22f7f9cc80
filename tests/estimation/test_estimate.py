"""The record of an estimate, and its two makers: by tracing a ``config.json``'s model and by arithmetic."""

import json

import pytest

from memfit.errors import ConfigError
from memfit.estimation import METRICS, Estimate, Interval, Setup, estimate_formula, find_gpu

BERT = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 1000,
}


def test_the_phase_of_the_peak_is_the_one_of_the_highest_value():
    phases = {"forward": Interval(3, 9), "backward": Interval(5, 6), "step": Interval(4, 4)}
    found = Estimate(dict.fromkeys(METRICS, Interval(5, 9)), {}, phases, "traced")
    assert found.peak_phase == "backward"


def test_the_json_form_holds_all_of_it():
    found = estimate_formula(BERT, Setup(batch=2, seq_len=32), gpu=find_gpu("24GiB"), reason="for a test")
    again = json.loads(json.dumps(found.to_dict()))
    assert list(again["device"]) == list(METRICS)
    assert again["notes"][0] == "computed, not traced: for a test"
    assert (again["method"], again["verdict"], again["gpu"]["total_bytes"]) == ("formula", "fits", 24 << 30)


@pytest.mark.parametrize("gpu", [None, "T4", "H200"])
@pytest.mark.parametrize("setup", [Setup(), Setup(batch=64, dtype="fp32", world_size=4, strategy="ddp")])
def test_each_figure_contains_the_one_before_and_its_bound_is_no_lower(gpu, setup):
    found = estimate_formula(BERT, setup, gpu=gpu and find_gpu(gpu))
    sizes = [found.device[metric] for metric in METRICS]
    assert [one.value for one in sizes] == sorted(one.value for one in sizes)
    assert [one.upper for one in sizes] == sorted(one.upper for one in sizes)
    assert all(one.upper >= one.value for one in (*sizes, *found.parts.values(), *found.by_phase.values()))


def test_the_verdict_follows_from_value_and_bound():
    setup = Setup(batch=2, seq_len=32)
    need = estimate_formula(BERT, setup, gpu=find_gpu("24GiB")).device["device_bytes"]
    sizes = (need.upper, need.upper - 1, need.value, need.value - 1)
    verdicts = [estimate_formula(BERT, setup, gpu=find_gpu(f"{max(size, 1 << 30)} B")).verdict for size in sizes]
    assert verdicts[0] == "fits"
    assert verdicts[1] == "may fit"


def test_what_no_formula_knows_is_refused():
    with pytest.raises(ConfigError):
        estimate_formula({"model_type": "nothing"}, Setup())
