"""What programs print when they die: one table of signatures, and one reader of the figures in them.

A row says in which words something is said; its heading says what that means. Rows are matched against text without
white space, because consoles wrap inside words and numbers; spaces in a row are for its reader. Rows of ``by_line`` are
matched against each line as it stands. The first row that matches a place decides, so particular rows come first.

A named group is a figure. Its name says what it counts, the end of its name in what: ``tried_kb``, ``used_mb``,
``limit_b``; ``tried`` with ``tried_u`` has its unit in the text. Sizes become ``tried_bytes``, counted in 1024s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from memfit.diagnosis._text import Line, Stream

Kind = Literal[
    "gpu",
    "gpu_fragmentation",
    "host_cgroup",
    "host_kernel",
    "shm",
    "host_alloc",
    "pinned",
    "other_accelerator",
    "none",
]
#: How far words show a cause: they prove it, they make it likely, or they only say that something ended.
Sure = Literal["proved", "likely", "not shown"]
#: Tiers of causes. One of an earlier tier explains what stands in a later one.
MEMORY, OTHER, OWN, ENDED, FOLLOWED = range(5)
#: Not causes: warnings, what a program caught, counters and words of a good end.
MARK = 9


@dataclass(frozen=True)
class Meaning:
    """What a heading of the table means.

    Attributes:
        tier: Of the cause.
        kind: Which memory ran out.
        cause: In a word.
        sure: How far the words show it.
        doubtful: The same words also follow an assertion or a lost device, which then is the cause.
        told: The program was told and may go on.
    """

    tier: int
    kind: Kind = "none"
    cause: str = "out_of_memory"
    sure: Sure = "proved"
    doubtful: bool = False
    told: bool = False


#: The headings, those first that explain others of their tier.
MEANINGS: dict[str, Meaning] = {
    "chip_memory": Meaning(MEMORY, "none", "chip_memory", told=True),
    "device_oom": Meaning(MEMORY, "gpu", told=True),
    "device_refused": Meaning(MEMORY, "gpu", told=True),
    "nccl_oom": Meaning(MEMORY, "gpu", sure="likely", doubtful=True),
    "library_alloc": Meaning(MEMORY, "gpu", sure="likely", doubtful=True, told=True),
    "other_device": Meaning(MEMORY, "other_accelerator", told=True),
    "xpu_error": Meaning(MEMORY, "other_accelerator", sure="likely", doubtful=True, told=True),
    "pinned": Meaning(MEMORY, "pinned", told=True),
    "shm": Meaning(MEMORY, "shm"),
    "host_refused": Meaning(MEMORY, "host_alloc", told=True),
    "bad_alloc": Meaning(MEMORY, "host_alloc", sure="likely", doubtful=True),
    "no_fork": Meaning(MEMORY, "host_alloc", doubtful=True, told=True),
    "cgroup_kill": Meaning(MEMORY, "host_cgroup"),
    "global_kill": Meaning(MEMORY, "host_kernel"),
    "oom_kill": Meaning(MEMORY, "host_kernel"),
    "walltime": Meaning(OTHER, cause="walltime"),
    "preempted": Meaning(OTHER, cause="preempted"),
    "node_fail": Meaning(OTHER, cause="node_fail"),
    "assertion": Meaning(OTHER, cause="assertion", told=True),
    "illegal_access": Meaning(OTHER, cause="illegal_access"),
    "open_files": Meaning(OTHER, cause="open_files", told=True),
    "process_limit": Meaning(OTHER, cause="process_limit", told=True),
    "disk_full": Meaning(OTHER, cause="disk_full", told=True),
    "segfault": Meaning(OTHER, cause="segfault"),
    "import_error": Meaning(OTHER, cause="import_error", told=True),
    "device_lost": Meaning(OTHER, cause="device_lost", told=True),
    "config_error": Meaning(OTHER, cause="config_error", told=True),
    "missing_file": Meaning(OTHER, cause="missing_file", told=True),
    "hangup": Meaning(OTHER, cause="hangup"),
    "limit_touched": Meaning(ENDED, cause="limit_touched", sure="likely"),
    "killed": Meaning(ENDED, cause="killed", sure="not shown"),
    "bus_error": Meaning(ENDED, cause="bus_error", sure="likely"),
    "own_exception": Meaning(OWN, cause="own_exception", sure="likely", told=True),
    "collective_timeout": Meaning(FOLLOWED, cause="collective_timeout", sure="likely"),
    "aborted": Meaning(FOLLOWED, cause="aborted", sure="likely"),
    "worker_exited": Meaning(FOLLOWED, cause="worker_exited", sure="likely"),
    "cancelled": Meaning(FOLLOWED, cause="cancelled", sure="likely"),
    "terminated": Meaning(FOLLOWED, cause="terminated", sure="likely"),
    "hang": Meaning(FOLLOWED, cause="hang", sure="likely", told=True),
    "skipped_batches": Meaning(MARK, "gpu", sure="likely"),
    "pressure": Meaning(MARK, cause="recovered", sure="likely"),
    "caught": Meaning(MARK),
    "served": Meaning(MARK),
    "success": Meaning(MARK),
}
_ORDER = {name: place for place, name in enumerate(MEANINGS)}


@dataclass(frozen=True)
class Sign:
    """One thing that a log or another witness says.

    Attributes:
        name: The heading of the table.
        lines: The lines that say it.
        values: Figures and names in them, sizes in bytes.
        stream: The number of the stream that it stands in.
        place: The position of its first line there.
        of: Which memory, where the words alone do not say; empty for that of the heading.
        before: What stands before it in its line.
    """

    name: str
    lines: tuple[Line, ...]
    values: Mapping[str, Any] = field(default_factory=dict)
    stream: int = 0
    place: int = 0
    of: Kind | Literal[""] = ""
    before: str = ""

    @property
    def meaning(self) -> Meaning:
        """What its heading means."""
        return MEANINGS[self.name]

    @property
    def kind(self) -> Kind:
        """Which memory ran out."""
        return self.of or self.meaning.kind

    @property
    def cause(self) -> str:
        """The cause in a word."""
        return self.meaning.cause

    @property
    def rank(self) -> int:
        """The place of its heading in the table."""
        return _ORDER[self.name]

    @property
    def file(self) -> str:
        """The file that it stands in."""
        return self.lines[0].file if self.lines else ""

    @property
    def number(self) -> int:
        """The number of its first line."""
        return self.lines[0].number if self.lines else 0

    @property
    def text(self) -> str:
        """Its lines."""
        return " ".join(line.text for line in self.lines)


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: Its heading.
        regex: The words.
        by_line: Matched against lines as they stand.
        who: Who prints it, where somebody else than the program does.
        more: Where further figures stand in the text behind it.
        around: Further figures may stand before it too.
    """

    name: str
    regex: re.Pattern[str]
    by_line: bool = False
    who: str = ""
    more: tuple[re.Pattern[str], ...] = ()
    around: bool = False


