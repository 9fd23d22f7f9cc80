"""Which facts a job survived, and which only repeat what another says better."""

from __future__ import annotations

import re
from collections.abc import Sequence

from memfit.diagnosis._facts import Fact, FactKind
from memfit.diagnosis._phase import warns_of_clone
from memfit.diagnosis._read_progress import Reading, went_on
from memfit.diagnosis._text import Stream

#: What a program can be told and go on; a kill is not among it.
_TOLD: frozenset[FactKind] = frozenset(
    {
        "device_oom",
        "device_error_oom",
        "mps_oom",
        "xpu_oom",
        "library_alloc",
        "xla_oom",
        "tf_oom",
        "pinned",
        "cpu_alloc",
        "array_alloc",
        "memory_error",
        "errno_12",
        "own_exception",
        "import_error",
        "missing_file",
        "config_error",
        "disk_full",
        "process_limit",
        "open_files",
        "device_lost",
        "assertion",
        "chip_memory",
        "hang",  # faulthandler's dump may come of a mere slow step
    }
)
_AFTERMATH: frozenset[FactKind] = frozenset(
    {"exit_code", "collective_timeout", "terminated", "aborted", "sigkill", "segfault"}
)
#: Exceptions that only pass on that a child or a worker ended.
_ECHOES = frozenset(
    {
        "ChildFailedError",
        "ProcessExitedException",
        "ProcessRaisedException",
        "SignalException",
        "CalledProcessError",
        "SystemExit",
        "BrokenProcessPool",
        "KeyboardInterrupt",
        "DistBackendError",
        "TerminatedWorkerError",
        "RayTaskError",
        "RendezvousClosedError",
        "BrokenPipeError",
        "ConnectionResetError",
        "ActorDiedError",
        "EOFError",
    }
)
_OF_OTHERS = re.compile(
    r"DataLoader worker|One of the subprocesses has abruptly died|worker died unexpectedly"
    r"|NCCL|ProcessGroup|process group|Connection (?:closed|reset)|Broken pipe"
    r"|Engine core|EngineCore|worker died"
)
#: Text that only speaks of a shortage: advice, help, code.
_HINT = re.compile(
    r"\b(?:if|when|in case|avoid|avoids|prevent|prevents|may|might|could|can|help|helps|hint|tip|note"
    r"|troubleshoot\w*|due to possible|to reduce|fix(?:es|ed)?|known issue)\b"
    r".{0,80}out of memory|in str\(|^\s*#|['\"]\s*(?:not )?in\b|except \w"
    r"|out of memory.{0,25}\b(?:try (?:to )?reduc|consider|lower your|can happen|may occur)",
    re.IGNORECASE,
)
#: What somebody said, in a log of a conversation.
_SAID = re.compile(
    r"^\W{0,4}(?:user|human|assistant|prompt|question|instruction)\W{0,2}[:>]|[\"']role[\"']: ?[\"'](?:user|assistant)",
    re.IGNORECASE,
)
_COUNTED = re.compile(r"Detected \d+ oom[-_]kill event")
_LOST = re.compile(r"fallen off the bus|GPU is lost|NVRM: Xid")
_BETTER: dict[FactKind, tuple[FactKind, ...]] = {
    "device_oom": ("device_error_oom",),
    "shm_map": ("errno_12",),
    "shm_write": ("disk_full", "open_files"),
    "pinned": ("device_error_oom",),
    "chip_memory": ("xla_oom", "device_error_oom"),
    "global_kill": ("memory_error",),
    "device_error_oom": ("xla_oom", "memory_error", "bad_alloc"),
    "xla_oom": (),
}
#: Groups of containers whose names tell no more than that.
_CONTAINER = re.compile(r"_memcg=/\S*(?:lxc|machine\.slice|crio|garden|containerd)")
#: How many of a stream's last lines may hold a fatal line that no traceback precedes, and how far one reaches.
_LAST, _TRACEBACK = 12, 150


def without_echoes(streams: Sequence[Stream], facts: Sequence[Fact]) -> list[Fact]:
    """Facts without those that another says better at the same place, that only give advice, or only pass news on."""
    drop = {id(fact) for fact in facts if _is_hint(fact) or _is_quoted(fact) or _is_of_lost_device(fact, facts)}
    drop |= {id(fact) for fact in facts if not _ends_something(streams[fact.stream], fact)}
    drop |= {id(fact) for fact in facts if _is_of_another(fact, facts)}
    for fact in facts:
        for weaker in _BETTER.get(fact.kind, ()):
            if id(fact) not in drop:
                drop |= {id(one) for one in facts if one.kind == weaker and _near(one, fact, 3)}
    said = {(fact.stream, fact.place) for fact in facts if fact.kind not in ("own_exception", "caught", "exit_code")}
    for fact in facts:
        if fact.kind == "own_exception" and ((fact.stream, fact.place) in said or _is_echo(fact)):
            drop.add(id(fact))
    cancelled = [fact for fact in facts if fact.kind in ("cancelled", "walltime", "preempted", "node_fail")]
    for fact in facts:
        by_slurm = fact.kind == "sigkill" and fact.values.get("who") == "Slurm"
        is_told_apart = "linked" in fact.values  # by the accounting, whose rows stand in no order with the log's lines
        if by_slurm and any(
            is_told_apart or (one.file == fact.file and one.number <= fact.number) for one in cancelled
        ):
            drop.add(id(fact))
    return [fact for fact in facts if id(fact) not in drop]


