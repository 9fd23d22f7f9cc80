"""transformers' own Trainer is watched, stops and resumes; with exact it ends in the same bytes, or is refused."""

import functools
import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch._dynamo  # the optimizers import it: once, for all children

pytestmark = [
    pytest.mark.usefixtures("no_device"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
transformers = pytest.importorskip("transformers")

from integrations import bert  # noqa: E402
from memfit.errors import DamagedError, UsageError  # noqa: E402
from memfit.integrations.huggingface import MemfitCallback, choose, exact, stoppable  # noqa: E402
from memfit.rundir import JOB_ID_VARIABLE, RUN_DIR_VARIABLE, read_events  # noqa: E402
from memfit.training import SealedFolder  # noqa: E402


@functools.cache
def whole(**settings):
    """The digest of a training that nothing stops."""
    code, found = bert.child(tempfile.mkdtemp(), **settings)
    assert code == 0
    return found


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_stop_in_an_evaluation_waits_for_its_end_and_its_checkpoint_stays(tmp_path, strategy):
    options = {"eval_strategy": strategy, "save_strategy": strategy, "eval_steps": 3, "save_total_limit": 1}
    options |= {"load_best_model_at_end": True}
    step = 6 if strategy == "steps" else 8
    assert bert.child(tmp_path, at=step, where="on_prediction_step", **options)[0] == 75
    assert (tmp_path / f"checkpoint-{step}" / "SEAL.json").exists()
    assert bert.child(tmp_path, **options) == (0, whole(**options))
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1, "the best one stays"


def test_a_script_that_names_the_newest_folder_is_served_when_that_is_torn(tmp_path):
    assert bert.child(tmp_path, at=7)[0] == 75
    (tmp_path / "checkpoint-8" / "SEAL.json").rename(tmp_path / "checkpoint-8" / ".unsealed")
    exact(trainer := bert.make(tmp_path))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert bert.digest(trainer) == whole()


def test_a_training_with_workers_that_live_on_goes_on_without_them(tmp_path):
    options = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
    assert bert.child(tmp_path, at=5, **options)[0] == 75
    assert bert.child(tmp_path) == (0, whole())


class OwnLoader(transformers.Trainer):
    """Makes its loader itself, as trainers of TRL and others do."""

    def get_train_dataloader(self):
        loader = torch.utils.data.DataLoader(self.train_dataset, 2, shuffle=True, collate_fn=self.data_collator)
        return loader if self.args.seed == 42 else self.accelerator.prepare(loader)


class WithScaler(transformers.Trainer):
    """Scales gradients as fp16 does, where there is no GPU for fp16 itself."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)


def with_lora():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(bert.model(), peft.LoraConfig(target_modules=["query"], r=2, lora_dropout=0.1))


@pytest.mark.parametrize(
    "name",
    [
        "group_by_length",
        "own loader",
        "own prepared loader",
        "peft",
        "bf16",
        "scaler",
        "no saves of its own",
    ],
)
def test_what_trainings_have_is_exact_too(tmp_path, name):
    options = {
        "group_by_length": {"train_sampling_strategy": "group_by_length"},
        "own loader": {"kind": OwnLoader},
        "own prepared loader": {"kind": OwnLoader, "seed": 1},
        "peft": {},
        "bf16": {"bf16": True},
        "scaler": {"kind": WithScaler},
        "no saves of its own": {"save_strategy": "no"},
    }[name]

    def train(folder, **moment):
        return bert.child(folder, net=with_lora() if name == "peft" else None, **options, **moment)

    found = train(tmp_path / "whole")
    assert found[0] == 0 and (found[1] == whole()) == (name in ("own loader", "no saves of its own"))
    assert train(tmp_path / "stopped", at=9)[0] == 75
    assert train(tmp_path / "stopped") == found


@pytest.mark.skipif(torch.version.cuda is None, reason="fp16 needs a GPU")
def test_fp16_on_a_gpu_is_exact(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    code = f"""
import torch
from integrations import bert
if torch.cuda.is_available():
    whole = bert.train({str(tmp_path / "whole")!r}, fp16=True, use_cpu=False)
    try:
        bert.train({str(tmp_path / "own")!r}, at=5, fp16=True, use_cpu=False)
    except SystemExit as stop:
        assert stop.code == 75
    assert bert.train({str(tmp_path / "own")!r}, fp16=True, use_cpu=False) == whole
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(bert.Words())


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "part", "cure"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size", "recover=True"),
        ({"ignore_data_skip": True}, "ignore_data_skip", "leave it off"),
        ({"save_only_model": True}, "save_only_model", "optimizer"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint", "memfit saves at a stop"),
        ({"torch_compile": True}, "torch_compile", "leave it off"),
        ({"data": Stream(), "max_steps": 4}, "Stream", "index"),
    ],
)
def test_what_cannot_be_exact_is_refused_before_anything_is_trained(tmp_path, monkeypatch, options, part, cure):
    monkeypatch.setattr("signal.signal", lambda *_: None)  # enable_jit_checkpoint would leave its handler
    with pytest.raises(UsageError) as caught:
        exact(bert.make(tmp_path, **options))
    assert part in caught.value.what and cure in caught.value.remedy


@pytest.mark.core
def test_what_trl_and_peft_keep_in_no_checkpoint_is_refused(tmp_path):
    peft = pytest.importorskip("peft")
    ranks = {"init_r": 2, "target_r": 1, "tinit": 1, "tfinal": 1, "total_step": 9}
    net = peft.get_peft_model(bert.model(), peft.AdaLoraConfig(target_modules=["query"], **ranks))
    with pytest.raises(UsageError, match="with adalora"):
        stoppable(bert.make(tmp_path, net=net))
    trainer = bert.make(tmp_path)
    trainer.args.steps_per_generation, trainer.args.num_iterations = 2, 2  # as those of GRPO
    with pytest.raises(UsageError, match="with steps_per_generation"):
        exact(trainer)
    trainer.args.num_iterations = 1
    exact(trainer)


class WithHead(transformers.Trainer):
    """Its loss trains weights of its own, as that of sentence-transformers."""

    def create_optimizer(self, *args, **kwargs):
        self.head = torch.nn.Linear(40, 40)
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), *self.head.parameters()])
        return self.optimizer