def _squeezed(text: str, flags: int = 0) -> re.Pattern[str]:
    return re.compile(text.replace(" ", ""), flags)


def _rows(name: str, *texts: str, who: str = "", any_case: bool = False, more: tuple[str, ...] = ()) -> Iterator[Row]:
    for text in texts:
        regex = _squeezed(text, re.IGNORECASE if any_case else 0)
        yield Row(name, regex, who=who, more=tuple(_squeezed(one) for one in more), around=more is _TENSORFLOW)


def _lines(name: str, *texts: str, any_case: bool = False, who: str = "") -> Iterator[Row]:
    for text in texts:
        yield Row(name, re.compile(text, re.IGNORECASE if any_case else 0), by_line=True, who=who)


def _size(name: str, letter: str = "[KMGT](?![a-zA-Z])") -> str:
    """A number with its unit, of which the last form is a letter alone."""
    return rf"(?P<{name}>\d[\d.,]{{0,24}})(?P<{name}_u>bytes?|[KMGTE]i?[Bb]|{letter})"


#: The fields of torch's message since 0.4; the total that the allocator held is reckoned from what is there.
_TORCH = (
    r"[GNX]PU (?P<device>\d{1,5})(?=;|has a total)",
    rf";{_size('total')} total capacity",
    rf"has a total capaci?ty of {_size('total')}",
    rf";{_size('allocated')} already allocated",
    rf"Of the allocated memory {_size('allocated')} is allocated by PyTorch",
    rf";{_size('free')} free",
    rf"of which {_size('free')} is free",
    rf";{_size('reserved')} reserved in total by",
    rf";{_size('cached')} cached",
    rf"and {_size('slack')} is reserved by PyTorch but unallocated",
)
_CUPY = (r"allocated so far: (?P<allocated_b>[\d,]+) bytes", r"limit set to: (?P<total_b>[\d,]+) bytes")
_JULIA = (
    rf"GPU memory usage: [\d.]+% \({_size('used')}/{_size('total')}\)",
    rf"Memory pool usage: {_size('allocated')} \({_size('reserved')} reserved",
)
_TENSORFLOW = (r"Limit: (?P<total_b>\d{6,}) InUse: (?P<allocated_b>\d+)",)
_SUMMARY = (rf"\|Allocated memory\| {_size('allocated')}", rf"\|GPU reserved memory\| {_size('reserved')}")
_RSS = (r"anon-rss: (?P<used_kb>\d{1,15}) kB",)
_RAY = (r"(?:running|\)) was (?P<used_gb>[\d.]+)GB (?:used)? / (?P<limit_gb>[\d.]+)GB",)
_YARN = (rf"{_size('used')} of {_size('limit')} (?:physical|virtual)",)

