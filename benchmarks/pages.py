"""Measure, drop and fill the page cache of files."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_PIECE_BYTES = 8 << 20


def drop_pages(files: Iterable[Path]) -> bool:
    """Have the kernel drop files from its page cache; return False off Linux. Pages that processes map stay.

    Source: Linux mm/fadvise.c, POSIX_FADV_DONTNEED.
    """
    if not sys.platform.startswith("linux"):
        return False
    for path in files:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def cached_share(files: Iterable[Path]) -> float | None:
    """Return the share of the files' pages in the page cache, 0 to 1; None if unknown.

    Source: mincore(2); since Linux 5.2 it tells the truth of files that the caller owns or may write.
    """
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    num_cached = num_pages = 0
    for path in files:
        size = path.stat().st_size
        if not size:
            continue
        flags = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            address, found = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(flags.ctypes.data)
            known = libc.mincore(address, ctypes.c_size_t(size), found)
            del view  # a map with views of it cannot be closed
        if known != 0:
            return None
        num_cached, num_pages = num_cached + int(np.count_nonzero(flags & 1)), num_pages + len(flags)
    return num_cached / num_pages if num_pages else None


def warm_pages(files: Iterable[Path], most_seconds: float) -> None:
    """Read files into the page cache, for so many seconds at most."""
    deadline = time.monotonic() + most_seconds
    buffer = bytearray(_PIECE_BYTES)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while time.monotonic() < deadline and file.readinto(buffer):
                pass
