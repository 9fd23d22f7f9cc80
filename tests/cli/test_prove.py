"""``memfit prove`` as a command: over a stand-in that reports what it is told, and over real trainings."""

import json
import re
import sys
import textwrap

import pytest

from cli.conftest import check_refused

#: What the first run of a stand-in reports, and the second one.
FIRST = {"why": "", "began": 0, "seal": 6, "planned_end": 10, "end": 10, "epoch_ends": 1, "validations": 2}
FIRST |= {"compared": 0, "difference": "", "differs_at_seal": [], "differs_at_end": []}
SECOND = FIRST | {"began": 6, "compared": 4}
STAND_IN = """
import json, os, pathlib, sys
folder = pathlib.Path(os.environ["MEMFIT_PROVE"])
is_second = json.loads((folder / "plan.json").read_text())["is_second"]
(folder / "outputs").mkdir(exist_ok=True)
(folder / "sealed").mkdir(exist_ok=True)
print("a last line")
reports, code = json.loads(pathlib.Path("reports.json").read_text())[is_second]
for rank, report in enumerate(reports):
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
sys.exit(code)
"""


@pytest.fixture
def prove(memfit, tmp_path):
    """Proves a stand-in; returns the exit code, what ``--json`` prints, and the text for people."""

    def run(first, second, *, codes=(0, 0)):
        (tmp_path / "train.py").write_text(STAND_IN)
        (tmp_path / "reports.json").write_text(json.dumps(list(zip((first, second), codes, strict=True))))
        done = memfit("prove", "--json", "--", sys.executable, "train.py")
        assert not list(tmp_path.glob(".memfit-prove-*"))
        found = json.loads(done.out)
        assert {"prove: first run begins"} <= set(done.err.splitlines())
        return done.exit_code, found, "\n".join(found["text"])

    return run


def test_what_is_the_same_gives_0_and_says_what_was_passed(prove):
    code, found, text = prove([FIRST], [SECOND])
    assert (code, found["verdict"], found["seal"], found["end"], found["compared"]) == (0, "same", 6, 10, 4)
    assert text.startswith("same bytes: steps 7 to 10 were made again from the checkpoint of step 6")
    assert "(1 epoch's end, 2 validations passed)" in text
    assert set(found) == {
        "verdict", "text", "seal", "end", "epoch_ends", "validations", "compared", "ranks", "differs", "seconds",
        "folder",
    }  # fmt: skip
    _, _, text = prove([FIRST | {"epoch_ends": 0, "validations": 0}], [SECOND])
    assert "no epoch's end passed: what acts there was not tried" in text


@pytest.mark.parametrize(
    ("change", "words", "differs"),
    [
        ({"difference": "step 8 is not what it was: loss 2 in place of 1", "differs_at_seal": ["Ramp.calls"]},
         "step 8 is not what it was: loss 2 in place of 1; what differs since the checkpoint: Ramp.calls", ["Ramp.calls"]),
        ({"differs_at_end": ["Ramp.calls", "the parameter weight"]},
         "what differs at the end: the parameter weight, Ramp.calls", ["the parameter weight", "Ramp.calls"]),
        ({"differs_at_end": ["Ema.shadow (weights)"]}, "Ema.shadow (weights)", None),
        ({"end": 9}, "the second run ended after step 9, the first one after step 10", []),
    ],
)  # fmt: skip
def test_what_is_not_the_same_gives_3_names_it_and_says_what_to_do(prove, change, words, differs):
    code, found, text = prove([FIRST], [SECOND | change])
    assert (code, found["verdict"]) == (3, "not the same")
    assert text.startswith("NOT the same: ") and words in text and "let a checkpoint hold" in text
    assert differs is None or found["differs"] == differs


def test_what_no_step_shows_is_named_and_the_bytes_are_the_same(prove):
    code, found, text = prove([FIRST], [SECOND | {"differs_at_end": ["Plot.points"]}])
    assert (code, found["differs"]) == (0, ["Plot.points"])
    assert text.endswith("differs, and no step shows it: Plot.points")


