"""Walk-forward splits: a fold is trained on the past of its test block alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memfit.errors import SplitError
from memfit.splits._purged import Indices, PurgedKFold, SplitSummary, _check_size, _Rows, sizes_table

# What a row is in one fold.
_TRAIN, _TEST, _PURGED, _EMBARGOED, _UNUSED = range(5)


@final
@dataclass(frozen=True, eq=False)
class WalkForward:
    """Folds in the order of time, each trained on dates before its test block and on no label that reaches into it.

    The distinct dates are cut into ``n_splits + 1`` contiguous blocks whose sizes differ by at most one. The first is
    trained on only; each of the others is tested once. From the rows dated before a test block these are dropped:

    * *purged*: the label's interval, from the row's date to its end, both included, reaches the first test date.
    * *embargoed*: the label ends on one of the ``embargo_size`` dates before the test block: so many dates lie free
      between the last label that was learned and the first test date.
    * with ``train_size``, all dates but the last so many of those that are left: a window that rolls in place of one
      that expands.

    Rows dated after a test block are not used in its fold. What a fold learns, a trader of its first test date knew:
    so an estimate by these folds is that of a strategy that was trained anew now and then. It rests on less data in
    the early folds than `PurgedKFold`, and it tests no date of the first block.

    Args:
        n_splits: Number of folds.
        label_end: For each row the date on which its label is known, as for `PurgedKFold`. This or ``purged_size``.
        purged_size: Number of dates that each label reaches ahead.
        embargo_size: Number of distinct dates left free before the test block.
        train_size: The most distinct dates to train on; None takes all that there are.

    Raises:
        SplitError: If a size is no whole number or too small, or not exactly one of ``label_end`` and ``purged_size``
            is given.

    Source:
        R. Pardo, The Evaluation and Optimization of Trading Strategies (2nd edition, 2008), chapter 11, for walking
        forward; the purge is that of M. López de Prado, Advances in Financial Machine Learning (2018), chapter 7.

    Example:
        >>> for train, test in WalkForward(3, purged_size=2, embargo_size=1).split(range(16)):
        ...     print(train, test)
        [0] [4 5 6 7]
        [0 1 2 3 4] [ 8  9 10 11]
        [0 1 2 3 4 5 6 7 8] [12 13 14 15]
        >>> [train.tolist() for train, _ in WalkForward(3, purged_size=0, train_size=2).split(range(16))]
        [[2, 3], [6, 7], [10, 11]]
    """

    n_splits: int = 5
    label_end: ArrayLike | None = field(default=None, kw_only=True)
    purged_size: int | None = field(default=None, kw_only=True)
    embargo_size: int = field(default=0, kw_only=True)
    train_size: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_size("n_splits", self.n_splits, 1)
        _check_size("embargo_size", self.embargo_size, 0)
        if self.train_size is not None:
            _check_size("train_size", self.train_size, 1)
        self._cut()

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        """The number of folds; the arguments are ignored, as in scikit-learn."""
        return self.n_splits

    def split(self, X: Any, y: Any = None, groups: ArrayLike | None = None) -> Iterator[tuple[Indices, Indices]]:
        """The row numbers to train and to test on, fold by fold in the order of time.

        All folds are checked at the call, before the first is handed out.

        Args:
            X: Gives the number of rows. A 1-D ``datetime64`` array is taken as the dates when ``groups`` is None.
            y: Ignored.
            groups: The date of each row, as for `PurgedKFold.split`.

        Returns:
            An iterator of pairs (train, test) of ascending int64 row numbers; all training dates are before all test
            dates.

        Raises:
            SplitError: If a fold has nothing to train on, there are fewer dates than blocks, or dates and label ends
                cannot be used.
        """
        rows = self._rows(X, groups)
        summaries = self._describe(rows)
        empty = [summary.fold for summary in summaries if summary.num_train_rows == 0]
        if empty:
            purge = "label_end" if self.purged_size is None else f"purged_size={self.purged_size}"
            raise SplitError(
                f"nothing is left to train on in {len(empty)} of {self.n_splits} folds (fold "
                f"{', '.join(map(str, empty))}):\n{sizes_table(summaries)}",
                rule=f"purged by {purge}, embargo_size={self.embargo_size}, over {rows.num_dates} dates; a fold is "
                "trained on dates before its test block.",
                remedy="give more dates or fewer folds, or shorten the labels or embargo_size",
            )
        return self._folds(rows)

    def describe(self, X: Any, y: Any = None, groups: ArrayLike | None = None) -> list[SplitSummary]:
        """What each fold keeps, purges and embargoes, also when a fold would be empty; arguments as for `split`.

        Rows that a fold does not look at, those after its test block and those that ``train_size`` leaves behind, are
        counted nowhere.
        """
        return self._describe(self._rows(X, groups))

    def _cut(self) -> PurgedKFold:
        """What cuts the dates into blocks, the first one included, and checks the labels."""
        return PurgedKFold(self.n_splits + 1, label_end=self.label_end, purged_size=self.purged_size)

    def _rows(self, X: Any, groups: ArrayLike | None) -> _Rows:
        return self._cut()._rows(X, groups)

    def _roles(self, rows: _Rows) -> Iterator[NDArray[np.int8]]:
        """What each row is, fold by fold; shape (num_rows,)."""
        blocks = list(self._cut()._blocks(rows))[1:]
        for first, last in blocks:
            roles = np.full(len(rows.date), _UNUSED, np.int8)
            past = rows.date < first
            roles[past] = _TRAIN
            roles[past & (rows.label_end >= first - self.embargo_size)] = _EMBARGOED
            roles[past & (rows.label_end >= first)] = _PURGED
            if self.train_size is not None:
                left = np.unique(rows.date[roles == _TRAIN])[: -self.train_size]
                roles[(roles == _TRAIN) & np.isin(rows.date, left)] = _UNUSED
            roles[(rows.date >= first) & (rows.date <= last)] = _TEST
            yield roles

    def _folds(self, rows: _Rows) -> Iterator[tuple[Indices, Indices]]:
        for roles in self._roles(rows):
            yield np.flatnonzero(roles == _TRAIN), np.flatnonzero(roles == _TEST)

    def _describe(self, rows: _Rows) -> list[SplitSummary]:
        summaries = []
        for fold, roles in enumerate(self._roles(rows), start=1):
            count = np.bincount(roles, minlength=5).tolist()
            summaries.append(
                SplitSummary(
                    fold=fold,
                    num_train_rows=count[_TRAIN],
                    num_train_dates=len(np.unique(rows.date[roles == _TRAIN])),
                    num_test_rows=count[_TEST],
                    num_test_dates=len(np.unique(rows.date[roles == _TEST])),
                    num_purged_before=count[_PURGED],
                    num_purged_after=0,
                    num_embargoed=count[_EMBARGOED],
                    num_lookback=0,
                )
            )
        return summaries
