"""What programs print when they die: the one table of signatures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from memfit.diagnosis._words import words_of
from memfit.refusals import REFUSALS, rows_of

Kind = Literal[
    "gpu", "gpu_fragmentation", "host_cgroup", "host_kernel", "shm", "host_alloc", "pinned", "other_accelerator", "none"
]  # fmt: skip
Sure = Literal["proved", "likely", "not shown"]
#: Tiers of causes. A cause of an earlier tier explains those of later ones.
MEMORY, OTHER, OWN, ENDED, FOLLOWED = range(5)
#: Not causes: warnings, what a program caught, counters and words of a good end.
MARK = 9


@dataclass(frozen=True)
class Meaning:
    """What a heading of the table means; within a tier, earlier headings explain later ones."""

    tier: int
    kind: Kind = "none"
    cause: str = ""
    sure: Sure = "proved"  # how far the words show it
    doubtful: bool = False  # the same words follow an assertion or a lost device, which then is the cause
    told: bool = False  # the program gets an error, and may go on
    poisons: bool = False  # the doubtful words that follow it are its consequence
    by_scheduler: bool = False  # who then kills
    trails: bool = False  # what is left of a job that another one's failure ended
    last_resort: bool = False  # general words: they count where nothing else is known
    of_alloc: bool = False  # it may follow from an allocation that failed, of whatever allocator


_MEANINGS = (
    ("chip_memory", Meaning(MEMORY, "none", "chip_memory", told=True)),
    ("device_oom device_refused", Meaning(MEMORY, "gpu", told=True)),
    ("nccl_oom", Meaning(MEMORY, "gpu", sure="likely", doubtful=True)),
    ("library_alloc", Meaning(MEMORY, "gpu", sure="likely", doubtful=True, told=True)),
    ("other_device", Meaning(MEMORY, "other_accelerator", told=True)),
    ("xpu_error", Meaning(MEMORY, "other_accelerator", sure="likely", doubtful=True, told=True)),
    ("pinned", Meaning(MEMORY, "pinned", told=True, of_alloc=True)),
    ("shm", Meaning(MEMORY, "shm")),
    ("host_refused", Meaning(MEMORY, "host_alloc", told=True)),
    ("bad_alloc", Meaning(MEMORY, "host_alloc", sure="likely", doubtful=True)),
    ("no_fork", Meaning(MEMORY, "host_alloc", doubtful=True, told=True)),
    ("other_words", Meaning(MEMORY, "other_accelerator", sure="likely", doubtful=True, told=True, last_resort=True)),
    ("device_words", Meaning(MEMORY, "gpu", sure="likely", doubtful=True, told=True, last_resort=True)),
    ("memory_words", Meaning(MEMORY, "host_alloc", sure="likely", doubtful=True, told=True, last_resort=True)),
    ("cgroup_kill", Meaning(MEMORY, "host_cgroup")),
    ("global_kill oom_kill", Meaning(MEMORY, "host_kernel")),
    ("walltime preempted node_fail", Meaning(OTHER, by_scheduler=True)),
    ("assertion", Meaning(OTHER, told=True, poisons=True)),
    ("illegal_access", Meaning(OTHER, poisons=True, of_alloc=True)),
    ("open_files process_limit", Meaning(OTHER, told=True, poisons=True)),
    ("disk_full", Meaning(OTHER, told=True)),
    ("segfault", Meaning(OTHER, trails=True, of_alloc=True)),
    ("no_kernel build_mismatch port_in_use", Meaning(OTHER, told=True)),
    ("diverged", Meaning(OTHER)),
    ("import_error", Meaning(OTHER, told=True)),
    ("device_lost", Meaning(OTHER, told=True, poisons=True)),
    ("config_error missing_file", Meaning(OTHER, told=True)),
    ("hangup", Meaning(OTHER)),
    ("limit_touched", Meaning(ENDED, sure="likely")),
    ("killed", Meaning(ENDED, sure="not shown", trails=True)),
    ("bus_error", Meaning(ENDED, sure="likely")),
    ("own_exception", Meaning(OWN, sure="likely", told=True, of_alloc=True)),
    ("exit_status", Meaning(FOLLOWED, sure="likely")),
    ("hang", Meaning(FOLLOWED, sure="likely", told=True)),
    ("collective_timeout aborted", Meaning(FOLLOWED, sure="likely", trails=True, of_alloc=True)),
    ("worker_exited", Meaning(FOLLOWED, sure="likely")),
    ("cancelled", Meaning(FOLLOWED, sure="likely", by_scheduler=True)),
    ("terminated", Meaning(FOLLOWED, sure="likely", trails=True)),
    ("skipped_batches", Meaning(MARK, "gpu", sure="likely")),
    ("rank_lost", Meaning(MARK)),
    ("pressure", Meaning(MARK, cause="recovered", sure="likely")),
    ("caught success", Meaning(MARK)),
)
#: What each heading means; the cause has its name, unless it is memory or told here.
MEANINGS: dict[str, Meaning] = {
    name: replace(one, cause=one.cause or ("out_of_memory" if one.kind != "none" else name))
    for names, one in _MEANINGS
    for name in names.split()
}


#: Words of a shortage, for rows that know no emitter.
_SHORT = (
    r"(?i:out[\s-]*of[a-z\s-]{0,24}?memory|(?:maximum\s*)?pool\s*size\s*exceeded|(?:fail\w{0,4}|unable|can'?t|can\s*not|could\s*not)\s*(?:to\s*)?(?:re|[cm])?alloc"
    r"|error\s*allocating\s*\d|(?:memory\s*)?(?:re|[cm])?alloc\w{0,8}\s*(?:still\s*)?fail|(?:insufficient|not\s*enough)\s*\w{0,10}\s*memory"
    r"|(?:v\w{5,6}\s*)?memory\s*(?:is\s*)?(?:insufficient|exhausted))"
)
#: The rows of ``REFUSALS``, and those of other ends.
_TABLE = (
    REFUSALS
    + r"""