@pytest.mark.parametrize(
    ("first", "second", "codes", "words"),
    [
        ([], [SECOND], (1, 0), "the first run ended with exit code 1\n  a last line"),
        ([], [SECOND], (0, 0), "the first run trained nothing that memfit keeps exact"),
        ([FIRST | {"why": "its training is not exact"}], [], (0, 0), "its training is not exact"),
        ([FIRST | {"end": 7}], [SECOND], (0, 0), "ended after 7 steps: too few"),
        ([FIRST], [], (0, 2), "the second run ended with exit code 2\n  a last line"),
        ([FIRST], [SECOND | {"began": 0}], (0, 0), "the second run began at step 0"),
        ([FIRST], [SECOND | {"compared": 1}], (0, 0), "the second run has made 1 step again"),
        ([FIRST], [SECOND | {"why": "in 2 parts"}], (0, 0), "the second run was not compared: in 2 parts"),
        ([FIRST, FIRST], [SECOND], (0, 79), "the second run ended with exit code 79"),
    ],
)
def test_what_is_not_proved_gives_4_and_the_reason(prove, first, second, codes, words):
    code, found, text = prove(first, second, codes=codes)
    assert (code, found["verdict"]) == (4, "not proved")
    assert text.startswith("not proved: ") and words in text


def test_each_rank_counts(prove):
    code, found, _ = prove([FIRST, FIRST], [SECOND, SECOND | {"differs_at_end": ["the buffer mean"]}])
    assert (code, found["ranks"], found["differs"]) == (3, 2, ["the buffer mean"])


def test_a_run_without_a_step_is_ended(memfit, tmp_path):
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)")
    done = memfit("prove", "--wait", "1", "--", sys.executable, "train.py")
    assert done.exit_code == 4
    assert "not proved: the first run made no step of an exact training in 1 s (--wait)" in done.out


def test_it_wants_a_command(memfit):
    check_refused(memfit("prove"), "nothing to run", "memfit prove -- python train.py")
    check_refused(memfit("prove", "config.yaml"), "config.yaml", "memfit prove -- python train.py")


# --- real trainings

LOOP = """
import torch
from memfit.training import Loop

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
calls, shadow = {"number": 0}, [one.detach().clone() for one in model.parameters()]
loop = Loop("out", LOOP every=2, model=model, optimizer=optimizer)
loader = torch.utils.data.DataLoader(torch.arange(48.0).view(12, 4) / 48, batch_size=2, shuffle=True)
for epoch in loop.epochs(EPOCHS):
    for batch in loop(loader):
        loss = model(batch + torch.rand_like(batch)).square().mean()
        (loss * 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    loop.log(score=0.0)
print("the whole training")
"""
RAMP, EMA = (
    '(1 + calls["number"])',
    "[old.mul_(0.9).add_(one.detach(), alpha=0.1) for old, one in zip(shadow, model.parameters())]",
)


def really(memfit, tmp_path, script, *words):
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    done = memfit("prove", *words, "--json", "--", sys.executable, "train.py")
    found = json.loads(done.out)
    assert not list(tmp_path.glob(".memfit-prove-*")) and not list(tmp_path.glob("out/*"))
    return done, found, "\n".join(found["text"])


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def loop(*changes, epochs=3, settings="seed=1,"):
    text = LOOP.replace("LOOP", settings).replace("EPOCHS", str(epochs))
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return text


@pytest.mark.core
def test_a_loop_that_is_exact(memfit, tmp_path):
    done, found, text = really(memfit, tmp_path, loop())
    assert (done.exit_code, found["seal"], found["end"], found["compared"]) == (0, 9, 14, 5), done
    assert "(1 epoch's end, 1 validation passed)" in text
    assert {"prove: first run begins", "prove: second run begins"} <= set(done.err.splitlines())


@pytest.mark.slow
def test_a_counter_that_nobody_saves(memfit, tmp_path):
    ramp = ("(loss * 1).backward()", f"calls['number'] += 1\n        (loss * {RAMP}).backward()")
    done, found, text = really(memfit, tmp_path, loop(ramp))
    assert done.exit_code == 3, done
    assert re.search(r"NOT the same: step 1\d is not what it was: .*loss", text)
    assert "calls of __main__ (global)" in found["differs"] and "let a checkpoint hold" in text


@pytest.mark.slow
def test_an_average_that_nobody_saves(memfit, tmp_path):
    done, _, text = really(memfit, tmp_path, loop(("loop.log(loss)", f"loop.log(loss)\n        {EMA}")))
    assert done.exit_code == 3, done
    assert "came out as before; what differs at the end: shadow" in text and "(weights)" in text


