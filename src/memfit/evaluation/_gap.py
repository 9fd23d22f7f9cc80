"""How much better a model is on what it was trained on than on what it was not."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from memfit.errors import DataError


@dataclass(frozen=True)
class Gap:
    """A metric on training and on validation rows, over folds. What is undefined is NaN.

    Attributes:
        train: Mean over the folds.
        valid: Mean over the folds.
        gap: Mean of the folds' ``train - valid``. Large: the model has learned its rows by heart. Small with a poor
            ``train``: it has not learned. Folds by themselves prevent neither.
        sd: Standard deviation of the folds' gaps, divisor n - 1.
        num_folds: Folds.
    """

    train: float
    valid: float
    gap: float
    sd: float
    num_folds: int


def generalization_gap(train: ArrayLike, valid: ArrayLike) -> Gap:
    """The gap between training and validation over folds.

    Args:
        train: A metric of each fold on its training rows, shape (num_folds,).
        valid: The same metric of each fold on its validation rows, shape (num_folds,).

    Raises:
        DataError: If there is no fold, or the two differ in length.

    Example:
        >>> generalization_gap([1.0, 0.75], [0.5, 0.5])
        Gap(train=0.875, valid=0.5, gap=0.375, sd=0.176..., num_folds=2)
    """
    a, b = np.asarray(train, np.float64), np.asarray(valid, np.float64)
    if a.ndim != 1 or a.shape != b.shape or not len(a):
        raise DataError(
            f"there are training figures of the shape {a.shape}, and validation figures of {b.shape}.",
            rule="each fold has one of both.",
            remedy="pass one figure per fold",
        )
    gaps = a - b
    sd = float(gaps.std(ddof=1)) if len(gaps) > 1 else math.nan
    return Gap(float(a.mean()), float(b.mean()), float(gaps.mean()), sd, len(gaps))
