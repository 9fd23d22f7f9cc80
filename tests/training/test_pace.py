"""What an epoch's record and event say of samples a second, waiting and padding."""

import time
from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from memfit.errors import UsageError
from memfit.training import Trainer, load_checkpoint, seed_everything
from memfit.training._pace import Pace, has_decoder, padding_in, samples_in

LENGTHS = [4, 1, 3, 2]


def batches():
    """Two batches of two sources, filled up to 4 and 3, and targets of 2, of which one is padding."""
    found = []
    for first, second in (LENGTHS[:2], LENGTHS[2:]):
        places = torch.arange(max(first, second))
        mask = (places < torch.tensor([[first], [second]])).long()
        labels = torch.tensor([[1, 1], [1, -100]])
        found.append({"input_ids": mask * 3, "attention_mask": mask, "labels": labels})
    return found


class Model(torch.nn.Module):
    def __init__(self, is_encoder_decoder):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.config = SimpleNamespace(is_encoder_decoder=is_encoder_decoder)


class Slow:
    """Batches that are waited for, by number."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 2

    def set_epoch(self, epoch):
        pass

    def __getitem__(self, number):
        time.sleep(self.seconds)
        return batches()[number]


def make(path=None, *, seconds=0.0, decoder=True, **settings):
    def loss(model, batch):
        time.sleep(seconds)
        return model.weight.square().sum() * len(batch["labels"]), len(batch["labels"])

    seed_everything(0)
    model = Model(decoder)
    return Trainer(
        model, loss=loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), checkpoint_dir=path, **settings
    )


@pytest.mark.parametrize(("load", "step", "least", "most"), [(0.05, 0.0, 0.8, 1.0), (0.0, 0.05, 0.0, 0.2)])
def test_the_share_of_waiting_says_whether_the_loader_or_the_step_is_slow(events, load, step, least, most, capfd):
    entry = make(seconds=step).fit(Slow(load), num_epochs=1, preflight=False).history[0]
    assert least <= entry.wait_share <= most
    assert 10 < entry.samples_per_second <= 4 / 0.1
    (event,) = events("epoch")
    assert event["wait_share"] == pytest.approx(entry.wait_share, abs=1e-6)
    assert event["samples_per_second"] == pytest.approx(entry.samples_per_second)
    assert event["seconds"] == pytest.approx(entry.seconds) == pytest.approx(4 / entry.samples_per_second)
    assert event["num_threads"] >= 1
    assert "device_use" not in event  # of a GPU alone
    assert f"waits {entry.wait_share * 100:.1f} %  pads" in event["text"]
    assert not capfd.readouterr().err  # a run shows its events


def test_the_use_of_a_gpu_is_the_mean_of_what_its_driver_says(monkeypatch):
    said = iter([30, 50])
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: next(said))  # stands in for a GPU
    pace = Pace(seconds=1.0)
    for _ in range(3):  # the third time the driver gives no answer
        pace.look_at(torch.device("cuda:0"))
    assert pace.figures()["device_use"] == pytest.approx(0.4)


@pytest.mark.parametrize(("decoder", "expected"), [(True, (4 + 2) / (14 + 8)), (False, 4 / 14)])
def test_padding_is_that_of_the_masks_and_of_a_decoder_s_labels(decoder, expected):
    entry = make(decoder=decoder).fit(batches(), num_epochs=1).history[0]
    assert entry.pad_share == pytest.approx(expected)


def test_an_epoch_that_was_stopped_counts_all_its_batches_once(tmp_path):
    whole = make().fit(batches(), num_epochs=2)
    trainer = make(tmp_path, checkpoint_seconds=0)
    seen = []

    def die_in_the_fourth_step(outcome):
        seen.append(outcome)
        if len(seen) == 4:
            raise RuntimeError("killed")

    trainer.on_step = die_in_the_fourth_step
    with pytest.raises(RuntimeError, match="killed"):
        trainer.fit(batches(), num_epochs=2)
    saved = load_checkpoint(tmp_path / "latest_checkpoint.pt")
    assert (saved["within_epoch"]["num_padding"], saved["within_epoch"]["num_positions"]) == (4, 12)
    assert not {"samples_per_second", "wait_share", "seconds", "device_use", "pace"} & {
        *saved["history"][0],
        *saved["within_epoch"],
    }
    resumed = make(tmp_path).fit(batches(), num_epochs=2)
    assert resumed.history == whole.history
    assert resumed.history[0].wait_share is None and resumed.history[1].wait_share >= 0
    assert resumed.history[1].samples_per_second > 0


def test_metrics_of_validation_cannot_take_the_names_of_the_pace():
    with pytest.raises(UsageError, match="wait_share"):
        make().fit(
            batches(),
            batches(),
            num_epochs=1,
            best_metric="wait_share",
            evaluate=lambda model, valid: {"wait_share": 1},
        )


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(3, 2), 3),
        ({"x": np.zeros((5, 1)), "y": np.zeros(5)}, 5),
        ([("a", 1), ("b", 2)], 2),
        ({"x": torch.zeros(3), "y": torch.zeros(2)}, 0),
        (object(), 0),
    ],
)
def test_samples_are_counted_where_a_batch_says_how_many(batch, samples):
    assert samples_in(batch) == samples


def test_padding_is_known_of_matrices_in_a_mapping_alone():
    masks = {"attention_mask": np.array([[1, 0]]), "decoder_attention_mask": np.array([[1, 1, 0, 0]])}
    labels = {"labels": np.array([[7, -100]])}
    assert padding_in(masks | labels, labels_too=True) == (3, 6)
    assert padding_in(UserDict(labels), labels_too=True) == (1, 2)
    assert padding_in(labels, labels_too=False) == (0, 0)
    assert padding_in({"attention_mask": torch.ones(1, 1, 2, 2)}, labels_too=False) == (0, 0)
    assert padding_in([torch.ones(2)], labels_too=True) == (0, 0)
    assert Pace().figures() == {}


def test_a_model_that_is_wrapped_is_looked_into():
    assert has_decoder(SimpleNamespace(module=Model(True))) and not has_decoder(torch.nn.Linear(1, 1))