@pytest.mark.core
@pytest.mark.parametrize("mode", ["stoppable", "exact"])
def test_an_optimizer_of_weights_that_no_checkpoint_holds_is_refused(tmp_path, mode):
    with pytest.raises(UsageError, match=r"no saved model, of the shapes \[\(40, 40\), \(40,\)\]"):
        bert.train(tmp_path, mode=mode, kind=WithHead)
    assert not list(tmp_path.glob("checkpoint-*"))


class InItsLoop(transformers.Trainer):
    """Its loss needs what the training loop sets, as that of GRPO."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) / self.current_gradient_accumulation_steps


class WithLookahead(transformers.Trainer):
    """The state of its optimizer has no param_groups."""

    def create_optimizer(self, *args, **kwargs):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.optimizer = pytest.importorskip("pytorch_optimizer").Lookahead(optimizer)
        return self.optimizer


@pytest.mark.parametrize(("kind", "told"), [(InItsLoop, "no verdict whether"), (WithLookahead, "memfit: ")])
def test_what_only_a_trial_cannot_do_trains_and_is_exact(tmp_path, kind, told, capfd):
    code, found = bert.child(tmp_path / "whole", kind=kind)
    assert code == 0, found
    assert told in capfd.readouterr().err
    assert bert.child(tmp_path / "own", at=9, kind=kind)[0] == 75
    assert bert.child(tmp_path / "own", kind=kind) == (0, found)


def test_a_checkpoint_that_lacks_a_weight_is_refused_at_its_resume(tmp_path):
    net = bert.model()
    net._keys_to_ignore_on_save = ["bert.embeddings.position_embeddings.weight"]
    assert bert.child(tmp_path, net=net, at=4)[0] == 75
    with pytest.raises(UsageError, match=r"other weights than the model: bert.*position_embeddings"):
        bert.train(tmp_path)


@pytest.mark.parametrize("place", ["the model", "a part", "in place"])
def test_a_model_that_was_compiled_before_is_refused(tmp_path, place):
    net = bert.model()
    if place == "in place":
        net.bert.compile()
    elif place == "a part":
        net.cls = torch.compile(net.cls)
    with pytest.raises(UsageError, match="with torch_compile"):
        exact(bert.make(tmp_path, net=torch.compile(net) if place == "the model" else net))


def test_cuda_graphs_are_refused_also_where_compiling_is_allowed(tmp_path, monkeypatch):
    trainer = bert.make(tmp_path, torch_compile_mode="reduce-overhead")
    monkeypatch.setattr(transformers.TrainingArguments, "device", torch.device("cuda"))
    with pytest.raises(UsageError, match="with cuda_graphs"):
        exact(trainer, allow=("torch_compile",))


@pytest.mark.long
@pytest.mark.timeout(580)
def test_a_compiled_training_of_one_shape_is_exact(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    net = bert.model(num_hidden_layers=0)  # of C++, a layer takes a compiler a minute
    options = {"allow": ("torch_compile",), "net": net, "torch_compile_mode": "reduce-overhead"}
    importlib.import_module("torch._inductor.compile_fx")  # for seconds: once, for all children
    with torch._inductor.config.patch(compile_threads=1):
        found = bert.child(tmp_path / "whole", **options)
        assert found[0] == 0, found[1]
        assert bert.child(tmp_path / "own", at=9, **options)[0] == 75
        assert bert.child(tmp_path / "own", **options) == found


@pytest.mark.core
def test_a_rate_that_is_named_holds_from_now_on_and_other_data_are_refused(tmp_path):
    assert bert.child(tmp_path, at=7)[0] == 75
    with pytest.raises(UsageError, match="num_samples: 32 then, 24 now"):
        bert.train(tmp_path, data=bert.Words(24), allow=("schedule",))
    trainer = bert.make(tmp_path, learning_rate=0.1)
    exact(trainer, allow=("learning_rate",))
    trainer.train()
    rates = {one["step"]: one["learning_rate"] for one in trainer.state.log_history if "learning_rate" in one}
    assert rates[5] < 0.01 < rates[10]


def test_a_running_project_becomes_stoppable_and_at_an_epochs_end_exact(tmp_path):
    assert bert.child(tmp_path, mode="plain", at=9, send="KILL", save_steps=4)[0] == -9
    exact(trainer := bert.make(tmp_path))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert trainer.state.global_step == bert.STEPS
    assert bert.child(tmp_path / "own", mode="stoppable", at=4)[0] == 75
    with pytest.raises(UsageError, match="stream: None then, 1 now"):
        bert.train(tmp_path / "own")


@pytest.mark.core
def test_stoppable_saves_at_the_next_step_goes_on_and_says_what_is_not_exact(tmp_path, capfd):
    plain = whole(mode="plain")
    assert whole(mode="stoppable") == plain, "the framework's own random numbers"
    assert bert.child(tmp_path, mode="stoppable", at=4, send="GROUP", dataloader_num_workers=2)[0] == 75
    assert "Stopped by SIGTERM after step 5 of 16." in capfd.readouterr().err
    code, (_, losses) = bert.child(tmp_path, mode="stoppable")
    assert code == 0 and [step for step, _ in losses] == [step for step, _ in plain[1]]
    assert capfd.readouterr().err.count("not to the same bytes: the order goes on, and what the data draw") == 1


@pytest.mark.parametrize("kind", [OwnLoader, transformers.Trainer])
def test_an_order_that_transformers_makes_anew_is_not_said_to_go_on(tmp_path, capfd, kind):
    options = {"kind": kind, "mode": "stoppable"}
    if kind is transformers.Trainer:
        options["train_sampling_strategy"] = "group_by_length"  # drawn from the random state of now
    assert bert.child(tmp_path, at=10, **options)[0] == 75
    assert bert.child(tmp_path, **options)[0] == 0
    said = capfd.readouterr().err
    assert "some samples come twice in it, and some not at all" in said and "the order goes on" not in said


class Resumable(Stream):
    """Exports its position; each of its passes is another."""

    def __init__(self, number=9):
        self.number, self.epoch, self.row = number, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rows = list(bert.Words(self.number))
        while self.row < len(rows):
            item = rows[self.row]
            self.row += 1
            yield {"input_ids": [4, *item["input_ids"][1:], 5 + self.epoch]}
        self.row = 0

    def state_dict(self):
        return {"row": self.row}

    def load_state_dict(self, state):
        self.row = state["row"]


def first_word(items):
    words = torch.tensor([item["input_ids"] for item in items])
    return {"input_ids": words, "labels": words}


@pytest.mark.parametrize(
    ("data", "skip", "told", "is_same"),
    [
        *((functools.partial(Resumable, number), False, "the stream goes on where its", True) for number in (9, 99)),
        (Stream, False, "20 samples are run forward: no state_dict of them", True),
        (Stream, True, "20 samples are seen again: no state_dict of them", False),
    ],
)
def test_a_stream_goes_on_where_it_says_or_it_is_told_what_is_seen_again(tmp_path, capfd, data, skip, told, is_same):
    net = functools.partial(bert.model, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    options = {"mode": "stoppable", "max_steps": 7, "collator": first_word, "ignore_data_skip": skip}
    code, found = bert.child(tmp_path / "whole", data=data(), net=net(), **options)
    assert code == 0
    assert bert.child(tmp_path / "own", data=data(), net=net(), at=4, **options)[0] == 75
    assert "not exact" not in capfd.readouterr().err
    assert (bert.child(tmp_path / "own", data=data(), net=net(), **options)[1][0] == found[0]) == is_same
    assert f"not to the same bytes: {told}" in capfd.readouterr().err


@pytest.mark.core
def test_a_stream_without_a_length_is_run_forward_in_its_second_pass_too_which_is_told(tmp_path, capfd):
    options = {"mode": "stoppable", "max_steps": 20, "collator": first_word, "gradient_accumulation_steps": 3}
    assert bert.child(tmp_path, data=Stream(), at=5, **options)[0] == 75  # with the gradients of the first pass's end
    assert bert.child(tmp_path, data=Stream(), **options)[0] == 0
    assert "not to the same bytes: 6 samples are run forward: no state_dict of them" in capfd.readouterr().err


@pytest.mark.core
@pytest.mark.parametrize("mode", ["plain", "stoppable"])
def test_the_events_are_those_of_memfits_own_trainer(tmp_path, monkeypatch, mode):
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setenv(JOB_ID_VARIABLE, "fold_1")
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "callbacks": [MemfitCallback()]}
    bert.train(tmp_path / "out", mode=mode, **options)
    events = read_events(tmp_path / "events")
    kinds = [event["kind"] for event in events]
    assert kinds.count("epoch") == 2 and kinds.count("checkpoint") == 2 and "step" in kinds
    first, second = (event for event in events if event["kind"] == "epoch")
    assert (first["epoch"], first["num_epochs"], second["epoch"]) == (1, 2, 2)
    assert {"train_loss", "eval_loss", "wait_share", "samples_per_second"} <= first.keys()
    assert list(first["memory"]["phases"]) == ["train", "validate", "checkpoint"]
    phases = [event["phase"] for event in events if event["kind"] == "phase"]
    assert phases[-8:] == ["train", "validate", "checkpoint", "train"] * 2
    [used] = [event["settings"] for event in events if event["kind"] == "loaders"]
    assert used["samples"] > 0 and used["accumulation"] >= 1 and used["batch"] and used["validation batch"]
    assert ("preflight" in kinds) == (mode == "stoppable"), "whether the largest batch fits"
    saved = [event for event in events if event["kind"] == "checkpoint"]
    assert [Path(event["path"]).name for event in saved] == ["checkpoint-8", "checkpoint-16"]
    assert saved[0]["bytes"] > 9999


@pytest.mark.core
def test_the_newest_checkpoint_is_taken_and_one_without_a_seal_only_when_it_is_named(tmp_path):
    chosen = functools.partial(choose, path=tmp_path)
    old, middle, new = (tmp_path / f"checkpoint-{step}" for step in (2, 4, 10))
    assert chosen(None) == chosen(False) == (None, None)
    old.mkdir()
    (old / "optimizer.pt").touch()
    assert chosen(True) == chosen(str(old)) == (old, None)
    sealed = SealedFolder(tmp_path, "checkpoint-")
    (sealed.begin(4) / "optimizer.pt").touch()
    sealed.seal(4, {"a": 1})
    for named in (None, True, middle):
        path, found = chosen(named)
        assert (path, found.step, found.facts) == (middle, 4, {"a": 1})
    new.mkdir()
    (new / "optimizer.pt").touch()
    assert chosen(True) == (new, None)
    with pytest.raises(UsageError, match="checkpoint-10 is newer than what memfit has sealed"):
        chosen(None)
    (middle / "optimizer.pt").unlink()
    with pytest.raises(DamagedError, match=r"optimizer.pt is missing"):
        chosen(None)


def test_a_named_checkpoint_that_is_not_there_is_the_frameworks_error(tmp_path):
    stoppable(trainer := bert.make(tmp_path))
    with pytest.raises((ValueError, OSError), match="nowhere"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "nowhere"))


def test_two_adapters_on_one_trainer_are_refused(tmp_path):
    stoppable(trainer := bert.make(tmp_path))
    with pytest.raises(UsageError, match="stoppable or exact twice"):
        exact(trainer)


def test_the_seal_says_what_stays_unproved(tmp_path):
    assert bert.child(tmp_path, at=1)[0] == 75
    facts = json.loads((tmp_path / "checkpoint-2" / "SEAL.json").read_text())["facts"]
    assert facts["identity"]["stream"] == 1 and facts["environment"]["torch"] == torch.__version__


@pytest.mark.parametrize("name", ["huggingface", "lightning", "accelerate"])
def test_integrations_load_no_framework_and_a_missing_one_names_its_extra(name):
    code = f"""
