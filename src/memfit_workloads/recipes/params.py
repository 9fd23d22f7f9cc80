"""The parameters of the recipe fine-tune: the ``params`` section of its config."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from memfit import config
from memfit.estimation import equation_of_batch

#: What report 4 trained with: 8 x 16.
_DEFAULT_GLOBAL = 128


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
    gradient_checkpointing: bool = False
    compile: bool = Field(False, description="the blocks run through torch.compile while training")
    device: str = "auto"
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
        """Pairs of an update."""
        batch, steps = self.sizes(1)
        return batch * steps


def equation(batch: int, steps: int) -> str:
    """Return the sizes as people read them.

    >>> equation(8, 16)
    '8 samples x 16 microbatches x 1 device = 128 samples an update'
    """
    return equation_of_batch(batch, steps, 1)
