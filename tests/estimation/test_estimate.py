"""The record of an estimate, and its two makers: by tracing a ``config.json``'s model and by arithmetic."""

import importlib
import json
import re
from dataclasses import replace

import pytest

from memfit.errors import ConfigError
from memfit.estimation import METRICS, Estimate, Interval, Setup, estimate_config, estimate_formula, find_gpu

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
}


def test_the_phase_of_the_peak_is_the_one_of_the_highest_value():
    phases = {"forward": Interval(3, 9), "backward": Interval(5, 6), "step": Interval(4, 4)}
    found = Estimate(dict.fromkeys(METRICS, Interval(5, 9)), {}, phases, "traced")
    assert found.peak_phase == "backward"


def test_the_json_form_holds_all_of_it():
    found = estimate_formula(LLAMA, Setup(batch=2, seq_len=32), gpu=find_gpu("24GiB"), reason="for a test")
    again = json.loads(json.dumps(found.to_dict()))
    assert list(again["device"]) == list(METRICS)
    assert again["notes"][0] == "computed, not traced: for a test"
    assert (again["method"], again["verdict"], again["gpu"]["total_bytes"]) == ("formula", "fits", 24 << 30)


@pytest.mark.parametrize("gpu", [None, "T4", "H200"])
@pytest.mark.parametrize("setup", [Setup(), Setup(batch=64, dtype="fp32", world_size=4, strategy="ddp")])
def test_each_figure_contains_the_one_before_and_its_bound_is_no_lower(gpu, setup):
    found = estimate_formula(LLAMA, setup, gpu=gpu and find_gpu(gpu))
    sizes = [found.device[metric] for metric in METRICS]
    assert [one.value for one in sizes] == sorted(one.value for one in sizes)
    assert [one.upper for one in sizes] == sorted(one.upper for one in sizes)
    assert all(one.upper >= one.value for one in (*sizes, *found.parts.values(), *found.by_phase.values()))


def test_the_verdict_follows_from_value_and_bound():
    setup = Setup(batch=2, seq_len=32)
    need = estimate_formula(LLAMA, setup, gpu=find_gpu("24GiB")).device["device_bytes"]
    sizes = (int(need.upper / 0.95) + 1, need.upper, need.upper - 1, need.value, need.value - 1)
    verdicts = [estimate_formula(LLAMA, setup, gpu=find_gpu(f"{max(size, 1 << 30)} B")).verdict for size in sizes]
    assert verdicts[:3] == ["fits", "tight", "may fit"]


def test_what_no_formula_knows_is_refused():
    with pytest.raises(ConfigError):
        estimate_formula({"model_type": "nothing"}, Setup())


def test_what_is_not_traced_is_computed_and_says_why():
    pytest.importorskip("transformers")
    found = estimate_config({**LLAMA, "model_type": "lama"}, Setup())
    assert found.method == "formula" and re.match("computed, not traced: transformers .*'lama'", found.notes[0])


SMALL = Setup(batch=1, seq_len=8)


@pytest.fixture(params=[estimate_config, estimate_formula], ids=["traced", "formula"])
def both(request):
    """The two makers of an estimate, by turns."""
    if request.param is estimate_config:
        pytest.importorskip("transformers")
    return lambda setup, config=LLAMA: request.param(config, setup)


@pytest.mark.slow
def test_beside_quantised_weights_the_rest_is_in_fp32(both):
    frozen, trained = (
        both(replace(SMALL, lora_rank=4, quantization="nf4", optimizer=one)) for one in ("none", "adamw")
    )
    head = 2048 * 256 * 2  # as large as the embedding
    assert 2 * head < trained.by_phase["build"].value - frozen.by_phase["build"].value < 2.1 * head


@pytest.mark.slow
def test_an_estimate_names_the_versions_that_it_models(both):
    found = both(SMALL)
    assert set(found.versions) >= {"torch", "transformers"}
    if found.method == "traced":
        assert found.versions["torch"] == importlib.import_module("torch").__version__


@pytest.mark.parametrize(
    ("setup", "warned"),
    [
        (SMALL, True),
        (replace(SMALL, master_weights=True), False),
        (replace(SMALL, dtype="bf16-amp"), False),
        (replace(SMALL, lora_rank=4), False),
    ],
)
def test_pure_bf16_is_told_what_it_rounds_away(setup, warned):
    notes = " ".join(estimate_formula(LLAMA, setup).notes)
    assert ("--train master_weights=true or --dtype bf16-amp" in notes) == warned


@pytest.mark.slow
@pytest.mark.parametrize("make", [estimate_config, estimate_formula])
def test_a_compiled_step_is_counted_as_one_that_is_not_and_a_note_says_so(make):
    if make is estimate_config:
        pytest.importorskip("transformers")
    plain, compiled = (make(LLAMA, replace(SMALL, compiled=one)) for one in (False, True))
    assert compiled.method == ("formula" if make is estimate_formula else "traced")
    assert (compiled.device, compiled.parts, compiled.by_phase) == (plain.device, plain.parts, plain.by_phase)
    [note] = set(compiled.notes) - set(plain.notes)
    assert note.startswith("torch.compile is left out")


@pytest.mark.slow
def test_a_head_that_transformers_ties_against_the_config_is_noted():
    pytest.importorskip("transformers")
    t5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 16, "d_kv": 8, "d_ff": 24}
    t5 |= {"num_layers": 1, "num_heads": 2, "vocab_size": 90}
    texts = [" ".join(estimate_config({**t5, **more}, SMALL).notes) for more in ({}, {"tie_word_embeddings": False})]
    assert ["ties the head" in text for text in texts] == [False, True]
