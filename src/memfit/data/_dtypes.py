"""The types that a panel's values may have: how numbers are stored in them, what stands for a missing one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.errors import DataError

Array = npt.NDArray[Any]

FLOATS = ("float16", "float32", "float64", "bfloat16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
_BFLOAT16_NAN = 0x7FC0
_BFLOAT16_EXPONENT = 0x7F80


def dtype_name(dtype: Any) -> str:
    """The name of a type that a panel may have, of a name or a numpy type.

    Raises:
        DataError: If a panel cannot have it.

    >>> dtype_name("float32"), dtype_name(np.int8), dtype_name("bfloat16")
    ('float32', 'int8', 'bfloat16')
    """
    try:
        name = "bfloat16" if dtype == "bfloat16" else np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in FLOATS + INTEGERS:
        raise DataError(
            f"dtype is {name}.",
            rule=f"a panel's values are {', '.join(FLOATS)} (missing ones are NaN) or {', '.join(INTEGERS)}.",
            remedy='pass dtype="float32"',
        )
    return name


def storage(name: str) -> np.dtype[Any]:
    """What numpy stores the values as: bfloat16, which numpy lacks, is kept as its 16 bits."""
    return np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<")


def target_dtype(name: str) -> str:
    """The type of the targets beside values of a type: their own, or float32 where that would lose them."""
    return name if name in ("float16", "float32", "float64") else "float32"


def missing(name: str) -> float | int:
    """What a cell without a value holds: NaN, or 0 where the type has none."""
    return 0 if name in INTEGERS else _BFLOAT16_NAN if name == "bfloat16" else float("nan")


def is_finite(name: str, values: Array) -> npt.NDArray[np.bool_]:
    """Where stored values are numbers; integers always are."""
    if name == "bfloat16":
        return np.asarray((values & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT)
    return np.isfinite(values)


def encode(name: str, numbers: Array, column: str) -> Array:
    """Numbers as they are stored.

    Raises:
        DataError: If the type cannot hold one: too large for it, a fraction or a missing one in an integer.
    """
    if name in INTEGERS:
        return _to_integers(name, numbers, column)
    with np.errstate(over="ignore"):
        stored = numbers.astype("float32" if name == "bfloat16" else name, copy=False)
        if name == "bfloat16":
            stored = _to_bfloat16(stored)
    infinite = decode(name, stored)
    lost = np.isinf(infinite) & np.isfinite(numbers)
    if lost.any():
        largest = 3.38953e38 if name == "bfloat16" else np.finfo(name).max
        raise DataError(
            f"column '{column}' holds {numbers[lost][0]:g}, which {name} cannot hold.",
            rule=f"the largest value of {name} is {largest:g}.",
            remedy='pass dtype="float64", or scale the column',
        )
    return stored


def _to_integers(name: str, numbers: Array, column: str) -> Array:
    limits = np.iinfo(name)
    if numbers.dtype.kind == "f":
        # The float above the largest integer is exact for every width, the largest one of 64 bits is not.
        kept = (numbers == np.floor(numbers)) & (numbers >= float(limits.min)) & (numbers < float(limits.max) + 1)
    else:
        kept = (numbers >= limits.min) & (numbers <= limits.max)
    if not kept.all():
        first = numbers[~kept][0]
        what = "has no value in a row" if first != first else f"holds {first:g}"
        raise DataError(
            f"column '{column}' {what}, which {name} cannot hold.",
            rule=f"{name} holds whole numbers from {limits.min} to {limits.max}, and none that is missing.",
            remedy='pass dtype="float32" or a wider type, fill what is missing, or leave the column out',
        )
    return numbers.astype(name)


def _to_bfloat16(numbers: npt.NDArray[np.float32]) -> Array:
    """The upper 16 bits of float32, rounded to the nearest and to even; every NaN is one."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(_BFLOAT16_NAN), rounded)


def decode(name: str, stored: Array) -> Array:
    """Stored values as numbers that numpy can reckon with: bfloat16 as float32, exactly; others as they are.

    >>> decode("bfloat16", encode("bfloat16", np.array([1.0, -2.5]), "close")).tolist()
    [1.0, -2.5]
    """
    if name != "bfloat16":
        return stored
    return (np.ascontiguousarray(stored).astype(np.uint32) << np.uint32(16)).view(np.float32)
