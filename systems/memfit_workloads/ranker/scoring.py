"""A ranker's scores as a table, and how good they are by date."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memfit.data import Loader, Panel
from memfit_workloads import own
from memfit_workloads.finance import evaluate_days, read_scores, summarize
from memfit_workloads.finance.batches import scores_of
from memfit_workloads.finance.panels import DataParams, sectors_of
from memfit_workloads.ranker.batches import INPUTS
from memfit_workloads.ranker.params import RankerParams

if TYPE_CHECKING:
    import torch


def lists_to_score(panel: Panel, dates: npt.NDArray[np.int64], params: RankerParams) -> Loader:
    """Every asset with a whole window, date by date in their order; its targets need not be known."""
    return Loader(panel, dates, lookback=params.data.lookback, target=None, min_assets=2)


def score_table(model: torch.nn.Module, panel: Panel, batches: Iterable[Any], params: RankerParams) -> pa.Table:
    """The scores of a model in evaluation mode, as `table_of` gives them.

    ``batches`` are what `lists_to_score` gives, or other `memfit.data.DateBatch`.
    """
    import torch

    device, sectors = next(model.parameters()).device, sectors_of(panel, params.data).astype(np.int64)

    def rows(batch: Any) -> tuple[Any, Any, torch.Tensor]:
        assets = batch.asset_indices
        given = {"windows": batch.windows, "lists": np.zeros(len(assets), np.int64), "sectors": sectors[assets]}
        found = own.call(model, INPUTS, lambda name: torch.from_numpy(given[name]).to(device))
        return np.full(len(assets), batch.date_index), assets, found

    return scores_of(model, panel, params.data, batches, rows=rows, precision=params.train.precision)


def validation_metrics(scores: pa.Table, params: RankerParams) -> dict[str, float]:
    """What an epoch is judged by: ``valid_lift`` decides, ``valid_rank_ic`` is that of the main horizon.

    The lift is the share of the best-scored assets that rose, less that of all assets: a mean over the dates, then over
    the horizons by their weights.
    """
    days = _days(scores, params.data, params.train.k_ratio)
    lifts = np.array([_mean(days, f"h{horizon}_delta_p_at_k_pos") for horizon in params.data.horizons])
    weights = np.where(np.isnan(lifts), 0.0, params.horizon_weights)
    lift = float(np.nansum(weights * lifts) / weights.sum()) if weights.any() else float("nan")
    return {"valid_lift": lift, "valid_rank_ic": _mean(days, f"h{params.data.main_horizon}_rank_ic")}


def fold_metrics(scores: pa.Table, data: DataParams, k_ratio: float) -> dict[str, float]:
    """The figures of a fold: the rank IC of the main horizon, then rank IC and lift by horizon."""
    days = _days(scores, data, k_ratio)
    main = summarize(days.column(f"h{data.main_horizon}_rank_ic").to_numpy())
    found = {"rank_ic": main.mean, "rank_ic_sd": main.sd, "icir": main.icir, "num_dates": main.num_dates}
    for horizon in data.horizons:
        for name in ("rank_ic", "delta_p_at_k_pos"):
            found[f"h{horizon}_{name}"] = _mean(days, f"h{horizon}_{name}")
    return found


def _days(scores: pa.Table, data: DataParams, k_ratio: float) -> pa.Table:
    """The table of days of the horizons that were trained."""
    return evaluate_days(read_scores(scores), horizons=data.horizons, k_ratio=k_ratio)


def _mean(days: pa.Table, name: str) -> float:
    """The mean over the dates on which the figure is defined."""
    return summarize(days.column(name).to_numpy()).mean