chip_memory; emitter tpu
    memory space [vs]mem
chip_memory
    out of resource: shared memory | too many resources requested for launch
        | uses too much shared data | insufficient shared memory available | CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
shm
    Unexpected bus error encountered in worker(?P<bare>)
    workers are out of shared memory | /dev/shm/[^:]{0,80}:? No space left on device | ObjectStoreFullError
        | DataLoader worker \(pid\(?s?\)? [\d,]+\) is killed by signal: Bus error | No space left on device[^a-z]{0,8}'?/dev/shm
        | insufficient shared memory \(shm\) | Call to posix_fallocate failed :? No space left on device
        | failed to extend /dev/shm/nccl-\w+ to (?P<tried_b>\d+) bytes
        | open\([^!]{0,20}?/dev/shm/[^!]{0,200}? OSError: \[Errno 28\] No space left on device
        | (?:SemLock|multiprocessing/(?:queues|shared_memory|heap|synchronize)\.py)[^!]{0,400}?\[Errno 28\] No space left on device
    Error while creating shared memory segment (?:/dev/shm/)? nccl[\w-]{0,60} (?:\(size (?P<tried_b>\d+)\))?
        (?!.{0,160}?Cudafailure'invalid)

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
    (?:killed|put on hold)\S{0,30}? (?:due to|because of|for) (?:excessive)? memory (?:usage|use(?!d)|limit)
    (?:job|container)(?:(?!job)\S){0,60}? (?:exceed(?:s|ed|ing)|beyond|reaching|gone over)\S{0,24}? (?:mem|rss)(?!\S{0,9}soft)\S{0,60}? limit(?!at)
        | Cgroup mem(?:ory|sw)? limit exceeded | under_oom detected | TERM_(?:MEMLIMIT|SWAP) | job killed:[^!]{0,40}? p?v?mem
        | (?:killed|terminated)[^.]{0,30}? exceed(?:ed|ing) (?:its|the) mem(?:ory)? limit | memory limit of [\d.]+ ?[kmgt]i?b? exceeded
        | (?:exceeded|enforced) (?:the|its|max|hard)? (?:h_)?(?:v?mem(?:ory)?|rss) limit (?:because|[:,;-] ?(?:job|step|task|container|process))
        | exceed(?:s|ed) (?:job)? (?:hard|soft) limit \"?[hs]_(?:vmem|rss|data|stack)\"? of queue
        | used more memory than (?:it|they)? (?:was|were)? (?:allocated|requested|allowed) | PeakMemoryUsage exceeded | memory usage exceeded request_memory
cgroup_kill; by Dask's nanny
    exceeded (?!0%|0\.0*%) [\d.]+% memory budget\. Restarting
cgroup_kill; by memfit
    ended at its (?:wall|limit) by memfit
cgroup_kill; by the container's limit
    OOM ?Killed (?!\\?\"?[:=]\"?(?:false|0)) | container oom (?=[0-9a-f]{12})
        | \"(?:[Ss]tatus|[Aa]ction)\":\"oom\" | /tasks/oom\{ | TaskOOM event
        | [Cc]ontainer (?:\S{1,80}? was OOM[- ]? killed|killed due to memory usage)
        | crashed after using all available RAM | tried to allocate more memory than is available
global_kill; by the kubelet
    low on resource: memory | had condition: \[MemoryPressure\] | System OOM encountered
global_kill; by Ray's memory monitor; any case; figures ray
    (?:Task|Actor|Worker)s? (?:\(s\))? (?:was|were) killed due to the node running low on memory
        | Killing worker with \S{1,60}? to free up memory
global_kill; by Ray's memory monitor
    RayOutOfMemoryError:? (?:More than \d+%|Heap memory)
        | (?<!\d)[1-9]\d{0,8} Workers? \(tasks / actors\) killed due to memory pressure \(OOM\)

# The kernel
cgroup_kill; by the kernel; any case; figures rss
    Memory cgroup out of memory: Kill(?:ed)? process (?P<pid>\d{1,9}),? \((?P<task>[^)]{1,40})\)
cgroup_kill; by the kernel
    oom-kill: constraint=CONSTRAINT_MEMCG | Task in /\S{1,200}? killed as a result of limit of
        | memory: usage \d+ kB, limit \d+ kB, failcnt | Memory cgroup (?:out of memory|stats for/)
        | _{0,2}mem_cgroup_(?:out_of_memory|oom_synchronize|handle_oom|try_charge) | be killed due to memory\.oom\.group set
global_kill; by the kernel
    oom-kill: constraint=CONSTRAINT_(?:NONE|MEMORY_POLICY|CPUSET) | ,global_oom,
oom_kill; by the kernel; figures rss
    (?<!cgroup)(?: Out of memory: )? Kill(?:ed)? process (?P<pid>\d{1,9}),? (?:UID \d+,?)? \((?P<task>[^)]{1,40})\)
oom_kill; by the kernel; any case
    invoked oom-killer: | killed by the OOM killer | killed by \"?OOM-?Killer\"?
        | Failed with result 'oom-kill'
global_kill; by systemd-oomd
    systemd-oomd(?:\[\d+\])?: Killed | systemd-oomd killed [1-9] | oomd attempting to kill \d+ with
        | due to memory (?:pressure|used)[^!]{0,60}?for[^!]{0,120}?being [\d.]+% >
global_kill; by earlyoom
    sending SIG(?:TERM|KILL) to process \d+ (?:uid \d+)? \"[^\"]{1,40}\": (?:badness|oom_score)
    [Kk]illing process \S{1,60}? with signal (?:9|15) (?:, pid: \d+,|:) badness

# Deaths by a signal, however it is written: `_SIGNALS` has the heading
signal; lines
    : line \d+: +(?P<pid>\d{1,9}) +(?P<signal>Killed|Terminated|Hangup|Aborted|Bus error)\b
    (?:^ *|\d|[%\])│|\\] *)(?P<signal>Killed|Terminated)\s*(?:\(core dumped\))?\s*$
    (?:^|[%\])│|.]) *(?P<signal>Segmentation fault)\s*(?:\(.*\))?\s*$
    \bzsh: (?P<signal>killed|terminated|abort|segmentation fault|bus error)\b|^(?P<signal2>Killed|Terminated): (?:9|15)\b
    ^\s*\[\d+\][+-]?\s+(?:\d+ )?(?P<signal>Killed|Terminated|Aborted|Bus error|Segmentation fault)\b
