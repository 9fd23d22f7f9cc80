"""The parameters of the forecaster: the ``params`` section of its config."""

from __future__ import annotations

from pydantic import Field, model_validator

from memfit import config
from memfit_workloads.finance.panels import Count, DataParams, Weight
from memfit_workloads.folds import TrainSettings
from memfit_workloads.own import Network, Target


class SplitParams(config.Settings):
    """Purged folds: labels are purged by the longest horizon."""

    n_splits: int = Field(5, ge=2, description="folds")
    embargo_size: int = Field(5, ge=0, description="dates dropped after a test block's labels")


class GraphParams(config.Settings):
    """The graph of a day, made of what was known on it."""

    neighbours: int = Field(5, ge=1, description="most correlated assets that an asset is joined with")
    window: int = Field(60, ge=3, description="dates of returns that the correlations are taken over")
    sectors: bool = Field(True, description="join assets of one sector as well")


class ModelParams(Network):
    """The network, whose widths and heads come from hidden_size and num_heads, or your own."""

    target: Target = "memfit_workloads.forecaster.model:Forecaster"
    hidden_size: int = Field(64, ge=1, description="width of all layers")
    num_layers: int = Field(2, ge=1, le=6, description="layers along the graph")
    num_heads: int = Field(4, ge=1, description="attention heads of each layer")
    dropout: float = Field(0.1, ge=0, lt=1, description="share of a layer's output that is dropped in training")


class PretrainParams(config.Settings):
    """Pre-training: the encoder reconstructs hidden features of a day. It uses a fold's training dates alone."""

    num_epochs: int = Field(0, ge=0, description="epochs, 0 for none")
    learning_rate: float = Field(1e-3, gt=0, description="highest learning rate")


class TrainParams(TrainSettings):
    """The training of a fold."""

    batch_size: int = Field(512, ge=1, description="rows of a batch: it takes whole days until the next does not fit")
    horizon_weights: dict[Count, Weight] = Field({}, description="how much a horizon counts, 1 where not named")
    rank_weight: float = Field(0.1, ge=0, description="how much the order within a day counts; 0 leaves it out")
    regime_strength: float = Field(0.0, ge=0, description="how much volatile days count less; 0: all days count 1")
    valid_share: float = Field(0.15, gt=0, lt=1, description="the last of the training dates, kept for validation")


class ForecasterParams(config.Settings):
    """The ``params`` section of a forecaster's config."""

    data: DataParams = DataParams()
    splits: SplitParams = SplitParams()
    graph: GraphParams = GraphParams()
    model: ModelParams = ModelParams()
    pretrain: PretrainParams = PretrainParams()
    train: TrainParams = TrainParams()

    @model_validator(mode="after")
    def _sections_fit_together(self) -> ForecasterParams:
        width, heads = self.model.hidden_size, self.model.num_heads
        self.data.weigh(self.train.horizon_weights)
        if self.model.is_own and self.pretrain.num_epochs:
            raise ValueError(f"pretrain.num_epochs needs {ModelParams().target}: it trains that network's encoder")
        if self.model.is_own:
            return self
        if width % heads:
            raise ValueError(f"model.hidden_size ({width}) must be a multiple of model.num_heads ({heads})")
        if heads % 2:
            raise ValueError(
                f"model.num_heads ({heads}) must be even: half of the heads follows correlations, half sectors"
            )
        return self

    @property
    def horizon_weights(self) -> tuple[float, ...]:
        """How much each of ``data.horizons`` counts, in their order."""
        return self.data.weigh(self.train.horizon_weights)