@pytest.mark.slow
def test_a_training_that_only_stops(memfit, tmp_path):
    done, _, text = really(memfit, tmp_path, loop(settings=""))
    assert done.exit_code == 4 and "its training stops and resumes, and is not exact" in text, done


@pytest.mark.slow
def test_one_that_ends_before_its_checkpoint_was_due_is_tried_with_an_earlier_one(memfit, tmp_path):
    done, found, _ = really(memfit, tmp_path, loop(epochs=1))
    assert (done.exit_code, found["seal"], found["end"]) == (0, 2, 6), done
    done, found, _ = really(memfit, tmp_path, loop(), "--seconds", "0")
    assert (done.exit_code, found["seal"], found["end"], found["epoch_ends"]) == (0, 5, 12, 1), done


TRAINER = """
import torch
from memfit import Trainer

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.arange(48.0).view(12, 4) / 48, batch_size=2, shuffle=True)
trainer = Trainer(
    model, loss=lambda model, batch: (model(batch).square().sum(), len(batch)), optimizer=optimizer,
    checkpoint_dir="out", seed=1,
)
trainer.fit(loader, loader, num_epochs=4)
"""
ACCELERATE = """
import accelerate, torch
from memfit.integrations.accelerate import Exact

torch.manual_seed(0)
accelerator = accelerate.Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
exact = Exact(accelerator, "out", seed=1, every=4)
loader = exact.loader(torch.utils.data.DataLoader(torch.arange(48.0).view(12, 4) / 48, batch_size=2, shuffle=True))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in exact.epochs(4):
    for batch in exact.batches(loader):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        exact.log(loss)
"""
TRANSFORMERS = """
import torch, transformers
from memfit.integrations.huggingface import exact

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return {"x": torch.full((4,), index / 12.0)}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = torch.nn.Linear(4, 1), torch.nn.Dropout(0.2)
    def forward(self, x):
        return {"loss": self.drop(self.layer(x)).square().mean()}

class Ramp(transformers.TrainerCallback):
    def __init__(self):
        self.num_calls = 0
    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        self.num_calls += 1
        if RAMPS:
            optimizer.param_groups[0]["weight_decay"] = 0.01 * self.num_calls

torch.manual_seed(0)
args = transformers.TrainingArguments(
    "out", per_device_train_batch_size=2, num_train_epochs=4, eval_strategy="epoch", save_strategy="epoch",
    save_total_limit=1, report_to="none", use_cpu=True, disable_tqdm=True,
)
trainer = transformers.Trainer(Net(), args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[Ramp()])
exact(trainer)
trainer.train()
"""
LIGHTNING = """
import torch
from lightning.pytorch import LightningModule, Trainer
from memfit.integrations.lightning import Exact

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch + torch.rand_like(batch)).square().mean()
    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch).square().mean())
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

torch.manual_seed(0)
loader = torch.utils.data.DataLoader(torch.arange(48.0).view(12, 4) / 48, batch_size=2, shuffle=True)
trainer = Trainer(max_epochs=4, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir="out")
Exact("out", seed=1, every=4).fit(trainer, Module(), loader, torch.utils.data.DataLoader(torch.ones(4, 4)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "needs", "validations"),
    [
        (TRAINER, "torch", 1),
        (ACCELERATE, "accelerate", 0),
        (TRANSFORMERS, "transformers", 1),
        (LIGHTNING, "lightning", 1),
    ],
)
def test_each_framework(memfit, tmp_path, script, needs, validations):
    pytest.importorskip(needs)
    done, found, text = really(memfit, tmp_path, script.replace("RAMPS", "False"))
    assert (done.exit_code, found["seal"], found["end"], found["epoch_ends"]) == (0, 9, 14, 1), done
    assert found["validations"] == validations and "weights, buffers and optimizer are the same" in text


@pytest.mark.slow
def test_a_ramp_of_transformers(memfit, tmp_path):
    pytest.importorskip("transformers")
    done, _, text = really(memfit, tmp_path, TRANSFORMERS.replace("RAMPS", "True"))
    assert done.exit_code == 3 and "Ramp.num_calls" in text, done


@pytest.mark.slow
def test_ranks_of_torchrun(memfit, tmp_path):
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(ACCELERATE.replace("48", "96").replace("12, 4", "24, 4"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = memfit("prove", "--json", "--", *launch, "train.py")
    found = json.loads(done.out)
    assert (done.exit_code, found["ranks"], found["compared"]) == (0, 2, 5), done
