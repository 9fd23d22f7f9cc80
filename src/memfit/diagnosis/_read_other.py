"""What else ends a job: its scheduler, its code, its device, its limits of files and processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from memfit.diagnosis._facts import Pattern, words


def _cancelled(match: re.Match[str], after: str) -> dict[str, Any] | None:
    """A cancellation that names no reason: somebody's, or that of a step whose other ranks failed."""
    return None if after[:5].lower() == "dueto" else {"what": match.group(1).lower()}


def _own(match: re.Match[str], after: str) -> dict[str, Any]:
    return {"name": match.group(1).rpartition(".")[2], "text": after.lstrip(": ")[:200]}


#: What the driver reports of a program's own fault, and what only follows from another report.
#: Source: NVIDIA, "XID Errors".
_FAULTS, _FOLLOWING = frozenset({13, 31}), frozenset({43, 45, 63})


def _xid_of(kind: str) -> Callable[[re.Match[str], str], dict[str, Any] | None]:
    """Keeps a report of the driver's if its number means that kind; a report without a number is of a lost device."""

    def values(match: re.Match[str], after: str) -> dict[str, Any] | None:
        number = int(match["number"] or 0)
        means = "illegal_access" if number in _FAULTS else "" if number in _FOLLOWING else "device_lost"
        return {"xid": number} if means == kind else None

    return values


#: What bash says before the name of a signal of which a script's command died: ``train.sh: line 2: 4260 Bus error``.
_BASH = r"(?:\S.{0,200}: line \d+: +\d+ )?"
_EXCEPTION = re.compile(
    r"^\s*((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Warning|Timeout"
    r"|Expired|NotFound))(?=:|\s*$)"
)

_SCHEDULERS: tuple[Pattern, ...] = (
    Pattern(
        "walltime",
        words(
            r"DUE TO TIME LIMIT | TERM_RUNLIMIT | walltime \d+ exceeded limit \d+ | PBS: job killed: walltime"
            r"| exceed(?:s|ed) (?:hard)? wallclock time | hard limit \"?[hs]_(?:rt|cpu)\"? of queue"
            r"| reached LSF run time limit | DeadlineExceeded",
            flags=re.I,
        ),
    ),
    Pattern(
        "walltime",
        re.compile(
            r"\bTIMEOUT\s+(?:0:\d+|\d+:\d+)|State: TIMEOUT|CANCELLED.*time limit|Timed out waiting for the job"
            r"|(?:reached|exceeded) (?:its |the )?(?:maximum )?(?:wall|time|run)[ -]?(?:clock|time)?[ -]?limit"
            r"|exceeded the maximum execution time|exceeded time limit",
            re.I,
        ),
        by_line=True,
    ),
    Pattern(
        "preempted",
        words(
            r"DUE TO PREEMPTION | TERM_PREEMPT | (?:was|been|being) preempted | spot (?:instance)? (?:interruption"
            r"|termination) (?:notice|warning|detected|received) | \"EventType\": \"Preempt\" | preemption notice"
            r"| job preempted",
            flags=re.I,
        ),
    ),
    Pattern(
        "preempted",
        re.compile(r"\bPREEMPTED\b|reason: Preempt\w+|spot instance (?:interruption|termination)"),
        by_line=True,
    ),
    Pattern("node_fail", words(r"DUE TO NODE FAILURE | NODE_FAIL | Node failure on | DUE TO NODE FAIL", flags=re.I)),
    Pattern(
        "cancelled",
        words(r"\*\*\*(STEP|JOB)[\w.+]+ON[\w.,\[\]-]+?CANCELLED AT\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"),
        _cancelled,
    ),
    Pattern(
        "cancelled",
        re.compile(
            r"CANCELLED by \d+|^scancel: |\bKeyboardInterrupt\b(?!.{0,60}except)|TERM_OWNER"
            r"|TERM_ADMIN|job was deleted by"
        ),
        lambda match, after: {"what": "somebody"},
        by_line=True,
    ),
)

