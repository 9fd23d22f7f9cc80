"""Find what programs print when they die: one table of signatures, and one reader of the figures in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from memfit.diagnosis._signs import Kind, Sign
from memfit.diagnosis._text import Stream

#: A heading, then its patterns: a line each, continued on lines that are indented further. A pattern is matched against
#: text without white space, because consoles wrap inside words and numbers; its spaces are for the reader. Options:
#: ``lines``: matched against each line as it is. ``any case``. ``by X``: X prints it, not the program. ``figures X``: its
#: figures are behind it, by ``_FIGURES``. Of patterns that match the same place the first one counts.
#:
#: A named group is a figure: ``tried_kb`` in KiB, ``SIZE(tried)`` with its unit in the text (``SIZE_`` where a letter may
#: follow the unit). Sizes become ``tried_bytes``, counted in 1024s. ``emitter X``: advice is in the words of library X.
_TABLE = r"""
# Devices
device_oom; figures torch
    (?P<api>CUDA|HIP|XPU|NPU|MUSA|MLU) out of memory
        (?:\. (?:Tried to allocate (?:SIZE(tried)|more than SIZE_(over)))?)?
pinned
    could not allocate pinned host memory of size: (?P<tried_b>\d+)
    failed to allocate SIZE(tried) of pinned memory
    (?:failed|unable) to allocate CUDA_Host buffer (?:of size (?P<tried_b>\d+))?
    [Ff]ailed to (?:allocate|alloc|pin) [^.]{0,40}? pinned [^.]{0,40}? memory
        | out of memory at \S{1,200}?CachingHostAllocator
