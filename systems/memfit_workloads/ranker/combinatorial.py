"""Combinatorial purged folds over dates, by skfolio's ``CombinatorialPurgedCV``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memfit.errors import SplitError

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class CombinatorialPurged:
    """Folds that each test another choice of ``n_test_blocks`` of ``n_blocks`` blocks of dates, and train on the rest.

    Dates are purged and embargoed around every test block as by `memfit.splits.PurgedKFold`. A *path* (`test_paths`)
    tests each date once. Paths share dates and models, so they are no independent samples.

    Source: M. López de Prado, Advances in Financial Machine Learning (2018), chapter 12.

    Example:
        >>> train, test = list(CombinatorialPurged(4, 2, purged_size=1).split(range(16)))[1]  # blocks 1 and 3 of 4
        >>> train.tolist(), test.tolist()
        ([5, 6, 13, 14, 15], [0, 1, 2, 3, 8, 9, 10, 11])
    """

    n_blocks: int
    n_test_blocks: int
    purged_size: int
    embargo_size: int = 0

    def split(self, X: ArrayLike, y: Any = None, groups: Any = None) -> Iterator[tuple[Indices, Indices]]:
        """Return the numbers of dates to train and to test on, fold by fold; ``X`` has each date once, in order."""
        return ((np.sort(train), np.sort(np.concatenate(tests))) for train, tests in self._folds(np.size(X))[0])

    def test_paths(self, X: ArrayLike) -> NDArray[np.int64]:
        """Return the path of each date in each fold, shape (num_folds, num_dates), or -1 where a fold does not test it.

        The cells of one path hold each date once.
        """
        folds, path_ids = self._folds(np.size(X))
        paths = np.full((len(folds), np.size(X)), -1, np.int64)
        for path, (_, tests), ids in zip(paths, folds, path_ids, strict=True):
            for dates, number in zip(tests, ids, strict=True):
                path[dates] = number
        return paths

    def _folds(self, num_dates: int) -> tuple[list[Any], Any]:
        """Return the dates to train on and those of each test block, by fold; and the path of each test block."""
        from skfolio.model_selection import CombinatorialPurgedCV  # slow to load

        try:
            cut = CombinatorialPurgedCV(self.n_blocks, self.n_test_blocks, self.purged_size, self.embargo_size)
            return list(cut.split(np.zeros((num_dates, 1)))), cut.get_path_ids()
        except ValueError as error:
            raise SplitError(
                f"{self.n_blocks} blocks, {self.n_test_blocks} of them tested, over {num_dates} dates cannot be had: "
                f"{error}.",
                rule=f"each block is longer than purged_size ({self.purged_size}) + embargo_size ({self.embargo_size}) "
                "+ 1 dates, and there are at most 100,000 folds.",
                remedy="give more dates or fewer blocks, or shorten the labels or embargo_size",
            ) from error
