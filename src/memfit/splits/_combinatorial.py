"""Combinatorial purged splits: several blocks of dates are tested at once, so that each date is tested several times.

The splits are those of skfolio's ``CombinatorialPurgedCV``, over the distinct dates; here they get the protocol of the
other splitters, rows with dates, and errors that say what to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memfit.errors import MissingExtraError, SplitError
from memfit.splits._purged import Indices, PurgedKFold, _check_size, _Rows


@final
@dataclass(frozen=True, eq=False)
class CombinatorialPurged:
    """Folds that each test another choice of ``n_test_blocks`` of ``n_blocks`` blocks of dates, and train on the rest.

    Around every test block the dates are purged and embargoed as by `PurgedKFold` with a fixed reach: training labels
    that meet a test label's interval are dropped on both sides, then ``embargo_size`` dates after the end of the test
    labels. Each date is tested in ``C(n_blocks - 1, n_test_blocks - 1)`` folds; put together so that each date comes
    once, these are so many *paths* (`test_paths`): series of out-of-fold scores over all dates, whose spread shows how
    much a result owes to the choice of training dates. The paths share dates and models, so they are no independent
    samples.

    Args:
        n_blocks: Blocks of contiguous dates; the last one also has the remainder.
        n_test_blocks: How many of them a fold tests.
        purged_size: Number of dates that each label reaches ahead.
        embargo_size: Number of distinct dates dropped after a test block's labels have ended.

    Raises:
        SplitError: If a size is no whole number, or out of range.
        MissingExtraError: If skfolio is not installed.

    Source:
        M. López de Prado, Advances in Financial Machine Learning (2018), chapter 12.

    Example:
        >>> splitter = CombinatorialPurged(4, 2, purged_size=1)
        >>> folds = list(splitter.split(range(16)))
        >>> len(folds)
        6
        >>> folds[1][0].tolist(), folds[1][1].tolist()  # blocks 1 and 3 of 4 are tested
        ([5, 6, 13, 14, 15], [0, 1, 2, 3, 8, 9, 10, 11])
    """

    n_blocks: int = 6
    n_test_blocks: int = 2
    purged_size: int = field(kw_only=True)
    embargo_size: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        for name, least in (("n_blocks", 3), ("n_test_blocks", 2), ("purged_size", 0), ("embargo_size", 0)):
            _check_size(name, getattr(self, name), least)
        if self.n_test_blocks >= self.n_blocks:
            raise SplitError(
                f"{self.n_test_blocks} of {self.n_blocks} blocks are tested: nothing is left to train on.",
                rule="n_test_blocks is less than n_blocks.",
                remedy=f"pass n_test_blocks <= {self.n_blocks - 1}, or more blocks",
            )

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        """The number of folds, ``C(n_blocks, n_test_blocks)``; the arguments are ignored, as in scikit-learn."""
        return math.comb(self.n_blocks, self.n_test_blocks)

    def split(self, X: Any, y: Any = None, groups: ArrayLike | None = None) -> Iterator[tuple[Indices, Indices]]:
        """The row numbers to train and to test on, fold by fold; the choices of blocks come in their natural order.

        Args:
            X: Gives the number of rows. A 1-D ``datetime64`` array is taken as the dates when ``groups`` is None.
            y: Ignored.
            groups: The date of each row, as for `PurgedKFold.split`.

        Returns:
            An iterator of pairs (train, test) of ascending int64 row numbers; ``test`` holds all tested blocks.

        Raises:
            SplitError: If the blocks are not longer than purge and embargo, or dates cannot be used.
        """
        rows = self._rows(X, groups)
        return iter(
            [
                (np.flatnonzero(np.isin(rows.date, train)), np.flatnonzero(np.isin(rows.date, np.concatenate(tests))))
                for train, tests in self._date_folds(rows.num_dates)
            ]
        )

    def test_paths(self, X: Any, y: Any = None, groups: ArrayLike | None = None) -> NDArray[np.int64]:
        """To which path the test of a row in a fold belongs; the arguments are those of `split`.

        Returns:
            Shape (n_splits, num_rows), int64: the number of the path, from 0, or -1 where a fold does not test a row.
            The cells of one path hold each row once.

        Raises:
            SplitError: As `split`.

        Example:
            >>> paths = CombinatorialPurged(3, 2, purged_size=0).test_paths(range(9))
            >>> paths[:, [0, 3, 6]].tolist()  # a row of each block
            [[0, 0, -1], [1, -1, 0], [-1, 1, 1]]
        """
        rows = self._rows(X, groups)
        paths = np.full((self.get_n_splits(), len(rows.date)), -1, np.int64)
        folds = zip(paths, self._date_folds(rows.num_dates), self._skfolio().get_path_ids(), strict=True)
        for path, (_, tests), ids in folds:
            for dates, number in zip(tests, ids, strict=True):
                path[np.isin(rows.date, dates)] = number
        return paths

    def _rows(self, X: Any, groups: ArrayLike | None) -> _Rows:
        return PurgedKFold(self.n_blocks, purged_size=self.purged_size)._rows(X, groups)

    def _date_folds(self, num_dates: int) -> list[tuple[Indices, list[Indices]]]:
        """Per fold the numbers of the dates to train on, and of those of each tested block."""
        try:
            return list(self._skfolio().split(np.zeros((num_dates, 1))))
        except ValueError as error:
            raise SplitError(
                f"{self.n_blocks} blocks, {self.n_test_blocks} of them tested, over {num_dates} dates cannot be had: "
                f"{error}.",
                rule=f"each block is longer than purged_size ({self.purged_size}) + embargo_size ({self.embargo_size}) "
                "+ 1 dates, and there are at most 100,000 folds.",
                remedy="give more dates or fewer blocks, or shorten the labels or embargo_size",
            ) from error

    def _skfolio(self) -> Any:
        try:
            from skfolio.model_selection import CombinatorialPurgedCV
        except ModuleNotFoundError as error:
            raise MissingExtraError.of("skfolio", "ranker", "CombinatorialPurged") from error
        return CombinatorialPurgedCV(self.n_blocks, self.n_test_blocks, self.purged_size, self.embargo_size)
