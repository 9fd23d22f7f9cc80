"""The types that a panel's values may have."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.errors import DataError

#: What a panel is built with.
FLOATS = ("float16", "float32", "float64")


def dtype_name(dtype: Any) -> str:
    """Return the name of a type, given as a name or a numpy type."""
    try:
        name = str(np.dtype(dtype))
    except TypeError:
        name = str(dtype)
    if name not in FLOATS:
        raise DataError(
            f"dtype is {name}.",
            rule=f"a panel's values are {', '.join(FLOATS)}; a missing one is NaN.",
            remedy='pass dtype="float32"; float64 holds whole numbers up to 2**53 exactly',
        )
    return name


def encode(name: str, numbers: npt.NDArray[Any], column: str) -> npt.NDArray[Any]:
    """Return numbers as they are stored."""
    with np.errstate(over="ignore"):
        stored = numbers.astype(name, copy=False)
    lost = np.isinf(stored) & np.isfinite(numbers)
    if lost.any():
        raise DataError(
            f"column '{column}' holds {numbers[lost][0]:g}, which {name} cannot hold.",
            rule=f"the largest value of {name} is {np.finfo(name).max:g}.",
            remedy='pass dtype="float64", or scale the column',
        )
    return stored
