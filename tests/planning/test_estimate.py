"""Questions about a model's memory: as JSON and back, what of a device counts, and which batches are looked at."""

import json

import pytest

import memfit.planning._estimate as planning
from memfit.errors import ConfigError, UsageError
from memfit.estimation import Setup
from memfit.planning import Question, ask

GIB = 1 << 30
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 64,
    "num_attention_heads": 8,
    "vocab_size": 1024,
}


def test_a_question_survives_json():
    setup = Setup(lora_rank=8, lora_targets=("q_proj",))
    question = Question(LLAMA, setup, "24GiB", formula=True, available_bytes=5, largest_batch=True, global_batch=4)
    assert Question.from_dict(json.loads(json.dumps(question.to_dict()))) == question


def test_what_others_leave_of_a_device_is_its_size():
    assert Question(LLAMA, Setup(), "24GiB", available_bytes=3 * GIB).device.total_bytes == 3 * GIB
    assert Question(LLAMA, Setup(), "24GiB", available_bytes=99 * GIB).device.total_bytes == 24 * GIB
    assert Question(LLAMA, Setup()).device is None


def test_batches_that_are_looked_at_make_up_the_samples_of_an_update():
    setups = Question(LLAMA, Setup(world_size=2, strategy="ddp"), largest_batch=True, global_batch=24).setups
    assert [(one.batch, one.num_microbatches) for one in setups] == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    with pytest.raises(UsageError, match="no multiple"):
        ask(Question(LLAMA, Setup(world_size=2), "24GiB", formula=True, largest_batch=True, global_batch=25))


def test_ranks_of_one_tensor_parallel_model_share_their_samples():
    setups = Question(LLAMA, Setup(world_size=2, strategy="tp"), largest_batch=True, global_batch=3).setups
    assert [(one.batch, one.num_microbatches) for one in setups] == [(1, 3), (3, 1)]


def test_what_the_child_is_asked_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setattr(planning, "call_in_child", lambda *_: pytest.fail("a child was started"))
    for question in (Question(LLAMA, Setup(), "RTX 4091"), Question(LLAMA, Setup(), allocator="x:1")):
        with pytest.raises(ConfigError):
            ask(question)
    with pytest.raises(UsageError, match="no device to fit"):
        ask(Question(LLAMA, Setup(), largest_batch=True))


def test_a_child_that_fails_leaves_the_formula_with_the_reason(monkeypatch):
    def fail(*_):
        raise UsageError("it was killed.", rule="r", remedy="d")

    monkeypatch.setattr(planning, "call_in_child", fail)
    found = ask(Question(LLAMA, Setup()))
    assert (found["method"], found["notes"][0]) == ("formula", "computed, not traced: it was killed.")


def test_where_nothing_fits_as_many_blocks_as_would_are_named():
    setup = Setup(dtype="fp32", batch=2, seq_len=2048)
    config = {**LLAMA, "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 256}
    found = ask(Question(config, setup, "6GiB", formula=True))
    assert found["change"] is None
    smaller = found["smaller_model"]
    blocks = smaller["num_blocks"]["num_hidden_layers"]
    assert 0 < blocks < 256
    assert smaller["device"]["device_bytes"]["upper"] <= 6 * GIB
    each = 4 * 2048**2 + 3 * 2048 * 5504 + 2 * 2048
    assert smaller["num_parameters"] == pytest.approx(blocks * each + 2 * 1024 * 2048 + 2048, rel=0.01)
    assert f"{blocks} of 256 blocks" in smaller["text"]
