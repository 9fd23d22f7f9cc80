"""Combinatorial purged splits over dates, by skfolio's ``CombinatorialPurgedCV``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memfit.errors import MissingExtraError, SplitError, check_counts
from memfit.splits._purged import Indices, PurgedKFold


@final
@dataclass(frozen=True, eq=False)
class CombinatorialPurged:
    """Folds that each test another choice of ``n_test_blocks`` of ``n_blocks`` blocks of dates, and train on the rest.

    Dates are purged and embargoed around every test block as by `PurgedKFold`. A *path* (`test_paths`) tests each date
    once. Paths share dates and models, so they are no independent samples.

    Args:
        n_blocks: Blocks of contiguous dates; the last one also has the remainder.
        n_test_blocks: How many of them a fold tests.
        purged_size: Number of dates that each label reaches ahead.
        embargo_size: Number of distinct dates dropped after a test block's labels have ended.

    Raises:
        SplitError: If a size is no whole number, or out of range.

    Source:
        M. López de Prado, Advances in Financial Machine Learning (2018), chapter 12.

    Example:
        >>> splitter = CombinatorialPurged(4, 2, purged_size=1)
        >>> train, test = list(splitter.split(range(16)))[1]  # blocks 1 and 3 of 4 are tested
        >>> train.tolist(), test.tolist()
        ([5, 6, 13, 14, 15], [0, 1, 2, 3, 8, 9, 10, 11])
        >>> CombinatorialPurged(3, 2, purged_size=0).test_paths(range(9))[:, [0, 3, 6]].tolist()  # a row of each block
        [[0, 0, -1], [1, -1, 0], [-1, 1, 1]]
    """

    n_blocks: int = 6
    n_test_blocks: int = 2
    purged_size: int = field(kw_only=True)
    embargo_size: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_counts(SplitError, 3, n_blocks=self.n_blocks)
        check_counts(SplitError, 2, n_test_blocks=self.n_test_blocks)
        check_counts(SplitError, 0, purged_size=self.purged_size, embargo_size=self.embargo_size)
        if self.n_test_blocks >= self.n_blocks:
            raise SplitError(
                f"{self.n_test_blocks} of {self.n_blocks} blocks are tested: nothing is left to train on.",
                rule="n_test_blocks is less than n_blocks.",
                remedy=f"pass n_test_blocks <= {self.n_blocks - 1}, or more blocks",
            )

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        """Return the number of folds; the arguments are ignored, as in scikit-learn."""
        return math.comb(self.n_blocks, self.n_test_blocks)

    def split(self, X: Any, y: Any = None, groups: ArrayLike | None = None) -> Iterator[tuple[Indices, Indices]]:
        """Return ascending row numbers to train and to test on, fold by fold; arguments as for `PurgedKFold.split`.

        Raises:
            SplitError: If the blocks are not longer than purge and embargo, or dates cannot be used.
            MissingExtraError: If skfolio is not installed.
        """
        date, folds, _ = self._date_folds(X, groups)
        dates = ((train, np.concatenate(tests)) for train, tests in folds)
        return ((np.flatnonzero(np.isin(date, a)), np.flatnonzero(np.isin(date, b))) for a, b in dates)

    def test_paths(self, X: Any, y: Any = None, groups: ArrayLike | None = None) -> NDArray[np.int64]:
        """Return the path of each row in each fold, shape (n_splits, num_rows), or -1 where a fold does not test it.

        The cells of one path hold each row once. Arguments and errors as for `split`.
        """
        date, folds, path_ids = self._date_folds(X, groups)
        paths = np.full((self.get_n_splits(), len(date)), -1, np.int64)
        for path, (_, tests), ids in zip(paths, folds, path_ids, strict=True):
            for dates, number in zip(tests, ids, strict=True):
                path[np.isin(date, dates)] = number
        return paths

    def _date_folds(self, X: Any, groups: ArrayLike | None) -> tuple[Indices, list[Any], Any]:
        """Return each row's date number; by fold, the dates to train on and those of each test block; the path ids."""
        try:
            from skfolio.model_selection import CombinatorialPurgedCV
        except ModuleNotFoundError as error:
            raise MissingExtraError.of("skfolio", "ranker", "CombinatorialPurged") from error
        rows = PurgedKFold(self.n_blocks, purged_size=self.purged_size).rows(X, groups)
        try:
            cut = CombinatorialPurgedCV(self.n_blocks, self.n_test_blocks, self.purged_size, self.embargo_size)
            return rows.date, list(cut.split(np.zeros((rows.num_dates, 1)))), cut.get_path_ids()
        except ValueError as error:
            raise SplitError(
                f"{self.n_blocks} blocks, {self.n_test_blocks} of them tested, over {rows.num_dates} dates cannot be "
                f"had: {error}.",
                rule=f"each block is longer than purged_size ({self.purged_size}) + embargo_size ({self.embargo_size}) "
                "+ 1 dates, and there are at most 100,000 folds.",
                remedy="give more dates or fewer blocks, or shorten the labels or embargo_size",
            ) from error
