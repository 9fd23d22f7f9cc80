"""Low-rank adapters: where they go, what is trained and what is kept."""

import pytest
import torch
from torch import nn

from memfit.errors import ConfigError
from memfit.estimation import LoraLinear, QuantizedLinear, add_lora


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
    base = QuantizedLinear(16, 24, None, "nf4", compute_dtype=torch.bfloat16)
    assert LoraLinear(base, 4)(torch.randn(5, 16, dtype=torch.bfloat16)).shape == (5, 24)


def test_a_name_that_no_layer_has_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'q_proj'"):
        add_lora(make(), 4, ("q_prj",))
