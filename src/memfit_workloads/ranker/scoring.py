"""A ranker's scores as a table, and how good they are by date."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memfit.data import Loader, Panel
from memfit.evaluation import evaluate_days, read_scores, summarize
from memfit_workloads.ranker.params import RankerParams

if TYPE_CHECKING:
    from memfit_workloads.ranker.model import PatchRanker


def lists_to_score(panel: Panel, dates: npt.NDArray[np.int64], params: RankerParams) -> Loader:
    """Every asset with a whole window, date by date in their order; its targets need not be known."""
    return Loader(panel, dates, lookback=params.data.lookback, target=None, min_assets=2)


def score_table(model: PatchRanker, panel: Panel, batches: Iterable[Any], params: RankerParams) -> pa.Table:
    """A row for each date and asset: ``date``, ``code``, and by horizon ``score_h<h>`` and ``target_h<h>``.

    ``target_h1`` is always there. A target that is not known is null.

    Args:
        model: In evaluation mode.
        panel: The panel that the batches are of.
        batches: What `lists_to_score` gives, or other `memfit.data.DateBatch`.
        params: The horizons, and the precision of the scores.
    """
    import torch

    from memfit.training import autocast

    device = next(model.parameters()).device
    dates, assets, scores = [], [], []
    with torch.no_grad(), autocast(model, params.train.precision):
        for batch in batches:
            dates.append(np.full(len(batch.asset_indices), batch.date_index))
            assets.append(batch.asset_indices)
            scores.append(model(torch.from_numpy(batch.windows).to(device)).float().cpu().numpy())
    date, asset, score = (np.concatenate(parts) for parts in (dates, assets, scores))
    columns: dict[str, Any] = {
        "date": pa.array(panel.dates[date], pa.date32()),
        "code": pa.array(panel.assets).take(pa.array(asset)),
    }
    for number, horizon in enumerate(params.data.horizons):
        columns[f"score_h{horizon}"] = pa.array(score[:, number])
    for horizon in params.data.labels:
        known = panel.target(params.data.target(horizon))[date, asset]
        columns[f"target_h{horizon}"] = pa.array(known, from_pandas=True)
    return pa.table(columns)


def validation_metrics(scores: pa.Table, params: RankerParams) -> dict[str, float]:
    """What an epoch is judged by: ``valid_lift`` decides, ``valid_rank_ic`` is that of the main horizon.

    The lift is the share of the best-scored assets that rose, less that of all assets: a mean over the dates, then over
    the horizons by their weights.
    """
    days = _days(scores, params)
    lifts = np.array([_mean(days, f"h{horizon}_delta_p_at_k_pos") for horizon in params.data.horizons])
    weights = np.where(np.isnan(lifts), 0.0, params.horizon_weights)
    lift = float(np.nansum(weights * lifts) / weights.sum()) if weights.any() else float("nan")
    return {"valid_lift": lift, "valid_rank_ic": _mean(days, f"h{params.data.main_horizon}_rank_ic")}


def fold_metrics(scores: pa.Table, params: RankerParams) -> dict[str, float]:
    """The figures of a fold: the rank IC of the main horizon, then rank IC and lift by horizon."""
    days = _days(scores, params)
    main = summarize(days.column(f"h{params.data.main_horizon}_rank_ic").to_numpy())
    found = {"rank_ic": main.mean, "rank_ic_sd": main.sd, "icir": main.icir, "num_dates": main.num_dates}
    for horizon in params.data.horizons:
        for name in ("rank_ic", "delta_p_at_k_pos"):
            found[f"h{horizon}_{name}"] = _mean(days, f"h{horizon}_{name}")
    return found


def _days(scores: pa.Table, params: RankerParams) -> pa.Table:
    return evaluate_days(read_scores(scores), horizons=params.data.horizons, k_ratio=params.train.k_ratio)


def _mean(days: pa.Table, name: str) -> float:
    """The mean over the dates on which the figure is defined."""
    values = days.column(name).to_numpy()
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