import sys
import memfit.integrations
assert not {{"torch", "transformers", "accelerate", "lightning"}} & sys.modules.keys()
sys.modules["{name.replace("huggingface", "transformers")}"] = None
try:
    import memfit.integrations.{name}
except memfit.errors.MissingExtraError as error:
    assert "memfit[{name}]" in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.core
@pytest.mark.parametrize("name", ["transformers", "lightning", "accelerate"])
def test_a_framework_is_allowed_up_to_the_newest_that_was_tried(name):
    page, project = (
        Path(__file__).parents[2].joinpath(one).read_text() for one in ("docs/support.md", "pyproject.toml")
    )
    major, minor = re.search(rf"(?mi)^\| {name} \|.*\| (\d+)\.(\d+)[\d.]* \|[^|]*\|$", page).groups()
    assert set(re.findall(rf'"{name}>=[\d.]+,<([\d.]+)"', project)) == {f"{major}.{int(minor) + 1}"}


def test_a_model_that_is_published_under_other_names_is_resumed(tmp_path):
    def run(stop_at=0):
        class Interrupt(transformers.TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == stop_at:
                    raise InterruptedError

        torch.manual_seed(0)
        sizes = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3, "intermediate_size": 16}
        config = transformers.ViTConfig(**sizes, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        model = transformers.ViTForImageClassification(config)
        data = [{"pixel_values": torch.full((1, 8, 8), one / 32), "labels": one % 3} for one in range(32)]
        options = {"max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True}
        folder = tmp_path / ("part" if stop_at != -1 else "whole")
        trainer = transformers.Trainer(
            model, transformers.TrainingArguments(str(folder), disable_tqdm=True, **options), train_dataset=data
        )
        trainer.add_callback(Interrupt())
        exact(trainer)
        trainer.train()
        return torch.cat([one.detach().flatten() for one in model.parameters()])

    whole = run(stop_at=-1)
    with pytest.raises(InterruptedError):
        run(stop_at=3)
    assert torch.equal(run(), whole)