signal
    (?:by|with|on|got|closing|Neg|<|\() [Ss]ignals? [.:]? (?:SIG)? (?P<signal>KILL|HUP|1|6|7|9|11|15) (?!\d)
        (?!\S{0,20}?by somebody else)
    Signal (?P<signal>9|15) \(SIG
    SIG[A-Z]{2,5} \((?P<signal>-(?:6|7|9|11|15))\)
    Received (?P<signal>1|15) death signal
    (?:tasks? [\d,-]+|worker \(pid\(?s?\)? [\d,]+\) is killed by signal): (?P<signal>Killed|Terminated|Aborted|Bus error)
    (?:[Ee]xit|[Rr]eturn) (?:ed|s)? (?:with)? _? (?:[Cc]ode|[Ss]tatus)? (?:is)? [\"':=(]{0,3}
        (?P<signal>-(?:6|7|9|11|15)|1(?:34|35|37|39|43)) (?!\d)
killed; lines
    ^lost sys\.stderr$|(?:^|[%\])│|. ]) *(?:已杀死|Getötet|Processus arrêté)\s*$
killed
    Killed signal terminated program | killed with SIGKILL by somebody else (?P<stranger>)
    BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES =? (?:RANK \d+)? (?:PID (?P<pid>\d{1,9}))? [^=]{0,100}?
        =* (?:EXIT CODE: (?:9|137)(?!\d) | KILLED BY SIGNAL: 9 \()
    terminated abruptly while the future was running | One of the subprocesses has abruptly died during map
segfault; any case
    (?<!caused by a) Segmentation fault | (?<!due to) SIGSEGV | Windows fatal exception: access violation
        | exit code -1073741819 | 0xC0000005
segfault; lines
    \bsegfault at [0-9a-f]+ ip\b|段错误|Speicherzugriffsfehler
aborted
    double free or corruption | free\(\): invalid | malloc\(\): | corrupted (?:size vs|double-linked)
        | stack smashing detected | munmap_chunk\(\)

# Other causes
walltime; any case
    DUE TO TIME LIMIT | TERM_RUNLIMIT | walltime \d+ exceeded limit \d+ | PBS: job killed: walltime | reached LSF run time limit
        | exceed(?:s|ed) (?:hard)? wallclock time | (?:due to|exceeded) wall ?clock limit | hard limit \"?[hs]_(?:rt|cpu)\"? of queue | DeadlineExceeded | exceeded the maximum execution time
walltime; lines; any case
    CANCELLED.*time limit|\bTIMEOUT\s+(?:0:\d+|\d+:\d+)|State: TIMEOUT
        |(?:reached|exceeded) (?:its |the )?(?:maximum )?(?:wall|time|run)[ -]?(?:clock|time)?[ -]?limit
preempted; any case
    DUE TO PREEMPTION | TERM_PREEMPT | (?:was|been|being) preempted | preemption notice | reason: Preempt
        | spot (?:instance)? (?:interruption|termination) (?:notice|warning|detected|received)
        | \"EventType\": \"Preempt\"
node_fail; any case
    DUE TO NODE FAILURE | Node failure on | DUE TO NODE FAIL
cancelled
    \*\*\*(?:STEP|JOB)[\w.+]+ON[\w.,\[\]-]+?CANCELLED AT\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?!DUETO)
cancelled; lines
    \bKeyboardInterrupt\b(?!.{0,60}except)|TERM_(?:OWNER|ADMIN)|CANCELLED by \d+|^scancel: |job was deleted by
illegal_access
    NVRM: Xid \([^)]{1,40}\): (?P<xid>13|31)(?!\d)
