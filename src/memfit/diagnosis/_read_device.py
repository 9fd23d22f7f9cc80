"""Messages of accelerators that ran out of memory, with their figures: torch from 0.1 to 2.x, JAX and TensorFlow."""

from __future__ import annotations

import re
from typing import Any

from memfit.diagnosis._facts import SIZE, Pattern, to_bytes, words

_FIELD = {
    "device": words(r"[GNX]PU (\d+)(?=;|has a total)"),
    "total": words(rf"(?:;{SIZE} total capacity | has a total capaci?ty of {SIZE})"),
    "allocated": words(rf"(?:;{SIZE} already allocated | Of the allocated memory {SIZE} is allocated by PyTorch)"),
    "free": words(rf"(?:;{SIZE} free | of which {SIZE} is free)"),
    "reserved": words(rf";{SIZE} reserved in total by"),
    "cached": words(rf";{SIZE} cached"),
    "slack": words(rf"and {SIZE} is reserved by PyTorch but unallocated"),
    "allowed": words(rf"{SIZE} allowed;"),
    "process": words(rf"this process has {SIZE} memory in use"),
}
_OTHERS = words(rf"Process \d+ has {SIZE} memory in use")
#: What ends a message's fields: the next message, or its advice.
_END = words(
    r"out of memory\. Tried | See documentation | Traceback \(most | If reserved (?:memory is >>|but unallocated)"
)
_GPU = re.compile(r"gpu|cuda|nvidia", re.IGNORECASE)
_TPU = re.compile(r"TPU|hbm|HBM")
#: How much of the text around a message is asked whether it is about a GPU.
_NEAR = 20_000


def device_figures(match: re.Match[str], after: str) -> dict[str, Any]:
    """The figures of torch's message, all in bytes; ``reserved_bytes`` is the total that the allocator held."""
    stop = _END.search(after)
    text = match.group(0) + after[: stop.start() if stop else None]
    values: dict[str, Any] = {"api": match.group("api").upper()}
    if match.group("size"):
        values["tried_bytes"] = to_bytes(match.group("size"), match.group("unit"))
    reach = 0
    for name, regex in _FIELD.items():
        found = regex.search(text)
        if not found:
            continue
        reach = max(reach, found.end() - len(match.group(0)))
        groups = [group for group in found.groups() if group is not None]
        if name == "device":
            values["device"] = int(groups[0])
        else:
            values[f"{name}_bytes"] = to_bytes(groups[0], groups[1])
    allocated = values.get("allocated_bytes")
    if allocated is not None and "reserved_bytes" not in values:
        rest = values.pop("cached_bytes", values.get("slack_bytes"))
        if rest is not None:
            values["reserved_bytes"] = allocated + rest
    others = [to_bytes(*found.groups()) for found in _OTHERS.finditer(text)]
    if others:
        values["others_bytes"] = sum(others)
    return values | {"_reach": reach}


def _mps(match: re.Match[str], after: str) -> dict[str, Any]:
    tried = words(rf"Tried to allocate {SIZE}").search(after[:80])
    sizes = [to_bytes(match.group(at), match.group(at + 1)) for at in (1, 3, 5) if match.group(at)]
    values: dict[str, Any] = dict(zip(("allocated_bytes", "other_bytes", "total_bytes"), sizes, strict=False))
    if len(sizes) == 2:  # an old form without other allocations
        values = {"allocated_bytes": sizes[0], "total_bytes": sizes[1]}
    if tried:
        values["tried_bytes"] = to_bytes(tried.group(1), tried.group(2))
        values["_reach"] = tried.end()
    return values


def _xla(match: re.Match[str], after: str) -> dict[str, Any]:
    """A refusal of XLA's, on a GPU where the text around it names one, and what was asked for."""
    number = match.groupdict().get("bytes")
    near = match.string[max(0, match.start() - _NEAR) : match.end() + _NEAR]
    values: dict[str, Any] = {"gpu": bool(_GPU.search(near)) and not _TPU.search(match.group(0) + after[:300])}
    if number:
        values["tried_bytes"] = int(number.replace(",", ""))
    elif match.groupdict().get("size"):
        values["tried_bytes"] = to_bytes(match["size"], match["unit"])
    return values


def _hbm(match: re.Match[str], after: str) -> dict[str, Any]:
    values = _xla(match, after)
    return values | ({"total_bytes": to_bytes(match["total"], match["of"])} if match["total"] else {})


