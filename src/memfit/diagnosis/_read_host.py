"""Host memory that was refused: CPU tensors, arrays, forks, pinned memory, ``/dev/shm``, and workers that went."""

from __future__ import annotations

import re
from typing import Any

from memfit.diagnosis._facts import SIZE, Pattern, to_bytes, words
from memfit.diagnosis._read_device import backend, is_of_gpu


def _tried(match: re.Match[str], after: str) -> dict[str, Any]:
    number = next((group for group in match.groups() if group), None)
    return {"tried_bytes": int(number)} if number else {}


def _sized(match: re.Match[str], after: str) -> dict[str, Any]:
    return {"tried_bytes": to_bytes(match.group(1), match.group(2))} if match.group(1) else {}


def _errno_12(match: re.Match[str], after: str) -> dict[str, Any] | None:
    return None if "instaticTLSblock" in after[:40] else {}


def _shm_map(match: re.Match[str], after: str) -> dict[str, Any]:
    values: dict[str, Any] = {"tried_bytes": int(match.group(1))}
    return values | ({"name": match.group(2)} if match.group(2) else {})


def _bad_alloc(match: re.Match[str], after: str) -> dict[str, Any] | None:
    """A C++ allocation that failed; that of a library of a GPU says so."""
    device = re.search(r"cudaErrorMemoryAllocation|CUDAerrorat|rmm|cudaMalloc", after[:300])
    return None if device else _tried(match, after)


def _pinned(match: re.Match[str], after: str) -> dict[str, Any]:
    """What was asked for; some locales write it with a decimal comma."""
    return {"tried_bytes": to_bytes(match.group(1).replace(",", "."), match.group(2))}


