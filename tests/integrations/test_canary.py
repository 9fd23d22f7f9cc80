"""In a canary, trainings of the frameworks take a few steps, save elsewhere, validate a few batches, and end."""

import pytest
import torch

from memfit.errors import StoppedError
from memfit.rundir import CANARY_BATCHES, CANARY_STEPS, CANARY_VARIABLE, canary_folder
from training.conftest import events  # noqa: F401

pytestmark = [
    pytest.mark.usefixtures("no_device"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
]


@pytest.fixture
def canary(tmp_path, monkeypatch, events):  # noqa: F811
    """Gives the phases that were marked, in order, without those that were marked twice in a row."""
    monkeypatch.setenv(CANARY_VARIABLE, str(tmp_path / "canary"))

    def phases():
        found = [event["phase"] for event in events("phase") if event["phase"] != "preflight"]
        return [phase for at, phase in enumerate(found) if at == 0 or found[at - 1] != phase]

    return phases


@pytest.fixture
def files(tmp_path):
    """Gives the files of the long run's folder, which must not change."""
    (tmp_path / "long" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "long" / "checkpoint-3" / "weights").write_text("of the long run")
    return lambda: sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "long").rglob("*"))


@pytest.mark.parametrize(("form", "strategy"), [("watch", "steps"), ("watch", "no"), ("stoppable", "epoch")])
def test_transformers(canary, files, tmp_path, form, strategy):
    bert = pytest.importorskip("integrations.bert")
    from memfit.integrations.huggingface import MemfitCallback, stoppable

    before, callbacks = files(), [MemfitCallback()] if form == "watch" else []
    seen = {"validated": 0}

    class Counts(bert.transformers.TrainerCallback):
        def on_prediction_step(self, *args, **kwargs):
            seen["validated"] += 1

    trainer = bert.make(
        tmp_path / "long",
        callbacks=[Counts(), *callbacks],
        eval_strategy=strategy,
        eval_steps=2,
        num_train_epochs=50,
        per_device_eval_batch_size=1,
    )
    trainer.eval_dataset = bert.Words(20)
    if form == "stoppable":
        stoppable(trainer, allow=("rehearsal",))
    with pytest.raises(StoppedError, match="The canary ends here"):
        trainer.train()
        trainer.evaluate()  # of a script that validates by itself
    assert seen["validated"] == CANARY_BATCHES
    assert trainer.state.global_step == CANARY_STEPS + 1
    assert canary() == ["train", "checkpoint", "train", "validate"]
    assert files() == before
    assert (canary_folder(tmp_path / "long") / f"checkpoint-{CANARY_STEPS}" / "trainer_state.json").exists()


@pytest.mark.parametrize(("form", "validates"), [("watch", True), ("watch", False), ("stop", True)])
def test_lightning(canary, files, tmp_path, form, validates):
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    from memfit.integrations.lightning import MemfitCallback, Stop

    before, seen = files(), {"train": 0, "valid": 0}

    class Module(BoringModel):
        def training_step(self, batch, batch_idx):
            seen["train"] += 1
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            seen["valid"] += not self.trainer.sanity_checking
            return super().validation_step(batch, batch_idx)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    saves = ModelCheckpoint(tmp_path / "long", every_n_train_steps=2)
    watch = [MemfitCallback()] if form == "watch" else []
    trainer = lightning.Trainer(
        callbacks=[saves, *watch],
        default_root_dir=tmp_path / "long",
        accumulate_grad_batches=2,
        limit_val_batches=1.0 if validates else 0,
        val_check_interval=7,
        max_epochs=9,
        **quiet,
    )
    with pytest.raises(StoppedError, match="The canary ends here"):
        if form == "watch":
            trainer.fit(Module())
        else:
            Stop(tmp_path / "long", every=1000, allow=("rehearsal",)).fit(trainer, Module())
    assert seen == {"train": 2 * CANARY_STEPS, "valid": CANARY_BATCHES * validates}
    assert canary() == ["train", *["validate"] * validates, "checkpoint"]
    assert files() == before
    assert (canary_folder(tmp_path / "long") / "canary.ckpt").exists()


@pytest.mark.parametrize("form", ["watch", "stop"])
def test_accelerate(canary, files, tmp_path, form):
    accelerate = pytest.importorskip("accelerate")
    from memfit.integrations.accelerate import MemfitCallback, Stop

    accelerate.state.AcceleratorState._reset_state(True)
    accelerator, seen, before = accelerate.Accelerator(cpu=True), [], files()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(20, 2))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loop = MemfitCallback(accelerator)
    if form == "stop":
        loop = Stop(accelerator, tmp_path / "long", every=3, allow=("rehearsal",))
    with pytest.raises(StoppedError, match="The canary ends here"):
        for _ in loop.epochs(9):
            for batch in loop.batches(loader):
                accelerator.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
                seen.append("step")
            seen.append("validation")
    accelerate.state.AcceleratorState._reset_state(True)
    assert seen == ["step"] * CANARY_STEPS + ["validation"]
    assert {"train", "validate"} <= {*canary()} and ("checkpoint" in canary()) == (form == "stop")
    assert files() == before
