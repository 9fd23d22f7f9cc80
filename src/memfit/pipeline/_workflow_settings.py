"""The section ``workflow`` of a config: how the folds of a run are judged."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from memfit.config import Settings
from memfit.evaluation import BacktestSettings, GateSettings, QualitySettings

_METRIC = r"^h[1-9]\d*_(rank_ic|p_at_k_pos|delta_p_at_k_pos|ndcg_at_k|spread|hit_rate)$"


class DecisionSettings(Settings):
    """What the scores are compared with, and when the difference counts.

    Attributes:
        baseline: ``random``, or a folder or table of the days of another run.
        metric: A column of the table of days, such as ``h5_spread``; None for the rank IC at the backtest's horizon.
        level: The level of the interval; a test counts at one minus it, corrected for the comparisons tried.
    """

    baseline: str = "random"
    metric: Annotated[str, Field(pattern=_METRIC)] | None = None
    level: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95


class WorkflowSettings(Settings):
    """How the folds of a run are judged.

    Attributes:
        blend: Which checkpoints of a fold are averaged: a pattern in its folder. Name late ones.
        k_ratio: The share of a date's assets that precision at k and NDCG look at.
        start_date: The first date that is judged, included; None for all.
        end_date: The last one, included.
        on_yellow: Whether a yellow gate lets the other folds train.
        sweep: What a gate that is not green tries on the first fold: settings below ``params``, each with its values,
            such as ``{train: {tau_days: [60, 250]}}``. Shares held (``k_ratio``) are always tried, for they need no
            training.
        backtest: How scores become positions, and what trading costs; its horizon is the one that counts.
        quality: Bounds of the data checks.
        gate: When a backtest is green, yellow or red.
        decision: What the scores are compared with.

    Example:
        >>> WorkflowSettings().backtest.horizon
        5
    """

    blend: Annotated[str, Field(min_length=1)] = "ema_epoch_*.pt"
    k_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    start_date: datetime.date | None = None
    end_date: datetime.date | None = None
    on_yellow: Literal["continue", "stop"] = "continue"
    sweep: dict[str, Any] = Field(default_factory=dict)
    backtest: BacktestSettings = BacktestSettings()
    quality: QualitySettings = QualitySettings()
    gate: GateSettings = GateSettings()
    decision: DecisionSettings = DecisionSettings()

    @field_validator("end_date")
    @classmethod
    def _dates_are_in_order(cls, end_date: datetime.date | None, info: ValidationInfo) -> datetime.date | None:
        start_date = info.data.get("start_date")
        if start_date and end_date and start_date > end_date:
            raise ValueError(f"must not be before start_date, {start_date}")
        return end_date

    @model_validator(mode="after")
    def _sweep_ends_in_lists(self) -> WorkflowSettings:
        for name, values in self.swept.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"sweep: {name} needs a list of values, and has {values!r}")
        return self

    @property
    def swept(self) -> dict[str, list[Any]]:
        """The values to try, by the dotted name below ``params``.

        >>> WorkflowSettings(sweep={"train": {"tau_days": [60, 250]}}).swept
        {'train.tau_days': [60, 250]}
        """
        return dict(_leaves(self.sweep, ""))

    @property
    def metric_horizon(self) -> int:
        """How many dates the labels of that metric span."""
        return int(self.metric[1:].partition("_")[0])

    @property
    def metric(self) -> str:
        """The metric that decides."""
        return self.decision.metric or f"h{self.backtest.horizon}_rank_ic"

    @property
    def metric_beside(self) -> str:
        """The metric that is shown beside it: the spread, or the rank IC where the spread decides."""
        name = "rank_ic" if self.metric.endswith("_spread") else "spread"
        return f"h{self.metric_horizon}_{name}"


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