HOST: tuple[Pattern, ...] = (
    Pattern(
        "cpu_alloc",
        words(r"insufficient memory \(attempted to allocate (\d[\d.]{0,24}) ([KMG]i?B)\)"),
        lambda match, after: None if backend(match) else _sized(match, after),
    ),
    Pattern("cpu_alloc", words(r"(?:failed|unable) to allocate CPU\w{0,12}? buffer (?:of size (\d+))?"), _tried),
    Pattern("cpu_alloc", words(rf"requires more system memory \({SIZE}\) than is available"), _sized),
    Pattern("cpu_alloc", words(rf"Requested [\dx]+ \({SIZE}\) array exceeds maximum array size"), _sized),
    Pattern(
        "cpu_alloc",
        words(r"Failed to allocate memory for requested buffer of size (\d+)"),
        lambda match, after: None if is_of_gpu(match) else _tried(match, after),
    ),
    Pattern(
        "cpu_alloc",
        words(
            r"DefaultCPUAllocator: (?:can't|can\u2019t) allocate memory: you tried to allocate (\d+) bytes"
            r"| DefaultCPUAllocator: not enough memory: you tried to allocate (?=(\d+)) \d+ bytes"
            r"| DefaultCPUAllocator: (?:can't allocate|not enough) memory"
            r"| data\. DefaultMobileCPUAllocator: [^:]{5,40}: you tried to allocate (\d+) bytes"
        ),
        _tried,
    ),
    Pattern("cpu_alloc", words(r"posix_memalign\(&data,gAlignment,nbytes\)==0\.12vs0")),
    Pattern("cpu_alloc", words(rf"\$ Torch: not enough memory: you tried to (?:re)?allocate {SIZE}"), _sized),
    Pattern("array_alloc", words(rf"Unable to allocate {SIZE} for an array"), _sized),
    Pattern("array_alloc", words(r"Unable to allocate array with shape | ArrayMemoryError(?!:Unabletoallocate)")),
    Pattern(
        "array_alloc", words(r"(?:ArrowMemoryError|Out of memory): (?:malloc|realloc) of size (\d+) failed"), _tried
    ),
    Pattern("array_alloc", words(r"Insufficient memory\) Failed to allocate (\d+) bytes"), _tried),
    Pattern("array_alloc", words(rf"cannot allocate vector of size {SIZE}"), _sized),
    Pattern(
        "memory_error",
        re.compile(r"^\s*(?:[\w.]*\.)?MemoryError\s*(?:$|:(?! std::bad_alloc: out_of_memory: CUDA))"),
        by_line=True,
    ),
    Pattern(
        "memory_error",
        words(
            r"java\.lang\.OutOfMemoryError | JavaScript heap out of memory | LoadError: OutOfMemoryError\(\)"
            r"| C error: out of memory | Out of memory\. Type \"help memory\""
            r"| virtual memory exhausted: | fatal error: runtime: out of memory"
        ),
    ),
    Pattern(
        "bad_alloc",
        words(
            r"std::bad_alloc | memory allocation of (\d+) bytes failed | failed to allocate memory: Cannot allocate"
            r"| tcmalloc: allocation failed (\d+)? | libc\+\+abi: \S{0,60}?bad_alloc "
            r"| terminate called\S{0,60}?bad_array_new_length"
        ),
        _bad_alloc,
    ),
    Pattern(
        "device_error_oom",
        words(r"std::bad_alloc: (?:out_of_memory: CUDA error | cudaErrorMemoryAllocation)"),
        lambda m, a: {"api": "CUDA"},
    ),
    Pattern(
        "errno_12",
        words(
            r"\[Errno 12\] (?:Cannot allocate memory|Not enough space) "
            r"| Cannot allocate memory \((?:errno=|os error )?12\)"
            r"| Java HotSpot\(TM\)[^!]{0,200}? There is insufficient memory for the Java Runtime "
            r"| os::commit_memory\(\S{5,80}failed"
        ),
        _errno_12,
    ),
    Pattern(
        "errno_12",
        words(r"(?:fork|clone|os\.fork|spawn|vfork|mmap|malloc): (?:retry: )? Cannot allocate memory"),
    ),
    Pattern("errno_12", words(r"initialization failed \(can't allocate memory\)")),
    Pattern("page_file", words(r"\[?WinError 1455\]? | The paging file is too small | os error 1455")),
    Pattern(
        "pinned",
        words(rf"could not allocate pinned host memory of size: (\d+) | failed to alloc {SIZE} bytes on host"),
        lambda match, after: {"tried_bytes": int(match.group(1))} if match.group(1) else {},
    ),
    Pattern("pinned", words(r"failed to allocate (\d[\d.,]{0,24}) ([KMG]i?B) of pinned memory"), _pinned),
    Pattern("pinned", words(r"(?:failed|unable) to allocate CUDA_Host buffer (?:of size (\d+))?"), _tried),
    Pattern(
        "pinned",
        words(
            r"cuMemHostAlloc failed | cudaHostAlloc failed "
            r"| cudaHostRegister (?:failed)?[^:]{0,40}: (?:out of memory|invalid)"
            r"| [Ff]ailed to (?:allocate|alloc|pin) [^.]{0,40}? pinned [^.]{0,40}? memory "
            r"| pinned memory allocation failed"
            r"| out of memory at \S{1,200}?CachingHostAllocator"
        ),
    ),
    Pattern(
        "shm_bus",
        words(
            r"insufficient shared memory \(shm\) | workers are out of shared memory"
            r"| DataLoader worker \(pid\(?s?\)? [\d,]+\) is killed by signal: Bus error"
        ),
    ),
    Pattern(
        "shm_write",
        words(
            r"unable to write to file </torch_[^>]{1,80}> | unable to (?:resize|allocate) (?:file|shared memory)"
            r" [^:]{0,100}:Nospaceleftondevice | Call to posix_fallocate failed :? No space left on device"
            r"| unable to open shared memory object </torch_[^>]{1,80}> in read-write mode: No space"
            r"| failed to extend /dev/shm/nccl-\w+ to (\d+) bytes"
            r"| Error while creating shared memory segment (?:/dev/shm/)? nccl[\w-]{0,60} (?:\(size (\d+)\))?"
            r"| /dev/shm/[^:]{0,80} No space left on device | No space left on device[^a-z]{0,8}'?/dev/shm"
            r"| ObjectStoreFullError"
            r"| open\([^!]{0,20}?/dev/shm/[^!]{0,200}? OSError: \[Errno 28\] No space left on device"
        ),
        _tried,
    ),
    Pattern("shm_write", words(r"SemLock[^!]{0,300}?\[Errno 28\] No space left on device")),
    Pattern("shm_map", words(r"unable to mmap (\d+) bytes from file <([^>]{1,80})>: Cannot allocate memory"), _shm_map),
    Pattern(
        "worker_killed",
        words(r"DataLoader worker \(pid\(?s?\)? ([\d,]+)\) is killed by signal: Killed"),
        lambda match, after: {"pid": match.group(1)},
    ),
)
