"""Memory that batches lie in and that is used again once nobody holds an array of them."""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.errors import DataError, MissingExtraError

Array = npt.NDArray[Any]

_ALIGN = 64  # bytes: a cache line, and what vector instructions like


@dataclass(frozen=True)
class Layout:
    """How a batch lies in a slot: windows, targets, then the cells that it is made of.

    Attributes:
        max_size: Windows in the largest batch.
        lookback: Dates per window.
        num_features: Numbers per date.
    """

    max_size: int
    lookback: int
    num_features: int

    @property
    def nbytes(self) -> int:
        """Bytes of a slot that holds any batch."""
        return self._starts(self.max_size)[2] + self.max_size * 8

    def _starts(self, size: int) -> tuple[int, int, int]:
        windows = _aligned(size * self.lookback * self.num_features * 4)
        return 0, windows, windows + _aligned(size * 4)

    def parts(self, memory: Array, size: int) -> tuple[Array, Array, Array]:
        """Views of a slot's bytes: (size, lookback, num_features) float32, (size,) float32, (size,) int64."""
        _, targets, cells = self._starts(size)
        shape = (size, self.lookback, self.num_features)
        windows = memory[: size * self.lookback * self.num_features * 4].view(np.float32).reshape(shape)
        return windows, memory[targets : targets + size * 4].view(np.float32), _int64(memory, cells, size)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _int64(memory: Array, start: int, size: int) -> Array:
    return memory[start : start + size * 8].view(np.int64)


class Slot:
    """A piece of memory for one batch: private, or of an anonymous file that other processes can map.

    Attributes:
        number: Its name among the slots of this process.
        memory: (nbytes,) uint8.
        descriptor: The anonymous file; None if the memory is private. It ends with the last process that maps it.
    """

    _numbers = itertools.count()

    def __init__(self, nbytes: int, *, shared: bool, pinned: bool) -> None:
        self.number = next(Slot._numbers)
        self.nbytes = nbytes
        self.descriptor: int | None = None
        if shared:
            self.descriptor = anonymous_file(self.nbytes)
            weakref.finalize(self, os.close, self.descriptor).atexit = False
            self.memory: Array = np.frombuffer(mmap.mmap(self.descriptor, self.nbytes), np.uint8)
        else:
            memory = np.empty(self.nbytes + _ALIGN, np.uint8)
            start = -memory.ctypes.data % _ALIGN
            self.memory = memory[start : start + self.nbytes]
        self.used_until: Any = None
        if pinned:
            _pin(self)

    @property
    def is_idle(self) -> bool:
        """Whether no copy to a device still reads it."""
        return self.used_until is None or bool(self.used_until.query())


class Slots:
    """Slots of one size that are made when they are needed and used again when their batch is gone.

    Args:
        nbytes: Bytes of each.
        shared: Other processes will write into them.
        pinned: Page-locked, for copies to a CUDA device that do not wait.
        num_kept: Free ones to keep; None for all.
    """

    def __init__(self, nbytes: int, *, shared: bool = False, pinned: bool = False, num_kept: int | None = None) -> None:
        self.nbytes = nbytes
        self.shared, self.pinned = shared, pinned
        self.num_made = 0
        self._free: deque[Slot] = deque(maxlen=num_kept)
        self._lent: dict[weakref.ref[_Lease], Slot] = {}
        self._dropped: deque[weakref.ref[_Lease]] = deque()

    @property
    def num_free(self) -> int:
        self._collect()
        return len(self._free)

    def _collect(self) -> None:
        while self._dropped:
            self.put(self._lent.pop(self._dropped.popleft()))

    def take(self, wanted: frozenset[int] | set[int] = frozenset(), *, make: bool = True) -> Slot | None:
        """A free slot, one of the wanted numbers if there is any; a new one if none is free and ``make`` says so."""
        self._collect()
        for _ in range(len(self._free)):
            slot = self._free.popleft()
            if slot.is_idle and (not wanted or slot.number in wanted):
                return slot
            self._free.append(slot)
        if wanted:
            return self.take(make=make)
        if not make:
            return None
        self.num_made += 1
        return Slot(self.nbytes, shared=self.shared, pinned=self.pinned)

    def put(self, slot: Slot) -> None:
        """The slot is free again; one of another size is dropped."""
        if slot.nbytes == self.nbytes:
            self._free.append(slot)  # atomic: this may happen in any thread, at any point

    def lend(self, slot: Slot) -> Array:
        """(nbytes,) uint8: the slot's memory; it is free again when no view of this array is left."""
        lease = _Lease(slot)
        if self.pinned:
            weakref.finalize(lease, self._give_back, slot).atexit = False
        else:  # nothing runs in Python when a batch is dropped: a Ctrl-C in that moment would be printed and forgotten
            self._lent[weakref.ref(lease, self._dropped.append)] = slot
        return np.asarray(lease)

    def _give_back(self, slot: Slot) -> None:
        slot.used_until = _event()
        self.put(slot)


class _Lease:
    """What the arrays of a batch are based on; numpy keeps it as long as there is one of them."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.__array_interface__ = slot.memory.__array_interface__


def anonymous_file(nbytes: int) -> int:
    """A descriptor of a file in memory that has no name, so that nothing of it outlives its processes.

    Raises:
        DataError: If there is no room for it.
    """
    try:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("memfit-batch", os.MFD_CLOEXEC)
        else:
            descriptor, name = tempfile.mkstemp(prefix="memfit-")
            Path(name).unlink()
        os.truncate(descriptor, nbytes)
    except OSError as error:
        raise DataError(
            f"no shared memory of {nbytes} bytes for a batch: {error}.",
            rule="workers write batches into anonymous files, one per batch that is made ahead.",
            remedy="raise the limit of open files (ulimit -n), lower num_workers, or use num_workers=0",
        ) from None
    return descriptor


def _pin(slot: Slot) -> None:
    """Lock the slot's pages for the device until the slot is gone."""
    torch = _torch()
    address = slot.memory.ctypes.data
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(address, slot.nbytes, 0))
    if status != 0:
        raise DataError(
            f"CUDA could not lock {slot.nbytes} bytes of memory for a batch (cudaHostRegister: error {status}).",
            rule="pin_memory=True locks the pages of every batch that is made ahead.",
            remedy="leave pin_memory out, or lower num_workers",
        )
    weakref.finalize(slot, _unpin, runtime, address, slot.memory).atexit = False


def _unpin(runtime: Any, address: int, memory: Array) -> None:
    runtime.cudaHostUnregister(address)
    del memory  # kept until here, so that no page is given back while it is locked


def _event() -> Any:
    """What has happened on the device once all copies that are queued on the present stream are done."""
    event = _torch().cuda.Event()
    event.record()
    return event


def can_pin() -> bool:
    """Whether there is a CUDA device to lock memory for.

    Raises:
        MissingExtraError: If torch is not installed.
    """
    return bool(_torch().cuda.is_available())


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise MissingExtraError.of("torch", "torch", "pin_memory=True") from None
    return torch
