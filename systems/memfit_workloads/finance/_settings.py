"""The settings of judging: how the scores of trained folds are blended, traded and compared."""

from __future__ import annotations

import datetime
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from memfit.config import Settings
from memfit.errors import ConfigError
from memfit_workloads.finance._backtest import BacktestSettings
from memfit_workloads.finance._checks import QualitySettings
from memfit_workloads.finance._gate import GateSettings

_METRIC = r"^h[1-9]\d*_(rank_ic|p_at_k_pos|delta_p_at_k_pos|spread)$"


class DecisionSettings(Settings):
    """What the scores are compared with, and when the difference counts; docs/workflow.md has each setting."""

    baseline: str = "random"
    metric: Annotated[str, Field(pattern=_METRIC)] | None = None
    level: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95


class JudgeSettings(Settings):
    """A base for the params of a workload that is judged by `stages`: a class of its own derives from it.

    docs/workflow.md has each setting. Without ``blend``, the averaged weights (``ema_epoch_*.pt``) are averaged, or the
    newest checkpoint is taken. Without ``backtest.horizon``, positions are held for the main horizon of the models.
    """

    blend: Annotated[str, Field(min_length=1)] | None = None
    start_date: datetime.date | None = None
    end_date: datetime.date | None = None
    k_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    on_yellow: Literal["continue", "stop"] = "continue"
    backtest: BacktestSettings = BacktestSettings()
    quality: QualitySettings = QualitySettings()
    gate: GateSettings = GateSettings()
    decision: DecisionSettings = DecisionSettings()

    @property
    def scored_horizons(self) -> tuple[int, ...]:
        """The horizons that the models score, the main one first; empty if not known before. A derived class says."""
        return ()

    @field_validator("end_date")
    @classmethod
    def _dates_are_in_order(cls, end_date: datetime.date | None, info: ValidationInfo) -> datetime.date | None:
        start_date = info.data.get("start_date")
        if start_date and end_date and start_date > end_date:
            raise ValueError(f"must not be before start_date, {start_date}")
        return end_date

    @model_validator(mode="after")
    def _horizons_are_scored(self) -> JudgeSettings:
        known = self.scored_horizons
        if known and "horizon" not in self.backtest.model_fields_set:
            object.__setattr__(self, "backtest", self.backtest.model_copy(update={"horizon": known[0]}))
        for name, horizon in (("backtest.horizon", self.backtest.horizon), ("decision.metric", self.metric_horizon)):
            if known and horizon not in known:
                scored = ", ".join(map(str, sorted(set(known))))
                raise ConfigError(
                    f"params.{name} asks for the horizon {horizon}, and the models score {scored}.",
                    rule="positions are held, and metrics are taken, at a horizon that the models are trained for.",
                    remedy=f"--set params.backtest.horizon={known[0]}, or train that horizon too",
                )
        return self

    @property
    def period(self) -> str:
        """The dates that are judged, in words."""
        return f"from {self.start_date or 'the first'} to {self.end_date or 'the last'}"

    @property
    def metric(self) -> str:
        return self.decision.metric or f"h{self.backtest.horizon}_rank_ic"

    @property
    def metric_horizon(self) -> int:
        return int(self.metric[1:].partition("_")[0])