_DEVICES = (
    *_rows(
        "device_oom",
        rf"(?P<api>CUDA|HIP|XPU|NPU|MUSA|MLU) out of memory (?:\. (?:Tried to allocate {_size('tried')})?)?",
        more=_TORCH,
    ),
    *_rows(
        "pinned",
        r"could not allocate pinned host memory of size: (?P<tried_b>\d+)",
        rf"failed to alloc {_size('tried')} bytes on host",
        rf"failed to allocate {_size('tried')} of pinned memory",
        r"(?:failed|unable) to allocate CUDA_Host buffer (?:of size (?P<tried_b>\d+))?",
        r"cuMemHostAlloc failed | cudaHostAlloc failed | cudaHostRegister (?:failed)?[^:]{0,40}: (?:out of memory|invalid)"
        r"| [Ff]ailed to (?:allocate|alloc|pin) [^.]{0,40}? pinned [^.]{0,40}? memory | pinned memory allocation failed"
        r"| out of memory at \S{1,200}?CachingHostAllocator",
    ),
    *_rows(
        "device_refused",
        r"(?:RESOURCE_EXHAUSTED|Resource exhausted):\S{0,80}? Out of memory (?:while)? (?:trying to allocate"
        r"|allocating) (?P<xla>) (?P<tried_b>\d+) bytes(?!\()",
        rf"(?:RESOURCE_EXHAUSTED|Resource exhausted):\S{{0,80}}? Out of memory (?:while)? (?:trying to allocate"
        rf"|allocating) (?P<xla>) {_size('tried', '[KMGT]')}",
        rf"(?:RESOURCE_EXHAUSTED|Resource exhausted):\S{{0,120}}? (?:Attempting to (?:allocate|reserve)"
        rf"|Failed to allocate request for) (?P<xla>) {_size('tried', '[KMGT]')}",
        r"Ran out of memory in memory space hbm (?P<xla>) (?:\. Used [\d.]+[KMGT]? of (?P<total>[\d.]+) (?P<total_u>[KMGT]))?",
        r"std::bad_alloc: (?:out_of_memory: CUDA error | cudaErrorMemoryAllocation)",
        rf"(?:allocating {_size('tried')} on device \d+:)? cudaMalloc (?:Async|retry)? failed: out of memory",
        r"Error Code 2: OutOfMemory \(Requested size was (?P<tried_b>\d+) bytes",
        r"cuMemAllocAsync failed to allocate (?P<tried_b>\d+) bytes",
        r"failed to allocate [\d.]+[KMGT]i?B? \((?P<tried_b>\d+) bytes\) from device: CUDA_ERROR_OUT_OF_MEMORY",
        r"failed to allocate [\d.]+[KMGT]i?B? \((?P<tried_b>\d+) bytes\) from device: (?P<api>[hH](?:ip|IP))",
        r"(?P<api>MIOpen) Error:[^!]{1,120}? Memory not available to allocate buffer: (?P<tried_b>\d+)",
        rf"Out of memory error on GPU \d+\. Cannot allocate {_size('tried')}",
        r"Memory allocation error on worker \d+:[^!]{0,200}? Requested memory: (?P<tried>\d[\d.]*) (?P<tried_u>[KMGT]i?B)",
        r"Memory allocation error on worker \d+:[^!]{0,200}? Requested memory: (?P<tried_b>\d+)(?![\d.]*[KMGT])",
        r"No available memory for the (?P<build>) cache blocks",
        r"Free memory on device (?P<build>) (?:cuda:\d+)? \([\d.]+/(?P<total>[\d.]+)(?P<total_u>GiB)\) on startup is less",
        r"\((?P<tried>[\d.]+)(?P<tried_u>GiB) (?P<build>) KV cache is needed, which is larger than the available KV cache",
        r"CUDA [Ee]rror: out of memory | (?:CUDA|(?P<api>HIP)) error (?:\(\d+\))?:? ?out of memory"
        r"| cuda runtime error \(2\):? out of memory | THCudaCheck FAIL file= \S{1,300}? error=2 : out of memory"
        r"| hipErrorOutOfMemory | cudaErrorMemoryAllocation | CUDA driver error: out of memory"
        r"| (?P<api2>HIP) runtime error: out of memory | CudaOutOfMemory | cuMemAlloc failed: out of memory"
        r"| CUDA_ERROR_OUT_OF_MEMORY | cudaMalloc failed with error code 2 | error == cudaSuccess \(2 vs\. 0\)"
        r"| Out of memory on device\. To view | Out of memory on device\.[^!]{0,80}?gpuDevice"
        r"| CUDA error 2 at [^:!]{1,200}?:\d+: out of memory | \[CUDA\] out of memory | Error Code 2: OutOfMemory"
        r"| No executable batch size found, reached zero | Cuda Runtime \(out of memory\)"
        r"| CUDA failure 2:? '?out of memory | GPU memory allocation failed",
    ),
    *_rows(
        "device_refused",
        r"cupy\.cuda\.memory\.OutOfMemoryError: (?:Out of memory allocating|out of memory to allocate)"
        r" (?P<tried_b>[\d,]+) bytes",
        more=_CUPY,
    ),
    *_rows("device_refused", rf"Out of GPU memory trying to allocate {_size('tried')}", more=_JULIA),
    *_rows("device_refused", r"CUDA OOMs: [1-9]\d*", more=_SUMMARY),
    *_rows(
        "device_refused",
        r"(?:Resource ?Exhausted ?Error|Resource exhausted)\S{0,200}?OOM when allocating tensor (?P<tf>)"
        r"| OOM when allocating tensor (?:with|of) shape (?P<tf2>) | failed to allocate memory\[Op: (?P<tf3>)",
        more=_TENSORFLOW,
    ),
    *_rows(
        "device_refused",
        rf"insufficient memory \(attempted to allocate {_size('tried')}\) (?P<ggml>)",
        r"(?:failed|unable) to allocate (?P<ggml>(?:CUDA|ROCm|Vulkan|Metal|MTL|SYCL|CPU)(?!_Host)\w{0,12}?) buffer"
        r" (?:of size (?P<tried_b>\d+))?",
        r"Failed to allocate memory for requested buffer of size (?P<tried_b>\d+) (?P<arena>)",
    ),
    *_rows(
        "other_device",
        rf"MPS backend out of memory \(MPS allocated: {_size('allocated')}, other allocations: {_size('other')},"
        rf" max allowed: {_size('total')}\) (?:\. Tried to allocate {_size('tried')})?",
        rf"MPS backend out of memory \(MPS allocated: {_size('allocated')}, max allowed: {_size('total')}\)"
        rf" (?:\. Tried to allocate {_size('tried')})?",
        rf"MPS backend out of memory (?!\(MPS) | Invalid buffer size: {_size('tried')}"
        rf" | kIOGPUCommandBufferCallbackErrorOutOfMemory",
    ),
    *_rows(
        "xpu_error",
        r"UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY | PI_ERROR_OUT_OF_RESOURCES | UR_RESULT_ERROR_OUT_OF_RESOURCES"
        r"| PI_ERROR_OUT_OF_HOST_MEMORY | ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY | PI_ERROR_MEM_OBJECT_ALLOCATION_FAILURE",
    ),
    *_rows(
        "library_alloc",
        r"CUBLAS_STATUS_ALLOC_FAILED | CUDNN_STATUS_ALLOC_FAILED | failed to create cublas handle"
        r"| Unable to find a valid cuDNN algorithm to run convolution | CUSPARSE_STATUS_ALLOC_FAILED"
        r"| CUSOLVER_STATUS_ALLOC_FAILED | CUFFT_ALLOC_FAILED | HIPBLAS_STATUS_ALLOC_FAILED"
        r"| CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    ),
    *_rows(
        "nccl_oom",
        r"(?:Cuda|HIP) failure (?:\d+)? '?outofmemory"
        r"| Failed to CUDA (?:host)? (?:c|m)alloc (?:async)? (?P<tried_b>\d+)?",
    ),
    *_lines("device_oom", r"^\s*(?:E +)?(?:torch\.(?:cuda\.)?|jax\.\w+\.)?OutOfMemoryError(?P<bare>)(?=\s|:|$)"),
    *_rows(
        "chip_memory",
        r"OutOfResources: | out of resource: shared memory | too many resources requested for launch"
        r"| uses too much shared data | memory space [vs]mem | CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
    ),
)

_HOST = (
    *_rows(
        "host_refused",
        r"Default(?:Mobile)?CPUAllocator: (?:[^:]{5,40}: you tried to allocate (?P<tried_b>\d+) bytes"
        r"|(?:can't allocate|not enough) memory)",
        r"posix_memalign\(&data,gAlignment,nbytes\)==0\.12vs0",
        rf"\$ Torch: not enough memory: you tried to (?:re)?allocate {_size('tried')}",
        rf"requires more system memory \({_size('tried')}\) than is available",
        rf"Requested [\dx]+ \({_size('tried')}\) array exceeds maximum array size",
        rf"Unable to allocate {_size('tried')} for an array | Unable to allocate array with shape"
        rf"| ArrayMemoryError (?!:Unabletoallocate)",
        r"(?:ArrowMemoryError|Out of memory): (?:malloc|realloc) of size (?P<tried_b>\d+) failed",
        r"Insufficient memory\) Failed to allocate (?P<tried_b>\d+) bytes",
        rf"cannot allocate vector of size {_size('tried')}",
        r"java\.lang\.OutOfMemoryError | JavaScript heap out of memory | LoadError: OutOfMemoryError\(\)"
        r"| C error: out of memory | Out of memory\. Type \"help memory\" | virtual memory exhausted: "
        r"| fatal error: runtime: out of memory | \[?WinError 1455\]? | The paging file is too small | os error 1455",
        r"memory allocation of (?P<tried_b>\d+) bytes failed",
    ),
    *_lines("host_refused", r"^\s*(?:[\w.]*\.)?MemoryError\s*(?:$|:(?! std::bad_alloc: out_of_memory: CUDA))"),
    *_rows(
        "bad_alloc",
        r"std::bad_alloc (?!:out_of_memory:CUDA|:cudaError)(?!.{0,300}?(?:cudaErrorMemoryAllocation|rmm|cudaMalloc))"
        r"| failed to allocate memory: Cannot allocate | tcmalloc: allocation failed (?P<tried_b>\d+)?"
        r"| libc\+\+abi: \S{0,60}?bad_alloc | terminate called\S{0,60}?bad_array_new_length",
    ),
    *_rows(
        "shm",
        r"insufficient shared memory \(shm\) | workers are out of shared memory"
        r"| DataLoader worker \(pid\(?s?\)? [\d,]+\) is killed by signal: Bus error | ObjectStoreFullError"
        r"| unable to write to file </torch_[^>]{1,80}> | Call to posix_fallocate failed :? No space left on device"
        r"| unable to (?:resize|allocate) (?:file|shared memory) [^:]{0,100}:Nospaceleftondevice"
        r"| unable to open shared memory object </torch_[^>]{1,80}> in read-write mode: No space"
        r"| failed to extend /dev/shm/nccl-\w+ to (?P<tried_b>\d+) bytes"
        r"| /dev/shm/[^:]{0,80} No space left on device | No space left on device[^a-z]{0,8}'?/dev/shm"
        r"| open\([^!]{0,20}?/dev/shm/[^!]{0,200}? OSError: \[Errno 28\] No space left on device"
        r"| (?:SemLock|multiprocessing/(?:queues|shared_memory|heap|synchronize)\.py)[^!]{0,400}?"
        r"\[Errno 28\] No space left on device",
        r"unable to mmap (?P<tried_b>\d+) bytes from file <[^>]{1,80}>: Cannot allocate memory",
        r"Error while creating shared memory segment (?:/dev/shm/)? nccl[\w-]{0,60} \(size (?P<tried_b>\d+)\)",
        r"Error while creating shared memory segment (?:/dev/shm/)? nccl[\w-]{0,60}",
    ),
    *_rows(
        "no_fork",
        r"\[Errno 12\] (?:Cannot allocate memory|Not enough space) (?!instaticTLS)"
        r"| Cannot allocate memory \((?:errno=|os error )?12\) | os::commit_memory\(\S{5,80}failed"
        r"| Java HotSpot\(TM\)[^!]{0,200}? There is insufficient memory for the Java Runtime"
        r"| (?:fork|clone|os\.fork|spawn|vfork|mmap|malloc): (?:retry: )? Cannot allocate memory"
        r"| initialization failed \(can't allocate memory\)",
    ),
)

_SCHEDULERS = (
    *_rows(
        "cgroup_kill",
        r"Detected (?P<count>\d+) oom[-_]kill events? (?:\(s\))? in (?:Step ?Id=|step )?"
        r" (?P<step>[\w.+]+?(?=cgroup|\.Some|$|\.[A-Z]|srun|slurm|[^\w.+]))",
        r"(?<![\w.-])(?P<node>\w[\w.-]{0,80}): tasks? (?P<tasks>[\d,-]+): Out Of Memory",
        r"(?P<scope>Job|Step) (?P<step>[\d.\w]+) exceeded (?:virtual )? memory limit"
        r" \((?P<used_kb>\d+) > (?P<limit_kb>\d+)\),? being killed",
        r"(?:srun|slurmstepd): (?:error: )? Exceeded (?:job|step) memory limit (?!at)",
        who="Slurm",
    ),
    *_lines("cgroup_kill", r"\bOUT_OF_ME(?:MORY|M|\+|MO?\+)(?![\w])", who="Slurm"),
    *_rows("limit_touched", r"Exceeded (?:step|job) memory limit at some point", who="Slurm"),
    *_rows(
        "cgroup_kill",
        r"job killed: (?:mem|vmem|pmem|pvmem) (?P<used_kb>\d+) kb exceeded limit (?P<limit_kb>\d+) kb",
        r"PBS: job killed:[^!]{0,40}?mem | under_oom detected | Cgroup mem(?:ory|sw)? limit exceeded",
        who="PBS",
    ),
    *_rows("cgroup_kill", r"job \S{1,40}? exceeded MEM usage hard limit", who="Moab"),
    *_rows("cgroup_kill", r"TERM_MEMLIMIT | TERM_SWAP | killed after reaching LSF memory usage limit", who="LSF"),
    *_rows("cgroup_kill", r"oom: Memory cgroup out of memory: killed \d+ task", who="Flux"),
    *_rows(
        "cgroup_kill",
        r"Job has gone over (?:cgroup)? memory limit of (?P<limit_mb>\d+) megabytes"
        r" (?:\. (?:Peak usage|Last measured usage): (?P<used_mb>\d+) megabytes)?",
        r"Job has gone over (?:cgroup)? memory limit of (?P<limit_kb>\d+) kilobytes",
        r"memory usage exceeded request_memory | PeakMemoryUsage exceeded",
        who="HTCondor",
    ),
    *_rows(
        "cgroup_kill",
        r"exceed(?:s|ed) (?:job)? (?:hard|soft) limit \"?[hs]_(?:vmem|rss|data|stack)\"? of queue"
        r" (?:[^(]{0,100}\((?P<used_b>\d+)[\d.]* > limit: (?P<limit_b>\d+))?",
        who="Grid Engine",
    ),
    *_rows(
        "cgroup_kill",
        r"killed by YARN for exceeding \S{0,20}?memory limits | is running beyond (?:physical|virtual) memory limits",
        who="YARN",
        more=_YARN,
    ),
    *_rows("cgroup_kill", r"OutOfMemoryError: Container killed due to memory usage", who="ECS"),
    *_rows("cgroup_kill", r"exceeded (?!0%|0\.0*%) [\d.]+% memory budget\. Restarting", who="Dask's nanny"),
    *_rows("cgroup_kill", r"ended at its wall by memfit", who="memfit"),
    *_rows(
        "cgroup_kill",
        r"OOM ?Killed (?!\\?\"?[:=]\"?(?:false|0)) | container oom (?=[0-9a-f]{12}) | \"(?:status|Action)\":\"oom\""
        r"| [Cc]ontainer \S{1,80}? was OOM[- ]?killed",
        who="the container's limit",
    ),
    *_rows("global_kill", r"low on resource: memory | had condition: \[MemoryPressure\] | System OOM encountered",
           who="the kubelet"),
    *_rows(
        "global_kill",
        r"(?:Task|Actor|Worker)s? (?:\(s\))? (?:was|were) killed due to the node running low on memory",
        who="Ray's memory monitor",
        any_case=True,
        more=_RAY,
    ),
    *_rows(
        "global_kill",
        r"RayOutOfMemoryError:? (?:More than \d+%|Heap memory)"
        r"| (?<!\d)[1-9]\d{0,8} Workers? \(tasks / actors\) killed due to memory pressure \(OOM\)",
        who="Ray's memory monitor",
    ),
)  # fmt: skip

_KERNEL = (
    *_rows(
        "cgroup_kill",
        r"Memory cgroup out of memory: Kill(?:ed)? process (?P<pid>\d{1,9}),? \((?P<task>[^)]{1,40})\)",
        who="the kernel",
        any_case=True,
        more=_RSS,
    ),
    *_rows(
        "cgroup_kill",
        r"oom-kill: constraint=CONSTRAINT_MEMCG | Task in /\S{1,200}? killed as a result of limit of"
        r"| mem_cgroup_out_of_memory | mem_cgroup_oom_synchronize | memory: usage \d+ kB, limit \d+ kB, failcnt"
        r"| Memory cgroup out of memory",
        who="the kernel",
    ),
    *_rows(
        "global_kill",
        r"oom-kill: constraint=CONSTRAINT_(?:NONE|MEMORY_POLICY|CPUSET) | ,global_oom,",
        who="the kernel",
    ),
    *_rows(
        "oom_kill",
        r"(?<!cgroup)(?: Out of memory: )? Kill(?:ed)? process (?P<pid>\d{1,9}),? (?:UID \d+,?)? \((?P<task>[^)]{1,40})\)",
        who="the kernel",
        more=_RSS,
    ),
    *_rows(
        "oom_kill",
        r"invoked oom-killer: | killed by the OOM killer | killed by \"?OOM-?Killer\"? | Failed with result 'oom-kill'"
        r"| (?:main)? process exited, code=killed, status=9/KILL\S{0,300}? oom-kill",
        who="the kernel",
        any_case=True,
    ),
    *_rows(
        "global_kill",
        r"systemd-oomd(?:\[\d+\])?: Killed | systemd-oomd killed [1-9]"
        r"| due to memory (?:pressure|used)[^!]{0,60}?for[^!]{0,120}?being [\d.]+% >",
        who="systemd-oomd",
    ),
    *_rows(
        "global_kill",
        r"sending SIG(?:TERM|KILL) to process \d+ (?:uid \d+)? \"[^\"]{1,40}\": (?:badness|oom_score)"
        r"| killing process \d+ \"[^\"]{1,40}\" with signal \d+: badness",
        who="earlyoom",
    ),
)

#: Deaths whose sender no line names: a signal 9, however it is written.
_KILLED = (
    *_lines(
        "killed",
        r"^\s*(?:Killed|已杀死|Getötet|Processus arrêté|Terminado \(killed\))\s*(?:\(core dumped\))?\s*$",
        r"(?:[%\])s│|]|it/s\]|\.{3}) ?(?:Killed|已杀死)\s*$",
        r"^\s*\[\d+\][+-]?\s+(?:\d+ )?Killed\b|\bzsh: killed\b|^Killed: 9",
        r"^lost sys\.stderr$",
    ),
    *_rows(
        "killed",
        r"DataLoader worker \(pid\(?s?\)? (?P<pids>[\d,]+)\) is killed by signal: Killed (?P<worker>)",
        r"line \d+: (?P<pid>\d{1,9}) Killed (?=\S) | terminated (?:by|with) signal (?:9(?!\d)|SIGKILL) | killed by signal:? 9 | Signal 9 \(SIGKILL\)"
        r"| Killed signal terminated program | SIGKILL\(-9\) | signal: 9, SIGKILL | interrupted by signal 9"
        r"| Negsignal\.SIGKILL | exited on signal 9 \(Killed\) | died with <Signals\.SIGKILL: 9>"
        r"| killed by SIGKILL (?!by OOM) | killed with SIGKILL by somebody else (?P<stranger>)"
        r"| EXIT STRING: Killed \(signal 9\) | tasks? [\d,-]+: Killed",
        r"BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES =? (?:RANK \d+)? (?:PID (?P<pid>\d{1,9}))? [^=]{0,100}?"
        r" =* (?:EXIT CODE: (?:9|137)(?!\d) | KILLED BY SIGNAL: 9 \()",
    ),
    *_rows(
        "killed",
        r"(?:exit|return) ?_?code\"?:?=?\(? (?:-9|137) (?!\d) | non-zero exit status (?:-9|137) (?!\d)"
        r"| exit(?:ed|s)? (?:with)? (?:status|code)?:? \(? 137 (?!\d) | Exit code is 137 (?!\d)"
        r"| return code = -9 (?!\d) | terminated abruptly while the future was running"
        r"| A child process terminated abruptly | One of the subprocesses has abruptly died during map"
        r"| The worker died unexpectedly while executing | A worker process managed by the executor was unexpectedly",
        any_case=True,
    ),
)  # fmt: skip

#: What bash says before the name of a signal of which a script's command died: ``train.sh: line 2: 4260 Bus error``.
_BASH = r"^\s*(?:\S.{0,200}: line \d+: +\d+ )?"

_OTHER = (
    *_rows(
        "walltime",
        r"DUE TO TIME LIMIT | TERM_RUNLIMIT | walltime \d+ exceeded limit \d+ | PBS: job killed: walltime"
        r"| exceed(?:s|ed) (?:hard)? wallclock time | hard limit \"?[hs]_(?:rt|cpu)\"? of queue"
        r"| reached LSF run time limit | DeadlineExceeded",
        any_case=True,
    ),
    *_lines(
        "walltime",
        r"\bTIMEOUT\s+(?:0:\d+|\d+:\d+)|State: TIMEOUT|CANCELLED.*time limit|Timed out waiting for the job"
        r"|(?:reached|exceeded) (?:its |the )?(?:maximum )?(?:wall|time|run)[ -]?(?:clock|time)?[ -]?limit"
        r"|exceeded the maximum execution time|exceeded time limit",
        any_case=True,
    ),
    *_rows(
        "preempted",
        r"DUE TO PREEMPTION | TERM_PREEMPT | (?:was|been|being) preempted | spot (?:instance)? (?:interruption"
        r"|termination) (?:notice|warning|detected|received) | \"EventType\": \"Preempt\" | preemption notice"
        r"| job preempted",
        any_case=True,
    ),
    *_lines("preempted", r"\bPREEMPTED\b|reason: Preempt\w+|spot instance (?:interruption|termination)"),
    *_rows("node_fail", r"DUE TO NODE FAILURE | NODE_FAIL | Node failure on | DUE TO NODE FAIL", any_case=True),
    *_rows("cancelled", r"\*\*\*(?:STEP|JOB)[\w.+]+ON[\w.,\[\]-]+?CANCELLED AT\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?!DUETO)"),
    *_lines(
        "cancelled",
        r"CANCELLED by \d+|^scancel: |\bKeyboardInterrupt\b(?!.{0,60}except)|TERM_OWNER|TERM_ADMIN|job was deleted by",
    ),
    *_rows(
        "hangup",
        r"got signal: 1(?!\d) | received SIGHUP | Received 1 death signal | closing signal SIGHUP | signal SIGHUP",
    ),
    *_lines("hangup", rf"{_BASH}Hangup\b"),
    *_rows(
        "terminated",
        r"got signal: 15 | received SIGTERM | Signal 15 \(SIGTERM\) | killed by signal:? 15 | tasks? [\d,-]+: Terminated"
        r"| exit ?code: -15 (?!\d) | is killed by signal: Terminated | Received 15 death signal"
        r"| exited with (?:exit)? code 143 (?!\d) | Exit code is 143 (?!\d)",
    ),
    *_lines("terminated", r"^\s*Terminated\s*$|: line \d+: +\d+ Terminated\b"),
    *_rows(
        "segfault",
        r"(?<!caused by a) Segmentation fault | segmentation fault encountered in worker | (?<!due to) SIGSEGV"
        r"| exit ?code: -11 (?!\d) | exited with code 139 | exited on signal 11 \( | killed by signal:? 11 (?!\d)"
        r"| status 139 | Windows fatal exception: access violation | exit code -1073741819 | 0xC0000005",
        any_case=True,
    ),
    *_lines("segfault", r"段错误|Speicherzugriffsfehler|\bsegfault at [0-9a-f]+ ip\b"),
    *_rows(
        "aborted",
        r"is killed by signal: Aborted | exit ?code: -6 (?!\d) | exited with code 134 | double free or corruption"
        r"| free\(\): invalid | malloc\(\): | corrupted (?:size vs|double-linked) | stack smashing detected"
        r"| Signal 6 \(SIGABRT\) | munmap_chunk\(\)",
    ),
    *_lines(
        "aborted",
        rf"{_BASH}(?:Aborted|Floating point exception|Illegal instruction)\b|\bIllegal instruction\s*\(core",
    ),
    *_lines("bus_error", rf"{_BASH}Bus error\b|\bBus error\s*\(core dumped\)|^\[\d+\]\s+\d+ bus error"),
    *_rows("device_lost", r"NVRM: Xid (?!\([^)]{1,40}\):(?:13|31|43|45|63)(?!\d))"),
    *_rows("illegal_access", r"NVRM: Xid \([^)]{1,40}\): (?P<xid>13|31)(?!\d)"),
    *_rows(
        "illegal_access",
        r"illegal memory access | misaligned address | unspecified launch failure | CUDA_ERROR_ILLEGAL"
        r"| Memory access fault by GPU | CUDA_ERROR_LAUNCH_FAILED | an illegal instruction was encountered"
        r"| invalid (?:global|shared) memory (?:read|write)",
        any_case=True,
    ),
    *_rows(
        "device_lost",
        r"uncorrectable ECC error | fallen off the bus | GPU is lost | devices? (?:\(s\))? (?:is/)? are busy or unavailable"
        r"| no CUDA-capable device | CUDA driver initialization failed | initialization error at"
        r"| Found no NVIDIA driver | driver (?:version)? is (?:too old|insufficient) | invalid device ordinal"
        r"| no kernel image is available | UR_RESULT_ERROR_DEVICE_LOST | CUDA_ERROR_NO_DEVICE"
        r"| Torch not compiled with CUDA enabled | CUDNN_STATUS_NOT_SUPPORTED"
        r"| (?:CUDNN|CUBLAS)_STATUS_(?:NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR|INVALID_VALUE|ARCH_MISMATCH)",
    ),
    *_rows(
        "collective_timeout",
        r"Watchdog caught collective operation timeout | ran for \d+ milliseconds before timing out"
        r"| Collective operation timeout | (?:NCCL|ProcessGroup\w+)\S{0,200}? timed? ?out | wait timeout after \d+ms"
        r"| Socket Timeout | Timed out waiting \d+ms for recv | watchdog got stuck for \d+ seconds"
        r"| Timed out initializing process group | Broken pipe\S{0,40}TCPStore | ncclRemoteError | ncclSystemError"
        r"| (?:NCCL|gloo)\S{0,300}?(?:Connection (?:closed|reset) by peer|remote process exited)"
        r"| NCCL communicator was aborted | Connection closed by peer \[",
    ),
    *_rows(
        "open_files",
        r"\[Errno 24\] | Too many open files | received 0 items of ancdata"
        r"| unable to open shared memory object </torch_[^>]{1,80}> in read-write mode (?!:No space)",
    ),
    *_rows(
        "process_limit",
        r"\[Errno 11\] Resource temporarily unavailable | can't start new thread | fork: (?:retry: )? (?:无资源)?"
        r" Resource temporarily unavailable | pthread_create (?:\(\))? failed | Thread creation failed"
        r"| fork: retry: (?!Cannotallocate) | unable to create (?:new native)? thread"
        r"| pthread_create: Resource temporarily",
    ),
    *_rows(
        "disk_full",
        r"\[Errno 28\] No space left on device | No space left on device | Disk quota exceeded | \[Errno 122\]"
        r"| write failed, file size limit | PytorchStreamWriter failed writing file | unexpected pos \d+ vs \d+"
        r"| disk I/O error | database or disk is full | There is not enough space on the disk"
        r"| not enough free disk space | condition: \[DiskPressure\]"
        r"| low on resource: (?:ephemeral-storage|\[?(?:DiskPressure|imagefs|nodefs))",
    ),
    *_rows(
        "assertion",
        r"device-side assert triggered | Assertion ?[`'\u2018][^`'\u2019]{1,300}[`'\u2019] ?failed"
        r"| AssertionError (?!:TorchnotcompiledwithCUDA) | INTERNAL ASSERT FAILED",
    ),
    *_lines("import_error", r"^\s*(?:\w+\.)*(?:ImportError|ModuleNotFoundError)\b"),
    *_rows(
        "import_error",
        r"error while loading shared libraries: | undefined symbol: | cannot allocate memory in static TLS block",
    ),
    *_lines(
        "missing_file",
        r"^\s*(?:\w+\.)*FileNotFoundError\b|^\S.*: No such file or directory\s*$|^\s*lmdb\.Error: /|can't open file '",
    ),
    *_lines(
        "config_error",
        r"unrecognized arguments|ConfigurationError|ConfigAttributeError|Couldn't instantiate the backend tokenizer"
        r"|MissingMandatoryValue|Could not override|invalid choice:|exceeded 0% memory budget"
        r"|the following arguments are required|ConfigKeyError|ConfigCompositionException|Non-existent config key"
        r"|larger than the (?:available number|maximum number of tokens)",
    ),
    *_rows(
        "worker_exited",
        r"DataLoader worker \(pid\(?s?\)? [\d,]+\) exited unexpectedly | Pin memory thread exited unexpectedly"
        r"| RayActorError | Worker exit type: SYSTEM_ERROR | KilledWorker: \(",
    ),
    *_rows(
        "hang",
        r"Waiting up to \d+ seconds for job step to finish(?!.{0,200}(?:CANCELLED|Killed)) | stack of the stuck"
        r"| no progress for \d+ | DataLoader timed out after \d+ seconds | Timeout \(?>[\d.]+s\)? from pytest-timeout"
        r"| came within [\d.e+]+ s, and the workers do nothing:",
    ),
    *_lines("hang", r"^Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!\s*$"),
)

#: What ended nothing.
_MARKS = (
    *_rows(
        "pressure",
        r"ran out of memory trying to allocate (?=.{0,260}isnotafailure)",
        r"Allocation of \d+ exceeds \d+% of (?:free)? system memory"
        r"| (?<!\d)\d{1,9} pytorch allocator cache flushes since last step"
        r"| Can't reduce memory use below [\d.]+[KMGT]?i?B \( \d+ bytes\) by rematerialization"
        r"| memory usage\. Pausing worker",
    ),
    *_lines("skipped_batches", r"\"?\boom\"?[=:] ?\"?(?!0(?:\.0*)?(?![\d.])|0\.0*e)(?:\d+(?:\.\d+)?(?:e-?\d+)?)"),
    *_rows(
        "skipped_batches",
        r"ran out of memory (?:in [\w/]+)? [,:;-]* (?:skipping|retrying)"
        r"| (?:skipping|skipped) (?:this )?batch[^!]{0,60}?(?:out of memory|OOM)"
        r"| (?:OOM|out of memory)[^!]{0,60}? (?:skipping (?:the|this)? batch|retrying)"
        r"| Attempting to copy inputs of [^!]{0,200}? to CPU due to CUDA OOM | Decreasing batch size to: \d"
        r"| Batch size \d+ failed, trying batch size \d | attempting to recover from OOM"
        r"| retrying with (?:a )?(?:smaller|reduced|lower) (?:micro)?batch"
        r"| Failed to clone\(\) tensor with name [^!]{0,600}?(?:out of memory|OOM)"
        r"| (?:out of memory|OOM)[^!]{0,200}? (?<!try)(?<!consider)(?<!by) (?:reducing|halving|decreasing)"
        r" (?:the)? (?:micro)? batch",
        any_case=True,
    ),
    *_lines(
        "caught",
        r"skipping (?:this |the )?(?:batch|sample|image|trial|step)|retrying|(?:decreas|reduc|halv|lower)ing (?:the |micro ?)*"
        r"batch|trying (?:a )?(?:smaller )?batch[ _]?size|AutoBatch:|batch size \d+ failed|trial \d+ (?:failed|pruned)"
        r"|recover(?:ing|ed) from (?:the )?(?:OOM|out of memory)|falling back to|^\s*caught\b|UserWarning: Failed to clone",
        any_case=True,
    ),
    *_lines(
        "served",
        r"server is listening|server listening on|Application startup complete|Uvicorn running on"
        r"|^ *(?P<all>\d+)/(?P=all) \[=+\]",
    ),
    *_lines(
        "success",
        r"Pipeline completed at|Training (?:has )?(?:finished|completed?)\b|State: COMPLETED|training (?:is )?done"
        r"|Done training|Evaluation (?:is |has )?(?:finished|completed?|done)\b|Finished training|train_runtime"
        r"|`?Trainer\.(?:fit|test)`? stopped: `max_|successfully completed|job finished successfully",
        any_case=True,
    ),
)

TABLE: tuple[Row, ...] = (*_DEVICES, *_HOST, *_SCHEDULERS, *_KERNEL, *_KILLED, *_OTHER, *_MARKS)

_SHIFTS = {"b": 0, "kb": 10, "mb": 20, "gb": 30}
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "e": 1 << 60}
#: What ends a message's figures: the next message, or its advice.
_END = _squeezed(
    r"out of memory\. Tried | See documentation | Traceback \(most | If reserved (?:memory is >>|but unallocated)"
)
_AFTER, _NEAR = 1500, 20_000
#: Of what a row says again and again, so much of the beginning and of the end is kept.
_MOST = 40
_GPU = re.compile(r"gpu|cuda|nvidia|tensorrt", re.IGNORECASE)
_TPU = re.compile(r"TPU|hbm", re.IGNORECASE)
_BACKEND = re.compile(r"(?i:cuda|rocm|metal|mtl|vulkan|sycl|hip)")