illegal_access; any case
    illegal memory access | unspecified launch failure | misaligned address | CUDA_ERROR_(?:ILLEGAL|LAUNCH_FAILED)
        | Memory access fault by GPU | an illegal instruction was encountered | invalid (?:global|shared) memory (?:read|write)
device_lost
    NVRM: Xid (?!\([^)]{1,40}\):(?:13|31|43|45|63)(?!\d))
    uncorrectable ECC error | fallen off the bus | GPU is lost | ERROR_(?:DEVICE_LOST|NO_DEVICE) | devices? (?:\(s\))? (?:is/)? are busy or unavailable
        | no CUDA-capable device | initialization error at | CUDA driver initialization failed | Found no NVIDIA driver
        | driver (?:version|on your system)? is (?:too old|insufficient) | No CUDA GPUs are available
        | Torch not compiled with CUDA enabled
        | (?:CUDNN|CUBLAS)_STATUS_(?:NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR(?!_\w*ALLOC)|INVALID_VALUE|ARCH_MISMATCH
        |NOT_SUPPORTED)
collective_timeout
    Watchdog caught collective operation timeout | ran for \d+ milliseconds before timing out
        | (?:NCCL|ProcessGroup\w+)\S{0,200}? timed? ?out | watchdog got stuck for \d+ seconds | ncclRemoteError
        | (?:NCCL|gloo)\S{0,300}?(?:Connection (?:closed|reset) by peer|remote process exited)
        | NCCL communicator was aborted | Connection closed by peer \[
        | gloo\S{0,200}? Timed out waiting \d+ ?ms for (?:recv|send) operation
        | Broken pipe\S{0,40}TCPStore | ncclSystemError | Socket Timeout | Timed out after \d+ seconds waiting for clients | Timed out initializing process group | DistStoreError:
        | Application timeout caused pair closure | memfit: rank \d+ leaves with exit code 79: (?!rank|it hangs)
open_files
    \[Errno 24\] | Too many open files | received 0 items of ancdata
        | unable to open shared memory object </torch_[^>]{1,80}> in read-write mode (?!:No space|:Cannot allocate)
process_limit
    \[Errno 11\] Resource temporarily unavailable | can't start new thread
        | fork: (?:retry: )? (?:无资源)?Resource temporarily unavailable | pthread_create (?:\(\))? failed
        | Thread creation failed | fork: retry: (?!Cannotallocate) | unable to create (?:new native)? thread
disk_full
    No space left on device | [Dd]isk quota exceeded | \[Errno 122\]
        | There is not enough space on the disk | not enough free disk space | condition: \[DiskPressure\] | disk I/O error
        | PytorchStreamWriter failed writing file | unexpected pos \d+ vs \d+ | database or disk is full
        | low on resource: (?:ephemeral-storage|\[?(?:DiskPressure|imagefs|nodefs))
no_kernel
    no kernel image is available | CUDA_ERROR_NO_BINARY_FOR_GPU
build_mismatch
    error while loading shared libraries: | undefined symbol: | version .GLIBC(?:XX)?_[\d.]+' not found | numpy\.dtype size changed
        | detected CUDA version \([\d.]+\) mismatches | Could not load library lib\S{1,60}? Error:
port_in_use; any case
    address already in use | EADDRINUSE
diverged; any case
    Minimum loss scale reached | loss scale already at minimum
        | loss (?:is|became|was) (?:nan|inf\w*)[^!]{0,20}? (?:stop|abort|exit|terminat|at iter)
config_error
    invalid device ordinal
assertion
    device-side assert triggered | Assertion ?[`'\u2018][^`'\u2019]{1,300}[`'\u2019] ?failed
        | AssertionError (?!:TorchnotcompiledwithCUDA) | INTERNAL ASSERT FAILED
import_error; lines
    ^\s*(?:\w+\.)*(?:ImportError|ModuleNotFoundError)\b
import_error
    cannot allocate memory in static TLS block
missing_file; lines
    ^\s*(?:\w+\.)*FileNotFoundError\b|^\s*lmdb\.Error: /|^\S.*: No such file or directory\s*$
        |can't open file '
config_error; lines
    unrecognized arguments|Config(?:urationError|AttributeError|KeyError|CompositionException)|MissingMandatoryValue
        |Could not override|invalid choice:|the following arguments are required|Couldn't instantiate the backend tokenizer
        |exceeded 0% memory budget
        |larger than the (?:available number|maximum number of tokens)
worker_exited
    DataLoader worker \(pid\(?s?\)? [\d,]+\) exited unexpectedly | Pin memory thread exited unexpectedly | Worker exit type: SYSTEM_ERROR
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
    \b(?:NPU|Ascend|EL0004|HPU|Gaudi|PT_DEVMEM|TPU|HBM|XPU|MPS|ROCm|MLU|MUSA|Vulkan|(?:acl)?rt(?=M)|hip(?=M)).{0,60}?SHORT
    SHORT.{0,60}?\b(?:NPU|Ascend|HPU|Gaudi|PT_DEVMEM|TPU|HBM|XPU|MPS|ROCm|MLU|MUSA|Vulkan)\b
memory_words; lines; any case; emitter other
    (?:\b(?:the )?(?P<unit>job|worker|task|container|executor|replica|pod|service)\b[^.!?]{0,40}? (?:has |have )?)?
        (?:\b(?:process|program|trial|actor|rank|script|it)\b[^.!?]{0,40}? )?(?:ran |went |is |was |are )?SHORT

# What ended nothing
pressure
    ran out of memory trying to allocate (?=.{0,260}isnotafailure)
    Allocation of \d+ exceeds \d+% of (?:free)? system memory
        | (?<!\d)\d{1,9} pytorch allocator cache flushes since last step
        | Can't reduce memory use below [\d.]+[KMGT]?i?B \( \d+ bytes\) by rematerialization
        | memory usage\. Pausing worker | allocation failed; attempting to free | out of memory\. Freeing cached blocks and retrying
        | kipping tactic \S{1,20}? due to insuff?icient memory
skipped_batches; lines
    \"?\boom\"?[=:] ?\"?(?!0(?:\.0*)?(?![\d.])|0\.0*e)(?:\d+(?:\.\d+)?(?:e-?\d+)?)
skipped_batches; any case
    (?:OOM|out of memory (?!\.Freeing))[^!]{0,60}? (?:skipping (?!tactic)|discarding (?:the|this)? batch|batch (?:removed|discarded|skipped)|retrying)
        | (?:OOM|OutOfMemoryError)\S{0,120}? (?:using CPU|CPU mode)
        | Attempting to copy inputs of [^!]{0,200}? to CPU due to CUDA OOM | Decreasing batch size to: \d
        | Batch size \d+ failed, trying batch size \d
        | Failed to clone\(\) tensor with name [^!]{0,600}?(?:out of memory|OOM)
        | (?:out of memory|OOM)[^!]{0,200}? (?<!try)(?<!consider)(?<!by) (?:reducing|halving|decreasing)(?:the)? (?:micro)? batch(?!.{0,30}?(?:help|work))
caught; lines; any case
    skipping (?:this |the )?(?:batch|sample|image|trial|step)|retrying
        |(?:decreas|reduc|halv|lower)ing (?:the |micro ?)*batch(?!.*\b(?:help|work))
        |skipping tactic .*insuff|recover from OOM|trial \d+ (?:failed|pruned)|(?:error|exception) caught\b|^\s*caught\b
success; lines; any case
    Pipeline completed at|Training (?:has )?(?:finished|completed?)\b|State: COMPLETED
        |Evaluation (?:is |has )?(?:finished|completed?|done)\b|train_runtime|job finished successfully
        |`Trainer\.fit` stopped: `max_
"""
)
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


@dataclass(frozen=True)
class Row:
    name: str
    regex: re.Pattern[str]
    by_line: bool = False  # matched against lines as they are
    who: str = ""  # who prints it, if not the program
    more: tuple[re.Pattern[str], ...] = ()  # of further figures in the text behind it, of TensorFlow's also before it
    emitter: str = ""

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Words of which a text has at least one where the pattern matches; none if it may match any text."""
        return words_of(self.regex)


def _rows() -> Iterator[Row]:
    figures: dict[str, tuple[re.Pattern[str], ...]] = {}
    for name, _, regex in rows_of(_FIGURES):
        figures[name] = (*figures.get(name, ()), regex)
    for name, options, regex in rows_of(_TABLE.replace("SHORT", _SHORT)):
        given = {word: rest for word, _, rest in (one.partition(" ") for one in options)}
        who, more, emitter = (given.get(option, "") for option in ("by", "figures", "emitter"))
        yield Row(name, regex, "lines" in options, who, figures.get(more, ()), emitter)


SIGNATURES = tuple(_rows())
