"""The scores of a fold as a table, and how good they are by date."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memfit.data import Panel
from memfit_workloads.finance._days import evaluate_days
from memfit_workloads.finance._inference import summarize
from memfit_workloads.finance._matrices import read_scores
from memfit_workloads.finance._provenance import Indices
from memfit_workloads.finance.panels import DataParams


def table_of(
    panel: Panel, data: DataParams, date: Indices, asset: Indices, scores: npt.NDArray[np.float32]
) -> pa.Table:
    """A row for each date and asset: ``date``, ``code``, and by horizon ``score_h<h>`` and ``target_h<h>``.

    ``target_h1`` is always there. A target that is not known is null.

    Args:
        panel: The panel that was scored.
        data: Names the horizons.
        date: (n,) positions in ``panel.dates``.
        asset: (n,) positions in ``panel.assets``.
        scores: (n, num_horizons).
    """
    columns: dict[str, Any] = {
        "date": pa.array(panel.dates[date], pa.date32()),
        "code": pa.array(panel.assets).take(pa.array(asset)),
    }
    for number, horizon in enumerate(data.horizons):
        columns[f"score_h{horizon}"] = pa.array(scores[:, number])
    for horizon in data.labels:
        known = panel.target(data.target(horizon))[date, asset]
        columns[f"target_h{horizon}"] = pa.array(known, from_pandas=True)
    return pa.table(columns)


def fold_metrics(scores: pa.Table, data: DataParams, k_ratio: float) -> dict[str, float]:
    """The figures of a fold: the rank IC of the main horizon, then rank IC and lift by horizon."""
    days = days_of(scores, data, k_ratio)
    main = summarize(days.column(f"h{data.main_horizon}_rank_ic").to_numpy())
    found = {"rank_ic": main.mean, "rank_ic_sd": main.sd, "icir": main.icir, "num_dates": main.num_dates}
    for horizon in data.horizons:
        for name in ("rank_ic", "delta_p_at_k_pos"):
            found[f"h{horizon}_{name}"] = mean_of(days, f"h{horizon}_{name}")
    return found


def days_of(scores: pa.Table, data: DataParams, k_ratio: float) -> pa.Table:
    """The table of days of the horizons that were trained."""
    return evaluate_days(read_scores(scores), horizons=data.horizons, k_ratio=k_ratio)


def mean_of(days: pa.Table, name: str) -> float:
    """The mean over the dates on which the figure is defined."""
    return summarize(days.column(name).to_numpy()).mean
