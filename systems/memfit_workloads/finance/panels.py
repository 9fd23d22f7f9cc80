"""The panel of a workload on stocks: where the rows come from, how dates are split, and the market to check.

This loads no torch, for the processes that only prepare a run.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from memfit import config
from memfit.data import Panel, Source, decode_dates
from memfit.errors import ConfigError, SplitError, UsageError, nearest
from memfit.pipeline import Context
from memfit.rundir import phase
from memfit_workloads.finance import generated, prices
from memfit_workloads.finance._provenance import Indices, save_folds

_OF_SOURCE = {
    "prices": ("start", "end"),
    "generated": ("num_dates", "num_assets", "num_features", "information_coefficient", "turnover", "market_seed"),
    "parquet": ("path", "columns", "features", "targets", "close", "volume", "sector"),
}
_SCALE_DATES = 256
Count = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(ge=0)]


def refuse_others(settings: config.Settings, choice: str, owned: Mapping[str, Iterable[str]]) -> None:
    """Refuse a setting that belongs to another choice than the one made."""
    chosen = getattr(settings, choice)
    for owner, names in owned.items():
        for name in names if owner != chosen else ():
            if getattr(settings, name) != type(settings).model_fields[name].default:
                raise ValueError(f"{name} belongs to {choice}: {owner}, and {choice} is {chosen}")


class ColumnParams(config.Settings):
    """The names of the columns that say which date and which asset a row is of."""

    date: str = Field("date", min_length=1, description="the column of dates")
    asset: str = Field("code", min_length=1, description="the column of asset codes")


class DataParams(config.Settings):
    """Where the panel comes from. A setting of a source that is not chosen is refused, unless it has its default."""

    source: Literal["prices", "generated", "parquet"] = "prices"
    lookback: int = Field(40, ge=1, description="dates in a window")
    horizons: tuple[Count, ...] = Field((1, 5, 10, 20), min_length=1, description="dates that targets look ahead")
    main_horizon: Count = Field(5, description="one of the horizons: that of the figures without a prefix")
    start: datetime.date = Field(datetime.date(2012, 1, 1), description="prices: the first date")
    end: datetime.date = Field(datetime.date(2022, 12, 28), description="prices: the last date")
    num_dates: int = Field(1000, ge=2, description="generated: dates")
    num_assets: int = Field(100, ge=2, description="generated: assets")
    num_features: int = Field(8, ge=1, description="generated: features")
    information_coefficient: float = Field(0.1, gt=-1, lt=1, description="generated: rank IC at the main horizon")
    turnover: float = Field(0.1, ge=0, le=1, description="generated: share of assets not listed all the time")
    market_seed: int = Field(0, ge=0, description="generated: seed of the market")
    path: Path | None = Field(None, description="parquet: a file, or a folder of files")
    columns: ColumnParams = Field(ColumnParams(), description="parquet: the columns of dates and of asset codes")
    features: tuple[str, ...] = Field((), description="parquet: columns to learn from, known on their date")
    targets: dict[Count, str] = Field({}, description="parquet: the column of the simple return over so many dates")
    close: str | None = Field(None, description="parquet: the column of closing prices, for the market's checks")
    volume: str | None = Field(None, description="parquet: the column of shares or money traded, to be checked as well")
    sector: str | None = Field(None, description="parquet: the column of sector names; prices have theirs")

    @model_validator(mode="after")
    def _settings_fit_the_source(self) -> DataParams:
        refuse_others(self, "source", _OF_SOURCE)
        if len(set(self.horizons)) < len(self.horizons):
            raise ValueError(f"horizons {list(self.horizons)} name one twice")
        if self.main_horizon not in self.horizons:
            raise ValueError(f"main_horizon {self.main_horizon} is none of the horizons {list(self.horizons)}")
        if self.source == "parquet":
            if not (self.path and self.features):
                raise ValueError("source: parquet needs path and features")
            if self.volume is not None and self.close is None:
                raise ValueError("volume needs close: volumes are checked with the closing prices")
            missing = [horizon for horizon in self.labels if horizon not in self.targets]
            if missing:
                raise ValueError(
                    f"source: parquet needs a column in targets for the horizons {missing}: each of horizons, and 1, "
                    "of which daily results are made"
                )
        return self

    @property
    def labels(self) -> tuple[int, ...]:
        """The horizons that have a target in the panel: those that are trained, and 1."""
        return tuple(sorted({1, *self.horizons}))

    def weigh(self, weights: Mapping[int, float]) -> tuple[float, ...]:
        """Return how much each of the horizons counts, in their order: 1 where ``weights`` does not name it."""
        unknown = sorted(weights.keys() - set(self.horizons))
        if unknown:
            raise ValueError(f"train.horizon_weights names {unknown}, and data.horizons are {list(self.horizons)}")
        found = tuple(weights.get(horizon, 1.0) for horizon in self.horizons)
        if not any(found):
            raise ValueError("train.horizon_weights gives every horizon the weight 0")
        return found

    def target(self, horizon: int) -> str:
        """The name of a horizon's target in the panel."""
        return self.targets[horizon] if self.source == "parquet" else f"target_h{horizon}"