def _is_of_another(fact: Fact, facts: Sequence[Fact]) -> bool:
    """Whether a kernel's kill, which nothing links to the job, is of another process than the one that was killed.

    A container's processes have other numbers outside of it: there a difference says nothing.
    """
    if fact.values.get("linked", True) is not None or fact.values.get("who") != "the kernel":
        return False
    killed = [str(one.values.get("pid", "")) for one in facts if one.kind in ("sigkill", "worker_killed")]
    victims = {int(number) for text in killed for number in re.findall(r"\d+", text)}
    is_outside = fact.values.get("owner", {}).get("who") in (None, "slurm", "memfit", "systemd")
    is_outside &= not any(_CONTAINER.search(line.text) for line in fact.lines)
    return bool(victims) and is_outside and fact.values.get("pid") not in victims


def _near(one: Fact, other: Fact, lines: int) -> bool:
    return one is not other and one.stream == other.stream and abs(one.place - other.place) <= lines


def _is_hint(fact: Fact) -> bool:
    """Whether a line speaks of running out of memory without a figure, as advice and source code do."""
    if fact.kind not in ("device_oom", "device_error_oom") or "tried_bytes" in fact.values or not fact.lines:
        return False
    return bool(_HINT.search(fact.lines[0].text)) and not re.search(r"^\s*[\w.]*Error:", fact.lines[0].text)


def _is_quoted(fact: Fact) -> bool:
    """Whether it is what somebody asked or answered, and not the log's own word."""
    return fact.kind in _TOLD and bool(fact.lines) and bool(_SAID.search(fact.lines[0].text.strip()))


def _is_of_lost_device(fact: Fact, facts: Sequence[Fact]) -> bool:
    """Whether it is a launch that failed after the driver had lost the device."""
    return fact.kind == "illegal_access" and any(
        one.kind == "device_lost"
        and (one.file, one.number <= fact.number) == (fact.file, True)
        and any(_LOST.search(line.text) for line in one.lines)
        for one in facts
    )


def _ends_something(stream: Stream, fact: Fact) -> bool:
    """Whether an exception's line ends a traceback, or a log."""
    if fact.kind not in ("own_exception", "import_error", "missing_file") or "attempt" in fact.values:
        return True
    if fact.place >= len(stream.lines) - _LAST:
        return True
    before = stream.lines[max(0, fact.place - _TRACEBACK) : fact.place]
    return any("Traceback (most recent call last)" in line.text for line in before)


def _is_echo(fact: Fact) -> bool:
    name = str(fact.values["name"])
    return name in _ECHOES or name.endswith("Warning") or bool(_OF_OTHERS.search(str(fact.values["text"])))


def survived(streams: Sequence[Stream], facts: Sequence[Fact], readings: Sequence[list[Reading]]) -> frozenset[int]:
    """The ids of the facts after which a job went on: counters that rise, or its own word that it caught it.

    What goes on and then ends by a failure that has no other cause was not survived: the other ranks of a dead one
    write a few steps more before they wait for it in vain.
    """
    found = set()
    for fact in facts:
        if (fact.kind in _TOLD or fact.kind == "cgroup_kill") and _went_on(
            streams[fact.stream], readings[fact.stream], fact, facts
        ):
            found.add(id(fact))
    dead = [one for one in facts if one.kind in _AFTERMATH]
    fatal = [one for one in facts if id(one) not in found and (one.kind in _TOLD or one.kind in _FATAL)]
    for fact in facts:
        later = [one for one in dead if one.file == fact.file and one.number > fact.number]
        explained = any(one.number > fact.number and one.file == fact.file for one in fatal)
        if id(fact) in found and later and not explained:
            found.discard(id(fact))
    # Of its own jobs' attempts memfit knows which a later one made good, however they ended.
    return frozenset(found | {id(fact) for fact in facts if fact.values.get("recovered")})


_FATAL: frozenset[FactKind] = frozenset(
    {
        "cgroup_kill",
        "limit_kill",
        "global_kill",
        "oom_kill",
        "worker_killed",
        "shm_bus",
        "shm_write",
        "walltime",
        "preempted",
        "node_fail",
        "cancelled",
        "illegal_access",
        "segfault",
        "assertion",
        "hangup",
    }
)


def _went_on(stream: Stream, readings: list[Reading], fact: Fact, facts: Sequence[Fact]) -> bool:
    line = stream.lines[fact.place].text
    if "UserWarning" in line or warns_of_clone(stream, fact):
        return True
    caught = "No executable batch size" not in line and any(
        one.kind in ("caught", "skipped_batches") and one.stream == fact.stream and -3 <= one.place - fact.place <= 8
        for one in facts
    )
    finished = any(one.kind == "success" and one.stream == fact.stream and one.place > fact.place for one in facts)
    if fact.kind == "cgroup_kill":  # the scheduler's count: of some child that its parent did without
        return bool(_COUNTED.search(line)) and finished and went_on(readings, fact.place)
    if fact.kind == "pinned" or (
        fact.kind == "device_error_oom" and "failed to allocate" in line
    ):  # a runtime that asks for less, or for pageable memory, goes on
        served = any(one.kind == "progress" and one.stream == fact.stream and one.place > fact.place for one in facts)
        finished = finished or served
    if caught:
        again = any(one.kind in _TOLD and one.stream == fact.stream and one.place > fact.place + 8 for one in facts)
        return finished or went_on(readings, fact.place, 1) or (not again and fact.kind != "own_exception")
    return went_on(readings, fact.place) or finished