def to_bytes(number: str, unit: str) -> int:
    """A size of squeezed text in bytes; decimal units count in 1024s, as torch and most tools mean them.

    >>> to_bytes("1.5", "GiB"), to_bytes("926.", "GiB") == 926 << 30, to_bytes("0", "bytes")
    (1610612736, True, 0)
    """
    if re.fullmatch(r"\d+,\d\d", number):  # some locales write a decimal comma
        number = number.replace(",", ".")
    number = number.replace(",", "").rstrip(".")
    return int(float(number or 0) * _UNITS[unit[0].lower()]) if number.count(".") < 2 else 0


def _figures(found: Mapping[str, str | None]) -> dict[str, Any]:
    """The figures of a match's named groups."""
    values: dict[str, Any] = {}
    for name, text in found.items():
        base, _, unit = name.rpartition("_")
        if text is None or unit == "u":
            continue
        if f"{name}_u" in found:
            values[f"{name}_bytes"] = to_bytes(text, found[f"{name}_u"] or "b")
        elif unit in _SHIFTS and base:
            values[f"{base}_bytes"] = int(float(text.replace(",", "") or 0) * (1 << _SHIFTS[unit]))
        elif name in ("device", "pid", "count", "xid"):
            values[name] = int(text)
        elif not text:  # an empty group says what sort of message it is
            values[name.rstrip("0123456789")] = True
        else:
            values[name.rstrip("0123456789")] = text
    return values