device_refused; emitter jax
    (?:RESOURCE_EXHAUSTED|Resource exhausted):\S{0,80}? Out of memory (?:while)? (?:trying to allocate
        |allocating) (?P<tried_b>\d+) bytes(?!\()
    (?:RESOURCE_EXHAUSTED|Resource exhausted):\S{0,80}? Out of memory (?:while)? (?:trying to allocate
        |allocating) SIZE_(tried)
    (?:RESOURCE_EXHAUSTED|Resource exhausted):\S{0,120}? (?:Attempting to (?:allocate|reserve)
        |Failed to allocate request for) SIZE_(tried)
    Ran out of memory in memory space hbm (?:\. Used [\d.]+[KMGT]? of (?P<total>[\d.]+) (?P<total_u>[KMGT]))?
device_refused; emitter rmm
    std::bad_alloc: (?:out_of_memory: (?:CUDA error|RMM failure) | cudaErrorMemoryAllocation)
device_refused
    (?:allocating SIZE(tried) on device \d+:)? cudaMalloc (?:Async|retry)? failed: out of memory
    Error Code 2: OutOfMemory \(Requested size was (?P<tried_b>\d+) bytes
    cuMemAllocAsync failed to allocate (?P<tried_b>\d+) bytes
    failed to allocate [\d.]+[KMGT]i?B? \((?P<tried_b>\d+) bytes\) from device: CUDA_ERROR_OUT_OF_MEMORY
    failed to allocate [\d.]+[KMGT]i?B? \((?P<tried_b>\d+) bytes\) from device: (?P<api>[hH](?:ip|IP))
    (?P<api>MIOpen) Error:[^!]{1,120}? Memory not available to allocate buffer: (?P<tried_b>\d+)
    Out of memory error on GPU \d+\. Cannot allocate SIZE(tried)
    Memory allocation error on worker \d+:[^!]{0,200}? Requested memory: (?P<tried>\d[\d.]*) (?P<tried_u>[KMGT]i?B)
    Memory allocation error on worker \d+:[^!]{0,200}? Requested memory: (?P<tried_b>\d+)(?![\d.]*[KMGT])
device_refused; emitter vllm
    No available memory for the cache blocks
    \((?P<tried>[\d.]+)(?P<tried_u>GiB) KV cache is needed, which is larger than the available KV cache
device_refused; emitter vllm.start
    Free memory on device (?:cuda:\d+)? \([\d.]+/(?P<total>[\d.]+)(?P<total_u>GiB)\) on startup is less
device_refused
    CUDA [Ee]rror: out of memory | (?:CUDA|(?P<api>HIP)) error (?:\(\d+\))?:? ?out of memory
        | cuda runtime error \(2\):? out of memory | THCudaCheck FAIL file= \S{1,300}? error=2 : out of memory
        | cudaErrorMemoryAllocation | CUDA_ERROR_OUT_OF_MEMORY | error == cudaSuccess \(2 vs\. 0\)
        | Out of memory on device\. To view | Out of memory on device\.[^!]{0,80}?gpuDevice
        | CUDA error 2 at [^:!]{1,200}?:\d+: out of memory | \[CUDA\] out of memory | Error Code 2: OutOfMemory
        | No executable batch size found, reached zero | Cuda Runtime \(out of memory\)
device_refused; emitter cupy; figures cupy
    cupy\.cuda\.memory\.OutOfMemoryError: (?:Out of memory allocating|out of memory to allocate)
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
xpu_error
    (?:UR_RESULT|PI|ZE_RESULT)_ERROR_(?:OUT_OF_(?:DEVICE_MEMORY|RESOURCES)|MEM_OBJECT_ALLOCATION_FAILURE)
library_alloc
    (?:CU|HIP)(?:BLAS|DNN|FFT|RAND|SOLVER|SPARSE)_\w{0,50}?ALLOC(?:ATION)?_FAILED
        | Unable to find a valid cuDNN algorithm to run convolution | failed to create cublas handle
        | rocblas_status_memory_error | miopenStatusAllocFailed | CUSPARSE_STATUS_INSUFFICIENT_RESOURCES
library_alloc; emitter thrust
    (?:instance of ')? (?:thrust|cub|raft|cudf|rmm)::[\w:]{0,40}?(?:bad_alloc|out_of_memory)
nccl_oom; emitter nccl
    (?:Cuda|HIP) failure (?:\d+)? '?outofmemory
        | Failed to CUDA (?:host)? (?:c|m)alloc (?:async)? (?P<tried_b>\d+)?
device_oom; lines
    ^\s*(?:E +)?(?:torch\.(?:cuda\.)?|jax\.\w+\.)?OutOfMemoryError(?P<bare>)(?=\s|:|$)
chip_memory
    OutOfResources: | out of resource: shared memory | too many resources requested for launch
        | memory space [vs]mem

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
        | C error: out of memory | Out of memory\. Type \"help memory\" | \[?WinError 1455\]?
        | The paging file is too small
    memory allocation of (?P<tried_b>\d+) bytes failed | UR_RESULT_ERROR_OUT_OF_HOST_MEMORY
host_refused; lines
    ^\s*(?!\S*(?:cuda|opencl))(?:[\w.]*\.)?MemoryError\s*(?:$|:(?! std::bad_alloc: out_of_memory: CUDA))
bad_alloc
    std::bad_alloc (?!:out_of_memory:CUDA|:cudaError)(?!.{0,300}?(?:cudaErrorMemoryAllocation|rmm|cudaMalloc))
bad_alloc; lines
    \bcould not (?:create|execute) a primitive\s*$
shm
    insufficient shared memory \(shm\) | workers are out of shared memory
        | DataLoader worker \(pid\(?s?\)? [\d,]+\) is killed by signal: Bus error
        | unable to write to file </torch_[^>]{1,80}> | Call to posix_fallocate failed :? No space left on device
        | unable to (?:resize|allocate) (?:file|shared memory) (?![^<]{0,20}</(?!dev/shm)\w{1,40}/) [^:]{0,100}:Nospaceleftondevice
        | failed to extend /dev/shm/nccl-\w+ to (?P<tried_b>\d+) bytes
        | open\([^!]{0,20}?/dev/shm/[^!]{0,200}? OSError: \[Errno 28\] No space left on device
        | (?:SemLock|multiprocessing/(?:queues|shared_memory|heap|synchronize)\.py)[^!]{0,400}?\[Errno 28\] No space left on device
    unable to mmap (?P<tried_b>\d+) bytes from file <[^>]{1,80}>: Cannot allocate memory
    Error while creating shared memory segment (?:/dev/shm/)? nccl[\w-]{0,60} \(size (?P<tried_b>\d+)\)
    Error while creating shared memory segment (?:/dev/shm/)? nccl[\w-]{0,60}
no_fork
    \[Errno 12\] (?:Cannot allocate memory|Not enough space) (?!instaticTLS)
        | Cannot allocate memory \((?:errno=|os error )?12\)
        | (?:fork|clone|os\.fork|spawn|vfork|mmap|malloc): (?:retry: )? Cannot allocate memory
        | initialization failed \(can't allocate memory\)

# Schedulers and limits
cgroup_kill; by Slurm
    Detected (?P<count>\d+) oom[-_]kill events? (?:\(s\))? in (?:Step ?Id=|step )?
        (?P<step>[\w.+]+?(?=cgroup|\.Some|$|\.[A-Z]|srun|slurm|[^\w.+]))
    (?<![\w.-])(?P<node>\w[\w.-]{0,80}): tasks? (?P<tasks>[\d,-]+): Out Of Memory
    (?P<scope>Job|Step) (?P<step>[\d.\w]+) exceeded (?:virtual )? memory limit
        \((?P<used_kb>\d+) > (?P<limit_kb>\d+)\),? being killed
    (?:srun|slurmstepd): (?:error: )? Exceeded (?:job|step) memory limit (?!at)
cgroup_kill; lines; by Slurm
    \bOUT_OF_ME(?:MORY|M|\+|MO?\+)(?![\w])
limit_touched; by Slurm
    Exceeded (?:step|job) memory limit at some point
cgroup_kill; by the batch system; any case
    mem (?P<used_kb>\d+) kb exceeded limit (?P<limit_kb>\d+) kb
    (?:job|container)\S{0,60}? (?:exceed(?:s|ed|ing)|beyond|reaching|gone over)\S{0,24}? (?:mem|rss)\S{0,60}? limit(?!at)
        | Cgroup memory limit exceeded
cgroup_kill; by Dask's nanny
    exceeded (?!0%|0\.0*%) [\d.]+% memory budget\. Restarting
cgroup_kill; by memfit
    ended at its (?:wall|limit) by memfit
cgroup_kill; by the container's limit
    OOM ?Killed (?!\\?\"?[:=]\"?(?:false|0)) | container oom (?=[0-9a-f]{12})
        | [Cc]ontainer (?:\S{1,80}? was OOM[- ]? killed|killed due to memory usage)
global_kill; by the kubelet
    low on resource: memory | had condition: \[MemoryPressure\] | System OOM encountered
global_kill; by Ray's memory monitor; any case; figures ray
    (?:Task|Actor|Worker)s? (?:\(s\))? (?:was|were) killed due to the node running low on memory
global_kill; by Ray's memory monitor
    RayOutOfMemoryError:? (?:More than \d+%|Heap memory)
        | (?<!\d)[1-9]\d{0,8} Workers? \(tasks / actors\) killed due to memory pressure \(OOM\)

# The kernel
cgroup_kill; by the kernel; any case; figures rss
    Memory cgroup out of memory: Kill(?:ed)? process (?P<pid>\d{1,9}),? \((?P<task>[^)]{1,40})\)
cgroup_kill; by the kernel
    oom-kill: constraint=CONSTRAINT_MEMCG | Task in /\S{1,200}? killed as a result of limit of
        | memory: usage \d+ kB, limit \d+ kB, failcnt | Memory cgroup out of memory
global_kill; by the kernel
    oom-kill: constraint=CONSTRAINT_(?:NONE|MEMORY_POLICY|CPUSET) | ,global_oom,
oom_kill; by the kernel; figures rss
    (?<!cgroup)(?: Out of memory: )? Kill(?:ed)? process (?P<pid>\d{1,9}),? (?:UID \d+,?)? \((?P<task>[^)]{1,40})\)
oom_kill; by the kernel; any case
    invoked oom-killer: | killed by the OOM killer | killed by \"?OOM-?Killer\"?
        | Failed with result 'oom-kill'
global_kill; by systemd-oomd
    systemd-oomd(?:\[\d+\])?: Killed | systemd-oomd killed [1-9]
        | due to memory (?:pressure|used)[^!]{0,60}?for[^!]{0,120}?being [\d.]+% >
global_kill; by earlyoom
    sending SIG(?:TERM|KILL) to process \d+ (?:uid \d+)? \"[^\"]{1,40}\": (?:badness|oom_score)

# Deaths by a signal, however it is written: `_SIGNALS` has the heading
signal; lines
    : line \d+: +(?P<pid>\d{1,9}) +(?P<signal>Killed|Terminated|Hangup|Aborted|Bus error)\b
    (?:^|[%\])│|]) *(?P<signal>Killed|Terminated)\s*(?:\(core dumped\))?\s*$
signal
    (?:by|with|on|got|closing|Neg|<|\() [Ss]ignals? [.:]? (?:SIG)? (?P<signal>KILL|HUP|1|9|11|15) (?!\d)
        (?!\S{0,20}?by somebody else)
    Signal (?P<signal>9|15) \(SIG
    Received (?P<signal>1|15) death signal
    (?:tasks? [\d,-]+|worker \(pid\(?s?\)? [\d,]+\) is killed by signal): (?P<signal>Killed|Terminated|Aborted)
    (?:[Ee]xit|[Rr]eturn) (?:ed|s)? (?:with)? _? (?:[Cc]ode|[Ss]tatus)? (?:is)? [\"':=(]{0,3}
        (?P<signal>-(?:6|7|9|11|15)|1(?:34|35|37|39|43)) (?!\d)
killed; lines
    ^lost sys\.stderr$
killed
    Killed signal terminated program | killed with SIGKILL by somebody else (?P<stranger>)
    BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES =? (?:RANK \d+)? (?:PID (?P<pid>\d{1,9}))? [^=]{0,100}?
        =* (?:EXIT CODE: (?:9|137)(?!\d) | KILLED BY SIGNAL: 9 \()
    terminated abruptly while the future was running | One of the subprocesses has abruptly died during map
segfault; any case
    (?<!caused by a) Segmentation fault

# Other causes
walltime; any case
    DUE TO TIME LIMIT | TERM_RUNLIMIT | walltime \d+ exceeded limit \d+ | PBS: job killed: walltime
        | exceed(?:s|ed) (?:hard)? wallclock time
walltime; lines; any case
    CANCELLED.*time limit
preempted; any case
    DUE TO PREEMPTION | (?:was|been|being) preempted
        | spot (?:instance)? (?:interruption|termination) (?:notice|warning|detected|received)
        | \"EventType\": \"Preempt\"
node_fail; any case
    DUE TO NODE FAILURE | Node failure on | DUE TO NODE FAIL
cancelled
    \*\*\*(?:STEP|JOB)[\w.+]+ON[\w.,\[\]-]+?CANCELLED AT\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?!DUETO)
cancelled; lines
    \bKeyboardInterrupt\b(?!.{0,60}except)|TERM_OWNER
device_lost
    NVRM: Xid (?!\([^)]{1,40}\):(?:13|31|43|45|63)(?!\d))
illegal_access
    NVRM: Xid \([^)]{1,40}\): (?P<xid>13|31)(?!\d)
illegal_access; any case
    illegal memory access | unspecified launch failure
device_lost
    uncorrectable ECC error | fallen off the bus | devices? (?:\(s\))? (?:is/)? are busy or unavailable
        | no CUDA-capable device | initialization error at | invalid device ordinal
        | Torch not compiled with CUDA enabled
        | (?:CUDNN|CUBLAS)_STATUS_(?:NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR(?!_\w*ALLOC)|INVALID_VALUE|ARCH_MISMATCH)
collective_timeout
    Watchdog caught collective operation timeout | ran for \d+ milliseconds before timing out
        | (?:NCCL|ProcessGroup\w+)\S{0,200}? timed? ?out | watchdog got stuck for \d+ seconds | ncclRemoteError
        | (?:NCCL|gloo)\S{0,300}?(?:Connection (?:closed|reset) by peer|remote process exited)
        | NCCL communicator was aborted | Connection closed by peer \[
        | gloo\S{0,200}? Timed out waiting \d+ ?ms for (?:recv|send) operation
        | Application timeout caused pair closure | memfit: rank \d+ leaves with exit code 79: (?!rank|it hangs)
open_files
    \[Errno 24\] | Too many open files | received 0 items of ancdata
        | unable to open shared memory object </torch_[^>]{1,80}> in read-write mode (?!:No space|:Cannot allocate)
process_limit
    \[Errno 11\] Resource temporarily unavailable | can't start new thread
        | fork: (?:retry: )? (?:无资源)?Resource temporarily unavailable | pthread_create (?:\(\))? failed
        | Thread creation failed | fork: retry: (?!Cannotallocate)
disk_full
    \[Errno 28\] No space left on device | No space left on device | Disk quota exceeded | \[Errno 122\]
        | PytorchStreamWriter failed writing file | unexpected pos \d+ vs \d+ | database or disk is full
        | low on resource: (?:ephemeral-storage|\[?(?:DiskPressure|imagefs|nodefs))
assertion
    device-side assert triggered | Assertion ?[`'\u2018][^`'\u2019]{1,300}[`'\u2019] ?failed
        | AssertionError (?!:TorchnotcompiledwithCUDA)
import_error; lines
    ^\s*(?:\w+\.)*(?:ImportError|ModuleNotFoundError)\b
import_error
    cannot allocate memory in static TLS block
missing_file; lines
    ^\s*(?:\w+\.)*FileNotFoundError\b|^\s*lmdb\.Error: /|^\S.*: No such file or directory\s*$
config_error; lines
    unrecognized arguments|ConfigAttributeError|exceeded 0% memory budget
        |larger than the (?:available number|maximum number of tokens)
worker_exited
    DataLoader worker \(pid\(?s?\)? [\d,]+\) exited unexpectedly | Worker exit type: SYSTEM_ERROR
        | KilledWorker: \(
hang
    leaves with exit code 79: rank (?P<rank>\d{1,6}) (?:left: it)? hangs: no sign of life
    memfit: rank (?P<rank>\d{1,6}) hung
    DataLoader timed out after \d+ seconds | Timeout \(?>[\d.]+s\)? from pytest-timeout
hang; lines
    ^Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!\s*$

# Where nothing above is known: a word for a device beside words of a shortage
device_words; any case; emitter other
    (?:cuda|gpu|opencl|vram|device memory)\S{0,60}?SHORT | SHORT\S{0,60}?(?:cuda|gpu|opencl|vram|device memory)
other_words; lines; emitter other
    \b(?:NPU|Ascend|HPU|Gaudi|PT_DEVMEM|TPU|HBM|XPU|MPS|ROCm|MLU|MUSA|Vulkan|(?:acl)?rt(?=M)|hip(?=M)).{0,60}?SHORT
    SHORT.{0,60}?\b(?:NPU|Ascend|HPU|Gaudi|PT_DEVMEM|TPU|HBM|XPU|MPS|ROCm|MLU|MUSA|Vulkan)\b

# What ended nothing
pressure
    ran out of memory trying to allocate (?=.{0,260}isnotafailure)
    Allocation of \d+ exceeds \d+% of (?:free)? system memory
        | (?<!\d)\d{1,9} pytorch allocator cache flushes since last step
        | Can't reduce memory use below [\d.]+[KMGT]?i?B \( \d+ bytes\) by rematerialization
        | memory usage\. Pausing worker
skipped_batches; lines
    \"?\boom\"?[=:] ?\"?(?!0(?:\.0*)?(?![\d.])|0\.0*e)(?:\d+(?:\.\d+)?(?:e-?\d+)?)
skipped_batches; any case
    ran out of memory (?:in [\w/]+)? [,:;-]* (?:skipping|retrying)
        | (?:OOM|out of memory)[^!]{0,60}? (?:skipping (?:the|this)? batch|retrying)
        | Attempting to copy inputs of [^!]{0,200}? to CPU due to CUDA OOM | Decreasing batch size to: \d
        | Batch size \d+ failed, trying batch size \d
        | Failed to clone\(\) tensor with name [^!]{0,600}?(?:out of memory|OOM)
        | (?:out of memory|OOM)[^!]{0,200}? (?<!try)(?<!consider)(?<!by) (?:reducing|halving|decreasing)(?:the)? (?:micro)? batch
caught; lines; any case
    skipping (?:this |the )?(?:batch|sample|image|trial|step)|retrying
        |(?:decreas|reduc|halv|lower)ing (?:the |micro ?)*batch|trying (?:a )?(?:smaller )?batch[ _]?size
        |batch size \d+ failed|trial \d+ (?:failed|pruned)|^\s*caught\b
success; lines; any case
    Pipeline completed at|Training (?:has )?(?:finished|completed?)\b|State: COMPLETED
        |Evaluation (?:is |has )?(?:finished|completed?|done)\b|train_runtime|job finished successfully
        |`Trainer\.fit` stopped: `max_
"""
#: Fields of the messages that have several: torch since 0.4; the total of the allocator is computed from what is there.
_FIGURES = r"""
torch
    [GNX]PU (?P<device>\d{1,5})(?=;|has a total)
    ;SIZE(total) total capacity
    has a total capaci?ty of SIZE(total)
    ;SIZE(allocated) already allocated
    Of the allocated memory SIZE(allocated) is allocated by PyTorch
    ;SIZE(free) free
    of which SIZE(free) is free
    SIZE(allowed) allowed;
    this process has SIZE(own) memory in use
    ;SIZE(reserved) reserved in total by
    ;SIZE(cached) cached
    and SIZE(slack) is reserved by PyTorch but unallocated
cupy
    allocated so far: (?P<allocated_b>[\d,]+) bytes
    limit set to: (?P<total_b>[\d,]+) bytes
julia
    GPU memory usage: [\d.]+% \(SIZE(used)/SIZE(total)\)
    Memory pool usage: SIZE(allocated) \(SIZE(reserved) reserved
tensorflow
    Limit: (?P<total_b>\d{6,}) InUse: (?P<allocated_b>\d+)
summary
    \|Allocated memory\| SIZE(allocated)
    \|GPU reserved memory\| SIZE(reserved)
rss
    anon-rss: (?P<used_kb>\d{1,15}) kB
ray
    (?:running|\)) was (?P<used_gb>[\d.]+)GB (?:used)? / (?P<limit_gb>[\d.]+)GB
"""
_SHORT = (
    r"(?i:out\s*of\s*\w{0,10}\s*memory|(?:fail\w{0,4}|unable|can'?t|can\s*not|could\s*not)\s*(?:to\s*)?[cm]?alloc"
    r"|alloc\w{0,8}\s*fail|(?:insufficient|not\s*enough)\s*\w{0,10}\s*memory|memory\s*(?:is\s*)?(?:insufficient|exhausted))"
)


@dataclass(frozen=True)
class Row:
    """One pattern of the table."""

    name: str
    regex: re.Pattern[str]
    by_line: bool = False  # matched against lines as they are
    who: str = ""  # who prints it, if not the program
    more: tuple[re.Pattern[str], ...] = ()  # of further figures in the text behind it, of TensorFlow's also before it
    emitter: str = ""


def _patterns(table: str) -> Iterator[tuple[str, str]]:
    """Each pattern with its heading."""
    for block in re.split(r"\n(?=\w)", re.sub(r"\n#.*|\n(?=\n)", "", table)):
        head, *patterns = re.split(r"\n    (?! )", block.strip("\n"))
        yield from ((head, re.sub(r"\n +", "", pattern)) for pattern in patterns)


def _compiled(text: str, options: Sequence[str] = ()) -> re.Pattern[str]:
    def size(match: re.Match[str]) -> str:
        last = "[KMGT]" if match[1] else "[KMGT](?![a-zA-Z])"
        return rf"(?P<{match[2]}>\d[\d.,]{{0,24}})(?P<{match[2]}_u>bytes?|[KMGTE]i?[Bb]|{last})"

    text = text if "lines" in options else text.replace(" ", "")
    text = text.replace("SHORT", _SHORT)
    return re.compile(re.sub(r"SIZE(_?)\((\w+)\)", size, text), re.IGNORECASE if "any case" in options else 0)


def _rows() -> Iterator[Row]:
    figures: dict[str, tuple[re.Pattern[str], ...]] = {}
    for name, text in _patterns(_FIGURES):
        figures[name] = (*figures.get(name, ()), _compiled(text))
    for head, text in _patterns(_TABLE):
        name, *options = head.split("; ")
        given = {word: rest for word, _, rest in (one.partition(" ") for one in options)}
        who, more, emitter = (given.get(option, "") for option in ("by", "figures", "emitter"))
        yield Row(name, _compiled(text, options), "lines" in options, who, figures.get(more, ()), emitter)


SIGNATURES = tuple(_rows())

#: Headings by the number of a signal, and by the first letters of its name.
_SIGNALS = {"1": "hangup", "6": "aborted", "7": "bus_error", "9": "killed", "11": "segfault", "15": "terminated"} | {
    "hup": "hangup",
    "han": "hangup",
    "abo": "aborted",
    "bus": "bus_error",
    "kil": "killed",
    "ter": "terminated",
}
_SHIFTS = {"b": 0, "kb": 10, "mb": 20, "gb": 30}
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "e": 1 << 60}
#: What ends a message's figures: the next message, or its advice.
_END = _compiled(
    r"out of memory\. Tried | See documentation | Traceback \(most | If reserved (?:memory is >>|but unallocated)"
)
_AFTER, _NEAR = 1500, 20_000
#: How many of the first and of the last matches of a row are kept.
_MOST = 40
_GPU = re.compile(r"gpu|cuda|nvidia|tensorrt", re.IGNORECASE)
_TPU = re.compile(r"TPU|hbm", re.IGNORECASE)
_BACKEND = re.compile(r"(?i:cuda|rocm|metal|mtl|vulkan|sycl|hip)")


def to_bytes(number: str, unit: str) -> int:
    """Return a size in bytes; decimal units count in 1024s, as torch and most tools mean them."""
    if re.fullmatch(r"\d+,\d\d", number):  # some locales write a decimal comma
        number = number.replace(",", ".")
    number = number.replace(",", "").rstrip(".")
    return int(float(number or 0) * _UNITS[unit[0].lower()]) if number.count(".") < 2 else 0


def _figures(row: Row, matches: Sequence[re.Match[str]]) -> dict[str, Any] | None:
    """The figures of the named groups; None for a number that is none, or that no machine can hold."""
    values: dict[str, Any] = {"who": row.who} if row.who else {}
    for found in (match.groupdict() for match in matches):
        for name, text in found.items():
            base, _, unit = name.rpartition("_")
            if text is None or unit == "u":
                continue
            try:
                if f"{name}_u" in found:
                    values[f"{name}_bytes"] = to_bytes(text, found[f"{name}_u"] or "b")
                elif unit in _SHIFTS and base:
                    values[f"{base}_bytes"] = int(float(text.replace(",", "") or 0) * (1 << _SHIFTS[unit]))
                elif name in ("device", "pid", "count", "xid"):
                    values[name] = int(text)
                else:
                    values[name.rstrip("0123456789")] = text or True
            except (ValueError, OverflowError):
                return None
    return values


def find_signs(stream: Stream, index: int = 0) -> list[Sign]:
    """Return what a stream says, row by row of the table."""
    found: list[Sign] = []
    for row in SIGNATURES:
        signs = list(_in_lines(row, stream, index) if row.by_line else _in_text(row, stream, index))
        found += signs if len(signs) <= 2 * _MOST else [*signs[:_MOST], *signs[-_MOST:]]
    return found


def _in_lines(row: Row, stream: Stream, index: int) -> Iterator[Sign]:
    for place in stream.telling:
        line = stream.lines[place]
        if (match := row.regex.search(line.text)) and (values := _figures(row, [match])) is not None:
            name = _heading(row, values)
            yield Sign(name, (line,), values, index, place, "", line.text[: match.start()], row.emitter)


def _in_text(row: Row, stream: Stream, index: int) -> Iterator[Sign]:
    text, end = stream.squeezed, -1
    for match in row.regex.finditer(text):
        if match.start() < end:
            continue
        after = text[match.end() : match.end() + _AFTER]
        stop = _END.search(after)
        own = after[: stop.start() if stop else None]
        near = text[max(0, match.start() - _NEAR) : match.end() + _NEAR]
        end = match.end() + max((one.end() for regex in row.more if (one := regex.search(own))), default=0)
        more = [one for regex in row.more if (one := regex.search(near if row.emitter == "tf" else match[0] + own))]
        values = _figures(row, [match, *more])
        if values is None:
            continue
        of, place = _kind(row.emitter, values, match, after, near), stream.line_at(match.start())
        emitter = row.emitter or (f"torch.{values['api'].lower()}" if row.name == "device_oom" else "")
        before = re.match(rf"(?:\s*\S){{{match.start() - stream.start_of(place)}}}\s*", stream.lines[place].text)
        lines, said = stream.between(match.start(), end)[:8], before[0] if before else ""
        yield Sign(_heading(row, values), lines, values, index, place, of, said, emitter)


def _heading(row: Row, values: dict[str, Any]) -> str:
    """The heading of a row's sign: that of the signal that the text names, by name or number, else the row's."""
    signal = values.pop("signal", "")  # a shell adds 128 to the number, and Python makes it negative
    number = str(abs(int(signal)) % 128) if signal.lstrip("-").isdecimal() else signal[:3].lower()
    return _SIGNALS[number] if signal else row.name


def _kind(emitter: str, values: dict[str, Any], match: re.Match[str], after: str, near: str) -> Kind | Literal[""]:
    """Which memory a message is about, where only the text around it says."""
    if emitter.startswith("vllm"):
        values["phase"] = "build"
    elif emitter == "jax":
        return "gpu" if _GPU.search(near) and not _TPU.search(match.group(0) + after[:300]) else "other_accelerator"
    elif emitter == "ort":
        return "gpu" if _GPU.search(near) else "host_alloc"
    elif emitter == "tf":
        text = match.group(0) + after[:600]
        is_cpu = "device:CPU" in text or "CPU:0byallocator" in text or "allocatorcpu" in text
        return "host_alloc" if is_cpu and "GPU" not in text and "gpu:" not in text else "gpu"
    elif emitter == "ggml":
        said = values.pop("backend", "") or match.string[max(0, match.start() - 60) : match.start()]
        found = _BACKEND.search(said.rpartition("ggml")[2])
        return "host_alloc" if found is None else "gpu" if found[0].upper() == "CUDA" else "other_accelerator"
    return "other_accelerator" if values.get("api", "CUDA") != "CUDA" else ""
