"""A setup: what is trained how, as values that can be sent to another process."""

import inspect
import json
from dataclasses import asdict, fields

import pytest

from memfit.errors import ConfigError, UsageError
from memfit.estimation import Setup, equation_of_batch, split_batch


def test_a_setup_survives_json():
    setup = Setup(batch=3, lora_rank=8, lora_targets=("q_proj",), quantization="nf4", num_microbatches=2)
    again = json.loads(json.dumps(asdict(setup)))
    assert Setup(**{**again, "lora_targets": tuple(again["lora_targets"])}) == setup


def test_a_setup_is_a_key_and_cannot_be_changed():
    assert len({Setup(), Setup(), Setup(batch=2)}) == 2
    with pytest.raises(AttributeError):
        Setup().batch = 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer_in_backward": True, "num_microbatches": 2}, "optimizer_in_backward=true with --microbatches 2"),
        ({"strategy": "fsdp"}, "--strategy fsdp on one device"),
        ({"master_weights": True, "dtype": "bf16-amp"}, "--train master_weights=true with --dtype bf16-amp"),
        ({"quantization": "nf4"}, "--train quantization=nf4 without --lora"),
        ({"quantization": "int8", "lora_rank": 8}, "--train quantization=int8\\."),
    ],
)
def test_a_setup_that_contradicts_itself_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        Setup(**given)


def test_every_field_is_described():
    described = (inspect.getdoc(Setup) or "").split("Attributes:")[1]
    assert [one.name for one in fields(Setup) if f"\n    {one.name}: " not in described] == []


@pytest.mark.proves("S4-32")
def test_the_size_of_a_batch_is_an_equation():
    assert equation_of_batch(8, 16, 1) == "8 samples x 16 microbatches x 1 device = 128 samples an update"
    assert equation_of_batch(1, 1, 2) == "1 sample x 1 microbatch x 2 devices = 2 samples an update"
    assert split_batch(128, 8) == 16
    with pytest.raises(UsageError, match=r"100 samples(?s:.*)take 96 samples"):
        split_batch(100, 8, world_size=2)
    with pytest.raises(UsageError, match="samples is 0"):
        equation_of_batch(0, 1, 1)