def _tensorflow(match: re.Match[str], after: str) -> dict[str, Any]:
    near = match.group(0) + after[:600]
    values: dict[str, Any] = {"gpu": "GPU" in near or "gpu:" in near}
    values["cpu"] = "device:CPU" in near or "CPU:0byallocator" in near or "allocatorcpu" in near
    limit = re.search(r"Limit:(\d{6,})InUse:(\d+)", match.string[max(0, match.start() - _NEAR) : match.end() + _NEAR])
    return values | ({"total_bytes": int(limit[1]), "allocated_bytes": int(limit[2])} if limit else {})


def _not_a_failure(match: re.Match[str], after: str) -> dict[str, Any] | None:
    return {"what": "a warning of TensorFlow's allocator"} if "isnotafailure" in after[:260] else None


def _library(match: re.Match[str], after: str) -> dict[str, Any]:
    return {"library": "cuBLAS" if "CUBLAS" in match.group(0).upper() else "cuDNN"}


def _summary(match: re.Match[str], after: str) -> dict[str, Any]:
    """Torch's own table of its allocator; MB there are MiB."""
    values: dict[str, Any] = {"api": "CUDA"}
    for name, title in (("allocated_bytes", r"\|Allocatedmemory\|"), ("reserved_bytes", r"\|GPUreservedmemory\|")):
        found = re.search(rf"{title}(\d+)([KMGT]?i?B)", after)
        if found:
            values[name] = to_bytes(found[1], found[2])
    return values


def _sized(match: re.Match[str], after: str) -> dict[str, Any]:
    """What was asked for, where the message says it as a size or in bytes."""
    values: dict[str, Any] = {"api": "HIP" if match.group(0).lower().startswith("hip") else "CUDA"}
    found = match.groupdict()
    if found.get("size"):
        values["tried_bytes"] = to_bytes(found["size"], found["unit"])
    elif found.get("bytes"):
        values["tried_bytes"] = int(found["bytes"].replace(",", ""))
    return values


_BACKEND = re.compile(r"(?i:cuda|rocm|metal|mtl|vulkan|sycl|hip)")
_ARENA = re.compile(r"cuda|gpu|tensorrt", re.IGNORECASE)


def backend(match: re.Match[str]) -> str:
    """The device that a name in ggml's message, or in the function before it, stands for; empty for the processor.

    >>> backend(re.search("insufficient memory", "ggml_backend_cuda_buffer_type_alloc_buffer: insufficient memory"))
    'CUDA'
    """
    name = (
        match.groupdict().get("name") or match.string[max(0, match.start() - 60) : match.start()].rpartition("ggml")[2]
    )
    found = _BACKEND.search(name)
    return found[0].upper() if found else ""


def _ggml(match: re.Match[str], after: str) -> dict[str, Any] | None:
    device = backend(match)
    return _sized(match, after) | {"api": device} if device else None


def is_of_gpu(match: re.Match[str]) -> bool:
    """Whether the text around a message of onnxruntime's arena speaks of a GPU."""
    return bool(_ARENA.search(match.string[max(0, match.start() - _NEAR) : match.end() + _NEAR]))


def _julia(match: re.Match[str], after: str) -> dict[str, Any]:
    """What was asked for, and the device's and the pool's sizes where its report follows."""
    values = _sized(match, after)
    total = re.search(rf"GPUmemoryusage:[\d.]+%\({SIZE}/{SIZE}\)", after[:300])
    pool = re.search(rf"Memorypoolusage:{SIZE}\({SIZE}reserved", after[:400])
    values |= {"total_bytes": to_bytes(total[3], total[4])} if total else {}
    if pool:
        values |= {"allocated_bytes": to_bytes(pool[1], pool[2]), "reserved_bytes": to_bytes(pool[3], pool[4])}
    return values


def _cupy(match: re.Match[str], after: str) -> dict[str, Any]:
    values = _sized(match, after)
    for name, title in (("allocated_bytes", "allocatedsofar:"), ("total_bytes", "limitsetto:")):
        found = re.search(rf"{title}([\d,]+)bytes", after[:200])
        values |= {name: int(found[1].replace(",", ""))} if found else {}
    return values


def _serving(match: re.Match[str], after: str) -> dict[str, Any]:
    """What a server of models lacks for its cache; it looks for that while it is being built."""
    found = match.groupdict()
    values: dict[str, Any] = {"api": "CUDA", "phase": "build"}
    for name in ("total", "tried"):
        if found.get(name):
            values[f"{name}_bytes"] = to_bytes(found[name], found["unit"])
    return values


