"""The memory of a training step by arithmetic, on a machine that has no torch."""

import dataclasses
import os
import subprocess
import sys

import pytest

from memfit.errors import ConfigError
from memfit.estimation import Estimate, Interval, Setup, estimate_formula, find_anatomy
from memfit.units import GIB

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
LLAMA_3B = {
    **LLAMA_8B,
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "intermediate_size": 8192,
    "tie_word_embeddings": True,
}
T5_XL = {
    "model_type": "t5",
    "d_model": 2048,
    "d_kv": 64,
    "d_ff": 5120,
    "num_layers": 24,
    "num_heads": 32,
    "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
FALCON_7B = {
    "model_type": "falcon",
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "vocab_size": 65024,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
SMALL = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 1408,
    "vocab_size": 8000,
}


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (LLAMA_8B, 8_030_261_248),
        (LLAMA_3B, 3_212_749_824),
        ({**LLAMA_8B, "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000}, 6_738_415_616),
        ({**LLAMA_8B, "model_type": "mistral", "vocab_size": 32000}, 7_241_732_096),
        (QWEN_7B, 7_615_616_512),
        (T5_XL, 2_849_757_184),
        (GPT2, 124_439_808),
    ],
)
def test_parameters_are_as_many_as_the_models_pages_say(config: dict[str, object], count: int) -> None:
    assert find_anatomy(config).num_parameters == count


_DECODER = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 320,
    "vocab_size": 1000,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_T5 = {"d_model": 256, "d_kv": 32, "d_ff": 320, "num_layers": 2, "num_heads": 8, "vocab_size": 1000}
_GPT2 = {"n_embd": 256, "n_layer": 2, "n_head": 8, "vocab_size": 1000, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("kind", "values", "task"),
    [
        *((kind, _GROUPED, "CausalLM") for kind in ("llama", "mistral", "qwen2", "qwen3")),
        ("llama", {**_GROUPED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, "CausalLM"),
        ("gpt2", _GPT2, "CausalLM"),
        ("t5", _T5, "Seq2SeqLM"),
        ("mt5", {**_T5, "num_decoder_layers": 3, "tie_word_embeddings": False}, "Seq2SeqLM"),
    ],
)
def test_parameters_are_as_many_as_transformers_builds(kind: str, values: dict[str, object], task: str) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    if kind == "qwen3":
        values = {**values, "head_dim": 64}
    transformers.utils.logging.set_verbosity_error()
    parsed = transformers.AutoConfig.for_model(kind, **values)
    with torch.device("meta"):
        model = getattr(transformers, f"AutoModelFor{task}").from_config(parsed)
    config = {**parsed.to_dict(), "architectures": [type(model).__name__]}
    assert find_anatomy(config).num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("setup", "gib"),
    [
        (Setup(), 21.2),
        (Setup(master_weights=True), 42.5),
        (Setup(dtype="bf16-amp"), 42.5),
    ],
    ids=["pure bf16", "fp32 master", "fp32 weights"],
)
def test_flan_t5_xl_takes_this_before_any_activation(setup: Setup, gib: float) -> None:
    parts = estimate_formula(T5_XL, setup).parts
    found = sum(parts[part].value for part in ("weights", "gradients", "optimizer"))
    assert found / GIB == pytest.approx(gib, abs=0.06)


def test_fp32_gradients_of_master_weights_bring_flan_t5_xl_to_48_gib() -> None:
    setup = Setup(master_weights=True, foreach=False)
    parts = estimate_formula(T5_XL, setup).parts
    held = sum(parts[part].value for part in ("weights", "gradients", "optimizer"))
    assert (held + 2 * 2_849_757_184) / GIB == pytest.approx(47.8, abs=0.06)  # in place of the 16-bit ones
    assert parts["temporaries"].value == 4 * 2_849_757_184  # beside them, while the update runs


def test_flan_t5_xl_in_pure_bf16_fits_32_gib_and_with_fp32_copies_does_not() -> None:
    setup = Setup(batch=1, seq_len=512, gradient_checkpointing="full", foreach=False)
    assert estimate_formula(T5_XL, setup).device["allocated_bytes"].upper < 32 * GIB
    wide = dataclasses.replace(setup, master_weights=True)
    assert estimate_formula(T5_XL, wide).device["allocated_bytes"].value > 32 * GIB


def test_an_8b_llama_steps_at_five_copies_of_its_weights() -> None:
    found = estimate_formula(LLAMA_8B, Setup(batch=1, seq_len=2048))
    assert max(found.by_phase, key=lambda phase: found.by_phase[phase].value) == "step"
    assert found.by_phase["step"].value == pytest.approx(5 * 2 * 8_030_261_248, rel=0.001)


def peak(found: Estimate) -> Interval:
    return found.device["allocated_bytes"]


def count(config: dict[str, object], **changes: object) -> int:
    """How many parameters a model has."""
    setup = Setup(**{"dtype": "fp32", "optimizer": "none", "seq_len": 8, **changes})  # type: ignore[arg-type]
    return estimate_formula(config, setup).parts["weights"].value // 4


def kept(config: dict[str, object] = SMALL, **changes: object) -> int:
    """Bytes of activations in the backward pass of a step that they dominate."""
    setup = Setup(**{"batch": 64, "optimizer": "sgd", **changes})  # type: ignore[arg-type]
    parts = estimate_formula(config, setup).parts
    return parts["activations"].value


def test_activations_of_a_block_are_what_autograd_keeps_of_it() -> None:
    tokens, width, inner, heads = 64 * 512, 512, 1408, 8
    norms = 2 * (4 + 2) * width  # x in fp32, and the normalised x
    attention = 2 * width + 2 * 4 * width + 4 * heads  # the input; q, k, v and the result; log-sum-exp
    mlp = 2 * width + 2 * 4 * inner  # the input; both factors, silu's input and the product
    block = tokens * (norms + attention + mlp)
    ends = tokens * width * (4 + 2 + 2)  # the last norm, and the head's input
    assert kept() == 2 * block + ends
    assert kept(gradient_checkpointing="full") == 2 * tokens * 2 * width + ends
    assert kept(gradient_checkpointing="full") < kept(gradient_checkpointing="selective") < kept()


def test_activations_grow_with_the_batch_and_with_eager_attention_with_the_square_of_the_length() -> None:
    assert kept(batch=128) == 2 * kept()
    assert kept(seq_len=1024) == 2 * kept()
    scores = [kept(attention="eager", seq_len=n) - kept(seq_len=n) + 64 * n * 8 * 4 * 2 for n in (512, 1024)]
    assert scores == [2 * 64 * 8 * n * n * (4 + 2) for n in (512, 1024)]  # softmax in fp32, and its 16-bit copy


def test_frozen_layers_keep_no_input_and_adapters_keep_theirs_in_fp32() -> None:
    tokens, width, inner = 64 * 512, 512, 1408
    names = ("q_proj", "v_proj")
    without = 2 * tokens * (2 * 2 * width + 2 * 2 * width + 2 * inner)  # normalised twice, two inputs, the product
    adapters = 2 * tokens * 2 * (4 * width + 2 * 4)  # each of two its fp32 copy, and 4 numbers between its matrices
    adapted = [kept(lora_rank=4, lora_targets=names, lora_dropout=share) for share in (0.0, 0.05)]
    assert adapted == [kept() - without + adapters, kept() - without + adapters + 2 * tokens * 2 * width]  # masks


def test_adapters_of_a_4_bit_model_leave_little_but_activations() -> None:
    full = estimate_formula(LLAMA_8B, Setup(seq_len=128))
    adapted = estimate_formula(LLAMA_8B, Setup(seq_len=128, lora_rank=8, quantization="nf4"))
    blocks = 32 * 4096 * (4096 * 2 + 1024 * 2 + 3 * 14336)
    rest = 8_030_261_248 - blocks
    adapters = 32 * 8 * (4096 + 4096 + 4096 + 1024)
    assert adapted.parts["weights"].value == blocks * 9 // 16 + rest * 4 + adapters * 4
    assert count(LLAMA_8B, lora_rank=8) == count(LLAMA_8B) + adapters
    assert adapted.by_phase["step"].value < full.by_phase["step"].value / 9


def test_bounds_are_never_below_values_and_wider_for_an_unknown_family() -> None:
    known, unknown = (
        estimate_formula({**SMALL, "model_type": kind}, Setup(batch=16)) for kind in ("llama", "no-such-model")
    )
    assert peak(known).value == peak(unknown).value
    assert peak(known).value < peak(known).upper < 1.3 * peak(known).value < peak(unknown).upper
    assert "unknown" in unknown.notes[0] and not any("unknown" in note for note in known.notes)


@pytest.mark.parametrize(
    ("kind", "config", "like", "count"),
    [
        ("falcon", FALCON_7B, "gpt2", 6_921_720_704),
        ("whatever", LLAMA_8B, "llama", 8_030_261_248),
    ],
)
def test_other_families_are_counted_like_the_nearest_with_a_bound_that_holds(kind, config, like, count) -> None:  # type: ignore[no-untyped-def]
    found = estimate_formula({**config, "model_type": kind}, Setup())
    assert f"counted like {like}" in found.notes[0]
    assert 0.9 * 2 * count <= found.parts["weights"].upper / 2 * 1.001
    assert found.parts["weights"].upper >= 2 * count


def test_of_an_unknown_family_weights_gradients_and_states_are_bounded_too() -> None:
    configs = ({**SMALL, "model_type": kind} for kind in ("llama", "no-such"))
    known, unknown = (estimate_formula(config, Setup(seq_len=8)).parts for config in configs)
    for name in ("weights", "gradients", "optimizer"):
        assert known[name].upper == known[name].value  # type: ignore[index]
        assert unknown[name].upper == 2 * unknown[name].value  # type: ignore[index]


def test_the_backward_pass_of_tied_embeddings_ends_with_three_gradients_of_the_table() -> None:
    apart, tied = ({**SMALL, "vocab_size": 400_000, "tie_word_embeddings": tied} for tied in (False, True))
    table = 400_000 * 512 * 2

    def beside_weights(config: dict[str, object], **changes: object) -> float:
        """What the peak of the backward pass has beside weights and gradients, in tables."""
        setup = Setup(seq_len=8, optimizer="sgd", **changes)  # type: ignore[arg-type]
        weights = count(config, lora_rank=setup.lora_rank) * 2
        return (estimate_formula(config, setup).by_phase["backward"].value - 2 * weights) / table

    assert beside_weights(tied) == pytest.approx(2, abs=0.06)
    assert beside_weights(tied, num_microbatches=2) == pytest.approx(3, abs=0.06)
    assert beside_weights(apart) < 0.1
    assert beside_weights(tied, lora_rank=8) < 0  # the table has no gradient


_SOME, _FULL = ({"gradient_checkpointing": name} for name in ("selective", "full"))
#: The bytes of all phases together, and the bound of the whole device, with eight samples.
FIGURES = [
    (SMALL, {}, [1534455808, 2528432476]),
    (SMALL, {**_SOME, "num_microbatches": 2}, [1336547328, 2442132440]),
    (SMALL, {"dtype": "bf16-amp", **_FULL, "loss_chunks": 4}, [1109395456, 2240480256]),
    (SMALL, {"dtype": "fp32", "attention": "eager", "foreach": False, "compiled": True}, [2364717056, 3102657455]),
    (SMALL, {"master_weights": True, "world_size": 3, "strategy": "ddp"}, [2060670976, 4031397724]),
    (SMALL, {"world_size": 4, "strategy": "fsdp"}, [1336241152, 3870119756]),
    (SMALL, {"world_size": 2, "strategy": "fsdp", "optimizer": "adafactor"}, [1336325824, 3862046239]),
    (SMALL, {"lora_rank": 4, "lora_targets": ("all-linear",), "quantization": "nf4"}, [1604050944, 2848199189]),
    (SMALL, {"optimizer": "adamw8bit", "optimizer_in_backward": True}, [1389655280, 2497430547]),
    ({**_GROUPED, "model_type": "qwen3"}, {"seq_len": 300, "clip_grad_norm": False}, [349229056, 1869835520]),
    ({**_GPT2, "model_type": "gpt2"}, {"dtype": "fp16-amp", "optimizer": "paged_adamw"}, [463990784, 1907320243]),
    ({**_T5, "model_type": "t5"}, {"target_len": 96, "dtype": "bf16-amp"}, [596242432, 2167055198]),
    ({**_T5, "model_type": "mt5", "num_decoder_layers": 3}, {**_FULL, "optimizer": "sgd"}, [360385024, 2052311193]),
]  # fmt: skip


@pytest.mark.parametrize(("config", "changes", "figures"), FIGURES)
def test_the_figures_of_a_setup_are_those_that_were_recorded(config, changes, figures) -> None:  # type: ignore[no-untyped-def]
    """A change of any rule moves one: look whether it is right, and record it."""
    found = estimate_formula(config, Setup(**{"batch": 8, **changes}))
    assert [sum(one.value for one in found.by_phase.values()), found.device["device_bytes"].upper] == figures


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"architectures": 5}, "architectures = 5"),
        ({"architectures": [None]}, "architectures = "),
        ({"model_type": ["llama"]}, "model_type = "),
        ({"attention_dropout": "x"}, "attention_dropout = 'x'"),
        ({"hidden_act": ["silu"]}, "hidden_act = "),
        ({"hidden_size": 10**400}, "hidden_size = a number of 1329 bits"),
        ({"hidden_size": 515}, "a width of 515 and 8 heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0"),
        *(
            ({name: 1}, f"has {name}")
            for name in ("vision_config", "image_size", "state_size", "decoder_layers", "num_local_experts")
        ),
        ({"model_type": "roberta"}, "has model_type = 'roberta'"),
    ],
)
def test_an_entry_of_another_kind_is_refused_in_three_parts(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        estimate_formula({**SMALL, **wrong}, Setup())
    assert said in caught.value.what
    assert caught.value.rule and caught.value.remedy


def test_an_adapter_for_a_module_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'q_prj'(?s:.*)did you mean 'q_proj'\?"):
        estimate_formula(SMALL, Setup(lora_rank=8, lora_targets=("q_prj",)))


def test_a_config_that_tells_no_width_is_refused_in_three_parts() -> None:
    with pytest.raises(ConfigError, match=r"hidden_size = None(?s:.*)rule:(?s:.*)do:"):
        estimate_formula({"model_type": "llama"}, Setup())
    for name, value in (("num_attention_heads", 0), ("num_hidden_layers", "many"), ("vocab_size", -1)):
        with pytest.raises(ConfigError, match=f"{name} = "):
            estimate_formula({**SMALL, name: value}, Setup())


def test_the_formula_loads_no_torch() -> None:
    code = "import sys, memfit.estimation; sys.exit('torch' in sys.modules)"
    env = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=60, check=False).returncode == 0


def test_an_interval_is_no_interval_upside_down() -> None:
    with pytest.raises(ValueError, match="5 to 4"):
        Interval(5, 4)