class Splitter(Protocol):
    """What the three splitters have in common."""

    def split(self, X: Any, y: Any = None, groups: Any = None) -> Iterator[tuple[Indices, Indices]]: ...


@contextlib.contextmanager
def naming(settings: str) -> Iterator[None]:
    """Let an error name the settings that it is about, as ``--set`` takes them."""
    try:
        yield
    except UsageError as error:
        remedy = f"--set params.{settings}=...; {error.remedy}"
        raise ConfigError(error.what, rule=error.rule, remedy=remedy) from None


def check_data(data: DataParams) -> None:
    """Refuse data that no panel can be built from: a missing file or column, or a period or market that cannot be."""
    if data.source == "prices":
        with naming("data.start=... --set params.data.end"):
            prices.span_of(prices.read_prices(), data.start, data.end, data.labels)
    elif data.source == "generated":
        with naming("data"):
            market_of(data)
    else:
        columns = data.columns
        named = [("columns.date", columns.date), ("columns.asset", columns.asset)]
        named += [("features", name) for name in data.features]
        named += [(f"targets.{days}", name) for days, name in data.targets.items()]
        named += [(name, one) for name in ("close", "volume", "sector") if (one := getattr(data, name)) is not None]
        with naming("data.path"):
            schemas = list(_rows(data).schemas())
        for (path, schema), (setting, name) in itertools.product(schemas, named):
            if (number := len(schema.get_all_field_indices(name))) != 1:
                raise ConfigError(
                    f"{path} has {number} columns named '{name}'.",
                    rule=f"params.data.{setting} names a column that each file has once.",
                    remedy=f"{nearest(name, schema.names)}; --set params.data.{setting}=...",
                )


def possible_dates(data: DataParams) -> tuple[npt.NDArray[np.datetime64], int]:
    """Return the dates that may be split, of which a panel's usable ones are a part; and the most assets on a date."""
    after = max(data.horizons)  # no return beyond the last date is known here
    if data.source == "prices":
        known = prices.read_prices()
        first, stop = prices.span_of(known, data.start, data.end, data.labels)
        dates, num_assets = known.dates[first:stop], len(known.codes)
    elif data.source == "generated":
        dates, num_assets = np.busday_offset(generated.FIRST_DATE, np.arange(data.num_dates)), data.num_assets
    else:
        counts: Counter[Any] = Counter()
        for batch in _rows(data).batches([data.columns.date]):
            days, number = np.unique(decode_dates(batch.column(0), data.columns.date), return_counts=True)
            counts.update(dict(zip(days.tolist(), number.tolist(), strict=True)))
        dates, num_assets, after = np.array(sorted(counts), "datetime64[D]"), max(counts.values(), default=1), 0
    return dates[data.lookback - 1 : len(dates) - after], num_assets


