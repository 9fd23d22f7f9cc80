"""In a canary, memfit's Trainer and Loop train a few steps, save elsewhere, validate a few batches, and end."""

import pytest
import torch
from torch.utils.data import DataLoader

from memfit.errors import StoppedError
from memfit.rundir import CANARY_BATCHES, CANARY_STEPS, CANARY_VARIABLE, canary_folder
from memfit.training import Loop, Trainer, Unheard, load_checkpoint
from memfit.units import MIB


@pytest.fixture
def canary(tmp_path, monkeypatch, events):
    """Gives the phases that were marked, in order."""
    monkeypatch.setenv(CANARY_VARIABLE, str(tmp_path / "canary"))
    return lambda: [event["phase"] for event in events("phase")]


def test_a_fit_is_its_preflight_a_few_steps_a_save_and_a_few_batches_of_validation(
    canary, tmp_path, monkeypatch, events
):
    folder, seen = tmp_path / "long", {"train": 0, "valid": 0}

    def loss(model, batch):
        seen["train" if model.training else "valid"] += 1
        return model(batch).square().sum(), len(batch)

    def fit(*, preflight=False):
        model = torch.nn.Linear(2, 1)
        trainer = Trainer(model, loss=loss, checkpoint_dir=folder)
        batches = [torch.ones(3, 2)] * 20
        return trainer.fit(batches, batches, num_epochs=1, preflight=preflight)

    with pytest.raises(StoppedError, match="The canary ends here"):
        fit()
    assert seen == {"train": CANARY_STEPS, "valid": CANARY_BATCHES}
    assert [name for name in canary() if name != "preflight"] == ["checkpoint", "train", "checkpoint", "validate"]
    assert [event["step"] for event in events("step")] == [1, 2, 3, 4, 5]
    assert not folder.exists()
    kept = load_checkpoint(canary_folder(folder) / "latest")
    with pytest.raises(StoppedError):
        fit(preflight=True)
    assert canary()[4:7] == ["preflight", "train", "validate"]  # each is named if the job dies there
    monkeypatch.delenv(CANARY_VARIABLE)
    fit()
    assert kept["epoch"] == 0 and load_checkpoint(folder / "latest")["epoch"] == 1


@pytest.mark.parametrize("num_batches", [20, 3])
def test_a_loop_ends_after_the_validation_of_its_script_and_saves_elsewhere(canary, tmp_path, events, num_batches):
    model, seen = torch.nn.Linear(2, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = Loop(tmp_path / "long", every=2, allow=("rehearsal",), model=model, optimizer=optimizer)
    with pytest.raises(StoppedError, match="The canary ends here"):
        for _ in loop.epochs(9):
            for batch in loop(DataLoader(torch.ones(num_batches, 2))):
                model(batch).sum().backward()
                optimizer.step()
                seen.append("step")
            seen.append("validation")
    assert seen == ["step"] * min(num_batches, CANARY_STEPS) + ["validation"]
    assert canary()[0] == "train" and {"checkpoint", "validate"} <= {*canary()}
    assert len(heaps := [one["heap_bytes"] for one in events("step")]) == min(num_batches, CANARY_STEPS)
    assert min(heaps) > MIB
    assert not (tmp_path / "long").exists()
    assert list(canary_folder(tmp_path / "long").glob("step-*/SEAL.json"))


def test_a_rank_that_tells_nothing_tells_its_phases(canary):
    Unheard().phase("validate")
    assert canary() == ["validate"]
