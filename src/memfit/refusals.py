"""Words with which allocators refuse memory, as rows: a training tells its own failures by them, a diagnosis those of logs.

A heading, then its patterns: a line each, continued on lines that are indented further. A pattern is matched against text
without white space, because consoles wrap inside words and numbers; its spaces are for the reader. Options:
``lines``: matched against each line as it is. ``any case``. ``by X``: X prints it, not the program. ``figures X``: its
figures are behind it. ``emitter X``: advice is in the words of library X. The first pattern that matches a place counts.

A named group is a figure: ``tried_kb`` in KiB, ``SIZE(tried)`` with its unit in the text (``SIZE_`` where a letter may
follow the unit). Sizes become ``tried_bytes``, counted in 1024s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

#: Sources: PyTorch 0.4 to 2.13 (c10/core, c10/cuda, ATen), cuDNN 9, NCCL 2.27, oneDNN 3, Level Zero, PJRT, and the
#: libraries that the rows name.
REFUSALS = r"""
# Devices
device_oom; figures torch
    (?P<api>CUDA|HIP|XPU|NPU|MUSA|MLU) out of memory (?!\.Freeingcached)
        (?:\. (?:Tried to allocate (?:SIZE(tried)|more than SIZE_(over)))?)?
pinned
    could not allocate pinned host memory of size: (?P<tried_b>\d+)
    failed to alloc (?P<tried_b>\d+) bytes on host: CUDA_ERROR_OUT_OF_MEMORY
    (?:cuMemHostAlloc|cudaHostAlloc) failed | cudaHostRegister (?:failed)?[^:]{0,40}: (?:out of memory|invalid)
        | pinned memory allocation failed
    failed to allocate SIZE(tried) of pinned memory
    (?:failed|unable) to allocate CUDA_Host buffer (?:of size (?P<tried_b>\d+))?
    [Ff]ailed to (?:allocate|alloc|pin) [^.]{0,40}? pinned [^.]{0,40}? memory
device_refused; emitter jax
    (?:RESOURCE_EXHAUSTED|Resource exhausted):\S{0,80}? Out of memory (?:while)? (?:trying to allocate
        |allocating) SIZE_(tried)
    (?:RESOURCE_EXHAUSTED|Resource exhausted):\S{0,120}? (?:Attempting to (?:allocate|reserve)
        |Failed to allocate request for) SIZE_(tried)
    Ran out of memory in memory space hbm (?:\. Used [\d.]+[KMGT]? of (?P<total>[\d.]+) (?P<total_u>[KMGT]))?
device_refused; emitter rmm
    std::bad_alloc: (?:(?:out_of_memory:)? (?:CUDA error|RMM failure) | cudaErrorMemoryAllocation) | RMM_ERROR_OUT_OF_MEMORY
