"""The peers of ``benchmarks/loaders.py``: PyTorch's DataLoader over pandas, polars, HF datasets and LitData.

Each gives the same batches: of a date the windows of the assets that have one and their targets. What is eligible, and
in which row of the source a date and asset lie, is worked out beforehand and handed to all of them (``Index``), so that
what is compared is the way of the bytes. Each takes the rows of a window with one slice, which its library does best,
and gathers the assets with one NumPy index. The data that all of them and memfit read is written here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Batch = dict[str, Any]

NUM_FEATURES, LOOKBACK, DATES_PER_GROUP = 112, 20, 16
FEATURES = [f"f{number}" for number in range(NUM_FEATURES)]


def write_data(folder: Path, num_dates: int, num_assets: int, listed_all: bool = False) -> dict[str, Any]:
    """The source as a Parquet file sorted by date and code, its panel, and the peers' index.

    With ``listed_all`` every asset has every date.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from memfit.data import Panel

    rng = np.random.default_rng(0)
    first = np.where(rng.random(num_assets) < 0.1, rng.integers(0, num_dates, num_assets), 0)
    last = np.where(rng.random(num_assets) < 0.1, rng.integers(0, num_dates, num_assets), num_dates)
    last = np.where(last > first, last, num_dates)
    is_listed = (np.arange(num_dates)[:, None] >= first) & (np.arange(num_dates)[:, None] < last) | listed_all
    names = [*FEATURES, "ret"]
    schema = pa.schema([("date", pa.date32()), ("code", pa.string()), *((name, pa.float32()) for name in names)])
    codes = np.array([f"A{code:05d}" for code in range(num_assets)])
    source = folder / "source.parquet"
    with pq.ParquetWriter(source, schema, use_dictionary=["code"], compression="snappy") as writer:
        for start in range(0, num_dates, DATES_PER_GROUP):
            day, asset = np.nonzero(is_listed[start : start + DATES_PER_GROUP])
            columns = rng.random((len(names), len(day)), np.float32)
            days = pa.array((np.datetime64("2000-01-01") + start + day).astype("datetime64[D]"))
            arrays = [days, pa.array(codes[asset]), *map(pa.array, columns)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=len(day))
    panel = Panel.build(source, folder / "panels", features=FEATURES, targets=["ret"])
    assert panel.shape == (num_dates, num_assets, NUM_FEATURES)
    row_of = np.where(is_listed, np.cumsum(is_listed).reshape(is_listed.shape) - 1, -1)
    first_row = np.concatenate([[0], np.cumsum(is_listed.sum(axis=1))])
    is_eligible = (panel.history >= LOOKBACK) & np.isfinite(panel.target("ret"))
    np.savez(folder / "index.npz", row_of=row_of, first_row=first_row, is_eligible=is_eligible, lookback=LOOKBACK,
             features=np.array(FEATURES))  # fmt: skip
    order = np.random.default_rng(1).permutation(np.arange(LOOKBACK - 1, num_dates))
    np.save(folder / "dates.npy", order)
    return {}


@dataclass(frozen=True)
class Index:
    """Where the rows lie.

    Attributes:
        row_of: (num_dates, num_assets) int64: the row in the source, sorted by date and asset; -1 where there is none.
        first_row: (num_dates + 1,) int64: the first row of each date.
        is_eligible: (num_dates, num_assets) bool.
        lookback: Dates per window.
        features: The columns.
    """

    row_of: npt.NDArray[np.int64]
    first_row: npt.NDArray[np.int64]
    is_eligible: npt.NDArray[np.bool_]
    lookback: int
    features: Sequence[str]

    @classmethod
    def load(cls, folder: Path) -> Index:
        with np.load(folder / "index.npz", allow_pickle=False) as found:
            return cls(
                found["row_of"],
                found["first_row"],
                found["is_eligible"],
                int(found["lookback"]),
                tuple(found["features"].tolist()),
            )

    def rows(self, date: int) -> tuple[int, int, npt.NDArray[np.int64]]:
        """The slice of rows that holds the windows of a date, and (n, lookback) places within it."""
        first = date + 1 - self.lookback
        start, stop = int(self.first_row[first]), int(self.first_row[date + 1])
        places = self.row_of[first : date + 1, self.is_eligible[date]].T - start
        return start, stop, places


def _batch(values: npt.NDArray[np.float32], targets: npt.NDArray[np.float32], places: Any) -> Batch:
    """Tensors from the rows of a slice: (rows, num_features) and (rows,)."""
    import torch

    return {"windows": torch.from_numpy(values[places]), "targets": torch.from_numpy(targets[places[:, -1]])}


