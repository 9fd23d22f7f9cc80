"""Tell a failed allocation from other errors, try what may fail so, and free all that a failed try holds."""

from __future__ import annotations

import errno
import gc
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar

import torch

from memfit.memory import Budget, read_heap
from memfit.refusals import REFUSALS, rows_of
from memfit.rundir import record
from memfit.units import format_bytes

T = TypeVar("T")


class OomKind(StrEnum):
    """Which memory an allocation failed in."""

    DEVICE = "device"
    HOST = "host"
    PINNED = "pinned"
    LIBRARY = "library"
    """Inside cuBLAS, cuDNN, NCCL and the like, most of which do not say how much they wanted."""


_OF_HEADING = {
    **dict.fromkeys(("device_oom", "device_refused", "other_device", "xpu_error"), OomKind.DEVICE),
    **dict.fromkeys(("library_alloc", "nccl_oom"), OomKind.LIBRARY),
    **dict.fromkeys(("host_refused", "bad_alloc", "shm", "no_fork"), OomKind.HOST),
    "pinned": OomKind.PINNED,
}
_CUDA_ERROR_MEMORY_ALLOCATION = 2
# torch._utils.ExceptionWrapper: the traceback of a worker, a thread or a replica is the error's message
_RELAYED = re.compile(r"\ACaught (\w+ in .*)\.\nOriginal Traceback \(most recent call last\):\n")
_FRAME = re.compile(r"^  File .*\n(?:    .*\n)*", re.MULTILINE)


def classify_oom(error: BaseException) -> OomKind | None:
    """Return which memory was short when ``error`` was raised, or None if it is no failed allocation. An error that
    torch relays from a worker or a replica is judged by what was raised there. The death of a ``DataLoader`` worker is
    none.
    >>> classify_oom(MemoryError()), classify_oom(ValueError("no room for zoom, out of memory"))
    (<OomKind.HOST: 'host'>, None)
    """
    text, where = str(error), ""
    if relayed := _RELAYED.match(text):
        where = relayed[1]
        text = _FRAME.split(text)[-1].strip()
    if isinstance(error, torch.OutOfMemoryError):
        return OomKind.DEVICE
    # numpy's own type, which calls itself either, cannot be rebuilt from a text: relayed, it is a RuntimeError
    if isinstance(error, MemoryError) or where.startswith(("MemoryError in", "_ArrayMemoryError in")):
        return OomKind.HOST
    if isinstance(error, OSError):
        short = error.errno == errno.ENOMEM or (where and f"[Errno {errno.ENOMEM}]" in text)
        return OomKind.HOST if short else None
    if not isinstance(error, RuntimeError):
        return None
    kind = _kind_in(text)
    if getattr(error, "error_code", None) == _CUDA_ERROR_MEMORY_ALLOCATION:
        kind = OomKind.DEVICE
    if kind is OomKind.DEVICE and ("pin memory thread" in where or _is_pinning(error, text)):
        return OomKind.PINNED
    return kind


_rows = cache(lambda: list(rows_of(REFUSALS)))  # compiled when an error is judged


def _kind_in(text: str) -> OomKind | None:
    """Return which kind of memory a text says was refused."""
    squeezed, lines = ["".join(text.split())], text.splitlines()
    said = (name for name, options, row in _rows() if any(map(row.search, lines if "lines" in options else squeezed)))
    return next((_OF_HEADING[name] for name in said), None)


def _is_pinning(error: BaseException, text: str) -> bool:
    """Return whether page-locking host memory raised a CUDA error: only the line of code that raised it says so."""
    if "Tried to allocate" in text:
        return False
    innermost = traceback.extract_tb(error.__traceback__)[-1:]
    return any("pin_memory" in (frame.line or "") or "cudaHost" in (frame.line or "") for frame in innermost)


@dataclass(frozen=True)
class Failed:
    kind: OomKind
    text: str

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]


def attempt(
    action: Callable[[], T], write_record: Callable[[str, OomKind], object] = lambda text, kind: None
) -> T | Failed:
    """Return what ``action`` returns, or ``Failed`` once all that it held is freed. ``write_record`` is called before
    that."""
    try:
        return action()
    except Exception as error:
        kind = classify_oom(error)
        if kind is None:
            raise
        text = str(error) or type(error).__name__
        write_record(text, kind)
        failure = error
    release(failure)  # outside of the handler, which would keep the frames
    del failure
    clean_up()
    return Failed(kind, text)


def release(error: BaseException) -> None:
    """Clear every finished frame that ``error`` and the errors chained to it hold: their locals are activations."""
    pending, seen = [error], set[int]()
    while pending:
        link = pending.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        pending += [other for other in (link.__cause__, link.__context__) if other is not None]
        if isinstance(link, BaseExceptionGroup):
            pending += link.exceptions


@dataclass(frozen=True)
class Cleanup:
    num_objects: int  # unreachable ones that were found
    host_bytes: int  # by how much the heap's live bytes fell
    reserved_bytes: int  # of torch's cache, that went back to the driver, over all devices
    seconds: float


def clean_up() -> Cleanup:
    """Collect garbage, empty the devices' cache, and return what that freed and cost; record it as ``cleanup``.

    memfit does so after an out-of-memory, and on no schedule: one every few steps costs time and frees nothing.
    """
    begin, heap, reserved = time.perf_counter(), read_heap().get("live_bytes", 0), _reserved_bytes()
    num_objects = gc.collect()
    for backend in _backends():
        backend.empty_cache()
    host = heap - read_heap().get("live_bytes", 0)
    done = Cleanup(num_objects, max(0, host), reserved - _reserved_bytes(), time.perf_counter() - begin)
    record("cleanup", **asdict(done))
    return done


def _reserved_bytes() -> int:
    return sum(sizes["reserved_bytes"] for sizes in device_bytes().values())


def device_bytes() -> dict[str, dict[str, int]]:
    """Return what torch holds on each device now and held at its peak, in bytes. Devices that this process does not use
    are left out, also those that other ranks use."""
    return {
        f"{backend.__name__.rpartition('.')[2]}:{index}": {
            "allocated_bytes": backend.memory_allocated(index),
            "reserved_bytes": backend.memory_reserved(index),
            "allocated_peak_bytes": backend.max_memory_allocated(index),
            "reserved_peak_bytes": backend.max_memory_reserved(index),
        }
        for backend in _backends()
        for index in _own_devices(backend)
    }


def reset_device_peaks() -> None:
    for backend in _backends():
        for index in _own_devices(backend):
            backend.reset_peak_memory_stats(index)


def _own_devices(backend: Any) -> list[int]:
    """Return which visible devices of a torch backend hold tensors of this process, or else the current one."""
    return [n for n in range(backend.device_count()) if backend.memory_reserved(n)] or [backend.current_device()]


def _backends() -> list[Any]:
    """Return the device backends that this process has begun to use (ROCm calls itself cuda)."""
    return [backend for backend in (torch.cuda, torch.xpu) if backend.is_initialized()]


def memory_now(kind: OomKind) -> str:
    """Return in a sentence how full the memory is in which an allocation failed."""
    held = [
        f"{name} holds {format_bytes(sizes['allocated_bytes'])} in tensors, "
        f"{format_bytes(sizes['allocated_peak_bytes'])} at its peak"
        for name, sizes in device_bytes().items()
    ]
    if held and kind in (OomKind.DEVICE, OomKind.LIBRARY):
        return f"{'; '.join(held)}."
    binding = Budget.read().binding
    return (
        f"{format_bytes(binding.used_bytes)} of {format_bytes(binding.limit_bytes)} are taken without it "
        f"({binding.source}, {binding.name})."
    )
