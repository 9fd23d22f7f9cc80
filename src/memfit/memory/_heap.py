"""What the C allocator of this process has given out, and what it holds."""

from __future__ import annotations

import ctypes


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``. Source: mallinfo(3)."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def read_heap() -> dict[str, int]:
    """What the C allocator of this process has given out and what it holds, in bytes; empty where it does not tell.
    Python's own small objects (up to 512 bytes) lie in arenas that do not count here. Source: mallinfo(3), glibc 2.33.
    >>> heap = read_heap()
    >>> not heap or 0 < heap["live_bytes"] <= heap["resident_bytes"]
    True
    """
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):  # another C library, or an older one
        return {}
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return {"live_bytes": info.uordblks + info.hblkhd, "resident_bytes": info.arena + info.hblkhd}
