"""From a config.json to a training step, for the families that people train."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("transformers")

from memfit.errors import ConfigError, UntraceableError
from memfit.estimation import QuantizedLinear, Setup, build_program

SIZES = {
    "vocab_size": 90,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 1, **SIZES}
T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "vocab_size": 90,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
}
BERT = {"model_type": "bert", **SIZES}
VIT = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "image_size": 32,
    "patch_size": 16,
    **{name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "image_size": 32}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 2}
DEEPSEEK = {**SIZES, "model_type": "deepseek_v3", "first_k_dense_replace": 1}
TINY = Setup(batch=2, seq_len=8)


def run(config, setup=TINY):
    """A program after one update, whose peak is not looked at here."""
    with FakeTensorMode():
        program = build_program(config, setup)
        loss = program.loss(program.model, program.batch)
        loss.backward()
        program.optimizer.step()
    assert loss.dim() == 0
    return program


def count(program):
    return sum(parameter.numel() for parameter in program.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [LLAMA, T5, BERT, VIT, RESNET, MIXTRAL], ids=["llama", "t5", "bert", "vit", "resnet", "mixtral"]
)
def test_a_config_becomes_a_step_in_the_dtype_of_the_setup(config):
    program = run(config)
    assert {parameter.dtype for parameter in program.model.parameters()} == {torch.bfloat16}
    assert all(parameter.grad is not None for parameter in program.model.parameters() if parameter.requires_grad)


def test_experts_run_in_fp32_too():
    run(MIXTRAL, Setup(batch=2, seq_len=8, dtype="fp32"))


def test_tied_weights_stay_tied():
    with FakeTensorMode():
        tied, untied = (build_program({**LLAMA, "tie_word_embeddings": tie}, TINY) for tie in (True, False))
    assert count(untied) - count(tied) == 90 * 16


def test_what_a_partial_config_lacks_is_said_with_its_default():
    with FakeTensorMode():
        partial = {name: value for name, value in LLAMA.items() if name != "vocab_size"}
        notes = build_program(partial, TINY).notes
        images = build_program({**RESNET, "image_size": None}, TINY).batch["pixel_values"]
    assert images.shape == (2, 3, 224, 224)
    assert "not in the config, so transformers' defaults: vocab_size = 32000" in notes


def test_a_config_without_a_class_gets_the_usual_one_of_its_type():
    with FakeTensorMode():
        program = build_program(BERT, TINY)
    assert (type(program.model).__name__, {*program.batch}) == ("BertForMaskedLM", {"input_ids", "labels"})
    assert any("BertForMaskedLM is assumed" in note for note in program.notes)


def test_an_unknown_model_type_is_not_traced_and_the_nearest_is_named_and_not_all():
    with FakeTensorMode(), pytest.raises(UntraceableError, match="did you mean 'llama'"):
        build_program({"model_type": "lama"}, TINY)
    with FakeTensorMode(), pytest.raises(UntraceableError, match="'zzzzzzzz'") as far:
        build_program({"model_type": "zzzzzzzz"}, TINY)
    assert len(far.value.what) < 100


@pytest.mark.parametrize("wrong", [{"hidden_size": "wide"}, {"pad_token_id": 1000}], ids=["type", "range"])
def test_values_that_make_no_model_are_refused(wrong):
    with FakeTensorMode(), pytest.raises(ConfigError, match="transformers"):
        build_program({**LLAMA, **wrong}, TINY)


def test_sequences_beyond_learned_positions_are_refused():
    with FakeTensorMode(), pytest.raises(ConfigError, match="Sequences have 513 tokens; the model has 512"):
        build_program(BERT, Setup(seq_len=513))


def test_weights_are_fp32_under_autocast():
    with FakeTensorMode():
        program = build_program(LLAMA, Setup(batch=1, seq_len=8, dtype="bf16-amp"))
    assert {parameter.dtype for parameter in program.model.parameters()} == {torch.float32}
    assert program.autocast_dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("config", "dtype", "part"), [(T5, "fp16", ".wo."), (DEEPSEEK, "bf16", ".e_score_correction_bias")]
)
def test_what_transformers_keeps_in_fp32_is_kept_so(config, dtype, part):
    with FakeTensorMode():
        program = build_program(config, Setup(seq_len=8, dtype=dtype))
    kept = {name for name, tensor in program.model.state_dict().items() if tensor.dtype is torch.float32}
    assert kept and all(part in name for name in kept)


def test_qlora_quantises_all_but_the_head_and_trains_adapters_alone():
    setup = Setup(batch=1, seq_len=8, lora_rank=4, quantization="nf4", gradient_checkpointing="full")
    program = run(LLAMA, setup)
    assert sum(isinstance(module, QuantizedLinear) for module in program.model.modules()) == 14
    assert (program.model.lm_head.weight.dtype, program.autocast_dtype) == (torch.float32, torch.bfloat16)
    assert {name.split(".")[-2] for name, p in program.model.named_parameters() if p.requires_grad} == {
        "lora_A",
        "lora_B",
    }


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA, T5], ids=["llama", "t5"])
def test_everything_at_once_still_runs(config):
    setup = Setup(
        batch=2,
        seq_len=8,
        gradient_checkpointing="selective",
        loss_chunks=3,
        optimizer="adamw8bit",
        optimizer_in_backward=True,
    )
    program = run(config, setup)
    assert all(parameter.grad is None for parameter in program.model.parameters())
    assert not program.clip_grad_norm


def test_inference_has_no_optimizer_and_nothing_to_train():
    with FakeTensorMode():
        program = build_program(LLAMA, Setup(seq_len=8, optimizer="none"))
    assert program.optimizer is None
    assert not any(parameter.requires_grad for parameter in program.model.parameters())
