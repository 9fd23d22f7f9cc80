"""Linear layers in 4 and 8 bits: their bytes, and what they make and keep."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from memfit.estimation import QuantizedLinear, quantize_linears


@pytest.fixture(autouse=True)
def _fake():
    with FakeTensorMode():
        yield


def held(layer):
    return sum(parameter.numel() * parameter.element_size() for parameter in layer.parameters())


def make(kind):
    return QuantizedLinear(256, 512, None, kind, compute_dtype=torch.bfloat16)


def test_nf4_takes_four_and_a_half_bits_a_weight_and_int8_eight():
    size = 256 * 512
    assert held(make("nf4")) == size // 2 + 4 * size // 64 + 4 * 16
    assert held(make("int8")) == size + 4 * 512


@pytest.mark.parametrize(("kind", "num_kept"), [("nf4", 0), ("int8", 1)])
def test_only_the_eight_bit_layer_keeps_its_input(kind, num_kept):
    kept = []
    layer, x = make(kind), torch.empty(3, 7, 256, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        result = layer(x)
    assert len(kept) == num_kept
    result.sum().backward()
    assert (result.shape, result.dtype) == ((3, 7, 512), torch.bfloat16)
    assert x.grad.shape == x.shape


def test_results_have_the_dtype_of_the_input():
    assert make("nf4")(torch.empty(2, 256)).dtype is torch.float32


def test_linear_layers_are_replaced_but_for_those_that_are_skipped():
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), "head": nn.Linear(8, 8)})
    assert quantize_linears(model, "nf4", compute_dtype=torch.float16, skip=[model["head"]]) == 2
    assert isinstance(model["body"][0], QuantizedLinear)
    assert type(model["head"]) is nn.Linear
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_bias_on_the_meta_device_becomes_one_with_bytes(kind):
    with _disable_current_modes():
        model = nn.Sequential(nn.Linear(8, 24, device="meta", dtype=torch.bfloat16))
    assert quantize_linears(model, kind, compute_dtype=torch.bfloat16) == 1
    bias = model[0].bias
    assert (bias.device.type, bias.dtype, bias.shape, bias.requires_grad) == ("cpu", torch.bfloat16, (24,), False)
    assert model(torch.empty(2, 8)).shape == (2, 24)
