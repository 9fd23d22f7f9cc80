"""``memfit prove`` as a command: over a stand-in that reports what it is told, and over real trainings."""

import json
import sys

import pytest

from cli.conftest import check_refused

#: What each run of a stand-in reports.
RUN = {"why": "", "seal": 6, "planned_end": 10, "end": 10, "epoch_ends": 1, "validations": 2, "difference": ""}
STAND_IN = """
import json, os, pathlib, sys
folder = pathlib.Path(os.environ["MEMFIT_PROVE"])
is_second = json.loads((folder / "plan.json").read_text())["seal"] > 0
(folder / "outputs").mkdir(exist_ok=True)
(folder / "sealed").mkdir(exist_ok=True)
print("a last line")
reports, code = json.loads(pathlib.Path("reports.json").read_text())[is_second]
for rank, report in enumerate(reports):
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
sys.exit(code)
"""


@pytest.fixture
def prove(memfit, tmp_path, monkeypatch):
    """Proves a script; returns how that ended, what ``--json`` prints, and the text for people."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(script, *words, launch=()):
        (tmp_path / "train.py").write_text(script)
        done = memfit("prove", *words, "--json", "--", sys.executable, *launch, "train.py")
        assert not list(tmp_path.glob(".memfit-prove-*")) and not list(tmp_path.glob("out*/*"))
        assert "prove: first run begins" in done.err.splitlines()
        found = json.loads(done.out or '{"text": []}')
        return done, found, "\n".join(found["text"])

    return run


@pytest.mark.parametrize(
    ("first", "second", "codes", "code", "words"),
    [
        ([{}], [{}], (0, 0), 0, "same bytes: steps 7 to 10 were made again from the checkpoint of step 6, and passed 1 epoch end, 2 v"),
        ([{}], [{"differs": ["Plot.points"]}], (0, 0), 0, "\ndiffers, and no step shows it: Plot.points"),
        ([{}] * 2, [{}, {"difference": "step 8 is not what it was", "differs": ["Ramp.calls"]}], (0, 0), 3,
         "NOT the same: step 8 is not what it was\nlet a checkpoint hold Ramp.calls ("),
        ([{}], [{"end": 9}], (0, 0), 3, "NOT the same: the second run ended after step 9, the first one after step 10"),
        ([], [{}], (1, 0), 4, "not proved: the first run: it ended with exit code 1\n  a last line"),
        ([], [{}], (0, 0), 4, "exit code 0 and trained nothing that memfit keeps exact"),
        ([{}], [{"why": "in 2 parts"}], (0, 0), 4, "not proved: the second run: in 2 parts"),
        ([{}] * 2, [{}], (0, 79), 4, "the second run: it ended with exit code 79"),
    ],
)  # fmt: skip
def test_what_is_told_of_two_runs(prove, tmp_path, first, second, codes, code, words):
    runs = [[RUN | {"differs": []} | change for change in changes] for changes in (first, second)]
    (tmp_path / "reports.json").write_text(json.dumps(list(zip(runs, codes, strict=True))))
    done, found, text = prove(STAND_IN)
    assert done.exit_code == code and words in text
    assert found["ranks"] == len(first) and found["differs"] == (second[-1].get("differs", []) if first else [])


def test_an_interrupt_ends_the_run_and_removes_its_folder(prove):
    done, _, _ = prove("import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)")
    assert (done.exit_code, done.out) == (130, "")


def test_it_wants_a_command(memfit):
    check_refused(memfit("prove"), "nothing to run", "memfit prove -- python train.py")
    check_refused(memfit("prove", "config.yaml"), "config.yaml", "memfit prove -- python train.py")


# --- real trainings

LOOP = """
import os, torch
from memfit.training import Loop

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
calls, shadow = {"number": 0}, [one.detach().clone() for one in model.parameters()]
loop = Loop("out", seed=1, every=2, model=model, optimizer=optimizer)
loader = torch.utils.data.DataLoader(torch.arange(48.0).view(12, 4) / 48, batch_size=2, shuffle=True)
for epoch in loop.epochs(3):
    for batch in loop(loader):
        loss = model(batch + torch.rand_like(batch)).square().mean()
        (loss * 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    loop.log(score=0.0)
"""
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

class Count(transformers.TrainerCallback):
    num_calls = 0
    def on_step_begin(self, *args, **kwargs):
        self.num_calls += 1

torch.manual_seed(0)
args = transformers.TrainingArguments(
    "out", per_device_train_batch_size=2, num_train_epochs=4, eval_strategy="epoch", save_strategy="epoch",
    save_total_limit=1, report_to="none", use_cpu=True, disable_tqdm=True,
)
trainer = transformers.Trainer(Net(), args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[Count()])
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
    ("before", "after", "options", "code", "words"),
    [
        ("(loss * 1)", "calls['number'] += 1\n        (loss * calls['number'])", (), 3,
         "the batch and the rate the same; what differs since the checkpoint: calls of __main__ (global)\nlet a checkpoint"),
        ("loop.log(loss)", "[old.add_(one.detach()) for old, one in zip(shadow, model.parameters())]", (), 3,
         "each step came out as before; what differs at the end: shadow of __main__ (global) (weights)\n"),
        ("seed=1, ", "", (), 4, "the first run: its training stops and resumes, and is not exact"),
        ('"out"', 'f"out{os.getpid()}"', (), 4, "the second run: it began at step 0, not at 9"),
        ("epochs(3)", "epochs(1)", (), 4, "the first run: it ended after 6 steps, 1 of them after the checkpoint: let"),
        ("epochs(3)", "epochs(2)", ("--seconds", "0"), 0, "steps 6 to 12 were made again"),
    ],
)  # fmt: skip
def test_each_verdict_on_a_loop(prove, before, after, options, code, words):
    assert before in LOOP
    done, _, text = prove(LOOP.replace(before, after), *options)
    assert done.exit_code == code and words in text, done


@pytest.mark.parametrize(
    ("script", "needs", "validations", "ranks"),
    [
        pytest.param(LOOP, "torch", 1, 1, marks=pytest.mark.core),
        pytest.param(TRAINER, "torch", 1, 1, marks=pytest.mark.slow),
        pytest.param(ACCELERATE.replace("48", "96").replace("12", "24"), "accelerate", 0, 2, marks=pytest.mark.slow),
        pytest.param(TRANSFORMERS, "transformers", 1, 1, marks=pytest.mark.slow),
        pytest.param(LIGHTNING, "lightning", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_each_framework(prove, script, needs, validations, ranks):
    pytest.importorskip(needs)
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2") if ranks == 2 else ()
    done, found, text = prove(script, launch=launch)
    assert (done.exit_code, found["seal"], found["end"], found["epoch_ends"]) == (0, 9, 14, 1), done
    assert (found["validations"], found["ranks"]) == (validations, ranks)
    assert found["differs"] == ["Count.num_calls"] * (needs == "transformers"), text
