"""Frozen linear layers: adapters beside them, and weights in 4 bits."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from memfit.errors import ConfigError
from memfit.estimation import LoraLinear, QuantizedLinear, add_lora, quantize_linears


def make(dtype=torch.bfloat16):
    block = nn.ModuleDict({"q_proj": nn.Linear(16, 16), "v_proj": nn.Linear(16, 8), "down_proj": nn.Linear(16, 16)})
    return nn.ModuleDict({"block": block, "lm_head": nn.Linear(16, 40), "classifier": nn.Linear(16, 3)}).to(dtype)


def test_only_adapters_and_classifiers_are_trained():
    model = make()
    assert add_lora(model, 4, ("q_proj", "v_proj")) == 2
    trained = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {
        "block.q_proj.lora_A.weight": 64,
        "block.q_proj.lora_B.weight": 64,
        "block.v_proj.lora_A.weight": 64,
        "block.v_proj.lora_B.weight": 32,
        "classifier.weight": 48,
        "classifier.bias": 3,
    }


def test_all_linear_leaves_out_the_head():
    model = make()
    assert add_lora(model, 4, ("all-linear",), head=model["lm_head"]) == 4
    assert type(model["lm_head"]) is nn.Linear


def test_fp32_adapters_keep_an_fp32_copy_of_a_16_bit_input():
    kept = []
    layer = LoraLinear(nn.Linear(16, 16, dtype=torch.bfloat16).requires_grad_(False), 4)
    x = torch.randn(5, 16, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        result = layer(x)
    assert result.dtype is torch.bfloat16
    assert [tensor.dtype for tensor in kept if tensor.shape == x.shape] == [torch.float32]


def test_adapters_go_beside_quantised_layers():
    base = QuantizedLinear(16, 24, None, compute_dtype=torch.bfloat16)
    assert LoraLinear(base, 4)(torch.randn(5, 16, dtype=torch.bfloat16)).shape == (5, 24)


def test_a_name_that_no_layer_has_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'q_proj'"):
        add_lora(make(), 4, ("q_prj",))
    with pytest.raises(ConfigError, match="No linear layer of Linear"):  # a model that is one cannot be replaced
        add_lora(nn.Linear(4, 4), 4, ("all-linear",))


# In 4 bits: their bytes, and what they make and keep.


@pytest.fixture
def fake():
    with FakeTensorMode():
        yield


def held(layer):
    return sum(parameter.numel() * parameter.element_size() for parameter in layer.parameters())


def make_quantized():
    return QuantizedLinear(256, 512, None, compute_dtype=torch.bfloat16)


@pytest.mark.usefixtures("fake")
def test_nf4_takes_four_and_a_half_bits_a_weight():
    size = 256 * 512
    assert held(make_quantized()) == size // 2 + 4 * size // 64 + 4 * 16


@pytest.mark.usefixtures("fake")
def test_a_quantised_layer_does_not_keep_its_input():
    kept = []
    layer, x = make_quantized(), torch.empty(3, 7, 256, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        result = layer(x)
    assert kept == []
    result.sum().backward()
    assert (result.shape, result.dtype) == ((3, 7, 512), torch.bfloat16)
    assert x.grad.shape == x.shape


@pytest.mark.usefixtures("fake")
def test_results_have_the_dtype_of_the_input():
    assert make_quantized()(torch.empty(2, 256)).dtype is torch.float32


@pytest.mark.usefixtures("fake")
def test_linear_layers_are_replaced_but_for_those_that_are_skipped():
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), "head": nn.Linear(8, 8)})
    assert quantize_linears(model, compute_dtype=torch.float16, skip=[model["head"]]) == 2
    assert isinstance(model["body"][0], QuantizedLinear)
    assert type(model["head"]) is nn.Linear
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.usefixtures("fake")
def test_a_bias_on_the_meta_device_becomes_one_with_bytes():
    with _disable_current_modes():
        model = nn.Sequential(nn.Linear(8, 24, device="meta", dtype=torch.bfloat16))
    assert quantize_linears(model, compute_dtype=torch.bfloat16) == 1
    bias = model[0].bias
    assert (bias.device.type, bias.dtype, bias.shape, bias.requires_grad) == ("cpu", torch.bfloat16, (24,), False)
    assert model(torch.empty(2, 8)).shape == (2, 24)
