"""Batches of whole days: their assets' windows, targets, graph and weights."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from memfit.data import DateBatch, DateBatches, Loader
from memfit.pipeline import Output
from memfit_workloads.finance.batches import GroupedDates, targets_of, windows_of
from memfit_workloads.forecaster.data import day_weights
from memfit_workloads.forecaster.params import ForecasterParams

Scale = tuple[NDArray[np.float32], NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class DayBatch:
    """The assets of several whole days, one day after the other.

    Shapes: N rows, L dates of look-back, F features, H horizons, K neighbours.

    Attributes:
        windows: (N, L, F) standardised; all values are known.
        targets: (N, H); NaN where not known.
        days: (N,) the number of the row's day within the batch, ascending.
        neighbours: (N, K) places within the day of the most correlated assets; -1 is none.
        sectors, weights: (N,) the number of the sector, -1 if not known; how much the row's day counts, above 0.
        dates, assets: (N,) positions in ``panel.dates`` and ``panel.assets``.
    """

    #: What a network may name as inputs; batch is a whole `DayBatch`.
    INPUTS: ClassVar = ("windows", "days", "neighbours", "sectors", "batch")
    windows: NDArray[np.float32]
    targets: NDArray[np.float32]
    days: NDArray[np.int64]
    neighbours: NDArray[np.int64]
    sectors: NDArray[np.int64]
    weights: NDArray[np.float32]
    dates: NDArray[np.int64]
    assets: NDArray[np.int64]


class DayBatches(GroupedDates[DayBatch]):
    """Batches of as many whole days as have at most ``train.batch_size`` rows; a larger day is a batch by itself.

    What batch k of an epoch holds depends on (panel, dates, parameters, seed, epoch, k) alone. So a training resumes
    bit-exact in mid-epoch. A copy in another process maps the same files. ``scale`` has means and standard deviations
    of the features, (F,) each; without a ``seed`` the days keep their order.
    """

    def __init__(
        self,
        prepared: Output,
        dates: NDArray[np.int64],
        params: ForecasterParams,
        scale: Scale,
        *,
        seed: int | None,
        num_workers: int = 0,
    ) -> None:
        self.panel, self._size = prepared.panel(), params.train.batch_size
        self._data = params.data
        self._neighbours = prepared.path("neighbours")
        known = prepared.arrays("days")
        sectors = np.array(known["sectors"], np.int64)
        self._sectors = sectors if params.graph.sectors else np.full_like(sectors, -1)
        self._weights = day_weights(np.array(known["volatility"]), params.train.regime_strength)
        windows: dict[str, Any] = {"lookback": params.data.lookback, "target": None, "min_assets": 2}
        self._days = DateBatches(self.panel, dates, shuffle_seed=seed, **windows)
        loader = Loader(
            self.panel,
            dates,
            shuffle=seed,
            num_workers=num_workers,
            transform=functools.partial(_standardize, *scale),
            **windows,
        )
        self._borders: dict[int, list[int]] = {}
        super().__init__(loader)

    def borders(self) -> Sequence[int]:
        """Return at which days batches begin, and where the last one ends."""
        epoch = self.state_dict()["epoch"]
        if epoch not in self._borders:
            self._days.set_epoch(epoch)
            borders, rows = [0], 0
            for place in range(len(self._days)):
                size = len(self._days.cells(place))
                if rows and rows + size > self._size:
                    borders.append(place)
                    rows = 0
                rows += size
            self._borders = {epoch: [*borders, len(self._days)]}
        return self._borders[epoch]

    def longest(self) -> DayBatch:
        """As many of the largest day as a batch has: no batch takes more memory."""
        return self.repeated(max(1, self._size // len(self._loader.longest().asset_indices)))

    def joined(self, group: Sequence[DateBatch]) -> DayBatch:
        """Return several days as one batch."""
        sizes = [len(one.asset_indices) for one in group]
        dates = np.repeat([one.date_index for one in group], sizes)
        assets = np.concatenate([one.asset_indices for one in group])
        return DayBatch(
            windows=windows_of(group),
            targets=targets_of(self.panel, self._data, group),
            days=np.repeat(np.arange(len(group)), sizes),
            neighbours=self._places(group),
            sectors=self._sectors[assets],
            weights=self._weights[dates],
            dates=dates,
            assets=assets,
        )

    def _places(self, group: Sequence[DateBatch]) -> NDArray[np.int64]:
        """(N, K): the neighbours of each row as places among the assets of its day."""
        found = np.load(self._neighbours, mmap_mode="r")  # mapped anew, so that a copy of this holds no array
        parts = []
        for one in group:
            place = np.full(len(self.panel.assets) + 1, -1, np.int64)  # the last is where -1 points
            place[one.asset_indices] = np.arange(len(one.asset_indices))
            parts.append(place[found[one.date_index][one.asset_indices]])
        return np.concatenate(parts)


def _standardize(mean: NDArray[np.float32], sd: NDArray[np.float32], windows: NDArray[np.float32], *_: object) -> None:
    np.subtract(windows, mean, out=windows)
    np.divide(windows, sd, out=windows)