def find_signs(stream: Stream, index: int = 0) -> list[Sign]:
    """What a stream says, row by row of the table."""
    found: list[Sign] = []
    for row in TABLE:
        signs = list(_signs_of(row, stream, index))
        found += signs if len(signs) <= 2 * _MOST else [*signs[:_MOST], *signs[-_MOST:]]
    return found


def _signs_of(row: Row, stream: Stream, index: int) -> Iterator[Sign]:
    if row.by_line:
        for place in stream.telling:
            text = stream.lines[place].text
            if match := row.regex.search(text):
                yield from _sign(row, match, text[match.end() :], (index, place), stream, 0)
        return
    end = -1
    for match in row.regex.finditer(stream.squeezed):
        if match.start() < end:
            continue
        after = stream.squeezed[match.end() : match.end() + _AFTER]
        end = match.end() + _reach(row, after)
        yield from _sign(row, match, after, (index, stream.line_at(match.start())), stream, end)


def _stopped(after: str) -> str:
    stop = _END.search(after)
    return after[: stop.start() if stop else None]


def _reach(row: Row, after: str) -> int:
    """How far behind a match its figures stand."""
    return max((one.end() for regex in row.more if (one := regex.search(_stopped(after)))), default=0)


def _sign(
    row: Row, match: re.Match[str], after: str, where: tuple[int, int], stream: Stream, end: int
) -> Iterator[Sign]:
    """What a match says, with the figures in it and behind it."""
    index, place = where
    near = match.string[max(0, match.start() - _NEAR) : match.end() + _NEAR]
    text = near if row.around else match.group(0) + _stopped(after)
    try:
        values = _figures(match.groupdict())
        for regex in row.more:
            if one := regex.search(text):
                values |= _figures(one.groupdict())
    except (ValueError, OverflowError):  # a number that is none, or that no machine can hold
        return
    if row.who:
        values["who"] = row.who
    of = _kind(values, match, after, near)
    lines: tuple[Line, ...] = (stream.lines[place],)
    before = match.string[: match.start()]
    if not row.by_line:
        lines = stream.between(match.start(), end)[:8]
        before = _unsqueezed(stream.lines[place].text, match.start() - stream.start_of(place))
    yield Sign(row.name, lines, values, index, place, of, before)


