"""Questions about a model's memory: as JSON and back, what of a device counts, and which batches are looked at."""

import json
import os
import subprocess
import sys

import pytest

from jobs.contract import is_alive, wait_until
from memfit import estimation, jobs
from memfit.errors import ConfigError, UsageError
from memfit.estimation import METRICS, Estimate, Interval, Setup
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


def test_what_the_child_is_asked_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setattr(jobs, "call_in_child", lambda *_: pytest.fail("a child was started"))
    for question in (Question(LLAMA, Setup(), "RTX 4091"), Question(LLAMA, Setup(), allocator="x:1")):
        with pytest.raises(ConfigError):
            ask(question)
    with pytest.raises(UsageError, match="no device to fit"):
        ask(Question(LLAMA, Setup(), largest_batch=True))


def test_a_child_that_fails_leaves_the_formula_with_the_reason(monkeypatch):
    def fail(*_):
        raise UsageError("it was killed.", rule="r", remedy="d")

    monkeypatch.setattr(jobs, "call_in_child", fail)
    found = ask(Question(LLAMA, Setup()))
    assert (found["method"], found["notes"][0]) == ("formula", "computed, not traced: it was killed.")


UNREAD = {"model_type": "own", "sizes": [1, 2]}


@pytest.fixture
def traced(monkeypatch):
    """Traces of a config that the formula does not read, made up: 4 GiB and 1 GiB a sample."""

    def trace(config, setup, *, gpu, allocator):
        need = Interval((4 + setup.batch) * GIB)
        verdict = gpu and ("fits" if need.upper <= gpu.total_bytes else "does not fit")
        return Estimate(dict.fromkeys(METRICS, need), {}, {"step": need}, "traced", gpu, verdict)

    monkeypatch.setattr(estimation, "estimate_config", trace)
    monkeypatch.setattr(jobs, "call_in_child", lambda target, question: jobs.load_target(target)(**question))


@pytest.mark.usefixtures("traced")
def test_a_trace_is_answered_also_where_the_formula_does_not_read_the_config():
    assert ask(Question(UNREAD, Setup(batch=2), "24GiB"))["verdict"] == "fits"
    found = ask(Question(UNREAD, Setup(batch=30), "24GiB"))
    wanted = {"verdict": "does not fit", "method": "traced", "change": None}
    assert found.items() >= wanted.items()
    assert "no change was looked for" in found["notes"][-1]
    assert "hidden_size" in found["notes"][-1]


@pytest.mark.usefixtures("traced")
def test_where_trace_and_formula_differ_the_formula_is_scaled():
    found = ask(Question(LLAMA, Setup(batch=9), "3GiB"))  # traced: 13 GiB, by the formula: 7.63 GiB
    assert (found["verdict"], found["change"]) == ("does not fit", None)


@pytest.mark.usefixtures("traced")
def test_the_largest_batch_is_found_by_traces_alone():
    found = ask(Question(UNREAD, Setup(), "24GiB", largest_batch=True))
    assert found["largest_batch"] == {"batch": 20, "num_microbatches": 1, "fits": True}


@pytest.mark.usefixtures("traced")
def test_real_weights_say_which_share_of_them_moves(tmp_path):
    torch = pytest.importorskip("torch")
    weights = {"large": torch.full((64, 64), 3.0), "number": torch.tensor(1.0)}
    pytest.importorskip("safetensors.torch").save_file(weights, tmp_path / "model.safetensors")
    asked = Question(LLAMA, Setup(learning_rate=1e-3), "24GiB", weights=str(tmp_path))
    assert "by dry steps on the real weights, about 0 % of the weights move in a step" in ask(asked)["notes"]
    change = ask(asked)["change"]
    assert (change["setup"]["dtype"], change["share_that_moves"]) == ("bf16-amp", 1.0)


@pytest.mark.parametrize("wrong", [{"architectures": 5}, {"architectures": [None]}, {"model_type": ["llama"]}])
def test_a_config_whose_classes_are_no_names_is_refused_before_a_child_starts(wrong, monkeypatch):
    monkeypatch.setattr(jobs, "call_in_child", lambda *_: pytest.fail("a child was started"))
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ask(Question({**LLAMA, **wrong}, Setup()))


def test_a_child_that_was_killed_is_said_to_have_been_short_of_memory(monkeypatch):
    real = jobs.call_in_child
    order = {"args": ["sh", "-c", "kill -9 $PPID"]}
    monkeypatch.setattr(jobs, "call_in_child", lambda *_: real("subprocess:run", order))
    note = ask(Question(LLAMA, Setup()))["notes"][0]
    assert note == "computed, not traced: the process that traced was killed (signal 9): out of memory?"


def test_the_child_ends_with_a_parent_that_is_killed(tmp_path):
    path = tmp_path / "pid"
    order = {"args": ["sh", "-c", f"echo $PPID > {path}; exec sleep 5"]}
    code = (
        "import json, sys\nfrom memfit.jobs import call_in_child\n"
        "call_in_child('subprocess:run', json.loads(sys.argv[1]))"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code, json.dumps(order)], env=env)
    try:
        wait_until(lambda: path.exists() and path.read_text().strip() != "")
        child = int(path.read_text())
        assert is_alive(child)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not is_alive(child))
