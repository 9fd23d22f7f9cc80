"""``memfit estimate``: its options, its JSON, what it refuses, what it proposes, and where it falls back."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cli.conftest import check_refused
from memfit import jobs
from memfit.memory import Budget, Device, DeviceProcess
from memfit.units import GIB, MIB

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "tie_word_embeddings": False,
}
NUM_PARAMETERS = 2 * 1024 * 256 + 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 688 + 2 * 256) + 256
METRICS = ["allocated_bytes", "active_bytes", "reserved_bytes", "device_bytes"]


@pytest.fixture(autouse=True)
def _no_gpu_here(monkeypatch):
    monkeypatch.setattr(Budget, "read", lambda: SimpleNamespace(devices=()))
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)


@pytest.fixture
def model(tmp_path):
    """The folder of a small Llama."""
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


@pytest.fixture
def estimate(memfit, model, monkeypatch):
    """Runs the verb on the small Llama, tracing in this process; gives what it wrote and, where it is JSON, the JSON."""
    monkeypatch.setattr(jobs, "call_in_child", lambda target, question: jobs.load_target(target)(**question))

    def run(*words, config=model, batch=("--batch", 4, "--seq-len", 128)):
        done = memfit("estimate", "--hf-config", config, *batch, *words)
        done.json = json.loads(done.out) if "--json" in words else None
        return done

    return run


def device(done, metric="allocated_bytes", end="value"):
    return done.json["device"][metric][end]


@pytest.mark.slow
def test_json_holds_the_four_figures_the_parts_and_the_phases_each_with_a_bound(estimate):
    done = estimate("--json", "--gpu", "A100-80GB")
    assert done.exit_code == 0
    assert list(done.json["device"]) == METRICS
    assert done.json["method"] == "traced"
    assert done.json["verdict"] == "fits"
    assert done.json["gpu"] == {"name": "A100-80GB", "total_bytes": 81039 * MIB}
    assert done.json["peak_phase"] in done.json["by_phase"]
    assert all(isinstance(note, str) for note in done.json["notes"])
    for intervals in (done.json["device"], done.json["parts"], done.json["by_phase"]):
        assert all(0 <= one["value"] <= one["upper"] for one in intervals.values())
    for end in ("value", "upper"):
        sizes = [device(done, metric, end) for metric in METRICS]
        assert sizes == sorted(sizes)
    assert done.json["parts"]["weights"]["value"] == 2 * NUM_PARAMETERS


@pytest.mark.slow
def test_a_child_of_its_own_traces_and_this_process_loads_no_torch(model):
    code = (
        "import sys; from memfit.cli import main\ntry: main()\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    )
    words = ["estimate", "--hf-config", str(model), "--seq-len", "16", "--json", "--gpu", "none"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert json.loads(done.stdout)["method"] == "traced"
    assert done.stderr.split()[-1] == "False"


def test_the_table_says_verdict_figures_parts_phases_and_the_size_of_an_update(estimate):
    done = estimate("--formula", "--gpu", "24GiB", "--global-batch", 128)
    assert done.exit_code == 0
    assert done.out.startswith("fits: needs ")
    assert "4 samples x 32 microbatches x 1 device = 128 samples an update" in done.out
    for word in ("allocated", "active", "reserved", "device", "weights", "optimizer", "forward", "backward", "step"):
        assert word in done.out


@pytest.mark.proves("S4-41")
@pytest.mark.parametrize(("share", "verdict"), [(0.999, "tight"), (0.955, "tight"), (0.945, "fits")])
def test_a_bound_that_leaves_less_than_a_twentieth_of_the_device_is_tight_and_no_success(estimate, share, verdict):
    need = device(estimate("--formula", "--json", "--gpu", "24GiB"), "device_bytes", "upper")
    words = ("--formula", "--gpu", f"{int(need / share)} B")
    done = estimate(*words)
    assert done.exit_code == (3 if verdict == "tight" else 0)
    assert done.out.startswith(f"{verdict}: needs ") and " free" in done.out
    assert "computed by the rules of torch 2.13 and transformers 5" in done.out
    assert ("to accept that little: --accept-tight" in done.out) == (verdict == "tight")
    accepted = estimate(*words, "--accept-tight", "--json")
    assert (accepted.exit_code, accepted.json["verdict"]) == (0, verdict)


EACH_OPTION = [
    # option, part or metric, the change expected of its value as a factor: low, high
    (["--batch", 8], "activations", 1.9, 2.1),
    (["--seq-len", 256], "activations", 1.9, 2.3),
    (["--dtype", "fp32"], "weights", 2, 2),
    (["--dtype", "bf16-amp"], "weights", 2, 2),
    (["--train", "master_weights=true"], "optimizer", 2.9, 3.1),
    (["--optimizer", "adamw8bit"], "optimizer", 0.45, 0.6),
    (["--optimizer", "paged_adamw8bit"], "optimizer", 0, 0.02),
    (["--optimizer", "paged_adamw"], "optimizer", 0, 0),
    (["--optimizer", "momentum"], "optimizer", 0.5, 0.5),
    (["--optimizer", "sgd"], "optimizer", 0, 0),
    (["--lora", "8"], "optimizer", 0, 0.3),
    (["--lora", "8", "--train", "quantization=nf4"], "weights", 0.2, 0.8),
    (["--gradient-checkpointing"], "allocated_bytes", 0.3, 0.95),
    (["--train", "gradient_checkpointing=selective"], "allocated_bytes", 0.3, 0.99),
    (["--train", "attention=eager"], "activations", 1.05, 2.5),
    (["--train", "loss_chunks=8"], "allocated_bytes", 0.5, 0.99),
    (["--train", "compiled=true"], "activations", 1, 1),
    (["--microbatches", 2], "gradients", 1.0, 1e9),
    (["--world-size", 4, "--strategy", "fsdp"], "weights", 0.2, 0.3),
    (["--world-size", 4], "communication", 1, 1e9),
]


@pytest.mark.proves("S4-05")
@pytest.mark.parametrize(("words", "name", "low", "high"), EACH_OPTION, ids=lambda one: str(one)[:40])
def test_every_option_changes_its_own_figure_by_the_right_factor(estimate, words, name, low, high):
    was, found = estimate("--formula", "--json").json, estimate("--formula", "--json", *words).json
    sizes = [
        {
            **{key: one["value"] for key, one in answer["parts"].items()},
            METRICS[0]: answer["device"][METRICS[0]]["value"],
        }
        for answer in (was, found)
    ]
    before, after = (size.get(name, 0) for size in sizes)
    assert low * max(before, 1) <= after <= high * max(before, 1)


@pytest.mark.slow
def test_a_trace_that_takes_too_long_leaves_the_formula(estimate):
    found = estimate("--json", "--time-limit", 0).json
    assert found["method"] == "formula"
    assert found["notes"][0].startswith("computed, not traced: the trace was not done after 0 s of CPU")


@pytest.mark.slow
def test_a_trace_that_was_given_up_is_named_where_the_formula_cannot_read_the_config_either(estimate, tmp_path):
    path = tmp_path / "mamba.json"
    path.write_text(json.dumps({"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16}))
    done = estimate("--time-limit", 0, config=path)
    assert done.exit_code == 2
    assert "so memfit gave up the trace" in done.err and "does not read" in done.err


REFUSED = [
    (["--gpu", "A100"], "more than one size", "A100-40GB"),
    (["--gpu", "RTX 4091"], "no GPU that memfit knows", "RTX 4090"),
    (["--dtype", "bf61"], "--dtype must be 'fp32', 'bf16', 'fp16'", "--dtype bf16"),
    (["--train", "attention=flush"], "--train attention must be 'sdpa', 'flash'", "--train attention=sdpa"),
    (["--train", "loss_chunk=8"], "loss_chunk is no setting (--train loss_chunk)", "did you mean 'loss_chunks'?"),
    (["--train", "foreach"], '--train "foreach" is not name=value', "--train NAME=VALUE"),
    (["--seq-len", "9", "--train", "seq_len=8"], "twice: --seq-len and --train", "leave out --train seq_len=8"),
    (["--strategy", "fsdp"], "--strategy fsdp on one device", "--world-size 8"),
    (
        ["--dtype", "bf16-amp", "--train", "master_weights=true"],
        "--train master_weights=true with --dtype bf16-amp",
        "--dtype bf16",
    ),
    (["--train", "quantization=nf4"], "--train quantization=nf4 without --lora", "--lora 16"),
    (["--lora", "8", "--train", "lora_targets=[q_prj]"], "q_prj", "q_proj"),
    (["--batch", "0"], "--batch must be greater than or equal to 1, got 0", "--batch 1"),
    (["--batch", "auto"], "no device to fit", "--gpu"),
    (["--global-batch", "30"], "30 samples an update are no multiple", "a microbatch that divides 30"),
    (["--global-batch", "32", "--microbatches", "4"], "--microbatches and --global-batch 32 are both given", "leave"),
    (["--train", "optimizer_in_backward=true", "--microbatches", "2"], "optimizer_in_backward=true with", "leave one"),
    (["--allocator", "expandable_segments:yes"], "must be True or False", "expandable_segments:True"),
    (["--allocator", "expandable_segment:True"], "expandable_segment", "expandable_segments"),
    (["train.py"], "train.py is a Python script", "memfit run -- python train.py"),
    (
        ["--gpu", "2GiB", "--train", "optimizer_in_backward=true", "--batch", "auto", "--global-batch", "64"],
        "--train optimizer_in_backward=true with --microbatches",
        "leave one",
    ),
]


@pytest.mark.parametrize(("words", "what", "hint"), REFUSED, ids=lambda one: " ".join(one)[:50])
def test_bad_input_is_refused_in_three_parts(estimate, words, what, hint):
    check_refused(estimate("--formula", *words), what, hint)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("none.json", None, "cannot be read: No such file"),
        ("empty", None, "cannot be read"),
        ("bad.json", "{", "is no JSON"),
        ("list.json", "[1]", "is no JSON object"),
        ("deep.json", "[" * 100_000, "is no JSON: maximum recursion depth"),
        ("other.json", '{"a": 1}', "model"),
    ],
)
def test_a_config_that_is_none_is_refused(estimate, tmp_path, name, content, what):
    (tmp_path / "empty").mkdir()
    if content is not None:
        (tmp_path / name).write_text(content)
    check_refused(estimate("--formula", config=tmp_path / name), what)


def retyped(estimate, words, **more):
    """What does not fit with these words, and the same with the options that it proposes."""
    refused = estimate("--json", *words, **more)
    assert refused.exit_code == 3
    options = " ".join(refused.json["change"]["options"]).split()
    return refused.json, estimate("--json", *words, *options, **more)


@pytest.mark.parametrize(
    "words",
    [
        ("--formula", "--gpu", "4GiB", "--batch", 256, "--seq-len", 512),
        ("--formula", "--gpu", "1700MiB", "--batch", 64, "--train", "gradient_checkpointing=selective"),
        ("--formula", "--gpu", "1900MiB", "--batch", 7, "--seq-len", 2048, "--train", "attention=eager"),
        ("--formula", "--gpu", "1900MiB", "--batch", 32, "--seq-len", 256),
        pytest.param(("--gpu", "2300MiB", "--batch", 64, "--seq-len", 256), marks=pytest.mark.slow),
        ("--formula", "--batch", 64),  # tight
    ],
)
def test_the_change_that_fits_is_printed_with_its_cost_and_fits_when_it_is_typed(estimate, words):
    words = (*words, "--train", "learning_rate=0.003")  # at which most updates survive pure bf16
    if is_tight := "--gpu" not in words:
        need = device(estimate("--json", "--gpu", "24GiB", *words), "device_bytes", "upper")
        words = (*words, "--gpu", f"{int(need / 0.97)} B")
    refused, accepted = retyped(estimate, words)
    assert (refused["verdict"] == "tight") == is_tight
    assert (accepted.exit_code, accepted.json["verdict"]) == (0, "fits")
    assert refused["method"] == accepted.json["method"] == ("formula" if "--formula" in words else "traced")
    assert accepted.json["device"] == refused["change"]["device"]
    assert accepted.json["setup"] == refused["change"]["setup"]
    update = [setup["batch"] * setup["num_microbatches"] for setup in (refused["setup"], accepted.json["setup"])]
    assert update[0] == update[1]
    assert refused["change"]["same_training"]
    if "--formula" in words:  # what is traced is printed alike
        printed = estimate(*words)
        assert printed.exit_code == 3
        assert f"fits with {' '.join(refused['change']['options'])}: " in printed.out
        assert "  costs: " in printed.out and "; the same training" in printed.out


@pytest.mark.proves("S4-13")
@pytest.mark.parametrize(
    ("words", "per_rank"),
    [
        (("--gpu", "2GiB", "--seq-len", 512), None),
        (("--gpu", "7GiB", "--seq-len", 2048, "--global-batch", 960, "--world-size", 2), 480),
    ],
)
def test_auto_takes_the_largest_batch_whose_bound_fits_and_keeps_the_samples_of_an_update(estimate, words, per_rank):
    words = ("--formula", "--json", *words)
    found = estimate(*words, batch=("--batch", "auto"))
    chosen = found.json["largest_batch"]
    assert found.exit_code == 0 and chosen["fits"] and chosen["batch"] > 1
    assert per_rank is None or chosen["batch"] * chosen["num_microbatches"] == per_rank
    assert estimate(*words, batch=("--batch", chosen["batch"])).json["verdict"] == "fits"
    larger = next(size for size in range(chosen["batch"] + 1, 10**4) if (per_rank or 0) % size == 0)
    assert estimate(*words, batch=("--batch", larger)).json["verdict"] != "fits"


@pytest.mark.slow
def test_auto_traces_the_batch_that_it_chooses(estimate):
    found = estimate("--json", "--gpu", "1900MiB", "--seq-len", 128, batch=("--batch", "auto", "--global-batch", 16))
    assert found.json["method"] == "traced"
    assert found.exit_code == 0
    chosen = found.json["largest_batch"]
    assert chosen["batch"] * chosen["num_microbatches"] == 16


@pytest.mark.proves("S4-32")
def test_the_chosen_batch_is_printed_with_the_size_of_an_update(estimate):
    done = estimate("--formula", "--gpu", "2100MiB", "--seq-len", 512, batch=("--batch", "auto", "--global-batch", 64))
    assert "the largest batch that fits is 16" in done.out
    assert "16 samples x 4 microbatches x 1 device = 64 samples an update" in done.out
    assert "not even a batch of 1 fits" in estimate("--formula", "--gpu", "1GiB", batch=("--batch", "auto")).out


@pytest.mark.slow
def test_expandable_segments_lower_what_is_reserved_where_blocks_of_many_sizes_leave_gaps(estimate, tmp_path):
    path = tmp_path / "wide.json"
    path.write_text(json.dumps({**LLAMA, "hidden_size": 1024, "intermediate_size": 2752, "vocab_size": 8192}))
    batch = ("--batch", 3, "--seq-len", 500)
    usual, expandable = (
        estimate("--json", *more, config=path, batch=batch)
        for more in ((), ("--allocator", "expandable_segments:True"))
    )
    assert device(expandable, "reserved_bytes") < device(usual, "reserved_bytes")


def test_a_model_that_transformers_does_not_know_is_computed_with_a_note(estimate, tmp_path):
    path = tmp_path / "own.json"
    path.write_text(json.dumps({**LLAMA, "model_type": "own_llama", "architectures": ["OwnLlamaForCausalLM"]}))
    done = estimate("--json", config=path)
    assert done.exit_code == 0
    assert done.json["method"] == "formula"
    assert "has no model type 'own_llama'" in done.json["notes"][0]


@pytest.mark.slow
def test_without_torch_the_formula_answers(model):
    code = (
        "import sys, json; sys.modules['torch'] = None\n"
        "from memfit import jobs\nfrom memfit.estimation import Setup\nfrom memfit.planning import Question, ask\n"
        "jobs.call_in_child = lambda target, question: jobs.load_target(target)(**question)\n"
        "question = Question(json.load(open(sys.argv[1])), Setup(seq_len=16))\n"
        "print(json.dumps(ask(question)))"
    )
    words = [sys.executable, "-c", code, str(model / "config.json")]
    answer = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert answer["method"] == "formula"
    assert "torch is not installed" in answer["notes"][0]


@pytest.mark.slow
def test_without_transformers_the_formula_answers(estimate, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    answer = estimate("--json").json
    assert answer["method"] == "formula"
    assert "transformers is not installed" in answer["notes"][0]


@pytest.fixture
def gpu_here(monkeypatch):
    """A GPU in this machine of which others have so much."""

    def put(name, foreign_bytes, total_bytes=32 * GIB):
        jupyter = DeviceProcess(300, "jupyter", foreign_bytes, "ada")
        device = Device(0, "GPU-a", name, total_bytes, total_bytes - foreign_bytes, foreign_bytes, (jupyter,))
        monkeypatch.setattr(Budget, "read", lambda: SimpleNamespace(devices=(device,)))

    return put


@pytest.mark.proves("S4-14")
@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 5090", "NVIDIA Unheard Of 9000"])
def test_of_a_gpu_in_this_machine_what_others_leave_counts_and_they_are_named(estimate, gpu_here, name):
    gpu_here(name, 30 * GIB)
    done = estimate("--formula", "--json")
    assert done.json["gpu"]["total_bytes"] == 2 * GIB
    assert f"GPU 0 of this machine, {name}: 2.00 GiB of 32.00 GiB" in done.json["notes"][-1]
    assert "jupyter (300) 30.00 GiB" in done.json["notes"][-1]
    gpu_here(name, 31 * GIB)
    assert estimate("--formula").exit_code == 3


def test_a_named_gpu_or_none_counts_more_than_the_one_in_this_machine(estimate, gpu_here):
    assert estimate("--formula").out.startswith("needs ")
    gpu_here("NVIDIA GeForce RTX 5090", 31 * GIB)
    assert estimate("--formula", "--json", "--gpu", "24GiB").json["gpu"]["total_bytes"] == 24 * GIB
    small = estimate("--formula", "--json", "--gpu", "1GiB")
    assert (small.json["verdict"], small.exit_code) == ("may fit", 3)
    none = estimate("--formula", "--json", "--gpu", "none")
    assert (none.json["gpu"], none.json["verdict"], none.exit_code) == (None, None, 0)
