"""The parameters of the ranker: the ``params`` section of its config."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from memfit import config
from memfit_workloads.finance import JudgeSettings
from memfit_workloads.finance.panels import Count, DataParams, Weight
from memfit_workloads.folds import TrainSettings
from memfit_workloads.own import Network, Target


class SplitParams(config.Settings):
    """How dates become folds; labels are purged by the longest horizon in any case."""

    kind: Literal["purged", "walk_forward"] = "purged"
    n_splits: int = Field(5, ge=2, description="folds")
    embargo_size: int = Field(5, ge=0, description="dates dropped after a test block's labels; walk_forward: before it")
    warm_start: bool = Field(False, description="walk_forward: begin a fold with the weights of the one before")

    @model_validator(mode="after")
    def _settings_fit_the_kind(self) -> SplitParams:
        if self.warm_start and self.kind != "walk_forward":
            raise ValueError(
                f"warm_start needs kind: walk_forward, and kind is {self.kind}: the fold before was trained on dates "
                "that this one is tested on, so its weights would leak them"
            )
        return self


class ModelParams(Network):
    """The network: an encoder with these sizes, or your own."""

    target: Target = "memfit_workloads.ranker.model:PatchRanker"
    patch_size: int = Field(10, ge=1, description="dates in a patch")
    width: int = Field(32, ge=1, description="width of a token")
    num_layers: int = Field(1, ge=1, description="encoder layers")
    num_heads: int = Field(4, ge=1, description="attention heads")
    dropout: float = Field(0.1, ge=0, lt=1, description="share of activations dropped in training")


class LossParams(config.Settings):
    """How much each loss counts; a loss with weight 0 is not computed."""

    listnet: Weight = Field(1.0, description="cross entropy of being first")
    ranknet: Weight = Field(0.5, description="logistic loss of sampled pairs")
    mse: Weight = Field(0.1, description="squared error to the standardised target")

    @model_validator(mode="after")
    def _one_counts(self) -> LossParams:
        if self.listnet == self.ranknet == self.mse == 0:
            raise ValueError("one of the losses needs a weight above 0")
        return self


class TrainParams(TrainSettings):
    """The training of a fold."""

    dates_per_batch: int = Field(8, ge=1, description="dates of an optimizer step")
    loss: LossParams = LossParams()
    pairs_per_asset: int = Field(8, ge=1, description="pairs of the RankNet loss that an asset is drawn into")
    tau_days: float | None = Field(None, gt=0, description="calendar days in which a date's weight falls to 1/e")
    ema_decay: float = Field(0.98, ge=0, lt=1, description="of the average of the weights")
    ema_epochs: tuple[Count, ...] = Field((), description="epochs after which a snapshot of the average is written")
    k_ratio: float = Field(0.2, gt=0, le=1, description="share of a date's assets that precision at k looks at")
    patience: int | None = Field(None, ge=1, description="epochs without a better validation before an early stop")

    @model_validator(mode="after")
    def _settings_fit_together(self) -> TrainParams:
        if self.tau_days is not None and self.dates_per_batch == 1:
            raise ValueError(
                "tau_days needs dates_per_batch of 2 or more: the weight of a single date scales the whole loss, which "
                "dividing by it takes back"
            )
        if self.valid_share == 0 and self.patience is not None:
            raise ValueError("patience needs a valid_share above 0")
        return self


class RankerParams(JudgeSettings):
    """The ``params`` section of a ranker's config: what is trained; and how it is judged, as `JudgeSettings` say."""

    data: DataParams = DataParams()
    splits: SplitParams = SplitParams()
    model: ModelParams = ModelParams()
    train: TrainParams = TrainParams()

    @model_validator(mode="after")
    def _sections_fit_together(self) -> RankerParams:
        parts = (("data.lookback", "model.patch_size"), ("model.width", "model.num_heads"))
        for whole, part in () if self.model.is_own else parts:
            sizes = [getattr(getattr(self, section), key) for section, key in (whole.split("."), part.split("."))]
            if sizes[0] % sizes[1]:
                raise ValueError(f"{whole} ({sizes[0]}) must be a multiple of {part} ({sizes[1]})")
        return self

    @property
    def scored_horizons(self) -> tuple[int, ...]:
        """The horizons that the models score, the main one first."""
        return (self.data.main_horizon, *self.data.horizons)
