"""The event of an epoch holds its memory: parts that are counted exactly, and the figures of each phase."""

import numpy as np
import pytest
import torch

from memfit.errors import UsageError
from memfit.training import Ema, Trainer, _epoch_memory

N = 1024


def loss(model, batch):
    return model(batch).square().sum(), len(batch)


def fit(tmp_path, model, optimizer, **more):
    evaluate, num_epochs = more.pop("evaluate", None), more.pop("num_epochs", 2)
    trainer = Trainer(
        model, loss=more.pop("loss", loss), optimizer=optimizer, checkpoint_dir=tmp_path / "saved", **more
    )
    data = [torch.ones(4, N), torch.ones(2, N)]
    metric = {"evaluate": evaluate, "best_metric": "found"} if evaluate else {}
    trainer.fit(data, data[:1], num_epochs=num_epochs, **metric)


def test_each_epoch_has_its_parts_exactly_and_every_phase(tmp_path, events):
    model = torch.nn.Linear(N, N, bias=False)
    model.register_buffer("scale", torch.ones(10))
    fit(tmp_path, model, torch.optim.AdamW(model.parameters()), ema=Ema(0.9))
    found = [event["memory"] for event in events("epoch")]
    assert len(found) == 2
    size = 4 * N * N
    for one in found:
        assert one["metric"] == "non_reclaimable"
        assert one["parts"] == {
            "cpu": {
                "weights_bytes": size,
                "buffers_bytes": 40,
                "gradients_bytes": size,
                "optimizer_bytes": 2 * size + 4,  # the count of steps is a tensor
                "average_bytes": size,
            }
        }
        assert list(one["phases"]) == ["train", "checkpoint", "validate"]
        assert all(phase["host_bytes"] > 6 * size and phase["devices"] == {} for phase in one["phases"].values())


def test_what_a_validation_holds_is_seen_in_its_phase_alone(tmp_path, events):
    held = []

    def evaluate(model, batches):
        held.append(np.ones(64 << 20, np.uint8))
        return {"found": 1.0}

    model = torch.nn.Linear(N, 1)
    fit(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), evaluate=evaluate, num_epochs=1)
    phases = events("epoch")[0]["memory"]["phases"]
    grown = phases["validate"]["host_bytes"] - phases["train"]["host_bytes"]
    assert 60 << 20 < grown < 80 << 20 and len(held) == 1


def test_a_devices_peaks_are_those_of_each_phase(monkeypatch):
    model = torch.nn.Linear(2, 1)
    peak, starts = {"now": 0}, []

    def device_bytes():
        sizes = dict.fromkeys(("allocated_bytes", "reserved_bytes"), 1)
        return {"cuda:1": sizes | {"allocated_peak_bytes": peak["now"], "reserved_peak_bytes": 2 * peak["now"]}}

    monkeypatch.setattr(_epoch_memory, "device_bytes", device_bytes)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", starts.append)
    memory = _epoch_memory.EpochMemory(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
    for phase, peak_bytes in (("train", 50), ("checkpoint", 20), ("train", 40), ("validate", 70)):
        memory.enter(phase)
        peak["now"] = peak_bytes
    found = {name: one["devices"]["cuda:1"] for name, one in memory.end()["phases"].items()}
    assert found == {
        name: {"allocated_peak_bytes": size, "reserved_peak_bytes": 2 * size}
        for name, size in (("train", 50), ("checkpoint", 20), ("validate", 70))
    }
    assert starts == [1, 1, 1, 1]
    assert memory.end()["phases"] == {}, "the next epoch begins with nothing"


def test_tied_weights_count_once_and_sparse_gradients_by_what_they_hold(tmp_path, events):
    table = torch.nn.Embedding(100, N, sparse=True)

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = table, torch.nn.Linear(N, 100, bias=False)
            self.head.weight = table.weight
            self.rows = torch.tensor([1, 2])

        def forward(self, x):
            return self.table(self.rows)

    model = Tied()
    fit(
        tmp_path,
        model,
        torch.optim.SparseAdam(list(model.parameters())),
        num_epochs=1,
        loss=lambda m, x: (m(x).sum(), len(x)),
    )
    parts = events("epoch")[0]["memory"]["parts"]["cpu"]
    assert parts["weights_bytes"] == 4 * 100 * N
    assert parts["gradients_bytes"] == 2 * (4 * N + 8)


def test_a_metric_cannot_take_its_name(tmp_path):
    model = torch.nn.Linear(N, 1)
    with pytest.raises(UsageError, match="'memory'"):
        fit(
            tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1),
            evaluate=lambda model, batches: {"found": 1.0, "memory": 2.0},
        )  # fmt: skip