_SIGNALS: tuple[Pattern, ...] = (
    Pattern(
        "hangup",
        words(
            r"got signal: 1(?!\d) | received SIGHUP | Received 1 death signal | closing signal SIGHUP | signal SIGHUP"
        ),
    ),
    Pattern("hangup", re.compile(rf"^\s*{_BASH}Hangup\b"), by_line=True),
    Pattern(
        "terminated",
        words(
            r"got signal: 15 | received SIGTERM | Signal 15 \(SIGTERM\) | killed by signal:? 15 "
            r"| tasks? [\d,-]+: Terminated"
            r"| exit ?code: -15 (?!\d) | is killed by signal: Terminated | Received 15 death signal"
            r"| exited with (?:exit)? code 143 (?!\d) | Exit code is 143 (?!\d)",
        ),
    ),
    Pattern("terminated", re.compile(r"^\s*Terminated\s*$|: line \d+: +\d+ Terminated\b"), by_line=True),
    Pattern(
        "segfault",
        words(
            r"(?<!caused by a) Segmentation fault | segmentation fault encountered in worker "
            r"| (?<!due to) SIGSEGV | exit ?code: -11 (?!\d)"
            r"| exited with code 139 | EXIT STRING: Segmentation fault | exited on signal 11 \("
            r"| killed by signal:? 11 (?!\d) | status 139 "
            r"| Windows fatal exception: access violation"
            r"| exit code -1073741819 | 0xC0000005",
            flags=re.I,
        ),
    ),
    Pattern("segfault", re.compile(r"段错误|Speicherzugriffsfehler|\bsegfault at [0-9a-f]+ ip\b"), by_line=True),
    Pattern(
        "aborted",
        words(
            r"is killed by signal: Aborted | exit ?code: -6 (?!\d) | exited with code 134 | double free or corruption"
            r"| free\(\): invalid | malloc\(\): | corrupted (?:size vs|double-linked) | stack smashing detected"
            r"| Signal 6 \(SIGABRT\) | munmap_chunk\(\)",
        ),
    ),
    Pattern(
        "aborted",
        re.compile(
            rf"^\s*{_BASH}(?:Aborted|Floating point exception|Illegal instruction)\b|\bIllegal instruction\s*\(core"
        ),
        by_line=True,
    ),
    Pattern(
        "bus_error",
        re.compile(rf"^\s*{_BASH}Bus error\b|\bBus error\s*\(core dumped\)|^\[\d+\]\s+\d+ bus error"),
        by_line=True,
    ),
    Pattern(
        "exit_code",
        words(
            r"Exited with exit code [1-9] | ChildFailedError | exit ?code: 1\) | returned non-zero exit status 1 (?!\d)"
        ),
    ),
)

_DEVICES: tuple[Pattern, ...] = (
    Pattern(
        "illegal_access",
        words(
            r"illegal memory access | misaligned address | unspecified launch failure | CUDA_ERROR_ILLEGAL"
            r"| Memory access fault by GPU | CUDA_ERROR_LAUNCH_FAILED | an illegal instruction was encountered"
            r"| invalid (?:global|shared) memory (?:read|write)",
            flags=re.I,
        ),
    ),
    Pattern(
        "device_lost",
        words(
            r"uncorrectable ECC error | fallen off the bus | GPU is lost "
            r"| devices? (?:\(s\))? (?:is/)? are busy or"
            r" unavailable | no CUDA-capable device | CUDA driver initialization failed | initialization error at"
            r"| Found no NVIDIA driver | driver (?:version)? is (?:too old|insufficient) | invalid device ordinal"
            r"| no kernel image is available | UR_RESULT_ERROR_DEVICE_LOST | CUDNN_STATUS_NOT_INITIALIZED"
            r"| CUBLAS_STATUS_NOT_INITIALIZED | CUDNN_STATUS_EXECUTION_FAILED | CUBLAS_STATUS_EXECUTION_FAILED"
            r"| CUDNN_STATUS_INTERNAL_ERROR | CUBLAS_STATUS_INTERNAL_ERROR | CUDA_ERROR_NO_DEVICE"
            r"| CUDNN_STATUS_NOT_SUPPORTED | CUBLAS_STATUS_INVALID_VALUE | CUBLAS_STATUS_ARCH_MISMATCH"
        ),
    ),
    Pattern("device_lost", words(r"NVRM: Xid (?:\([^)]{1,40}\):)? (?P<number>\d+)?"), _xid_of("device_lost")),
    Pattern("illegal_access", words(r"NVRM: Xid \([^)]{1,40}\): (?P<number>\d+)"), _xid_of("illegal_access")),
    Pattern(
        "collective_timeout",
        words(
            r"Watchdog caught collective operation timeout | ran for \d+ milliseconds before timing out"
            r"| Collective operation timeout | (?:NCCL|ProcessGroup\w+)\S{0,200}? timed? ?out "
            r"| wait timeout after \d+ms"
            r"| Socket Timeout | Timed out waiting \d+ms for recv | watchdog got stuck for \d+ seconds"
            r"| Timed out initializing process group | Broken pipe\S{0,40}TCPStore"
        ),
    ),
    Pattern(
        "collective_timeout",
        words(
            r"(?:NCCL|gloo)\S{0,300}?(?:Connection (?:closed|reset) by peer|remote process exited)"
            r"| ncclRemoteError | ncclSystemError | NCCL communicator was aborted | Connection closed by peer \["
        ),
    ),
    Pattern(
        "chip_memory",
        words(
            r"OutOfResources: | out of resource: shared memory | too many resources requested for launch"
            r"| uses too much shared data | memory space [vs]mem | CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
        ),
    ),
)

