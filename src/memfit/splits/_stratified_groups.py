"""Folds of whole groups in which every class keeps its share, beside a test set that no fold sees."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memfit.errors import MissingExtraError, SplitError, check_counts
from memfit.splits._purged import Indices


@final
@dataclass(frozen=True)
class StratifiedGroups:
    """A test set of whole groups that is put aside first, and stratified folds of whole groups over the rest.

    A group holds near-duplicates, such as the clips of one video. Compare by the folds; report the test set.

    Args:
        n_splits: Folds over the rows that are not put aside.
        test_share: The share of the rows, about, that is put aside; 0 puts nothing aside.
        seed: The seed of the order in which groups are dealt.

    Raises:
        SplitError: If a setting is out of range.

    Source:
        scikit-learn's ``StratifiedGroupKFold`` deals the groups; the test set is one of its folds.

    Example:
        >>> y = [0, 1] * 20
        >>> groups = [row // 4 for row in range(40)]  # ten groups of four rows
        >>> splitter = StratifiedGroups(3, test_share=0.2, seed=1)
        >>> rest, test = splitter.hold_out(y, groups)
        >>> len(rest), len(test), [len(valid) for _, valid in splitter.split(y, y, groups)]
        (32, 8, [12, 12, 8])
    """

    n_splits: int = 5
    test_share: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(SplitError, 2, n_splits=self.n_splits)
        check_counts(SplitError, 0, seed=self.seed)
        if not 0 <= self.test_share <= 0.5:
            raise SplitError(
                f"test_share is {self.test_share}.",
                rule="the test set is at most half of the rows.",
                remedy="pass for example test_share=0.2, or 0 for no test set",
            )

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        """Return the number of folds; the arguments are ignored, as in scikit-learn."""
        return self.n_splits

    def hold_out(self, y: ArrayLike, groups: ArrayLike) -> tuple[Indices, Indices]:
        """Return the ascending row numbers that the folds share, and those of the test set.

        Args:
            y: The class of each row, shape (n,).
            groups: The group of each row, shape (n,).

        Raises:
            SplitError: If the two differ in length, or a class is in too few groups.
            MissingExtraError: If scikit-learn is not installed.
        """
        label, group = np.asarray(y), np.asarray(groups)
        if label.ndim != 1 or label.shape != group.shape or not len(label):
            raise SplitError(
                f"y has the shape {label.shape}, and groups {group.shape}.",
                rule="each row has one class and one group.",
                remedy="pass one of each per row",
            )
        if self.test_share == 0:
            return np.arange(len(label)), np.arange(0)
        return next(self._deal(label, group, max(2, round(1 / self.test_share)), "test_share"))

    def split(self, X: Any, y: ArrayLike, groups: ArrayLike) -> Iterator[tuple[Indices, Indices]]:
        """Yield the row numbers to train and to validate on; none is in the test set. Errors as for `hold_out`."""
        rest, _ = self.hold_out(y, groups)
        for train, valid in self._deal(np.asarray(y)[rest], np.asarray(groups)[rest], self.n_splits, "n_splits"):
            yield rest[train], rest[valid]

    def _deal(
        self, label: NDArray[Any], group: NDArray[Any], num_parts: int, setting: str
    ) -> Iterator[tuple[Indices, Indices]]:
        try:
            from sklearn.model_selection import StratifiedGroupKFold
        except ImportError as error:
            raise MissingExtraError.of("scikit-learn", "evaluation", "StratifiedGroups") from error
        for one in np.unique(label):
            if (number := len(np.unique(group[label == one]))) < num_parts:
                raise SplitError(
                    f"the class {one} lies in {number} groups, and {setting} makes {num_parts} parts.",
                    rule="a group is never split, so each part needs a group with every class.",
                    remedy=f"ask for fewer parts ({setting}), or finer groups where those are right",
                )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of few rows in a class: its groups count, checked above
            dealer = StratifiedGroupKFold(num_parts, shuffle=True, random_state=self.seed)
            for rest, part in dealer.split(label, label, group):
                yield np.sort(rest), np.sort(part)