class _Days:
    """A map-style data set of dates that opens its data when it is first used, in the process that uses it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = Index.load(folder)
        self._opened: Any = None

    def __len__(self) -> int:
        return len(self.index.first_row) - 1

    def open(self) -> Any:
        raise NotImplementedError

    def rows(self, data: Any, start: int, stop: int, date: int) -> tuple[Any, Any]:
        raise NotImplementedError

    def __getitem__(self, date: int) -> Batch:
        if self._opened is None:
            self._opened = self.open()
        start, stop, places = self.index.rows(date)
        values, targets = self.rows(self._opened, start, stop, date)
        return _batch(values, targets, places)


class PandasDays(_Days):
    """All of the Parquet file in a frame, in memory."""

    def open(self) -> Any:
        import pandas as pd

        frame = pd.read_parquet(self.folder / "source.parquet", columns=[*self.index.features, "ret"])
        targets = frame.pop("ret").to_numpy()
        return frame, targets

    def rows(self, data: Any, start: int, stop: int, date: int) -> tuple[Any, Any]:
        frame, targets = data
        return frame.iloc[start:stop].to_numpy(), targets[start:stop]


class PolarsDays(_Days):
    """All of the Parquet file in a frame, in memory."""

    def open(self) -> Any:
        import polars as pl

        frame = pl.read_parquet(self.folder / "source.parquet", columns=[*self.index.features, "ret"])
        return frame.drop("ret"), frame["ret"].to_numpy()

    def rows(self, data: Any, start: int, stop: int, date: int) -> tuple[Any, Any]:
        frame, targets = data
        return frame.slice(start, stop - start).to_numpy(), targets[start:stop]


class DatasetsDays(_Days):
    """HF datasets in torch format: an Arrow file, mapped; the features of a row are one fixed-size list."""

    def open(self) -> Any:
        import datasets

        datasets.disable_progress_bars()
        return datasets.load_from_disk(str(self.folder / "datasets")).with_format("torch")

    def rows(self, data: Any, start: int, stop: int, date: int) -> tuple[Any, Any]:
        found = data[start:stop]
        return found["features"].numpy(), found["ret"].numpy()


class LitDays(_Days):
    """LitData's chunks: an item is the rows of a date."""

    def open(self) -> Any:
        from litdata import StreamingDataset

        return StreamingDataset(str(self.folder / "litdata"), shuffle=False)

    def rows(self, data: Any, start: int, stop: int, date: int) -> tuple[Any, Any]:
        days = [data[day] for day in range(date + 1 - self.index.lookback, date + 1)]
        rows = np.concatenate([np.asarray(day["rows"]) for day in days])
        return rows[:, :-1], rows[:, -1]


def write_datasets(folder: Path) -> None:
    """The Arrow files of HF datasets."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    datasets.disable_progress_bars()
    index = Index.load(folder)
    source = pq.ParquetFile(folder / "source.parquet")
    width = len(index.features)

    def rows() -> Iterator[pa.Table]:
        for group in range(source.num_row_groups):
            table = source.read_row_group(group, columns=[*index.features, "ret"])
            values = np.stack([table[name].to_numpy() for name in index.features], axis=1)
            lists = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), width)
            yield pa.table({"features": lists, "ret": table["ret"].combine_chunks()})

    datasets.Dataset(pa.concat_tables(rows())).save_to_disk(str(folder / "datasets"), max_shard_size="512MB")


def _lit_days(item: tuple[str, int]) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    folder, group = item
    names = [*Index.load(Path(folder)).features, "ret"]
    table = pq.ParquetFile(Path(folder, "source.parquet")).read_row_group(group, columns=["date", *names])
    dates = table["date"].to_numpy()
    rows = np.stack([table[name].to_numpy() for name in names], axis=1)
    for date in np.unique(dates):
        yield {"rows": rows[dates == date]}


def write_litdata(folder: Path) -> None:
    """LitData's chunks, an item a date."""
    import litdata
    import pyarrow.parquet as pq

    groups = pq.ParquetFile(folder / "source.parquet").num_row_groups
    items = [(str(folder), group) for group in range(groups)]
    litdata.optimize(_lit_days, items, str(folder / "litdata"), chunk_bytes="64MB", num_workers=1, verbose=False)


#: By name: the package, the data set of dates, what writes its files, and how workers are started (polars: never fork).
PEERS: dict[str, tuple[str, type[_Days], Callable[[Path], None] | None, str]] = {
    "pandas": ("pandas", PandasDays, None, "fork"),
    "polars": ("polars", PolarsDays, None, "forkserver"),
    "HF datasets": ("datasets", DatasetsDays, write_datasets, "fork"),
    "LitData": ("litdata", LitDays, write_litdata, "fork"),
}


def make_peer(name: str, folder: Path, dates: Sequence[int], num_workers: int) -> Any:
    """PyTorch's DataLoader over a peer, one date a batch, in the order given."""
    from torch.utils.data import DataLoader

    _, days, _, method = PEERS[name]
    more = {"multiprocessing_context": method, "persistent_workers": True} if num_workers else {}
    return DataLoader(days(folder), batch_size=None, sampler=list(dates), num_workers=num_workers, **more)  # type: ignore[arg-type]


class Memcpy:
    """np.copyto of a batch's bytes out of a panel's values, place after place, by some threads at once."""

    def __init__(self, values: npt.NDArray[np.float32], num_threads: int) -> None:
        self.source = values.reshape(-1)
        self.target = np.zeros(min(values.shape[1] * LOOKBACK * NUM_FEATURES, self.source.size), self.source.dtype)
        self.parts = np.array_split(self.target, num_threads)
        self.threads = ThreadPoolExecutor(num_threads)
        self.at = 0

    def __iter__(self) -> Iterator[npt.NDArray[np.float32]]:
        while True:
            size = self.target.size
            self.at = 0 if self.at + 2 * size > self.source.size else self.at + size
            sources = np.array_split(self.source[self.at : self.at + size], len(self.parts))
            if len(self.parts) == 1:
                np.copyto(self.target, sources[0])
            else:
                list(self.threads.map(np.copyto, self.parts, sources))
            yield self.target
