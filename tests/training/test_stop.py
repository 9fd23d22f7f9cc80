"""A fit that is asked to stop at any moment goes on in a fresh trainer to the same bytes."""

import signal

import pytest
import torch

from memfit import rundir
from memfit.data import Padding, SequenceLoader
from memfit.training import Trainer, load_checkpoint, seed_everything
from training.stop_driver import KINDS, sweep


@pytest.fixture
def in_a_run(tmp_path, monkeypatch):
    """Events are written, and a SIGTERM that no fit notes ends nothing."""
    monkeypatch.setenv(rundir.RUN_DIR_VARIABLE, str(tmp_path / "run"))
    monkeypatch.setenv(rundir.JOB_ID_VARIABLE, "fold_1")
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield
    signal.signal(signal.SIGTERM, earlier)


@pytest.mark.usefixtures("in_a_run")
@pytest.mark.parametrize(
    ("name", "every"),
    [
        *(pytest.param(*one, marks=pytest.mark.core) for one in zip([*KINDS][::2], (7, 18), strict=True)),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in zip([*KINDS][1::2], (9, 12), strict=True)),
        pytest.param("SequenceLoader, early stop", 3, marks=pytest.mark.long),
    ],
)
def test_a_fit_that_is_stopped_at_any_moment_goes_on_to_identical_bytes(name, every, tmp_path):
    names, different = sweep(tmp_path, KINDS[name], every)
    assert different == []
    assert {"save", "loss in training", "loss in validation", "event epoch", "event checkpoint"} <= set(names)
    assert ("event early_stop" in names) == ("early stop" in name)
    assert len(names) >= 35


def squared(model, batch):
    return model(torch.from_numpy(batch["input_ids"]).float()).square().sum(), len(batch["input_ids"])


def make(folder):
    """A trainer, and a loader of four batches."""
    seed_everything(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = [{"input_ids": [number, 2, 3]} for number in range(8)]
    loader = SequenceLoader(rows, Padding(pad_id=0), batch=2, shuffle=3)
    return Trainer(model, loss=squared, optimizer=optimizer, checkpoint_dir=folder), loader


@pytest.mark.slow
def test_a_checkpoint_with_the_finished_epochs_last_position_goes_on_with_the_next_epoch(tmp_path):
    whole = make(tmp_path / "whole")
    expected = whole[0].fit(whole[1], num_epochs=3)
    trainer, loader = make(tmp_path / "stopped")
    trainer.fit(loader, num_epochs=1)
    state = load_checkpoint(tmp_path / "stopped" / "latest")
    assert (state["epoch"], state["data"]["loader"]["epoch"], state["data"]["loader"]["position"]) == (1, 1, 4)
    trainer, loader = make(tmp_path / "stopped")
    assert trainer.fit(loader, num_epochs=3).history == expected.history


def test_a_validation_that_is_run_once_more_sees_all_its_batches(tmp_path):
    trainer, loader = make(tmp_path)
    seen = []

    def evaluate(model, batches):
        for number, _ in enumerate(batches):
            seen.append(number)
            if len(seen) == 3:
                raise MemoryError
        return {"valid_loss": number + 1.0}

    valid = make(tmp_path / "other")[1]
    result = trainer.fit(loader, valid, num_epochs=1, evaluate=evaluate, preflight=False)
    assert result.history[0].metrics == {"valid_loss": 4.0} and seen == [0, 1, 2, 0, 1, 2, 3]
