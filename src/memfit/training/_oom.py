"""What a failed allocation looks like as an exception, how to let go of all that it holds, what devices hold.

The type decides first, one table of exact patterns second; a bare word never does: of ``zoom``, ``bathroom`` and
``CUDNN_STATUS_NOT_SUPPORTED`` none is a shortage. A process that the kernel killed raised nothing, so ``DataLoader
worker (pid 7) is killed by signal`` is none of these either: what ended it stands in the kernel's counters.
"""

from __future__ import annotations

import errno
import gc
import re
import traceback
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import torch


class OomKind(StrEnum):
    """Which memory an allocation failed in."""

    DEVICE = "device"
    HOST = "host"
    PINNED = "pinned"
    LIBRARY = "library"
    """Inside cuBLAS, cuDNN, NCCL, oneDNN and the like, most of which do not say how much they wanted."""


# The places that write these: PyTorch 0.4 to 2.13, c10/core/impl/alloc_cpu.cpp, c10/cuda/CUDACachingAllocator.cpp,
# c10/cuda/CUDAException.cpp, aten/src/ATen/MapAllocator.cpp, aten/src/ATen/mps/MPSAllocator.mm,
# aten/src/ATen/cuda/Exceptions.cpp, aten/src/ATen/native/cudnn; cuDNN 9, NCCL 2.27, oneDNN 3, Level Zero, PJRT.
_PATTERNS: tuple[tuple[OomKind, str], ...] = (
    (OomKind.HOST, r"DefaultCPUAllocator: (can't allocate|not enough) memory: you tried to allocate \d+ bytes"),
    (OomKind.HOST, r"posix_memalign\(&data, gAlignment, nbytes\) == 0\. 12 vs 0"),
    (OomKind.HOST, r"unable to mmap \d+ bytes from file <[^>]*>: Cannot allocate memory \(12\)"),
    (OomKind.HOST, r"</?(dev/shm/)?torch_\w+>.*: (Cannot allocate memory \(12\)|No space left on device \(28\))"),
    (OomKind.HOST, r"(\A|: )std::bad_alloc\Z"),
    (OomKind.HOST, r"\bUR_RESULT_ERROR_OUT_OF_HOST_MEMORY\b"),
    (OomKind.LIBRARY, r"\b(CU|HIP)(BLAS|SOLVER|SPARSE|RAND)_STATUS_ALLOC_FAILED\b"),
    (OomKind.LIBRARY, r"\bCUSPARSE_STATUS_INSUFFICIENT_RESOURCES\b"),
    (OomKind.LIBRARY, r"\bCU(DNN_STATUS|FFT)_ALLOC_FAILED\b"),
    (OomKind.LIBRARY, r"\bCUDNN_STATUS_INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED\b"),
    (OomKind.LIBRARY, r"\brocblas_status_memory_error\b|\bmiopenStatusAllocFailed\b"),
    (OomKind.LIBRARY, r"Unable to find a valid cuDNN algorithm to run convolution"),
    (OomKind.LIBRARY, r"\bCuda failure (2 )?'out of memory'|Failed to CUDA (host )?[cm]alloc(Async)? \d+ bytes"),
    (OomKind.LIBRARY, r"(\A|: )could not (create a primitive|execute a primitive|create a memory object)\Z"),
    (OomKind.DEVICE, r"\b(CUDA|HIP|XPU|NPU|MLU|MUSA) out of memory\. Tried to allocate "),
    (OomKind.DEVICE, r"\bMPS backend out of memory \(MPS allocated: "),
    (OomKind.DEVICE, r"\bcan NOT allocate memory block with size larger than 4GB\b"),
    (OomKind.DEVICE, r"\b(CUDA|HIP)( driver)? error: out of memory\b|\bcuda runtime error \(2\) : out of memory\b"),
    (OomKind.DEVICE, r"\bInvalid buffer size: [\d.]+ [KMGT]i?B\b"),
    (OomKind.DEVICE, r"\bUR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY\b"),
    (OomKind.DEVICE, r"\bRESOURCE_EXHAUSTED: (Out of memory|Attempting to allocate) "),
    (OomKind.DEVICE, r"\bFATAL ERROR :: MODULE:PT_DEVMEM Allocation failed\b"),
)
_TABLE = tuple((kind, re.compile(pattern)) for kind, pattern in _PATTERNS)

_CUDA_ERROR_MEMORY_ALLOCATION = 2
# torch._utils.ExceptionWrapper: the traceback of a worker, a thread or a replica is the message of the error here
_RELAYED = re.compile(r"\ACaught (\w+ in .*)\.\nOriginal Traceback \(most recent call last\):\n")
_FRAME = re.compile(r"^  File .*\n(?:    .*\n)*", re.MULTILINE)


def classify_oom(error: BaseException) -> OomKind | None:
    """Which memory was short when ``error`` was raised, or None if it is no failed allocation.

    An error that torch relays from a loader's worker, its pinning thread or a replica is judged by the error that was
    raised there. Causes and contexts are not looked at: an error raised while one is handled is another error.

    Example:
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
    kind = next((kind for kind, pattern in _TABLE if pattern.search(text)), None)
    if getattr(error, "error_code", None) == _CUDA_ERROR_MEMORY_ALLOCATION:
        kind = OomKind.DEVICE
    if kind is OomKind.DEVICE and ("pin memory thread" in where or _is_pinning(error, text)):
        return OomKind.PINNED
    return kind


def _is_pinning(error: BaseException, text: str) -> bool:
    """Whether a CUDA error without numbers comes from page-locking host memory: only the line that raised it tells."""
    if "Tried to allocate" in text:
        return False
    innermost = traceback.extract_tb(error.__traceback__)[-1:]
    return any("pin_memory" in (frame.line or "") or "cudaHost" in (frame.line or "") for frame in innermost)


def release(error: BaseException) -> None:
    """Clear every finished frame that ``error`` and the errors chained to it hold, so that nothing lives on in them.

    Call it after the ``except`` block was left, before the caches are emptied: until then the traceback keeps the
    locals of all frames that failed, activations among them. Texts and chain stay; tracebacks are gone.
    """
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it is chained to or holds as a group, each once."""
    pending, seen = [error], set()
    while pending:
        link = pending.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        pending += [other for other in (link.__cause__, link.__context__) if other is not None]
        if isinstance(link, BaseExceptionGroup):
            pending += link.exceptions


def clear_caches() -> int:
    """Collect garbage once and hand the devices' unused cache back; returns how many objects were unreachable."""
    num_objects = gc.collect()
    for backend in _backends():
        backend.empty_cache()
    return num_objects


def device_bytes() -> dict[str, dict[str, int]]:
    """What torch holds on each device now and held at its peak, in bytes, by ``cuda:0`` and the like.

    Empty where no device was used: asking one that nothing has touched would cost this process a context.
    """
    return {
        f"{backend.__name__.rpartition('.')[2]}:{index}": {
            "allocated_bytes": backend.memory_allocated(index),
            "reserved_bytes": backend.memory_reserved(index),
            "allocated_peak_bytes": backend.max_memory_allocated(index),
            "reserved_peak_bytes": backend.max_memory_reserved(index),
        }
        for backend in _backends()
        for index in range(backend.device_count())
    }


def _backends() -> list[Any]:
    """The device backends that this process has begun to use (ROCm calls itself cuda)."""
    return [backend for backend in (torch.cuda, torch.xpu) if backend.is_initialized()]
