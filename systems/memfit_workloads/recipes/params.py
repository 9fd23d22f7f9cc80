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
    "--lora 16": "params.lora.rank=16",
}


class DataParams(config.Settings):
    """Where the pairs come from, and which are good enough."""

    source: Literal["generated", "files"] = "generated"
    num_pairs: int = Field(4000, ge=20, description="generated: recipes to make")
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
    num_heads: int = Field(4, ge=1, le=8)
    vocab_size: int = Field(800, ge=64, description="pieces of the tokenizer that is trained on the data")


class LoraParams(config.Settings):
    """Adapters of PEFT beside frozen weights."""

    rank: int = Field(0, ge=0, description="0: all weights are trained")
    alpha: int = Field(32, ge=1)
    dropout: float = Field(0.05, ge=0, lt=1)
    modules: tuple[str, ...] = Field((), description="layers beside which they go: PEFT's own, or all-linear")


class RecipesParams(config.Settings):
    """All settings of the workload."""

    data: DataParams = DataParams()
    pretrained_model: str | None = Field(
        None, description="a folder with config.json, weights and tokenizer.json, or a name on the hub"
    )
    lora: LoraParams = LoraParams()
    model_output: Path | None = Field(None, description="where the trained model is also saved")
    tiny: TinyParams = TinyParams()
    epochs: int = Field(6, ge=1)
    batch_size: int | None = Field(None, ge=1, description="pairs at once; one size alone makes 128 an update")
    gradient_accumulation_steps: int | None = Field(
        None, ge=1, description="microbatches of an update; the product of both is 128"
    )
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
    num_samples: int = Field(2, ge=0, description="written texts to look at")
    num_rouge: int = Field(200, ge=0, description="validation pairs whose written texts are scored by ROUGE")
    baseline: bool = Field(False, description="judge the model before the training too")

    @model_validator(mode="after")
    def _sizes_agree(self) -> RecipesParams:
        batch, steps = self.batch_size, self.gradient_accumulation_steps
        if self.auto_batch_size and batch is None and steps is not None:
            raise ValueError(
                "gradient_accumulation_steps follows from auto_batch_size; name batch_size too, or neither"
            )
        for name, one in (("batch_size", batch), ("gradient_accumulation_steps", steps)):
            if one and not (batch and steps) and _DEFAULT_GLOBAL % one:
                raise ValueError(f"{name} {one} does not divide the global batch of {_DEFAULT_GLOBAL}")
        return self

    def sizes(self, microbatch: int) -> tuple[int, int]:
        """Return pairs at once and microbatches of an update; ``microbatch`` where neither was named."""
        batch, steps = self.batch_size, self.gradient_accumulation_steps
        batch = batch or (_DEFAULT_GLOBAL // steps if steps else microbatch)
        return batch, steps or _DEFAULT_GLOBAL // batch

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
        found: dict[str, Any] = json.loads(find_file(params.pretrained_model, "config.json").read_text())
    except (OSError, ValueError) as error:
        raise unreadable(params.pretrained_model, error) from None
    return found


def find_file(model: str, name: str) -> Path:
    """Return a file of a pretrained model: in its folder; of a name on the hub from the cache, else by the network."""
    if Path(model).is_dir():
        return Path(model, name)
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    try:
        if model.count("/") > 1 or model.startswith((".", "/")) or ("/" in model and Path(model).parent.is_dir()):
            raise FileNotFoundError("there is no such folder")
        cached = try_to_load_from_cache(model, name)
        if isinstance(cached, str):
            return Path(cached)
        get_hf_file_metadata(hf_hub_url(model, name), timeout=3)  # asks once; hf_hub_download asks for half a minute
        return Path(hf_hub_download(model, name))
    except Exception as error:  # those of a connection are no OSError
        raise unreadable(model, error) from None


def unreadable(model: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{model} cannot be loaded: {str(error).splitlines()[0].rstrip('.')}.",
        rule="pretrained_model is a folder that save_pretrained() wrote, or a name on the hub, cached or reached.",
        remedy=f"where there is a network: hf download {model} --local-dir models/{Path(model).name}; then "
        f"--set params.pretrained_model=models/{Path(model).name}. Left out, a small T5 is made",
    )


def setup_of(params: RecipesParams, batch: int) -> Setup:
    """Return how the model is trained, with so many pairs at once where the settings name no number."""
    batch, steps = params.sizes(batch)
    return Setup(
        batch=batch, num_microbatches=steps, seq_len=params.max_source_length, target_len=params.max_target_length,
        dtype=_DTYPES[params.precision], optimizer=params.optimizer, foreach=False,
        clip_grad_norm=params.max_grad_norm is not None,
        gradient_checkpointing="full" if params.gradient_checkpointing else "none", compiled=params.compile,
        learning_rate=params.learning_rate, lora_rank=params.lora.rank, lora_targets=params.lora.modules,
        lora_dropout=params.lora.dropout,
    )  # fmt: skip


def plan_of(params: RecipesParams) -> tuple[dict[str, Any], Setup, str]:
    """Return the model, how it is trained and the folder of its weights; with one pair where the size is automatic."""
    is_auto, model = params.auto_batch_size and params.batch_size is None, params.pretrained_model
    folder = str(find_file(model, "config.json").parent) if model else ""
    return model_config(params, params.tiny.vocab_size), setup_of(params, 1 if is_auto else 8), folder
