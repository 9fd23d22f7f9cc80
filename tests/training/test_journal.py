"""What a journal writes: of an epoch its samples a second, waiting and memory."""

import time

import numpy as np
import pytest
import torch

from memfit.errors import UsageError
from memfit.training import WHOLE, Trainer, _journal, load_checkpoint, seed_everything

MIB = 1 << 20


class Slow:
    """Two batches of two samples that are waited for, by number."""

    def __init__(self, seconds=0.0, batch=None):
        self.seconds, self.batch = seconds, torch.ones(2, 4) if batch is None else batch

    def __len__(self):
        return 2

    def set_epoch(self, epoch):
        pass

    def __getitem__(self, number):
        time.sleep(self.seconds)
        return self.batch


def make(path=None, *, seconds=0.0, **settings):
    def loss(model, batch):
        time.sleep(seconds)
        return model.weight.square().sum() * 2, 2

    seed_everything(0)
    model = torch.nn.Linear(4, 1)
    return Trainer(
        model, loss=loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), checkpoint_dir=path, **settings
    )


@pytest.mark.proves("C-38", "C-59", "S4-02")
@pytest.mark.slow
@pytest.mark.parametrize(("load", "step", "least", "most"), [(0.2, 0.0, 0.6, 1.0), (0.0, 0.2, 0.0, 0.4)])
def test_the_share_of_waiting_says_whether_the_loader_or_the_step_is_slow(events, load, step, least, most, capfd):
    entry = make(seconds=step).fit(Slow(load), num_epochs=1, preflight=False).history[0]
    assert least <= entry.wait_share <= most
    assert 0 < entry.samples_per_second <= 4 / 0.4
    (event,) = events("epoch")
    assert event["wait_share"] == pytest.approx(entry.wait_share, abs=1e-6)
    assert event["samples_per_second"] == pytest.approx(entry.samples_per_second)
    assert event["seconds"] == pytest.approx(entry.seconds) == pytest.approx(4 / entry.samples_per_second)
    assert event["num_threads"] >= 1
    assert "device_use" not in event  # of a GPU alone
    assert event["text"].endswith(f" samples/s  waits for data {entry.wait_share * 100:.1f} %")
    assert not capfd.readouterr().err  # a run shows its events


def test_the_use_of_a_gpu_is_the_mean_of_what_its_driver_says(monkeypatch):
    said = iter([30, 50])
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: next(said))  # stands in for a GPU
    monkeypatch.setattr(_journal, "_STEP_EVENT_SECONDS", 0.0)
    journal = _journal.Journal()
    for _ in range(3):  # the third time the driver gives no answer
        journal.step({"epoch": 1, "step": 1, "num_steps": 3}, 0.5, torch.device("cuda:0"))
        journal.took(1.0, 0.0)
    assert journal.pace()["device_use"] == pytest.approx(0.4)
    assert journal.pace() == {}, "the next epoch begins with nothing"


@pytest.mark.proves("S4-19")
def test_a_devices_peaks_are_those_of_each_phase(monkeypatch, events):
    peak, starts = {"now": 0}, []

    def device_bytes():
        sizes = dict.fromkeys(("allocated_bytes", "reserved_bytes"), 1)
        return {"cuda:1": sizes | {"allocated_peak_bytes": peak["now"], "reserved_peak_bytes": 2 * peak["now"]}}

    monkeypatch.setattr(_journal, "device_bytes", device_bytes)
    monkeypatch.setattr(_journal, "reset_device_peaks", lambda: starts.append(1))
    journal = _journal.Journal(num_epochs=2)
    for phase, peak_bytes in (("train", 50), ("checkpoint", 20), ("train", 40), ("validate", 70)):
        journal.phase(phase)
        peak["now"] = peak_bytes
    journal.epoch(1, {"train_loss": 0.5}, {})
    journal.epoch(2, {"train_loss": 0.5}, {})
    first, second = (event["memory"]["phases"] for event in events("epoch"))
    assert {name: one["devices"]["cuda:1"] for name, one in first.items()} == {
        name: {"allocated_peak_bytes": size, "reserved_peak_bytes": 2 * size}
        for name, size in (("train", 50), ("checkpoint", 20), ("validate", 70))
    }
    assert starts == [1, 1, 1, 1]
    assert second == {}, "the next epoch begins with nothing"


def test_an_epoch_that_was_stopped_counts_all_its_batches_once_and_saves_no_times(tmp_path):
    whole = make().fit(Slow(), num_epochs=2)
    seen = []

    def die_in_the_fourth_step(outcome):
        seen.append(outcome)
        if len(seen) == 4:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        make(tmp_path, checkpoint_seconds=0, on_step=die_in_the_fourth_step).fit(Slow(), num_epochs=2)
    saved = load_checkpoint(tmp_path / "latest")
    times = {"samples_per_second", "wait_share", "seconds", "device_use", "pace"}
    assert not times & {*saved["history"][0], *saved}
    resumed = make(tmp_path).fit(Slow(), num_epochs=2)
    assert resumed.history == whole.history
    assert resumed.history[0].wait_share is None and resumed.history[1].wait_share >= 0
    assert resumed.history[1].samples_per_second > 0


@pytest.mark.parametrize("name", ["wait_share", "memory"])
def test_metrics_of_validation_cannot_take_the_names_of_the_figures(name):
    with pytest.raises(UsageError, match=f"'{name}'"):
        make().fit(Slow(), Slow(), num_epochs=1, best_metric=name, evaluate=lambda model, valid: {name: 1})


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(3, 2), 3),
        ({"x": np.zeros((5, 1)), "y": np.zeros(5)}, 5),
        ([("a", 1), ("b", 2)], 2),
        ({"x": torch.zeros(3), "y": torch.zeros(2)}, None),
        (object(), None),
    ],
)
def test_samples_are_counted_where_a_batch_says_how_many(batch, samples):
    trainer = make(split=WHOLE)
    entry = trainer.fit(Slow(0.01, batch), num_epochs=1, preflight=False).history[0]
    found = entry.samples_per_second
    assert found is None if samples is None else found * entry.seconds == pytest.approx(2 * samples)


def test_what_a_validation_holds_is_seen_in_its_phase_alone(tmp_path, events):
    held = []

    def evaluate(model, batches):
        held.append(np.ones(64 * MIB, np.uint8))
        return {"valid_loss": 1.0}

    make(tmp_path).fit(Slow(), Slow(), num_epochs=2, evaluate=evaluate)
    [used] = events("loaders")
    assert {"validation", "samples", "accumulation"} & set(used["settings"]) == {"accumulation"}, "Slow is no loader"
    first, second = (event["memory"] for event in events("epoch"))
    assert first["metric"] == "non_reclaimable"
    assert list(first["phases"]) == list(second["phases"]) == ["train", "checkpoint", "validate"]
    grown = [first["phases"][name]["host_bytes"] - first["phases"]["train"]["host_bytes"] for name in first["phases"]]
    assert abs(grown[1]) < 8 * MIB and 60 * MIB < grown[2] < 80 * MIB
    assert all(phase["devices"] == {} for phase in first["phases"].values())
