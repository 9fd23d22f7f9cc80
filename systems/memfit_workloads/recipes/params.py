"""The parameters of the recipe fine-tune: the ``params`` section of its config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from memfit import config
from memfit.errors import ConfigError
from memfit.estimation import Dtype, Setup

#: What report 4 trained with: 8 x 16.
_DEFAULT_GLOBAL = 128
_DTYPES: Mapping[str, Dtype] = {"fp32": "fp32", "bf16-mixed": "bf16-amp", "bf16": "bf16"}
#: What this workload calls the options of ``memfit estimate`` that it has.
SETTINGS = {
    "--batch": "params.batch_size={}",
    "--microbatches": "params.gradient_accumulation_steps={}",
    "--gradient-checkpointing": "params.gradient_checkpointing=true",
    "--optimizer adafactor": "params.optimizer=adafactor",
    "--dtype bf16-amp": "params.precision=bf16-mixed",
}


class DataParams(config.Settings):
    """Where the pairs come from, and which are good enough."""

    source: Literal["generated", "files"] = "generated"
    num_pairs: int = Field(4000, ge=20, description="generated: recipes to make")
    data_seed: int = Field(0, ge=0, description="generated: seed of the recipes")
    path: Path | None = Field(None, description="files: a JSON Lines file")
    source_field: str = Field("ingredients", description="the field of a row that is read")
    target_field: str = Field("recipe", description="the field of a row that is to be written")
    min_words: int = Field(3, ge=0, description="quality: a target of fewer words is left out")
    max_repeats: float = Field(0.5, ge=0, le=1, description="quality: the largest share of one word in a target")
    most_bad: float = Field(0.2, ge=0, le=1, description="the largest share of rows that may be unreadable")
    valid_share: float = Field(0.1, gt=0, lt=1)

    @model_validator(mode="after")
    def _path_fits_the_source(self) -> DataParams:
        if (self.path is not None) != (self.source == "files"):
            raise ValueError("path belongs to source: files, which needs one")
        return self


class TinyParams(config.Settings):
    """The T5 that is trained from nothing where no pretrained model is named."""

    d_model: int = Field(96, ge=8, multiple_of=8)
    num_layers: int = Field(2, ge=1)
    num_heads: int = Field(4, ge=1)
    vocab_size: int = Field(800, ge=64, description="pieces of the tokenizer that is trained on the data")


class RecipesParams(config.Settings):
    """All settings of the workload."""

    data: DataParams = DataParams()
    pretrained_model: Path | None = Field(None, description="a folder with config.json, weights and tokenizer.json")
    model_output: Path | None = Field(None, description="where the trained model is also saved")
    tiny: TinyParams = TinyParams()
    epochs: int = Field(6, ge=1)
    batch_size: int | None = Field(None, ge=1, description="pairs at once; beats auto_batch_size")
    gradient_accumulation_steps: int | None = Field(None, ge=1, description="microbatches of an update")
    global_batch_size: int | None = Field(None, ge=1, description="pairs of an update, the product of both; 128")
    auto_batch_size: bool = Field(False, description="the most pairs at once that fit, by an estimate")
    max_tokens: int | None = Field(None, ge=16, description="tokens of a microbatch at most, padding included")
    max_source_length: int = Field(64, ge=4)
    max_target_length: int = Field(96, ge=4)
    learning_rate: float = Field(3e-3, gt=0)
    warmup_steps: int = Field(10, ge=0)
    max_grad_norm: float | None = Field(1.0, gt=0)
    precision: Literal["fp32", "bf16-mixed", "bf16"] = Field("fp32", description="bf16: all 16-bit, with a warning")
    optimizer: Literal["adamw", "adafactor"] = Field("adamw", description="adafactor: hardly any state")
    gradient_checkpointing: bool = False
    compile: bool = Field(False, description="the blocks run through torch.compile while training")
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto: the granted GPU, the CPU where there is none"
    )
    num_samples: int = Field(2, ge=0, description="texts to generate at the end")

    @model_validator(mode="after")
    def _sizes_agree(self) -> RecipesParams:
        batch, steps, total = self.batch_size, self.gradient_accumulation_steps, self.global_batch_size
        if self.auto_batch_size and batch is None and steps is not None:
            raise ValueError(
                "gradient_accumulation_steps follows from auto_batch_size; name batch_size too, or neither"
            )
        if batch and steps and total and batch * steps != total:
            raise ValueError(f"batch_size x gradient_accumulation_steps is {batch * steps}, not {total}")
        for name, one in (("batch_size", batch), ("gradient_accumulation_steps", steps)):
            if one and not (batch and steps) and (total or _DEFAULT_GLOBAL) % one:
                raise ValueError(f"{name} {one} does not divide the global batch of {total or _DEFAULT_GLOBAL}")
        return self

    def sizes(self, microbatch: int) -> tuple[int, int]:
        """Return pairs at once and microbatches of an update; ``microbatch`` where neither was named."""
        batch, steps = self.batch_size, self.gradient_accumulation_steps
        total = self.global_batch_size or (batch * steps if batch and steps else _DEFAULT_GLOBAL)
        batch = batch or (total // steps if steps else microbatch)
        return batch, total // batch

    @property
    def total(self) -> int:
        batch, steps = self.sizes(1)
        return batch * steps


def model_config(params: RecipesParams, vocab_size: int) -> dict[str, Any]:
    """Return the config.json of the model: of the pretrained one, or of a small T5."""
    if params.pretrained_model is None:
        tiny = params.tiny
        shape = {"d_model": tiny.d_model, "d_kv": tiny.d_model // tiny.num_heads, "d_ff": 2 * tiny.d_model,
                 "num_layers": tiny.num_layers, "num_heads": tiny.num_heads}  # fmt: skip
        pieces = {"vocab_size": vocab_size, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
        name = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
        return {**name, **shape, **pieces, "feed_forward_proj": "gated-gelu", "is_encoder_decoder": True}
    try:
        found: dict[str, Any] = json.loads((params.pretrained_model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise unreadable(params.pretrained_model, error) from None
    return found


def unreadable(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{folder} cannot be loaded: {str(error).splitlines()[0]}.",
        rule="pretrained_model is a folder that save_pretrained() wrote; nothing is downloaded.",
        remedy="--set params.pretrained_model=<such a folder>, or leave it out for a small T5",
    )


def setup_of(params: RecipesParams, batch: int) -> Setup:
    """Return how the model is trained, with so many pairs at once where the settings name no number."""
    batch, steps = params.sizes(batch)
    return Setup(
        batch=batch, num_microbatches=steps, seq_len=params.max_source_length, target_len=params.max_target_length,
        dtype=_DTYPES[params.precision], optimizer=params.optimizer, foreach=False,
        clip_grad_norm=params.max_grad_norm is not None,
        gradient_checkpointing="full" if params.gradient_checkpointing else "none", compiled=params.compile,
        learning_rate=params.learning_rate,
    )  # fmt: skip


def plan_of(params: RecipesParams) -> tuple[dict[str, Any], Setup, str]:
    """Return the model, how it is trained and the folder of its weights; with one pair where the size is automatic."""
    is_auto, folder = params.auto_batch_size and params.batch_size is None, str(params.pretrained_model or "")
    return model_config(params, params.tiny.vocab_size), setup_of(params, 1 if is_auto else 8), folder