_TAGGED = r"(?P<size>\d[\d.]{0,24})(?P<unit>bytes?|[KMGTE]i?B|[KMGT])"
_REFUSED = Pattern(
    "device_error_oom",
    words(
        r"(?:CUDA|HIP) error (?:\(\d+\))?:? ?out of memory | cuda runtime error \(2\):? out of memory"
        r"| THCudaCheck FAIL file= \S{1,300}? error=2 : out of memory | hipErrorOutOfMemory"
        r"| cudaErrorMemoryAllocation | CUDA driver error: out of memory | HIP runtime error: out of memory"
        r"| CudaOutOfMemory | cuMemAlloc failed: out of memory"
        r"| cudaMalloc failed with error code 2 | error == cudaSuccess \(2 vs\. 0\)"
        r"| Out of memory on device\. To view | Out of memory on device\.[^!]{0,80}?gpuDevice"
        r"| CUDA error 2 at [^:!]{1,200}?:\d+: out of memory | \[CUDA\] out of memory | Error Code 2: OutOfMemory"
        r" (?:\(Requested size was (?P<bytes>\d+) bytes)? | No executable batch size found, reached zero"
        r"| Cuda Runtime \(out of memory\) | CUDA failure 2: out of memory | GPU memory allocation failed"
    ),
    _sized,
)

