"""Folds of whole groups in which every class keeps its share, beside a test set that no fold sees."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memfit.errors import MissingExtraError, SplitError
from memfit.splits._purged import Indices


@final
@dataclass(frozen=True)
class StratifiedGroups:
    """A test set of whole groups that is put aside first, and stratified folds of whole groups over the rest.

    A group holds what is alike: the clips of one video, the pictures of one person. Split apart, near-duplicates of
    the training rows are validated, and a model that has learned them by heart looks good. Cross-validation prevents
    no over- or underfitting, it estimates: what the folds were compared and chosen by is too good afterwards, so the
    last word is the test set's.

    Args:
        n_splits: Folds over the rows that are not put aside.
        test_share: About so much of the rows is put aside; 0 puts nothing aside.
        seed: Of the order in which groups are dealt.

    Raises:
        SplitError: If a setting is out of range.
        MissingExtraError: If scikit-learn is not installed.

    Source:
        scikit-learn's ``StratifiedGroupKFold``, which deals the groups; the test set is one of its folds.

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
        if self.n_splits < 2 or not 0 <= self.test_share <= 0.5 or self.seed < 0:
            raise SplitError(
                f"n_splits is {self.n_splits}, test_share {self.test_share}, seed {self.seed}.",
                rule="there are two folds or more, the test set is at most half of the rows, and a seed is from 0 up.",
                remedy="pass for example StratifiedGroups(5, test_share=0.2)",
            )

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        """How many folds ``split`` gives."""
        return self.n_splits

    def hold_out(self, y: ArrayLike, groups: ArrayLike) -> tuple[Indices, Indices]:
        """The rows that the folds share, and those of the test set; positions, ascending.

        Args:
            y: The class of each row, shape (n,).
            groups: The group of each row, shape (n,).

        Raises:
            SplitError: If the two differ in length, or a class is in too few groups.
        """
        label, group = _checked(y, groups)
        rows = np.arange(len(label))
        if self.test_share == 0:
            return rows, rows[:0]
        parts = max(2, round(1 / self.test_share))
        self._check_groups(label, group, parts, "test_share")
        rest, test = next(iter(_deal(label, group, parts, self.seed)))
        return np.sort(rest), np.sort(test)

    def split(self, X: Any, y: ArrayLike, groups: ArrayLike) -> Iterator[tuple[Indices, Indices]]:
        """Rows to train on and to validate on, fold by fold; none of them is in the test set.

        Args:
            X: Not looked at.
            y: The class of each row, shape (n,).
            groups: The group of each row, shape (n,).

        Raises:
            SplitError: If the two differ in length, or a class is in fewer groups than there are folds.
        """
        label, group = _checked(y, groups)
        rest, _ = self.hold_out(label, group)
        self._check_groups(label[rest], group[rest], self.n_splits, "n_splits")
        for train, valid in _deal(label[rest], group[rest], self.n_splits, self.seed):
            yield np.sort(rest[train]), np.sort(rest[valid])

    def _check_groups(self, label: NDArray[Any], group: NDArray[Any], least: int, name: str) -> None:
        """Refuse a class that lies in fewer groups than there are parts: some part would have none of it."""
        for one in np.unique(label):
            number = len(np.unique(group[label == one]))
            if number < least:
                raise SplitError(
                    f"the class {one} lies in {number} groups, and {name} makes {least} parts.",
                    rule="a group is never split, so each part needs a group with every class.",
                    remedy=f"ask for fewer parts ({name}), or finer groups where those are right",
                )


def _checked(y: ArrayLike, groups: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
    label, group = np.asarray(y), np.asarray(groups)
    if label.ndim != 1 or label.shape != group.shape or not len(label):
        raise SplitError(
            f"y has the shape {label.shape}, and groups {group.shape}.",
            rule="each row has one class and one group.",
            remedy="pass one of each per row",
        )
    return label, group


def _deal(label: NDArray[Any], group: NDArray[Any], parts: int, seed: int) -> Iterator[tuple[Indices, Indices]]:
    try:
        from sklearn.model_selection import StratifiedGroupKFold
    except ImportError as error:
        raise MissingExtraError.of("scikit-learn", "evaluation", "StratifiedGroups") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class with few rows; what matters is its groups, checked above
        yield from StratifiedGroupKFold(parts, shuffle=True, random_state=seed).split(label, label, group)
