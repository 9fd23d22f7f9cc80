"""Folds of whole groups in which every class keeps its share, beside a test set that no fold sees."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memfit.errors import SplitError

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class StratifiedGroups:
    """A test set of whole groups that is put aside first, and stratified folds of whole groups over the rest.

    A group holds near-duplicates, such as the clips of one video. ``test_share`` of the rows, about, are put aside; 0
    puts nothing aside. scikit-learn's ``StratifiedGroupKFold`` deals the groups; the test set is one of its folds.
    """

    n_splits: int
    test_share: float
    seed: int = 0

    def hold_out(self, y: ArrayLike, groups: ArrayLike) -> tuple[Indices, Indices]:
        """Return the rows for the folds, and those put aside, by the class and the group of each row."""
        label, group = np.asarray(y), np.asarray(groups)
        if self.test_share == 0:
            return np.arange(len(label)), np.arange(0)
        return next(self._deal(label, group, max(2, round(1 / self.test_share)), "test_share"))

    def split(self, y: ArrayLike, groups: ArrayLike) -> Iterator[tuple[Indices, Indices]]:
        """Yield the row numbers to train and to validate on; none is in the test set. Errors as for `hold_out`."""
        rest, _ = self.hold_out(y, groups)
        for train, valid in self._deal(np.asarray(y)[rest], np.asarray(groups)[rest], self.n_splits, "n_splits"):
            yield rest[train], rest[valid]

    def _deal(
        self, label: NDArray[Any], group: NDArray[Any], num_parts: int, setting: str
    ) -> Iterator[tuple[Indices, Indices]]:
        from sklearn.model_selection import StratifiedGroupKFold  # slow to load

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
