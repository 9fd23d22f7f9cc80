"""Map an array that lies in several files as one read-only array.

Its stream is that of a ``.npy`` file. A later version's bytes go into a file that begins at the last multiple of
`CUT_BYTES` before the end of the old ones, so that each file can be mapped at a page's border.
"""

from __future__ import annotations

import ctypes
import functools
import io
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.data._manifest import damaged

Array = npt.NDArray[Any]

#: Files are cut at multiples of this: the largest page of the systems that Python runs on.
CUT_BYTES = 1 << 16


def array_files(name: str, facts: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the files of an array in order, each with the byte of the stream at which it begins."""
    return [(file, start) for file, start in facts.get("segments", [(f"{name}.npy", 0)])]


def file_name(name: str, start: int) -> str:
    """Return the name of the file that holds an array's stream from a byte on."""
    return f"{name}.npy" if start == 0 else f"{name}.{start}.bin"


def header(dtype: str, shape: Sequence[int]) -> bytes:
    """Return the header of a ``.npy`` file; its length does not depend on the first axis."""
    text = io.BytesIO()
    facts = {"descr": dtype, "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(text, facts)
    return text.getvalue()


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of an array's stream."""
    return len(header(dtype, shape)) + np.dtype(dtype).itemsize * math.prod(shape)


def map_array(folder: Path, name: str, facts: Mapping[str, Any]) -> Array:
    """Return a read-only view of the maps of an array's files."""
    dtype, shape = np.dtype(facts["dtype"]), tuple(facts["shape"])
    files = array_files(name, facts)
    if len(files) == 1:
        return _map_file(folder / files[0][0], dtype, shape)
    first = len(header(facts["dtype"], shape))
    size = first + dtype.itemsize * math.prod(shape)
    space = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    base = np.frombuffer(space, np.uint8).ctypes.data
    for (file, start), end in zip(files, [start for _, start in files[1:]] + [size], strict=True):
        _map_over(base + start, end - start, folder / file)
    return np.ndarray(shape, dtype, buffer=space, offset=first)


def _map_file(file: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    try:
        array: Array = np.load(file, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    except (OSError, ValueError):
        raise damaged(file, "cannot be mapped") from None
    if array.dtype != dtype or array.shape != shape:
        raise damaged(file, f"holds {array.dtype} {array.shape} instead of {dtype} {shape}")
    return array


def _map_over(address: int, size: int, file: Path) -> None:
    """Map the beginning of a file at an address inside a map of this process."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        raise damaged(file, "cannot be mapped") from None
    try:
        if os.fstat(descriptor).st_size < size:
            raise damaged(file, f"has less than {size} bytes")
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if _mmap()(address, size, mmap.PROT_READ, flags, descriptor, 0) != address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))
    finally:
        os.close(descriptor)


_MAP_FIXED = 0x10  # of Linux, macOS and the BSDs alike; Python has no name for it


@functools.cache
def _mmap() -> Any:
    """The C library's ``mmap``, which maps at a given address; Python's cannot."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    integer = ctypes.c_int
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, integer, integer, integer, ctypes.c_int64]
    return function
