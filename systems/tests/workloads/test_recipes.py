"""The recipe fine-tune: what is left out and told, the batch as an equation, out of memory, and kills."""

import importlib
import io
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rich.console import Console
from ruamel.yaml import YAML

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
pytestmark += [pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")]  # peft asks for it
pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import kills  # noqa: E402
from memfit import jobs  # noqa: E402
from memfit.data import PackedDataset, Padding, SequenceLoader  # noqa: E402
from memfit.errors import ConfigError, DataError, DoesNotFitError  # noqa: E402
from memfit.estimation import estimate_formula, list_options, share_that_moves  # noqa: E402
from memfit.pipeline import Output, _plan_run, estimate_workload, plan_run  # noqa: E402
from memfit.reports import to_text, view_run_plan  # noqa: E402
from memfit.training import SafeStep, seed_everything  # noqa: E402
from memfit.units import format_bytes  # noqa: E402
from memfit_workloads.recipes import text, training  # noqa: E402
from memfit_workloads.recipes.params import SETTINGS, RecipesParams, plan_of  # noqa: E402
from memfit_workloads.recipes.stages import RECIPES  # noqa: E402
from stages_here import StagesHere  # noqa: E402

SMALL = {
    "data": {"num_pairs": 60},
    "tiny": {"d_model": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 120},
    "epochs": 2,
    "batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_target_length": 24,
    "num_samples": 1,
}


def config(folder, **params):
    content = {"schema_version": 1, "experiment": "t5", "target": "memfit_workloads.recipes.stages:RECIPES", "seed": 1}
    path = folder / "config.yaml"
    path.write_text(json.dumps(content | {"params": SMALL | params}))
    return path


def examples(count=12):
    rng = np.random.default_rng(0)
    return [
        {"input_ids": rng.integers(3, 60, rng.integers(2, 12)), "labels": rng.integers(3, 60, rng.integers(1, 15))}
        for _ in range(count)
    ]


def tiny(**changes):
    seed_everything(0)
    return training.make_model(RecipesParams(**SMALL | changes), 64)


OWN = {"source": "files", "source_field": "q", "target_field": "a"}


def tokenized(folder, **params):
    here = StagesHere(folder, RECIPES, RecipesParams(**SMALL | params))
    here.run("tokenize")
    return here


@pytest.mark.proves("S4-55")
def test_rows_that_cannot_be_used_are_counted_and_named_and_the_others_are_packed_once(tmp_path):
    pairs = {f"what is {n}": f"it is the number {n}" for n in range(300)}
    good = [json.dumps({"q": q, "a": a}) for q, a in pairs.items()]
    bad = ["{", json.dumps({"q": "no answer"}), json.dumps({"q": "?", "a": "short"}), '{"q": "?", "a": "no no no no"}']
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n\n".join([*good[:20], *bad, *good[20:], '{"q": "cut o']))
    for min_words, expected in ((3, 300), (0, 301)):
        here = tokenized(tmp_path / str(min_words), data=OWN | {"path": path, "min_words": min_words})
        output = Output(here.manifest("tokenize"))
        assert output.result["num_train"] + output.result["num_valid"] == expected
        if min_words:
            tokenizer = text.load_tokenizer(output.dir)
            parts = [PackedDataset.open(output.path(part)) for part in ("train", "valid")]
            found = [(pair["input_ids"].tolist(), pair["labels"].tolist()) for part in parts for pair in part]
            wanted = [tuple(tokenizer.encode(one).ids for one in pair) for pair in pairs.items()]
            assert len(parts[1]) == 30 and sorted(found) == sorted(wanted)
    assert output.result["left_out"] == {"no JSON": 2, "no such fields": 1, "repeats itself": 1}
    assert [one["line"] for one in output.result["named"]] == [41, 43, 47, 609]
    with pytest.raises(
        DataError, match=r"305 of 305 rows of .*pairs\.jsonl are left out: 303 no such fields, 2 no JSON"
    ):
        tokenized(tmp_path, data=OWN | {"path": path, "target_field": "answer"})


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path, seen = tmp_path / "pairs.jsonl", iter(["before", "after"])
    path.write_text("".join(json.dumps({"q": f"what is {n}", "a": f"it is {n}"}) + "\n" for n in range(30)))
    monkeypatch.setattr(text, "fingerprint_files", lambda path: next(seen))
    with pytest.raises(DataError, match="has changed while it was read"):
        tokenized(tmp_path, data=OWN | {"path": path})


@pytest.mark.proves("S4-18")
def test_with_and_without_orjson_the_same_rows_are_taken(monkeypatch):
    lines = ['{"ingredients": "\\u00e9", "recipe": "a b c"}', '{"recipe": NaN}', '{"recipe": [1]}', '{"a": "cut']
    expected = [{"input_ids": "é", "labels": "a b c"}, "no JSON", "no such fields", "no JSON"]
    assert [text.read_pair(line.encode(), RecipesParams().data) for line in lines] == expected
    with monkeypatch.context() as at, pytest.warns(UserWarning, match="pip install orjson"):
        at.setitem(sys.modules, "orjson", None)
        importlib.reload(text)
    assert [text.read_pair(line.encode(), RecipesParams().data) for line in lines] == expected
    importlib.reload(text)


@pytest.mark.proves("S4-20")
@pytest.mark.parametrize(
    ("given", "automatic", "expected"),
    [
        ({}, 8, (8, 16)),
        ({"auto_batch_size": True}, 32, (32, 4)),
        ({"batch_size": 8, "gradient_accumulation_steps": 16}, 1, (8, 16)),
        ({"batch_size": 4, "gradient_accumulation_steps": 32, "auto_batch_size": True}, 128, (4, 32)),
        ({"gradient_accumulation_steps": 16}, 1, (8, 16)),
        ({"batch_size": 4}, 1, (4, 32)),
    ],
)
def test_an_explicit_size_beats_an_automatic_one(given, automatic, expected):
    assert RecipesParams(**given).sizes(automatic) == expected


@pytest.mark.proves("S4-34")
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"auto_batch_size": True, "gradient_accumulation_steps": 4}, "follows from auto_batch_size"),
        ({"batch_size": 5}, "does not divide the global batch of 128"),
        ({"data": {"source": "files"}}, "path belongs to source: files"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(given, told):
    with pytest.raises(ValidationError, match=told):
        RecipesParams(**given)


def test_the_automatic_size_is_the_largest_whose_bound_fits(monkeypatch):
    params = RecipesParams(
        **{**SMALL, "auto_batch_size": True, "batch_size": None, "gradient_accumulation_steps": None}
    )

    class Free:
        headroom_bytes = 1 << 40

    model = tiny()
    monkeypatch.setattr(training.Budget, "read", lambda: Free)
    assert training.plan(params, model)["batch_size"] == 128
    whole = training.plan(params, model)["forecast_bytes"]
    monkeypatch.setattr(Free, "headroom_bytes", training.BASE_BYTES + whole - 1)
    chosen = training.plan(params, model)
    assert (chosen["batch_size"], chosen["gradient_accumulation_steps"]) == (64, 2)
    assert chosen["forecast_bytes"] < whole
    monkeypatch.setattr(Free, "headroom_bytes", training.BASE_BYTES)
    with pytest.raises(DoesNotFitError, match=r"tried 128: .*, 1: ") as caught:
        training.plan(params, model)
    assert "gradient_checkpointing=true" in caught.value.remedy


def in_float64(model):
    """Without dropout, and with norms that compute in float64 too: T5's own are float32."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "T5LayerNorm":
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.load_state_dict(child.state_dict())
                setattr(module, name, norm)
    return model.double().eval()


@pytest.mark.proves("C-56")
def test_the_gradient_of_ragged_batches_is_that_of_the_whole():
    rows = examples()
    padding = Padding(pad_id=0)
    grads = []
    for size in (12, 4, 3):
        model = in_float64(tiny())
        step = SafeStep(model, torch.optim.SGD(model.parameters(), lr=0.1), training.loss, microbatch_size=None)
        step.gradients(*[padding(rows[at : at + size]) for at in range(0, 12, size)])
        grads.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
    for other in grads[1:]:
        assert max(float((a - b).abs().max()) for a, b in zip(grads[0], other, strict=True)) < 1e-12


def test_what_is_too_large_goes_on_with_half_the_microbatch_and_the_same_update(monkeypatch):
    told = []
    monkeypatch.setattr(training, "record", lambda kind, **fields: told.append((kind, fields)))
    batches = list(SequenceLoader(examples(128), Padding(pad_id=0), batch=8))
    model = tiny()

    def loss(model, batch):
        if len(batch["labels"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return training.loss(model, batch)

    sizes = training.SizesTold(8, 128)
    step = SafeStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss)
    for _ in range(2):
        outcome = step(*batches)
        sizes(outcome)
    assert (outcome.num_microbatches, sizes.smallest) == (32, 4)
    text = "ran out of memory at 8 x 16 and goes on at 4 x 32: still 128"
    assert [(kind, fields["text"]) for kind, fields in told] == [("batch_changed", text)]


@pytest.mark.proves("S4-36", "C-55")
@pytest.mark.parametrize(("precision", "rate"), [("bf16", 1e-5), ("bf16", 1e-3), ("fp32", 1e-5)])
def test_the_share_of_weights_that_move_is_known_before_real_steps_move_it(precision, rate):
    model = tiny(precision=precision)
    setup = plan_of(RecipesParams(**SMALL, precision=precision, learning_rate=rate))[1]
    said, _ = share_that_moves(setup, model.parameters())
    step = SafeStep(model, torch.optim.AdamW(model.parameters(), lr=rate, foreach=False), training.loss)
    for batch in list(SequenceLoader(examples(32), Padding(pad_id=0), batch=4)) * 3:
        before = [one.detach().clone() for one in model.parameters()]
        step(batch)
    moved = sum(int((one != was).sum()) for one, was in zip(model.parameters(), before, strict=True))
    print(said, moved / sum(one.numel() for one in before))
    assert moved / sum(one.numel() for one in before) == pytest.approx(said, abs=0.1)


@pytest.mark.proves("S4-25", "C-58")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_blocks_are_compiled_once_for_all_lengths_and_run_as_they_are_where_that_fails():
    model = in_float64(tiny())
    batches = list(SequenceLoader(examples(16), Padding(pad_id=0), batch=4))
    plain = [float(training.loss(model, batch)[0].detach()) for batch in batches]
    before = torch.compiler.get_default_backend()
    try:
        torch.compiler.set_default_backend(lambda graph, inputs: 1 / 0)
        with pytest.warns(UserWarning, match="nothing is compiled: .*division by zero"):
            assert training.compile_blocks(model) is training.loss
        torch.compiler.set_default_backend("eager")
        loss, model.training = training.compile_blocks(model), True  # its blocks are without dropout
        graphs = [training.num_graphs()]
        for _ in range(2):
            for batch, expected in zip(batches, plain, strict=True):
                assert float(loss(model, batch)[0].detach()) == pytest.approx(expected, rel=1e-9)
            graphs.append(training.num_graphs())
        model.eval()
        loss(model, batches[0])
        assert 0 < graphs[1] - graphs[0] <= 4 and graphs[1] == graphs[2] == training.num_graphs()
    finally:
        torch.compiler.reset()
        torch.compiler.set_default_backend(before)


@pytest.mark.proves("S4-35", "C-57")
def test_generation_cache_is_off_while_checkpointing_and_gradients_stay_the_same():
    batch = Padding(pad_id=0)(examples(4))
    grads = []
    for checkpointing in (False, True):
        model = tiny(gradient_checkpointing=checkpointing).double()
        assert model.config.use_cache is False
        seed_everything(3)
        training.loss(model.train(), batch)[0].backward()
        grads.append([one.grad for one in model.parameters() if one.grad is not None])
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*grads, strict=True))


XL = Path(__file__).parents[2] / "memfit_workloads/recipes"


@pytest.mark.proves("S4-33")
def test_a_plan_has_the_models_memory_by_part_with_context_and_bound_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_plan_run, "_TRACE_SECONDS", 300.0)  # on a busy machine the formula would answer
    monkeypatch.setattr(
        jobs, "call_in_child", lambda target, asked: jobs.load_target(target)(**asked)
    )  # has all loaded
    plan = plan_run(config(tmp_path))
    stages = {stage.name: stage for stage in plan.stages}
    assert [name for name, stage in stages.items() if stage.model is not None] == ["train"]
    answer = stages["train"].model
    num_bytes = sum(4 * one.numel() for one in training.make_model(RecipesParams(**SMALL), 120).parameters())
    parts = {name: size["value"] for name, size in answer["parts"].items()}
    assert answer["method"] == "traced"
    assert (parts["weights"], parts["gradients"]) == (num_bytes, num_bytes)
    assert 2 * num_bytes <= parts["optimizer"] < 2.1 * num_bytes + 4096
    whole = answer["device"]["allocated_bytes"]["value"]  # in blocks of 512 B
    assert parts["activations"] > 0 and sum(parts.values()) == pytest.approx(whole, rel=0.01)
    file = io.StringIO()
    to_text(view_run_plan(plan), Console(file=file, width=200))
    sizes = {name: format_bytes(size) for name, size in parts.items()}
    assert all(f"{name} {sizes[name]}" in file.getvalue() for name in ("weights", "gradients", "optimizer"))
    assert re.search(r"a step of its model \(traced\) needs \S+ MiB, at most \S+ GiB of device", file.getvalue())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("gpu", "verdict", "changes"),
    [
        ("RTX 5090", "does not fit", [("bf16-amp", "adafactor"), ("bf16", "adamw"), ("bf16", "adamw")]),
        ("A100-80GB", "fits", [("bf16-amp", "adamw"), ("bf16-amp", "adafactor"), ("bf16", "adamw")]),
    ],
)
def test_an_xl_model_is_planned_from_the_workloads_own_settings(monkeypatch, gpu, verdict, changes):
    monkeypatch.chdir(XL.parents[2])
    found = estimate_workload(XL / "flan-t5-xl.yaml", gpu=gpu, formula=True)
    assert found["verdict"] == verdict
    assert (found["setup"]["batch"], found["setup"]["num_microbatches"]) == (8, 16)
    assert found["parts"]["weights"]["value"] == pytest.approx(2 * 2.85e9, rel=0.01)
    ranked = [one for one in (found["change"], *found["others"]) if one is not None]
    assert [(one["setup"]["dtype"], one["setup"]["optimizer"]) for one in ranked] == changes
    for one in ranked:
        setup, own = one["setup"], " ".join(one["options"]).replace("--set ", "").split()
        moves_few = setup["dtype"] == "bf16" and not setup["lora_rank"]
        assert ("of the weights move in a step" in one["cost"]) == moves_few
        again = estimate_workload(XL / "flan-t5-xl.yaml", gpu=gpu, formula=True, overrides=own)
        assert (again["verdict"], again["setup"]) == (one["verdict"], setup)
    assert not [note for note in found["notes"] if "--" in note.replace("--set params.precision=bf16-mixed", "")]


@pytest.mark.parametrize("option", SETTINGS)
def test_each_setting_that_an_estimate_may_advise_makes_the_setup_that_its_option_makes(option):
    text = SETTINGS[option].format(4).removeprefix("params.")
    before, field = RecipesParams(batch_size=8, gradient_accumulation_steps=16, precision="bf16"), text.partition("=")
    outer, _, inner = field[0].partition(".")
    value = YAML(typ="safe").load(field[2])
    after = RecipesParams.model_validate(before.model_dump() | {outer: {inner: value} if inner else value})
    options = list_options(plan_of(before)[1], plan_of(after)[1])
    assert options == (option if "{}" not in SETTINGS[option] else f"{option} 4",)


@pytest.mark.long
def test_a_plan_says_whether_the_model_fits_this_machines_gpu_and_what_makes_it_fit(monkeypatch, tmp_path):
    monkeypatch.chdir(XL.parents[2])
    monkeypatch.setattr(_plan_run, "find_this_gpu", lambda budget: ("RTX 5090", 30 << 30, ["another process"]))
    monkeypatch.setattr(_plan_run, "_TRACE_SECONDS", 0.0)  # the formula answers
    plan = plan_run(XL / "flan-t5-xl.yaml", overrides=[f"runs_dir={tmp_path}"])
    file = io.StringIO()
    to_text(view_run_plan(plan), Console(file=file, width=200))
    assert "a step of its model (by the formula) does not fit: needs " in file.getvalue()
    assert " of 30.00 GiB (RTX 5090); " in file.getvalue() and "weights 5.31 GiB" in file.getvalue()
    adapters = "--set params.batch_size=4 --set params.lora.rank=16 --set params.gradient_accumulation_steps=32"
    assert f"fits with {adapters}: 15.05 GiB, at most 21.59 GiB" in file.getvalue()


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory):
    """A T5 of random weights in a folder as the hub gives it, and pairs to train it on."""
    folder = tmp_path_factory.mktemp("hub")
    params = RecipesParams(**SMALL)
    text.make_recipes(folder / "pairs.jsonl", 60, 0)
    rows = map(json.loads, (folder / "pairs.jsonl").read_text().splitlines())
    tokenizer = text.train_tokenizer([{"a": row["ingredients"], "b": row["recipe"]} for row in rows], params)
    seed_everything(0)
    training.make_model(params, tokenizer.get_vocab_size()).save_pretrained(folder / "t5")
    tokenizer.save(str(folder / "t5/tokenizer.json"))
    return folder / "t5"


LORA = {
    "lora": {"rank": 4, "alpha": 8},
    "num_rouge": 4,
    "baseline": True,
    "learning_rate": 0.02,
    "optimizer": "adafactor",
}


@pytest.mark.proves("S4-17", "S4-53")
@pytest.mark.long
def test_adapters_killed_and_gone_on_leave_the_merged_model_and_rouge_before_and_after(
    tmp_path, one_thread, hub_folder
):
    changed = LORA | {"pretrained_model": str(hub_folder)}
    here = StagesHere(tmp_path / "here", RECIPES, RecipesParams(**SMALL | changed), seed=1)
    for name in ("tokenize", "train", "evaluate"):
        here.run(name)
    config(tmp_path, **changed)
    killed = kills.run(tmp_path, kill_at=[kills.epoch("train", 1)])
    left, found = (kills.numbers_in(one) for one in (here.run_dir, killed.path))
    assert "stage_train/latest" in left and found == left
    from safetensors.torch import load_file

    old = load_file(hub_folder / "model.safetensors")
    new = load_file(Output(here.manifest("train")).path("model") / "model.safetensors")
    moved = {name for name in old if not torch.equal(old[name], new[name])}
    assert old.keys() == new.keys() and moved and all(name.rsplit(".", 2)[-2] in ("q", "v") for name in moved)
    result, judged = left["stage_train"], left["stage_evaluate"]
    assert result["capabilities"] == {"attention": "sdpa", "flash_attention": False}
    assert result["equation"] == "4 samples x 2 microbatches x 1 device = 8 samples an update"
    assert judged["loss"] < judged["before"]["loss"] and judged["num_rouge"] == 4
    assert all(0 <= one[name] <= 1 for one in (judged, judged["before"]) for name in ("rouge1", "rougeL"))
    assert "ROUGE-L" in judged["report"][1] and judged["report"][0].startswith("before the training: ")


@pytest.mark.parametrize("modules", [[], ["all-linear"], ["q", "wo"]])
def test_only_adapters_have_gradients_and_the_estimate_counts_their_optimizer_alone(hub_folder, modules):
    params = RecipesParams(
        **SMALL | {"pretrained_model": str(hub_folder), "lora": {"rank": 4, "modules": modules}, "precision": "bf16"}
    )
    model = training.make_model(params, 0)
    training.loss(model.train(), Padding(pad_id=0)(examples(4)))[0].backward()
    trained = [one for name, one in model.named_parameters() if one.grad is not None]
    assert trained and all("lora_" in name for name, one in model.named_parameters() if one.requires_grad)
    shape, setup, folder = plan_of(params)
    parts = estimate_formula(shape, setup).parts
    num_bytes = sum(4 * one.numel() for one in trained)
    assert folder == str(hub_folder)
    assert 2 * num_bytes <= parts["optimizer"].value <= 2 * num_bytes + 8192
    frozen = sum(2 * one.numel() for one in model.parameters() if not one.requires_grad)
    assert parts["weights"].value == pytest.approx(frozen + num_bytes, rel=0.02)


def test_an_adapter_beside_no_layer_and_a_model_that_is_not_there_are_refused_before_the_first_job(
    tmp_path, monkeypatch, hub_folder
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="no module of the t5 model is named 'query'"):
        plan_run(config(tmp_path, pretrained_model=str(hub_folder), lora={"rank": 4, "modules": ["query"]}))
    (tmp_path / "models").mkdir()
    with pytest.raises(ConfigError, match=r"models/t6 cannot be loaded: there is no such folder"):
        plan_run(config(tmp_path, pretrained_model="models/t6"))
    with pytest.raises(ConfigError, match=r"google/no-such-t5 cannot be loaded: .+") as refused:
        plan_run(config(tmp_path, pretrained_model="google/no-such-t5"))
    assert "or a name on the hub" in refused.value.rule
    assert "hf download google/no-such-t5 --local-dir models/no-such-t5" in refused.value.remedy


def test_a_name_on_the_hub_is_read_from_its_cache(tmp_path, monkeypatch, hub_folder):
    cache, commit = tmp_path / "models--some--t5", "0" * 40
    (cache / "refs").mkdir(parents=True)
    (cache / "refs/main").write_text(commit)
    shutil.copytree(hub_folder, cache / "snapshots" / commit)
    for name in ("huggingface_hub.constants.HF_HUB_CACHE", "huggingface_hub.file_download.HF_HUB_CACHE"):
        monkeypatch.setattr(name, str(tmp_path), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    params = RecipesParams(**SMALL | {"pretrained_model": "some/t5"})
    text.check(params)
    assert text.fingerprint(params).endswith(commit)
    assert Path(plan_of(params)[2]).name == commit
    found, own = (training.load_model(params.model_copy(update={"pretrained_model": one}), 0).state_dict()
                  for one in ("some/t5", str(hub_folder)))  # fmt: skip
    assert all(torch.equal(found[name], own[name]) for name in own)
