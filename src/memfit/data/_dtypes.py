"""The types that a panel's values may have: how numbers are stored in them, what stands for a missing one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.errors import DataError

Array = npt.NDArray[Any]

#: What a panel is built with.
FLOATS = ("float16", "float32", "float64", "bfloat16")
_BFLOAT16_NAN = 0x7FC0
_BFLOAT16_EXPONENT = 0x7F80


def dtype_name(dtype: Any) -> str:
    """Return the name of a type, given as a name or a numpy type."""
    try:
        name = "bfloat16" if dtype == "bfloat16" else np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in FLOATS:
        raise DataError(
            f"dtype is {name}.",
            rule=f"a panel's values are {', '.join(FLOATS)}; a missing one is NaN.",
            remedy='pass dtype="float32"; float64 holds whole numbers up to 2**53 exactly',
        )
    return name


def storage(name: str) -> np.dtype[Any]:
    """Return the type that numpy stores the values as: the 16 bits of bfloat16, which numpy lacks, are a uint16."""
    return np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<")


def target_dtype(name: str) -> str:
    """Return the type of the targets beside values of a type."""
    return "float32" if name == "bfloat16" else name


def missing(name: str) -> float | int:
    """Return what a cell without a value holds, as it is stored."""
    return _BFLOAT16_NAN if name == "bfloat16" else float("nan")


def is_finite(name: str, values: Array) -> npt.NDArray[np.bool_]:
    """Return where stored values are finite."""
    if name == "bfloat16":
        return np.asarray((values & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT)
    return np.isfinite(values)


def encode(name: str, numbers: Array, column: str) -> Array:
    """Return numbers as they are stored."""
    with np.errstate(over="ignore"):
        stored = numbers.astype("float32" if name == "bfloat16" else name, copy=False)
        if name == "bfloat16":
            stored = _to_bfloat16(stored)
    lost = np.isinf(decode(name, stored)) & np.isfinite(numbers)
    if lost.any():
        largest = 3.38953e38 if name == "bfloat16" else np.finfo(name).max
        raise DataError(
            f"column '{column}' holds {numbers[lost][0]:g}, which {name} cannot hold.",
            rule=f"the largest value of {name} is {largest:g}.",
            remedy='pass dtype="float64", or scale the column',
        )
    return stored


def _to_bfloat16(numbers: npt.NDArray[np.float32]) -> Array:
    """Return the upper 16 bits of float32, rounded to the nearest and to even; every NaN is one."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(_BFLOAT16_NAN), rounded)


def decode(name: str, stored: Array) -> Array:
    """Return stored values as numbers that numpy can add: bfloat16 as float32, exactly; others as they are."""
    if name != "bfloat16":
        return stored
    return (np.ascontiguousarray(stored).astype(np.uint32) << np.uint32(16)).view(np.float32)