def _rows(data: DataParams) -> Source:
    """Return the user's own files."""
    assert data.path is not None  # checked by DataParams
    return Source.of(data.path)


def check_cycles(cycles: int, num_steps: int, warmup_share: float, *, setting: str = "cycles", more: str = "") -> None:
    """Refuse cycles that do not fit the steps of a training.

    Raises:
        UsageError: If the first cycle would have less than 2 steps.
    """
    least, room = 2 * (2**cycles - 1), num_steps - int(warmup_share * num_steps)
    if cycles > 1 and room < least:
        raise UsageError(
            f"{cycles} cycles take {least} steps at least, and the run has {room} after its warm-up.",
            rule="the first cycle has 2 steps or more, each other is twice as long as the one before it.",
            remedy=f"{setting}={(room // 2 + 1).bit_length() - 1 or 1}, or {more or 'train for more steps'}",
        )


def check_folds(data: DataParams, cut: Splitter, valid_share: float) -> int:
    """Refuse folds that leave nothing to train on; return the most dates that the smallest fold is fitted on."""
    dates, _ = possible_dates(data)
    reach = 0 if data.source == "parquet" else max(data.labels)  # gaps of a file may lie where labels reach
    with naming("splits.n_splits"):
        return min(len(hold_out(train, valid_share, reach)[0]) for train, _ in cut.split(dates))


def fingerprint(data: DataParams) -> str:
    """A digest of the data that the settings name: of their content where they are files."""
    if data.source == "prices":
        return prices.prices_fingerprint()
    if data.source == "generated":
        return config.fingerprint(asdict(market_of(data)))
    return _rows(data).content_digest(date=data.columns.date, asset=data.columns.asset, numbers=data.features)


def prepare_folds(
    context: Context, data: DataParams, cut: Splitter, *, embargo_size: int, forward_only: bool = False
) -> tuple[Panel, dict[str, Any]]:
    """Save the panel and its folds as ``cut`` makes them of the usable dates; gives it, and what `save_folds` gives."""
    phase("load")
    source, features, checked = _source(context.panels_dir, data)
    phase("build")
    targets = list(dict.fromkeys([*(data.target(horizon) for horizon in data.labels), *checked]))
    index = (data.columns.date, data.columns.asset) if data.source == "parquet" else ("date", "code")
    panel = Panel.build(source, context.panels_dir, index=index, features=features, targets=targets)
    usable = usable_dates(panel, data)
    folds = [(usable[train], usable[test]) for train, test in cut.split(panel.dates[usable])]
    sizes: dict[str, Any] = {"label_dates": max(data.labels), "embargo_size": embargo_size}
    return panel, save_folds(context, panel, folds, forward_only=forward_only, **sizes)


def usable_dates(panel: Panel, data: DataParams) -> Indices:
    """The dates that are split: for each horizon, two assets or more have a whole window and a known target."""
    whole = panel.history >= data.lookback
    counts = [(whole & np.isfinite(panel.target(data.target(horizon)))).sum(axis=1) for horizon in data.horizons]
    return np.flatnonzero(np.min(counts, axis=0) >= 2)


def hold_out(dates: Indices, share: float, reach: int) -> tuple[Indices, Indices]:
    """The training dates to fit on, and the last ``share`` of them, to validate on; ascending positions.

    What is fitted ends before validation begins: a label that looks ``reach`` dates ahead does not reach into it.

    Raises:
        SplitError: If nothing is left to fit on.
    """
    if share == 0:
        return dates, dates[:0]
    valid = dates[-max(1, round(share * len(dates))) :]
    fit = dates[dates + reach < valid[0]]
    if len(fit) == 0:
        raise SplitError(
            f"of {len(dates)} training dates {len(valid)} are kept for validation, and none is left to fit on.",
            rule=f"dates are fitted whose labels of {reach} dates end before validation begins.",
            remedy="give more dates, fewer folds, shorter horizons, or --set params.train.valid_share=0",
        )
    return fit, valid


