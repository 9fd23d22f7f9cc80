"""The ranker as a workload of memfit: where its data come from, how its dates are split, how a fold is trained.

Importing this module loads no torch, for the processes that only prepare a run. ``RANKER`` is what a config names as
``target: memfit_workloads.ranker.job:RANKER``.

The rank IC that a fold reports is that of its *last* epoch's model on dates that it neither trained on nor overlapped.
The best epoch is marked too (``best_model.pt``), but it is chosen on those same dates: its rank IC there is too good.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field, model_validator

from memfit import config
from memfit.data import DateBatch, DateBatches, Loader, Panel
from memfit.errors import DataError
from memfit.evaluation import ICSummary, rank_ic_by_date, summarize_ic
from memfit.pipeline import FoldContext, FoldWorkload, PrepareContext, Prepared
from memfit.rundir import mark_phase
from memfit.splits import PurgedKFold
from memfit_workloads.ranker import market, prices

if TYPE_CHECKING:
    import torch

    from memfit_workloads.ranker.model import PatchRanker

_OF_SOURCE = {
    "prices": ("start", "end"),
    "generated": ("num_dates", "num_assets", "num_features", "information_coefficient", "turnover", "market_seed"),
    "parquet": ("path", "features", "target"),
}
_SCALE_DATES = 256


class DataParams(config.Settings):
    """Where the panel comes from. A setting of a source that is not chosen is refused, unless it has its default."""

    source: Literal["prices", "generated", "parquet"] = "prices"
    lookback: int = Field(40, ge=1, description="dates in a window")
    horizon: int = Field(5, ge=1, description="dates that a target looks ahead")
    start: datetime.date = Field(datetime.date(2012, 1, 1), description="prices: the first date")
    end: datetime.date = Field(datetime.date(2022, 12, 28), description="prices: the last date")
    num_dates: int = Field(1000, ge=2, description="generated: dates")
    num_assets: int = Field(100, ge=2, description="generated: assets")
    num_features: int = Field(8, ge=1, description="generated: features")
    information_coefficient: float = Field(0.1, gt=-1, lt=1, description="generated: the rank IC that is planted")
    turnover: float = Field(0.1, ge=0, le=1, description="generated: share of assets not listed all the time")
    market_seed: int = Field(0, ge=0, description="generated: seed of the market")
    path: Path | None = Field(None, description="parquet: a file, or a folder of files")
    features: tuple[str, ...] = Field((), description="parquet: columns to learn from, known on their date")
    target: str | None = Field(None, description="parquet: the column to rank by, known horizon dates later")

    @model_validator(mode="after")
    def _settings_fit_the_source(self) -> DataParams:
        for source, names in _OF_SOURCE.items():
            for name in names if source != self.source else ():
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} belongs to source: {source}, and source is {self.source}")
        if self.source == "parquet" and not (self.path and self.features and self.target):
            raise ValueError("source: parquet needs path, features and target")
        return self


class SplitParams(config.Settings):
    """How dates become folds; labels are purged by ``data.horizon`` in any case."""

    n_splits: int = Field(5, ge=2, description="folds")
    embargo_size: int = Field(5, ge=0, description="dates dropped after a test block's labels have ended")
    lookback_size: int = Field(0, ge=0, description="dates of feature overlap to drop as well")


class ModelParams(config.Settings):
    """The encoder."""

    patch_size: int = Field(10, ge=1, description="dates in a patch")
    width: int = Field(32, ge=1, description="width of a token")
    num_layers: int = Field(1, ge=1, description="encoder layers")
    num_heads: int = Field(4, ge=1, description="attention heads")
    dropout: float = Field(0.1, ge=0, lt=1, description="share of activations dropped in training")


class TrainParams(config.Settings):
    """The training of a fold."""

    num_epochs: int = Field(2, ge=1, description="epochs")
    learning_rate: float = Field(1e-3, gt=0, description="step size of AdamW")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay of AdamW")
    max_grad_norm: float = Field(1.0, gt=0, description="longer gradients are cut to this norm")
    max_assets: int | None = Field(
        None, ge=3, description="dates with more assets are cut into lists of at most so many"
    )


class RankerParams(config.Settings):
    """The ``params`` section of a ranker's config.

    Example:
        >>> RankerParams(data={"source": "generated", "num_assets": 50}).data.num_assets
        50
    """

    data: DataParams = DataParams()
    splits: SplitParams = SplitParams()
    model: ModelParams = ModelParams()
    train: TrainParams = TrainParams()

    @model_validator(mode="after")
    def _sizes_divide(self) -> RankerParams:
        for whole, part in (("data.lookback", "model.patch_size"), ("model.width", "model.num_heads")):
            sizes = [getattr(getattr(self, section), key) for section, key in (whole.split("."), part.split("."))]
            if sizes[0] % sizes[1]:
                raise ValueError(f"{whole} ({sizes[0]}) must be a multiple of {part} ({sizes[1]})")
        return self


def fingerprint(params: RankerParams) -> str:
    """A digest of the data that the parameters name: of their content where they are files."""
    data = params.data
    if data.source == "prices":
        return prices.prices_fingerprint()
    if data.source == "generated":
        return config.fingerprint(asdict(_market(data)))
    assert data.path is not None  # checked by DataParams
    files = sorted(path for path in data.path.iterdir() if path.is_file()) if data.path.is_dir() else [data.path]
    if not files or not files[0].exists():
        raise DataError(
            f"{data.path} is not there, or an empty folder.",
            rule="params.data.path names a Parquet file or a folder of them.",
            remedy="--set params.data.path=<a file>",
        )
    digest = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def prepare(context: PrepareContext, params: RankerParams) -> Prepared:
    """The panel and its purged folds.

    The dates that are split are those on which at least two assets have a whole window and a known target.
    """
    mark_phase("load")
    source, features, target = _source(context.panels_dir, params.data)
    mark_phase("build")
    panel = Panel.build(source, context.panels_dir, features=features, targets=[target])
    usable = np.flatnonzero(_eligible(panel, params.data.lookback).sum(axis=1) >= 2)
    splitter = PurgedKFold(
        params.splits.n_splits,
        purged_size=params.data.horizon,
        embargo_size=params.splits.embargo_size,
        lookback_size=params.splits.lookback_size,
    )
    folds = splitter.split(panel.dates[usable])
    return Prepared(panel, [(usable[train], usable[test]) for train, test in folds])


def _eligible(panel: Panel, lookback: int) -> npt.NDArray[np.bool_]:
    """(num_dates, num_assets): a whole window, and a known target."""
    known: npt.NDArray[np.bool_] = (panel.history >= lookback) & np.isfinite(panel.targets[:, :, 0])
    return known


def _source(panels_dir: Path, data: DataParams) -> tuple[pa.Table | Path, list[str], str]:
    """The rows to build the panel from, the columns of features, and the column of the target."""
    if data.source == "parquet":
        assert data.path is not None and data.target is not None  # checked by DataParams
        return data.path, list(data.features), data.target
    if data.source == "prices":
        return prices.daily_features(data.start, data.end, data.horizon), list(prices.FEATURES), "target"
    settings = _market(data)
    path = panels_dir / "markets" / f"{config.fingerprint(asdict(settings))[:16]}.parquet"
    if not path.exists() or market.read_market(path) != settings:
        path.parent.mkdir(parents=True, exist_ok=True)
        market.write_market(path, settings)
    return path, list(settings.feature_names), "target"


def _market(data: DataParams) -> market.Market:
    names = {"seed" if name == "market_seed" else name: name for name in ("horizon", *_OF_SOURCE["generated"])}
    return market.Market(**{name: getattr(data, ours) for name, ours in names.items()})


def train_fold(context: FoldContext, params: RankerParams) -> dict[str, float]:
    """Train one fold, score its test dates with the last epoch's model, and save the scores as a table.

    Returns:
        ``rank_ic`` (mean over the test dates), ``rank_ic_sd``, ``icir``, ``num_dates`` (that they are taken over) and
        ``train_loss`` (of the last epoch).
    """
    mark_phase("load")
    from memfit.training import WHOLE, Trainer

    target = context.panel.target_names[0]
    test = DateBatches(context.panel, context.test_dates, lookback=params.data.lookback, target=target)
    model, optimizer = _model(context, params)
    trainer = Trainer(
        model,
        loss=_loss,
        optimizer=optimizer,
        checkpoint_dir=context.checkpoint_dir,
        seed=context.seed,
        max_grad_norm=params.train.max_grad_norm,
        split=WHOLE,
    )
    result = trainer.fit(
        _train_batches(context, params),
        test,
        num_epochs=params.train.num_epochs,
        evaluate=lambda model, batches: {"rank_ic": _rank_ic(_score(model, batches)).mean},
        best_metric="rank_ic",
        direction="maximize",
    )
    mark_phase("validate")
    scores = _score(model, test)
    context.save_table("scores", scores)
    summary = _rank_ic(scores)
    return {
        "rank_ic": summary.mean,
        "rank_ic_sd": summary.sd,
        "icir": summary.icir,
        "num_dates": summary.num_dates,
        "train_loss": result.history[-1].train_loss,
    }


def _train_batches(context: FoldContext, params: RankerParams) -> DateBatches:
    return DateBatches(
        context.panel,
        context.train_dates,
        lookback=params.data.lookback,
        target=context.panel.target_names[0],
        shuffle_seed=context.seed,
        max_assets=params.train.max_assets,
    )


def _model(context: FoldContext, params: RankerParams) -> tuple[PatchRanker, torch.optim.Optimizer]:
    import torch

    from memfit.training import seed_everything
    from memfit_workloads.ranker.model import PatchRanker

    panel, settings = context.panel, params.train
    seed_everything(context.seed)
    model = PatchRanker(
        num_features=len(panel.feature_names), lookback=params.data.lookback, **params.model.model_dump()
    )
    model.scale.set(*map(torch.from_numpy, _scale(panel, context.train_dates)))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
    )
    return model, optimizer


def loader(context: FoldContext, params: RankerParams, num_workers: int) -> Loader:
    """The batches that a fold trains on, made by so many worker processes."""
    return Loader(
        context.panel,
        context.train_dates,
        lookback=params.data.lookback,
        target=context.panel.target_names[0],
        shuffle=context.seed,
        max_assets=params.train.max_assets,
        num_workers=num_workers,
    )


def training_step(context: FoldContext, params: RankerParams) -> Callable[[DateBatch], None]:
    """One step of a fold's training on a batch, without what a trainer does around it."""
    import torch

    model, optimizer = _model(context, params)
    model.train()

    def step(batch: DateBatch) -> None:
        total, weight = _loss(model, batch)
        optimizer.zero_grad()
        torch.autograd.backward(total / weight)
        torch.nn.utils.clip_grad_norm_(model.parameters(), params.train.max_grad_norm)
        optimizer.step()

    return step


