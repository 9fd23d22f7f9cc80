"""Purged folds for rows that carry a date, any number of rows (assets) per date.

A *date number* is a date's position among the sorted distinct dates. A label that ends between two dates moves back to
the earlier one, which is exact: no other label begins between the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memfit.checks import check_one_given
from memfit.errors import SplitError, check_counts

Indices = NDArray[np.int64]

_TRAIN, _TEST, _PURGED_BEFORE, _PURGED_AFTER, _EMBARGOED, _LOOKBACK, _UNUSED = range(7)


@dataclass(frozen=True)
class SplitSummary:
    """What one fold keeps and what it drops: each row that it looks at is counted exactly once.

    Attributes:
        fold: Number of the fold, from 1.
        num_train_rows, num_train_dates: Rows to train on, and their distinct dates.
        num_test_rows, num_test_dates: Rows to test on, and their distinct dates.
        num_purged_before: Rows dated before the test block whose label reaches into it.
        num_purged_after: Rows dated after the test block while one of its labels is still open.
        num_embargoed: Rows dropped by the embargo.
        num_lookback: Rows dropped only because feature windows overlap.
    """

    fold: int
    num_train_rows: int
    num_train_dates: int
    num_test_rows: int
    num_test_dates: int
    num_purged_before: int
    num_purged_after: int
    num_embargoed: int
    num_lookback: int


@dataclass(frozen=True, eq=False)
class _DateSplitter(ABC):
    """Take dates and labels, and describe folds; the base of the splitters of dated rows."""

    n_splits: int = 5
    label_end: ArrayLike | None = field(default=None, kw_only=True)
    purged_size: int | None = field(default=None, kw_only=True)
    embargo_size: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_counts(SplitError, 0, embargo_size=self.embargo_size, purged_size=self.purged_size)
        check_one_given(
            {"label_end": self.label_end, "purged_size": self.purged_size},
            none="neither label_end nor purged_size is given",
            rule="how long a label stays open decides what is purged; without it nothing would be.",
            remedy="pass purged_size=h when every label looks h dates ahead, or label_end=<one date per row>",
            error=SplitError,
        )

    @abstractmethod
    def _roles(self, date: Indices, end: Indices, blocks: Sequence[Indices]) -> Iterator[NDArray[np.int8]]:
        """Yield what each row is, fold by fold, shape (num_rows,): by the date numbers of the rows and of the ends of
        their labels, and by those of each block."""

    #: Blocks beside those that are tested.
    _num_more_blocks: ClassVar[int] = 0

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        """Return the number of folds; the arguments are ignored, as in scikit-learn."""
        return self.n_splits

    def split(self, X: Any, y: Any = None, groups: ArrayLike | None = None) -> Iterator[tuple[Indices, Indices]]:
        """Return the row numbers to train and to test on, fold by fold. The call checks all folds.

        Args:
            X: Gives the number of rows. A 1-D ``datetime64`` array is taken as the dates when ``groups`` is None.
            y: Ignored.
            groups: The date of each row, in any order: ``datetime64`` or a number. None: each row is a date of its own,
                numbered from 0; a pandas index must agree.

        Returns:
            An iterator of pairs (train, test) of ascending int64 row numbers.

        Raises:
            SplitError: If a fold has nothing to train on, there are fewer dates than blocks, or dates and label ends
                cannot be used (missing, before the row's date, of another kind or length).
        """
        rows = self._rows(X, groups)
        summaries = self._describe(*rows)
        empty = [summary.fold for summary in summaries if summary.num_train_rows == 0]
        if empty:
            sizes = {name: value for name, value in vars(self).items() if name.endswith("_size") and value}
            raise SplitError(
                f"nothing is left to train on in {len(empty)} of {self.n_splits} folds (fold "
                f"{', '.join(map(str, empty))}):\n{sizes_table(summaries)}",
                rule=f"{', '.join(f'{name}={value}' for name, value in sizes.items()) or 'labels that reach far'} over "
                f"{sum(map(len, rows[-1]))} dates.",
                remedy="give more dates or fewer folds, or shorten the labels, embargo_size or lookback_size",
            )
        return ((np.flatnonzero(one == _TRAIN), np.flatnonzero(one == _TEST)) for one in self._roles(*rows))

    def describe(self, X: Any, y: Any = None, groups: ArrayLike | None = None) -> list[SplitSummary]:
        """Return what each fold keeps and drops, also for an empty fold; the arguments are those of `split`."""
        return self._describe(*self._rows(X, groups))

    def _rows(self, X: Any, groups: ArrayLike | None) -> tuple[Indices, Indices, Sequence[Indices]]:
        """Return what `_roles` takes; arguments and errors as for `split`."""
        num_rows = int(X.shape[0]) if hasattr(X, "shape") else len(X)
        if groups is None and getattr(getattr(X, "dtype", None), "kind", "") == "M" and X.ndim == 1:
            groups = X
        if groups is None:
            _refuse_index(X)
        dates = np.arange(num_rows) if groups is None else _column("groups", groups, num_rows)
        distinct, number = np.unique(dates, return_inverse=True)
        num_blocks = self.n_splits + self._num_more_blocks
        if len(distinct) < num_blocks:
            raise SplitError(
                f"{len(distinct)} distinct dates cannot be cut into {num_blocks} test blocks.",
                rule="each block needs at least one date.",
                remedy="give more dates or a smaller n_splits",
            )
        blocks = np.array_split(np.arange(len(distinct)), num_blocks)  # a remainder goes one by one to the first ones
        if self.purged_size is not None:
            return number, number + self.purged_size, blocks
        return number, _end_numbers(dates, distinct, _column("label_end", self.label_end, num_rows)), blocks

    def _describe(self, date: Indices, end: Indices, blocks: Sequence[Indices]) -> list[SplitSummary]:
        summaries = []
        for fold, roles in enumerate(self._roles(date, end, blocks), start=1):
            count = np.bincount(roles, minlength=7).tolist()
            train, test = (len(np.unique(date[roles == role])) for role in (_TRAIN, _TEST))
            kept = count[_TRAIN], train, count[_TEST], test
            summaries.append(SplitSummary(fold, *kept, *count[_PURGED_BEFORE:_UNUSED]))
        return summaries


@final
@dataclass(frozen=True, eq=False)
class PurgedKFold(_DateSplitter):
    """K-fold over dates that trains on no row whose label overlaps a label of the test block in time.

    The distinct dates are cut into ``n_splits`` contiguous blocks of nearly equal size; each is tested once. A row's
    label is open from its date to its ``label_end``, both included. These other rows are dropped, in this order:

    * *purged*: the label's interval meets the test block's, from its first date to the *latest* end of its labels.
    * *embargoed*: the row lies on one of the ``embargo_size`` dates that follow the end of the test block's labels.
    * *look-back*, only with ``lookback_size``: a feature window of the row or of the test block reaches the other. Use
      it for features that were fitted over their window; other overlapping features leak nothing.

    Args:
        n_splits: Number of folds.
        label_end: For each row the date on which its label is known; it may lie between two dates or past the last one.
            Give this or ``purged_size``.
        purged_size: Dates that each label reaches ahead: h for a forward return over h days (h - 1 leaks).
        embargo_size: Distinct dates dropped after the test block's labels have ended.
        lookback_size: Dates that a feature window reaches back before its row: n - 1 for windows of n dates.

    Raises:
        SplitError: If a size is no whole number or negative, or not exactly one of ``label_end`` and ``purged_size``
            is given.

    Source:
        M. López de Prado, Advances in Financial Machine Learning (2018), chapter 7: purging, and an embargo that starts
        where the labels of the test block end.

    Example:
        >>> import numpy as np
        >>> days = np.arange("2024-01-01", "2024-01-11", dtype="datetime64[D]")
        >>> rows = np.repeat(days, 2)  # two assets a day
        >>> splitter = PurgedKFold(2, label_end=rows + np.tile([1, 3], 10))
        >>> [(len(train), len(test)) for train, test in splitter.split(rows)]
        [(4, 10), (6, 10)]
    """

    lookback_size: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_counts(SplitError, 2, n_splits=self.n_splits)
        check_counts(SplitError, 0, lookback_size=self.lookback_size)
        super().__post_init__()

    def _roles(self, date: Indices, end: Indices, blocks: Sequence[Indices]) -> Iterator[NDArray[np.int8]]:
        for first, last in ((block[0], block[-1]) for block in blocks):
            before, after = date < first, date > last
            test = ~(before | after)
            latest_end = int(end[test].max())
            # From the weakest rule to the strongest: each overwrites what the ones before it named.
            roles = np.full(len(date), _TRAIN, np.int8)
            roles[(date >= first - self.lookback_size) & (date <= last + self.lookback_size)] = _LOOKBACK
            roles[after & (date <= latest_end + self.embargo_size)] = _EMBARGOED
            roles[after & (date <= latest_end)] = _PURGED_AFTER
            roles[before & (end >= first)] = _PURGED_BEFORE
            roles[test] = _TEST
            yield roles


@final
@dataclass(frozen=True, eq=False)
class WalkForward(_DateSplitter):
    """Folds in the order of time, each trained on dates before its test block and on no label that reaches into it.

    The distinct dates are cut into ``n_splits + 1`` contiguous blocks of nearly equal size. The first is only trained
    on; each of the others is tested once. Rows after a test block are not used. Of the rows before it are dropped:

    * *purged*: the label's interval reaches the first test date.
    * *embargoed*: the label ends on one of the ``embargo_size`` dates before the test block.
    * with ``train_size``, all dates but the last so many of those that are left (a rolling window).

    Early folds train on less data than those of `PurgedKFold`.

    Args:
        n_splits, label_end, purged_size: As for `PurgedKFold`.
        embargo_size: Number of distinct dates left free before the test block.
        train_size: The most distinct dates to train on; None takes all that there are.

    Raises:
        SplitError: As `PurgedKFold`.

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

    train_size: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_counts(SplitError, 1, n_splits=self.n_splits, train_size=self.train_size)
        super().__post_init__()

    _num_more_blocks = 1

    def _roles(self, date: Indices, end: Indices, blocks: Sequence[Indices]) -> Iterator[NDArray[np.int8]]:
        for first, last in ((block[0], block[-1]) for block in blocks[1:]):
            past = date < first
            roles = np.where(past, _TRAIN, _UNUSED).astype(np.int8)
            roles[past & (end >= first - self.embargo_size)] = _EMBARGOED
            roles[past & (end >= first)] = _PURGED_BEFORE
            if self.train_size is not None:
                left = np.unique(date[roles == _TRAIN])[: -self.train_size]
                roles[(roles == _TRAIN) & np.isin(date, left)] = _UNUSED
            roles[(date >= first) & (date <= last)] = _TEST
            yield roles


def sizes_table(summaries: Sequence[SplitSummary]) -> str:
    """Return the folds as a plain table of row counts, one line a fold."""
    names = [one.name.removeprefix("num_").replace("_", " ") for one in fields(SplitSummary)]
    lines = [[*names[:-1], "look-back"], *([str(count) for count in astuple(summary)] for summary in summaries)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _column(name: str, values: ArrayLike | None, num_rows: int) -> NDArray[Any]:
    column = np.asarray(values)
    if column.shape != (num_rows,):
        raise SplitError(
            f"{name} has the shape {column.shape}, but there are {num_rows} rows.",
            rule=f"{name} holds one date per row, in the order of the rows.",
            remedy=f"pass {name} as a 1-D array of {num_rows} dates",
        )
    if column.dtype.kind not in "Miuf":
        raise SplitError(
            f"{name} is of the type {column.dtype}.",
            rule="a date is a datetime64 or a number.",
            remedy=f"convert it first: {name}=pandas.DatetimeIndex({name}).tz_localize(None)",
        )
    if column.dtype.kind == "M":  # one unit for all: numpy compares two in the finer one, where 9999 may wrap around
        column = column.astype("datetime64[us]")
    missing = ~np.isfinite(column)  # of dates, NaT
    if missing.any():
        raise SplitError(
            f"{int(missing.sum())} of {len(column)} rows have no date in {name} (first: row {int(missing.argmax())}).",
            rule="a row without a date lies in no test block, and an open label has no end to purge by.",
            remedy=f"drop those rows first, from X, groups and label_end alike: the rows where {name} is missing",
        )
    return column


def _refuse_index(X: Any) -> None:
    """Refuse rows without groups whose pandas index says that they are not one date each, in order."""
    index: Any = X if hasattr(X, "nlevels") else getattr(X, "index", None)
    if not hasattr(index, "nlevels"):
        return
    if index.nlevels > 1:
        what = f"the rows have an index of {index.nlevels} levels ({', '.join(map(str, index.names))})"
    elif not index.is_unique:
        what = "the index of the rows holds the same entry twice"
    elif type(index).__name__ in ("DatetimeIndex", "PeriodIndex") and not index.is_monotonic_increasing:
        what = "the dates in the index of the rows are not in order"
    else:
        return
    raise SplitError(
        f"{what}, and groups is missing.",
        rule="without groups each row is a date of its own, in order: rows of one date would be tested and learned.",
        remedy="pass groups=<date of each row>, such as groups=X.index.get_level_values('date')",
    )


def _end_numbers(dates: NDArray[Any], distinct: NDArray[Any], ends: NDArray[Any]) -> Indices:
    """Return the number of the last date that is not after each label's end."""
    if (dates.dtype.kind == "M") != (ends.dtype.kind == "M"):
        raise SplitError(
            f"dates of the type {dates.dtype} do not compare with label_end of the type {ends.dtype}.",
            rule="label_end is compared with the dates; where groups is None, the dates are the row numbers.",
            remedy="pass groups=<date of each row> and label_end as the same kind, best as datetime64",
        )
    early = ends < dates
    if early.any():
        row = int(early.argmax())
        raise SplitError(
            f"{int(early.sum())} of {len(ends)} labels end before their row's date "
            f"(row {row}: date {dates[row]}, label_end {ends[row]}).",
            rule="a label is known on its row's date at the earliest.",
            remedy="check that label_end is in the order of the rows and holds the date on which a label is known",
        )
    return np.searchsorted(distinct, ends, side="right").astype(np.int64, copy=False) - 1