def check_market(data: DataParams) -> None:
    """Refuse a config without closing prices."""
    if data.source == "parquet" and data.close is None:
        raise ConfigError(
            "the config names no closing prices.",
            rule="a profit counts only on prices that were checked; source: parquet names their column.",
            remedy="--set params.data.close=<a column>; without a backtest: --until fold --skip health",
        )


def market(panel: Panel, params: Any) -> pa.Table:
    """The closing prices that the returns are made of: ``date``, ``code``, ``close``, where there is one.

    A Parquet file whose column of volumes was named adds ``volume``. ``params`` have `DataParams` as ``data``.
    """
    data: DataParams = params.data
    check_market(data)
    columns = {"close": panel.target("close" if data.close is None else data.close)}
    date, asset = np.nonzero(np.isfinite(columns["close"]))
    if data.volume is not None:
        columns["volume"] = panel.target(data.volume)
    return pa.table(
        {
            "date": pa.array(panel.dates[date], pa.date32()),
            "code": pa.array(panel.assets).take(pa.array(asset)),
            **{column: pa.array(values[date, asset].astype(np.float64)) for column, values in columns.items()},
        }
    )


def _source(panels_dir: Path, data: DataParams) -> tuple[pa.Table | Path, list[str], list[str]]:
    """The rows to build the panel from, the columns of features, and those that only the market's checks look at."""
    if data.source == "parquet":
        assert data.path is not None  # checked by DataParams
        return data.path, list(data.features), [name for name in (data.close, data.volume) if name is not None]
    if data.source == "prices":
        return prices.daily_features(data.start, data.end, data.labels), list(prices.FEATURES), ["close"]
    settings = market_of(data)
    path = panels_dir / "markets" / f"{config.fingerprint(asdict(settings))[:16]}.parquet"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        generated.write_market(path, settings)
    return path, list(settings.feature_names), ["close"]


def sectors_of(panel: Panel, data: DataParams) -> npt.NDArray[np.int16]:
    """Return the sector number of each asset, -1 where not known. In a file, the sector of its first date counts."""
    names: list[str | None] = [None] * len(panel.assets)
    if data.source == "prices":
        names = [prices.SECTORS.get(code) for code in panel.assets]
    elif data.sector is not None:
        assets, first = pa.array(panel.assets), np.full(len(panel.assets), np.datetime64("NaT"), "datetime64[D]")
        date, asset = data.columns.date, data.columns.asset
        for batch in _rows(data).batches([date, asset, data.sector]):
            place = pc.index_in(batch.column(asset).cast(pa.string()), assets).to_numpy(zero_copy_only=False)
            dates = decode_dates(batch.column(date), date)
            by_date = np.argsort(dates, kind="stable")
            seen, rows = np.unique(place[by_date], return_index=True)
            for at, row in zip(seen.tolist(), by_date[rows].tolist(), strict=True):
                if not dates[row] >= first[at]:  # NaT compares as false: the first that is seen
                    names[at], first[at] = batch.column(data.sector)[row].as_py(), dates[row]
    numbers = {name: number for number, name in enumerate(sorted({str(name) for name in names if name is not None}))}
    return np.array([-1 if name is None else numbers[str(name)] for name in names], np.int16)


def num_features(data: DataParams) -> int:
    """Return how many features an asset has."""
    return {"prices": len(prices.FEATURES), "generated": data.num_features}.get(data.source, len(data.features))


def market_of(data: DataParams) -> generated.Market:
    same = data.model_dump(include={"num_dates", "num_assets", "num_features", "information_coefficient", "turnover"})
    return generated.Market(**same, horizon=data.main_horizon, horizons=data.labels, seed=data.market_seed)


def scale_of(panel: Panel, dates: Indices) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
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