def _loss(model: PatchRanker, batch: DateBatch) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    from memfit_workloads.ranker.loss import listnet_loss

    return listnet_loss(model(torch.from_numpy(batch.windows)), torch.from_numpy(batch.targets))


def _score(model: PatchRanker, batches: DateBatches) -> pa.Table:
    """A row for each date and asset: ``date``, ``code``, ``score``, ``target``. The model is in evaluation mode."""
    import torch

    panel = batches.panel
    dates, codes, scores, targets = [], [], [], []
    with torch.no_grad():
        for batch in batches:
            dates.append(np.repeat(panel.dates[batch.date_index], len(batch.asset_indices)))
            codes.append(batch.asset_indices)
            scores.append(model(torch.from_numpy(batch.windows)).numpy())
            targets.append(batch.targets)
    names = pa.array(panel.assets).take(pa.array(np.concatenate(codes)))
    columns = [pa.array(np.concatenate(parts)) for parts in (dates, scores, targets)]
    return pa.table({"date": columns[0], "code": names, "score": columns[1], "target": columns[2]})


def _rank_ic(scores: pa.Table) -> ICSummary:
    columns = [scores.column(name).to_numpy() for name in ("date", "score", "target")]
    return summarize_ic(rank_ic_by_date(*columns)[1])


def _scale(panel: Panel, dates: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The features' means and standard deviations, (num_features,) each, over evenly spaced training dates."""
    chosen = dates[np.linspace(0, len(dates) - 1, min(len(dates), _SCALE_DATES)).astype(np.int64)]
    count, total, square = (np.zeros(len(panel.feature_names)) for _ in range(3))
    for date in chosen:
        values = panel.values[date].astype(np.float64)
        known = np.isfinite(values)
        values = np.where(known, values, 0.0)
        count, total, square = count + known.sum(0), total + values.sum(0), square + (values**2).sum(0)
    mean = total / np.maximum(count, 1)
    sd = np.sqrt(np.maximum(square / np.maximum(count, 1) - mean**2, 0.0))
    return mean.astype(np.float32), np.where(sd > 1e-6 * np.abs(mean), sd, 1.0).astype(np.float32)


RANKER = FoldWorkload(
    params=RankerParams,
    fingerprint=fingerprint,
    prepare=prepare,
    train_fold=train_fold,
    loader=loader,
    step=training_step,
)