def _unsqueezed(text: str, count: int) -> str:
    """The beginning of a line, up to so many characters that are not white space."""
    for at, one in enumerate(text):
        if count <= 0 and not one.isspace():
            return text[:at]
        count -= not one.isspace()
    return text


def _kind(values: dict[str, Any], match: re.Match[str], after: str, near: str) -> Kind | Literal[""]:
    """Which memory a message is about, where only the text around it says."""
    if values.pop("build", False):
        values["phase"] = "build"
    if values.pop("xla", False):
        return "gpu" if _GPU.search(near) and not _TPU.search(match.group(0) + after[:300]) else "other_accelerator"
    if values.pop("arena", False):
        return "gpu" if _GPU.search(near) else "host_alloc"
    if values.pop("tf", False):
        text = match.group(0) + after[:600]
        is_cpu = "device:CPU" in text or "CPU:0byallocator" in text or "allocatorcpu" in text
        return "host_alloc" if is_cpu and "GPU" not in text and "gpu:" not in text else "gpu"
    if (name := values.pop("ggml", "")) != "":
        said = name if isinstance(name, str) else match.string[max(0, match.start() - 60) : match.start()]
        found = _BACKEND.search(said.rpartition("ggml")[2])
        return "host_alloc" if found is None else "gpu" if found[0].upper() == "CUDA" else "other_accelerator"
    return "other_accelerator" if values.get("api", "CUDA") != "CUDA" else ""