DEVICE: tuple[Pattern, ...] = (
    Pattern(
        "device_oom",
        words(
            r"(?P<api>CUDA|HIP|XPU|NPU|MUSA|MLU) out of memory (?:\. (?:Tried to allocate "
            r"(?P<size>\d[\d.]{0,24}) (?P<unit>bytes?|[KMGTE]i?B))?)?"
        ),
        device_figures,
    ),
    _REFUSED,
    Pattern("device_error_oom", words(r"CUDA [Ee]rror: out of memory"), _sized),
    Pattern(
        "device_error_oom",
        words(
            r"cuMemAllocAsync failed to allocate (?P<bytes>\d+) bytes "
            r"| failed to allocate [\d.]+[KMGT]i?B? \((?P<b2>\d+)bytes\)"
            r" from device: CUDA_ERROR_OUT_OF_MEMORY | CUDA_ERROR_OUT_OF_MEMORY"
        ),
        lambda match, after: (
            {"api": "CUDA"}
            | ({"tried_bytes": int(match["bytes"] or match["b2"])} if match["bytes"] or match["b2"] else {})
        ),
    ),
    Pattern(
        "device_error_oom",
        words(rf"(?:allocating {_TAGGED} on device \d+:)? cudaMalloc (?:Async|retry)? failed: out of memory"),
        _sized,
    ),
    Pattern(
        "device_error_oom",
        words(
            r"cupy\.cuda\.memory\.OutOfMemoryError: (?:Out of memory allocating|out of memory to allocate)"
            r" (?P<bytes>[\d,]+) bytes"
        ),
        _cupy,
    ),
    Pattern("device_error_oom", words(rf"Out of GPU memory trying to allocate {_TAGGED}"), _julia),
    Pattern(
        "device_error_oom",
        words(
            r"Memory allocation error on worker \d+:[^!]{0,200}? Requested memory: (?P<size>\d[\d.]*)"
            r" (?P<unit>[KMGT]i?B)?"
        ),
        lambda match, after: {"api": "CUDA", "tried_bytes": to_bytes(match["size"], match["unit"] or "B")},
    ),
    Pattern(
        "device_error_oom",
        words(
            r"insufficient memory \(attempted to allocate (?P<size>\d[\d.]{0,24}) (?P<unit>[KMG]i?B)\)"
            r"| (?:failed|unable) to allocate (?P<name>(?:CUDA|ROCm|Vulkan|Metal|MTL|SYCL)(?!_Host)\w{0,12}?) buffer"
            r" (?:of size (?P<bytes>\d+))?"
        ),
        _ggml,
    ),
    Pattern(
        "device_error_oom",
        words(r"Failed to allocate memory for requested buffer of size (?P<bytes>\d+)"),
        lambda match, after: _sized(match, after) if is_of_gpu(match) else None,
    ),
    Pattern(
        "device_error_oom",
        words(
            r"No available memory for the cache blocks"
            r"| Free memory on device (?:cuda:\d+)? \([\d.]+/ (?P<total>[\d.]+) (?P<unit>GiB)\) on startup is less"
        ),
        _serving,
    ),
    Pattern(
        "device_error_oom",
        words(
            r"\( (?P<tried>[\d.]+) (?P<unit>GiB) KV cache is needed, which is larger than the available KV cache memory"
        ),
        _serving,
    ),
    Pattern("device_error_oom", words(rf"Out of memory error on GPU \d+\. Cannot allocate {_TAGGED}"), _sized),
    Pattern(
        "device_error_oom",
        words(
            r"failed to allocate [\d.]+[KMGT]i?B? \((?P<bytes>\d+)bytes\) from device: [hH](?:ip|IP)"
            r"| MIOpen Error:[^!]{1,120}? Memory not available to allocate buffer: (?P<buffer>\d+)"
        ),
        lambda match, after: {"api": "HIP", "tried_bytes": int(match["bytes"] or match["buffer"])},
    ),
    Pattern("device_error_oom", words(r"CUDA OOMs: [1-9]\d*"), _summary),
    Pattern(
        "xpu_oom",
        words(
            r"UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY | PI_ERROR_OUT_OF_RESOURCES | UR_RESULT_ERROR_OUT_OF_RESOURCES"
            r"| PI_ERROR_OUT_OF_HOST_MEMORY | ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY "
            r"| PI_ERROR_MEM_OBJECT_ALLOCATION_FAILURE"
        ),
    ),
    Pattern(
        "mps_oom",
        words(
            rf"MPS backend out of memory \(MPS allocated: {SIZE} (?:, other allocations: {SIZE})?"
            rf" , max allowed: {SIZE}\)"
        ),
        _mps,
    ),
    Pattern(
        "mps_oom",
        words(
            rf"MPS backend out of memory (?!\(MPS) | Invalid buffer size: {_TAGGED} "
            rf"| kIOGPUCommandBufferCallbackErrorOutOfMemory"
        ),
        lambda match, after: {"tried_bytes": to_bytes(match["size"], match["unit"])} if match["size"] else {},
    ),
    Pattern(
        "library_alloc",
        words(
            r"CUBLAS_STATUS_ALLOC_FAILED | CUDNN_STATUS_ALLOC_FAILED | failed to create cublas handle"
            r"| Unable to find a valid cuDNN algorithm to run convolution | CUSPARSE_STATUS_ALLOC_FAILED"
            r"| CUSOLVER_STATUS_ALLOC_FAILED | CUFFT_ALLOC_FAILED | HIPBLAS_STATUS_ALLOC_FAILED"
            r"| CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
        ),
        _library,
    ),
    Pattern(
        "nccl_oom",
        words(
            r"NCCL WARN (?:Cuda|HIP) failure (?:\d+)? '?outofmemory | Failed to CUDA (?:host)? (?:c|m)alloc (?:async)?"
            r" (?P<bytes>\d+)?"
        ),
        _sized,
    ),
    Pattern(
        "xla_oom",
        words(
            r"(?:RESOURCE_EXHAUSTED"
            r"|Resource exhausted):\S{0,80}? Out of memory (?:while)? (?:trying to allocate"
            r"|allocating)"
            rf" (?:(?P<bytes>\d+) bytes | {_TAGGED})"
        ),
        _xla,
    ),
    Pattern(
        "xla_oom",
        words(
            r"(?:RESOURCE_EXHAUSTED|Resource exhausted):\S{0,120}? (?:Attempting to (?:allocate|reserve)|"
            rf"Failed to allocate request for) {_TAGGED}"
        ),
        _xla,
    ),
    Pattern(
        "xla_oom",
        words(r"Ran out of memory in memory space hbm (?:\. Used [\d.]+[KMGT]? of (?P<total>[\d.]+) (?P<of>[KMGT]))?"),
        _hbm,
    ),
    Pattern(
        "tf_oom",
        words(
            r"(?:Resource ?Exhausted ?Error|Resource exhausted)\S{0,200}?OOM when allocating tensor"
            r"| OOM when allocating tensor (?:with|of) shape | failed to allocate memory\[Op:"
        ),
        _tensorflow,
    ),
    Pattern("pressure", words(r"ran out of memory trying to allocate"), _not_a_failure),
    Pattern(
        "pressure",
        words(r"Allocation of \d+ exceeds \d+% of (?:free)? system memory"),
        lambda match, after: {"what": "a warning of TensorFlow's"},
    ),
    Pattern(
        "pressure",
        words(r"(?<!\d)\d{1,9} pytorch allocator cache flushes since last step"),
        lambda match, after: {"what": "flushes of torch's cache under pressure"},
    ),
    Pattern(
        "pressure",
        words(r"Can't reduce memory use below [\d.]+[KMGT]?i?B \( \d+ bytes\) by rematerialization"),
        lambda match, after: {"what": "a warning of XLA's"},
    ),
)
