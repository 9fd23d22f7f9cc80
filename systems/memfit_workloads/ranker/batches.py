"""Batches of several dates: each date is a list of assets, with its targets, its weight and its pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memfit.data import DateBatch, Loader, Panel
from memfit_workloads.finance.batches import GroupedDates, targets_of, windows_of
from memfit_workloads.finance.panels import sectors_of
from memfit_workloads.ranker.params import RankerParams


@dataclass(frozen=True, eq=False)
class ListBatch:
    """The lists of a step. Rows of one list stand together, so a batch can be cut between lists.

    Attributes:
        windows, targets: (n, lookback, num_features); (n, num_horizons), NaN where not known.
        lists, weights: (n,) the number of the row's list within the batch; of its date, 1 for the newest of the batch.
        sectors: (n,) the number of the row's sector, -1 if not known.
        partners: (n, num_pairs) the assets, as places within the list, that the row is compared with; never its own.
        dates, assets: (n,) positions in ``panel.dates`` and ``panel.assets``.
    """

    #: What a network may name as inputs.
    INPUTS: ClassVar = ("windows", "lists", "sectors")
    windows: NDArray[np.float32]
    targets: NDArray[np.float32]
    lists: NDArray[np.int64]
    sectors: NDArray[np.int64]
    weights: NDArray[np.float32]
    partners: NDArray[np.int64]
    dates: NDArray[np.int32]
    assets: NDArray[np.int32]


class ListBatches(GroupedDates[ListBatch]):
    """Batches of ``train.dates_per_batch`` lists; without a ``seed`` each list by itself, in the order of the dates.

    What batch k of an epoch holds depends on (panel, dates, parameters, seed, epoch, k) alone, so a training resumes
    bit-exact in mid-epoch, at the loader's position. A list has every asset with a whole window; its targets need not
    be known.
    """

    def __init__(
        self, panel: Panel, dates: NDArray[np.int64], params: RankerParams, *, seed: int | None, num_workers: int = 0
    ) -> None:
        self.panel, self._sectors = panel, sectors_of(panel, params.data).astype(np.int64)
        self._data = params.data
        self._size = 1 if seed is None else params.train.dates_per_batch
        self._tau_days = params.train.tau_days
        self._num_pairs = params.train.pairs_per_asset if params.train.loss.ranknet and seed is not None else 0
        self._seed = seed or 0  # without one no pairs are drawn
        loader = Loader(
            panel,
            dates,
            lookback=params.data.lookback,
            target=None,
            shuffle=seed,
            min_assets=2,
            num_workers=num_workers,
        )
        super().__init__(loader)

    def borders(self) -> Sequence[int]:
        """Return at which lists of the epoch batches begin, and where the last one ends."""
        return [*range(0, len(self._loader), self._size), len(self._loader)]

    def longest(self) -> ListBatch:
        """As many of the longest list as a batch has: no batch takes more memory."""
        return self.repeated(self._size)

    def joined(self, group: Sequence[DateBatch]) -> ListBatch:
        """Return the lists of several dates as one batch."""
        sizes = [len(one.asset_indices) for one in group]
        dates, assets = [one.date_index for one in group], np.concatenate([one.asset_indices for one in group])
        return ListBatch(
            windows=windows_of(group),
            targets=targets_of(self.panel, self._data, group),
            lists=np.repeat(np.arange(len(group)), sizes),
            sectors=self._sectors[assets],
            weights=np.repeat(self._date_weights(dates), sizes),
            partners=np.concatenate([self._partners(one) for one in group]),
            dates=np.repeat(np.array(dates, np.int32), sizes),
            assets=assets.astype(np.int32),
        )

    def _date_weights(self, dates: Sequence[int]) -> NDArray[np.float32]:
        """``exp(-age / tau_days)`` of each date, its age in calendar days counted from the newest of the batch.

        Only the ratios within a batch matter, since a step divides by the weights' sum.
        """
        if self._tau_days is None:
            return np.ones(len(dates), np.float32)
        days = self.panel.dates[list(dates)]
        age = (days.max() - days).astype(np.float64)
        weights: NDArray[np.float32] = np.exp(-age / self._tau_days).astype(np.float32)
        return weights

    def _partners(self, one: DateBatch) -> NDArray[np.int64]:
        """(n, num_pairs): draws among the other assets."""
        size = len(one.asset_indices)
        key = [self._seed, self.state_dict()["epoch"], one.date_index, int(one.asset_indices[0])]
        steps = np.random.default_rng(key).integers(1, size, (size, self._num_pairs))
        partners: NDArray[np.int64] = (np.arange(size)[:, None] + steps) % size
        return partners
