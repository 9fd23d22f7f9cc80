"""Memory for batches that is used again once nobody holds an array of it."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.errors import DataError, MissingExtraError

Array = npt.NDArray[Any]

_ALIGN = 64  # bytes: a cache line, and what vector instructions like


class Buffers:
    """Buffers of ``nbytes`` each, for one thread that takes them. ``most`` are watched: if all are held, the oldest is
    left to its holder. ``pinned`` locks their pages, so that copies to a CUDA device need not wait."""

    def __init__(self, nbytes: int, *, most: int, pinned: bool = False) -> None:
        self.nbytes, self.most, self.pinned = nbytes, most, pinned
        self._watched: deque[_Buffer] = deque()

    def take(self) -> Array:
        """Return (nbytes,) uint8, free to write into until no array of it is left."""
        dropped = [one for one in self._watched if one.lease() is None]
        buffer = next((one for one in dropped if not self.pinned or one.is_read()), None)
        if buffer is None and len(self._watched) >= self.most:
            if dropped:
                buffer = dropped[0]
                buffer.copied.synchronize()
            else:
                self._watched.popleft()
        if buffer is None:
            buffer = _Buffer(self.nbytes, self.pinned)
            self._watched.append(buffer)
        lease = _Lease(buffer.memory)
        buffer.lease, buffer.copied = weakref.ref(lease), None
        return np.asarray(lease)


class _Buffer:
    def __init__(self, nbytes: int, pinned: bool) -> None:
        memory = np.empty(nbytes + _ALIGN, np.uint8)
        start = -memory.ctypes.data % _ALIGN
        self.memory: Array = memory[start : start + nbytes]
        self.lease: Any = None
        self.copied: Any = None  # an event: all copies to the device that read it are done
        if pinned:
            _pin(memory)

    def is_read(self) -> bool:
        """Tell whether the device has read all that was queued on the present stream."""
        if self.copied is None:
            self.copied = _torch().cuda.Event()
            self.copied.record()
        return bool(self.copied.query())


class _Lease:
    """The base of a batch's arrays: it lives as long as one of them."""

    def __init__(self, memory: Array) -> None:
        self.memory = memory
        self.__array_interface__ = memory.__array_interface__


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _pin(memory: Array) -> None:
    """Lock the pages of an array until it is gone."""
    runtime = _torch().cuda.cudart()
    status = int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if status != 0:
        raise DataError(
            f"CUDA could not lock {memory.nbytes} bytes of memory for a batch (cudaHostRegister: error {status}).",
            rule="pin_memory=True locks the pages of every batch that is made ahead.",
            remedy="leave pin_memory out, or lower num_workers",
        )
    weakref.finalize(memory, _unpin, runtime, memory.ctypes.data).atexit = False


def _unpin(runtime: Any, address: int) -> None:
    _torch().cuda.synchronize()  # a copy may still read it
    runtime.cudaHostUnregister(address)


def can_pin() -> bool:
    return bool(_torch().cuda.is_available())


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise MissingExtraError.of("torch", "torch", "pin_memory=True") from None
    return torch
