"""The exponential moving average, and its snapshots at exactly the listed epochs."""

import math

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.errors import UsageError
from memfit.training import CheckpointWarning, Ema, Trainer, load_checkpoint, seed_everything


class Net(torch.nn.Module):
    """Weights in two layouts, a scalar, a tied head and buffers."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 3, 2, dtype=dtype).to(memory_format=torch.channels_last)
        self.first = torch.nn.Linear(3, 3, bias=False, dtype=dtype)
        self.head = torch.nn.Linear(3, 3, bias=False, dtype=dtype)
        self.head.weight = self.first.weight
        self.scale = torch.nn.Parameter(torch.tensor(1.0, dtype=dtype))
        self.norm = torch.nn.BatchNorm1d(3)


def walk(model, step):
    """Move every weight and buffer, as a step of training would."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor += torch.randn(tensor.shape, generator=generator).to(tensor.dtype)


def copies(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_the_average_is_that_of_torch():
    model = Net()
    ema, reference = Ema(0.9), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(6):
        walk(model, step)
        ema.update(model)
        reference.update_parameters(model)
    own = copies(model)
    with ema.applied(model):
        applied = copies(model)
    for name, value in reference.module.state_dict().items():
        torch.testing.assert_close(applied[name], value)
    assert all(torch.equal(own[name], value) for name, value in model.state_dict().items())
    assert not torch.equal(own["first.weight"], applied["first.weight"])
    assert torch.equal(applied["first.weight"], applied["head.weight"])


@pytest.mark.parametrize("warmup", [False, True])
def test_the_recurrence_in_float64(warmup):
    model = torch.nn.Linear(3, 2).double()
    ema, expected = Ema(0.95, warmup=warmup), None
    for step in range(40):
        walk(model, step)
        ema.update(model)
        weight = model.weight.detach().numpy()
        decay = min(0.95, (1 + step) / (10 + step)) if warmup else 0.95
        expected = weight.copy() if expected is None else decay * expected + (1 - decay) * weight
    np.testing.assert_allclose(ema.state_dict()["average"]["weight"].numpy(), expected, rtol=0, atol=1e-12)


def test_sixteen_bits_are_averaged_in_float32():
    model = Net(torch.bfloat16)
    ema, expected = Ema(0.999), None
    for step in range(5):
        walk(model, step)
        ema.update(model)
        now = {name: parameter.detach().to(torch.float64, copy=True) for name, parameter in model.named_parameters()}
        expected = now if expected is None else {name: e.lerp(now[name], 1 - 0.999) for name, e in expected.items()}
    for name, average in ema.state_dict()["average"].items():
        assert average.dtype == torch.float32
        torch.testing.assert_close(average.double(), expected[name], rtol=2e-7, atol=2e-7)
    with ema.applied(model):
        assert model.first.weight.dtype == torch.bfloat16


class NoNewTensors(TorchDispatchMode):
    """Fails on every operation that gives memory which was not there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(t)}
        for value in torch.utils._pytree.tree_leaves(out):
            assert not torch.is_tensor(value) or value.untyped_storage().data_ptr() in known, func
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prepared_update_allocates_nothing(dtype):
    model, ema = Net(dtype), Ema(0.9)
    ema.prepare(model)
    for step in range(3):
        walk(model, step)
        with NoNewTensors():
            ema.update(model)


def test_frozen_weights_cost_no_memory_and_join_when_they_are_trained():
    model, ema = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), Ema(0.5)
    model[0].requires_grad_(False)
    walk(model, 0)
    ema.update(model)
    assert set(ema.state_dict()["average"]) == {"1.weight", "1.bias"}
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    ema.update(model)
    assert torch.equal(ema.state_dict()["average"]["0.weight"], before)


def test_it_resumes_with_the_same_bits(tmp_path):
    straight, model = Ema(0.9, warmup=True), Net()
    for step in range(8):
        walk(model, step)
        straight.update(model)
        if step == 3:
            torch.save({"ema": straight.state_dict(), "model": model.state_dict()}, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    again, resumed = Net(), Ema(0.9, warmup=True)
    again.load_state_dict(saved["model"])
    resumed.prepare(again)
    resumed.load_state_dict(saved["ema"])
    for step in range(4, 8):
        walk(again, step)
        resumed.update(again)
    assert resumed.num_updates == 8
    for name, average in straight.state_dict()["average"].items():
        assert torch.equal(average, resumed.state_dict()["average"][name])


def test_another_decay_or_model_is_refused():
    ema = Ema(0.9)
    ema.update(torch.nn.Linear(2, 1))
    with pytest.raises(UsageError, match=r"decay=0\.9, .* decay=0\.5"):
        Ema(0.5).load_state_dict(ema.state_dict())
    resumed = Ema(0.9)
    resumed.load_state_dict(ema.state_dict())
    with pytest.raises(UsageError, match=r"'weight' of shape \(1, 2\), and the model has \(1, 3\)"):
        resumed.prepare(torch.nn.Linear(3, 1))


@pytest.mark.parametrize("decay", [1.0, -0.1, math.nan])
def test_a_decay_that_makes_no_sense_is_refused(decay):
    with pytest.raises(UsageError, match="decay is"):
        Ema(decay)


def test_milestones_leave_the_averaged_model_and_the_training_its_own_weights(tmp_path):
    averages = {}
    seed_everything(2)
    model, ema = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)), Ema(0.5)

    def keep(record):
        with ema.applied(model):
            averages[record.epoch] = copies(model)

    trainer = Trainer(
        model, loss=lambda model, x: (model(x).square().sum(), len(x)), ema=ema, checkpoint_dir=tmp_path,
        milestones=(2, 3), on_epoch=keep,
    )  # fmt: skip
    (tmp_path / ".ema_epoch_2.pt.99999.tmp").write_text("of a writer that was killed")
    trainer.fit([torch.randn(4, 3)] * 3, num_epochs=4)
    assert sorted(path.name for path in tmp_path.glob("*ema*")) == ["ema_epoch_2.pt", "ema_epoch_3.pt"]
    assert not list(tmp_path.glob(".*"))
    for epoch in (2, 3):
        average, checkpoint = (
            load_checkpoint(tmp_path / name) for name in (f"ema_epoch_{epoch}.pt", f"step-{3 * epoch}")
        )
        assert all(average[name] == checkpoint[name] for name in ("epoch", "fit", "identity"))
        assert all(torch.equal(average["model"][name], value) for name, value in averages[epoch].items())
        assert torch.equal(average["model"]["1.running_mean"], checkpoint["model"]["1.running_mean"])
        assert not torch.equal(average["model"]["0.weight"], checkpoint["model"]["0.weight"])


@pytest.mark.proves("S0-26")
def test_a_resumed_fit_writes_the_snapshot_that_a_kill_left_out(tmp_path):
    def squared(model, x):
        return model(x).square().sum(), len(x)

    def fit(folder, num_epochs):
        seed_everything(2)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
        trainer = Trainer(model, loss=squared, ema=Ema(0.8), milestones=(2, 3), checkpoint_dir=folder)
        trainer.fit([torch.ones(4, 3)] * 3, num_epochs=num_epochs)

    fit(tmp_path / "straight", 4)
    with pytest.warns(CheckpointWarning, match=r"\[3\]"):
        fit(tmp_path / "resumed", 2)
    (tmp_path / "resumed" / "ema_epoch_2.pt").unlink()  # as if killed between the checkpoint and the snapshot
    fit(tmp_path / "resumed", 4)
    for name in ("ema_epoch_2.pt", "ema_epoch_3.pt"):
        straight, resumed = (load_checkpoint(tmp_path / folder / name)["model"] for folder in ("straight", "resumed"))
        assert all(torch.equal(straight[key], value) for key, value in resumed.items())
    names = ("resumed/ema_epoch_2.pt", "resumed/ema_epoch_3.pt", "straight/ema_epoch_3.pt")
    one, same, other = (load_checkpoint(tmp_path / name)["fit"] for name in names)
    assert one == same != other  # an average takes the files of one training only