_LIMITS: tuple[Pattern, ...] = (
    Pattern(
        "open_files",
        words(
            r"\[Errno 24\] | Too many open files | received 0 items of ancdata"
            r"| unable to open shared memory object </torch_[^>]{1,80}> in read-write mode (?!:No space)"
        ),
    ),
    Pattern(
        "process_limit",
        words(
            r"\[Errno 11\] Resource temporarily unavailable | can't start new thread | fork: (?:retry: )? (?:无资源)?"
            r" Resource temporarily unavailable | pthread_create (?:\(\))? failed | Thread creation failed"
            r"| fork: retry: | unable to create (?:new native)? thread | pthread_create: Resource temporarily"
        ),
    ),
    Pattern(
        "disk_full",
        words(
            r"\[Errno 28\] No space left on device | No space left on device | Disk quota exceeded | \[Errno 122\]"
            r"| write failed, file size limit | PytorchStreamWriter failed writing file | unexpected pos \d+ vs \d+"
            r"| disk I/O error | database or disk is full"
            r"| There is not enough space on the disk | not enough free disk space"
        ),
    ),
)

_CODE: tuple[Pattern, ...] = (
    Pattern(
        "assertion",
        words(
            r"device-side assert triggered "
            r"| Assertion ?[`'\u2018][^`'\u2019]{1,300}[`'\u2019] ?failed | AssertionError "
            r"| INTERNAL ASSERT FAILED"
        ),
    ),
    Pattern("import_error", re.compile(r"^\s*(?:\w+\.)*(?:ImportError|ModuleNotFoundError)\b"), by_line=True),
    Pattern(
        "import_error",
        words(
            r"error while loading shared libraries: | undefined symbol: | cannot allocate memory in static TLS block"
        ),
    ),
    Pattern(
        "missing_file",
        re.compile(
            r"^\s*(?:\w+\.)*FileNotFoundError\b|^\S.*: No such file or directory\s*$"
            r"|^\s*lmdb\.Error: /|can't open file '"
        ),
        by_line=True,
    ),
    Pattern(
        "config_error",
        re.compile(
            r"unrecognized arguments|ConfigurationError|ConfigAttributeError|Couldn't instantiate the backend tokenizer"
            r"|MissingMandatoryValue|Could not override|invalid choice:|exceeded 0% memory budget"
            r"|the following arguments are"
            r" required|ConfigKeyError|ConfigCompositionException|Non-existent config key"
            r"|larger than the (?:available number|maximum number of tokens)"
        ),
        by_line=True,
    ),
    Pattern(
        "worker_exited",
        words(r"DataLoader worker \(pid\(?s?\)? [\d,]+\) exited unexpectedly | Pin memory thread exited unexpectedly"),
    ),
    Pattern(
        "worker_exited",
        words(
            r"The worker died unexpectedly while executing | One of the subprocesses has abruptly died during map"
            r"| RayActorError "
            r"| Worker exit type: SYSTEM_ERROR | KilledWorker: \("
        ),
    ),
    Pattern(
        "hang",
        words(
            r"Waiting up to \d+ seconds for job step to finish(?!.{0,200}(?:CANCELLED|Killed)) "
            r"| stack of the stuck | no progress for \d+ | DataLoader timed out after \d+ seconds"
            r"| came within [\d.e+]+ s, and the workers do nothing: | Timeout \(?>[\d.]+s\)? from pytest-timeout"
        ),
    ),
    Pattern("hang", re.compile(r"^Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!\s*$"), by_line=True),
    Pattern("own_exception", _EXCEPTION, _own, by_line=True),
)

OTHER: tuple[Pattern, ...] = (*_SCHEDULERS, *_SIGNALS, *_DEVICES, *_LIMITS, *_CODE)
