"""The states that optimizers keep, byte by byte."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.errors import ConfigError
from memfit.estimation import Setup, build_optimizer

SIZE = 128 * 256


@pytest.fixture(autouse=True)
def _fake():
    with FakeTensorMode(allow_fallback_kernels=False):  # as in a trace
        yield


def step(setup, *, dtype=torch.bfloat16):
    model = nn.ModuleDict({"table": nn.Embedding(256, 128, dtype=dtype), "small": nn.LayerNorm(8, dtype=dtype)})
    optimizer, notes = build_optimizer(model, setup)
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    return model, optimizer, notes


def state_bytes(optimizer):
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor) and tensor.dim()
    }
    return sum(storages.values())


SMALL = 2 * 8  # elements of the layer norm


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adamw", 2 * 2 * (SIZE + SMALL)),
        ("adam", 2 * 2 * (SIZE + SMALL)),
        ("momentum", 2 * (SIZE + SMALL)),
        ("sgd", 0),
        ("adafactor", 4 * (256 + 128 + SMALL)),
        ("adamw8bit", 2 * (SIZE + 4 * SIZE // 256 + 4 * 256) + 2 * 4 * SMALL),
    ],
)
def test_each_optimizer_keeps_the_bytes_of_its_moments(name, expected):
    assert state_bytes(step(Setup(optimizer=name))[1]) == expected


@pytest.mark.parametrize(
    ("name", "kept"),
    [("paged_adamw", 2 * 4 * 8), ("paged_adamw8bit", 2 * 4 * (131_072 // 256 + 256) + 2 * 4 * 8), ("adamw8bit", None)],
)
def test_large_moments_of_a_paged_optimizer_take_nothing_of_the_device(name, kept):
    model = nn.ParameterList([torch.zeros(1024, 128), torch.zeros(8)])
    optimizer, _ = build_optimizer(model, Setup(optimizer=name))
    sum(one.sum() for one in model).backward()
    optimizer.step()
    assert state_bytes(optimizer) == (kept if kept is not None else 2 * 131_072 + 2 * 4 * (131_072 // 256 + 256) + 64)


def test_fp32_masters_take_twelve_bytes_a_weight_with_their_moments():
    assert state_bytes(step(Setup(master_weights=True))[1]) == 12 * (SIZE + SMALL)
    assert state_bytes(step(Setup(master_weights=True), dtype=torch.float32)[1]) == 8 * (SIZE + SMALL)


def test_an_update_in_the_backward_pass_drops_each_gradient():
    model, optimizer, _ = step(Setup(optimizer_in_backward=True))
    assert [parameter.grad for parameter in model.parameters()] == [None] * 3
    assert state_bytes(optimizer) == 4 * (SIZE + SMALL)


def test_an_update_in_the_backward_pass_keeps_masters_too():
    model, optimizer, _ = step(Setup(optimizer_in_backward=True, master_weights=True))
    assert state_bytes(optimizer) == 12 * (SIZE + SMALL)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_optimizer_without_a_weight_to_train_is_refused():
    with pytest.raises(ConfigError, match="No weight of Linear is trained"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), Setup())
    assert build_optimizer(nn.Linear(2, 2), Setup(optimizer="none")) == (None, ())


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_update_without_foreach_runs_on_fake_tensors(name, dtype):
    _, optimizer, _ = step(Setup(optimizer=name, foreach=False), dtype=dtype)
    moments = {"sgd": 0, "adamw": 2, "adam": 2}.get(name, 1)
    assert state_bytes(optimizer) == moments * dtype.itemsize * (SIZE + SMALL)