device_refused
    (?:allocating SIZE(tried) on device \d+:)? cudaMalloc (?:Async|retry)? failed: out of memory
    Error Code 2: OutOfMemory \(Requested size was (?P<tried_b>\d+) bytes
    cuMemAllocAsync failed to allocate (?P<tried_b>\d+) bytes
    failed to allocate [\d.]+[KMGT]i?B? \((?P<tried_b>\d+) bytes\) from device: (?:CUDA_ERROR_OUT_OF_MEMORY|(?P<api>[hH](?:ip|IP)))
    (?P<api>MIOpen) Error:[^!]{1,120}? Memory not available to allocate buffer: (?P<tried_b>\d+)
    Memory allocation error on worker \d+:[^!]{0,200}? Requested memory: (?P<tried>\d[\d.]*) (?P<tried_u>[KMGT]i?B)?
device_refused; emitter paddle
    Out of memory error on GPU \d+\. Cannot allocate SIZE(tried)
    enforce allocating <= available failed, (?P<tried_b>\d+)
device_refused; emitter vllm
    No available memory for the cache blocks | Not enough memory\. Please try to \w{1,12}? --mem-fraction
    \((?P<tried>[\d.]+)(?P<tried_u>GiB) KV cache is needed, which is larger than the available KV cache
device_refused; emitter vllm.start
    Free memory on device (?:cuda:\d+)? \([\d.]+/(?P<total>[\d.]+)(?P<total_u>GiB)\) on startup is less
device_refused
    (?:CUDA|(?P<api>HIP)) [Ee]rror (?:\(\d+\))?:? ?out of memory
        | cuda runtime error \(2\):? out of memory | THCudaCheck FAIL file= \S{1,300}? error=2 : out of memory
        | cudaErrorMemoryAllocation | (?<!onhost:)CUDA_ERROR_OUT_OF_MEMORY | error == cudaSuccess \(2 vs\. 0\)
        | Out of memory on device\. | CUDA error 2 at [^:!]{1,200}?:\d+: out of memory | \[CUDA\] out of memory
        | Error Code 2: OutOfMemory | No executable batch size found, reached zero | Cuda Runtime \(out of memory\)
        | (?P<api2>hip)ErrorOutOfMemory | CUDA driver error: out of memory | CudaOutOfMemory
        | out of GPU and shared host memory | (?:cuda|cuMem)\w*Alloc\w* failed (?:with error code 2|: out of memory) | GPU memory allocation failed
device_refused; emitter cupy; figures cupy
    (?:cupy\.cuda\.memory\.OutOfMemoryError: | [Ee]xception[^:]{0,40}:) (?:Out of memory allocating|out of memory to allocate)
        (?P<tried_b>[\d,]+) bytes
device_refused; figures julia
    Out of GPU memory trying to allocate SIZE(tried)
device_refused; figures summary
    CUDA OOMs: [1-9]\d*
device_refused; emitter tf; figures tensorflow
    (?:Resource ?Exhausted ?Error|Resource exhausted)\S{0,200}?OOM when allocating tensor
        | OOM when allocating tensor (?:with|of) shape
device_refused; emitter ggml
    insufficient memory \(attempted to allocate SIZE(tried)\)
    (?:failed|unable) to allocate (?P<backend>(?:CUDA|ROCm|Vulkan|Metal|MTL|SYCL|CPU)(?!_Host)\w{0,12}?) buffer
        (?:of size (?P<tried_b>\d+))?
device_refused; emitter ort
    Failed to allocate memory for requested buffer of size (?P<tried_b>\d+)
other_device; emitter torch.mps
    MPS backend out of memory \(MPS allocated: SIZE(allocated), (?:other allocations: SIZE(other),)?
        max allowed: SIZE(total)\) (?:\. Tried to allocate SIZE(tried))?
    Invalid buffer size: SIZE(tried)
other_device
    Allocation is out of device memory
    Device memory allocation of size (?P<tried_b>\d+) failed
    (?:VK_ERROR_|Error) (?:OUT_OF_DEVICE_MEMORY|OutOfDeviceMemory)
    MODULE: (?:SYNHELPER|PT_DEVMEM) \S{0,20}?[Aa]llocation (?:of|failed for) size ::(?P<tried_b>\d+)
other_device; emitter metal
    \[METAL\][^!]{0,80}? Insufficient Memory | kIOGPUCommandBufferCallbackErrorOutOfMemory
    Attempting to allocate (?P<tried_b>\d+) bytes which is greater than the maximum allowed buffer
other_device; figures torch
    can NOT allocate memory block with size larger than \S{1,8}! (?P<bare>) (?:Tried to allocate SIZE(tried))?
xpu_error
    (?:UR_RESULT|PI|ZE_RESULT)_ERROR_(?:OUT_OF_(?:DEVICE_MEMORY|RESOURCES)|MEM_OBJECT_ALLOCATION_FAILURE)
library_alloc
    (?:CU|HIP)(?:BLAS|DNN|FFT|RAND|SOLVER|SPARSE)_\w{0,50}?ALLOC(?:ATION)?_FAILED
        | Unable to find a valid cuDNN algorithm to run convolution | failed to create cublas handle
        | rocblas_status_memory_error | miopenStatusAllocFailed | CUSPARSE_STATUS_INSUFFICIENT_RESOURCES
        | Dst tensor is not initialized
library_alloc; emitter thrust
    (?:instance of ')? (?:thrust|cub|raft|cudf|rmm)::[\w:]{0,40}?(?:bad_alloc|out_of_memory)
nccl_oom; emitter nccl
    (?:Cuda|HIP) failure (?:\d+)? '?outofmemory
        | Failed to CUDA (?:host)? (?:c|m)alloc (?:async)? (?P<tried_b>\d+)?
device_oom; lines
    ^\s*(?:E +)?(?:torch\.(?:cuda\.)?|jax\.\w+\.)?OutOfMemoryError(?P<bare>)(?=\s|:|$)

# Host memory
host_refused
    Default(?:Mobile)?CPUAllocator: (?:[^:]{5,40}: you tried to allocate (?P<tried_b>\d+) bytes
        |(?:can't allocate|not enough) memory)
    posix_memalign\(&data,gAlignment,nbytes\)==0\.12vs0
    \$ Torch: not enough memory: you tried to (?:re)?allocate SIZE(tried)
    requires more system memory \(SIZE(tried)\) than is available
    Requested [\dx]+ \(SIZE(tried)\) array exceeds maximum array size
    Unable to allocate SIZE(tried) for an array | Unable to allocate array with shape
    (?:ArrowMemoryError|Out of memory): (?:malloc|realloc) of size (?P<tried_b>\d+) failed
    Insufficient memory\) Failed to allocate (?P<tried_b>\d+) bytes
    cannot allocate vector of size SIZE(tried)
    java\.lang\.OutOfMemoryError | JavaScript heap out of memory | LoadError: OutOfMemoryError\(\)
        | C error: out of memory | Out of memory\. Type \"help memory\"
    memory allocation of (?P<tried_b>\d+) bytes failed
        | (?:[A-Z]{2,8}_)?(?:RESULT_)?(?:ERROR_)?OUT_OF_HOST_MEMORY | Out [Oo]f [Hh]ost [Mm]emory
host_refused; emitter windows
    \[?WinError (?:8|14|1450|1455)(?!\d)\]? | The paging file is too small | Die Auslagerungsdatei ist zu klein
        | Le fichier de pagination est insuffisant | El archivo de paginación es demasiado pequeño | 页面文件太小
        | Файл подкачки слишком мал | O arquivo de paginação é muito pequeno | Il file di paging è troppo piccolo
host_refused; any case
    out of memory (?:, malloc failed\(|:)? (?:cannot|tried to)? allocat(?:e|ing) (?P<tried_b>\d+) (?:-byte|bytes)
    (?<!cuda) fatal error: (?:runtime:)? (?:out of memory|cannot allocate memory)
        | virtual memory exhausted
host_refused; lines
    ^\s*(?!\S*(?:cuda|opencl))(?:[\w.]*\.)?(?:(?:Arrow)?MemoryError|OutOfMemoryException)\s*(?:$|:(?!.*(?:CUDA error|RMM failure|cudaError|device memory)))
bad_alloc
    (?:instance of ')? std::bad_alloc (?!:(?:out_of_memory:)?(?:CUDA|cuda|RMM))(?!.{0,300}?(?:cudaErrorMemoryAllocation|rmm|cudaMalloc))
bad_alloc; lines
    \bcould not (?:create|execute) a primitive\s*$|\bcould not create a memory object\s*$
        |terminate called.{0,60}bad_array_new_length|\bbad allocation\s*$
shm
    unable to open shared memory object </torch_[^>]{1,80}> in read-write mode: No space
        | unable to (?:write to|allocate shared memory \(shm\) for) file </torch_[^>]{1,80}>
        | unable to (?:resize|allocate) (?:file|shared memory) (?![^<]{0,20}</(?!dev/shm)\w{1,40}/) [^:]{0,100}:Nospaceleftondevice
    unable to mmap (?P<tried_b>\d+) bytes from file <[^>]{1,80}>: Cannot allocate memory
no_fork
    \[Errno 12\] (?:Cannot allocate memory|Not enough space) (?!instaticTLS)
        | Cannot allocate memory \((?:errno=|os error )?12\)
        | (?:fork|clone|spawn|mmap|malloc|failed|object): (?:retry: )? Cannot allocate memory
        | initialization failed \(can't allocate memory\) | os::commit_memory\(\S{5,80}failed
        | insufficient memory for the Java Runtime | failed to allocate memory: Cannot allocate
    tcmalloc: large alloc (?P<tried_b>\d+) bytes == \(nil\)
"""


def rows_of(table: str) -> Iterator[tuple[str, list[str], re.Pattern[str]]]:
    """Yield the heading, the options and the regular expression of each row of a table."""
    for block in re.split(r"\n(?=\w)", re.sub(r"\n#.*|\n(?=\n)", "", table)):
        head, *patterns = re.split(r"\n    (?! )", block.strip("\n"))
        name, *options = head.split("; ")
        for pattern in patterns:
            yield name, options, compile_pattern(re.sub(r"\n +", "", pattern), options)


def compile_pattern(text: str, options: Sequence[str] = ()) -> re.Pattern[str]:
    def size(match: re.Match[str]) -> str:
        last = "[KMGT]" if match[1] else "[KMGT](?![a-zA-Z])"
        return rf"(?P<{match[2]}>\d[\d.,]{{0,24}})(?P<{match[2]}_u>bytes?|[KMGTE]i?[Bb]|{last})"

    text = text if "lines" in options else text.replace(" ", "")
    return re.compile(re.sub(r"SIZE(_?)\((\w+)\)", size, text), re.IGNORECASE if "any case" in options else 0)
